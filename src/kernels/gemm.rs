//! Matrix products with one law: **every output element is one chain of fused multiply-adds over
//! k = 0, 1, .. K-1**, starting from 0 or from the element's old value. Blocking, threads and instruction
//! sets decide which elements are computed when, never the order within one, so the same row gives the
//! same bits alone and among a thousand.
//!
//! The lanes of a register are neighbouring columns of the output; a micro-kernel holds up to
//! [`ROWS`] x 64 of them in registers and walks k once.

use super::Pool;
use super::isa::dispatch;
use super::simd::{LANES, Simd};

/// Rows of the largest micro-kernel.
pub(crate) const ROWS: usize = 6;
/// Columns of a packed panel.
pub(crate) const PANEL: usize = 64;
/// Most steps of k between two visits of the outputs: a panel of the right operand and a block of the left
/// one then stay in a core's first cache.
const DEPTH: usize = 128;

/// What happens to the old value of an output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    /// Overwritten: chain from 0.
    Set,
    /// The chain from 0 is added to it.
    Add,
    /// The chain starts from it, so that products over consecutive pieces of k make one chain.
    Continue,
}

/// Where the right operand `[k, n]` lies, column `j` of step `k` at `start(j) + k * stride`.
#[derive(Clone, Copy)]
pub(crate) enum Right {
    /// Panels of 64 columns, whole vectors readable everywhere.
    Panels(*const f32),
    /// Row-major with a row stride; only the `n` columns may be read.
    Strided(*const f32, usize),
}

/// One product; pointers are valid for what the shape says.
#[derive(Clone, Copy)]
pub(crate) struct Product {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    /// Left operand: element `(row, k)` at `row * left_row + k * left_step`.
    pub left: *const f32,
    pub left_row: usize,
    pub left_step: usize,
    pub right: Right,
    pub out: *mut f32,
    pub out_row: usize,
    pub output: Output,
}

// SAFETY: a product only describes memory; `product` is where its promises are made.
unsafe impl Send for Product {}
// SAFETY: as above.
unsafe impl Sync for Product {}

/// `NR` vectors by `MR` rows of output, over all of k.
///
/// # Safety
/// Pointers as in [`Product`]; `tail` valid lanes in the last vector.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "a micro-kernel's registers")]
unsafe fn micro<S: Simd, const MR: usize, const NR: usize, const MASKED: bool>(
    k: usize,
    left: *const f32,
    left_row: usize,
    left_step: usize,
    right: *const f32,
    right_step: usize,
    out: *mut f32,
    out_row: usize,
    output: Output,
    tail: usize,
) {
    /// Runs a block for each row or column of the micro-kernel, its number a constant: an index that is a
    /// variable anywhere would keep `sums` in memory everywhere.
    macro_rules! each {
        ($count:ident, $at:ident, $body:block, $($value:literal)*) => {
            $(if $count > $value {
                const $at: usize = $value;
                $body
            })*
        };
        (row $at:ident $body:block) => { each!(MR, $at, $body, 0 1 2 3 4 5) };
        (column $at:ident $body:block) => { each!(NR, $at, $body, 0 1 2 3) };
    }
    // SAFETY: the caller's promise.
    unsafe {
        let mut sums = [[S::splat(0.0); 4]; ROWS];
        if output == Output::Continue {
            each!(row R {
                each!(column C {
                    let at = out.add(R * out_row + C * LANES);
                    let is_cut = C + 1 == NR && tail < LANES;
                    sums[R][C] = if is_cut { S::load_first(at, tail) } else { S::load(at) };
                });
            });
        }
        let (mut left, mut right) = (left, right);
        for _ in 0..k {
            let mut columns = [S::splat(0.0); 4];
            each!(column C {
                let at = right.add(C * LANES);
                let is_cut = MASKED && C + 1 == NR;
                columns[C] = if is_cut { S::load_first(at, tail) } else { S::load(at) };
            });
            each!(row R {
                let factor = S::splat(*left.add(R * left_row));
                each!(column C {
                    sums[R][C] = S::fma(factor, columns[C], sums[R][C]);
                });
            });
            left = left.wrapping_add(left_step);
            right = right.wrapping_add(right_step);
        }
        each!(row R {
            each!(column C {
                let at = out.add(R * out_row + C * LANES);
                let is_cut = C + 1 == NR && tail < LANES;
                if output == Output::Add {
                    let old = if is_cut { S::load_first(at, tail) } else { S::load(at) };
                    sums[R][C] = S::add(old, sums[R][C]);
                }
                if is_cut {
                    S::store_first(at, sums[R][C], tail);
                } else {
                    S::store(at, sums[R][C]);
                }
            });
        });
    }
}

/// Rows of the first block when `rows` are left: blocks of nearly equal height, none above [`ROWS`].
#[inline(always)]
fn block_rows(rows: usize) -> usize {
    rows.div_ceil(rows.div_ceil(ROWS))
}

/// The body of [`product`].
///
/// # Safety
/// Pointers as in [`Product`].
#[inline(always)]
unsafe fn product_body<S: Simd>(p: &Product) {
    let mut done = 0;
    while done < p.k || (done == 0 && p.k == 0) {
        // With `Add` the chain has to be whole before it meets the old value.
        let left_over = p.k - done;
        let depth = match p.output {
            Output::Add => left_over,
            _ => left_over.div_ceil(left_over.div_ceil(DEPTH).max(1)),
        };
        let output = if done > 0 { Output::Continue } else { p.output };
        let mut j = 0;
        while j < p.n {
            let width = (p.n - j).min(S::COLUMNS * LANES);
            let vectors = width.div_ceil(LANES);
            let tail = width - (vectors - 1) * LANES;
            // SAFETY: the caller's promise: column j, step `done` lie inside the operand.
            let (right, step, is_masked) = unsafe {
                match p.right {
                    Right::Panels(start) => {
                        let panel = start.add(j / PANEL * PANEL * p.k + j % PANEL);
                        (panel.add(done * PANEL), PANEL, false)
                    }
                    Right::Strided(start, stride) => (start.add(done * stride + j), stride, tail < LANES),
                }
            };
            let mut i = 0;
            while i < p.m {
                let rows = block_rows(p.m - i);
                // SAFETY: the block lies inside the product.
                unsafe {
                    let left = p.left.add(i * p.left_row + done * p.left_step);
                    let out = p.out.add(i * p.out_row + j);
                    macro_rules! call {
                        ($mr:literal, $nr:literal) => {
                            if is_masked {
                                micro::<S, $mr, $nr, true>(
                                    depth,
                                    left,
                                    p.left_row,
                                    p.left_step,
                                    right,
                                    step,
                                    out,
                                    p.out_row,
                                    output,
                                    tail,
                                )
                            } else {
                                micro::<S, $mr, $nr, false>(
                                    depth,
                                    left,
                                    p.left_row,
                                    p.left_step,
                                    right,
                                    step,
                                    out,
                                    p.out_row,
                                    output,
                                    tail,
                                )
                            }
                        };
                        ($nr:literal) => {
                            match rows {
                                1 => call!(1, $nr),
                                2 => call!(2, $nr),
                                3 => call!(3, $nr),
                                4 => call!(4, $nr),
                                5 => call!(5, $nr),
                                _ => call!(6, $nr),
                            }
                        };
                    }
                    if S::COLUMNS == 1 {
                        call!(1);
                    } else {
                        match vectors {
                            1 => call!(1),
                            2 => call!(2),
                            3 => call!(3),
                            _ => call!(4),
                        }
                    }
                }
                i += rows;
            }
            j += width;
        }
        done += depth;
        if p.k == 0 {
            break;
        }
    }
}

dispatch! {
    /// Runs a product on this thread.
    ///
    /// # Safety
    /// Pointers are valid for the shape, and `out` overlaps neither operand.
    pub(crate) unsafe fn product(p: &Product) = product_body
}

/// Work below this many multiply-adds is not worth sharing out.
const SHARE: usize = 1 << 17;

/// Runs a product on the pool's threads: split by rows when there are many, else by columns.
///
/// # Safety
/// As [`product`].
pub(super) unsafe fn share(pool: &Pool, whole: Product) {
    let Product { m, n, k, .. } = whole;
    let threads = pool.threads();
    if threads == 1 || m * n * k < SHARE {
        // SAFETY: the caller's promise.
        return unsafe { product(&whole) };
    }
    let by_rows = m >= 2 * ROWS * threads;
    let (total, unit) = if by_rows { (m, ROWS) } else { (n, PANEL) };
    let units = total.div_ceil(unit);
    let tasks = units.min(4 * threads);
    pool.run(tasks, move |task| {
        let whole = { whole };
        let Product { right, left, out, .. } = whole;
        let start = task * units / tasks * unit;
        let len = ((task + 1) * units / tasks * unit).min(total) - start;
        // SAFETY: tasks cover disjoint rows or columns of the whole; the caller promised the whole.
        unsafe {
            product(&if by_rows {
                Product {
                    m: len,
                    left: left.add(start * whole.left_row),
                    out: out.add(start * whole.out_row),
                    ..whole
                }
            } else {
                let right = match right {
                    Right::Panels(from) => Right::Panels(from.add(start * k)),
                    Right::Strided(from, stride) => Right::Strided(from.add(start), stride),
                };
                Product { n: len, right, out: out.add(start), ..whole }
            });
        }
    });
}
