//! Which sessions are episodes, of which groups, with which reward and advantage.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::counts::Counts;
use super::index::Index;
use super::{ExportError, Format, Options};
use crate::loss::{AdvantageEstimator, advantages};
use crate::record::{GroupId, SessionId, TaskId, TrialId};
use crate::telemetry::{Attempt, RunBooks};

/// Bucket of what no predicate chose.
pub(super) const NOT_ASKED: &str = "not asked for (--where)";
/// Bucket of lego's own probes, and of what else a run's proxy was asked outside of trials.
const NO_TRIAL: &str = "of no trial";
const INCOMPLETE: &str = "incomplete group";

/// What a session is an attempt at.
#[derive(Debug, Default)]
pub(super) struct Episode {
    pub trial: Option<TrialId>,
    pub task: Option<TaskId>,
    pub version: Option<u64>,
    /// The name of the trials that it shares a baseline with.
    pub group_id: Option<String>,
    /// Of those that are in the export.
    pub group: Option<usize>,
    /// Counts those in the export.
    pub number: u64,
    pub reward: Option<f64>,
    pub advantage: Option<f64>,
    pub is_evaluation: bool,
    pub is_masked: bool,
    /// Why it is none in its group; `None` too where no run says so.
    pub standing: Option<&'static str>,
}

impl Episode {
    /// Whether it takes part in its group.
    pub(super) const fn is_in_group(&self) -> bool {
        self.trial.is_some() && self.standing.is_none()
    }

    /// The columns that name it, with its reward.
    pub(super) fn columns(&self, session: &SessionId) -> Map<String, Value> {
        let purpose =
            self.trial.is_some().then_some(if self.is_evaluation { "evaluation" } else { "training" });
        let columns = json!({
            "session_id": session, "episode_id": self.trial, "group_id": self.group_id, "task_id": self.task,
            "purpose": purpose, "policy_version": self.version, "reward": self.reward,
        });
        let Value::Object(columns) = columns else { unreachable!("it was written as an object") };
        columns
    }
}

/// Trials that share a baseline.
#[derive(Debug)]
pub(super) struct Group {
    /// How many there are to be.
    pub size: usize,
    /// Of all that are there, by trial.
    pub rewards: Vec<f64>,
    sessions: Vec<SessionId>,
}

impl Group {
    pub(super) const fn is_complete(&self) -> bool {
        self.rewards.len() == self.size
    }
}

/// The sessions that are exported.
#[derive(Debug, Default)]
pub(super) struct Episodes {
    pub by_session: BTreeMap<SessionId, Episode>,
    /// Those of samples, in the order of policy versions and groups.
    pub groups: Vec<Group>,
    /// The sessions in the order in which they are written.
    pub order: Vec<SessionId>,
    /// A run says what each session is.
    pub is_of_run: bool,
}

/// By it groups are told apart and put in order: groups of two versions, or of two starts of a run, have no trial in
/// common whatever their number is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    version: u64,
    incarnation: u32,
    group: u64,
}

impl Key {
    fn of(trial: &TrialId, attempt: &Attempt) -> Option<Self> {
        let of_result = attempt.group_id.map(|GroupId(group)| {
            let (version, incarnation) = (attempt.version.0, attempt.incarnation);
            Self { version, incarnation, group }
        });
        of_result.or_else(|| Self::in_name(trial))
    }

    /// `v<version>-g<group>-<member>`, and `-r<start>` behind it where that is not the first.
    fn in_name(trial: &TrialId) -> Option<Self> {
        let mut parts = trial.as_str().split('-');
        let mut numbered = |prefix: &str| parts.next()?.strip_prefix(prefix)?.parse::<u64>().ok();
        let (version, group, _member) = (numbered("v")?, numbered("g")?, numbered("")?);
        let incarnation = match parts.next() {
            None => 0,
            Some(start) => start.strip_prefix('r')?.parse().ok()?,
        };
        parts.next().is_none().then_some(Self { version, incarnation, group })
    }

    fn name(self) -> String {
        let start = if self.incarnation == 0 { String::new() } else { format!("-r{}", self.incarnation) };
        format!("v{}-g{}{start}", self.version, self.group)
    }
}

/// One that may be exported.
struct Candidate {
    key: Option<Key>,
    session: SessionId,
    episode: Episode,
}

impl Episodes {
    /// Chooses sessions, and counts the others.
    pub(super) fn of(
        index: &Index,
        books: Option<&RunBooks>,
        options: Options<'_>,
        counts: &mut Counts,
    ) -> Result<Self, ExportError> {
        let is_of_samples = options.format.is_of_samples();
        let config = match books {
            Some(books) if is_of_samples => Some(books.config()?),
            _ => None,
        };
        let mut candidates = vec![];
        for (session, found) in &index.sessions {
            let (key, episode) = keyed(books, session, (found.trial.as_ref(), found.task.as_ref()))?;
            let is_in_group = books.is_some() && episode.is_in_group();
            counts.episodes.all += u64::from(is_in_group);
            let bucket = match episode.standing {
                _ if !found.is_wanted => Some(NOT_ASKED),
                Some("evaluation") if options.with_evaluations && !is_of_samples => None,
                standing => standing.filter(|_| options.format.is_for_training()),
            };
            if let Some(bucket) = bucket {
                counts.sessions.add(bucket, 1);
                counts.calls.add(bucket, found.calls);
                counts.episodes.add(bucket, u64::from(is_in_group));
                continue;
            }
            if is_of_samples
                && key.is_none()
                && let Some(trial) = &episode.trial
            {
                return Err(ExportError::NoGroup { trial: trial.clone() });
            }
            candidates.push(Candidate { key, session: session.clone(), episode });
        }
        let mut episodes = Self { is_of_run: books.is_some(), ..Self::default() };
        if let Some(config) = &config {
            if config.training.shuffle_rewards {
                let note = "training.shuffle_rewards: the run trained on rewards shuffled among trials; these are those \
                            that the trials were graded with";
                counts.notes.insert(note.to_owned());
            }
            let eps = config.training.advantage_eps;
            let estimator = AdvantageEstimator::of(&config.training).ok_or(ExportError::Estimator { eps })?;
            candidates.sort_by(|a, b| (a.key, &a.episode.trial).cmp(&(b.key, &b.episode.trial)));
            episodes.groups = groups(&mut candidates, config.training.group_size, estimator)?;
            let is_left_out = options.format == Format::PrimeRl;
            for group in &episodes.groups {
                counts.groups.all += 1;
                counts.groups.add(if group.is_complete() { "complete" } else { "incomplete" }, 1);
                if group.is_complete() {
                    continue;
                }
                let what = if is_left_out { "left out" } else { "without an advantage" };
                let note = format!("groups of which not all episodes are here with a reward: {what}");
                counts.notes.insert(note);
                for session in group.sessions.iter().filter(|_| is_left_out) {
                    counts.sessions.add(INCOMPLETE, 1);
                    counts.episodes.add(INCOMPLETE, 1);
                    counts.calls.add(INCOMPLETE, index.sessions[session].calls);
                }
            }
            if is_left_out {
                let is_complete =
                    |group: Option<usize>| group.is_some_and(|group| episodes.groups[group].is_complete());
                candidates.retain(|candidate| is_complete(candidate.episode.group));
            }
        }
        for (number, Candidate { session, mut episode, .. }) in (0..).zip(candidates) {
            episode.number = number;
            episodes.order.push(session.clone());
            episodes.by_session.insert(session, episode);
        }
        Ok(episodes)
    }
}

/// What a session is an attempt at. `of`: the trial and the task that its calls name.
pub(super) fn of_session(
    books: Option<&RunBooks>,
    session: &SessionId,
    of: (Option<&TrialId>, Option<&TaskId>),
) -> Result<Episode, ExportError> {
    Ok(keyed(books, session, of)?.1)
}

fn keyed(
    books: Option<&RunBooks>,
    session: &SessionId,
    (trial, task): (Option<&TrialId>, Option<&TaskId>),
) -> Result<(Option<Key>, Episode), ExportError> {
    let (key, episode) = match (books, trial) {
        (None, trial) => (None, Episode { trial: trial.cloned(), ..Episode::default() }),
        (Some(_), None) => (None, Episode { standing: Some(NO_TRIAL), ..Episode::default() }),
        (Some(books), Some(trial)) => of_trial(trial, &books.attempt(trial, session)?),
    };
    let own = episode.task.clone();
    Ok((key, Episode { task: own.or_else(|| task.cloned()), ..episode }))
}

fn of_trial(trial: &TrialId, attempt: &Attempt) -> (Option<Key>, Episode) {
    let key = Key::of(trial, attempt).filter(|_| !attempt.is_evaluation);
    let episode = Episode {
        trial: Some(trial.clone()),
        task: attempt.task_id.clone(),
        version: Some(attempt.version.0).filter(|_| attempt.left_out != Some("its trial has not ended")),
        group_id: key.map(Key::name),
        group: None,
        number: 0,
        reward: attempt.reward,
        advantage: None,
        is_evaluation: attempt.is_evaluation,
        is_masked: attempt.is_masked,
        standing: attempt.left_out,
    };
    (key, episode)
}

/// Puts episodes that are sorted by group together, and gives those of complete groups their advantages.
fn groups(
    candidates: &mut [Candidate],
    size: usize,
    estimator: AdvantageEstimator,
) -> Result<Vec<Group>, ExportError> {
    let mut groups: Vec<Group> = vec![];
    for of_group in candidates.chunk_by_mut(|a, b| a.key == b.key) {
        let (first, others) = of_group.split_at(1);
        for other in others {
            let (a, b) = (&first[0].episode, &other.episode);
            let what = match () {
                () if a.version != b.version => "policy versions",
                () if a.task.is_some() && b.task.is_some() && a.task != b.task => "tasks",
                () => continue,
            };
            if let (Some(first), Some(second)) = (a.trial.clone(), b.trial.clone()) {
                return Err(ExportError::MixedGroup { first, second, what });
            }
        }
        let rewards: Vec<f64> = of_group.iter().filter_map(|one| one.episode.reward).collect();
        let sessions = of_group.iter().map(|one| one.session.clone()).collect();
        let group = Group { size, rewards, sessions };
        if group.is_complete() {
            let values = advantages(estimator, &vec![0; size], &group.rewards)?.values;
            for (one, value) in of_group.iter_mut().zip(values) {
                one.episode.advantage = Some(value);
            }
        }
        of_group.iter_mut().for_each(|one| one.episode.group = Some(groups.len()));
        groups.push(group);
    }
    Ok(groups)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_named_by_version_number_and_start() {
        let key = |name: &str| Key::in_name(&name.parse().expect("id")).map(Key::name);
        assert_eq!(key("v3-g12-0").as_deref(), Some("v3-g12"));
        assert_eq!(key("v3-g12-7-r2").as_deref(), Some("v3-g12-r2"));
        for other in ["t1", "v3-g12", "eval-before-t1-0", "v3-g12-0-x", "v3-g12-0-r1-2", "vx-g1-0", "v1-gx-0"]
        {
            assert_eq!(key(other), None, "{other}");
        }
    }
}
