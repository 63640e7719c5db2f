//! Gradient of [`super::attention`]. Probabilities are computed again from queries and keys.
//!
//! One task owns a key-value head of a sequence, so every sum over queries runs in a fixed order.

use super::attention::{Heads, QUERIES, Raw, check, exp_row, pack_panels, pack_rows};
use super::gemm::{Output, Product, Right, product};
use super::isa::dispatch;
use super::math::{dot, load, store, with_scratch};
use super::simd::{LANES, Simd};
use super::{Pool, cache_capacity};
use std::ops::Range;

/// What the forward pass saw and gave, shaped as in [`super::attention`].
#[derive(Debug, Clone, Copy)]
pub struct AttentionInputs<'a> {
    pub queries: &'a [f32],
    pub keys: &'a [f32],
    pub values: &'a [f32],
    pub value_stride: usize,
    pub out: &'a [f32],
}

/// Writes the gradients at queries, keys and values; `d_values` has rows `value_stride` apart, like the
/// values.
///
/// # Panics
/// When the lengths do not fit.
#[expect(clippy::too_many_arguments, reason = "three gradients and the shape")]
pub fn attention_backward(
    pool: &Pool,
    shape: Heads,
    sequences: &[Range<usize>],
    inputs: AttentionInputs<'_>,
    d_out: &[f32],
    d_queries: &mut [f32],
    d_keys: &mut [f32],
    d_values: &mut [f32],
) {
    let AttentionInputs { queries, keys, values, value_stride, out } = inputs;
    let Heads { heads, kv_heads, head_dim } = shape;
    let rows = out.len() / (heads * head_dim);
    check(shape, sequences, rows, queries, keys, values, value_stride);
    check(shape, sequences, rows, d_queries, d_keys, d_values, value_stride);
    assert!(out.len() == queries.len() && d_out.len() == queries.len(), "rows fit");
    let (to_queries, to_keys, to_values) = (Raw::new(d_queries), Raw::new(d_keys), Raw::new(d_values));
    pool.run(sequences.len() * kv_heads, |task| {
        let (sequence, kv_head) = (&sequences[task / kv_heads], task % kv_heads);
        let len = sequence.len();
        let capacity = cache_capacity(len);
        let one = capacity * head_dim;
        // Rows of whole panels would put a column's scores into few sets of the cache.
        let score_row = capacity + LANES;
        with_scratch(5 * one + 2 * QUERIES * score_row, |scratch| {
            let mut pieces = scratch[..5 * one].chunks_exact_mut(one);
            let mut piece = || pieces.next().map_or(std::ptr::null_mut(), <[f32]>::as_mut_ptr);
            let (key_panels, value_panels, dense_keys) = (piece(), piece(), piece());
            let (d_keys, d_values) = (piece(), piece());
            let scores = Raw::read(&scratch[5 * one..]);
            let key_width = kv_heads * head_dim;
            let key_at = (sequence.start * kv_heads + kv_head) * head_dim;
            let value_at = sequence.start * value_stride + kv_head * head_dim;
            // SAFETY: `check` proved the lengths, scratch is cut into disjoint pieces; tasks write the columns
            // of different heads or rows of different sequences.
            unsafe {
                let key = Raw::read(keys).at(key_at);
                pack_panels(key, key_width, len, head_dim, key_panels);
                pack_rows(key, key_width, len, head_dim, dense_keys);
                let value = Raw::read(values).at(value_at);
                pack_panels(value, value_stride, len, head_dim, value_panels);
                for head in kv_head * shape.group()..(kv_head + 1) * shape.group() {
                    for start in (0..len).step_by(QUERIES) {
                        let at = ((sequence.start + start) * heads + head) * head_dim;
                        block(&Block {
                            rows: QUERIES.min(len - start),
                            start,
                            is_first: head == kv_head * shape.group(),
                            head_dim,
                            row: heads * head_dim,
                            queries: Raw::read(queries).at(at),
                            out: Raw::read(out).at(at),
                            d_out: Raw::read(d_out).at(at),
                            d_queries: to_queries.at(at),
                            key_panels,
                            value_panels,
                            dense_keys,
                            d_keys,
                            d_values,
                            scores: scores.at(0),
                            d_scores: scores.at(QUERIES * score_row),
                            score_row,
                        });
                    }
                }
                for row in 0..len {
                    let (from, width) = (row * head_dim, head_dim);
                    let to = to_keys.at(key_at + row * key_width);
                    std::ptr::copy_nonoverlapping(d_keys.add(from), to, width);
                    let to = to_values.at(value_at + row * value_stride);
                    std::ptr::copy_nonoverlapping(d_values.add(from), to, width);
                }
            }
        });
    });
}

/// A block of queries of one head.
struct Block {
    rows: usize,
    /// Position of the first query.
    start: usize,
    /// First head of its group: its new positions start the sums of keys and values.
    is_first: bool,
    head_dim: usize,
    /// Stride of queries, outputs and their gradients.
    row: usize,
    queries: *const f32,
    out: *const f32,
    d_out: *const f32,
    d_queries: *mut f32,
    key_panels: *const f32,
    value_panels: *const f32,
    dense_keys: *const f32,
    d_keys: *mut f32,
    d_values: *mut f32,
    scores: *mut f32,
    d_scores: *mut f32,
    score_row: usize,
}

dispatch! {
    unsafe fn block(b: &Block) = block_body
}

/// # Safety
/// Pointers are valid for the shape; the CPU has `S`.
#[inline(always)]
unsafe fn block_body<S: Simd>(b: &Block) {
    let dim = b.head_dim;
    let seen = b.start + b.rows;
    // SAFETY: the caller's promise.
    unsafe {
        if b.is_first {
            // The block's own positions have no gradient yet.
            std::ptr::write_bytes(b.d_keys.add(b.start * dim), 0, b.rows * dim);
            std::ptr::write_bytes(b.d_values.add(b.start * dim), 0, b.rows * dim);
        }
        // Scores, and the gradient at probabilities: both [rows, seen].
        let scores = Product {
            m: b.rows,
            n: seen,
            k: dim,
            left: b.queries,
            left_row: b.row,
            left_step: 1,
            right: Right::Panels(b.key_panels),
            out: b.scores,
            out_row: b.score_row,
            output: Output::Set,
        };
        product(&scores);
        product(&Product { left: b.d_out, right: Right::Panels(b.value_panels), out: b.d_scores, ..scores });
        for row in 0..b.rows {
            let scores = b.scores.add(row * b.score_row);
            let d_scores = b.d_scores.add(row * b.score_row);
            let visible = b.start + row + 1;
            let inverse = S::splat(1.0 / exp_row::<S>(scores, visible));
            let mean = S::splat(dot::<S>(b.out.add(row * b.row), b.d_out.add(row * b.row), dim));
            let mut at = 0;
            while at < visible {
                let n = (visible - at).min(LANES);
                let probability = S::mul(load::<S>(scores.add(at), n), inverse);
                let slope = S::sub(load::<S>(d_scores.add(at), n), mean);
                store::<S>(scores.add(at), probability, n);
                store::<S>(d_scores.add(at), S::mul(probability, slope), n);
                at += n;
            }
            std::ptr::write_bytes(scores.add(visible), 0, seen - visible);
            std::ptr::write_bytes(d_scores.add(visible), 0, seen - visible);
        }
        // dQ = dS K
        product(&Product {
            m: b.rows,
            n: dim,
            k: seen,
            left: b.d_scores,
            left_row: b.score_row,
            left_step: 1,
            right: Right::Strided(b.dense_keys, dim),
            out: b.d_queries,
            out_row: b.row,
            output: Output::Set,
        });
        // dV += P^T dO, dK += dS^T Q
        let d_values = Product {
            m: seen,
            n: dim,
            k: b.rows,
            left: b.scores,
            left_row: 1,
            left_step: b.score_row,
            right: Right::Strided(b.d_out, b.row),
            out: b.d_values,
            out_row: dim,
            output: Output::Continue,
        };
        product(&d_values);
        product(&Product {
            left: b.d_scores,
            right: Right::Strided(b.queries, b.row),
            out: b.d_keys,
            ..d_values
        });
    }
}
