use super::*;
use crate::protocol::sse;
use crate::record::{RoutingDtype, UpstreamKind};
use crate::upstream::routing::{self, RoutingHint};
use proptest::prelude::*;

fn fixture(name: &str) -> Vec<u8> {
    let path = format!("{}/tests/fixtures/wire/{name}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read(path).expect("fixture")
}

/// Feeds the events of a stream, or what `feed` makes of a text.
fn feed_all<T: AsRef<[u8]>>(parts: impl IntoIterator<Item = T>) -> Result<GenerateReply, GenerateError> {
    let mut reply = GenerateReply::default();
    for part in parts {
        reply.feed(part.as_ref())?;
    }
    Ok(reply)
}

fn stream(name: &str) -> Reply {
    let mut parser = sse::Parser::new();
    parser.push(&fixture(name));
    let mut events = Vec::new();
    while let Some(event) = parser.next_event() {
        events.extend((event.data() != "[DONE]").then(|| event.data()));
    }
    feed_all(events).expect("a reply").into_reply()
}

fn event(text: &str, ids: &str, total: usize, more: &str) -> String {
    format!(
        r#"{{"text":"{text}","output_ids":{ids},"meta_info":{{"completion_tokens":{total},"prompt_tokens":2{more}}}}}"#
    )
}

#[test]
fn body_and_both_streams_of_the_same_answer_read_the_same() {
    let body = feed_all([fixture("sglang_generate.json")]).expect("a reply").into_reply();
    let choice = &body.choices[&0];
    assert_eq!(choice.text, "Hello! 🎉");
    assert_eq!(choice.token_ids, Some(vec![9707, 0, 220, 144_848, 144_849, 151_645]));
    assert_eq!(choice.logprobs.as_ref().expect("log-probs")[1], Some(-1.5585));
    assert_eq!(choice.finish_reason.as_deref(), Some("stop"));
    assert_eq!(choice.stop_match, Some(StopMatch::Token(151_645)));
    assert_eq!(choice.weight_version.as_deref(), Some("step-42"));
    let usage = body.usage.expect("usage");
    assert_eq!((usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens), (12, 6, Some(4)));
    assert_eq!(body.prompt_token_ids.as_ref().expect("ids").len(), 12);
    for name in ["sglang_generate_stream.sse", "sglang_generate_stream_incremental.sse"] {
        let mut streamed = stream(name);
        // Streams do not repeat the prompt's ids, and only one of them has spans.
        assert_eq!(streamed.prompt_token_ids.take(), None);
        streamed.prompt_token_ids.clone_from(&body.prompt_token_ids);
        let told = streamed.choices.get_mut(&0).expect("choice");
        told.weight_versions.clone_from(&choice.weight_versions);
        assert_eq!(streamed, body, "{name}");
    }
}

#[test]
fn routing_of_the_native_endpoint_is_that_of_chat() {
    let reply = feed_all([fixture("sglang_generate.json")]).expect("a reply").into_reply();
    let text = reply.choices[&0].routed_experts.as_ref().expect("routing");
    let hint = RoutingHint { layers: Some(4), top_k: None };
    let routing = routing::decode(UpstreamKind::Sglang, hint, text, 0, 17).expect("read");
    assert_eq!((routing.shape().top_k, routing.shape().dtype), (2, RoutingDtype::U8));
}

#[test]
fn events_that_were_joined_under_load_and_empty_ones_change_nothing() {
    let incremental = [
        event("", "[]", 0, ""),
        event("a", "[1]", 1, ""),
        event("", "[]", 1, ""),
        event("bc", "[2,3]", 3, ""),
        event("", "[4]", 4, r#","finish_reason":{"type":"length","length":4}"#),
    ];
    let cumulative = [
        event("a", "[1]", 1, ""),
        event("a", "[1]", 1, ""),
        event("abc", "[1,2,3]", 3, ""),
        event("abc", "[1,2,3,4]", 4, r#","finish_reason":{"type":"length","length":4}"#),
    ];
    let incremental = feed_all(incremental).expect("a reply").into_reply();
    assert_eq!(incremental, feed_all(cumulative).expect("a reply").into_reply());
    assert_eq!(incremental.choices[&0].token_ids, Some(vec![1, 2, 3, 4]));
    assert_eq!(incremental.choices[&0].text, "abc");
    assert!(incremental.is_finished(1));
}

#[test]
fn an_abort_that_repeats_the_last_id_is_clamped_and_is_no_stop() {
    let abort = r#","finish_reason":{"type":"abort","message":"paused","status_code":503,"err_type":null}"#;
    for parts in [
        [event("a", "[1]", 1, ""), event("b", "[2]", 2, ""), event("", "[2]", 2, abort)],
        [event("a", "[1]", 1, ""), event("ab", "[1,2]", 2, ""), event("ab", "[1,2]", 2, abort)],
    ] {
        let reply = feed_all(parts).expect("a reply").into_reply();
        assert_eq!(reply.choices[&0].token_ids, Some(vec![1, 2]));
        assert_eq!(reply.choices[&0].finish_reason.as_deref(), Some("abort"));
        assert_eq!(reply.error.as_deref(), Some("paused"));
    }
}

#[test]
fn an_abort_after_the_first_token_shows_no_form() {
    let abort = r#","finish_reason":{"type":"abort","message":"paused"}"#;
    let with_index = |index: u16, event: String| format!(r#"{{"index":{index},{}"#, &event[1..]);
    for (text, second) in [("", event("c", "[3]", 2, "")), ("a", event("bc", "[2,3]", 2, ""))] {
        let reply = feed_all([
            with_index(0, event("a", "[1]", 1, "")),
            with_index(1, event("b", "[2]", 1, "")),
            with_index(0, event(text, "[1]", 1, abort)),
            with_index(1, second),
        ]);
        let reply = reply.expect("a reply").into_reply();
        assert_eq!((reply.choices[&0].text.as_str(), &reply.choices[&0].token_ids), ("a", &Some(vec![1])));
        assert_eq!(
            (reply.choices[&1].text.as_str(), &reply.choices[&1].token_ids),
            ("bc", &Some(vec![2, 3]))
        );
    }
}

#[test]
fn several_prompts_have_their_own_ids_and_are_counted_once() {
    let output = |prompt: &str, cached: u32| {
        event("x", "[9]", 1, &format!(r#","cached_tokens":{cached},"finish_reason":{{"type":"length"}}"#))
            .replacen('{', &format!(r#"{{"prompt_token_ids":{prompt},"#), 1)
    };
    let (one, two) = (output("[1,2]", 1), output("[3,4]", 2));
    let mut reply = GenerateReply::of_prompts(2);
    reply.feed(format!("[{one},{one},{two},{two}]").as_bytes()).expect("a reply");
    let reply = reply.into_reply();
    let usage = reply.usage.expect("usage");
    assert_eq!((usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens), (4, 4, Some(3)));
    assert_eq!(
        (reply.prompt_ids_of(1, 2), reply.prompt_ids_of(2, 2)),
        (Some(&[1, 2][..]), Some(&[3, 4][..]))
    );
    assert_eq!(reply.prompt_token_ids, None);
    // Beside log-probs of the whole prompt, and of no part of it.
    for (scored, ids) in [("[[null,5,null],[-0.5,6,null]]", Some(vec![5, 6])), ("[[-0.5,6,null]]", None)] {
        let scored = event("x", "[9]", 1, &format!(r#","input_token_logprobs":{scored}"#));
        assert_eq!(feed_all([scored]).expect("a reply").into_reply().prompt_token_ids, ids);
    }
}

#[test]
fn several_outputs_are_several_choices() {
    let one =
        |id: u32| event("x", &format!("[{id},9]"), 2, r#","finish_reason":{"type":"stop","matched":"</s>"}"#);
    let reply = feed_all([format!("[{},{}]", one(5), one(6))]).expect("a reply").into_reply();
    assert_eq!(reply.choices[&1].token_ids, Some(vec![6, 9]));
    assert_eq!(reply.choices[&1].stop_match, Some(StopMatch::Text("</s>".into())));
    assert_eq!(reply.usage.expect("usage").completion_tokens, 4);
    assert_eq!(reply.usage.expect("usage").prompt_tokens, 2);
    assert!(reply.is_finished(2));
    // Streamed, each event says whose it is; the form is the stream's.
    let with_index = |index: u16, event: String| format!(r#"{{"index":{index},{}"#, &event[1..]);
    let parts = [
        with_index(0, event("a", "[1]", 1, "")),
        with_index(1, event("b", "[2]", 1, "")),
        with_index(0, event("ac", "[1,3]", 2, "")),
        with_index(1, event("bd", "[2,4]", 2, "")),
    ];
    let reply = feed_all(parts).expect("a reply").into_reply();
    assert_eq!(reply.choices[&0].text, "ac");
    assert_eq!(reply.choices[&1].token_ids, Some(vec![2, 4]));
}

#[test]
fn c07_values_that_are_missing_or_of_other_ids_are_null() {
    let pairs = r#","output_token_logprobs":[[-0.5,1,null],[NaN,2,null],[-0.25,7,null]]"#;
    let reply = feed_all([event("abc", "[1,2,3]", 3, pairs)]).expect("a reply").into_reply();
    assert_eq!(reply.choices[&0].logprobs, Some(vec![Some(-0.5), None, None]));
    let only_pairs =
        r#"{"text":"a","meta_info":{"completion_tokens":1,"output_token_logprobs":[[-0.5,8,"a"]]}}"#;
    let reply = feed_all([only_pairs]).expect("a reply").into_reply();
    assert_eq!(reply.choices[&0].token_ids, Some(vec![8]));
}

#[test]
fn what_contradicts_itself_is_refused() {
    let bad: [&[String]; 5] = [
        // Ids that were sent changed.
        &[event("a", "[1]", 1, ""), event("ab", "[2,3]", 2, "")],
        // Neither new ones nor all.
        &[event("a", "[1]", 1, ""), event("abc", "[1,2]", 4, "")],
        // First all, then only new ones.
        &[event("a", "[1]", 1, ""), event("ab", "[1,2]", 2, ""), event("c", "[3]", 3, "")],
        &[event("a", "[1]", 1, ""), event("b", "[2]", 2, ""), event("abc", "[1,2,3]", 3, "")],
        &[event("a", "[1]", 1, ""), event("ab", "[1,2]", 2, "").replace("\"completion_tokens\"", "\"x\"")],
    ];
    for parts in bad {
        assert!(feed_all(parts).is_err(), "{parts:?}");
    }
    for text in ["{}", "[{}]", r#"{"text":"a","output_ids":[1]}"#] {
        assert!(matches!(feed_all([text]), Err(GenerateError::Other { .. })), "{text}");
    }
    for text in ["", "{", "3", "[3]", r#"{"output_ids":"x"}"#] {
        assert!(matches!(feed_all([text]), Err(GenerateError::Json(_))), "{text}");
    }
}

#[test]
fn a07_an_error_in_the_stream_is_the_replys_error() {
    let error = r#"{"error":{"message":"out of memory","type":"invalid_request_error","code":400,"retryable":false}}"#;
    let mut reply = feed_all([event("a", "[1]", 1, "")]).expect("a reply");
    assert!(reply.feed(error.as_bytes()).expect("readable").has_error);
    assert_eq!(reply.reply().error.as_deref(), Some("out of memory"));
    assert!(!reply.reply().is_finished(1));
}

proptest! {
    #[test]
    fn whatever_a_server_tells_nothing_panics(
        events in prop::collection::vec(
            (0_u16..3, "a{0,3}", prop::option::of(prop::collection::vec(0_u32..3, 0..4)), any::<Option<u64>>(), 0_u64..6),
            0..6,
        ),
        bytes in prop::collection::vec(any::<u8>(), 0..64),
    ) {
        let mut reply = GenerateReply::default();
        for (index, text, ids, huge, small) in events {
            let total = huge.filter(|_| small == 0).unwrap_or(small);
            let event = serde_json::json!({
                "index": index, "text": text, "output_ids": ids,
                "meta_info": {"completion_tokens": total, "prompt_tokens": huge},
            });
            let _ = reply.feed(event.to_string().as_bytes());
            for choice in reply.reply().choices.values() {
                let lengths = (choice.token_ids.as_ref().map(Vec::len), choice.logprobs.as_ref().map(Vec::len));
                prop_assert!(lengths.1.is_none() || lengths.0 == lengths.1);
            }
        }
        let _ = reply.feed(&bytes);
    }

    #[test]
    fn without_the_events_that_later_ones_repeat_a_reply_reads_the_same(
        is_cumulative: bool,
        parts in prop::collection::vec((0_u16..3, 0_usize..3, any::<[bool; 7]>()), 0..14),
    ) {
        let (mut all, mut short) = (GenerateReply::of_prompts(1), GenerateReply::of_prompts(1));
        let (mut counts, mut last, mut is_over) = ([0_usize; 3], [None; 3], [false; 3]);
        let mut kept: BTreeMap<usize, String> = BTreeMap::new();
        for (number, (index, more, told)) in parts.into_iter().enumerate() {
            let output = usize::from(index);
            if std::mem::replace(&mut is_over[output], told[6] && more == 2) {
                break;
            }
            let start = if is_cumulative { 0 } else { counts[output] };
            counts[output] += more;
            let total = counts[output];
            let text: String = (start..total).map(|at| char::from(b'a' + at as u8)).collect();
            let mut meta = serde_json::json!({"completion_tokens": total, "cached_tokens": number});
            let mut member = |is_told: bool, name: &str, value: serde_json::Value| {
                if is_told {
                    meta[name] = value;
                }
            };
            let pairs: Vec<_> = (start..total).map(|at| serde_json::json!([-0.5, at, null])).collect();
            member(told[0], "output_token_logprobs", pairs.into());
            member(told[1], "weight_version", number.to_string().into());
            member(told[2], "routed_experts", number.to_string().into());
            member(told[3], "prompt_tokens", 2.into());
            let spans = serde_json::json!([{"version": "v", "start": 0, "end": total}]);
            member(told[4], "weight_versions", spans);
            member(is_over[output], "finish_reason", serde_json::json!({"type": "length"}));
            let mut event = serde_json::json!({"index": index, "text": text, "meta_info": meta});
            event["output_ids"] = (start..total).collect::<Vec<_>>().into();
            if told[5] {
                event["prompt_token_ids"] = serde_json::json!([1, 2]);
            }
            let event = event.to_string();
            let Ok(fed) = all.feed(event.as_bytes()) else {
                break;
            };
            kept.insert(number, event.clone());
            // As it is done where the events can be read again.
            prop_assert_eq!(short.feed(event.as_bytes()).expect("as before"), fed);
            short.forget();
            prop_assert_eq!(short.reply().usage, all.reply().usage);
            prop_assert_eq!(short.reply().is_finished(1), all.reply().is_finished(1));
            if let Some(old) = all.repeated().and_then(|index| last[usize::from(index)].replace(number)) {
                kept.remove(&old);
            }
        }
        let mut again = GenerateReply::of_prompts(1);
        for event in kept.values() {
            again.feed(event.as_bytes()).expect("as before");
        }
        prop_assert_eq!(again.reply(), all.reply());
    }
}

#[test]
fn of_events_that_say_everything_so_far_the_last_is_enough() {
    let mut reply = GenerateReply::of_prompts(1);
    let mut repeated = |event: String| {
        reply.feed(event.as_bytes()).expect("readable");
        reply.repeated()
    };
    let pairs = r#","output_token_logprobs":[[-0.5,1,null]]"#;
    assert_eq!(repeated(event("a", "[1]", 1, pairs)), Some(0));
    // One that lacks what was there already is no substitute, nor is one of several outputs.
    assert_eq!(repeated(event("ab", "[1,2]", 2, "")), None);
    let pairs = r#","output_token_logprobs":[[-0.5,1,null],[-0.5,2,null],[-0.5,3,null]]"#;
    assert_eq!(repeated(event("abc", "[1,2,3]", 3, pairs)), Some(0));
    assert_eq!(repeated(format!("[{}]", event("abc", "[1,2,3]", 3, pairs))), None);
    let over = format!(r#"{pairs},"finish_reason":{{"type":"stop"}}"#);
    assert_eq!(repeated(event("abc", "[1,2,3]", 3, &over)), Some(0));
    assert_eq!(repeated(event("abc", "[1,2,3]", 3, pairs)), None);
}

#[test]
fn c07_ids_without_log_probs_after_ids_that_had_them_have_none() {
    let first = event("a", "[1]", 1, r#","output_token_logprobs":[[-0.5,1,null]]"#);
    let reply = feed_all([first, event("ab", "[1,2]", 2, "")]).expect("a reply").into_reply();
    let choice = &reply.choices[&0];
    assert_eq!((&choice.token_ids, &choice.logprobs), (&Some(vec![1, 2]), &Some(vec![Some(-0.5), None])));
}
