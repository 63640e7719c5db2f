//! The learner: episodes in, new weights and metrics out. [`Learner::train_version`] shows a policy version's
//! update top to bottom.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::metrics::StepMetrics;
use super::{Optimizer, OptimizerOptions, TrainError};
use crate::kernels::Pool;
use crate::loss::{
    AdvantageEstimator, Advantages, Aggregation, Denominator, PolicyLossOptions, Row, TokenStats, advantages,
    alignment,
};
use crate::model::{Gradients, Model};
use crate::record::{EpisodeId, GroupId, PolicyVersion, Sample};

/// What happens to groups whose rewards have no spread, and so no advantage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DegenerateGroups {
    /// They count in the loss's denominator, and the KL term, where there is one, pulls on them.
    #[default]
    Keep,
    /// They leave the step: denominator, KL term and all.
    Drop,
}

/// How the learner trains.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LearnerOptions {
    /// Of the steps to come; [`Learner::set_learning_rate`] changes it.
    pub learning_rate: f64,
    pub optimizer: OptimizerOptions,
    pub advantage: AdvantageEstimator,
    pub loss: PolicyLossOptions,
    pub aggregation: Aggregation,
    pub degenerate_groups: DegenerateGroups,
    /// Bound on the tokens of one forward and backward pass; a longer row is a pass of its own. Bounds memory
    /// and changes no result.
    pub max_microbatch_tokens: usize,
}

impl Default for LearnerOptions {
    fn default() -> Self {
        Self {
            learning_rate: 1e-6,
            optimizer: OptimizerOptions::default(),
            advantage: AdvantageEstimator::default(),
            loss: PolicyLossOptions::default(),
            aggregation: Aggregation::default(),
            degenerate_groups: DegenerateGroups::default(),
            max_microbatch_tokens: 4096,
        }
    }
}

impl LearnerOptions {
    /// Checks every option.
    ///
    /// # Errors
    /// Names the first that is out of range.
    pub fn check(&self) -> Result<(), TrainError> {
        self.loss.check()?;
        let positive = [
            ("learning_rate", self.learning_rate),
            ("optimizer.max_grad_norm", self.optimizer.max_grad_norm),
            ("optimizer.eps", self.optimizer.eps),
        ];
        for (name, value) in positive {
            if !(value.is_finite() && value > 0.0) {
                let value = value.to_string();
                return Err(TrainError::Option { name, value, remedy: "give a positive number" });
            }
        }
        if self.max_microbatch_tokens == 0 {
            return Err(TrainError::Option {
                name: "max_microbatch_tokens",
                value: "0".to_owned(),
                remedy: "give at least 1",
            });
        }
        Ok(())
    }
}

/// One graded trial as the learner sees it: one member of its group, with a row a lineage.
#[derive(Debug, Clone, PartialEq)]
pub struct Episode {
    pub episode_id: EpisodeId,
    pub group_id: GroupId,
    pub reward: f64,
    /// Empty when no row of it may be trained; it still counts in its group's baseline.
    pub samples: Vec<Sample>,
}

/// Trains a model on episodes.
#[derive(Debug)]
pub struct Learner {
    pub(super) options: LearnerOptions,
    pub(super) model: Model,
    pub(super) optimizer: Optimizer,
    reference: Option<Model>,
    gradients: Gradients,
    pool: Pool,
}

/// A row on its way through a step.
struct TrainingRow<'a> {
    episode: usize,
    sample: &'a Sample,
    advantage: f64,
    temperature: f32,
    /// Whether it can have a gradient.
    is_active: bool,
}

/// Sums of a step, in the order of its rows.
#[derive(Default)]
struct Sums {
    loss: f64,
    stats: TokenStats,
    entropy: f64,
    trained_tokens: usize,
    captured: Vec<f64>,
    recomputed: Vec<f64>,
    lag_sum: u64,
    lag_max: u64,
}

impl Learner {
    /// A learner that starts from `model`. `reference` is the policy that the KL is measured to, kept as it is.
    ///
    /// # Errors
    /// An option out of range; a `kl_coef` without a reference.
    pub fn new(
        model: Model,
        reference: Option<Model>,
        options: LearnerOptions,
        pool: Pool,
    ) -> Result<Self, TrainError> {
        options.check()?;
        if options.loss.kl_coef != 0.0 && reference.is_none() {
            return Err(TrainError::Option {
                name: "kl_coef",
                value: options.loss.kl_coef.to_string(),
                remedy: "a KL term needs the reference policy",
            });
        }
        let optimizer = Optimizer::new(options.optimizer, model.parameters());
        let gradients = model.gradients();
        Ok(Self { options, model, optimizer, reference, gradients, pool })
    }

    /// The policy as trained so far.
    #[must_use]
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The learning rate of the steps to come.
    pub fn set_learning_rate(&mut self, learning_rate: f64) {
        self.options.learning_rate = learning_rate;
    }

    /// Optimizer updates taken so far.
    #[must_use]
    pub fn optimizer_steps(&self) -> u64 {
        self.optimizer.steps()
    }

    /// Trains on the episodes of one policy version: advantages over all of them, then `optimizer_steps` updates on
    /// consecutive parts of whole groups (fewer where there are fewer groups). `version` is the policy's version before
    /// these updates. Log-probs are recomputed under that version, before the first update.
    ///
    /// # Errors
    /// Values that the loss needs and cannot use; on an error in a later part, earlier parts stay applied.
    pub fn train_version(
        &mut self,
        episodes: &[Episode],
        optimizer_steps: usize,
        version: PolicyVersion,
    ) -> Result<Vec<StepMetrics>, TrainError> {
        let mut episodes: Vec<&Episode> = episodes.iter().collect();
        // Arrival order must change nothing.
        episodes.sort_by_key(|episode| (episode.group_id, episode.episode_id));
        if episodes.is_empty() {
            return Err(TrainError::EmptyBatch);
        }
        let mut ids = BTreeSet::new();
        if let Some(twice) = episodes.iter().find(|episode| !ids.insert(episode.episode_id)) {
            return Err(TrainError::DuplicateEpisode(twice.episode_id));
        }
        let groups: Vec<u64> = episodes.iter().map(|episode| episode.group_id.0).collect();
        let rewards: Vec<f64> = episodes.iter().map(|episode| episode.reward).collect();
        let advantages = advantages(self.options.advantage, &groups, &rewards)?;

        let parts = parts_of_whole_groups(&groups, optimizer_steps);
        let mut recomputed = Vec::with_capacity(parts.len());
        for (index, part) in parts.iter().enumerate() {
            // The first part's own forward pass runs under the version's weights.
            let rows = self.rows(&episodes[part.clone()], &advantages.values[part.clone()])?;
            recomputed.push(if index == 0 { None } else { Some(self.recompute(&rows)?) });
        }
        let mut metrics = Vec::with_capacity(parts.len());
        for (part, recomputed) in parts.into_iter().zip(recomputed) {
            metrics.push(self.step(&episodes[part.clone()], part, &advantages, recomputed, version)?);
        }
        Ok(metrics)
    }

    /// One optimizer step on `episodes`, which are `range` of the version's.
    fn step(
        &mut self,
        episodes: &[&Episode],
        range: std::ops::Range<usize>,
        advantages: &Advantages,
        recomputed: Option<Vec<Vec<f32>>>,
        version: PolicyVersion,
    ) -> Result<StepMetrics, TrainError> {
        let rows = self.rows(episodes, &advantages.values[range.clone()])?;
        let is_kept = |episode: usize| {
            self.options.degenerate_groups == DegenerateGroups::Keep
                || rows.iter().any(|row| row.episode == episode && row.advantage != 0.0)
        };
        let episode_tokens: Vec<usize> = episodes
            .iter()
            .enumerate()
            .filter(|&(episode, _)| is_kept(episode))
            .map(|(_, episode)| episode.samples.iter().map(|s| s.sampled_tokens()).sum())
            .collect();
        // Places of kept episodes among the kept ones.
        let mut place = 0;
        let places: Vec<Option<usize>> = (0..episodes.len())
            .map(|episode| {
                is_kept(episode).then(|| {
                    place += 1;
                    place - 1
                })
            })
            .collect();
        let sampled_tokens: usize = episode_tokens.iter().sum();
        let denominator = (sampled_tokens > 0)
            .then(|| Denominator::new(self.options.aggregation, episode_tokens))
            .transpose()?;

        self.gradients.clear();
        let mut sums = Sums::default();
        let mut has_gradient = false;
        for (first, microbatch) in microbatches(&rows, self.options.max_microbatch_tokens) {
            let sequences: Vec<&[u32]> =
                microbatch.iter().map(|row| row.sample.token_ids.as_slice()).collect();
            let temperature = microbatch[0].temperature;
            let pass = self.model.forward(&self.pool, &sequences, temperature)?;
            let reference = match &self.reference {
                Some(reference) => Some(reference.log_probs(&self.pool, &sequences, temperature)?),
                None => None,
            };
            let mut grad_log_probs = Vec::with_capacity(microbatch.len());
            for (index, row) in microbatch.iter().enumerate() {
                let log_probs = pass.log_probs(index);
                let captured_under = match &recomputed {
                    Some(recomputed) => recomputed[first + index].as_slice(),
                    None => log_probs,
                };
                sums.measure(row.sample, captured_under, pass.entropy(index), version);
                let weight = match (&denominator, places[row.episode]) {
                    (Some(denominator), Some(place)) => denominator.token_weight(place),
                    _ => 0.0,
                };
                let reference = reference.as_ref().map(|all| all[index].as_slice());
                let gradient = self.row_loss(episodes, row, weight, log_probs, reference, &mut sums)?;
                grad_log_probs.push(gradient);
            }
            if microbatch[0].is_active && grad_log_probs.iter().flatten().any(|&g| g != 0.0) {
                has_gradient = true;
                sums.trained_tokens += sequences.iter().map(|ids| ids.len()).sum::<usize>();
                self.model.backward(&self.pool, pass, &grad_log_probs, &mut self.gradients)?;
            }
        }
        // Without any gradient the step changes nothing: moments do not decay towards a step nobody asked for.
        let grad_norm = if has_gradient {
            let rate = self.options.learning_rate;
            Some(self.optimizer.step(&mut self.model, &mut self.gradients, rate)?)
        } else {
            None
        };
        self.metrics(episodes, advantages, &range, sampled_tokens, rows.len(), &sums, grad_norm)
    }

    /// The rows of `episodes`: first those that can have a gradient, then the others, each in order.
    fn rows<'a>(
        &self,
        episodes: &[&'a Episode],
        advantages: &[f64],
    ) -> Result<Vec<TrainingRow<'a>>, TrainError> {
        let has_kl =
            self.options.loss.kl_coef != 0.0 && self.options.degenerate_groups == DegenerateGroups::Keep;
        let mut rows = Vec::new();
        for (index, episode) in episodes.iter().enumerate() {
            for sample in &episode.samples {
                let mut temperatures = sample.temperature.iter().flatten();
                let temperature = *temperatures.next().unwrap_or(&1.0);
                if temperatures.any(|&other| other != temperature) {
                    return Err(TrainError::MixedTemperature(episode.episode_id));
                }
                let advantage = advantages[index];
                let is_active = advantage != 0.0 || has_kl;
                rows.push(TrainingRow { episode: index, sample, advantage, temperature, is_active });
            }
        }
        rows.sort_by_key(|row| !row.is_active);
        Ok(rows)
    }

    /// Log-probs of `rows` under the current weights, without a KV cache.
    fn recompute(&self, rows: &[TrainingRow<'_>]) -> Result<Vec<Vec<f32>>, TrainError> {
        let mut all = Vec::with_capacity(rows.len());
        for (_, microbatch) in microbatches(rows, self.options.max_microbatch_tokens) {
            let sequences: Vec<&[u32]> =
                microbatch.iter().map(|row| row.sample.token_ids.as_slice()).collect();
            all.extend(self.model.log_probs(&self.pool, &sequences, microbatch[0].temperature)?);
        }
        Ok(all)
    }

    /// Adds one row's loss to `sums` and gives its gradient with respect to the log-probs of tokens 1 onwards.
    fn row_loss(
        &self,
        episodes: &[&Episode],
        row: &TrainingRow<'_>,
        token_weight: f64,
        log_probs: &[f32],
        reference: Option<&[f32]>,
        sums: &mut Sums,
    ) -> Result<Vec<f32>, TrainError> {
        let widen = |values: &[f32]| -> Vec<f64> { values.iter().copied().map(f64::from).collect() };
        let old: Vec<Option<f64>> =
            row.sample.logprobs[1..].iter().map(|value| value.map(f64::from)).collect();
        let reference = reference.map(widen);
        let result = self
            .options
            .loss
            .row(&Row {
                mask: &row.sample.loss_mask[1..],
                log_probs: &widen(log_probs),
                old_log_probs: &old,
                reference_log_probs: reference.as_deref(),
                advantage: row.advantage,
                token_weight,
            })
            .map_err(|source| TrainError::Episode { episode: episodes[row.episode].episode_id, source })?;
        sums.loss += result.loss;
        sums.stats.add(&result.stats);
        Ok(result.gradient.into_iter().map(|value| value as f32).collect())
    }

    #[expect(clippy::too_many_arguments, reason = "the sums of one step, read once")]
    fn metrics(
        &self,
        episodes: &[&Episode],
        advantages: &Advantages,
        range: &std::ops::Range<usize>,
        sampled_tokens: usize,
        samples: usize,
        sums: &Sums,
        grad_norm: Option<f64>,
    ) -> Result<StepMetrics, TrainError> {
        let count = episodes.len() as f64;
        let lengths: Vec<usize> =
            episodes.iter().map(|episode| episode.samples.iter().map(Sample::sampled_tokens).sum()).collect();
        let tokens = sums.stats.tokens.max(1) as f64;
        let aligned = match sums.captured.is_empty() {
            true => None,
            false => Some(alignment(&sums.captured, &sums.recomputed)?),
        };
        let part = Advantages { values: advantages.values[range.clone()].to_vec(), ..*advantages };
        let groups = advantages.groups.max(1) as f64;
        Ok(StepMetrics {
            optimizer_step: self.optimizer.steps(),
            episodes: episodes.len(),
            samples,
            reward_mean: episodes.iter().map(|episode| episode.reward).sum::<f64>() / count,
            solve_rate: episodes.iter().filter(|episode| episode.reward >= 1.0).count() as f64 / count,
            episode_tokens_mean: lengths.iter().sum::<usize>() as f64 / count,
            episode_tokens_max: lengths.iter().copied().max().unwrap_or(0),
            sampled_tokens,
            trained_tokens: sums.trained_tokens,
            loss: sums.loss,
            kl: sums.stats.kl_reference_mean(),
            kl_old: sums.stats.kl_old / tokens,
            entropy: sums.entropy / tokens,
            clip_fraction: sums.stats.clip_fraction(),
            ratio_mean: sums.stats.ratio / tokens,
            ratio_max: sums.stats.ratio_max,
            grad_norm,
            learning_rate: self.options.learning_rate,
            advantage_std: part.std(),
            degenerate_group_ratio: advantages.degenerate_group_ratio(),
            all_solved_group_ratio: advantages.groups_all_solved as f64 / groups,
            all_failed_group_ratio: advantages.groups_all_failed as f64 / groups,
            policy_version_lag_mean: sums.lag_sum as f64 / tokens,
            policy_version_lag_max: sums.lag_max,
            aligned_tokens: sums.captured.len(),
            prob_correlation: aligned.and_then(|aligned| aligned.prob_correlation),
            max_logprob_diff: aligned.map(|aligned| aligned.max_logprob_diff),
            mean_logprob_diff: aligned.map(|aligned| aligned.mean_logprob_diff),
        })
    }
}

impl Sums {
    /// Adds what needs no loss: entropy, lag, and the pairs of captured and recomputed log-probs of tokens
    /// that `version` itself sampled.
    fn measure(&mut self, sample: &Sample, recomputed: &[f32], entropy: &[f32], version: PolicyVersion) {
        for index in (1..sample.token_ids.len()).filter(|&index| sample.loss_mask[index]) {
            self.entropy += f64::from(entropy[index - 1]);
            let (Some(captured), Some(sampled_by)) = (sample.logprobs[index], sample.weight_version[index])
            else {
                continue;
            };
            let lag = version.0.saturating_sub(sampled_by);
            self.lag_sum += lag;
            self.lag_max = self.lag_max.max(lag);
            if sampled_by == version.0 {
                self.captured.push(f64::from(captured));
                self.recomputed.push(f64::from(recomputed[index - 1]));
            }
        }
    }
}

/// Cuts episodes sorted by group into at most `parts` consecutive ranges of whole groups, of about equal size.
fn parts_of_whole_groups(groups: &[u64], parts: usize) -> Vec<std::ops::Range<usize>> {
    let mut starts: Vec<usize> =
        (0..groups.len()).filter(|&i| i == 0 || groups[i] != groups[i - 1]).collect();
    starts.push(groups.len());
    let count = starts.len() - 1;
    let parts = parts.clamp(1, count.max(1));
    (0..parts).map(|part| starts[part * count / parts]..starts[(part + 1) * count / parts]).collect()
}

/// Consecutive rows of at most `max_tokens` tokens, one temperature, and all active or none, each with the
/// index of its first row.
fn microbatches<'r, 'a>(
    rows: &'r [TrainingRow<'a>],
    max_tokens: usize,
) -> Vec<(usize, &'r [TrainingRow<'a>])> {
    let mut batches = Vec::new();
    let (mut start, mut tokens) = (0, 0);
    for (index, row) in rows.iter().enumerate() {
        let length = row.sample.token_ids.len();
        let is_cut = index > start
            && (tokens + length > max_tokens
                || row.temperature != rows[start].temperature
                || row.is_active != rows[start].is_active);
        if is_cut {
            batches.push((start, &rows[start..index]));
            (start, tokens) = (index, 0);
        }
        tokens += length;
    }
    if start < rows.len() {
        batches.push((start, &rows[start..]));
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::parts_of_whole_groups;

    #[test]
    fn parts_hold_whole_groups() {
        let groups = [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4];
        assert_eq!(parts_of_whole_groups(&groups, 2), [0..6, 6..12]);
        assert_eq!(parts_of_whole_groups(&groups, 1).first(), Some(&(0..12)));
        assert_eq!(parts_of_whole_groups(&groups, 1).len(), 1);
        assert_eq!(parts_of_whole_groups(&groups, 9).len(), 4);
        assert_eq!(parts_of_whole_groups(&[1, 1, 2], 2), [0..2, 2..3]);
    }
}
