//! The expert routing of a reply in several segments, put together by position.
//!
//! Invariants:
//! - A row is that of the segment that read its position first, so that those of sampled tokens are those they were
//!   sampled with. A later segment reads all before it again, with its own weights: what it has of those rows is compared,
//!   counted, and never stands for them.
//! - What is told are the rows up to the reply's last. Rows that a segment did not tell are nobody's, and neither are
//!   those before them.
//! - Routing that cannot be read is told as it came, so that the record says so. A reply that the engine gave up may have
//!   been read further than was told: rows of another number are then as if they were not there.

use metrics::counter;
use serde_json::Value;

use crate::record::{Position, RoutedExperts, Routing, UpstreamKind};
use crate::upstream::routing::{self, RoutingHint};

/// What segments told.
pub(super) struct Rows {
    kind: UpstreamKind,
    /// `None`: routing is not captured.
    hint: Option<RoutingHint>,
    /// Ids of the call's prompt.
    prompt: usize,
    /// Position of the first row that was asked for.
    start: usize,
    told: Vec<Told>,
    /// What could not be read.
    broken: Option<String>,
}

/// The rows of one segment, over all that it read.
struct Told {
    routing: Routing,
    /// The first position that no segment before it had read.
    from: Position,
    end: Position,
}

/// Rows that become the whole reply's.
pub(super) struct Joined {
    /// In the engine's form.
    pub(super) text: String,
    /// Position of the first one.
    pub(super) start: usize,
}

impl Rows {
    pub(super) const fn new(kind: UpstreamKind, hint: Option<RoutingHint>, prompt: usize) -> Self {
        Self { kind, hint, prompt, start: 0, told: Vec::new(), broken: None }
    }

    /// The same, whose rows were asked for from this position on.
    pub(super) fn starting_at(self, start: usize) -> Self {
        Self { start, ..self }
    }

    /// Takes what a segment told at its end. `begun`, `sampled`: ids that were sampled before it, and with it.
    pub(super) fn take(&mut self, told: &Value, begun: usize, sampled: usize, is_given_up: bool) {
        let Some(hint) = self.hint.filter(|_| !told.is_null()) else {
            return;
        };
        let text = told.as_str().map_or_else(|| told.to_string(), str::to_owned);
        // The last token is read by no forward pass of this segment.
        let end = (self.prompt + sampled).saturating_sub(1);
        let from = if begun == 0 { 0 } else { (self.prompt + begun).saturating_sub(1) };
        let rows = end.saturating_sub(self.start) as u64;
        match routing::decode(self.kind, hint, &text, self.start as u64, rows) {
            Ok(routing) => {
                let (from, end) = (Position::new(from), Position::new(end));
                self.told.push(Told { routing, from, end });
            }
            Err(error) => {
                tracing::warn!(%error, is_given_up, "the expert routing of a part of a reply is not taken");
                if !(is_given_up && error.is_of_another_number()) {
                    self.broken.get_or_insert(text);
                }
            }
        }
    }

    /// The rows of the whole reply, of so many sampled ids; `None`: there are none to tell.
    pub(super) fn joined(&self, sampled: usize) -> Option<Joined> {
        let tokens = self.prompt + sampled;
        let last = tokens.saturating_sub(1);
        // No rows are told there, which it has not, whatever it is.
        let broken = || Some(Joined { text: self.broken.clone()?, start: last });
        let mut experts: Option<RoutedExperts> = None;
        let mut others = 0;
        for Told { routing, from, end } in &self.told {
            let experts = experts.get_or_insert_with(|| RoutedExperts::new(tokens, routing));
            match experts.take(routing, *end, |at| at >= *from) {
                Ok(differ) => others += differ,
                Err(error) => {
                    tracing::warn!(%error, "the parts of a reply have no routing together");
                    return Some(Joined { text: routing::encode(self.kind, routing), start: last });
                }
            }
        }
        let run = experts.filter(|_| self.broken.is_none()).and_then(RoutedExperts::into_last_run);
        let start = run.as_ref().map_or(last, |run| run.shape().start as usize);
        if !self.told.is_empty() {
            count("resumed_otherwise", others);
            count("resumed_lost", start.saturating_sub(self.start) as u64);
        }
        run.map(|run| Joined { text: routing::encode(self.kind, &run), start }).or_else(broken)
    }
}

fn count(rows: &'static str, count: u64) {
    counter!("lego_capture_routing_rows_total", "rows" => rows).increment(count);
}
