//! The kernels' law: a result depends on its inputs alone, not on blocking, threads or instruction set.

use lego::kernels::{Isa, Output, Packed, Pool, View, accumulate_outer, matmul, matmul_packed};

/// A small reproducible generator.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
    fn floats(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0).collect()
    }
}

/// The law written out: one chain of fused multiply-adds per element.
fn chain(k: usize, start: f32, a: impl Fn(usize) -> f32, b: impl Fn(usize) -> f32) -> f32 {
    (0..k).fold(start, |sum, step| a(step).mul_add(b(step), sum))
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn isas() -> Vec<Isa> {
    [Isa::Portable, Isa::Avx2, Isa::Avx512].into_iter().filter(|isa| *isa <= Isa::detect()).collect()
}

#[test]
fn every_product_is_one_chain_at_any_shape_thread_count_and_instruction_set() {
    let mut random = Random(0x1234_5678_9abc_def1);
    let pools = [Pool::serial(), Pool::new(2), Pool::new(3)];
    for case in 0..60 {
        let (m, n, k) = match case {
            0 => (97, 130, 700),
            1 => (1, 64, 128),
            2 => (64, 300, 530),
            _ => (1 + random.below(40), 1 + random.below(150), random.below(90)),
        };
        let (a, b, old) = (random.floats(m * k), random.floats(n * k), random.floats(m * n));
        let transposed: Vec<f32> = (0..k * n).map(|at| b[at % n * k + at / n]).collect();
        let from_zero: Vec<f32> = (0..m * n)
            .map(|at| chain(k, 0.0, |step| a[at / n * k + step], |step| b[at % n * k + step]))
            .collect();
        let continued: Vec<f32> = (0..m * n)
            .map(|at| chain(k, old[at], |step| a[at / n * k + step], |step| b[at % n * k + step]))
            .collect();
        let added: Vec<f32> = from_zero.iter().zip(&old).map(|(sum, old)| old + sum).collect();
        let packed = Packed::new(&b, n, k);
        let a_transposed: Vec<f32> = (0..k * m).map(|at| a[at % m * k + at / m]).collect();
        for isa in isas() {
            assert!(isa.select());
            for pool in &pools {
                for (output, expected) in
                    [(Output::Set, &from_zero), (Output::Add, &added), (Output::Continue, &continued)]
                {
                    let mut out = old.clone();
                    matmul_packed(pool, View::new(&a, k), &packed, &mut out, output);
                    assert_eq!(bits(&out), bits(expected), "packed {m} {n} {k} {isa:?} {output:?}");
                    let mut out = old.clone();
                    matmul(pool, View::new(&a, k), View::new(&transposed, n), &mut out, output);
                    assert_eq!(bits(&out), bits(expected), "strided {m} {n} {k} {isa:?} {output:?}");
                }
                let mut out = old.clone();
                let split = random.below(k + 1);
                for rows in [0..split, split..k] {
                    accumulate_outer(
                        pool,
                        rows.len(),
                        View::new(&a_transposed[rows.start * m..], m),
                        View::new(&transposed[rows.start * n..], n),
                        &mut out,
                    );
                }
                assert_eq!(bits(&out), bits(&continued), "outer {m} {n} {k} split at {split} {isa:?}");
            }
        }
    }
}
