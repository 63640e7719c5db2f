//! SGLang's native `/generate`: replies as [`chat::Reply`](Reply), whose text is what was generated, unparsed.
//!
//! A stream repeats everything so far in each event (cumulative), or sends only what is new (incremental, a server
//! flag); nothing in an event says which, and totals are totals in both. The number of ids in an event tells: with
//! everything so far it is `completion_tokens`, with only what is new it is what `completion_tokens` grew by.
//!
//! The prompt's ids are `prompt_token_ids` where they were asked for, else those beside the log-probs of the whole
//! prompt (`logprob_start_len` 0).

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::protocol::chat::{
    Choice, Fed, Reply, ReplyError, ReplyUsage, StopMatch, VersionSpan, error_message, label, pairs, raw_text,
};
use crate::protocol::json;

/// Why a reply of `/generate` cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    #[error(transparent)]
    Json(#[from] ReplyError),
    #[error("output {index} of the reply came with {ids} ids where {new} new and {total} in all were told")]
    Ids { index: u16, ids: usize, new: usize, total: usize },
    #[error("output {index} of the reply has no `meta_info`: it is none of /generate")]
    Other { index: u16 },
    #[error("output {index} of the reply does not go on where it was: its ids changed")]
    Rewritten { index: u16 },
}

/// How a stream's events are to be put together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Cumulative,
    Incremental,
}

/// Puts a reply together from a body, or from a stream's events.
#[derive(Debug, Clone, Default)]
pub struct GenerateReply {
    reply: Reply,
    form: Option<Form>,
    /// `completion_tokens` of each output so far.
    totals: BTreeMap<u16, u64>,
    /// Ids of each output so far.
    counts: BTreeMap<u16, usize>,
    /// `prompt_tokens` and `cached_tokens` of each output.
    prompts: BTreeMap<u16, (u64, Option<u64>)>,
    /// Outputs that share a prompt; 0: all do.
    each: u64,
    /// The output of which the last event told all that the earlier ones did.
    repeated: Option<u16>,
}

impl GenerateReply {
    /// A reply to several prompts, with this many outputs of each. The prompt's ids are in its outputs.
    #[must_use]
    pub fn of_prompts(each: u64) -> Self {
        Self { each: each.max(1), ..Self::default() }
    }

    /// The output of which the last event told all that the earlier ones did: without those before it the reply reads
    /// the same.
    #[must_use]
    pub const fn repeated(&self) -> Option<u16> {
        self.repeated
    }

    /// Whether each event tells everything so far; `None`: no event has shown it yet.
    #[must_use]
    pub fn is_cumulative(&self) -> Option<bool> {
        self.form.map(|form| form == Form::Cumulative)
    }

    /// The reply so far.
    #[must_use]
    pub const fn reply(&self) -> &Reply {
        &self.reply
    }

    /// Lets go of what grows with the reply, and reads the same when its events are read again. Where each event tells
    /// everything so far it stays: the next one is compared with it.
    pub fn forget(&mut self) {
        if self.form == Some(Form::Incremental) {
            self.reply.forget();
        }
    }

    /// The reply so far.
    #[must_use]
    pub fn into_reply(self) -> Reply {
        self.reply
    }

    /// Adds a whole body (one output, or the array of several) or the data of a stream's event (not `[DONE]`).
    ///
    /// # Errors
    /// [`GenerateError`] when it is not such a reply, or contradicts what came before; of its own outputs, those
    /// before the bad one were added.
    pub fn feed(&mut self, data: &[u8]) -> Result<Fed, GenerateError> {
        let clean;
        let view = match read(data) {
            Ok(view) => view,
            Err(error) => match json::without_bad_numbers(data) {
                Some(copy) => {
                    clean = copy;
                    read(&clean).map_err(ReplyError::from)?
                }
                None => return Err(ReplyError::from(error).into()),
            },
        };
        let mut fed = Fed::default();
        self.repeated = None;
        let is_alone = matches!(view, View::Output(_));
        let outputs = match view {
            View::Outputs(outputs) => outputs.into_iter().enumerate().collect(),
            View::Output(output) => vec![(0, *output)],
        };
        for (position, output) in outputs {
            if let Some(error) = output.error {
                fed.has_error = true;
                let message = error_message(error);
                self.reply.error.get_or_insert(message);
                continue;
            }
            let index = output.index.or(u16::try_from(position).ok()).unwrap_or(0);
            fed.has_finish |= self.add(index, output)?;
        }
        self.repeated = self.repeated.filter(|_| is_alone);
        Ok(fed)
    }

    /// Adds one output; true if it is over.
    fn add(&mut self, index: u16, output: Output<'_>) -> Result<bool, GenerateError> {
        let meta = output.meta_info.ok_or(GenerateError::Other { index })?;
        let pairs = meta.output_token_logprobs.map(|list| pairs(&list));
        let ids = output.output_ids.or_else(|| {
            // Older servers have the ids beside the log-probs only.
            pairs.as_deref()?.iter().map(|(id, _)| *id).collect()
        });
        let known = self.reply.choices.entry(index).or_default();
        let before = self.counts.get(&index).copied().unwrap_or(0);
        let was_over = known.finish_reason.is_some();
        let total_before = self.totals.get(&index).copied().unwrap_or(0);
        let count = ids.as_ref().map_or(0, Vec::len);
        let total = match meta.completion_tokens {
            Some(total) => total,
            None if before == 0 => count as u64,
            None => return Err(GenerateError::Ids { index, ids: count, new: 0, total: before }),
        };
        let form = form(self.form, index, ids.as_deref(), before, total_before, total)?;
        if form.is_some() {
            self.form = form;
        }
        let values = pairs.map(|pairs| values(&pairs, ids.as_deref()));
        let mut is_all = values.is_some() || known.logprobs.is_none();
        let count = match form {
            Some(Form::Incremental) => {
                known.text.push_str(&output.text.unwrap_or_default());
                before + append(known, ids, values, before, total)
            }
            // Both forms of the first event are the same; so are those of the abort of one token, but for its text.
            Some(Form::Cumulative) | None => {
                let told = output.text.filter(|text| form.is_some() || before == 0 || !text.is_empty());
                is_all &= told.is_some() || known.text.is_empty();
                let text = told.unwrap_or_else(|| known.text.clone());
                let goes_on = match (&known.token_ids, &ids) {
                    (Some(before), Some(ids)) => ids.starts_with(before),
                    (Some(_), None) => false,
                    (None, _) => text.starts_with(&known.text),
                };
                if !goes_on {
                    return Err(GenerateError::Rewritten { index });
                }
                known.text = text;
                known.token_ids = ids.or(known.token_ids.take());
                known.logprobs = values.or_else(|| {
                    // Ids that come without log-probs after ids that had them have none.
                    let mut earlier = known.logprobs.take()?;
                    earlier.resize(known.token_ids.as_ref().map_or(0, Vec::len), None);
                    Some(earlier)
                });
                known.token_ids.as_ref().map_or(0, Vec::len)
            }
        };
        self.counts.insert(index, count);
        self.totals.insert(index, total);
        if let Some(spans) = meta.weight_versions {
            let span = |span: VersionView| {
                Some(VersionSpan { version: label(span.version)?, start: span.start, end: span.end })
            };
            known.weight_versions = Some(spans.into_iter().filter_map(span).collect());
        } else {
            is_all &= known.weight_versions.is_none();
        }
        let version = meta.weight_version.and_then(label);
        let routed = meta.routed_experts.map(raw_text);
        is_all &= version.is_some() || known.weight_version.is_none();
        is_all &= routed.is_some() || known.routed_experts.is_none();
        known.weight_version = version.or(known.weight_version.take());
        known.routed_experts = routed.or(known.routed_experts.take());
        known.routing_start = meta.routed_experts_start_len.or(known.routing_start);
        let is_over = meta.finish_reason.is_some();
        if let Some(reason) = meta.finish_reason {
            known.stop_match = reason.matched.and_then(stop_match);
            // An abort is never a stop: its message is the reply's error.
            if reason.kind == "abort"
                && let Some(message) = reason.message
            {
                self.reply.error.get_or_insert(message);
            }
            known.finish_reason = Some(reason.kind);
        }
        let place =
            if self.each == 0 { &mut self.reply.prompt_token_ids } else { &mut known.prompt_token_ids };
        let scored = || {
            let ids = list_ids(&meta.input_token_logprobs?);
            ids.filter(|ids| !ids.is_empty() && Some(ids.len() as u64) == meta.prompt_tokens)
        };
        let prompt = output.prompt_token_ids.or_else(scored);
        is_all &= place.is_none() || *place == prompt;
        *place = place.take().or(prompt);
        is_all &= meta.prompt_tokens.is_some() || !self.prompts.contains_key(&index);
        let is_cumulative = form == Some(Form::Cumulative) || (form.is_none() && before == 0);
        self.repeated = (is_cumulative && is_all && !was_over).then_some(index);
        self.reply.id = self.reply.id.take().or(meta.id);
        self.prompts.extend(meta.prompt_tokens.map(|tokens| (index, (tokens, meta.cached_tokens))));
        self.reply.usage = self.usage(meta.reasoning_tokens);
        Ok(is_over)
    }

    /// Usage as the chat endpoint counts it: each prompt once, the outputs' tokens together.
    fn usage(&self, reasoning_tokens: Option<u64>) -> Option<ReplyUsage> {
        let mut prompts: BTreeMap<u64, (u64, Option<u64>)> = BTreeMap::new();
        for (index, told) in &self.prompts {
            prompts.entry(u64::from(*index).checked_div(self.each).unwrap_or(0)).or_insert(*told);
        }
        let (mut prompt_tokens, mut cached_tokens) = prompts.pop_first()?.1;
        for (tokens, cached) in prompts.into_values() {
            prompt_tokens = prompt_tokens.saturating_add(tokens);
            cached_tokens = cached_tokens.zip(cached).map(|(a, b)| a.saturating_add(b));
        }
        let completion_tokens = self.totals.values().fold(0, |sum: u64, total| sum.saturating_add(*total));
        Some(ReplyUsage { prompt_tokens, completion_tokens, cached_tokens, reasoning_tokens })
    }
}

/// The form that this event shows, or that earlier ones showed; `None`: it could be either.
fn form(
    known: Option<Form>,
    index: u16,
    ids: Option<&[u32]>,
    before: usize,
    total_before: u64,
    total: u64,
) -> Result<Option<Form>, GenerateError> {
    let Some(ids) = ids else {
        return Ok(known);
    };
    let count = ids.len() as u64;
    let new = total.saturating_sub(total_before);
    // The event of an abort repeats the last id in the incremental form: what is too much is left out later.
    let may_be_incremental = count == new || (new == 0 && count == 1 && before > 0);
    let form = match (count == total, may_be_incremental) {
        // The first event, or an abort that repeats the only id.
        (true, true) => known,
        (true, false) => Some(Form::Cumulative),
        (false, true) => Some(Form::Incremental),
        (false, false) => None,
    };
    let is_told = (count == total) || may_be_incremental;
    if !is_told || (known.is_some() && form != known) {
        let (new, total) = (usize::try_from(new).unwrap_or(0), usize::try_from(total).unwrap_or(0));
        return Err(GenerateError::Ids { index, ids: ids.len(), new, total });
    }
    Ok(form)
}

/// Adds what is new of an incremental event, up to `total` tokens in all, and tells how many ids that are.
fn append(
    known: &mut Choice,
    ids: Option<Vec<u32>>,
    values: Option<Vec<Option<f32>>>,
    before: usize,
    total: u64,
) -> usize {
    let room = usize::try_from(total).unwrap_or(usize::MAX).saturating_sub(before);
    let Some(ids) = ids else {
        return 0;
    };
    let added = ids.len().min(room);
    known.token_ids.get_or_insert_default().extend_from_slice(&ids[..added]);
    if values.is_some() || known.logprobs.is_some() {
        let values = values.unwrap_or_default();
        let all = known.logprobs.get_or_insert_with(|| vec![None; before]);
        all.extend((0..added).map(|at| values.get(at).copied().flatten()));
    }
    added
}

/// Log-probs in the order of `ids`; `None` where the pair is of another id.
fn values(pairs: &[(Option<u32>, Option<f32>)], ids: Option<&[u32]>) -> Vec<Option<f32>> {
    let Some(ids) = ids else {
        return Vec::new();
    };
    let value = |(at, id): (usize, &u32)| match pairs.get(at) {
        Some((of, value)) if *of == Some(*id) => *value,
        _ => None,
    };
    ids.iter().enumerate().map(value).collect()
}

/// The ids of a list of log-probs, where each has one.
fn list_ids(list: &[Vec<&RawValue>]) -> Option<Vec<u32>> {
    pairs(list).into_iter().map(|(id, _)| id).collect()
}

fn stop_match(matched: Matched) -> Option<StopMatch> {
    match matched {
        Matched::Token(id) => Some(StopMatch::Token(id)),
        Matched::Text(text) => Some(StopMatch::Text(text)),
        Matched::Other(_) => None,
    }
}

enum View<'a> {
    Outputs(Vec<Output<'a>>),
    Output(Box<Output<'a>>),
}

fn read(data: &[u8]) -> Result<View<'_>, serde_json::Error> {
    if data.trim_ascii_start().starts_with(b"[") {
        serde_json::from_slice(data).map(View::Outputs)
    } else {
        serde_json::from_slice(data).map(Box::new).map(View::Output)
    }
}

#[derive(Deserialize)]
struct Output<'a> {
    index: Option<u16>,
    text: Option<String>,
    output_ids: Option<Vec<u32>>,
    prompt_token_ids: Option<Vec<u32>>,
    #[serde(borrow)]
    meta_info: Option<Meta<'a>>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Meta<'a> {
    id: Option<String>,
    finish_reason: Option<FinishReason>,
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    cached_tokens: Option<u64>,
    reasoning_tokens: Option<u64>,
    weight_version: Option<Value>,
    weight_versions: Option<Vec<VersionView>>,
    #[serde(borrow)]
    routed_experts: Option<&'a RawValue>,
    /// Of a reply in several parts.
    routed_experts_start_len: Option<u64>,
    #[serde(borrow)]
    output_token_logprobs: Option<Vec<Vec<&'a RawValue>>>,
    #[serde(borrow)]
    input_token_logprobs: Option<Vec<Vec<&'a RawValue>>>,
}

#[derive(Deserialize)]
struct FinishReason {
    #[serde(rename = "type")]
    kind: String,
    matched: Option<Matched>,
    message: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Matched {
    Token(u32),
    Text(String),
    Other(serde::de::IgnoredAny),
}

#[derive(Deserialize)]
struct VersionView {
    version: Value,
    start: u32,
    end: u32,
}

#[cfg(test)]
#[path = "sglang_generate_tests.rs"]
mod tests;
