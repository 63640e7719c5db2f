//! Expert routing that a test can tell from any other: of each position, of its id, of the weights.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

/// Weights, in each row.
pub type Version = u8;

/// The experts of a position: two layers, two experts.
pub fn row(version: Version, position: usize, id: u32) -> [u8; 4] {
    [version, (position % 251) as u8, (id % 251) as u8, (id / 251) as u8]
}

/// A log-prob that belongs to the id.
pub fn logprob(id: u32) -> f64 {
    -f64::from(id % 8 + 1) / 8.0
}

/// As vLLM sends them.
pub fn npy(rows: &[[u8; 4]]) -> String {
    let header = format!("{{'descr': '|u1', 'fortran_order': False, 'shape': ({}, 2, 2), }}\n", rows.len());
    let length = (header.len() as u16).to_le_bytes();
    STANDARD.encode([b"\x93NUMPY\x01\x00", &length[..], header.as_bytes(), rows.as_flattened()].concat())
}

/// As SGLang sends them.
pub fn raw(rows: &[[u8; 4]]) -> String {
    let ids = rows.as_flattened().iter().map(|id| i32::from(*id));
    STANDARD.encode(ids.flat_map(i32::to_le_bytes).collect::<Vec<u8>>())
}

/// A chat reply of a vLLM whose model has experts.
pub fn chat_probe() -> Value {
    json!({"id": "c", "object": "chat.completion", "created": 1, "model": "toy", "prompt_token_ids": [1, 2],
        "usage": {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3},
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "a", "reasoning": null}, "finish_reason": "length",
            "token_ids": [3], "logprobs": {"content": [{"token": "a", "logprob": -0.5}]}, "routed_experts": npy(&[[0; 4]; 2])}]})
}
