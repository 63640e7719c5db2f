//! The copy of a reply, read in the upstream's protocol.

use serde_json::Value;

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

/// Whether a client may act on an event that could not be read here. Only a chunk that shows that it finishes no choice
/// is none.
pub(super) fn may_finish(data: &[u8]) -> bool {
    let event = serde_json::from_slice::<Value>(data).unwrap_or_default();
    let finishes = |choice: &Value| {
        !matches!(choice["finish_reason"].as_str(), Some("")) && !choice["finish_reason"].is_null()
    };
    event["choices"].as_array().is_none_or(|choices| choices.iter().any(finishes))
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
            assert_eq!(may_finish(data.as_bytes()), expected, "{data}");
        }
    }
}
