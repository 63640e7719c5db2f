//! One trial: a task, a sandbox, a harness, a session; then the verifier.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use super::books::{Attempt, book};
use super::{RolloutError, SessionFacts, conclude};
use crate::config::Samples;
use crate::harness::{Harness, LISTEN_PORT, TrialInput, WORKSPACE};
use crate::proxy::{Proxy, SessionResult, SessionSampling, SessionSpec, VersionSource};
use crate::record::{
    CallKind, Disposition, EpisodeId, ExitEvidence, GroupId, InfraFailure, Outcome, Sample, SessionId,
    TaskId, Termination, TrialId,
};
use crate::sandbox::{Backend, Limits, Mount, SandboxError, Spec, make_readable, remove_tree};
use crate::task::{ChangeError, Task, TaskStore, Verdict, Verifier};
use crate::trajectory::{BreakReason, IdTexts};

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
    pub temperature: f64,
    /// The task's one greedy trial, beside those that are sampled (at whatever temperature).
    pub is_greedy: bool,
}

/// What all trials of a run have in common.
#[derive(Debug, Clone)]
pub struct TrialOptions {
    /// Wall time of the harness; then the trial ends as the policy's own timeout.
    pub timeout: Duration,
    /// Model calls a trial may make.
    pub max_calls: u64,
    /// Name the harness asks for.
    pub model_name: String,
    pub limits: Limits,
    pub max_output_bytes: usize,
    /// An out-of-memory trial is graded; if not, it is masked.
    pub is_agent_oom_graded: bool,
    /// Reward of a trial that the policy itself made invalid, where that is wanted.
    pub invalid_reward: Option<f64>,
    /// What is trained of its calls.
    pub samples: Samples,
    /// Texts of the policy's ids: why a history was rewritten can often be told only from them.
    pub texts: Option<IdTexts>,
}

/// The machinery that trials share.
pub struct TrialEnv {
    pub backend: Arc<dyn Backend>,
    pub proxy: Proxy,
    pub store: Arc<TaskStore>,
    pub verifier: Verifier,
    pub harness: Arc<dyn Harness>,
    pub options: TrialOptions,
    /// The version that the upstream samples with now.
    pub policy_version: VersionSource,
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
    /// `None` exactly when the outcome is invalid.
    pub reward: Option<f64>,
    /// Empty too for a masked trial, which keeps its reward.
    pub samples: Vec<Sample>,
    /// Sampled tokens that are in no sample, by what became of them; those of failed attempts too.
    pub left_out: Vec<(Disposition, u64)>,
    /// Why histories were rewritten, over all attempts.
    pub breaks: Vec<BreakReason>,
    /// Tokens the policy sampled, over all attempts.
    pub sampled_tokens: u64,
    /// Calls that the policy answered in the last attempt, each once.
    pub turns: usize,
    /// Those of them whose prompt's length is known.
    pub measured_prompts: usize,
    /// Prompt tokens of [`measured_prompts`](Self::measured_prompts) calls.
    pub prompt_tokens: u64,
    pub attempts: u32,
    pub wall: Duration,
    /// Of `wall`: the verifier, over all attempts.
    pub verify: Duration,
}

impl TrialResult {
    /// Of a trial that nothing is known of yet.
    pub(super) fn new(spec: TrialSpec) -> Self {
        Self {
            spec,
            outcome: Outcome::Invalid { failure: InfraFailure::Shutdown },
            reward: None,
            samples: Vec::new(),
            left_out: Vec::new(),
            breaks: Vec::new(),
            sampled_tokens: 0,
            turns: 0,
            measured_prompts: 0,
            prompt_tokens: 0,
            attempts: 0,
            wall: Duration::ZERO,
            verify: Duration::ZERO,
        }
    }
}

/// `result.json`.
#[derive(Serialize)]
struct ResultFile<'a> {
    trial_id: &'a TrialId,
    task_id: &'a TaskId,
    session_id: &'a SessionId,
    purpose: Purpose,
    episode_id: EpisodeId,
    /// The trials of a policy version with this one share a baseline.
    group_id: GroupId,
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
    let mut result = TrialResult::new(spec.clone());
    loop {
        result.attempts += 1;
        let folder = TrialFolder::create(env, spec, result.attempts)?;
        let session_id: SessionId = format!("{}.{}", spec.trial_id, result.attempts)
            .parse()
            .map_err(|error: crate::record::InvalidId| RolloutError::Session(error.to_string()))?;
        let attempt = tokio::select! {
            attempt = attempt(env, spec, &session_id, &folder) => attempt?,
            // Dropping the attempt ends its sandbox and closes its session.
            () = cancel.cancelled() => return Err(RolloutError::Cancelled),
        };
        let is_last = result.attempts == 2 || !deserves_another(&attempt.outcome);
        book(&env.options, &attempt, is_last, &mut result)?;
        result.wall = started.elapsed();
        result.verify += attempt.verify;
        folder.write(
            "result.json",
            &ResultFile {
                trial_id: &spec.trial_id,
                task_id: &spec.task.instance_id,
                session_id: &session_id,
                purpose: spec.purpose,
                episode_id: spec.episode,
                group_id: spec.group,
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
            },
        )?;
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

/// One try: sandbox, harness, diff, verifier.
async fn attempt(
    env: &TrialEnv,
    spec: &TrialSpec,
    session_id: &SessionId,
    folder: &TrialFolder,
) -> Result<Attempt, RolloutError> {
    let invalid = |failure, evidence, session| Attempt {
        outcome: Outcome::Invalid { failure },
        evidence,
        session,
        verdict: None,
        verify: Duration::ZERO,
    };
    let nothing = || (ExitEvidence::default(), SessionResult::default());
    let workspace = folder.scratch.join("workspace");
    if let Err(error) = in_background({
        let (store, task, workspace) = (Arc::clone(&env.store), Arc::clone(&spec.task), workspace.clone());
        move || store.prepare(&task, &workspace)
    })
    .await?
    {
        let (evidence, session) = nothing();
        return Ok(invalid(InfraFailure::Task(error.to_string()), evidence, session));
    }

    let launch = env.harness.launch(&TrialInput {
        statement: &spec.task.problem_statement,
        model: &env.options.model_name,
        timeout: env.options.timeout,
        max_output_bytes: env.options.max_output_bytes,
    });
    let mut mounts = launch.mounts;
    mounts.push(Mount { host: workspace.clone(), inside: WORKSPACE.into(), is_writable: true });
    let sandbox_spec = Spec { mounts, listen_port: Some(LISTEN_PORT), limits: env.options.limits.clone() };
    let mut sandbox = match env.backend.create(sandbox_spec).await {
        Ok(sandbox) => sandbox,
        Err(error) => {
            let (evidence, session) = nothing();
            return Ok(invalid(InfraFailure::SandboxStart(error.to_string()), evidence, session));
        }
    };
    let Some(listener) = sandbox.take_listener() else {
        let (evidence, session) = nothing();
        let cause = "the sandbox has no listener".to_owned();
        return Ok(invalid(InfraFailure::SandboxStart(cause), evidence, session));
    };
    let session = env
        .proxy
        .open_session(SessionSpec {
            session_id: session_id.clone(),
            trial_id: Some(spec.trial_id.clone()),
            task_id: Some(spec.task.instance_id.clone()),
            harness: Some(env.harness.name().to_owned()),
            kind: CallKind::Policy,
            sampling: SessionSampling::Pinned { temperature: spec.temperature, seed: spec.seed },
            policy_version: Some(Arc::clone(&env.policy_version)),
            max_calls: Some(env.options.max_calls),
        })
        .map_err(|error| RolloutError::Session(error.to_string()))?;
    let (served, run) = {
        let serving = env.proxy.serve_session_listener(listener, session_id);
        tokio::pin!(serving);
        let run = sandbox.exec(launch.exec);
        tokio::pin!(run);
        tokio::select! {
            biased;
            run = &mut run => (None, Some(run)),
            served = &mut serving => (Some(served), None),
        }
    };
    let session = session.close().await;
    let exit = match (run, served) {
        (Some(Ok(exit)), _) => exit,
        (Some(Err(error)), _) => {
            let failure = match error {
                SandboxError::Exec { .. } => {
                    InfraFailure::Harness(format!("does not start: {error}; see harness.command"))
                }
                error => InfraFailure::SandboxLost(error.to_string()),
            };
            return Ok(invalid(failure, ExitEvidence::default(), session));
        }
        // The listener ends before the harness only when the proxy shuts down.
        (None, _) => return Ok(invalid(InfraFailure::Shutdown, ExitEvidence::default(), session)),
    };
    // What the agent left running ends before its files are read.
    if let Err(error) = sandbox.stop().await {
        return Ok(invalid(InfraFailure::SandboxLost(error.to_string()), exit.evidence, session));
    }
    folder.write_bytes(STDOUT, &exit.stdout)?;
    folder.write_bytes(STDERR, &exit.stderr)?;

    let facts = SessionFacts::of(&session, env.harness.used_up_turns(&exit.stdout));
    let outcome = conclude(&exit.evidence, &facts);
    if matches!(outcome, Outcome::Invalid { .. }) {
        let (evidence, verify) = (exit.evidence, Duration::ZERO);
        return Ok(Attempt { outcome, evidence, session, verdict: None, verify });
    }
    let changes = in_background({
        let (store, task, workspace) = (Arc::clone(&env.store), Arc::clone(&spec.task), workspace);
        move || {
            // An agent that locks its files is graded like any other.
            make_readable(&workspace);
            store.changes(&task, &workspace)
        }
    })
    .await?;
    let started = Instant::now();
    let verdict = match changes {
        Ok(changes) => {
            folder.write_bytes(DIFF, &changes.diff)?;
            env.verifier.verify(&*env.backend, &spec.task, &changes.diff).await
        }
        Err(ChangeError::Refused { path, reason }) => {
            Ok(Verdict::rejected(&spec.task, format!("the diff is refused: {path}: {reason}")))
        }
        Err(error) => Err(InfraFailure::Verifier(error.to_string())),
    };
    let verify = started.elapsed();
    Ok(match verdict {
        Ok(verdict) => Attempt { outcome, evidence: exit.evidence, session, verdict: Some(verdict), verify },
        Err(failure) => Attempt { verify, ..invalid(failure, exit.evidence, session) },
    })
}

/// Runs blocking file work off the runtime's threads.
async fn in_background<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, RolloutError> {
    tokio::task::spawn_blocking(work).await.map_err(|error| RolloutError::Panicked(error.to_string()))
}

/// Files of a trial's folder that one attempt may leave and the next not write.
const STDOUT: &str = "stdout.log";
const STDERR: &str = "stderr.log";
const DIFF: &str = "changes.diff";

/// `trials/<trial_id>/`, and the trial's scratch folder, which goes with it.
struct TrialFolder {
    kept: PathBuf,
    scratch: PathBuf,
}

impl TrialFolder {
    fn create(env: &TrialEnv, spec: &TrialSpec, attempt: u32) -> Result<Self, RolloutError> {
        let kept = env.trials.join(spec.trial_id.as_str());
        let scratch = env.scratch.join(format!("{}.{attempt}", spec.trial_id));
        for dir in [&kept, &scratch] {
            fs::create_dir_all(dir).map_err(|source| RolloutError::Io { path: dir.clone(), source })?;
        }
        // What an earlier attempt left is not this one's.
        for name in ["result.json", STDOUT, STDERR, DIFF] {
            let path = kept.join(name);
            match fs::remove_file(&path) {
                Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
                    return Err(RolloutError::Io { path, source });
                }
                _ => {}
            }
        }
        Ok(Self { kept, scratch })
    }

    fn write<T: Serialize>(&self, name: &str, value: &T) -> Result<(), RolloutError> {
        let path = self.kept.join(name);
        let text = serde_json::to_vec_pretty(value)
            .map_err(|error| RolloutError::Io { path: path.clone(), source: std::io::Error::other(error) })?;
        self.write_bytes(name, &text)
    }

    fn write_bytes(&self, name: &str, bytes: &[u8]) -> Result<(), RolloutError> {
        let path = self.kept.join(name);
        fs::write(&path, bytes).map_err(|source| RolloutError::Io { path, source })
    }
}

impl Drop for TrialFolder {
    fn drop(&mut self) {
        // What is left is removed at the run's end or at its next start.
        if let Err(error) = remove_tree(&self.scratch) {
            tracing::warn!("cannot remove {}: {error}", self.scratch.display());
        }
    }
}
