//! The attention block around the attention kernel: norm, projections, per-head norm and rotation before
//! it; the output projection belongs to the block after it (see `mlp`).
//!
//! Shapes: `_nd` is `[rows, hidden]`, `_nq` `[rows, heads * head_dim]`, `_nk` `[rows, kv_heads * head_dim]`,
//! `_nw` `[rows, (heads + 2 kv_heads) * head_dim]` with q, k and v side by side.

use super::buffers::Buffer;
use super::decoder::{Layer, Saved, Tiles};
use super::parameters::Gradients;
use crate::kernels::{
    HeadNorm, Output, Pool, View, accumulate_outer, matmul, matmul_packed, rms_norm, rms_norm_backward,
    rms_norm_weight_gradient,
};

/// Scale of the scores, applied to the queries.
fn query_factor(head_dim: usize) -> f32 {
    (1.0 / (head_dim as f64).sqrt()) as f32
}

impl Layer<'_> {
    fn query_norm(&self) -> HeadNorm<'_> {
        HeadNorm {
            weight: self.weights(&self.ranges.q_norm),
            epsilon: self.config.rms_norm_eps,
            table: self.rope,
            factor: query_factor(self.config.head_dim),
            heads: self.config.num_attention_heads,
        }
    }

    fn key_norm(&self) -> HeadNorm<'_> {
        HeadNorm {
            weight: self.weights(&self.ranges.k_norm),
            factor: 1.0,
            heads: self.config.num_key_value_heads,
            ..self.query_norm()
        }
    }

    /// Width of q, k and v side by side.
    pub(super) fn qkv_width(&self) -> usize {
        self.config.query_size() + 2 * self.config.key_value_size()
    }

    /// `x` to normed rotated queries and keys, and values (the last columns of `qkv`).
    pub(super) fn project(&self, pool: &Pool, tiles: Tiles, positions: &[u32], saved: &mut Saved) {
        let config = self.config;
        let (hidden, query, key_value) = (config.hidden_size, config.query_size(), config.key_value_size());
        let width = self.qkv_width();
        let rows = tiles.rows;
        let items: Vec<_> = positions
            .chunks(rows)
            .zip(saved.x_nd.chunks(rows * hidden))
            .zip(saved.h1_nd.chunks_mut(rows * hidden))
            .zip(saved.scale1_n.chunks_mut(rows))
            .zip(saved.qkv_nw.chunks_mut(rows * width))
            .zip(saved.q_nq.chunks_mut(rows * query))
            .zip(saved.k_nk.chunks_mut(rows * key_value))
            .collect();
        let inner = tiles.inner(pool);
        pool.each(items, |((((((positions, x), h1), scales), qkv), q), k)| {
            rms_norm(x, self.weights(&self.ranges.input_norm), config.rms_norm_eps, h1, scales);
            matmul_packed(inner, View::new(h1, hidden), &self.packed.qkv, qkv, Output::Set);
            self.query_norm().forward(qkv, width, positions, q);
            self.key_norm().forward(&qkv[query..], width, positions, k);
        });
    }

    /// Gradient of [`Layer::project`]: adds to `dx_nd` from the gradients at queries, keys and values. On
    /// return `d.q_nq` and `d.k_nk` hold gradients at the head norms' outputs.
    #[expect(clippy::too_many_arguments, reason = "inputs, gradients in and gradients out")]
    pub(super) fn project_backward(
        &self,
        pool: &Pool,
        tiles: Tiles,
        positions: &[u32],
        saved: &Saved,
        d: &mut ProjectGradients,
        dx_nd: &mut [f32],
        gradients: &mut Gradients,
    ) {
        let config = self.config;
        let (hidden, query, key_value) = (config.hidden_size, config.query_size(), config.key_value_size());
        let width = self.qkv_width();
        let rows = tiles.rows;
        let items: Vec<_> = positions
            .chunks(rows)
            .zip(saved.x_nd.chunks(rows * hidden))
            .zip(saved.scale1_n.chunks(rows))
            .zip(saved.qkv_nw.chunks(rows * width))
            .zip(d.q_nq.chunks_mut(rows * query))
            .zip(d.k_nk.chunks_mut(rows * key_value))
            .zip(d.qkv_nw.chunks_mut(rows * width))
            .zip(d.h1_nd.chunks_mut(rows * hidden))
            .zip(dx_nd.chunks_mut(rows * hidden))
            .collect();
        let inner = tiles.inner(pool);
        pool.each(items, |((((((((positions, x), scales), qkv), dq), dk), d_qkv), dh), dx)| {
            self.query_norm().backward(qkv, width, positions, dq, d_qkv);
            self.key_norm().backward(&qkv[query..], width, positions, dk, &mut d_qkv[query..]);
            let weights = View::new(self.weights(&self.ranges.qkv), hidden);
            matmul(inner, View::new(d_qkv, width), weights, dh, Output::Set);
            rms_norm_backward(x, self.weights(&self.ranges.input_norm), scales, dh, dx);
        });
        let grads = &mut gradients.flat;
        accumulate_outer(
            pool,
            positions.len(),
            View::new(&d.qkv_nw, width),
            View::new(&saved.h1_nd, hidden),
            &mut grads[self.ranges.qkv.clone()],
        );
        rms_norm_weight_gradient(
            &saved.x_nd,
            &saved.scale1_n,
            &d.h1_nd,
            &mut grads[self.ranges.input_norm.clone()],
        );
        self.query_norm().weight_gradient(
            &saved.qkv_nw,
            width,
            positions,
            &d.q_nq,
            &mut grads[self.ranges.q_norm.clone()],
        );
        self.key_norm().weight_gradient(
            &saved.qkv_nw[query..],
            width,
            positions,
            &d.k_nk,
            &mut grads[self.ranges.k_norm.clone()],
        );
    }
}

/// Gradients between the attention kernel and the block's input, shared by all layers of a pass.
pub(super) struct ProjectGradients {
    pub q_nq: Buffer,
    pub k_nk: Buffer,
    pub qkv_nw: Buffer,
    pub h1_nd: Buffer,
}
