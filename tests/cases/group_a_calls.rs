//! Group A, A16: tool calls whose fragments are numbered in every way that servers number them.

use lego::record::{Call, CallStatus};
use serde_json::{Value, json};

use crate::mock::Part;
use crate::setup::{Setup, post, request, text as whole};
use crate::speech;
use crate::support::{chunk, done, finish, raw, stream, strict_events, url};

fn parts(fragments: &Value) -> Vec<Part> {
    let fragments = fragments.as_array().expect("list").iter();
    let chunks = fragments.map(|fragment| chunk(json!({"tool_calls": [fragment]}), None));
    chunks.chain([finish("tool_calls"), done()]).collect()
}

fn calls_of(call: &Call) -> Vec<(&str, &str)> {
    let calls = call.tool_calls.as_deref().unwrap_or_default();
    calls.iter().map(|call| (call.name.as_str(), call.arguments.as_str())).collect()
}

/// Names and inputs of a Messages stream's tool blocks.
fn blocks(stream: &[u8]) -> Vec<(String, String)> {
    let mut blocks: Vec<(String, String)> = Vec::new();
    for (name, data) in strict_events(stream) {
        match name.as_str() {
            "content_block_start" => {
                let name = data["content_block"]["name"].as_str().expect("a tool").to_owned();
                assert_eq!(data["index"], blocks.len());
                blocks.push((name, String::new()));
            }
            "content_block_delta" => {
                let at = data["index"].as_u64().expect("index") as usize;
                blocks[at].1 += data["delta"]["partial_json"].as_str().expect("a fragment");
            }
            _ => {}
        }
    }
    blocks
}

#[tokio::test]
async fn a16_calls_are_told_apart_however_their_fragments_are_numbered() {
    let f = |name: &str, arguments: &str| json!({"name": name, "arguments": arguments});
    let tail = |arguments: &str| json!({"arguments": arguments});
    let shapes = [
        (
            "standard, interleaved",
            json!([
                {"index": 0, "id": "x", "type": "function", "function": f("f", "")}, {"index": 0, "function": tail("{\"a\":")},
                {"index": 1, "id": "y", "type": "function", "function": f("g", "")}, {"index": 0, "function": tail("1}")},
                {"index": 1, "function": tail("{\"b\":2}")}
            ]),
        ),
        (
            "no index",
            json!([
                {"id": "x", "function": f("f", "{\"a\":")}, {"function": tail("1}")},
                {"id": "y", "function": f("g", "{\"b\":")}, {"function": tail("2}")}
            ]),
        ),
        (
            "index null",
            json!([
                {"index": null, "id": "x", "function": f("f", "{\"a\":")}, {"index": null, "function": tail("1}")},
                {"index": null, "id": "y", "function": f("g", "{\"b\":2}")}
            ]),
        ),
        (
            "all 0, with ids",
            json!([
                {"index": 0, "id": "x", "function": f("f", "{\"a\":1}")}, {"index": 0, "id": "y", "function": f("g", "{\"b\":2}")}
            ]),
        ),
        (
            "all 0, no ids, other names",
            json!([
                {"index": 0, "function": f("f", "{\"a\":1}")}, {"index": 0, "function": f("g", "{\"b\":2}")}
            ]),
        ),
        (
            "blank ids later",
            json!([
                {"index": 0, "id": "x", "function": f("f", "")}, {"index": 0, "id": "", "function": {"name": "", "arguments": "{\"a\":1}"}},
                {"index": 1, "id": "y", "function": f("g", "")}, {"index": 1, "id": " ", "function": {"name": null, "arguments": "{\"b\":2}"}}
            ]),
        ),
        (
            "head on 0, tail on 1",
            json!([
                {"index": 0, "id": "x", "function": f("f", "{\"a\":1}")}, {"index": 0, "id": "y", "function": f("g", "")},
                {"index": 1, "function": tail("{\"b\":2}")}
            ]),
        ),
        (
            "mixed",
            json!([
                {"index": 0, "id": "x", "function": f("f", "{\"a\":")}, {"function": tail("1}")},
                {"index": 1, "function": f("g", "")}, {"index": 1, "id": "y", "function": tail("{\"b\":2}")}
            ]),
        ),
        (
            "id on each",
            json!([
                {"index": 0, "id": "x", "function": f("f", "{\"a\":")}, {"index": 0, "id": "x", "function": f("f", "1}")},
                {"index": 1, "id": "y", "function": f("g", "{\"b\":")}, {"index": 1, "id": "y", "function": f("g", "2}")}
            ]),
        ),
    ];
    for (shape, fragments) in shapes {
        let parts = parts(&fragments);
        let setup = Setup::stand_alone(stream(parts.clone())).await;
        assert_eq!(whole(setup.post(&request(true)).await).await, raw(&parts), "{shape}");
        let call = setup.sink.calls(1).await.remove(0);
        assert_eq!(call.status, CallStatus::Ok, "{shape}");
        assert_eq!(calls_of(&call), [("f", "{\"a\":1}"), ("g", "{\"b\":2}")], "{shape}");
        assert!(call.tool_calls.expect("calls").iter().all(|call| call.arguments_valid_json), "{shape}");

        let reply = whole(post(&url(&setup, "messages"), &speech::messages(true)).await).await;
        let seen = blocks(&reply);
        let seen: Vec<_> = seen.iter().map(|(name, input)| (name.as_str(), input.as_str())).collect();
        assert_eq!(seen, [("f", "{\"a\":1}"), ("g", "{\"b\":2}")], "{shape}");
        assert_eq!(
            calls_of(&setup.sink.calls(2).await[1]),
            [("f", "{\"a\":1}"), ("g", "{\"b\":2}")],
            "{shape}"
        );
    }
}

#[tokio::test]
async fn a16_fragments_that_nobody_can_place_are_kept_and_flagged() {
    // Two calls are open, and nothing says whose the rest is.
    let fragments = json!([
        {"index": 0, "id": "x", "function": {"name": "f", "arguments": ""}},
        {"index": 1, "id": "y", "function": {"name": "g", "arguments": ""}},
        {"function": {"arguments": "{\"a\":1}"}}, {"function": {"arguments": "{\"b\":2}"}}
    ]);
    let parts = parts(&fragments);
    let setup = Setup::stand_alone(stream(parts.clone())).await;
    assert_eq!(whole(setup.post(&request(true)).await).await, raw(&parts));
    let call = setup.sink.calls(1).await.remove(0);
    assert!(call.tool_calls.expect("calls").iter().all(|call| !call.arguments_valid_json));
    let kept: Vec<Value> = serde_json::from_str(call.response.expect("reply").get()).expect("list");
    let kept: Vec<&Value> = kept.iter().map(|event| &event["choices"][0]["delta"]["tool_calls"][0]).collect();
    assert_eq!(kept[..4], fragments.as_array().expect("list").iter().collect::<Vec<_>>()[..]);
    // A client of another protocol gets them as they came too: no whole call is made out of them.
    let reply = whole(post(&url(&setup, "messages"), &speech::messages(true)).await).await;
    let seen = blocks(&reply);
    assert_eq!(seen, [("f".to_owned(), String::new()), ("g".to_owned(), "{\"a\":1}{\"b\":2}".to_owned())]);
}
