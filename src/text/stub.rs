#![allow(missing_docs, clippy::all)]
use std::sync::Arc;
use serde_json::{Map, Value};
use super::*;
#[derive(Debug, Clone, Copy)]
pub enum ToolForm { Hermes }
#[derive(Debug, Clone, Copy)]
pub enum ReasoningForm { Think }
impl ToolForm { pub fn of_template(_: &str) -> Option<Self> { Some(Self::Hermes) } pub fn from_name(_: &str) -> Option<Self> { None } pub fn names() -> impl Iterator<Item=&'static str> { ["hermes"].into_iter() } }
impl ReasoningForm { pub fn of_template(_: &str) -> Option<Self> { None } pub fn from_name(_: &str) -> Option<Self> { None } pub fn names() -> impl Iterator<Item=&'static str> { ["x"].into_iter() } pub fn is_open_at_end(self, _: &str) -> bool { false } }
#[derive(Debug, Default)]
pub struct ToolSchemas;
impl ToolSchemas { pub fn of(_: &[Value]) -> Self { Self } }
pub struct Piece<'a> { pub text: &'a str, pub is_control: bool }
pub enum ReplyEvent { Reasoning(String), Text(String), CallStart { index: u32, id: Option<String>, name: String }, CallArguments { index: u32, text: String }, CallEnd { index: u32 }, Malformed { index: Option<u32>, raw: String }, Markup(String) }
pub struct ReplyParser(ToolCallParser, u32);
impl ReplyParser {
    pub fn new(_: Option<ToolForm>, _: Option<ReasoningForm>, _: bool, _: &ToolSchemas) -> Self { Self(ToolCallParser::new(), 0) }
    pub fn is_markup(&self, _: &str) -> bool { false }
    fn map(&mut self, from: Vec<ToolEvent>, to: &mut Vec<ReplyEvent>) { for e in from { match e { ToolEvent::Text(t) => to.push(ReplyEvent::Text(t)), ToolEvent::Call { name, arguments } => { let index = self.1; self.1 += 1; to.push(ReplyEvent::CallStart { index, id: None, name }); to.push(ReplyEvent::CallArguments { index, text: arguments }); to.push(ReplyEvent::CallEnd { index }); } } } }
    pub fn push(&mut self, piece: Piece<'_>, events: &mut Vec<ReplyEvent>) { let mut v = vec![]; self.0.push(piece.text, &mut v); self.map(v, events) }
    pub fn finish(&mut self, events: &mut Vec<ReplyEvent>) { let mut v = vec![]; self.0.finish(&mut v); self.map(v, events) }
}
#[derive(Debug)]
pub struct Extender { tokenizer: Arc<Tokenizer>, template: Arc<ChatTemplate> }
#[derive(Debug, thiserror::Error)]
#[error("no")]
pub struct NotIncremental;
impl Extender {
    pub fn prove(tokenizer: Arc<Tokenizer>, template: Arc<ChatTemplate>, _: Option<&Map<String, Value>>) -> Result<Self, NotIncremental> { Ok(Self { tokenizer, template }) }
    pub fn tail(&self, _: &[u32], answered: usize, input: &ChatInput<'_>) -> Result<Vec<u32>, TextError> {
        let mut t = self.tokenizer.encode("\n")?;
        t.extend(encode_chat(&self.tokenizer, &self.template, &ChatInput { messages: &input.messages[answered..], tools: None, ..*input })?);
        Ok(t)
    }
}
