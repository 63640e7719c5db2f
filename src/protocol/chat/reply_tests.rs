use super::*;
use crate::protocol::sse;

fn fixture(name: &str) -> Vec<u8> {
    let path = format!("{}/tests/fixtures/wire/{name}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read(path).expect("fixture")
}

fn stream(name: &str) -> Reply {
    let mut parser = sse::Parser::new();
    parser.push(&fixture(name));
    let mut reply = Reply::default();
    while let Some(event) = parser.next_event() {
        if event.has_data() && event.data() != "[DONE]" {
            reply.feed(&event.data()).expect("readable");
        }
    }
    reply
}

#[test]
fn a_vllm_stream_and_body_of_the_same_answer_read_the_same() {
    let mut body = Reply::default();
    body.feed(&fixture("vllm_chat.json")).expect("readable");
    let streamed = stream("vllm_chat_stream.sse");
    let (a, b) = (&body.choices[&0], &streamed.choices[&0]);
    assert_eq!(a.token_ids, b.token_ids);
    assert_eq!(a.token_ids.as_ref().expect("ids").len(), 13);
    assert_eq!(a.logprobs, b.logprobs);
    assert_eq!(a.logprobs.as_ref().expect("logprobs")[0], Some(-1.748_499_989_509_582_5_f64 as f32));
    assert_eq!((&a.text, &a.finish_reason), (&b.text, &b.finish_reason));
    assert_eq!(a.text, "\n\nHello! 🎉");
    assert_eq!(a.weight_versions, b.weight_versions);
    assert_eq!(body.prompt_token_ids, streamed.prompt_token_ids);
    assert_eq!(body.usage, streamed.usage);
}

#[test]
fn c02_c05_ids_in_chunks_without_text_are_kept() {
    let reply = stream("vllm_chat_tools_stream.sse");
    let choice = &reply.choices[&0];
    let ids = choice.token_ids.as_ref().expect("ids").len() as u64;
    assert_eq!(ids, reply.usage.expect("usage").completion_tokens);
    assert_eq!(choice.logprobs.as_ref().expect("logprobs").len() as u64, ids);
    assert!(choice.tool_calls.iter().all(|call| serde_json::from_str::<Value>(&call.arguments).is_ok()));
    assert!(!choice.tool_calls.is_empty());
}

#[test]
fn sglang_says_the_same_in_a_body_and_in_a_stream_with_its_extension() {
    let mut body = Reply::default();
    body.feed(&fixture("sglang_chat.json")).expect("readable");
    let streamed = stream("sglang_chat_stream_sglext.sse");
    let (a, b) = (&body.choices[&0], &streamed.choices[&0]);
    assert_eq!(a.token_ids.as_deref(), Some(&[9707, 0, 220, 144_848, 144_849, 151_645][..]));
    assert_eq!(a.ids_from, IdsFrom::Engine);
    assert_eq!(body.prompt_token_ids.as_ref().expect("ids").len(), 12);
    assert_eq!((&a.token_ids, &a.routed_experts, &a.text), (&b.token_ids, &b.routed_experts, &b.text));
    assert!(a.routed_experts.as_ref().expect("routing").starts_with("AAAAAAAAAAADAAAA"));
    assert_eq!(body.prompt_token_ids, streamed.prompt_token_ids);
    assert_eq!((body.usage, body.usage.expect("usage").reasoning_tokens), (streamed.usage, Some(0)));
    assert_eq!(a.stop_match, Some(StopMatch::Token(151_645)));
    assert_eq!(b.stop_match, a.stop_match);
    assert_eq!(a.logprobs.as_ref().expect("log-probs").len(), 6);
    // Its streams lose log-probs: the record's verdict sees that they are fewer than the ids.
    assert_eq!(b.logprobs.as_ref().expect("log-probs").len(), 4);
    assert_eq!(body.weight_version.as_deref(), Some("step-42"));
    let span = VersionSpan { version: "step-42".into(), start: 0, end: 6 };
    assert_eq!(a.weight_versions, Some(vec![span]));
}

#[test]
fn c03_sglangs_meta_info_has_log_probs_by_id() {
    let reply = |ids: &str, pairs: &str| {
        let mut reply = Reply::default();
        let text = format!(
            r#"{{"choices":[{{"index":0,"message":{{"content":"x"}},"finish_reason":"stop","prompt_token_ids":[1],{ids}
            "meta_info":{{"weight_version":7,"routed_experts":"AAAA","output_token_logprobs":{pairs}}}}}]}}"#
        );
        reply.feed(text.as_bytes()).expect("readable");
        reply
    };
    let told = reply(r#""response_token_ids":[5,6],"#, r#"[[-0.5,5,null],[null,6,"x"]]"#);
    let choice = &told.choices[&0];
    assert_eq!(choice.logprobs, Some(vec![Some(-0.5), None]));
    assert_eq!(choice.weight_version.as_deref(), Some("7"));
    assert_eq!(choice.routed_experts.as_deref(), Some("AAAA"));
    assert_eq!(told.prompt_token_ids, Some(vec![1]));
    let only_pairs = reply("", "[[-0.5,5,null],[-0.25,6,null]]");
    assert_eq!(only_pairs.choices[&0].token_ids, Some(vec![5, 6]));
    let of_other_ids = reply(r#""response_token_ids":[5,6],"#, "[[-0.5,5,null],[-0.25,7,null]]");
    assert_eq!(of_other_ids.choices[&0].logprobs, Some(vec![None, None]));
    let odd = reply(r#""response_token_ids":[5],"#, r#"{"another":"shape"}"#);
    assert_eq!((&odd.choices[&0].token_ids, &odd.choices[&0].logprobs), (&Some(vec![5]), &None));
}

#[test]
fn ids_in_the_place_of_token_texts_are_taken_where_there_are_no_others() {
    let mut body = Reply::default();
    body.feed(&fixture("vllm_chat_routed.json")).expect("readable");
    assert_eq!(body.choices[&0].ids_from, IdsFrom::Engine);
    let text = String::from_utf8(fixture("vllm_chat_routed.json")).expect("text");
    let mut old = Reply::default();
    old.feed(text.replace("\"token_ids\"", "\"x\"").as_bytes()).expect("readable");
    assert_eq!(old.choices[&0].token_ids, body.choices[&0].token_ids);
    assert_eq!(old.choices[&0].ids_from, IdsFrom::TokenStrings);
    let mut mixed = Reply::default();
    for token in ["token_id:5", "a", "token_id:6"] {
        let chunk = format!(
            r#"{{"choices":[{{"index":0,"delta":{{}},"logprobs":{{"content":[{{"token":"{token}","logprob":-0.5}}]}}}}]}}"#
        );
        mixed.feed(chunk.as_bytes()).expect("readable");
    }
    // The numbers differ: the verdict refuses it.
    let choice = &mixed.choices[&0];
    assert_eq!(
        (choice.token_ids.as_ref().map(Vec::len), choice.logprobs.as_ref().map(Vec::len)),
        (Some(1), Some(3))
    );
}

#[test]
fn vllms_token_endpoint_is_read_by_the_same_reader() {
    let mut reply = Reply::default();
    reply.feed(&fixture("vllm_inference_generate.json")).expect("readable");
    let choice = &reply.choices[&0];
    assert_eq!(reply.prompt_token_ids.as_ref().expect("ids").len(), 12);
    assert_eq!(choice.token_ids.as_ref().expect("ids").len(), 13);
    assert!(choice.logprobs.as_ref().expect("log-probs").iter().all(Option::is_some));
    assert!(choice.routed_experts.is_some() && choice.weight_versions.is_some());
}

#[test]
fn a06_a18_empty_choices_and_empty_finish_reasons_do_no_harm() {
    let mut reply = Reply::default();
    for chunk in [
        r#"{"choices":[],"prompt_filter_results":[]}"#,
        r#"{"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":""}],"error":null}"#,
        r#"{"choices":[{"index":0,"delta":{"content":"b error"},"finish_reason":"length"}]}"#,
        r#"{"usage":{"prompt_tokens":3,"completion_tokens":2}}"#,
    ] {
        reply.feed(chunk.as_bytes()).expect("readable");
    }
    assert_eq!(reply.choices[&0].text, "ab error");
    assert_eq!(reply.choices[&0].finish_reason.as_deref(), Some("length"));
    assert_eq!(reply.usage.expect("usage").completion_tokens, 2);
    assert_eq!(reply.error, None);
}

#[test]
fn a_count_that_the_usage_does_not_tell_is_not_0() {
    let usage = |usage: &str| {
        let mut reply = Reply { usage: Some(ReplyUsage::default()), ..Reply::default() };
        reply.feed(format!(r#"{{"usage":{usage}}}"#).as_bytes()).expect("readable");
        reply.usage.map(|usage| (usage.prompt_tokens, usage.completion_tokens))
    };
    for partial in ["{}", r#"{"prompt_tokens":3}"#, r#"{"completion_tokens":2,"prompt_tokens":null}"#] {
        assert_eq!(usage(partial), None, "{partial}");
    }
    assert_eq!(usage(r#"{"completion_tokens":0,"prompt_tokens":4}"#), Some((4, 0)));
}

#[test]
fn c07_c08_c12_unusable_log_probs_are_null_and_nothing_shifts() {
    let mut reply = Reply::default();
    let chunk = br#"{"choices":[{"index":0,"delta":{"content":"x"},"token_ids":[1,2,3,4,5,6,7],"logprobs":{"content":[
        {"logprob":-Infinity},{"logprob":NaN},{"logprob":null},{"logprob":-9999.0},{"logprob":1e999},{"logprob":-0.25}]}}]}"#;
    reply.feed(chunk).expect("readable");
    let logprobs = reply.choices[&0].logprobs.clone().expect("logprobs");
    assert_eq!(logprobs, [None, None, None, None, None, Some(-0.25), None]);
}

#[test]
fn a_log_prob_is_the_nearest_f32_to_its_text() {
    for value in [-1e-40_f32, -0.1, -1.175_494_4e-38, -0.0, -13.815_511] {
        let text = format!("{{\"choices\":[{{\"logprobs\":{{\"content\":[{{\"logprob\":{value:?}}}]}}}}]}}");
        let mut reply = Reply::default();
        reply.feed(text.as_bytes()).expect("readable");
        let read = reply.choices[&0].logprobs.as_ref().expect("logprobs")[0];
        assert_eq!(read.expect("value").to_bits(), value.to_bits());
    }
}
