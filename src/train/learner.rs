//! The learner: episodes in, new weights and metrics out. [`Learner::train_version`] shows a policy version's
//! update top to bottom.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use super::batch::{TrainingRow, microbatches, parts_of_whole_groups};
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
        let refuse = |name, value: f64, remedy| {
            let value = value.to_string();
            Err(TrainError::Option { name, value, remedy })
        };
        let OptimizerOptions { max_grad_norm, eps, .. } = self.optimizer;
        if !(max_grad_norm.is_finite() && max_grad_norm >= 0.0) {
            let remedy = "give a positive number, or 0 to leave gradients as they are";
            return refuse("optimizer.max_grad_norm", max_grad_norm, remedy);
        }
        if !(eps.is_finite() && eps > 0.0) {
            return refuse("optimizer.eps", eps, "give a positive number");
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
    replay_time: Option<Duration>,
    stop: CancellationToken,
}

/// The episodes of one optimizer step.
struct Part<'a> {
    episodes: &'a [&'a Episode],
    /// Theirs, with the group counts of the whole version.
    advantages: Advantages,
    /// Log-probs of their rows under the version's weights; `None`: the step's own forward pass has them.
    recomputed: Option<Vec<Vec<f32>>>,
    learning_rate: f64,
}

/// Sums of a step, in the order of its rows.
#[derive(Default)]
struct Sums {
    loss: f64,
    policy_loss: f64,
    kl_loss: f64,
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
        Ok(Self {
            options,
            model,
            optimizer,
            reference,
            gradients,
            pool,
            replay_time: None,
            stop: CancellationToken::new(),
        })
    }

    /// Cancelling `stop` ends [`Learner::train_version`] after the pass it is at, with [`TrainError::Stopped`].
    pub fn stop_with(&mut self, stop: CancellationToken) {
        self.stop = stop;
    }

    fn go_on(&self) -> Result<(), TrainError> {
        if self.stop.is_cancelled() { Err(TrainError::Stopped) } else { Ok(()) }
    }

    /// The policy as trained so far.
    #[must_use]
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Optimizer updates taken so far.
    #[must_use]
    pub fn optimizer_steps(&self) -> u64 {
        self.optimizer.steps()
    }

    /// Wall time that the last [`Learner::train_version`] took to recompute log-probs in passes of their own; `None`
    /// if it made none, as with one optimizer step.
    #[must_use]
    pub fn replay_time(&self) -> Option<Duration> {
        self.replay_time
    }

    /// Trains on the episodes of one policy version: advantages over all of them, then one update for each of
    /// `learning_rates` on consecutive parts of whole groups (fewer where there are fewer groups). `version` is the
    /// policy's version before these updates. Log-probs are recomputed under that version, before the first update.
    ///
    /// # Errors
    /// Values that the loss needs and cannot use; on an error in a later part, earlier parts stay applied.
    pub fn train_version(
        &mut self,
        episodes: &[Episode],
        learning_rates: &[f64],
        version: PolicyVersion,
    ) -> Result<Vec<StepMetrics>, TrainError> {
        if learning_rates.is_empty() || !learning_rates.iter().all(|rate| rate.is_finite() && *rate >= 0.0) {
            return Err(TrainError::Option {
                name: "learning_rates",
                value: format!("{learning_rates:?}"),
                remedy: "give a number of at least 0 for each optimizer step",
            });
        }
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

        let ranges = parts_of_whole_groups(&groups, learning_rates.len());
        let mut parts = Vec::with_capacity(ranges.len());
        self.replay_time = None;
        for (index, (range, &learning_rate)) in ranges.into_iter().zip(learning_rates).enumerate() {
            let values = advantages.values[range.clone()].to_vec();
            let mut part = Part {
                episodes: &episodes[range],
                advantages: Advantages { values, ..advantages },
                recomputed: None,
                learning_rate,
            };
            // The first part's own forward pass runs under the version's weights.
            if index > 0 {
                let started = Instant::now();
                part.recomputed = Some(self.recompute(&self.rows(&part)?)?);
                *self.replay_time.get_or_insert_default() += started.elapsed();
            }
            parts.push(part);
        }
        parts.iter().map(|part| self.step(part, version)).collect()
    }

    /// One optimizer step.
    fn step(&mut self, part: &Part<'_>, version: PolicyVersion) -> Result<StepMetrics, TrainError> {
        let episodes = part.episodes;
        let rows = self.rows(part)?;
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
            self.go_on()?;
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
                let captured_under = match &part.recomputed {
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
            Some(self.optimizer.step(&mut self.model, &mut self.gradients, part.learning_rate)?)
        } else {
            None
        };
        self.metrics(part, sampled_tokens, &sums, grad_norm)
    }

    /// The rows of a part: first those that can have a gradient, then the others, each in order.
    fn rows<'a>(&self, part: &Part<'a>) -> Result<Vec<TrainingRow<'a>>, TrainError> {
        let has_kl =
            self.options.loss.kl_coef != 0.0 && self.options.degenerate_groups == DegenerateGroups::Keep;
        let mut rows = Vec::new();
        for (index, episode) in part.episodes.iter().enumerate() {
            for sample in &episode.samples {
                let mut temperatures = sample.temperature.iter().flatten();
                let temperature = *temperatures.next().unwrap_or(&1.0);
                if temperatures.any(|&other| other != temperature) {
                    return Err(TrainError::MixedTemperature(episode.episode_id));
                }
                let advantage = part.advantages.values[index];
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
            self.go_on()?;
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
        sums.policy_loss += result.policy_loss;
        sums.kl_loss += result.kl_loss;
        sums.stats.add(&result.stats);
        Ok(result.gradient.into_iter().map(|value| value as f32).collect())
    }

    fn metrics(
        &self,
        part: &Part<'_>,
        sampled_tokens: usize,
        sums: &Sums,
        grad_norm: Option<f64>,
    ) -> Result<StepMetrics, TrainError> {
        let (episodes, advantages) = (part.episodes, &part.advantages);
        let count = episodes.len() as f64;
        let stats = &sums.stats;
        let measured = |value: f64| (stats.tokens > 0).then_some(value);
        let mean = |sum: f64| measured(sum / stats.tokens as f64);
        let aligned = match sums.captured.is_empty() {
            true => None,
            false => Some(alignment(&sums.captured, &sums.recomputed)?),
        };
        let groups = advantages.groups.max(1) as f64;
        Ok(StepMetrics {
            reward_mean: episodes.iter().map(|episode| episode.reward).sum::<f64>() / count,
            solve_rate: episodes.iter().filter(|episode| episode.reward >= 1.0).count() as f64 / count,
            sampled_tokens,
            trained_tokens: sums.trained_tokens,
            loss: measured(sums.loss),
            policy_loss: measured(sums.policy_loss),
            kl_loss: (stats.reference_tokens > 0).then_some(sums.kl_loss),
            kl: stats.kl_reference_mean(),
            kl_old: mean(stats.kl_old),
            entropy: mean(sums.entropy),
            clip_fraction: measured(stats.clip_fraction()),
            ratio_mean: mean(stats.ratio),
            ratio_max: measured(stats.ratio_max),
            grad_norm,
            learning_rate: part.learning_rate,
            advantage_mean: advantages.mean(),
            advantage_std: advantages.std(),
            degenerate_group_ratio: advantages.degenerate_group_ratio(),
            all_solved_group_ratio: advantages.groups_all_solved as f64 / groups,
            all_failed_group_ratio: advantages.groups_all_failed as f64 / groups,
            policy_version_lag: mean(sums.lag_sum as f64),
            policy_version_lag_max: (stats.tokens > 0).then_some(sums.lag_max),
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
