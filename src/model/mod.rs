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

mod cache;
mod checkpoint;
mod config;
mod error;
mod init;
mod parameters;

pub use cache::{KvCache, Logits, Row};
pub use config::{Config, Shape};
pub use error::ModelError;
pub use parameters::{Gradients, Parameters, Tensor};

use crate::kernels::Pool;
use std::path::Path;

/// A model: weights, and the same weights packed for the kernels.
#[derive(Debug, Clone)]
pub struct Model {
    config: Config,
    parameters: Parameters,
}

/// What [`Model::forward`] keeps for [`Model::backward`].
#[derive(Debug)]
pub struct Pass {
    log_probs: Vec<Vec<f32>>,
    entropy: Vec<Vec<f32>>,
}

impl Pass {
    /// Number of sequences.
    #[must_use]
    pub fn sequences(&self) -> usize {
        self.log_probs.len()
    }

    /// Log-prob of each token of `sequence` but the first, given all before it: `T - 1` values.
    #[must_use]
    pub fn log_probs(&self, sequence: usize) -> &[f32] {
        &self.log_probs[sequence]
    }

    /// Entropy in nats of the distribution each of those tokens was drawn from: `T - 1` values.
    #[must_use]
    pub fn entropy(&self, sequence: usize) -> &[f32] {
        &self.entropy[sequence]
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
        Ok(Self { config, parameters })
    }

    /// A model with random weights that depend on `config` and `seed` only.
    #[must_use]
    pub fn init(config: Config, seed: u64) -> Self {
        let layout = parameters::Layout::new(&config);
        let mut parameters = Parameters {
            flat: vec![0.0; layout.len],
            layout: layout.into(),
        };
        init::fill(&config, seed, &mut parameters);
        Self { config, parameters }
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
    }

    /// The same architecture with other weights, in the order of [`Parameters::flat`].
    ///
    /// # Errors
    /// [`ModelError::ParameterCount`] when the length differs.
    pub fn with_parameters(&self, flat: Vec<f32>) -> Result<Self, ModelError> {
        let expected = self.parameters.len();
        if flat.len() != expected {
            return Err(ModelError::ParameterCount {
                found: flat.len(),
                expected,
            });
        }
        let parameters = Parameters {
            flat,
            layout: self.parameters.layout.clone(),
        };
        Ok(Self {
            config: self.config.clone(),
            parameters,
        })
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
    /// An empty sequence, a token outside the vocabulary, a sequence longer than the model's positions.
    pub fn forward(
        &self,
        _pool: &Pool,
        _sequences: &[&[u32]],
        _temperature: f32,
    ) -> Result<Pass, ModelError> {
        unimplemented!()
    }

    /// Log-probs of each token but the first, per sequence; nothing is kept. This is replay.
    ///
    /// # Errors
    /// As [`Model::forward`].
    pub fn log_probs(
        &self,
        _pool: &Pool,
        _sequences: &[&[u32]],
        _temperature: f32,
    ) -> Result<Vec<Vec<f32>>, ModelError> {
        unimplemented!()
    }

    /// Adds to `gradients` the gradient of a loss with `d loss / d log_prob` = `grad_log_probs`
    /// (per sequence, `T - 1` values).
    ///
    /// # Errors
    /// [`ModelError::Length`] when the shapes are not those of `pass`.
    pub fn backward(
        &self,
        _pool: &Pool,
        _pass: Pass,
        _grad_log_probs: &[Vec<f32>],
        _gradients: &mut Gradients,
    ) -> Result<(), ModelError> {
        unimplemented!()
    }

    /// Appends `rows` to their slots, prefill chunks and decode rows in any mix, and gives the logits of
    /// those rows `r` with `want_logits[r]`.
    ///
    /// # Errors
    /// A row that does not continue its slot, a full slot, a token or position out of range. Nothing is
    /// appended then.
    pub fn step(
        &self,
        _pool: &Pool,
        _cache: &mut KvCache,
        _rows: &[Row],
        _want_logits: &[bool],
    ) -> Result<Logits, ModelError> {
        unimplemented!()
    }
}
