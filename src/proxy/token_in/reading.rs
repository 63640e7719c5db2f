//! Sampled ids as what a client is told: reasoning, text and tool calls.

use std::sync::Arc;

use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::record::CapturedToolCall;
use crate::text::parsers::{Forms, Piece, ReplyEvent, ReplyParser, ToolSchemas};
use crate::text::{Decoder, StopMatcher, Tokenizer};

/// How the replies to one request are read.
#[derive(Debug)]
pub(super) struct Reading {
    pub(super) tokenizer: Arc<Tokenizer>,
    pub(super) forms: Forms,
    /// Special tokens that are the forms' tags. No other special token is text.
    pub(super) tags: Vec<u32>,
    /// The prompt ends within a block of reasoning.
    pub(super) starts_in_reasoning: bool,
    pub(super) schemas: ToolSchemas,
    /// Texts that end a reply, and whether they are part of it.
    pub(super) stop: (Vec<String>, bool),
    /// Ids that end a reply and are no part of its text.
    pub(super) ends: Vec<u32>,
    /// What the ids of calls are made of.
    pub(super) seed: String,
}

impl Reading {
    /// The id of a tool call that has none of its own: nine letters and digits, which is all that some templates take.
    /// The same for each reader of the same reply.
    pub(super) fn call_id(&self, choice: u16, call: u32) -> String {
        const LETTERS: &[u8; 62] = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";
        let hash = Sha256::digest(format!("{} {choice} {call}", self.seed));
        hash[..9].iter().map(|byte| char::from(LETTERS[usize::from(*byte) % 62])).collect()
    }

    /// A whole reply.
    pub(super) fn whole(&self, choice: u16, ids: &[u32], finish_reason: &str) -> Whole {
        let (mut reader, mut events) = (Reader::new(self), Vec::new());
        reader.push(self, ids, Some(finish_reason), &mut events);
        let mut whole = Whole::default();
        for event in events {
            match event {
                ReplyEvent::Reasoning(text) => whole.reasoning += &text,
                ReplyEvent::Text(text) => whole.text += &text,
                ReplyEvent::CallStart { index, id, name } => whole.calls.push(CapturedToolCall {
                    id: id.unwrap_or_else(|| self.call_id(choice, index)),
                    name,
                    arguments: String::new(),
                    arguments_valid_json: false,
                }),
                ReplyEvent::CallArguments { index, text } => {
                    if let Some(call) = whole.calls.get_mut(index as usize) {
                        call.arguments += &text;
                    }
                }
                ReplyEvent::Malformed { raw, .. } => whole.text += &raw,
                ReplyEvent::Markup(_) | ReplyEvent::CallEnd { .. } => {}
            }
        }
        for call in &mut whole.calls {
            call.arguments_valid_json =
                serde_json::from_str::<serde::de::IgnoredAny>(&call.arguments).is_ok();
        }
        whole
    }
}

/// What a reply says.
#[derive(Debug, Default)]
pub(super) struct Whole {
    pub(super) reasoning: String,
    pub(super) text: String,
    pub(super) calls: Vec<CapturedToolCall>,
}

/// Reads one choice as its ids come.
pub(super) struct Reader {
    decoder: Decoder,
    stop: StopMatcher,
    parser: ReplyParser,
    is_over: bool,
}

impl Reader {
    pub(super) fn new(reading: &Reading) -> Self {
        let (stop, include_stop) = reading.stop.clone();
        Self {
            // What is left out of text is decided here, a token at a time.
            decoder: Decoder::new(false),
            stop: StopMatcher::new(stop, include_stop),
            parser: parser(reading),
            is_over: false,
        }
    }

    /// Adds ids. `finish_reason`: they are the last ones.
    pub(super) fn push(
        &mut self,
        reading: &Reading,
        ids: &[u32],
        finish_reason: Option<&str>,
        events: &mut Vec<ReplyEvent>,
    ) {
        let told = match (finish_reason, ids.split_last()) {
            (Some("stop"), Some((last, before))) if reading.ends.contains(last) => before,
            _ => ids,
        };
        for &id in told {
            self.token(reading, id, events);
        }
        if finish_reason.is_some() && !std::mem::replace(&mut self.is_over, true) {
            let (mut decoded, mut text) = (String::new(), String::new());
            self.decoder.finish(&mut decoded);
            if self.stop.push(&decoded, &mut text).is_none() {
                self.stop.finish(&mut text);
            }
            self.parser.push(Piece::text(&text), events);
            self.parser.finish(events);
        }
    }

    fn token(&mut self, reading: &Reading, id: u32, events: &mut Vec<ReplyEvent>) {
        let tokenizer = &reading.tokenizer;
        if self.is_over || (tokenizer.is_special(id) && !reading.tags.contains(&id)) {
            return;
        }
        if tokenizer.is_control(id) {
            // What is left of a character that was cut is no part of the token.
            let mut cut = String::new();
            self.decoder.finish(&mut cut);
            self.text(&cut, false, events);
        }
        let mut decoded = String::new();
        self.decoder.push(tokenizer, id, &mut decoded);
        self.text(&decoded, tokenizer.is_control(id), events);
    }

    fn text(&mut self, decoded: &str, is_control: bool, events: &mut Vec<ReplyEvent>) {
        let mut text = String::new();
        let ended = self.stop.push(decoded, &mut text);
        if !text.is_empty() {
            let is_control = is_control && text == decoded;
            self.parser.push(Piece { text: &text, is_control }, events);
        }
        if ended.is_some() {
            self.is_over = true;
            self.parser.finish(events);
        }
    }
}

/// Calls are given whole: a client may repair half a call and run it, and what was told cannot be taken back.
fn parser(reading: &Reading) -> ReplyParser {
    let Forms { tools, reasoning } = reading.forms;
    let parser =
        ReplyParser::new(tools, reasoning, reading.starts_in_reasoning, &reading.schemas).with_whole_calls();
    // Text that may be the beginning of a stop text comes later than its token.
    match reading.stop.0.is_empty() {
        true => parser.with_token_tags(|tag| reading.tokenizer.control_id(tag).is_some()),
        false => parser,
    }
}

/// The texts that end a reply to this request, and whether they are part of it.
pub(super) fn stop_texts(stop: Option<Value>, include: bool) -> (Vec<String>, bool) {
    let texts = match stop {
        Some(Value::String(text)) => vec![text],
        Some(Value::Array(list)) => list.iter().filter_map(|text| text.as_str().map(str::to_owned)).collect(),
        _ => Vec::new(),
    };
    (texts.into_iter().filter(|text| !text.is_empty()).collect(), include)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::text::parsers::ToolForm;

    #[test]
    fn a_call_behind_half_a_character_is_a_call() {
        let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/models/lego-tiny"));
        let tokenizer = Arc::new(Tokenizer::load(folder).expect("the bundled tokenizer"));
        let half = (0..tokenizer.vocab_size() as u32).find(|id| tokenizer.token_bytes(*id) == [0xc3]);
        let call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call><|im_end|>";
        let ids = [vec![half.expect("a byte's token")], tokenizer.encode(call).expect("encodes")].concat();
        let reading = Reading {
            forms: Forms { tools: Some(ToolForm::Hermes), reasoning: None },
            tags: Vec::new(),
            starts_in_reasoning: false,
            schemas: ToolSchemas::default(),
            stop: (Vec::new(), false),
            ends: tokenizer.eos_token_ids().to_vec(),
            seed: String::new(),
            tokenizer,
        };
        let whole = reading.whole(0, &ids, "stop");
        assert_eq!((whole.text.as_str(), whole.calls.len()), ("\u{fffd}", 1));
        assert_eq!((whole.calls[0].name.as_str(), whole.calls[0].arguments.as_str()), ("f", "{}"));
        // Text that spells the tags is text.
        let spelled: Vec<u32> = reading.tokenizer.encode_text(call).expect("encodes");
        let whole = reading.whole(0, &spelled, "length");
        assert!(whole.calls.is_empty() && whole.text.starts_with("<tool_call>"), "{}", whole.text);
    }
}
