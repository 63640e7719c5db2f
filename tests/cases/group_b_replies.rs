//! Group B, the rest: usage, schemas, names of models, event lines, Responses.

use std::collections::BTreeMap;

use lego::config::UpstreamResponses;
use lego::proxy::{Mode, ProxyOptions, SessionSampling};
use lego::record::{CallStatus, ClientApi, UpstreamKind};
use lego::upstream::Upstream;
use serde_json::{Value, json};

use crate::mock::{Mock, Part, Script};
use crate::setup::{Setup, broken, client, post, request, text as whole, timeouts};
use crate::speech::{messages, responses};
use crate::support::{chunk, done, finish, head, of_messages, stream, strict_events, text, url};

const RESPONSES: &str = include_str!("../fixtures/wire/responses_stream.sse");
const TOOLS: &str = include_str!("../fixtures/wire/anthropic_tools_stream.sse");

#[tokio::test]
async fn b14_cached_tokens_are_counted_once_on_each_side() {
    for (prompt, cached, input) in [(10_000, 9_993, 7), (10, 0, 10), (10, 12, 0)] {
        let mut last = head(json!([]));
        last["usage"] = json!({"prompt_tokens": prompt, "completion_tokens": 2, "total_tokens": prompt + 2,
            "prompt_tokens_details": {"cached_tokens": cached}});
        let parts = vec![text("hi"), finish("stop"), Part::Event(last.to_string()), done()];
        let setup = Setup::stand_alone(stream(parts)).await;
        let reply = whole(post(&url(&setup, "messages"), &messages(true)).await).await;
        let events = strict_events(&reply);
        let end = &events.iter().find(|(name, _)| name == "message_delta").expect("an end").1["usage"];
        let seen = (&end["input_tokens"], &end["cache_read_input_tokens"], &end["output_tokens"]);
        assert_eq!(seen, (&json!(input), &json!(cached), &json!(2)));
        let reply = whole(post(&url(&setup, "responses"), &responses(true)).await).await;
        let events = strict_events(&reply);
        let end = &events.last().expect("an end").1["response"]["usage"];
        let seen = (&end["input_tokens"], &end["input_tokens_details"]["cached_tokens"]);
        assert_eq!(seen, (&json!(prompt), &json!(cached)));
        for call in setup.sink.calls(2).await {
            let usage = call.usage.expect("usage");
            assert_eq!((usage.prompt_tokens, usage.cached_tokens), (prompt, Some(cached)));
        }
    }
    // And back: a server of Messages tells both apart, the record has the whole prompt.
    let told = TOOLS.split("\"usage\":").nth(1).expect("usage");
    let told: Value =
        serde_json::Deserializer::from_str(told).into_iter().next().expect("one").expect("JSON");
    let count = |name: &str| told[name].as_u64().expect("a number");
    let setup = of_messages(stream(vec![Part::Raw(TOOLS.as_bytes().to_vec())])).await;
    whole(post(&url(&setup, "messages"), &messages(true)).await).await;
    let usage = setup.sink.calls(1).await[0].usage.expect("usage");
    assert_eq!(usage.cached_tokens, Some(count("cache_read_input_tokens")));
    let parts = ["input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"];
    assert_eq!(usage.prompt_tokens, parts.into_iter().map(count).sum::<u64>());
}

#[tokio::test]
async fn b15_schemas_go_as_they_came_and_servers_tools_are_refused() {
    let schema = r##"{"$schema":"x","type":["object","null"],"properties":{"b":{"anyOf":[{"$ref":"#/$defs/q"}]},"a":{"pattern":"^(?=\\p{L})","type":"string"}},"required":["b"],"$defs":{"q":{}}}"##;
    let message = r#""max_tokens":4,"messages":[{"role":"user","content":"hi"}]"#;
    let bodies = [
        (
            "messages",
            format!(r#"{{"model":"m",{message},"tools":[{{"name":"f","input_schema":{schema}}}]}}"#),
        ),
        (
            "responses",
            format!(
                r#"{{"model":"m","input":"hi","tools":[{{"type":"function","name":"f","parameters":{schema}}}]}}"#
            ),
        ),
        (
            "chat/completions",
            format!(
                r#"{{"model":"m",{message},"tools":[{{"type":"function","function":{{"name":"f","parameters":{schema}}}}}]}}"#
            ),
        ),
    ];
    for (route, body) in bodies {
        let setup = Setup::stand_alone(Script::default()).await;
        let sent = client().post(url(&setup, route)).header("content-type", "application/json").body(body);
        assert_eq!(sent.send().await.expect("an answer").status(), 200);
        let asked = setup.mock.asked().remove(0);
        let asked = String::from_utf8_lossy(&asked.body);
        assert!(asked.contains(&format!("\"parameters\":{schema}")), "{route} {asked}");
    }
    let setup = Setup::stand_alone(Script::default()).await;
    for tool in [json!({"type": "web_search_20250305", "name": "web_search"}), json!({"name": "no_schema"})] {
        let mut body = messages(false);
        body["tools"] = json!([tool]);
        let response = post(&url(&setup, "messages"), &body).await;
        assert_eq!(response.status(), 400);
        let reply = String::from_utf8_lossy(&whole(response).await).into_owned();
        assert!(
            reply.contains("tools[0]") && reply.contains(tool["name"].as_str().expect("name")),
            "{reply}"
        );
    }
    assert_eq!((setup.mock.asked().len(), setup.sink.count()), (0, 0));
    // Codex sends hosted tools with every request: they are left out, and never sent as functions of nothing.
    let mut body = responses(false);
    body["tools"] = json!([{"type": "web_search"}, {"type": "function", "name": "f", "parameters": {}}]);
    assert_eq!(post(&url(&setup, "responses"), &body).await.status(), 200);
    let tools = setup.mock.asked()[0].json()["tools"].clone();
    assert_eq!(tools, json!([{"type": "function", "function": {"name": "f", "parameters": {}}}]));
}

#[tokio::test]
async fn b15_server_tools_are_refused_or_left_out_as_the_setting_says() {
    use lego::config::ServerTools::{Auto, Drop, Refuse};
    for (setting, of_messages, of_responses) in [(Auto, 400, 200), (Refuse, 400, 400), (Drop, 200, 200)] {
        let mut options = ProxyOptions::stand_alone();
        options.server_tools = setting;
        let setup = Setup::with(options, UpstreamKind::Vllm, Script::default()).await;
        let mut spoken = responses(false);
        spoken["tools"] =
            json!([{"type": "web_search"}, {"type": "function", "name": "f", "parameters": {}}]);
        let mut said = messages(false);
        said["tools"] = json!([{"type": "web_search_20250305", "name": "web_search"}, {"name": "f", "input_schema": {"type": "object"}}]);
        for (route, body, status) in [
            ("messages", &said, of_messages),
            ("messages/count_tokens", &said, of_messages),
            ("responses", &spoken, of_responses),
        ] {
            let reply = post(&url(&setup, route), body).await;
            assert_eq!(reply.status(), status, "{setting:?} {route}");
            let reply = String::from_utf8_lossy(&whole(reply).await).into_owned();
            assert!(
                status == 200 || reply.contains("tools[0]") && reply.contains("proxy.server_tools"),
                "{reply}"
            );
        }
        let asked = setup
            .mock
            .asked()
            .iter()
            .map(|asked| asked.json())
            .chain(setup.mock.tokenized())
            .collect::<Vec<_>>();
        let passed = [of_messages, of_messages, of_responses].iter().filter(|status| **status == 200).count();
        assert_eq!(asked.len(), passed);
        for asked in asked {
            let names: Vec<_> = asked["tools"]
                .as_array()
                .expect("tools")
                .iter()
                .map(|tool| &tool["function"]["name"])
                .collect();
            assert_eq!(names, ["f"], "{setting:?}");
        }
    }
}

#[tokio::test]
async fn b19_the_asked_model_is_echoed_and_both_names_are_recorded() {
    let model_map = BTreeMap::from([("claude-x".to_owned(), "local-model".to_owned())]);
    let mode = Mode::StandAlone { sampling: SessionSampling::PassThrough, model_map };
    let setup = Setup::with(ProxyOptions::new(mode), UpstreamKind::Vllm, Script::default()).await;
    let mut chat = request(true);
    chat["model"] = json!("claude-x");
    let mut spoken = responses(true);
    spoken["model"] = json!("claude-x");
    let calls = [("chat/completions", chat), ("messages", messages(true)), ("responses", spoken)];
    for (number, (route, body)) in calls.into_iter().enumerate() {
        let reply = whole(post(&url(&setup, route), &body).await).await;
        let reply = String::from_utf8_lossy(&reply).into_owned();
        assert!(reply.contains("\"claude-x\"") && !reply.contains("local-model"), "{reply}");
        assert_eq!(setup.mock.asked()[number].json()["model"], "local-model");
        let call = setup.sink.calls(number + 1).await.pop().expect("a call");
        assert_eq!(
            (call.model_requested.as_str(), call.model_served.as_deref()),
            ("claude-x", Some("local-model"))
        );
    }
    // A name that is not in the map is the upstream's own business.
    whole(setup.post(&request(true)).await).await;
    assert_eq!(setup.mock.asked()[3].json()["model"], "toy");
    let list = |version: Option<&'static str>| {
        let asked = client().get(url(&setup, "models"));
        let asked = version.map_or(client().get(url(&setup, "models")), |version| {
            asked.header("anthropic-version", version)
        });
        async move {
            serde_json::from_slice::<Value>(&whole(asked.send().await.expect("an answer")).await)
                .expect("JSON")
        }
    };
    assert_eq!(list(None).await["object"], "list");
    let anthropic = list(Some("2023-06-01")).await;
    let listed: Vec<_> =
        anthropic["data"].as_array().expect("a list").iter().map(|model| &model["id"]).collect();
    assert_eq!(listed, ["claude-x", "toy"], "the map's names and the upstream's");
    assert_eq!(anthropic["data"][0]["type"], "model");
    assert_eq!(anthropic["has_more"], false);
}

#[tokio::test]
async fn b20_every_data_line_has_its_event_line() {
    let setup = of_messages(Script {
        bytes_per_write: Some(7),
        ..stream(vec![Part::Raw(TOOLS.as_bytes().to_vec())])
    })
    .await;
    let reply = whole(post(&url(&setup, "messages"), &messages(true)).await).await;
    assert_eq!(String::from_utf8_lossy(&reply), TOOLS);
    // Translated: `strict_events` refuses what has no event line, or another one than its type.
    let setup = Setup::stand_alone(Script::default()).await;
    for (route, body) in [("messages", messages(true)), ("responses", responses(true))] {
        let reply = whole(post(&url(&setup, route), &body).await).await;
        assert!(strict_events(&reply).len() > 5);
    }
}

/// A recorded request of Codex.
fn codex(turn: usize) -> Value {
    let path = format!("{}/tests/fixtures/harness/codex/turn{turn}.request.json", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_slice(&std::fs::read(path).expect("fixture")).expect("JSON")
}

#[tokio::test]
async fn b21_codex_is_served_by_a_chat_upstream() {
    let tool = json!({"tool_calls": [{"index": 0, "id": "call_9", "type": "function", "function": {"name": "exec_command", "arguments": "{\"cmd\":"}}]});
    let tail = json!({"tool_calls": [{"index": 0, "function": {"arguments": "\"ls\"}"}}]});
    let parts = vec![
        chunk(json!({"reasoning": "so"}), None),
        text("I look."),
        chunk(tool, None),
        chunk(tail, None),
        finish("tool_calls"),
        done(),
    ];
    let setup = Setup::stand_alone(stream(parts)).await;
    for turn in 1..=3 {
        let request = codex(turn);
        let reply = whole(post(&url(&setup, "responses"), &request).await).await;
        let events = strict_events(&reply);
        let numbers: Vec<_> = events.iter().map(|(_, data)| data["sequence_number"].as_u64()).collect();
        assert_eq!(numbers, (0..events.len() as u64).map(Some).collect::<Vec<_>>());
        let mut names: Vec<&str> =
            events.iter().map(|(name, _)| name.trim_start_matches("response.")).collect();
        names.dedup();
        let of_a_call = [
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
            "completed",
        ];
        assert_eq!(names[..3], ["created", "in_progress", "output_item.added"]);
        assert_eq!(names[names.len() - 5..], of_a_call);

        // The developer speaks as the system, and each call has its result.
        let asked = setup.mock.asked()[turn - 1].json();
        let turns = asked["messages"].as_array().expect("messages");
        assert!(turns.iter().all(|turn| turn["role"] != "developer"));
        assert_eq!(turns[0]["role"], "system");
        let items = request["input"].as_array().expect("items");
        let of = |kind: &str| {
            items
                .iter()
                .filter(|item| item["type"] == kind)
                .map(|item| item["call_id"].clone())
                .collect::<Vec<_>>()
        };
        let calls: Vec<Value> = turns
            .iter()
            .filter_map(|turn| turn["tool_calls"].as_array())
            .flatten()
            .map(|call| call["id"].clone())
            .collect();
        let results: Vec<Value> = turns
            .iter()
            .filter(|turn| turn["role"] == "tool")
            .map(|turn| turn["tool_call_id"].clone())
            .collect();
        assert_eq!((calls, results), (of("function_call"), of("function_call_output")));
        let call = setup.sink.calls(turn).await.pop().expect("a call");
        assert_eq!((call.status, call.client_api), (CallStatus::Ok, ClientApi::OpenaiResponses));
        assert_eq!(call.tool_calls.expect("calls")[0].arguments, "{\"cmd\":\"ls\"}");
    }
}

#[tokio::test]
async fn b21_codex_passes_to_an_upstream_that_speaks_responses() {
    let script = Script { has_responses: true, ..stream(vec![Part::Raw(RESPONSES.as_bytes().to_vec())]) };
    let mock = Mock::start(script).await;
    let upstream = Upstream::http(&mock.url(), UpstreamKind::Openai, None, timeouts()).expect("upstream");
    let upstream = upstream.with_responses(UpstreamResponses::Auto);
    let setup = Setup::in_front_of(upstream, ProxyOptions::stand_alone(), mock).await;
    for turn in 1..=3 {
        let request = codex(turn);
        let reply = whole(post(&url(&setup, "responses"), &request).await).await;
        let direct = whole(post(&format!("{}/v1/responses", setup.mock.url()), &request).await).await;
        assert_eq!((&reply, &reply[..]), (&direct, RESPONSES.as_bytes()));
        let [ours, theirs] = &setup.mock.asked()[2 * (turn - 1)..] else { panic!("two requests") };
        assert_eq!((ours.uri.path(), &ours.body), ("/v1/responses", &theirs.body));
        let call = setup.sink.calls(turn).await.pop().expect("a call");
        assert_eq!((call.status, call.upstream_api), (CallStatus::Ok, ClientApi::OpenaiResponses));
        assert_eq!(call.tool_calls.expect("calls")[0].arguments, "{\"command\": \"ls -la\"}");
        assert!(!call.trainable);
    }
}

#[tokio::test]
async fn b21_a_response_ends_incomplete_or_failed_as_its_reply_did() {
    let setup = Setup::stand_alone(stream(vec![text("half"), finish("length"), done()])).await;
    let reply = whole(post(&url(&setup, "responses"), &codex(1)).await).await;
    let (name, data) = strict_events(&reply).pop().expect("an end");
    assert_eq!(name, "response.incomplete");
    assert_eq!(data["response"]["incomplete_details"]["reason"], "max_output_tokens");
    assert_eq!(setup.sink.calls(1).await[0].finish_reason.as_deref(), Some("length"));

    let error = r#"{"error":{"message":"engine died","type":"InternalServerError","code":500}}"#;
    let setup = Setup::stand_alone(stream(vec![text("half"), Part::Event(error.to_owned())])).await;
    let reply = broken(post(&url(&setup, "responses"), &codex(1)).await).await;
    let (name, data) = strict_events(&reply).pop().expect("an end");
    assert_eq!((name.as_str(), &data["response"]["status"]), ("response.failed", &json!("failed")));
    assert!(data["response"]["error"]["message"].as_str().expect("text").contains("engine died"));
    let call = setup.sink.calls(1).await.remove(0);
    assert_eq!(call.status, CallStatus::UpstreamError);
    assert!(call.error.expect("why").contains("engine died"));

    let mut next = codex(1);
    next["previous_response_id"] = json!("resp_7");
    let response = post(&url(&setup, "responses"), &next).await;
    assert_eq!(response.status(), 400);
    let reply = String::from_utf8_lossy(&whole(response).await).into_owned();
    assert!(reply.contains("previous_response_id") && reply.contains("resp_7"), "{reply}");
    assert_eq!(setup.mock.asked().len(), 1);
}
