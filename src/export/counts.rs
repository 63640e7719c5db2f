//! What was written, and what was left out and why.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::ExportError;

/// Bucket of what is in the export.
pub(super) const WRITTEN: &str = "written";

/// Things of one kind, each in one bucket.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Tally {
    /// How many there are.
    pub all: u64,
    /// [`Tally::all`] by what became of them: `written`, or why not.
    pub by: BTreeMap<String, u64>,
}

impl Tally {
    /// `number` of those that there are went there.
    pub(super) fn add(&mut self, bucket: &str, number: u64) {
        if number > 0 {
            *self.by.entry(bucket.to_owned()).or_default() += number;
        }
    }

    /// How many were written.
    #[must_use]
    pub fn written(&self) -> u64 {
        self.by.get(WRITTEN).copied().unwrap_or(0)
    }

    fn check(&self, what: &'static str) -> Result<(), ExportError> {
        let in_buckets = self.by.values().sum();
        if in_buckets == self.all {
            Ok(())
        } else {
            Err(ExportError::Unbalanced { what, all: self.all, in_buckets })
        }
    }
}

/// What an export holds, and what it does not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Counts {
    pub format: &'static str,
    /// Sampled choices, each once.
    pub calls: Tally,
    /// Sessions; in a run one is an attempt at a trial, or of no trial.
    pub sessions: Tally,
    /// Of them: those of a trial that is an episode of its group.
    pub episodes: Tally,
    /// Groups of episodes.
    pub groups: Tally,
    /// Lines, or samples.
    pub rows: Tally,
    /// Samples whose expert routing is not all there: their rows have none.
    pub routing_lost: u64,
    /// Rows of expert routing that two calls have of one position, and that differ: the first call's are written.
    pub differing_rows: u64,
    /// What is to be known of the whole.
    pub notes: BTreeSet<String>,
    /// Files and bytes of the captures that could not be read: nobody knows what is in them.
    pub unread: BTreeSet<String>,
}

impl Counts {
    pub(super) fn new(format: &'static str) -> Self {
        Self {
            format,
            calls: Tally::default(),
            sessions: Tally::default(),
            episodes: Tally::default(),
            groups: Tally::default(),
            rows: Tally::default(),
            routing_lost: 0,
            differing_rows: 0,
            notes: BTreeSet::new(),
            unread: BTreeSet::new(),
        }
    }

    /// Each kind of thing with its name.
    #[must_use]
    pub const fn tallies(&self) -> [(&'static str, &Tally); 5] {
        [
            ("rows", &self.rows),
            ("calls", &self.calls),
            ("sessions", &self.sessions),
            ("episodes", &self.episodes),
            ("groups", &self.groups),
        ]
    }

    /// Whether all buckets sum to what there is.
    pub(super) fn check(&self) -> Result<(), ExportError> {
        self.tallies().into_iter().try_for_each(|(what, tally)| tally.check(what))
    }
}
