//! Who may call at all: no web page, no rebound name; with a client token, only who has it.

use std::net::IpAddr;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use http::header;
use sha2::{Digest, Sha256};

use super::identify::Door;
use super::{Inner, Shared, identify, reply};
use crate::protocol::error::{ApiError, ErrorType};

/// Refuses a `Host` or an `Origin` that is not this proxy's own, unless what calls is asked for the client token: no web
/// page knows that, and a proxy beyond loopback has names that only its callers know (`host.docker.internal`, a
/// service's name).
pub(super) async fn foreign(state: State<Shared>, request: Request, next: Next) -> Response {
    let asks_token = state.inner.options.client_token.is_some() && matches!(state.door, Door::Public);
    if asks_token { next.run(request).await } else { host(state, request, next).await }
}

/// Refuses a `Host` or an `Origin` that is not this proxy's own: a web page that makes a browser call a local port
/// gives itself away by one or the other.
pub(super) async fn host(State(shared): State<Shared>, request: Request, next: Next) -> Response {
    let headers = request.headers();
    let host = headers.get(header::HOST).map(|value| value.to_str().unwrap_or("?"));
    let host = host.or_else(|| request.uri().host());
    if host.is_some_and(|host| !is_own(&shared.inner, host)) {
        return refuse(&request, "Host");
    }
    let origin = headers.get(header::ORIGIN).map(|value| value.to_str().unwrap_or("?"));
    let is_foreign = |origin: &str| match origin.split_once("://") {
        Some((_, authority)) => !is_own(&shared.inner, authority),
        None => true,
    };
    if origin.is_some_and(is_foreign) {
        return refuse(&request, "Origin");
    }
    next.run(request).await
}

/// Asks for the client token, where there is one. A session's own key is as good.
pub(super) async fn token(State(shared): State<Shared>, request: Request, next: Next) -> Response {
    let Some(token) = &shared.inner.options.client_token else {
        return next.run(request).await;
    };
    let key = identify::client_key(request.headers()).unwrap_or_default();
    // Hashes, so that the time of the comparison says nothing.
    let is_token = Sha256::digest(key) == Sha256::digest(token);
    if is_token || identify::has_session_key(&shared.inner, request.headers()) {
        return next.run(request).await;
    }
    let message = "this proxy asks for its client token as API key (the value of the variable named in \
                   proxy.client_token_env)";
    let error = ApiError::new(401, ErrorType::Authentication, "bad_client_token", message);
    reply::error(reply::api_of(request.uri().path(), request.headers()), &error)
}

fn is_own(inner: &Inner, authority: &str) -> bool {
    let host = match authority.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => authority.split(':').next().unwrap_or_default(),
    };
    let address: Option<IpAddr> = host.parse().ok();
    let serves_all =
        inner.options.allowed_hosts.iter().any(|allowed| allowed == "0.0.0.0" || allowed == "::");
    host.eq_ignore_ascii_case("localhost")
        || address.is_some_and(|address| address.is_loopback() || serves_all)
        || inner.options.allowed_hosts.iter().any(|allowed| allowed.eq_ignore_ascii_case(host))
}

fn refuse(request: &Request, header: &str) -> Response {
    let message = format!(
        "the {header} header names another place than this proxy; call it by its address or as localhost"
    );
    let error = ApiError::new(403, ErrorType::InvalidRequest, "foreign_host", message);
    reply::error(reply::api_of(request.uri().path(), request.headers()), &error)
}
