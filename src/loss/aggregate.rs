//! From token losses to one number: what each token weighs.

use serde::{Deserialize, Serialize};

use super::error::LossError;

/// How token losses are averaged over an optimizer step, by name.
///
/// An episode is one trial, however many training rows it fans out into.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "name")]
pub enum Aggregation {
    /// Sum over all sampled tokens of the step, divided by their number (DAPO: Yu et al. 2025,
    /// arXiv:2503.14476, equation 8). Long episodes weigh more.
    #[default]
    TokenMean,
    /// Mean over the tokens of each episode, then mean over episodes: one episode, one vote
    /// (GRPO as in arXiv:2402.03300, equation 3).
    EpisodeMean,
    /// Sum over tokens, divided by episodes times a constant length (Dr. GRPO, arXiv:2503.20783).
    EpisodeSum {
        /// The constant, in tokens.
        length: f64,
    },
}

/// The denominators of one optimizer step, counted before it is cut into microbatches.
#[derive(Debug, Clone, PartialEq)]
pub struct Denominator {
    aggregation: Aggregation,
    tokens: usize,
    /// Sampled tokens of each episode over all its rows, 0 for an episode that has none.
    episode_tokens: Vec<usize>,
}

impl Denominator {
    /// `episode_tokens[i]` is the number of sampled tokens of episode `i`, over all its rows.
    ///
    /// # Errors
    /// No sampled token at all, or an [`Aggregation::EpisodeSum`] length that is not positive.
    pub fn new(aggregation: Aggregation, episode_tokens: Vec<usize>) -> Result<Self, LossError> {
        if let Aggregation::EpisodeSum { length } = aggregation
            && !(length.is_finite() && length > 0.0)
        {
            return Err(LossError::Option {
                name: "aggregation.length",
                value: length,
                remedy: "give a positive number of tokens",
            });
        }
        let tokens = episode_tokens.iter().sum();
        if tokens == 0 {
            return Err(LossError::NoTokens);
        }
        Ok(Self { aggregation, tokens, episode_tokens })
    }

    /// Sampled tokens of the step.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// What each sampled token of episode `episode` weighs in the step's loss.
    #[must_use]
    pub fn token_weight(&self, episode: usize) -> f64 {
        let episodes = self.episode_tokens.len() as f64;
        match self.aggregation {
            Aggregation::TokenMean => 1.0 / self.tokens as f64,
            Aggregation::EpisodeMean => 1.0 / (episodes * self.episode_tokens[episode].max(1) as f64),
            Aggregation::EpisodeSum { length } => 1.0 / (episodes * length),
        }
    }
}
