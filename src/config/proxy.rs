//! `proxy_config.json`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ListenHost, Route, Volatile};

/// The capture proxy.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Proxy {
    /// Address that the proxy listens on, or a list of several, such as `["127.0.0.1", "::1"]`. Beyond loopback it starts
    /// only with `client_token_env` set.
    pub listen_host: ListenHost,
    /// Port that the proxy listens on, at each address, and port of the model API inside each sandbox. 0 lets the system choose.
    pub listen_port: u16,
    /// What answers model calls: `embedded` (lego's own engine, in this process) or the base URL of an
    /// OpenAI-compatible server, with or without its trailing `/v1`.
    pub upstream_base_url: String,
    /// Name of the environment variable with the upstream's API key.
    pub upstream_api_key_env: Option<String>,
    /// Which server the upstream is.
    pub upstream_kind: UpstreamKind,
    /// How a client of Responses is served by an upstream of kind `openai`.
    pub upstream_responses: UpstreamResponses,
    /// PEM file with certificates of authorities that are trusted for an https upstream, besides the system's.
    pub upstream_ca_file: Option<PathBuf>,
    /// Folder of the embedded engine's model, in Hugging Face form.
    pub model_path: PathBuf,
    /// Ask the upstream for token ids and store them.
    pub capture_token_ids: bool,
    /// Ask the upstream for the sampled tokens' log-probabilities and store them.
    pub capture_logprobs: bool,
    /// Store expert routing where the upstream returns it.
    pub capture_expert_routing: bool,
    /// `num_hidden_layers` of the upstream's model. SGLang sends routing without its shape: this or
    /// `routing_top_k` is needed to store it.
    pub routing_layers: Option<u32>,
    /// `num_experts_per_tok` of the upstream's model.
    pub routing_top_k: Option<u32>,
    /// Folder with the `tokenizer.json` (and chat template) of the upstream's model. A reply that carries no token ids
    /// gets ids of its text from it, marked `local_tokenizer` and never trained. Absent: such a reply has none.
    pub local_tokenizer: Option<PathBuf>,
    /// Serve a call that rewrites its session's history. `false` answers it with 409.
    pub history_rewrite_tolerance: bool,
    /// What becomes of system messages within a conversation of Messages or Responses (Claude Code and Codex send them).
    pub inline_system: InlineSystem,
    /// What becomes of the reasoning of earlier turns that a client of Messages or Responses says back.
    pub replayed_reasoning: ReplayedReasoning,
    /// What becomes of tools that the vendor's servers run and no upstream here has: web search, code execution, MCP
    /// servers.
    pub server_tools: ServerTools,
    /// Bytes of a reply that may wait for a slow harness before lego stops reading from the upstream.
    pub stream_buffer_size: usize,
    /// Bytes of a stream's copy that stay in memory. What is longer, and all but the last 8 KiB of each when the copies
    /// of all calls together are over 16 MiB, waits for its record in a nameless file in the folder of the capture.
    pub capture_buffer_size: usize,
    /// Folder of the capture: one writer at a time. Or a place in object storage, as `s3://bucket/prefix`, `gs://…` or
    /// `az://…` (docs/object-storage.md), of `lego proxy` alone: the captures of a run are in the run's folder.
    pub capture_dir: PathBuf,
    /// With a URL in `capture_dir`: the folder of calls that are not there yet. Absent: one in the current folder that is
    /// named for the URL.
    pub capture_local_dir: Option<PathBuf>,
    /// The log warns when the files of `capture_dir` have grown to so many bytes together. 0: never.
    pub capture_alarm_bytes: u64,
    /// With so many bytes in `capture_dir` no more calls are served: they get 507 until there is less
    /// (`lego capture prune`). Calls that run then are still recorded. 0: no limit.
    pub capture_max_bytes: u64,
    /// With fewer bytes left on the disk of `capture_dir` no more calls are served: they get 507 until there is more.
    /// What is left is for the records of calls that run then. On a disk of less than twenty times as many, a twentieth
    /// of the disk. 0: until the disk is full.
    pub capture_min_free_bytes: u64,
    /// Longest time that a call waits for the disk to take its record, in seconds; then it fails, and further ones are
    /// refused until the disk goes on. 0: no limit.
    pub capture_stall_timeout_secs: u64,
    /// Find out by one tiny call, before the first of a harness, what the upstream gives: ids, ids in streams, expert
    /// routing. `false`: what a recent release gives is assumed, without routing.
    pub probe_upstream: bool,
    /// How a reply is passed on.
    pub relay: Relay,
    /// With `relay = token_in`: what the model sees of earlier turns.
    pub token_history: TokenHistory,
    /// With `relay = token_in`: the form of tool calls in sampled text, by vLLM's name for its parser. Absent: the one of
    /// the chat template.
    pub tool_call_parser: Option<String>,
    /// The same for reasoning.
    pub reasoning_parser: Option<String>,
    /// What a finished call survives before the harness may act on it.
    pub durability: Durability,
    /// Longest wait for usage and terminator before a call is committed without them, in milliseconds.
    pub commit_wait_ms: u64,
    /// A harness that was given no event for so long gets a sign of life, in seconds: a no-op event in a stream, a
    /// space in front of a body. The reply's status is 200 from the first one on. 0: never.
    pub keep_alive_secs: u64,
    /// Largest request body, in bytes.
    pub max_body_bytes: usize,
    /// Bytes of request bodies over 1 MiB that are held at once, from their first byte until their call is recorded;
    /// further ones wait. A call takes two to three times its body in memory. Absent: four times `max_body_bytes`.
    pub large_bodies_bytes: Option<usize>,
    /// Most model calls in flight; further ones wait. Fewer where the system lets the process open too few files.
    pub max_in_flight: usize,
    /// Longest such wait, in seconds; then the harness gets 429 with `Retry-After`.
    pub admission_wait_secs: u64,
    /// How often a call is sent upstream again after a failure that passes by itself (no connection, 408, 429, 500, 502,
    /// 503, 504, 529), as long as the harness has had no byte of the reply. Each attempt is a record. One that asks in other words, after the
    /// upstream refused what lego adds or has no such route, is not counted.
    pub max_retries: u16,
    /// Longest pause before such a retry, in seconds. An upstream whose `Retry-After` asks for more is not asked again:
    /// the harness gets its answer.
    pub retry_max_wait_secs: u64,
    /// Longest wait for a connection to the upstream, in seconds.
    pub connect_timeout_secs: u64,
    /// Longest wait for the upstream's first byte, in seconds.
    pub first_byte_timeout_secs: u64,
    /// Longest silence of the upstream within a reply, in seconds.
    pub idle_timeout_secs: u64,
    /// Longest time of a whole call, over all its attempts, in seconds. 0: no limit; long replies are healthy.
    pub total_timeout_secs: u64,
    /// Longest time that a client may take nothing of its reply, in seconds; then its connection is closed, as if it had
    /// left. One that sends nothing of its request's body for as long gets 408. 0: no limit.
    pub client_stall_timeout_secs: u64,
    /// Time that running calls get to end when the proxy stops, in milliseconds.
    pub shutdown_grace_ms: u64,
    /// How long a call runs on upstream after its client left, in milliseconds. A client that comes back within that time
    /// with the same request gets the reply of that call. 0: the call is cancelled at once.
    pub retry_grace_ms: u64,
    /// Stand-alone only: a session without a call for this long is ended, in seconds; what comes later for it is refused.
    /// 0: never.
    pub session_idle_secs: u64,
    /// Name of the environment variable with the token that clients must send as their API key. Clients that have it
    /// may call the proxy by any name (`Host`).
    pub client_token_env: Option<String>,
    /// Port of the admin listener, on the same host: `/admin/pause`, `/admin/resume`, `/admin/policy-version`,
    /// `/admin/state`. Absent: there is none.
    pub admin_listen_port: Option<u16>,
    /// Name of the environment variable with the token that the admin listener asks for.
    pub admin_token_env: Option<String>,
    /// Stand-alone only: model names that harnesses ask for, and the upstream's name for each. `claude-*` is every name
    /// that begins so, `*` every name; the name itself is preferred, then the longest beginning. Names that none fits
    /// pass through. `GET /v1/models` lists the names before the upstream's own.
    pub model_map: BTreeMap<String, String>,
    /// Stand-alone only: sampling that replaces what the harness asks for, in full. Absent: pass through.
    /// In a training session lego always sends its own.
    pub pinned_sampling: Option<PinnedSampling>,
    /// Models with an upstream, a key or limits of their own, by a name of your choice (letters, digits, `-`, `_`); see
    /// `proxy.routes.<name>`. With routes, a model name that none of them has is answered by the upstream above if that
    /// was set, else with 404.
    pub routes: BTreeMap<String, Route>,
    /// Parts of prompts that change from call to call without meaning anything. They are ignored where calls are compared
    /// (derived sessions, `history_rewrite_tolerance`, clients that come back); what is sent to the upstream changes
    /// only where a rule says `remove`. The capture has both: the request as it came, and as it was sent. To an
    /// `anthropic` upstream requests go as they came.
    pub volatile: Volatile,
}

impl Default for Proxy {
    fn default() -> Self {
        Self {
            listen_host: ListenHost::One("127.0.0.1".to_owned()),
            listen_port: 18080,
            upstream_base_url: "embedded".to_owned(),
            upstream_api_key_env: None,
            upstream_kind: UpstreamKind::Auto,
            upstream_responses: UpstreamResponses::Translate,
            upstream_ca_file: None,
            model_path: PathBuf::from("models/lego-tiny"),
            capture_token_ids: true,
            capture_logprobs: true,
            capture_expert_routing: true,
            routing_layers: None,
            routing_top_k: None,
            local_tokenizer: None,
            history_rewrite_tolerance: true,
            inline_system: InlineSystem::Keep,
            replayed_reasoning: ReplayedReasoning::Keep,
            server_tools: ServerTools::Auto,
            stream_buffer_size: 65536,
            capture_buffer_size: 256 * 1024,
            capture_dir: PathBuf::from("./captures"),
            capture_local_dir: None,
            capture_alarm_bytes: 10 << 30,
            capture_max_bytes: 0,
            capture_min_free_bytes: 1 << 30,
            capture_stall_timeout_secs: 60,
            probe_upstream: true,
            relay: Relay::Auto,
            token_history: TokenHistory::Sampled,
            tool_call_parser: None,
            reasoning_parser: None,
            durability: Durability::PowerLoss,
            commit_wait_ms: 1000,
            keep_alive_secs: 15,
            max_body_bytes: 64 * 1024 * 1024,
            large_bodies_bytes: None,
            max_in_flight: 1024,
            admission_wait_secs: 60,
            max_retries: 2,
            retry_max_wait_secs: 30,
            connect_timeout_secs: 10,
            first_byte_timeout_secs: 600,
            idle_timeout_secs: 300,
            total_timeout_secs: 0,
            client_stall_timeout_secs: 300,
            shutdown_grace_ms: 3000,
            retry_grace_ms: 800,
            session_idle_secs: 86_400,
            client_token_env: None,
            admin_listen_port: None,
            admin_token_env: None,
            model_map: BTreeMap::new(),
            pinned_sampling: None,
            routes: BTreeMap::new(),
            volatile: Volatile::default(),
        }
    }
}

impl Proxy {
    /// True if the upstream is the embedded engine.
    #[must_use]
    pub fn is_embedded(&self) -> bool {
        self.upstream_base_url == "embedded"
    }

    /// [`Proxy::commit_wait_ms`] as a duration.
    #[must_use]
    pub const fn commit_wait(&self) -> Duration {
        Duration::from_millis(self.commit_wait_ms)
    }

    /// [`Proxy::large_bodies_bytes`], or what it is by default.
    #[must_use]
    pub const fn large_bodies_bytes(&self) -> usize {
        match self.large_bodies_bytes {
            Some(bytes) => bytes,
            None => self.max_body_bytes.saturating_mul(4),
        }
    }

    /// [`Proxy::keep_alive_secs`] as a duration; `None` when keep-alives are off.
    #[must_use]
    pub const fn keep_alive(&self) -> Option<Duration> {
        if self.keep_alive_secs == 0 { None } else { Some(Duration::from_secs(self.keep_alive_secs)) }
    }
}

/// Sampling sent in place of what the harness asks for. Everything not named here is neutral: top_p 1,
/// top_k off, min_p 0, no penalties, no logit_bias.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct PinnedSampling {
    /// Sampling temperature; 0 is greedy.
    pub temperature: f64,
    /// Seed of all sessions; each call gets its own from it, the session's name and the call's number in the session.
    pub seed: u64,
}

impl Default for PinnedSampling {
    fn default() -> Self {
        Self { temperature: 1.0, seed: 1 }
    }
}

/// Which server answers model calls.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum UpstreamKind {
    /// `embedded` for the embedded engine, `vllm` for a URL. Whatever the kind, a server that refuses what lego adds for
    /// capture is asked without it: nothing to train on.
    #[default]
    Auto,
    /// lego's own engine, in this process.
    Embedded,
    /// A vLLM server.
    Vllm,
    /// An SGLang server.
    Sglang,
    /// Any other OpenAI-compatible server: no token ids, so nothing to train on.
    Openai,
    /// A server that speaks Anthropic's Messages itself: no token ids, so nothing to train on.
    Anthropic,
}

/// Calls of Responses to an upstream of kind `openai`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum UpstreamResponses {
    /// `pass_through` where the upstream has `/v1/responses` for the model, which the first call finds out, and no
    /// `local_tokenizer` is set; else `translate`.
    Auto,
    /// The upstream is asked in chat's words, and for log-probs.
    #[default]
    Translate,
    /// Requests and replies pass as they are, with all that only Responses has: hosted tools, encrypted reasoning, stored
    /// responses.
    PassThrough,
}

/// System messages within a conversation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum InlineSystem {
    /// They stay what they are.
    #[default]
    Keep,
    /// They are said by the user: for chat templates that take a system message only at the beginning.
    User,
}

/// The reasoning of earlier turns.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ReplayedReasoning {
    /// It goes upstream as `reasoning_content` of its turn; the chat template says what of it the model sees.
    #[default]
    Keep,
    /// It is left out: for servers that refuse that member.
    Drop,
}

/// Tools that the vendor's servers run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ServerTools {
    /// Messages: `refuse`. Responses: `web_search` and `image_generation` are left out, since Codex sends them with
    /// every request; others are refused.
    #[default]
    Auto,
    /// The request is answered with 400 that names the tool.
    Refuse,
    /// They are left out; the model is not told of them.
    Drop,
}

/// How a reply is passed on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Relay {
    /// Chosen for each call.
    #[default]
    Auto,
    /// Stream through; parse a copy.
    Live,
    /// Ask without streaming, give the harness a real event sequence.
    Destreamed,
    /// Render the chat template here and ask for tokens with tokens, so that each prompt extends the ids of the one before
    /// (`docs/token-in.md`). Needs `local_tokenizer`, or the embedded engine.
    TokenIn,
}

/// What a prompt that lego renders has of earlier turns.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TokenHistory {
    /// The ids that were sampled, as they were sampled, reasoning included. Each prompt extends the one before it.
    #[default]
    Sampled,
    /// What the chat template makes of the messages, as the engine's own chat endpoint would. Most templates leave the
    /// reasoning of earlier turns out, so that each turn begins a lineage.
    Template,
}

/// What a finished call survives before the harness may act on it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Durability {
    /// Synced to disk: survives loss of power and kill -9.
    #[default]
    PowerLoss,
    /// Handed to the kernel: survives kill -9, not loss of power.
    ProcessKill,
}

/// The harness that lego starts in each sandbox.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Harness {
    /// Which harness. `mini` is lego's own and needs nothing else on the machine.
    pub r#type: HarnessType,
    /// Version of the harness that must be installed.
    pub sdk_version: Option<String>,
    /// Settings given to the harness.
    pub llm_config_override: LlmConfigOverride,
    /// Command line that starts the harness, in place of the built-in one of its type. The program is one of the
    /// system's or lies in the task's repository; it runs in the workspace, with the task's statement on standard
    /// input and the policy at `OPENAI_BASE_URL`, `OPENAI_API_KEY` and `OPENAI_MODEL`.
    pub command: Option<Vec<String>>,
    /// Environment variables added for a harness that `command` starts.
    pub env: BTreeMap<String, String>,
}

/// Which harness.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum HarnessType {
    /// OpenHands.
    #[default]
    #[serde(alias = "openhands-sdk", alias = "openhands_sdk")]
    Openhands,
    /// Claude Code.
    #[serde(alias = "claude-code")]
    ClaudeCode,
    /// OpenCode.
    Opencode,
    /// Codex.
    Codex,
    /// mini-swe-agent.
    #[serde(alias = "mini-swe-agent")]
    MiniSweAgent,
    /// lego's own small agent (`lego agent`).
    Mini,
}

impl HarnessType {
    /// The name in config files and records.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Openhands => "openhands",
            Self::ClaudeCode => "claude_code",
            Self::Opencode => "opencode",
            Self::Codex => "codex",
            Self::MiniSweAgent => "mini_swe_agent",
            Self::Mini => "mini",
        }
    }
}

/// Port on 127.0.0.1 inside every sandbox where the model API is, whatever `proxy.listen_port` is outside.
pub const SANDBOX_PORT: u16 = 18080;

/// Settings given to the harness.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LlmConfigOverride {
    /// Base URL of the model API as the harness sees it: port 18080 of the sandbox's own loopback, with or without
    /// `/v1`. A harness that `command` starts finds it in `OPENAI_BASE_URL`. Absent: `http://127.0.0.1:18080/v1`.
    pub base_url: Option<String>,
    /// Model name that the harness asks for; the policy answers every name. A harness that `command` starts finds it
    /// in `OPENAI_MODEL`. Absent: the policy's name.
    pub model: Option<String>,
    /// How the harness signs in. A harness that `command` starts finds it in `LLM_AUTH_TYPE`; the key in
    /// `OPENAI_API_KEY` is a placeholder.
    pub auth_type: Option<String>,
}
