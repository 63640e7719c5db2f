//! The expert routing of a sample, put together from that of its calls.
//!
//! Invariant: a row is that of the call that first computed its position, so that those of sampled tokens are those they
//! were sampled with. What another call has of it is compared, and never stands for it.

use super::lineage::Lineage;
use crate::record::{Position, RoutedExperts, Routing};

/// Rows of one sample.
#[derive(Debug)]
pub struct Gather {
    tokens: usize,
    /// Of each call of the lineage: the first position that no call before it has computed.
    firsts: Vec<Position>,
    found: Found,
}

/// What there is.
#[derive(Debug, Default)]
pub struct Found {
    /// `None`: no call has routing, or it is of different shapes.
    pub experts: Option<RoutedExperts>,
    /// Rows that a later call has otherwise.
    pub differing_rows: u64,
    /// Calls have routing of different shapes.
    pub is_mixed: bool,
}

impl Gather {
    /// Of a sample of so many tokens.
    #[must_use]
    pub fn new(lineage: &Lineage, tokens: usize) -> Self {
        let mut before = 0;
        let firsts = lineage.calls.iter().map(|one| {
            let prompt = one.call.prompt_token_ids.as_ref().map_or(0, Vec::len);
            // The last sampled token is read by the next call.
            let end = (prompt + one.call.sampled_ids().map_or(0, <[u32]>::len)).saturating_sub(1);
            Position::new(std::mem::replace(&mut before, end))
        });
        Self { tokens, firsts: firsts.collect(), found: Found::default() }
    }

    /// Takes what the call in this place of the lineage has of the sample's positions before `end`. The last token is
    /// read by no forward pass.
    pub fn take(&mut self, place: usize, routing: &Routing, end: Option<Position>) {
        let last = Position::new(self.tokens.saturating_sub(1));
        let end = end.map_or(last, |end| end.min(last));
        let Found { experts, differing_rows, is_mixed } = &mut self.found;
        let experts = experts.get_or_insert_with(|| RoutedExperts::new(self.tokens, routing));
        let first = self.firsts.get(place).copied().unwrap_or(last);
        match experts.take(routing, end, |at| at >= first) {
            Ok(others) => *differing_rows += others,
            Err(_) => *is_mixed = true,
        }
    }

    /// All rows.
    #[must_use]
    pub fn finish(self) -> Found {
        match self.found {
            Found { is_mixed: true, differing_rows, .. } => {
                Found { experts: None, differing_rows, is_mixed: true }
            }
            found => found,
        }
    }
}
