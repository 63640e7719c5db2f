//! The expert routing of a sample, put together from that of its calls.
//!
//! Invariant: a row is that of the first call that has one for its position, in whatever order they come. So those of
//! sampled tokens are those they were sampled with.

use crate::record::{Position, RoutedExperts, Routing};

/// Rows of one sample.
#[derive(Debug)]
pub struct Gather {
    /// Of each position: the place of the call that its row is of.
    places: Vec<usize>,
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
    pub fn new(tokens: usize) -> Self {
        Self { places: vec![usize::MAX; tokens], found: Found::default() }
    }

    /// Takes what the call in this place of its lineage has of the sample's positions before `end`. The last token is
    /// read by no forward pass.
    pub fn take(&mut self, place: usize, routing: &Routing, end: Option<Position>) {
        let tokens = self.places.len();
        let last = Position::new(tokens.saturating_sub(1));
        let end = end.map_or(last, |end| end.min(last));
        let Found { experts, differing_rows, is_mixed } = &mut self.found;
        let experts = experts.get_or_insert_with(|| RoutedExperts::new(tokens, routing));
        let is_earlier = |at: Position| {
            let before = &mut self.places[at.index()];
            let is_earlier = place < *before;
            *before = place.min(*before);
            is_earlier
        };
        match experts.take(routing, end, is_earlier) {
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
