//! The ways to an upstream, and the reply's head.

use std::time::{Duration, Instant};

use axum::Router;
use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderValue};
use http::{Method, Request, StatusCode, Uri};
use tower::ServiceExt;

use super::body::UpstreamBody;
use super::capabilities::Capabilities;
use super::environment;
use super::headers::{forward_request_headers, without_key_parameters};
use super::key::{self, ApiKey};
use super::native::{Native, Silence};
use super::pool::{Pool, PoolError};
use super::probe::ProbeState;
use super::redirect;
use super::refusals::{Additions, Refusals};
use super::responses::Responses;
use super::routing::RoutingHint;
use super::unpack::Unpacker;
use super::url::{BaseUrl, InvalidUrl, below};
use super::vllm_generate::TokenStreams;
use crate::record::UpstreamKind;

/// Longest waits. There is no limit on a whole reply: long answers are healthy.
#[derive(Debug, Clone, Copy)]
pub struct Timeouts {
    /// For a connection.
    pub connect: Duration,
    /// From the request to the reply's head.
    pub first_byte: Duration,
    /// Between two pieces of a reply.
    pub idle: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(10),
            first_byte: Duration::from_secs(600),
            idle: Duration::from_secs(300),
        }
    }
}

/// An upstream that could not be set up or did not answer. No message holds a key.
#[derive(Debug, thiserror::Error)]
pub enum UpstreamError {
    #[error(transparent)]
    Url(#[from] InvalidUrl),
    #[error("the upstream's API key is not usable in a header: it has control characters or is not ASCII")]
    Key,
    #[error("the certificates of upstream_ca_file are not usable: {0}")]
    Authorities(String),
    #[error("the https client could not be made: {0}")]
    Tls(String),
    #[error(
        "the upstream at {upstream} cannot be reached: {cause}. Check that it runs and that upstream_base_url is right"
    )]
    Unreachable { upstream: String, cause: String },
    #[error("the upstream at {upstream} did not begin to answer within {limit:?}")]
    FirstByteTimeout { upstream: String, limit: Duration },
    #[error("the upstream at {upstream} broke off before it answered: {cause}")]
    Broken { upstream: String, cause: String },
    #[error("the upstream at {upstream} answers {status} and points {to}. lego follows no redirect")]
    Redirect { upstream: String, status: StatusCode, to: String },
    #[error(
        "the proxy of the environment variable {variable} cannot be used: {why}. Correct it, or unset it for lego"
    )]
    Proxy { variable: &'static str, why: String },
}

impl UpstreamError {
    /// True if it was a matter of time.
    #[must_use]
    pub const fn is_timeout(&self) -> bool {
        matches!(self, Self::FirstByteTimeout { .. })
    }

    /// True if another try may end otherwise. Whoever let a whole first-byte limit pass is not asked again.
    #[must_use]
    pub const fn may_pass(&self) -> bool {
        !matches!(self, Self::FirstByteTimeout { .. } | Self::Redirect { .. })
    }

    /// For programs: the code of the answer to a call that ends with it.
    #[must_use]
    pub const fn code(&self) -> &'static str {
        match self {
            Self::FirstByteTimeout { .. } => "upstream_timeout",
            Self::Redirect { .. } => "upstream_redirect",
            _ => "upstream_unreachable",
        }
    }
}

/// Head and body of a reply.
#[derive(Debug)]
pub struct UpstreamReply {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: UpstreamBody,
}

/// What answers model calls.
#[derive(Debug)]
pub struct Upstream {
    kind: UpstreamKind,
    transport: Transport,
    key: Option<ApiKey>,
    timeouts: Timeouts,
    refusals: Refusals,
    /// `None`: expert routing is not captured.
    routing_hint: Option<RoutingHint>,
    probe: ProbeState<Capabilities>,
    native_probe: ProbeState<Native>,
    streams_probe: ProbeState<TokenStreams>,
    silence: Silence,
    pub(super) responses: Responses,
}

#[derive(Debug)]
enum Transport {
    Http {
        base: BaseUrl,
        pool: Pool,
    },
    Reqwest {
        base: BaseUrl,
        client: reqwest::Client,
        /// The variable that names the proxy that is used.
        proxy: Option<&'static str>,
    },
    InProcess(Router),
}

impl Upstream {
    /// An upstream at a URL. `key` is the API key's value.
    ///
    /// # Errors
    /// [`UpstreamError`] when the URL or the key is not usable.
    pub fn http(
        base_url: &str,
        kind: UpstreamKind,
        key: Option<&str>,
        timeouts: Timeouts,
    ) -> Result<Self, UpstreamError> {
        Self::http_trusting(base_url, kind, key, timeouts, None)
    }

    /// An upstream at a URL whose certificate may also be signed by those of `authorities`, a PEM text, besides
    /// the ones that the system trusts.
    ///
    /// # Errors
    /// [`UpstreamError`] when the URL, the key or the certificates are not usable.
    pub fn http_trusting(
        base_url: &str,
        kind: UpstreamKind,
        key: Option<&str>,
        timeouts: Timeouts,
        authorities: Option<&[u8]>,
    ) -> Result<Self, UpstreamError> {
        let base = BaseUrl::parse(base_url)?;
        let key = key.map(|key| ApiKey::new(kind, key)).transpose()?;
        let authorities = authorities.map(certificates).transpose()?.unwrap_or_default();
        let proxy = environment::proxy_for(&base, environment::variable)?;
        let transport = if base.is_https() || proxy.is_some() {
            // A provider may have been installed already: any will do.
            let _ = rustls::crypto::ring::default_provider().install_default();
            let mut builder = reqwest::Client::builder()
                .tcp_nodelay(true)
                .connect_timeout(timeouts.connect)
                .redirect(reqwest::redirect::Policy::none())
                .tls_certs_merge(authorities)
                // It would read the environment again, and otherwise.
                .no_proxy();
            let variable = proxy.as_ref().map(|found| found.variable);
            if let Some(found) = proxy {
                builder = builder.proxy(found.proxy);
            }
            let client = builder.build().map_err(|error| UpstreamError::Tls(chain(&error)))?;
            Transport::Reqwest { base, client, proxy: variable }
        } else {
            let (host, port) = base.host_port();
            let pool = Pool::new(host, port, timeouts.connect);
            Transport::Http { pool, base }
        };
        Ok(Self {
            kind,
            transport,
            key,
            timeouts,
            refusals: Refusals::default(),
            routing_hint: Some(RoutingHint::default()),
            probe: ProbeState::default(),
            native_probe: ProbeState::default(),
            streams_probe: ProbeState::default(),
            silence: Silence::default(),
            responses: Responses::default(),
        })
    }

    /// The embedded engine in this process.
    #[must_use]
    pub fn in_process(router: Router, timeouts: Timeouts) -> Self {
        Self {
            kind: UpstreamKind::Embedded,
            transport: Transport::InProcess(router),
            key: None,
            timeouts,
            refusals: Refusals::default(),
            routing_hint: Some(RoutingHint::default()),
            probe: ProbeState::default(),
            native_probe: ProbeState::default(),
            streams_probe: ProbeState::default(),
            silence: Silence::default(),
            responses: Responses::default(),
        }
    }

    /// The same, with what is known of the shape of its expert routing; `None`: routing is not captured.
    #[must_use]
    pub fn with_routing_hint(mut self, hint: Option<RoutingHint>) -> Self {
        self.routing_hint = hint;
        self
    }

    /// What is known of the shape of its expert routing; `None`: routing is not captured.
    #[must_use]
    pub const fn routing_hint(&self) -> Option<RoutingHint> {
        self.routing_hint
    }

    /// Which engine it is.
    #[must_use]
    pub const fn kind(&self) -> UpstreamKind {
        self.kind
    }

    #[cfg(test)]
    pub(super) const fn probe_state_mut(&mut self) -> &mut ProbeState<Capabilities> {
        &mut self.probe
    }

    pub(super) const fn probe_state(&self) -> &ProbeState<Capabilities> {
        &self.probe
    }

    pub(super) const fn native_state(&self) -> &ProbeState<Native> {
        &self.native_probe
    }

    pub(super) const fn streams_state(&self) -> &ProbeState<TokenStreams> {
        &self.streams_probe
    }

    pub(super) const fn silence(&self) -> &Silence {
        &self.silence
    }

    /// Its waits.
    #[must_use]
    pub const fn timeouts(&self) -> Timeouts {
        self.timeouts
    }

    /// What calls for this model of its own may have added: less for a while after it refused some of it.
    #[must_use]
    pub fn additions(&self, model: &str) -> Additions {
        self.refusals.taken(model, Instant::now())
    }

    /// Remembers that calls for this model of its own are answered with no more than this added.
    pub fn set_additions(&self, model: &str, taken: Additions) {
        if self.refusals.set(model, taken, Instant::now()) {
            tracing::warn!(
                upstream = %self.name(),
                model,
                "the upstream refuses what lego adds to requests for capture (return_token_ids, logprobs, …): it is \
                 asked without, and nothing can be trained on. If it is not a vLLM or SGLang server, set \
                 upstream_kind = \"openai\""
            );
        }
    }

    /// How it is called in messages.
    #[must_use]
    pub fn name(&self) -> String {
        match &self.transport {
            Transport::Http { base, .. } | Transport::Reqwest { base, .. } => base.to_string(),
            Transport::InProcess(_) => "embedded".to_owned(),
        }
    }

    /// Where it is and how it is reached, for people.
    #[must_use]
    pub fn place(&self) -> String {
        match &self.transport {
            Transport::Http { base, .. } => format!("{base} directly"),
            Transport::Reqwest { base, proxy: Some(name), .. } => {
                format!("{base} through the proxy of {name}")
            }
            Transport::Reqwest { base, .. } => format!("{base} directly"),
            Transport::InProcess(_) => self.name(),
        }
    }

    /// `text` with the upstream's key blacked out, should the upstream have repeated it.
    #[must_use]
    pub fn without_key(&self, text: Bytes) -> Bytes {
        match &self.key {
            Some(key) => key.redact(text),
            None => text,
        }
    }

    /// Sends a request to `route` (such as `/chat/completions`) with the client's end-to-end headers and the
    /// upstream's own key.
    ///
    /// # Errors
    /// [`UpstreamError`] when no reply began.
    pub async fn send(
        &self,
        method: Method,
        route: &str,
        query: Option<&str>,
        client_headers: &HeaderMap,
        body: Bytes,
    ) -> Result<UpstreamReply, UpstreamError> {
        let limit = self.timeouts.first_byte;
        let exchange = self.exchange(method, route, query, client_headers, body);
        match tokio::time::timeout(limit, exchange).await {
            Ok(Ok(UpstreamReply { status, headers, .. }))
                if status.is_redirection() && status != StatusCode::NOT_MODIFIED =>
            {
                let name = self.name();
                let to = Bytes::from(redirect::advice(&name, route, &headers));
                let to = String::from_utf8_lossy(&self.without_key(to)).into_owned();
                Err(UpstreamError::Redirect { upstream: name, status, to })
            }
            Ok(Ok(UpstreamReply { status, mut headers, body })) => {
                let body = body.unpacked(Unpacker::of(&mut headers));
                Ok(UpstreamReply { status, headers, body })
            }
            Ok(Err(error)) => Err(error),
            Err(_) => Err(UpstreamError::FirstByteTimeout { upstream: self.name(), limit }),
        }
    }

    async fn exchange(
        &self,
        method: Method,
        route: &str,
        query: Option<&str>,
        client_headers: &HeaderMap,
        body: Bytes,
    ) -> Result<UpstreamReply, UpstreamError> {
        let broken = |cause: String| UpstreamError::Broken { upstream: self.name(), cause };
        let unreachable = |cause: String| UpstreamError::Unreachable { upstream: self.name(), cause };
        let mut headers = forward_request_headers(client_headers);
        if let Some(key) = &self.key {
            key.insert_into(&mut headers);
        }
        key::complete(self.kind, &mut headers);
        let query = query.map(without_key_parameters).filter(|query| !query.is_empty());
        match &self.transport {
            Transport::Http { base, pool } => {
                let uri = base.join(route, query.as_deref()).map_err(|error| broken(error.to_string()))?;
                let path = uri.path_and_query().map_or("/", |path| path.as_str());
                let origin: Uri = path.parse().map_err(|_| broken("the URL's path is broken".into()))?;
                let mut request = Request::new(body);
                *request.method_mut() = method;
                *request.uri_mut() = origin;
                *request.headers_mut() = headers;
                let host = HeaderValue::from_str(base.authority())
                    .map_err(|_| broken("the URL's host is broken".into()))?;
                request.headers_mut().insert(header::HOST, host);
                let response = pool.send(request).await.map_err(|error| match error {
                    PoolError::Connect(_) | PoolError::ConnectTimeout(_) => unreachable(error.to_string()),
                    _ => broken(error.to_string()),
                })?;
                let (head, body) = response.into_parts();
                let body = UpstreamBody::pooled(body);
                Ok(UpstreamReply { status: head.status, headers: head.headers, body })
            }
            Transport::Reqwest { base, client, .. } => {
                let uri = base.join(route, query.as_deref()).map_err(|error| broken(error.to_string()))?;
                let request = client.request(method, uri.to_string()).headers(headers).body(body);
                let response = request.send().await.map_err(|error| {
                    let is_connect = error.is_connect();
                    let cause = chain(&error.without_url());
                    if is_connect { unreachable(cause) } else { broken(cause) }
                })?;
                let (head, body) = http::Response::<reqwest::Body>::from(response).into_parts();
                let body = UpstreamBody::other(body);
                Ok(UpstreamReply { status: head.status, headers: head.headers, body })
            }
            Transport::InProcess(router) => {
                let query = query.map_or(String::new(), |query| format!("?{query}"));
                let mut request = Request::new(axum::body::Body::from(body));
                *request.method_mut() = method;
                *request.uri_mut() = format!("{}{query}", below("/v1", route))
                    .parse()
                    .map_err(|_| broken("the URL's query is broken".into()))?;
                *request.headers_mut() = headers;
                let response = match router.clone().oneshot(request).await {
                    Ok(response) => response,
                    Err(never) => match never {},
                };
                let (head, body) = response.into_parts();
                let body = UpstreamBody::other(body);
                Ok(UpstreamReply { status: head.status, headers: head.headers, body })
            }
        }
    }
}

fn certificates(pem: &[u8]) -> Result<Vec<reqwest::Certificate>, UpstreamError> {
    let certificates = reqwest::Certificate::from_pem_bundle(pem);
    let certificates = certificates.map_err(|error| UpstreamError::Authorities(chain(&error)))?;
    if certificates.is_empty() {
        let why = "there is no PEM certificate in it (-----BEGIN CERTIFICATE-----)";
        return Err(UpstreamError::Authorities(why.to_owned()));
    }
    Ok(certificates)
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(": ");
        text.push_str(&error.to_string());
        source = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn g04_no_key_is_in_a_debug_output() {
        let key = Some("sk-canary");
        let upstream = Upstream::http("http://127.0.0.1:1", UpstreamKind::Openai, key, Timeouts::default());
        let upstream = upstream.expect("upstream");
        assert_eq!(upstream.without_key(Bytes::from_static(b"sk-canary")), "[redacted]");
        assert!(!format!("{upstream:?}").contains("canary"));
    }

    #[test]
    fn certificates_that_are_none_are_refused_before_anything_starts() {
        let with = |pem: &[u8]| {
            let url = "https://engine.example";
            Upstream::http_trusting(url, UpstreamKind::Vllm, None, Timeouts::default(), Some(pem))
        };
        for pem in [
            "",
            "not a certificate",
            "-----BEGIN CERTIFICATE-----\n!!!\n-----END CERTIFICATE-----\n",
            "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
        ] {
            let error = with(pem.as_bytes()).expect_err(pem);
            assert!(matches!(error, UpstreamError::Authorities(_) | UpstreamError::Tls(_)), "{pem}: {error}");
        }
    }
}
