//! `POST …/v1/messages/count_tokens`: answered by the upstream's tokenizer, or, where prompts are rendered here, by the
//! prompt that a call would have. No turn of a conversation, so no record.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Path, State};
use axum::response::Response;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, StatusCode, header};

use super::limits::Refused;
use super::routes::Route;
use super::session::Session;
use super::stop::Stop;
use super::{Inner, Shared, body, face, identify, reply, whole};
use crate::protocol::chat::Request;
use crate::protocol::error::{ApiError, ErrorType};
use crate::protocol::{json, messages};
use crate::record::{ClientApi, UpstreamKind};
use crate::upstream::UpstreamReply;

/// The handler.
pub(super) async fn count_tokens(
    State(shared): State<Shared>,
    path: Option<Path<String>>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let session = path.as_ref().map(|Path(session)| session.as_str());
    match count(&shared, session, &headers, body).await {
        Ok(body) => {
            let mut response = reply::whole(StatusCode::OK, HeaderMap::new(), body);
            let json = HeaderValue::from_static("application/json");
            response.headers_mut().insert(header::CONTENT_TYPE, json);
            response
        }
        Err(Failed::Api(error)) => reply::error(ClientApi::AnthropicMessages, &error),
        Err(Failed::Refused(refused)) => {
            metrics::counter!("lego_proxy_refused_total", "code" => refused.code).increment(1);
            let mut response = reply::error(ClientApi::AnthropicMessages, &refused.error());
            response.headers_mut().insert(header::RETRY_AFTER, refused.retry_after());
            response
        }
    }
}

/// Why there is no count.
enum Failed {
    Api(ApiError),
    /// By the route's limits.
    Refused(Refused),
}

impl From<ApiError> for Failed {
    fn from(error: ApiError) -> Self {
        Self::Api(error)
    }
}

async fn count(
    shared: &Shared,
    session: Option<&str>,
    headers: &HeaderMap,
    body: Body,
) -> Result<Bytes, Failed> {
    let inner = &shared.inner;
    let trainers = identify::trainers(inner, &shared.door, session, headers)?;
    let headers = &identify::without_token(inner, headers.clone());
    let body::Taken { body, held: _held } = inner.bodies.take(headers, body).await?;
    let api = ClientApi::AnthropicMessages;
    let asked = face::asked_model(&body);
    let route = inner.routes.find(inner, api, asked.as_deref(), trainers.as_deref())?;
    let model = asked.as_deref().and_then(|asked| route.upstream_model(&inner.options, asked));
    if route.upstream.kind() == UpstreamKind::Anthropic {
        return ask(inner, &route, "/messages/count_tokens", headers, of_model(body, model)).await;
    }
    let told = face::told(inner, &route, api, &body)?;
    let begun = |request: &Request| identify::begun(inner, session, headers, request);
    if let Some(count) = of_prompt(inner, &route, &told, |request| trainers.or_else(|| begun(request))).await
    {
        return Ok(messages::counted_reply(count as u64));
    }
    let asked = face::as_configured(inner, messages::count_request(&told)?)?;
    let told = ask(inner, &route, "/../tokenize", headers, of_model(asked, model)).await?;
    messages::count_reply(&told).map_err(|error| {
        let message = format!("the count of tokens: {error}");
        ApiError::new(502, ErrorType::Upstream, "upstream_unreadable", message).into()
    })
}

/// The number of ids that lego itself would ask with. `None`: it asks otherwise, or the upstream is to say what is wrong.
async fn of_prompt(
    inner: &Inner,
    route: &Route,
    told: &Bytes,
    session: impl FnOnce(&Request) -> Option<Arc<Session>>,
) -> Option<usize> {
    route.renderer.as_ref()?;
    // A call has a limit, a count none; and it plays no part.
    let call = Bytes::from(json::set_members(told, &[("max_tokens", "1".to_owned())], &[]).ok()?);
    let names = face::names(&call);
    let chat = face::as_configured(inner, messages::translate(&call, names).ok()?.chat).ok()?;
    let request = Request::parse(chat).ok()?;
    let model = route.upstream_model(&inner.options, &request.model).unwrap_or(&request.model);
    let renderer = route.renderer_for(model)?;
    let lineages = session(&request)
        .map_or_else(Arc::default, |session| session.lineages.with(renderer, &route.upstream.name(), model));
    renderer.count(lineages, request.clone(), &inner.options.volatile).await
}

/// A request with the upstream's name for the model.
fn of_model(body: Bytes, model: Option<&str>) -> Bytes {
    let Some(model) = model else { return body };
    let name = serde_json::Value::from(model).to_string();
    match json::set_members(&body, &[("model", name)], &[]) {
        Ok(edited) => edited.into(),
        // It is no object: the upstream says so.
        Err(_) => body,
    }
}

async fn ask(
    inner: &Inner,
    route: &Route,
    path: &str,
    headers: &HeaderMap,
    body: Bytes,
) -> Result<Bytes, Failed> {
    route.limits.turn().await.map_err(Failed::Refused)?;
    let upstream = &route.upstream;
    let sent = upstream.send(Method::POST, path, None, headers, body).await;
    let UpstreamReply { status, body, .. } = sent.map_err(|error| whole::no_reply(&error).1)?;
    let piece_bytes = inner.options.stream_buffer_bytes;
    let stop = Stop::new(inner.abort.clone(), route.total_timeout);
    let text = whole::read(upstream, body, piece_bytes, &stop).await.map_err(|bad| bad.error)?;
    if status.is_success() {
        Ok(text)
    } else {
        Err(whole::upstream_error(route, status.as_u16(), &upstream.without_key(text)).into())
    }
}
