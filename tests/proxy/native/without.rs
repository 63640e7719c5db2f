//! Servers that lack a part of what is asked of SGLang's native endpoint.

use std::sync::Arc;
use std::time::Duration;

use lego::proxy::{Proxy, ProxyOptions, RouteOptions};
use lego::record::{CallSink, CallStatus, ClientApi, UpstreamKind};
use lego::upstream::Upstream;
use serde_json::json;

use super::server::{Server, Style, TEXTS};
use super::{Rig, said};
use crate::rejoin::left;
use crate::setup::{MemorySink, PATIENCE, post, text, timeouts};

/// Nobody asked before: the first call finds out.
#[tokio::test]
async fn a_server_without_the_endpoint_answers_completions_also_where_nothing_is_probed() {
    for is_stream in [true, false] {
        let rig = Rig::stand_alone(Style { has_generate: false, ..Style::default() }).await;
        for _ in 0..2 {
            let body = json!({"model": "toy", "prompt": [5], "stream": is_stream});
            let reply = text(rig.complete(&body).await).await;
            assert_eq!(said(&reply, is_stream)[0].text, "own");
        }
        let calls = rig.setup.sink.calls(3).await;
        let seen: Vec<_> =
            calls.iter().map(|call| (call.upstream_api, call.http_status, call.attempt)).collect();
        let own = |attempt| (ClientApi::OpenaiCompletions, 200, attempt);
        assert_eq!(seen, [(ClientApi::SglangGenerate, 404, 1), own(2), own(1)]);
        assert_eq!(calls[1].retry_of, Some(calls[0].call_id));
        assert_eq!((rig.server.asked("/generate").len(), rig.server.asked("/v1/completions").len()), (1, 2));
        // Its own clients are told what the server says.
        let reply = post(&rig.url("/generate"), &json!({"input_ids": [5]})).await;
        assert_eq!(reply.status(), 404);
    }
}

#[tokio::test]
async fn a_tokenizer_that_is_not_there_is_asked_once() {
    let rig = Rig::stand_alone(Style { has_tokenizer: false, ..Style::default() }).await;
    for _ in 0..3 {
        let reply = text(rig.complete(&json!({"model": "toy", "prompt": "abc", "stream": true})).await).await;
        assert_eq!(said(&reply, true)[0].text, TEXTS.concat());
    }
    assert_eq!((rig.server.asked("/tokenize").len(), rig.server.asked("/generate").len()), (1, 3));
}

/// A question to the tokenizer is a request like any other.
#[tokio::test]
async fn where_a_route_has_no_second_turn_in_time_the_tokenizer_is_not_asked() {
    for (per_minute, questions) in [(1, 0), (2, 1)] {
        let server = Server::start(Style::default()).await;
        let upstream = Upstream::http(&server.url, UpstreamKind::Sglang, None, timeouts()).expect("upstream");
        let mut options = ProxyOptions::stand_alone();
        options.admission_wait = Duration::ZERO;
        options.probes_upstream = false;
        let route = RouteOptions {
            requests_per_minute: Some(per_minute),
            ..RouteOptions::new("toy", Arc::new(upstream))
        };
        let sink = MemorySink::new() as Arc<dyn CallSink>;
        let proxy = Proxy::with_routes(options, sink, None, vec![route]);
        let listener = lego::proxy::listen("127.0.0.1", 0, false).await.expect("loopback");
        let url = format!("http://{}/v1/completions", listener.local_addr().expect("bound"));
        let served = proxy.clone();
        tokio::spawn(async move { served.serve(listener).await });
        // Two turns of a minute are there at once.
        let body = json!({"model": "toy", "prompt": "abc", "stream": true});
        assert_eq!(said(&text(post(&url, &body).await).await, true)[0].text, TEXTS.concat());
        assert_eq!(server.asked("/tokenize").len(), questions);
        assert_eq!(post(&url, &body).await.status(), 429, "all turns are taken");
        assert_eq!(server.asked("/tokenize").len(), questions);
    }
}

/// A13: what the probe found meanwhile makes no other request of the same one.
#[tokio::test]
async fn a13_a_client_that_left_during_the_probe_comes_back_to_its_call() {
    for is_stream in [true, false] {
        let mut options = ProxyOptions::stand_alone();
        options.retry_grace = 10 * PATIENCE;
        let style = Style { has_generate: false, waits: Some(0), ..Style::default() };
        let rig = Rig::new(options, style, true).await;
        let (url, body) =
            (rig.url("/v1/completions"), json!({"model": "toy", "prompt": [5], "stream": is_stream}));
        let (first, again) = (body.clone(), body.clone());
        let calling = {
            let url = url.clone();
            tokio::spawn(async move { post(&url, &first).await })
        };
        // The probe has its answer, and the call waits for its own.
        while rig.server.asked("/v1/completions").is_empty() {
            tokio::task::yield_now().await;
        }
        calling.abort();
        left(&rig.setup, 1).await;
        let calling = tokio::spawn(async move { text(post(&url, &again).await).await });
        left(&rig.setup, 0).await;
        rig.server.go_on();
        assert_eq!(said(&calling.await.expect("a reply"), is_stream)[0].text, "own");
        assert_eq!(rig.server.asked("/v1/completions").len(), 1);
        let calls = rig.setup.sink.calls(2).await;
        assert_eq!((calls[1].status, calls[1].rejoined), (CallStatus::Ok, 1));
    }
}
