//! The copy of a reply, read in the upstream's protocol.

use crate::protocol::chat::{Fed, Reply, ReplyError, ReplyUsage};
use crate::protocol::messages::{Assembled, Assembler};
use crate::record::ClientApi;

/// The reply as the upstream's protocol is read.
pub(super) enum Received {
    Chat(Reply),
    Messages(Assembler),
}

impl Received {
    pub(super) fn new(upstream_api: ClientApi) -> Self {
        match upstream_api {
            ClientApi::AnthropicMessages => Self::Messages(Assembler::default()),
            _ => Self::Chat(Reply::default()),
        }
    }

    /// The reply so far.
    pub(super) const fn so_far(&self) -> &Reply {
        match self {
            Self::Chat(reply) => reply,
            Self::Messages(assembler) => assembler.reply(),
        }
    }

    /// The reply.
    pub(super) fn into_reply(self) -> Reply {
        match self {
            Self::Chat(reply) => reply,
            Self::Messages(assembler) => assembler.into_reply(),
        }
    }

    /// Lets go of tokens and texts, which reading the same events again gives back.
    pub(super) fn forget(&mut self) {
        match self {
            Self::Chat(reply) => reply.forget(),
            Self::Messages(assembler) => assembler.forget(),
        }
    }

    /// Adds a stream's event.
    pub(super) fn event(&mut self, name: &str, data: &[u8]) -> Result<Assembled, ReplyError> {
        let before = self.so_far().usage;
        let read = match self {
            Self::Chat(reply) => reply.feed(data).map(chat_event),
            Self::Messages(assembler) => assembler.event(name, data),
        };
        self.doubt_usage(before);
        read
    }

    /// Adds a whole body.
    pub(super) fn body(&mut self, body: &[u8]) -> Result<Assembled, ReplyError> {
        let read = match self {
            Self::Chat(reply) => reply.feed(body).map(chat_event),
            Self::Messages(assembler) => assembler.body(body),
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
