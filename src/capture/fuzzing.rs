//! What fuzzing sees of the store: records of the journal, and what is left out of calls and put back. Nobody else is to
//! use it.

use std::convert::Infallible;

use bytes::Bytes;

use super::history::{Held, Joiner, Parts};
use super::payload;
use crate::record::{Call, CallId, SinkError};

/// The payload of a frame.
///
/// # Errors
/// A call is too large.
pub fn encode(calls: Vec<Call>) -> Result<Bytes, SinkError> {
    Ok(payload::encode(calls)?.parts().concat().into())
}

/// The calls of a payload.
///
/// # Errors
/// What is wrong with it.
pub fn decode(payload: &Bytes) -> Result<Vec<Call>, String> {
    payload::decode(payload)
}

/// Of the first call of a payload its session, when it was received, and its id.
#[must_use]
pub fn first(payload: &[u8]) -> Option<(String, i64, CallId)> {
    payload::first(payload)
}

/// Calls as a writer stores them that gets these appends one after another.
#[must_use]
pub fn shorten(appends: Vec<Vec<Call>>) -> Vec<Call> {
    let held = Held::default();
    let mut stored = vec![];
    for mut calls in appends {
        let contexts = held.shorten(&mut calls);
        held.hold(contexts);
        stored.extend(calls);
    }
    stored
}

/// The calls whole, read from the one in place `from` on, and for each whether nothing lacks.
#[must_use]
pub fn join(stored: &[Call], from: usize) -> Vec<(Call, bool)> {
    let mut joiner = Joiner::new(Parts { ids: true, bodies: true, routing: true });
    let rest = stored.iter().skip(from);
    let whole = rest.map(|call| {
        let mut call = call.clone();
        let read = |call: &Call, give: &mut dyn FnMut(&Call)| {
            stored.iter().filter(|other| other.session_id == call.session_id).for_each(give);
            Ok::<(), Infallible>(())
        };
        let Ok(is_whole) = joiner.join(&mut call, read);
        (call, is_whole)
    });
    whole.collect()
}
