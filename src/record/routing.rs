//! Which experts computed each position, as the engine told it.
//!
//! Invariants:
//! - The data has exactly the bytes that the shape says.
//! - Rows that another call's routing has already may be left out; then that call is named, and its rows before this
//!   one's first are this one's as well.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::{ChoiceId, LayerAxis, RoutingDtype};

/// Shape of a routing. Row `r` belongs to the forward pass at position `start + r` of prompt and completion
/// together, the one that predicts the token at `start + r + 1`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoutingShape {
    /// Position of the first row.
    pub start: u32,
    pub rows: u32,
    pub layers: u32,
    pub layer_axis: LayerAxis,
    /// Experts a token and layer.
    pub top_k: u32,
    pub dtype: RoutingDtype,
}

/// A shape and data that do not belong together.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidRouting {
    #[error("{rows} rows of {layers} layers and {top_k} experts in {dtype} do not fill {bytes} bytes")]
    Length { rows: u32, layers: u32, top_k: u32, dtype: &'static str, bytes: usize },
    #[error("{0} is no expert's id")]
    Id(u32),
}

/// Expert ids of the positions of one sampled choice. Clones share the data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Text", into = "Text")]
pub struct Routing {
    shape: RoutingShape,
    base: Option<ChoiceId>,
    data: Bytes,
}

impl RoutingDtype {
    /// Bytes of one id.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::U16 => 2,
            Self::I32 => 4,
        }
    }
}

impl RoutingShape {
    /// Number of ids; `None` if it is beyond what a computer can hold.
    #[must_use]
    pub fn ids(&self) -> Option<usize> {
        let ids = u64::from(self.rows).checked_mul(self.layers.into())?.checked_mul(self.top_k.into())?;
        usize::try_from(ids).ok()
    }
}

impl Routing {
    /// Takes little-endian ids in C order: row, layer, expert.
    ///
    /// # Errors
    /// [`InvalidRouting`] if `data` has not the bytes that `shape` says.
    pub fn new(shape: RoutingShape, data: Bytes) -> Result<Self, InvalidRouting> {
        let bytes = shape.ids().and_then(|ids| ids.checked_mul(shape.dtype.bytes()));
        if bytes == Some(data.len()) {
            return Ok(Self { shape, base: None, data });
        }
        Err(InvalidRouting::Length {
            rows: shape.rows,
            layers: shape.layers,
            top_k: shape.top_k,
            dtype: shape.dtype.as_str(),
            bytes: data.len(),
        })
    }

    /// Packs ids in C order with the smallest type that holds them all; the type of `shape` is not looked at.
    ///
    /// # Errors
    /// [`InvalidRouting`] if there are not as many ids as `shape` says, or one is beyond `i32`.
    pub fn pack(shape: RoutingShape, ids: &[u32]) -> Result<Self, InvalidRouting> {
        let largest = ids.iter().copied().max().unwrap_or(0);
        let (dtype, data): (_, Vec<u8>) = if u8::try_from(largest).is_ok() {
            (RoutingDtype::U8, ids.iter().map(|&id| id as u8).collect())
        } else if u16::try_from(largest).is_ok() {
            (RoutingDtype::U16, ids.iter().flat_map(|&id| (id as u16).to_le_bytes()).collect())
        } else if i32::try_from(largest).is_err() {
            return Err(InvalidRouting::Id(largest));
        } else {
            (RoutingDtype::I32, ids.iter().flat_map(|&id| id.to_le_bytes()).collect())
        };
        Self::new(RoutingShape { dtype, ..shape }, data.into())
    }

    /// Its shape.
    #[must_use]
    pub const fn shape(&self) -> &RoutingShape {
        &self.shape
    }

    /// Where the rows before the first one are, if they were left out.
    #[must_use]
    pub const fn base(&self) -> Option<ChoiceId> {
        self.base
    }

    /// The same with its earlier rows in `base`.
    #[must_use]
    pub fn based_on(mut self, base: Option<ChoiceId>) -> Self {
        self.base = base;
        self
    }

    /// Each row's bytes.
    pub fn rows(&self) -> impl Iterator<Item = &[u8]> {
        let rows = usize::try_from(self.shape.rows).unwrap_or(usize::MAX);
        let row_bytes = self.data.len().checked_div(rows).unwrap_or(0);
        self.data.chunks_exact(row_bytes.max(1)).take(rows)
    }

    /// The rows behind the first `count`, which are in `base`. Shares the data.
    #[must_use]
    pub fn without_first(&self, count: u32, base: ChoiceId) -> Self {
        let count = count.min(self.shape.rows);
        let rows = self.shape.rows - count;
        let bytes = self.data.len().checked_div(self.shape.rows as usize).unwrap_or(0) * count as usize;
        let shape = RoutingShape { start: self.shape.start + count, rows, ..self.shape };
        Self { shape, base: Some(base), data: self.data.slice(bytes..) }
    }

    /// Little-endian ids in C order: row, layer, expert.
    #[must_use]
    pub const fn data(&self) -> &Bytes {
        &self.data
    }

    /// All ids in C order, whatever they are stored as.
    pub fn ids(&self) -> impl Iterator<Item = u32> + '_ {
        let wide = |id: &[u8]| id.iter().rev().fold(0_u32, |number, byte| number << 8 | u32::from(*byte));
        self.data.chunks_exact(self.shape.dtype.bytes()).map(wide)
    }
}

/// A routing in JSON: its data in base64.
#[derive(Serialize, Deserialize)]
struct Text {
    #[serde(flatten)]
    shape: RoutingShape,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    base: Option<ChoiceId>,
    data: String,
}

impl From<Routing> for Text {
    fn from(routing: Routing) -> Self {
        Self { shape: routing.shape, base: routing.base, data: STANDARD.encode(&routing.data) }
    }
}

impl TryFrom<Text> for Routing {
    type Error = String;

    fn try_from(text: Text) -> Result<Self, String> {
        let data = STANDARD.decode(&text.data).map_err(|error| format!("routing: {error}"))?;
        let routing = Self::new(text.shape, data.into()).map_err(|error| format!("routing: {error}"))?;
        Ok(routing.based_on(text.base))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::CallId;

    const SHAPE: RoutingShape = RoutingShape {
        start: 4,
        rows: 2,
        layers: 1,
        layer_axis: LayerAxis::Unknown,
        top_k: 2,
        dtype: RoutingDtype::U8,
    };

    #[test]
    fn ids_are_packed_by_the_smallest_type_that_holds_them() {
        for (largest, dtype) in [
            (255, RoutingDtype::U8),
            (256, RoutingDtype::U16),
            (65_535, RoutingDtype::U16),
            (65_536, RoutingDtype::I32),
        ] {
            let ids = [0, 1, largest, 7];
            let routing = Routing::pack(SHAPE, &ids).expect("four ids");
            assert_eq!(routing.shape().dtype, dtype);
            assert_eq!(routing.data().len(), 4 * dtype.bytes());
            assert_eq!(routing.ids().collect::<Vec<_>>(), ids);
        }
    }

    #[test]
    fn data_of_another_length_is_refused() {
        assert!(Routing::new(SHAPE, Bytes::from_static(&[0; 4])).is_ok());
        for bytes in [0, 3, 5, 8] {
            let refused = Routing::new(SHAPE, vec![0; bytes].into()).expect_err("another length");
            assert!(refused.to_string().contains(&format!("{bytes} bytes")), "{refused}");
        }
        let huge = RoutingShape { rows: u32::MAX, layers: u32::MAX, top_k: u32::MAX, ..SHAPE };
        assert!(Routing::new(huge, Bytes::new()).is_err());
        assert!(Routing::pack(SHAPE, &[1]).is_err());
        assert_eq!(Routing::pack(SHAPE, &[1, 2, 3, u32::MAX]), Err(InvalidRouting::Id(u32::MAX)));
    }

    #[test]
    fn rows_that_another_call_has_can_be_left_out() {
        let routing = Routing::pack(SHAPE, &[0, 300, 2, 65_535]).expect("four ids");
        let base = ChoiceId { call_id: CallId::now(), choice_index: 1 };
        for count in 0..=2 {
            let rest = routing.without_first(count, base);
            let expected: Vec<&[u8]> = routing.rows().skip(count as usize).collect();
            assert_eq!(rest.rows().collect::<Vec<_>>(), expected);
            assert_eq!((rest.shape().start, rest.shape().rows), (4 + count, 2 - count));
            assert_eq!((rest.base(), rest.shape().dtype), (Some(base), RoutingDtype::U16));
            assert!(Routing::new(*rest.shape(), rest.data().clone()).is_ok());
        }
    }

    #[test]
    fn json_keeps_every_byte() {
        let routing = Routing::pack(SHAPE, &[0, 300, 2, 65_535]).expect("four ids");
        let text = serde_json::to_string(&routing).expect("JSON");
        assert_eq!(serde_json::from_str::<Routing>(&text).expect("routing"), routing);
        let base = ChoiceId { call_id: CallId::now(), choice_index: 0 };
        let rest = serde_json::to_string(&routing.without_first(1, base)).expect("JSON");
        assert_eq!(serde_json::from_str::<Routing>(&rest).expect("routing").base(), Some(base));
        let short = text.replace("\"rows\":2", "\"rows\":3");
        assert!(serde_json::from_str::<Routing>(&short).is_err());
    }
}
