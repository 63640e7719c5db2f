//! The token-in relay: prompts that lego renders, replies that it reads from their ids, lineages that do not break.

mod alike;
mod configured;
mod count;
mod engine;
mod interrupted;
mod lost;
mod models;
mod resumed;
mod routed;
mod streams;

use std::sync::Arc;

use lego::config::TokenHistory;
use lego::proxy::{Proxy, ProxyOptions, Renderer, SessionHandle};
use lego::record::{Call, ClientApi, IdsSource, UpstreamKind};
use lego::text::parsers::ReasoningForm;
use lego::text::{ChatInput, ChatTemplate, encode_chat};
use lego::trajectory::lineages;
use lego::upstream::Upstream;
use serde_json::{Value, json};
use tokio::io::AsyncBufReadExt;

use crate::mock::{Mock, Script};
use crate::setup::{Setup, post, spec, text, timeouts};
use crate::speech;
use engine::{Engine, Says, folder, tokenizer};

struct World {
    engine: Engine,
    setup: Setup,
    session: SessionHandle,
}

/// Of the bundled model.
fn renderer() -> Arc<Renderer> {
    Arc::new(Renderer::load(folder(), None, None, TokenHistory::Sampled).expect("loads"))
}

async fn world_with(kind: UpstreamKind, history: TokenHistory) -> World {
    let renderer = Renderer::load(folder(), None, None, history).expect("loads");
    world_of(kind, renderer, ProxyOptions::trainer("policy")).await
}

async fn world_of(kind: UpstreamKind, renderer: Renderer, mut options: ProxyOptions) -> World {
    let engine = Engine::start(kind == UpstreamKind::Sglang).await;
    options.renderer = Some(Arc::new(renderer));
    let upstream = Upstream::http(&engine.url, kind, None, timeouts()).expect("upstream");
    let setup = Setup::in_front_of(upstream, options, Mock::in_process(Script::default())).await;
    let session = setup.proxy.open_session(spec("s1")).expect("open");
    World { engine, setup, session }
}

async fn world(kind: UpstreamKind) -> World {
    world_with(kind, TokenHistory::Sampled).await
}

impl World {
    /// A chat request's reply: its text or its stream.
    async fn ask(&self, body: &Value) -> String {
        self.ask_at("chat/completions", body).await
    }

    async fn ask_at(&self, route: &str, body: &Value) -> String {
        let url = format!("http://{}/sessions/s1/v1/{route}", self.setup.address);
        String::from_utf8(text(post(&url, body).await).await.to_vec()).expect("UTF-8")
    }

    async fn calls(self) -> Vec<Arc<Call>> {
        self.session.close().await.calls
    }
}

fn chat(messages: Value, stream: bool) -> Value {
    json!({"model": "m", "messages": messages, "stream": stream, "tools": tools()})
}

fn tools() -> Value {
    json!([{"type": "function", "function": {"name": "read", "parameters":
        {"type": "object", "properties": {"path": {"type": "string"}}}}}])
}

/// The message of a whole reply, or of a stream put together.
fn message(reply: &str, stream: bool) -> (Value, Value) {
    if !stream {
        let reply: Value = serde_json::from_str(reply).expect("JSON");
        let choice = &reply["choices"][0];
        return (choice["message"].clone(), choice["finish_reason"].clone());
    }
    let (mut content, mut finish) = (String::new(), Value::Null);
    let mut calls: Vec<Value> = Vec::new();
    for line in reply.lines().filter_map(|line| line.strip_prefix("data: ")) {
        if line == "[DONE]" {
            continue;
        }
        let chunk: Value = serde_json::from_str(line).expect("JSON");
        for choice in chunk["choices"].as_array().unwrap_or_else(|| panic!("choices in {reply}")) {
            content += choice["delta"]["content"].as_str().unwrap_or_default();
            for part in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
                let index = part["index"].as_u64().expect("index") as usize;
                if index == calls.len() {
                    calls.push(part.clone());
                } else {
                    let so_far =
                        calls[index]["function"]["arguments"].as_str().unwrap_or_default().to_owned();
                    let more = part["function"]["arguments"].as_str().unwrap_or_default();
                    calls[index]["function"]["arguments"] = format!("{so_far}{more}").into();
                }
            }
            if !choice["finish_reason"].is_null() {
                finish = choice["finish_reason"].clone();
            }
        }
    }
    assert!(reply.ends_with("data: [DONE]\n\n"), "{reply}");
    let mut message = json!({"role": "assistant", "content": content});
    if !calls.is_empty() {
        message["tool_calls"] = Value::Array(calls);
    }
    (message, finish)
}

fn all_ids(call: &Call) -> Vec<u32> {
    let prompt = call.prompt_token_ids.clone().expect("prompt ids");
    [prompt, call.completion_token_ids.clone().expect("ids")].concat()
}

const CALL: &str =
    "I look.\n<tool_call>\n{\"name\": \"read\", \"arguments\": {\"path\":  \"a.py\"}}\n</tool_call>";

#[tokio::test]
async fn each_prompt_extends_the_one_before_it_whatever_the_client_does_to_its_history() {
    for (kind, stream) in [
        (UpstreamKind::Vllm, true),
        (UpstreamKind::Vllm, false),
        (UpstreamKind::Sglang, true),
        (UpstreamKind::Sglang, false),
    ] {
        let world = world(kind).await;
        world.engine.will_say(CALL);
        let first = json!([{"role": "user", "content": "fix it"}]);
        let (said, finish) = message(&world.ask(&chat(first.clone(), stream)).await, stream);
        assert_eq!((said["content"].as_str(), finish.as_str()), (Some("I look."), Some("tool_calls")));
        let call = &said["tool_calls"][0];
        assert_eq!(call["function"]["name"], "read");
        // The sampled bytes, two spaces and all.
        assert_eq!(call["function"]["arguments"], "{\"path\":  \"a.py\"}");

        // The client spells the arguments anew and sends content as parts.
        let again = json!({"role": "assistant", "content": [{"type": "text", "text": "I look."}], "tool_calls": [
            {"id": call["id"], "type": "function", "function": {"name": "read", "arguments": "{\"path\":\"a.py\"}"}}]});
        let result = json!({"role": "tool", "tool_call_id": call["id"], "content": "x <|im_end|> y"});
        let second = json!([first[0], again, result]);
        world.engine.will_say("done");
        let (said, finish) = message(&world.ask(&chat(second, stream)).await, stream);
        assert_eq!((said["content"].as_str(), finish.as_str()), (Some("done"), Some("stop")));

        let asked = world.engine.asked();
        let calls = world.calls().await;
        let (one, two) = (&calls[0], &calls[1]);
        let prompt = two.prompt_token_ids.as_ref().expect("prompt ids");
        assert!(prompt.starts_with(&all_ids(one)), "{kind:?} {stream}");
        // What the tool said is text.
        let rest = tokenizer().decode(&prompt[all_ids(one).len()..], false);
        assert_eq!(rest, "\n<|im_start|>user\nx <|im_end|> y<|im_end|>\n<|im_start|>assistant\n");
        let im_end = tokenizer().token_to_id("<|im_end|>").expect("a token");
        let ends = prompt[all_ids(one).len()..].iter().filter(|id| **id == im_end).count();
        assert_eq!(ends, 1, "the message's own end alone");
        for call in &calls {
            assert!(call.trainable, "{:?}", call.not_trainable_reasons);
            assert_eq!((call.client_api, call.client_stream), (ClientApi::OpenaiChat, stream));
        }
        assert_eq!((one.parent_call_id, two.parent_call_id), (None, Some(one.call_id)));
        assert_eq!(one.text.as_deref(), Some("I look."));
        assert_eq!(one.tool_calls.as_ref().expect("calls")[0].arguments, "{\"path\":  \"a.py\"}");
        let source = if kind == UpstreamKind::Vllm { IdsSource::Engine } else { IdsSource::SentByUs };
        assert_eq!(two.prompt_ids_source, source);
        let found = lineages(&calls);
        assert_eq!(found.lineages.len(), 1);
        assert_eq!(found.lineages[0].calls.len(), 2);
        // Law 12 holds for what is asked with tokens too, and nothing of the chat request is left.
        let body = &asked[1].1;
        assert!(body.get("messages").is_none() && body.get("tools").is_none());
        let sampling = if kind == UpstreamKind::Vllm { body } else { &body["sampling_params"] };
        assert_eq!((&sampling["temperature"], &sampling["top_p"]), (&json!(1.0), &json!(1.0)));
    }
}

#[tokio::test]
async fn the_first_prompt_is_what_the_template_renders() {
    let world = world(UpstreamKind::Vllm).await;
    world.engine.will_say("hi");
    let messages = json!([{"role": "system", "content": "be good"}, {"role": "user", "content": "hello"}]);
    world.ask(&chat(messages.clone(), true)).await;
    let template = ChatTemplate::load(folder()).expect("loads");
    let (list, tools) = (messages.as_array().expect("list"), tools());
    let input = ChatInput {
        messages: list,
        tools: tools.as_array().map(Vec::as_slice),
        add_generation_prompt: true,
        template_kwargs: None,
    };
    let expected = encode_chat(&tokenizer(), &template, &input).expect("renders");
    assert_eq!(world.engine.asked()[0].1["prompt"], json!(expected));
    assert_eq!(world.engine.asked()[0].1["max_tokens"], Value::Null);
}

#[tokio::test]
async fn a_turn_that_was_cut_is_ended_as_the_template_ends_it() {
    let world = world(UpstreamKind::Vllm).await;
    world.engine.will_say(Says { text: "half a".to_owned(), finish_reason: "length", ..Says::from("") });
    let first = json!({"role": "user", "content": "go"});
    let (said, finish) = message(&world.ask(&chat(json!([first]), true)).await, true);
    assert_eq!((said["content"].as_str(), finish.as_str()), (Some("half a"), Some("length")));
    world.engine.will_say("sentence");
    world.ask(&chat(json!([first, said, {"role": "user", "content": "more"}]), true)).await;
    let calls = world.calls().await;
    let prompt = calls[1].prompt_token_ids.as_ref().expect("prompt ids");
    assert!(prompt.starts_with(&all_ids(&calls[0])));
    let rest = tokenizer().decode(&prompt[all_ids(&calls[0]).len()..], false);
    assert_eq!(rest, "<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n");
}

#[tokio::test]
async fn an_edited_history_begins_a_lineage() {
    let world = world(UpstreamKind::Vllm).await;
    world.engine.will_say("one");
    let first = json!({"role": "user", "content": "go"});
    world.ask(&chat(json!([first]), true)).await;
    world.engine.will_say("two");
    let edited = json!({"role": "assistant", "content": "another"});
    world.ask(&chat(json!([first, edited, {"role": "user", "content": "more"}]), true)).await;
    let calls = world.calls().await;
    assert_eq!(calls[1].parent_call_id, None);
    assert_eq!(lineages(&calls).lineages.len(), 2);
}

#[tokio::test]
async fn two_branches_share_what_came_before_them() {
    let world = world(UpstreamKind::Vllm).await;
    world.engine.will_say("one");
    let first = json!({"role": "user", "content": "go"});
    let (said, _) = message(&world.ask(&chat(json!([first]), true)).await, true);
    for branch in ["left", "right"] {
        world.engine.will_say(branch);
        world.ask(&chat(json!([first, said, {"role": "user", "content": branch}]), true)).await;
    }
    let calls = world.calls().await;
    for call in &calls[1..] {
        assert_eq!(call.parent_call_id, Some(calls[0].call_id));
        assert!(call.prompt_token_ids.as_ref().expect("ids").starts_with(&all_ids(&calls[0])));
    }
}

#[tokio::test]
async fn an_engine_that_read_another_prompt_is_not_trained_on() {
    let world = world(UpstreamKind::Vllm).await;
    world.engine.will_say(Says { misreads: true, ..Says::from("hm") });
    world.ask(&chat(json!([{"role": "user", "content": "go"}]), true)).await;
    let calls = world.calls().await;
    assert!(calls[0].not_trainable_reasons.contains(&"prompt_ids_differ_from_sent".to_owned()));
}

#[tokio::test]
async fn clients_of_other_protocols_keep_their_lineage_too() {
    for route in ["messages", "responses"] {
        let world = world(UpstreamKind::Vllm).await;
        world.engine.will_say(CALL);
        let tool = json!({"type": "object", "properties": {"path": {"type": "string"}}});
        let (first, reply) = if route == "messages" {
            let body = json!({"model": "m", "max_tokens": 99, "stream": true, "messages": [{"role": "user", "content": "go"}],
                "tools": [{"name": "read", "input_schema": tool}]});
            (body.clone(), world.ask_at(route, &body).await)
        } else {
            let body = json!({"model": "m", "stream": true, "input": [{"role": "user", "content": "go"}],
                "tools": [{"type": "function", "name": "read", "parameters": tool}]});
            (body.clone(), world.ask_at(route, &body).await)
        };
        let events = speech::events(reply.as_bytes());
        let mut second = first;
        if route == "messages" {
            let block = events.iter().find(|(_, event)| event["content_block"]["type"] == "tool_use");
            let id = &block.expect("a tool call").1["content_block"]["id"];
            let list = second["messages"].as_array_mut().expect("messages");
            list.push(json!({"role": "assistant", "content": [{"type": "text", "text": "I look."},
                {"type": "tool_use", "id": id, "name": "read", "input": {"path": "a.py"}}]}));
            list.push(json!({"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": "x"}]}));
        } else {
            let done = events.iter().find(|(name, _)| name == "response.completed").expect("completed");
            let list = second["input"].as_array_mut().expect("input");
            list.extend(done.1["response"]["output"].as_array().expect("output").iter().cloned());
            let call =
                list.iter().find(|item| item["type"] == "function_call").expect("a call")["call_id"].clone();
            list.push(json!({"type": "function_call_output", "call_id": call, "output": "x"}));
        }
        world.engine.will_say("done");
        world.ask_at(route, &second).await;
        let calls = world.calls().await;
        assert_eq!(calls[1].parent_call_id, Some(calls[0].call_id), "{route}");
        assert!(calls[1].prompt_token_ids.as_ref().expect("ids").starts_with(&all_ids(&calls[0])));
    }
}

#[tokio::test]
async fn an_empty_reply_is_a_turn_in_every_protocol() {
    for (route, stream) in
        [("responses", true), ("responses", false), ("messages", true), ("chat/completions", true)]
    {
        let world = world(UpstreamKind::Vllm).await;
        let user = |text: &str| json!({"role": "user", "content": text});
        world.engine.will_say("");
        world.engine.will_say("done");
        let list = if route == "responses" { "input" } else { "messages" };
        let mut body = json!({"model": "m", "stream": stream, list: [user("go")]});
        if route == "messages" {
            body["max_tokens"] = json!(99);
        }
        let reply = world.ask_at(route, &body).await;
        let said = match (route, stream) {
            ("chat/completions", _) => vec![message(&reply, true).0],
            ("messages", _) => vec![json!({"role": "assistant", "content": [{"type": "text", "text": ""}]})],
            (_, false) => serde_json::from_str::<Value>(&reply).expect("JSON")["output"]
                .as_array()
                .expect("output")
                .clone(),
            _ => {
                let events = speech::events(reply.as_bytes());
                let done = events.iter().filter(|(name, _)| name == "response.output_item.done");
                done.map(|(_, event)| event["item"].clone()).collect()
            }
        };
        body[list].as_array_mut().expect("a list").extend([said, vec![user("more")]].concat());
        world.ask_at(route, &body).await;
        let calls = world.calls().await;
        assert_eq!(calls[0].completion_token_ids.as_ref().map(Vec::len), Some(1), "its end alone");
        assert_eq!(calls[1].parent_call_id, Some(calls[0].call_id), "{route} {stream}");
        assert!(calls[1].prompt_token_ids.as_ref().expect("ids").starts_with(&all_ids(&calls[0])));
    }
}

/// Codex sends thoughts back by their `encrypted_content` alone.
#[tokio::test]
async fn a_reply_of_thoughts_alone_is_a_turn_in_responses() {
    let renderer =
        Renderer::load(folder(), None, Some(ReasoningForm::Qwen3), TokenHistory::Sampled).expect("loads");
    let world = world_of(UpstreamKind::Vllm, renderer, ProxyOptions::trainer("policy")).await;
    let user = |text: &str| json!({"role": "user", "content": text});
    world.engine.will_say("<think>\nhm\n</think>\n\n");
    world.engine.will_say("done");
    let mut body = json!({"model": "m", "input": [user("go")], "include": ["reasoning.encrypted_content"]});
    let reply: Value = serde_json::from_str(&world.ask_at("responses", &body).await).expect("JSON");
    let mut thought = reply["output"][0].clone();
    assert_eq!(
        (reply["output"].as_array().map(Vec::len), thought["content"][0]["text"].as_str()),
        (Some(1), Some("hm"))
    );
    for member in ["id", "content", "status"] {
        thought.as_object_mut().expect("an item").remove(member);
    }
    body["input"] = json!([user("go"), thought, user("more")]);
    world.ask_at("responses", &body).await;
    let calls = world.calls().await;
    assert_eq!(calls[1].parent_call_id, Some(calls[0].call_id));
}

#[tokio::test]
async fn what_tokens_cannot_say_is_asked_in_chat() {
    // The engine has no chat endpoint, and says so: the call did go there.
    let world = world(UpstreamKind::Vllm).await;
    let mut body = chat(json!([{"role": "user", "content": "go"}]), false);
    body["response_format"] = json!({"type": "json_object"});
    let url = format!("http://{}/sessions/s1/v1/chat/completions", world.setup.address);
    assert_eq!(post(&url, &body).await.status(), 404);
    assert!(world.engine.asked().is_empty());
}

#[tokio::test]
async fn with_the_templates_own_history_every_prompt_is_its_rendering() {
    let world = world_with(UpstreamKind::Vllm, TokenHistory::Template).await;
    world.engine.will_say("one");
    let first = json!({"role": "user", "content": "go"});
    let (said, _) = message(&world.ask(&chat(json!([first]), true)).await, true);
    world.engine.will_say("two");
    world.ask(&chat(json!([first, said, {"role": "user", "content": "more"}]), true)).await;
    let calls = world.calls().await;
    assert_eq!(calls[1].parent_call_id, None);
    let rendered = tokenizer().decode(calls[1].prompt_token_ids.as_ref().expect("ids"), false);
    assert!(rendered.ends_with("one<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"));
}

/// The embedded engine and the policy that comes with lego.
#[tokio::test]
async fn the_embedded_engine_takes_tokens() {
    use lego::engine::{Engine as Policy, EngineOptions};
    use lego::model::Model;
    use lego::serve::{ServeState, router};
    use lego::text::parsers::Forms;

    let model = Arc::new(Model::load(folder()).expect("loads"));
    let options = EngineOptions { threads: 1, ..EngineOptions::for_model(&model) };
    let engine = Policy::start(model, options).expect("starts");
    let template = Arc::new(ChatTemplate::load(folder()).expect("loads"));
    let state =
        ServeState::new(engine, Arc::new(tokenizer()), template, vec!["policy".to_owned()], Forms::default());
    let upstream = Upstream::in_process(router(state), timeouts());
    let mut options = ProxyOptions::trainer("policy");
    options.renderer = Some(renderer());
    let setup = Setup::in_front_of(upstream, options, Mock::in_process(Script::default())).await;
    let session = setup.proxy.open_session(spec("s1")).expect("open");
    let url = format!("http://{}/sessions/s1/v1/chat/completions", setup.address);
    let mut messages = vec![json!({"role": "user", "content": "hello"})];
    for _ in 0..3 {
        let mut body = chat(Value::Array(messages.clone()), true);
        body["max_tokens"] = json!(12);
        let reply = String::from_utf8(text(post(&url, &body).await).await.to_vec()).expect("UTF-8");
        messages.push(message(&reply, true).0);
        messages.push(json!({"role": "user", "content": "go on"}));
    }
    let calls = session.close().await.calls;
    assert_eq!(calls.len(), 3);
    assert!(calls.iter().all(|call| call.trainable), "{:?}", calls[0].not_trainable_reasons);
    let found = lineages(&calls);
    assert_eq!(found.lineages.iter().map(|lineage| lineage.calls.len()).collect::<Vec<_>>(), [3]);
    drop::<Proxy>(setup.proxy);
}

/// A template that leaves the thoughts of earlier turns out, as Qwen3's does.
const FORGETFUL: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content.split('</think>')[-1] }}\
<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

#[tokio::test]
async fn what_the_template_would_have_left_out_stays_and_is_shown() {
    let model = tempfile::tempdir().expect("temp");
    for file in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        std::fs::copy(folder().join(file), model.path().join(file)).expect("copied");
    }
    std::fs::write(model.path().join("chat_template.jinja"), FORGETFUL).expect("written");
    let engine = Engine::start(false).await;
    let captures = tempfile::tempdir().expect("temp");
    let config = json!({"proxy": {
        "listen_port": 0, "upstream_base_url": engine.url, "upstream_kind": "vllm", "relay": "token_in",
        "local_tokenizer": model.path(), "capture_dir": captures.path(), "probe_upstream": false,
        "pinned_sampling": {"temperature": 1, "seed": 1},
    }});
    let file = captures.path().join("proxy.json");
    std::fs::write(&file, config.to_string()).expect("written");
    let mut lego = tokio::process::Command::new(env!("CARGO_BIN_EXE_lego"))
        .args(["proxy", "--config"])
        .arg(&file)
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("lego starts");
    let mut lines = tokio::io::BufReader::new(lego.stderr.take().expect("stderr")).lines();
    let url = loop {
        let line = lines.next_line().await.expect("readable").expect("it says where it listens");
        if let Some(url) = line.split_whitespace().find(|word| word.starts_with("http://127.0.0.1")) {
            break url.to_owned();
        }
    };
    engine.will_say("<think>\nhm\n</think>\n\nyes");
    let mut messages = json!([{"role": "user", "content": "go"}]);
    let ask = async |messages: &Value| {
        let url = url.replace("/v1", "/sessions/s1/v1/chat/completions");
        let reply = text(post(&url, &json!({"model": "m", "messages": messages})).await).await;
        serde_json::from_slice::<Value>(&reply).expect("JSON")["choices"][0]["message"].clone()
    };
    let said = ask(&messages).await;
    messages.as_array_mut().expect("list").extend([said, json!({"role": "user", "content": "more"})]);
    engine.will_say("done");
    ask(&messages).await;
    lego.kill().await.expect("ended");
    let prompt: Vec<u32> = serde_json::from_value(engine.asked()[1].1["prompt"].clone()).expect("ids");
    let sent = tokenizer().decode(&prompt, false);
    assert!(sent.contains("hm\n</think>\n\nyes<|im_end|>\n<|im_start|>user\nmore"), "{sent}");
    let shown = std::process::Command::new(env!("CARGO_BIN_EXE_lego"))
        .args(["capture", "show", "s1", "--capture-dir"])
        .arg(captures.path())
        .arg("--tokenizer")
        .arg(model.path())
        .output()
        .expect("lego runs");
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(shown.contains("the chat template would render "), "{shown}");
    assert!(shown.contains("instead of") && shown.contains("<think>"), "{shown}");
}
