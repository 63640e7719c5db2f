//! Group A, what passes: bytes, characters, line ends, usage, comments, compression, liveness.

use std::io::Write as _;
use std::time::{Duration, Instant};

use lego::proxy::ProxyOptions;
use lego::record::{CallStatus, UpstreamKind};
use lego::upstream::Upstream;
use serde_json::{Value, json};

use crate::mock::{Mock, Part, Script};
use crate::setup::{PATIENCE, Setup, client, post, request, text as whole, timeouts};
use crate::support::{
    chunk, done, finish, numbers, of_messages, protocols, raw, read, stream, text, url, usage,
};

const ODD: &str = "北京 🌍 “x”";

#[tokio::test]
async fn a01_multibyte_text_cut_anywhere_arrives_whole() {
    let parts = vec![text(ODD), finish("stop"), done()];
    let direct = raw(&parts);
    // One byte a write, over a socket.
    let setup = Setup::stand_alone(Script { bytes_per_write: Some(1), ..stream(parts) }).await;
    assert_eq!(whole(setup.post(&request(true)).await).await, direct);
    assert_eq!(setup.sink.calls(1).await[0].text.as_deref(), Some(ODD));
    // Cut at every offset: in the process each write arrives by itself.
    let mock = Mock::in_process(Script::default());
    let upstream = Upstream::in_process(mock.router(), timeouts());
    let setup = Setup::in_front_of(upstream, ProxyOptions::stand_alone(), mock).await;
    for cut in 1..direct.len() {
        let (start, end) = direct.split_at(cut);
        setup.mock.set(stream(vec![Part::Raw(start.to_vec()), Part::Raw(end.to_vec())]));
        assert_eq!(whole(setup.post(&request(true)).await).await, direct, "cut at {cut}");
        let call = setup.sink.calls(cut).await.pop().expect("a call");
        assert_eq!((call.status, call.text.as_deref()), (CallStatus::Ok, Some(ODD)), "cut at {cut}");
        assert!(!call.response.expect("reply").get().contains('\u{fffd}'), "cut at {cut}");
    }
}

#[tokio::test]
async fn a02_every_line_end_gives_each_event_when_its_blank_line_arrives() {
    // What ends the data line, what ends the event, and what of it comes with the next write.
    for (line, blank, late) in
        [("\n", "\n", ""), ("\r\n", "\r\n", ""), ("\r", "\r", ""), ("\r\n", "\n", ""), ("\r\n", "\r", "\n")]
    {
        let mut parts = Vec::new();
        let mut events: Vec<Part> = ["one", "two", "three"].map(text).into();
        events.extend([finish("stop"), done()]);
        let mut before = "";
        for (number, event) in events.into_iter().enumerate() {
            let Part::Event(data) = event else { unreachable!("events only") };
            parts.push(Part::Raw(format!("{before}data: {data}{line}{blank}").into_bytes()));
            parts.push(Part::Until(number + 1));
            before = late;
        }
        parts.push(Part::Raw(late.as_bytes().to_vec()));
        let setup = Setup::stand_alone(stream(parts.clone())).await;
        let mut response = setup.post(&request(true)).await;
        let mut seen = Vec::new();
        for (number, word) in ["one", "two", "three"].into_iter().enumerate() {
            let has = |seen: &[u8]| {
                let seen = String::from_utf8_lossy(seen);
                seen.contains(&format!("\"{word}\""))
                    && seen.trim_end_matches(['\r', '\n']).len() < seen.len()
            };
            while !has(&seen) {
                let piece = tokio::time::timeout(PATIENCE, response.chunk()).await.expect("at once");
                seen.extend_from_slice(&piece.expect("piece").expect("more"));
            }
            setup.mock.step(number + 1);
        }
        setup.mock.step(usize::MAX);
        seen.extend_from_slice(&whole(response).await);
        assert_eq!(String::from_utf8_lossy(&seen), String::from_utf8_lossy(&raw(&parts)));
        let call = setup.sink.calls(1).await.remove(0);
        assert_eq!(call.text.as_deref(), Some("onetwothree"));
        let kept: Vec<Value> = serde_json::from_str(call.response.expect("reply").get()).expect("list");
        assert_eq!(kept.len(), 4, "three events and the finish, nothing made up");
    }
}

#[tokio::test]
async fn a06_usage_is_captured_and_seen_only_by_who_asked() {
    let with = |part: Part, usage: Value| {
        let Part::Event(data) = part else { unreachable!("events only") };
        let mut event: Value = serde_json::from_str(&data).expect("JSON");
        event["usage"] = usage;
        Part::Event(event.to_string())
    };
    let without_choices = || {
        let Part::Event(data) = usage(4, 2) else { unreachable!("an event") };
        let mut event: Value = serde_json::from_str(&data).expect("JSON");
        event.as_object_mut().expect("object").remove("choices");
        Part::Event(event.to_string())
    };
    let streams = [
        vec![text("hi"), finish("stop"), usage(4, 2), done()],
        vec![text("hi"), finish("stop"), without_choices(), done()],
        vec![text("hi"), with(finish("stop"), numbers(4, 2)), done()],
        vec![with(text("hi"), Value::Null), with(finish("stop"), Value::Null), usage(4, 2), done()],
    ];
    let options =
        [None, Some(json!({})), Some(json!({"include_usage": false})), Some(json!({"include_usage": true}))];
    for parts in &streams {
        let setup = Setup::stand_alone(stream(parts.clone())).await;
        for (number, option) in options.iter().enumerate() {
            let mut body = request(true);
            if let Some(option) = option {
                body["stream_options"] = option.clone();
            }
            let reply = whole(setup.post(&body).await).await;
            let call = setup.sink.calls(number + 1).await.pop().expect("a call");
            assert_eq!(call.usage.expect("usage").completion_tokens, 2);
            assert_eq!((call.status, call.text.as_deref()), (CallStatus::Ok, Some("hi")));
            let wants = option.as_ref().is_some_and(|option| option["include_usage"] == true);
            let reply = String::from_utf8_lossy(&reply).into_owned();
            if wants {
                assert_eq!(reply, String::from_utf8_lossy(&raw(parts)));
            } else {
                assert!(!reply.contains("completion_tokens"), "{option:?} {reply}");
                assert!(reply.contains("\"finish_reason\":\"stop\""), "{reply}");
                for line in reply.lines().filter_map(|line| line.strip_prefix("data: {")) {
                    assert!(line.contains("\"choices\":[{"), "an event for nobody: {line}");
                }
            }
        }
    }
}

#[tokio::test]
async fn a09_comments_and_pings_pass_as_they_came_and_are_no_part_of_the_reply() {
    let comment = || Part::Raw(b": PROCESSING\n\n".to_vec());
    let parts =
        vec![comment(), text("a"), comment(), Part::Raw(b": x\n".to_vec()), text("b"), finish("stop")];
    let parts: Vec<Part> = parts.into_iter().chain([comment(), done()]).collect();
    let setup = Setup::stand_alone(stream(parts.clone())).await;
    assert_eq!(whole(setup.post(&request(true)).await).await, raw(&parts));
    let call = setup.sink.calls(1).await.remove(0);
    assert_eq!((call.status, call.text.as_deref()), (CallStatus::Ok, Some("ab")));
    assert!(!call.response.expect("reply").get().contains("PROCESSING"));

    const PINGED: &str = include_str!("../fixtures/wire/anthropic_stream.sse");
    assert!(PINGED.contains("event: ping"));
    let sse = Part::Raw(format!(": PROCESSING\n\n{PINGED}").into_bytes());
    let setup = of_messages(stream(vec![sse])).await;
    let reply = whole(post(&url(&setup, "messages"), &crate::speech::messages(true)).await).await;
    assert_eq!(String::from_utf8_lossy(&reply), format!(": PROCESSING\n\n{PINGED}"));
    assert_eq!(setup.sink.calls(1).await[0].text.as_deref(), Some("Hello! 🎉"));

    // In another protocol, an upstream's comment is no event, and the client's own no-op events are whole events.
    let mut options = ProxyOptions::stand_alone();
    options.keep_alive = Some(Duration::from_millis(20));
    for (route, body) in protocols() {
        let script = Script { is_silent: true, ..stream(parts.clone()) };
        let setup = Setup::with(options.clone(), UpstreamKind::Vllm, script).await;
        let mut response = post(&url(&setup, route), &body).await;
        let mut seen = Vec::new();
        // The events with which the reply begins, and two signs of life after them.
        while String::from_utf8_lossy(&seen).matches("\n\n").count() < 5 {
            let piece = tokio::time::timeout(PATIENCE, response.chunk()).await.expect("a sign of life");
            seen.extend_from_slice(&piece.expect("piece").expect("more"));
        }
        setup.mock.open_gate();
        seen.extend_from_slice(&whole(response).await);
        let seen = String::from_utf8(seen).expect("text");
        // A decoder that dispatches on any blank line, comments or not.
        for block in seen.replace(": PROCESSING\n\n", "").replace(": x\n", "").split_terminator("\n\n") {
            let data = block.lines().find_map(|line| line.strip_prefix("data: ")).expect("data");
            assert!(data == "[DONE]" || serde_json::from_str::<Value>(data).is_ok(), "{block}");
        }
        if route != "chat/completions" {
            assert!(!seen.contains("PROCESSING"), "{seen}");
            assert_eq!(read(route, seen.as_bytes()).0, "ab");
        }
    }
}

/// One gzip member, zlib stream or raw deflate stream, flushed in the middle as a server does after each event.
fn packed(encoding: &str, plain: &[u8]) -> Vec<u8> {
    use flate2::{Compression, write};
    let (first, second) = plain.split_at(plain.len() / 2);
    macro_rules! pack {
        ($encoder:expr) => {{
            let mut encoder = $encoder;
            encoder.write_all(first).expect("packed");
            encoder.flush().expect("packed");
            encoder.write_all(second).expect("packed");
            encoder.finish().expect("packed")
        }};
    }
    match encoding {
        "gzip" | "" => pack!(write::GzEncoder::new(Vec::new(), Compression::fast())),
        "deflate" => pack!(write::ZlibEncoder::new(Vec::new(), Compression::fast())),
        "raw deflate" => pack!(write::DeflateEncoder::new(Vec::new(), Compression::fast())),
        "zstd" => pack!(zstd::stream::write::Encoder::new(Vec::new(), 1).expect("an encoder")),
        "br" => {
            // Brotli's stored form (RFC 7932, section 9.2): no encoder is needed to make it.
            let mut out = Vec::new();
            for (number, block) in plain.chunks(1 << 16).enumerate() {
                let length = block.len() as u32 - 1;
                let header = if number == 0 { length << 4 | 1 << 20 } else { length << 3 | 1 << 19 };
                out.extend_from_slice(&header.to_le_bytes()[..3]);
                out.extend_from_slice(block);
            }
            out.push(0b11);
            out
        }
        other => unreachable!("{other}"),
    }
}

#[tokio::test]
async fn a14_compressed_replies_are_captured_plain_and_the_client_can_read_them() {
    let parts = vec![text("Hello"), text(ODD), finish("stop"), usage(4, 3), done()];
    let body = json!({"id": "c", "object": "chat.completion", "created": 1, "model": "toy", "usage": numbers(4, 3),
        "choices": [{"index": 0, "message": {"role": "assistant", "content": ODD}, "logprobs": null, "finish_reason": "stop"}]});
    for encoding in ["gzip", "deflate", "raw deflate", "zstd", "br", ""] {
        let header = match encoding {
            "" => vec![],
            "raw deflate" => vec![("content-encoding", "deflate")],
            named => vec![("content-encoding", named)],
        };
        for bytes_per_write in [1, 100, usize::MAX] {
            let script = Script {
                parts: Some(vec![Part::Raw(packed(encoding, &raw(&parts)))]),
                body: Some(packed(encoding, body.to_string().as_bytes())),
                headers: header.clone(),
                bytes_per_write: Some(bytes_per_write),
                ..Script::default()
            };
            let setup = Setup::stand_alone(script).await;
            for stream in [true, false] {
                let mut asked = request(stream);
                asked["stream_options"] = if stream { json!({"include_usage": true}) } else { Value::Null };
                let sent = client().post(setup.url()).header("accept-encoding", "gzip, br");
                let sent = sent.header("content-type", "application/json").body(asked.to_string());
                let response = sent.send().await.expect("an answer");
                assert!(!response.headers().contains_key("content-encoding"));
                let length = response.headers().get("content-length").cloned();
                let reply = whole(response).await;
                if let Some(length) = length {
                    assert_eq!(length.to_str().expect("number"), reply.len().to_string());
                }
                let expected = if stream { raw(&parts) } else { body.to_string().into_bytes() };
                assert_eq!(String::from_utf8_lossy(&reply), String::from_utf8_lossy(&expected), "{encoding}");
            }
            let calls = setup.sink.calls(2).await;
            assert!(calls.iter().all(|call| call.status == CallStatus::Ok), "{encoding}");
            assert_eq!(calls[0].text.as_deref(), Some(&*format!("Hello{ODD}")));
            assert_eq!(calls[1].text.as_deref(), Some(ODD));
            assert_eq!(setup.mock.asked()[0].headers["accept-encoding"], "identity");
        }
    }
}

#[tokio::test]
async fn a14_a_compressed_reply_that_is_broken_is_no_success() {
    let cut = |bytes: Vec<u8>| bytes[..bytes.len() / 2].to_vec();
    // Digits of no pattern, so that half of the packed bytes is not the whole text.
    let digits = (0..4096_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13).to_string());
    let parts = vec![text(&digits.collect::<String>()), finish("stop"), done()];
    for encoding in ["gzip", "deflate", "zstd", "br"] {
        for spoiled in [cut(packed(encoding, &raw(&parts))), b"\x01\xff no such thing".to_vec()] {
            let script =
                Script { headers: vec![("content-encoding", encoding)], ..stream(vec![Part::Raw(spoiled)]) };
            let setup = Setup::stand_alone(script).await;
            let response = setup.post(&request(true)).await;
            assert_eq!(response.status(), 200);
            let (reply, _) = crate::setup::read(response).await;
            assert!(!String::from_utf8_lossy(&reply).contains("[DONE]"), "{encoding}");
            let call = setup.sink.calls(1).await.remove(0);
            assert!(matches!(call.status, CallStatus::Truncated | CallStatus::ParseError), "{encoding}");
            assert!(!call.trainable && call.finish_reason.is_none());
        }
    }
}

#[tokio::test]
async fn a21_every_event_is_seen_before_the_next_is_sent() {
    for (route, body) in protocols() {
        let mut parts = vec![chunk(json!({"role": "assistant", "content": ""}), None)];
        for number in 1..=5 {
            parts.extend([text(&format!("word{number} ")), Part::Until(number)]);
        }
        parts.extend([finish("stop"), done()]);
        let setup = Setup::stand_alone(stream(parts)).await;
        let sent = client().post(url(&setup, route)).header("accept-encoding", "gzip, br");
        let sent = sent.header("content-type", "application/json").body(body.to_string());
        let mut response = sent.send().await.expect("an answer");
        let headers = response.headers();
        assert_eq!(headers["cache-control"], "no-cache, no-transform");
        assert_eq!(headers["x-accel-buffering"], "no");
        assert!(!headers.contains_key("content-encoding"));
        let mut seen = String::new();
        for number in 1..=5 {
            while !seen.contains(&format!("word{number} ")) {
                let piece = tokio::time::timeout(PATIENCE, response.chunk()).await.expect("at once");
                seen.push_str(&String::from_utf8_lossy(&piece.expect("piece").expect("more")));
            }
            setup.mock.step(number);
        }
        whole(response).await;
    }
}

#[tokio::test]
async fn a21_a_slow_reader_slows_nobody_and_fills_nothing() {
    const PIECES: usize = 640;
    let big = text(&"x".repeat(100_000));
    let mut parts = vec![big; PIECES];
    parts.extend([finish("stop"), done()]);
    let total = raw(&parts).len();
    let setup = Setup::stand_alone(stream(parts)).await;
    let mut slow = setup.post(&request(true)).await;
    slow.chunk().await.expect("piece").expect("begun");
    setup.mock.set(stream(vec![text("quick"), finish("stop"), done()]));
    for done in 1..=50 {
        whole(setup.post(&request(true)).await).await;
        setup.sink.calls(done).await;
    }
    // What is on its way lies in sockets and in lego's small buffer.
    let sent = setup.mock.sent();
    assert!(
        sent < total / 2,
        "{sent} of {total} bytes were taken from the upstream for a client that does not read"
    );
    whole(slow).await;
    assert_eq!(setup.sink.calls(51).await[50].text.as_ref().expect("text").len(), PIECES * 100_000);
}

#[tokio::test]
async fn a12_a_stream_that_goes_on_is_never_too_long() {
    const STEPS: usize = 5000;
    let idle = Duration::from_millis(400);
    let mut parts: Vec<Part> = (1..STEPS).flat_map(|step| [text("."), Part::Until(step)]).collect();
    parts.extend([finish("stop"), done()]);
    let mock = Mock::start(stream(parts)).await;
    let limits = lego::upstream::Timeouts { first_byte: idle, idle, ..timeouts() };
    let upstream = Upstream::http(&mock.url(), UpstreamKind::Vllm, None, limits).expect("upstream");
    let setup = Setup::in_front_of(upstream, ProxyOptions::stand_alone(), mock).await;
    let begun = Instant::now();
    let mut response = setup.post(&request(true)).await;
    let mut step = 0;
    // Ten times as long as any one wait may be.
    while begun.elapsed() < idle * 10 && step < STEPS - 1 {
        assert_eq!(
            client().get(setup.mock.url() + "/v1/models").send().await.expect("an answer").status(),
            200
        );
        response.chunk().await.expect("piece").expect("more");
        step += 1;
        setup.mock.step(step);
    }
    setup.mock.step(usize::MAX);
    let rest = whole(response).await;
    assert!(rest.ends_with(b"data: [DONE]\n\n"));
    assert_eq!(setup.sink.calls(1).await[0].status, CallStatus::Ok);
}
