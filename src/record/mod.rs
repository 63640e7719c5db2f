//! What lego stores and passes on, as plain data: ids, calls, samples, outcomes. No I/O.
//!
//! Invariants:
//! - A [`Call`] is append-only and immutable; lineages, samples and masks are derived from calls.
//! - Missing is `None`, never 0.
//! - A [`Routing`] has the bytes that its shape says.
//! - A [`Sample`] can only be built by [`Sample::new`], which checks its lengths and its mask.
//! - A [`Position`] counts from the first token of the prompt. Rows of [`RoutedExperts`] are found by it alone.

mod call;
mod disposition;
#[cfg(test)]
pub(crate) mod example;
mod experts;
mod ids;
mod json_text;
mod outcome;
mod routing;
mod sample;
mod shared;
mod sink;

pub use call::{
    Call, CallKind, CallStatus, CapturedToolCall, ClientApi, IdsSource, LayerAxis, LogprobSemantics, Parties,
    RoutingDtype, SCHEMA_VERSION, Sampling, UpstreamKind, Usage, WeightSource, WeightSpan,
};
pub use disposition::Disposition;
pub use experts::{Position, RoutedExperts};
pub use ids::{CallId, EpisodeId, GroupId, InvalidId, PolicyVersion, SessionId, TaskId, TrialId};
pub use json_text::JsonText;
pub use outcome::{ExitEvidence, InfraFailure, Outcome, Termination};
pub use routing::{InvalidRouting, Routing, RoutingShape};
pub use sample::{CallSpan, InvalidSample, Sample, SampleParts};
pub use shared::{ChoiceId, Part, Shared, SharedIds, Splice, SpliceSource};
pub use sink::{CallSink, SinkError};
