//! The learner of a run, from its config.

use super::RunError;
use crate::config::{self, LearningRateSchedule, Training};
use crate::kernels::Pool;
use crate::loss::{AdvantageEstimator, Aggregation, KlEstimator, PolicyLossOptions};
use crate::model::Model;
use crate::train::{Learner, LearnerOptions, OptimizerOptions};

/// A learner that starts from `model`, which is also the policy that the KL is measured to.
pub fn new(training: &Training, model: Model) -> Result<Learner, RunError> {
    let options = LearnerOptions {
        learning_rate: training.learning_rate,
        optimizer: OptimizerOptions {
            beta1: training.betas[0],
            beta2: training.betas[1],
            eps: training.adam_eps,
            weight_decay: training.weight_decay,
            max_grad_norm: training.max_grad_norm,
        },
        advantage: advantage(training)?,
        loss: PolicyLossOptions {
            clip_low: training.clip_range,
            clip_high: training.upper_clip_range(),
            dual_clip: None,
            kl_coef: training.kl_coef,
            kl: match training.kl_estimator {
                config::KlEstimator::K1 => KlEstimator::K1,
                config::KlEstimator::K2 => KlEstimator::K2,
                config::KlEstimator::K3 => KlEstimator::K3,
            },
        },
        aggregation: aggregation(training),
        ..LearnerOptions::default()
    };
    let reference = model.clone();
    let pool = Pool::new(training.kernel_threads());
    Learner::new(model, Some(reference), options, pool)
        .map_err(|error| RunError::failed("setting the learner up")(error.into()))
}

fn advantage(training: &Training) -> Result<AdvantageEstimator, RunError> {
    let estimators = [(1e-6, AdvantageEstimator::GrpoVerl), (1e-4, AdvantageEstimator::GrpoTrl)];
    if !training.advantage_scale_by_std {
        return Ok(AdvantageEstimator::MeanOnly);
    }
    estimators
        .into_iter()
        .find(|(eps, _)| *eps == training.advantage_eps)
        .map(|(_, estimator)| estimator)
        .ok_or_else(|| RunError::Failed {
            doing: "setting the learner up",
            cause: format!(
                "training.advantage_eps = {}: set it to 1e-4 (as TRL) or 1e-6 (as verl)",
                training.advantage_eps
            ),
        })
}

fn aggregation(training: &Training) -> Aggregation {
    let longest = (training.max_new_tokens * training.max_turns) as f64;
    match training.aggregation {
        config::Aggregation::TokenMean => Aggregation::TokenMean,
        config::Aggregation::SeqMeanTokenMean => Aggregation::EpisodeMean,
        config::Aggregation::SeqMeanTokenSum => Aggregation::EpisodeSum { length: 1.0 },
        config::Aggregation::SeqMeanTokenSumNorm => Aggregation::EpisodeSum { length: longest },
    }
}

/// Sets the learning rate of the steps that follow optimizer step `step`.
pub fn schedule(learner: &mut Learner, training: &Training, step: u64) {
    let warmup = match training.warmup_steps {
        0 => 1.0,
        steps => ((step + 1) as f64 / steps as f64).min(1.0),
    };
    let done = step as f64 / training.max_steps.max(1) as f64;
    let decay = match training.learning_rate_schedule {
        LearningRateSchedule::Constant => 1.0,
        LearningRateSchedule::Linear => 1.0 - done,
        LearningRateSchedule::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * done).cos()),
    };
    learner.set_learning_rate(training.learning_rate * warmup * decay);
}
