//! From evidence to outcome: one pure function, so that no backend draws conclusions of its own.

use crate::record::{ExitEvidence, InfraFailure, Outcome, Termination};

/// What the proxy knows of a trial's session.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SessionFacts {
    /// Calls that reached the policy and were answered.
    pub answered_calls: usize,
    /// Errors of the upstream, in order.
    pub upstream_failures: Vec<String>,
    /// The harness asked for more calls than `max_turns`.
    pub is_over_max_calls: bool,
}

/// Decides how a trial ended (law 9): infrastructure needs proof, the rest is the policy's own result.
///
/// A harness that ends without one answered call did nothing of the policy's doing: no token was
/// sampled, so it is filtered as a broken harness.
#[must_use]
pub fn conclude(evidence: &ExitEvidence, session: &SessionFacts) -> Outcome {
    let invalid = |failure| Outcome::Invalid { failure };
    let valid = |termination| Outcome::Valid { termination };
    let was_oom_killed = evidence.oom_kills.is_some_and(|kills| kills > 0)
        && (evidence.signal == Some(9) || evidence.code == Some(137));
    if evidence.killed_by_us {
        return invalid(InfraFailure::Shutdown);
    }
    if evidence.sandbox_lost {
        return invalid(InfraFailure::SandboxLost("its init died or its control channel closed".to_owned()));
    }
    if evidence.host_oom && evidence.signal == Some(9) && !was_oom_killed {
        return invalid(InfraFailure::HostOom);
    }
    if let Some(error) = session.upstream_failures.first() {
        return invalid(InfraFailure::Engine(error.clone()));
    }
    if was_oom_killed {
        return valid(Termination::AgentOom);
    }
    if session.answered_calls == 0 {
        return invalid(InfraFailure::Harness(match (evidence.timed_out, evidence.code) {
            (true, _) => "hung without a model call until its time was up".to_owned(),
            (false, Some(code)) => format!("exited with code {code} without a model call"),
            (false, None) => format!("ended by signal {} without a model call", evidence.signal.unwrap_or(0)),
        }));
    }
    if evidence.timed_out {
        return valid(Termination::AgentTimeout);
    }
    if session.is_over_max_calls {
        return valid(Termination::MaxTurns);
    }
    valid(if evidence.code == Some(0) { Termination::Completed } else { Termination::NonZeroExit })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(change: impl Fn(&mut ExitEvidence, &mut SessionFacts)) -> Outcome {
        let mut evidence = ExitEvidence { code: Some(0), ..ExitEvidence::default() };
        let mut session = SessionFacts { answered_calls: 2, ..SessionFacts::default() };
        change(&mut evidence, &mut session);
        conclude(&evidence, &session)
    }

    fn killed(evidence: &mut ExitEvidence) {
        evidence.code = None;
        evidence.signal = Some(9);
    }

    #[test]
    fn what_the_policy_did_is_graded() {
        let valid = |termination| Outcome::Valid { termination };
        assert_eq!(outcome(|_, _| {}), valid(Termination::Completed));
        assert_eq!(outcome(|e, _| e.code = Some(1)), valid(Termination::NonZeroExit));
        assert_eq!(
            outcome(|e, _| killed(e)),
            valid(Termination::NonZeroExit),
            "a kill nobody can explain is no pardon"
        );
        assert_eq!(
            outcome(|e, _| {
                killed(e);
                e.timed_out = true;
            }),
            valid(Termination::AgentTimeout)
        );
        assert_eq!(outcome(|_, s| s.is_over_max_calls = true), valid(Termination::MaxTurns));
        assert_eq!(
            outcome(|e, _| {
                killed(e);
                e.oom_kills = Some(1);
                e.host_oom = true;
            }),
            valid(Termination::AgentOom)
        );
        assert_eq!(outcome(|e, _| e.oom_kills = Some(1)), valid(Termination::Completed), "a child's OOM");
    }

    #[test]
    fn proven_infrastructure_failures_leave_the_batch() {
        let is_invalid = |outcome| matches!(outcome, Outcome::Invalid { .. });
        assert!(is_invalid(outcome(|e, _| e.sandbox_lost = true)));
        assert!(is_invalid(outcome(|e, _| e.killed_by_us = true)));
        assert!(is_invalid(outcome(|_, s| s.upstream_failures.push("502".to_owned()))));
        assert!(is_invalid(outcome(|e, _| {
            killed(e);
            e.host_oom = true;
        })));
        assert!(is_invalid(outcome(|e, s| {
            e.code = Some(1);
            s.answered_calls = 0;
        })));
    }
}
