//! Rollout: tasks in, graded episodes out.
//!
//! Invariants:
//! - Every trial that is started ends in exactly one [`TrialResult`].
//! - A trial's randomness is a function of (run seed, purpose, policy version, task, index in its group),
//!   never of arrival order or of the trials beside it.
//! - Broken machinery ends in [`Outcome::Invalid`](crate::record::Outcome): it has no reward, and its
//!   episode leaves its group. Everything else is graded.
//! - Staleness is bounded by admission: trials of a version are started only when that version is published.

mod books;
mod conclude;
mod error;
mod schedule;
mod seed;
mod trial;
mod wave;

pub use conclude::{SessionFacts, conclude};
pub use error::RolloutError;
pub use schedule::TaskOrder;
pub use seed::derive_seed;
pub use trial::{Purpose, TrialEnv, TrialOptions, TrialResult, TrialSpec, run_trial};
pub use wave::{WaveProgress, run_wave};
