//! The call record: one model request and its reply, as captured. One value a sampled choice.
//!
//! Field names are the Parquet column names. Columns that no relay fills yet are declared and null.

use serde::{Deserialize, Serialize};

use super::{CallId, ChoiceId, JsonText, Routing, SessionId, Shared, TaskId, TrialId};

/// Version of the record's schema, in the files' metadata and in each row.
///
/// 2: calls leave out what others have ([`Shared`]).
pub const SCHEMA_VERSION: u16 = 2;

macro_rules! name_enum {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $text:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
        pub enum $name { $($(#[$vdoc])* #[serde(rename = $text)] $variant),+ }

        impl $name {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            /// The name stored in captures.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text),+ }
            }

            /// The value with this stored name.
            #[must_use]
            pub fn from_name(name: &str) -> Option<Self> {
                match name { $($text => Some(Self::$variant),)+ _ => None }
            }
        }
    };
}

name_enum!(
    /// What a call was made for.
    CallKind {
        /// Sampled by the policy under training: what trains.
        Policy = "policy",
        /// A side call of the harness (titles, summaries, checks of a quota).
        Aux = "aux",
        /// A reward judge.
        Judge = "judge",
        /// A teacher model.
        Teacher = "teacher",
        /// lego's own capability probe.
        Probe = "probe",
        /// Stand-alone capture: nobody said.
        Unknown = "unknown",
    }
);
impl CallKind {
    /// The word by which a record of this kind says that it is not trainable.
    #[must_use]
    pub fn reason(self) -> String {
        format!("kind_{}", self.as_str())
    }
}
name_enum!(
    /// How a call ended.
    CallStatus {
        /// Complete.
        Ok = "ok",
        /// The upstream ended the stream before its terminator.
        Truncated = "truncated",
        /// The upstream answered with an error, or broke.
        UpstreamError = "upstream_error",
        /// The harness went away before the end.
        ClientDisconnect = "client_disconnect",
        /// Stopped by lego (shutdown, trial's end).
        Aborted = "aborted",
        /// The upstream did not answer in time.
        Timeout = "timeout",
        /// The reply reached the harness, but its copy could not be parsed.
        ParseError = "parse_error",
    }
);
name_enum!(
    /// Protocol spoken by the harness or to the upstream.
    ClientApi {
        /// `POST /v1/chat/completions`
        OpenaiChat = "openai_chat",
        /// `POST /v1/completions`
        OpenaiCompletions = "openai_completions",
        /// `POST /v1/responses`
        OpenaiResponses = "openai_responses",
        /// `POST /v1/messages`
        AnthropicMessages = "anthropic_messages",
        /// SGLang's `POST /generate`
        SglangGenerate = "sglang_generate",
        /// vLLM's `POST /inference/v1/generate`
        VllmGenerate = "vllm_generate",
    }
);
name_enum!(
    /// What answered.
    UpstreamKind {
        /// lego's own engine.
        Embedded = "embedded",
        /// vLLM.
        Vllm = "vllm",
        /// SGLang.
        Sglang = "sglang",
        /// An OpenAI-compatible gateway that gives no token ids.
        Openai = "openai",
        /// A server that speaks Anthropic's Messages itself, and gives no token ids.
        Anthropic = "anthropic",
    }
);
name_enum!(
    /// Where token ids came from. `Engine`, `SentByUs` and `TokenIdStrings` are exact.
    IdsSource {
        /// The engine returned them.
        Engine = "engine",
        /// lego sent them itself.
        SentByUs = "sent_by_us",
        /// The engine wrote each sampled token's id in the place of its text (vLLM before 0.10.2): exact.
        TokenIdStrings = "token_id_strings",
        /// Rendered by a local tokenizer: conditioning only, never a target.
        LocalTokenizer = "local_tokenizer",
        /// Nobody gave them.
        Absent = "absent",
    }
);
impl IdsSource {
    /// True for the ids that the model itself saw or sampled.
    #[must_use]
    pub const fn is_exact(self) -> bool {
        matches!(self, Self::Engine | Self::SentByUs | Self::TokenIdStrings)
    }
}

name_enum!(
    /// Which distribution `completion_logprobs` are of.
    LogprobSemantics {
        /// log-softmax of the raw logits; equals the behaviour policy only at temperature 1 without truncation.
        RawT1 = "raw_t1",
        /// log-softmax of logits / temperature, before truncation.
        TempScaled = "temp_scaled",
        /// After temperature and truncation: the distribution sampled from.
        ProcessedTruncated = "processed_truncated",
        /// Not known.
        Unknown = "unknown",
    }
);
name_enum!(
    /// Where the weight version of a call came from.
    WeightSource {
        /// Spans in the reply.
        ReplySpans = "reply_spans",
        /// One label in the reply.
        ReplySingle = "reply_single",
        /// lego's own count of publications.
        LegoClock = "lego_clock",
        /// Not known.
        Unknown = "unknown",
    }
);
name_enum!(
    /// Which layers the rows of a routing hold.
    LayerAxis {
        /// All hidden layers; dense ones are zero.
        AllHidden = "all_hidden",
        /// Mixture-of-experts layers only.
        MoeOnly = "moe_only",
        /// The engine did not say.
        Unknown = "unknown",
    }
);
name_enum!(
    /// How an expert id is stored.
    RoutingDtype {
        U8 = "u8",
        U16 = "u16",
        I32 = "i32",
    }
);

/// Sampling parameters. `None`: not given.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sampling {
    pub temperature: Option<f64>,
    pub top_p: Option<f64>,
    /// Off is -1 (vLLM's and SGLang's form) or 0.
    pub top_k: Option<i64>,
    pub min_p: Option<f64>,
    pub repetition_penalty: Option<f64>,
    pub frequency_penalty: Option<f64>,
    pub presence_penalty: Option<f64>,
    pub seed: Option<i64>,
    pub max_tokens: Option<u64>,
    pub stop: Option<Vec<String>>,
    pub n: Option<u64>,
    /// `logit_bias` as sent, as JSON text.
    pub logit_bias: Option<String>,
}

/// Token counts as the engine reported them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    pub prompt_tokens: u64,
    /// Over all choices of the call.
    pub completion_tokens: u64,
    pub cached_tokens: Option<u64>,
    pub reasoning_tokens: Option<u64>,
}

/// Completion tokens `[start, end)` were sampled by the weights labelled `version`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WeightSpan {
    pub version: String,
    pub start: u32,
    pub end: u32,
}

/// A tool call of the reply. `arguments` are the sampled bytes, never re-serialised.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CapturedToolCall {
    pub id: String,
    pub name: String,
    pub arguments: String,
    pub arguments_valid_json: bool,
}

/// One sampled choice of one call. A call that failed before a choice existed has one record with no ids.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Call {
    pub schema_version: u16,
    pub call_id: CallId,
    pub choice_index: u16,
    pub session_id: SessionId,
    pub trial_id: Option<TrialId>,
    pub task_id: Option<TaskId>,
    pub parent_call_id: Option<CallId>,
    /// 1 for the first try upstream.
    pub attempt: u16,
    pub retry_of: Option<CallId>,
    /// How often a client that had left before the reply came back for it.
    #[serde(default)]
    pub rejoined: u16,
    pub kind: CallKind,
    pub harness: Option<String>,
    pub harness_version: Option<String>,
    pub harness_conversation_id: Option<String>,
    pub http_status: u16,
    pub tokenizer_sha256: Option<String>,
    pub template_sha256: Option<String>,
    pub client_api: ClientApi,
    pub client_stream: bool,
    pub upstream_kind: UpstreamKind,
    pub upstream_api: ClientApi,
    pub model_requested: String,
    pub model_served: Option<String>,
    /// Microseconds since the Unix epoch, UTC.
    pub received_at: i64,
    /// Receipt to the upstream's first event, or to a body that is whole.
    pub ttft_us: Option<u64>,
    pub duration_us: u64,
    /// Request body of the harness, byte for byte when it was JSON; `None` when it was not.
    pub client_request: Option<JsonText>,
    /// Body sent upstream; `None` when it equals `client_request`.
    pub upstream_request: Option<JsonText>,
    /// Reply as one JSON value: the body, or for a stream the array of its data events.
    pub response: Option<JsonText>,
    pub prompt_token_ids: Option<Vec<u32>>,
    pub prompt_ids_source: IdsSource,
    pub completion_token_ids: Option<Vec<u32>>,
    pub completion_ids_source: IdsSource,
    /// `[i]` is the log-prob of `completion_token_ids[i]` given all before it.
    pub completion_logprobs: Option<Vec<Option<f32>>>,
    pub logprob_semantics: LogprobSemantics,
    pub sampling_requested: Sampling,
    pub sampling_sent: Sampling,
    pub weight_spans: Option<Vec<WeightSpan>>,
    pub weight_source: WeightSource,
    /// Experts of the positions `start..` of prompt and completion together; the last sampled token has no row.
    pub routing: Option<Routing>,
    pub text: Option<String>,
    pub tool_calls: Option<Vec<CapturedToolCall>>,
    pub finish_reason: Option<String>,
    pub usage: Option<Usage>,
    pub status: CallStatus,
    pub error: Option<String>,
    /// The capture-time verdict on this record alone.
    pub trainable: bool,
    /// Empty when `trainable`.
    pub not_trainable_reasons: Vec<String>,
    /// What the store left out. `None` in all calls but those that are read as they lie there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared: Option<Box<Shared>>,
}

/// Between whom a call runs: the client's protocol, the server, and the protocol that it is asked in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parties {
    pub client_api: ClientApi,
    pub upstream_kind: UpstreamKind,
    pub upstream_api: ClientApi,
}

impl Call {
    /// The first attempt of a call of which nothing came: all that can be null is, and its status is `aborted`.
    /// `received_at`: microseconds since the Unix epoch, UTC.
    #[must_use]
    pub fn unanswered(
        call_id: CallId,
        session_id: SessionId,
        kind: CallKind,
        parties: Parties,
        received_at: i64,
    ) -> Self {
        Self {
            schema_version: SCHEMA_VERSION,
            call_id,
            choice_index: 0,
            session_id,
            trial_id: None,
            task_id: None,
            parent_call_id: None,
            attempt: 1,
            retry_of: None,
            rejoined: 0,
            kind,
            harness: None,
            harness_version: None,
            harness_conversation_id: None,
            http_status: 0,
            tokenizer_sha256: None,
            template_sha256: None,
            client_api: parties.client_api,
            client_stream: false,
            upstream_kind: parties.upstream_kind,
            upstream_api: parties.upstream_api,
            model_requested: String::new(),
            model_served: None,
            received_at,
            ttft_us: None,
            duration_us: 0,
            client_request: None,
            upstream_request: None,
            response: None,
            prompt_token_ids: None,
            prompt_ids_source: IdsSource::Absent,
            completion_token_ids: None,
            completion_ids_source: IdsSource::Absent,
            completion_logprobs: None,
            logprob_semantics: LogprobSemantics::Unknown,
            sampling_requested: Sampling::default(),
            sampling_sent: Sampling::default(),
            weight_spans: None,
            weight_source: WeightSource::Unknown,
            routing: None,
            text: None,
            tool_calls: None,
            finish_reason: None,
            usage: None,
            status: CallStatus::Aborted,
            error: None,
            trainable: false,
            not_trainable_reasons: Vec::new(),
            shared: None,
        }
    }

    /// The name of this choice among all.
    #[must_use]
    pub const fn choice(&self) -> ChoiceId {
        ChoiceId { call_id: self.call_id, choice_index: self.choice_index }
    }

    /// How many ids the prompt has, those counted in that the store left out.
    #[must_use]
    pub fn prompt_tokens(&self) -> Option<u64> {
        let left_out =
            self.shared.as_ref().and_then(|shared| shared.ids).map_or(0, |ids| u64::from(ids.count));
        self.prompt_token_ids.as_ref().map(|ids| left_out + ids.len() as u64)
    }

    /// The ids that the model sampled. Ids of a local tokenizer are those of the reply's text: nobody sampled them.
    #[must_use]
    pub fn sampled_ids(&self) -> Option<&[u32]> {
        self.completion_token_ids.as_deref().filter(|_| self.completion_ids_source.is_exact())
    }
}
