//! A line a sampled choice: ids, log-probs and expert routing as they were captured.

use std::collections::HashMap;

use serde::Serialize;
use serde_json::{Map, Value};

use super::ExportError;
use super::counts::{Counts, WRITTEN};
use super::episodes::{Episode, of_session};
use super::output::Output;
use crate::capture::{Filter, Place, Query, Reader};
use crate::record::{Call, CallId, Routing, Sampling, WeightSpan};
use crate::telemetry::RunBooks;

#[derive(Serialize)]
struct Line<'a> {
    call_id: CallId,
    choice_index: u16,
    #[serde(flatten)]
    columns: Map<String, Value>,
    trial_id: Option<&'a str>,
    kind: &'a str,
    /// Microseconds since the Unix epoch, UTC.
    received_at: i64,
    model_served: Option<&'a str>,
    finish_reason: Option<&'a str>,
    status: &'a str,
    prompt_token_ids: Option<&'a [u32]>,
    prompt_ids_source: &'a str,
    token_ids: Option<&'a [u32]>,
    token_ids_source: &'a str,
    logprobs: Option<&'a [Option<f32>]>,
    logprob_semantics: &'a str,
    sampling_sent: &'a Sampling,
    weight_spans: Option<&'a [WeightSpan]>,
    expert_routing: Option<&'a Routing>,
    trainable: bool,
    not_trainable_reasons: &'a [String],
}

/// Writes the calls for which `filter` is true, in the order of the store.
pub(super) fn write(
    dir: &Place,
    books: Option<&RunBooks>,
    filter: Option<&Filter>,
    output: &mut Output,
    counts: &mut Counts,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), ExportError> {
    let uses_bodies = filter.is_some_and(Filter::uses_bodies);
    let query = Query { filter: filter.cloned(), without_bodies: !uses_bodies, ..Query::default() };
    let mut reader = Reader::open(dir, query)?;
    let mut sessions: HashMap<_, Episode> = HashMap::new();
    for call in reader.by_ref() {
        let call = call?;
        if !sessions.contains_key(&call.session_id) {
            let episode =
                of_session(books, &call.session_id, (call.trial_id.as_ref(), call.task_id.as_ref()))?;
            let is_in_group = books.is_some() && episode.is_in_group();
            counts.sessions.all += 1;
            counts.sessions.add(WRITTEN, 1);
            counts.episodes.all += u64::from(is_in_group);
            counts.episodes.add(WRITTEN, u64::from(is_in_group));
            sessions.insert(call.session_id.clone(), episode);
        }
        output.line(&line(&call, &sessions[&call.session_id]))?;
        counts.calls.all += 1;
        counts.calls.add(WRITTEN, 1);
        counts.rows.all += 1;
        counts.rows.add(WRITTEN, 1);
        counts.routing_lost += u64::from(super::index::has_lost_routing(&call));
        progress(counts.calls.all, counts.calls.all);
    }
    counts.unread.extend(reader.left_out());
    Ok(())
}

fn line<'a>(call: &'a Call, episode: &Episode) -> Line<'a> {
    Line {
        call_id: call.call_id,
        choice_index: call.choice_index,
        columns: episode.columns(&call.session_id),
        trial_id: call.trial_id.as_ref().map(|trial| trial.as_str()),
        kind: call.kind.as_str(),
        received_at: call.received_at,
        model_served: call.model_served.as_deref(),
        finish_reason: call.finish_reason.as_deref(),
        status: call.status.as_str(),
        prompt_token_ids: call.prompt_token_ids.as_deref(),
        prompt_ids_source: call.prompt_ids_source.as_str(),
        token_ids: call.completion_token_ids.as_deref(),
        token_ids_source: call.completion_ids_source.as_str(),
        logprobs: call.completion_logprobs.as_deref(),
        logprob_semantics: call.logprob_semantics.as_str(),
        sampling_sent: &call.sampling_sent,
        weight_spans: call.weight_spans.as_deref(),
        expert_routing: call.routing.as_ref(),
        trainable: call.trainable,
        not_trainable_reasons: &call.not_trainable_reasons,
    }
}
