//! Training: the optimizer, the learner of policy gradients, the supervised warm start, checkpoints.
//!
//! Invariants:
//! - A step's losses, gradients and new weights are the same bits at any microbatch size and any number of
//!   threads, and do not depend on the order in which episodes arrived (law 11).
//! - The importance ratio is taken against the log-probs captured at sampling. What a forward pass without KV
//!   cache recomputes before the update is compared with them and reported, and replaces nothing (law 12).
//! - Denominators count the whole optimizer step ([`crate::loss::Denominator`]); an episode is one member of its
//!   group however many rows it has (law 7).
//! - A step that cannot be computed exactly (a missing value, a gradient that is not finite) is an error and
//!   leaves weights and moments as they were.
//! - A checkpoint folder is complete or does not exist; one that was damaged later is refused by file name.

mod batch;
mod checkpoint;
mod error;
mod learner;
mod metrics;
mod optimizer;
mod rng;
mod schedule;
pub mod sft;

pub use checkpoint::Checkpoints;
pub use error::TrainError;
pub use learner::{DegenerateGroups, Episode, Learner, LearnerOptions};
pub use metrics::StepMetrics;
pub use optimizer::{Optimizer, OptimizerOptions};
pub use schedule::Schedule;
