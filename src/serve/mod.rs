//! The embedded engine over HTTP, in vLLM's shapes.
//!
//! Routes: `POST /v1/chat/completions`, `/v1/completions`, `/tokenize`, `/detokenize`; `GET /v1/models`, `/health`,
//! `/ping`, `/version`. Token ids (`return_token_ids`), log-probs (`logprobs`, `top_logprobs`) and weight versions
//! (`return_weight_versions`) are given as vLLM gives them, streamed or not.
//!
//! Invariants:
//! - Every sampled token's id and log-prob is in exactly one chunk, whatever the text does (partial characters, stop
//!   strings, tool-call markup): `len(logprobs.content) == len(token_ids)`, and they sum to `usage.completion_tokens`.
//! - A field that would change the result and is not supported is refused with a 400 unless it is neutral; fields that
//!   are not known are ignored, as vLLM does.
//! - A tool call is given once it is whole, in streams too: some clients repair and execute half a call. A malformed one
//!   stays content.
//! - A client that goes away ends its request in the engine.
//! - Nothing is taken from `generation_config.json` but the ids that end a completion: what a request leaves out is
//!   temperature 1, top_p 1, top_k off.

mod chat;
mod choice;
mod completions;
mod error;
mod events;
mod request;
mod tokenize;
mod wire;

pub use error::ApiError;

use std::sync::Arc;

use axum::extract::{DefaultBodyLimit, State};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};

use crate::engine::Engine;
use crate::text::parsers::Forms;
use crate::text::{ChatTemplate, Tokenizer};

/// Requests may hold long conversations.
const MAX_BODY_BYTES: usize = 256 << 20;

/// What the routes answer from. Clones share it.
#[derive(Clone, Debug)]
pub struct ServeState {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    engine: Engine,
    tokenizer: Arc<Tokenizer>,
    template: Arc<ChatTemplate>,
    model_names: Vec<String>,
    started_at: u64,
    fingerprint: String,
    forms: Forms,
}

impl ServeState {
    /// Serves `engine` under `model_names`; the first is the one that replies carry when a request names none. Tool
    /// calls and reasoning are parsed as `forms` says.
    #[must_use]
    pub fn new(
        engine: Engine,
        tokenizer: Arc<Tokenizer>,
        template: Arc<ChatTemplate>,
        model_names: Vec<String>,
        forms: Forms,
    ) -> Self {
        let fingerprint = format!("lego-{}-{}", env!("CARGO_PKG_VERSION"), &template.sha256()[..8]);
        let started_at = wire::unix_seconds();
        let inner = Inner { engine, tokenizer, template, model_names, started_at, fingerprint, forms };
        Self { inner: Arc::new(inner) }
    }

    /// The engine behind the routes, for publishing weights.
    #[must_use]
    pub fn engine(&self) -> &Engine {
        &self.inner.engine
    }

    /// The model name of a reply: the one asked for.
    fn model_name(&self, requested: Option<&str>) -> Result<String, ApiError> {
        match requested {
            None | Some("") => Ok(self.inner.model_names.first().cloned().unwrap_or_default()),
            Some(name) if self.inner.model_names.iter().any(|known| known == name) => Ok(name.to_owned()),
            Some(name) => Err(ApiError::not_found(format!(
                "The model `{name}` does not exist. This server has {}.",
                self.inner.model_names.join(", ")
            ))),
        }
    }
}

/// All routes of a serving engine.
pub fn router(state: ServeState) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(chat::chat_completions))
        .route("/v1/completions", post(completions::completions))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route("/v1/models", get(models))
        .route("/health", get(health))
        .route("/ping", get(health))
        .route("/version", get(|| async { Json(json!({"version": env!("CARGO_PKG_VERSION")})) }))
        .fallback(|| async { ApiError::not_found("Not Found".to_owned()) })
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .with_state(state)
}

async fn health() {}

async fn models(State(state): State<ServeState>) -> Json<Value> {
    let Inner { model_names, started_at, engine, .. } = &*state.inner;
    let card = |name: &String| {
        json!({
            "id": name, "object": "model", "created": started_at, "owned_by": "lego", "root": name, "parent": null,
            "max_model_len": engine.options().max_context, "permission": [],
        })
    };
    Json(json!({"object": "list", "data": model_names.iter().map(card).collect::<Vec<_>>()}))
}
