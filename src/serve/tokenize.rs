//! `POST /tokenize` and `/detokenize`.

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use serde::Deserialize;
use serde_json::{Value, json};

use super::ServeState;
use super::chat::PromptFields;
use super::error::ApiError;
use super::request::{fields, parse_object};

#[derive(Deserialize)]
struct Fields {
    model: Option<String>,
    prompt: Option<String>,
    return_token_strs: Option<bool>,
}

pub(super) async fn tokenize(State(state): State<ServeState>, body: Bytes) -> Result<Json<Value>, ApiError> {
    let body = parse_object(&body)?;
    let request: Fields = fields(&body)?;
    state.model_name(request.model.as_deref())?;
    let tokenizer = &state.inner.tokenizer;
    let tokens = match request.prompt {
        Some(prompt) => tokenizer.encode(&prompt)?,
        None => fields::<PromptFields>(&body)?.encode(&state)?,
    };
    let strings: Option<Vec<Option<String>>> = request
        .return_token_strs
        .unwrap_or(false)
        .then(|| tokens.iter().map(|&id| tokenizer.id_to_token(id)).collect());
    Ok(Json(json!({
        "count": tokens.len(),
        "max_model_len": state.engine().options().max_context,
        "tokens": tokens,
        "token_strs": strings,
    })))
}

#[derive(Deserialize)]
struct DetokenizeFields {
    model: Option<String>,
    tokens: Vec<u32>,
}

pub(super) async fn detokenize(
    State(state): State<ServeState>,
    body: Bytes,
) -> Result<Json<Value>, ApiError> {
    let body = parse_object(&body)?;
    let request: DetokenizeFields = fields(&body)?;
    state.model_name(request.model.as_deref())?;
    Ok(Json(json!({"prompt": state.inner.tokenizer.decode(&request.tokens, false)})))
}
