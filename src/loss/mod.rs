//! Losses, KL estimators, advantages and alignment statistics: pure functions of numbers.
//!
//! Invariants:
//! - A masked position is never read: whatever stands there (NaN, -inf, a difference of 200) changes no
//!   loss, gradient or metric.
//! - A value the loss needs that is missing or not finite is refused by name ([`LossError`]), never replaced.
//! - The unit of a baseline is the episode, not the training row; a group is named by its id, never by its
//!   place in the batch.
//! - Denominators count the tokens or episodes of a whole optimizer step ([`Denominator`]), so a loss does
//!   not depend on how the step is cut into microbatches.
//! - Gradients are of the loss with respect to the log-probs of the policy under training, by hand.
//!
//! All numbers are f64 here: a step has some ten thousand of them, and the model's work dwarfs them.

mod advantage;
mod aggregate;
mod alignment;
mod error;
mod kl;
mod policy;

pub use advantage::{AdvantageEstimator, Advantages, advantages};
pub use aggregate::{Aggregation, Denominator};
pub use alignment::{Alignment, alignment};
pub use error::LossError;
pub use kl::KlEstimator;
pub use policy::{PolicyLoss, PolicyLossOptions, Row, TokenStats};
