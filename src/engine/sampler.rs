//! From a row of logits to a token and its log-prob.

use super::random::uniform;
use super::{LogprobsMode, SamplingParams};
use crate::kernels;

/// A chosen token.
pub(super) struct Choice {
    pub id: u32,
    pub logprob: f32,
    pub top_logprobs: Vec<(u32, f32)>,
}

/// Chooses tokens; owns the scratch space that it needs. All sums run in a fixed order, so that a choice depends on its
/// arguments alone.
#[derive(Default)]
pub(super) struct Sampler {
    probabilities: Vec<f32>,
    order: Vec<u32>,
}

impl Sampler {
    /// Chooses the token at `position` from `logits` `[vocab]`, which are scaled in place. `None` when they are not
    /// finite: the model is broken.
    pub fn choose(
        &mut self,
        logits: &mut [f32],
        sampling: &SamplingParams,
        position: usize,
        mode: LogprobsMode,
        top: usize,
    ) -> Option<Choice> {
        let raw = kernels::normalizer(logits).log_sum_exp;
        // The vector exponential clamps its argument, so a NaN would not show in the sum.
        if !raw.is_finite() || logits.iter().any(|logit| logit.is_nan()) {
            return None;
        }
        if sampling.temperature == 0.0 {
            let id = argmax(logits);
            let top_logprobs = top_of(logits, raw, top);
            return Some(Choice { id, logprob: logits[id as usize] - raw, top_logprobs });
        }
        let raw_top = match mode {
            LogprobsMode::Raw => top_of(logits, raw, top),
            LogprobsMode::Processed => Vec::new(),
        };
        let unscaled: Option<Vec<f32>> =
            (mode == LogprobsMode::Raw && sampling.temperature != 1.0).then(|| logits.to_vec());
        kernels::apply_temperature(logits, sampling.temperature);

        self.probabilities.clear();
        self.probabilities.extend_from_slice(logits);
        kernels::softmax(&mut self.probabilities);
        let is_truncated = sampling.top_p < 1.0 || (sampling.top_k > 0 && sampling.top_k < logits.len());
        if is_truncated {
            self.truncate(sampling);
        }
        let id = self.draw(uniform(sampling.seed, position as u64));

        let (logprob, top_logprobs) = match mode {
            LogprobsMode::Raw => {
                let row = unscaled.as_deref().unwrap_or(logits);
                (row[id as usize] - raw, raw_top)
            }
            LogprobsMode::Processed => {
                if is_truncated {
                    for (logit, probability) in logits.iter_mut().zip(&self.probabilities) {
                        if *probability == 0.0 {
                            *logit = f32::NEG_INFINITY;
                        }
                    }
                }
                let scaled = kernels::normalizer(logits).log_sum_exp;
                (logits[id as usize] - scaled, top_of(logits, scaled, top))
            }
        };
        Some(Choice { id, logprob, top_logprobs })
    }

    /// Sets the probabilities outside of top-k, then outside of top-p, to 0. Equal ones are ranked by id.
    fn truncate(&mut self, sampling: &SamplingParams) {
        let probabilities = &mut self.probabilities;
        self.order.clear();
        self.order.extend(0..probabilities.len() as u32);
        let likeliest_first = |a: &u32, b: &u32| {
            probabilities[*b as usize].total_cmp(&probabilities[*a as usize]).then(a.cmp(b))
        };
        let mut kept = probabilities.len();
        if sampling.top_k > 0 && sampling.top_k < kept {
            kept = sampling.top_k;
            self.order.select_nth_unstable_by(kept - 1, likeliest_first);
        }
        self.order[..kept].sort_unstable_by(likeliest_first);
        if sampling.top_p < 1.0 {
            let sum =
                |order: &[u32]| order.iter().map(|&id| f64::from(probabilities[id as usize])).sum::<f64>();
            let wanted = f64::from(sampling.top_p) * sum(&self.order[..kept]);
            let mut reached = 0.0;
            let nucleus = self.order[..kept].iter().position(|&id| {
                reached += f64::from(probabilities[id as usize]);
                reached >= wanted
            });
            kept = nucleus.map_or(kept, |last| last + 1);
        }
        for &id in &self.order[kept..] {
            probabilities[id as usize] = 0.0;
        }
    }

    /// Inverts the cumulative distribution, in the order of ids.
    fn draw(&self, uniform: f64) -> u32 {
        let total: f64 = self.probabilities.iter().map(|&p| f64::from(p)).sum();
        let threshold = uniform * total;
        let mut cumulative = 0.0;
        let mut last = 0;
        for (id, &probability) in self.probabilities.iter().enumerate() {
            if probability > 0.0 {
                cumulative += f64::from(probability);
                last = id;
                if cumulative > threshold {
                    break;
                }
            }
        }
        last as u32
    }
}

/// The largest value's index, the first of equal ones.
fn argmax(row: &[f32]) -> u32 {
    let mut best = 0;
    for (id, value) in row.iter().enumerate() {
        if *value > row[best] {
            best = id;
        }
    }
    best as u32
}

/// The `count` largest values and their log-probs, largest first, equal ones by id.
fn top_of(row: &[f32], log_sum_exp: f32, count: usize) -> Vec<(u32, f32)> {
    if count == 0 {
        return Vec::new();
    }
    let mut top: Vec<(u32, f32)> = Vec::with_capacity(count + 1);
    for (id, &value) in row.iter().enumerate() {
        if top.len() == count && top.last().is_some_and(|&(_, least)| value <= least) {
            continue;
        }
        let at = top.partition_point(|&(_, other)| other >= value);
        top.insert(at, (id as u32, value));
        top.truncate(count);
    }
    for (_, value) in &mut top {
        *value -= log_sum_exp;
    }
    top
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(sampling: SamplingParams, mode: LogprobsMode) -> (Vec<u32>, Vec<f32>) {
        let logits = [0.0f32, 1.0, 2.0, 3.0, 1.0];
        let mut sampler = Sampler::default();
        let mut counts = vec![0; 5];
        let mut logprobs = vec![f32::NAN; 5];
        for position in 0..20_000 {
            let mut row = logits;
            let choice = sampler.choose(&mut row, &sampling, position, mode, 0).expect("finite");
            counts[choice.id as usize] += 1;
            logprobs[choice.id as usize] = choice.logprob;
        }
        (counts, logprobs)
    }

    /// Frequencies agree with the processed log-probs, which sum to 1 over what is kept.
    fn assert_sampled_from_processed(sampling: SamplingParams, kept: &[usize]) {
        let (counts, logprobs) = counts(sampling, LogprobsMode::Processed);
        let mut total = 0.0;
        for id in 0..5 {
            if kept.contains(&id) {
                let expected = f64::from(logprobs[id]).exp();
                let found = f64::from(counts[id]) / 20_000.0;
                assert!(
                    (found - expected).abs() < 5.0 * (expected / 20_000.0).sqrt(),
                    "{id}: {found} {expected}"
                );
                total += expected;
            } else {
                assert_eq!(counts[id], 0, "{id}");
            }
        }
        assert!((total - 1.0).abs() < 1e-6, "{total}");
    }

    #[test]
    fn tokens_come_as_often_as_their_log_probs_say() {
        let base = SamplingParams { seed: 3, ..SamplingParams::default() };
        assert_sampled_from_processed(base, &[0, 1, 2, 3, 4]);
        assert_sampled_from_processed(SamplingParams { temperature: 2.0, ..base }, &[0, 1, 2, 3, 4]);
        assert_sampled_from_processed(SamplingParams { top_k: 3, ..base }, &[1, 2, 3]);
        assert_sampled_from_processed(SamplingParams { top_p: 0.8, ..base }, &[2, 3]);
        assert_sampled_from_processed(SamplingParams { top_p: 0.01, temperature: 0.5, ..base }, &[3]);
    }

    #[test]
    fn raw_log_probs_do_not_know_temperature_or_truncation() {
        let (_, plain) = counts(SamplingParams::default(), LogprobsMode::Raw);
        let hot = SamplingParams { temperature: 3.0, ..SamplingParams::default() };
        let (_, scaled) = counts(hot, LogprobsMode::Raw);
        assert_eq!(
            plain.iter().map(|v| v.to_bits()).collect::<Vec<_>>(),
            scaled.iter().map(|v| v.to_bits()).collect::<Vec<_>>()
        );
    }

    #[test]
    fn temperature_0_takes_the_first_of_the_likeliest() {
        let greedy = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
        let mut row = [1.0, 4.0, 4.0, -1.0];
        let choice = Sampler::default().choose(&mut row, &greedy, 0, LogprobsMode::Raw, 3).expect("finite");
        assert_eq!(choice.id, 1);
        let ids: Vec<u32> = choice.top_logprobs.iter().map(|&(id, _)| id).collect();
        assert_eq!(ids, [1, 2, 0]);
        assert_eq!(choice.top_logprobs[0].1, choice.logprob);
    }

    #[test]
    fn logits_that_are_not_numbers_are_refused() {
        let mut row = [1.0, f32::NAN];
        let sampling = SamplingParams::default();
        assert!(Sampler::default().choose(&mut row, &sampling, 0, LogprobsMode::Raw, 0).is_none());
    }
}
