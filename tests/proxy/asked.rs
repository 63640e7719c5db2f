//! What an upstream is asked beside its calls: what it can give, and calls again without what it refuses.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use lego::proxy::ProxyOptions;
use lego::record::{CallKind, CallStatus, UpstreamKind};
use lego::upstream::Upstream;
use serde_json::Value;

use crate::mock::{Mock, Script};
use crate::setup::{Setup, post, request, text, timeouts};

fn named(model: &str) -> Value {
    let mut body = request(false);
    body["model"] = model.into();
    body
}

async fn probing(mut options: ProxyOptions) -> Setup {
    options.probes_upstream = true;
    let mock = Mock::start(Script { is_silent: true, ..Script::default() }).await;
    let upstream = Upstream::http(&mock.url(), UpstreamKind::Vllm, None, timeouts()).expect("upstream");
    Setup::as_told(upstream, options, mock).await
}

#[tokio::test]
async fn a_model_that_takes_no_additions_says_nothing_of_another() {
    let script = Script { refuses_logprobs: true, ..Script::default() };
    let setup = Setup::with(ProxyOptions::stand_alone(), UpstreamKind::Openai, script).await;
    for model in ["a", "a", "b"] {
        let response = setup.post(&named(model)).await;
        assert_eq!(response.status(), 200);
        text(response).await;
    }
    let asks: Vec<_> =
        setup.mock.asked().iter().map(|asked| asked.json().get("logprobs").is_some()).collect();
    assert_eq!(asks, [true, false, false, true, false]);
}

#[tokio::test]
async fn a_probe_whose_client_left_has_its_record() {
    let mut options = ProxyOptions::stand_alone();
    options.retry_grace = Duration::ZERO;
    let setup = probing(options).await;
    let url = setup.url();
    let asking = tokio::spawn(async move { post(&url, &request(false)).await });
    setup.mock.started(1).await;
    asking.abort();
    assert!(asking.await.is_err());
    setup.mock.open_gate();
    let call = &setup.sink.calls(1).await[0];
    assert_eq!((call.kind, call.status), (CallKind::Probe, CallStatus::Ok));
    setup.proxy.shutdown().await;
    assert_eq!(setup.sink.count(), 1);
}

#[tokio::test]
async fn a_call_that_waits_for_a_probe_counts_its_time_from_its_receipt() {
    let setup = probing(ProxyOptions::stand_alone()).await;
    let url = setup.url();
    let asking = tokio::spawn(async move { text(post(&url, &request(true)).await).await });
    setup.mock.started(1).await;
    // The probe is out, so the call was received.
    let (since, began) = (SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock"), Instant::now());
    setup.mock.open_gate();
    let waited = began.elapsed();
    asking.await.expect("a reply");
    let calls = setup.sink.calls(2).await;
    let call = calls.iter().find(|call| call.kind != CallKind::Probe).expect("a call");
    assert!(u128::try_from(call.received_at).expect("after 1970") <= since.as_micros());
    assert!(u128::from(call.ttft_us.expect("an event")) >= waited.as_micros());
    assert!(call.duration_us >= call.ttft_us.expect("an event"));
}

#[tokio::test]
async fn a_probe_that_runs_ends_with_the_proxy_and_has_its_record() {
    let mut options = ProxyOptions::stand_alone();
    options.shutdown_grace = Duration::from_millis(1);
    let setup = probing(options).await;
    let url = setup.url();
    let asking = tokio::spawn(async move { post(&url, &request(false)).await.status().as_u16() });
    setup.mock.started(1).await;
    setup.proxy.shutdown().await;
    assert_eq!(asking.await.expect("an answer"), 503);
    let calls = setup.sink.calls(2).await;
    let is_probe = |call: &&lego::record::Call| call.kind == CallKind::Probe;
    assert_eq!(calls.iter().find(is_probe).expect("a probe").status, CallStatus::UpstreamError);
}
