//! Names of models as keys: a name, or a beginning with `*` behind it.

use std::collections::BTreeMap;

/// The value of the key that fits a model's name best: the name itself, else the longest beginning. `*` fits all.
#[must_use]
pub fn fitting<'a, T>(entries: &'a BTreeMap<String, T>, name: &str) -> Option<&'a T> {
    entries.get(name).or_else(|| {
        let begun = |key: &str| key.strip_suffix('*').is_some_and(|beginning| name.starts_with(beginning));
        let fitting = entries.iter().filter(|(key, _)| begun(key));
        fitting.max_by_key(|(key, _)| key.len()).map(|(_, value)| value)
    })
}

/// True if the key is a beginning of names.
#[must_use]
pub fn is_beginning(key: &str) -> bool {
    key.ends_with('*')
}

/// What is wrong with a key, if anything is.
pub(super) fn problem(key: &str) -> Option<String> {
    if key.is_empty() {
        return Some("an empty model name".to_owned());
    }
    let named = key.strip_suffix('*').unwrap_or(key);
    let is_pattern = named.contains(['*', '?']) || named.contains("[!");
    is_pattern.then(|| format!("{key:?} is a pattern that is not read: only a * at the end is"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b19_the_name_itself_fits_best_then_the_longest_beginning() {
        let map = |keys: &[&str]| keys.iter().map(|key| ((*key).to_owned(), (*key).to_owned())).collect();
        let entries: BTreeMap<String, String> = map(&["claude-*", "claude-opus-*", "claude-x", "gpt", "*"]);
        for (name, expected) in [
            ("claude-x", "claude-x"),
            ("claude-xy", "claude-*"),
            ("claude-opus-4", "claude-opus-*"),
            ("claude-", "claude-*"),
            ("claude", "*"),
            ("gpt", "gpt"),
            ("gpt-5", "*"),
            ("", "*"),
        ] {
            assert_eq!(fitting(&entries, name).map(String::as_str), Some(expected), "{name}");
        }
        assert_eq!(fitting(&map(&["claude-*"]), "gpt"), None);
    }

    #[test]
    fn b19_a_key_that_would_fit_nothing_is_refused() {
        use crate::config::{Config, ConfigPaths, Environment};
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("proxy_config.json");
        let load = |proxy: serde_json::Value| {
            std::fs::write(&path, serde_json::json!({"proxy": proxy}).to_string()).expect("written");
            let paths = ConfigPaths { proxy: Some(path.clone()), ..ConfigPaths::default() };
            Config::load(&paths, Environment::default()).map_err(|error| error.to_string())
        };
        let fine = serde_json::json!({"model_map": {"claude-*": "m", "*": "m", "gpt": "m"},
            "routes": {"r": {"models": ["judge-*"]}}});
        assert_eq!(load(fine).expect("fine").proxy.model_map.len(), 3);
        for (proxy, key) in [
            (serde_json::json!({"model_map": {"*-mini": "m"}}), "proxy.model_map"),
            (serde_json::json!({"model_map": {"": "m"}}), "proxy.model_map"),
            (serde_json::json!({"model_map": {"gpt": ""}}), "proxy.model_map"),
            (serde_json::json!({"model_map": {"claude-*": "local-*"}}), "proxy.model_map"),
            (serde_json::json!({"routes": {"r": {"models": ["gpt-?"]}}}), "proxy.routes.r.models"),
        ] {
            let said = load(proxy.clone()).expect_err("refused");
            assert!(said.contains(key), "{proxy} {said}");
        }
    }

    #[test]
    fn one_star_at_the_end_is_the_only_pattern() {
        for (key, is_fine) in [
            ("a", true),
            ("a-*", true),
            ("*", true),
            ("", false),
            ("*-a", false),
            ("a*b", false),
            ("a**", false),
            ("a?", false),
        ] {
            assert_eq!(problem(key).is_none(), is_fine, "{key}");
        }
    }
}
