//! `count_tokens` where prompts are rendered here.

use lego::record::UpstreamKind;
use serde_json::{Value, json};

use super::{CALL, world};

/// The engine has no tokenizer to ask, so the count is lego's own.
#[tokio::test]
async fn tokens_are_counted_by_the_prompt_that_would_be_sent() {
    let world = world(UpstreamKind::Vllm).await;
    let tool = json!({"name": "read", "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}}});
    let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "go"}], "tools": [tool],
        "thinking": {"type": "enabled", "budget_tokens": 1024}});
    let mut counts = Vec::new();
    for says in [CALL, "done"] {
        let counted = world.ask_at("messages/count_tokens", &body).await;
        let counted: Value = serde_json::from_str(&counted).expect("JSON");
        counts.push(counted["input_tokens"].as_u64().expect("a count") as usize);
        body["max_tokens"] = json!(99);
        world.engine.will_say(says);
        let reply: Value = serde_json::from_str(&world.ask_at("messages", &body).await).expect("JSON");
        assert_eq!(reply["usage"]["input_tokens"], json!(counts[counts.len() - 1]));
        let list = body["messages"].as_array_mut().expect("messages");
        // Its arguments have lost a space: rendered anew, the prompt would be shorter.
        list.push(json!({"role": "assistant", "content": reply["content"]}));
        let result = json!({"type": "tool_result", "tool_use_id": reply["content"][1]["id"], "content": "x"});
        list.push(json!({"role": "user", "content": [result]}));
        body.as_object_mut().expect("an object").remove("max_tokens");
    }
    let prompts: Vec<Vec<Value>> = world
        .engine
        .asked()
        .iter()
        .map(|(_, body)| body["prompt"].as_array().expect("ids").clone())
        .collect();
    assert_eq!(prompts.iter().map(Vec::len).collect::<Vec<_>>(), counts);
    let calls = world.calls().await;
    assert_eq!(calls.len(), 2);
    assert_eq!(calls[1].parent_call_id, Some(calls[0].call_id));
}
