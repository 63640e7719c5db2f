//! SGLang's native protocol, `POST /generate`: the request as lego needs it, and what lego caused cut out of the
//! original bytes of a reply. Sampling parameters are in an object of their own; all other bytes stay.

use bytes::Bytes;
use serde_json::Value;

use crate::protocol::body::{Body, BodyError};
use crate::protocol::chat::{Cut, CutError, CutReply};
use crate::protocol::completions::{Prompt, prompts};
use crate::protocol::json::{self, Edit, Member, ScanError};

/// Why a body is not a request of this protocol.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    #[error(transparent)]
    Body(#[from] BodyError),
    #[error(
        "the request body needs `text` (a text or a list of them), `input_ids` (token ids or a list of such lists) or \
         `input_embeds`"
    )]
    NoPrompt,
    #[error("the request body's `sampling_params` must be an object, or a list of one for each prompt")]
    Sampling,
}

/// A request: its bytes, and what lego reads of them.
#[derive(Debug, Clone)]
pub struct Request {
    body: Body,
    /// Not the protocol's: what a proxy in front of several servers goes by.
    pub model: Option<String>,
    pub is_stream: bool,
    /// Outputs asked for, of each prompt.
    pub n: u64,
    /// In order; empty where the prompts are embeddings.
    pub prompts: Vec<Prompt>,
    /// Number of prompts.
    count: u64,
    /// `return_logprob` is true, or says it for each prompt.
    pub asks_logprobs: bool,
    /// Something else than the policy's own distribution decides tokens: a grammar.
    pub is_constrained: bool,
}

impl Request {
    /// Reads a body.
    ///
    /// # Errors
    /// [`RequestError`] says what is wrong with it.
    pub fn parse(body: Bytes) -> Result<Self, RequestError> {
        let body = Body::parse(body)?;
        let told = |name: &str| body.raw(name).filter(|value| *value != b"null");
        let (prompts, count) = match (told("text").or(told("input_ids")), told("input_embeds")) {
            (Some(raw), _) => {
                let prompts = prompts(raw).ok_or(RequestError::NoPrompt)?;
                let count = prompts.len();
                (prompts, count)
            }
            (None, Some(raw)) => (Vec::new(), embedded(raw)),
            (None, None) => return Err(RequestError::NoPrompt),
        };
        let sampling = sampling_of_each(&body)?;
        let first = sampling.first().map(|raw| serde_json::from_slice::<Value>(raw).unwrap_or_default());
        let first = first.unwrap_or_default();
        let guides = ["json_schema", "regex", "ebnf", "structural_tag"];
        let is_guided = |raw: &&[u8]| {
            let value: Value = serde_json::from_slice(raw).unwrap_or_default();
            guides.iter().any(|name| !value[name].is_null())
        };
        Ok(Self {
            model: body.get("model").and_then(|model| model.as_str().map(str::to_owned)),
            is_stream: body.is_true("stream"),
            n: first["n"].as_u64().unwrap_or(1),
            prompts,
            count: count as u64,
            asks_logprobs: body.get("return_logprob").is_some_and(|asked| asked != Value::Bool(false)),
            is_constrained: sampling.iter().any(is_guided),
            body,
        })
    }

    /// The body, to be read further.
    #[must_use]
    pub const fn object(&self) -> &Body {
        &self.body
    }

    /// Number of outputs that the reply has: `n` of each prompt.
    #[must_use]
    pub const fn choices(&self) -> u64 {
        self.n.saturating_mul(self.count)
    }

    /// A sampling parameter; `None` if it is absent or null, or not the same for all prompts.
    #[must_use]
    pub fn sampling(&self, name: &str) -> Option<Value> {
        let all = sampling_of_each(&self.body).ok()?;
        let mut values = all.iter().map(|raw| {
            let members = json::members(raw, 0).ok()?;
            let value = json::find(raw, &members, name)?.text(raw);
            serde_json::from_slice::<Value>(value).ok().filter(|value| !value.is_null())
        });
        let first = values.next()??;
        values.all(|value| value.as_ref() == Some(&first)).then_some(first)
    }

    /// True if a sampling parameter is given for any prompt.
    #[must_use]
    pub fn has_sampling(&self, name: &str) -> bool {
        sampling_of_each(&self.body).unwrap_or_default().iter().any(|raw| {
            let members = json::members(raw, 0).unwrap_or_default();
            json::find(raw, &members, name).is_some_and(|member| member.text(raw) != b"null")
        })
    }

    /// The body with members set and removed, and sampling parameters set and removed for every prompt. All other
    /// bytes stay.
    ///
    /// # Errors
    /// [`ScanError`] cannot happen for a parsed request; it is passed on rather than hidden.
    pub fn edited(
        &self,
        (set, remove): (&[(&str, String)], &[&str]),
        (set_sampling, remove_sampling): (&[(&str, String)], &[&str]),
    ) -> Result<Bytes, ScanError> {
        let mut set = set.to_vec();
        if !set_sampling.is_empty() || !remove_sampling.is_empty() {
            let edited = match self.body.raw("sampling_params").filter(|raw| *raw != b"null") {
                Some(list) if list.starts_with(b"[") => {
                    let mut edits = Vec::new();
                    for span in json::elements(list, 0)? {
                        let one = json::set_members(&list[span.clone()], set_sampling, remove_sampling)?;
                        edits.push(Edit::replace(span, one));
                    }
                    json::apply(list, &edits)
                }
                own => json::set_members(own.unwrap_or(b"{}"), set_sampling, remove_sampling)?,
            };
            set.push(("sampling_params", String::from_utf8_lossy(&edited).into_owned()));
        }
        self.body.edited(&set, remove)
    }
}

/// The objects of sampling parameters; none: all are the server's.
fn sampling_of_each(body: &Body) -> Result<Vec<&[u8]>, RequestError> {
    let Some(raw) = body.raw("sampling_params").filter(|raw| *raw != b"null") else {
        return Ok(Vec::new());
    };
    let all = if raw.starts_with(b"[") {
        let spans = json::elements(raw, 0).map_err(|_| RequestError::Sampling)?;
        spans.into_iter().map(|span| &raw[span]).collect()
    } else {
        vec![raw]
    };
    let are_objects = all.iter().all(|one| one.starts_with(b"{"));
    if are_objects && !all.is_empty() { Ok(all) } else { Err(RequestError::Sampling) }
}

/// Number of prompts that are given as embeddings: a list of vectors each.
fn embedded(raw: &[u8]) -> usize {
    let all = json::elements(raw, 0).unwrap_or_default();
    let is_list = all.first().is_some_and(|first| {
        let of_first = json::elements(raw, first.start).unwrap_or_default();
        of_first.first().is_some_and(|vector| raw[vector.start] == b'[')
    });
    if is_list { all.len() } else { 1 }
}

/// Members of `meta_info` that are there only with `return_logprob`.
const OF_LOGPROBS: [&str; 12] = [
    "input_token_logprobs",
    "input_token_logprobs_length",
    "input_top_logprobs",
    "input_top_logprobs_length",
    "input_token_ids_logprobs",
    "input_token_ids_logprobs_length",
    "output_token_logprobs",
    "output_token_logprobs_length",
    "output_top_logprobs",
    "output_top_logprobs_length",
    "output_token_ids_logprobs",
    "output_token_ids_logprobs_length",
];

/// What to cut out of a stream's event or a whole body. The engine leaves out what nobody asked for.
///
/// # Errors
/// [`CutError`] when the text is no JSON object and no list of them.
pub fn cut(text: &[u8], wanted: &Cut) -> Result<CutReply, CutError> {
    let mut edits = Vec::new();
    if text.trim_ascii_start().starts_with(b"[") {
        for output in json::elements(text, 0)? {
            cut_output(text, output.start, wanted, &mut edits)?;
        }
    } else {
        cut_output(text, 0, wanted, &mut edits)?;
    }
    edits.sort_by_key(|edit| edit.span.start);
    Ok(CutReply { edits, is_dropped: false })
}

fn cut_output(text: &[u8], at: usize, wanted: &Cut, edits: &mut Vec<Edit>) -> Result<(), ScanError> {
    let members = json::members(text, at)?;
    let meta = json::find(text, &members, "meta_info").filter(|meta| text[meta.value.start] == b'{');
    if let Some(meta) = meta {
        let fields = json::members(text, meta.value.start)?;
        json::remove_members(&fields, edits, |field| {
            (wanted.logprobs.is_some() && OF_LOGPROBS.iter().any(|name| field.is_named(text, name)))
                || (wanted.routed_experts.is_some() && field.is_named(text, "routed_experts"))
        });
    }
    json::remove_members(&members, edits, |member: &Member| {
        wanted.prompt_token_ids.is_some() && member.is_named(text, "prompt_token_ids")
    });
    Ok(())
}

/// Data of the events of a stream that says what `body` says, without the final `[DONE]`: one event for each output,
/// with its number where there are several.
///
/// # Errors
/// [`ScanError`] if `body` is no reply of this protocol.
pub fn events(body: &[u8]) -> Result<Vec<Bytes>, ScanError> {
    if !body.trim_ascii_start().starts_with(b"[") {
        json::members(body, 0)?;
        return Ok(vec![json::one_line(body)]);
    }
    let mut events = Vec::new();
    for (index, output) in json::elements(body, 0)?.into_iter().enumerate() {
        let members = json::members(body, output.start)?;
        let output = json::one_line(&body[output]);
        let has_number = json::find(body, &members, "index").is_some();
        match output.strip_prefix(b"{").filter(|_| !has_number && !members.is_empty()) {
            Some(rest) => {
                let mut event = format!("{{\"index\":{index},").into_bytes();
                event.extend_from_slice(rest);
                events.push(event.into());
            }
            None => events.push(output),
        }
    }
    Ok(events)
}

#[cfg(test)]
#[path = "generate_tests.rs"]
mod tests;
