use bytes::Bytes;
use serde_json::json;

use super::*;
use crate::record::LogprobSemantics;

const WANTED: Wanted = Wanted { token_ids: true, logprobs: true };
const PINNED: SamplingPlan = SamplingPlan::Pinned { temperature: 1.0, seed: 7 };

fn asking(plan: SamplingPlan, routing: bool) -> Asking {
    Asking { wanted: WANTED, routing, plan }
}

fn completions(body: &Value) -> completions::Request {
    completions::Request::parse(Bytes::from(body.to_string())).expect("a request")
}

fn sent(prepared: &Prepared) -> Value {
    serde_json::from_slice(&prepared.body).expect("JSON")
}

#[test]
fn a_completions_request_becomes_a_native_one() {
    let request = completions(&json!({
        "model": "m", "prompt": "a", "stream": true, "max_tokens": 5, "min_tokens": 1, "seed": 3, "temperature": 0.7,
        "stop": ["x"], "logit_bias": {"1": 2}, "n": 2, "logprobs": null, "user": "u", "rid": "r1", "top_k": null,
    }));
    let prepared = of_completions(asking(SamplingPlan::PassThrough, false), &request, None);
    let expected = json!({
        "text": "a",
        "sampling_params": {"temperature": 0.7, "max_new_tokens": 5, "min_new_tokens": 1, "sampling_seed": 3, "n": 2,
            "stop": ["x"], "logit_bias": {"1": 2}},
        "stream": true, "return_logprob": true, "logprob_start_len": -1, "return_prompt_token_ids": true, "rid": "r1",
    });
    assert_eq!(sent(&prepared), expected);
    assert!(prepared.upstream_is_stream && prepared.cut.is_nothing());
    let sampling = &prepared.sampling_sent;
    assert_eq!(
        (sampling.temperature, sampling.seed, sampling.max_tokens, sampling.n),
        (Some(0.7), Some(3), Some(5), Some(2))
    );
    assert_eq!((sampling.top_p, sampling.top_k), (None, None));
    assert_eq!(prepared.sampling_requested.max_tokens, Some(5));
    // `min_tokens` and `logit_bias`: nobody knows of which distribution the log-probs are.
    assert_eq!((prepared.is_shaped, prepared.logprob_semantics), (true, LogprobSemantics::Unknown));
}

#[test]
fn law_12_what_changes_the_distribution_beside_its_parameters_is_told() {
    let pass = asking(SamplingPlan::PassThrough, false);
    let told = |prepared: &Prepared| (prepared.is_shaped, prepared.logprob_semantics);
    let plain = (false, LogprobSemantics::TempScaled);
    let shaped = (true, LogprobSemantics::Unknown);
    let pinned = (false, LogprobSemantics::RawT1);
    let own = |name: &str, value: Value| completions(&json!({"model": "m", "prompt": [1], name: value}));
    assert_eq!(told(&of_completions(pass, &own("temperature", json!(0.5)), None)), plain);
    for name in ["logit_bias", "min_tokens", "ignore_eos", "custom_params", "custom_logit_processor"] {
        assert_eq!(told(&of_completions(pass, &own(name, Value::Null), None)), plain, "{name}");
        assert_eq!(told(&of_completions(pass, &own(name, json!(1)), None)), shaped, "{name}");
        assert_eq!(
            told(&of_completions(asking(PINNED, false), &own(name, json!(1)), None)),
            pinned,
            "{name}"
        );
    }
    for name in UNPINNED {
        for (value, expected) in [("null", plain), ("1", shaped)] {
            let text = format!(
                r#"{{"input_ids":[[1],[2]],"sampling_params":[{{"temperature":0.5}},{{"temperature":0.5,"{name}":{value}}}]}}"#
            );
            assert_eq!(told(&of_native(pass, &native(&text)).expect("an object")), expected, "{name}");
            let prepared = of_native(asking(PINNED, false), &native(&text)).expect("an object");
            assert_eq!(told(&prepared), pinned, "{name}");
        }
    }
    for (value, expected) in [("null", plain), ("\"x\"", shaped)] {
        let text = format!(r#"{{"input_ids":[1],"custom_logit_processor":{value}}}"#);
        assert_eq!(told(&of_native(pass, &native(&text)).expect("an object")), expected, "{value}");
    }
}

#[test]
fn law_12_pinned_sampling_is_sent_in_full() {
    let request = completions(&json!({
        "model": "m", "prompt": [1, 2], "temperature": 0.2, "top_p": 0.5, "seed": 3, "logit_bias": {"1": 2},
        "min_tokens": 4, "ignore_eos": true, "custom_params": {}, "custom_logit_processor": "x", "stop_token_ids": [5],
    }));
    let prepared = of_completions(asking(PINNED, true), &request, None);
    let expected = json!({
        "input_ids": [1, 2],
        "sampling_params": {"max_new_tokens": 16, "stop_token_ids": [5], "temperature": 1.0, "top_p": 1.0, "top_k": -1,
            "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "sampling_seed": 7},
        "stream": false, "return_logprob": true, "logprob_start_len": -1, "return_routed_experts": true,
    });
    assert_eq!(sent(&prepared), expected);
    assert!(super::super::dialect::is_untruncated(&prepared.sampling_sent));
    assert_eq!(prepared.sampling_sent.seed, Some(7));
    assert_eq!(prepared.sampling_requested.top_p, Some(0.5));
    assert_eq!(prepared.logprob_semantics, LogprobSemantics::RawT1);
    assert_eq!(prepared.sent_prompts, [Prompt::TokenIds(vec![1, 2])]);
}

#[test]
fn prompts_go_as_text_or_as_ids_and_one_of_a_list_alone() {
    let plan = asking(SamplingPlan::PassThrough, false);
    for (prompt, name, expected) in [
        (json!("a"), "text", json!("a")),
        (json!(["a"]), "text", json!("a")),
        (json!(["a", "b"]), "text", json!(["a", "b"])),
        (json!([1, 2]), "input_ids", json!([1, 2])),
        (json!([1]), "input_ids", json!([1])),
        (json!([[1]]), "input_ids", json!([1])),
        (json!([[1], [2]]), "input_ids", json!([[1], [2]])),
    ] {
        let request = completions(&json!({"model": "m", "prompt": prompt}));
        let body = sent(&of_completions(plan, &request, None));
        assert_eq!(body[name], expected, "{prompt}");
        assert_eq!(body.get("return_prompt_token_ids").is_some(), name == "text", "{prompt}");
    }
    // What the upstream's tokenizer told stands for the text.
    let request = completions(&json!({"model": "m", "prompt": ["a", "b"]}));
    let prepared = of_completions(plan, &request, Some(b"[[1],[2,3]]"));
    let body = sent(&prepared);
    assert_eq!((&body["input_ids"], body.get("text")), (&json!([[1], [2, 3]]), None));
    assert_eq!(body.get("return_prompt_token_ids"), None);
    assert_eq!(prepared.sent_prompts, [Prompt::TokenIds(vec![1]), Prompt::TokenIds(vec![2, 3])]);
}

#[test]
fn what_the_client_asks_to_see_is_asked_for_it_too() {
    let nothing = Wanted { token_ids: false, logprobs: false };
    let asking = Asking { wanted: nothing, routing: false, plan: SamplingPlan::PassThrough };
    let body = |more: Value| {
        let mut request = json!({"model": "m", "prompt": [1]});
        request.as_object_mut().expect("object").extend(more.as_object().expect("object").clone());
        sent(&of_completions(asking, &completions(&request), None))
    };
    assert_eq!(body(json!({})).get("return_logprob"), None);
    let with = body(
        json!({"logprobs": 3, "return_token_ids": true, "return_routed_experts": true, "routed_experts_start_len": 2}),
    );
    assert_eq!((&with["return_logprob"], &with["top_logprobs_num"]), (&json!(true), &json!(3)));
    assert_eq!(
        (&with["return_text_in_logprobs"], &with["return_prompt_token_ids"]),
        (&json!(true), &json!(true))
    );
    assert_eq!(
        (&with["return_routed_experts"], &with["routed_experts_start_len"]),
        (&json!(true), &json!(2))
    );
    assert_eq!(body(json!({"logprobs": 0}))["top_logprobs_num"], 0);
}

#[test]
fn what_only_the_servers_own_endpoint_can_do_stays_there() {
    let can = |body: Value, model: &str| {
        let mut request = json!({"model": "m", "prompt": "a"});
        request.as_object_mut().expect("object").extend(body.as_object().expect("object").clone());
        is_expressible(&completions(&request), model)
    };
    assert!(can(json!({"echo": false, "suffix": null, "response_format": {"type": "text"}}), "m"));
    for body in [
        json!({"echo": true}),
        json!({"suffix": "x"}),
        json!({"prompt": ["a", [1]]}),
        json!({"response_format": {"type": "json_object"}}),
        json!({"return_hidden_states": true}),
        json!({"return_meta_info": true}),
    ] {
        assert!(!can(body.clone(), "m"), "{body}");
    }
    assert!(!can(json!({}), "base:adapter"));
}

fn native(text: &str) -> generate::Request {
    generate::Request::parse(Bytes::copy_from_slice(text.as_bytes())).expect("a request")
}

#[test]
fn a_native_request_keeps_its_bytes_and_gets_what_is_to_be_captured() {
    let plan = asking(SamplingPlan::PassThrough, true);
    let prepared = of_native(plan, &native(r#"{ "text": "a",  "sampling_params": {"temperature": 0.70} }"#))
        .expect("an object");
    assert_eq!(
        prepared.body,
        r#"{ "text": "a",  "sampling_params": {"temperature": 0.70},"return_logprob":true,"return_prompt_token_ids":true,"return_routed_experts":true }"#
    );
    let absent = Some(Unasked::Absent);
    let Cut { logprobs, prompt_token_ids, routed_experts, .. } = prepared.cut;
    assert_eq!((logprobs, prompt_token_ids, routed_experts), (absent, absent, absent));
    assert_eq!(prepared.sampling_sent.temperature, Some(0.7));
    // Who asks for all of it has its request untouched.
    let text =
        r#"{"input_ids":[1], "return_logprob": true, "logprob_start_len": 0, "return_routed_experts":true}"#;
    let prepared = of_native(plan, &native(text)).expect("an object");
    assert_eq!((prepared.body.as_ref(), prepared.cut.is_nothing()), (text.as_bytes(), true));
    // A start that was left over must not have the whole prompt scored for lego.
    let text = r#"{"input_ids":[1],"logprob_start_len":0,"return_routed_experts":true}"#;
    let prepared = of_native(plan, &native(text)).expect("an object");
    assert_eq!(sent(&prepared)["logprob_start_len"], -1);
}

#[test]
fn law_12_pinned_sampling_of_a_native_request_is_sent_in_full() {
    let text = r#"{"input_ids":[[1],[2]],"sampling_params":[{"top_p":0.5,"logit_bias":{}},{"ignore_eos":true,"max_new_tokens":9}],"custom_logit_processor":"x"}"#;
    let prepared = of_native(asking(PINNED, false), &native(text)).expect("an object");
    let body = sent(&prepared);
    for sampling in body["sampling_params"].as_array().expect("a list") {
        for (name, value) in
            [("temperature", json!(1.0)), ("top_p", json!(1.0)), ("top_k", json!(-1)), ("min_p", json!(0.0))]
        {
            assert_eq!(sampling[name], value, "{name}");
        }
        assert_eq!((sampling.get("logit_bias"), sampling.get("ignore_eos")), (None, None));
        assert_eq!(sampling["sampling_seed"], 7);
    }
    assert_eq!(
        (&body["sampling_params"][1]["max_new_tokens"], body.get("custom_logit_processor")),
        (&json!(9), None)
    );
    assert!(super::super::dialect::is_untruncated(&prepared.sampling_sent));
    assert_eq!(prepared.sampling_sent.max_tokens, None);
    assert_eq!(prepared.sampling_requested.top_p, None);
}
