//! The expert routing of a sample, put together from that of its calls ([`Gather`]). Where a row is not to be had the
//! sample has none.

use std::collections::HashMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize;
use serde_json::{Value, json};

use super::ExportError;
use super::counts::Counts;
use super::index::Sessions;
use crate::record::{ChoiceId, Routing, RoutingDtype, RoutingShape, Sample, SessionId};
use crate::trajectory::{Gather, Lineage};

/// Experts of all positions of a sample but the last.
#[derive(Debug)]
pub(super) struct Experts(Routing);

impl Experts {
    pub(super) const fn shape(&self) -> &RoutingShape {
        self.0.shape()
    }

    /// Little-endian ids in C order: row, layer, expert.
    pub(super) fn data(&self) -> &[u8] {
        self.0.data()
    }

    /// The type of an id in numpy's words.
    pub(super) const fn dtype(&self) -> &'static str {
        match self.shape().dtype {
            RoutingDtype::U8 => "uint8",
            RoutingDtype::U16 => "uint16",
            RoutingDtype::I32 => "int32",
        }
    }

    /// As a JSON object, its data in base64.
    pub(super) fn json(&self) -> Value {
        let RoutingShape { rows, layers, top_k, layer_axis, .. } = self.shape();
        json!({
            "shape": [rows, layers, top_k], "dtype": self.dtype(), "layer_axis": layer_axis,
            "data": STANDARD.encode(self.data()),
        })
    }

    /// All ids as `i32`.
    pub(super) fn as_i32(&self) -> Vec<u8> {
        self.0.ids().flat_map(u32::to_le_bytes).collect()
    }
}

impl Serialize for Experts {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.json().serialize(serializer)
    }
}

/// The routing of each sample of a session that has some. A sample that lacks rows has none, and is counted.
pub(super) fn gather(
    sessions: &Sessions<'_>,
    id: &SessionId,
    samples: &[(&Sample, &Lineage)],
    counts: &mut Counts,
) -> Result<Vec<Option<Experts>>, ExportError> {
    // Which samples have a call, and where: calls come in the order of the store.
    let mut users: HashMap<ChoiceId, Vec<(usize, usize)>> = HashMap::new();
    let mut gathers: Vec<Gather> = vec![];
    for (index, (sample, lineage)) in samples.iter().enumerate() {
        for (place, one) in lineage.calls.iter().enumerate() {
            users.entry(one.call.choice()).or_default().push((index, place));
        }
        gathers.push(Gather::new(lineage, sample.token_ids.len()));
    }
    // The reader puts rows that were left out back into the calls.
    sessions.with_routing(id, counts, &mut |call| {
        let Some(routing) = &call.routing else { return };
        for &(sample, place) in users.get(&call.choice()).into_iter().flatten() {
            gathers[sample].take(place, routing, None);
        }
    })?;
    let mut experts = vec![];
    for found in gathers.into_iter().map(Gather::finish) {
        counts.differing_rows += found.differing_rows;
        let whole = found.experts.and_then(|experts| experts.into_whole()).map(Experts);
        counts.routing_lost += u64::from(whole.is_none());
        experts.push(whole);
    }
    Ok(experts)
}
