//! The recorded histories of `tests/fixtures/trees`, as captured with a template.

use std::fs;
use std::path::{Path, PathBuf};

use lego::record::{Call, CallKind, CallStatus, CapturedToolCall, ClientApi, JsonText, Usage};
use serde_json::{Value, json};

use crate::calls::call as made;
use crate::render::{Reply, assistant, printed, prompt, reply};

pub fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

pub fn read(path: &str) -> Value {
    let path = fixtures().join(path);
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// A tree's file.
pub struct Tree {
    #[allow(dead_code, reason = "not every binary that has this names them")]
    pub name: String,
    pub tree: Value,
}

/// All of them.
pub fn trees() -> Vec<Tree> {
    let files =
        fs::read_dir(fixtures().join("trees")).expect("folder").map(|entry| entry.expect("entry").path());
    let mut files: Vec<PathBuf> =
        files.filter(|path| path.extension().is_some_and(|extension| extension == "json")).collect();
    files.sort();
    assert!(files.len() > 50);
    let name = |path: &Path| path.file_stem().expect("a name").to_string_lossy().into_owned();
    files
        .iter()
        .map(|path| Tree { name: name(path), tree: read(&format!("trees/{}.json", name(path))) })
        .collect()
}

impl Tree {
    pub fn calls(&self) -> &Vec<Value> {
        self.tree["calls"].as_array().expect("calls")
    }

    pub fn wire(&self) -> &str {
        self.tree["wire"].as_str().expect("a wire")
    }

    /// One of its calls.
    pub fn call(&self, call: &Value, rendering: &str) -> Call {
        let request = read(call["request"].as_str().expect("a request"));
        let said = reply(call, &fixtures());
        let ids = |text: &str| text.bytes().map(u32::from).collect::<Vec<_>>();
        let (asked, sampled) = if rendering == "given" {
            let given = |name: &str| serde_json::from_value(call[name].clone()).expect("ids");
            (given("prompt_token_ids"), given("completion_token_ids"))
        } else {
            let sampled =
                said.as_ref().map(|said| assistant(&said.turn, true, said.has_ended)).unwrap_or_default();
            (ids(&prompt(&request, self.wire(), rendering)), ids(&sampled))
        };
        let mut one = made("s", &asked, &sampled);
        let number = call["call"].as_u64().expect("a number");
        one.received_at += number as i64;
        one.client_api = match self.wire() {
            "chat" => ClientApi::OpenaiChat,
            "messages" => ClientApi::AnthropicMessages,
            _ => ClientApi::OpenaiResponses,
        };
        // As the proxy marks them.
        let client = self.tree["client"].as_str().expect("a client");
        let is_agents = request["tools"].as_array().is_some_and(|tools| !tools.is_empty());
        if matches!(client, "claude-code" | "codex" | "opencode") && !is_agents {
            one.kind = CallKind::Aux;
        }
        if client == "claude-code" {
            let agent = call["headers"]["x-claude-code-agent-id"].as_str();
            one.harness_conversation_id = Some(agent.map_or("c".to_owned(), |agent| format!("c/{agent}")));
        }
        one.client_request = JsonText::new(request.to_string()).ok();
        let Some(Reply { turn, has_ended }) = said else {
            (one.text, one.tool_calls, one.response, one.completion_token_ids) = (None, None, None, None);
            (one.status, one.usage) = (CallStatus::UpstreamError, None);
            return one;
        };
        if !has_ended {
            (one.status, one.usage, one.trainable) = (CallStatus::Truncated, None::<Usage>, false);
        }
        let message = json!({"role": "assistant", "content": turn.text, "reasoning_content": turn.reasoning});
        let response = json!({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]});
        one.response = JsonText::new(response.to_string()).ok();
        let tool = |(id, name, arguments): &(String, String, Value)| CapturedToolCall {
            id: id.clone(),
            name: name.clone(),
            arguments: printed(arguments),
            arguments_valid_json: true,
        };
        one.tool_calls = (!turn.calls.is_empty()).then(|| turn.calls.iter().map(tool).collect());
        one.text = Some(turn.text);
        one
    }
}
