//! Where a sampled token ended up: the ledger's buckets (law 6).

use serde::{Deserialize, Serialize};

/// Every sampled token ends in exactly one of these.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "bucket", content = "reason")]
pub enum Disposition {
    /// Took part in an optimizer step's loss.
    Trained,
    /// In a sample, but weighted 0 (reason).
    Masked(String),
    /// Older than the staleness bound.
    Stale,
    /// A retry of the same request was continued instead.
    Superseded,
    /// Sampled for something other than the policy.
    AuxCall,
    /// Behind the end of what a sample may hold.
    OverWindow,
    /// Its trial failed by infrastructure.
    InfraFailure,
    /// Left out (reason).
    Dropped(String),
    /// The engine gave ids, but no usage to check them against.
    UsageUnknown,
    /// The engine reported usage, but gave no ids.
    NoIds,
}

impl Disposition {
    /// The name of its bucket, with the reason: `dropped: evaluation`.
    #[must_use]
    pub fn bucket(&self) -> String {
        match self {
            Self::Trained => "trained".to_owned(),
            Self::Masked(reason) => format!("masked: {reason}"),
            Self::Stale => "stale".to_owned(),
            Self::Superseded => "superseded".to_owned(),
            Self::AuxCall => "aux_call".to_owned(),
            Self::OverWindow => "over_window".to_owned(),
            Self::InfraFailure => "infra_failure".to_owned(),
            Self::Dropped(reason) => format!("dropped: {reason}"),
            Self::UsageUnknown => "usage_unknown".to_owned(),
            Self::NoIds => "no_ids".to_owned(),
        }
    }
}
