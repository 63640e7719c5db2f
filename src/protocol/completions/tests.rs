use bytes::Bytes;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::{Cut, Prompt, Reply, Request, Unasked, cut};
use crate::protocol::json::apply;

fn request(body: Value) -> Request {
    Request::parse(Bytes::from(body.to_string())).expect("request")
}

/// A stream of two prompts with two choices each, choices interleaved, as vLLM writes it.
fn chunks() -> Vec<String> {
    let chunk = |index: u64, text: &str, ids: &[u32], more: Value| {
        let logprobs: Vec<f32> = ids.iter().map(|id| -(*id as f32) / 8.0).collect();
        let mut choice = json!({"index": index, "text": text, "logprobs": {"text_offset": [0], "token_logprobs": logprobs,
            "tokens": ["x"], "top_logprobs": [{}]}, "finish_reason": null, "stop_reason": null, "token_ids": ids});
        choice.as_object_mut().expect("object").extend(more.as_object().expect("object").clone());
        let head = json!({"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "served", "choices": [choice]});
        head.to_string()
    };
    let spans = json!([{"version": "step-3", "start": 0, "end": 2}]);
    vec![
        chunk(2, "c", &[30], json!({"prompt_token_ids": [8, 9]})),
        chunk(0, "a", &[10], json!({"prompt_token_ids": [7]})),
        chunk(1, "", &[20], json!({})),
        chunk(3, "d", &[40, 41], json!({"finish_reason": "stop"})),
        chunk(0, "é", &[11], json!({"finish_reason": "length", "weight_versions": spans})),
        chunk(1, "b", &[21], json!({"finish_reason": "stop"})),
        chunk(2, "", &[31], json!({"finish_reason": "stop"})),
        r#"{"id":"cmpl-1","object":"text_completion","created":1,"model":"served","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":8}}"#
            .to_owned(),
    ]
}

#[test]
fn prompts_come_in_four_kinds() {
    let prompts = |prompt: Value| request(json!({"model": "m", "prompt": prompt, "n": 2})).prompts;
    assert_eq!(prompts(json!("a")), [Prompt::Text("a".into())]);
    assert_eq!(prompts(json!([1, 2])), [Prompt::TokenIds(vec![1, 2])]);
    assert_eq!(prompts(json!(["a", "b"])), [Prompt::Text("a".into()), Prompt::Text("b".into())]);
    assert_eq!(prompts(json!([[1], [2, 3]])), [Prompt::TokenIds(vec![1]), Prompt::TokenIds(vec![2, 3])]);
    for wrong in [
        json!(null),
        json!([]),
        json!(1),
        json!([1.5]),
        json!([-1]),
        json!([1, "a"]),
        json!([["a"]]),
        json!({}),
    ] {
        let body = json!({"model": "m", "prompt": wrong}).to_string();
        let message = Request::parse(Bytes::from(body)).map(|_| ()).expect_err("refused").to_string();
        assert!(message.contains("`prompt`"), "{wrong}: {message}");
    }
}

#[test]
fn members_are_read_and_the_rest_stays() {
    let text =
        r#"{ "model": "m", "prompt": "p", "stream": true, "logprobs": 0, "big": 12345678901234567890123 }"#;
    let read = Request::parse(Bytes::from(text)).expect("request");
    assert!(
        read.is_stream && read.asks_logprobs && !read.asks_usage && !read.asks_token_ids && !read.asks_echo
    );
    assert_eq!((read.n, read.is_constrained), (1, false));
    let edited = read.edited(&[("return_token_ids", "true".into())], &["logprobs"]).expect("object");
    assert_eq!(
        edited,
        r#"{ "model": "m", "prompt": "p", "stream": true, "big": 12345678901234567890123,"return_token_ids":true }"#
    );
    let read = request(
        json!({"model": "m", "prompt": "p", "echo": true, "return_token_ids": true, "logprobs": null,
        "guided_regex": "a+", "return_weight_versions": true, "stream_options": {"include_usage": true}}),
    );
    assert!(read.asks_echo && read.asks_token_ids && read.asks_weight_versions && read.asks_usage);
    assert!(read.is_constrained && !read.asks_logprobs);
    for (body, part) in [("{", "not JSON"), ("[]", "not a JSON object"), (r#"{"prompt":"a"}"#, "`model`")] {
        let message = Request::parse(Bytes::from(body)).map(|_| ()).expect_err("refused").to_string();
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn c20_every_choice_has_the_ids_of_its_own_prompt() {
    let asked = request(json!({"model": "m", "prompt": [[7], [8, 9]], "n": 2}));
    assert_eq!(asked.choices(), 4);
    let mut reply = Reply::default();
    for chunk in chunks() {
        reply.feed(chunk.as_bytes()).expect("readable");
    }
    assert!(reply.is_finished(asked.choices()));
    for (index, (text, ids)) in
        [("aé", [10, 11]), ("b", [20, 21]), ("c", [30, 31]), ("d", [40, 41])].into_iter().enumerate()
    {
        let index = index as u16;
        let choice = &reply.choices[&index];
        assert_eq!(choice.text, text);
        assert_eq!(choice.token_ids.as_deref(), Some(&ids[..]));
        let logprobs: Vec<Option<f32>> = ids.iter().map(|id| Some(-(*id as f32) / 8.0)).collect();
        assert_eq!(choice.logprobs.as_ref(), Some(&logprobs));
        let prompt = reply.prompt_ids_of(index, asked.n).expect("ids");
        assert_eq!(asked.prompt_of(index), Some(&Prompt::TokenIds(prompt.to_vec())));
    }
    assert_eq!(reply.choices[&0].weight_versions.as_ref().expect("spans")[0].version, "step-3");
    assert_eq!(reply.choices[&0].finish_reason.as_deref(), Some("length"));
    assert_eq!(reply.usage.expect("usage").completion_tokens, 8);
    assert_eq!(asked.prompt_of(4), None);
    assert_eq!(request(json!({"model": "m", "prompt": "a", "n": 0})).prompt_of(0), None);
    assert_eq!(reply.prompt_ids_of(0, 0), None);
}

#[test]
fn c07_c08_c12_unusable_log_probs_are_null_and_nothing_shifts() {
    let body = br#"{"choices":[{"index":0,"text":"x","finish_reason":"stop","token_ids":[1,2,3,4,5],
        "logprobs":{"token_logprobs":[NaN,null,-9999.0,-0.25]}}]}"#;
    let mut reply = Reply::default();
    reply.feed(body).expect("readable");
    assert_eq!(reply.choices[&0].logprobs.clone().expect("logprobs"), [None, None, None, Some(-0.25), None]);
}

#[test]
fn cutting_equals_deleting_from_what_is_parsed() {
    let wanted = Cut {
        token_ids: Some(Unasked::Absent),
        prompt_token_ids: Some(Unasked::Absent),
        logprobs: Some(Unasked::Null),
        weight_versions: Some(Unasked::Absent),
        usage: true,
        model: Some("asked".into()),
        ..Cut::default()
    };
    for text in chunks() {
        let result = cut(text.as_bytes(), &wanted).expect("chunk");
        let mut expected: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(result.is_dropped, expected["choices"] == json!([]), "{text}");
        expected["model"] = json!("asked");
        expected.as_object_mut().expect("object").shift_remove("usage");
        for choice in expected["choices"].as_array_mut().expect("choices") {
            let choice = choice.as_object_mut().expect("choice");
            choice.insert("logprobs".into(), Value::Null);
            for name in ["token_ids", "prompt_token_ids", "weight_versions"] {
                choice.shift_remove(name);
            }
        }
        let out = apply(text.as_bytes(), &result.edits);
        assert_eq!(String::from_utf8(out).expect("text"), expected.to_string());
    }
}

#[test]
fn an_empty_text_goes_only_where_the_engine_sends_it_for_its_ids() {
    let mut wanted = Cut { token_ids: Some(Unasked::Null), ..Cut::default() };
    let empty = r#"{"choices":[{"index":0,"text":"","token_ids":[1],"logprobs":null,"finish_reason":null}]}"#;
    let last =
        r#"{"choices":[{"index":0,"text":"","token_ids":[1],"logprobs":null,"finish_reason":"stop"}]}"#;
    assert!(!cut(empty.as_bytes(), &wanted).expect("chunk").is_dropped);
    wanted.empty_text = true;
    assert!(cut(empty.as_bytes(), &wanted).expect("chunk").is_dropped);
    assert!(!cut(last.as_bytes(), &wanted).expect("chunk").is_dropped);
    let body = r#"{"choices":[{"index":0,"text":"a","token_ids":[1],"prompt_token_ids":[2]}],"usage":{}}"#;
    let all = Cut { prompt_token_ids: Some(Unasked::Null), ..wanted };
    let edits = cut(body.as_bytes(), &all).expect("body").edits;
    assert_eq!(
        String::from_utf8(apply(body.as_bytes(), &edits)).expect("text"),
        r#"{"choices":[{"index":0,"text":"a","token_ids":null,"prompt_token_ids":null}],"usage":{}}"#
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn nothing_breaks_on_garbage(bytes in prop::collection::vec(any::<u8>(), 0..48), word in "[\\[\\]{}\",:0-9a-z ]{0,24}") {
        let _ = Request::parse(Bytes::from(bytes.clone()));
        let _ = Request::parse(Bytes::from(format!("{{\"model\":\"m\",\"prompt\":{word}}}")));
        let _ = Reply::default().feed(&bytes);
        let _ = Reply::default().feed(format!("{{\"choices\":[{{\"text\":\"a\",\"logprobs\":{word}}}]}}").as_bytes());
        let _ = cut(&bytes, &Cut::default());
    }
}
