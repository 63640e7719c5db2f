//! The copy of a reply, read in the upstream's protocol.

use std::collections::BTreeMap;

use crate::protocol::chat::{self, Cut, CutError, CutReply, Fed, Reply, ReplyError, ReplyUsage};
use crate::protocol::generate;
use crate::protocol::messages::{Assembled, Assembler};
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
    Chat(Reply),
    Messages(Assembler),
    /// With the last block of the stream for each output.
    Generate(Box<GenerateReply>, BTreeMap<u16, usize>),
}

impl Received {
    /// `each`: choices that share a prompt.
    pub(super) fn new(upstream_api: ClientApi, each: u64) -> Self {
        match upstream_api {
            ClientApi::SglangGenerate => {
                Self::Generate(Box::new(GenerateReply::of_prompts(each)), BTreeMap::new())
            }
            ClientApi::AnthropicMessages => Self::Messages(Assembler::default()),
            _ => Self::Chat(Reply::default()),
        }
    }

    /// The reply so far.
    pub(super) const fn so_far(&self) -> &Reply {
        match self {
            Self::Chat(reply) => reply,
            Self::Messages(assembler) => assembler.reply(),
            Self::Generate(reply, _) => reply.reply(),
        }
    }

    /// What of an event or a body comes only of what lego asked for.
    pub(super) fn cut(&self, text: &[u8], wanted: &Cut) -> Result<CutReply, CutError> {
        match self {
            Self::Generate(..) => generate::cut(text, wanted),
            _ => chat::cut(text, wanted),
        }
    }

    /// The earlier block of the stream of which `block`, just read, says all and more.
    pub(super) fn superseded(&mut self, block: usize) -> Option<usize> {
        match self {
            Self::Generate(reply, blocks) => blocks.insert(reply.repeated()?, block),
            _ => None,
        }
    }

    /// Adds a stream's event.
    pub(super) fn event(&mut self, name: &str, data: &[u8]) -> Result<Assembled, Unreadable> {
        let before = self.so_far().usage;
        let read = match self {
            Self::Chat(reply) => reply.feed(data).map(chat_event).map_err(Into::into),
            Self::Messages(assembler) => assembler.event(name, data).map_err(Into::into),
            Self::Generate(reply, _) => reply.feed(data).map(chat_event).map_err(Into::into),
        };
        self.doubt_usage(before);
        read
    }

    /// Adds a whole body.
    pub(super) fn body(&mut self, body: &[u8]) -> Result<Assembled, Unreadable> {
        let read = match self {
            Self::Chat(reply) => reply.feed(body).map(chat_event).map_err(Into::into),
            Self::Messages(assembler) => assembler.body(body).map_err(Into::into),
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
