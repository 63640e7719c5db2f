//! Which session a call belongs to (the first that applies): its own listener, the path, its API key; stand-alone
//! also a header, or a name derived from its first messages.

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::extract::{Path, State};
use axum::response::Response;
use http::HeaderMap;
use sha2::{Digest, Sha256};

use super::face::Incoming;
use super::options::Mode;
use super::session::{Session, SessionSpec};
use super::sessions::DERIVED;
use super::{Inner, Shared, reply};
use crate::protocol::chat::Request;
use crate::protocol::error::{ApiError, ErrorType};
use crate::protocol::volatile::Rules;
use crate::record::{CallKind, ClientApi, SessionId};

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
    parts(client_key(headers)?)
}

fn parts(key: &str) -> Option<(&str, &str)> {
    key.strip_prefix("sk-lego-")?.rsplit_once('.')
}

/// The session that a path or a header names, and the secret where it was given as the key: names are recorded, and a
/// secret must not be.
fn named(name: &str) -> (&str, Option<&str>) {
    parts(name).map_or((name, None), |(id, secret)| (id, Some(secret)))
}

/// True if the key is that of an open session.
pub(super) fn has_session_key(inner: &Inner, headers: &HeaderMap) -> bool {
    session_key(headers).is_some_and(|(id, secret)| {
        let session = id.parse().ok().and_then(|id| inner.sessions.get(&id));
        session.is_some_and(|session| session.has_secret(secret))
    })
}

/// A token that is shorter may be a part of anything.
const LEAST_TOKEN: usize = 8;

/// The headers without those that hold the client token, which is nobody else's: what is left may be sent upstream and
/// recorded. Sessions' keys are left out where headers are sent.
pub(super) fn without_token(inner: &Inner, mut headers: HeaderMap) -> HeaderMap {
    let Some(token) =
        inner.options.client_token.as_deref().map(str::as_bytes).filter(|token| !token.is_empty())
    else {
        return headers;
    };
    let holds = |value: &[u8]| match token.len() {
        0..LEAST_TOKEN => value == token,
        _ => value.windows(token.len()).any(|part| part == token),
    };
    let named: Vec<_> =
        headers.iter().filter(|(_, value)| holds(value.as_bytes())).map(|(name, _)| name.clone()).collect();
    for name in named {
        headers.remove(name);
    }
    headers
}

/// Headers by which a sub-agent tells itself apart within its harness's conversation.
const AGENT_HEADERS: [&str; 2] = ["x-claude-code-agent-id", "x-openai-subagent"];

/// Harnesses that send tools with every call of an agent: their calls without any are side calls (titles, topics,
/// summaries).
const TOOL_USERS: [&str; 3] = ["claude-cli", "opencode", "codex"];

fn short<'a>(headers: &'a HeaderMap, names: &[&str]) -> Option<&'a str> {
    names.iter().find_map(|name| {
        let value = headers.get(*name)?.to_str().ok()?;
        (!value.is_empty() && value.len() <= 256).then_some(value)
    })
}

/// The harness's own id for the conversation; a sub-agent's has its own id behind a slash.
pub(super) fn conversation_id(headers: &HeaderMap) -> Option<String> {
    // A session's key may be given as its name: its secret must not be recorded.
    let id = |names: &[&str]| {
        let id = short(headers, names).map(|name| named(name).0);
        id.filter(|id| !crate::upstream::has_session_key(id.as_bytes()))
    };
    match (id(&CONVERSATION_HEADERS), id(&AGENT_HEADERS)) {
        (Some(conversation), Some(agent)) => Some(format!("{conversation}/{agent}")),
        (one, other) => one.or(other).map(str::to_owned),
    }
}

/// What a client calls itself: name and version of its `User-Agent`.
pub(super) fn client_name(headers: &HeaderMap) -> (Option<String>, Option<String>) {
    let mut words = short(headers, &["user-agent"]).unwrap_or_default().split_whitespace();
    let Some(product) = words.next() else {
        return (None, None);
    };
    let is_version = |word: &&str| word.starts_with(|first: char| first.is_ascii_digit());
    match (product.rsplit_once('/'), words.next().filter(is_version)) {
        // OpenAI's and Anthropic's SDKs: `OpenAI/Python 2.8.1`.
        (Some((_, language)), Some(version)) if !language.contains(|of: char| of.is_ascii_digit()) => {
            (Some(product.to_owned()), Some(version.to_owned()))
        }
        (Some((name, version)), _) => (Some(name.to_owned()), Some(version.to_owned())),
        (None, _) => (Some(product.to_owned()), None),
    }
}

/// What a call of a session is made for: a harness's side calls are not the policy's.
pub(super) fn kind(kind: CallKind, headers: &HeaderMap, request: &Request) -> CallKind {
    if !matches!(kind, CallKind::Policy | CallKind::Unknown) {
        return kind;
    }
    let names = ["max_completion_tokens", "max_tokens", "max_output_tokens"];
    let most = names.iter().find_map(|name| request.get(name));
    let is_quota_probe = most.is_some_and(|most| most == 1);
    let agent = short(headers, &["user-agent"]).unwrap_or_default();
    let uses_tools = TOOL_USERS.iter().any(|name| agent.contains(name));
    let has_tools =
        request.get("tools").is_some_and(|tools| tools.as_array().is_some_and(|tools| !tools.is_empty()));
    if is_quota_probe || (uses_tools && !has_tools) { CallKind::Aux } else { kind }
}

/// The session of a call, if a trainer opened it; `None` stand-alone.
pub(super) fn trainers(
    inner: &Inner,
    door: &Door,
    path_session: Option<&str>,
    headers: &HeaderMap,
) -> Result<Option<Arc<Session>>, ApiError> {
    match (door, &inner.options.mode) {
        (Door::Session(session), _) => Ok(Some(Arc::clone(session))),
        (Door::Public, Mode::Trainer { .. }) => open_session(inner, path_session, headers).map(Some),
        (Door::Public, Mode::StandAlone { .. }) => Ok(None),
    }
}

/// The session that a client names, stand-alone.
fn stand_alone<'a>(path_session: Option<&'a str>, headers: &'a HeaderMap) -> Option<&'a str> {
    path_session
        .or_else(|| session_key(headers).map(|(id, _)| id))
        .or_else(|| headers.get("x-session-id").and_then(|value| value.to_str().ok()))
}

/// The stand-alone session that a call with this request would be of, if there is one.
pub(super) fn begun(
    inner: &Inner,
    path_session: Option<&str>,
    headers: &HeaderMap,
    request: &Request,
) -> Option<Arc<Session>> {
    let id = match stand_alone(path_session, headers) {
        Some(name) => parse(named(name).0).ok()?,
        None => derived(request, &inner.options.volatile),
    };
    inner.sessions.get(&id)
}

/// The session of a call. Those whose request nobody read, and that name none, share one.
pub(super) fn session_of(
    inner: &Inner,
    door: &Door,
    path_session: Option<&str>,
    headers: &HeaderMap,
    incoming: Option<&Incoming>,
) -> Result<Arc<Session>, ApiError> {
    if let Door::Session(session) = door {
        return Ok(Arc::clone(session));
    }
    match &inner.options.mode {
        Mode::Trainer { .. } => open_session(inner, path_session, headers),
        Mode::StandAlone { sampling, .. } => {
            let name = stand_alone(path_session, headers);
            let make = |id| {
                let spec = SessionSpec::stand_alone(id, *sampling);
                Session::new(spec, false, inner.abort.child_token())
            };
            let id = match (name, incoming) {
                (Some(name), _) => parse(named(name).0)?,
                (None, Some(incoming)) => {
                    // It says only what is new: the response that it goes on from knows where it belongs.
                    let linked = incoming.goes_on_from.as_deref();
                    let linked = linked.and_then(|id| inner.responses.session_of(id));
                    let linked =
                        linked.and_then(|id| inner.sessions.get_or_make(id, Instant::now(), make).ok());
                    if let Some(session) = linked {
                        return Ok(session);
                    }
                    derived(incoming.as_said(), &inner.options.volatile)
                }
                (None, None) => parse(&format!("{DERIVED}unread"))?,
            };
            inner.sessions.get_or_make(id, Instant::now(), make)
        }
    }
}

/// `POST /sessions/{session}/end`, stand-alone: no call of this session comes any more.
pub(super) async fn end(
    State(shared): State<Shared>,
    Path(name): Path<String>,
) -> Result<Json<serde_json::Value>, Response> {
    let refuse = |error: &ApiError| reply::error(ClientApi::OpenaiChat, error);
    if matches!(shared.inner.options.mode, Mode::Trainer { .. }) {
        let message = "a trainer's sessions are ended by the trainer";
        return Err(refuse(&ApiError::new(403, ErrorType::InvalidRequest, "not_yours_to_end", message)));
    }
    let id = parse(named(&name).0).map_err(|error| refuse(&error))?;
    let is_new = shared.inner.sessions.end(&id);
    Ok(Json(serde_json::json!({"session": id.as_str(), "ended": true, "was_ended_before": !is_new})))
}

/// True if a client says with a call that it is the session's last. Only where clients choose their sessions: a
/// program in a sandbox cannot end its trial's.
pub(super) fn is_last(inner: &Inner, door: &Door, headers: &HeaderMap) -> bool {
    let says = short(headers, &["x-session-done"]).is_some_and(|value| matches!(value, "1" | "true"));
    says && matches!((door, &inner.options.mode), (Door::Public, Mode::StandAlone { .. }))
}

fn open_session(
    inner: &Inner,
    path_session: Option<&str>,
    headers: &HeaderMap,
) -> Result<Arc<Session>, ApiError> {
    if let Some(name) = path_session {
        let (id, secret) = named(name);
        let id = parse(id)?;
        let found = inner.sessions.get(&id);
        let found = found.filter(|session| secret.is_none_or(|secret| session.has_secret(secret)));
        return found.ok_or_else(|| {
            let message = format!("there is no open session {id}: it never was, or its trial has ended");
            ApiError::new(404, ErrorType::NotFound, "no_such_session", message)
        });
    }
    let of_key = session_key(headers).and_then(|(id, secret)| {
        let session = inner.sessions.get(&id.parse().ok()?)?;
        session.has_secret(secret).then_some(session)
    });
    of_key.ok_or_else(|| {
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
fn derived(request: &Request, volatile: &Rules) -> SessionId {
    let mut hash = Sha256::new();
    hash.update(&request.model);
    for message in request.messages() {
        hash.update([0]);
        hash.update(volatile.compared(&message));
        let role = serde_json::from_slice::<serde_json::Value>(&message);
        if role.is_ok_and(|message| message["role"] == "user") {
            break;
        }
    }
    let digest: String = hash.finalize()[..8].iter().map(|byte| format!("{byte:02x}")).collect();
    let name = format!("{DERIVED}{digest}");
    name.parse().unwrap_or_else(|_| unreachable!("{name} only has letters, digits and a dash"))
}
