//! Training through the token-in relay.

use super::*;
use lego::record::ClientApi;

/// The bundled policy's template rewrites no history, so tokens and chat ask the engine for the very same.
#[test]
fn asking_with_tokens_trains_the_same_to_the_bit() {
    let temp = test_folder();
    let config = config(temp.path(), "seed = 5");
    let relay = |name: &str| {
        let proxy = temp.path().join(format!("{name}.json"));
        let own = fs::read(format!("{ROOT}/proxy_config.json")).expect("proxy_config.json");
        let mut own: Value = serde_json::from_slice(&own).expect("JSON");
        own["proxy"]["relay"] = name.into();
        fs::write(&proxy, own.to_string()).expect("config");
        let run = temp.path().join(name);
        finished(train(&config, &run, &[]).arg("--proxy-config").arg(&proxy));
        run
    };
    let (chat, tokens) = (relay("live"), relay("token_in"));
    let (one, other) = (columns(&chat), columns(&tokens));
    for name in REPEATABLE {
        assert_eq!(one[name], other[name], "{name}");
    }
    let calls = calls(&tokens);
    assert!(calls.iter().all(|call| call.upstream_api == ClientApi::OpenaiCompletions));
    // Every turn but the first of a trial goes on from the one before.
    let sessions: std::collections::BTreeSet<_> = calls.iter().map(|call| &call.session_id).collect();
    let first = calls.iter().filter(|call| call.parent_call_id.is_none()).count();
    assert_eq!(first, sessions.len());
    assert!(calls.len() > sessions.len(), "trials have turns");
    nothing_is_left(temp.path());
}
