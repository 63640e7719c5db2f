//! The copy of a reply, read in the upstream's protocol.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::protocol::chat::{self, Cut, CutError, CutReply, Fed, Reply, ReplyError, ReplyUsage};
use crate::protocol::generate;
use crate::protocol::messages::{Assembled, Assembler};
use crate::protocol::responses;
use crate::record::ClientApi;
use crate::upstream::sglang_generate::{GenerateError, GenerateReply};

/// Why a copy cannot be read.
#[derive(Debug, thiserror::Error)]
pub(super) enum Unreadable {
    #[error(transparent)]
    Reply(#[from] ReplyError),
    #[error("the upstream's reply could not be read: {0}")]
    Generate(#[from] GenerateError),
}

/// The reply as the upstream's protocol is read.
pub(super) enum Received {
    Chat(Box<chat::Stream>),
    Messages(Box<Assembler>),
    Responses(Box<responses::Assembler>),
    Generate(Box<GenerateReply>, Blocks),
}

/// The blocks of a stream whose events tell everything so far, as far as later ones tell the same. What stays reads as
/// all of them do.
#[derive(Default)]
pub(super) struct Blocks {
    /// The last one of each output.
    of_output: BTreeMap<u16, usize>,
    /// The last one that could not be read, but for the first.
    unread: Option<usize>,
    /// One could not be read.
    has_unread: bool,
    /// One that could not be read may have been read in part.
    is_lasting: bool,
    /// Known before the next one is read: one that cannot be read may show it.
    is_cumulative: bool,
}

impl Blocks {
    /// `block` tells all that the earlier ones of this output did. One that could not be read contradicted those, so
    /// without them it might be read after all.
    fn read(&mut self, output: Option<u16>, block: usize) -> [Option<usize>; 2] {
        match output {
            Some(output) => [self.of_output.insert(output, block), self.unread.take()],
            None => [None, None],
        }
    }

    /// `block` could not be read. `is_whole`: nothing of it was.
    fn not_read(&mut self, block: usize, is_whole: bool) -> [Option<usize>; 2] {
        if is_whole && self.has_unread {
            return [self.unread.replace(block), None];
        }
        // It says what is wrong with the reply, and those before it what it was compared with: they stay.
        self.of_output.clear();
        self.unread = None;
        self.has_unread = true;
        self.is_lasting |= !is_whole;
        [None, None]
    }
}

impl Received {
    /// `each`: choices that share a prompt.
    pub(super) fn new(upstream_api: ClientApi, each: u64) -> Self {
        match upstream_api {
            ClientApi::SglangGenerate => {
                Self::Generate(Box::new(GenerateReply::of_prompts(each)), Blocks::default())
            }
            ClientApi::AnthropicMessages => Self::Messages(Box::default()),
            ClientApi::OpenaiResponses => Self::Responses(Box::default()),
            _ => Self::Chat(Box::default()),
        }
    }

    /// The reply so far.
    pub(super) const fn so_far(&self) -> &Reply {
        match self {
            Self::Chat(stream) => stream.reply(),
            Self::Messages(assembler) => assembler.reply(),
            Self::Responses(assembler) => assembler.reply(),
            Self::Generate(reply, _) => reply.reply(),
        }
    }

    /// What of an event or a body comes only of what lego asked for.
    pub(super) fn cut(&self, text: &[u8], wanted: &Cut) -> Result<CutReply, CutError> {
        match self {
            Self::Generate(..) => generate::cut(text, wanted),
            Self::Responses(_) => responses::cut(text, wanted),
            _ => chat::cut(text, wanted),
        }
    }

    /// The earlier blocks of the stream that nobody misses now that `block`, an event with this data, came. `is_read`:
    /// it could be read.
    pub(super) fn superseded(&mut self, block: usize, data: &[u8], is_read: bool) -> [Option<usize>; 2] {
        let Self::Generate(reply, blocks) = self else {
            return [None, None];
        };
        let is_list = data.trim_ascii_start().starts_with(b"[");
        let gone = match is_read {
            true => blocks.read(reply.repeated(), block),
            false => blocks.not_read(block, blocks.is_cumulative && !is_list),
        };
        blocks.is_cumulative = reply.is_cumulative() == Some(true);
        gone
    }

    /// The reply.
    pub(super) fn into_reply(self) -> Reply {
        match self {
            Self::Chat(stream) => stream.into_reply(),
            Self::Messages(assembler) => assembler.into_reply(),
            Self::Responses(assembler) => assembler.into_reply(),
            Self::Generate(reply, _) => reply.into_reply(),
        }
    }

    /// Lets go of tokens and texts, which reading the same events again gives back. False where it keeps them, since they
    /// are few: up to `few` bytes.
    pub(super) fn forget(&mut self, few: usize) -> bool {
        if matches!(self, Self::Chat(stream) if stream.reply().growing_bytes() <= few) {
            return false;
        }
        match self {
            Self::Chat(stream) => stream.reply_mut().forget(),
            Self::Messages(assembler) => assembler.forget(),
            Self::Responses(assembler) => assembler.forget(),
            Self::Generate(reply, _) => reply.forget(),
        }
        true
    }

    /// What is known of a response that the upstream writes itself.
    pub(super) fn response(&self) -> Option<&responses::Assembler> {
        match self {
            Self::Responses(assembler) => Some(assembler),
            _ => None,
        }
    }

    /// True if each event says all that came before it.
    pub(super) fn repeats_itself(&self) -> bool {
        matches!(self, Self::Generate(reply, blocks) if reply.is_cumulative() == Some(true) && !blocks.is_lasting)
    }

    /// Whether a client may act on an event that could not be read here. Only one that shows that it finishes no choice
    /// is none.
    pub(super) fn may_finish(&self, data: &[u8]) -> bool {
        let event = serde_json::from_slice::<Value>(data).unwrap_or_default();
        let finishes = |reason: &Value| !matches!(reason.as_str(), Some("")) && !reason.is_null();
        if let Self::Generate(..) = self {
            return event["meta_info"]
                .as_object()
                .is_none_or(|meta| meta.get("finish_reason").is_some_and(finishes));
        }
        if let Self::Messages(..) = self {
            let passes = ["message_start", "content_block_start", "content_block_delta", "ping"];
            return event["type"].as_str().is_none_or(|kind| !passes.contains(&kind));
        }
        if let Self::Responses(_) = self {
            let is_on_the_way = |kind: &str| {
                let begins = ["response.created", "response.queued", "response.in_progress"];
                kind.ends_with(".delta") || kind.ends_with(".added") || begins.contains(&kind)
            };
            return event["type"].as_str().is_none_or(|kind| !is_on_the_way(kind));
        }
        let choices = event["choices"].as_array();
        choices.is_none_or(|choices| choices.iter().any(|choice| finishes(&choice["finish_reason"])))
    }

    /// Adds a stream's event.
    pub(super) fn event(&mut self, name: &str, data: &[u8]) -> Result<Assembled, Unreadable> {
        let before = self.so_far().usage;
        let read = match self {
            Self::Chat(stream) => stream.feed(data).map(chat_event).map_err(Into::into),
            Self::Messages(assembler) => assembler.event(name, data).map_err(Into::into),
            Self::Responses(assembler) => assembler.event(name, data).map_err(Into::into),
            Self::Generate(reply, _) => reply.feed(data).map(chat_event).map_err(Into::into),
        };
        self.doubt_usage(before);
        read
    }

    /// Adds a whole body.
    pub(super) fn body(&mut self, body: &[u8]) -> Result<Assembled, Unreadable> {
        let read = match self {
            Self::Chat(stream) => stream.reply_mut().feed(body).map(chat_event).map_err(Into::into),
            Self::Messages(assembler) => assembler.body(body).map_err(Into::into),
            Self::Responses(assembler) => assembler.body(body).map_err(Into::into),
            Self::Generate(reply, _) => reply.feed(body).map(chat_event).map_err(Into::into),
        };
        self.doubt_usage(None);
        read
    }

    /// More cached tokens than there were: recorded as it was said, and as 0 new ones where a client's protocol tells
    /// them apart.
    fn doubt_usage(&self, before: Option<ReplyUsage>) {
        let told = self.so_far().usage.filter(|usage| Some(*usage) != before);
        if let Some(ReplyUsage { prompt_tokens, cached_tokens: Some(cached), .. }) = told
            && cached > prompt_tokens
        {
            tracing::warn!(
                prompt_tokens,
                cached,
                "the upstream reports more cached tokens than the prompt has"
            );
        }
    }
}

/// A chat event in the terms of one of Messages: what finishes a choice is held.
const fn chat_event(fed: Fed) -> Assembled {
    Assembled { fed, must_hold: fed.has_finish, is_end: false }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_chunk_that_shows_that_it_finishes_nothing_is_not_held() {
        for (data, expected) in [
            (r#"{"choices":[{"delta":{"content":7},"finish_reason":null}]}"#, false),
            (r#"{"choices":[{"delta":{"content":7},"finish_reason":""},{}]}"#, false),
            (r#"{"choices":[],"created":1.5}"#, false),
            (r#"{"choices":[{"finish_reason":null},{"finish_reason":"stop"}]}"#, true),
            (r#"{"choices":[{"finish_reason":{"type":"stop"}}]}"#, true),
            (r#"{"choices":{"0":{"finish_reason":"stop"}}}"#, true),
            (r#"{"type":"content_block_stop","index":"0"}"#, true),
            (r#"{"choices":[{"finish_reason":"st"#, true),
        ] {
            let chat = Received::new(ClientApi::OpenaiChat, 1);
            assert_eq!(chat.may_finish(data.as_bytes()), expected, "{data}");
        }
        for (data, expected) in [
            (r#"{"type":"response.output_text.delta","delta":7}"#, false),
            (r#"{"type":"response.output_item.added","item":{"type":7}}"#, false),
            (r#"{"type":"response.in_progress","response":7}"#, false),
            (r#"{"type":"response.output_item.done","item":{"type":7}}"#, true),
            (r#"{"type":"response.completed","response":7}"#, true),
            (r#"{"type":7}"#, true),
            (r#"{"type":"response.completed""#, true),
        ] {
            let response = Received::new(ClientApi::OpenaiResponses, 1);
            assert_eq!(response.may_finish(data.as_bytes()), expected, "{data}");
        }
        for (data, expected) in [
            (r#"{"text":7,"meta_info":{"finish_reason":null}}"#, false),
            (r#"{"text":7,"meta_info":{}}"#, false),
            (r#"{"text":7,"meta_info":{"finish_reason":{"type":"stop"}}}"#, true),
            (r#"{"text":7}"#, true),
            (r#"[{"text":7,"meta_info":{"finish_reason":null}}]"#, true),
            (r#"{"choices":[]}"#, true),
            (r#"{"text":"#, true),
        ] {
            let native = Received::new(ClientApi::SglangGenerate, 1);
            assert_eq!(native.may_finish(data.as_bytes()), expected, "{data}");
        }
    }
}
