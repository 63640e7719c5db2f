//! The derived table of lineages of captures, session by session.
//!
//! Why a history was rewritten is read from calls' bodies, which are many times what their ids are: they are read of
//! sessions with more than one lineage only.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Size, batches, ids_bytes};
use crate::capture::{CaptureError, Filter, Place, Query, Reader};
use crate::record::{Call, CallKind, SessionId};
use crate::trajectory::{self, IdTexts, LineageRow};

/// Bytes of ids that are in memory together.
const ROOM: usize = 64 << 20;
/// Sessions with bodies that are read together, if their ids have fewer bytes than a part of [`ROOM`].
const BODIES_PART: usize = 8;

/// Gives the lineages of each session with a call for which `filter` is true, sessions in order of their first calls as
/// far as they are read together. Says what was left out of the captures.
///
/// # Errors
/// The captures cannot be read; what `each` says.
pub fn table<E: From<CaptureError>>(
    dir: impl Into<Place>,
    filter: Option<&Filter>,
    texts: Option<&IdTexts>,
    each: &mut dyn FnMut(&LineageRow) -> Result<(), E>,
) -> Result<Vec<String>, E> {
    let dir = dir.into();
    let query = Query {
        without_bodies: !filter.is_some_and(Filter::uses_bodies),
        without_routing: !filter.is_some_and(Filter::uses_routing),
        ..Query::default()
    };
    let mut reader = Reader::open(&dir, query)?;
    let mut sizes: BTreeMap<SessionId, (bool, Size)> = BTreeMap::new();
    for call in reader.by_ref() {
        let call = call?;
        let (is_wanted, size) = sizes.entry(call.session_id.clone()).or_default();
        *is_wanted |= filter.is_none_or(|filter| filter.matches(&call));
        size.bytes += ids_bytes(&call);
    }
    let left_out: Vec<String> = reader.left_out().iter().map(ToString::to_string).collect();
    let sizes = sizes.into_iter().filter(|(_, (is_wanted, _))| *is_wanted);
    let sizes: BTreeMap<SessionId, Size> = sizes.map(|(session, (_, size))| (session, size)).collect();
    for batch in batches(&sizes, ROOM) {
        let mut broken: BTreeMap<SessionId, Size> = BTreeMap::new();
        let mut rows: BTreeMap<SessionId, Vec<LineageRow>> = BTreeMap::new();
        for session in found(&dir, &batch, true)?.sessions() {
            let start = session[0].start();
            if session.len() == 1 && matches!(start.kind, CallKind::Policy | CallKind::Unknown) {
                rows.insert(start.session_id.clone(), trajectory::table(session, None));
            } else {
                let bytes = sizes[&start.session_id].bytes;
                broken.insert(start.session_id.clone(), Size { calls: 0, bytes });
            }
        }
        for part in batches(&broken, ROOM / BODIES_PART) {
            for session in found(&dir, &part, false)?.sessions() {
                rows.insert(session[0].session_id.clone(), IdTexts::table(texts, session));
            }
        }
        rows.values().flatten().try_for_each(&mut *each)?;
    }
    Ok(left_out)
}

fn found(
    dir: &Place,
    sessions: &[&SessionId],
    without_bodies: bool,
) -> Result<trajectory::Lineages, CaptureError> {
    let filter = Some(Filter::sessions(sessions.iter().copied()));
    let query = Query { filter, without_bodies, without_routing: true, ..Query::default() };
    let calls = Reader::open(dir, query)?;
    let calls: Result<Vec<Arc<Call>>, CaptureError> = calls.map(|call| call.map(Arc::new)).collect();
    Ok(trajectory::lineages(&calls?))
}
