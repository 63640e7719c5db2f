//! Law 5: the client gets the bytes that the engine would have sent without lego.

use lego::proxy::ProxyOptions;
use lego::record::UpstreamKind;
use lego::upstream::Upstream;
use serde_json::{Value, json};

use crate::mock::{Mock, Part, Script, Style};
use crate::setup::{Setup, post, request, text, timeouts};

async fn direct(mock: &Mock, body: &Value) -> bytes::Bytes {
    text(post(&format!("{}/v1/chat/completions", mock.url()), body).await).await
}

fn scripts(style: Style) -> Vec<Script> {
    let tools = || Script {
        tokens: vec![
            ("<tool_call>", -0.1),
            ("view", -0.2),
            ("{\"path\":", -0.3),
            (" \"a\"}", -0.4),
            ("<|im_end|>", -0.5),
        ],
        has_tool_call: true,
        ..Script::default()
    };
    let all = vec![
        Script::default(),
        Script { tokens_per_chunk: 4, ..Script::default() },
        Script { bytes_per_write: Some(1), ..Script::default() },
        Script { bytes_per_write: Some(7), ..tools() },
        tools(),
        Script { gives_ids: false, gives_versions: false, ..Script::default() },
    ];
    all.into_iter().map(|script| Script { style, ..script }).collect()
}

#[tokio::test]
async fn a01_a_client_that_asks_for_nothing_gets_the_bytes_of_a_direct_call() {
    for script in scripts(Style::Vllm) {
        let setup = Setup::stand_alone(script).await;
        for (stream, n) in [(false, 1), (true, 1), (false, 2), (true, 2)] {
            let mut body = request(stream);
            body["n"] = json!(n);
            let proxied = setup.post(&body).await;
            assert!(proxied.headers().contains_key("x-lego-call-id"));
            assert_eq!(text(proxied).await, direct(&setup.mock, &body).await);
            let asked = setup.mock.asked();
            let sent = asked[asked.len() - 2].json();
            assert_eq!(sent["return_token_ids"], true);
            assert_eq!(sent["logprobs"], true);
        }
    }
}

#[tokio::test]
async fn the_embedded_engine_in_the_process_is_relayed_as_faithfully() {
    for script in scripts(Style::Vllm) {
        let script = Script { is_quiet: true, ..script };
        let mock = Mock::start(script.clone()).await;
        let upstream = Upstream::in_process(mock.router(), timeouts());
        let setup = Setup::in_front_of(upstream, ProxyOptions::stand_alone(), mock).await;
        for stream in [false, true] {
            let body = request(stream);
            let proxied = text(setup.post(&body).await).await;
            assert_eq!(proxied, direct(&setup.mock, &body).await);
        }
    }
}

#[tokio::test]
async fn a_call_to_which_nothing_is_added_goes_through_untouched_both_ways() {
    let setup = Setup::stand_alone(Script::default()).await;
    for stream in [false, true] {
        let mut body = request(stream);
        for name in ["logprobs", "return_token_ids", "return_weight_versions"] {
            body[name] = json!(true);
        }
        if stream {
            body["stream_options"] = json!({"include_usage": true});
        }
        let proxied = text(setup.post(&body).await).await;
        assert_eq!(proxied, direct(&setup.mock, &body).await);
        let asked = setup.mock.asked();
        assert_eq!(asked[asked.len() - 2].body, asked[asked.len() - 1].body);
    }
}

#[tokio::test]
async fn what_the_client_asked_for_stays_and_only_the_rest_goes() {
    let setup = Setup::stand_alone(Script::default()).await;
    for stream in [false, true] {
        for asked in [vec!["logprobs"], vec!["return_token_ids"], vec!["return_token_ids", "logprobs"]] {
            let mut body = request(stream);
            for name in asked {
                body[name] = json!(true);
            }
            let proxied = text(setup.post(&body).await).await;
            assert_eq!(proxied, direct(&setup.mock, &body).await, "{body}");
        }
    }
}

#[tokio::test]
async fn a06_a_usage_event_reaches_only_the_client_that_asked_for_it() {
    let setup = Setup::stand_alone(Script::default()).await;
    let mut records = 0;
    for options in [
        None,
        Some(json!(null)),
        Some(json!({})),
        Some(json!({"include_usage": false})),
        Some(json!({"include_usage": true})),
    ] {
        let mut body = request(true);
        if let Some(options) = options.clone() {
            body["stream_options"] = options;
        }
        let proxied = text(setup.post(&body).await).await;
        assert_eq!(proxied, direct(&setup.mock, &body).await);
        records += 1;
        let calls = setup.sink.calls(records).await;
        assert_eq!(calls[records - 1].usage.expect("usage").completion_tokens, 5);
    }
}

#[tokio::test]
async fn a06_usage_on_other_chunks_is_read_and_cut_too() {
    let on_every_chunk = |parts: Vec<Part>| {
        let last = parts.len() - 3;
        let mut out = Vec::new();
        for (index, part) in parts.into_iter().enumerate() {
            let Part::Event(data) = part else { unreachable!("events only") };
            if !data.contains("\"choices\":[{") {
                out.extend((data == "[DONE]").then_some(Part::Event(data)));
                continue;
            }
            let usage = if index == last {
                json!({"prompt_tokens": 4, "completion_tokens": 5, "total_tokens": 9})
            } else {
                Value::Null
            };
            let body = data.strip_suffix('}').expect("object");
            out.push(Part::Event(format!("{body},\"usage\":{usage}}}")));
        }
        out
    };
    let script = Script { spoil: Some(on_every_chunk), ..Script::default() };
    let setup = Setup::stand_alone(script).await;
    let proxied = text(setup.post(&request(true)).await).await;
    assert!(!String::from_utf8_lossy(&proxied).contains("usage"));
    let calls = setup.sink.calls(1).await;
    assert_eq!(calls[0].usage.expect("usage").completion_tokens, 5);
    assert_eq!(calls[0].finish_reason.as_deref(), Some("stop"));
}

#[tokio::test]
async fn a09_a02_comments_and_other_line_ends_pass_as_they_are() {
    let with_comments = |parts: Vec<Part>| {
        let mut out = vec![Part::Raw(b": PROCESSING\n\n".to_vec())];
        for part in parts {
            let Part::Event(data) = part else { unreachable!("events only") };
            out.push(Part::Raw(format!("data: {data}\r\n\r\n").into_bytes()));
            out.push(Part::Raw(b": PROCESSING\r\n\r\n".to_vec()));
        }
        out
    };
    let script = Script { spoil: Some(with_comments), bytes_per_write: Some(3), ..Script::default() };
    let setup = Setup::stand_alone(script).await;
    let body = request(true);
    let proxied = text(setup.post(&body).await).await;
    // The direct call has one event less between the comments: the usage that lego asked for.
    let direct = String::from_utf8(direct(&setup.mock, &body).await.to_vec()).expect("text");
    let extra = ": PROCESSING\r\n\r\n";
    let proxied = String::from_utf8(proxied.to_vec()).expect("text");
    assert_eq!(proxied.matches(extra).count(), direct.matches(extra).count() + 1);
    assert_eq!(proxied.replace(extra, ""), direct.replace(extra, ": PROCESSING\r\n\r\n").replace(extra, ""));
    assert_eq!(setup.sink.calls(1).await[0].text.as_deref(), Some("Hello 北京🌍"));
}

#[tokio::test]
async fn in_a_training_session_the_asked_name_is_echoed_and_the_policy_answers() {
    let setup = Setup::trainer(Script::default()).await;
    let session = setup.proxy.open_session(crate::setup::spec("s1")).expect("open");
    let url = format!("http://{}/sessions/s1/v1/chat/completions", setup.address);
    for stream in [false, true] {
        let mut body = request(stream);
        body["model"] = json!("gpt-\"anything\"");
        let reply = text(post(&url, &body).await).await;
        let reply = String::from_utf8_lossy(&reply).into_owned();
        assert!(reply.contains(r#"gpt-\"anything\""#) && !reply.contains("policy"), "{reply}");
    }
    assert!(setup.mock.asked().iter().all(|asked| asked.json()["model"] == "policy"));
    let result = session.close().await;
    assert!(result.calls.iter().all(|call| call.model_requested == "gpt-\"anything\""));
    assert!(result.calls.iter().all(|call| call.model_served.as_deref() == Some("policy")));
}

#[tokio::test]
async fn unwanted_reasoning_is_asked_for_and_cut_out() {
    let setup = Setup::stand_alone(Script::default()).await;
    let mut body = request(false);
    body["include_reasoning"] = json!(false);
    let reply: Value = serde_json::from_slice(&text(setup.post(&body).await).await).expect("JSON");
    assert!(reply["choices"][0]["message"].get("reasoning").is_none());
    assert_eq!(setup.mock.asked()[0].json()["include_reasoning"], true);
}

#[tokio::test]
async fn a_plain_gateway_is_served_too() {
    let options = ProxyOptions::stand_alone();
    let script = Script { gives_ids: false, style: Style::Absent, ..Script::default() };
    let setup = Setup::with(options, UpstreamKind::Openai, script).await;
    for stream in [false, true] {
        let body = request(stream);
        let proxied = text(setup.post(&body).await).await;
        assert_eq!(proxied, direct(&setup.mock, &body).await);
    }
}
