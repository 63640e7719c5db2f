//! A wave: a set of trials run side by side, all of one policy version.

use std::sync::Arc;

use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::{RolloutError, TrialEnv, TrialResult, TrialSpec, run_trial};

/// Called as each trial ends.
pub type WaveProgress<'a> = &'a mut (dyn FnMut(&TrialResult) + Send);

/// Runs every trial, at most `max_concurrent` at once, started in order; gives the results in the order
/// of `specs`. Cancelling ends the running trials and starts no more.
///
/// # Errors
/// [`RolloutError`] when a trial met something that no other trial could do without (the capture store),
/// or the wave was cancelled. No trial is left running.
pub async fn run_wave(
    env: &Arc<TrialEnv>,
    specs: Vec<TrialSpec>,
    max_concurrent: usize,
    cancel: &CancellationToken,
    progress: WaveProgress<'_>,
) -> Result<Vec<TrialResult>, RolloutError> {
    let permits = Arc::new(Semaphore::new(max_concurrent.max(1)));
    let mut trials = JoinSet::new();
    let mut results: Vec<Option<TrialResult>> = specs.iter().map(|_| None).collect();
    let mut waiting = specs.into_iter().enumerate();
    let mut failure = None;
    loop {
        while failure.is_none() && !cancel.is_cancelled() {
            let Ok(permit) = Arc::clone(&permits).try_acquire_owned() else { break };
            let Some((index, spec)) = waiting.next() else { break };
            let (env, cancel) = (Arc::clone(env), cancel.clone());
            trials.spawn(async move {
                let result = run_trial(&env, &spec, &cancel).await;
                drop(permit);
                (index, result)
            });
        }
        match trials.join_next().await {
            None => break,
            Some(Ok((index, Ok(result)))) => {
                progress(&result);
                results[index] = Some(result);
            }
            Some(Ok((_, Err(error)))) => {
                cancel_rest(&mut failure, error, cancel);
            }
            Some(Err(panic)) => {
                cancel_rest(&mut failure, RolloutError::Panicked(panic.to_string()), cancel);
            }
        }
    }
    if let Some(error) = failure {
        return Err(error);
    }
    results.into_iter().collect::<Option<Vec<_>>>().ok_or(RolloutError::Cancelled)
}

/// The first failure is the one to report; the other trials end with it.
fn cancel_rest(failure: &mut Option<RolloutError>, error: RolloutError, cancel: &CancellationToken) {
    if failure.is_none() && !matches!(error, RolloutError::Cancelled) {
        *failure = Some(error);
    }
    cancel.cancel();
}
