//! One `append`'s calls as the bytes of one journal frame, and back.
//!
//! A record is the call as JSON without its per-token lists, its routing and its bodies, then those: numbers as raw
//! little-endian ones, bodies as their text, compressed where that makes them smaller: the events of a stream are a
//! tenth of themselves then. Nothing is parsed twice.

use std::borrow::Cow;
use std::cell::RefCell;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::record::{Call, CallId, ChoiceId, JsonText, Routing, RoutingShape, SinkError};

/// Version of this encoding, in each frame. 1 had no routing, 2 the bodies within the JSON, 3 no compressed ones, and
/// nothing was left out of their calls; they are read as well.
const ENCODING: u8 = 4;

/// What a record has behind its JSON, and how long it is.
#[derive(Serialize, Deserialize)]
struct Lists {
    prompt: Option<u32>,
    completion: Option<u32>,
    logprobs: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    routing: Option<RoutingShape>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    routing_base: Option<ChoiceId>,
    /// Bytes of `client_request`, `upstream_request` and `response`.
    #[serde(default)]
    bodies: [Option<u32>; 3],
    /// Bytes of those of them that are compressed, as they lie here.
    #[serde(default)]
    packed: [Option<u32>; 3],
}

#[derive(Serialize)]
struct Head<'a> {
    lists: Lists,
    call: &'a Call,
}

#[derive(Deserialize)]
struct OwnedHead {
    lists: Lists,
    call: Call,
}

/// A body this long is a part of its own, not copied.
pub(super) const LONG: usize = 64 << 10;

/// A body this long is compressed.
const PACKED: usize = 1 << 10;

/// So are the JSON and the lists together.
const PACKED_LISTS: usize = 4 << 10;

/// Three numbers begin a record: bytes of its JSON, of that and its lists, and of both compressed (0: they are not).
const RECORD_HEAD: usize = 12;

/// How zstd compresses, and how it finds out whether that pays: ten times as fast.
const LEVELS: [i32; 2] = [1, -1];

type Packer = zstd::bulk::Compressor<'static>;

thread_local! {
    static PACKERS: RefCell<[Option<Packer>; 2]> = const { RefCell::new([None, None]) };
    static UNPACKER: RefCell<zstd::bulk::Decompressor<'static>> = RefCell::default();
}

/// The bytes compressed, if they are so many; `None` if that is hardly worth it.
fn pack(bytes: &[u8], least: usize) -> Option<Vec<u8>> {
    if bytes.len() < least {
        return None;
    }
    // Expert routing in base64 is most of a reply that has it, shrinks by a quarter, and takes longer than all the rest.
    let middle = &bytes[bytes.len() / 2..][..bytes.len() / 16];
    if bytes.len() >= LONG && packed_at(1, middle).is_none() {
        return None;
    }
    packed_at(0, bytes)
}

/// The bytes compressed at one of [`LEVELS`], if that makes them shorter by a quarter.
fn packed_at(level: usize, bytes: &[u8]) -> Option<Vec<u8>> {
    PACKERS.with_borrow_mut(|packers| {
        let packer = &mut packers[level];
        if packer.is_none() {
            *packer = Packer::new(LEVELS[level]).ok();
        }
        let packed = packer.as_mut()?.compress(bytes).ok()?;
        (packed.len() < bytes.len() / 4 * 3).then_some(packed)
    })
}

/// The calls of one append, encoded: the parts in their order are the bytes of a frame.
#[derive(Debug, Default)]
pub(super) struct Payload {
    parts: Vec<Bytes>,
    len: usize,
}

impl Payload {
    pub(super) fn parts(&self) -> &[Bytes] {
        &self.parts
    }

    pub(super) const fn len(&self) -> usize {
        self.len
    }

    fn push(&mut self, part: Bytes) {
        self.len += part.len();
        self.parts.push(part);
    }
}

/// Encodes `calls` as one payload.
pub(super) fn encode(calls: Vec<Call>) -> Result<Payload, SinkError> {
    let mut payload = Payload::default();
    let mut out = Vec::with_capacity(calls.iter().map(room).sum());
    out.push(ENCODING);
    push_len(&mut out, calls.len());
    // As it is before anything is compressed: so much is in memory when it is read.
    let mut whole = out.len();
    for mut call in calls {
        let prompt = call.prompt_token_ids.take();
        let completion = call.completion_token_ids.take();
        let logprobs = call.completion_logprobs.take();
        let routing = call.routing.take();
        let bodies = [call.client_request.take(), call.upstream_request.take(), call.response.take()];
        let bodies = bodies.map(|body| body.map(|body| body.bytes().clone()));
        let packed = [0, 1, 2].map(|at: usize| Some(Bytes::from(pack(bodies[at].as_ref()?, PACKED)?)));
        let body_bytes =
            |body: &Option<Bytes>| body.as_ref().map(|body| length(body.len(), &call, "body")).transpose();
        let lists = Lists {
            prompt: prompt.as_ref().map(|ids| length(ids.len(), &call, "list")).transpose()?,
            completion: completion.as_ref().map(|ids| length(ids.len(), &call, "list")).transpose()?,
            logprobs: logprobs.as_ref().map(|values| length(values.len(), &call, "list")).transpose()?,
            routing: routing.as_ref().map(|routing| *routing.shape()),
            routing_base: routing.as_ref().and_then(Routing::base),
            bodies: [body_bytes(&bodies[0])?, body_bytes(&bodies[1])?, body_bytes(&bodies[2])?],
            packed: [body_bytes(&packed[0])?, body_bytes(&packed[1])?, body_bytes(&packed[2])?],
        };
        let refused = |reason: String| SinkError::Refused { call_id: call.call_id.to_string(), reason };
        let at = out.len();
        out.extend_from_slice(&[0; RECORD_HEAD]);
        let head = at + RECORD_HEAD;
        serde_json::to_writer(&mut out, &Head { lists, call: &call })
            .map_err(|error| refused(error.to_string()))?;
        let head_len = out.len() - head;
        for ids in [prompt, completion].into_iter().flatten() {
            out.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
        }
        if let Some(logprobs) = logprobs {
            for eight in logprobs.chunks(8) {
                let bits = eight.iter().enumerate().map(|(i, v)| u8::from(v.is_some()) << i);
                out.push(bits.sum());
            }
            out.extend(logprobs.iter().flat_map(|v| v.unwrap_or(0.0).to_bits().to_le_bytes()));
        }
        let bytes = length(out.len() - head, &call, "record")?;
        whole += RECORD_HEAD + bytes as usize + routing.as_ref().map_or(0, |routing| routing.data().len());
        whole += bodies.iter().flatten().map(Bytes::len).sum::<usize>();
        if whole > super::frame::MAX_PAYLOAD {
            return Err(refused("with its bodies and tokens it is over 1 GiB".to_owned()));
        }
        let own = pack(&out[head..], PACKED_LISTS);
        let packed_len = own.as_ref().map_or(0, Vec::len) as u32;
        if let Some(own) = own {
            out.truncate(head);
            out.extend_from_slice(&own);
        }
        for (number, at) in [head_len as u32, bytes, packed_len].into_iter().zip([at, at + 4, at + 8]) {
            out[at..at + 4].copy_from_slice(&number.to_le_bytes());
        }
        if let Some(routing) = routing {
            out.extend_from_slice(routing.data());
        }
        for body in packed.into_iter().zip(bodies).filter_map(|(packed, body)| packed.or(body)) {
            if body.len() >= LONG {
                payload.push(std::mem::take(&mut out).into());
                payload.push(body);
            } else {
                out.extend_from_slice(&body);
            }
        }
    }
    payload.push(out.into());
    Ok(payload)
}

/// About as many bytes as the record of a call takes, less its long bodies.
fn room(call: &Call) -> usize {
    let ids = [&call.prompt_token_ids, &call.completion_token_ids].into_iter().flatten();
    let logprobs = call.completion_logprobs.as_ref().map_or(0, |values| 5 * values.len());
    let routing = call.routing.as_ref().map_or(0, |routing| routing.data().len());
    let bodies = [&call.client_request, &call.upstream_request, &call.response].into_iter().flatten();
    let short = bodies.map(|body| body.bytes().len()).filter(|length| *length < LONG);
    4096 + ids.map(|ids| 4 * ids.len()).sum::<usize>() + logprobs + routing + short.sum::<usize>()
}

fn length(length: usize, call: &Call, what: &str) -> Result<u32, SinkError> {
    u32::try_from(length).map_err(|_| SinkError::Refused {
        call_id: call.call_id.to_string(),
        reason: format!("a {what} of {length} elements is too long"),
    })
}

fn push_len(out: &mut Vec<u8>, len: usize) {
    out.extend_from_slice(&(len as u32).to_le_bytes());
}

/// The calls of one payload, or what is wrong with it. Their bodies share its bytes.
pub(super) fn decode(payload: &Bytes) -> Result<Vec<Call>, String> {
    let mut rest = Cursor(payload);
    let encoding = rest.take(1)?[0];
    if !(1..=ENCODING).contains(&encoding) {
        return Err(format!("journal encoding {encoding} is newer than this lego's {ENCODING}"));
    }
    let count = rest.number()?;
    let mut calls = Vec::with_capacity(count.min(1024) as usize);
    for _ in 0..count {
        let (head_len, own) = own_part(&mut rest, encoding)?;
        let mut own = Cursor(&own);
        let OwnedHead { lists, mut call } =
            serde_json::from_slice(own.take(head_len)?).map_err(|error| error.to_string())?;
        call.prompt_token_ids = lists.prompt.map(|len| own.ids(len)).transpose()?;
        call.completion_token_ids = lists.completion.map(|len| own.ids(len)).transpose()?;
        if let Some(len) = lists.logprobs {
            let validity = own.take((len as usize).div_ceil(8))?;
            let values = own.ids(len)?;
            let values = values
                .into_iter()
                .enumerate()
                .map(|(i, bits)| (validity[i / 8] >> (i % 8) & 1 == 1).then(|| f32::from_bits(bits)));
            call.completion_logprobs = Some(values.collect());
        }
        match encoding {
            ..4 => {
                let left = own.0.len();
                rest.take(rest.0.len() - left)?;
            }
            _ if !own.0.is_empty() => return Err(format!("{} bytes too many in a record", own.0.len())),
            _ => {}
        }
        if let Some(shape) = lists.routing {
            let bytes = shape.ids().and_then(|ids| ids.checked_mul(shape.dtype.bytes()));
            let data = rest.take(bytes.ok_or("a routing is larger than memory")?)?;
            let routing = Routing::new(shape, Bytes::copy_from_slice(data));
            let routing = routing.map_err(|error| error.to_string())?;
            call.routing = Some(routing.based_on(lists.routing_base));
        }
        let bodies = [&mut call.client_request, &mut call.upstream_request, &mut call.response];
        for ((body, length), packed) in bodies.into_iter().zip(lists.bodies).zip(lists.packed) {
            let Some(length) = length else {
                continue;
            };
            let text = match packed {
                None => payload.slice_ref(rest.take(length as usize)?),
                Some(packed) => unpack(rest.take(packed as usize)?, length as usize)?,
            };
            *body = Some(JsonText::of_read_bytes(text).map_err(|error| format!("a body: {error}"))?);
        }
        calls.push(call);
    }
    if rest.0.is_empty() { Ok(calls) } else { Err(format!("{} bytes too many", rest.0.len())) }
}

/// Of the first call of a payload its session, when it was received, and its id. The rest is hardly looked at.
pub(super) fn first(payload: &[u8]) -> Option<(String, i64, CallId)> {
    #[derive(Deserialize)]
    struct Head {
        call: Named,
    }
    #[derive(Deserialize)]
    struct Named {
        session_id: String,
        received_at: i64,
        call_id: CallId,
    }
    let mut rest = Cursor(payload);
    let encoding = rest.take(1).ok()?[0];
    rest.number().ok()?;
    let (head_len, own) = own_part(&mut rest, encoding).ok()?;
    let head: Head = serde_json::from_slice(own.get(..head_len)?).ok()?;
    let Named { session_id, received_at, call_id } = head.call;
    Some((session_id, received_at, call_id))
}

/// Bytes of a record's JSON, and that with its lists; before encoding 4 with all that follows too.
fn own_part<'a>(rest: &mut Cursor<'a>, encoding: u8) -> Result<(usize, Cow<'a, [u8]>), String> {
    let head_len = rest.number()? as usize;
    // Before 4 there was nothing but the JSON's length, and the lists were as they are.
    if encoding < 4 {
        return Ok((head_len, Cow::Borrowed(rest.0)));
    }
    let (bytes, packed) = (rest.number()? as usize, rest.number()? as usize);
    Ok((
        head_len,
        match packed {
            0 => Cow::Borrowed(rest.take(bytes)?),
            _ => Cow::Owned(unpack(rest.take(packed)?, bytes)?.into()),
        },
    ))
}

fn unpack(packed: &[u8], length: usize) -> Result<Bytes, String> {
    // No more room than what is there can fill.
    let said = zstd::zstd_safe::get_frame_content_size(packed).ok().flatten();
    if said != Some(length as u64) || length > super::frame::MAX_PAYLOAD {
        return Err(format!("what is compressed is not of {length} bytes"));
    }
    let text = UNPACKER.with_borrow_mut(|unpacker| unpacker.decompress(packed, length));
    let text = text.map_err(|error| format!("what is compressed: {error}"))?;
    if text.len() == length { Ok(text.into()) } else { Err("what is compressed ends too early".to_owned()) }
}

struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], String> {
        let (taken, rest) = self.0.split_at_checked(len).ok_or("a record ends too early")?;
        self.0 = rest;
        Ok(taken)
    }

    fn number(&mut self) -> Result<u32, String> {
        let bytes = self.take(4)?;
        Ok(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    }

    fn ids(&mut self, len: u32) -> Result<Vec<u32>, String> {
        let bytes = self.take(len as usize * 4)?;
        Ok(bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    }
}

#[cfg(test)]
mod tests;
