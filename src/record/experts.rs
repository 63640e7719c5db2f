//! The expert routing of a sample: a row a token, where one is known.
//!
//! Invariants:
//! - Row `r` is of the forward pass at position `r`, the one that predicts the token behind it.
//! - What is no row is not there: its bytes are 0 and nobody is given them.

use super::{LayerAxis, Routing, RoutingDtype, RoutingShape};

/// The place of a token in its sequence, from the first one of the prompt on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Position(usize);

impl Position {
    /// The place of the token with so many before it.
    #[must_use]
    pub const fn new(tokens_before: usize) -> Self {
        Self(tokens_before)
    }

    /// How many tokens stand before it: its index.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0
    }
}

/// What rows have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Layout {
    layers: u32,
    layer_axis: LayerAxis,
    top_k: u32,
}

/// `routed_experts [tokens][layers][k]`, with which of the tokens have theirs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoutedExperts {
    layout: Layout,
    dtype: RoutingDtype,
    /// Little-endian ids in C order, as wide as `dtype` says.
    data: Vec<u8>,
    has_row: Vec<bool>,
}

/// Rows of another model, or of other layers of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expert routing of another shape: {layers} layers ({axis}) and {top_k} experts")]
pub struct OtherShape {
    layers: u32,
    top_k: u32,
    axis: &'static str,
}

impl RoutedExperts {
    /// Of so many tokens, none of which has a row yet; shaped as `routing`.
    #[must_use]
    pub fn new(tokens: usize, routing: &Routing) -> Self {
        let RoutingShape { layers, layer_axis, top_k, dtype, .. } = *routing.shape();
        let mut experts = Self {
            layout: Layout { layers, layer_axis, top_k },
            dtype,
            data: vec![],
            has_row: vec![false; tokens],
        };
        experts.data = vec![0; tokens * experts.row_bytes()];
        experts
    }

    /// Takes the rows that `routing` has of the positions before `end` for which `is_own` is true; the others are only
    /// compared.
    ///
    /// Gives how many rows that were there are others in `routing`.
    ///
    /// # Errors
    /// [`OtherShape`]; nothing was taken.
    pub fn take(
        &mut self,
        routing: &Routing,
        end: Position,
        is_own: impl Fn(Position) -> bool,
    ) -> Result<u64, OtherShape> {
        let RoutingShape { start, layers, layer_axis, top_k, dtype, .. } = *routing.shape();
        if (Layout { layers, layer_axis, top_k }) != self.layout {
            return Err(OtherShape { layers, top_k, axis: layer_axis.as_str() });
        }
        if dtype.bytes() > self.dtype.bytes() {
            self.widen(dtype);
        }
        let (row_bytes, mut others) = (self.row_bytes(), 0);
        if row_bytes == 0 {
            return Ok(0);
        }
        let mut widened = vec![];
        let places = (start as usize..end.0.min(self.has_row.len())).zip(routing.rows());
        for (position, row) in places {
            let row = if dtype == self.dtype {
                row
            } else {
                widened.clear();
                row.chunks_exact(dtype.bytes()).for_each(|id| push(&mut widened, id, self.dtype));
                &widened
            };
            let own = &mut self.data[position * row_bytes..][..row_bytes];
            others += u64::from(self.has_row[position] && own != row);
            if is_own(Position(position)) {
                own.copy_from_slice(row);
                self.has_row[position] = true;
            }
        }
        Ok(others)
    }

    fn widen(&mut self, dtype: RoutingDtype) {
        let mut data = Vec::with_capacity(self.data.len() / self.dtype.bytes() * dtype.bytes());
        self.data.chunks_exact(self.dtype.bytes()).for_each(|id| push(&mut data, id, dtype));
        (self.data, self.dtype) = (data, dtype);
    }

    const fn row_bytes(&self) -> usize {
        self.layout.layers as usize * self.layout.top_k as usize * self.dtype.bytes()
    }

    /// Tokens, with a row and without.
    #[must_use]
    pub const fn tokens(&self) -> usize {
        self.has_row.len()
    }

    /// Ids of the experts that computed this position: layer, expert; `None` where nobody told.
    #[must_use]
    pub fn row(&self, at: Position) -> Option<&[u8]> {
        let is_there = self.has_row.get(at.0).copied().unwrap_or(false);
        is_there.then(|| &self.data[at.0 * self.row_bytes()..][..self.row_bytes()])
    }

    /// Whether each token has a row.
    #[must_use]
    pub fn validity(&self) -> &[bool] {
        &self.has_row
    }

    /// The rows behind the last one that lacks, the last token apart, which has none; `None`: there are none.
    #[must_use]
    pub fn into_last_run(self) -> Option<Routing> {
        let end = self.has_row.len().checked_sub(1)?;
        let start = self.has_row[..end].iter().rposition(|is_there| !is_there).map_or(0, |lacks| lacks + 1);
        let bytes = self.row_bytes();
        let (first, rows) = (u32::try_from(start).ok()?, u32::try_from(end - start).ok()?);
        let Layout { layers, layer_axis, top_k } = self.layout;
        let shape = RoutingShape { start: first, rows, layers, layer_axis, top_k, dtype: self.dtype };
        (rows > 0).then(|| Routing::new(shape, self.data[start * bytes..end * bytes].to_vec().into()).ok())?
    }

    /// The rows of all tokens but the last, if they are all there.
    #[must_use]
    pub fn into_whole(mut self) -> Option<Routing> {
        let rows = self.has_row.len().checked_sub(1)?;
        let is_whole = self.has_row[..rows].iter().all(|is_there| *is_there);
        self.data.truncate(rows * self.row_bytes());
        let Layout { layers, layer_axis, top_k } = self.layout;
        let rows = u32::try_from(rows).ok().filter(|_| is_whole)?;
        let shape = RoutingShape { start: 0, rows, layers, layer_axis, top_k, dtype: self.dtype };
        Routing::new(shape, self.data.into()).ok()
    }
}

/// Adds an id as wide as `dtype` says, which is as wide as it is or wider.
fn push(data: &mut Vec<u8>, id: &[u8], dtype: RoutingDtype) {
    data.extend_from_slice(id);
    data.extend(std::iter::repeat_n(0, dtype.bytes() - id.len()));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn routing(start: u32, ids: &[u32]) -> Routing {
        let (rows, layers, top_k) = (ids.len() as u32 / 2, 1, 2);
        let shape = RoutingShape {
            start,
            rows,
            layers,
            layer_axis: LayerAxis::Unknown,
            top_k,
            dtype: RoutingDtype::U8,
        };
        Routing::pack(shape, ids).expect("two ids a row")
    }

    #[test]
    fn rows_stand_at_their_own_positions_and_are_taken_of_whom_they_are() {
        let first = routing(0, &[1, 2, 3, 4]);
        let mut experts = RoutedExperts::new(5, &first);
        assert_eq!(experts.take(&first, Position::new(5), |_| true), Ok(0));
        // Position 1 again, with other experts, and 2 and 3; of wider ids.
        let second = routing(1, &[3, 9, 5, 300, 7, 8]);
        let is_behind = |at: Position| at >= Position::new(2);
        assert_eq!(experts.take(&second, Position::new(3), is_behind), Ok(1));
        assert_eq!(experts.validity(), [true, true, true, false, false]);
        assert_eq!(experts.row(Position::new(1)), Some(&[3, 0, 4, 0][..]));
        assert_eq!(experts.row(Position::new(2)), Some(&[5, 0, 44, 1][..]));
        assert_eq!(experts.row(Position::new(3)), None);
        assert_eq!(experts.row(Position::new(9)), None);
        assert_eq!(experts.clone().into_whole(), None, "position 3 lacks");
        let mut others = experts.clone();
        assert_eq!(others.take(&second, Position::new(3), |_| true), Ok(1));
        assert_eq!(others.row(Position::new(1)), Some(&[3, 0, 9, 0][..]));
        assert_eq!(experts.take(&second, Position::new(4), is_behind), Ok(1));
        let whole = experts.into_whole().expect("4 rows of 5 tokens");
        assert_eq!(whole.ids().collect::<Vec<_>>(), [1, 2, 3, 4, 5, 300, 7, 8]);
    }

    #[test]
    fn the_last_run_is_what_is_behind_the_last_row_that_lacks() {
        let whole = routing(0, &[1, 2, 3, 4, 5, 6, 7, 8]);
        let of = |positions: &[usize]| {
            let mut experts = RoutedExperts::new(5, &whole);
            experts.take(&whole, Position::new(4), |at| positions.contains(&at.index())).expect("its shape");
            experts.into_last_run().map(|run| (run.shape().start, run.data().to_vec()))
        };
        assert_eq!(of(&[0, 1, 2, 3]), Some((0, vec![1, 2, 3, 4, 5, 6, 7, 8])));
        assert_eq!(of(&[0, 2, 3]), Some((2, vec![5, 6, 7, 8])));
        assert_eq!(of(&[3]), Some((3, vec![7, 8])));
        assert_eq!((of(&[0, 1, 2]), of(&[])), (None, None));
    }

    #[test]
    fn rows_of_another_model_are_refused() {
        let first = routing(0, &[1, 2, 3, 4]);
        let shape = RoutingShape { layers: 2, top_k: 1, ..*first.shape() };
        let other = Routing::new(shape, first.data().clone()).expect("as many bytes");
        let mut experts = RoutedExperts::new(3, &first);
        let refused =
            experts.take(&other, Position::new(3), |_| true).expect_err("another shape").to_string();
        assert!(refused.contains("2 layers (unknown) and 1 experts"), "{refused}");
        assert_eq!(experts.validity(), [false; 3]);
    }
}
