//! The copy of a reply, read in the upstream's protocol.

use crate::protocol::chat::{Fed, Reply, ReplyError};
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

    /// Adds a stream's event.
    pub(super) fn event(&mut self, name: &str, data: &[u8]) -> Result<Assembled, ReplyError> {
        match self {
            Self::Chat(reply) => reply.feed(data).map(chat_event),
            Self::Messages(assembler) => assembler.event(name, data),
        }
    }

    /// Adds a whole body.
    pub(super) fn body(&mut self, body: &[u8]) -> Result<Assembled, ReplyError> {
        match self {
            Self::Chat(reply) => reply.feed(body).map(chat_event),
            Self::Messages(assembler) => assembler.body(body),
        }
    }
}

/// A chat event in the terms of one of Messages: what finishes a choice is held.
const fn chat_event(fed: Fed) -> Assembled {
    Assembled { fed, must_hold: fed.has_finish, is_end: false }
}
