//! Why histories were rewritten: what a run's metrics count is what the table of its captures says.

use std::sync::Arc;

use super::*;
use lego::trajectory::{BreakReason, Heard, lineages, table};

/// Conversations of two turns, whose first reply comes back as it was said; and one that is edited.
const HARNESS: &str = r#"
import json, os, urllib.request
def call(*messages):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "max_tokens": 24}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(), {"content-type": "application/json"})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"].get("content") or ""
def user(text):
    return {"role": "user", "content": text}
def assistant(text):
    return {"role": "assistant", "content": text}
for number in range(3):
    task = user(f"Zyx wvut, srq {number} pon mlkj: ihg? Fedc!")
    call(task, assistant(call(task)), user("Go on."))
call(task, assistant("I have repaired it, and all of its tests pass now."), user("Thank you."))
"#;

#[test]
fn the_metrics_count_the_breaks_that_the_table_has() {
    let temp = test_folder();
    // Asked for what it was never trained on, the policy spells words in other tokens than the tokenizer does.
    let run = run_harness(temp.path(), "run", HARNESS, ("", ""));
    let mut command = lego(temp.path(), &["capture", "lineages", "--json"]);
    let rows = String::from_utf8(finished(command.arg(&run)).stdout).expect("UTF-8");
    let rows: Vec<Value> = rows.lines().map(|row| serde_json::from_str(row).expect("JSON")).collect();
    let mut reasons: BTreeMap<String, i64> = BTreeMap::new();
    for reason in rows.iter().filter_map(|row| row["break"]["reason"].as_str()) {
        *reasons.entry(reason.to_owned()).or_default() += 1;
    }
    let mut counted: BTreeMap<String, i64> = BTreeMap::new();
    for reason in BreakReason::ALL {
        let column = read_column(&run.join("metrics.parquet"), reason.column()).expect("a column");
        let [Some(MetricValue::Integer(count))] = column[..] else { panic!("one step: {column:?}") };
        if count > 0 {
            counted.insert(reason.as_str().to_owned(), count);
        }
    }
    assert_eq!(counted, reasons);
    assert!(reasons.get("retokenised").is_some_and(|count| *count > 0), "{reasons:?}");
    assert_eq!(reasons.get("message_edited"), Some(&4), "one of each trial");
    // Which nobody can tell without the texts of the ids.
    let calls: Vec<Arc<_>> = calls(&run).into_iter().map(Arc::new).collect();
    let found = lineages(&calls);
    let untold = found
        .sessions()
        .flat_map(|session| table(session, Heard::default(), None))
        .filter_map(|row| row.broke);
    assert!(untold.map(|broke| broke.reason).all(|reason| reason != BreakReason::Retokenised));
    nothing_is_left(temp.path());
}
