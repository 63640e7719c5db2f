//! Group G, what a process may use: files and memory.
#![cfg(target_os = "linux")]

use std::time::Duration;

use futures_util::future::join_all;
use lego::proxy::ProxyOptions;
use lego::record::{CallStatus, UpstreamKind};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::mock::{Mock, Part, Script};
use crate::process::{Process, captured};
use crate::setup::{Setup, client, post, request, text as whole};
use crate::support::{done, finish, protocols, raw, stream, text, url};

const MIB: usize = 1 << 20;

/// A chat request of this many bytes.
fn sized(stream: bool, bytes: usize) -> Value {
    let mut body = request(stream);
    body["messages"][0]["content"] = json!("");
    body["messages"][0]["content"] = json!("x".repeat(bytes - body.to_string().len()));
    body
}

#[tokio::test]
async fn g_more_streams_than_files_get_429_and_those_let_in_end_well_and_have_their_records() {
    let parts = vec![text("a"), Part::Gate, text("b"), finish("stop"), done()];
    let mock = Mock::start(stream(parts.clone())).await;
    let process = Process::with_files(&mock.url(), &json!({}), 60).await;
    let warning = process.says("this process may open 60 files").await;
    for part in ["10 calls", "1024 of proxy.max_in_flight", "ulimit -Hn", "LimitNOFILE"] {
        assert!(warning.contains(part), "{part} in {warning}");
    }
    let url = process.url("chat/completions");
    let body = request(true);
    let replies = join_all((0..80).map(|_| post(&url, &body))).await;
    let (served, refused): (Vec<_>, Vec<_>) = replies.into_iter().partition(|reply| reply.status() == 200);
    assert_eq!((served.len(), refused.len()), (10, 70));
    for reply in refused {
        assert_eq!(
            (reply.status().as_u16(), reply.headers()["retry-after"].to_str().expect("text")),
            (429, "1")
        );
        let said: Value = serde_json::from_slice(&whole(reply).await).expect("JSON");
        assert_eq!(said["error"]["code"], "too_many_connections", "{said}");
    }
    // Who looks after it is answered all the same.
    let health = client().get(format!("http://{}/healthz", process.address)).send().await.expect("an answer");
    assert_eq!(health.status(), 200);
    mock.open_gate();
    for reply in served {
        assert!(whole(reply).await == raw(&parts));
    }
    // There is room again, once their connections are gone.
    let again = async {
        loop {
            let reply = post(&url, &request(true)).await;
            let is_served = reply.status() == 200;
            whole(reply).await;
            if is_served {
                break;
            }
        }
    };
    tokio::time::timeout(crate::setup::PATIENCE, again).await.expect("room");
    process.signal(Signal::SIGTERM);
    let (code, log, folder) = process.end().await;
    assert_eq!(code, Some(0), "{log}");
    assert!(!log.contains("os error 24"), "{log}");
    let calls = captured(&folder);
    assert!(calls.len() == 11 && calls.iter().all(|call| call.status == CallStatus::Ok), "{log}");
}

#[tokio::test]
async fn g03_twenty_long_bodies_at_once_hold_little_memory() {
    let mock = Mock::start(Script::default()).await;
    let settings = json!({"max_body_bytes": 8 * MIB, "large_bodies_bytes": 16 * MIB});
    let process = Process::start(&mock.url(), &settings, &[]).await;
    let url = process.url("chat/completions");
    whole(post(&url, &request(false)).await).await;
    let before = process.peak();
    let body = sized(false, 8 * MIB);
    for reply in join_all((0..20).map(|_| post(&url, &body))).await {
        assert_eq!(reply.status(), 200);
    }
    let grown = process.peak() - before;
    println!("{} MiB for 20 bodies of 8 MiB", grown >> 20);
    // Three times what is let in, and the making of a Parquet row group of 32 MiB.
    assert!(grown < 200 << 20, "{grown}");
    process.signal(Signal::SIGTERM);
    let (_, log, folder) = process.end().await;
    let calls = captured(&folder);
    assert_eq!(calls.len(), 21, "{log}");
    for call in &calls[1..] {
        assert_eq!(call.client_request.as_ref().expect("a request").get().len(), 8 * MIB);
    }
}

#[tokio::test]
async fn g03_a_long_body_without_room_gets_429_and_a_record_and_short_ones_pass() {
    let mut options = ProxyOptions::stand_alone();
    (options.max_body_bytes, options.large_bodies_bytes) = (2 * MIB, 2 * MIB);
    options.admission_wait = Duration::ZERO;
    let script = stream(vec![text("a"), Part::Gate, finish("stop"), done()]);
    let setup = Setup::with(options, UpstreamKind::Vllm, script).await;
    let first = setup.post(&sized(true, 2 * MIB)).await;
    assert_eq!(first.status(), 200);
    for (number, (route, mut body)) in protocols().into_iter().enumerate() {
        body["metadata"] = json!({"note": "x".repeat(MIB + MIB / 2)});
        let refused = post(&url(&setup, route), &body).await;
        assert_eq!(
            (refused.status().as_u16(), refused.headers()["retry-after"].to_str().expect("text")),
            (429, "1")
        );
        let call_id = refused.headers()["x-lego-call-id"].to_str().expect("an id").to_owned();
        let said = String::from_utf8_lossy(&whole(refused).await).into_owned();
        assert!(said.contains("proxy.large_bodies_bytes"), "{said}");
        let call = setup.sink.calls(number + 1).await.pop().expect("a record");
        assert_eq!((call.call_id.to_string(), call.http_status), (call_id, 429));
        assert_eq!((call.status, call.client_request), (CallStatus::Aborted, None));
    }
    let short = setup.post(&request(true)).await;
    assert_eq!(short.status(), 200);
    setup.mock.open_gate();
    for reply in [first, short] {
        whole(reply).await;
    }
    setup.sink.calls(5).await;
    // The room is free once its call is recorded, and its reply let go of.
    let again = async {
        while setup.post(&sized(true, 2 * MIB)).await.status() != 200 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(crate::setup::PATIENCE, again).await.expect("room");
    assert_eq!(setup.mock.asked().len(), 3);
}

/// A body whose length nobody tells takes room as it grows, and no more.
#[tokio::test]
async fn g03_a_chunked_body_has_as_much_room_as_it_is_long() {
    let mut options = ProxyOptions::stand_alone();
    (options.max_body_bytes, options.large_bodies_bytes) = (8 * MIB, 8 * MIB);
    options.admission_wait = Duration::ZERO;
    let script = stream(vec![text("a"), Part::Gate, finish("stop"), done()]);
    let setup = Setup::with(options, UpstreamKind::Vllm, script).await;
    let chunked = async |bytes: usize| {
        let text = sized(true, bytes).to_string().into_bytes();
        let pieces: Vec<_> =
            text.chunks(100_000).map(|piece| Ok::<_, std::io::Error>(piece.to_vec())).collect();
        let body = reqwest::Body::wrap_stream(futures_util::stream::iter(pieces));
        let request = client().post(setup.url()).header("content-type", "application/json").body(body);
        request.send().await.expect("an answer")
    };
    let first = chunked(2 * MIB).await;
    let second = chunked(3 * MIB).await;
    assert_eq!((first.status().as_u16(), second.status().as_u16()), (200, 200));
    // They are in memory as long as they run.
    let refused = chunked(4 * MIB).await;
    assert_eq!(refused.status(), 429);
    assert!(String::from_utf8_lossy(&whole(refused).await).contains("proxy.large_bodies_bytes"));
    assert_eq!(chunked(9 * MIB).await.status(), 413);
    let third = chunked(2 * MIB).await;
    assert_eq!(third.status(), 200);
    setup.mock.open_gate();
    for reply in [first, second, third] {
        whole(reply).await;
    }
    let calls = setup.sink.calls(5).await;
    let mut told: Vec<_> = calls.iter().map(|call| call.http_status).collect();
    told.sort_unstable();
    assert_eq!(told, [200, 200, 200, 413, 429]);
}

/// Case A15 asks for less than four times the event, which is not reached: a record is made of the event, its text and the
/// reply as JSON side by side.
#[tokio::test]
async fn a15_an_event_of_many_megabytes_takes_no_large_multiple_of_it() {
    const EVENT: usize = 8 * MIB;
    // Responses says all of a text five times: its deltas, then four events that have it whole.
    for ((route, body), most) in protocols().into_iter().zip([8, 8, 14]) {
        let mock = Mock::start(stream(vec![text("a"), finish("stop"), done()])).await;
        let process = Process::start(&mock.url(), &json!({}), &[]).await;
        whole(post(&process.url(route), &body).await).await;
        let before = process.peak();
        let large = "x".repeat(EVENT);
        mock.set(stream(vec![text(&large), text("more"), finish("stop"), done()]));
        let reply = whole(post(&process.url(route), &body).await).await;
        assert!(reply.len() > EVENT);
        let grown = process.peak() - before;
        println!("{route}: {:.1} times the event", grown as f64 / EVENT as f64);
        assert!(grown < most * EVENT as u64, "{route}: {grown}");
        process.signal(Signal::SIGTERM);
        let (_, log, folder) = process.end().await;
        let call = captured(&folder).pop().expect("a record");
        assert_eq!(call.status, CallStatus::Ok, "{log}");
        assert!(call.text.expect("text") == format!("{large}more"));
    }
}
