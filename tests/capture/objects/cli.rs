//! Commands on a bucket, and what is said of places that cannot be used.

use std::path::Path;
use std::process::Command;

use hyper::Method;
use serde_json::Value;

use super::server::{Fault, Server};
use super::writer::{Process, lego, parquet, read};

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn prune_takes_whole_days_from_the_bucket() {
    let folder = tempfile::tempdir().expect("folder");
    let dir = folder.path().join("local");
    let server = Server::start().await;
    let mut process = Process::start(&server, "x", &dir);
    process.ask("append old 3 50");
    process.ask("append older 3 70");
    let kept = process.ask("append new 3 1");
    assert_eq!(process.close(), [] as [String; 0]);
    let url = server.url("x");
    let prune = async |dry: &[&str], code: i32| -> Vec<Value> {
        let arguments = [&["prune", "--older-than", "30d", "--json", &url], dry].concat();
        let output = lego(&server, &dir, &arguments).await;
        assert_eq!(output.status.code(), Some(code), "{output:?}");
        let text = String::from_utf8(output.stdout).expect("UTF-8");
        text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    };
    let day = server.keys().await.remove(0).split('/').nth(1).expect("a day").to_owned();
    server.put(&format!("x/{day}/notes.txt"), "mine").await;
    let days = prune(&[], 1).await;
    assert!(
        days[0]["reason"].as_str().expect("a reason").contains("notes.txt in it is not lego's"),
        "{days:?}"
    );
    assert_eq!((days.len(), &days[1]["is_removed"]), (2, &Value::Bool(true)));
    server.delete(&format!("x/{day}/notes.txt")).await;
    assert_eq!(prune(&["--dry-run"], 0).await[0]["is_removed"], true);
    assert_eq!(read(&server, "x", &dir).await.len(), 6);
    assert!(prune(&[], 0).await[0]["files"].as_u64() > Some(0));
    assert_eq!(read(&server, "x", &dir).await, kept);
    // What waits on this machine is not forgotten, nor overtaken.
    let mut process = Process::start(&server, "x", &dir);
    server.outage(Some(Fault::Internal));
    process.ask("append late 2 60");
    process.close();
    server.outage(None);
    let reason = prune(&[], 1).await[0]["reason"].as_str().expect("a reason").to_owned();
    assert!(reason.contains("1 files of it are on this machine"), "{reason}");
    assert_eq!(read(&server, "x", &dir).await.len(), 5);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn compact_uploads_what_a_dead_writer_left() {
    let folder = tempfile::tempdir().expect("folder");
    let dir = folder.path().join("local");
    let server = Server::start().await;
    let mut process = Process::start(&server, "x", &dir);
    server.outage(Some(Fault::DropBefore));
    let mut acked = process.ask("append s 20 0");
    process.kill();
    server.outage(None);
    let output = lego(&server, &dir, &["compact", &server.url("x")]).await;
    assert!(output.status.success(), "{output:?}");
    assert!(parquet(&dir).is_empty());
    let mut found = read(&server, "x", &folder.path().join("elsewhere")).await;
    found.sort();
    acked.sort();
    assert_eq!(found, acked);
    let output = lego(&server, &folder.path().join("nothing"), &["compact", &server.url("x")]).await;
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && text.contains("what is there is not merged"), "{text}");
}

/// Runs lego in an empty folder, where nothing but what is told is known of any storage.
fn told(folder: &Path, arguments: &[&str], environment: &[(&str, String)]) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lego"));
    let own = ["AWS_", "GOOGLE_", "AZURE_"];
    for (name, _) in std::env::vars().filter(|(name, _)| own.iter().any(|own| name.starts_with(own))) {
        command.env_remove(name);
    }
    command.args(arguments).current_dir(folder).envs(environment.iter().cloned());
    let output = command.output().expect("lego runs");
    let text = String::from_utf8(output.stderr).expect("UTF-8");
    assert!(!text.contains("canary") && !text.contains("CANARY"), "{text}");
    (output.status.code(), text)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_place_that_cannot_be_used_is_one_clear_error_before_anything_starts() {
    let server = Server::start().await;
    let folder = tempfile::tempdir().expect("folder");
    let url = server.url("x");
    let environment = server.environment();
    let without = |names: &[&str]| -> Vec<(&str, String)> {
        environment.iter().filter(|(name, _)| !names.contains(name)).cloned().collect()
    };
    let keys = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"];
    let mut no_keys = without(&keys);
    // A machine without a role: nobody is there.
    no_keys.push(("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9/latest".to_owned()));
    let half = without(&keys[1..]);
    let no_http = without(&["AWS_ALLOW_HTTP"]);
    let az =
        ["AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"].map(|name| (name, "canary!".to_owned()));
    let az = az.to_vec();
    let gs = vec![("GOOGLE_SERVICE_ACCOUNT", "/no/such/file".to_owned())];
    let proxy = |url: &str, environment: &[(&str, String)]| {
        let arguments = ["proxy", "--port", "0", "--upstream", "http://127.0.0.1:9", "--capture-dir", url];
        let (code, text) = told(folder.path(), &arguments, environment);
        assert!(code.is_some_and(|code| code == 1 || code == 2), "{code:?} {text}");
        assert_eq!(text.lines().filter(|line| line.contains("error")).count(), 1, "{text}");
        text
    };
    for (url, environment, part) in [
        ("ftp://b/x", &environment, "\"ftp\" is no storage that lego knows"),
        ("s3://", &environment, "it names no bucket"),
        ("s3://user:canary@b/x", &environment, "(hidden)"),
        ("s3://b/x?canary", &environment, "(hidden)"),
        (&url, &no_keys, "there are no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        (&url, &half, "AWS_SECRET_ACCESS_KEY"),
        (&url, &no_http, "AWS_ALLOW_HTTP"),
        ("s3://no-such-bucket-of-ours/x", &environment, "there is no bucket no-such-bucket-of-ours"),
        ("az://box/x", &environment, "AZURE_STORAGE_ACCOUNT_NAME is not set"),
        ("az://box/x", &az, "what the environment says of it is wrong"),
        ("gs://b/x", &gs, "what the environment says of it is wrong"),
    ] {
        let text = proxy(url, environment);
        assert!(text.contains(part), "{url}: {text}");
    }
    server.fail(Method::PUT, ".lego-check", 1, Fault::Denied);
    let text = proxy(&url, &environment);
    assert!(text.contains("access is denied (AccessDenied)"), "{text}");
    server.outage(Some(Fault::DropBefore));
    let text = proxy(&url, &environment);
    assert!(text.contains(&format!("cannot write to {url}")), "{text}");
    server.outage(None);
    // Nothing was made.
    assert!(!folder.path().join("captures").exists());
    let (code, text) = told(folder.path(), &["capture", "ls", "--capture-dir", &url], &environment);
    assert!(code == Some(1) && text.contains("there is nothing under"), "{text}");
    let nowhere = ["capture", "ls", "--capture-dir", "s3://no-such-bucket-of-ours/x"];
    let (code, text) = told(folder.path(), &nowhere, &environment);
    assert!(code == Some(1) && text.contains("there is no bucket no-such-bucket-of-ours"), "{text}");
    let local = ["capture", "ls", "--capture-dir", "captures", "--local-dir", "x"];
    let (code, text) = told(folder.path(), &local, &environment);
    assert!(code == Some(2) && text.contains("goes with a URL"), "{text}");
    assert_eq!(server.keys().await, [] as [String; 0]);
}

#[test]
fn a_config_is_checked_without_the_network() {
    let folder = tempfile::tempdir().expect("folder");
    let check = |proxy: Value| {
        std::fs::write(
            folder.path().join("proxy_config.json"),
            serde_json::json!({"proxy": proxy}).to_string(),
        )
        .expect("written");
        let nowhere = [("AWS_ENDPOINT_URL", "http://127.0.0.1:9".to_owned())];
        told(folder.path(), &["config", "check"], &nowhere)
    };
    let (code, text) =
        check(serde_json::json!({"capture_dir": "s3://bucket/x", "capture_local_dir": "./waiting"}));
    assert_eq!((code, text.as_str()), (Some(0), ""));
    for (proxy, part) in [
        (serde_json::json!({"capture_dir": "s4://bucket/x"}), "\"s4\" is no storage"),
        (
            serde_json::json!({"capture_dir": "s3://u:canary@bucket/x"}),
            "credentials come from the environment",
        ),
        (serde_json::json!({"capture_local_dir": "./waiting"}), "proxy.capture_dir is a folder itself"),
        (
            serde_json::json!({"capture_dir": "s3://b", "capture_local_dir": "s3://b"}),
            "not a folder of this machine",
        ),
    ] {
        let (code, text) = check(proxy.clone());
        assert!(code == Some(2) && text.contains(part), "{proxy}: {code:?} {text}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn lego_proxy_captures_into_a_bucket() {
    use std::io::{BufRead as _, BufReader};

    let server = Server::start().await;
    let folder = tempfile::tempdir().expect("folder");
    let url = server.url("p");
    let mut child = Command::new(env!("CARGO_BIN_EXE_lego"))
        .args(["proxy", "--port", "0", "--upstream", "http://127.0.0.1:9", "--capture-dir", &url])
        .current_dir(folder.path())
        .envs(server.environment())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("lego starts");
    let mut lines =
        BufReader::new(child.stderr.take().expect("piped")).lines().map(|line| line.expect("text"));
    let first = lines.find(|line| line.contains("lego proxy: http://")).expect("it starts");
    assert!(first.ends_with(&format!("captures in {url}")), "{first}");
    let local = format!("./captures-s3-{}-p", server.bucket);
    let second = lines.next().expect("goes on");
    assert_eq!(second, format!("lego proxy: captures that are not there yet in {local}"));
    let address =
        first.split("http://").nth(1).expect("an address").split('/').next().expect("an address").to_owned();
    let body = serde_json::json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
    let client = reqwest::Client::builder().no_proxy().build().expect("client");
    let sent = client
        .post(format!("http://{address}/v1/chat/completions"))
        .header("content-type", "application/json")
        .body(body.to_string())
        .send()
        .await;
    assert!(sent.expect("an answer").status().is_server_error());
    let page = client.get(format!("http://{address}/metrics")).send().await.expect("a page").text().await;
    let page = page.expect("text");
    assert!(page.contains("lego_capture_waiting_files 0"), "{page}");
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-s", "TERM", &pid]).status().expect("kill runs").success());
    let rest: Vec<String> = tokio::task::block_in_place(|| lines.collect());
    assert!(
        child.wait().expect("ends").success() && !rest.iter().any(|line| line.contains("warning")),
        "{rest:?}"
    );
    let local = folder.path().join(local);
    assert!(parquet(&local).is_empty() && local.join("UPLOADS_TO").is_file());
    // Without naming the folder: it is the one of this URL.
    let list = ["capture", "ls", "--capture-dir", &url, "--json"];
    let mut command = Command::new(env!("CARGO_BIN_EXE_lego"));
    command.args(list).envs(server.environment()).current_dir(folder.path());
    let output =
        tokio::task::spawn_blocking(move || command.output().expect("lego runs")).await.expect("no panic");
    let session: Value = serde_json::from_slice(&output.stdout).expect("one session");
    assert!(session["calls"].as_u64() > Some(0) && session["calls"] == session["failed"], "{session}");
}
