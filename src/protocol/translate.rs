//! A harness's protocol spoken in front of a chat upstream: the request becomes a chat request, the chat reply
//! becomes the harness's, as it comes in.
//!
//! OpenAI's chat form is the neutral conversation between protocols: every engine that gives token ids speaks it.
//! What it has no place for is dropped only where the upstream could not have used it either; tool arguments stay
//! the bytes that were sampled.

use bytes::Bytes;

use super::error::ApiError;

/// A request of another protocol as a chat request, and the way back.
pub struct Translation {
    /// The chat request's body.
    pub chat: Bytes,
    /// Writes this call's reply.
    pub reply: Box<dyn ReplyWriter>,
}

/// What a reply needs that is not in the upstream's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplyNames {
    /// The call's id: the ids of messages and items are made from it, so that they are unique and repeatable.
    pub call_id: String,
    /// The model as the harness asked for it.
    pub model: String,
    /// Seconds since the Unix epoch.
    pub created: u64,
}

/// A part of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// Whole events for the harness.
    Bytes(Bytes),
    /// Nothing that follows may leave before all that was read so far is durable (law 4): after what follows, the
    /// harness may act on the call or on one of its tool calls.
    Barrier,
}

/// A reply that a later request may go on from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptReply {
    /// By which the later request names it.
    pub id: String,
    /// All of the conversation so far, an item of the protocol each.
    pub items: Vec<Bytes>,
}

/// A reply that the client's protocol cannot be written from.
#[derive(Debug, thiserror::Error)]
#[error("the upstream's reply could not be translated: {0}")]
pub struct Untranslatable(pub String);

/// Chat's word, as JSON, for how much the model should think; `None`: it is no level of any protocol.
pub(super) fn chat_effort(level: &str) -> Option<&'static str> {
    Some(match level {
        "none" => r#""none""#,
        "minimal" => r#""minimal""#,
        "low" => r#""low""#,
        "medium" => r#""medium""#,
        // Chat's highest level that every engine knows.
        "high" | "xhigh" | "max" => r#""high""#,
        _ => return None,
    })
}

/// Writes one reply in the harness's protocol. Either [`body`](Self::body) is called once, or
/// [`chunk`](Self::chunk) for every event, then [`end`](Self::end).
pub trait ReplyWriter: Send + Sync {
    /// Takes the data of one event of the chat stream (never `[DONE]`, never an `error` member).
    ///
    /// # Errors
    /// [`Untranslatable`] when it is not a chat chunk. What was written before stands.
    fn chunk(&mut self, data: &[u8], out: &mut Vec<Piece>) -> Result<(), Untranslatable>;

    /// Ends the stream after the choice got its finish reason: closes what is open and says how it ended, with the
    /// usage if it came. Everything that tells the client it may act comes after a [`Piece::Barrier`].
    fn end(&mut self, out: &mut Vec<Piece>);

    /// A no-op event of the protocol; before the first chunk it begins the reply (headers are out then).
    fn keep_alive(&mut self, out: &mut Vec<Piece>);

    /// The event that ends a stream which broke off. Nothing follows it.
    fn error_event(&mut self, error: &ApiError) -> Bytes;

    /// The whole reply to a request without `stream`, from a whole chat reply.
    ///
    /// # Errors
    /// [`Untranslatable`] when it is not a chat reply.
    fn body(&mut self, chat: &[u8]) -> Result<Bytes, Untranslatable>;

    /// The reply as a later request goes on from it; `None` while it is not finished, and where the request or the
    /// protocol does not want it kept.
    fn kept(&self) -> Option<KeptReply> {
        None
    }

    /// The body of an error answer.
    fn error_body(&self, error: &ApiError) -> Bytes;
}
