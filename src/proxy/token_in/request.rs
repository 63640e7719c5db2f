//! A chat request in the words of completions: what shapes its prompt became ids, what shapes sampling stays as it is.

use bytes::Bytes;
use serde_json::{Map, Value};

use crate::protocol::chat;
use crate::protocol::object::Object;

/// Members that both have. Their bytes stay.
const SAME: [&str; 28] = [
    "model",
    "stream",
    "stream_options",
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "user",
    "priority",
    "request_id",
    "cache_salt",
    "vllm_xargs",
    "lora_path",
    "custom_params",
    "session_params",
];

/// Members that are no part of what the engine is asked: the prompt is made of them here, or they are about the client.
const OWN: [&str; 18] = [
    "messages",
    "tools",
    "chat_template_kwargs",
    "reasoning_effort",
    "max_tokens",
    "max_completion_tokens",
    "store",
    "metadata",
    "service_tier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "verbosity",
    "include_reasoning",
    "separate_reasoning",
    "skip_special_tokens",
    "return_weight_versions",
    "stream_reasoning",
];

/// The parts of a chat request that a template is rendered with.
#[derive(Debug)]
pub(super) struct Conversation {
    pub(super) messages: Vec<Value>,
    pub(super) tools: Option<Vec<Value>>,
    /// Further variables of the template.
    pub(super) kwargs: Map<String, Value>,
}

/// Reads a request, if ids can stand for all that shapes its prompt and nothing but sampling decides its tokens.
///
/// # Errors
/// The member, or its value, because of which it cannot: the engine is to be asked in chat's words.
pub(super) fn conversation(request: &chat::Request) -> Result<Conversation, String> {
    let members: Map<String, Value> =
        serde_json::from_slice(request.body()).map_err(|error| error.to_string())?;
    for (name, value) in &members {
        let is_known = SAME.contains(&name.as_str()) || OWN.contains(&name.as_str());
        let says_nothing = match name.as_str() {
            "tool_choice" => value == "auto" || (value == "none" && !members.contains_key("tools")),
            "response_format" => value["type"] == "text",
            // A second call would have to be taken out of what was sampled.
            "parallel_tool_calls" => value == true || !members.contains_key("tools"),
            "logprobs"
            | "echo"
            | "return_token_ids"
            | "return_tokens_as_token_ids"
            | "continue_final_message" => value == false,
            "top_logprobs" => value == 0,
            "add_generation_prompt" => value == true,
            _ => false,
        };
        if !(value.is_null() || says_nothing || is_known) {
            return Err(format!("`{name}`"));
        }
    }
    let list = |name: &str| members.get(name).and_then(Value::as_array).cloned();
    let tools = list("tools").filter(|tools| !tools.is_empty());
    let mut kwargs =
        members.get("chat_template_kwargs").and_then(Value::as_object).cloned().unwrap_or_default();
    if let Some(effort) = members.get("reasoning_effort").filter(|effort| !effort.is_null()) {
        kwargs.entry("reasoning_effort").or_insert_with(|| effort.clone());
    }
    let messages = list("messages").unwrap_or_default();
    let has_other = |message: &Value| {
        message["content"]
            .as_array()
            .is_some_and(|parts| parts.iter().any(|part| part["text"].is_null() && !part.is_string()))
    };
    match messages.iter().position(has_other) {
        Some(index) => Err(format!("`messages[{index}]`, which is not text alone")),
        None => Ok(Conversation { messages, tools, kwargs }),
    }
}

/// The body of a completions request for a prompt of these ids.
pub(super) fn completions(request: &chat::Request, prompt: &[u32]) -> Bytes {
    let body = request.object();
    let own = |name: &str| body.raw(name).filter(|value| *value != b"null");
    let mut out = Object::default();
    for name in SAME {
        if let Some(value) = own(name) {
            out.member(name, value);
        }
    }
    // Null is all that there is room for, as in chat; left out, completions have a few tokens.
    let most = own("max_completion_tokens").or_else(|| own("max_tokens")).unwrap_or(b"null");
    out.member("max_tokens", most);
    out.member("prompt", serde_json::json!(prompt).to_string().as_bytes());
    out.finish().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn request(body: &Value) -> chat::Request {
        chat::Request::parse(body.to_string().into()).expect("a request")
    }

    #[test]
    fn sampling_stays_and_the_prompt_is_ids() {
        let body = json!({"model": "m", "messages": [{"role": "user", "content": "a"}], "stream": true,
            "temperature": 0.7, "max_completion_tokens": 9, "max_tokens": 3, "stop": ["x"], "tool_choice": "auto",
            "reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": false}, "metadata": {"a": 1}});
        let request = request(&body);
        let found = conversation(&request).expect("expressible");
        assert_eq!(found.kwargs["reasoning_effort"], "low");
        let sent: Value = serde_json::from_slice(&completions(&request, &[1, 2])).expect("JSON");
        assert_eq!(
            sent,
            json!({"model": "m", "stream": true, "temperature": 0.7, "stop": ["x"], "max_tokens": 9, "prompt": [1, 2]})
        );
    }

    #[test]
    fn what_the_engine_alone_can_do_is_named() {
        let refused = |member: &str, value: Value| {
            let mut body = json!({"model": "m", "messages": [], "tools": [{}]});
            body[member] = value;
            conversation(&request(&body)).map(|_| ()).expect_err("not expressible")
        };
        assert_eq!(refused("tool_choice", json!("required")), "`tool_choice`");
        assert_eq!(refused("tool_choice", json!("none")), "`tool_choice`");
        assert_eq!(refused("response_format", json!({"type": "json_object"})), "`response_format`");
        assert_eq!(refused("parallel_tool_calls", json!(false)), "`parallel_tool_calls`");
        assert_eq!(refused("logprobs", json!(true)), "`logprobs`");
        assert_eq!(refused("guided_json", json!({})), "`guided_json`");
        assert_eq!(refused("documents", json!([1])), "`documents`");
        let image =
            json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]);
        assert_eq!(refused("messages", image), "`messages[0]`, which is not text alone");
    }
}
