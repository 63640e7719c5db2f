//! Where an upstream's redirect points. None is followed, by lego or by a client: the conversation, and with it the
//! key, would go to a place that nobody configured.

use http::HeaderMap;
use http::header;

/// Longest place that is repeated.
const MAX_SHOWN: usize = 200;

/// What a redirect says to whoever configures the upstream: where it points, without what may be a secret (user part,
/// query, fragment), and what to do. `base` is the upstream's base URL, `route` what was asked of it.
pub(super) fn advice(base: &str, route: &str, headers: &HeaderMap) -> String {
    let text = headers.get(header::LOCATION).and_then(|value| value.to_str().ok());
    let asked = reqwest::Url::parse(&format!("{base}{route}")).ok();
    let Some(mut to) = text.zip(asked).and_then(|(text, asked)| asked.join(text).ok()) else {
        return "elsewhere without saying where".to_owned();
    };
    // Both fail only where there is no host, and then there is no user part.
    let _ = to.set_username("");
    let _ = to.set_password(None);
    to.set_query(None);
    to.set_fragment(None);
    let shown: String = to.as_str().chars().take(MAX_SHOWN).collect();
    match to.as_str().strip_suffix(route).filter(|base| base.len() < MAX_SHOWN) {
        Some(base) => format!("to {shown}: set upstream_base_url to {base} if that is the server you mean"),
        None => format!("to {shown}: set upstream_base_url to the server's own base URL"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_redirect_says_where_to_and_no_secret() {
        for (location, expected) in [
            (
                "https://user:canary@h.example/v1/chat/completions?sig=canary#canary",
                "to https://h.example/v1/chat/completions: set upstream_base_url to https://h.example/v1 if",
            ),
            (
                "//h.example/login?next=canary",
                "to http://h.example/login: set upstream_base_url to the server's",
            ),
            ("/api/v1/chat/completions", "set upstream_base_url to http://up:1/api/v1 if"),
            ("http://[", "elsewhere"),
        ] {
            let location = location.parse().expect("header");
            let said = advice(
                "http://up:1/v1",
                "/chat/completions",
                &HeaderMap::from_iter([(header::LOCATION, location)]),
            );
            assert!(said.contains(expected) && !said.contains("canary"), "{said}");
        }
        assert!(advice("http://up:1/v1", "/models", &HeaderMap::new()).contains("without saying where"));
    }
}
