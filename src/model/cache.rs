//! Keys and values of running sequences.

use super::{Config, ModelError};

/// One row of a [`super::Model::step`]: the next token of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    pub slot: usize,
    /// Absolute position; rows of a slot continue it without a gap.
    pub position: usize,
    pub token: u32,
}

/// Keys and values of up to `slots` sequences of up to `max_tokens` tokens.
#[derive(Debug)]
pub struct KvCache {
    lengths: Vec<usize>,
    max_tokens: usize,
}

impl KvCache {
    /// An empty cache. Memory is touched only as tokens arrive.
    #[must_use]
    pub fn new(_config: &Config, slots: usize, max_tokens: usize) -> Self {
        Self {
            lengths: vec![0; slots],
            max_tokens,
        }
    }

    /// Tokens that `slot` holds.
    #[must_use]
    pub fn len(&self, slot: usize) -> usize {
        self.lengths[slot]
    }

    /// True when `slot` holds nothing.
    #[must_use]
    pub fn is_empty(&self, slot: usize) -> bool {
        self.lengths[slot] == 0
    }

    /// Number of slots.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.lengths.len()
    }

    /// Tokens that one slot can hold.
    #[must_use]
    pub fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    /// Keeps the first `len` tokens of `slot` (0 frees it).
    pub fn truncate(&mut self, slot: usize, len: usize) {
        self.lengths[slot] = self.lengths[slot].min(len);
    }

    /// Makes the first `len` tokens of `to` those of `from`; `to` holds exactly `len` tokens afterwards.
    ///
    /// # Errors
    /// A slot that does not exist, or `from` holding fewer than `len` tokens.
    pub fn copy_prefix(&mut self, _from: usize, _to: usize, _len: usize) -> Result<(), ModelError> {
        unimplemented!()
    }
}

/// Logits of the rows that asked for them, in row order.
#[derive(Debug, Clone, PartialEq)]
pub struct Logits {
    pub(super) values: Vec<f32>,
    pub(super) vocab_size: usize,
}

impl Logits {
    /// Number of rows that asked for logits.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.values.len() / self.vocab_size
    }

    /// Logits `[vocab]` of the `index`-th row that asked for them.
    #[must_use]
    pub fn row(&self, index: usize) -> &[f32] {
        &self.values[index * self.vocab_size..(index + 1) * self.vocab_size]
    }

    /// As [`Logits::row`], to scale in place.
    pub fn row_mut(&mut self, index: usize) -> &mut [f32] {
        &mut self.values[index * self.vocab_size..(index + 1) * self.vocab_size]
    }
}
