//! The stack of layers: what a batch is, how its rows are cut into tiles, forward and backward through all
//! layers.

use super::attention::ProjectGradients;
use super::buffers::{Arena, Buffer};
use super::mlp::FeedForwardGradients;
use super::parameters::{Gradients, LayerRanges};
use super::{Config, Model, ModelError, Parameters};
use crate::kernels::{AttentionInputs, Heads, Packed, Pool, RopeTable, attention, attention_backward};
use std::ops::Range;
use std::sync::Arc;

/// Whole sequences, one after the other.
#[derive(Debug)]
pub(super) struct Batch {
    pub tokens: Vec<u32>,
    pub positions: Vec<u32>,
    /// Rows of each sequence.
    pub sequences: Vec<Range<usize>>,
    /// Rows that predict the next token: all but the last of each sequence.
    pub predicting: Vec<u32>,
}

impl Batch {
    pub fn new(config: &Config, sequences: &[&[u32]]) -> Result<Self, ModelError> {
        let mut batch = Self { tokens: vec![], positions: vec![], sequences: vec![], predicting: vec![] };
        for &sequence in sequences {
            if sequence.is_empty() {
                return Err(ModelError::EmptySequence);
            }
            check_position(config, sequence.len() - 1)?;
            let start = batch.tokens.len();
            for (position, &token) in sequence.iter().enumerate() {
                check_token(config, token)?;
                batch.tokens.push(token);
                batch.positions.push(position as u32);
            }
            let end = batch.tokens.len();
            batch.predicting.extend(start as u32..end as u32 - 1);
            batch.sequences.push(start..end);
        }
        Ok(batch)
    }

    /// Where a sequence's predicting rows lie among all of them.
    pub fn predictions(&self, sequence: usize) -> Range<usize> {
        let Range { start, end } = self.sequences[sequence];
        // Each sequence before this one has one row that predicts nothing.
        start - sequence..end - sequence - 1
    }
}

pub(super) fn check_token(config: &Config, token: u32) -> Result<(), ModelError> {
    if token as usize >= config.vocab_size {
        return Err(ModelError::TokenOutOfRange { token, vocab_size: config.vocab_size });
    }
    Ok(())
}

pub(super) fn check_position(config: &Config, position: usize) -> Result<(), ModelError> {
    if position >= config.max_position_embeddings {
        let limit = config.max_position_embeddings;
        return Err(ModelError::PositionOutOfRange { position, limit });
    }
    Ok(())
}

/// How the rows of a batch are shared out: tiles that one thread takes through several operations, or, for
/// few rows, one tile whose matrix products are shared out by columns.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tiles {
    pub rows: usize,
    is_shared: bool,
}

static SERIAL: Pool = Pool::serial();

impl Tiles {
    pub fn new(config: &Config, pool: &Pool, rows: usize) -> Self {
        const LARGEST: usize = 96;
        let threads = pool.threads();
        let layer = config.hidden_size
            * (2 * config.query_size() + 2 * config.key_value_size() + 3 * config.intermediate_size);
        // Weights that do not fit a core's cache should be read once, not once per tile.
        let is_heavy = layer > 1 << 20;
        if threads > 1 && (rows <= 8 || (is_heavy && rows < LARGEST)) {
            return Self { rows: rows.max(1), is_shared: true };
        }
        let even = rows.div_ceil(threads).next_multiple_of(6);
        Self { rows: even.clamp(6, LARGEST), is_shared: false }
    }

    /// The pool for products inside a tile.
    pub fn inner<'a>(&self, pool: &'a Pool) -> &'a Pool {
        if self.is_shared { pool } else { &SERIAL }
    }
}

/// A layer's weights, packed for the forward pass.
#[derive(Debug, Clone)]
pub(super) struct PackedLayer {
    pub qkv: Packed,
    pub o: Packed,
    pub gate_up: Packed,
    pub down: Packed,
}

/// All matrices, packed for the forward pass.
#[derive(Debug, Clone)]
pub(super) struct PackedWeights {
    pub layers: Vec<PackedLayer>,
    pub head: Packed,
}

impl PackedWeights {
    pub fn new(config: &Config, parameters: &Parameters) -> Self {
        let (hidden, ffn) = (config.hidden_size, config.intermediate_size);
        let pack = |range: &Range<usize>, inputs: usize| {
            Packed::new(parameters.slice(range), range.len() / inputs, inputs)
        };
        let layers = parameters
            .layout
            .layers
            .iter()
            .map(|layer| PackedLayer {
                qkv: pack(&layer.qkv, hidden),
                o: pack(&layer.o, config.query_size()),
                gate_up: pack(&layer.gate_up, hidden),
                down: pack(&layer.down, ffn),
            })
            .collect();
        Self { layers, head: pack(&parameters.layout.head, hidden) }
    }

    pub fn repack(&mut self, parameters: &Parameters) {
        for (packed, ranges) in self.layers.iter_mut().zip(&parameters.layout.layers) {
            packed.qkv.repack(parameters.slice(&ranges.qkv));
            packed.o.repack(parameters.slice(&ranges.o));
            packed.gate_up.repack(parameters.slice(&ranges.gate_up));
            packed.down.repack(parameters.slice(&ranges.down));
        }
        self.head.repack(parameters.slice(&parameters.layout.head));
    }
}

/// One layer, as its blocks see it.
pub(super) struct Layer<'a> {
    pub config: &'a Config,
    pub rope: &'a RopeTable,
    pub ranges: &'a LayerRanges,
    pub packed: &'a PackedLayer,
    parameters: &'a Parameters,
}

impl Layer<'_> {
    pub fn weights(&self, range: &Range<usize>) -> &[f32] {
        self.parameters.slice(range)
    }
}

/// A layer's activations; shapes as in `attention` and `mlp`.
#[derive(Debug)]
pub(super) struct Saved {
    pub x_nd: Buffer,
    pub h1_nd: Buffer,
    pub scale1_n: Buffer,
    pub qkv_nw: Buffer,
    pub q_nq: Buffer,
    pub k_nk: Buffer,
    pub a_nq: Buffer,
    pub x1_nd: Buffer,
    pub h2_nd: Buffer,
    pub scale2_n: Buffer,
    pub gate_up_ng: Buffer,
}

impl Saved {
    fn new(config: &Config, arena: &Arc<Arena>, rows: usize, x_nd: Buffer) -> Self {
        let take = |width: usize| arena.take(rows * width);
        let (query, key_value) = (config.query_size(), config.key_value_size());
        Self {
            x_nd,
            h1_nd: take(config.hidden_size),
            scale1_n: take(1),
            qkv_nw: take(query + 2 * key_value),
            q_nq: take(query),
            k_nk: take(key_value),
            a_nq: take(query),
            x1_nd: take(config.hidden_size),
            h2_nd: take(config.hidden_size),
            scale2_n: take(1),
            gate_up_ng: take(2 * config.intermediate_size),
        }
    }
}

impl Model {
    pub(super) fn heads(&self) -> Heads {
        Heads {
            heads: self.config.num_attention_heads,
            kv_heads: self.config.num_key_value_heads,
            head_dim: self.config.head_dim,
        }
    }

    fn layer(&self, index: usize) -> Layer<'_> {
        Layer {
            config: &self.config,
            rope: &self.rope,
            ranges: &self.parameters.layout.layers[index],
            packed: &self.packed.layers[index],
            parameters: &self.parameters,
        }
    }

    /// Takes rows through all layers. `attend(layer, saved)` fills `saved.a_nq` from queries, keys and values.
    /// Gives what each layer saved (only the last one's memory, used again and again, unless `keeps`) and
    /// the last layer's output.
    pub(super) fn layers_forward(
        &self,
        pool: &Pool,
        positions: &[u32],
        x_nd: Buffer,
        keeps: bool,
        mut attend: impl FnMut(usize, &mut Saved),
    ) -> (Vec<Saved>, Buffer) {
        let rows = positions.len();
        let tiles = Tiles::new(&self.config, pool, rows);
        let mut x_nd = x_nd;
        let mut kept: Vec<Saved> = Vec::with_capacity(self.config.num_hidden_layers);
        for index in 0..self.config.num_hidden_layers {
            let layer = self.layer(index);
            let mut y_nd = self.arena.take(x_nd.len());
            let mut saved = match if keeps { None } else { kept.pop() } {
                Some(mut saved) => {
                    saved.x_nd = x_nd;
                    saved
                }
                None => Saved::new(&self.config, &self.arena, rows, x_nd),
            };
            layer.project(pool, tiles, positions, &mut saved);
            attend(index, &mut saved);
            layer.feed_forward(pool, tiles, &mut saved, &mut y_nd);
            kept.push(saved);
            x_nd = y_nd;
        }
        (kept, x_nd)
    }

    /// [`Model::layers_forward`] over whole sequences.
    pub(super) fn sequences_forward(&self, pool: &Pool, batch: &Batch, keeps: bool) -> (Vec<Saved>, Buffer) {
        let values = self.config.query_size() + self.config.key_value_size();
        let width = values + self.config.key_value_size();
        self.layers_forward(pool, &batch.positions, self.embed(&batch.tokens), keeps, |_, saved| {
            attention(
                pool,
                self.heads(),
                &batch.sequences,
                &saved.q_nq,
                &saved.k_nk,
                &saved.qkv_nw[values..],
                width,
                &mut saved.a_nq,
            );
        })
    }

    /// Takes the gradient at the last layer's output back to the embedding.
    pub(super) fn sequences_backward(
        &self,
        pool: &Pool,
        batch: &Batch,
        mut saved: Vec<Saved>,
        dy_nd: Buffer,
        gradients: &mut Gradients,
    ) {
        let config = &self.config;
        let rows = batch.tokens.len();
        let tiles = Tiles::new(config, pool, rows);
        let take = |width: usize| self.arena.take(rows * width);
        let (query, key_value) = (config.query_size(), config.key_value_size());
        let (values, width) = (query + key_value, query + 2 * key_value);
        let mut d_mlp = FeedForwardGradients {
            y_nd: dy_nd,
            f_ni: take(config.intermediate_size),
            h2_nd: take(config.hidden_size),
            x1_nd: take(config.hidden_size),
            a_nq: take(query),
        };
        let mut d_attention = ProjectGradients {
            q_nq: take(query),
            k_nk: take(key_value),
            qkv_nw: take(width),
            h1_nd: take(config.hidden_size),
        };
        for index in (0..config.num_hidden_layers).rev() {
            let Some(mut saved) = saved.pop() else { break };
            let layer = self.layer(index);
            layer.feed_forward_backward(pool, tiles, &mut saved, &mut d_mlp, gradients);
            let inputs = AttentionInputs {
                queries: &saved.q_nq,
                keys: &saved.k_nk,
                values: &saved.qkv_nw[values..],
                value_stride: width,
                out: &saved.a_nq,
            };
            attention_backward(
                pool,
                self.heads(),
                &batch.sequences,
                inputs,
                &d_mlp.a_nq,
                &mut d_attention.q_nq,
                &mut d_attention.k_nk,
                &mut d_attention.qkv_nw[values..],
            );
            layer.project_backward(
                pool,
                tiles,
                &batch.positions,
                &saved,
                &mut d_attention,
                &mut d_mlp.x1_nd,
                gradients,
            );
            std::mem::swap(&mut d_mlp.y_nd, &mut d_mlp.x1_nd);
        }
        self.embed_backward(&batch.tokens, &d_mlp.y_nd, gradients);
    }
}
