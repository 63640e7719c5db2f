//! What is not all there: calls that cannot be read, expert routing that is gone, values that are missing.

use std::fs;

use lego::capture::{Writer, WriterOptions};
use lego::record::{CallId, CallSink, ChoiceId};
use serde_json::{Value, json};

use crate::calls::routing;
use crate::setup::{Run, sampled, unsampled};

const ALL_FORMS: [&str; 8] = ["calls", "openai", "sharegpt", "atif", "trl", "verl", "slime", "prime-rl"];

#[tokio::test]
async fn calls_that_cannot_be_read_are_told_of_and_make_the_exit_code_1() {
    let run = Run::of_one_episode();
    let captures = run.at("captures");
    let writer = Writer::open(&captures, WriterOptions::default()).expect("free folder");
    for _ in 0..3 {
        writer.append(vec![sampled("v0-g0-0", 1, &[1], &[2])]).await.expect("room");
    }
    let mut segments = fs::read_dir(captures.join("journal")).expect("folder");
    let segment = segments.next().expect("one").expect("entry").path();
    let whole = fs::read(&segment).expect("read");
    let mut damaged = whole.clone();
    damaged[whole.len() / 2] ^= 1;
    fs::write(&segment, &damaged).expect("written");
    for form in ALL_FORMS {
        let exported = run.export(form, &[]);
        assert_eq!(exported.output.status.code(), Some(1), "{form}: {}", exported.words());
        assert!(exported.words().contains("damaged bytes of the journal"), "{form}: {}", exported.words());
        assert!(exported.path.exists(), "{form}: what can be read is there");
        // Once, however often the captures were read.
        assert_eq!(exported.counts["unread"].as_array().map(Vec::len), Some(1), "{form}");
    }
    fs::write(&segment, &whole).expect("written");
    writer.close().await;
    let mut days = fs::read_dir(&captures).expect("folder").map(|entry| entry.expect("entry").path());
    let day = days.find(|path| path.to_string_lossy().contains("date=")).expect("a day");
    fs::write(day.join("calls-cut.parquet"), b"PAR1").expect("written");
    for form in ALL_FORMS {
        let exported = run.export(form, &[]);
        assert_eq!(exported.output.status.code(), Some(1), "{form}");
        assert!(exported.words().contains("calls-cut.parquet"), "{form}: {}", exported.words());
    }
}

#[tokio::test]
async fn a_call_whose_earlier_routing_is_gone_trains_nobody_with_or_without_routing() {
    let run = Run::of_one_episode();
    let gone = ChoiceId { call_id: CallId::now(), choice_index: 0 };
    let mut lost = sampled("v0-g0-0", 1, &[1, 2], &[3, 4]);
    lost.routing = Some(routing(0, 3, 0).without_first(1, gone));
    let kept = sampled("v0-g0-0", 1, &[7], &[8]);
    run.capture(vec![lost, kept, unsampled()]).await;
    for form in ["trl", "verl", "slime", "prime-rl"] {
        let exported = run.export(form, &[]).ok();
        let calls = json!({"dropped: routing_base_missing": 1, "nothing sampled": 1, "written": 1});
        assert_eq!(exported.by("calls"), calls, "{form}");
    }
    let exported = run.export("calls", &[]).ok();
    assert_eq!(exported.counts["routing_lost"], 1);
    let rows = exported.rows();
    let of = rows.iter().find(|row| row["token_ids"] == json!([3, 4])).expect("listed");
    assert_eq!((&of["expert_routing"], &of["trainable"]), (&Value::Null, &false.into()));
}

#[tokio::test]
async fn rows_are_those_of_the_call_that_first_computed_them() {
    let run = Run::of_one_episode();
    // Two turns; the second one's engine routed the first one's positions otherwise when it read them again.
    let mut first = sampled("v0-g0-0", 1, &[1, 2], &[3, 4]);
    first.routing = Some(routing(0, 3, 0));
    let mut second = sampled("v0-g0-0", 1, &[1, 2, 3, 4, 5], &[6]);
    second.routing = Some(routing(0, 5, 100));
    run.capture(vec![first, second.clone(), unsampled()]).await;
    let exported = run.export("verl", &[]).ok();
    let experts = exported.rows()[0]["output"]["routed_experts"].clone();
    assert_eq!((&experts["shape"], &experts["dtype"]), (&json!([5, 2, 2]), &"uint8".into()));
    let ids: Vec<u8> = (0..12).chain(112..120).collect();
    assert_eq!(experts["data"], base64(&ids));
    assert_eq!(exported.counts["routing_lost"], 0);

    // Of a call without routing there are no such rows; the ids and log-probs are as good as before.
    let run = Run::of_one_episode();
    let first = sampled("v0-g0-0", 1, &[1, 2], &[3, 4]);
    run.capture(vec![first, second, unsampled()]).await;
    let exported = run.export("verl", &[]).ok();
    let row = &exported.rows()[0];
    assert_eq!((&row["output"]["routed_experts"], &row["episode_samples"]), (&Value::Null, &1.into()));
    assert_eq!(exported.counts["routing_lost"], 1);
    let told = crate::setup::run(run.root(), "verl", &run.at("told.jsonl"), &[]);
    assert!(
        String::from_utf8_lossy(&told.stderr).contains("expert routing is not all there: 1 row"),
        "{told:?}"
    );
}

fn base64(bytes: &[u8]) -> String {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.encode(bytes)
}

#[tokio::test]
async fn mask_1_stands_on_sampled_ids_and_what_is_missing_is_null() {
    let run = Run::of_one_episode();
    let first = sampled("v0-g0-0", 1, &[1, 2], &[3, 4]);
    let mut unsure = sampled("v0-g0-0", 1, &[1, 2, 3, 4, 5], &[6, 7]);
    unsure.completion_logprobs = Some(vec![Some(-0.5), None]);
    let last = sampled("v0-g0-0", 1, &[1, 2, 3, 4, 5, 6, 7, 8], &[9]);
    run.capture(vec![first, unsure.clone(), last, unsampled()]).await;
    let exported = run.export("trl", &[]).ok();
    let row = &exported.rows()[0];
    assert_eq!(row["prompt_ids"], json!([1, 2]));
    assert_eq!(row["completion_ids"], json!([3, 4, 5, 6, 7, 8, 9]));
    // The second call's ids are context: one of them has no log-prob.
    assert_eq!(row["env_mask"], json!([1, 1, 0, 0, 0, 0, 1]));
    assert_eq!(
        exported.by("calls"),
        json!({"dropped: a log-prob is missing": 1, "nothing sampled": 1, "written": 2})
    );
    let rows = run.export("calls", &[]).ok().rows();
    let of = rows.iter().find(|row| row["call_id"] == unsure.call_id.to_string()).expect("listed");
    assert_eq!((&of["logprobs"], &of["expert_routing"]), (&json!([-0.5, null]), &Value::Null));
}

#[tokio::test]
async fn an_episode_without_a_sample_is_told_of() {
    let run = Run::of_one_episode();
    run.capture(vec![sampled("v0-g0-0", 1, &[1], &[2]), unsampled()]).await;
    let exported = run.export("trl", &[]).ok();
    assert_eq!(exported.by("episodes"), json!({"no sample": 1, "written": 1}));
    assert_eq!(exported.by("calls"), json!({"nothing sampled": 1, "written": 1}));
    // Its reward is in the baseline all the same.
    let row = &exported.rows()[0];
    assert_eq!(row["group_rewards"], json!([1.0, 0.0]));
    assert!(row["advantage"].as_f64().is_some_and(|advantage| advantage > 0.5));
    assert!(
        exported.counts["notes"][0].as_str().is_some_and(|note| note.contains("episodes without a sample"))
    );
}
