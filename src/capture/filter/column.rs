//! The columns that a predicate may name: those of the files, fields of their structs, and a few counts.

use std::borrow::Cow;
use std::cmp::Ordering;

use crate::capture::layout::date_of;
use crate::capture::{bits, columns};
use crate::record::{
    Call, CallKind, CallStatus, ClientApi, IdsSource, LayerAxis, LogprobSemantics, Routing, RoutingDtype,
    Sampling, UpstreamKind, WeightSource,
};

/// What is in a column. Times are numbers: µs since the Unix epoch, UTC.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::capture) enum Value<'a> {
    Null,
    /// There is one that cannot be compared.
    Present,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(Cow<'a, str>),
}

impl Value<'_> {
    /// `None` for what cannot be compared: null, and a float that is no number.
    pub(super) fn compare(&self, other: &Value<'_>) -> Option<Ordering> {
        match (self, other) {
            (Self::Bool(a), Value::Bool(b)) => Some(a.cmp(b)),
            (Self::Int(a), Value::Int(b)) => Some(a.cmp(b)),
            (Self::Float(a), Value::Float(b)) => a.partial_cmp(b),
            (Self::Text(a), Value::Text(b)) => Some(a.cmp(b)),
            _ => None,
        }
    }

    pub(super) fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }
}

/// What a column may be compared with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Bool,
    Int,
    Float,
    Text,
    /// One of these texts.
    Name(&'static [&'static str]),
    /// The id of a call.
    CallId,
    Time,
    /// Only `is null`.
    Opaque,
}

#[derive(Debug)]
pub(super) struct Column {
    pub(super) name: &'static str,
    /// The column of the files that it is read from.
    pub(super) stored: &'static str,
    pub(super) kind: Kind,
    pub(super) get: for<'a> fn(&'a Call) -> Value<'a>,
}

impl Column {
    /// Whether the files have it as a plain text, for every row of every version. Bodies are too large to be read
    /// twice.
    pub(super) fn is_stored_text(&self) -> bool {
        let is_list = self.stored == "not_trainable_reasons";
        let is_body = columns::BODIES.contains(&self.stored);
        // Those of routing were added later, and null without the data; so were those of history.
        let is_later = columns::ROUTINGS.contains(&self.stored) || columns::SHARED.contains(&self.stored);
        let is_text = matches!(self.kind, Kind::Text | Kind::Name(_) | Kind::CallId);
        is_text && self.name == self.stored && !is_list && !is_body && !is_later
    }
}

const NULL: for<'a> fn(&'a Call) -> Value<'a> = |_| Value::Null;

fn text(text: Option<&str>) -> Value<'_> {
    text.map_or(Value::Null, |text| Value::Text(Cow::Borrowed(text)))
}

fn owned<T: ToString>(value: Option<T>) -> Value<'static> {
    value.map_or(Value::Null, |value| Value::Text(Cow::Owned(value.to_string())))
}

fn int<T: Into<i128>>(value: Option<T>) -> Value<'static> {
    value.map_or(Value::Null, |value| Value::Int(value.into()))
}

fn float(value: Option<f64>) -> Value<'static> {
    value.map_or(Value::Null, Value::Float)
}

fn present<T>(value: Option<T>) -> Value<'static> {
    value.map_or(Value::Null, |_| Value::Present)
}

fn length<T>(list: Option<&Vec<T>>) -> Value<'static> {
    int(list.map(|list| list.len() as u64))
}

fn routing(call: &Call, get: fn(&Routing) -> Option<u32>) -> Value<'static> {
    int(call.routing.as_ref().and_then(get))
}

macro_rules! names {
    ($of:ty) => {{
        const NAMES: [&str; <$of>::ALL.len()] = {
            let mut names = [""; <$of>::ALL.len()];
            let mut at = 0;
            while at < names.len() {
                names[at] = <$of>::ALL[at].as_str();
                at += 1;
            }
            names
        };
        Kind::Name(&NAMES)
    }};
}

macro_rules! columns {
    ($($name:literal $(of $stored:literal)?: $kind:expr, $get:expr;)+) => {
        &[$(Column { name: $name, stored: columns!(@ $name $($stored)?), kind: $kind, get: $get }),+]
    };
    (@ $name:literal) => { $name };
    (@ $name:literal $stored:literal) => { $stored };
}

macro_rules! sampling {
    ($name:literal, $stored:literal, $kind:expr, $of:ident, $call:ident, $sampling:ident => $get:expr) => {
        Column {
            name: concat!($stored, ".", $name),
            stored: $stored,
            kind: $kind,
            get: |$call| {
                let $sampling: &Sampling = &$call.$of;
                $get
            },
        }
    };
}

macro_rules! samplings {
    ($stored:literal, $of:ident) => {
        [
            sampling!("temperature", $stored, Kind::Float, $of, c, s => float(s.temperature)),
            sampling!("top_p", $stored, Kind::Float, $of, c, s => float(s.top_p)),
            sampling!("top_k", $stored, Kind::Int, $of, c, s => int(s.top_k)),
            sampling!("min_p", $stored, Kind::Float, $of, c, s => float(s.min_p)),
            sampling!("repetition_penalty", $stored, Kind::Float, $of, c, s => float(s.repetition_penalty)),
            sampling!("frequency_penalty", $stored, Kind::Float, $of, c, s => float(s.frequency_penalty)),
            sampling!("presence_penalty", $stored, Kind::Float, $of, c, s => float(s.presence_penalty)),
            sampling!("seed", $stored, Kind::Int, $of, c, s => int(s.seed)),
            sampling!("max_tokens", $stored, Kind::Int, $of, c, s => int(s.max_tokens)),
            sampling!("stop", $stored, Kind::Opaque, $of, c, s => present(s.stop.as_ref())),
            sampling!("n", $stored, Kind::Int, $of, c, s => int(s.n)),
            sampling!("logit_bias", $stored, Kind::Text, $of, c, s => text(s.logit_bias.as_deref())),
        ]
    };
}

static PLAIN: &[Column] = columns! {
    "schema_version": Kind::Int, |c| int(Some(c.schema_version));
    "call_id": Kind::CallId, |c| owned(Some(c.call_id));
    "choice_index": Kind::Int, |c| int(Some(c.choice_index));
    "session_id": Kind::Text, |c| text(Some(c.session_id.as_str()));
    "trial_id": Kind::Text, |c| text(c.trial_id.as_ref().map(|id| id.as_str()));
    "task_id": Kind::Text, |c| text(c.task_id.as_ref().map(|id| id.as_str()));
    "parent_call_id": Kind::CallId, |c| owned(c.parent_call_id);
    "attempt": Kind::Int, |c| int(Some(c.attempt));
    "retry_of": Kind::CallId, |c| owned(c.retry_of);
    "rejoined": Kind::Int, |c| int(Some(c.rejoined));
    "kind": names!(CallKind), |c| text(Some(c.kind.as_str()));
    "harness": Kind::Text, |c| text(c.harness.as_deref());
    "harness_version": Kind::Text, |c| text(c.harness_version.as_deref());
    "harness_conversation_id": Kind::Text, |c| text(c.harness_conversation_id.as_deref());
    "http_status": Kind::Int, |c| int(Some(c.http_status));
    "tokenizer_sha256": Kind::Text, |c| text(c.tokenizer_sha256.as_deref());
    "template_sha256": Kind::Text, |c| text(c.template_sha256.as_deref());
    "client_api": names!(ClientApi), |c| text(Some(c.client_api.as_str()));
    "client_stream": Kind::Bool, |c| Value::Bool(c.client_stream);
    "upstream_kind": names!(UpstreamKind), |c| text(Some(c.upstream_kind.as_str()));
    "upstream_api": names!(ClientApi), |c| text(Some(c.upstream_api.as_str()));
    "model_requested": Kind::Text, |c| text(Some(&c.model_requested));
    "model_served": Kind::Text, |c| text(c.model_served.as_deref());
    "received_at": Kind::Time, |c| int(Some(c.received_at));
    "ttft_us": Kind::Int, |c| int(c.ttft_us);
    "duration_us": Kind::Int, |c| int(Some(c.duration_us));
    "client_request": Kind::Text, |c| text(c.client_request.as_ref().map(|json| json.get()));
    "upstream_request": Kind::Text, |c| text(c.upstream_request.as_ref().map(|json| json.get()));
    "response": Kind::Text, |c| text(c.response.as_ref().map(|json| json.get()));
    "prompt_token_ids": Kind::Opaque, |c| present(c.prompt_token_ids.as_ref());
    "prompt_ids_source": names!(IdsSource), |c| text(Some(c.prompt_ids_source.as_str()));
    "completion_token_ids": Kind::Opaque, |c| present(c.completion_token_ids.as_ref());
    "completion_ids_source": names!(IdsSource), |c| text(Some(c.completion_ids_source.as_str()));
    "completion_logprobs": Kind::Opaque, |c| present(c.completion_logprobs.as_ref());
    "logprob_semantics": names!(LogprobSemantics), |c| text(Some(c.logprob_semantics.as_str()));
    "weight_spans": Kind::Opaque, |c| present(c.weight_spans.as_ref());
    "weight_source": names!(WeightSource), |c| text(Some(c.weight_source.as_str()));
    "routing": Kind::Opaque, |c| present(c.routing.as_ref());
    "routing_base_call_id": Kind::CallId, |c| owned(c.routing.as_ref().and_then(Routing::base).map(|b| b.call_id));
    "routing_base_choice": Kind::Int, |c| routing(c, |r| r.base().map(|base| base.choice_index.into()));
    "routing_start": Kind::Int, |c| routing(c, |r| Some(r.shape().start));
    "routing_rows": Kind::Int, |c| routing(c, |r| Some(r.shape().rows));
    "routing_layers": Kind::Int, |c| routing(c, |r| Some(r.shape().layers));
    "routing_layer_axis": names!(LayerAxis), |c| text(c.routing.as_ref().map(|r| r.shape().layer_axis.as_str()));
    "routing_top_k": Kind::Int, |c| routing(c, |r| Some(r.shape().top_k));
    "routing_bits": Kind::Int, |c| int(c.routing.as_ref().map(bits::needed));
    "routing_dtype": names!(RoutingDtype), |c| text(c.routing.as_ref().map(|r| r.shape().dtype.as_str()));
    "text": Kind::Text, |c| text(c.text.as_deref());
    "tool_calls": Kind::Opaque, |c| present(c.tool_calls.as_ref());
    "finish_reason": Kind::Text, |c| text(c.finish_reason.as_deref());
    "usage": Kind::Opaque, |c| present(c.usage);
    "usage.prompt_tokens" of "usage": Kind::Int, |c| int(c.usage.map(|usage| usage.prompt_tokens));
    "usage.completion_tokens" of "usage": Kind::Int, |c| int(c.usage.map(|usage| usage.completion_tokens));
    "usage.cached_tokens" of "usage": Kind::Int, |c| int(c.usage.and_then(|usage| usage.cached_tokens));
    "usage.reasoning_tokens" of "usage": Kind::Int, |c| int(c.usage.and_then(|usage| usage.reasoning_tokens));
    "status": names!(CallStatus), |c| text(Some(c.status.as_str()));
    "error": Kind::Text, |c| text(c.error.as_deref());
    "trainable": Kind::Bool, |c| Value::Bool(c.trainable);
    "not_trainable_reasons": Kind::Text, |c| Value::Text(Cow::Owned(c.not_trainable_reasons.join(", ")));
    "base_call_id": Kind::CallId, |c| owned(c.shared.as_ref().and_then(|shared| Some(shared.base?.call_id)));
    "base_choice": Kind::Int, |c| int(c.shared.as_ref().and_then(|shared| Some(shared.base?.choice_index)));
    "prompt_ids_crc32c": Kind::Int, |c| int(c.shared.as_ref().and_then(|shared| Some(shared.ids?.crc32c)));
    "client_request_splice": Kind::Opaque, |c| present(c.shared.as_ref().and_then(|shared| shared.client_request.as_ref()));
    "upstream_request_splice": Kind::Opaque, |c| present(c.shared.as_ref().and_then(|shared| shared.upstream_request.as_ref()));
    "response_splice": Kind::Opaque, |c| present(c.shared.as_ref().and_then(|shared| shared.response.as_ref()));
    "base_len": Kind::Int, |c| int(c.shared.as_ref().and_then(|shared| Some(shared.ids?.count)));
    "top_logprobs": Kind::Opaque, NULL;
    "prompt_logprobs": Kind::Opaque, NULL;
    "sampling_mask": Kind::Opaque, NULL;
    "prompt_tokens" of "prompt_token_ids": Kind::Int, |c| int(c.prompt_tokens());
    "completion_tokens" of "completion_token_ids": Kind::Int, |c| length(c.completion_token_ids.as_ref());
    "tools" of "tool_calls": Kind::Int, |c| length(c.tool_calls.as_ref());
    "date" of "received_at": Kind::Text, |c| Value::Text(Cow::Owned(date_of(c.received_at)));
};

static REQUESTED: [Column; 12] = samplings!("sampling_requested", sampling_requested);
static SENT: [Column; 12] = samplings!("sampling_sent", sampling_sent);

/// All of them.
pub(super) fn all() -> impl Iterator<Item = &'static Column> {
    PLAIN.iter().chain(&REQUESTED).chain(&SENT)
}

/// The column of this name.
pub(super) fn find(name: &str) -> Option<&'static Column> {
    all().find(|column| column.name == name)
}

pub(super) fn call_id() -> &'static Column {
    find("call_id").expect("it is in the list")
}

pub(super) fn session_id() -> &'static Column {
    find("session_id").expect("it is in the list")
}

/// The names that are most like `name`.
pub(super) fn nearest(name: &str) -> Vec<&'static str> {
    let mut names: Vec<(f64, &str)> = all()
        .map(|column| {
            // `tokens` is meant to find all that have to do with tokens.
            let is_part = !name.is_empty() && column.name.contains(name);
            (strsim::jaro_winkler(name, column.name) + if is_part { 1.0 } else { 0.0 }, column.name)
        })
        .collect();
    names.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(b.1)));
    names.into_iter().take(3).map(|(_, name)| name).collect()
}
