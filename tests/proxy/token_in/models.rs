//! One conversation with several models.

use std::sync::Arc;

use lego::proxy::{Proxy, ProxyOptions, RouteOptions};
use lego::record::{CallKind, CallSink, UpstreamKind};
use lego::upstream::Upstream;
use serde_json::{Value, json};

use super::engine::Engine;
use super::{all_ids, message, renderer};
use crate::setup::{MemorySink, post, spec, text, timeouts};

#[tokio::test]
async fn a_model_goes_on_from_its_own_replies_alone() {
    let (policy, small) = (Engine::start(false).await, Engine::start(false).await);
    let to = |engine: &Engine| {
        let upstream = Upstream::http(&engine.url, UpstreamKind::Vllm, None, timeouts());
        Arc::new(upstream.expect("upstream"))
    };
    let mut options = ProxyOptions::trainer("policy");
    options.probes_upstream = false;
    options.renderer = Some(renderer());
    let route = RouteOptions {
        kind: Some(CallKind::Aux),
        renderer: Some(renderer()),
        ..RouteOptions::new("small", to(&small))
    };
    let sink = MemorySink::new() as Arc<dyn CallSink>;
    let proxy = Proxy::with_routes(options, sink, Some(to(&policy)), vec![route]);
    let listener = lego::proxy::listen("127.0.0.1", 0, false).await.expect("loopback");
    let url = format!("http://{}/sessions/s1/v1/chat/completions", listener.local_addr().expect("bound"));
    let served = proxy.clone();
    tokio::spawn(async move { served.serve(listener).await });
    let session = proxy.open_session(spec("s1")).expect("open");

    let mut history = vec![json!({"role": "user", "content": "go"})];
    for (model, engine) in [("m", &policy), ("small", &small), ("m", &policy), ("small", &small)] {
        engine.will_say("ok");
        let body = json!({"model": model, "messages": history});
        let reply = String::from_utf8(text(post(&url, &body).await).await.to_vec()).expect("UTF-8");
        history.push(message(&reply, false).0);
        history.push(json!({"role": "user", "content": "go on"}));
    }
    assert_eq!((policy.asked().len(), small.asked().len()), (2, 2));
    let calls = session.close().await.calls;
    let extended: Vec<Value> = calls
        .iter()
        .map(|call| {
            let parent = calls.iter().position(|other| Some(other.call_id) == call.parent_call_id);
            if let Some(parent) = parent {
                let prompt = call.prompt_token_ids.as_ref().expect("ids");
                assert!(prompt.starts_with(&all_ids(&calls[parent])));
            }
            json!(parent)
        })
        .collect();
    // Between two replies of the one the other one said something.
    assert_eq!(extended, [Value::Null, Value::Null, json!(0), json!(1)]);
}
