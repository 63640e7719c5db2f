//! A Messages reply of an upstream that speaks the protocol itself, put together from a parsed copy.
//!
//! It fills the same [`Reply`] that a chat reply fills: one choice, argument bytes as they were streamed, the stop
//! reason as it came. Usage is set when the stream tells its end: what `message_start` counts as output is no count.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::protocol::chat::{Choice, Fed, Reply, ReplyError, ReplyUsage, ToolCall};
use crate::protocol::json;

/// What one event did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Assembled {
    pub fed: Fed,
    /// After this event a client may act on the call or on one of its tool calls (law 4): it waits until all before
    /// it is durable.
    pub must_hold: bool,
    /// The stream's own last event.
    pub is_end: bool,
}

/// A reply so far.
#[derive(Debug, Default)]
pub struct Assembler {
    reply: Reply,
    blocks: BTreeMap<u64, Block>,
    usage: UsageView,
}

#[derive(Debug)]
enum Block {
    Prose,
    Call { at: usize, input: Option<String> },
}

impl Assembler {
    /// The reply so far.
    #[must_use]
    pub const fn reply(&self) -> &Reply {
        &self.reply
    }

    /// The reply.
    #[must_use]
    pub fn into_reply(self) -> Reply {
        self.reply
    }

    /// Lets go of what grows with the reply. What comes later is read all the same.
    pub fn forget(&mut self) {
        self.reply.forget();
    }

    /// Adds an event of a stream: its name and its data.
    ///
    /// # Errors
    /// [`ReplyError`] when it is not JSON of the protocol's shapes; nothing was added.
    pub fn event(&mut self, name: &str, data: &[u8]) -> Result<Assembled, ReplyError> {
        match serde_json::from_slice(data) {
            Ok(event) => Ok(self.add_event(name, event)),
            Err(error) => match json::without_bad_numbers(data) {
                Some(clean) => Ok(self.add_event(name, serde_json::from_slice(&clean)?)),
                None => Err(error.into()),
            },
        }
    }

    /// Adds a whole body, a message or an error.
    ///
    /// # Errors
    /// [`ReplyError`] when it is not JSON of the protocol's shapes; nothing was added.
    pub fn body(&mut self, data: &[u8]) -> Result<Assembled, ReplyError> {
        let mut done = match serde_json::from_slice(data) {
            Ok(message) => self.add_body(message),
            Err(error) => match json::without_bad_numbers(data) {
                Some(clean) => self.add_body(serde_json::from_slice(&clean)?),
                None => return Err(error.into()),
            },
        };
        done.must_hold = true;
        done.is_end = true;
        Ok(done)
    }

    fn add_event(&mut self, name: &str, event: EventView<'_>) -> Assembled {
        let mut done = Assembled::default();
        match event.kind.as_deref().unwrap_or(name) {
            "message_start" => {
                if let Some(message) = event.message {
                    self.add_head(&message);
                    for (index, block) in (0..).zip(message.content.unwrap_or_default()) {
                        self.start(index, block);
                    }
                }
            }
            "content_block_start" => {
                if let Some(mut block) = event.content_block {
                    // An empty input only says that fragments will follow, or none.
                    block.input = block.input.filter(|input| !is_empty_object(input.get()));
                    self.start(event.index.unwrap_or(0), block);
                }
            }
            "content_block_delta" => {
                if let Some(delta) = event.delta {
                    self.delta(event.index.unwrap_or(0), &delta);
                }
            }
            "content_block_stop" => done.must_hold = self.stop(event.index.unwrap_or(0)),
            "message_delta" => {
                done.must_hold = true;
                if let Some(usage) = event.usage {
                    self.usage.merge(usage);
                    self.reply.usage = self.usage.counts();
                }
                done.fed.has_finish = self.finish(event.delta.and_then(|delta| delta.stop_reason));
            }
            "message_stop" => done.is_end = true,
            "error" => {
                done.fed.has_error = true;
                done.is_end = true;
                self.error(event.error);
            }
            // A ping, or an event that later versions add.
            _ => {}
        }
        done
    }

    fn add_body(&mut self, message: MessageView<'_>) -> Assembled {
        let mut done = Assembled::default();
        if message.error.is_some() || message.kind.as_deref() == Some("error") {
            done.fed.has_error = true;
            self.error(message.error);
            return done;
        }
        self.add_head(&message);
        for (index, block) in (0..).zip(message.content.unwrap_or_default()) {
            self.start(index, block);
            self.stop(index);
        }
        self.reply.usage = self.usage.counts();
        done.fed.has_finish = self.finish(message.stop_reason);
        done
    }

    fn add_head(&mut self, message: &MessageView<'_>) {
        self.choice();
        if self.reply.id.is_none() {
            self.reply.id.clone_from(&message.id);
        }
        if self.reply.model.is_none() {
            self.reply.model.clone_from(&message.model);
        }
        if let Some(usage) = message.usage {
            self.usage.merge(usage);
        }
    }

    fn start(&mut self, index: u64, block: BlockView<'_>) {
        let choice = self.choice();
        let kind = match block.kind.as_deref() {
            Some("tool_use") => {
                let (id, name) = (block.id.unwrap_or_default(), block.name.unwrap_or_default());
                choice.tool_calls.push(ToolCall::new(id, name, ""));
                let input = block.input.map(|input| input.get().to_owned());
                Block::Call { at: choice.tool_calls.len() - 1, input }
            }
            _ => {
                choice.text.push_str(block.text.as_deref().unwrap_or_default());
                choice.reasoning.push_str(block.thinking.as_deref().unwrap_or_default());
                Block::Prose
            }
        };
        self.blocks.insert(index, kind);
    }

    fn delta(&mut self, index: u64, delta: &DeltaView) {
        let call = match self.blocks.get(&index) {
            Some(Block::Call { at, .. }) => Some(*at),
            _ => None,
        };
        let choice = self.choice();
        choice.text.push_str(delta.text.as_deref().unwrap_or_default());
        choice.reasoning.push_str(delta.thinking.as_deref().unwrap_or_default());
        if let (Some(at), Some(fragment)) = (call, &delta.partial_json)
            && let Some(call) = choice.tool_calls.get_mut(at)
        {
            call.arguments.push_str(fragment);
        }
    }

    /// Ends a block. True if it is a client's tool call.
    fn stop(&mut self, index: u64) -> bool {
        let Some(Block::Call { at, input }) = self.blocks.remove(&index) else {
            return false;
        };
        // A body, and servers that stream no fragments, give the input at once.
        if let (Some(input), Some(call)) = (input, self.choice().tool_calls.get_mut(at))
            && call.arguments.is_empty()
        {
            call.arguments = input;
        }
        true
    }

    fn finish(&mut self, stop_reason: Option<String>) -> bool {
        let Some(reason) = stop_reason.filter(|reason| !reason.is_empty()) else {
            return false;
        };
        self.choice().finish_reason = Some(reason);
        true
    }

    fn error(&mut self, error: Option<ErrorView>) {
        let error = error.unwrap_or_default();
        let text = [error.kind, error.message].into_iter().flatten().collect::<Vec<_>>().join(": ");
        self.reply.error.get_or_insert(text);
    }

    fn choice(&mut self) -> &mut Choice {
        self.reply.choices.entry(0).or_default()
    }
}

fn is_empty_object(json: &str) -> bool {
    json.strip_prefix('{')
        .and_then(|rest| rest.strip_suffix('}'))
        .is_some_and(|inner| inner.trim().is_empty())
}

#[derive(Deserialize)]
struct EventView<'a> {
    #[serde(rename = "type")]
    kind: Option<String>,
    index: Option<u64>,
    #[serde(borrow)]
    message: Option<MessageView<'a>>,
    #[serde(borrow)]
    content_block: Option<BlockView<'a>>,
    delta: Option<DeltaView>,
    usage: Option<UsageView>,
    error: Option<ErrorView>,
}

#[derive(Deserialize)]
struct MessageView<'a> {
    #[serde(rename = "type")]
    kind: Option<String>,
    id: Option<String>,
    model: Option<String>,
    #[serde(borrow)]
    content: Option<Vec<BlockView<'a>>>,
    stop_reason: Option<String>,
    usage: Option<UsageView>,
    error: Option<ErrorView>,
}

#[derive(Deserialize)]
struct BlockView<'a> {
    #[serde(rename = "type")]
    kind: Option<String>,
    text: Option<String>,
    thinking: Option<String>,
    id: Option<String>,
    name: Option<String>,
    #[serde(borrow)]
    input: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct DeltaView {
    text: Option<String>,
    thinking: Option<String>,
    partial_json: Option<String>,
    stop_reason: Option<String>,
}

#[derive(Default, Deserialize)]
struct ErrorView {
    #[serde(rename = "type")]
    kind: Option<String>,
    message: Option<String>,
}

/// Counts are cumulative: a later one replaces an earlier one, and what is left out stays.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
struct UsageView {
    input_tokens: Option<u64>,
    cache_creation_input_tokens: Option<u64>,
    cache_read_input_tokens: Option<u64>,
    output_tokens: Option<u64>,
}

impl UsageView {
    fn merge(&mut self, later: Self) {
        self.input_tokens = later.input_tokens.or(self.input_tokens);
        self.cache_creation_input_tokens =
            later.cache_creation_input_tokens.or(self.cache_creation_input_tokens);
        self.cache_read_input_tokens = later.cache_read_input_tokens.or(self.cache_read_input_tokens);
        self.output_tokens = later.output_tokens.or(self.output_tokens);
    }

    /// Messages counts cached tokens apart; a prompt is all of them.
    fn counts(self) -> Option<ReplyUsage> {
        let cached = self.cache_read_input_tokens;
        let others = self.cache_creation_input_tokens.unwrap_or(0).saturating_add(cached.unwrap_or(0));
        Some(ReplyUsage {
            prompt_tokens: self.input_tokens?.saturating_add(others),
            completion_tokens: self.output_tokens?,
            cached_tokens: cached,
            reasoning_tokens: None,
        })
    }
}
