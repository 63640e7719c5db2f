//! What is refused, and how.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::{failure, rows, store};

/// Every file, with what is in it.
fn contents(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(dir).expect("folder") {
        let path = entry.expect("entry").path();
        if path.is_dir() {
            found.extend(contents(&path));
        } else {
            let bytes = fs::read(&path).expect("file");
            found.insert(path, bytes);
        }
    }
    found
}

#[tokio::test]
async fn all_that_is_no_query() {
    let dir = tempfile::tempdir().expect("folder");
    let _writer = store(dir.path()).await;
    let before = contents(dir.path());
    let aside = tempfile::tempdir().expect("folder");
    let aside = aside.path().join("copy.csv");
    let copy = format!("COPY calls TO '{}' STORED AS CSV", aside.display());
    let explained = format!("EXPLAIN ANALYZE {copy}");
    let statements = [
        "CREATE TABLE t AS SELECT * FROM calls",
        "CREATE VIEW v AS SELECT 1",
        "CREATE EXTERNAL TABLE t STORED AS CSV LOCATION '/etc/passwd'",
        "CREATE FUNCTION f(INT) RETURNS INT RETURN 1",
        "DROP TABLE calls",
        "INSERT INTO calls SELECT * FROM calls",
        "UPDATE calls SET session_id = 'x'",
        "DELETE FROM calls",
        "TRUNCATE TABLE calls",
        "SET datafusion.execution.target_partitions = 4",
        "RESET datafusion.execution.target_partitions",
        "PREPARE p AS SELECT 1",
        "EXECUTE p",
        "BEGIN",
        &copy,
        &explained,
    ];
    for statement in statements {
        let (code, message) = failure(dir.path(), statement, &[]);
        assert_eq!(code, 2, "{statement}: {message}");
        assert!(
            message.starts_with("error: captures are only read: write a query (SELECT"),
            "{statement}: {message}"
        );
    }
    assert!(!aside.exists());
    assert!(contents(dir.path()) == before);
}

#[tokio::test]
async fn queries_that_cannot_be_understood() {
    let dir = tempfile::tempdir().expect("folder");
    let _writer = store(dir.path()).await;
    let deep = format!("SELECT {}1{}", "(".repeat(5_000), ")".repeat(5_000));
    let cases = [
        ("SELECT sesion_id FROM calls", "Did you mean 'calls.session_id'"),
        ("SELECT * FROM call", "call' not found"),
        ("SELECT usage['cached'] FROM calls", "cached"),
        ("SELECT foo(1) FROM calls", "foo"),
        ("SELECT session_id, count(*) FROM calls", "session_id"),
        ("SELECT session_id FROM calls WHERE trainable = 'perhaps'", "Boolean = Utf8"),
        ("SELEC 1", "error: Expected: an SQL statement, found: SELEC at Line: 1"),
        ("SELECT 1; SELECT 2", "single SQL statement"),
        ("", "No SQL statements"),
        ("SELECT * FROM '/etc/passwd'", "not found"),
        ("SELECT * FROM calls WHERE received_at > 'yesterday'", "yesterday"),
        (&deep, "too many parentheses"),
    ];
    for (query, part) in cases {
        let (code, message) = failure(dir.path(), query, &["--json"]);
        assert!(code == 2 && message.contains(part), "{query:.80}: {code} {message}");
        assert!(message.starts_with("error: ") && !message.contains("acktrace"), "{message}");
    }
}

#[tokio::test]
async fn rows_that_json_cannot_tell() {
    let dir = tempfile::tempdir().expect("folder");
    let _writer = store(dir.path()).await;
    let (code, message) = failure(dir.path(), "SELECT ln(0) AS x", &["--json"]);
    assert!(code == 1 && message.contains("column x has a number that is infinite"), "{message}");
    let (code, message) = failure(dir.path(), "SELECT [1.0, 'NaN'::double] AS x", &["--json"]);
    assert!(code == 1 && message.contains("column x has a number"), "{message}");
    let (code, message) = failure(dir.path(), "SELECT a.text, b.text FROM calls a, calls b", &["--json"]);
    assert!(code == 2 && message.contains("two columns have the name text"), "{message}");
    assert_eq!(rows(dir.path(), "SELECT ln(0)::varchar AS x")[0]["x"], "-inf");
}

#[tokio::test]
async fn folders_options_and_readers_that_go_away() {
    let dir = tempfile::tempdir().expect("folder");
    let _writer = store(dir.path()).await;
    let (code, message) = failure(&dir.path().join("none"), "SELECT 1", &[]);
    assert!(code == 1 && message.contains("is not a folder"), "{message}");
    let (code, message) = failure(dir.path(), "SELECT 1", &["--spill", "/no/such/folder"]);
    assert!(code == 2 && message.contains("--spill /no/such/folder"), "{message}");
    assert_eq!(failure(dir.path(), "SELECT 1", &["--memory-mb", "0"]).0, 2);
    // As `head` does it.
    let mut lego = Command::new(env!("CARGO_BIN_EXE_lego"));
    let many = "SELECT a.client_request FROM calls a, calls b, calls c";
    lego.args(["capture", "sql", many, "--json"])
        .arg(dir.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut running = lego.spawn().expect("lego runs");
    drop(running.stdout.take());
    let output = running.wait_with_output().expect("it ends");
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}

#[tokio::test]
async fn long_queries_are_answered_and_endless_ones_refused() {
    let dir = tempfile::tempdir().expect("folder");
    let _writer = store(dir.path()).await;
    let chain = |terms: usize| format!("SELECT {} AS n", vec!["1"; terms].join("+"));
    assert_eq!(rows(dir.path(), &chain(900)), [serde_json::json!({"n": 900})]);
    let (code, message) = failure(dir.path(), &chain(50_000), &[]);
    assert!(code == 2 && message.contains("a chain of 50002 words and signs, at most 1000"), "{message}");
    let ids = (0..5_000).map(|n| format!("'s{n}'")).collect::<Vec<_>>().join(", ");
    let listed = format!("SELECT count(*) AS n FROM calls WHERE session_id IN ({ids})");
    assert_eq!(rows(dir.path(), &listed), [serde_json::json!({"n": 12})]);
    let wide =
        (0..500).map(|n| format!("sum(CASE WHEN status = 'ok' THEN {n} END) AS c{n}")).collect::<Vec<_>>();
    let wide = rows(dir.path(), &format!("SELECT {} FROM calls", wide.join(", ")));
    assert_eq!(wide[0].as_object().expect("a row").len(), 500);
    for joined in [" UNION ALL SELECT 1", " JOIN (SELECT 1) USING (x)"] {
        let (code, message) =
            failure(dir.path(), &format!("SELECT * FROM (SELECT 1 AS x){}", joined.repeat(1_000)), &[]);
        assert!(code == 2 && message.contains("a chain of"), "{message}");
    }
    let unions = format!("SELECT count(*) AS n FROM (SELECT 1{})", " UNION ALL SELECT 1".repeat(300));
    assert_eq!(rows(dir.path(), &unions), [serde_json::json!({"n": 301})]);
}
