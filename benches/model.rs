//! Training and decoding speed of a model of the bundled policy's shape (or, with the argument `wide`, of
//! 8 layers of 512), on one and two threads.

use lego::kernels::{Isa, Pool};
use lego::model::{Config, KvCache, Model, Row, Shape};
use std::time::{Duration, Instant};

fn main() {
    let is_wide = std::env::args().any(|argument| argument == "wide");
    let shape = if is_wide {
        Shape {
            vocab_size: 32000,
            hidden_size: 512,
            intermediate_size: 1536,
            num_hidden_layers: 8,
            num_attention_heads: 8,
            num_key_value_heads: 4,
            head_dim: 64,
            rope_theta: 1e4,
            max_position_embeddings: 2048,
            tie_word_embeddings: true,
        }
    } else {
        Shape {
            vocab_size: 768,
            hidden_size: 128,
            intermediate_size: 384,
            num_hidden_layers: 4,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            head_dim: 32,
            rope_theta: 1e4,
            max_position_embeddings: 2048,
            tie_word_embeddings: true,
        }
    };
    let model = Model::init(Config::new(shape).expect("sizes fit"), 1);
    println!("{:?}, {} parameters", Isa::current(), model.parameters().len());
    let tokens: Vec<u32> = (0..4096u64).map(|at| (at * at * 31 % shape.vocab_size as u64) as u32).collect();
    let (count, len) = if is_wide { (8, 512) } else { (8, 200) };
    let sequences: Vec<&[u32]> = (0..count).map(|at| &tokens[at * len..][..len]).collect();
    for threads in [1, 2] {
        let pool = Pool::new(threads);
        let grads = vec![vec![-1e-3f32; len - 1]; count];
        let mut gradients = model.gradients();
        let rate = |name: &str, tokens: usize, mut run: Box<dyn FnMut() + '_>| {
            let (start, mut best, mut runs) = (Instant::now(), Duration::MAX, 0);
            while runs < 3 || start.elapsed() < Duration::from_secs(1) {
                let begin = Instant::now();
                run();
                best = best.min(begin.elapsed());
                runs += 1;
            }
            let mean = start.elapsed().as_secs_f64() / f64::from(runs);
            let (per_best, per_mean) = (tokens as f64 / best.as_secs_f64(), tokens as f64 / mean);
            println!(
                "{threads} thread {name:16} best {best:>10.2?} {per_best:>9.0} tok/s, mean {per_mean:>9.0} tok/s"
            );
        };
        rate(
            "replay",
            count * len,
            Box::new(|| {
                model.log_probs(&pool, &sequences, 1.0).expect("valid");
            }),
        );
        rate(
            "forward",
            count * len,
            Box::new(|| {
                model.forward(&pool, &sequences, 1.0).expect("valid");
            }),
        );
        rate(
            "forward+backward",
            count * len,
            Box::new(|| {
                let pass = model.forward(&pool, &sequences, 1.0).expect("valid");
                model.backward(&pool, pass, &grads, &mut gradients).expect("fits");
            }),
        );
        for batch in [1, 8, 32, 64] {
            let context = 200;
            let mut cache = KvCache::new(model.config(), batch, context + 1).expect("memory");
            let prefill: Vec<Row> = (0..batch)
                .flat_map(|slot| (0..context).map(move |position| Row { slot, position, token: 7 }))
                .collect();
            model.step(&pool, &mut cache, &prefill, &vec![false; prefill.len()]).expect("valid");
            let rows: Vec<Row> = (0..batch).map(|slot| Row { slot, position: context, token: 9 }).collect();
            let want = vec![true; batch];
            rate(
                &format!("decode {batch}"),
                batch,
                Box::new(|| {
                    model.step(&pool, &mut cache, &rows, &want).expect("valid");
                    (0..batch).for_each(|slot| cache.truncate(slot, context));
                }),
            );
        }
    }
}
