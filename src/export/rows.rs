//! Samples, a row each: who is in it, and what each trainer's form has in common.

use std::collections::HashMap;
use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::counts::{Counts, WRITTEN};
use super::episodes::{Episode, Episodes, Group};
use super::index::Sessions;
use super::output::Output;
use super::prime_rl::PrimeRl;
use super::routing::{self, Experts};
use super::slime::Slime;
use super::{ExportError, Format, Options, trl, verl};
use crate::config::Samples;
use crate::record::{Call, CallId, CallSpan, Disposition, Sample, SessionId};
use crate::trajectory::{self, Built, Lineage, needs_bodies};

/// Bucket of an episode none of whose calls can be trained.
const NO_SAMPLE: &str = "no sample";
const NOTHING_SAMPLED: &str = "nothing sampled";

/// A sample with all that its row says.
pub(super) struct Row<'a> {
    pub session: &'a SessionId,
    pub episode: &'a Episode,
    pub group: &'a Group,
    pub sample: &'a Sample,
    /// Which of its episode's samples it is, and how many there are.
    pub index: usize,
    pub of: usize,
    /// Rows for all tokens but the last.
    pub experts: Option<Experts>,
    /// Calls of its lineage up to its end.
    pub turns: usize,
    /// Its last call was cut off.
    pub is_truncated: bool,
}

impl Row<'_> {
    /// Tokens before the first sampled one.
    pub(super) fn prompt_len(&self) -> usize {
        self.sample.loss_mask.iter().position(|is_sampled| *is_sampled).unwrap_or(0)
    }

    /// Whether each token behind the prompt trains.
    pub(super) fn mask(&self) -> impl Iterator<Item = bool> {
        let is_masked = self.episode.is_masked;
        self.sample.loss_mask[self.prompt_len()..].iter().map(move |is_sampled| *is_sampled && !is_masked)
    }

    /// Log-probs behind the prompt; 0 for context, as those who read it have it where the mask is 0.
    pub(super) fn logprobs(&self) -> impl Iterator<Item = f32> {
        self.sample.logprobs[self.prompt_len()..].iter().map(|logprob| logprob.unwrap_or(0.0))
    }

    /// The versions that sampled it, each once.
    pub(super) fn versions(&self) -> Vec<u64> {
        let mut versions: Vec<u64> = self.sample.weight_version.iter().flatten().copied().collect();
        versions.sort_unstable();
        versions.dedup();
        versions
    }

    /// The columns that all forms have in common.
    pub(super) fn columns(&self) -> Map<String, Value> {
        let mut columns = self.episode.columns(self.session);
        let calls = self.sample.call_spans.iter().map(|CallSpan { choice, start, end }| {
            let (start, end) = (start.index(), end.index());
            json!({"call_id": choice.call_id, "choice_index": choice.choice_index, "start": start, "end": end})
        });
        let more = json!({
            "sample_index": self.index, "episode_samples": self.of, "lineage_id": self.sample.lineage_id,
            "advantage": self.episode.advantage, "group_size": self.group.size,
            "group_is_complete": self.group.is_complete(), "group_rewards": self.group.rewards,
            "masked": self.episode.is_masked.then_some("agent_oom"), "weight_versions": self.versions(),
            "calls": calls.collect::<Vec<_>>(),
        });
        if let Value::Object(more) = more {
            columns.extend(more);
        }
        columns
    }
}

/// Who writes rows.
enum Form {
    Trl,
    Verl,
    Slime(Slime),
    PrimeRl(PrimeRl),
}

impl Form {
    const fn wants_routing(&self) -> bool {
        !matches!(self, Self::Trl)
    }

    fn write(&mut self, row: &Row<'_>, output: &mut Output) -> Result<(), ExportError> {
        match self {
            Self::Trl => output.line(&trl::line(row)),
            Self::Verl => output.line(&verl::line(row)),
            Self::Slime(slime) => slime.write(row, output),
            Self::PrimeRl(prime_rl) => prime_rl.write(row, output),
        }
    }

    fn end(self, output: &mut Output) -> Result<(), ExportError> {
        match self {
            Self::Trl | Self::Verl => Ok(()),
            Self::Slime(slime) => slime.end(output),
            Self::PrimeRl(prime_rl) => prime_rl.end(output),
        }
    }
}

/// Writes the samples of all episodes.
pub(super) fn write(
    sessions: &Sessions<'_>,
    episodes: &Episodes,
    (options, policy): (Options<'_>, &Samples),
    output: &mut Output,
    counts: &mut Counts,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), ExportError> {
    let form = match options.format {
        Format::Verl => Form::Verl,
        Format::Slime => Form::Slime(Slime::default()),
        Format::PrimeRl => Form::PrimeRl(PrimeRl::new(options.ranks)),
        _ => Form::Trl,
    };
    let mut work = Work { sessions, episodes, policy, form, output };
    sessions.each(episodes, needs_bodies(policy), counts, progress, &mut |id, calls, counts| {
        Ok(if work.session(id, calls, counts)? > 0 { WRITTEN } else { NO_SAMPLE })
    })?;
    work.form.end(work.output)
}

struct Work<'a> {
    sessions: &'a Sessions<'a>,
    episodes: &'a Episodes,
    policy: &'a Samples,
    form: Form,
    output: &'a mut Output,
}

impl Work<'_> {
    /// Writes the samples of one session, and says how many there are.
    fn session(
        &mut self,
        id: &SessionId,
        calls: &[Arc<Call>],
        counts: &mut Counts,
    ) -> Result<usize, ExportError> {
        let episode = &self.episodes.by_session[id];
        let lineages = trajectory::lineages(calls);
        let built = trajectory::samples(&lineages, None, self.policy);
        built.check(calls)?;
        count_calls(calls, &built, episode, counts);
        let of = built.samples.len();
        counts.rows.all += of as u64;
        let Some(group) = episode.group.map(|group| &self.episodes.groups[group]).filter(|_| of > 0) else {
            let note = "episodes without a sample have no row: their rewards are in group_rewards and advantage, which \
                        rows alone do not give";
            counts.notes.insert(note.to_owned());
            return Ok(0);
        };
        let samples = built.samples.iter();
        let samples: Vec<(&Sample, &Lineage)> =
            samples.map(|sample| (sample, lineage_of(sample, &lineages.lineages))).collect();
        let mut experts: Vec<Option<Experts>> = samples.iter().map(|_| None).collect();
        if self.form.wants_routing() && self.sessions.index.sessions[id].has_routing {
            experts = routing::gather(self.sessions, id, &samples, counts)?;
        }
        for (index, ((sample, lineage), experts)) in samples.into_iter().zip(experts).enumerate() {
            let calls = || lineage.calls.iter().map(|one| &one.call);
            let last = sample.call_spans.last().map(|span| span.choice);
            let is_last = |call: &&Arc<Call>| Some(call.choice()) == last;
            let row = Row {
                session: id,
                episode,
                group,
                sample,
                index,
                of,
                experts,
                turns: 1 + calls().take_while(|call| !is_last(call)).count(),
                is_truncated: calls()
                    .find(is_last)
                    .is_some_and(|call| call.finish_reason.as_deref() == Some("length")),
            };
            self.form.write(&row, self.output)?;
            counts.rows.add(WRITTEN, 1);
        }
        Ok(of)
    }
}

/// The lineage that a sample was built of.
fn lineage_of<'a>(sample: &Sample, lineages: &'a [Lineage]) -> &'a Lineage {
    let of = lineages.iter().find(|lineage| lineage.index == sample.lineage_id);
    of.expect("samples are built of these lineages, which have numbers of their own in their session")
}

/// Books each sampled choice of a session.
fn count_calls(calls: &[Arc<Call>], built: &Built, episode: &Episode, counts: &mut Counts) {
    let mut buckets: HashMap<(CallId, u16), String> = HashMap::new();
    for entry in &built.ledger {
        let bucket = match &entry.disposition {
            Disposition::Trained if episode.is_masked => "masked: agent_oom".to_owned(),
            Disposition::Trained => WRITTEN.to_owned(),
            other => other.bucket(),
        };
        let name = (entry.call_id, entry.choice_index);
        // Tokens without ids are told of beside those with ids, and those behind a sample beside those in it.
        if matches!(entry.disposition, Disposition::NoIds | Disposition::OverWindow) {
            buckets.entry(name).or_insert(bucket);
        } else {
            buckets.insert(name, bucket);
        }
    }
    for call in calls {
        let bucket = buckets.get(&(call.call_id, call.choice_index));
        counts.calls.add(bucket.map_or(NOTHING_SAMPLED, String::as_str), 1);
    }
}
