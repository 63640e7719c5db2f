//! Answers.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use lego::capture::column_names;
use parquet::file::metadata::ParquetMetaDataReader;
use serde_json::{Value, json};

use super::{CallSink, Writer, WriterOptions, odd_texts, read, rows, sql, store};
use crate::calls::{as_json, call};

/// A call as the reader gives it, in the form of an answer.
fn expected(call: &lego::record::Call) -> Value {
    let mut row: Value = serde_json::from_str(&as_json(call)).expect("JSON");
    for name in ["client_request", "upstream_request", "response"] {
        let body = match name {
            "client_request" => &call.client_request,
            "upstream_request" => &call.upstream_request,
            _ => &call.response,
        };
        row[name] = json!(body.as_ref().map(|body| body.get()));
    }
    let routing = call.routing.as_ref();
    let shape = |of: fn(&lego::record::RoutingShape) -> Value| routing.map_or(Value::Null, |r| of(r.shape()));
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let bits = routing.and_then(|r| r.ids().max()).map(|largest| largest.max(1).ilog2() as usize + 1);
    row["routing"] = json!(routing.zip(bits).map(|(routing, bits)| hex(&packed(routing, bits))));
    row["routing_bits"] = json!(bits);
    row["routing_rows"] = shape(|shape| json!(shape.rows));
    row["routing_dtype"] = shape(|shape| json!(shape.dtype.as_str()));
    row
}

/// Its ids, so many bits each, the lowest first.
fn packed(routing: &lego::record::Routing, bits: usize) -> Vec<u8> {
    let ones =
        routing.ids().flat_map(|id| (0..bits).map(move |bit| (id >> bit & 1) as u8)).collect::<Vec<_>>();
    ones.chunks(8).map(|ones| ones.iter().rev().fold(0, |byte, one| byte << 1 | one)).collect()
}

#[tokio::test]
async fn every_column_is_what_the_reader_gives() {
    let dir = tempfile::tempdir().expect("folder");
    let writer = store(dir.path()).await;
    writer.append(vec![odd_texts()]).await.expect("room");
    // The writer runs on.
    let (answers, calls) = (rows(dir.path(), "SELECT * FROM calls"), read(dir.path()));
    assert_eq!((answers.len(), calls.len()), (25, 25));
    for (answer, call) in answers.iter().zip(&calls) {
        let expected = expected(call);
        let names: Vec<&String> = answer.as_object().expect("an object").keys().collect();
        assert_eq!(names, column_names().iter().collect::<Vec<_>>());
        let compared = ["received_at", "routing_base_call_id", "routing_base_choice", "routing_start"];
        let compared = [&compared[..], &["routing_layers", "routing_layer_axis", "routing_top_k"]].concat();
        for name in names.into_iter().filter(|name| !compared.contains(&name.as_str())) {
            let wanted = expected.get(name).unwrap_or(&Value::Null);
            assert_eq!(whole(&answer[name]), whole(wanted), "{name} of {}", call.call_id);
        }
    }
    let times =
        rows(dir.path(), "SELECT arrow_cast(received_at, 'Int64') AS us, received_at AS t FROM calls");
    assert!(times.iter().zip(&calls).all(|(row, call)| row["us"] == call.received_at), "{times:?}");
    assert_eq!(times[0]["t"], "2026-11-29T10:00:00.123456Z");
    writer.close().await;
    assert_eq!(rows(dir.path(), "SELECT count(*) AS n FROM calls"), [json!({"n": 25})]);
}

/// Without the fields of structs that are null, which a call's own JSON leaves out in part.
fn whole(value: &Value) -> Value {
    match value {
        Value::Object(fields) => {
            let fields = fields.iter().filter(|(_, value)| !value.is_null());
            fields.map(|(name, value)| (name.clone(), whole(value))).collect()
        }
        Value::Array(values) => values.iter().map(whole).collect(),
        other => other.clone(),
    }
}

#[tokio::test]
async fn missing_is_null_and_nothing_is_empty() {
    let dir = tempfile::tempdir().expect("folder");
    let _writer = store(dir.path()).await;
    let count = |what: &str| {
        rows(dir.path(), &format!("SELECT count(*) AS n FROM calls WHERE {what}"))[0]["n"].clone()
    };
    // Of twelve, a third each; none of the twelve that failed has any.
    assert_eq!((count("tool_calls IS NULL"), count("cardinality(tool_calls) = 0")), (16.into(), 4.into()));
    assert_eq!(
        (count("text IS NULL"), count("text = ''"), count("text LIKE '%😀%'")),
        (16.into(), 4.into(), 4.into())
    );
    assert_eq!((count("usage IS NULL"), count("usage['cached_tokens'] IS NULL")), (16.into(), 16.into()));
    assert_eq!(count("usage['cached_tokens'] = 18446744073709551615"), 4);
    let ids = "SELECT completion_token_ids AS ids, array_length(completion_token_ids) AS length, \
               cardinality(completion_token_ids) AS number, completion_logprobs AS logprobs \
               FROM calls WHERE session_id IN ('s0', 's1', 's2', 'f0') ORDER BY received_at, session_id";
    let ids = rows(dir.path(), ids);
    let of = |row: &Value| (row["ids"].clone(), row["length"].clone(), row["number"].clone());
    assert_eq!(
        of(ids.iter().find(|row| row["ids"] == json!([])).expect("one")),
        (json!([]), json!(0), json!(0))
    );
    assert!(ids.iter().any(|row| of(row) == (Value::Null, Value::Null, Value::Null)), "{ids:?}");
    assert!(ids.iter().any(|row| row["ids"] == json!([7, 7]) && row["logprobs"][1].is_null()), "{ids:?}");
}

#[tokio::test]
async fn lists_structs_groups_and_joins() {
    let dir = tempfile::tempdir().expect("folder");
    let _writer = store(dir.path()).await;
    let calls = read(dir.path());
    let groups = "SELECT session_id, count(*) AS calls, sum(cardinality(completion_token_ids)) AS sampled FROM calls \
                  GROUP BY session_id ORDER BY session_id";
    let mut wanted: BTreeMap<&str, (u64, Option<u64>)> = BTreeMap::new();
    for call in &calls {
        let of = wanted.entry(call.session_id.as_str()).or_default();
        of.0 += 1;
        if let Some(ids) = &call.completion_token_ids {
            of.1 = Some(of.1.unwrap_or(0) + ids.len() as u64);
        }
    }
    let wanted = wanted.into_iter().map(
        |(session, (calls, sampled))| json!({"session_id": session, "calls": calls, "sampled": sampled}),
    );
    assert_eq!(rows(dir.path(), groups), wanted.collect::<Vec<_>>());
    let ids =
        "SELECT id, count(*) AS n FROM (SELECT unnest(completion_token_ids) AS id FROM calls) GROUP BY id";
    let sampled =
        calls.iter().filter_map(|call| call.completion_token_ids.as_ref()).map(Vec::len).sum::<usize>();
    assert_eq!(rows(dir.path(), ids), [json!({"id": 7, "n": sampled})]);
    let tools = "SELECT DISTINCT unnest(tool_calls)['name'] AS tool FROM calls";
    assert_eq!(rows(dir.path(), tools), [json!({"tool": "edit"})]);
    let slice = "SELECT prompt_token_ids[1:2] AS first, prompt_token_ids[4] AS fourth, \
                 array_position(prompt_token_ids, 2) AS at FROM calls WHERE session_id = 's5' LIMIT 1";
    assert_eq!(rows(dir.path(), slice), [json!({"first": [1, 2], "fourth": 2, "at": 2})]);
    let join = "SELECT count(*) AS n FROM calls a JOIN calls b ON a.call_id = b.call_id AND a.choice_index = b.choice_index";
    assert_eq!(rows(dir.path(), join), [json!({"n": 24})]);
    let days = "SELECT date_trunc('day', received_at) AS day, count(*) AS n FROM calls WHERE harness ~ '^h.[0-9]' GROUP BY 1 ORDER BY 1";
    let days = rows(dir.path(), days);
    assert_eq!(days[0], json!({"day": "2026-11-29T00:00:00Z", "n": 4}));
}

#[tokio::test]
async fn what_the_reader_tests_is_what_datafusion_would() {
    let dir = tempfile::tempdir().expect("folder");
    let _writer = store(dir.path()).await;
    let upper = read(dir.path())[0].call_id.to_string().to_uppercase();
    let id = read(dir.path())[1].call_id;
    let (by_id, by_upper) = (format!("call_id = '{id}'"), format!("call_id = '{upper}'"));
    let range = format!("call_id >= '{id}'");
    let tests = [
        ("session_id = 's1'", true),
        ("session_id <> 's1'", true),
        ("session_id > 's1' AND session_id <= 's4'", true),
        ("session_id IN ('s1', 's4', 'f0', 'nobody')", true),
        ("session_id NOT IN ('s1', 's4', 'f0', 'x')", true),
        ("trial_id IS NULL", true),
        ("trial_id IS NOT NULL AND NOT (trial_id = 'trial-of-s2')", true),
        ("harness = 'h''1_%'", true),
        ("harness NOT LIKE 'h_1%'", true),
        ("harness LIKE 'h%\\_%'", false),
        ("NOT (harness = 'h''1_%' OR ttft_us > 1)", true),
        ("status = 'ok' OR harness IS NULL", true),
        ("status < 'p'", false),
        ("status = 'no such status'", false),
        ("http_status = 200", true),
        ("ttft_us BETWEEN 1 AND 2", true),
        ("ttft_us NOT BETWEEN 1 AND 2", true),
        ("ttft_us > 0.5", false),
        ("client_stream", true),
        ("NOT client_stream", true),
        ("trainable", false),
        ("received_at >= '2026-11-30'", true),
        ("received_at < TIMESTAMP '2026-11-30 00:00:01.123456Z'", true),
        ("received_at = '2026-11-29 10:00:01.123456'", true),
        ("routing IS NOT NULL", false),
        ("routing_rows = 3", false),
        ("usage['cached_tokens'] > 5", false),
        ("client_request LIKE '%héllo%'", false),
        (&by_id, true),
        (&by_upper, false),
        (&range, true),
        ("length(session_id) = 2 AND ttft_us = 1", true),
    ];
    for (test, is_pushed) in tests {
        let found = rows(dir.path(), &format!("SELECT call_id, session_id FROM calls WHERE {test}"));
        // A column of the answer is computed by DataFusion alone.
        let all = rows(dir.path(), &format!("SELECT call_id, session_id, {test} AS is_wanted FROM calls"));
        let wanted = all.into_iter().filter(|row| row["is_wanted"] == true);
        let wanted = wanted.map(|row| json!({"call_id": row["call_id"], "session_id": row["session_id"]}));
        assert_eq!(found, wanted.collect::<Vec<_>>(), "{test}");
        let plan = sql(dir.path(), &format!("EXPLAIN SELECT call_id FROM calls WHERE {test}"), &[]);
        let plan = String::from_utf8(plan.stdout).expect("UTF-8");
        assert_eq!(plan.contains(", where="), is_pushed, "{test}\n{plan}");
    }
}

#[tokio::test]
async fn bodies_and_routing_are_read_if_asked_for() {
    let dir = tempfile::tempdir().expect("folder");
    let _writer = store(dir.path()).await;
    let plan = |query: &str| {
        String::from_utf8(sql(dir.path(), &format!("EXPLAIN {query}"), &[]).stdout).expect("UTF-8")
    };
    let lean = plan("SELECT session_id FROM calls WHERE status = 'ok'");
    assert!(
        lean.contains("Calls: columns=[session_id], where=status = 'ok', bodies=false, routing=false"),
        "{lean}"
    );
    assert!(plan("SELECT length(response) FROM calls").contains("bodies=true, routing=false"));
    assert!(plan("SELECT routing_rows FROM calls").contains("bodies=false, routing=true"));
    assert!(plan("SELECT session_id FROM calls LIMIT 2").contains("limit=2"));
}

/// The Parquet files of a folder.
fn parquet_files(dir: &Path) -> Vec<PathBuf> {
    let days = std::fs::read_dir(dir).expect("folder").map(|entry| entry.expect("entry").path());
    let days = days.filter(|day| day.is_dir());
    let files = days
        .flat_map(|day| std::fs::read_dir(day).expect("folder").map(|entry| entry.expect("entry").path()));
    files.filter(|file| file.extension().is_some_and(|extension| extension == "parquet")).collect()
}

#[tokio::test]
async fn row_groups_that_hold_no_match_are_not_read() {
    let dir = tempfile::tempdir().expect("folder");
    for session in ["damaged", "whole"] {
        let writer = Writer::open(dir.path(), WriterOptions::default()).expect("free folder");
        writer.append(vec![call(session, &[1, 2], &[3])]).await.expect("room");
        writer.close().await;
        if session == "damaged" {
            let file = parquet_files(dir.path()).remove(0);
            let metadata = ParquetMetaDataReader::new().parse_and_finish(&File::open(&file).expect("file"));
            let mut file = OpenOptions::new().write(true).open(file).expect("file");
            for column in metadata.expect("a footer").row_group(0).columns() {
                let (start, length) = column.byte_range();
                file.seek(SeekFrom::Start(start)).expect("there");
                file.write_all(&vec![0xff; length as usize]).expect("written");
            }
        }
    }
    for which in ["session_id = 'whole'", "trial_id = 'trial-of-whole'"] {
        let answer = rows(dir.path(), &format!("SELECT prompt_token_ids FROM calls WHERE {which}"));
        assert_eq!(answer, [json!({"prompt_token_ids": [1, 2]})]);
    }
    let none = rows(dir.path(), "SELECT * FROM calls WHERE received_at < '2020-01-01'");
    assert_eq!(none, Vec::<Value>::new());
    let (code, message) = super::failure(dir.path(), "SELECT count(*) FROM calls", &[]);
    assert!(code == 1 && message.contains("cannot be read as captures"), "{message}");
}

#[tokio::test]
async fn a_table_for_people_says_what_it_cuts_and_never_speaks_to_the_terminal() {
    let dir = tempfile::tempdir().expect("folder");
    let _writer = store(dir.path()).await;
    let query = "SELECT session_id, ttft_us AS t, text, repeat('x', 100) AS long FROM calls \
                 WHERE session_id IN ('s1', 's2') ORDER BY 1, 2";
    let output = sql(dir.path(), query, &[]);
    let (table, told) =
        (String::from_utf8(output.stdout).expect("UTF-8"), String::from_utf8(output.stderr).expect("UTF-8"));
    let lines: Vec<_> = table.lines().collect();
    assert!(lines.len() == 5 && lines[0].starts_with("session_id     t  text"), "{table}");
    assert!(lines[1].starts_with("s1             0  "), "{table}");
    assert!(lines[3].starts_with("s2          NULL  héllo 😀\\n\\u{1b}[31mred  xxx"), "{table}");
    assert_eq!(told, "4 rows; 4 values are cut short: --json has all of them\n");
    assert!(!table.contains('\u{1b}') && lines[1].ends_with("x…"), "{table}");
    let none = sql(dir.path(), "SELECT session_id FROM calls WHERE false", &[]);
    assert_eq!((none.stdout.as_slice(), none.stderr.as_slice()), (&b"session_id\n"[..], &b"0 rows\n"[..]));
}
