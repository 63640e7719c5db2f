//! The routes besides model calls: models, health, metrics, and what does not exist.

use std::time::Duration;

use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Method, StatusCode, Uri, header};
use serde_json::{Value, json};

use super::routes::Route;
use super::{Shared, identify, reply, whole};
use crate::config;
use crate::protocol::error::{ApiError, ErrorType};
use crate::record::{ClientApi, UpstreamKind};
use crate::upstream::{self, UpstreamReply};

const MAX_MODELS_BYTES: usize = 4 * 1024 * 1024;
const READY_LIMIT: Duration = Duration::from_secs(5);

/// `GET /v1/models`: the upstream's list; before it the names of routes, and those that `proxy.model_map` has.
pub(super) async fn models(
    State(shared): State<Shared>,
    path: Option<Path<String>>,
    headers: HeaderMap,
) -> Response {
    let inner = &*shared.inner;
    let named = path.as_ref().map(|Path(session)| session.as_str());
    // Who names no open session sees the routes that need none.
    let session = identify::trainers(inner, &shared.door, named, &headers).ok().flatten();
    let is_anthropic = reply::is_anthropic(&headers);
    let api = if is_anthropic { ClientApi::AnthropicMessages } else { ClientApi::OpenaiChat };
    let headers = identify::without_token(inner, headers);
    let served = inner.routes.served(inner, session.as_deref());
    let mut own: Vec<&str> = served.into_iter().filter(|name| !config::is_beginning(name)).collect();
    let default = inner.routes.default();
    let listed = match default {
        Some(route) => ask_models(route, &headers).await,
        None => Ok((HeaderMap::new(), Bytes::new())),
    };
    // Routes are there whether the default upstream answers or not.
    let listed = match listed {
        Err(error) if own.is_empty() => return reply::error(api, &error),
        listed => listed.ok(),
    };
    if default.is_some() {
        let aliases: Vec<&str> = inner.options.aliases().filter(|name| !own.contains(name)).collect();
        own.extend(aliases);
    }
    let speaks_it = default.is_some_and(|route| route.upstream.kind() == UpstreamKind::Anthropic);
    match listed {
        Some((headers, body)) if own.is_empty() && default.is_some() => {
            let read = if is_anthropic && !speaks_it { anthropic_models(&body) } else { None };
            reply::whole(StatusCode::OK, headers, read.unwrap_or(body))
        }
        listed => {
            let theirs = listed.map(|(_, body)| body).unwrap_or_default();
            let list = joined(&own, inner.routes.since, &theirs);
            let list = if is_anthropic { anthropic_models(&list).unwrap_or(list) } else { list };
            let mut headers = HeaderMap::new();
            headers.insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
            reply::whole(StatusCode::OK, headers, list)
        }
    }
}

/// OpenAI's list of these names, then of an upstream's models that are none of them.
fn joined(own: &[&str], since: u64, theirs: &[u8]) -> Bytes {
    let mine = |id: &str| json!({"id": id, "object": "model", "created": since, "owned_by": "lego"});
    let mut models: Vec<Value> = own.iter().map(|id| mine(id)).collect();
    let theirs: Value = serde_json::from_slice(theirs).unwrap_or_default();
    for model in theirs["data"].as_array().into_iter().flatten() {
        match model["id"].as_str() {
            Some(id) if own.contains(&id) => {}
            // Anthropic's form has a date in the place of seconds.
            Some(id) if model["type"] == "model" => models.push(mine(id)),
            Some(_) => models.push(model.clone()),
            None => {}
        }
    }
    Bytes::from(json!({"object": "list", "data": models}).to_string())
}

/// OpenAI's list of models as Anthropic's; `None` if it is no such list.
fn anthropic_models(list: &[u8]) -> Option<Bytes> {
    let list: Value = serde_json::from_slice(list).ok()?;
    let model = |model: &Value| {
        let id = model["id"].as_str()?;
        let created = model["created"].as_i64().unwrap_or(0);
        let of_day = created.rem_euclid(86_400);
        let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
        let date = crate::capture::date_of(created.saturating_mul(1_000_000));
        let at = format!("{date}T{hour:02}:{minute:02}:{second:02}Z");
        Some(json!({"type": "model", "id": id, "display_name": id, "created_at": at}))
    };
    let models: Vec<Value> = list["data"].as_array()?.iter().filter_map(model).collect();
    let end = |model: Option<&Value>| model.map_or(Value::Null, |model| model["id"].clone());
    let (first, last) = (end(models.first()), end(models.last()));
    Some(Bytes::from(
        json!({"data": models, "has_more": false, "first_id": first, "last_id": last}).to_string(),
    ))
}

/// The models of a route's upstream.
async fn ask_models(route: &Route, headers: &HeaderMap) -> Result<(HeaderMap, Bytes), ApiError> {
    let upstream = &*route.upstream;
    let failed = |message: String| ApiError::new(502, ErrorType::Upstream, "upstream_error", message);
    let sent = upstream.send(Method::GET, "/models", None, headers, Bytes::new()).await;
    let UpstreamReply { status, headers, mut body } = sent.map_err(|error| whole::no_reply(&error).1)?;
    let mut text = BytesMut::new();
    while let Some(piece) = body.next(MAX_MODELS_BYTES).await {
        text.extend_from_slice(&piece.map_err(|error| failed(error.to_string()))?);
        if text.len() > MAX_MODELS_BYTES {
            return Err(failed("the upstream's list of models is longer than 4 MiB".to_owned()));
        }
    }
    let text = upstream.without_key(text.freeze());
    if !status.is_success() {
        return Err(whole::upstream_error(route, status.as_u16(), &text));
    }
    Ok((upstream::forward_reply_headers(&headers), text))
}

/// `GET /v1/responses`: Codex asks for a WebSocket. By this status it uses `POST` at once; another makes it ask again.
pub(super) async fn no_websocket() -> Response {
    let message = "there is no WebSocket here; use POST /v1/responses";
    let error = ApiError::new(426, ErrorType::InvalidRequest, "no_websocket", message);
    reply::error(ClientApi::OpenaiResponses, &error)
}

/// `GET /healthz`: this process answers.
pub(super) async fn healthz() -> &'static str {
    "ok\n"
}

/// `GET /readyz`: the default upstream answers too (without one, those of all routes), and new calls are let in.
pub(super) async fn readyz(State(shared): State<Shared>) -> Response {
    if shared.inner.closing.is_cancelled() {
        return (StatusCode::SERVICE_UNAVAILABLE, "shutting down\n").into_response();
    }
    let headers = HeaderMap::new();
    for route in shared.inner.routes.needed() {
        let problem = match tokio::time::timeout(READY_LIMIT, ask_models(route, &headers)).await {
            Ok(Ok(_)) => continue,
            Ok(Err(error)) => format!("{}\n", error.message),
            Err(_) => "the upstream does not answer\n".to_owned(),
        };
        let problem = match &route.name {
            Some(name) => format!("route {name}: {problem}"),
            None => problem,
        };
        return (StatusCode::SERVICE_UNAVAILABLE, problem).into_response();
    }
    "ready\n".into_response()
}

/// `GET /metrics`, for Prometheus.
pub(super) async fn metrics(State(shared): State<Shared>) -> Response {
    match &shared.inner.options.render_metrics {
        Some(render) => {
            ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], render()).into_response()
        }
        None => not_found(Method::GET, Uri::from_static("/metrics"), HeaderMap::new()).await,
    }
}

/// What does not exist, with a hint.
pub(super) async fn not_found(method: Method, uri: Uri, headers: HeaderMap) -> Response {
    let path = uri.path();
    let hint = if path.contains("/v1/v1") || path.contains("//") {
        "the base URL has a /v1 or a slash too many"
    } else if path.ends_with("/chat/completions") && !path.contains("/v1/") {
        "the base URL lacks its /v1"
    } else if path.contains("/responses/") {
        "responses that are stored are not read, changed or deleted through this proxy, nor compacted; ask where they are stored"
    } else {
        "this proxy serves POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, \
         /v1/messages/count_tokens and GET /v1/models"
    };
    let message = format!("there is no {method} {path} here: {hint}");
    reply::error(
        reply::api_of(path, &headers),
        &ApiError::new(404, ErrorType::NotFound, "not_found", message),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_models_reads_as_anthropics() {
        let list =
            br#"{"object":"list","data":[{"id":"a","object":"model","created":1796083199},{"id":"b"}]}"#;
        let read: Value = serde_json::from_slice(&anthropic_models(list).expect("a list")).expect("JSON");
        assert_eq!(read["data"][0]["created_at"], "2026-11-30T23:59:59Z");
        assert_eq!(read["data"][1]["created_at"], "1970-01-01T00:00:00Z");
        assert_eq!((&read["first_id"], &read["last_id"]), (&json!("a"), &json!("b")));
        assert!(anthropic_models(b"[]").is_none() && anthropic_models(b"x").is_none());
    }
}
