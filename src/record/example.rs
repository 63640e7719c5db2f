//! A call record for unit tests of any room.

use serde_json::{Value, json};

use super::Call;

/// An answered policy call without ids that cannot be trained, with the members of `change` set over it.
///
/// # Panics
/// If `change` is no object, or the whole is no [`Call`].
pub fn call(change: Value) -> Call {
    let mut call = json!({
        "schema_version": super::SCHEMA_VERSION, "call_id": uuid::Uuid::now_v7(), "choice_index": 0,
        "session_id": "s", "attempt": 1, "kind": "policy", "http_status": 200, "client_api": "openai_chat",
        "client_stream": false, "upstream_kind": "embedded", "upstream_api": "openai_chat",
        "model_requested": "m", "received_at": 0, "duration_us": 1, "prompt_ids_source": "absent",
        "completion_ids_source": "absent", "logprob_semantics": "unknown", "sampling_requested": {},
        "sampling_sent": {}, "weight_source": "unknown", "status": "ok", "trainable": false,
        "not_trainable_reasons": []
    });
    let Value::Object(change) = change else { panic!("members to set: {change}") };
    call.as_object_mut().expect("an object").extend(change);
    serde_json::from_value(call).expect("a call")
}
