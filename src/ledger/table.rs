//! The derived table of lineages of captures, session by session.
//!
//! Why a history was rewritten is read from calls' bodies, which are many times what their ids are: they are read of
//! sessions with more than one lineage only, one call at a time. Of those are held: the ids of all prompts of some sessions
//! at a time, or of one that is larger, and each of their messages once.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::{Size, batches, ids_bytes};
use crate::capture::{CaptureError, Filter, Place, Query, Reader};
use crate::record::{Call, SessionId};
use crate::trajectory::{self, Heard, IdTexts, LineageRow};

/// Bytes of ids that are in memory together.
const ROOM: usize = 64 << 20;

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
        let rows = rows(&dir, &mut lean(&dir, &batch)?, texts)?;
        rows.values().flatten().try_for_each(&mut *each)?;
    }
    Ok(left_out)
}

/// The lineages of one session, and what was left out of the captures.
///
/// # Errors
/// The captures cannot be read.
pub fn session_table(
    dir: impl Into<Place>,
    session: &SessionId,
    texts: Option<&IdTexts>,
) -> Result<(Vec<LineageRow>, Vec<String>), CaptureError> {
    let dir = dir.into();
    let mut reader = lean(&dir, &[session])?;
    let rows = rows(&dir, &mut reader, texts)?.into_values().flatten().collect();
    Ok((rows, reader.left_out()))
}

/// The calls of some sessions without bodies and routing.
fn lean(dir: &Place, sessions: &[&SessionId]) -> Result<Reader, CaptureError> {
    let filter = Some(Filter::sessions(sessions.iter().copied()));
    Reader::open(dir, Query { filter, without_bodies: true, without_routing: true, ..Query::default() })
}

/// The lineages of the sessions of some calls.
fn rows(
    dir: &Place,
    calls: &mut Reader,
    texts: Option<&IdTexts>,
) -> Result<BTreeMap<SessionId, Vec<LineageRow>>, CaptureError> {
    let bare = |mut call: Call| {
        (call.text, call.tool_calls, call.completion_logprobs, call.shared) = (None, None, None, None);
        Arc::new(call)
    };
    let calls: Result<Vec<Arc<Call>>, CaptureError> = calls.map(|call| call.map(bare)).collect();
    let found = trajectory::lineages(&calls?);
    let mut heard: HashMap<&SessionId, Heard> = HashMap::new();
    for session in found.sessions().filter(|session| trajectory::only(session).is_none()) {
        heard.insert(&session[0].session_id, Heard::default());
    }
    if !heard.is_empty() {
        let filter = Some(Filter::sessions(heard.keys().copied()));
        for call in Reader::open(dir, Query { filter, without_routing: true, ..Query::default() })? {
            let call = call?;
            if let Some(heard) = heard.get_mut(&call.session_id) {
                heard.hear(&call);
            }
        }
    }
    let mut rows = BTreeMap::new();
    for session in found.sessions() {
        let id = &session[0].session_id;
        let heard = heard.remove(id).unwrap_or_default();
        rows.insert(id.clone(), IdTexts::table(texts, session, heard));
    }
    Ok(rows)
}
