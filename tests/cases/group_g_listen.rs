//! Group G, the places where the proxy listens.

use std::process::Output;

use lego::config::{Config, ConfigPaths, Environment, FileKind};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;

use crate::mock::{Mock, Script};
use crate::process::{Process, captured};
use crate::setup::{PATIENCE, client, post, request, text as whole};

/// All of these are this machine.
async fn loopbacks() -> Vec<&'static str> {
    let mut hosts = vec!["127.0.0.1", "127.0.0.2"];
    // Where there is IPv6.
    if TcpListener::bind("[::1]:0").await.is_ok() {
        hosts.push("[::1]");
    }
    hosts
}

#[tokio::test]
async fn g09_each_of_several_addresses_is_listened_on_at_one_port() {
    let mock = Mock::start(Script::default()).await;
    let hosts = loopbacks().await;
    let settings = json!({"listen_host": hosts, "admin_listen_port": 0, "admin_token_env": "ADMIN_TOKEN"});
    let process = Process::start(&mock.url(), &settings, &[("ADMIN_TOKEN", "a-token-for-admins")]).await;
    let port = process.address.port();
    for host in &hosts {
        let url = format!("http://{host}:{port}/v1/chat/completions");
        assert!(process.log().contains(&format!("http://{host}:{port}/v1")), "{}", process.log());
        let response = post(&url, &request(true)).await;
        assert_eq!(response.status(), 200, "{host}");
        whole(response).await;
    }
    let line = process.says("lego proxy: admin at ").await;
    let (_, admin) = line.split_once("admin at ").expect("places");
    let places: Vec<_> = admin.split(", ").collect();
    assert_eq!(places.len(), hosts.len(), "{line}");
    for place in places {
        let state = client().get(format!("{place}/state")).bearer_auth("a-token-for-admins").send().await;
        assert_eq!(state.expect("an answer").status(), 200, "{place}");
    }
    process.signal(Signal::SIGTERM);
    let (code, log, folder) = process.end().await;
    assert_eq!(code, Some(0), "{log}");
    assert_eq!(captured(&folder).len(), hosts.len());
    for host in hosts {
        assert!(TcpStream::connect(format!("{host}:{port}")).await.is_err(), "{host}");
    }
}

/// What `lego proxy` says that does not start.
async fn refused(proxy: Value) -> String {
    let folder = tempfile::tempdir().expect("temporary folder");
    let config = json!({"proxy": proxy}).to_string();
    std::fs::write(folder.path().join("proxy_config.json"), config).expect("written");
    let mut command = Command::new(env!("CARGO_BIN_EXE_lego"));
    command.args(["proxy", "--upstream", "http://127.0.0.1:9"]).current_dir(folder.path());
    let output = command.env("T", "a-token-for-all").kill_on_drop(true).output();
    let Output { status, stderr, .. } =
        tokio::time::timeout(PATIENCE, output).await.expect("an end").expect("it runs");
    let said = String::from_utf8_lossy(&stderr).into_owned();
    assert!(!status.success(), "{said}");
    said
}

#[tokio::test]
async fn g09_an_address_that_cannot_be_bound_is_named() {
    let taken = TcpListener::bind("127.0.0.2:0").await.expect("loopback");
    let port = taken.local_addr().expect("bound").port();
    let said = refused(json!({"listen_host": ["127.0.0.1", "127.0.0.2"], "listen_port": port})).await;
    assert!(said.contains(&format!("port {port} on 127.0.0.2 is in use")), "{said}");
    // Of documentation, and so nobody's (RFC 5737).
    let hosts = ["127.0.0.1", "192.0.2.1"];
    let said = refused(json!({"listen_host": hosts, "listen_port": 0, "client_token_env": "T"})).await;
    assert!(said.contains("cannot listen on 192.0.2.1"), "{said}");
}

#[test]
fn g09_addresses_that_cannot_be_meant_are_refused_by_name() {
    let load = |host: Value| {
        let file = tempfile::Builder::new().suffix(".json").tempfile().expect("file");
        std::fs::write(file.path(), json!({"proxy": {"listen_host": host}}).to_string()).expect("written");
        let paths = ConfigPaths::default().with(FileKind::Proxy, file.path().to_owned());
        Config::load(&paths, Environment::default()).map_err(|error| error.to_string())
    };
    for (host, part) in [
        (json!([]), "no address"),
        (json!(["127.0.0.1", "[127.0.0.1]"]), "127.0.0.1 is there twice"),
        (json!(["127.0.0.1", "0.0.0.0"]), "others can reach 0.0.0.0"),
        (json!(["127.0.0.1", "here"]), "here is not an IP address"),
        (json!(["127.0.0.1", ""]), "no IP address"),
        (json!(5), "text or list: text"),
        (json!([5]), "text or list: text"),
    ] {
        let error = load(host.clone()).expect_err("refused");
        assert!(error.contains("proxy.listen_host") && error.contains(part), "{host}: {error}");
    }
    let config = load(json!(["127.0.0.1", "::1"])).expect("two addresses");
    assert_eq!(config.shown("proxy.listen_host"), json!(["127.0.0.1", "::1"]));
    assert!(config.to_resolved_toml().contains(r#"listen_host = ["127.0.0.1", "::1"]"#));
}
