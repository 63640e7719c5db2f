//! Values about servers, routes and volatile parts that cannot be.

use std::collections::BTreeMap;

use super::Problems;
use crate::config::model_names;
use crate::config::read::is_variable_name;
use crate::config::{ConfigError, Relay, Server, UpstreamKind, UpstreamResponses, VolatileAction};

const BEGINNINGS: &str = "Write a model's name, the beginning of names with one * behind it, or * for all.";

impl Problems<'_> {
    /// A key that names a variable.
    pub(super) fn variable(&mut self, key: &str, name: Option<&str>) {
        if name.is_some_and(|name| !is_variable_name(name)) {
            // What stands here may be the secret itself: it is not repeated.
            self.errors.push(ConfigError::Value {
                file: self.config.file(key),
                key: key.to_owned(),
                value: "(hidden)".to_owned(),
                problem: "not the name of an environment variable".to_owned(),
                remedy: "Put the secret into a variable, and the variable's name here.".to_owned(),
            });
        }
    }

    pub(super) fn server(&mut self, server: &Server) {
        let key = |name: &str| format!("{}.{name}", server.table);
        self.variable(&key("upstream_api_key_env"), server.api_key_env.as_deref());
        let (url_key, kind_key) = (key("upstream_base_url"), key("upstream_kind"));
        if server.is_embedded() {
            self.require(
                matches!(server.kind, UpstreamKind::Auto | UpstreamKind::Embedded),
                &kind_key,
                "the upstream is the embedded engine",
                &format!(
                    "Set the upstream's base URL too ({url_key}{}).",
                    match server.table.as_str() {
                        "proxy" => " or policy.base_url",
                        _ => "",
                    }
                ),
            );
        } else {
            self.url(server, &url_key);
            self.require(
                server.kind != UpstreamKind::Embedded,
                &kind_key,
                "the upstream is a URL",
                &format!("Set {url_key} to embedded, or the kind to what the server is."),
            );
        }
        self.require(
            server.responses != UpstreamResponses::PassThrough || server.kind == UpstreamKind::Openai,
            &key("upstream_responses"),
            "only an upstream of kind openai is asked in the words of Responses: others give token ids, and those through chat",
            &format!("Set {kind_key} to openai, or take the key out."),
        );
        self.require(
            server.ca_file.is_none() || server.base_url.starts_with("https://"),
            &key("upstream_ca_file"),
            "the upstream is not an https URL, so no certificate is looked at",
            &format!("Take it out, or set {url_key} to an https URL."),
        );
        self.require(
            // A route to a judge or a teacher is asked in its own words.
            self.config.proxy.relay != Relay::TokenIn
                || server.table != "proxy"
                || !matches!(server.kind, UpstreamKind::Openai | UpstreamKind::Anthropic),
            &kind_key,
            "proxy.relay is token_in, and such an upstream takes no token ids",
            "Set proxy.relay to auto, or this to vllm, sglang or embedded.",
        );
        for (name, number) in
            [("routing_layers", server.routing_layers), ("routing_top_k", server.routing_top_k)]
        {
            if let Some(number) = number {
                self.positive(&key(name), number);
            }
        }
        for (name, limit) in [
            ("connect_timeout_secs", server.connect_timeout),
            ("first_byte_timeout_secs", server.first_byte_timeout),
            ("idle_timeout_secs", server.idle_timeout),
        ] {
            self.positive(&key(name), limit.as_secs());
        }
    }

    fn url(&mut self, server: &Server, key: &str) {
        let url = &server.base_url;
        let authority = url
            .strip_prefix("http://")
            .or_else(|| url.strip_prefix("https://"))
            .map(|rest| rest.split('/').next().unwrap_or_default());
        self.require(
            authority.is_some_and(|authority| !authority.is_empty()) && !url.contains([' ', '?', '#']),
            key,
            "neither embedded nor an http(s) URL",
            "Set it to embedded, or to a URL such as http://127.0.0.1:8000/v1.",
        );
        if authority.is_some_and(|authority| authority.contains('@')) {
            self.errors.push(ConfigError::Value {
                file: self.config.file(key),
                key: key.to_owned(),
                value: "(hidden)".to_owned(),
                problem: "the URL holds a user name or password".to_owned(),
                remedy: format!("Name a variable with the key in {}.upstream_api_key_env.", server.table),
            });
        }
    }

    pub(super) fn routes(&mut self) {
        let proxy = &self.config.proxy;
        let mut served: BTreeMap<String, &str> = BTreeMap::new();
        for (name, route) in &proxy.routes {
            let key = |of: &str| format!("proxy.routes.{name}.{of}");
            let models = route.model_names(name);
            self.require(
                !models.is_empty() && models.iter().all(|model| !model.is_empty()),
                &key("models"),
                "no model name, or an empty one",
                "Give the names that harnesses ask for, or take the key out: the route's own name is one.",
            );
            for model in models {
                if let Some(problem) = model_names::problem(&model).filter(|_| !model.is_empty()) {
                    self.require(false, &key("models"), &problem, BEGINNINGS);
                }
                if let Some(other) = served.insert(model.clone(), name).filter(|other| *other != name) {
                    let problem = format!("{model:?} is also a model of the route {other}");
                    self.require(false, &key("models"), &problem, "Give each model name to one route.");
                }
            }
            if let Some(model) = &route.upstream_model {
                let remedy = "Give the upstream's name for the model, or take the key out.";
                self.require(!model.is_empty(), &key("upstream_model"), "an empty name", remedy);
            }
            if route.has_own_server() {
                self.server(&proxy.server_of(name, route));
            }
            if let Some(most) = route.max_concurrent {
                self.positive(&key("max_concurrent"), most as u64);
            }
            for (of, most) in [
                ("requests_per_minute", route.requests_per_minute),
                ("requests_per_second", route.requests_per_second),
            ] {
                if let Some(most) = most {
                    self.positive(&key(of), most);
                }
            }
            if let Some(pinned) = &route.pinned_sampling {
                self.within(&key("pinned_sampling.temperature"), pinned.temperature, 0.0, 100.0);
            }
        }
    }

    pub(super) fn model_map(&mut self) {
        let config = self.config;
        for (asked, model) in &config.proxy.model_map {
            if let Some(problem) = model_names::problem(asked) {
                self.require(false, "proxy.model_map", &problem, BEGINNINGS);
            }
            let problem = if model.is_empty() {
                "an empty name"
            } else {
                "a pattern: the upstream has to be asked for one model"
            };
            let remedy = "Give the upstream's name for the model.";
            let is_name = !model.is_empty() && !model_names::is_beginning(model);
            self.require(is_name, "proxy.model_map", &format!("{asked:?} is {problem}"), remedy);
        }
    }

    pub(super) fn volatile(&mut self) {
        for (name, rule) in &self.config.proxy.volatile.rules {
            if rule.action == VolatileAction::Off {
                continue;
            }
            let key = format!("proxy.volatile.rules.{name}.pattern");
            let remedy = "Give a regular expression that matches the part and nothing else.";
            match regex::Regex::new(&rule.pattern) {
                // It would stand between any two characters.
                Ok(pattern) => self.require(!pattern.is_match(""), &key, "it matches an empty text", remedy),
                Err(error) => {
                    let said = error.to_string();
                    let cause = said.lines().last().unwrap_or_default().trim_start_matches("error: ");
                    self.require(false, &key, &format!("not a regular expression: {cause}"), remedy);
                }
            }
        }
    }
}
