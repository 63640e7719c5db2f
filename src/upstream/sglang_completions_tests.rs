use proptest::prelude::*;

use super::*;
use crate::protocol::sse;

fn fixture(name: &str) -> Vec<u8> {
    let path = format!("{}/tests/fixtures/wire/{name}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read(path).expect("fixture")
}

fn events_of(text: &[u8]) -> Vec<Bytes> {
    let mut parser = sse::Parser::new();
    parser.push(text);
    let mut events = Vec::new();
    while let Some(event) = parser.next_event() {
        events.extend((event.data() != "[DONE]").then(|| event.data()));
    }
    events
}

fn writer(more: Value) -> CompletionsWriter {
    let mut body = json!({"model": "m\"", "prompt": [1]});
    body.as_object_mut().expect("object").extend(more.as_object().expect("object").clone());
    let request = Request::parse(Bytes::from(body.to_string())).expect("a request");
    let names = ReplyNames { call_id: "c1".to_owned(), model: "m\"".to_owned(), created: 5 };
    CompletionsWriter::new(&request, names)
}

fn written(pieces: Vec<Piece>) -> Vec<u8> {
    let bytes = pieces.into_iter().map(|piece| match piece {
        Piece::Bytes(bytes) => bytes,
        Piece::Barrier => panic!("the end is the only thing that waits"),
    });
    bytes.collect::<Vec<Bytes>>().concat()
}

/// What a client gets of a stream.
fn streamed<T: AsRef<[u8]>>(mut writer: CompletionsWriter, events: &[T]) -> Result<String, Untranslatable> {
    let mut out = Vec::new();
    for event in events {
        writer.chunk(event.as_ref(), &mut out)?;
    }
    let begun = written(std::mem::take(&mut out));
    assert!(!String::from_utf8_lossy(&begun).contains("\"finish_reason\":\""), "the end waits");
    writer.end(&mut out);
    Ok(String::from_utf8([begun, written(out)].concat()).expect("text"))
}

/// The chunks of it, without the end.
fn chunks(stream: &str) -> Vec<Value> {
    let blocks: Vec<&str> = stream.split_terminator("\n\n").collect();
    assert_eq!(blocks.last(), Some(&"data: [DONE]"));
    let data =
        |block: &&str| serde_json::from_str(block.strip_prefix("data: ").expect("data")).expect("JSON");
    blocks[..blocks.len() - 1].iter().map(data).collect()
}

/// Text, ids and finish reason of each choice as a client puts them together.
fn read(stream: &str) -> BTreeMap<u64, (String, Vec<Value>, Vec<Value>, Option<String>)> {
    let mut all: BTreeMap<u64, (String, Vec<Value>, Vec<Value>, Option<String>)> = BTreeMap::new();
    for chunk in chunks(stream) {
        for choice in chunk["choices"].as_array().expect("choices") {
            let known = all.entry(choice["index"].as_u64().expect("an index")).or_default();
            assert_eq!(known.3, None, "nothing follows the finish reason");
            known.0.push_str(choice["text"].as_str().expect("text"));
            known.1.extend(choice["token_ids"].as_array().cloned().unwrap_or_default());
            known.2.extend(choice["logprobs"]["token_logprobs"].as_array().cloned().unwrap_or_default());
            known.3 = choice["finish_reason"].as_str().map(str::to_owned);
        }
    }
    all
}

#[test]
fn both_forms_of_the_stream_are_the_same_chunks() {
    let asks = json!({"return_token_ids": true, "logprobs": 0, "stream_options": {"include_usage": true}});
    let streams = ["sglang_generate_stream.sse", "sglang_generate_stream_incremental.sse"];
    let [cumulative, incremental] =
        streams.map(|name| streamed(writer(asks.clone()), &events_of(&fixture(name))).expect("a stream"));
    assert_eq!(cumulative, incremental);
    let chunks = chunks(&cumulative);
    // Five events, the end, the usage.
    assert_eq!(chunks.len(), 7);
    let first = &chunks[0];
    assert_eq!((&first["id"], &first["object"]), (&json!("6c1f0b7e9a5d4e2f"), &json!("text_completion")));
    assert_eq!((&first["created"], &first["model"]), (&json!(5), &json!("m\"")));
    let choice = &chunks[2]["choices"][0];
    assert_eq!((&choice["text"], &choice["token_ids"]), (&json!(" "), &json!([220, 144_848])));
    assert_eq!(
        choice["logprobs"]["token_logprobs"],
        json!([-2.168_499_946_594_238_3, -0.973_500_013_351_440_4])
    );
    assert_eq!(choice["logprobs"]["tokens"], json!(["token_id:220", "token_id:144848"]));
    let end = &chunks[5]["choices"][0];
    assert_eq!((&end["finish_reason"], &end["matched_stop"]), (&json!("stop"), &json!(151_645)));
    assert_eq!(chunks[6]["choices"], json!([]));
    assert_eq!(chunks[6]["usage"]["total_tokens"], 18);
    assert_eq!(chunks[6]["usage"]["prompt_tokens_details"]["cached_tokens"], 4);
    assert_eq!(read(&cumulative)[&0].0, "Hello! 🎉");
}

#[test]
fn a_body_says_what_the_stream_says() {
    let mut plain = writer(json!({}));
    let body: Value =
        serde_json::from_slice(&plain.body(&fixture("sglang_generate.json")).expect("a body")).expect("JSON");
    assert_eq!(
        body,
        json!({
            "id": "6c1f0b7e9a5d4e2f", "object": "text_completion", "created": 5, "model": "m\"",
            "choices": [{"index": 0, "text": "Hello! 🎉", "logprobs": null, "finish_reason": "stop", "matched_stop": 151_645}],
            "usage": {"prompt_tokens": 12, "total_tokens": 18, "completion_tokens": 6,
                "prompt_tokens_details": {"cached_tokens": 4}, "reasoning_tokens": 0},
            "metadata": {"weight_version": "step-42"},
        })
    );
    let mut asking = writer(json!({"logprobs": 2, "return_token_ids": true, "return_routed_experts": true}));
    let text = asking.body(&fixture("sglang_generate.json")).expect("a body");
    let text = std::str::from_utf8(&text).expect("text");
    let body: Value = serde_json::from_str(text).expect("JSON");
    let choice = &body["choices"][0];
    assert_eq!(choice["token_ids"].as_array().map(Vec::len), Some(6));
    assert_eq!(choice["prompt_token_ids"].as_array().map(Vec::len), Some(12));
    assert_eq!(choice["logprobs"]["text_offset"], json!([-1, -1, -1, -1, -1, -1]));
    assert_eq!(choice["logprobs"]["top_logprobs"][0].as_object().map(serde_json::Map::len), Some(2));
    // As the engine printed it.
    assert!(text.contains("\"token_logprobs\":[-0.2160000056028366,-1.558500051498413,"), "{text}");
    assert!(body["sglext"]["routed_experts"].as_str().is_some_and(|routed| !routed.is_empty()));
}

fn event(index: u16, text: &str, ids: &[u32], total: usize, more: Value) -> String {
    let pairs: Vec<Value> =
        ids.iter().map(|id| json!([-f64::from(*id) / 8.0, id, format!("t{id}")])).collect();
    let mut meta = json!({"id": format!("r{index}"), "prompt_tokens": 2, "completion_tokens": total,
        "finish_reason": null, "output_token_logprobs": pairs});
    meta.as_object_mut().expect("object").extend(more.as_object().expect("object").clone());
    json!({"index": index, "text": text, "output_ids": ids, "meta_info": meta}).to_string()
}

fn stop() -> Value {
    json!({"finish_reason": {"type": "stop", "matched": "#!"}})
}

#[test]
fn an_abort_repeats_no_token_and_says_that_it_is_one() {
    let abort = json!({"finish_reason": {"type": "abort", "message": "paused", "status_code": 503}});
    let events =
        [event(0, "a", &[1], 1, json!({})), event(0, "b", &[2], 2, json!({})), event(0, "", &[2], 2, abort)];
    let stream = streamed(writer(json!({"return_token_ids": true})), &events).expect("a stream");
    let (text, ids, _, finish) = &read(&stream)[&0];
    assert_eq!(
        (text.as_str(), ids.as_slice(), finish.as_deref()),
        ("ab", &[json!(1), json!(2)][..], Some("abort"))
    );
}

#[test]
fn a_stop_string_that_was_told_in_part_is_not_told_on() {
    let events = [
        event(0, "a", &[1], 1, json!({})),
        event(0, "a#", &[1, 2], 2, json!({})),
        event(0, "a", &[1, 2, 3], 3, stop()),
    ];
    let stream = streamed(writer(json!({})), &events).expect("a stream");
    assert_eq!((read(&stream)[&0].0.as_str(), read(&stream)[&0].3.as_deref()), ("a#", Some("stop")));
    assert!(stream.contains("\"matched_stop\":\"#!\""));
    let changed = [event(0, "a", &[1], 1, json!({})), event(0, "bc", &[1, 2], 2, json!({}))];
    let error = streamed(writer(json!({})), &changed).expect_err("what was said is not taken back");
    assert!(error.to_string().contains("not what it was"), "{error}");
}

#[test]
fn events_that_tell_nothing_new_make_no_chunk_and_tokens_without_text_do() {
    let events = [
        event(0, "a", &[1], 1, json!({})),
        event(0, "a", &[1], 1, json!({})),
        event(0, "a", &[1, 2], 2, json!({})),
        event(0, "aé", &[1, 2, 3], 3, stop()),
    ];
    let stream = streamed(writer(json!({"return_token_ids": true})), &events).expect("a stream");
    let told: Vec<Value> =
        chunks(&stream).iter().map(|chunk| chunk["choices"][0]["token_ids"].clone()).collect();
    assert_eq!(told, [json!([1]), json!([2]), json!([3]), json!([])]);
}

#[test]
fn a_body_without_its_end_or_of_another_protocol_is_no_reply() {
    let running = event(0, "a", &[1], 1, json!({}));
    let error = r#"{"error":{"message":"out of memory"}}"#;
    for body in ["{}", "[]", "3", "", running.as_str(), error, r#"{"choices":[]}"#] {
        assert!(writer(json!({})).body(body.as_bytes()).is_err(), "{body}");
    }
    assert!(
        writer(json!({})).body(error.as_bytes()).expect_err("an error").to_string().contains("out of memory")
    );
}

#[test]
fn a05_a_stream_without_its_end_has_no_clean_one() {
    let begun = event(0, "a", &[1], 1, json!({}));
    for n in [1, 2] {
        let mut writer = writer(json!({"n": n}));
        let mut out = Vec::new();
        writer.chunk(begun.as_bytes(), &mut out).expect("an event");
        if n == 2 {
            // One of two is not all.
            writer.chunk(event(1, "b", &[2], 1, stop()).as_bytes(), &mut out).expect("an event");
        }
        writer.end(&mut out);
        writer.end(&mut out);
        let stream = String::from_utf8(written(out)).expect("text");
        assert!(!stream.contains("[DONE]") && !stream.contains("\"finish_reason\":\""), "{stream}");
        assert_eq!(stream.matches("data: {\"error\"").count(), 1);
    }
}

#[test]
fn log_probs_that_json_does_not_have_are_null_and_nothing_shifts() {
    let odd = event(0, "ab", &[1, 2], 2, stop()).replace("-0.125", "-Infinity");
    let stream = streamed(writer(json!({"logprobs": 0})), std::slice::from_ref(&odd)).expect("a stream");
    assert_eq!(read(&stream)[&0].2, [Value::Null, json!(-0.25)]);
    let body = writer(json!({"logprobs": 0})).body(odd.as_bytes()).expect("a body");
    let body: Value = serde_json::from_slice(&body).expect("JSON");
    assert_eq!(body["choices"][0]["logprobs"]["token_logprobs"], json!([null, -0.25]));
    assert_eq!(body["choices"][0]["logprobs"]["tokens"], json!(["t1", "t2"]));
}

#[test]
fn a09_a_keep_alive_is_an_empty_chunk_of_the_same_reply() {
    let mut writer = writer(json!({}));
    let mut out = Vec::new();
    writer.keep_alive(&mut out);
    writer.chunk(event(0, "a", &[1], 1, stop()).as_bytes(), &mut out).expect("an event");
    writer.end(&mut out);
    let chunks = chunks(std::str::from_utf8(&written(out)).expect("text"));
    assert!(chunks.iter().all(|chunk| chunk["id"] == "cmpl-c1"));
    assert_eq!((&chunks[0]["choices"][0]["text"], chunks.len()), (&json!(""), 3));
}

/// An output: its tokens as text and id, and after how many of them an event ends.
type Sampled = (Vec<(String, u32)>, Vec<usize>);

fn sampled() -> impl Strategy<Value = Sampled> {
    let token = ("[a-zé🎉\"\\\\]{0,3}", 0_u32..200_000);
    prop::collection::vec(token, 1..12).prop_flat_map(|tokens| {
        let ends = prop::collection::vec(1..=tokens.len(), 0..6);
        (Just(tokens), ends)
    })
}

/// The events of a server for one output.
fn served(index: u16, (tokens, ends): &Sampled, is_cumulative: bool, repeats_last: bool) -> Vec<String> {
    let mut ends = ends.clone();
    ends.push(tokens.len());
    ends.sort_unstable();
    ends.dedup();
    let mut from = 0;
    let mut events = Vec::new();
    for end in &ends {
        let start = if is_cumulative { 0 } else { from };
        let text: String = tokens[start..*end].iter().map(|(text, _)| text.as_str()).collect();
        let ids: Vec<u32> = tokens[start..*end].iter().map(|(_, id)| *id).collect();
        let more = if *end == tokens.len() && !repeats_last { stop() } else { json!({}) };
        events.push(event(index, &text, &ids, *end, more));
        from = *end;
    }
    if repeats_last {
        let abort = json!({"finish_reason": {"type": "abort", "message": "paused"}});
        let start = if is_cumulative { 0 } else { tokens.len() - 1 };
        let ids: Vec<u32> = tokens[start..].iter().map(|(_, id)| *id).collect();
        let text: String = if is_cumulative {
            tokens.iter().map(|(text, _)| text.as_str()).collect()
        } else {
            String::new()
        };
        events.push(event(index, &text, &ids, tokens.len(), abort));
    }
    events
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// However a server joins its tokens into events, in either form, record and client have the same.
    #[test]
    fn both_forms_give_the_same_record_and_the_same_reply(
        outputs in prop::collection::vec(sampled(), 1..4),
        repeats_last in any::<bool>(),
        order in any::<u64>(),
    ) {
        let mut seen = Vec::new();
        for is_cumulative in [true, false] {
            let mut lists: Vec<_> = outputs.iter().enumerate()
                .map(|(index, output)| served(index as u16, output, is_cumulative, repeats_last).into_iter())
                .collect();
            let (mut events, mut turn) = (Vec::new(), order);
            while !lists.is_empty() {
                let at = turn as usize % lists.len();
                turn = turn.rotate_left(7) ^ 0x9E37;
                match lists[at].next() {
                    Some(event) => events.push(event),
                    None => drop(lists.remove(at)),
                }
            }
            let mut reply = GenerateReply::of_prompts(1);
            for event in &events {
                reply.feed(event.as_bytes()).expect("as a server writes it");
            }
            let asks = json!({"return_token_ids": true, "logprobs": 0, "n": outputs.len()});
            let stream = streamed(writer(asks), &events).expect("a stream");
            seen.push((reply.into_reply(), read(&stream)));
        }
        prop_assert_eq!(&seen[0], &seen[1]);
        for (index, (tokens, _)) in outputs.iter().enumerate() {
            let choice = &seen[0].0.choices[&(index as u16)];
            let ids: Vec<u32> = tokens.iter().map(|(_, id)| *id).collect();
            prop_assert_eq!(choice.token_ids.as_ref(), Some(&ids));
            let (text, told, logprobs, finish) = &seen[0].1[&(index as u64)];
            prop_assert_eq!(text, &tokens.iter().map(|(text, _)| text.as_str()).collect::<String>());
            prop_assert_eq!(told, &ids.iter().map(|id| json!(id)).collect::<Vec<_>>());
            let values: Vec<Value> = ids.iter().map(|id| json!(-f64::from(*id) / 8.0)).collect();
            prop_assert_eq!(logprobs, &values);
            prop_assert_eq!(finish.as_deref(), Some(if repeats_last { "abort" } else { "stop" }));
        }
    }

    #[test]
    fn nothing_breaks_on_garbage(bytes in prop::collection::vec(any::<u8>(), 0..48), word in "[\\[\\]{}\",:0-9a-z ]{0,24}") {
        let asks = json!({"logprobs": 2, "return_token_ids": true});
        let _ = writer(asks.clone()).body(&bytes);
        let mut writer = writer(asks);
        let mut out = Vec::new();
        let _ = writer.chunk(&bytes, &mut out);
        let meta = format!("{{\"text\":\"a\",\"output_ids\":[1],\"meta_info\":{{\"output_top_logprobs\":{word},\"output_token_logprobs\":{word}}}}}");
        let _ = writer.chunk(meta.as_bytes(), &mut out);
        writer.end(&mut out);
    }
}
