//! What an attempt comes to: its reward, its samples, and where each of its tokens went.

use std::collections::HashMap;
use std::time::Duration;

use metrics::counter;

use super::trial::{Purpose, TrialOptions, TrialResult};
use super::{RolloutError, conclude};
use crate::proxy::SessionResult;
use crate::record::{Call, CallId, CallKind, Disposition, ExitEvidence, Outcome, Termination};
use crate::task::Verdict;
use crate::trajectory::{self, BreakReason, Heard, IdTexts};

/// What one attempt found.
pub(super) struct Attempt {
    pub(super) outcome: Outcome,
    pub(super) evidence: ExitEvidence,
    pub(super) session: SessionResult,
    pub(super) verdict: Option<Verdict>,
    /// Wall time of the verifier.
    pub(super) verify: Duration,
}

impl Attempt {
    /// Its tokens are not trained on: it ran out of memory, and that is to be masked.
    fn is_masked(&self, options: &TrialOptions) -> bool {
        let is_oom = self.outcome == Outcome::Valid { termination: Termination::AgentOom };
        is_oom && !options.is_agent_oom_graded
    }
}

/// `None` for a trial that has no reward: its episode leaves its group. A masked one keeps its place there.
///
/// The floor for trials that the policy made invalid shapes training; an evaluation tells what the tests say.
pub(super) fn reward(options: &TrialOptions, purpose: Purpose, attempt: &Attempt) -> Option<f64> {
    let Outcome::Valid { termination } = &attempt.outcome else { return None };
    let is_invalid =
        matches!(termination, Termination::AgentOom | Termination::AgentTimeout | Termination::NonZeroExit);
    match options.invalid_reward {
        Some(floor) if is_invalid && purpose == Purpose::Training => Some(floor),
        _ => attempt.verdict.as_ref().map(|verdict| verdict.reward),
    }
}

/// Books an attempt: every sampled token of each (law 6); reward, turns and samples of the last.
pub(super) fn book(
    options: &TrialOptions,
    attempt: &Attempt,
    is_last: bool,
    result: &mut TrialResult,
) -> Result<(), RolloutError> {
    result.outcome = attempt.outcome.clone();
    result.reward = is_last.then(|| reward(options, result.spec.purpose, attempt)).flatten();
    let calls = &attempt.session.calls;
    let turns = turns(calls.iter().map(AsRef::as_ref));
    result.turns = turns.len();
    result.measured_prompts = turns.values().flatten().count();
    result.prompt_tokens = turns.values().flatten().sum();

    let spec = &result.spec;
    let episode = trajectory::Episode { episode_id: spec.episode, group_id: spec.group };
    let lineages = trajectory::lineages(calls);
    result.breaks.extend(breaks(&lineages, options.texts.as_ref()));
    let built = trajectory::samples(&lineages, Some(episode), &options.samples);
    built.check(calls).map_err(|unbalanced| RolloutError::Ledger {
        trial: spec.trial_id.to_string(),
        cause: unbalanced.to_string(),
    })?;
    let verdict_on_trained = if matches!(attempt.outcome, Outcome::Invalid { .. }) || !is_last {
        Some(Disposition::InfraFailure)
    } else if spec.purpose == Purpose::Evaluation {
        Some(Disposition::Dropped("evaluation".to_owned()))
    } else if attempt.is_masked(options) {
        Some(Disposition::Masked("agent_oom".to_owned()))
    } else {
        None
    };
    for entry in built.ledger {
        result.sampled_tokens += entry.tokens;
        let disposition = match (&verdict_on_trained, entry.disposition) {
            (None, Disposition::Trained) => continue,
            (Some(verdict), Disposition::Trained) => verdict.clone(),
            (_, other) => other,
        };
        result.left_out.push((disposition, entry.tokens));
    }
    if verdict_on_trained.is_none() {
        result.samples = built.samples;
    }
    Ok(())
}

/// Why histories were rewritten, counted.
fn breaks(lineages: &trajectory::Lineages, texts: Option<&IdTexts>) -> Vec<BreakReason> {
    let rows = lineages.sessions().flat_map(|session| IdTexts::table(texts, session, Heard::default()));
    let reasons: Vec<BreakReason> = rows.filter_map(|row| Some(row.broke?.reason)).collect();
    for reason in &reasons {
        counter!("lego_trainer_lineage_breaks_total", "reason" => reason.as_str()).increment(1);
    }
    reasons
}

/// The calls that the policy answered, each once whatever its choices, with the length of its prompt where that is
/// known.
fn turns<'a>(calls: impl Iterator<Item = &'a Call>) -> HashMap<CallId, Option<u64>> {
    let mut turns = HashMap::new();
    for call in calls.filter(|call| call.kind == CallKind::Policy && conclude::is_answered(call)) {
        let ids = call.prompt_token_ids.as_ref().map(|ids| ids.len() as u64);
        let length = ids.or(call.usage.map(|usage| usage.prompt_tokens));
        let known = turns.entry(call.call_id).or_insert(length);
        *known = known.or(length);
    }
    turns
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use serde_json::json;

    use super::*;
    use crate::config::Samples;
    use crate::loss::AdvantageEstimator;
    use crate::record::{EpisodeId, GroupId, InfraFailure, Usage, example};
    use crate::rollout::TrialSpec;
    use crate::sandbox::Limits;
    use crate::task::Task;

    /// An answered policy call that can be trained.
    fn call(prompt: &[u32], completion: &[u32]) -> Call {
        let usage = json!({"prompt_tokens": prompt.len(), "completion_tokens": completion.len()});
        example::call(json!({
            "prompt_ids_source": "engine", "prompt_token_ids": prompt, "completion_token_ids": completion,
            "completion_logprobs": vec![-0.5; completion.len()], "completion_ids_source": "engine",
            "logprob_semantics": "raw_t1", "sampling_sent": {"temperature": 1.0},
            "weight_spans": [{"version": "0", "start": 0, "end": completion.len()}],
            "weight_source": "reply_spans", "finish_reason": "stop", "usage": usage, "trainable": true,
        }))
    }

    fn options(is_agent_oom_graded: bool) -> TrialOptions {
        TrialOptions {
            timeout: Duration::from_secs(1),
            max_calls: 3,
            model_name: "m".to_owned(),
            limits: Limits::default(),
            max_output_bytes: 1,
            is_agent_oom_graded,
            invalid_reward: None,
            samples: Samples::default(),
            texts: None,
        }
    }

    fn spec(episode: u64, purpose: Purpose) -> TrialSpec {
        TrialSpec {
            trial_id: format!("t{episode}").parse().expect("id"),
            task: Arc::new(Task::example()),
            episode: EpisodeId(episode),
            group: GroupId(0),
            purpose,
            seed: 1,
            temperature: 1.0,
            is_greedy: false,
        }
    }

    fn attempt(outcome: Outcome, reward: f64, calls: Vec<Call>) -> Attempt {
        let verdict = Verdict {
            reward,
            resolved: reward >= 1.0,
            tests: std::collections::BTreeMap::new(),
            note: None,
            restored_paths: Vec::new(),
            evidence: None,
        };
        let calls = calls.into_iter().map(Arc::new).collect();
        let session = SessionResult { calls, ..SessionResult::default() };
        Attempt {
            outcome,
            evidence: ExitEvidence::default(),
            session,
            verdict: Some(verdict),
            verify: Duration::ZERO,
        }
    }

    fn booked(options: &TrialOptions, spec: TrialSpec, attempts: &[Attempt]) -> TrialResult {
        let mut result = TrialResult::new(spec);
        for (index, attempt) in attempts.iter().enumerate() {
            book(options, attempt, index + 1 == attempts.len(), &mut result).expect("balanced");
        }
        result
    }

    const OOM: Outcome = Outcome::Valid { termination: Termination::AgentOom };
    const COMPLETED: Outcome = Outcome::Valid { termination: Termination::Completed };

    #[test]
    fn a_masked_trial_keeps_its_place_in_its_group_and_trains_nothing() {
        let options = options(false);
        let oom = [
            attempt(OOM, 0.0, vec![call(&[1, 2], &[3, 4])]),
            attempt(OOM, 0.0, vec![call(&[1, 2], &[5, 6, 7])]),
        ];
        let masked = booked(&options, spec(0, Purpose::Training), &oom);
        let solved =
            booked(&options, spec(1, Purpose::Training), &[attempt(COMPLETED, 1.0, vec![call(&[1], &[2])])]);
        assert!(masked.samples.is_empty());
        assert_eq!(
            masked.left_out,
            [(Disposition::InfraFailure, 2), (Disposition::Masked("agent_oom".to_owned()), 3)]
        );
        assert_eq!(masked.sampled_tokens, 5);
        assert_eq!(solved.samples.len(), 1);
        let rewards: Vec<f64> = [&masked, &solved].iter().filter_map(|result| result.reward).collect();
        let advantages = crate::loss::advantages(AdvantageEstimator::MeanOnly, &[0, 0], &rewards);
        assert_eq!(advantages.expect("one group").values, [-0.5, 0.5]);
    }

    #[test]
    fn a_trial_that_is_graded_or_evaluated_is_masked_nowhere() {
        let oom = || [attempt(OOM, 0.0, vec![call(&[1, 2], &[3, 4])])];
        let graded = booked(&options(true), spec(0, Purpose::Training), &oom());
        assert_eq!((graded.reward, graded.samples.len(), graded.left_out.len()), (Some(0.0), 1, 0));
        let evaluated = booked(&options(false), spec(0, Purpose::Evaluation), &oom());
        assert_eq!(evaluated.reward, Some(0.0), "an evaluation counts it as unsolved");
        assert_eq!(evaluated.left_out, [(Disposition::Dropped("evaluation".to_owned()), 2)]);
    }

    #[test]
    fn the_floor_of_invalid_trajectories_is_trainings_own() {
        let options = TrialOptions { invalid_reward: Some(-1.0), ..options(true) };
        let crashed = Outcome::Valid { termination: Termination::NonZeroExit };
        let reward = |purpose| {
            let solved = attempt(crashed.clone(), 1.0, vec![call(&[1], &[2])]);
            booked(&options, spec(0, purpose), &[solved]).reward
        };
        assert_eq!((reward(Purpose::Training), reward(Purpose::Evaluation)), (Some(-1.0), Some(1.0)));
    }

    #[test]
    fn turns_and_prompts_are_of_the_same_calls_of_the_last_attempt() {
        let failed = Outcome::Invalid { failure: InfraFailure::HostOom };
        let first = attempt(failed, 0.0, vec![call(&[1; 100], &[2])]);
        let one = call(&[1; 10], &[3]);
        let second_choice = Call { choice_index: 1, ..one.clone() };
        let side_call = Call { kind: CallKind::Aux, ..call(&[1; 1000], &[2]) };
        let cut = Call { status: crate::record::CallStatus::Aborted, usage: None, ..call(&[1; 500], &[]) };
        let told = Call {
            prompt_token_ids: None,
            usage: Some(Usage { prompt_tokens: 30, completion_tokens: 1, ..Usage::default() }),
            ..call(&[], &[4])
        };
        let unknown = Call { prompt_token_ids: None, usage: None, ..call(&[], &[5]) };
        let one = Call { usage: one.usage.map(|usage| Usage { completion_tokens: 2, ..usage }), ..one };
        let second_choice = Call { usage: one.usage, ..second_choice };
        let last = attempt(COMPLETED, 1.0, vec![one, second_choice, side_call, cut, told, unknown]);
        let result = booked(&options(true), spec(0, Purpose::Training), &[first, last]);
        assert_eq!((result.turns, result.measured_prompts, result.prompt_tokens), (3, 2, 40));
    }
}
