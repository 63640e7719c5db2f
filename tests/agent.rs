//! The small agent against a scripted model: what it sends, what its tools answer, how it ends.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Json;
use axum::http::StatusCode;
use axum::routing::post;
use lego::harness::mini::{Agent, AgentOptions, Client, Ended, Report, TestCommand};
use serde_json::{Value, json};

/// Answers each request with the next scripted message, and keeps the requests.
struct Script {
    url: String,
    requests: Arc<Mutex<Vec<Value>>>,
}

async fn serve(messages: Vec<Result<Value, StatusCode>>) -> Script {
    let requests = Arc::new(Mutex::new(Vec::new()));
    let seen = requests.clone();
    let left = Arc::new(Mutex::new(VecDeque::from(messages)));
    let answer = move |Json(request): Json<Value>| {
        seen.lock().expect("lock").push(request);
        let next = left.lock().expect("lock").pop_front();
        async move {
            match next {
                Some(Ok(message)) => Ok(Json(json!({"choices": [{"index": 0, "message": message}]}))),
                Some(Err(status)) => Err(status),
                None => Err(StatusCode::GONE),
            }
        }
    };
    let router = axum::Router::new().route("/v1/chat/completions", post(answer));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let url = format!("http://{}/v1", listener.local_addr().expect("address"));
    tokio::spawn(async move { axum::serve(listener, router).await });
    Script { url, requests }
}

fn agent(url: &str, workspace: &Path, statement: &str, max_turns: u32) -> Agent {
    let client = Client::new(url, "placeholder", Duration::from_secs(20)).expect("client");
    let options = AgentOptions {
        workspace: workspace.to_owned(),
        statement: statement.to_owned(),
        model: "policy".to_owned(),
        max_turns,
        max_tokens: Some(56),
        tests: TestCommand::default(),
    };
    Agent::new(options, client).expect("agent")
}

fn call(name: &str, arguments: &str) -> Result<Value, StatusCode> {
    let function = json!({"name": name, "arguments": arguments});
    let call = json!({"id": "call_x", "type": "function", "function": function});
    Ok(json!({"role": "assistant", "content": null, "tool_calls": [call]}))
}

/// A workspace as the bundled tasks have it: `double` is broken in line 5.
fn workspace() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("folder");
    let write = |path: &str, text: &str| std::fs::write(folder.path().join(path), text).expect("write");
    std::fs::create_dir(folder.path().join("tests")).expect("tests");
    write("nums.py", "def one(x):\n    return 1\n\ndef double(x):\n    return x * 3\n");
    let runner = std::fs::read_to_string(repository().join("data/mini/run.py")).expect("runner");
    write("tests/run.py", &runner);
    write(
        "tests/test_nums.py",
        "FILE = \"nums.py\"\nFUNCTION = \"double\"\nCASES = {\"test_1\": ((4,), 8)}\n",
    );
    folder
}

fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Runs a script of replies in a fresh workspace: the report, the answers of the tools, the file.
async fn play(replies: Vec<Result<Value, StatusCode>>) -> (Report, Vec<String>, String) {
    let folder = workspace();
    let turns = u32::try_from(replies.len()).expect("turns");
    let script = serve(replies).await;
    let mut agent = agent(&script.url, folder.path(), "nums.py: double should return 2 times x", turns);
    let report = agent.run().await.expect("run");
    let answers = agent.messages()[1..]
        .iter()
        .filter(|message| message["role"] != "assistant")
        .map(|message| message["content"].as_str().expect("text").to_owned())
        .collect();
    let file = std::fs::read_to_string(folder.path().join("nums.py")).expect("file");
    (report, answers, file)
}

#[tokio::test]
async fn a_good_edit_stays_and_submit_ends() {
    let (report, answers, file) = play(vec![
        call("edit", r#"{"line": 5, "new": "return x + 3"}"#),
        call("edit", r#"{"line": "5", "new": "  return x * 2  "}"#),
        call("submit", "{}"),
        call("view", "{}"),
    ])
    .await;
    assert_eq!((report.ended, report.turns), (Ended::Submitted, 3));
    assert_eq!(answers, ["FAIL double(4) = 7, want 8", "PASS"]);
    assert_eq!(file, "def one(x):\n    return 1\n\ndef double(x):\n    return x * 2\n");
}

#[tokio::test]
async fn a_failing_edit_is_rolled_back() {
    let before = "def one(x):\n    return 1\n\ndef double(x):\n    return x * 3\n";
    let (report, answers, file) = play(vec![
        call("edit", r#"{"line": 5, "new": "return x *"}"#),
        call("edit", r#"{"line": 5, "new": "while x: x = x * x"}"#),
        call("edit", r#"{"line": 5, "new": "import os; os._exit(0)"}"#),
        call("edit", r#"{"line": 5, "new": "import os; os.kill(os.getpid(), 9)"}"#),
        call("run_tests", "{}"),
    ])
    .await;
    assert_eq!(report.ended, Ended::MaxTurns);
    let failed = "FAIL double(4) = ERR, want 8";
    assert_eq!(
        answers,
        [failed, failed, "FAIL tests broke", "FAIL tests did not finish", "FAIL double(4) = 12, want 8"]
    );
    assert_eq!(file, before);
}

#[tokio::test]
async fn calls_that_make_no_sense_are_answered() {
    let bad = [
        call("edit", r#"{"line": 5, "new": "return x"#),
        call("edit", r#"{"line": 0, "new": "x"}"#),
        call("edit", r#"{"line": 6, "new": "x"}"#),
        call("edit", r#"{"line": 5}"#),
        call("edit", r#"{"line": 5, "new": "a\nb"}"#),
        call("edit", r#"{"line": 5, "new": "x", "file": "../nums.py"}"#),
        call("fly", "{}"),
        call("view", r#"{"start": 9}"#),
        Ok(json!({"role": "assistant", "content": "I give up"})),
    ];
    let count = bad.len();
    let mut replies = bad.to_vec();
    replies.push(call("edit", r#"{"line": 5, "new": "return x * 3"}"#));
    replies.push(call("view", r#"{"start": 4, "end": 9}"#));
    let (_, answers, _) = play(replies).await;
    assert_eq!(answers[..count], vec!["ERROR bad call"; count]);
    assert_eq!(answers[count..], ["FAIL no change", "4|def double(x):\n5|    return x * 3"]);
}

#[tokio::test]
async fn requests_hold_the_statement_the_listing_and_nothing_that_varies() {
    let mut bodies = Vec::new();
    for _ in 0..2 {
        let folder = workspace();
        let script = serve(vec![call("run_tests", "{ }"), call("submit", "{}")]).await;
        let mut agent = agent(&script.url, folder.path(), "nums.py: double should return 2 times x\n", 3);
        agent.run().await.expect("run");
        bodies.push(script.requests.lock().expect("lock").clone());
    }
    assert_eq!(bodies[0], bodies[1]);
    assert_eq!(
        bodies[0][0]["messages"],
        json!([{"role": "user", "content": "nums.py: double should return 2 times x\n4|def double(x):\n5|    return x * 3"}])
    );
    assert_eq!(bodies[0][0]["max_tokens"], 56);
    let history = bodies[0][1]["messages"].as_array().expect("messages");
    assert_eq!(history[1]["tool_calls"][0]["function"]["arguments"], "{ }", "arguments stay as sampled");
    assert_eq!(history[2]["role"], "tool");
    assert_eq!(history[2]["tool_call_id"], "call_x");
}

#[tokio::test]
async fn a_busy_server_is_asked_again_and_a_refusal_is_an_error() {
    let (report, _, _) =
        play(vec![Err(StatusCode::BAD_GATEWAY), Err(StatusCode::TOO_MANY_REQUESTS), call("submit", "{}")])
            .await;
    assert_eq!(report.turns, 1);
    let folder = workspace();
    let script = serve(vec![Err(StatusCode::FORBIDDEN), call("submit", "{}")]).await;
    let error = agent(&script.url, folder.path(), "nums.py: double", 3).run().await.expect_err("refused");
    assert!(error.to_string().contains("403"), "{error}");
    assert_eq!(script.requests.lock().expect("lock").len(), 1);
}

/// The warm start's trajectories are what the agent does: their assistant turns, played to the agent,
/// give the same conversation to the letter.
#[tokio::test]
async fn expert_trajectories_are_the_agents_own_conversations() {
    let folder = tempfile::tempdir().expect("folder");
    let out = folder.path().join("sft.jsonl");
    let workspaces = folder.path().join("workspaces");
    let made = Command::new("python3")
        .args(["-B", "models/lego-tiny/recipe/make_sft.py", "--stage", "b"])
        .args(["--count", "24", "--tasks", "60", "--p", "0.3", "--g", "0.2"])
        .args(["--out".as_ref(), out.as_os_str(), "--workspaces".as_ref(), workspaces.as_os_str()])
        .current_dir(repository())
        .status()
        .expect("python3");
    assert!(made.success());
    let mut seen = String::new();
    for (number, line) in std::fs::read_to_string(&out).expect("trajectories").lines().enumerate() {
        let trajectory: Value = serde_json::from_str(line).expect("json");
        let messages = trajectory["messages"].as_array().expect("messages");
        let is_assistant = |message: &&Value| message["role"] == "assistant";
        let turns = messages.iter().filter(is_assistant).map(|turn| Ok(turn.clone())).collect();
        let script = serve(turns).await;
        let first = messages[0]["content"].as_str().expect("text");
        let statement = first.lines().next().expect("statement");
        let mut agent = agent(&script.url, &workspaces.join(number.to_string()), statement, 3);
        agent.run().await.expect("run");
        // The answer to the last turn's call stays in the agent: nobody asks for it.
        assert_eq!(agent.messages()[..messages.len()], messages[..], "trajectory {number}");
        assert!(agent.messages().len() <= messages.len() + 1);
        seen.push_str(line);
    }
    for needed in ["PASS", "FAIL", "= ERR", "submit"] {
        assert!(seen.contains(needed), "no trajectory has {needed}");
    }
}

#[test]
fn the_command_ends_with_a_clear_error() {
    let folder = workspace();
    let run = |base_url: &str, issue: &str| {
        let output = Command::new(env!("CARGO_BIN_EXE_lego"))
            .args(["agent", "--issue-file", issue, "--workspace"])
            .arg(folder.path())
            .env("OPENAI_BASE_URL", base_url)
            .output()
            .expect("lego");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, message) = run("https://127.0.0.1:1/v1", "tests/run.py");
    assert_eq!(code, Some(1));
    assert!(message.contains("OPENAI_BASE_URL") || message.contains("issue"), "{message}");
    let issue = folder.path().join("nums.py");
    let (code, message) = run("http://127.0.0.1:9/v1", issue.to_str().expect("utf-8"));
    assert_eq!(code, Some(1));
    assert!(message.contains("no answer from http://127.0.0.1:9/v1/chat/completions"), "{message}");
}
