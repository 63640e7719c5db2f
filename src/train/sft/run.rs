//! The supervised training loop.

use super::batches::Batches;
use super::conversations::EncodedConversation;
use crate::kernels::Pool;
use crate::model::{Gradients, Model};
use crate::train::{Optimizer, OptimizerOptions, Schedule, TrainError};

/// How the warm start trains.
#[derive(Debug, Clone, PartialEq)]
pub struct SftOptions {
    /// Peak learning rate.
    pub learning_rate: f64,
    /// Steps over which the rate rises.
    pub warmup: u64,
    pub steps: u64,
    /// Conversations a step.
    pub batch_size: usize,
    /// Loss weight of tokens that no assistant sampled.
    pub prompt_weight: f64,
    pub optimizer: OptimizerOptions,
    /// Decides the order of conversations.
    pub seed: u64,
    /// Bound on the tokens of one forward and backward pass.
    pub max_microbatch_tokens: usize,
}

/// Numbers of one supervised step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SftMetrics {
    /// From 1.
    pub step: u64,
    /// Weighted mean of the negative log-probs.
    pub loss: f64,
    /// Mean negative log-prob of sampled tokens alone.
    pub assistant_loss: f64,
    pub grad_norm: f64,
    pub learning_rate: f64,
    /// Tokens of the step.
    pub tokens: usize,
}

/// A model on its way through a warm start.
#[derive(Debug)]
pub struct SupervisedTrainer {
    options: SftOptions,
    data: Vec<EncodedConversation>,
    batches: Batches,
    model: Model,
    optimizer: Optimizer,
    gradients: Gradients,
    schedule: Schedule,
    pool: Pool,
}

impl SupervisedTrainer {
    /// Ready to train `model` on `data`.
    ///
    /// # Errors
    /// An option out of range, no data, a row longer than the model's positions.
    pub fn new(
        model: Model,
        data: Vec<EncodedConversation>,
        options: SftOptions,
        pool: Pool,
    ) -> Result<Self, TrainError> {
        let refuse = |name, value: String, remedy| Err(TrainError::Option { name, value, remedy });
        if !(options.learning_rate.is_finite() && options.learning_rate > 0.0) {
            return refuse("lr", options.learning_rate.to_string(), "give a positive number");
        }
        if !(0.0..=1.0).contains(&options.prompt_weight) {
            return refuse("prompt-weight", options.prompt_weight.to_string(), "give 0 to 1");
        }
        if options.batch_size == 0 || options.max_microbatch_tokens == 0 {
            return refuse("batch-size", options.batch_size.to_string(), "give at least 1");
        }
        if data.is_empty() {
            return Err(TrainError::EmptyBatch);
        }
        let limit = model.config().max_position_embeddings;
        let longest = data.iter().map(|row| row.token_ids.len()).max().unwrap_or(0);
        if longest > limit {
            return refuse(
                "max_position_embeddings",
                format!("{limit}, and the longest conversation has {longest} tokens"),
                "raise it in config.json, or cut the conversation",
            );
        }
        let lengths = data.iter().map(|row| row.token_ids.len()).collect();
        Ok(Self {
            batches: Batches::new(lengths, options.batch_size, options.seed),
            optimizer: Optimizer::new(options.optimizer, model.parameters()),
            gradients: model.gradients(),
            schedule: Schedule::WarmupHoldDecay { warmup: options.warmup, steps: options.steps },
            options,
            data,
            model,
            pool,
        })
    }

    /// The model as trained so far.
    #[must_use]
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Steps taken.
    #[must_use]
    pub fn steps_done(&self) -> u64 {
        self.optimizer.steps()
    }

    /// Whether all steps are done.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.steps_done() >= self.options.steps
    }

    /// One step on the next batch.
    ///
    /// # Errors
    /// A gradient that is not finite, a token outside the vocabulary.
    pub fn step(&mut self) -> Result<SftMetrics, TrainError> {
        let batch = self.batches.next_batch();
        let rows: Vec<&EncodedConversation> = batch.iter().map(|&index| &self.data[index]).collect();
        let weight = |is_sampled: bool| if is_sampled { 1.0 } else { self.options.prompt_weight };
        let total: f64 =
            rows.iter().flat_map(|row| &row.is_sampled[1..]).map(|&sampled| weight(sampled)).sum();

        self.gradients.clear();
        let (mut loss, mut assistant_loss, mut assistant_tokens) = (0.0, 0.0, 0usize);
        for microbatch in chunks_of_tokens(&rows, self.options.max_microbatch_tokens) {
            let sequences: Vec<&[u32]> = microbatch.iter().map(|row| row.token_ids.as_slice()).collect();
            let pass = self.model.forward(&self.pool, &sequences, 1.0)?;
            let mut grad_log_probs = Vec::with_capacity(microbatch.len());
            for (index, row) in microbatch.iter().enumerate() {
                let targets = row.is_sampled[1..].iter().zip(pass.log_probs(index));
                for (&is_sampled, &log_prob) in targets {
                    loss -= weight(is_sampled) * f64::from(log_prob) / total;
                    if is_sampled {
                        assistant_loss -= f64::from(log_prob);
                        assistant_tokens += 1;
                    }
                }
                let gradient = row.is_sampled[1..].iter().map(|&s| (-weight(s) / total) as f32);
                grad_log_probs.push(gradient.collect());
            }
            self.model.backward(&self.pool, pass, &grad_log_probs, &mut self.gradients)?;
        }
        let learning_rate = self.options.learning_rate * self.schedule.factor(self.optimizer.steps());
        let grad_norm = self.optimizer.step(&mut self.model, &mut self.gradients, learning_rate)?;
        Ok(SftMetrics {
            step: self.optimizer.steps(),
            loss,
            assistant_loss: assistant_loss / assistant_tokens.max(1) as f64,
            grad_norm,
            learning_rate,
            tokens: rows.iter().map(|row| row.token_ids.len()).sum(),
        })
    }
}

/// Consecutive rows of at most `max_tokens` tokens; a longer row stands alone.
fn chunks_of_tokens<'r, 'a>(
    rows: &'r [&'a EncodedConversation],
    max_tokens: usize,
) -> Vec<&'r [&'a EncodedConversation]> {
    let mut chunks = Vec::new();
    let (mut start, mut tokens) = (0, 0);
    for (index, row) in rows.iter().enumerate() {
        if index > start && tokens + row.token_ids.len() > max_tokens {
            chunks.push(&rows[start..index]);
            (start, tokens) = (index, 0);
        }
        tokens += row.token_ids.len();
    }
    chunks.push(&rows[start..]);
    chunks
}
