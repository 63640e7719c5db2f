//! What the proxy is told at start.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::local_ids::LocalTokenizer;
use super::session::SessionSampling;
use super::token_in::Renderer;
use crate::capture::Spill;
use crate::config::{self, VolatileAction, VolatileRole};
use crate::protocol::volatile::{Pattern, Role, Rule, Rules};
use crate::upstream::dialect::Wanted;

/// Renders the metrics page.
pub type RenderMetrics = Arc<dyn Fn() -> String + Send + Sync>;

/// Whose calls are served.
#[derive(Debug, Clone, PartialEq)]
pub enum Mode {
    /// Anybody's: sessions are made as they are named.
    StandAlone {
        /// Whether lego replaces the harness's sampling.
        sampling: SessionSampling,
        /// Names that harnesses ask for, or beginnings of them ([`config::fitting`]), and the upstream's name for each;
        /// others pass through.
        model_map: BTreeMap<String, String>,
    },
    /// Only those of sessions that a trainer opened. Every name is answered by this model of the upstream's.
    Trainer { policy_model: String },
}

/// How often a call is sent upstream again after a failure that passes by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retries {
    /// Further attempts at most.
    pub most: u16,
    /// Longest pause before one: an upstream that asks for more gets none.
    pub longest_wait: Duration,
}

/// Options of a proxy. [`ProxyOptions::new`] has the defaults of `proxy_config.json`.
#[derive(Clone)]
pub struct ProxyOptions {
    pub mode: Mode,
    pub wanted: Wanted,
    pub relay: config::Relay,
    /// Find out by one tiny call what the upstream can give.
    pub probes_upstream: bool,
    /// Who says the system messages within a translated conversation.
    pub inline_system: config::InlineSystem,
    /// What becomes of the reasoning of earlier turns in translated requests.
    pub replayed_reasoning: config::ReplayedReasoning,
    /// What becomes of tools that the vendor's servers run, in translated requests.
    pub server_tools: config::ServerTools,
    /// False: a call that rewrites its session's history is answered with 409.
    pub history_rewrite_tolerance: bool,
    /// Most bytes of a reply held at once: what is taken from the upstream for one write to the client, and what is
    /// held back until a call is durable.
    pub stream_buffer_bytes: usize,
    /// A longer copy of a reply goes to [`ProxyOptions::spill`] until its record is written.
    pub capture_buffer_bytes: usize,
    /// `None`: copies of replies stay in memory.
    pub spill: Option<Spill>,
    /// Longest wait for usage and terminator before a call is committed without them.
    pub commit_wait: Duration,
    /// A client that was given no event for so long gets a sign of life: a no-op event, or a space in front of a body.
    pub keep_alive: Option<Duration>,
    pub max_body_bytes: usize,
    /// Bytes of request bodies over 1 MiB that are held at once.
    pub large_bodies_bytes: usize,
    pub max_in_flight: usize,
    /// Files that this process may open; `None`: as many as it likes.
    pub open_files: Option<usize>,
    /// Longest wait of a call for one of the places in flight.
    pub admission_wait: Duration,
    pub retries: Retries,
    /// Longest time of a whole call, over all its attempts.
    pub total_timeout: Option<Duration>,
    /// Parts of prompts that change from call to call.
    pub volatile: Arc<Rules>,
    pub shutdown_grace: Duration,
    /// Longest time that a client may take nothing of its reply.
    pub client_stall: Option<Duration>,
    /// How long a call runs on whose client left before it could act on the reply.
    pub retry_grace: Duration,
    /// Stand-alone: a session that has been idle for longer is ended.
    pub session_idle: Option<Duration>,
    /// Names under which the proxy may be called besides loopback ones, where it asks for no client token.
    pub allowed_hosts: Vec<String>,
    /// Clients must send this as their API key.
    pub client_token: Option<String>,
    /// Variable that holds the upstream's key, for messages.
    pub upstream_key_env: Option<String>,
    /// Fills in the ids of replies of the default upstream that carry none.
    pub local_tokenizer: Option<Arc<LocalTokenizer>>,
    /// Renders the prompts of the default upstream's model, which is asked with tokens.
    pub renderer: Option<Arc<Renderer>>,
    /// `None`: `/metrics` answers 404.
    pub render_metrics: Option<RenderMetrics>,
}

impl ProxyOptions {
    /// The options that a config file gives; `client_token` is the value of its variable.
    #[must_use]
    pub fn from_config(config: &config::Proxy, mode: Mode, client_token: Option<String>) -> Self {
        Self {
            mode,
            wanted: Wanted { token_ids: config.capture_token_ids, logprobs: config.capture_logprobs },
            relay: config.relay,
            probes_upstream: config.probe_upstream,
            inline_system: config.inline_system,
            replayed_reasoning: config.replayed_reasoning,
            server_tools: config.server_tools,
            history_rewrite_tolerance: config.history_rewrite_tolerance,
            stream_buffer_bytes: config.stream_buffer_size,
            capture_buffer_bytes: config.capture_buffer_size,
            spill: None,
            commit_wait: config.commit_wait(),
            keep_alive: config.keep_alive(),
            max_body_bytes: config.max_body_bytes,
            large_bodies_bytes: config.large_bodies_bytes(),
            max_in_flight: config.max_in_flight,
            open_files: None,
            admission_wait: Duration::from_secs(config.admission_wait_secs),
            retries: Retries {
                most: config.max_retries,
                longest_wait: Duration::from_secs(config.retry_max_wait_secs),
            },
            total_timeout: (config.total_timeout_secs > 0)
                .then(|| Duration::from_secs(config.total_timeout_secs)),
            volatile: Arc::new(rules(&config.volatile)),
            shutdown_grace: Duration::from_millis(config.shutdown_grace_ms),
            client_stall: (config.client_stall_timeout_secs > 0)
                .then(|| Duration::from_secs(config.client_stall_timeout_secs)),
            retry_grace: Duration::from_millis(config.retry_grace_ms),
            session_idle: (config.session_idle_secs > 0)
                .then(|| Duration::from_secs(config.session_idle_secs)),
            allowed_hosts: config.listen_host.bare().map(str::to_owned).collect(),
            client_token,
            upstream_key_env: config.upstream_api_key_env.clone(),
            local_tokenizer: None,
            renderer: None,
            render_metrics: None,
        }
    }

    /// The defaults of `proxy_config.json`.
    #[must_use]
    pub fn new(mode: Mode) -> Self {
        Self::from_config(&config::Proxy::default(), mode, None)
    }

    /// Stand-alone capture: sampling and model names pass through.
    #[must_use]
    pub fn stand_alone() -> Self {
        Self::new(Mode::StandAlone { sampling: SessionSampling::PassThrough, model_map: BTreeMap::new() })
    }

    /// A trainer's proxy.
    #[must_use]
    pub fn trainer(policy_model: impl Into<String>) -> Self {
        Self::new(Mode::Trainer { policy_model: policy_model.into() })
    }

    /// Names besides the upstream's own that the default upstream answers.
    pub(super) fn aliases(&self) -> impl Iterator<Item = &str> {
        let model_map = match &self.mode {
            Mode::StandAlone { model_map, .. } => Some(model_map),
            Mode::Trainer { .. } => None,
        };
        let names = model_map.into_iter().flat_map(BTreeMap::keys).map(String::as_str);
        names.filter(|name| !config::is_beginning(name))
    }

    /// The upstream's model for a requested name; `None`: the name passes through.
    pub(super) fn upstream_model(&self, requested: &str) -> Option<&str> {
        match &self.mode {
            Mode::StandAlone { model_map, .. } => config::fitting(model_map, requested).map(String::as_str),
            Mode::Trainer { policy_model } => Some(policy_model),
        }
    }
}

/// The rules of a configuration that was checked.
fn rules(config: &config::Volatile) -> Rules {
    let is_on = |action: VolatileAction| action != VolatileAction::Off;
    let is_removed = |action: VolatileAction| action == VolatileAction::Remove;
    let billing = is_on(config.billing_header).then(|| Rule {
        role: Role::System,
        pattern: Pattern::BillingHeader,
        is_removed: is_removed(config.billing_header),
    });
    let own = config.rules.values().filter(|rule| is_on(rule.action)).map(|rule| Rule {
        role: match rule.role {
            VolatileRole::System => Role::System,
            VolatileRole::User => Role::User,
            VolatileRole::Any => Role::Any,
        },
        pattern: Pattern::Text {
            regex: regex::Regex::new(&rule.pattern).expect("patterns are checked when the config is read"),
            replacement: rule.replacement.clone(),
        },
        is_removed: is_removed(rule.action),
    });
    billing.into_iter().chain(own).collect()
}
