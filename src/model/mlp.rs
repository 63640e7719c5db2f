//! Everything after the attention kernel: output projection, norm, SwiGLU, both residuals.
//!
//! Shapes as in `attention`; `_ng` is `[rows, 2 * intermediate]` with gate and up side by side, `_ni`
//! `[rows, intermediate]`.

use super::buffers::Buffer;
use super::decoder::{Layer, Saved, Tiles};
use super::parameters::Gradients;
use crate::kernels::{
    Output, Pool, View, accumulate_outer, matmul, matmul_packed, rms_norm, rms_norm_backward,
    rms_norm_weight_gradient, swiglu, swiglu_backward, with_scratch,
};

impl Layer<'_> {
    /// `x1 = x + attention o_proj`, then `y = x1 + down(silu(gate(norm x1)) up(norm x1))`.
    pub(super) fn feed_forward(&self, pool: &Pool, tiles: Tiles, saved: &mut Saved, y_nd: &mut [f32]) {
        let config = self.config;
        let (hidden, query, ffn) = (config.hidden_size, config.query_size(), config.intermediate_size);
        let rows = tiles.rows;
        let items: Vec<_> = saved
            .x_nd
            .chunks(rows * hidden)
            .zip(saved.a_nq.chunks(rows * query))
            .zip(saved.x1_nd.chunks_mut(rows * hidden))
            .zip(saved.h2_nd.chunks_mut(rows * hidden))
            .zip(saved.scale2_n.chunks_mut(rows))
            .zip(saved.gate_up_ng.chunks_mut(rows * 2 * ffn))
            .zip(y_nd.chunks_mut(rows * hidden))
            .collect();
        let inner = tiles.inner(pool);
        pool.each(items, |((((((x, a), x1), h2), scales), gate_up), y)| {
            x1.copy_from_slice(x);
            matmul_packed(inner, View::new(a, query), &self.packed.o, x1, Output::Add);
            rms_norm(x1, self.weights(&self.ranges.post_norm), config.rms_norm_eps, h2, scales);
            matmul_packed(inner, View::new(h2, hidden), &self.packed.gate_up, gate_up, Output::Set);
            with_scratch(gate_up.len() / 2, |f| {
                swiglu(gate_up, ffn, f);
                y.copy_from_slice(x1);
                matmul_packed(inner, View::new(f, ffn), &self.packed.down, y, Output::Add);
            });
        });
    }

    /// Gradient of [`Layer::feed_forward`] for `d.y_nd`: leaves the gradients at `x1` (which is also that at
    /// `x` through the residual) in `d.x1_nd` and at the attention's output in `d.a_nq`.
    pub(super) fn feed_forward_backward(
        &self,
        pool: &Pool,
        tiles: Tiles,
        saved: &mut Saved,
        d: &mut FeedForwardGradients,
        gradients: &mut Gradients,
    ) {
        let config = self.config;
        let (hidden, query, ffn) = (config.hidden_size, config.query_size(), config.intermediate_size);
        let rows = tiles.rows;
        let items: Vec<_> = d
            .y_nd
            .chunks(rows * hidden)
            .zip(saved.x1_nd.chunks(rows * hidden))
            .zip(saved.scale2_n.chunks(rows))
            .zip(saved.gate_up_ng.chunks_mut(rows * 2 * ffn))
            .zip(d.f_ni.chunks_mut(rows * ffn))
            .zip(d.h2_nd.chunks_mut(rows * hidden))
            .zip(d.x1_nd.chunks_mut(rows * hidden))
            .zip(d.a_nq.chunks_mut(rows * query))
            .collect();
        let inner = tiles.inner(pool);
        pool.each(items, |(((((((dy, x1), scales), gate_up), f), dh), dx1), da)| {
            let down = View::new(self.weights(&self.ranges.down), ffn);
            matmul(inner, View::new(dy, hidden), down, f, Output::Set);
            swiglu_backward(gate_up, ffn, f);
            let into = View::new(self.weights(&self.ranges.gate_up), hidden);
            matmul(inner, View::new(gate_up, 2 * ffn), into, dh, Output::Set);
            dx1.copy_from_slice(dy);
            rms_norm_backward(x1, self.weights(&self.ranges.post_norm), scales, dh, dx1);
            let o = View::new(self.weights(&self.ranges.o), query);
            matmul(inner, View::new(dx1, hidden), o, da, Output::Set);
        });
        let count = saved.scale2_n.len();
        let grads = &mut gradients.flat;
        accumulate_outer(
            pool,
            count,
            View::new(&d.y_nd, hidden),
            View::new(&d.f_ni, ffn),
            &mut grads[self.ranges.down.clone()],
        );
        accumulate_outer(
            pool,
            count,
            View::new(&saved.gate_up_ng, 2 * ffn),
            View::new(&saved.h2_nd, hidden),
            &mut grads[self.ranges.gate_up.clone()],
        );
        accumulate_outer(
            pool,
            count,
            View::new(&d.x1_nd, hidden),
            View::new(&saved.a_nq, query),
            &mut grads[self.ranges.o.clone()],
        );
        rms_norm_weight_gradient(
            &saved.x1_nd,
            &saved.scale2_n,
            &d.h2_nd,
            &mut grads[self.ranges.post_norm.clone()],
        );
    }
}

/// Gradients inside the block, shared by all layers of a pass.
pub(super) struct FeedForwardGradients {
    pub y_nd: Buffer,
    /// The activation that meets the down projection.
    pub f_ni: Buffer,
    pub h2_nd: Buffer,
    pub x1_nd: Buffer,
    pub a_nq: Buffer,
}
