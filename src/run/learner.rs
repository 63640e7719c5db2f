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
    AdvantageEstimator::of(training).ok_or_else(|| RunError::Failed {
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

/// The learning rate of the step that follows optimizer step `step`.
pub fn learning_rate(training: &Training, step: u64) -> f64 {
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
    training.learning_rate * warmup * decay
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, ConfigPaths, Environment};
    use crate::model::{Config as ModelConfig, Shape};

    fn model() -> Model {
        let config = ModelConfig::new(Shape {
            vocab_size: 8,
            hidden_size: 8,
            intermediate_size: 8,
            num_hidden_layers: 1,
            num_attention_heads: 1,
            num_key_value_heads: 1,
            head_dim: 8,
            rope_theta: 1e4,
            max_position_embeddings: 8,
            tie_word_embeddings: true,
        })
        .expect("sizes fit");
        Model::init(config, 1)
    }

    #[test]
    fn what_the_config_accepts_the_learner_takes() {
        let folder = tempfile::tempdir().expect("temp");
        let load = |line: &str| {
            std::fs::write(folder.path().join("train.toml"), format!("[training]\n{line}\n"))
                .expect("written");
            Config::load(&ConfigPaths::in_folder(folder.path()), Environment::default())
        };
        for line in [
            "max_grad_norm = 0",
            "max_grad_norm = 1e9",
            "clip_range = 0",
            "clip_range = 1.0",
            "clip_range_high = 0",
            "clip_range_high = 1e6",
            "kl_coef = 0",
            "kl_coef = 1e6",
            "learning_rate = 0.99",
            "adam_eps = 0.99",
            "advantage_eps = 1e-4",
            "advantage_eps = 1e-6",
            "advantage_eps = 0.5\nadvantage_scale_by_std = false",
        ] {
            let config = load(line).unwrap_or_else(|error| panic!("{line}: {error}"));
            if let Err(error) = new(&config.training, model()) {
                panic!("{line}: {error}");
            }
        }
        for line in [
            "max_grad_norm = -1",
            "max_grad_norm = nan",
            "clip_range = 1.1",
            "clip_range_high = inf",
            "kl_coef = -0.1",
            "adam_eps = 0",
            "advantage_eps = 1e-5",
        ] {
            let key = line.split(' ').next().expect("a key");
            let error = load(line).expect_err(line).to_string();
            assert!(error.contains(&format!("training.{key}")), "{line}: {error}");
        }
    }

    #[test]
    fn the_rate_rises_over_the_warm_up_and_falls_to_0_at_the_last_step() {
        let training = |schedule| Training {
            learning_rate: 0.5,
            warmup_steps: 4,
            max_steps: 8,
            learning_rate_schedule: schedule,
            ..Training::default()
        };
        let rates =
            |schedule| -> Vec<f64> { (0..8).map(|step| learning_rate(&training(schedule), step)).collect() };
        assert_eq!(rates(LearningRateSchedule::Constant), [0.125, 0.25, 0.375, 0.5, 0.5, 0.5, 0.5, 0.5]);
        let linear = rates(LearningRateSchedule::Linear);
        assert_eq!((linear[0], linear[4], linear[7]), (0.125, 0.25, 0.0625));
        let cosine = rates(LearningRateSchedule::Cosine);
        assert!((cosine[4] - 0.25).abs() < 1e-12 && cosine[7] < 0.02, "{cosine:?}");
    }
}
