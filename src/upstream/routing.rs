//! Expert routing out of replies, in the forms that engines send it.
//!
//! - vLLM: base64 of a NumPy `.npy` file, whose header has type and shape.
//! - SGLang: base64 of raw little-endian 32-bit ids. The shape is not in it: rows follow from the token ids, layers
//!   and experts a token must be told ([`RoutingHint`]) unless one of them settles the other.
//!
//! A reply that lego put together of several has what is stored of it in the same form ([`encode`]).
//!
//! Rows must be those of the ids: a routing that is off by one row is worse than none.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;

use crate::protocol::chat::{Choice, Request};
use crate::record::{InvalidRouting, LayerAxis, Routing, RoutingDtype, RoutingShape, UpstreamKind};

/// What is known beforehand of the shape of an engine's routing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RoutingHint {
    /// `num_hidden_layers` of the model.
    pub layers: Option<u32>,
    /// `num_experts_per_tok` of the model.
    pub top_k: Option<u32>,
}

/// What a reply gave for one choice.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CapturedRouting {
    pub routing: Option<Routing>,
    /// Why there is none although the engine sent one; a word of `not_trainable_reasons`.
    pub reason: Option<&'static str>,
}

/// Why a routing is not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RoutingError {
    #[error("the routing is not base64: {0}")]
    Base64(#[from] base64::DecodeError),
    #[error("the routing is not the NumPy file that was expected: {0}")]
    Npy(&'static str),
    #[error("the routing has {found} rows, and the ids need {needed}")]
    Rows { found: u64, needed: u64 },
    #[error("the routing begins at position {start} of {tokens} tokens")]
    Start { start: u64, tokens: u64 },
    #[error("{bytes} bytes of 32-bit ids are not {rows} whole rows of whole layers")]
    RawLength { bytes: usize, rows: u32 },
    #[error(
        "{ids} ids a row can be split into layers and experts in several ways: set proxy.routing_layers or \
         proxy.routing_top_k"
    )]
    Ambiguous { ids: u64 },
    #[error("an expert's id is negative")]
    NegativeId,
    #[error(transparent)]
    Shape(#[from] InvalidRouting),
}

impl RoutingError {
    /// The word in a record's reasons.
    #[must_use]
    pub const fn reason(&self) -> &'static str {
        if self.is_of_another_number() { "routing_rows_mismatch" } else { "routing_unreadable" }
    }

    /// True if there are not as many rows as there should be.
    #[must_use]
    pub const fn is_of_another_number(&self) -> bool {
        matches!(self, Self::Rows { .. } | Self::Start { .. } | Self::RawLength { .. })
    }
}

/// The routing of one choice of a reply, whose prompt has these ids. `start`: the position of the first row that was
/// asked for. Nothing sent or nothing wanted (no hint) is nothing, without a reason.
#[must_use]
pub fn captured(
    kind: UpstreamKind,
    hint: Option<RoutingHint>,
    start: u64,
    prompt: Option<&[u32]>,
    choice: &Choice,
) -> CapturedRouting {
    let (Some(hint), Some(text)) = (hint, &choice.routed_experts) else {
        return CapturedRouting::default();
    };
    let (Some(prompt), Some(completion)) = (prompt, &choice.token_ids) else {
        return CapturedRouting { routing: None, reason: Some("routing_without_ids") };
    };
    let start = choice.routing_start.unwrap_or(start);
    let tokens = prompt.len() as u64 + completion.len() as u64;
    let decoded = match tokens.checked_sub(1).and_then(|rows| rows.checked_sub(start)) {
        Some(rows) => decode(kind, hint, text, start, rows),
        None => Err(RoutingError::Start { start, tokens }),
    };
    match decoded {
        Ok(routing) => CapturedRouting { routing: Some(routing), reason: None },
        Err(error) => {
            tracing::warn!(%error, upstream = kind.as_str(), "a reply's expert routing is not stored");
            CapturedRouting { routing: None, reason: Some(error.reason()) }
        }
    }
}

/// Reads a routing of `rows` rows from position `start`.
///
/// # Errors
/// [`RoutingError`] for a form that is not this engine's, and for any other number of rows.
pub fn decode(
    kind: UpstreamKind,
    hint: RoutingHint,
    text: &str,
    start: u64,
    rows: u64,
) -> Result<Routing, RoutingError> {
    let narrow =
        |number: u64| u32::try_from(number).map_err(|_| RoutingError::Rows { found: number, needed: rows });
    let (start, needed) = (narrow(start)?, narrow(rows)?);
    let bytes = Bytes::from(STANDARD.decode(text)?);
    if kind == UpstreamKind::Sglang {
        return raw_int32(&bytes, start, needed, hint);
    }
    let (shape, data) = npy(&bytes)?;
    if shape.rows != needed {
        return Err(RoutingError::Rows { found: shape.rows.into(), needed: rows });
    }
    let shape = RoutingShape { start, ..shape };
    let ids: Vec<u32> = match shape.dtype {
        // As small as it can be already.
        RoutingDtype::U8 => return Ok(Routing::new(shape, bytes.slice_ref(data))?),
        RoutingDtype::U16 => {
            data.chunks_exact(2).map(|id| u16::from_le_bytes([id[0], id[1]]).into()).collect()
        }
        RoutingDtype::I32 => int32(data)?,
    };
    Ok(Routing::pack(shape, &ids)?)
}

/// A routing as an engine of this kind sends it.
#[must_use]
pub fn encode(kind: UpstreamKind, routing: &Routing) -> String {
    let RoutingShape { rows, layers, top_k, dtype, .. } = *routing.shape();
    if kind == UpstreamKind::Sglang {
        return STANDARD.encode(routing.ids().flat_map(u32::to_le_bytes).collect::<Vec<u8>>());
    }
    let descr = match dtype {
        RoutingDtype::U8 => "|u1",
        RoutingDtype::U16 => "<u2",
        RoutingDtype::I32 => "<i4",
    };
    let dict =
        format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({rows}, {layers}, {top_k}), }}");
    // The data begins at a multiple of 64.
    let header = format!("{dict:<width$}\n", width = (10 + dict.len() + 1).next_multiple_of(64) - 11);
    let length = u16::try_from(header.len()).unwrap_or(u16::MAX).to_le_bytes();
    STANDARD.encode([b"\x93NUMPY\x01\x00", &length[..], header.as_bytes(), routing.data()].concat())
}

/// Position of the first row that the client let the engine begin at.
#[must_use]
pub fn first_row(kind: UpstreamKind, request: &Request) -> u64 {
    let name = match kind {
        UpstreamKind::Sglang => "routed_experts_start_len",
        _ => "routed_experts_prompt_start",
    };
    request.get(name).and_then(|start| start.as_u64()).unwrap_or(0)
}

/// Raw ids: layers and experts a token from the hint; one of them settles the other.
fn raw_int32(bytes: &[u8], start: u32, rows: u32, hint: RoutingHint) -> Result<Routing, RoutingError> {
    let wrong_length = RoutingError::RawLength { bytes: bytes.len(), rows };
    let row_bytes = 4 * u64::from(rows);
    let total = bytes.len() as u64;
    if row_bytes == 0 || total == 0 || !total.is_multiple_of(row_bytes) {
        return Err(wrong_length);
    }
    let ids_per_row = total / row_bytes;
    let other = |known: u32| match ids_per_row.checked_rem(known.into()) {
        Some(0) => u32::try_from(ids_per_row / u64::from(known)).ok(),
        _ => None,
    };
    let (layers, top_k) = match (hint.layers, hint.top_k) {
        (Some(layers), Some(top_k)) => {
            (u64::from(layers) * u64::from(top_k) == ids_per_row).then_some((layers, top_k))
        }
        (Some(layers), None) => other(layers).map(|top_k| (layers, top_k)),
        (None, Some(top_k)) => other(top_k).map(|layers| (layers, top_k)),
        (None, None) if ids_per_row == 1 => Some((1, 1)),
        (None, None) => return Err(RoutingError::Ambiguous { ids: ids_per_row }),
    }
    .ok_or(wrong_length)?;
    let shape = RoutingShape {
        start,
        rows,
        layers,
        layer_axis: LayerAxis::AllHidden,
        top_k,
        dtype: RoutingDtype::I32,
    };
    Ok(Routing::pack(shape, &int32(bytes)?)?)
}

fn int32(bytes: &[u8]) -> Result<Vec<u32>, RoutingError> {
    let ids = bytes.chunks_exact(4).map(|id| {
        let id = i32::from_le_bytes([id[0], id[1], id[2], id[3]]);
        u32::try_from(id).map_err(|_| RoutingError::NegativeId)
    });
    ids.collect()
}

/// A `.npy` file, version 1 or 2, of a three-dimensional C-order array of `u1`, `u2` or `i4`
/// (numpy.lib.format). Nothing may follow the array.
fn npy(bytes: &[u8]) -> Result<(RoutingShape, &[u8]), RoutingError> {
    let bad = RoutingError::Npy;
    let rest = bytes.strip_prefix(b"\x93NUMPY").ok_or(bad("it does not begin with NumPy's magic"))?;
    let (version, rest) = rest.split_at_checked(2).ok_or(bad("it ends in its header"))?;
    let length_bytes = match version {
        [1, 0] => 2,
        [2, 0] => 4,
        _ => return Err(bad("its version is not 1.0 or 2.0")),
    };
    let (length, rest) = rest.split_at_checked(length_bytes).ok_or(bad("it ends in its header"))?;
    let length = length.iter().rev().fold(0_usize, |number, byte| number << 8 | usize::from(*byte));
    let (header, data) = rest.split_at_checked(length).ok_or(bad("it ends in its header"))?;
    let header = Header::parse(header).ok_or(bad("its header is not descr, fortran_order and shape"))?;
    if header.is_fortran {
        return Err(bad("it is in Fortran order"));
    }
    let dtype = match header.descr {
        "|u1" => RoutingDtype::U8,
        "<u2" => RoutingDtype::U16,
        "<i4" => RoutingDtype::I32,
        _ => return Err(bad("its type is not u1, u2 or i4")),
    };
    let [rows, layers, top_k] = header.shape;
    if layers == 0 || top_k == 0 {
        return Err(bad("it has no layers or no experts"));
    }
    let shape = RoutingShape { start: 0, rows, layers, layer_axis: LayerAxis::Unknown, top_k, dtype };
    let needed = shape.ids().and_then(|ids| ids.checked_mul(dtype.bytes()));
    if needed != Some(data.len()) {
        return Err(bad("its data has not the length that its shape needs"));
    }
    Ok((shape, data))
}

/// The Python dictionary in front of a `.npy` array.
struct Header<'a> {
    descr: &'a str,
    is_fortran: bool,
    shape: [u32; 3],
}

impl<'a> Header<'a> {
    /// Exactly the three keys, once each, in any order, then spaces and one line feed.
    fn parse(header: &'a [u8]) -> Option<Self> {
        let text = std::str::from_utf8(header).ok()?.strip_suffix('\n')?.trim_end_matches(' ');
        let mut rest = text.strip_prefix('{')?.strip_suffix('}')?.trim();
        let (mut descr, mut is_fortran, mut shape) = (None, None, None);
        while !rest.is_empty() {
            let (key, after) = quoted(rest)?;
            let value = after.trim_start().strip_prefix(':')?.trim_start();
            let after = match key {
                "descr" if descr.is_none() => {
                    let (name, after) = quoted(value)?;
                    descr = Some(name);
                    after
                }
                "fortran_order" if is_fortran.is_none() => {
                    let (flag, after) = match value.strip_prefix("False") {
                        Some(after) => (false, after),
                        None => (true, value.strip_prefix("True")?),
                    };
                    is_fortran = Some(flag);
                    after
                }
                "shape" if shape.is_none() => {
                    let (list, after) = value.strip_prefix('(')?.split_once(')')?;
                    let sizes = list.split(',').map(|size| size.trim().parse::<u32>().ok());
                    shape = Some(<[u32; 3]>::try_from(sizes.collect::<Option<Vec<_>>>()?).ok()?);
                    after
                }
                _ => return None,
            };
            let after = after.trim_start();
            rest = match after.strip_prefix(',') {
                Some(after) => after.trim_start(),
                None if after.is_empty() => after,
                None => return None,
            };
        }
        Some(Self { descr: descr?, is_fortran: is_fortran?, shape: shape? })
    }
}

/// A Python string without escapes at the beginning of `text`, and what follows it.
fn quoted(text: &str) -> Option<(&str, &str)> {
    let quote = text.chars().next().filter(|quote| matches!(quote, '\'' | '"'))?;
    text[1..].split_once(quote)
}

#[cfg(test)]
#[path = "routing_tests.rs"]
mod tests;
