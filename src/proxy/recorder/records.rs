//! Records of a call's choices.

use std::borrow::Cow;
use std::sync::Arc;

use super::{Open, micros};
use crate::protocol::chat::{Choice, Reply};
use crate::proxy::columns::tool_calls;
use crate::proxy::local_ids::Missing;
use crate::proxy::received::Received;
use crate::proxy::rejoin::Attendance;
use crate::proxy::{kept, verdict};
use crate::record::{Call, CallStatus, JsonText, SCHEMA_VERSION, SinkError, Usage, WeightSource, WeightSpan};
use crate::upstream;
use crate::upstream::dialect;

/// Records of some choices of a call.
pub(in crate::proxy) struct Records {
    pub(in crate::proxy) calls: Vec<Call>,
    /// What is to be filled in before they are stored.
    pub(in crate::proxy) missing: Option<Missing>,
    /// With these the call is a success.
    pub(in crate::proxy) success: Option<Arc<Attendance>>,
}

impl Open {
    pub(super) fn records(
        &self,
        choices: &[u16],
        status: CallStatus,
        error: Option<String>,
    ) -> Result<Records, SinkError> {
        let (reply, mut response) = self.copy()?;
        let ids = reply.choices.values().filter_map(|choice| choice.token_ids.as_ref());
        let sampled: usize = ids.map(Vec::len).sum();
        // An upstream's error may quote the key that it was sent.
        if reply.error.is_some() {
            response = response.map(|json| kept::raw(&self.without_key(json.get())));
        }
        let missing = Choice::default();
        let prompts = self.prompt_tokens(&reply);
        let record = |&index: &u16| {
            let choice = reply.choices.get(&index).unwrap_or(&missing);
            let (status, error) = ended(choice, &reply, status, error.clone());
            let mut call = self.call(index, &reply, choice, status, error);
            if let Some(rendered) = &self.wire.rendered {
                rendered.fill(&mut call, self.is_done, &self.attendance.given);
            }
            // The last one has it without a copy: it is the longest part of a record.
            call.response = if Some(&index) == choices.last() { response.take() } else { response.clone() };
            let constrained = self.request.is_constrained;
            call.not_trainable_reasons = verdict::reasons(&call, sampled as u64, prompts, constrained);
            call.not_trainable_reasons.extend(self.more_reasons.iter().cloned());
            call.trainable = call.not_trainable_reasons.is_empty();
            call
        };
        let calls: Vec<Call> = choices.iter().map(record).collect();
        let missing = Missing::of(self.wire.route.local_tokenizer.as_ref(), &reply, &calls);
        let is_success = self.is_done && status == CallStatus::Ok;
        Ok(Records { calls, missing, success: is_success.then(|| Arc::clone(&self.attendance)) })
    }

    /// The reply with all that has come of it, and its JSON.
    fn copy(&self) -> Result<(Cow<'_, Reply>, Option<JsonText>), SinkError> {
        let is_json = self.is_json;
        if !self.is_forgotten {
            return Ok((Cow::Borrowed(self.reply()), self.kept.json(is_json, |_, _| ())?));
        }
        let mut again = Received::new(self.wire.upstream_api, self.request.n_each);
        // What could not be read then cannot be read now: it is in the record already.
        let json = self.kept.json(is_json, |name, data| drop(again.event(name, data)))?;
        Ok((Cow::Owned(again.into_reply()), json))
    }

    fn call(
        &self,
        index: u16,
        reply: &Reply,
        choice: &Choice,
        status: CallStatus,
        error: Option<String>,
    ) -> Call {
        let spec = &self.session.spec;
        let upstream = &self.wire.route.upstream;
        let kind = upstream.kind();
        let (prompt_ids, prompt_ids_source) = self.prompt_ids(reply, index);
        let told = dialect::told_weights(reply, choice);
        let (weight_spans, weight_source) = told.unwrap_or_else(|| self.weights(choice));
        let routing = {
            let hint = upstream.routing_hint();
            let own = || upstream::routing::first_row(kind, &self.request);
            let start = self.prepared.routing_start.map_or_else(own, u64::from);
            upstream::routing::captured(kind, hint, start, prompt_ids, choice)
        };
        // What the engine says it read is what it was sent.
        let sent = self.rendered().map(|rendered| rendered.prompt.as_slice());
        let changed =
            sent.filter(|_| prompt_ids.is_some_and(|ids| Some(ids) != sent)).map(|_| verdict::PROMPT_CHANGED);
        let upstream_request =
            (self.prepared.body != self.wire.client_body).then(|| kept::raw(&self.prepared.body));
        Call {
            schema_version: SCHEMA_VERSION,
            call_id: self.call_id,
            choice_index: index,
            session_id: spec.session_id.clone(),
            trial_id: spec.trial_id.clone(),
            task_id: spec.task_id.clone(),
            parent_call_id: None,
            attempt: self.attempt,
            retry_of: self.retry_of,
            rejoined: self.attendance.times_rejoined(),
            kind: self.kind,
            harness: spec.harness.clone().or_else(|| self.client_name.clone()),
            harness_version: self.client_version.clone(),
            harness_conversation_id: self.conversation_id.clone(),
            http_status: self.http_status,
            tokenizer_sha256: None,
            template_sha256: None,
            client_api: self.wire.client_api,
            client_stream: self.request.is_stream,
            upstream_kind: kind,
            upstream_api: self.wire.upstream_api,
            model_requested: self.request.model.clone(),
            model_served: reply.model.clone(),
            received_at: self.received_at,
            ttft_us: self.ttft_us,
            duration_us: micros(self.received),
            client_request: Some(kept::raw(&self.wire.client_body)),
            upstream_request,
            response: None,
            prompt_ids_source,
            prompt_token_ids: prompt_ids.map(<[u32]>::to_vec),
            completion_token_ids: choice.token_ids.clone(),
            completion_ids_source: dialect::completion_ids_source(choice),
            completion_logprobs: choice.logprobs.clone(),
            logprob_semantics: self.prepared.logprob_semantics,
            sampling_requested: self.prepared.sampling_requested.clone(),
            sampling_sent: self.prepared.sampling_sent.clone(),
            weight_spans,
            weight_source,
            routing: routing.routing,
            text: reply.choices.contains_key(&index).then(|| choice.text.clone()),
            tool_calls: (!choice.tool_calls.is_empty()).then(|| tool_calls(choice)),
            finish_reason: choice.finish_reason.clone(),
            // Before the end it counts what there is by then.
            usage: reply.usage.filter(|_| self.is_done).map(|usage| Usage {
                prompt_tokens: usage.prompt_tokens,
                completion_tokens: usage.completion_tokens,
                cached_tokens: usage.cached_tokens,
                reasoning_tokens: usage.reasoning_tokens,
            }),
            status,
            error,
            trainable: false,
            not_trainable_reasons: routing.reason.or(changed).map(str::to_owned).into_iter().collect(),
            shared: None,
        }
    }

    /// Which weights sampled, where the reply does not say: lego's clock does if it stood still during the call.
    fn weights(&self, choice: &Choice) -> (Option<Vec<WeightSpan>>, WeightSource) {
        let now = self.wire.route.version_now(&self.inner, &self.session);
        match (self.version_at_start.get().and_then(Option::as_ref), now, &choice.token_ids) {
            (Some(start), Some(now), Some(ids)) if *start == now => {
                let end = u32::try_from(ids.len()).unwrap_or(u32::MAX);
                let span = WeightSpan { version: start.clone(), start: 0, end };
                (Some(vec![span]), WeightSource::LegoClock)
            }
            _ => (None, WeightSource::Unknown),
        }
    }
}

/// How a choice of a call ended that ended like this.
fn ended(
    choice: &Choice,
    reply: &Reply,
    status: CallStatus,
    error: Option<String>,
) -> (CallStatus, Option<String>) {
    let is_cut = matches!(status, CallStatus::Truncated | CallStatus::Timeout);
    // The upstream gave up another choice, and said nothing of the whole.
    let is_others = status == CallStatus::UpstreamError && reply.error.is_none() && reply.aborted().is_some();
    match choice.finish_reason {
        Some(_) if choice.is_aborted() && (is_cut || status == CallStatus::Ok) => {
            (CallStatus::UpstreamError, reply.error.clone().or_else(|| reply.aborted()))
        }
        // One that had its finish reason before the others broke off is whole.
        Some(_) if !choice.is_aborted() && (is_cut || is_others) => (CallStatus::Ok, None),
        _ => (status, error),
    }
}
