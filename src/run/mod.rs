//! The composition root: everything is wired here, and nowhere else.
//!
//! Invariants:
//! - Whatever can be refused is refused before the first trial: config, dataset, model, sandbox, port.
//! - A run that is killed at any moment goes on with `--resume` from its last checkpoint, and what it
//!   then computes is what it would have computed without the kill.
//! - Every sampled token is accounted for at each step, or the run stops (law 6).

mod account;
mod batch;
mod carried;
mod error;
mod eval;
mod evaluation;
mod folder;
mod inputs;
mod learner;
mod machinery;
mod metrics;
mod policy;
mod progress;
mod report;
mod training;
mod upstreams;
mod waves;

pub use account::TokenAccount;
pub use error::{RunError, causes};
pub use eval::{EvalOptions, EvalReport, eval};
pub use evaluation::{Evaluation, Rates, TaskScore};
pub use folder::{RunFolder, write_json};
pub use machinery::writer_options;
pub use policy::{ServedPolicy, embedded, http_upstream};
pub use report::{CurvePoint, Report, count};
pub use training::{TrainOptions, train};
pub use upstreams::upstreams;
