//! A causal language model of Qwen3's architecture: Hugging Face folders in and out, forward and backward
//! by hand.
//!
//! Invariants:
//! - **One log-prob.** [`Model::step`] (decode and prefill chunks, any mix), [`Model::log_probs`] (replay) and
//!   [`Model::forward`] (training) give the same bits for the same tokens, whatever the batch, its split,
//!   the number of threads or the CPU's instruction set.
//! - **One gradient.** [`Model::backward`] gives the same bits at any number of threads, and over any split
//!   of the sequences into consecutive batches.
//! - A checkpoint that is not exactly what `config.json` describes is refused by name.

mod attention;
mod buffers;
mod cache;
mod checkpoint;
mod config;
mod decoder;
mod error;
mod head;
mod init;
mod mlp;
mod parameters;

pub use cache::{KvCache, Logits, Row};
pub use config::{Config, Shape};
pub use error::ModelError;
pub use parameters::{Gradients, Parameters, Tensor};

use crate::kernels::{Pool, RopeTable};
use buffers::{Arena, Buffer};
use decoder::{Batch, PackedWeights, Saved};
use head::Predictions;
use std::path::Path;
use std::sync::Arc;

/// A model: weights, and the same weights packed for the kernels.
#[derive(Debug, Clone)]
pub struct Model {
    config: Config,
    parameters: Parameters,
    packed: PackedWeights,
    rope: Arc<RopeTable>,
    arena: Arc<Arena>,
}

/// What [`Model::forward`] gives, and what it keeps for [`Model::backward`].
pub struct Pass {
    batch: Batch,
    saved: Vec<Saved>,
    /// Output of the last layer, `[rows, hidden]`.
    x_nd: Buffer,
    predictions: Predictions,
}

impl Pass {
    /// Number of sequences.
    #[must_use]
    pub fn sequences(&self) -> usize {
        self.batch.sequences.len()
    }

    /// Log-prob of each token of `sequence` but the first, given all before it: `T - 1` values.
    #[must_use]
    pub fn log_probs(&self, sequence: usize) -> &[f32] {
        &self.predictions.log_probs[self.batch.predictions(sequence)]
    }

    /// Entropy in nats of the distribution each of those tokens was drawn from: `T - 1` values.
    #[must_use]
    pub fn entropy(&self, sequence: usize) -> &[f32] {
        &self.predictions.entropy[self.batch.predictions(sequence)]
    }
}

impl Model {
    /// Loads `config.json` and `model.safetensors` from `dir`.
    ///
    /// # Errors
    /// [`ModelError`] names the file, the key or tensor, and what was expected.
    pub fn load(dir: &Path) -> Result<Self, ModelError> {
        let config = Config::load(dir)?;
        let parameters = checkpoint::read(dir, &config)?;
        Ok(Self::assemble(config, parameters))
    }

    /// A model with random weights that depend on `config` and `seed` only.
    #[must_use]
    pub fn init(config: Config, seed: u64) -> Self {
        let layout = parameters::Layout::new(&config);
        let mut parameters = Parameters { flat: vec![0.0; layout.len], layout: layout.into() };
        init::fill(&config, seed, &mut parameters);
        Self::assemble(config, parameters)
    }

    fn assemble(config: Config, parameters: Parameters) -> Self {
        let packed = PackedWeights::new(&config, &parameters);
        let rope = RopeTable::new(config.rope_theta, config.head_dim, config.max_position_embeddings);
        Self { config, parameters, packed, rope: rope.into(), arena: Arc::default() }
    }

    /// Writes `config.json` (unknown keys kept) and `model.safetensors` (f32) into `dir`.
    ///
    /// # Errors
    /// [`ModelError::Write`] with the path.
    pub fn save(&self, dir: &Path) -> Result<(), ModelError> {
        checkpoint::write(dir, &self.config, &self.parameters)
    }

    /// The model's configuration.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// All weights.
    #[must_use]
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// Changes the weights in place, then packs them for the kernels.
    pub fn update(&mut self, change: impl FnOnce(&mut [f32])) {
        change(&mut self.parameters.flat);
        self.packed.repack(&self.parameters);
    }

    /// The same architecture with other weights, in the order of [`Parameters::flat`].
    ///
    /// # Errors
    /// [`ModelError::ParameterCount`] when the length differs.
    pub fn with_parameters(&self, flat: Vec<f32>) -> Result<Self, ModelError> {
        let expected = self.parameters.len();
        if flat.len() != expected {
            return Err(ModelError::ParameterCount { found: flat.len(), expected });
        }
        let parameters = Parameters { flat, layout: self.parameters.layout.clone() };
        let packed = PackedWeights::new(&self.config, &parameters);
        let (config, rope, arena) = (self.config.clone(), self.rope.clone(), self.arena.clone());
        Ok(Self { config, parameters, packed, rope, arena })
    }

    /// Gradients of this model, all 0.
    #[must_use]
    pub fn gradients(&self) -> Gradients {
        Gradients::new(&self.parameters.layout)
    }

    /// Log-probs and entropies of `sequences` at `temperature` (logits are divided by it), and what the
    /// backward pass needs.
    ///
    /// # Errors
    /// An empty sequence, a token outside the vocabulary, a sequence longer than the model's positions, a
    /// temperature that is not positive.
    pub fn forward(&self, pool: &Pool, sequences: &[&[u32]], temperature: f32) -> Result<Pass, ModelError> {
        check_temperature(temperature)?;
        let batch = Batch::new(&self.config, sequences)?;
        let (saved, x_nd) = self.sequences_forward(pool, &batch, true);
        let predictions = self.predict(pool, &batch, &x_nd, temperature, true);
        Ok(Pass { batch, saved, x_nd, predictions })
    }

    /// Log-probs of each token but the first, per sequence; nothing is kept. This is replay.
    ///
    /// # Errors
    /// As [`Model::forward`].
    pub fn log_probs(
        &self,
        pool: &Pool,
        sequences: &[&[u32]],
        temperature: f32,
    ) -> Result<Vec<Vec<f32>>, ModelError> {
        check_temperature(temperature)?;
        let batch = Batch::new(&self.config, sequences)?;
        let (_, x_nd) = self.sequences_forward(pool, &batch, false);
        let predictions = self.predict(pool, &batch, &x_nd, temperature, false);
        Ok((0..sequences.len())
            .map(|sequence| predictions.log_probs[batch.predictions(sequence)].to_vec())
            .collect())
    }

    /// Adds to `gradients` the gradient of a loss with `d loss / d log_prob` = `grad_log_probs`
    /// (per sequence, `T - 1` values).
    ///
    /// # Errors
    /// [`ModelError::Length`] when the shapes are not those of `pass`.
    pub fn backward(
        &self,
        pool: &Pool,
        pass: Pass,
        grad_log_probs: &[Vec<f32>],
        gradients: &mut Gradients,
    ) -> Result<(), ModelError> {
        let Pass { batch, saved, x_nd, predictions } = pass;
        let length = |what, found, expected| Err(ModelError::Length { what, found, expected });
        if grad_log_probs.len() != batch.sequences.len() {
            let (found, expected) = (grad_log_probs.len(), batch.sequences.len());
            return length("gradients of log-probs (sequences)", found, expected);
        }
        for (sequence, grad) in grad_log_probs.iter().enumerate() {
            let expected = batch.predictions(sequence).len();
            if grad.len() != expected {
                return length("gradients of a sequence's log-probs", grad.len(), expected);
            }
        }
        if gradients.flat.len() != self.parameters.len() {
            return length("gradients", gradients.flat.len(), self.parameters.len());
        }
        let grad = grad_log_probs.concat();
        let dy_nd = self.predict_backward(pool, &batch, &x_nd, &predictions, &grad, gradients);
        self.sequences_backward(pool, &batch, saved, dy_nd, gradients);
        Ok(())
    }
}

fn check_temperature(temperature: f32) -> Result<(), ModelError> {
    if temperature > 0.0 && temperature.is_finite() {
        return Ok(());
    }
    Err(ModelError::Temperature(temperature))
}
