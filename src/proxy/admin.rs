//! `/admin`: for a trainer that changes the upstream's weights. A listener of its own, and always its token.

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router, middleware};
use bytes::Bytes;
use serde::Deserialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::net::TcpListener;

use super::{Proxy, Shared, guard, identify, models, reply, server};
use crate::protocol::error::{ApiError, ErrorType};
use crate::record::ClientApi;

/// Longest label of a version.
const MAX_LABEL: usize = 256;

impl Proxy {
    /// The admin listener's routes. `token` must be sent as the API key of every request.
    pub fn admin_router(&self, token: &str) -> Router {
        let state = Shared { inner: std::sync::Arc::clone(&self.inner), door: identify::Door::Public };
        let expected: [u8; 32] = Sha256::digest(token).into();
        let guarded = move |request: Request, next: Next| async move {
            let key = identify::client_key(request.headers()).unwrap_or_default();
            // Hashes, so that the time of the comparison says nothing.
            if Sha256::digest(key).as_slice() == expected {
                return next.run(request).await;
            }
            let message = "the admin listener asks for its token as API key (the value of the variable named in \
                           proxy.admin_token_env)";
            refuse(401, ErrorType::Authentication, "bad_admin_token", message)
        };
        Router::new()
            .route("/admin/pause", post(pause))
            .route("/admin/resume", post(resume))
            .route("/admin/policy-version", post(policy_version))
            .route("/admin/state", get(state_of))
            .fallback(models::not_found)
            .layer(middleware::from_fn(guarded))
            .layer(middleware::from_fn_with_state(state.clone(), guard::host))
            .with_state(state)
    }

    /// Serves the admin listener until [`Proxy::shutdown`].
    pub async fn serve_admin(&self, listener: TcpListener, token: &str) {
        self.serve_admin_all(vec![listener], token).await;
    }

    /// Serves several admin listeners until [`Proxy::shutdown`].
    pub async fn serve_admin_all(&self, listeners: Vec<TcpListener>, token: &str) {
        let router = self.admin_router(token);
        let serve = |listener| {
            let (closing, abort) = (self.inner.closing.clone(), self.inner.abort.clone());
            let routers = server::Routers { usual: router.clone(), surplus: router.clone() };
            server::serve(listener, routers, &self.inner.room, closing, abort, None)
        };
        futures_util::future::join_all(listeners.into_iter().map(serve)).await;
    }

    /// Holds new calls back, with their connections kept alive, until [`Proxy::resume`].
    pub fn pause(&self) {
        self.inner.gate.set_open(false);
    }

    /// As [`Proxy::pause`]; streamed calls of the token-in relay let go of their upstream, and go on from the tokens that
    /// they have once [`Proxy::resume`] lets them through: weights can change in the middle of a reply.
    pub fn interrupt(&self) {
        self.inner.gate.interrupt();
    }

    /// Lets calls through again.
    pub fn resume(&self) {
        self.inner.gate.set_open(true);
    }

    /// Calls that run on after their clients left.
    #[must_use]
    pub fn calls_without_client(&self) -> usize {
        self.inner.left.get()
    }

    /// Says which weights the upstream has from now on. Calls that see the label change while they run are recorded
    /// with an unknown version, unless the engine tells its own.
    pub fn set_policy_version(&self, label: impl Into<String>) {
        self.inner.gate.set_version(label.into());
    }
}

fn state(shared: &Shared) -> Json<Value> {
    let inner = &shared.inner;
    let (running, waiting) = inner.gate.calls();
    Json(json!({
        "is_paused": !inner.gate.is_open(), "policy_version": inner.gate.version(),
        "calls_in_flight": running, "calls_waiting": waiting,
        "calls_without_client": inner.left.get(),
    }))
}

async fn state_of(State(shared): State<Shared>) -> Json<Value> {
    state(&shared)
}

/// What becomes of calls that run when the gate closes.
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct Pause {
    #[serde(default)]
    running: WhileRunning,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "snake_case")]
enum WhileRunning {
    /// They come to their end.
    #[default]
    Finish,
    /// Those of the token-in relay stop, and go on behind the gate.
    Interrupt,
}

async fn pause(State(shared): State<Shared>, body: Bytes) -> Response {
    let body = if body.trim_ascii().is_empty() { b"{}".as_slice() } else { &body };
    match serde_json::from_slice(body) {
        Ok(Pause { running: WhileRunning::Finish }) => shared.inner.gate.set_open(false),
        Ok(Pause { running: WhileRunning::Interrupt }) => shared.inner.gate.interrupt(),
        Err(error) => {
            let message = format!(r#"send nothing, or {{"running": "finish" | "interrupt"}}: {error}"#);
            return refuse(400, ErrorType::InvalidRequest, "bad_pause", &message);
        }
    }
    state(&shared).into_response()
}

async fn resume(State(shared): State<Shared>) -> Json<Value> {
    shared.inner.gate.set_open(true);
    state(&shared)
}

/// `{"version": "step-42"}`; a number is as good.
#[derive(Deserialize)]
struct Version {
    version: Value,
}

async fn policy_version(State(shared): State<Shared>, body: Bytes) -> Response {
    let label = match serde_json::from_slice(&body) {
        Ok(Version { version: Value::String(label) }) => label,
        Ok(Version { version: Value::Number(label) }) => label.to_string(),
        _ => String::new(),
    };
    if label.is_empty() || label.len() > MAX_LABEL {
        let message = r#"send {"version": "<label>"}, a label of 1 to 256 bytes"#;
        return refuse(400, ErrorType::InvalidRequest, "bad_version", message);
    }
    shared.inner.gate.set_version(label);
    state(&shared).into_response()
}

fn refuse(status: u16, kind: ErrorType, code: &'static str, message: &str) -> Response {
    reply::error(ClientApi::OpenaiChat, &ApiError::new(status, kind, code, message))
}
