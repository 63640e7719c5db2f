//! Several models behind one proxy, and the parts of prompts that change from call to call.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    Config, ConfigError, Origin, PinnedSampling, Proxy, Relay, Secret, UpstreamKind, UpstreamResponses,
};

const SHARED: &str = "proxy.local_tokenizer";

/// Where calls for some model names go. Absent keys have the values of the same keys of `proxy`; but what says how to
/// reach a server (`upstream_…`, `routing_…`) is that of `proxy` only as long as the route has no `upstream_base_url`
/// of its own: one server's key is never sent to another.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Route {
    /// Model names that harnesses ask for; as in `proxy.model_map`, `claude-*` and `*` are beginnings. Absent: the
    /// route's own name.
    pub models: Option<Vec<String>>,
    /// The upstream's name for the model. Absent: the name that the harness asked for.
    pub upstream_model: Option<String>,
    /// What its calls are made for. `aux`, `judge` and `teacher` are recorded as such, sampled as the harness asks, and
    /// never trained. Absent: as calls without a route.
    pub kind: Option<RouteKind>,
    /// As `proxy.upstream_base_url`.
    pub upstream_base_url: Option<String>,
    /// As `proxy.upstream_kind`.
    pub upstream_kind: Option<UpstreamKind>,
    /// As `proxy.upstream_responses`.
    pub upstream_responses: Option<UpstreamResponses>,
    /// As `proxy.upstream_api_key_env`. With an `upstream_base_url` and without this, no key is sent.
    pub upstream_api_key_env: Option<String>,
    /// As `proxy.upstream_ca_file`.
    pub upstream_ca_file: Option<PathBuf>,
    /// As `proxy.model_path`.
    pub model_path: Option<PathBuf>,
    /// As `proxy.routing_layers`.
    pub routing_layers: Option<u32>,
    /// As `proxy.routing_top_k`.
    pub routing_top_k: Option<u32>,
    /// Most calls of this route in flight; further ones wait. Absent: only `proxy.max_in_flight` holds.
    pub max_concurrent: Option<usize>,
    /// Most requests sent to the upstream in any minute, retries included; further ones wait. Absent: no limit.
    pub requests_per_minute: Option<u32>,
    /// Most requests sent to the upstream in any second, retries included; further ones wait. Absent: no limit.
    pub requests_per_second: Option<u32>,
    /// Longest such wait, in seconds; then the harness gets 429 with `Retry-After`. As `proxy.admission_wait_secs`.
    pub admission_wait_secs: Option<u64>,
    /// As `proxy.max_retries`.
    pub max_retries: Option<u16>,
    /// As `proxy.connect_timeout_secs`.
    pub connect_timeout_secs: Option<u64>,
    /// As `proxy.first_byte_timeout_secs`.
    pub first_byte_timeout_secs: Option<u64>,
    /// As `proxy.idle_timeout_secs`.
    pub idle_timeout_secs: Option<u64>,
    /// As `proxy.total_timeout_secs`.
    pub total_timeout_secs: Option<u64>,
    /// As `proxy.capture_token_ids`.
    pub capture_token_ids: Option<bool>,
    /// As `proxy.capture_logprobs`.
    pub capture_logprobs: Option<bool>,
    /// As `proxy.local_tokenizer`. With an `upstream_base_url` and without this, there is none.
    pub local_tokenizer: Option<PathBuf>,
    /// As `proxy.pinned_sampling`. It is not taken from there for calls of kind `aux`, `judge` and `teacher`.
    pub pinned_sampling: Option<PinnedSampling>,
}

/// What the calls of a route are made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RouteKind {
    /// Sampled by the policy.
    Policy,
    /// Side calls of a harness.
    Aux,
    /// A reward judge.
    Judge,
    /// A teacher model.
    Teacher,
}

impl Route {
    /// True if it differs from `proxy` in how its server is reached or waited for.
    #[must_use]
    pub const fn has_own_server(&self) -> bool {
        self.upstream_base_url.is_some()
            || self.upstream_kind.is_some()
            || self.upstream_responses.is_some()
            || self.upstream_api_key_env.is_some()
            || self.upstream_ca_file.is_some()
            || self.model_path.is_some()
            || self.routing_layers.is_some()
            || self.routing_top_k.is_some()
            || self.connect_timeout_secs.is_some()
            || self.first_byte_timeout_secs.is_some()
            || self.idle_timeout_secs.is_some()
    }

    /// True if its calls may be the policy's.
    #[must_use]
    pub const fn is_policy(&self) -> bool {
        matches!(self.kind, None | Some(RouteKind::Policy))
    }

    /// The folder of the tokenizer that fills in ids, and the key that names it: that of `proxy` is of its server's
    /// model.
    #[must_use]
    pub fn local_tokenizer<'a>(&'a self, name: &str, proxy: &'a Proxy) -> Option<(String, &'a Path)> {
        let own = self.local_tokenizer.as_deref();
        let own = own.map(|folder| (format!("proxy.routes.{name}.local_tokenizer"), folder));
        let shares = self.upstream_base_url.is_none();
        own.or_else(|| {
            proxy.local_tokenizer.as_deref().filter(|_| shares).map(|folder| (SHARED.to_owned(), folder))
        })
    }

    /// The model names that it answers; `name` is its own.
    #[must_use]
    pub fn model_names(&self, name: &str) -> Vec<String> {
        self.models.clone().unwrap_or_else(|| vec![name.to_owned()])
    }
}

/// How to reach a server and how long to wait for it.
#[derive(Debug, Clone, PartialEq)]
pub struct Server {
    /// The table that has these values: `proxy`, or `proxy.routes.<name>`.
    pub table: String,
    pub base_url: String,
    pub kind: UpstreamKind,
    pub responses: UpstreamResponses,
    pub api_key_env: Option<String>,
    pub ca_file: Option<PathBuf>,
    pub model_path: PathBuf,
    pub routing_layers: Option<u32>,
    pub routing_top_k: Option<u32>,
    pub connect_timeout: Duration,
    pub first_byte_timeout: Duration,
    pub idle_timeout: Duration,
}

impl Server {
    /// True for the embedded engine.
    #[must_use]
    pub fn is_embedded(&self) -> bool {
        self.base_url == "embedded"
    }

    /// The folder with tokenizer and chat template of its model, and the key that names it. `local`: that of
    /// `local_tokenizer`.
    #[must_use]
    pub fn rendered_folder<'a>(&'a self, local: Option<&'a Path>) -> Option<(String, &'a Path)> {
        match local {
            None if self.is_embedded() => Some((format!("{}.model_path", self.table), &self.model_path)),
            local => local.map(|folder| (format!("{}.local_tokenizer", self.table), folder)),
        }
    }
}

impl Proxy {
    /// The server of the calls that no route has.
    #[must_use]
    pub fn server(&self) -> Server {
        Server {
            table: "proxy".to_owned(),
            base_url: self.upstream_base_url.clone(),
            kind: self.upstream_kind,
            responses: self.upstream_responses,
            api_key_env: self.upstream_api_key_env.clone(),
            ca_file: self.upstream_ca_file.clone(),
            model_path: self.model_path.clone(),
            routing_layers: self.routing_layers,
            routing_top_k: self.routing_top_k,
            connect_timeout: Duration::from_secs(self.connect_timeout_secs),
            first_byte_timeout: Duration::from_secs(self.first_byte_timeout_secs),
            idle_timeout: Duration::from_secs(self.idle_timeout_secs),
        }
    }

    /// The server of a route.
    #[must_use]
    pub fn server_of(&self, name: &str, route: &Route) -> Server {
        let mut server = self.server();
        if let Some(url) = &route.upstream_base_url {
            server = Server {
                base_url: url.clone(),
                kind: UpstreamKind::Auto,
                responses: UpstreamResponses::default(),
                api_key_env: None,
                ca_file: None,
                routing_layers: None,
                routing_top_k: None,
                ..server
            };
        }
        let secs = |own: Option<u64>, other| own.map_or(other, Duration::from_secs);
        Server {
            table: format!("proxy.routes.{name}"),
            kind: route.upstream_kind.unwrap_or(server.kind),
            responses: route.upstream_responses.unwrap_or(server.responses),
            api_key_env: route.upstream_api_key_env.clone().or(server.api_key_env),
            ca_file: route.upstream_ca_file.clone().or(server.ca_file),
            model_path: route.model_path.clone().unwrap_or(server.model_path),
            routing_layers: route.routing_layers.or(server.routing_layers),
            routing_top_k: route.routing_top_k.or(server.routing_top_k),
            connect_timeout: secs(route.connect_timeout_secs, server.connect_timeout),
            first_byte_timeout: secs(route.first_byte_timeout_secs, server.first_byte_timeout),
            idle_timeout: secs(route.idle_timeout_secs, server.idle_timeout),
            base_url: server.base_url,
        }
    }
}

impl Config {
    /// True if model names that no route has are answered by the upstream of `proxy`: there are no routes, or that
    /// upstream was set.
    #[must_use]
    pub fn has_default_route(&self) -> bool {
        let keys = ["proxy.upstream_base_url", "proxy.upstream_kind", "proxy.model_path"];
        self.proxy.routes.is_empty() || keys.iter().any(|key| self.origin(key) != Origin::Default)
    }

    /// The folders of local tokenizers that calls need, each with the key that names it.
    #[must_use]
    pub fn local_tokenizers(&self) -> Vec<(String, PathBuf)> {
        let proxy = &self.proxy;
        let default = proxy.local_tokenizer.as_deref().filter(|_| self.has_default_route());
        let default = default.map(|folder| (SHARED.to_owned(), folder));
        let routes = proxy.routes.iter().filter_map(|(name, route)| route.local_tokenizer(name, proxy));
        default.into_iter().chain(routes).map(|(key, folder)| (key, folder.to_owned())).collect()
    }

    /// The folders of the models that are asked with tokens, each with the key that names it.
    #[must_use]
    pub fn rendered_folders(&self) -> Vec<(String, PathBuf)> {
        let proxy = &self.proxy;
        if proxy.relay != Relay::TokenIn {
            return Vec::new();
        }
        let default = self.has_default_route().then(|| (proxy.server(), proxy.local_tokenizer.as_deref()));
        let routes = proxy.routes.iter().map(|(name, route)| {
            let local = route.local_tokenizer(name, proxy).map(|(_, folder)| folder);
            (proxy.server_of(name, route), local)
        });
        let folder = |(server, local): (Server, Option<&Path>)| {
            let (key, folder) = server.rendered_folder(local)?;
            Some((key, folder.to_owned()))
        };
        default.into_iter().chain(routes).filter_map(folder).collect()
    }

    /// The servers that are called, each once: the default one if it is used, and those of routes that have their own.
    #[must_use]
    pub fn servers(&self) -> Vec<Server> {
        let routes = &self.proxy.routes;
        let shares = routes.values().any(|route| !route.has_own_server());
        let default = (self.has_default_route() || shares).then(|| self.proxy.server());
        let own = routes.iter().filter(|(_, route)| route.has_own_server());
        default.into_iter().chain(own.map(|(name, route)| self.proxy.server_of(name, route))).collect()
    }

    /// Folders of the models that embedded engines serve.
    #[must_use]
    pub fn embedded_models(&self) -> BTreeSet<PathBuf> {
        self.servers().into_iter().filter(Server::is_embedded).map(|server| server.model_path).collect()
    }

    /// A server's API key, from the variable that its `upstream_api_key_env` names.
    ///
    /// # Errors
    /// [`ConfigError::MissingVariable`] when that variable is not set.
    pub fn server_key(&self, server: &Server) -> Result<Option<Secret>, ConfigError> {
        // Messages name the key that holds the variable's name.
        let own = format!("{}.upstream_api_key_env", server.table);
        let is_own = server.table != "proxy" && !self.shown(&own).is_null();
        let key = if is_own { own.as_str() } else { "proxy.upstream_api_key_env" };
        self.secret(key, server.api_key_env.as_deref())
    }
}

/// Parts of prompts that change from call to call.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Volatile {
    /// Claude Code's first system block, `x-anthropic-billing-header: …`. Some versions put another value into it with
    /// every call, so that no prompt begins like the one before.
    pub billing_header: VolatileAction,
    /// Further rules, by a name of your choice. They apply in the order of their names.
    pub rules: BTreeMap<String, VolatileRule>,
}

impl Default for Volatile {
    fn default() -> Self {
        Self { billing_header: VolatileAction::Ignore, rules: BTreeMap::new() }
    }
}

/// One kind of volatile part.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct VolatileRule {
    /// A regular expression (syntax of Rust's `regex` crate). What it matches in a message's text is the volatile part.
    pub pattern: String,
    /// Whose texts it is looked for in; absent: `system`. What the model said and what tools returned is never changed.
    pub role: VolatileRole,
    /// What happens to it; absent: `ignore`.
    pub action: VolatileAction,
    /// What stands in its place, absent: nothing; `$1` is the pattern's first group.
    pub replacement: String,
}

/// What happens to a volatile part.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum VolatileAction {
    /// Nothing: it is a part of the prompt like any other.
    Off,
    /// It is sent, and ignored where calls are compared.
    #[default]
    Ignore,
    /// It is not sent either.
    Remove,
}

/// Whose texts a rule applies to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum VolatileRole {
    /// System prompts and system messages, a developer's too.
    #[default]
    System,
    /// What the user says.
    User,
    /// Both.
    Any,
}
