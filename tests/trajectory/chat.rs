//! A made-up agent: it keeps a conversation as a harness does, and its prompts are rendered by a template of a few
//! lines, so that the tokens of both are known. A token is a byte; "ab" is also a token of its own.

use std::sync::Arc;

use lego::record::{Call, CallId, JsonText};
use lego::trajectory::{Decode, Heard, Lineage, LineageRow, lineages, table};
use serde_json::{Value, json};

use crate::calls::call;

const BEGIN: u32 = 1000;
const END: u32 = 1001;
const AB: u32 = 1002;

/// What the model says.
#[derive(Debug, Clone, Default)]
pub struct Says {
    pub thinking: String,
    pub text: String,
    /// Name and arguments as they were sampled.
    pub tool: Option<(String, String)>,
    /// "ab" was sampled as two tokens.
    pub in_pieces: bool,
}

pub fn says(text: &str) -> Says {
    Says { text: text.to_owned(), ..Says::default() }
}

/// What the template leaves out or prints in its own way.
#[derive(Debug, Clone, Copy, Default)]
pub struct Template {
    pub drops_thinking: bool,
    pub prints_arguments: bool,
}

/// A conversation and the calls that were made of it.
#[derive(Clone)]
pub struct Agent {
    pub system: String,
    pub tools: Value,
    pub messages: Vec<Value>,
    pub template: Template,
    pub conversation: Option<String>,
}

/// Calls of one session, in time.
#[derive(Default)]
pub struct Session {
    pub calls: Vec<Arc<Call>>,
}

pub fn text_of(id: u32) -> String {
    match id {
        BEGIN => "<|im_start|>".to_owned(),
        END => "<|im_end|>".to_owned(),
        AB => "ab".to_owned(),
        byte => char::from_u32(byte).expect("a character").to_string(),
    }
}

pub fn decode(ids: &[u32]) -> String {
    ids.iter().map(|id| text_of(*id)).collect()
}

fn encode(text: &str, in_pieces: bool, out: &mut Vec<u32>) {
    let mut chars = text.chars().peekable();
    while let Some(one) = chars.next() {
        if one == 'a' && !in_pieces && chars.next_if_eq(&'b').is_some() {
            out.push(AB);
        } else {
            out.push(one as u32);
        }
    }
}

/// What the model samples for a reply, or what a template prints for it.
fn encode_reply(says: &Says, out: &mut Vec<u32>) {
    if !says.thinking.is_empty() {
        encode(&format!("<think>{}</think>", says.thinking), says.in_pieces, out);
    }
    encode(&says.text, says.in_pieces, out);
    if let Some((name, arguments)) = &says.tool {
        encode(&format!("<tool_call>{name} {arguments}</tool_call>"), says.in_pieces, out);
    }
    out.push(END);
}

impl Agent {
    pub fn new(system: &str, task: &str) -> Self {
        Self {
            system: system.to_owned(),
            tools: json!([{"type": "function", "function": {"name": "bash"}}]),
            messages: vec![json!({"role": "user", "content": task})],
            template: Template::default(),
            conversation: None,
        }
    }

    fn asked(&self) -> Vec<Value> {
        let system = (!self.system.is_empty()).then(|| json!({"role": "system", "content": self.system}));
        system.into_iter().chain(self.messages.iter().cloned()).collect()
    }

    pub fn prompt(&self) -> Vec<u32> {
        let mut ids = vec![];
        if self.tools != json!([]) {
            encode(&self.tools.to_string(), false, &mut ids);
        }
        for message in self.asked() {
            ids.push(BEGIN);
            let text = |name: &str| message[name].as_str().unwrap_or_default().to_owned();
            encode(&text("role"), false, &mut ids);
            let tool = message["tool_calls"][0]["function"].as_object().map(|function| {
                let arguments = function["arguments"].as_str().expect("text").to_owned();
                let value: Value = serde_json::from_str(&arguments).expect("JSON");
                let arguments = if self.template.prints_arguments { value.to_string() } else { arguments };
                (function["name"].as_str().expect("text").to_owned(), arguments)
            });
            let thinking = text("reasoning_content");
            let thinking = if self.template.drops_thinking { String::new() } else { thinking };
            encode_reply(&Says { thinking, text: text("content"), tool, in_pieces: false }, &mut ids);
        }
        ids.push(BEGIN);
        encode("assistant", false, &mut ids);
        ids
    }

    /// Asks the model, and keeps the reply as the last message.
    pub fn ask(&mut self, session: &mut Session, says: &Says) -> CallId {
        let mut sampled = vec![];
        encode_reply(says, &mut sampled);
        let mut one = call("s", &self.prompt(), &sampled);
        one.received_at += session.calls.len() as i64;
        let id = format!("call_{}", session.calls.len());
        let tool_calls = says.tool.as_ref().map(|(name, arguments)| {
            json!([{"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}])
        });
        let mut message = json!({"role": "assistant", "content": says.text});
        if !says.thinking.is_empty() {
            message["reasoning_content"] = json!(says.thinking);
        }
        if let Some(tool_calls) = &tool_calls {
            message["tool_calls"] = tool_calls.clone();
        }
        let body = json!({"model": "m", "messages": self.asked(), "tools": self.tools});
        one.client_request = JsonText::new(body.to_string()).ok();
        let response = json!({"id": "r", "object": "chat.completion", "created": 1, "model": "m", "choices": [
            {"index": 0, "message": message, "finish_reason": "stop"}]});
        one.response = JsonText::new(response.to_string()).ok();
        one.text = Some(says.text.clone());
        one.tool_calls = says.tool.as_ref().map(|(name, arguments)| {
            vec![lego::record::CapturedToolCall {
                id: id.clone(),
                name: name.clone(),
                arguments: arguments.clone(),
                arguments_valid_json: true,
            }]
        });
        one.harness_conversation_id.clone_from(&self.conversation);
        self.messages.push(message);
        let id = one.call_id;
        session.calls.push(Arc::new(one));
        id
    }

    pub fn user(&mut self, text: &str) {
        self.messages.push(json!({"role": "user", "content": text}));
    }

    /// The result of the last tool call.
    pub fn result(&mut self, text: &str) {
        let id = self.messages.last().expect("a reply")["tool_calls"][0]["id"].clone();
        self.messages.push(json!({"role": "tool", "tool_call_id": id, "content": text}));
    }
}

/// The table, which is the same whether calls have their bodies or were heard before, in any order.
pub fn table_of(calls: &[Arc<Call>], session: &[Lineage], decode: Option<Decode<'_>>) -> Vec<LineageRow> {
    let rows = table(session, Heard::default(), decode);
    let mut heard = Heard::default();
    calls.iter().rev().for_each(|call| heard.hear(call));
    let bare = |call: &Arc<Call>| {
        let mut call = Call::clone(call);
        (call.client_request, call.upstream_request, call.response) = (None, None, None);
        (call.text, call.tool_calls) = (None, None);
        Arc::new(call)
    };
    let bare: Vec<Arc<Call>> = calls.iter().map(bare).collect();
    let found = lineages(&bare);
    assert_eq!(table(found.sessions().next().unwrap_or_default(), heard, decode), rows);
    rows
}

impl Session {
    pub fn table(&self, with_texts: bool) -> Vec<LineageRow> {
        let found = lineages(&self.calls);
        let session = found.sessions().next().unwrap_or_default();
        table_of(&self.calls, session, with_texts.then_some(&decode))
    }
}
