//! Calls whole again: what the store left out of them, put back.
//!
//! What is remembered for the calls that follow is bounded. Sessions that were not read for longest are forgotten first,
//! and are read again, once and as a whole, when one of their calls comes; of a session that is too large by itself what
//! its last call needed stays.

use std::collections::{HashMap, HashSet, VecDeque};
use std::ops::Range;

use bytes::{Bytes, BytesMut};

use crate::record::{
    Call, ChoiceId, JsonText, Part, Routing, RoutingShape, SessionId, Shared, Splice, SpliceSource,
};

/// Bytes that are remembered, beyond those that one call needs.
const MAX_BYTES: usize = 256 << 20;
/// Bytes of whole bodies that are remembered, so that the next call has not far to go.
const MAX_WHOLE_BYTES: usize = 64 << 20;
/// Pieces of which ids, rows or a body consist: only a damaged store has more.
const MAX_STEPS: usize = 1 << 24;
/// Bases of which it is remembered that they are not to be had.
const MAX_MISSING: usize = 100_000;

/// What is put back. The rest stays as it lies in the store.
#[derive(Debug, Clone, Copy)]
pub(in crate::capture) struct Parts {
    /// Ids of prompts.
    pub(in crate::capture) ids: bool,
    pub(in crate::capture) bodies: bool,
    pub(in crate::capture) routing: bool,
}

/// Puts back what was left out. It remembers the calls that it saw.
#[derive(Debug)]
pub(in crate::capture) struct Joiner {
    parts: Parts,
    most_bytes: usize,
    bytes: usize,
    sessions: HashMap<SessionId, Seen>,
    whole: Wholes,
    /// They are looked for once.
    missing: HashSet<ChoiceId>,
    /// Counts the calls.
    now: u64,
}

/// Bodies that were put together last.
#[derive(Debug, Default)]
struct Wholes {
    bodies: HashMap<(ChoiceId, Body), Bytes>,
    order: VecDeque<(ChoiceId, Body)>,
    bytes: usize,
}

impl Wholes {
    fn push(&mut self, name: (ChoiceId, Body), body: Bytes) {
        self.bytes += body.len();
        if let Some(before) = self.bodies.insert(name, body) {
            self.bytes -= before.len();
        } else {
            self.order.push_back(name);
        }
        while self.bytes > MAX_WHOLE_BYTES
            && let Some(oldest) = self.order.pop_front()
        {
            self.bytes -= self.bodies.remove(&oldest).map_or(0, |body| body.len());
        }
    }
}

/// One session's calls, as they lie in the store.
#[derive(Debug, Default)]
struct Seen {
    pieces: HashMap<ChoiceId, Piece>,
    /// Those that have their responses: choices of the call that came last. No other call goes on from a response.
    responses: Vec<ChoiceId>,
    bytes: usize,
    used: u64,
}

#[derive(Debug)]
struct Piece {
    shared: Option<Box<Shared>>,
    prompt: Vec<u32>,
    completion: Vec<u32>,
    bodies: [Option<Bytes>; 3],
    /// Its response was let go of.
    is_without_response: bool,
    routing: Option<Routing>,
    bytes: usize,
    used: u64,
}

/// A body of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Body {
    Client,
    Upstream,
    Response,
}

const BODIES: [Body; 3] = [Body::Client, Body::Upstream, Body::Response];

impl Body {
    const fn splice(self, shared: &Shared) -> Option<&Splice> {
        match self {
            Self::Client => shared.client_request.as_ref(),
            Self::Upstream => shared.upstream_request.as_ref(),
            Self::Response => shared.response.as_ref(),
        }
    }

    const fn of(self, call: &mut Call) -> &mut Option<JsonText> {
        match self {
            Self::Client => &mut call.client_request,
            Self::Upstream => &mut call.upstream_request,
            Self::Response => &mut call.response,
        }
    }
}

impl Piece {
    fn of(call: &Call, parts: Parts, with_response: bool, used: u64) -> Self {
        let ids = |ids: &Option<Vec<u32>>| ids.clone().filter(|_| parts.ids).unwrap_or_default();
        // A copy: the text may be a small part of what it lies in.
        let text = |body: &Option<JsonText>| {
            body.as_ref().filter(|_| parts.bodies).map(|body| Bytes::copy_from_slice(body.bytes()))
        };
        let (prompt, completion) = (ids(&call.prompt_token_ids), ids(&call.completion_token_ids));
        // What is kept of one that is in another choice is nothing.
        let shares = call.shared.as_ref().is_some_and(|shared| shared.response.is_some());
        let is_without_response = call.response.is_some() && parts.bodies && !shares && !with_response;
        let response = text(&call.response).filter(|_| !is_without_response);
        let bodies = [text(&call.client_request), text(&call.upstream_request), response];
        let routing = call.routing.clone().filter(|_| parts.routing);
        let bytes = 4 * (prompt.len() + completion.len())
            + bodies.iter().flatten().map(Bytes::len).sum::<usize>()
            + routing.as_ref().map_or(0, |routing| routing.data().len())
            + size_of::<Self>();
        let shared = call.shared.clone();
        Self { shared, prompt, completion, bodies, is_without_response, routing, bytes, used }
    }

    fn let_go_of_response(&mut self) -> usize {
        let response =
            self.bodies[2].take_if(|_| self.shared.as_ref().is_none_or(|of| of.response.is_none()));
        let bytes = response.map_or(0, |response| response.len());
        self.is_without_response |= bytes > 0;
        self.bytes -= bytes;
        bytes
    }
}

/// What was put together, or the base that is not remembered. `Ok(None)`: the pieces do not fit together.
type Walked<T> = Result<Option<T>, ChoiceId>;

impl Joiner {
    pub(in crate::capture) fn new(parts: Parts) -> Self {
        let (sessions, missing) = (HashMap::new(), HashSet::new());
        Self { parts, most_bytes: MAX_BYTES, bytes: 0, sessions, whole: Wholes::default(), missing, now: 0 }
    }

    /// Makes the call whole. `read` gives the calls of its session that it may go on from, as they lie in the store; what
    /// cannot be read it leaves out. What is not to be had is null in the call, which then says so and is not trainable. True if nothing lacks.
    ///
    /// # Errors
    /// Those of `read`.
    pub(in crate::capture) fn join<E>(
        &mut self,
        call: &mut Call,
        read: impl FnOnce(&Call, &mut dyn FnMut(&Call)) -> Result<(), E>,
    ) -> Result<bool, E> {
        let Parts { ids, bodies, routing } = self.parts;
        self.now += 1;
        self.remember(call, true);
        let mut read = Some(read);
        let (mut lost_history, mut lost_routing) = (false, false);
        if ids && call.shared.as_ref().is_some_and(|shared| shared.ids.is_some()) {
            call.prompt_token_ids = self.fetch(call, &mut read, Self::ids)?;
            lost_history |= call.prompt_token_ids.is_none();
        }
        if bodies {
            lost_history |= self.join_bodies(call, &mut read)?;
        }
        if routing && call.routing.as_ref().is_some_and(|routing| routing.base().is_some()) {
            call.routing = self.fetch(call, &mut read, Self::routing)?;
            lost_routing = call.routing.is_none();
        }
        // It is what the next one goes on from.
        self.piece(&call.session_id, call.choice());
        self.forget(&call.session_id);
        call.shared = None;
        for (is_lost, reason) in
            [(lost_history, "history_base_missing"), (lost_routing, "routing_base_missing")]
        {
            if is_lost {
                call.trainable = false;
                call.not_trainable_reasons.push(reason.to_owned());
            }
        }
        Ok(!lost_history && !lost_routing)
    }

    /// The call with its bodies whole, and the rest as it lies in the store.
    ///
    /// # Errors
    /// Those of `read`.
    pub(in crate::capture) fn with_bodies<E>(
        &mut self,
        call: &Call,
        read: impl FnOnce(&Call, &mut dyn FnMut(&Call)) -> Result<(), E>,
    ) -> Result<Call, E> {
        self.now += 1;
        self.remember(call, true);
        let mut call = call.clone();
        self.join_bodies(&mut call, &mut Some(read))?;
        self.piece(&call.session_id, call.choice());
        self.forget(&call.session_id);
        Ok(call)
    }

    /// True if one is not to be had.
    fn join_bodies<E, R: FnOnce(&Call, &mut dyn FnMut(&Call)) -> Result<(), E>>(
        &mut self,
        call: &mut Call,
        read: &mut Option<R>,
    ) -> Result<bool, E> {
        let mut is_lost = false;
        for body in BODIES {
            if call.shared.as_ref().is_some_and(|shared| body.splice(shared).is_some()) {
                let whole = self.fetch(call, read, |joiner, call| joiner.body(call, body))?;
                is_lost |= whole.is_none();
                *body.of(call) = whole;
            }
        }
        Ok(is_lost)
    }

    /// What `walk` puts together, its session read again if need be.
    fn fetch<T, E, R: FnOnce(&Call, &mut dyn FnMut(&Call)) -> Result<(), E>>(
        &mut self,
        call: &Call,
        read: &mut Option<R>,
        walk: impl Fn(&mut Self, &Call) -> Walked<T>,
    ) -> Result<Option<T>, E> {
        let missing = match walk(self, call) {
            Ok(whole) => return Ok(whole),
            Err(missing) => missing,
        };
        if let Some(read) = read.take_if(|_| !self.missing.contains(&missing)) {
            read(call, &mut |other| self.remember(other, other.call_id == call.call_id))?;
            // Of what was just read only what this call goes on from is in use.
            self.now += 1;
        }
        Ok(walk(self, call).unwrap_or_else(|missing| {
            if self.missing.len() >= MAX_MISSING {
                self.missing.clear();
            }
            self.missing.insert(missing);
            None
        }))
    }

    /// What was looked for in vain may be there by now.
    pub(in crate::capture) fn look_again(&mut self) {
        self.missing.clear();
    }

    fn remember(&mut self, call: &Call, with_response: bool) {
        let piece = Piece::of(call, self.parts, with_response, self.now);
        let bytes = piece.bytes;
        // Nobody goes on from what has nothing; what only goes on from others has to know from whom.
        if bytes == size_of::<Piece>() && call.shared.is_none() {
            return;
        }
        if !self.sessions.contains_key(&call.session_id) {
            self.sessions.insert(call.session_id.clone(), Seen::default());
        }
        let Some(seen) = self.sessions.get_mut(&call.session_id) else {
            return;
        };
        seen.used = self.now;
        if with_response {
            let mut freed = 0;
            for choice in seen.responses.iter().filter(|choice| choice.call_id != call.call_id) {
                freed += seen.pieces.get_mut(choice).map_or(0, Piece::let_go_of_response);
            }
            seen.responses.retain(|choice| choice.call_id == call.call_id);
            seen.responses.push(call.choice());
            seen.bytes -= freed;
            self.bytes -= freed;
        }
        let before = seen.pieces.insert(call.choice(), piece).map_or(0, |piece| piece.bytes);
        seen.bytes = seen.bytes + bytes - before;
        self.bytes = self.bytes + bytes - before;
    }

    /// Makes room. `current` was read last.
    fn forget(&mut self, current: &SessionId) {
        while self.bytes > self.most_bytes {
            let others = self.sessions.iter().filter(|(session, _)| *session != current);
            let Some(oldest) = others.min_by_key(|(_, seen)| seen.used).map(|(session, _)| session.clone())
            else {
                break;
            };
            self.bytes -= self.sessions.remove(&oldest).map_or(0, |seen| seen.bytes);
        }
        if self.bytes > self.most_bytes
            && let Some(seen) = self.sessions.get_mut(current)
        {
            seen.pieces.retain(|_, piece| piece.used == self.now);
            seen.bytes = seen.pieces.values().map(|piece| piece.bytes).sum();
            self.bytes = seen.bytes;
        }
    }

    /// What is remembered of a call; it is in use then.
    fn piece(&mut self, session: &SessionId, name: ChoiceId) -> Option<&Piece> {
        let seen = self.sessions.get_mut(session)?;
        let piece = seen.pieces.get_mut(&name)?;
        (seen.used, piece.used) = (self.now, self.now);
        Some(piece)
    }

    /// All ids of a prompt.
    fn ids(&mut self, call: &Call) -> Walked<Vec<u32>> {
        let Some((shared, tail)) = call.shared.as_ref().zip(call.prompt_token_ids.as_ref()) else {
            return Ok(None);
        };
        let (Some(first), Some(base)) = (shared.ids, shared.base) else {
            return Ok(None);
        };
        // From the last ids to the first ones.
        let mut pieces: Vec<Vec<u32>> = vec![tail.clone()];
        let (mut needed, mut next) = (first.count as usize, base);
        for _ in 0..MAX_STEPS {
            let piece = self.piece(&call.session_id, next).ok_or(next)?;
            let before =
                piece.shared.as_ref().and_then(|shared| Some((shared.ids?.count as usize, shared.base?)));
            let (left_out, base) = before.unwrap_or((0, next));
            if needed > left_out {
                let own = piece.prompt.iter().chain(&piece.completion).copied();
                let own: Vec<u32> = own.take(needed - left_out).collect();
                if own.len() < needed - left_out {
                    return Ok(None);
                }
                pieces.push(own);
                needed = left_out;
            }
            if needed == 0 {
                break;
            }
            next = base;
        }
        pieces.reverse();
        let ids = pieces.concat();
        let is_whole = needed == 0 && sum_of_ids(&ids) == first.crc32c;
        Ok(is_whole.then_some(ids))
    }

    /// All of a body.
    fn body(&mut self, call: &Call, body: Body) -> Walked<JsonText> {
        let Some(splice) = call.shared.as_ref().and_then(|shared| body.splice(shared)) else {
            return Ok(None);
        };
        let mut whole = Vec::with_capacity((splice.length as usize).min(MAX_WHOLE_BYTES));
        // The next on top.
        let mut todo = vec![Todo::Range(call.choice(), body, 0..splice.length)];
        let mut steps = 0;
        while let Some(next) = todo.pop() {
            steps += 1;
            let (name, body, range) = match next {
                Todo::Kept(bytes) => {
                    whole.extend_from_slice(&bytes);
                    continue;
                }
                Todo::Range(name, body, range) => (name, body, range),
            };
            let at_hand = self.whole.bodies.get(&(name, body));
            if let Some(bytes) = at_hand.and_then(|bytes| bytes.get(range.start as usize..range.end as usize))
            {
                whole.extend_from_slice(bytes);
                continue;
            }
            let piece = self.piece(&call.session_id, name).ok_or(name)?;
            if body == Body::Response && piece.is_without_response {
                return Err(name);
            }
            let Some(segments) = piece.segments(name, body, range).filter(|_| steps < MAX_STEPS) else {
                return Ok(None);
            };
            todo.extend(segments.into_iter().rev());
        }
        let is_whole = whole.len() == splice.length as usize && crc32c::crc32c(&whole) == splice.crc32c;
        let text = JsonText::of_read_bytes(whole.into()).ok().filter(|_| is_whole);
        if let Some(text) = &text {
            self.whole.push((call.choice(), body), text.bytes().clone());
        }
        Ok(text)
    }

    /// All rows up to those of the call; `None` if they do not fit together.
    fn routing(&mut self, call: &Call) -> Walked<Routing> {
        let Some(last) = &call.routing else {
            return Ok(None);
        };
        // From the last rows to the first ones: each piece with the row at which it ends for the one behind it.
        let mut pieces: Vec<Bytes> = vec![last.data().clone()];
        let (shape, mut needed, mut next) = (*last.shape(), last.shape().start, last.base());
        let mut steps = 0;
        while let Some(base) = next {
            steps += 1;
            let piece = self.piece(&call.session_id, base).and_then(|piece| piece.routing.as_ref());
            let piece = piece.ok_or(base)?;
            let of = piece.shape();
            let is_alike =
                RoutingShape { start: 0, rows: 0, ..*of } == RoutingShape { start: 0, rows: 0, ..shape };
            if !is_alike || needed > of.start + of.rows || steps > MAX_STEPS {
                return Ok(None);
            }
            // One that begins behind what is needed only shares its own base.
            if of.start < needed {
                let row_bytes = piece.data().len() / of.rows.max(1) as usize;
                pieces.push(piece.data().slice(..row_bytes * (needed - of.start) as usize));
                needed = of.start;
            }
            next = piece.base();
        }
        let mut data = BytesMut::with_capacity(pieces.iter().map(Bytes::len).sum());
        pieces.iter().rev().for_each(|piece| data.extend_from_slice(piece));
        let rows = shape.start - needed + shape.rows;
        Ok(Routing::new(RoutingShape { start: needed, rows, ..shape }, data.freeze()).ok())
    }
}

/// What comes next in a body.
enum Todo {
    Kept(Bytes),
    Range(ChoiceId, Body, Range<u32>),
}

impl Piece {
    /// What a range of a body consists of; `None` if the body has no such range.
    fn segments(&self, name: ChoiceId, body: Body, range: Range<u32>) -> Option<Vec<Todo>> {
        let kept = self.bodies[BODIES.iter().position(|other| *other == body)?].as_ref()?;
        let slice = |from: u32, to: u32| {
            let (from, to) = (from as usize, to as usize);
            (from <= to && to <= kept.len()).then(|| Todo::Kept(kept.slice(from..to)))
        };
        let shared = self.shared.as_ref().and_then(|shared| Some((shared, body.splice(shared)?)));
        let Some((shared, splice)) = shared else {
            return Some(vec![slice(range.start, range.end)?]);
        };
        let (source, from_body) = match splice.source {
            SpliceSource::Base => (shared.base?, body),
            SpliceSource::ClientRequest if body == Body::Upstream => (name, Body::Client),
            SpliceSource::ClientRequest => return None,
        };
        let mut segments = vec![];
        // Where the text goes on, and how much of it before that is in parts.
        let (mut at, mut left_out) = (0_u32, 0_u32);
        let end = Part { at: splice.length, from: 0, length: 0 };
        for part in splice.parts.iter().chain([&end]) {
            let behind = part.at.checked_add(part.length).filter(|_| part.at >= at)?;
            let (from, to) = (range.start.max(at), range.end.min(part.at));
            if from < to {
                segments.push(slice(from - left_out, to - left_out)?);
            }
            let (from, to) = (range.start.max(part.at), range.end.min(behind));
            if from < to {
                let from_source = part.from.checked_add(from - part.at)?;
                let to_source = from_source.checked_add(to - from)?;
                segments.push(Todo::Range(source, from_body, from_source..to_source));
            }
            at = behind;
            left_out = left_out.checked_add(part.length)?;
        }
        (range.end <= splice.length).then_some(segments)
    }
}

/// CRC-32C of ids, each as four little-endian bytes.
pub(super) fn sum_of_ids(ids: &[u32]) -> u32 {
    ids.chunks(1024).fold(0, |sum, ids| {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        crc32c::crc32c_append(sum, &bytes)
    })
}

#[cfg(test)]
mod tests;
