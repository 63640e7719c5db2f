//! The three config files as types: `proxy_config.json`, `sandbox.toml`, `train.toml`.
//!
//! Invariants:
//! - Every key has a default, and its documentation is the doc comment of its field: `docs/configuration.md`
//!   is generated from the types and cannot drift.
//! - An unknown key, a wrong type or an impossible value is an error that names file, key path, value and
//!   remedy, before anything starts.
//! - Secrets are never values of a file: keys that end in `_env` name environment variables, and `${VAR}`
//!   inside a string is read from the environment. What came from the environment is never printed or stored.
//! - A key whose feature is not there yet is accepted by `lego config check`, and refused by
//!   [`Config::refuse_unsupported`] when a run starts.

mod check;
mod docs;
mod environment;
mod error;
mod layers;
mod listen;
mod load;
mod model_names;
mod object_url;
mod proxy;
mod read;
mod routes;
mod sandbox;
mod schema;
mod train;
mod unsupported;

pub use check::MAX_THREADS;
pub use docs::reference_markdown;
pub use environment::{Environment, Secret};
pub use error::ConfigError;
pub use listen::ListenHost;
pub use load::{Config, ConfigPaths, FileKind, Origin};
pub use model_names::{fitting, is_beginning};
pub use object_url::{ObjectScheme, ObjectUrl, ObjectUrlError};
pub use proxy::{
    Durability, Harness, HarnessType, InlineSystem, LlmConfigOverride, PinnedSampling, Proxy, Relay,
    ReplayedReasoning, SANDBOX_PORT, ServerTools, TokenHistory, UpstreamKind, UpstreamResponses,
};
pub use routes::{Route, RouteKind, Server, Volatile, VolatileAction, VolatileRole, VolatileRule};
pub use sandbox::{AgentOom, Cache, Defense, NetworkPolicy, ReadonlyPaths, Sandbox, SandboxBackend};
pub use train::{
    Aggregation, Algorithm, Async, AuxKind, KlEstimator, LearningRateSchedule, LogLevel, Observability,
    Policy, Reward, RewardType, Samples, SideKind, TrainedLineages, Training,
};
pub use unsupported::{Note, Use};
