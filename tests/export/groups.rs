//! Episodes and groups: who is in which, and whose advantage is known.

use std::fs;

use lego::record::{Call, CallId};
use serde_json::{Value, json};

use crate::setup::{Run, sampled, unsampled};

const SAMPLE_FORMS: [&str; 4] = ["trl", "verl", "slime", "prime-rl"];

fn of<'a>(rows: &'a [Value], episode: &str) -> Vec<&'a Value> {
    rows.iter().filter(|row| row["episode_id"] == episode).collect()
}

#[tokio::test]
async fn an_attempt_without_a_reward_is_left_out_and_is_no_reward_of_0() {
    let mut run = Run::new(2);
    // Out of memory, and the run was stopped before its second attempt.
    let oom = || json!({"outcome": "valid", "termination": "agent_oom"});
    run.ended("v0-g0-0", 0, None, oom());
    run.result("v0-g0-0", None, json!({"termination": "agent_oom"}));
    run.trial("v0-g0-1", 0, Some(1.0), json!({"session_id": "v0-g0-1.2"}));
    run.ended("v0-g0-2", 0, None, json!({"outcome": "invalid", "failure": {"kind": "host_oom"}}));
    run.result("v0-g0-2", None, json!({"outcome": "invalid"}));
    run.capture(vec![
        sampled("v0-g0-0", 1, &[1], &[2]),
        sampled("v0-g0-1", 1, &[1], &[3]),
        sampled("v0-g0-1", 2, &[1], &[4]),
        sampled("v0-g0-2", 1, &[1], &[5]),
        sampled("v0-g1-0", 1, &[1], &[6]),
    ])
    .await;
    for form in SAMPLE_FORMS {
        let exported = run.export(form, &[]).ok();
        let left_out = [
            ("another attempt followed", 1),
            ("infra_failure", 1),
            ("its trial has not ended", 1),
            ("no reward", 1),
        ];
        for (reason, number) in left_out {
            assert_eq!(exported.by("sessions")[reason], number, "{form}: {}", exported.counts);
            assert_eq!(exported.by("calls")[reason], number, "{form}");
        }
    }
    let exported = run.export("trl", &[]).ok();
    let rows = exported.rows();
    assert_eq!(rows.len(), 1);
    assert_eq!((&rows[0]["completion_ids"], &rows[0]["reward"]), (&json!([4]), &1.0.into()));
    // One of two: there is no baseline.
    assert_eq!((&rows[0]["advantage"], &rows[0]["group_is_complete"]), (&Value::Null, &false.into()));
}

#[tokio::test]
async fn advantages_are_of_complete_groups_alone() {
    let mut run = Run::new(2);
    run.trial("v0-g0-0", 0, Some(1.0), json!({}));
    run.trial("v0-g0-1", 0, Some(0.0), json!({}));
    run.trial("v0-g1-0", 0, Some(1.0), json!({}));
    let calls = ["v0-g0-0", "v0-g0-1", "v0-g1-0"].map(|trial| sampled(trial, 1, &[1], &[2, 3]));
    // A second conversation of the first episode: two rows, and one vote.
    let second = sampled("v0-g0-0", 1, &[9], &[8]);
    run.capture([&calls[..], &[second]].concat()).await;
    let exported = run.export("trl", &[]).ok();
    let rows = exported.rows();
    assert_eq!(exported.by("groups"), json!({"complete": 1, "incomplete": 1}));
    let advantage = |reward: f64| (reward - 0.5) / (0.5_f64.sqrt() + 1e-4);
    let both = of(&rows, "v0-g0-0");
    assert_eq!(both.len(), 2);
    for (index, row) in both.into_iter().enumerate() {
        assert_eq!((&row["sample_index"], &row["episode_samples"]), (&index.into(), &2.into()));
        let found = row["advantage"].as_f64().expect("a number");
        assert!((found - advantage(1.0)).abs() < 1e-12, "{found}");
        assert_eq!((&row["group_id"], &row["group_rewards"]), (&"v0-g0".into(), &json!([1.0, 0.0])));
    }
    assert_eq!(of(&rows, "v0-g0-1")[0]["advantage"], advantage(0.0));
    let lonely = of(&rows, "v0-g1-0")[0];
    assert_eq!((&lonely["advantage"], &lonely["group_is_complete"]), (&Value::Null, &false.into()));
    assert!(exported.counts["notes"][0].as_str().is_some_and(|note| note.contains("without an advantage")));
    // A form that has an advantage in each row has no row for it.
    let exported = run.export("prime-rl", &[]).ok();
    assert_eq!(exported.by("episodes"), json!({"incomplete group": 1, "written": 2}));
    assert_eq!(exported.by("calls"), json!({"incomplete group": 1, "written": 3}));
    // A part of a group is not the group.
    let exported = run.export("trl", &["--where", "trial_id = 'v0-g0-0'"]).ok();
    assert_eq!(exported.rows()[0]["advantage"], Value::Null);
    assert_eq!(exported.by("episodes"), json!({"not asked for (--where)": 2, "written": 1}));
}

#[tokio::test]
async fn groups_of_two_versions_or_two_starts_are_never_one() {
    let mut run = Run::new(2);
    // Group 0 of each version, as result.json names them; the ids of the trials tell nothing.
    for (trial, version, reward) in [("a", 0, 1.0), ("b", 0, 1.0), ("c", 1, 0.0), ("d", 1, 0.0)] {
        run.trial(trial, version, Some(reward), json!({"group_id": 0, "episode_id": 0}));
    }
    // The same group of the same version, sampled again after a crash.
    run.restart(1);
    for (trial, reward) in [("v0-g0-0-r1", 0.0), ("v0-g0-1-r1", 0.0)] {
        run.trial(trial, 0, Some(reward), json!({"group_id": 0}));
    }
    let trials = ["a", "b", "c", "d", "v0-g0-0-r1", "v0-g0-1-r1"];
    run.capture(trials.map(|trial| sampled(trial, 1, &[1], &[2])).into()).await;
    let exported = run.export("trl", &[]).ok();
    let rows = exported.rows();
    let groups: Vec<&Value> = rows.iter().map(|row| &row["group_id"]).collect();
    assert_eq!(groups, ["v0-g0", "v0-g0", "v0-g0-r1", "v0-g0-r1", "v1-g0", "v1-g0"]);
    assert_eq!(exported.by("groups"), json!({"complete": 3}));
    assert!(rows.iter().all(|row| row["advantage"] == 0.0), "{rows:?}");
}

#[tokio::test]
async fn groups_of_runs_that_did_not_write_them_down_are_taken_from_ids_or_refused() {
    let mut run = Run::new(2);
    for (trial, version) in [("v0-g0-0", 0), ("v0-g0-1", 0), ("v1-g0-0", 1), ("v1-g0-1", 1)] {
        run.trial(trial, version, Some(1.0), json!({}));
    }
    let trials = ["v0-g0-0", "v0-g0-1", "v1-g0-0", "v1-g0-1"];
    run.capture(trials.map(|trial| sampled(trial, 1, &[1], &[2])).into()).await;
    let rows = run.export("trl", &[]).ok().rows();
    let groups: Vec<&Value> = rows.iter().map(|row| &row["group_id"]).collect();
    assert_eq!(groups, ["v0-g0", "v0-g0", "v1-g0", "v1-g0"]);

    run.trial("mine", 1, Some(1.0), json!({}));
    run.capture(vec![sampled("mine", 1, &[1], &[2])]).await;
    for form in SAMPLE_FORMS {
        let refused = run.export(form, &[]);
        assert_eq!(refused.output.status.code(), Some(1), "{form}");
        assert!(refused.words().contains("trial mine: nothing says which trials"), "{}", refused.words());
        assert!(!refused.path.exists());
    }
    run.export("calls", &[]).ok();
    // Trials of two versions have no baseline in common, nor have those of two tasks, whatever they are called.
    let mut named = Run::new(2);
    named.trial("v0-g0-0", 0, Some(1.0), json!({}));
    named.trial("v0-g0-1", 1, Some(1.0), json!({}));
    named.capture(["v0-g0-0", "v0-g0-1"].map(|trial| sampled(trial, 1, &[1], &[2])).into()).await;
    let refused = named.export("verl", &[]);
    assert!(refused.words().contains("of different policy versions"), "{}", refused.words());
    run.result("mine", Some(1.0), json!({"group_id": 0, "task_id": "another"}));
    let refused = run.export("trl", &[]);
    assert!(refused.words().contains("are of one group, and of different tasks"), "{}", refused.words());
}

#[tokio::test]
async fn a_masked_episode_keeps_its_place_and_has_no_mask() {
    let mut run = Run::new(2);
    let oom = json!({"outcome": "valid", "termination": "agent_oom"});
    run.ended("v0-g0-0", 0, Some(0.0), oom);
    run.result("v0-g0-0", Some(0.0), json!({"termination": "agent_oom"}));
    run.trial("v0-g0-1", 0, Some(1.0), json!({}));
    run.capture(vec![sampled("v0-g0-0", 1, &[1], &[2, 3]), sampled("v0-g0-1", 1, &[1], &[4])]).await;
    let exported = run.export("trl", &[]).ok();
    let rows = exported.rows();
    let masked = of(&rows, "v0-g0-0")[0];
    assert_eq!((&masked["env_mask"], &masked["masked"]), (&json!([0, 0]), &"agent_oom".into()));
    assert!(of(&rows, "v0-g0-1")[0]["advantage"].as_f64().is_some_and(|advantage| advantage > 0.5));
    assert_eq!(exported.by("calls"), json!({"masked: agent_oom": 1, "written": 1}));
}

#[tokio::test]
async fn a_run_without_its_config_is_refused_where_it_is_needed() {
    let mut run = Run::new(2);
    run.trial("v0-g0-0", 0, Some(1.0), json!({}));
    run.capture(vec![sampled("v0-g0-0", 1, &[1], &[2])]).await;
    fs::remove_file(run.at("config.resolved.toml")).expect("removed");
    for form in SAMPLE_FORMS {
        let refused = run.export(form, &[]);
        assert!(
            !refused.output.status.success() && refused.words().contains("config.resolved.toml"),
            "{}",
            refused.words()
        );
        assert!(!refused.path.exists(), "{form}");
    }
    for form in ["calls", "openai", "sharegpt", "atif"] {
        run.export(form, &[]).ok();
    }
}

#[tokio::test]
async fn captures_of_no_run_have_no_samples() {
    let folder = tempfile::tempdir().expect("folder");
    crate::setup::write(folder.path(), vec![sampled("t", 1, &[1], &[2])]).await;
    for form in SAMPLE_FORMS {
        let refused = crate::setup::Exported::of(folder.path(), form, &[]);
        assert!(refused.words().contains("the captures of no run"), "{}", refused.words());
    }
}

#[tokio::test]
async fn sessions_of_no_trial_are_counted_apart() {
    let mut run = Run::of_one_episode();
    run.trial("eval-before-t0-0", 0, Some(1.0), json!({"purpose": "evaluation"}));
    let probe = Call { trial_id: None, ..sampled("probe", 1, &[1], &[2]) };
    let evaluated = sampled("eval-before-t0-0", 1, &[1], &[2]);
    run.capture(vec![sampled("v0-g0-0", 1, &[1], &[2]), evaluated, probe, unsampled()]).await;
    for form in ["trl", "openai"] {
        let exported = run.export(form, &[]).ok();
        let session = exported.by("sessions");
        assert_eq!(
            (&session["of no trial"], &session["evaluation"]),
            (&1.into(), &1.into()),
            "{form}: {session}"
        );
        assert_eq!(exported.counts["episodes"]["all"], 2);
    }
}

#[tokio::test]
async fn a_choice_goes_by_its_index_wherever_it_is_named() {
    let run = Run::of_one_episode();
    let first = sampled("v0-g0-0", 1, &[1], &[2]);
    let usage = first.usage.map(|usage| lego::record::Usage { completion_tokens: 2, ..usage });
    let second = Call { choice_index: 1, completion_token_ids: Some(vec![3]), usage, ..first.clone() };
    let first = Call { usage, ..first };
    // The second choice is gone on from.
    let next = sampled("v0-g0-0", 1, &[1, 3, 5], &[6]);
    let named = [(second.call_id, 1, 1, 2), (next.call_id, 0, 3, 4)];
    run.capture(vec![first, second, next, unsampled()]).await;
    let exported = run.export("trl", &[]).ok();
    let calls = named.map(|(id, choice, start, end): (CallId, u16, u64, u64)| {
        json!({"call_id": id, "choice_index": choice, "start": start, "end": end})
    });
    assert_eq!(exported.rows()[0]["calls"], json!(calls));
    assert_eq!(
        exported.by("calls"),
        json!({"dropped: another choice of the call was used": 1, "nothing sampled": 1, "written": 2})
    );
    let rows = run.export("calls", &[]).ok().rows();
    let mut choices: Vec<u64> = rows.iter().filter_map(|row| row["choice_index"].as_u64()).collect();
    choices.sort_unstable();
    assert_eq!(choices, [0, 0, 0, 1]);
}
