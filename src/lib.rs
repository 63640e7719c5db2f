//! lego: reinforcement learning for code agents in their own harnesses.
//!
//! A harness runs unchanged in a sandbox and calls the policy through lego's proxy. The proxy captures
//! exact token ids and log-probabilities; hidden tests give the reward; the captured tokens train the
//! policy; the next trial is sampled from the new weights.
//!
//! The map of the house. A room imports only from rooms of a lower level (`tests/house.rs` enforces it).
//!
//! | level | room | what it is for |
//! |---|---|---|
//! | 0 | [`config`] | the three config files as types: defaults, validation, where each value came from |
//! | 0 | [`protocol`] | wire formats as pure data and functions: SSE, chat, completions, Responses, Messages, error bodies |
//! | 0 | [`kernels`] | CPU math with a fixed reduction order, chosen by CPU at run time |
//! | 1 | [`record`] | what is stored and passed on: calls, samples, outcomes, ids. No I/O |
//! | 1 | [`loss`] | losses, KL, advantages, alignment statistics: pure functions of numbers |
//! | 1 | [`text`] | tokenizer, chat template, parsers of replies |
//! | 2 | [`telemetry`] | logs, Prometheus registry, TensorBoard, `metrics.parquet`, the run's events |
//! | 2 | [`model`] | HF checkpoints and one decoder, forward and backward side by side |
//! | 2 | [`capture`] | the store of calls: journal, Parquet, reader |
//! | 2 | [`trajectory`] | calls to lineages to samples |
//! | 2 | [`sandbox`] | the backend trait and the embedded backend, exit evidence |
//! | 3 | [`engine`] | the embedded engine: KV cache, continuous batching, sampling; ids in, ids out |
//! | 3 | [`replay`] | forward over samples: log-probs |
//! | 3 | [`export`] | captures to other trainers' forms |
//! | 3 | [`ledger`] | the token account of captures |
//! | 3 | [`task`] | datasets, workspaces, verifier, reward |
//! | 3 | [`harness`] | one file a harness: how to start it |
//! | 4 | [`serve`] | vLLM-shaped HTTP router over the engine |
//! | 4 | [`upstream`] | one file an engine dialect: what to inject, how to read the reply |
//! | 4 | [`train`] | optimizer, learner, supervised warm start, checkpoints |
//! | 5 | [`proxy`] | routes, sessions, auth, relays |
//! | 6 | [`rollout`] | dispatcher and trial: tasks to episodes |
//! | 8 | [`run`] | composition root: wiring, run folder, resume, shutdown, report |
//! | 9 | [`cli`] | one file a command, no logic |

pub mod capture;
pub mod cli;
pub mod config;
pub mod engine;
pub mod export;
pub mod harness;
pub mod kernels;
pub mod ledger;
pub mod loss;
pub mod model;
pub mod protocol;
pub mod proxy;
pub mod record;
pub mod replay;
pub mod rollout;
pub mod run;
pub mod sandbox;
pub mod serve;
pub mod task;
pub mod telemetry;
pub mod text;
pub mod train;
pub mod trajectory;
pub mod upstream;
