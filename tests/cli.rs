//! The binary, seen from a shell.

use std::path::Path;
use std::process::{Command, Output};

fn lego(arguments: &[&str], folder: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_lego"))
        .args(arguments)
        .current_dir(folder)
        .env_remove("LEGO_RL_LOG_DIR")
        .env_remove("LEGO_RL_SANDBOX_IMAGE")
        .output()
        .expect("the binary runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A reader of its messages that went away (`lego proxy 2>&1 | head -1`) keeps no command from ending.
#[cfg(unix)]
#[test]
fn a_command_whose_messages_nobody_reads_ends_when_it_is_told_to() {
    use std::io::BufRead as _;
    use std::process::Stdio;

    let folder = tempfile::tempdir().expect("folder");
    let config = r#"{"proxy": {"listen_port": 0, "upstream_base_url": "http://127.0.0.1:1"}}"#;
    std::fs::write(folder.path().join("proxy_config.json"), config).expect("written");
    let mut command = Command::new(env!("CARGO_BIN_EXE_lego"));
    command.arg("proxy").current_dir(folder.path()).stdin(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("lego starts");
    let mut messages = std::io::BufReader::new(child.stderr.take().expect("piped")).lines();
    while !messages.next().expect("a line").expect("text").contains("lego proxy: http://") {}
    drop(messages);
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().expect("kill runs").success());
    let (sender, ended) = std::sync::mpsc::sync_channel(1);
    std::thread::spawn(move || sender.send(child.wait().expect("ends")));
    match ended.recv_timeout(std::time::Duration::from_secs(60)) {
        Ok(status) => assert!(status.code().is_some(), "{status}"),
        Err(_) => {
            let killed = Command::new("kill").args(["-KILL", &pid]).status();
            panic!("it goes on; killed: {killed:?}");
        }
    }
}

#[test]
fn version_has_the_commit() {
    let output = lego(&["--version"], root());
    assert!(output.status.success());
    let version = text(&output.stdout);
    assert!(version.starts_with(&format!("lego {} (", env!("CARGO_PKG_VERSION"))), "{version}");
}

#[test]
fn bad_usage_and_bad_config_exit_with_2_and_say_it_once() {
    assert_eq!(lego(&["no-such-command"], root()).status.code(), Some(2));
    let folder = tempfile::tempdir().expect("temporary folder");
    assert_eq!(lego(&["config", "check"], folder.path()).status.code(), Some(2));
    std::fs::write(folder.path().join("train.toml"), "[training]\nbatchsize = 3\n").expect("written");
    let output = lego(&["config", "check"], folder.path());
    assert_eq!(output.status.code(), Some(2));
    let error = text(&output.stderr);
    assert_eq!(error.matches("training.batchsize").count(), 1, "{error}");
    assert!(error.contains("Did you mean batch_size?"), "{error}");
}

#[test]
fn the_committed_files_pass_the_check() {
    let output = lego(&["config", "check"], root());
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout).lines().filter(|line| line.ends_with(": ok")).count(), 3);
    let output = lego(&["config", "check"], &root().join("docs/examples/lego-rl"));
    assert!(output.status.success(), "{}", text(&output.stderr));
    let notes = text(&output.stdout);
    assert!(notes.contains("training.async.enable = true: not there yet"), "{notes}");
}

#[test]
fn show_gives_every_value_with_its_origin() {
    let output = lego(&["config", "show", "--json"], root());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let shown: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(shown["training.group_size"]["value"], 8);
    assert_eq!(shown["training.group_size"]["origin"], "train.toml");
    assert_eq!(shown["training.adam_eps"]["origin"], "default");
    let upstream = shown["proxy.upstream_base_url"]["origin"].as_str().expect("text");
    assert!(upstream.contains("policy.upstream"), "{upstream}");
}

#[test]
fn a_routes_missing_key_is_told_before_anything_starts() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let route = r#"{"proxy": {"listen_port": 0, "routes": {"judge": {"upstream_base_url": "http://h:1", "upstream_api_key_env": "LEGO_TEST_NO_KEY"}}}}"#;
    std::fs::write(folder.path().join("proxy_config.json"), route).expect("written");
    let output = lego(&["proxy"], folder.path());
    assert_eq!(output.status.code(), Some(2));
    let error = text(&output.stderr);
    for part in ["proxy_config.json", "proxy.routes.judge.upstream_api_key_env", "LEGO_TEST_NO_KEY"] {
        assert!(error.contains(part), "{error}");
    }
    assert!(!folder.path().join("captures").exists());
    let output = lego(&["config", "check"], folder.path());
    assert!(text(&output.stdout).contains("LEGO_TEST_NO_KEY is not set"), "{}", text(&output.stdout));
    let output = lego(&["config", "show"], folder.path());
    let shown = text(&output.stdout);
    for part in [
        "proxy.routes.judge.upstream_base_url = \"http://h:1\"",
        "proxy.routes.judge.idle_timeout_secs = 300",
        "as proxy.idle_timeout_secs",
    ] {
        assert!(shown.contains(part), "{part} in {shown}");
    }
}

#[test]
fn an_admin_token_that_is_not_set_is_told_before_anything_listens() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let config = r#"{"proxy": {"listen_port": 0, "upstream_base_url": "http://h:1", "admin_listen_port": 0, "admin_token_env": "LEGO_TEST_NO_TOKEN"}}"#;
    std::fs::write(folder.path().join("proxy_config.json"), config).expect("written");
    let output = lego(&["proxy"], folder.path());
    assert_eq!(output.status.code(), Some(2));
    let error = text(&output.stderr);
    for part in ["proxy_config.json", "proxy.admin_token_env", "LEGO_TEST_NO_TOKEN"] {
        assert!(error.contains(part), "{error}");
    }
    assert!(!error.contains("lego proxy: http://"), "{error}");
    assert!(!folder.path().join("captures").exists());
}

#[test]
fn show_without_files_gives_the_defaults() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let output = lego(&["config", "show", "--json"], folder.path());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let shown: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(shown["proxy.listen_port"]["value"], 18080);
    assert_eq!(shown["proxy.listen_port"]["origin"], "default");
}

#[test]
fn a_local_tokenizer_that_cannot_be_used_is_told_before_anything_starts() {
    let folder = tempfile::tempdir().expect("temporary folder");
    std::fs::create_dir(folder.path().join("broken")).expect("made");
    std::fs::write(folder.path().join("broken/tokenizer.json"), "{").expect("written");
    for (key, named, part) in [
        ("proxy.local_tokenizer", r#""local_tokenizer": "nowhere""#, "nowhere/tokenizer.json"),
        ("proxy.local_tokenizer", r#""local_tokenizer": "broken""#, "broken/tokenizer.json: is not JSON"),
        (
            "proxy.routes.judge.local_tokenizer",
            r#""routes": {"judge": {"upstream_base_url": "http://h:1", "local_tokenizer": "nowhere"}}"#,
            "nowhere/tokenizer.json",
        ),
    ] {
        let text_of =
            format!(r#"{{"proxy": {{"listen_port": 0, "upstream_base_url": "http://h:1", {named}}}}}"#);
        std::fs::write(folder.path().join("proxy_config.json"), text_of).expect("written");
        let output = lego(&["proxy"], folder.path());
        assert_eq!(output.status.code(), Some(2));
        let error = text(&output.stderr);
        for part in ["proxy_config.json", key, part, "or take it out"] {
            assert!(error.contains(part), "{part} in {error}");
        }
        assert!(!folder.path().join("captures").exists());
    }
}

#[test]
fn a_run_folder_given_for_a_model_is_told_with_its_checkpoints() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let run = folder.path().join("run");
    for step in [2, 10] {
        let checkpoint = run.join(format!("checkpoints/step_{step}"));
        std::fs::create_dir_all(&checkpoint).expect("made");
        std::fs::write(checkpoint.join("config.json"), "{}").expect("written");
    }
    let path = run.to_str().expect("text");
    let train = root().join("train.toml");
    let dataset = root().join("data/swebench_mini.jsonl");
    let arguments = [
        "eval",
        "--config",
        train.to_str().expect("text"),
        "--proxy-config",
        concat!(env!("CARGO_MANIFEST_DIR"), "/proxy_config.json"),
        "--dataset",
        dataset.to_str().expect("text"),
        "--model-path",
        path,
    ];
    let output = lego(&arguments, folder.path());
    assert_eq!(output.status.code(), Some(1));
    let error = text(&output.stderr);
    let listed = format!("{path}/checkpoints/step_2, {path}/checkpoints/step_10");
    assert!(error.contains("no model folder") && error.contains(&listed), "{error}");
}

#[test]
fn a_cache_larger_than_the_machine_is_refused_with_the_flags_to_lower() {
    for more in [&["--max-batch", "100000000000"][..], &["--max-batch", "18446744073709551615"]] {
        let output = lego(&[&["serve", "--port", "0"], more].concat(), root());
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{error}");
        for part in ["--max-batch", "--max-context", more[1]] {
            assert!(error.contains(part), "{part}: {error}");
        }
    }
}

#[test]
fn a_parser_that_lego_lacks_is_refused_with_those_it_has() {
    for (flag, known) in [("--tool-call-parser", "qwen3_coder"), ("--reasoning-parser", "deepseek_r1")] {
        let output = lego(&["serve", "--port", "0", flag, "pythonic"], root());
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains(flag) && error.contains("\"pythonic\"") && error.contains(known), "{error}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn doctor_says_how_many_calls_the_open_files_allow_and_who_can_reach_the_proxy() {
    let folder = tempfile::tempdir().expect("folder");
    for (settings, place, reach) in [
        (r#"{"listen_port": 4321}"#, "127.0.0.1:4321", "not reachable"),
        (r#"{"listen_host": "0.0.0.0", "client_token_env": "T"}"#, "0.0.0.0:18080", "host.docker.internal"),
    ] {
        let config = format!(r#"{{"proxy": {settings}}}"#);
        std::fs::write(folder.path().join("proxy_config.json"), config).expect("written");
        let mut command = Command::new("sh");
        command.args(["-c", "ulimit -n 100 && exec \"$0\" doctor", env!("CARGO_BIN_EXE_lego")]);
        // Whether sandboxes work here is not asked.
        let output = command.current_dir(folder.path()).env("T", "token").output().expect("the binary runs");
        let said = text(&output.stdout);
        let line = |name: &str| {
            said.lines()
                .find(|line| line.trim_start().starts_with(name))
                .unwrap_or_else(|| panic!("{name} in {said}"))
        };
        assert!(line("open files").contains("100: 30 model calls at once"), "{said}");
        assert!(said.contains("proxy.max_in_flight") && said.contains("ulimit -Hn"), "{said}");
        assert!(line("listens on").contains(place), "{said}");
        assert!(line("from containers").contains(reach), "{said}");
    }
}
