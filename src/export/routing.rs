//! The expert routing of a sample, put together from that of its calls.
//!
//! Invariant: a row is that of the call that first computed its position, so that those of sampled tokens are those they
//! were sampled with. Where one is not to be had the sample has none.

use std::collections::HashMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize;
use serde_json::{Value, json};

use super::ExportError;
use super::counts::Counts;
use super::index::Sessions;
use crate::record::{CallId, Routing, RoutingDtype, RoutingShape, Sample, SessionId};
use crate::trajectory::Lineage;

/// Experts of all positions of a sample but the last, little-endian, in C order: row, layer, expert.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Experts {
    pub shape: RoutingShape,
    pub data: Vec<u8>,
}

impl Experts {
    /// The type of an id in numpy's words.
    pub(super) const fn dtype(&self) -> &'static str {
        match self.shape.dtype {
            RoutingDtype::U8 => "uint8",
            RoutingDtype::U16 => "uint16",
            RoutingDtype::I32 => "int32",
        }
    }

    /// As a JSON object, its data in base64.
    pub(super) fn json(&self) -> Value {
        let RoutingShape { rows, layers, top_k, layer_axis, .. } = self.shape;
        json!({
            "shape": [rows, layers, top_k], "dtype": self.dtype(), "layer_axis": layer_axis,
            "data": STANDARD.encode(&self.data),
        })
    }

    /// All ids as `i32`.
    pub(super) fn as_i32(&self) -> Vec<u8> {
        let routing = Routing::new(self.shape, self.data.clone().into());
        routing.map_or_else(|_| vec![], |routing| routing.ids().flat_map(u32::to_le_bytes).collect())
    }
}

impl Serialize for Experts {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.json().serialize(serializer)
    }
}

/// Rows `from..to` of the sample at `sample`, which the call is to give.
struct Need {
    sample: usize,
    piece: usize,
    from: u32,
    to: u32,
}

/// The routing of each sample of a session that has some. A sample that lacks rows has none, and is counted.
pub(super) fn gather(
    sessions: &Sessions<'_>,
    id: &SessionId,
    samples: &[(&Sample, &Lineage)],
    counts: &mut Counts,
) -> Result<Vec<Option<Experts>>, ExportError> {
    let mut needs: HashMap<(CallId, u16), Vec<Need>> = HashMap::new();
    let mut pieces: Vec<Vec<Option<Routing>>> = vec![];
    for (index, (sample, lineage)) in samples.iter().enumerate() {
        let all = sample.token_ids.len();
        let mut of_sample = vec![];
        let mut from = 0;
        for one in &lineage.calls {
            let prompt = one.call.prompt_token_ids.as_ref().map_or(0, Vec::len);
            let end = prompt + one.call.sampled_ids().map_or(0, <[u32]>::len);
            if end > all {
                break;
            }
            // The last sampled token has no row until the next call reads it.
            let to = u32::try_from(end.saturating_sub(1)).unwrap_or(u32::MAX);
            let need = Need { sample: index, piece: of_sample.len(), from, to };
            needs.entry((one.call.call_id, one.call.choice_index)).or_default().push(need);
            of_sample.push(None);
            from = to;
        }
        pieces.push(of_sample);
    }
    sessions.with_routing(id, counts, &mut |call| {
        let Some(routing) = &call.routing else { return };
        for need in needs.get(&(call.call_id, call.choice_index)).into_iter().flatten() {
            pieces[need.sample][need.piece] = cut(routing, need.from, need.to);
        }
    })?;
    let experts: Vec<Option<Experts>> =
        pieces.into_iter().map(|pieces| join(&pieces.into_iter().collect::<Option<Vec<_>>>()?)).collect();
    counts.routing_lost += experts.iter().filter(|experts| experts.is_none()).count() as u64;
    Ok(experts)
}

/// A copy of some rows, which keeps no others in memory.
fn cut(routing: &Routing, from: u32, to: u32) -> Option<Routing> {
    let shape = *routing.shape();
    let (start, rows) = (from.checked_sub(shape.start)?, to.checked_sub(from)?);
    if to > shape.start.checked_add(shape.rows)? {
        return None;
    }
    let row_bytes = routing.data().len().checked_div(shape.rows as usize)?;
    let (begin, end) = (start as usize * row_bytes, (start + rows) as usize * row_bytes);
    let data = routing.data().get(begin..end)?.to_vec();
    Routing::new(RoutingShape { start: from, rows, ..shape }, data.into()).ok()
}

/// Rows one after the other, if they are alike, in the smallest type that holds them all.
fn join(pieces: &[Routing]) -> Option<Experts> {
    let first = *pieces.first()?.shape();
    let is_alike = |shape: &RoutingShape| {
        (shape.layers, shape.top_k, shape.layer_axis) == (first.layers, first.top_k, first.layer_axis)
    };
    if !pieces.iter().all(|piece| is_alike(piece.shape())) {
        return None;
    }
    let dtype = pieces.iter().map(|piece| piece.shape().dtype).max_by_key(|dtype| dtype.bytes())?;
    let mut data = vec![];
    for piece in pieces {
        if piece.shape().dtype == dtype {
            data.extend_from_slice(piece.data());
        } else {
            piece.ids().for_each(|id| data.extend_from_slice(&id.to_le_bytes()[..dtype.bytes()]));
        }
    }
    let rows = pieces.iter().map(|piece| piece.shape().rows).sum();
    Some(Experts { shape: RoutingShape { start: 0, rows, dtype, ..first }, data })
}
