//! Our matrix products beside the crate `gemm`'s, at the shapes of the bundled policy and of a 512-wide
//! model. Prints GFLOP/s of the best of many runs and the ratio ours / crate.

use gemm::Parallelism;
use lego::kernels::{Isa, Output, Packed, Pool, View, accumulate_outer, matmul, matmul_packed};
use std::time::{Duration, Instant};

/// Best GFLOP/s over a fifth of a second.
fn measure(flop: f64, mut run: impl FnMut()) -> f64 {
    let (start, mut best) = (Instant::now(), f64::MAX);
    while start.elapsed() < Duration::from_millis(200) {
        let begin = Instant::now();
        run();
        best = best.min(begin.elapsed().as_secs_f64());
    }
    flop / best / 1e9
}

/// The crate's product of row-major operands; `(row, column)` strides.
#[expect(clippy::too_many_arguments, reason = "a matrix product's shape")]
fn theirs(
    m: usize,
    n: usize,
    k: usize,
    out: &mut [f32],
    adds: bool,
    a: &[f32],
    a_strides: (usize, usize),
    b: &[f32],
    b_strides: (usize, usize),
    threads: usize,
) {
    let parallelism = if threads == 1 { Parallelism::None } else { Parallelism::Rayon(threads) };
    let stride = |stride: usize| stride as isize;
    // SAFETY: all three hold the shapes that the strides describe.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            stride(n),
            adds,
            a.as_ptr(),
            stride(a_strides.1),
            stride(a_strides.0),
            b.as_ptr(),
            stride(b_strides.1),
            stride(b_strides.0),
            1.0,
            1.0,
            false,
            false,
            false,
            parallelism,
        );
    }
}

fn main() {
    let shapes = [
        ("policy qkv", 256, 128),
        ("policy o", 128, 128),
        ("policy gate+up", 768, 128),
        ("policy down", 128, 384),
        ("policy head", 768, 128),
        ("512-wide gate+up", 3072, 512),
        ("512-wide down", 512, 1536),
        ("512-wide head", 32000, 512),
    ];
    println!("{:?}; GFLOP/s ours, crate gemm, ratio", Isa::current());
    for threads in [1, 2] {
        let pool = Pool::new(threads);
        for (name, n, k) in shapes {
            for m in [1, 8, 32, 64, 1536] {
                if m * n > 1 << 23 {
                    continue;
                }
                let flop = 2.0 * (m * n * k) as f64;
                let (x, w) = (vec![0.5f32; m * k], vec![0.25f32; n * k]);
                let (mut y, packed) = (vec![0f32; m * n], Packed::new(&w, n, k));
                let report = |what: &str, ours: f64, crates: f64| {
                    let ratio = ours / crates;
                    println!(
                        "{threads} thread {name:18} {what:9} m={m:<5} {ours:6.1} {crates:6.1} {ratio:5.2}"
                    );
                };
                let ours =
                    measure(flop, || matmul_packed(&pool, View::new(&x, k), &packed, &mut y, Output::Set));
                let crates =
                    measure(flop, || theirs(m, n, k, &mut y, false, &x, (k, 1), &w, (1, k), threads));
                report("forward", ours, crates);
                if m < 64 {
                    continue;
                }
                let mut dx = vec![0f32; m * k];
                let ours = measure(flop, || {
                    matmul(&pool, View::new(&y, n), View::new(&w, k), &mut dx, Output::Set);
                });
                let crates =
                    measure(flop, || theirs(m, k, n, &mut dx, false, &y, (n, 1), &w, (k, 1), threads));
                report("d input", ours, crates);
                let mut dw = vec![0f32; n * k];
                let ours =
                    measure(flop, || accumulate_outer(&pool, m, View::new(&y, n), View::new(&x, k), &mut dw));
                let crates =
                    measure(flop, || theirs(n, k, m, &mut dw, true, &y, (1, n), &x, (k, 1), threads));
                report("d weight", ours, crates);
            }
        }
    }
}
