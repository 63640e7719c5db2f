//! The events of a later segment in the words of the whole reply, and the request for one.

use bytes::Bytes;
use serde_json::{Value, json};

use super::rows::{Joined, Rows};
use crate::protocol::sse::Event;
use crate::record::ClientApi;
use crate::upstream::vllm_generate;

/// What became of an event.
pub(super) enum Segment {
    /// It is told, in these bytes.
    Goes(Bytes),
    /// The upstream gave the reply up. `told`: what it brought by then; `original`: the event as it came.
    GivenUp { told: Bytes, original: Bytes },
}

/// What requests and events are worded in.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Wording {
    Completions,
    /// vLLM's token endpoint: its events are those of completions.
    Tokens,
    /// SGLang's own.
    Native,
}

impl Wording {
    pub(super) const fn of(upstream_api: ClientApi) -> Self {
        match upstream_api {
            ClientApi::SglangGenerate => Self::Native,
            ClientApi::VllmGenerate => Self::Tokens,
            _ => Self::Completions,
        }
    }

    const fn prompt(self) -> &'static str {
        match self {
            Self::Completions => "prompt",
            Self::Tokens => "token_ids",
            Self::Native => "input_ids",
        }
    }

    /// The most tokens, the least, and the seed.
    const fn sampling_names(self) -> [&'static str; 3] {
        match self {
            Self::Completions | Self::Tokens => ["max_tokens", "min_tokens", "seed"],
            Self::Native => ["max_new_tokens", "min_new_tokens", "sampling_seed"],
        }
    }

    /// Where a request has them; `None`: at its top.
    const fn sampling(self) -> Option<&'static str> {
        match self {
            Self::Completions => None,
            Self::Tokens | Self::Native => Some("sampling_params"),
        }
    }

    /// What says at which position the routing begins.
    const fn routing_start(self) -> &'static str {
        match self {
            Self::Completions | Self::Tokens => vllm_generate::START,
            Self::Native => "routed_experts_start_len",
        }
    }
}

/// The member of the same name, in both wordings.
const ROUTING: &str = "routed_experts";

/// A reply so far.
pub(super) struct Rewriting {
    /// The first request.
    request: Value,
    wording: Wording,
    /// Ids that end a turn.
    ends: Vec<u32>,
    sampled: Vec<u32>,
    is_finished: bool,
    /// This is not the first segment.
    is_later: bool,
    /// Ids that earlier segments sampled.
    begun_at: usize,
    /// Weights of those; `None`: not all are known.
    spans: Option<Vec<(String, usize, usize)>>,
    /// Weights of this segment as the engine told them, counted from its beginning.
    told: Option<Vec<(String, usize, usize)>>,
    /// By lego's clock, when this segment was asked for.
    clock: Option<String>,
    /// Weights of a segment are known by the clock alone, and the engine has told others than the clock. Both together
    /// are two ways of counting.
    is_by_clock: bool,
    is_told_otherwise: bool,
    rows: Rows,
    /// The upstream told of an error.
    has_error: bool,
    /// SGLang: text and log-probs of earlier segments, which each event repeats.
    text: String,
    logprobs: Vec<Value>,
    /// The same with this segment's.
    all_text: String,
    all_logprobs: Vec<Value>,
    /// SGLang: each event has only what is new.
    is_incremental: bool,
}

impl Rewriting {
    /// `None`: such a reply cannot go on. A stop text may lie across two segments, where no engine finds it; and several
    /// outputs are several prompts.
    pub(super) fn of(
        request: &Bytes,
        wording: Wording,
        clock: Option<String>,
        ends: &[u32],
        rows: Rows,
    ) -> Option<Self> {
        let request: Value = serde_json::from_slice(request).ok()?;
        let sampling = wording.sampling().map_or(&request, |name| &request[name]);
        let has_stop = match &sampling["stop"] {
            Value::Null => false,
            Value::Array(list) => !list.is_empty(),
            _ => true,
        };
        let is_one = sampling["n"].as_u64().is_none_or(|n| n == 1);
        let start = sampling[vllm_generate::START].as_u64().and_then(|start| usize::try_from(start).ok());
        let rows = rows.starting_at(start.unwrap_or(0));
        let may_go_on = !has_stop && is_one && sampling["stop_regex"].is_null();
        (request["stream"] == true && may_go_on).then(|| Self {
            request,
            wording,
            rows,
            has_error: false,
            ends: ends.to_vec(),
            sampled: Vec::new(),
            is_finished: false,
            is_later: false,
            begun_at: 0,
            spans: Some(Vec::new()),
            told: None,
            clock,
            is_by_clock: false,
            is_told_otherwise: false,
            text: String::new(),
            logprobs: Vec::new(),
            all_text: String::new(),
            all_logprobs: Vec::new(),
            is_incremental: false,
        })
    }

    /// Ids so far.
    pub(super) const fn sampled(&self) -> usize {
        self.sampled.len()
    }

    /// Ids of earlier segments.
    pub(super) const fn begun_at(&self) -> usize {
        self.begun_at
    }

    /// The reply ended by itself.
    pub(super) const fn is_finished(&self) -> bool {
        self.is_finished
    }

    /// Takes an event with data. `clock`: the version by lego's clock now.
    pub(super) fn event(&mut self, event: &Event, clock: &dyn Fn() -> Option<String>) -> Segment {
        let data = event.data();
        // Older releases say so of a reply that they gave up, and nothing else.
        let is_silent_end = self.wording == Wording::Tokens && data == "[DONE]" && !self.has_error;
        if is_silent_end && !self.has_ended() {
            return Segment::GivenUp { told: Bytes::new(), original: event.raw.clone() };
        }
        let Ok(mut value) = serde_json::from_slice::<Value>(&data) else {
            return Segment::Goes(event.raw.clone());
        };
        self.has_error |= !value["error"].is_null();
        let is_given_up = match self.wording {
            Wording::Native => self.native(&mut value, clock),
            Wording::Completions | Wording::Tokens => self.completions(&mut value, clock),
        };
        let told = || Bytes::from(format!("data: {value}\n\n"));
        if is_given_up {
            return Segment::GivenUp { told: told(), original: event.raw.clone() };
        }
        // What is all in the engine's own words stays so.
        Segment::Goes(if self.is_later { told() } else { event.raw.clone() })
    }

    /// True if the reply was given up.
    fn completions(&mut self, value: &mut Value, clock: &dyn Fn() -> Option<String>) -> bool {
        let begun = self.begun_at;
        if let Some(usage) = value.get_mut("usage").filter(|usage| usage.is_object()) {
            shift(usage, "completion_tokens", begun as i64);
            shift(usage, "prompt_tokens", -(begun as i64));
            if begun > 0 {
                usage["prompt_tokens_details"] = Value::Null;
            }
        }
        // The token endpoint has them beside the choices.
        let beside = ids(&value["prompt_token_ids"]);
        if self.is_later
            && let Some(value) = value.as_object_mut()
        {
            value.remove("prompt_token_ids");
        }
        let Some(choice) = value["choices"].as_array_mut().and_then(|list| list.first_mut()) else {
            return false;
        };
        let told = [beside, ids(&choice["prompt_token_ids"])].concat();
        let routed = taken(choice, ROUTING);
        if self.is_later {
            taken(choice, "prompt_token_ids");
        }
        if self.is_later && !told.is_empty() {
            let prompt = ids(&self.request[self.wording.prompt()]);
            let is_sent = told.len() == prompt.len() + begun
                && told.starts_with(&prompt)
                && told.ends_with(&self.sampled[..begun]);
            if !is_sent {
                let message =
                    "the engine went on from another prompt than it was sent (prompt_token_ids differ)";
                *value = json!({"error": {"message": message, "type": "upstream_error"}});
                return false;
            }
        }
        let choice = &mut value["choices"][0];
        self.sampled.extend(ids(&choice["token_ids"]));
        if let Some(spans) = spans(&choice["weight_versions"]) {
            self.tell(spans);
        }
        if choice["finish_reason"] == "abort" && !self.has_ended() {
            self.rows.take(&routed, begun, self.sampled.len(), true);
            choice["finish_reason"] = Value::Null;
            // What was held back till then is of ids that came before.
            if ids(&choice["token_ids"]).is_empty() {
                choice["text"] = Value::from("");
            }
            taken(choice, "weight_versions");
            return true;
        }
        let is_last = choice["finish_reason"].is_string();
        self.is_finished |= is_last;
        if self.is_later && is_last {
            self.rows.take(&routed, begun, self.sampled.len(), false);
            choice["weight_versions"] = self.told_of_all(clock);
            self.tell_rows(choice);
        }
        false
    }

    fn native(&mut self, value: &mut Value, clock: &dyn Fn() -> Option<String>) -> bool {
        let begun = self.begun_at;
        let new = ids(&value["output_ids"]);
        let meta = &value["meta_info"];
        let total = meta["completion_tokens"].as_u64().map_or(new.len(), |total| total as usize);
        let known = self.sampled.len() - begun;
        self.is_incremental |= known > 0 && new.len() < total;
        let mut text = value["text"].as_str().unwrap_or_default().to_owned();
        let logprobs = meta["output_token_logprobs"].as_array().cloned().unwrap_or_default();
        // The event of an abort repeats the last id.
        let fresh = total.saturating_sub(known).min(new.len());
        // What was held back till then is of ids that came before.
        if fresh == 0 && meta["finish_reason"]["type"] == "abort" && !self.has_ended() {
            let before = if self.is_incremental { "" } else { &self.all_text[self.text.len()..] };
            before.clone_into(&mut text);
        }
        let (fresh_ids, fresh_logprobs) = (
            new[new.len() - fresh..].to_vec(),
            logprobs[logprobs.len() - fresh.min(logprobs.len())..].to_vec(),
        );
        if self.is_incremental {
            self.sampled.extend(&fresh_ids);
            self.all_logprobs.extend_from_slice(&fresh_logprobs);
            self.all_text += &text;
        } else {
            self.sampled.truncate(begun);
            self.sampled.extend(&new);
            self.all_logprobs = [self.logprobs.as_slice(), &logprobs].concat();
            self.all_text = format!("{}{text}", self.text);
        }
        let label = meta["weight_version"].as_str().filter(|label| *label != "default").map(str::to_owned);
        let count = self.sampled.len() - begun;
        if let Some(told) = spans(&meta["weight_versions"]).or_else(|| Some(vec![(label?, 0, count)])) {
            self.tell(told);
        }
        let is_given_up = meta["finish_reason"]["type"] == "abort" && !self.has_ended();
        self.is_finished |= !is_given_up && meta["finish_reason"].is_object();
        if !self.is_later && !is_given_up {
            return false;
        }
        let all = if is_given_up { None } else { Some(self.told_of_all(clock)) };
        let (ids, logprobs, text) = match self.is_incremental {
            true => (fresh_ids.as_slice(), &fresh_logprobs, text.as_str()),
            false => (self.sampled.as_slice(), &self.all_logprobs, self.all_text.as_str()),
        };
        value["output_ids"] = json!(ids);
        value["text"] = Value::from(text);
        let meta = &mut value["meta_info"];
        meta["output_token_logprobs"] = json!(logprobs);
        meta["output_token_logprobs_length"] = self.sampled.len().into();
        meta["completion_tokens"] = self.sampled.len().into();
        shift(meta, "prompt_tokens", -(begun as i64));
        let is_last = meta["finish_reason"].is_object();
        let routed = taken(meta, ROUTING);
        if is_last {
            self.rows.take(&routed, begun, self.sampled.len(), is_given_up);
        }
        taken(meta, "weight_version");
        taken(meta, "weight_versions");
        if let Some(all) = all {
            meta["weight_versions"] = all;
        }
        if is_given_up {
            meta["finish_reason"] = Value::Null;
        } else if is_last {
            self.tell_rows(meta);
        }
        is_given_up
    }

    /// Tells the rows of the whole where those of a segment stood.
    fn tell_rows(&self, place: &mut Value) {
        if let Some(Joined { text, start }) = self.rows.joined(self.sampled.len()) {
            place[ROUTING] = text.into();
            place[self.wording.routing_start()] = start.into();
        }
    }

    /// The model has ended its turn, or the engine the reply: what is told of an abort behind it changes nothing.
    fn has_ended(&self) -> bool {
        self.is_finished || self.sampled.last().is_some_and(|last| self.ends.contains(last))
    }

    /// The weights of the whole as an engine would tell them; no spans at all, which tile nothing, where those of a part
    /// are not known.
    fn told_of_all(&mut self, clock: &dyn Fn() -> Option<String>) -> Value {
        self.segment_now(clock).and_then(|told| self.joined(&told)).unwrap_or_else(|| json!([]))
    }

    /// The engine tells the weights of this segment so far.
    fn tell(&mut self, told: Vec<(String, usize, usize)>) {
        self.is_told_otherwise |= told.iter().any(|(version, ..)| Some(version) != self.clock.as_ref());
        self.told = Some(told);
    }

    /// The weights of the whole, with those of this segment.
    fn joined(&self, told: &[(String, usize, usize)]) -> Option<Value> {
        if self.is_by_clock && self.is_told_otherwise {
            return None;
        }
        let begun = self.begun_at;
        let own = told.iter().map(|(version, start, end)| (version.clone(), start + begun, end + begun));
        let all = self.spans.clone()?.into_iter().chain(own);
        let span = |(version, start, end)| json!({"version": version, "start": start, "end": end});
        Some(all.map(span).collect())
    }

    /// The weights of this segment so far: the engine's words, or lego's clock if it stood still.
    fn segment_now(&mut self, clock: &dyn Fn() -> Option<String>) -> Option<Vec<(String, usize, usize)>> {
        let count = self.sampled.len() - self.begun_at;
        if self.told.is_some() {
            return self.told.clone();
        }
        self.is_by_clock |= count > 0;
        let still = self.clock.clone().filter(|version| Some(version) == clock().as_ref())?;
        Some(vec![(still, 0, count)])
    }

    /// The segment is at its end. `clock`: the version by lego's clock now. False: it brought nothing.
    pub(super) fn end_segment(&mut self, clock: Option<String>) -> bool {
        let count = self.sampled.len() - self.begun_at;
        let told = self.segment_now(&|| clock.clone());
        self.told = None;
        let begun = self.begun_at;
        let tiles =
            |spans: &Vec<(String, usize, usize)>| spans.last().is_some_and(|(_, _, end)| *end == count);
        if count > 0 {
            self.spans = self.spans.take().zip(told.filter(tiles)).map(|(mut spans, told)| {
                spans.extend(
                    told.into_iter().map(|(version, start, end)| (version, start + begun, end + begun)),
                );
                spans
            });
        }
        self.begun_at = self.sampled.len();
        self.text.clone_from(&self.all_text);
        self.logprobs.clone_from(&self.all_logprobs);
        count > 0
    }

    /// Another segment begins. `clock`: the version by lego's clock.
    pub(super) fn begin_segment(&mut self, clock: Option<String>) {
        self.clock = clock;
        self.is_later = true;
    }

    /// The end of the stream, if there is no room for another token.
    pub(super) fn is_full(&self) -> Option<Bytes> {
        (self.left()? == 0).then(|| {
            let mut last =
                json!({"choices": [{"index": 0, "text": "", "token_ids": [], "finish_reason": "length"}]});
            let prompt = self.request[self.wording.prompt()].as_array().map_or(0, Vec::len);
            last["usage"] =
                json!({"prompt_tokens": prompt, "completion_tokens": self.sampled.len(), "total_tokens": 0});
            let is_native = self.wording == Wording::Native;
            if is_native {
                let (ids, logprobs, text) = match self.is_incremental {
                    true => (&[][..], &[][..], ""),
                    false => (self.sampled.as_slice(), self.logprobs.as_slice(), self.text.as_str()),
                };
                last = json!({"text": text, "output_ids": ids, "meta_info": {
                    "finish_reason": {"type": "length"}, "prompt_tokens": prompt,
                    "completion_tokens": self.sampled.len(), "output_token_logprobs": logprobs,
                }});
            }
            let all = self.joined(&[]).unwrap_or_else(|| json!([]));
            let place = if is_native { &mut last["meta_info"] } else { &mut last["choices"][0] };
            place["weight_versions"] = all;
            self.tell_rows(place);
            format!("data: {last}\n\ndata: [DONE]\n\n").into()
        })
    }

    /// Tokens that may still be sampled; `None`: as many as there is room for.
    fn left(&self) -> Option<u64> {
        let [most, ..] = self.wording.sampling_names();
        let sampling = self.wording.sampling().map_or(&self.request, |name| &self.request[name]);
        Some(sampling[most].as_u64()?.saturating_sub(self.sampled.len() as u64))
    }

    /// The request for the next segment. Its seed is another one, so that it does not draw the first one's numbers again.
    pub(super) fn request(&self, prompt: &[u32]) -> Bytes {
        let mut request = self.request.clone();
        request[self.wording.prompt()] = json!([prompt, &self.sampled].concat());
        let left = self.left();
        let [most, least, seed] = self.wording.sampling_names();
        let sampling = match self.wording.sampling() {
            Some(name) => &mut request[name],
            None => &mut request,
        };
        if let Some(left) = left {
            sampling[most] = left.into();
        }
        if let Some(min) = sampling[least].as_u64() {
            sampling[least] = min.saturating_sub(self.sampled.len() as u64).into();
        }
        if let Some(first) = sampling[seed].as_i64() {
            // splitmix64's constant; still in 0..2^63.
            let step = (self.sampled.len() as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            sampling[seed] = ((first as u64).wrapping_add(step) >> 1).into();
        }
        request.to_string().into()
    }
}

fn ids(value: &Value) -> Vec<u32> {
    let ids = value.as_array().into_iter().flatten().filter_map(Value::as_u64);
    ids.filter_map(|id| u32::try_from(id).ok()).collect()
}

fn spans(value: &Value) -> Option<Vec<(String, usize, usize)>> {
    let one = |span: &Value| {
        let at = |name: &str| usize::try_from(span[name].as_u64()?).ok();
        Some((span["version"].as_str()?.to_owned(), at("start")?, at("end")?))
    };
    let spans: Vec<(String, usize, usize)> = value.as_array()?.iter().map(one).collect::<Option<_>>()?;
    // So engines call weights that nobody labelled.
    (!spans.is_empty() && spans.iter().all(|(version, ..)| version != "default")).then_some(spans)
}

/// The member, which the object has no more.
fn taken(object: &mut Value, name: &str) -> Value {
    object.as_object_mut().and_then(|members| members.remove(name)).unwrap_or_default()
}

fn shift(object: &mut Value, name: &str, by: i64) {
    if let Some(count) = object[name].as_i64() {
        object[name] = (count + by).into();
    }
}
