//! Request bodies: what is read, what is refused, what is ignored.

use axum::body::Bytes;
use axum::http::HeaderMap;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::ServeState;
use super::choice::TextOptions;
use super::error::ApiError;
use crate::engine::SamplingParams;
use crate::text::parsers::{Forms, ToolSchemas};

/// vLLM's default of `--max-logprobs`.
const MAX_LOGPROBS: i64 = 20;
/// Choices of one request.
const MAX_CHOICES: u64 = 128;

/// A JSON object.
pub(super) fn parse_object(body: &Bytes) -> Result<Value, ApiError> {
    match serde_json::from_slice(body) {
        Ok(value @ Value::Object(_)) => Ok(value),
        Ok(_) => Err(ApiError::bad_request("the request body is not a JSON object")),
        Err(error) => Err(ApiError::bad_request(format!("the request body is not JSON: {error}"))),
    }
}

/// The fields of `T`; others are left alone. An error names the field.
pub(super) fn fields<'de, T: Deserialize<'de>>(body: &'de Value) -> Result<T, ApiError> {
    serde_path_to_error::deserialize(body).map_err(|error| {
        let path = error.path().to_string();
        ApiError::bad_field(&path, format!("{path}: {}", error.inner()))
    })
}

/// One text or several.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

#[derive(Debug, Default, Clone, Deserialize)]
#[serde(default)]
pub(super) struct StreamOptions {
    include_usage: Option<bool>,
    continuous_usage_stats: Option<bool>,
}

/// Fields that chat and completions share.
#[derive(Debug, Deserialize)]
struct CommonFields {
    model: Option<String>,
    n: Option<u64>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<i64>,
    seed: Option<i64>,
    max_tokens: Option<u64>,
    stop: Option<OneOrMany>,
    stop_token_ids: Option<Vec<u32>>,
    ignore_eos: Option<bool>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    return_token_ids: Option<bool>,
    return_weight_versions: Option<bool>,
    return_tokens_as_token_ids: Option<bool>,
    skip_special_tokens: Option<bool>,
    include_stop_str_in_output: Option<bool>,
    request_id: Option<String>,
}

/// How to sample.
#[derive(Debug, Clone)]
pub(super) struct Sampling {
    pub params: SamplingParams,
    pub n: usize,
    /// `None`: what the context has room for.
    pub max_tokens: Option<usize>,
    pub stop_token_ids: Vec<u32>,
    pub top_logprobs: usize,
}

/// What chat and completions share, checked.
#[derive(Debug)]
pub(super) struct Common {
    pub model: String,
    pub id: String,
    pub sampling: Sampling,
    pub text: TextOptions,
    pub is_stream: bool,
    pub include_usage: bool,
    pub continuous_usage: bool,
    pub return_token_ids: bool,
    pub return_weight_versions: bool,
}

/// Log-probs asked for: whether, and how many of the likeliest.
#[derive(Debug, Clone, Copy)]
pub(super) struct Logprobs {
    pub is_wanted: bool,
    pub top: usize,
}

impl Logprobs {
    /// `logprobs` and `top_logprobs` of a chat request.
    pub fn of_chat(body: &Value) -> Result<Self, ApiError> {
        #[derive(Deserialize)]
        struct Fields {
            logprobs: Option<bool>,
            top_logprobs: Option<i64>,
        }
        let Fields { logprobs, top_logprobs } = fields(body)?;
        let is_wanted = logprobs.unwrap_or(false);
        let top = count("top_logprobs", top_logprobs.unwrap_or(0))?;
        if top > 0 && !is_wanted {
            return Err(ApiError::bad_field(
                "top_logprobs",
                "when using `top_logprobs`, `logprobs` must be set to true.",
            ));
        }
        Ok(Self { is_wanted, top })
    }

    /// `logprobs` of a completions request.
    pub fn of_completion(body: &Value) -> Result<Self, ApiError> {
        #[derive(Deserialize)]
        struct Fields {
            logprobs: Option<i64>,
        }
        let Fields { logprobs } = fields(body)?;
        let top = count("logprobs", logprobs.unwrap_or(0))?;
        Ok(Self { is_wanted: logprobs.is_some(), top })
    }
}

fn count(field: &str, value: i64) -> Result<usize, ApiError> {
    if (0..=MAX_LOGPROBS).contains(&value) {
        return Ok(value.unsigned_abs() as usize);
    }
    Err(ApiError::bad_field(field, format!("{field} = {value} is not supported; give 0 to {MAX_LOGPROBS}")))
}

impl Common {
    /// Reads and checks the shared fields. `default_max_tokens` applies when the request gives none.
    pub fn read(
        state: &ServeState,
        headers: &HeaderMap,
        body: &Value,
        logprobs: Logprobs,
        max_tokens: Option<u64>,
    ) -> Result<Self, ApiError> {
        if let Some(object) = body.as_object() {
            refuse_unsupported(object)?;
        }
        let fields: CommonFields = fields(body)?;
        let model = state.model_name(fields.model.as_deref())?;
        let is_stream = fields.stream.unwrap_or(false);
        if !is_stream && fields.stream_options.is_some() {
            return Err(ApiError::bad_field(
                "stream_options",
                "Stream options can only be defined when `stream=True`.",
            ));
        }
        let n = fields.n.unwrap_or(1);
        if !(1..=MAX_CHOICES).contains(&n) {
            return Err(ApiError::bad_field(
                "n",
                format!("n = {n} is not supported; give 1 to {MAX_CHOICES}"),
            ));
        }
        let top_k = match fields.top_k.unwrap_or(0) {
            -1 | 0 => 0,
            top_k if top_k > 0 => usize::try_from(top_k).unwrap_or(usize::MAX),
            top_k => {
                let message = format!("top_k = {top_k} is not usable; give -1 or 0 (off), or 1 or more");
                return Err(ApiError::bad_field("top_k", message));
            }
        };
        let eos_token_ids = state.inner.tokenizer.eos_token_ids().to_vec();
        let mut stop_token_ids = fields.stop_token_ids.unwrap_or_default();
        if !fields.ignore_eos.unwrap_or(false) {
            stop_token_ids.extend_from_slice(&eos_token_ids);
        }
        let stop = match fields.stop {
            None => Vec::new(),
            Some(OneOrMany::One(stop)) => vec![stop],
            Some(OneOrMany::Many(stops)) => stops,
        };
        if stop.iter().any(String::is_empty) {
            return Err(ApiError::bad_field("stop", "stop cannot contain an empty string."));
        }
        let options = fields.stream_options.unwrap_or_default();
        let asked_id = headers
            .get("x-request-id")
            .and_then(|value| value.to_str().ok())
            .map(str::to_owned)
            .or(fields.request_id);
        Ok(Self {
            model,
            id: asked_id.unwrap_or_else(|| uuid::Uuid::new_v4().simple().to_string()),
            sampling: Sampling {
                params: SamplingParams {
                    temperature: fields.temperature.unwrap_or(1.0) as f32,
                    top_p: fields.top_p.unwrap_or(1.0) as f32,
                    top_k,
                    seed: fields.seed.map_or_else(random_seed, i64::cast_unsigned),
                },
                n: n as usize,
                max_tokens: max_tokens
                    .or(fields.max_tokens)
                    .map(|tokens| usize::try_from(tokens).unwrap_or(usize::MAX / 2)),
                stop_token_ids,
                top_logprobs: logprobs.top,
            },
            text: TextOptions {
                stop,
                include_stop: fields.include_stop_str_in_output.unwrap_or(false),
                skip_special_tokens: fields.skip_special_tokens.unwrap_or(true),
                forms: Forms::default(),
                starts_in_reasoning: false,
                tool_schemas: ToolSchemas::default(),
                single_tool_call: false,
                eos_token_ids,
                logprobs: logprobs.is_wanted,
                tokens_as_ids: fields.return_tokens_as_token_ids.unwrap_or(false),
            },
            is_stream,
            include_usage: options.include_usage.unwrap_or(false),
            continuous_usage: options.include_usage.unwrap_or(false)
                && options.continuous_usage_stats.unwrap_or(false),
            return_token_ids: fields.return_token_ids.unwrap_or(false),
            return_weight_versions: fields.return_weight_versions.unwrap_or(false),
        })
    }
}

/// For requests without a seed: they ask for no repetition.
fn random_seed() -> u64 {
    uuid::Uuid::new_v4().as_u64_pair().0
}

fn is_number(value: &Value, neutral: f64) -> bool {
    value.as_f64() == Some(neutral)
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::Bool(is_set) => !is_set,
        _ => false,
    }
}

/// A field that would change the result, and when it does not.
type Neutral = (&'static str, fn(&Value) -> bool);

const UNSUPPORTED: &[Neutral] = &[
    ("frequency_penalty", |value| is_number(value, 0.0)),
    ("presence_penalty", |value| is_number(value, 0.0)),
    ("repetition_penalty", |value| is_number(value, 1.0)),
    ("length_penalty", |value| is_number(value, 1.0)),
    ("min_p", |value| is_number(value, 0.0)),
    ("min_tokens", |value| is_number(value, 0.0)),
    ("best_of", |value| is_number(value, 1.0)),
    ("prompt_logprobs", |value| is_number(value, 0.0)),
    ("logit_bias", is_empty),
    ("bad_words", is_empty),
    ("allowed_token_ids", is_empty),
    ("logprob_token_ids", is_empty),
    ("use_beam_search", is_empty),
    ("structured_outputs", is_empty),
    ("guided_json", |_| false),
    ("guided_regex", |_| false),
    ("guided_choice", |_| false),
    ("guided_grammar", |_| false),
    ("response_format", |value| value["type"] == "text"),
    ("echo", is_empty),
    ("suffix", |value| value == ""),
    ("continue_final_message", is_empty),
    ("add_special_tokens", is_empty),
    ("chat_template", |_| false),
    ("documents", is_empty),
    ("truncate_prompt_tokens", |value| is_number(value, -1.0)),
    ("thinking_token_budget", |_| false),
    ("function_call", |value| value == "none"),
    ("functions", is_empty),
];

fn refuse_unsupported(body: &Map<String, Value>) -> Result<(), ApiError> {
    for (name, is_neutral) in UNSUPPORTED {
        if let Some(value) = body.get(*name).filter(|value| !value.is_null() && !is_neutral(value)) {
            let message = format!("{name} = {value} is not supported by the embedded engine; leave it out");
            return Err(ApiError::bad_field(name, message));
        }
    }
    Ok(())
}
