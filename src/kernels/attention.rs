//! Causal grouped-query attention, over whole sequences and over a key-value cache.
//!
//! Both go through [`attend`]: a score is one chain over `head_dim`, the softmax's sum is 16 partial sums
//! interleaved by absolute position, an output is one chain over positions from 0. A row therefore has
//! the same bits in a training batch, a prefill chunk and a decode step.
//!
//! Keys are kept in panels `[positions / 64][head_dim][64]`, values in rows `[position][head_dim]`, per
//! key-value head. Queries arrive scaled by `1 / sqrt(head_dim)`.

use super::Pool;
use super::gemm::{Output, PANEL, Product, ROWS, Right, product};
use super::isa::dispatch;
use super::math::{exp, load, store, with_scratch};
use super::simd::{LANES, Simd};
use super::softmax::row_max;
use std::ops::Range;

/// Query rows that one task of attention handles at a time: scores are `[QUERIES, positions]`.
pub(super) const QUERIES: usize = 8 * ROWS;

/// Heads of an attention layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// Query heads; a multiple of `kv_heads`.
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
}

impl Heads {
    /// Query heads per key-value head.
    #[must_use]
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Floats that `capacity` positions (a multiple of 64) take, for keys and for values each.
    #[must_use]
    pub fn cache_len(&self, capacity: usize) -> usize {
        self.kv_heads * capacity * self.head_dim
    }
}

/// Rounds positions up to whole panels.
#[must_use]
pub fn cache_capacity(positions: usize) -> usize {
    positions.next_multiple_of(PANEL)
}

/// Raw memory that tasks touch at disjoint places.
#[derive(Clone, Copy)]
pub(super) struct Raw(*mut f32);
// SAFETY: whoever makes one promises that the tasks write disjoint elements.
unsafe impl Send for Raw {}
// SAFETY: as above.
unsafe impl Sync for Raw {}
impl Raw {
    pub fn new(data: &mut [f32]) -> Self {
        Self(data.as_mut_ptr())
    }
    pub fn read(data: &[f32]) -> Self {
        Self(data.as_ptr().cast_mut())
    }
    pub fn at(self, offset: usize) -> *mut f32 {
        self.0.wrapping_add(offset)
    }
}

/// Queries that attend to one head's keys and values.
#[derive(Clone, Copy)]
pub(super) struct Attend {
    pub rows: usize,
    pub queries: *const f32,
    pub query_row: usize,
    /// Positions that row 0 sees; row r sees `seen + r * grows`.
    pub seen: usize,
    pub grows: usize,
    pub panels: *const f32,
    pub values: *const f32,
    pub head_dim: usize,
    pub out: *mut f32,
    pub out_row: usize,
    /// `[rows, score_row]`, at least as many columns as the last row sees, rounded up to 16.
    pub scores: *mut f32,
    pub score_row: usize,
}

/// `out = softmax(queries keys^T) values`.
///
/// # Safety
/// Pointers are valid for the shape; the CPU has `S`.
#[inline(always)]
unsafe fn attend_body<S: Simd>(a: &Attend) {
    let most = a.seen + (a.rows - 1) * a.grows;
    // SAFETY: the caller's promise.
    unsafe {
        product(&Product {
            m: a.rows,
            n: most,
            k: a.head_dim,
            left: a.queries,
            left_row: a.query_row,
            left_step: 1,
            right: Right::Panels(a.panels),
            out: a.scores,
            out_row: a.score_row,
            output: Output::Set,
        });
        let mut row = 0;
        while row < a.rows {
            let rows = (a.rows - row).min(ROWS);
            let mut inverse_sums = [0f32; ROWS];
            for (r, inverse) in inverse_sums.iter_mut().enumerate().take(rows) {
                let seen = a.seen + (row + r) * a.grows;
                *inverse = 1.0 / exp_row::<S>(a.scores.add((row + r) * a.score_row), seen);
            }
            // What all rows of the block see in one go, then each row's rest continues its chain.
            let common = a.seen + row * a.grows;
            let block = Product {
                m: rows,
                n: a.head_dim,
                k: common,
                left: a.scores.add(row * a.score_row),
                left_row: a.score_row,
                left_step: 1,
                right: Right::Strided(a.values, a.head_dim),
                out: a.out.add(row * a.out_row),
                out_row: a.out_row,
                output: Output::Set,
            };
            product(&block);
            for r in 1..rows * a.grows {
                product(&Product {
                    m: 1,
                    k: r,
                    left: block.left.add(r * a.score_row + common),
                    right: Right::Strided(a.values.add(common * a.head_dim), a.head_dim),
                    out: block.out.add(r * a.out_row),
                    output: Output::Continue,
                    ..block
                });
            }
            for (r, &inverse) in inverse_sums.iter().enumerate().take(rows) {
                scale_row::<S>(block.out.add(r * a.out_row), a.head_dim, inverse);
            }
            row += rows;
        }
    }
}

/// Replaces `len` scores by `exp(score - max)` and returns their sum.
///
/// # Safety
/// `len` floats are writable; the CPU has `S`.
#[inline(always)]
pub(super) unsafe fn exp_row<S: Simd>(row: *mut f32, len: usize) -> f32 {
    // SAFETY: the caller's promise.
    unsafe {
        let shift = S::splat(row_max::<S>(row, len));
        let mut sums = S::splat(0.0);
        let mut at = 0;
        while at < len {
            let n = (len - at).min(LANES);
            let value = exp::<S>(S::sub(load::<S>(row.add(at), n), shift));
            sums = S::add(sums, S::select_first(n, value, S::splat(0.0)));
            store::<S>(row.add(at), value, n);
            at += n;
        }
        S::reduce_add(sums)
    }
}

/// # Safety
/// `len` floats are writable; the CPU has `S`.
#[inline(always)]
pub(super) unsafe fn scale_row<S: Simd>(row: *mut f32, len: usize, factor: f32) {
    let mut at = 0;
    while at < len {
        let n = (len - at).min(LANES);
        // SAFETY: the caller's promise.
        unsafe { store::<S>(row.add(at), S::mul(load::<S>(row.add(at), n), S::splat(factor)), n) };
        at += n;
    }
}

dispatch! {
    unsafe fn attend(a: &Attend) = attend_body
}

/// Packs `rows` rows of one head, `stride` floats apart, into panels.
///
/// # Safety
/// Both pointers are valid for the shape; `panels` holds whole panels.
pub(super) unsafe fn pack_panels(from: *const f32, stride: usize, rows: usize, dim: usize, panels: *mut f32) {
    for row in 0..rows {
        let start = row / PANEL * PANEL * dim + row % PANEL;
        for column in 0..dim {
            // SAFETY: the caller's promise.
            unsafe { *panels.add(start + column * PANEL) = *from.add(row * stride + column) };
        }
    }
}

/// Copies `rows` rows of `dim` floats into dense rows.
///
/// # Safety
/// Both pointers are valid for the shape and do not overlap.
pub(super) unsafe fn pack_rows(from: *const f32, stride: usize, rows: usize, dim: usize, to: *mut f32) {
    for row in 0..rows {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(from.add(row * stride), to.add(row * dim), dim) };
    }
}

/// Attention of whole sequences, each over its own rows.
///
/// `queries` and `out` are `[rows, heads * head_dim]`, `keys` `[rows, kv_heads * head_dim]`; row r of the
/// values starts at `values[r * value_stride]`. `sequences` are ranges of rows.
///
/// # Panics
/// When the lengths do not fit.
#[expect(clippy::too_many_arguments, reason = "three operands, their stride and the shape")]
pub fn attention(
    pool: &Pool,
    shape: Heads,
    sequences: &[Range<usize>],
    queries: &[f32],
    keys: &[f32],
    values: &[f32],
    value_stride: usize,
    out: &mut [f32],
) {
    let Heads { heads, kv_heads, head_dim } = shape;
    let rows = out.len() / (heads * head_dim);
    check(shape, sequences, rows, queries, keys, values, value_stride);
    let out = Raw::new(out);
    pool.run(sequences.len() * kv_heads, |task| {
        let (sequence, kv_head) = (&sequences[task / kv_heads], task % kv_heads);
        let len = sequence.len();
        let capacity = cache_capacity(len);
        let score_row = capacity + LANES;
        with_scratch(2 * head_dim * capacity + QUERIES * score_row, |scratch| {
            let (panels, rest) = scratch.split_at_mut(capacity * head_dim);
            let (dense_values, scores) = rest.split_at_mut(capacity * head_dim);
            // SAFETY: `check` proved the lengths; tasks write the columns of different heads or rows of
            // different sequences.
            unsafe {
                let key = Raw::read(keys).at((sequence.start * kv_heads + kv_head) * head_dim);
                let value = Raw::read(values).at(sequence.start * value_stride + kv_head * head_dim);
                pack_panels(key, kv_heads * head_dim, len, head_dim, panels.as_mut_ptr());
                pack_rows(value, value_stride, len, head_dim, dense_values.as_mut_ptr());
                for head in kv_head * shape.group()..(kv_head + 1) * shape.group() {
                    for start in (0..len).step_by(QUERIES) {
                        let at = ((sequence.start + start) * heads + head) * head_dim;
                        attend(&Attend {
                            rows: QUERIES.min(len - start),
                            queries: Raw::read(queries).at(at),
                            query_row: heads * head_dim,
                            seen: start + 1,
                            grows: 1,
                            panels: panels.as_ptr(),
                            values: dense_values.as_ptr(),
                            head_dim,
                            out: out.at(at),
                            out_row: heads * head_dim,
                            scores: scores.as_mut_ptr(),
                            score_row,
                        });
                    }
                }
            }
        });
    });
}

pub(super) fn check(
    shape: Heads,
    sequences: &[Range<usize>],
    rows: usize,
    queries: &[f32],
    keys: &[f32],
    values: &[f32],
    value_stride: usize,
) {
    let key_width = shape.kv_heads * shape.head_dim;
    let mut end = 0;
    for sequence in sequences {
        assert!(end <= sequence.start && sequence.start <= sequence.end, "sequences do not overlap");
        end = sequence.end;
    }
    assert!(
        end <= rows
            && shape.heads.is_multiple_of(shape.kv_heads)
            && queries.len() == rows * shape.heads * shape.head_dim
            && keys.len() == rows * key_width
            && key_width <= value_stride
            && (rows == 0 || values.len() >= (rows - 1) * value_stride + key_width),
        "rows fit"
    );
}

/// Writes the key and value `[kv_heads * head_dim]` of one position into a slot of a cache.
///
/// # Panics
/// When the lengths do not fit.
pub fn cache_write(
    shape: Heads,
    capacity: usize,
    position: usize,
    (key, value): (&[f32], &[f32]),
    (keys, values): (&mut [f32], &mut [f32]),
) {
    let dim = shape.head_dim;
    assert!(position < capacity && capacity.is_multiple_of(PANEL), "the position fits");
    for head in 0..shape.kv_heads {
        let start = head * capacity * dim;
        let panel = start + position / PANEL * PANEL * dim + position % PANEL;
        for (step, &value) in key[head * dim..(head + 1) * dim].iter().enumerate() {
            keys[panel + step * PANEL] = value;
        }
        let row = start + position * dim;
        values[row..row + dim].copy_from_slice(&value[head * dim..(head + 1) * dim]);
    }
}

/// Copies the first `len` positions of one slot to another of the same capacity.
///
/// # Panics
/// When the lengths do not fit.
pub fn cache_copy(
    shape: Heads,
    capacity: usize,
    len: usize,
    (from_keys, from_values): (&[f32], &[f32]),
    (keys, values): (&mut [f32], &mut [f32]),
) {
    let dim = shape.head_dim;
    for head in 0..shape.kv_heads {
        let start = head * capacity * dim;
        let panels = start..start + cache_capacity(len) * dim;
        let rows = start..start + len * dim;
        keys[panels.clone()].copy_from_slice(&from_keys[panels]);
        values[rows.clone()].copy_from_slice(&from_values[rows]);
    }
}

/// Consecutive new rows of one sequence, with its cached keys and values (the new rows' included).
#[derive(Debug, Clone)]
pub struct Run<'a> {
    pub keys: &'a [f32],
    pub values: &'a [f32],
    /// Which rows of the batch.
    pub rows: Range<usize>,
    /// Absolute position of the first of them.
    pub position: usize,
}

/// Attention of new rows over their slots of a cache. `queries` and `out` are `[rows, heads * head_dim]`.
///
/// # Panics
/// When the lengths do not fit.
pub fn attention_cached(
    pool: &Pool,
    shape: Heads,
    capacity: usize,
    runs: &[Run<'_>],
    queries: &[f32],
    out: &mut [f32],
) {
    let Heads { heads, kv_heads, head_dim } = shape;
    let width = heads * head_dim;
    assert_eq!(queries.len(), out.len(), "rows fit");
    let mut end = 0;
    let mut tasks: Vec<(&Run<'_>, usize, usize)> = Vec::new();
    for run in runs {
        assert!(
            end <= run.rows.start
                && run.rows.end * width <= out.len()
                && run.position + run.rows.len() <= capacity
                && run.keys.len() == shape.cache_len(capacity)
                && run.values.len() == run.keys.len(),
            "runs fit"
        );
        end = run.rows.end;
        for start in (0..run.rows.len()).step_by(QUERIES) {
            tasks.push((run, start, QUERIES.min(run.rows.len() - start)));
        }
    }
    let out = Raw::new(out);
    pool.run(tasks.len(), |task| {
        let (run, start, rows) = tasks[task];
        let score_row = cache_capacity(run.position + start + rows) + LANES;
        let at = (run.rows.start + start) * width;
        with_scratch(rows.max(shape.group()) * score_row, |scores| {
            for kv_head in 0..kv_heads {
                let base = kv_head * capacity * head_dim;
                let first = kv_head * shape.group() * head_dim;
                let one_head = Attend {
                    rows,
                    queries: Raw::read(queries).at(at + first),
                    query_row: width,
                    seen: run.position + start + 1,
                    grows: 1,
                    panels: Raw::read(run.keys).at(base),
                    values: Raw::read(run.values).at(base),
                    head_dim,
                    out: out.at(at + first),
                    out_row: width,
                    scores: scores.as_mut_ptr(),
                    score_row,
                };
                // SAFETY: lengths were checked; tasks write different rows.
                unsafe {
                    if rows == 1 {
                        // The heads of a group share their keys and see the same positions.
                        let (rows, query_row, out_row) = (shape.group(), head_dim, head_dim);
                        attend(&Attend { rows, grows: 0, query_row, out_row, ..one_head });
                        continue;
                    }
                    for head in 0..shape.group() {
                        let queries = one_head.queries.add(head * head_dim);
                        attend(&Attend { queries, out: one_head.out.add(head * head_dim), ..one_head });
                    }
                }
            }
        });
    });
}
