//! What a harness asks beside its agents' turns: captured as `aux`, and trained where the config takes it in.

use super::*;
use lego::record::{Call, CallKind};

/// A check of the quota, a turn, a title and its retry, a summary of the history, and a turn that has it.
const HARNESS: &str = r#"
import json, os, urllib.request
def call(messages, tools=None, **more):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "max_tokens": 48, **more}
    if tools:
        body["tools"] = tools
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
        {"content-type": "application/json", "user-agent": "claude-cli/2.1.0 (external, cli)"})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"].get("content") or ""
system = {"role": "system", "content": "You repair code."}
task = {"role": "user", "content": "Repair the parser that fails its tests."}
tools = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]
call([{"role": "user", "content": "quota"}], max_tokens=1)
call([system, task], tools)
for _ in range(2):
    call([{"role": "system", "content": "Give a title."}, task])
said = {"role": "assistant", "content": "I have read the parser, and its third function is wrong."}
summary = call([system, task, said, {"role": "user", "content": "Sum up what was done."}])
call([system, {"role": "user", "content": "What was done: " + summary + " Go on."}], tools)
"#;

fn sampled<'a>(calls: impl IntoIterator<Item = &'a Call>) -> u64 {
    calls.into_iter().map(|call| call.completion_token_ids.as_ref().expect("ids").len() as u64).sum()
}

/// Of the report: what was trained, and what went to side calls and to retries.
fn tokens(run: &Path) -> [u64; 3] {
    let tokens = report(run)["tokens"].clone();
    the_ledger_agrees(run, &tokens);
    the_export_agrees(run, &tokens);
    let left_out = |bucket: &str| tokens["left_out"][bucket].as_u64().unwrap_or(0);
    [tokens["trained"].as_u64().expect("a number"), left_out("aux_call"), left_out("superseded")]
}

#[test]
fn side_calls_are_trained_where_they_are_taken_in() {
    let temp = test_folder();
    let run = |name: &str, samples: &str| run_harness(temp.path(), name, HARNESS, ("", samples));
    let plain = run("plain", "");
    let calls = calls(&plain);
    assert_eq!(calls.len(), 4 * 6, "six calls of each trial");
    // In each trial: the quota's, the agent's, two titles, the summary, the agent's.
    let mut trials: BTreeMap<_, Vec<&Call>> = BTreeMap::new();
    calls.iter().for_each(|call| trials.entry(&call.session_id).or_default().push(call));
    let at = |places: &[usize]| -> u64 {
        trials.values().map(|calls| sampled(places.iter().map(|at| calls[*at]))).sum()
    };
    for calls in trials.values() {
        let kinds: Vec<CallKind> = calls.iter().map(|call| call.kind).collect();
        let (policy, aux) = (CallKind::Policy, CallKind::Aux);
        assert_eq!(kinds, [aux, policy, aux, aux, aux, policy]);
        for call in calls.iter().filter(|call| call.kind == aux) {
            assert_eq!(call.not_trainable_reasons, ["kind_aux"]);
        }
    }
    let (agents, side, summary) = (at(&[1, 5]), at(&[0, 2, 3]), at(&[4]));
    assert_eq!(tokens(&plain), [agents, side + summary, 0]);
    // Of the two titles the later counts, as of any retried call.
    let taken = run("side", "take_in = [\"side\"]");
    assert_eq!(tokens(&taken), [agents + at(&[0, 3]), summary, at(&[2])]);
    let taken = run("all", "take_in = [\"compaction\", \"side\"]");
    assert_eq!(tokens(&taken), [agents + at(&[0, 3]) + summary, 0, at(&[2])]);
    let taken = run("some", "take_in = [\"compaction\"]\nleave_out = [\"side\"]");
    assert_eq!(tokens(&taken), [agents + summary, side, 0]);
    nothing_is_left(temp.path());
}

#[test]
fn what_cannot_be_taken_in_is_refused_before_a_run() {
    let temp = test_folder();
    for (samples, said) in [
        ("take_in = [\"titles\"]", vec!["take_in", "titles", "`side`", "`compaction`"]),
        (
            "take_in = [\"side\"]\nleave_out = [\"side\"]",
            vec!["training.samples.take_in", "leave_out has the same kind"],
        ),
        (
            "take_in = [\"side\"]\nlineages = \"main\"",
            vec!["training.samples.take_in", "lineages = \"main\""],
        ),
    ] {
        let config = config(temp.path(), &format!("samples = {{ {} }}", samples.replace('\n', ", ")));
        let output = train(&config, &temp.path().join("run"), &[]).output().expect("lego runs");
        let words = String::from_utf8_lossy(&output.stderr);
        assert!(
            !output.status.success() && said.iter().all(|word| words.contains(word)),
            "{samples}: {words}"
        );
    }
}
