use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::protocol::chat::Unasked;
use crate::protocol::json::apply;

fn request(body: &Value) -> Request {
    Request::parse(Bytes::from(body.to_string())).expect("a request")
}

fn refused(body: &Value) -> String {
    Request::parse(Bytes::from(body.to_string())).map(|_| ()).expect_err("refused").to_string()
}

#[test]
fn prompts_and_samples_are_counted() {
    let both = [Prompt::TokenIds(vec![1, 2]), Prompt::TokenIds(vec![3])];
    let read = request(&json!({"input_ids": [[1, 2], [3]], "sampling_params": {"n": 2}, "stream": true}));
    assert_eq!((read.prompts.as_slice(), read.n, read.choices(), read.is_stream), (&both[..], 2, 4, true));
    let one = request(&json!({"text": "a", "input_ids": null, "model": "m"}));
    assert_eq!((one.choices(), one.model.as_deref()), (1, Some("m")));
    assert_eq!(one.prompts, [Prompt::Text("a".into())]);
    for (embeddings, count) in [(json!([[0.5], [0.25]]), 1), (json!([[[0.5]], [[0.25]]]), 2), (json!([]), 1)]
    {
        let read = request(&json!({"input_embeds": embeddings}));
        assert_eq!((read.prompts.len(), read.choices()), (0, count));
    }
    for (body, part) in [
        (json!({}), "`text`"),
        (json!({"text": null}), "`text`"),
        (json!({"text": 3}), "`text`"),
        (json!({"text": "a", "sampling_params": 3}), "sampling_params"),
        (json!({"text": "a", "sampling_params": [3]}), "sampling_params"),
        (json!({"text": "a", "sampling_params": []}), "sampling_params"),
    ] {
        assert!(refused(&body).contains(part), "{body}");
    }
}

#[test]
fn what_bears_on_the_capture_is_read() {
    let asks = |value: Value| request(&json!({"text": "a", "return_logprob": value})).asks_logprobs;
    assert!(asks(json!(true)) && asks(json!([true, false])));
    assert!(!asks(json!(false)) && !asks(Value::Null));
    let guided = |sampling: Value| request(&json!({"text": "a", "sampling_params": sampling})).is_constrained;
    assert!(guided(json!({"regex": "a+"})) && guided(json!([{}, {"json_schema": "{}"}])));
    assert!(!guided(json!({"regex": null, "temperature": 1})));
}

#[test]
fn a_sampling_parameter_is_one_only_if_it_is_the_same_for_all_prompts() {
    let of = |sampling: Value| {
        request(&json!({"text": ["a", "b"], "sampling_params": sampling})).sampling("top_p")
    };
    assert_eq!(of(json!({"top_p": 0.5})), Some(json!(0.5)));
    assert_eq!(of(json!([{"top_p": 0.5}, {"top_p": 0.5}])), Some(json!(0.5)));
    assert_eq!(of(json!([{"top_p": 0.5}, {"top_p": 0.6}])), None);
    assert_eq!(of(json!([{"top_p": 0.5}, {}])), None);
    assert_eq!(of(Value::Null), None);
}

#[test]
fn edits_reach_every_objects_parameters_and_leave_all_other_bytes() {
    let edited = |text: &'static str| {
        let request = Request::parse(Bytes::from(text)).expect("a request");
        let set = [("temperature", "1.0".to_owned())];
        let body = request.edited((&[("stream", "true".into())], &["x"]), (&set, &["logit_bias"]));
        String::from_utf8(body.expect("an object").to_vec()).expect("text")
    };
    assert_eq!(
        edited(
            r#"{ "text": "é\u00e9", "x": 1, "sampling_params": {"temperature": 0.70, "logit_bias": {}, "n":1 } }"#
        ),
        r#"{ "text": "é\u00e9", "sampling_params": {"temperature": 1.0, "n":1 },"stream":true }"#
    );
    assert_eq!(
        edited(r#"{"sampling_params": [ {"n":1}, {} ],"text":["a","b"],"stream":false}"#),
        r#"{"sampling_params": [ {"n":1,"temperature":1.0}, {"temperature":1.0} ],"text":["a","b"],"stream":true}"#
    );
    let bare = r#"{"text":"a","stream":true,"sampling_params":{"temperature":1.0}}"#;
    assert_eq!(edited(r#"{"text":"a"}"#), bare);
    assert_eq!(edited(r#"{"text":"a","stream":1,"sampling_params":null}"#), bare);
}

#[test]
fn only_what_was_asked_for_is_cut() {
    let text = r#"{"text": "a", "output_ids": [1], "prompt_token_ids": [2], "meta_info": {"id": "x", "input_token_logprobs": [],
        "output_token_logprobs": [[-Infinity,1,null]], "output_token_logprobs_length": 1, "output_token_sampling_logprobs": [],
        "completion_tokens": 1, "routed_experts": "AAAA"}}"#;
    let out = |text: &str, wanted: &Cut| {
        let edits = cut(text.as_bytes(), wanted).expect("an output").edits;
        String::from_utf8(apply(text.as_bytes(), &edits)).expect("text")
    };
    assert_eq!(out(text, &Cut::default()), text);
    let logprobs = Cut { logprobs: Some(Unasked::Absent), ..Cut::default() };
    let all = Cut {
        prompt_token_ids: Some(Unasked::Absent),
        routed_experts: Some(Unasked::Absent),
        ..logprobs.clone()
    };
    let expected = r#"{"text": "a", "output_ids": [1], "meta_info": {"id": "x", "output_token_sampling_logprobs": [],
        "completion_tokens": 1}}"#;
    assert_eq!(out(text, &all), expected);
    assert_eq!(out(&format!("[{text}, {text}]"), &all), format!("[{expected}, {expected}]"));
    let kept = out(text, &logprobs);
    assert!(
        kept.contains("routed_experts") && kept.contains("prompt_token_ids") && !kept.contains("Infinity")
    );
    for other in ["3", "", "[3]", "{"] {
        assert!(cut(other.as_bytes(), &all).is_err(), "{other}");
    }
    assert_eq!(out(r#"{"error":{"message":"x"}}"#, &all), r#"{"error":{"message":"x"}}"#);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn nothing_breaks_on_garbage(bytes in prop::collection::vec(any::<u8>(), 0..48), word in "[\\[\\]{}\",:0-9a-z ]{0,24}") {
        let wanted = Cut { logprobs: Some(Unasked::Absent), ..Cut::default() };
        let _ = Request::parse(Bytes::from(bytes.clone()));
        let _ = cut(&bytes, &wanted);
        let _ = cut(format!("{{\"meta_info\":{word}}}").as_bytes(), &wanted);
        for name in ["text", "input_ids", "input_embeds", "sampling_params"] {
            let text = format!("{{\"text\":\"a\",\"{name}\":{word}}}");
            if let Ok(request) = Request::parse(Bytes::from(text)) {
                let set = [("n", "1".to_owned())];
                let body = request.edited((&[], &[]), (&set, &["stop"])).expect("an object");
                prop_assert_eq!(Request::parse(body).expect("a request").n, 1);
            }
        }
    }
}
