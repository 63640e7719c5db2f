//! What the writer remembers of the last calls of each session, and what it leaves out of a new one.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use ahash::RandomState;

use super::joiner::sum_of_ids;
use super::signature::{self, BLOCK, IDS, Signature};
use crate::capture::layout::DAY_US;
use crate::record::{
    Call, ChoiceId, ClientApi, JsonText, Part, SessionId, Shared, SharedIds, Splice, SpliceSource,
};

/// Calls of a session that others may go on from: those of its agent, of sub-agents, of branches.
const MAX_CONTEXTS: usize = 4;
/// Bytes of hashes of all sessions together: 12 for 256 of a body, 8 for 64 ids.
const MAX_BYTES: usize = 32 << 20;
/// Bytes that noting a part takes, about.
const PART_COST: u32 = 64;
/// Calls that go on from each other, one after the other, and parts of a body: who reads them goes through all of them.
const MAX_DEPTH: u16 = 256;
const MAX_PARTS: usize = 64;

/// What the writer remembers. Its hashes are made with a key that nobody outside can foresee.
#[derive(Debug, Default)]
pub(in crate::capture) struct Held {
    hasher: RandomState,
    sessions: Mutex<Sessions>,
}

#[derive(Debug, Default)]
struct Sessions {
    by_id: HashMap<SessionId, Session>,
    bytes: usize,
    /// Counts what is remembered.
    now: u64,
}

#[derive(Debug, Default)]
struct Session {
    /// The last one was used last.
    contexts: Vec<Arc<Known>>,
    used: u64,
}

/// A call that others may go on from.
#[derive(Debug)]
struct Known {
    choice: ChoiceId,
    day: i64,
    client_api: ClientApi,
    /// How many calls it goes on from.
    depth: u16,
    /// Of prompt and completion together.
    ids: Vec<u64>,
    client_request: Option<Signature>,
    /// Where it is not mostly made of `client_request`.
    upstream_request: Option<Signature>,
}

/// A call to be remembered when it is durable.
#[derive(Debug)]
pub(in crate::capture) struct Context {
    session_id: SessionId,
    known: Known,
    /// What others would have gone on from before.
    replaced: Option<ChoiceId>,
}

impl Known {
    fn of(call: &Call, hasher: &RandomState) -> Self {
        let body = |body: &Option<JsonText>| body.as_ref().map(|body| Signature::of(body.bytes(), hasher));
        let ids = [&call.prompt_token_ids, &call.completion_token_ids];
        let ids: Vec<u32> = ids.into_iter().flatten().flatten().copied().collect();
        Self {
            choice: call.choice(),
            day: day(call),
            client_api: call.client_api,
            depth: 0,
            ids: signature::ids(if call.prompt_token_ids.is_some() { &ids } else { &[] }, hasher),
            client_request: body(&call.client_request),
            upstream_request: body(&call.upstream_request),
        }
    }

    fn memory_bytes(&self) -> usize {
        let bodies = [&self.client_request, &self.upstream_request].into_iter().flatten();
        size_of::<Self>() + 8 * self.ids.len() + bodies.map(Signature::memory_bytes).sum::<usize>()
    }

    /// About how many first bytes two calls share.
    fn same(&self, other: &Self) -> usize {
        let bodies = self.client_request.as_ref().zip(other.client_request.as_ref());
        let bodies = bodies.map_or(0, |(a, b)| a.same(b));
        bodies + 4 * IDS * signature::same(&self.ids, &other.ids)
    }
}

fn day(call: &Call) -> i64 {
    call.received_at.div_euclid(DAY_US)
}

impl Held {
    /// Leaves out of calls that are appended together what an earlier call of their session has, and gives what is to be
    /// remembered of them.
    pub(in crate::capture) fn shorten(&self, calls: &mut [Call]) -> Vec<Context> {
        let mut contexts = vec![];
        for at in (0..calls.len()).rev() {
            let (before, rest) = calls.split_at_mut(at);
            let Some(call) = rest.first_mut().filter(|call| is_long(call) && call.shared.is_none()) else {
                continue;
            };
            match before.iter().find(|first| first.call_id == call.call_id) {
                Some(first) => repeat(call, first),
                None => contexts.push(self.shorten_one(call)),
            }
        }
        contexts
    }

    fn shorten_one(&self, call: &mut Call) -> Context {
        let mut known = Known::of(call, &self.hasher);
        let best = self.best(&call.session_id, &known);
        // From one that is too deep nobody goes on any more.
        let deep = best.as_ref().filter(|best| best.depth >= MAX_DEPTH).map(|best| best.choice);
        let base = best.filter(|_| deep.is_none());
        let mut shared = Shared::default();
        // What lego made of the client's body comes first: it is compared with the whole of that.
        if let (Some(upstream), Some(client)) = (&call.upstream_request, &call.client_request)
            && let Some(own) = &known.upstream_request
        {
            let parts =
                known.client_request.as_ref().map(|known| known.parts(own, upstream.bytes(), &self.hasher));
            let parts = signature::extend(parts.unwrap_or_default(), client.bytes(), upstream.bytes());
            let made_of_client = splice(upstream, SpliceSource::ClientRequest, parts);
            let is_most = |splice: &Splice| splice.kept() < u64::from(splice.length / 4);
            if made_of_client.as_ref().is_some_and(is_most) {
                shared.upstream_request = made_of_client;
                known.upstream_request = None;
            } else {
                let of_base = base.as_ref().and_then(|base| base.upstream_request.as_ref());
                let parts = of_base.map(|base| base.parts(own, upstream.bytes(), &self.hasher));
                let of_base = parts.and_then(|parts| splice(upstream, SpliceSource::Base, parts));
                let both = [made_of_client, of_base].into_iter().flatten();
                shared.upstream_request = both.min_by_key(Splice::kept);
            }
        }
        if let Some(base) = &base {
            if let (Some(client), Some(own), Some(of_base)) =
                (&call.client_request, &known.client_request, &base.client_request)
            {
                let parts = of_base.parts(own, client.bytes(), &self.hasher);
                shared.client_request = splice(client, SpliceSource::Base, parts);
            }
            if let Some(prompt) = &mut call.prompt_token_ids {
                let count = IDS * signature::same(&base.ids, &known.ids).min(prompt.len() / IDS);
                if count > 0 {
                    shared.ids = Some(SharedIds { count: count as u32, crc32c: sum_of_ids(prompt) });
                    prompt.drain(..count);
                    prompt.shrink_to_fit();
                }
            }
        }
        let session_id = call.session_id.clone();
        let base = base.filter(|_| goes_on(&shared));
        known.depth = base.as_ref().map_or(0, |base| base.depth + 1);
        let base = base.map(|base| base.choice);
        store(call, Shared { base, ..shared });
        Context { session_id, known, replaced: deep.or(base) }
    }

    /// The call of the session that has most of this one.
    fn best(&self, session_id: &SessionId, call: &Known) -> Option<Arc<Known>> {
        let sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        let contexts = sessions.by_id.get(session_id).map(|session| session.contexts.clone());
        drop(sessions);
        let contexts = contexts.unwrap_or_default().into_iter();
        let alike = contexts.filter(|known| {
            known.day == call.day && known.client_api == call.client_api && known.choice != call.choice
        });
        // Of those that share no beginning the last one may have most all the same.
        alike.max_by_key(|known| known.same(call))
    }

    /// Remembers what became durable.
    pub(in crate::capture) fn hold(&self, contexts: Vec<Context>) {
        let mut sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        for Context { session_id, known, replaced } in contexts {
            sessions.now += 1;
            let now = sessions.now;
            let session = sessions.by_id.entry(session_id).or_default();
            session.used = now;
            let sum =
                |session: &Session| session.contexts.iter().map(|known| known.memory_bytes()).sum::<usize>();
            let before = sum(session);
            session.contexts.retain(|known| Some(known.choice) != replaced);
            if session.contexts.len() == MAX_CONTEXTS {
                session.contexts.remove(0);
            }
            session.contexts.push(Arc::new(known));
            let after = sum(session);
            sessions.bytes = sessions.bytes + after - before;
        }
        if sessions.bytes > MAX_BYTES {
            sessions.forget();
        }
    }
}

impl Sessions {
    /// Forgets the half of the sessions that was not used for longest.
    fn forget(&mut self) {
        let mut used: Vec<u64> = self.by_id.values().map(|session| session.used).collect();
        let middle = used.len() / 2;
        let middle = *used.select_nth_unstable(middle).1;
        self.by_id.retain(|_, session| session.used > middle);
        let contexts = self.by_id.values().flat_map(|session| &session.contexts);
        self.bytes = contexts.map(|known| known.memory_bytes()).sum();
    }
}

/// Whether anything can be left out of a call that is worth noting it.
fn is_long(call: &Call) -> bool {
    let bodies = [&call.client_request, &call.upstream_request, &call.response].into_iter().flatten();
    let ids = call.prompt_token_ids.as_ref().map_or(0, Vec::len);
    ids >= 2 * IDS || bodies.map(|body| body.bytes().len()).max().unwrap_or(0) >= 4 * BLOCK
}

fn goes_on(shared: &Shared) -> bool {
    let mut bodies =
        [&shared.client_request, &shared.upstream_request, &shared.response].into_iter().flatten();
    shared.ids.is_some() || bodies.any(|splice| splice.source == SpliceSource::Base)
}

/// Leaves out of a choice what the first choice of its call has.
fn repeat(call: &mut Call, first: &Call) {
    if first.session_id != call.session_id || day(first) != day(call) {
        return;
    }
    let whole = |body: &Option<JsonText>, of_first: &Option<JsonText>| {
        let body = body.as_ref().filter(|body| Some(*body) == of_first.as_ref())?;
        let part = Part { at: 0, from: 0, length: u32::try_from(body.bytes().len()).ok()? };
        splice(body, SpliceSource::Base, vec![part])
    };
    let mut shared = Shared {
        base: Some(first.choice()),
        ids: None,
        client_request: whole(&call.client_request, &first.client_request),
        upstream_request: whole(&call.upstream_request, &first.upstream_request),
        response: whole(&call.response, &first.response),
    };
    if let (Some(prompt), Some(of_first)) = (&mut call.prompt_token_ids, &first.prompt_token_ids)
        && prompt.len() >= IDS
        && prompt == of_first
        && let Ok(count) = u32::try_from(prompt.len())
    {
        shared.ids = Some(SharedIds { count, crc32c: sum_of_ids(prompt) });
        *prompt = vec![];
    }
    if goes_on(&shared) {
        store(call, shared);
    }
}

/// `None` if noting the parts takes about what they save, or the text is beyond what can be noted.
fn splice(text: &JsonText, source: SpliceSource, mut parts: Vec<Part>) -> Option<Splice> {
    if parts.len() > MAX_PARTS {
        let mut lengths: Vec<u32> = parts.iter().map(|part| part.length).collect();
        let (_, least, _) = lengths.select_nth_unstable_by(MAX_PARTS - 1, |a, b| b.cmp(a));
        parts.retain(|part| part.length >= *least);
        parts.truncate(MAX_PARTS);
    }
    let length = u32::try_from(text.bytes().len()).ok()?;
    let saved: u32 = parts.iter().map(|part| part.length).sum();
    let cost = PART_COST.checked_mul(2 + u32::try_from(parts.len()).ok()?)?;
    (saved > cost).then(|| Splice { source, length, crc32c: crc32c::crc32c(text.bytes()), parts })
}

/// Takes away what `shared` says.
fn store(call: &mut Call, shared: Shared) {
    for (body, splice) in [
        (&mut call.client_request, &shared.client_request),
        (&mut call.upstream_request, &shared.upstream_request),
        (&mut call.response, &shared.response),
    ] {
        if let (Some(text), Some(splice)) = (&body, splice) {
            let mut kept = String::with_capacity(splice.kept() as usize);
            let mut at = 0;
            for part in &splice.parts {
                kept.push_str(&text.get()[at..part.at as usize]);
                at = (part.at + part.length) as usize;
            }
            kept.push_str(&text.get()[at..]);
            *body = Some(JsonText::of_read(kept));
        }
    }
    if shared != Shared::default() {
        call.shared = Some(Box::new(shared));
    }
}
