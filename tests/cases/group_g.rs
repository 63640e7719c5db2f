//! Group G, the process: proxies of the environment, secrets, shutdown, configuration.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use lego::config::{Config, ConfigPaths, Environment, FileKind};
use lego::record::CallStatus;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

use crate::mock::{Mock, Part, Script};
use crate::process::{PROXY_VARIABLES, Process, bytes_of, captured};
use crate::setup::{PATIENCE, broken, client, post, request, text as whole};
use crate::support::{done, finish, protocols, stream, text};

/// A proxy that answers everything itself, and counts.
async fn poison() -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
    let address = listener.local_addr().expect("bound").to_string();
    let hits = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&hits);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            counted.fetch_add(1, Ordering::SeqCst);
            let _ = stream.read(&mut [0; 65_536]).await;
            let answer = "HTTP/1.1 418 PROXY-HIT\r\ncontent-length: 9\r\nconnection: close\r\n\r\nPROXY-HIT";
            let _ = stream.write_all(answer.as_bytes()).await;
        }
    });
    (address, hits)
}

#[tokio::test]
async fn what_a_probe_found_is_told_in_fields() {
    let mock = Mock::start(Script::default()).await;
    let settings = json!({"probe_upstream": true, "upstream_kind": "vllm"});
    let process = Process::start(&mock.url(), &settings, &[]).await;
    whole(post(&process.url("chat/completions"), &request(false)).await).await;
    let line = process.says("what the upstream can give").await;
    for part in ["token_ids=\"token_ids\"", "ids_in_streams=true", "expert_routing=false"] {
        assert!(line.contains(part), "{part} in {line}");
    }
    assert!(!line.contains("{ "), "{line}");
    process.signal(Signal::SIGTERM);
    process.end().await;
}

#[tokio::test]
async fn g01_the_environments_proxies_never_get_what_is_for_this_machine() {
    let (proxy, hits) = poison().await;
    let mock = Mock::start(Script::default()).await;
    let named = |host: &str| mock.url().replace("127.0.0.1", host);
    let mut upstreams = vec![mock.url(), named("localhost"), named("0.0.0.0")];
    // Where there is IPv6.
    if let Ok(listener) = TcpListener::bind("[::1]:0").await {
        upstreams.push(format!("http://{}", listener.local_addr().expect("bound")));
        let router = mock.router();
        tokio::spawn(async move { axum::serve(listener, router).await });
        upstreams.push(named("[::ffff:127.0.0.1]"));
    }
    for scheme in ["http", "socks5"] {
        let poisoned = format!("{scheme}://{proxy}");
        let names = ["HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"];
        let variables = names.map(|name| (name, poisoned.as_str()));
        for upstream in &upstreams {
            let process = Process::start(upstream, &json!({}), &variables).await;
            assert_eq!(
                post(&process.url("chat/completions"), &request(true)).await.status(),
                200,
                "{upstream}"
            );
            assert!(process.log().contains(&format!("{upstream}/v1 directly")), "{}", process.log());
        }
    }
    assert_eq!(hits.load(Ordering::SeqCst), 0);
    // What is elsewhere goes through them, and the start says so.
    let poisoned = format!("http://{proxy}");
    for (number, upstream) in
        ["http://host.docker.internal:8000", "http://engine.invalid"].into_iter().enumerate()
    {
        let process =
            Process::start(upstream, &json!({}), &[("HTTP_PROXY", &poisoned), ("http_proxy", &poisoned)])
                .await;
        let response = post(&process.url("chat/completions"), &request(true)).await;
        assert_eq!(response.status(), 418, "{upstream}");
        assert!(String::from_utf8_lossy(&whole(response).await).contains("PROXY-HIT"));
        assert_eq!(hits.load(Ordering::SeqCst), number + 1);
        assert!(process.log().contains("through the proxy of http_proxy"), "{}", process.log());
    }
}

#[tokio::test]
async fn g01_the_environments_proxies_are_read_as_curl_reads_them() {
    let (proxy, hits) = poison().await;
    let (used, other) = (format!("http://{proxy}"), "http://proxy.invalid:1");
    let cgi = ("REQUEST_METHOD", "POST");
    for (variables, variable) in [
        (vec![("HTTP_PROXY", other), ("http_proxy", &used)], Some("http_proxy")),
        (vec![("HTTP_PROXY", other), ("http_proxy", "")], None),
        (vec![("HTTP_PROXY", ""), ("http_proxy", &used)], Some("http_proxy")),
        (vec![("HTTP_PROXY", &used), ("all_proxy", other), ("https_proxy", other)], Some("HTTP_PROXY")),
        (vec![cgi, ("HTTP_PROXY", other)], None),
        (vec![cgi, ("HTTP_PROXY", other), ("ALL_PROXY", &used)], Some("ALL_PROXY")),
        (vec![("http_proxy", other), ("NO_PROXY", "a.example, engine.invalid")], None),
        (vec![("http_proxy", &used), ("no_proxy", "a.example"), ("NO_PROXY", "*")], Some("http_proxy")),
    ] {
        let before = hits.load(Ordering::SeqCst);
        let process = Process::start("http://engine.invalid:8000", &json!({}), &variables).await;
        let way = match variable {
            Some(variable) => format!("engine.invalid:8000/v1 through the proxy of {variable}"),
            None => "engine.invalid:8000/v1 directly".to_owned(),
        };
        assert!(process.log().contains(&way), "{variables:?}: {}", process.log());
        let response = post(&process.url("chat/completions"), &request(false)).await;
        let (status, hit) = if variable.is_some() { (418, 1) } else { (502, 0) };
        assert_eq!(
            (response.status().as_u16(), hits.load(Ordering::SeqCst) - before),
            (status, hit),
            "{variables:?}"
        );
    }
}

/// A SOCKS5 server (RFC 1928) that leads to `engine`, whatever is asked for; it tells the names.
async fn socks(engine: SocketAddr) -> (String, mpsc::Receiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
    let address = listener.local_addr().expect("bound").to_string();
    let (named, names) = mpsc::channel(16);
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let named = named.clone();
            tokio::spawn(async move {
                let methods = client.read_u16().await? & 0xff;
                client.read_exact(&mut vec![0; usize::from(methods)]).await?;
                client.write_all(&[5, 0]).await?;
                // Version, connect, reserved, a name.
                assert_eq!(client.read_u32().await?, 0x0501_0003);
                let mut name = vec![0; usize::from(client.read_u8().await?)];
                client.read_exact(&mut name).await?;
                client.read_u16().await?;
                client.write_all(&[5, 0, 0, 1, 0, 0, 0, 0, 0, 0]).await?;
                named.send(String::from_utf8_lossy(&name).into_owned()).await.expect("the test takes it");
                let mut engine = TcpStream::connect(engine).await?;
                tokio::io::copy_bidirectional(&mut client, &mut engine).await
            });
        }
    });
    (address, names)
}

#[tokio::test]
async fn g01_a_socks_proxy_is_used_and_one_that_cannot_be_is_refused_at_start() {
    let mock = Mock::start(Script::default()).await;
    let (address, mut names) = socks(mock.address).await;
    let all = format!("socks5h://{address}");
    let process = Process::start("http://engine.invalid", &json!({}), &[("ALL_PROXY", &all)]).await;
    assert!(process.log().contains("through the proxy of ALL_PROXY"), "{}", process.log());
    assert_eq!(post(&process.url("chat/completions"), &request(true)).await.status(), 200);
    assert_eq!(names.recv().await.as_deref(), Some("engine.invalid"));

    let folder = tempfile::tempdir().expect("temporary folder");
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_lego"));
    command.args(["proxy", "--port", "0", "--upstream", "http://engine.invalid"]);
    for name in PROXY_VARIABLES {
        command.env_remove(name);
    }
    command.current_dir(folder.path()).env("ALL_PROXY", "ftp://user:canary@proxy").kill_on_drop(true);
    let ended = tokio::time::timeout(PATIENCE, command.output()).await.expect("an end").expect("it runs");
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(!ended.status.success(), "{said}");
    assert!(said.contains("ALL_PROXY") && said.contains("\"ftp\"") && said.contains("socks5h"), "{said}");
    assert!(!said.contains("canary"), "{said}");
}

#[tokio::test]
async fn g04_no_key_is_said_or_kept_anywhere() {
    let mock = Mock::start(Script::default()).await;
    let settings = json!({"upstream_api_key_env": "REAL_KEY"});
    let variables = [("REAL_KEY", "sk-real-canary"), ("RUST_LOG", "trace")];
    let down = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
    let nowhere = format!("http://{}", down.local_addr().expect("bound"));
    drop(down);
    let headers =
        ["authorization", "x-api-key", "api-key", "x-goog-api-key", "cookie", "proxy-authorization"];
    for (upstream, error) in [
        (mock.url(), None),
        (mock.url(), Some((401, r#"{"error":{"message":"bad key sk-real-canary"}}"#.to_owned()))),
        (mock.url(), Some((500, "<html>sk-real-canary</html>".to_owned()))),
        (nowhere, None),
    ] {
        mock.set(Script { error, ..Script::default() });
        let process = Process::start(&upstream, &settings, &variables).await;
        let mut said = String::new();
        for (route, mut body) in protocols() {
            for stream in [true, false] {
                body["stream"] = json!(stream);
                let mut sent = client().post(process.url(route) + "?key=canary-query").body(body.to_string());
                for name in headers {
                    sent = sent.header(name, format!("Bearer canary-{name}"));
                }
                let response =
                    sent.header("content-type", "application/json").send().await.expect("an answer");
                said += &format!("{:?}", response.headers());
                said += &String::from_utf8_lossy(&whole(response).await);
            }
        }
        let page =
            client().get(format!("http://{}/metrics", process.address)).send().await.expect("an answer");
        said += &String::from_utf8_lossy(&whole(page).await);
        process.signal(Signal::SIGTERM);
        let (code, log, folder) = process.end().await;
        assert_eq!(code, Some(0), "{log}");
        assert!(said.contains("lego_proxy_calls_total"), "{said}");
        let calls = captured(&folder);
        assert_eq!(calls.len(), 6);
        said += &serde_json::to_string(&calls).expect("JSON");
        for (place, text) in [("log", log), ("reply, metric or record", said), ("file", bytes_of(&folder))] {
            let found = text
                .find("canary")
                .map(|at| text[at.saturating_sub(200)..].chars().take(260).collect::<String>());
            assert_eq!(found, None, "in a {place}");
        }
    }
    assert!(mock.asked().iter().all(|asked| asked.headers["authorization"] == "Bearer sk-real-canary"));
    assert!(
        mock.asked().iter().all(|asked| !format!("{:?} {}", asked.headers, asked.uri).contains("canary-"))
    );
    // A key in the URL itself is refused, and not repeated.
    let refused = std::process::Command::new(env!("CARGO_BIN_EXE_lego"))
        .args(["proxy", "--upstream", "http://me:canary@127.0.0.1:1/v1"])
        .current_dir(tempfile::tempdir().expect("temporary folder").path())
        .output()
        .expect("the binary runs");
    assert_eq!(refused.status.code(), Some(2));
    assert!(!String::from_utf8_lossy(&refused.stderr).contains("canary"));
}

#[tokio::test]
async fn g05_a_signal_ends_the_process_with_all_that_was_captured() {
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let mock = Mock::start(Script::default()).await;
        let process = Process::start(&mock.url(), &json!({"shutdown_grace_ms": 50}), &[]).await;
        for _ in 0..50 {
            whole(post(&process.url("chat/completions"), &request(false)).await).await;
        }
        mock.set(stream(vec![text("half"), Part::Gate, finish("stop"), done()]));
        let mut open = post(&process.url("chat/completions"), &request(true)).await;
        open.chunk().await.expect("piece").expect("begun");
        let url = process.url("chat/completions");
        process.signal(signal);
        assert!(String::from_utf8_lossy(&broken(open).await).contains("call_aborted"));
        let (code, log, folder) = process.end().await;
        assert_eq!(code, Some(0), "{log}");
        assert!(client().post(url).body("{}").send().await.is_err(), "nobody listens any more");
        let calls = captured(&folder);
        let ended = |status: CallStatus| calls.iter().filter(|call| call.status == status).count();
        assert_eq!((ended(CallStatus::Ok), ended(CallStatus::Aborted)), (50, 1));
        let aborted = calls.iter().find(|call| call.status == CallStatus::Aborted).expect("one");
        assert_eq!((aborted.text.as_deref(), aborted.trainable), (Some("half"), false));
        mock.aborted(1).await;
    }
}

fn load(kind: FileKind, text: &str, variables: &[(&str, &str)]) -> Result<Config, String> {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join(kind.file_name());
    std::fs::write(&path, text).expect("written");
    let variables = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    Config::load(&ConfigPaths::default().with(kind, path), variables).map_err(|error| error.to_string())
}

/// A file of this kind with one key set.
fn with_key(kind: FileKind, key: &str, value: Value) -> String {
    let tree = key.rsplit('.').fold(value, |inner, name| json!({name: inner}));
    if kind == FileKind::Proxy {
        return tree.to_string();
    }
    toml::to_string(&tree).expect("TOML")
}

#[test]
fn g08_a_key_that_is_not_known_is_refused_at_every_level() {
    let config = Config::defaults(Environment::default()).expect("valid");
    let mut tables: Vec<String> = Vec::new();
    for (key, _, _) in config.entries() {
        let mut table = key.as_str();
        while let Some((outer, _)) = table.rsplit_once('.') {
            table = outer;
            tables.push(table.to_owned());
        }
    }
    tables.sort();
    tables.dedup();
    for expected in [
        "proxy",
        "harness.llm_config_override",
        "sandbox.cache",
        "training.async",
        "training.observability",
        "policy",
    ] {
        assert!(tables.iter().any(|table| table == expected), "{expected} in {tables:?}");
    }
    for table in &tables {
        let kind = FileKind::of_key(table).expect("a file");
        let names: Vec<String> = config
            .entries()
            .into_iter()
            .filter_map(|(key, _, _)| {
                let rest = key.strip_prefix(&format!("{table}."))?;
                (!rest.contains('.')).then(|| rest.to_owned())
            })
            .collect();
        // One letter is missing, so that the nearest name is known.
        let known = names.iter().find(|name| name.len() > 6).unwrap_or(&names[0]);
        let misspelt = format!("{table}.{}", &known[..known.len() - 1]);
        let refusal = load(kind, &with_key(kind, &misspelt, json!(1)), &[]).expect_err(&misspelt);
        assert!(
            refusal.contains(kind.file_name()) && refusal.contains(&format!("{misspelt}: unknown key")),
            "{refusal}"
        );
        assert!(refusal.contains(known.as_str()), "{refusal} names {known}");
    }
}

#[test]
fn g08_empty_unset_and_impossible_values_are_refused_by_name() {
    let refusal = |key: &str, value: Value, variables: &[(&str, &str)]| {
        let kind = FileKind::of_key(key).expect("a file");
        let refusal = load(kind, &with_key(kind, key, value), variables).expect_err(key);
        assert!(refusal.contains(key), "{refusal}");
        refusal
    };
    let unset = refusal("proxy.upstream_base_url", json!("${UPSTREAM}"), &[]);
    assert!(unset.contains("environment variable UPSTREAM is not set"), "{unset}");
    refusal("proxy.upstream_base_url", json!("${UPSTREAM}"), &[("UPSTREAM", "")]);
    refusal("proxy.upstream_base_url", json!(""), &[]);
    refusal("proxy.listen_host", json!(""), &[]);
    refusal("sandbox.image", json!(""), &[]);
    for value in [json!(-1), json!(0), json!("soon")] {
        refusal("proxy.idle_timeout_secs", value, &[]);
    }
    for value in [json!(70_000), json!(-1), json!("18080x")] {
        refusal("proxy.listen_port", value, &[]);
    }
    refusal("sandbox.hidden_test_mount", json!("relative/path"), &[]);
    // Both spellings of an address.
    for host in ["::1", "[::1]", "127.0.0.1", "localhost"] {
        load(FileKind::Proxy, &with_key(FileKind::Proxy, "proxy.listen_host", json!(host)), &[]).expect(host);
    }
}

#[test]
fn g08_variables_that_nothing_reads_are_told() {
    let variables = [
        ("LEGO_RL_SANDBOX_IMGE", "x"),
        ("LEGO_KEY", "k"),
        ("LEGO_PART", "p"),
        ("LEGO_RL_LOG_DIR", "d"),
        ("OTHER", "o"),
    ];
    let text =
        r#"{"proxy": {"upstream_base_url": "http://h/${LEGO_PART}", "upstream_api_key_env": "LEGO_KEY"}}"#;
    let strays = load(FileKind::Proxy, text, &variables).expect("valid").stray_variables();
    assert_eq!(strays.len(), 1, "{strays:?}");
    assert!(
        strays[0].contains("LEGO_RL_SANDBOX_IMGE")
            && strays[0].contains("Did you mean LEGO_RL_SANDBOX_IMAGE?"),
        "{strays:?}"
    );
    let folder = tempfile::tempdir().expect("temporary folder");
    std::fs::write(
        folder.path().join("proxy_config.json"),
        r#"{"proxy": {"upstream_api_key_env": "MY_KEY"}}"#,
    )
    .expect("written");
    let lego = |arguments: &[&str], folder: &Path| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_lego"));
        let command = command
            .args(arguments)
            .current_dir(folder)
            .env("LEGO_RL_LOG_DRI", "x")
            .env("MY_KEY", "sk-canary");
        let output = command.output().expect("the binary runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let checked = lego(&["config", "check"], folder.path());
    assert!(
        checked.contains("LEGO_RL_LOG_DRI") && checked.contains("Did you mean LEGO_RL_LOG_DIR?"),
        "{checked}"
    );
    let shown = lego(&["config", "show"], folder.path());
    assert!(shown.contains("MY_KEY") && !shown.contains("sk-canary"), "{shown}");
}
