//! Lineages to samples and the ledger.

use std::collections::HashMap;

use super::account::{self, Entry};
use super::kinds::{Kinds, is_taken_in};
use super::lineage::{Lineage, LineageCall, Lineages, SetAside};
use super::routing::Gather;
use crate::config::{Samples, TrainedLineages};
use crate::record::{
    Call, CallSpan, Disposition, EpisodeId, GroupId, Position, RoutedExperts, Sample, SampleParts, SessionId,
};

/// Whose tokens these are, for the samples' `episode_id` and `group_id`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Episode {
    pub episode_id: EpisodeId,
    pub group_id: GroupId,
}

/// Samples and where every sampled token went.
#[derive(Debug, Clone, Default)]
pub struct Built {
    /// One a lineage that has tokens to train.
    pub samples: Vec<Sample>,
    /// Each sampled token of the calls, once.
    pub ledger: Vec<Entry>,
    /// Rows of expert routing that two calls have of one position, and that differ. The first call's are taken.
    pub differing_rows: u64,
    /// Samples that have no routing because their calls' is of different shapes.
    pub mixed_routing: u64,
}

/// What one lineage comes to.
struct Draft {
    parts: SampleParts,
    /// In the order of its own calls.
    entries: Vec<Entry>,
}

impl Draft {
    fn trained(&self) -> u64 {
        let trained = self.entries.iter().filter(|entry| entry.disposition == Disposition::Trained);
        trained.map(|entry| entry.tokens).sum()
    }

    /// Nothing of it is trained after all.
    fn give_up(&mut self, disposition: &Disposition) {
        let behind = [Disposition::Trained, Disposition::OverWindow];
        for entry in self.entries.iter_mut().filter(|entry| behind.contains(&entry.disposition)) {
            entry.disposition = disposition.clone();
        }
    }
}

/// Builds one sample a lineage, as `policy` says. A call that has not all values the loss needs is context in its
/// lineage's sample, and its tokens are dropped with the reason.
///
/// Which calls are whose is read from their bodies where `policy` asks for it ([`needs_bodies`]).
#[must_use]
pub fn samples(lineages: &Lineages, episode: Option<Episode>, policy: &Samples) -> Built {
    let mut built = Built::default();
    let sessions = lineages.sessions().filter(|_| needs_bodies(policy));
    let kinds: HashMap<&SessionId, Kinds> =
        sessions.map(|session| (&session[0].session_id, Kinds::of(session))).collect();
    for SetAside { entry, call, winner } in &lineages.set_aside {
        let (choice, kinds) = (winner.unwrap_or(call.choice()), kinds.get(&call.session_id));
        let is_booked =
            entry.disposition == Disposition::NoIds || is_taken_in(policy, call.kind, choice, kinds);
        let disposition = if is_booked { entry.disposition.clone() } else { Disposition::AuxCall };
        built.ledger.push(Entry { disposition, ..entry.clone() });
    }
    for session in lineages.sessions() {
        let kinds = kinds.get(&session[0].session_id);
        let mut drafts: Vec<Draft> =
            session.iter().map(|lineage| draft(lineage, episode, policy, kinds)).collect();
        if policy.lineages == TrainedLineages::Longest {
            // Of equals the first.
            let longest = (0..drafts.len()).rev().max_by_key(|&index| drafts[index].trained());
            let others = drafts.iter_mut().enumerate().filter(|(index, _)| Some(*index) != longest);
            let reason = Disposition::Dropped("not in the longest lineage".to_owned());
            others.for_each(|(_, draft)| draft.give_up(&reason));
        }
        for (lineage, draft) in session.iter().zip(drafts) {
            finish(lineages, lineage, draft, &mut built);
        }
    }
    built
}

/// Whether [`samples`] by this policy has to know who made which call.
#[must_use]
pub fn needs_bodies(policy: &Samples) -> bool {
    policy.lineages == TrainedLineages::Main || !policy.leave_out.is_empty() || !policy.take_in.is_empty()
}

fn draft(lineage: &Lineage, episode: Option<Episode>, policy: &Samples, kinds: Option<&Kinds>) -> Draft {
    let parts = SampleParts {
        lineage_id: lineage.index,
        episode_id: episode.map(|episode| episode.episode_id),
        group_id: episode.map(|episode| episode.group_id),
        ..SampleParts::default()
    };
    let mut draft = Draft { parts, entries: vec![] };
    let end = if policy.max_tokens == 0 { usize::MAX } else { policy.max_tokens };
    for LineageCall { call, verdict, .. } in lineage.own() {
        let is_taken_in = is_taken_in(policy, call.kind, call.choice(), kinds);
        let verdict = if is_taken_in { verdict.clone() } else { Some(Disposition::AuxCall) };
        let by_kind = || kinds.and_then(|kinds| kinds.left_out(lineage, call, policy));
        let targets = match verdict.or_else(by_kind) {
            Some(disposition) => Err(disposition),
            None => account::targets(call).map_err(Disposition::Dropped),
        };
        match targets {
            Ok(targets) => {
                let taken = append(&mut draft.parts, call, targets, end);
                let all = Entry::of(call, Disposition::Trained);
                let behind = all.tokens - taken;
                draft.entries.push(Entry { tokens: taken, ..all });
                draft.entries.push(Entry { tokens: behind, ..Entry::of(call, Disposition::OverWindow) });
            }
            Err(disposition) => draft.entries.push(Entry::of(call, disposition)),
        }
    }
    draft.entries.retain(|entry| entry.tokens > 0);
    draft
}

/// Adds the context up to the call's completion and as much of the completion as stands before `window`; gives how
/// many tokens that is. Every earlier call of the lineage is a prefix of this one's prompt, so what is there already
/// stays as it is.
fn append(parts: &mut SampleParts, call: &Call, targets: account::Targets, window: usize) -> u64 {
    let prompt = call.prompt_token_ids.as_deref().unwrap_or_default();
    let completion = call.sampled_ids().unwrap_or_default();
    let start = prompt.len();
    let taken = completion.len().min(window.saturating_sub(start));
    if taken == 0 {
        return 0;
    }
    let end = start + taken;
    parts.token_ids.extend_from_slice(&prompt[parts.token_ids.len()..]);
    parts.loss_mask.resize(start, false);
    parts.logprobs.resize(start, None);
    parts.weight_version.resize(start, None);
    parts.temperature.resize(start, None);
    parts.token_ids.extend_from_slice(&completion[..taken]);
    parts.loss_mask.resize(end, true);
    parts.logprobs.extend(targets.logprobs.into_iter().take(taken).map(Some));
    parts.weight_version.extend(targets.versions.into_iter().take(taken).map(Some));
    parts.temperature.resize(end, Some(targets.temperature));
    let (start, end) = (Position::new(start), Position::new(end));
    parts.call_spans.push(CallSpan { choice: call.choice(), start, end });
    taken as u64
}

fn finish(lineages: &Lineages, lineage: &Lineage, mut draft: Draft, built: &mut Built) {
    if draft.trained() > 0 {
        let mut parts = std::mem::take(&mut draft.parts);
        parts.routed_experts = routing(lineages, lineage, parts.token_ids.len(), built);
        match Sample::new(parts) {
            Ok(sample) => built.samples.push(sample),
            Err(error) => draft.give_up(&Disposition::Dropped(error.to_string())),
        }
    }
    built.ledger.extend(draft.entries);
}

fn routing(
    lineages: &Lineages,
    lineage: &Lineage,
    tokens: usize,
    built: &mut Built,
) -> Option<RoutedExperts> {
    let mut gather = Gather::new(lineage, tokens);
    for (place, one) in lineage.calls.iter().enumerate() {
        let (mut next, mut end) = (one.call.routing.as_ref(), None);
        // Nobody goes on from a later one; a damaged record may.
        for _ in 0..=lineages.routed.len() {
            let Some(routing) = next else { break };
            gather.take(place, routing, end);
            // Rows that were left out are those of the call it goes on from, which may be in another lineage.
            let start = Position::new(routing.shape().start as usize);
            end = Some(end.map_or(start, |end: Position| end.min(start)));
            let base = routing.base().and_then(|base| lineages.routed.get(&base));
            next = base.and_then(|base| base.routing.as_ref());
        }
    }
    let found = gather.finish();
    built.differing_rows += found.differing_rows;
    built.mixed_routing += u64::from(found.is_mixed);
    found.experts
}
