//! One trial: a task, a sandbox, a harness, a session; then the verifier.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use super::{RolloutError, SessionFacts, conclude};
use crate::harness::{Harness, LISTEN_PORT, TrialInput, WORKSPACE};
use crate::proxy::{Proxy, SessionResult, SessionSpec};
use crate::record::{
    CallKind, Disposition, EpisodeId, ExitEvidence, GroupId, InfraFailure, Outcome, Sample,
    SessionId, TaskId, Termination, TrialId,
};
use crate::sandbox::{Backend, Limits, Mount, Spec};
use crate::task::{Task, TaskStore, Verdict, Verifier};
use crate::trajectory;

/// What a trial is for. Evaluation trials are captured like the others and never train.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Purpose {
    Training,
    Evaluation,
}

/// One trial to run.
#[derive(Debug, Clone)]
pub struct TrialSpec {
    pub trial_id: TrialId,
    pub task: Arc<Task>,
    pub episode: EpisodeId,
    pub group: GroupId,
    pub purpose: Purpose,
    /// Seed of the session's sampling: call `i` samples with a seed derived from it and `i`.
    pub seed: u64,
    /// 0 is greedy.
    pub temperature: f64,
}

/// What all trials of a run have in common.
#[derive(Debug, Clone)]
pub struct TrialOptions {
    /// Wall time of the harness; then the trial ends as the policy's own timeout.
    pub timeout: Duration,
    /// Model calls a trial may make.
    pub max_calls: usize,
    /// Name the harness asks for.
    pub model_name: String,
    pub limits: Limits,
    pub max_output_bytes: usize,
    /// An out-of-memory trial is graded; if not, it is masked.
    pub is_agent_oom_graded: bool,
    /// Reward is the share of passed tests, not all or nothing.
    pub has_partial_credit: bool,
    /// Reward of a trial that the policy itself made invalid, where that is wanted.
    pub invalid_reward: Option<f64>,
}

/// The machinery that trials share.
pub struct TrialEnv {
    pub backend: Arc<dyn Backend>,
    pub proxy: Proxy,
    pub store: Arc<TaskStore>,
    pub verifier: Verifier,
    pub harness: Arc<dyn Harness>,
    pub options: TrialOptions,
    /// Workspaces of running trials.
    pub scratch: PathBuf,
    /// `trials/<trial_id>/` keeps logs, diff, verifier output and `result.json`.
    pub trials: PathBuf,
}

/// How a trial ended. Every trial that was started has one.
#[derive(Debug)]
pub struct TrialResult {
    pub spec: TrialSpec,
    pub outcome: Outcome,
    /// `None` exactly when the outcome is invalid or masked.
    pub reward: Option<f64>,
    pub samples: Vec<Sample>,
    /// Sampled tokens that are in no sample, by what became of them; those of failed attempts too.
    pub left_out: Vec<(Disposition, u64)>,
    /// Tokens the policy sampled, over all attempts.
    pub sampled_tokens: u64,
    /// Prompt tokens over all calls.
    pub prompt_tokens: u64,
    /// Calls the policy answered in the last attempt.
    pub turns: usize,
    pub attempts: u32,
    pub wall: Duration,
}

/// `result.json`.
#[derive(Serialize)]
struct ResultFile<'a> {
    trial_id: &'a TrialId,
    task_id: &'a TaskId,
    session_id: &'a SessionId,
    purpose: Purpose,
    seed: u64,
    temperature: f64,
    attempt: u32,
    #[serde(flatten)]
    outcome: &'a Outcome,
    reward: Option<f64>,
    turns: usize,
    exit: &'a ExitEvidence,
    verdict: Option<&'a Verdict>,
    sandbox: &'a crate::sandbox::Capabilities,
    wall_ms: u64,
}

/// What one attempt found.
struct Attempt {
    outcome: Outcome,
    evidence: ExitEvidence,
    session: SessionResult,
    verdict: Option<Verdict>,
}

/// Runs a trial to its end: a second attempt on a fresh sandbox follows an infrastructure failure or an
/// out-of-memory kill (law 9), and what the second one finds stands.
///
/// # Errors
/// Only what no other trial could do without either.
pub async fn run_trial(
    env: &TrialEnv,
    spec: &TrialSpec,
    cancel: &CancellationToken,
) -> Result<TrialResult, RolloutError> {
    let started = Instant::now();
    let mut result = TrialResult {
        spec: spec.clone(),
        outcome: Outcome::Invalid { failure: InfraFailure::Shutdown },
        reward: None,
        samples: Vec::new(),
        left_out: Vec::new(),
        sampled_tokens: 0,
        prompt_tokens: 0,
        turns: 0,
        attempts: 0,
        wall: Duration::ZERO,
    };
    loop {
        result.attempts += 1;
        let folder = TrialFolder::create(env, spec, result.attempts)?;
        let session_id: SessionId = format!("{}.{}", spec.trial_id, result.attempts)
            .parse()
            .map_err(|error: crate::record::InvalidId| RolloutError::Capture(error.to_string()))?;
        let attempt = tokio::select! {
            attempt = attempt(env, spec, &session_id, &folder) => attempt?,
            () = cancel.cancelled() => {
                let _closed = env.proxy.close_session(&session_id).await;
                return Err(RolloutError::Cancelled);
            }
        };
        let is_last = result.attempts == 2 || !deserves_another(&attempt.outcome);
        result.outcome = attempt.outcome.clone();
        result.reward = is_last.then(|| reward(&env.options, &attempt)).flatten();
        result.turns = attempt.session.calls.len();
        account(spec, &attempt, is_last, &session_id, &mut result)?;
        result.wall = started.elapsed();
        folder.write_result(env, &ResultFile {
            trial_id: &spec.trial_id,
            task_id: &spec.task.instance_id,
            session_id: &session_id,
            purpose: spec.purpose,
            seed: spec.seed,
            temperature: spec.temperature,
            attempt: result.attempts,
            outcome: &attempt.outcome,
            reward: result.reward,
            turns: result.turns,
            exit: &attempt.evidence,
            verdict: attempt.verdict.as_ref(),
            sandbox: env.backend.capabilities(),
            wall_ms: result.wall.as_millis() as u64,
        })?;
        if is_last {
            return Ok(result);
        }
    }
}

fn deserves_another(outcome: &Outcome) -> bool {
    match outcome {
        Outcome::Invalid { failure } => !matches!(failure, InfraFailure::Shutdown | InfraFailure::Task(_)),
        Outcome::Valid { termination } => *termination == Termination::AgentOom,
    }
}

/// `None` for a trial that has no reward: its episode leaves its group.
fn reward(options: &TrialOptions, attempt: &Attempt) -> Option<f64> {
    let Outcome::Valid { termination } = &attempt.outcome else { return None };
    if *termination == Termination::AgentOom && !options.is_agent_oom_graded {
        return None;
    }
    let verdict = attempt.verdict.as_ref()?;
    let is_invalid = matches!(
        termination,
        Termination::AgentOom | Termination::AgentTimeout | Termination::NonZeroExit
    );
    Some(match options.invalid_reward {
        Some(floor) if is_invalid => floor,
        _ if options.has_partial_credit => verdict.passed_share(),
        _ => f64::from(u8::from(verdict.is_resolved())),
    })
}
