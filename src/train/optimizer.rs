//! AdamW over all weights of a model.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::TrainError;
use crate::kernels;
use crate::model::{Gradients, Model, Parameters};

/// Hyper-parameters. The learning rate is given with each step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerOptions {
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    /// On matrices only; norm weights are never decayed.
    pub weight_decay: f64,
    /// The gradient is scaled down to this norm over all weights together; 0: it is left as it is.
    pub max_grad_norm: f64,
}

impl Default for OptimizerOptions {
    fn default() -> Self {
        Self { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.0, max_grad_norm: 1.0 }
    }
}

/// AdamW's moments and its step count.
#[derive(Debug, Clone, PartialEq)]
pub struct Optimizer {
    options: OptimizerOptions,
    pub(super) first_moment: Vec<f32>,
    pub(super) second_moment: Vec<f32>,
    pub(super) steps: u64,
    /// Stretches of the flat buffer, in order, and whether they are decayed.
    stretches: Vec<(Range<usize>, bool)>,
}

impl Optimizer {
    /// Moments of 0 for `parameters`.
    #[must_use]
    pub fn new(options: OptimizerOptions, parameters: &Parameters) -> Self {
        let mut stretches: Vec<(Range<usize>, bool)> = Vec::new();
        for tensor in parameters.tensors() {
            let is_decayed = tensor.shape.len() > 1;
            match stretches.last_mut() {
                Some((range, decayed)) if *decayed == is_decayed && range.end == tensor.range.start => {
                    range.end = tensor.range.end;
                }
                _ => stretches.push((tensor.range.clone(), is_decayed)),
            }
        }
        Self {
            options,
            first_moment: vec![0.0; parameters.len()],
            second_moment: vec![0.0; parameters.len()],
            steps: 0,
            stretches,
        }
    }

    /// Updates taken so far.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// One update of `model`. Returns the gradient's norm before clipping.
    ///
    /// # Errors
    /// A gradient that is not finite; nothing has changed then.
    pub fn step(
        &mut self,
        model: &mut Model,
        gradients: &mut Gradients,
        learning_rate: f64,
    ) -> Result<f64, TrainError> {
        let gradients = gradients.total();
        let norm = kernels::l2_norm(gradients);
        if !norm.is_finite() {
            return Err(TrainError::GradientNotFinite { norm, step: self.steps + 1 });
        }
        let OptimizerOptions { beta1, beta2, eps, weight_decay, max_grad_norm } = self.options;
        // As torch's clip_grad_norm_.
        let scale = match max_grad_norm {
            0.0 => 1.0,
            bound => (bound / (norm + 1e-6)).min(1.0) as f32,
        };
        self.steps += 1;
        model.update(|weights| {
            for (range, is_decayed) in &self.stretches {
                let options = kernels::AdamW {
                    lr: learning_rate as f32,
                    beta1: beta1 as f32,
                    beta2: beta2 as f32,
                    eps: eps as f32,
                    weight_decay: if *is_decayed { weight_decay as f32 } else { 0.0 },
                };
                kernels::adamw(
                    &mut weights[range.clone()],
                    &gradients[range.clone()],
                    &mut self.first_moment[range.clone()],
                    &mut self.second_moment[range.clone()],
                    &options,
                    self.steps,
                    scale,
                );
            }
        });
        Ok(norm)
    }
}
