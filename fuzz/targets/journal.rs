//! What is stored of calls: the journal's records, and calls without what earlier ones have.

use bytes::Bytes;
use lego::capture::fuzzing::{decode, encode, first, join, shorten};
use lego::record::{
    Call, CallId, ChoiceId, JsonText, LayerAxis, Routing, RoutingDtype, RoutingShape, Splice,
};
use serde_json::json;

/// A payload as it lies in a frame, whatever its bytes: read without a panic and without room for what is not there. What
/// was read is written and read again to the bit; and what calls lack is put back, or said to be missing.
pub fn journal_payload(input: &[u8]) {
    let payload = Bytes::copy_from_slice(input);
    let place = first(input);
    let Ok(calls) = decode(&payload) else {
        return;
    };
    if let (Some((session, received_at, call_id)), Some(call)) = (place, calls.first()) {
        assert_eq!(
            (session.as_str(), received_at, call_id),
            (call.session_id.as_str(), call.received_at, call.call_id)
        );
    }
    let Ok(written) = encode(calls.clone()) else {
        return;
    };
    let read = decode(&written).expect("what was written can be read");
    assert_eq!(read.len(), calls.len());
    assert_eq!(encode(read).expect("as large as before"), written, "the same bytes, log-probs included");
    // A few bytes may claim gigabytes that are put together of each other.
    if calls.len() > 16 || !calls.iter().all(is_small) {
        return;
    }
    for from in 0..calls.len().min(3) {
        for (call, is_whole) in join(&calls, from) {
            assert!(is_whole || !call.trainable, "what lacks something trains nobody");
            assert!(call.shared.is_none());
        }
    }
}

fn as_json(call: &Call) -> String {
    serde_json::to_string(call).expect("JSON")
}

/// Whether what is put together of it is small, too.
fn is_small(call: &Call) -> bool {
    let Some(shared) = &call.shared else { return true };
    let is_small = |splice: &Option<Splice>| splice.as_ref().is_none_or(|splice| splice.length < 1 << 16);
    shared.ids.is_none_or(|ids| ids.count < 1 << 16)
        && is_small(&shared.client_request)
        && is_small(&shared.upstream_request)
        && is_small(&shared.response)
}

/// Experts of a row: one layer, two of them.
const ROW: usize = 2;

/// A session whose calls the bytes decide, line by line, as a writer stores it, through the journal's records: ids, bodies
/// and routing come back whole, read from any call on. One whose base is gone lacks something exactly if it needs it.
pub fn splices(input: &[u8]) {
    let mut session = Session::default();
    let appends: Vec<Vec<Call>> =
        input.split(|byte| *byte == b'\n').take(24).map(|line| session.append(line)).collect();
    let whole: Vec<Call> = appends.iter().flatten().cloned().collect();
    let mut stored = shorten(appends);
    without_rows(&mut stored);
    let read: Vec<Call> = stored
        .chunks(3)
        .flat_map(|calls| {
            let payload = encode(calls.to_vec()).expect("small");
            decode(&payload).expect("what was written can be read")
        })
        .collect();
    assert_eq!(encode(read.clone()).expect("small"), encode(stored).expect("small"));
    for from in [0, read.len() / 2, read.len().saturating_sub(1)] {
        let joined = join(&read, from);
        assert_eq!(joined.len(), read.len() - from);
        for ((call, is_whole), wanted) in joined.iter().zip(&whole[from..]) {
            assert!(is_whole, "nothing is gone");
            assert_eq!(as_json(call), as_json(wanted));
            assert_eq!(call.routing, wanted.routing);
        }
    }
    let Some(gone) = read.first().map(Call::choice) else { return };
    let left: Vec<Call> = read.iter().filter(|call| call.choice() != gone).cloned().collect();
    for (call, is_whole) in join(&left, 0) {
        let wanted = whole.iter().find(|wanted| wanted.choice() == call.choice()).expect("one of them");
        if is_whole {
            assert_eq!(as_json(&call), as_json(wanted), "never anything else than what was there");
            assert_eq!(call.routing, wanted.routing);
        } else {
            assert!(!call.trainable && !call.not_trainable_reasons.is_empty());
        }
    }
}

/// Leaves rows of routing to the call before, as the proxy does.
fn without_rows(calls: &mut [Call]) {
    let mut before: Option<(ChoiceId, u32)> = None;
    for call in calls {
        let rows = call.routing.as_ref().map(|routing| routing.shape().rows);
        if let (Some(routing), Some((base, known))) = (&call.routing, before) {
            call.routing = Some(routing.without_first(known.min(routing.shape().rows), base));
        }
        before = rows.map(|rows| (call.choice(), rows)).or(before);
    }
}

/// A conversation that goes on.
#[derive(Default)]
struct Session {
    calls: u16,
    ids: Vec<u32>,
    messages: Vec<String>,
    experts: Vec<u8>,
}

impl Session {
    /// What the first byte of a line says happens, with the rest of it.
    fn append(&mut self, line: &[u8]) -> Vec<Call> {
        let (first, rest) = line.split_first().unwrap_or((&0, &[]));
        // Blocks of history are longer than lines.
        let ids = rest.iter().flat_map(|byte| [u32::from(*byte), u32::from(*byte) << 9, 7, 8]);
        let text = String::from_utf8_lossy(rest).repeat(1 + usize::from(first % 8));
        match first % 5 {
            // History is rewritten.
            1 => {
                let half = self.ids.len() / 2;
                self.ids.splice(half..half + self.ids.len().min(half + 3) - half, ids);
                let at = self.messages.len() / 2;
                self.messages.insert(at, text);
            }
            // A part of it is gone.
            2 => {
                self.ids.truncate(self.ids.len() / 2);
                self.messages.truncate(self.messages.len() / 2);
                self.messages.push(text);
            }
            _ => {
                self.ids.extend(ids);
                self.messages.push(text);
            }
        }
        self.experts.extend(rest.iter().chain(rest));
        let mut calls = vec![self.call()];
        if first % 7 == 3 {
            let mut second = Call { choice_index: 1, ..calls[0].clone() };
            second.completion_token_ids = Some(vec![9]);
            calls.push(second);
        }
        self.ids.extend([1, 2]);
        calls
    }

    fn call(&mut self) -> Call {
        self.calls += 1;
        let body = json!({"model": "m", "messages": self.messages, "max_tokens": self.calls});
        let sent = json!({"model": "m", "logprobs": true, "messages": self.messages});
        let reply = json!([{"choices": [{"text": self.messages.last()}]}]);
        let text = |body: serde_json::Value| JsonText::new(body.to_string()).ok();
        let rows = u32::try_from(self.experts.len() / ROW).expect("few");
        let (layer_axis, dtype) = (LayerAxis::Unknown, RoutingDtype::U8);
        let shape = RoutingShape { start: 0, rows, layers: 1, layer_axis, top_k: 2, dtype };
        let routing = Routing::new(shape, Bytes::copy_from_slice(&self.experts)).expect("two ids a row");
        let call = json!({
            "schema_version": 2, "call_id": CallId(uuid(self.calls)), "choice_index": 0, "session_id": "s",
            "attempt": 1, "kind": "policy", "http_status": 200, "client_api": "openai_chat",
            "client_stream": true, "upstream_kind": "vllm", "upstream_api": "openai_chat",
            "model_requested": "m", "received_at": self.calls, "duration_us": 1,
            "prompt_ids_source": "engine", "completion_ids_source": "engine", "logprob_semantics": "unknown",
            "sampling_requested": {}, "sampling_sent": {}, "weight_source": "unknown", "status": "ok",
            "trainable": true, "not_trainable_reasons": []
        });
        let mut call: Call = serde_json::from_value(call).expect("a call");
        (call.client_request, call.upstream_request, call.response) = (text(body), text(sent), text(reply));
        (call.prompt_token_ids, call.completion_token_ids) = (Some(self.ids.clone()), Some(vec![1, 2]));
        call.completion_logprobs = Some(vec![Some(-0.5), None]);
        call.routing = Some(routing);
        call
    }
}

fn uuid(number: u16) -> uuid::Uuid {
    uuid::Uuid::from_u128(0x01a2_2ef7_eef5_7000_8000_0000_0000_0000 | u128::from(number))
}
