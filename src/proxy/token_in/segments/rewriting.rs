//! The events of a later segment in the words of the whole reply, and the request for one.

use bytes::Bytes;
use serde_json::{Value, json};

use crate::protocol::sse::Event;

/// What became of an event.
pub(super) enum Segment {
    /// It is told, in these bytes.
    Goes(Bytes),
    /// The upstream gave the reply up. `told`: what it brought by then; `original`: the event as it came.
    GivenUp { told: Bytes, original: Bytes },
}

/// A reply so far.
pub(super) struct Rewriting {
    /// The first request.
    request: Value,
    is_native: bool,
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
    pub(super) fn of(request: &Bytes, is_native: bool, clock: Option<String>, ends: &[u32]) -> Option<Self> {
        let request: Value = serde_json::from_slice(request).ok()?;
        let sampling = if is_native { &request["sampling_params"] } else { &request };
        let has_stop = match &sampling["stop"] {
            Value::Null => false,
            Value::Array(list) => !list.is_empty(),
            _ => true,
        };
        let is_one = sampling["n"].as_u64().is_none_or(|n| n == 1);
        (request["stream"] == true && !has_stop && is_one && sampling["stop_regex"].is_null()).then(|| Self {
            request,
            is_native,
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
        let Ok(mut value) = serde_json::from_slice::<Value>(&data) else {
            return Segment::Goes(event.raw.clone());
        };
        let is_given_up =
            if self.is_native { self.native(&mut value, clock) } else { self.completions(&mut value, clock) };
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
        let Some(choice) = value["choices"].as_array_mut().and_then(|list| list.first_mut()) else {
            return false;
        };
        let told = ids(&choice["prompt_token_ids"]);
        if self.is_later
            && let Some(choice) = choice.as_object_mut()
        {
            choice.remove("prompt_token_ids");
            choice.remove("routed_experts");
        }
        if self.is_later && !told.is_empty() {
            let sent = self.request["prompt"].as_array().map_or(0, Vec::len);
            let is_sent = told.len() == sent + begun
                && ids(&self.request["prompt"]) == told[..sent]
                && self.sampled[..begun] == told[sent..];
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
            choice["finish_reason"] = Value::Null;
            // What was held back till then is of ids that came before.
            if ids(&choice["token_ids"]).is_empty() {
                choice["text"] = Value::from("");
            }
            if let Some(choice) = choice.as_object_mut() {
                choice.remove("weight_versions");
                choice.remove("routed_experts");
            }
            return true;
        }
        let is_last = choice["finish_reason"].is_string();
        self.is_finished |= is_last;
        if self.is_later && is_last {
            choice["weight_versions"] = self.told_of_all(clock);
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
        if let Some(meta) = meta.as_object_mut() {
            // Those of this segment's own pass over the tokens before it are not those that they were sampled with.
            for name in ["weight_version", "weight_versions", "routed_experts"] {
                meta.remove(name);
            }
            if let Some(all) = all {
                meta.insert("weight_versions".to_owned(), all);
            }
        }
        if is_given_up {
            value["meta_info"]["finish_reason"] = Value::Null;
        }
        is_given_up
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
            let prompt = self.request["prompt"].as_array().map_or(0, Vec::len);
            last["usage"] =
                json!({"prompt_tokens": prompt, "completion_tokens": self.sampled.len(), "total_tokens": 0});
            if self.is_native {
                let prompt = self.request["input_ids"].as_array().map_or(0, Vec::len);
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
            match self.is_native {
                true => last["meta_info"]["weight_versions"] = all,
                false => last["choices"][0]["weight_versions"] = all,
            }
            format!("data: {last}\n\ndata: [DONE]\n\n").into()
        })
    }

    /// Tokens that may still be sampled; `None`: as many as there is room for.
    fn left(&self) -> Option<u64> {
        let most = match self.is_native {
            true => &self.request["sampling_params"]["max_new_tokens"],
            false => &self.request["max_tokens"],
        };
        Some(most.as_u64()?.saturating_sub(self.sampled.len() as u64))
    }

    /// The request for the next segment. Its seed is another one, so that it does not draw the first one's numbers again.
    pub(super) fn request(&self, prompt: &[u32]) -> Bytes {
        let mut request = self.request.clone();
        request[if self.is_native { "input_ids" } else { "prompt" }] =
            json!([prompt, &self.sampled].concat());
        let left = self.left();
        let (sampling, most, least, seed) = match self.is_native {
            true => (&mut request["sampling_params"], "max_new_tokens", "min_new_tokens", "sampling_seed"),
            false => (&mut request, "max_tokens", "min_tokens", "seed"),
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

fn shift(object: &mut Value, name: &str, by: i64) {
    if let Some(count) = object[name].as_i64() {
        object[name] = (count + by).into();
    }
}
