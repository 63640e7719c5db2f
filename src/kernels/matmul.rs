//! Matrix products of slices: the safe face of [`super::gemm`].

use super::Pool;
use super::gemm::{Output, PANEL, Product, Right, share};
use std::ops::Range;

/// A weight matrix `[n, k]`, repacked so that the kernels read it front to back: panels of 64 outputs,
/// `[panel][k][64]`, the last one padded with zeros.
#[derive(Debug, Clone, Default)]
pub struct Packed {
    n: usize,
    k: usize,
    data: Vec<f32>,
}

impl Packed {
    /// Packs row-major `weights` `[n, k]`.
    #[must_use]
    pub fn new(weights: &[f32], n: usize, k: usize) -> Self {
        let mut packed = Self { n, k, data: vec![0.0; n.div_ceil(PANEL) * PANEL * k] };
        packed.repack(weights);
        packed
    }

    /// Packs other weights of the same shape.
    ///
    /// # Panics
    /// When `weights` does not have `n * k` values.
    pub fn repack(&mut self, weights: &[f32]) {
        assert_eq!(weights.len(), self.n * self.k, "weights have the packed matrix's shape");
        if self.k == 0 {
            return;
        }
        for (row, values) in weights.chunks_exact(self.k).enumerate() {
            let start = row / PANEL * PANEL * self.k + row % PANEL;
            for (step, &value) in values.iter().enumerate() {
                self.data[start + step * PANEL] = value;
            }
        }
    }

    /// Outputs.
    #[must_use]
    pub fn outputs(&self) -> usize {
        self.n
    }

    /// Inputs.
    #[must_use]
    pub fn inputs(&self) -> usize {
        self.k
    }
}

/// A row-major matrix of `columns` columns whose rows start `stride` floats apart.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    data: &'a [f32],
    columns: usize,
    stride: usize,
}

impl<'a> View<'a> {
    /// Dense rows.
    #[must_use]
    pub fn new(data: &'a [f32], columns: usize) -> Self {
        Self { data, columns, stride: columns }
    }

    /// Some columns of wider rows.
    #[must_use]
    pub fn columns(data: &'a [f32], stride: usize, columns: Range<usize>) -> Self {
        Self { data: data.get(columns.start..).unwrap_or(&[]), columns: columns.len(), stride }
    }

    fn check(&self, rows: usize) {
        let needed = if rows == 0 { 0 } else { (rows - 1) * self.stride + self.columns };
        assert!(
            self.columns <= self.stride && needed <= self.data.len(),
            "a view has the rows it is used for"
        );
    }
}

/// `out [m, n]` = `left [m, k]` times the transpose of `weights [n, k]`.
///
/// # Panics
/// When the lengths do not fit.
pub fn matmul_packed(pool: &Pool, left: View<'_>, weights: &Packed, out: &mut [f32], output: Output) {
    let (n, k) = (weights.n, weights.k);
    assert!(left.columns == k && out.len().is_multiple_of(n), "operands fit");
    let m = out.len() / n;
    left.check(m);
    // SAFETY: lengths were checked; `out` is borrowed mutably, so it overlaps nothing.
    unsafe {
        share(
            pool,
            Product {
                m,
                n,
                k,
                left: left.data.as_ptr(),
                left_row: left.stride,
                left_step: 1,
                right: Right::Panels(weights.data.as_ptr()),
                out: out.as_mut_ptr(),
                out_row: n,
                output,
            },
        );
    }
}

/// `out [m, n]` = `left [m, k]` times `right [k, n]`: the gradient of a linear layer's input, with its
/// weights as `right`.
///
/// # Panics
/// When the lengths do not fit.
pub fn matmul(pool: &Pool, left: View<'_>, right: View<'_>, out: &mut [f32], output: Output) {
    let (n, k) = (right.columns, left.columns);
    assert!(out.len().is_multiple_of(n), "operands fit");
    let m = out.len() / n;
    left.check(m);
    right.check(k);
    // SAFETY: lengths were checked; `out` is borrowed mutably, so it overlaps nothing.
    unsafe {
        share(
            pool,
            Product {
                m,
                n,
                k,
                left: left.data.as_ptr(),
                left_row: left.stride,
                left_step: 1,
                right: Right::Strided(right.data.as_ptr(), right.stride),
                out: out.as_mut_ptr(),
                out_row: n,
                output,
            },
        );
    }
}

/// `out [m, n]` continues with the transpose of `left [rows, m]` times `right [rows, n]`: the gradient of a
/// linear layer's weights, one chain over all rows in order, across calls too.
///
/// # Panics
/// When the lengths do not fit.
pub fn accumulate_outer(pool: &Pool, rows: usize, left: View<'_>, right: View<'_>, out: &mut [f32]) {
    let (m, n) = (left.columns, right.columns);
    assert_eq!(out.len(), m * n, "operands fit");
    left.check(rows);
    right.check(rows);
    // SAFETY: lengths were checked; `out` is borrowed mutably, so it overlaps nothing.
    unsafe {
        share(
            pool,
            Product {
                m,
                n,
                k: rows,
                left: left.data.as_ptr(),
                left_row: 1,
                left_step: left.stride,
                right: Right::Strided(right.data.as_ptr(), right.stride),
                out: out.as_mut_ptr(),
                out_row: n,
                output: Output::Continue,
            },
        );
    }
}
