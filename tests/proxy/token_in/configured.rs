//! What the configuration must say.

use lego::config::{Config, ConfigPaths, Environment, FileKind};
use serde_json::json;

#[test]
fn asking_with_tokens_needs_an_engine_that_takes_them_and_a_tokenizer() {
    let problem = |proxy: serde_json::Value| {
        let folder = tempfile::tempdir().expect("temp");
        let path = folder.path().join("proxy_config.json");
        std::fs::write(&path, json!({"proxy": proxy}).to_string()).expect("written");
        let paths = ConfigPaths::default().with(FileKind::Proxy, path);
        Config::load(&paths, Environment::default()).map(|_| ()).map_err(|error| error.to_string())
    };
    let url = "http://127.0.0.1:9/v1";
    let none = problem(json!({"relay": "token_in", "upstream_base_url": url})).expect_err("no tokenizer");
    assert!(none.contains("proxy.relay") && none.contains("local_tokenizer"), "{none}");
    let gateway = json!({"relay": "token_in", "upstream_base_url": url, "upstream_kind": "openai",
        "local_tokenizer": "models/lego-tiny"});
    let gateway = problem(gateway).expect_err("a gateway");
    assert!(gateway.contains("proxy.upstream_kind") && gateway.contains("takes no token ids"), "{gateway}");
    // A judge is asked in its own words.
    let judge = json!({"relay": "token_in", "routes": {"judge": {
        "kind": "judge", "upstream_base_url": url, "upstream_kind": "openai"}}});
    assert_eq!(problem(judge), Ok(()));
    assert_eq!(problem(json!({"relay": "token_in"})), Ok(()));
}
