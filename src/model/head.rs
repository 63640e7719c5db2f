//! Embedding and head. Logits live for a bounded number of rows at a time, forward and backward.

use super::Model;
use super::buffers::Buffer;
use super::decoder::Batch;
use super::parameters::Gradients;
use crate::kernels::{
    Output, Pool, View, accumulate_outer, apply_temperature, entropy, log_prob_gradient, matmul,
    matmul_packed, normalizer, rms_norm, rms_norm_backward, rms_norm_weight_gradient, with_scratch,
};

/// Floats of logits alive at a time, per thread in the forward pass and in all in the backward pass.
const LOGITS: usize = 1 << 19;

/// What the head gives for each predicting row.
pub(super) struct Predictions {
    /// Rows `[n, hidden]` after the final norm.
    pub hidden_nd: Buffer,
    pub scale_n: Buffer,
    pub log_probs: Vec<f32>,
    pub entropy: Vec<f32>,
    pub log_sum_exp: Vec<f32>,
    pub temperature: f32,
}

static SERIAL: Pool = Pool::serial();

impl Model {
    /// `[n, hidden]` rows of the embedding.
    pub(super) fn embed(&self, tokens: &[u32]) -> Buffer {
        let hidden = self.config.hidden_size;
        let table = self.parameters.slice(&self.parameters.layout.embedding);
        let mut x_nd = self.arena.take(tokens.len() * hidden);
        for (row, &token) in x_nd.chunks_exact_mut(hidden).zip(tokens) {
            row.copy_from_slice(&table[token as usize * hidden..][..hidden]);
        }
        x_nd
    }

    /// Adds each row's gradient to its token's embedding, in the order of the rows.
    pub(super) fn embed_backward(&self, tokens: &[u32], dx_nd: &[f32], gradients: &mut Gradients) {
        let hidden = self.config.hidden_size;
        let table = &mut gradients.flat[self.parameters.layout.embedding.clone()];
        for (row, &token) in dx_nd.chunks_exact(hidden).zip(tokens) {
            let target = &mut table[token as usize * hidden..][..hidden];
            crate::kernels::add(row, target);
        }
    }

    /// Final norm of rows: the hidden states that meet the head.
    pub(super) fn final_norm(&self, pool: &Pool, x_nd: &[f32]) -> (Buffer, Buffer) {
        let hidden = self.config.hidden_size;
        let weight = self.parameters.slice(&self.parameters.layout.norm);
        let mut hidden_nd = self.arena.take(x_nd.len());
        let mut scale_n = self.arena.take(x_nd.len() / hidden);
        let rows = (scale_n.len().div_ceil(pool.threads())).max(32);
        let items: Vec<_> = x_nd
            .chunks(rows * hidden)
            .zip(hidden_nd.chunks_mut(rows * hidden))
            .zip(scale_n.chunks_mut(rows))
            .collect();
        pool.each(items, |((x, h), scales)| rms_norm(x, weight, self.config.rms_norm_eps, h, scales));
        (hidden_nd, scale_n)
    }

    /// Log-probs, entropies and normalisers of the batch's predicting rows.
    pub(super) fn predict(
        &self,
        pool: &Pool,
        batch: &Batch,
        x_nd: &[f32],
        temperature: f32,
        with_entropy: bool,
    ) -> Predictions {
        let (hidden, vocab) = (self.config.hidden_size, self.config.vocab_size);
        let (hidden_nd, scale_n) = self.final_norm(pool, x_nd);
        let count = batch.predicting.len();
        let mut log_probs = vec![0.0; count];
        let mut log_sum_exp = vec![0.0; count];
        let mut entropies = vec![0.0; if with_entropy { count } else { 0 }];
        let rows = (LOGITS / vocab).clamp(12, 96);
        let items: Vec<_> = batch
            .predicting
            .chunks(rows)
            .zip(log_probs.chunks_mut(rows))
            .zip(log_sum_exp.chunks_mut(rows))
            .zip(chunks_or_empty(&mut entropies, rows, count))
            .collect();
        pool.each(items, |(((predicting, log_probs), sums), entropies)| {
            with_scratch(predicting.len() * (vocab + hidden), |scratch| {
                let (h, logits) = scratch.split_at_mut(predicting.len() * hidden);
                gather(&hidden_nd, predicting, hidden, h);
                matmul_packed(&SERIAL, View::new(h, hidden), &self.packed.head, logits, Output::Set);
                for (at, row) in logits.chunks_exact_mut(vocab).enumerate() {
                    apply_temperature(row, temperature);
                    let normalizer = normalizer(row);
                    let target = batch.tokens[predicting[at] as usize + 1];
                    sums[at] = normalizer.log_sum_exp;
                    log_probs[at] = row[target as usize] - normalizer.log_sum_exp;
                    if let Some(value) = entropies.get_mut(at) {
                        *value = entropy(row, normalizer);
                    }
                }
            });
        });
        Predictions { hidden_nd, scale_n, log_probs, entropy: entropies, temperature, log_sum_exp }
    }

    /// Gradient at `x` (before the final norm) of a loss with `d loss / d log_prob` = `grad`, one value a
    /// predicting row.
    pub(super) fn predict_backward(
        &self,
        pool: &Pool,
        batch: &Batch,
        x_nd: &[f32],
        predictions: &Predictions,
        grad: &[f32],
        gradients: &mut Gradients,
    ) -> Buffer {
        let (hidden, vocab) = (self.config.hidden_size, self.config.vocab_size);
        let layout = &self.parameters.layout;
        let mut dh_nd = self.arena.take(x_nd.len());
        dh_nd.fill(0.0);
        // Rows whose log-prob the loss does not touch take no part.
        let active: Vec<usize> = (0..grad.len()).filter(|&at| grad[at] != 0.0).collect();
        let chunk = (4 * LOGITS / vocab).clamp(24, 480).min(active.len().max(1));
        let mut h = self.arena.take(chunk * hidden);
        let mut d_logits = self.arena.take(chunk * vocab);
        let mut dh = self.arena.take(chunk * hidden);
        let weights = self.parameters.slice(&layout.head);
        for active in active.chunks(chunk) {
            let count = active.len();
            let rows = count.div_ceil(2 * pool.threads()).next_multiple_of(6).min(96);
            let items: Vec<_> = active
                .chunks(rows)
                .zip(h[..count * hidden].chunks_mut(rows * hidden))
                .zip(d_logits[..count * vocab].chunks_mut(rows * vocab))
                .zip(dh[..count * hidden].chunks_mut(rows * hidden))
                .collect();
            pool.each(items, |(((active, h), d_logits), dh)| {
                for (&at, h) in active.iter().zip(h.chunks_exact_mut(hidden)) {
                    let row = batch.predicting[at] as usize;
                    h.copy_from_slice(&predictions.hidden_nd[row * hidden..][..hidden]);
                }
                matmul_packed(&SERIAL, View::new(h, hidden), &self.packed.head, d_logits, Output::Set);
                for (&at, logits) in active.iter().zip(d_logits.chunks_exact_mut(vocab)) {
                    apply_temperature(logits, predictions.temperature);
                    let target = batch.tokens[batch.predicting[at] as usize + 1] as usize;
                    let scaled = grad[at] / predictions.temperature;
                    log_prob_gradient(logits, target, predictions.log_sum_exp[at], scaled);
                }
                let weights = View::new(weights, hidden);
                matmul(&SERIAL, View::new(d_logits, vocab), weights, dh, Output::Set);
            });
            for (&at, dh) in active.iter().zip(dh.chunks_exact(hidden)) {
                let row = batch.predicting[at] as usize;
                dh_nd[row * hidden..(row + 1) * hidden].copy_from_slice(dh);
            }
            let target = if self.config.tie_word_embeddings {
                &mut gradients.tied_head[..]
            } else {
                &mut gradients.flat[layout.head.clone()]
            };
            accumulate_outer(
                pool,
                count,
                View::new(&d_logits[..count * vocab], vocab),
                View::new(&h[..count * hidden], hidden),
                target,
            );
        }
        let weight = self.parameters.slice(&layout.norm);
        let mut dx_nd = self.arena.take(x_nd.len());
        dx_nd.fill(0.0);
        rms_norm_backward(x_nd, weight, &predictions.scale_n, &dh_nd, &mut dx_nd);
        let d_weight = &mut gradients.flat[layout.norm.clone()];
        rms_norm_weight_gradient(x_nd, &predictions.scale_n, &dh_nd, d_weight);
        dx_nd
    }
}

/// Chunks of `values`, or as many empty ones as `count` rows would have.
fn chunks_or_empty(values: &mut [f32], rows: usize, count: usize) -> Vec<&mut [f32]> {
    if values.is_empty() {
        return (0..count.div_ceil(rows)).map(|_| <&mut [f32]>::default()).collect();
    }
    values.chunks_mut(rows).collect()
}

fn gather(from: &[f32], rows: &[u32], width: usize, to: &mut [f32]) {
    for (&row, to) in rows.iter().zip(to.chunks_exact_mut(width)) {
        to.copy_from_slice(&from[row as usize * width..][..width]);
    }
}
