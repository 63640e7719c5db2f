//! Which session a call belongs to (the first that applies): its own listener, the path, its API key; stand-alone
//! also a header, or a name derived from its first messages.

use std::sync::Arc;

use http::HeaderMap;
use sha2::{Digest, Sha256};

use super::Inner;
use super::options::Mode;
use super::session::{Session, SessionSpec};
use crate::protocol::chat::Request;
use crate::protocol::error::{ApiError, ErrorType};
use crate::record::SessionId;

/// Where a request came in.
#[derive(Clone)]
pub(super) enum Door {
    /// The public listener.
    Public,
    /// The listener of one session.
    Session(Arc<Session>),
}

/// Harnesses' own ids for a conversation: recorded, never trusted to choose a session.
const CONVERSATION_HEADERS: [&str; 8] = [
    "x-session-id",
    "session_id",
    "session-id",
    "conversation_id",
    "x-session-affinity",
    "x-claude-code-session-id",
    "x-litellm-session-id",
    "x-affinity",
];

/// The API key that a client sent, under any of the names clients use.
pub(super) fn client_key(headers: &HeaderMap) -> Option<&str> {
    let bearer = headers.get(http::header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let bearer = bearer.and_then(|value| value.split_once(' ')).map(|(_, key)| key.trim());
    bearer.or_else(|| ["x-api-key", "api-key"].iter().find_map(|name| headers.get(*name)?.to_str().ok()))
}

/// The session that an `sk-lego-<session>.<secret>` key names, and the secret.
fn session_key(headers: &HeaderMap) -> Option<(&str, &str)> {
    client_key(headers)?.strip_prefix("sk-lego-")?.rsplit_once('.')
}

/// True if the key is that of an open session.
pub(super) fn has_session_key(inner: &Inner, headers: &HeaderMap) -> bool {
    session_key(headers).is_some_and(|(id, secret)| {
        let session = id.parse().ok().and_then(|id| inner.sessions.get(&id));
        session.is_some_and(|session| session.has_secret(secret))
    })
}

/// The harness's own id for the conversation.
pub(super) fn conversation_id(headers: &HeaderMap) -> Option<String> {
    CONVERSATION_HEADERS.iter().find_map(|name| {
        let value = headers.get(*name)?.to_str().ok()?;
        (!value.is_empty() && value.len() <= 256).then(|| value.to_owned())
    })
}

/// The session of a call.
pub(super) fn session_of(
    inner: &Inner,
    door: &Door,
    path_session: Option<&str>,
    headers: &HeaderMap,
    request: &Request,
) -> Result<Arc<Session>, ApiError> {
    if let Door::Session(session) = door {
        return Ok(Arc::clone(session));
    }
    match &inner.options.mode {
        Mode::Trainer { .. } => open_session(inner, path_session, headers),
        Mode::StandAlone { sampling, .. } => {
            let named = path_session
                .or_else(|| session_key(headers).map(|(id, _)| id))
                .or_else(|| headers.get("x-session-id").and_then(|value| value.to_str().ok()));
            let id = match named {
                Some(name) => parse(name)?,
                None => derived(request),
            };
            let make = |id| {
                let spec = SessionSpec::stand_alone(id, *sampling);
                Session::new(spec, false, inner.abort.child_token())
            };
            Ok(inner.sessions.get_or_make(id, make))
        }
    }
}

/// Refuses what is no call but must not be had without an open session either.
pub(super) fn must_be_open(
    inner: &Inner,
    door: &Door,
    path_session: Option<&str>,
    headers: &HeaderMap,
) -> Result<(), ApiError> {
    match (door, &inner.options.mode) {
        (Door::Public, Mode::Trainer { .. }) => open_session(inner, path_session, headers).map(drop),
        _ => Ok(()),
    }
}

fn open_session(
    inner: &Inner,
    path_session: Option<&str>,
    headers: &HeaderMap,
) -> Result<Arc<Session>, ApiError> {
    if let Some(name) = path_session {
        let id = parse(name)?;
        return inner.sessions.get(&id).ok_or_else(|| {
            let message = format!("there is no open session {id}: it never was, or its trial has ended");
            ApiError::new(404, ErrorType::NotFound, "no_such_session", message)
        });
    }
    let named = session_key(headers).and_then(|(id, secret)| {
        let session = inner.sessions.get(&id.parse().ok()?)?;
        session.has_secret(secret).then_some(session)
    });
    named.ok_or_else(|| {
        let message = "this proxy serves a trainer's sessions only, and the call names none that is open: use the \
                       base URL …/sessions/<session>/v1, or the session's key as API key";
        ApiError::new(401, ErrorType::Authentication, "no_session", message)
    })
}

fn parse(name: &str) -> Result<SessionId, ApiError> {
    name.parse().map_err(|error: crate::record::InvalidId| {
        ApiError::new(400, ErrorType::InvalidRequest, "bad_session_id", error.to_string())
    })
}

/// A session for a client that names none: calls that begin alike (up to the first user message) share it. The name
/// says that it was derived.
fn derived(request: &Request) -> SessionId {
    let mut hash = Sha256::new();
    hash.update(&request.model);
    for message in request.messages() {
        hash.update([0]);
        hash.update(message);
        let role = serde_json::from_slice::<serde_json::Value>(message);
        if role.is_ok_and(|message| message["role"] == "user") {
            break;
        }
    }
    let digest: String = hash.finalize()[..8].iter().map(|byte| format!("{byte:02x}")).collect();
    let name = format!("derived-{digest}");
    name.parse().unwrap_or_else(|_| unreachable!("{name} only has letters, digits and a dash"))
}
