//! Law 11: decode, prefill, replay and training give the same log-prob to the bit, and the gradient does not
//! depend on threads or on how a batch is split.

use lego::kernels::{Isa, Pool, log_prob};
use lego::model::{Config, KvCache, Model, Row, Shape};

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
    fn tokens(&mut self, len: usize, vocab: usize) -> Vec<u32> {
        (0..len).map(|_| self.below(vocab) as u32).collect()
    }
}

/// Pools to try with an instruction set: plain Rust without fused multiply-add is too slow for all.
fn pools(isa: Isa) -> Vec<Pool> {
    let threads = if isa == Isa::Portable { 2..3 } else { 1..4 };
    threads.map(Pool::new).collect()
}

/// Sizes that are multiples of nothing, so that every tail of the kernels is used.
fn odd_model(tie_word_embeddings: bool) -> Model {
    let config = Config::new(Shape {
        vocab_size: 203,
        hidden_size: 44,
        intermediate_size: 70,
        num_hidden_layers: 2,
        num_attention_heads: 6,
        num_key_value_heads: 2,
        head_dim: 18,
        rope_theta: 1e4,
        max_position_embeddings: 256,
        tie_word_embeddings,
    })
    .expect("sizes fit");
    // Large weights make attention and logits uneven.
    let model = Model::init(config, 5);
    let flat = model.parameters().flat().iter().map(|x| x * 1.7).collect();
    model.with_parameters(flat).expect("the same shape")
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn sequences(random: &mut Random, model: &Model) -> Vec<Vec<u32>> {
    let vocab = model.config().vocab_size;
    [1, 70, 2, 57, 64, 65, 31].map(|len| random.tokens(len, vocab)).to_vec()
}

fn slices(sequences: &[Vec<u32>]) -> Vec<&[u32]> {
    sequences.iter().map(Vec::as_slice).collect()
}

#[test]
fn decode_prefill_replay_and_training_agree_to_the_bit() {
    let mut random = Random(0xfeed_5eed);
    for tied in [true, false] {
        let model = odd_model(tied);
        let sequences = sequences(&mut random, &model);
        let pass = model.forward(&Pool::serial(), &slices(&sequences), 1.0).expect("valid");
        let expected: Vec<Vec<u32>> =
            (0..sequences.len()).map(|sequence| bits(pass.log_probs(sequence))).collect();
        for isa in [Isa::Portable, Isa::Avx2, Isa::Avx512] {
            if !isa.select() {
                continue;
            }
            for pool in &pools(isa) {
                let replay = model.log_probs(pool, &slices(&sequences), 1.0).expect("valid");
                for (replay, expected) in replay.iter().zip(&expected) {
                    assert_eq!(&bits(replay), expected, "replay {isa:?}");
                }
                let found = stepped(&model, pool, &sequences, &mut random);
                for (sequence, expected) in expected.iter().enumerate() {
                    assert_eq!(&bits(&found[sequence]), expected, "steps {isa:?} {sequence}");
                }
            }
        }
    }
}

/// Log-probs from steps that mix prefill chunks of random length and single rows of all sequences, half of
/// each sequence taken over from another slot.
fn stepped(model: &Model, pool: &Pool, sequences: &[Vec<u32>], random: &mut Random) -> Vec<Vec<f32>> {
    let count = sequences.len();
    let mut cache = KvCache::new(model.config(), count + 1, 140).expect("memory");
    let mut found: Vec<Vec<f32>> = vec![Vec::new(); count];
    let mut moved = vec![false; count];
    while (0..count).any(|slot| cache.len(slot) < sequences[slot].len()) {
        let (mut rows, mut owners) = (Vec::new(), Vec::new());
        for (slot, sequence) in sequences.iter().enumerate() {
            let start = cache.len(slot);
            if start > sequence.len() / 2 && !moved[slot] {
                moved[slot] = true;
                cache.copy_prefix(slot, count, start).expect("held");
                cache.truncate(slot, 0);
                cache.copy_prefix(count, slot, start).expect("held");
            }
            let longest = [0, 1, 1, 5, 70][random.below(5)];
            for (position, &token) in sequence.iter().enumerate().skip(start).take(longest) {
                rows.push(Row { slot, position, token });
                owners.push(slot);
            }
        }
        let want = vec![true; rows.len()];
        let logits = model.step(pool, &mut cache, &rows, &want).expect("valid rows");
        for (at, (row, &owner)) in rows.iter().zip(&owners).enumerate() {
            if let Some(&next) = sequences[owner].get(row.position + 1) {
                found[owner].push(log_prob(logits.row(at), next as usize));
            }
        }
    }
    found
}

#[test]
fn gradients_do_not_depend_on_threads_split_or_instruction_set() {
    let mut random = Random(0xabcd_0123);
    for tied in [true, false] {
        let model = odd_model(tied);
        let sequences = sequences(&mut random, &model);
        let grads: Vec<Vec<f32>> = sequences
            .iter()
            .map(|tokens| (1..tokens.len()).map(|_| [0.0, 0.5, -0.25][random.below(3)]).collect())
            .collect();
        let gradient = |pool: &Pool, batches: &[std::ops::Range<usize>]| {
            let mut gradients = model.gradients();
            for batch in batches {
                let pass = model.forward(pool, &slices(&sequences[batch.clone()]), 0.8).expect("ok");
                model.backward(pool, pass, &grads[batch.clone()], &mut gradients).expect("ok");
            }
            bits(gradients.total())
        };
        let whole = std::iter::once(0..7).collect::<Vec<_>>();
        let expected = gradient(&Pool::serial(), &whole);
        for isa in [Isa::Portable, Isa::Avx2, Isa::Avx512] {
            if !isa.select() {
                continue;
            }
            for pool in pools(isa) {
                for split in [whole.clone(), vec![0..1, 1..4, 4..7]] {
                    assert_eq!(gradient(&pool, &split), expected, "{isa:?} {pool:?} {split:?}");
                }
            }
        }
    }
}

/// Central differences of a weighted sum of log-probs, summed in f64, along random directions in each
/// tensor.
#[test]
fn gradients_agree_with_finite_differences() {
    let mut random = Random(0x1357_9bdf);
    for (tied, temperature) in [(true, 1.0), (false, 0.7)] {
        let model = odd_model(tied);
        let pool = Pool::serial();
        let vocab = model.config().vocab_size;
        let sequences = [random.tokens(40, vocab), random.tokens(75, vocab)];
        let weights: Vec<Vec<f32>> = sequences
            .iter()
            .map(|tokens| (1..tokens.len()).map(|_| random.below(9) as f32 / 4.0 - 1.0).collect())
            .collect();
        let loss = |model: &Model| -> f64 {
            let log_probs = model.log_probs(&pool, &slices(&sequences), temperature).expect("ok");
            let pairs = log_probs.iter().flatten().zip(weights.iter().flatten());
            pairs.map(|(&x, &weight)| f64::from(x) * f64::from(weight)).sum()
        };
        let pass = model.forward(&pool, &slices(&sequences), temperature).expect("ok");
        let mut gradients = model.gradients();
        model.backward(&pool, pass, &weights, &mut gradients).expect("ok");
        let flat = gradients.total();
        for tensor in model.parameters().tensors() {
            let direction: Vec<f32> = tensor
                .range
                .clone()
                .map(|at| if random.below(2) == 0 { flat[at].signum() } else { 0.0 })
                .collect();
            let expected: f64 = direction
                .iter()
                .zip(&flat[tensor.range.clone()])
                .map(|(&d, &g)| f64::from(d) * f64::from(g))
                .sum();
            let moved = |step: f32| {
                let mut values = model.parameters().flat().to_vec();
                for (value, d) in values[tensor.range.clone()].iter_mut().zip(&direction) {
                    *value += step * d;
                }
                loss(&model.with_parameters(values).expect("the same shape"))
            };
            let step = 1e-3 / (direction.len() as f32).sqrt();
            let found = (moved(step) - moved(-step)) / (2.0 * f64::from(step));
            let difference = (found - expected).abs();
            assert!(difference < 2e-2 * expected.abs(), "{}: {found} {expected}", tensor.name);
        }
    }
}
