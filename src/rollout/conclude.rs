//! From evidence to outcome: one pure function, so that no backend draws conclusions of its own.

use crate::proxy::SessionResult;
use crate::record::{Call, CallKind, CallStatus, ExitEvidence, InfraFailure, Outcome, Termination};

/// What is known of a trial's session.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SessionFacts {
    /// Calls that the policy answered, or was answering when the trial ended.
    pub policy_calls: usize,
    /// Errors of the upstream, in order.
    pub upstream_failures: Vec<String>,
    /// What is said of the last call that went wrong.
    pub last_error: Option<String>,
    /// The harness says that its turns were used up, or asked for more of them.
    pub is_at_max_turns: bool,
}

impl SessionFacts {
    /// Of a closed session.
    #[must_use]
    pub fn of(session: &SessionResult, has_harness_used_up_turns: bool) -> Self {
        let (calls, failures) = (&session.calls, session.upstream_failures.iter());
        let unreadable = calls.iter().filter(|call| is_no_reply(call)).filter_map(|call| call.error.as_ref());
        Self {
            policy_calls: calls.iter().filter(|call| is_policys_doing(call)).count(),
            upstream_failures: failures.chain(unreadable).cloned().collect(),
            last_error: calls.iter().rev().find_map(|call| call.error.clone()),
            is_at_max_turns: has_harness_used_up_turns || session.max_calls_hit,
        }
    }
}

/// The harness got the whole reply.
pub(super) fn is_answered(call: &Call) -> bool {
    matches!(call.status, CallStatus::Ok | CallStatus::ParseError) && !is_no_reply(call)
}

/// What came was not even JSON, and so none of the policy's: a proxy's page, say. It is kept as text.
fn is_no_reply(call: &Call) -> bool {
    let is_text = call.response.as_ref().is_some_and(|response| response.get().starts_with('"'));
    let is_empty = call.completion_token_ids.is_none() && call.text.is_none() && call.tool_calls.is_none();
    call.status == CallStatus::ParseError && is_text && is_empty
}

/// True if the policy sampled for the call, or was at it when the trial ended.
fn is_policys_doing(call: &Call) -> bool {
    if matches!(call.kind, CallKind::Judge | CallKind::Teacher | CallKind::Probe) {
        return false;
    }
    let has_sampled = call.completion_token_ids.as_ref().is_some_and(|ids| !ids.is_empty());
    let was_cut = matches!(call.status, CallStatus::Aborted | CallStatus::ClientDisconnect);
    // One that found no place (429), or had none when its session ended (403), never came to the policy. One that was sent again had an upstream that failed
    // before, and may have been waiting for the next try.
    let was_in_flight = was_cut && !matches!(call.http_status, 403 | 429) && call.attempt == 1;
    has_sampled || is_answered(call) || was_in_flight
}

/// Decides how a trial ended (law 9): infrastructure needs proof, the rest is the policy's own result.
///
/// A harness that ends while the policy neither answered a call nor was answering one did nothing of the policy's
/// doing, so it is filtered as a broken harness.
#[must_use]
pub fn conclude(evidence: &ExitEvidence, session: &SessionFacts) -> Outcome {
    let invalid = |failure| Outcome::Invalid { failure };
    let valid = |termination| Outcome::Valid { termination };
    // Whom lego killed when its time was up or its workspace too large no OOM killer has ended, whatever became of its
    // children before.
    let was_killed_by_lego = evidence.timed_out || evidence.is_killed_for_disk;
    let was_killed = !was_killed_by_lego && evidence.signal == Some(9);
    let was_killed_inside = !was_killed_by_lego && evidence.code == Some(137);
    let has_own_oom = evidence.oom_kills.is_some_and(|kills| kills > 0);
    let was_oom_killed = has_own_oom && (was_killed || was_killed_inside);
    if evidence.host_oom && was_killed && !was_oom_killed {
        return invalid(InfraFailure::HostOom);
    }
    if let Some(error) = session.upstream_failures.first() {
        return invalid(InfraFailure::Engine(error.clone()));
    }
    if session.policy_calls == 0 {
        let calls = match &session.last_error {
            None => "without a model call".to_owned(),
            Some(error) => format!("without an answer to a model call, of which the last: {error}"),
        };
        return invalid(InfraFailure::Harness(match (evidence.code, evidence.signal) {
            _ if was_oom_killed => {
                "ran out of memory before any model call: raise sandbox.memory_mb".to_owned()
            }
            _ if evidence.timed_out => format!("hung until its time was up, {calls}"),
            _ if evidence.is_killed_for_disk => {
                "wrote more than its workspace may take before any model call: raise sandbox.workspace_mb"
                    .to_owned()
            }
            (Some(code), _) => format!("exited with code {code} {calls} (see stderr.log of the trial)"),
            (None, signal) => format!("ended by signal {} {calls}", signal.unwrap_or(0)),
        }));
    }
    if was_oom_killed {
        return valid(Termination::AgentOom);
    }
    if evidence.timed_out {
        return valid(Termination::AgentTimeout);
    }
    if session.is_at_max_turns {
        return valid(Termination::MaxTurns);
    }
    valid(if evidence.code == Some(0) { Termination::Completed } else { Termination::NonZeroExit })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::example;

    fn outcome(change: impl Fn(&mut ExitEvidence, &mut SessionFacts)) -> Outcome {
        let mut evidence = ExitEvidence { code: Some(0), ..ExitEvidence::default() };
        let mut session = SessionFacts { policy_calls: 2, ..SessionFacts::default() };
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
        assert_eq!(outcome(|_, s| s.is_at_max_turns = true), valid(Termination::MaxTurns));
        assert_eq!(
            outcome(|e, _| {
                killed(e);
                e.oom_kills = Some(1);
                e.host_oom = true;
            }),
            valid(Termination::AgentOom)
        );
        assert_eq!(outcome(|e, _| e.oom_kills = Some(1)), valid(Termination::Completed), "a child's OOM");
        for is_hosts in [false, true] {
            assert_eq!(
                outcome(|e, _| {
                    killed(e);
                    e.timed_out = true;
                    e.oom_kills = Some(u64::from(!is_hosts));
                    e.host_oom = is_hosts;
                }),
                valid(Termination::AgentTimeout),
                "a child's OOM, and then a timeout: lego killed it"
            );
            assert_eq!(
                outcome(|e, _| {
                    killed(e);
                    (e.is_over_disk_limit, e.is_killed_for_disk) = (true, true);
                    e.oom_kills = Some(u64::from(!is_hosts));
                    e.host_oom = is_hosts;
                }),
                valid(Termination::NonZeroExit),
                "a child's OOM, and then a workspace too large: lego killed it"
            );
        }
    }

    #[test]
    fn a_page_in_place_of_a_reply_is_the_upstreams_failure() {
        let page = serde_json::json!({
            "status": "parse_error", "http_status": 200, "response": "<html>", "error": "no chat completion"
        });
        let session =
            SessionResult { calls: vec![std::sync::Arc::new(call(&page))], ..SessionResult::default() };
        let evidence = ExitEvidence { code: Some(1), ..ExitEvidence::default() };
        let outcome = conclude(&evidence, &SessionFacts::of(&session, false));
        let failure = InfraFailure::Engine("no chat completion".to_owned());
        assert_eq!(outcome, Outcome::Invalid { failure });
    }

    #[test]
    fn a_workspace_that_is_too_large_at_the_end_explains_no_kill() {
        let ended = |is_hosts: bool| {
            outcome(|e, _| {
                killed(e);
                e.is_over_disk_limit = true;
                e.oom_kills = Some(u64::from(!is_hosts));
                e.host_oom = is_hosts;
            })
        };
        assert_eq!(ended(false), Outcome::Valid { termination: Termination::AgentOom });
        assert_eq!(ended(true), Outcome::Invalid { failure: InfraFailure::HostOom });
    }

    #[test]
    fn a_harness_that_fails_before_any_call_says_what_to_raise() {
        let why = |change: fn(&mut ExitEvidence)| {
            let outcome = outcome(|e, s| {
                killed(e);
                change(e);
                s.policy_calls = 0;
            });
            match outcome {
                Outcome::Invalid { failure: InfraFailure::Harness(why) } => why,
                other => panic!("{other:?}"),
            }
        };
        assert!(why(|e| e.oom_kills = Some(1)).contains("sandbox.memory_mb"));
        assert!(why(|e| e.is_killed_for_disk = true).contains("sandbox.workspace_mb"));
        assert!(why(|e| e.timed_out = true).contains("time was up"));
        assert!(why(|_| {}).contains("signal 9"));
    }

    #[test]
    fn proven_infrastructure_failures_leave_the_batch() {
        let is_invalid = |outcome| matches!(outcome, Outcome::Invalid { .. });
        assert!(is_invalid(outcome(|_, s| s.upstream_failures.push("502".to_owned()))));
        assert!(is_invalid(outcome(|e, _| {
            killed(e);
            e.host_oom = true;
        })));
        assert!(is_invalid(outcome(|e, s| {
            e.code = Some(1);
            s.policy_calls = 0;
        })));
    }

    /// A call of a session that ended like this.
    fn call(change: &serde_json::Value) -> Call {
        let mut facts = serde_json::json!({"http_status": 503, "status": "aborted"});
        facts.as_object_mut().expect("members").extend(change.as_object().expect("members").clone());
        example::call(facts)
    }

    #[test]
    fn a_first_reply_that_never_ends_is_the_policys_own() {
        let concluded = |change: serde_json::Value, is_timeout: bool| {
            let calls = vec![std::sync::Arc::new(call(&change))];
            let session = SessionResult { calls, ..SessionResult::default() };
            let mut evidence = ExitEvidence { code: Some(1), ..ExitEvidence::default() };
            if is_timeout {
                killed(&mut evidence);
                evidence.timed_out = true;
            }
            conclude(&evidence, &SessionFacts::of(&session, false))
        };
        for own in [
            serde_json::json!({"status": "aborted"}),
            serde_json::json!({"status": "client_disconnect", "http_status": 200}),
            serde_json::json!({"status": "aborted", "attempt": 2, "completion_token_ids": [1]}),
            serde_json::json!({"status": "parse_error"}),
            serde_json::json!({"status": "parse_error", "response": {"choices": []}}),
            serde_json::json!({"status": "ok", "kind": "aux"}),
        ] {
            let valid = |termination| Outcome::Valid { termination };
            assert_eq!(concluded(own.clone(), true), valid(Termination::AgentTimeout), "{own}");
            assert_eq!(concluded(own.clone(), false), valid(Termination::NonZeroExit), "{own}");
        }
        for other in [
            serde_json::json!({"status": "aborted", "http_status": 429}),
            serde_json::json!({"status": "aborted", "attempt": 2}),
            serde_json::json!({"status": "upstream_error", "http_status": 400}),
            serde_json::json!({"status": "ok", "kind": "judge"}),
        ] {
            assert!(matches!(concluded(other.clone(), true), Outcome::Invalid { .. }), "{other}");
        }
    }

    #[test]
    fn turns_are_used_up_when_the_harness_says_so_or_asks_for_more() {
        let session = |max_calls_hit| SessionResult { max_calls_hit, ..SessionResult::default() };
        for (has_asked, says_so) in [(true, false), (false, true), (false, false)] {
            let facts = SessionFacts::of(&session(has_asked), says_so);
            assert_eq!(facts.is_at_max_turns, has_asked || says_so);
        }
    }
}
