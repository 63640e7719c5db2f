//! Expert routing that a session's store has already. A chat engine gives the rows of the whole context with each turn;
//! those that an earlier call of the session stored are not stored again.
//!
//! Invariants:
//! - A row is left out only where ids and experts of it and of all rows before it are those of the call that is named,
//!   which is durable by then. Experts that an engine chose otherwise when it read the same ids again are stored.
//! - Calls that the trainer gets in memory have all the rows that they came with.
//! - Rows that were not asked for, since the calls of the lineage have them, are in no call's record twice: a call's first
//!   row is then the one behind the last one of the call that it extends.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use metrics::{Counter, counter};

use crate::record::{Call, CallId, CallKind, CallStatus, ChoiceId, ClientApi, IdsSource, RoutingShape};

/// Contexts of a session that are remembered: those of its agent, of sub-agents, of branches.
const MAX_CONTEXTS: usize = 8;
/// Rows that all sessions remember together, 12 bytes each. Calls of contexts beyond them are stored whole.
const MAX_ROWS: usize = 8 << 20;

/// Calls of a session of which it is remembered how far their rows go.
const MAX_CALLS: usize = 4096;

/// Rows that are remembered, of all sessions.
static REMEMBERED: AtomicUsize = AtomicUsize::new(0);

/// What a session's store has.
#[derive(Debug, Default)]
pub(super) struct HeldRows {
    /// Hashes that nobody outside can foresee.
    hasher: RandomState,
    contexts: Mutex<Vec<Context>>,
    /// Of first choices from whose lineage no row lacks: how many positions have theirs, up to the call's own last row.
    /// Calls of another kind are in lineages of their own, which find no rows there.
    lineages: Mutex<HashMap<CallId, (CallKind, u32)>>,
}

/// What the store will have of some calls.
#[derive(Debug, Default)]
pub(super) struct Fresh {
    contexts: Vec<Context>,
    lineages: Vec<(CallId, (CallKind, u32))>,
}

/// The rows of one context.
#[derive(Debug)]
struct Context {
    base: ChoiceId,
    /// With `start` and `rows` 0.
    shape: RoutingShape,
    ids: Vec<u32>,
    /// Of each row's bytes.
    rows: Vec<u64>,
    /// How much of it counts among the remembered.
    counted: usize,
}

impl Context {
    fn of(call: &Call, hasher: &RandomState) -> Option<Self> {
        let routing = call.routing.as_ref().filter(|routing| routing.shape().start == 0)?;
        let is_exact = call.prompt_ids_source == IdsSource::Engine && call.completion_ids_source.is_exact();
        let prompt = call.prompt_token_ids.as_deref().filter(|_| is_exact)?;
        let mut ids = [prompt, call.sampled_ids()?].concat();
        let rows: Vec<u64> = routing.rows().map(|row| hasher.hash_one(row)).collect();
        ids.truncate(rows.len());
        (ids.len() == rows.len() && !rows.is_empty()).then(|| Self {
            base: call.choice(),
            shape: RoutingShape { start: 0, rows: 0, ..*routing.shape() },
            ids,
            rows,
            counted: 0,
        })
    }

    /// First rows that two contexts share, and how many of the ids that they share were routed otherwise.
    fn shared(&self, other: &Self) -> (usize, usize) {
        if self.shape != other.shape {
            return (0, 0);
        }
        let ids = self.ids.iter().zip(&other.ids).take_while(|(a, b)| a == b).count();
        let is_same = |row: &usize| self.rows[*row] == other.rows[*row];
        let same = (0..ids).take_while(is_same).count();
        (same, (same..ids).filter(|row| !is_same(row)).count())
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        REMEMBERED.fetch_sub(self.counted, Ordering::Relaxed);
    }
}

impl HeldRows {
    /// Leaves out of each call what the store has, or what a call before it in the list has, and gives what the store
    /// will have once they are durable.
    pub(super) fn shorten(&self, calls: &mut [Call], counts: &RowCounts) -> Fresh {
        let mut fresh: Vec<Context> = Vec::new();
        let lineages =
            calls.iter().filter_map(|call| Some((call.call_id, (call.kind, self.covered(call)?)))).collect();
        for call in calls {
            counts.not_told.increment(not_told(call));
            let Some(context) = Context::of(call, &self.hasher) else {
                let shape = call.routing.as_ref().map(|routing| routing.shape());
                counts.stored.increment(shape.map_or(0, |shape| shape.rows.into()));
                let before = shape.filter(|_| self.covered(call).is_some()).map_or(0, |shape| shape.start);
                counts.dropped.increment(before.into());
                continue;
            };
            let held = self.contexts.lock().unwrap_or_else(PoisonError::into_inner);
            let known = held.iter().chain(&fresh);
            let best =
                known.map(|known| (known.base, known.shared(&context))).max_by_key(|(_, shared)| *shared);
            drop(held);
            let (same, other) = best.map_or((0, 0), |(_, shared)| shared);
            counts.dropped.increment(same as u64);
            counts.rerouted.increment(other as u64);
            counts.stored.increment((context.rows.len() - same) as u64);
            if let Some((base, _)) = best.filter(|_| same > 0)
                && let Some(routing) = &call.routing
            {
                call.routing = Some(routing.without_first(same as u32, base));
            }
            fresh.push(context);
        }
        Fresh { contexts: fresh, lineages }
    }

    /// How many positions have their rows in this call and those that it extends; `None`: some lack.
    fn covered(&self, call: &Call) -> Option<u32> {
        let shape = call.routing.as_ref().filter(|_| call.choice_index == 0)?.shape();
        let before = if shape.start == 0 { 0 } else { self.of_lineage(call.parent_call_id?, call.kind)? };
        (shape.start == before).then_some(shape.start + shape.rows)
    }

    /// How many positions have their rows in a call of this kind that is durable, and in those that it extends.
    pub(super) fn of_lineage(&self, call_id: CallId, kind: CallKind) -> Option<u32> {
        let known = self.lineages.lock().unwrap_or_else(PoisonError::into_inner);
        known.get(&call_id).filter(|(of, _)| *of == kind).map(|(_, rows)| *rows)
    }

    /// Remembers what became durable.
    pub(super) fn hold(&self, Fresh { contexts, lineages }: Fresh) {
        {
            let mut known = self.lineages.lock().unwrap_or_else(PoisonError::into_inner);
            if known.len() >= MAX_CALLS {
                // They are asked for again.
                known.clear();
            }
            known.extend(lineages);
        }
        let mut held = self.contexts.lock().unwrap_or_else(PoisonError::into_inner);
        for mut context in contexts {
            // What it goes on from is in it.
            held.retain(|known| known.shared(&context).0 < known.rows.len());
            if held.len() == MAX_CONTEXTS {
                held.remove(0);
            }
            let rows = context.rows.len();
            if REMEMBERED.fetch_add(rows, Ordering::Relaxed) + rows > MAX_ROWS {
                REMEMBERED.fetch_sub(rows, Ordering::Relaxed);
                continue;
            }
            context.counted = rows;
            held.push(context);
        }
    }
}

/// Rows of a reply that was asked for as a stream since those have the routing, and had none.
fn not_told(call: &Call) -> u64 {
    let is_whole = call.upstream_api == ClientApi::VllmGenerate && call.status == CallStatus::Ok;
    let is_refused = || call.not_trainable_reasons.iter().any(|reason| reason.starts_with("routing_"));
    if !is_whole || call.routing.is_some() || is_refused() {
        return 0;
    }
    let tokens = |ids: &Option<Vec<u32>>| ids.as_ref().map_or(0, Vec::len) as u64;
    let rows = (tokens(&call.prompt_token_ids) + tokens(&call.completion_token_ids)).saturating_sub(1);
    tracing::warn!(call_id = %call.call_id, rows, "the upstream told no expert routing of a reply, as it did before");
    rows
}

/// Rows of records, counted.
pub(super) struct RowCounts {
    stored: Counter,
    not_told: Counter,
    dropped: Counter,
    rerouted: Counter,
}

impl Default for RowCounts {
    fn default() -> Self {
        let of = |what: &'static str| counter!("lego_capture_routing_rows_total", "rows" => what);
        // Those of the token-in relay, before they count.
        for of_parts in ["resumed_otherwise", "resumed_lost"] {
            of(of_parts).increment(0);
        }
        Self {
            stored: of("stored"),
            not_told: of("not_told"),
            dropped: of("held_already"),
            rerouted: of("routed_otherwise"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{LayerAxis, Routing, RoutingDtype, example};

    /// A call whose position `p` with the id `i` has the experts that `experts` says.
    fn call(prompt: &[u32], completion: &[u32], experts: impl Fn(usize, u32) -> u32) -> Call {
        let ids = [prompt, completion].concat();
        let rows = ids.len() - 1;
        let routed: Vec<u32> = (0..rows).flat_map(|p| [experts(p, ids[p]), 7]).collect();
        let shape = RoutingShape {
            start: 0,
            rows: rows as u32,
            layers: 1,
            layer_axis: LayerAxis::MoeOnly,
            top_k: 2,
            dtype: RoutingDtype::U8,
        };
        let mut call = example::call(serde_json::json!({"upstream_kind": "vllm"}));
        call.call_id = crate::record::CallId::now();
        call.prompt_token_ids = Some(prompt.to_vec());
        call.completion_token_ids = Some(completion.to_vec());
        (call.prompt_ids_source, call.completion_ids_source) = (IdsSource::Engine, IdsSource::Engine);
        call.routing = Some(Routing::pack(shape, &routed).expect("two a row"));
        call
    }

    fn by_id(_: usize, id: u32) -> u32 {
        id
    }

    /// What is stored of a call, as first row and base.
    fn stored(held: &HeldRows, calls: &mut [Call]) -> Vec<(u32, Option<ChoiceId>)> {
        let fresh = held.shorten(calls, &RowCounts::default());
        held.hold(fresh);
        let of = |call: &Call| call.routing.as_ref().map(|routing| (routing.shape().start, routing.base()));
        calls.iter().filter_map(of).collect()
    }

    fn base(call: &Call) -> Option<ChoiceId> {
        Some(call.choice())
    }

    #[test]
    fn c16_a_turn_stores_the_rows_that_no_turn_before_it_stored() {
        let held = HeldRows::default();
        let mut first = [call(&[1, 2, 3], &[4, 5], by_id)];
        assert_eq!(stored(&held, &mut first), [(0, None)]);
        // The last sampled token of the turn before has its row now.
        let mut second = [call(&[1, 2, 3, 4, 5, 6], &[7], by_id)];
        assert_eq!(stored(&held, &mut second), [(4, base(&first[0]))]);
        assert_eq!(second[0].routing.as_ref().expect("rows").data().as_ref(), [5, 7, 6, 7]);
        let mut third = [call(&[1, 2, 3, 4, 5, 6, 7, 8], &[9], by_id)];
        assert_eq!(stored(&held, &mut third), [(6, base(&second[0]))]);
        // A branch from the first turn: the newest that has its rows is as good.
        let mut branch = [call(&[1, 2, 3, 4, 5, 60], &[70], by_id)];
        assert_eq!(stored(&held, &mut branch), [(5, base(&third[0]))]);
        let mut other = [call(&[9, 9], &[9], by_id)];
        assert_eq!(stored(&held, &mut other), [(0, None)]);
    }

    #[test]
    fn choices_of_a_call_share_the_prompts_rows() {
        let mut choices = [call(&[1, 2, 3], &[4, 5], by_id), call(&[1, 2, 3], &[6, 7], by_id)];
        choices[1].call_id = choices[0].call_id;
        choices[1].choice_index = 1;
        let held = HeldRows::default();
        assert_eq!(stored(&held, &mut choices), [(0, None), (3, base(&choices[0]))]);
    }

    #[test]
    fn rows_that_were_routed_otherwise_are_stored() {
        let held = HeldRows::default();
        let mut first = [call(&[1, 2, 3], &[4, 5], by_id)];
        stored(&held, &mut first);
        let mut second = [call(&[1, 2, 3, 4, 5, 6], &[7], |p, id| if p == 2 { 99 } else { id })];
        assert_eq!(stored(&held, &mut second), [(2, base(&first[0]))]);
        let wider = |p: usize, id: u32| if p == 5 { 300 } else { id };
        let mut third = [call(&[1, 2, 3, 4, 5, 6], &[8], wider)];
        assert_eq!(stored(&held, &mut third), [(0, None)], "ids of another width");
    }

    #[test]
    fn what_has_no_exact_ids_or_not_all_rows_is_left_alone() {
        let held = HeldRows::default();
        stored(&held, &mut [call(&[1, 2, 3], &[4, 5], by_id)]);
        let mut local = call(&[1, 2, 3], &[4, 5], by_id);
        local.prompt_ids_source = IdsSource::LocalTokenizer;
        let mut part = call(&[1, 2, 3], &[4, 5], by_id);
        let first = ChoiceId { call_id: part.call_id, choice_index: 0 };
        part.routing = part.routing.map(|routing| routing.without_first(1, first).based_on(None));
        assert_eq!(stored(&held, &mut [local, part]), [(0, None), (1, None)]);
    }

    #[test]
    fn few_contexts_are_remembered() {
        let held = HeldRows::default();
        for context in 0..MAX_CONTEXTS as u32 + 1 {
            assert_eq!(stored(&held, &mut [call(&[100 + context, 2], &[3], by_id)]), [(0, None)]);
        }
        assert_eq!(held.contexts.lock().expect("whole").len(), MAX_CONTEXTS);
        assert_eq!(stored(&held, &mut [call(&[100, 2], &[3], by_id)]), [(0, None)], "forgotten");
        let last = &mut [call(&[100 + MAX_CONTEXTS as u32, 2], &[4], by_id)];
        assert_eq!(stored(&held, last)[0].0, 2, "remembered");
    }

    #[test]
    fn rows_of_a_lineage_are_held_as_far_as_none_lacks_and_once_they_are_durable() {
        let held = HeldRows::default();
        let counts = RowCounts::default();
        let first = call(&[1, 2], &[3, 4], |_, id| id);
        let extends = |parent: &Call, start: u32| {
            let mut next = call(&[1, 2, 3, 4, 9], &[5], |_, id| id);
            next.parent_call_id = Some(parent.call_id);
            let routing = next.routing.take().expect("rows").without_first(start, parent.choice());
            next.routing = Some(routing.based_on(None));
            next
        };
        let fresh = held.shorten(&mut [first.clone()], &counts);
        assert_eq!(held.of_lineage(first.call_id, first.kind), None, "it is not durable yet");
        held.hold(fresh);
        assert_eq!(held.of_lineage(first.call_id, first.kind), Some(3));
        let (whole, gap) = (extends(&first, 3), extends(&first, 4));
        held.hold(held.shorten(&mut [whole.clone(), gap.clone()], &counts));
        assert_eq!(
            (held.of_lineage(whole.call_id, whole.kind), held.of_lineage(gap.call_id, gap.kind)),
            (Some(5), None)
        );
        let behind_the_gap = extends(&gap, 4);
        held.hold(held.shorten(&mut [behind_the_gap.clone()], &counts));
        assert_eq!(held.of_lineage(behind_the_gap.call_id, behind_the_gap.kind), None);
        let mut other_choice = call(&[1, 2], &[3, 4], |_, id| id);
        other_choice.choice_index = 1;
        held.hold(held.shorten(&mut [other_choice.clone()], &counts));
        assert_eq!(
            held.of_lineage(other_choice.call_id, other_choice.kind),
            None,
            "all rows are asked for behind it"
        );
        let aux = CallKind::Aux;
        assert_eq!(held.of_lineage(first.call_id, aux), None, "another kind has lineages of its own");
    }

    #[test]
    fn a_stream_that_was_asked_for_its_rows_and_has_none_is_counted() {
        let mut told = call(&[1, 2], &[3, 4], |_, id| id);
        told.upstream_api = ClientApi::VllmGenerate;
        assert_eq!(not_told(&told), 0);
        told.routing = None;
        assert_eq!(not_told(&told), 3);
        told.not_trainable_reasons = vec!["routing_rows_mismatch".to_owned()];
        assert_eq!(not_told(&told), 0, "it says so by itself");
        (told.not_trainable_reasons, told.status) = (Vec::new(), CallStatus::Truncated);
        assert_eq!(not_told(&told), 0);
    }
}
