//! Keys and values of running sequences, and the step that appends to them.

use super::decoder::{check_position, check_token};
use super::{Config, Model, ModelError};
use crate::kernels::{
    Heads, Output, Pool, Run, View, attention_cached, cache_capacity, cache_copy, cache_write, matmul_packed,
};

/// One row of a [`Model::step`]: the next token of a slot.
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
    heads: Heads,
    lengths: Vec<usize>,
    max_tokens: usize,
    /// `max_tokens` in whole panels.
    capacity: usize,
    /// Per layer, all slots' keys and values.
    layers: Vec<(Vec<f32>, Vec<f32>)>,
}

impl KvCache {
    /// An empty cache. Memory is touched only as tokens arrive.
    ///
    /// # Errors
    /// [`ModelError::Memory`] when so much cannot be had.
    pub fn new(config: &Config, slots: usize, max_tokens: usize) -> Result<Self, ModelError> {
        let heads = Heads {
            heads: config.num_attention_heads,
            kv_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
        };
        // At most: the last panel may be a part of one.
        let rows = (slots as u128).saturating_mul(max_tokens as u128 + cache_capacity(1) as u128);
        let floats = rows.saturating_mul(heads.kv_heads as u128 * heads.head_dim as u128);
        // All parts at once, as they are allocated: where the system gives no more than it has, it says so here.
        reserve(2 * config.num_hidden_layers, floats, || {
            let what = format!("the keys and values of {slots} sequences of {max_tokens} tokens");
            (what, "take fewer or shorter sequences".to_owned())
        })?;
        let capacity = cache_capacity(max_tokens);
        let len = slots * heads.cache_len(capacity);
        let layers = (0..config.num_hidden_layers).map(|_| (vec![0.0; len], vec![0.0; len])).collect();
        Ok(Self { heads, lengths: vec![0; slots], max_tokens, capacity, layers })
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
    pub fn copy_prefix(&mut self, from: usize, to: usize, len: usize) -> Result<(), ModelError> {
        let slots = self.slots();
        for slot in [from, to] {
            if slot >= slots {
                return Err(ModelError::Slot { slot, slots });
            }
        }
        if len > self.lengths[from] {
            let found = self.lengths[from];
            return Err(ModelError::Length { what: "tokens of the slot to copy", found, expected: len });
        }
        self.lengths[to] = len;
        if from == to {
            return Ok(());
        }
        let one = self.heads.cache_len(self.capacity);
        for (keys, values) in &mut self.layers {
            let (from_keys, to_keys) = two_slots(keys, one, from, to);
            let (from_values, to_values) = two_slots(values, one, from, to);
            cache_copy(self.heads, self.capacity, len, (from_keys, from_values), (to_keys, to_values));
        }
        Ok(())
    }

    fn check(&self, config: &Config, rows: &[Row]) -> Result<(), ModelError> {
        let mut lengths = self.lengths.clone();
        let slots = lengths.len();
        for &Row { slot, position, token } in rows {
            let held = lengths.get_mut(slot).ok_or(ModelError::Slot { slot, slots })?;
            if *held != position {
                return Err(ModelError::Position { slot, held: *held, position });
            }
            if position >= self.max_tokens {
                return Err(ModelError::CacheFull { slot, capacity: self.max_tokens });
            }
            check_position(config, position)?;
            check_token(config, token)?;
            *held += 1;
        }
        Ok(())
    }
}

/// Refuses `parts` of so many floats each that the system does not give together, before an allocation that cannot
/// fail would end the process. `what` gives its name and the remedy.
pub(super) fn reserve(
    parts: usize,
    floats: u128,
    what: impl FnOnce() -> (String, String),
) -> Result<(), ModelError> {
    let part = || {
        let mut part = Vec::<f32>::new();
        part.try_reserve_exact(usize::try_from(floats).ok()?).ok()?;
        Some(part)
    };
    if (0..parts).map(|_| part()).collect::<Option<Vec<_>>>().is_some() {
        return Ok(());
    }
    let (what, remedy) = what();
    Err(ModelError::Memory { what, bytes: floats.saturating_mul(4 * parts as u128), remedy })
}

/// The memory of `from` to read and of `to` to write; they differ.
fn two_slots(data: &mut [f32], one: usize, from: usize, to: usize) -> (&[f32], &mut [f32]) {
    let (low, high) = data.split_at_mut(from.max(to) * one);
    if from < to {
        (&low[from * one..][..one], &mut high[..one])
    } else {
        (&high[..one], &mut low[to * one..][..one])
    }
}

/// Logits of the rows that asked for them, in row order.
#[derive(Debug, Clone, PartialEq)]
pub struct Logits {
    values: Vec<f32>,
    vocab_size: usize,
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

impl Model {
    /// Appends `rows` to their slots, prefill chunks and decode rows in any mix, and gives the logits of
    /// those rows `r` with `want_logits[r]`.
    ///
    /// # Errors
    /// A row that does not continue its slot, a full slot, a token or position out of range. Nothing is
    /// appended then.
    pub fn step(
        &self,
        pool: &Pool,
        cache: &mut KvCache,
        rows: &[Row],
        want_logits: &[bool],
    ) -> Result<Logits, ModelError> {
        if want_logits.len() != rows.len() {
            let (found, expected) = (want_logits.len(), rows.len());
            return Err(ModelError::Length { what: "want_logits", found, expected });
        }
        cache.check(&self.config, rows)?;
        let vocab_size = self.config.vocab_size;
        if rows.is_empty() {
            return Ok(Logits { values: Vec::new(), vocab_size });
        }
        let tokens: Vec<u32> = rows.iter().map(|row| row.token).collect();
        let positions: Vec<u32> = rows.iter().map(|row| row.position as u32).collect();
        let (heads, capacity) = (cache.heads, cache.capacity);
        let (query, key_value) = (self.config.query_size(), self.config.key_value_size());
        let width = query + 2 * key_value;
        let one = heads.cache_len(capacity);
        let x_nd = self.embed(&tokens);
        let (_, x_nd) = self.layers_forward(pool, &positions, x_nd, false, |layer, saved| {
            let (keys, values) = &mut cache.layers[layer];
            for (at, row) in rows.iter().enumerate() {
                let key = &saved.k_nk[at * key_value..][..key_value];
                let value = &saved.qkv_nw[at * width + query + key_value..][..key_value];
                let slot = row.slot * one..(row.slot + 1) * one;
                let target = (&mut keys[slot.clone()], &mut values[slot]);
                cache_write(heads, capacity, row.position, (key, value), target);
            }
            let mut runs: Vec<Run<'_>> = Vec::new();
            for (at, row) in rows.iter().enumerate() {
                match runs.last_mut() {
                    Some(run) if at > 0 && rows[at - 1].slot == row.slot => run.rows.end = at + 1,
                    _ => runs.push(Run {
                        keys: &keys[row.slot * one..][..one],
                        values: &values[row.slot * one..][..one],
                        rows: at..at + 1,
                        position: row.position,
                    }),
                }
            }
            attention_cached(pool, heads, capacity, &runs, &saved.q_nq, &mut saved.a_nq);
        });
        for row in rows {
            cache.lengths[row.slot] = row.position + 1;
        }
        let hidden = self.config.hidden_size;
        let wanted: Vec<usize> = (0..rows.len()).filter(|&at| want_logits[at]).collect();
        let mut wanted_nd = self.arena.take(wanted.len() * hidden);
        for (&at, target) in wanted.iter().zip(wanted_nd.chunks_exact_mut(hidden)) {
            target.copy_from_slice(&x_nd[at * hidden..][..hidden]);
        }
        let (hidden_nd, _) = self.final_norm(pool, &wanted_nd);
        let mut values = vec![0.0; wanted.len() * vocab_size];
        matmul_packed(pool, View::new(&hidden_nd, hidden), &self.packed.head, &mut values, Output::Set);
        Ok(Logits { values, vocab_size })
    }
}
