//! What a call in the store leaves out because an earlier one of its session has it.
//!
//! Invariants:
//! - Only the store keeps calls like that: who reads calls gets them whole, with nothing left out.
//! - What is put together again is what was there: it has the length and the checksum that were noted, or it is missing.

use serde::{Deserialize, Serialize};

use super::CallId;

/// One sampled choice of one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ChoiceId {
    pub call_id: CallId,
    pub choice_index: u16,
}

/// What is left out of a call.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shared {
    /// The earlier choice that has it. It was received on the same day (UTC).
    pub base: Option<ChoiceId>,
    /// The first of the prompt's ids.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ids: Option<SharedIds>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client_request: Option<Splice>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upstream_request: Option<Splice>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub response: Option<Splice>,
}

/// First ids of a prompt that are those of the base's prompt and completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedIds {
    pub count: u32,
    /// CRC-32C of all ids of the prompt, each as four little-endian bytes.
    pub crc32c: u32,
}

/// A text of which parts are those of another one. What is kept of it are the bytes between those parts, in order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Splice {
    pub source: SpliceSource,
    /// Bytes of the whole text.
    pub length: u32,
    /// CRC-32C of the whole text.
    pub crc32c: u32,
    /// In the order in which they stand in the text; none reaches into the next.
    pub parts: Vec<Part>,
}

/// Where the parts of a text are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SpliceSource {
    /// In the same body of the base.
    Base,
    /// In the call's own `client_request`.
    ClientRequest,
}

impl SpliceSource {
    /// The name stored in captures.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Base => "base",
            Self::ClientRequest => "client_request",
        }
    }

    /// The source with this stored name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Base, Self::ClientRequest].into_iter().find(|source| source.as_str() == name)
    }
}

/// `length` bytes of a text from byte `at` on are those of another one from byte `from` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Part {
    pub at: u32,
    pub from: u32,
    pub length: u32,
}

impl Splice {
    /// Bytes that are not in parts.
    #[must_use]
    pub fn kept(&self) -> u64 {
        let parts: u64 = self.parts.iter().map(|part| u64::from(part.length)).sum();
        u64::from(self.length).saturating_sub(parts)
    }
}
