//! What is written to the journal comes back, or is refused.

use super::*;
use crate::record::{LayerAxis, RoutingDtype, example};

fn call() -> Call {
    example::call(serde_json::json!({"upstream_kind": "vllm"}))
}

fn joined(calls: Vec<Call>) -> Vec<u8> {
    encode(calls).expect("small").parts().concat()
}

fn read(payload: &[u8]) -> Result<Vec<Call>, String> {
    decode(&Bytes::copy_from_slice(payload))
}

#[test]
fn long_bodies_are_neither_copied_on_their_way_in_nor_out() {
    // One that is no smaller when it is compressed.
    let mut random = 7_u64;
    let mut next = || {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let letter = char::from(b'#' + ((random >> 40) % 92) as u8);
        if letter == '\\' { ' ' } else { letter }
    };
    let text: String = (0..LONG).map(|_| next()).collect();
    let body = JsonText::new(format!("\"{text}\"")).expect("JSON");
    let short = JsonText::new("[]").ok();
    let mut first = call();
    (first.client_request, first.upstream_request) = (Some(body.clone()), Some(body.clone()));
    first.response = short.clone();
    let second = Call { client_request: short, response: Some(body.clone()), ..call() };
    let wanted = [first.clone(), second.clone()];
    let payload = encode(vec![first, second]).expect("small");
    let shared = payload.parts().iter().filter(|part| part.as_ptr() == body.bytes().as_ptr());
    assert_eq!(shared.count(), 3);
    let bytes = Bytes::from(payload.parts().concat());
    assert_eq!(payload.len(), bytes.len());
    let found = decode(&bytes).expect("whole");
    let bodies =
        |call: &Call| [&call.client_request, &call.upstream_request, &call.response].map(Option::clone);
    assert_eq!(found.iter().map(bodies).collect::<Vec<_>>(), wanted.iter().map(bodies).collect::<Vec<_>>());
    let at = found[0].client_request.as_ref().expect("a body").bytes().as_ptr();
    assert!(bytes.as_ptr_range().contains(&at));
}

#[test]
fn bodies_are_compressed_and_come_back_or_are_refused() {
    let text = format!("[{}]", vec![r#"{"choices":[{"delta":{"content":"é"}}]}"#; 400].join(","));
    let body = JsonText::new(text).expect("JSON");
    let wanted = Call { response: Some(body.clone()), ..call() };
    let payload = joined(vec![wanted.clone()]);
    assert!(payload.len() < body.bytes().len() / 8, "{}", payload.len());
    let found = read(&payload).expect("whole");
    assert_eq!(found[0].response, wanted.response);
    for cut in 0..payload.len() {
        assert!(read(&payload[..cut]).is_err(), "{cut}");
    }
    let head = String::from_utf8_lossy(&payload).into_owned();
    let length = format!("[null,null,{}]", body.bytes().len());
    assert!(head.contains(&length));
    for other in [body.bytes().len() + 1, body.bytes().len() - 1] {
        let at = payload.windows(length.len()).position(|part| part == length.as_bytes()).expect("there");
        let mut bad = payload.clone();
        bad[at..at + length.len()].copy_from_slice(format!("[null,null,{other}]").as_bytes());
        assert!(read(&bad).is_err(), "{other}");
    }
}

fn routed() -> Call {
    let shape = RoutingShape {
        start: 0,
        rows: 3,
        layers: 1,
        layer_axis: LayerAxis::Unknown,
        top_k: 2,
        dtype: RoutingDtype::U16,
    };
    let routing = Routing::pack(shape, &[0, 1, 256, 3, 4, 65_535]).expect("two ids a row");
    Call { routing: Some(routing), ..call() }
}

#[test]
fn journals_of_older_legos_are_read_and_newer_ones_refused() {
    let mut payload = joined(vec![call()]);
    for encoding in [0, ENCODING + 1] {
        payload[0] = encoding;
        assert!(read(&payload).is_err(), "{encoding}");
    }
    let older = |encoding: u8, head: serde_json::Value, rest: &[u8]| {
        let head = head.to_string().replace(r#"{"a":1.0}"#, r#"{"a": 1.0}"#);
        let mut payload = vec![encoding];
        push_len(&mut payload, 2);
        for _ in 0..2 {
            push_len(&mut payload, head.len());
            payload.extend_from_slice(head.as_bytes());
            payload.extend_from_slice(rest);
        }
        payload
    };
    let ids = [7, 0, 0, 0, 8, 0, 0, 0];
    let bare =
        Call { prompt_token_ids: None, completion_token_ids: None, completion_logprobs: None, ..call() };
    // As 3 was: lists as they are, and bodies behind them.
    let head = serde_json::json!({
        "lists": {"prompt": null, "completion": 2, "logprobs": null, "bodies": [10, null, null]}, "call": bare,
    });
    let payload = older(3, head, &[&ids[..], br#"{"a": 1.0}"#].concat());
    let found = read(&payload).expect("older records");
    for call in &found {
        assert_eq!(call.client_request.as_ref().map(JsonText::get), Some(r#"{"a": 1.0}"#));
        assert_eq!(call.completion_token_ids, Some(vec![7, 8]));
    }
    assert_eq!(found.len(), 2);
    // As 2 was: bodies in the JSON, and no word about where else they are.
    let head = serde_json::json!({
        "lists": {"prompt": null, "completion": 2, "logprobs": null},
        "call": Call { client_request: JsonText::new(r#"{"a": 1.0}"#).ok(), ..bare },
    });
    for encoding in [1, 2] {
        for call in read(&older(encoding, head.clone(), &ids)).expect("older records") {
            assert_eq!(call.client_request.as_ref().map(JsonText::get), Some(r#"{"a": 1.0}"#));
            assert_eq!(call.completion_token_ids, Some(vec![7, 8]));
        }
    }
}

#[test]
fn bytes_that_changed_give_calls_or_an_error() {
    let response = JsonText::new(format!("[{}]", vec!["\"é\""; 600].join(","))).ok();
    let payload = joined(vec![Call { response, ..routed() }, call()]);
    let mut state = 7_u64;
    let mut next = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    for _ in 0..3_000 {
        let mut bad = payload.clone();
        for _ in 0..=next(3) {
            let at = next(bad.len());
            match next(4) {
                0 => drop(bad.remove(at)),
                1 => bad.insert(at, next(256) as u8),
                2 => bad[at] ^= 1 << next(8),
                _ => bad[at] = [0, 0x7f, 0x80, 0xff][next(4)],
            }
        }
        // Without a panic, and without room for what is not there.
        let _ = read(&bad);
        let _ = first(&bad);
    }
}

#[test]
fn routing_comes_back_whole_or_not_at_all() {
    let (first, second) = (routed(), call());
    let wanted = [first.routing.clone(), None];
    let payload = joined(vec![first, second]);
    let found = read(&payload).expect("whole");
    assert_eq!(found.into_iter().map(|call| call.routing).collect::<Vec<_>>(), wanted);
    for cut in 0..payload.len() {
        assert!(read(&payload[..cut]).is_err(), "{cut}");
    }
    let text = String::from_utf8_lossy(&payload).into_owned();
    assert!(text.contains("\"rows\":3"));
    for (from, to) in [("\"rows\":3", "\"rows\":4"), ("\"rows\":3", "\"rows\":2")] {
        let at = payload.windows(from.len()).position(|part| part == from.as_bytes()).expect("there");
        let mut bad = payload.clone();
        bad[at..at + to.len()].copy_from_slice(to.as_bytes());
        assert!(read(&bad).is_err(), "{to}");
    }
}
