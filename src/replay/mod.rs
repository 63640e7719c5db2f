//! A forward pass over captured ids: the log-prob of every sampled token, computed again.
//!
//! Invariants:
//! - No KV cache: whole sequences go through the model, as in training.
//! - On the weights that sampled the tokens, the result equals the captured log-probs to the bit.
//! - A value is given exactly where the sample's mask is true; everywhere else it is `None`.

use crate::kernels::Pool;
use crate::model::{Model, ModelError};
use crate::record::Sample;

/// Log-probs of a sample's sampled tokens, aligned to its `token_ids`.
pub type ReplayedLogprobs = Vec<Option<f32>>;

/// Tokens of one forward pass, unless a single sample is longer.
const BATCH_TOKENS: usize = 8192;

/// Computes the log-prob of each sampled token of `samples` again, at the temperature it was sampled with.
///
/// # Errors
/// A sample that is longer than the model's positions, or has a token outside its vocabulary.
pub fn replay(model: &Model, pool: &Pool, samples: &[&Sample]) -> Result<Vec<ReplayedLogprobs>, ModelError> {
    let mut replayed: Vec<ReplayedLogprobs> =
        samples.iter().map(|sample| vec![None; sample.token_ids.len()]).collect();
    for temperature in temperatures(samples) {
        let uses = |sample: &Sample| sample.temperature.contains(&Some(temperature));
        let chosen: Vec<usize> = (0..samples.len()).filter(|&at| uses(samples[at])).collect();
        for batch in batches(&chosen, samples) {
            let sequences: Vec<&[u32]> = batch.iter().map(|&at| samples[at].token_ids.as_slice()).collect();
            let log_probs = model.log_probs(pool, &sequences, temperature)?;
            for (&at, log_probs) in batch.iter().zip(&log_probs) {
                for (index, sampled_with) in samples[at].temperature.iter().enumerate() {
                    if *sampled_with == Some(temperature) {
                        replayed[at][index] = Some(log_probs[index - 1]);
                    }
                }
            }
        }
    }
    Ok(replayed)
}

/// The different temperatures in order of first use.
fn temperatures(samples: &[&Sample]) -> Vec<f32> {
    let mut distinct = Vec::new();
    for temperature in samples.iter().flat_map(|sample| sample.temperature.iter().flatten()) {
        if !distinct.contains(temperature) {
            distinct.push(*temperature);
        }
    }
    distinct
}

/// Consecutive pieces of `chosen` of at most [`BATCH_TOKENS`] tokens each.
fn batches<'a>(chosen: &'a [usize], samples: &[&Sample]) -> Vec<&'a [usize]> {
    let mut pieces = Vec::new();
    let (mut start, mut tokens) = (0, 0);
    for (end, &at) in chosen.iter().enumerate() {
        let len = samples[at].token_ids.len();
        if end > start && tokens + len > BATCH_TOKENS {
            pieces.push(&chosen[start..end]);
            (start, tokens) = (end, 0);
        }
        tokens += len;
    }
    if start < chosen.len() {
        pieces.push(&chosen[start..]);
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::{apply_temperature, log_prob};
    use crate::model::{Config, KvCache, Row, Shape};
    use crate::record::{CallSpan, SampleParts};

    fn model() -> Model {
        let config = Config::new(Shape {
            vocab_size: 50,
            hidden_size: 32,
            intermediate_size: 48,
            num_hidden_layers: 2,
            num_attention_heads: 2,
            num_key_value_heads: 1,
            head_dim: 16,
            rope_theta: 1e4,
            max_position_embeddings: 64,
            tie_word_embeddings: true,
        });
        Model::init(config.expect("sizes fit"), 11)
    }

    #[test]
    fn replay_equals_what_was_captured_while_decoding_at_mixed_temperatures() {
        let (model, pool) = (model(), Pool::new(2));
        let tokens: Vec<u32> = (0..30).map(|at| (at * at + 7) % 50).collect();
        let mut cache = KvCache::new(model.config(), 1, 64).expect("memory");
        let (mut logprobs, mut temperature) = (vec![None], vec![None]);
        for position in 0..29 {
            let row = Row { slot: 0, position, token: tokens[position] };
            let mut logits = model.step(&pool, &mut cache, &[row], &[true]).expect("valid");
            let is_sampled = (10..20).contains(&(position + 1)) || position + 1 > 25;
            let used = if position < 20 { 1.0 } else { 0.7 };
            apply_temperature(logits.row_mut(0), used);
            let value = log_prob(logits.row(0), tokens[position + 1] as usize);
            logprobs.push(is_sampled.then_some(value));
            temperature.push(is_sampled.then_some(used));
        }
        let sample = Sample::new(SampleParts {
            loss_mask: logprobs.iter().map(Option::is_some).collect(),
            weight_version: logprobs.iter().map(|value| value.map(|_| 0)).collect(),
            token_ids: tokens,
            logprobs,
            temperature,
            call_spans: vec![CallSpan::of_test(10, 20), CallSpan::of_test(26, 30)],
            ..SampleParts::default()
        })
        .expect("a valid sample");
        let replayed = replay(&model, &pool, &[&sample, &sample]).expect("valid");
        assert_eq!(replayed, [sample.logprobs.clone(), sample.logprobs.clone()]);
    }

    #[test]
    fn batches_keep_every_sample_once() {
        let chosen: Vec<usize> = (0..5).collect();
        let sample = |len: usize| {
            let sampled = |at: usize| at + 1 == len;
            Sample::new(SampleParts {
                token_ids: vec![0; len],
                loss_mask: (0..len).map(sampled).collect(),
                logprobs: (0..len).map(|at| sampled(at).then_some(-1.0)).collect(),
                weight_version: (0..len).map(|at| sampled(at).then_some(0)).collect(),
                temperature: (0..len).map(|at| sampled(at).then_some(1.0)).collect(),
                call_spans: vec![CallSpan::of_test(len - 1, len)],
                ..SampleParts::default()
            })
            .expect("a valid sample")
        };
        let samples = [sample(5000), sample(4000), sample(9000), sample(4), sample(4)];
        let samples: Vec<&Sample> = samples.iter().collect();
        let pieces = batches(&chosen, &samples);
        assert_eq!(pieces, [&[0][..], &[1], &[2], &[3, 4]]);
    }
}
