//! The capture proxy: routes, sessions, relays.
//!
//! The path of a request is one list of layers ([`Proxy::router`]); behind it [`call`] reads the request
//! ([`face`]: the client's protocol), finds the session ([`identify`]) and the upstream
//! ([`routes`]: by the model's name), has the request edited (room `upstream`), sends
//! it, again if need be ([`retry`]), and relays the reply: [`relay`] for a stream, [`whole`] for a body. [`recorder`] holds what is captured of a call and writes it, [`verdict`] says whether it can train.
//! [`local_ids`] fills in ids that a reply does not carry, where that is asked for.
//! [`rejoin`] has a call run on for a client that may come back.
//!
//! Invariants:
//! - The event after which a client may act on a call, or the last byte of a body, leaves only after the call's
//!   records are durable (law 4). A store that fails turns into an error for the client, never into silence.
//! - A client gets the engine's bytes, less what lego itself caused (law 5). Capture never breaks a reply: what
//!   cannot be read is forwarded, and the record says why it is not trainable.
//! - Every call that was sent upstream leaves a record, whoever goes away first.
//! - A call belongs to the session that its door, path or key names; headers choose one only stand-alone.
//! - Nothing is read from the upstream ahead of what the client takes: a slow client slows its own call only. A call
//!   whose client left is read on for its grace, and kept as its record keeps it.
//! - A client that takes nothing of its reply holds neither its call nor its session's end up ([`stall`]).
//! - A route's limits hold for model calls and counts of tokens; its key goes to no other.
//! - The upstream's key is in no reply, record, error or log line.

mod admin;
mod body;
mod call;
mod columns;
mod count;
mod face;
mod failures;
mod files;
mod gate;
mod guard;
mod identify;
mod kept;
mod limits;
mod local_ids;
mod lull;
mod measures;
mod models;
mod options;
mod probe;
mod received;
mod recorder;
mod rejoin;
mod relay;
mod reply;
mod responses;
mod retry;
mod routes;
mod rows;
mod server;
mod session;
mod sessions;
mod stall;
mod stop;
mod store;
mod tape;
mod token_in;
mod unread;
mod verdict;
mod whole;

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::DefaultBodyLimit;
use axum::middleware;
use axum::routing::{get, post};
use http::{HeaderMap, Uri};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tower::ServiceBuilder;

use crate::record::{CallSink, ClientApi, SessionId};
use crate::upstream::Upstream;

pub use files::{FileShare, raise_open_files, too_few_files};
pub use local_ids::{LocalTokenizer, LocalTokenizers};
pub use lull::settle_heaps;
pub use options::{Mode, ProxyOptions, RenderMetrics};
pub use routes::RouteOptions;
pub use server::{ListenError, listen, listen_on};
pub use session::{SessionHandle, SessionResult, SessionSampling, SessionSpec, VersionSource};
pub use token_in::Renderer;

use identify::Door;
use session::Session;
use sessions::Sessions;

/// A session that cannot be opened or served.
#[derive(Debug, thiserror::Error)]
pub enum ProxyError {
    #[error("session {0} is open already")]
    SessionExists(SessionId),
    #[error("there is no open session {0}")]
    NoSuchSession(SessionId),
    #[error("the proxy is shutting down")]
    ShuttingDown,
}

/// The path of every request, outermost layer first.
fn layered(routes: Router<Shared>, state: Shared) -> Router {
    let layers = ServiceBuilder::new()
        // A bug answers 500 in the client's protocol instead of closing the connection.
        .layer(middleware::from_fn(reply::caught))
        // Web pages and rebound names do not get in.
        .layer(middleware::from_fn_with_state(state.clone(), guard::foreign))
        // axum's 2 MiB would cut long sessions off: the limit is the configuration's, told in the client's protocol.
        .layer(DefaultBodyLimit::disable());
    routes
        .fallback(models::not_found)
        .method_not_allowed_fallback(models::not_found)
        .with_state(state)
        .layer(layers)
}

/// The routes that a harness calls.
fn model_routes(base: &str) -> Router<Shared> {
    let at = |route: &str| format!("{base}{route}");
    Router::new()
        .route(&at("/chat/completions"), call::route(ClientApi::OpenaiChat))
        .route(&at("/completions"), call::route(ClientApi::OpenaiCompletions))
        .route(&at("/responses"), call::route(ClientApi::OpenaiResponses).get(models::no_websocket))
        .route(&at("/messages"), call::route(ClientApi::AnthropicMessages))
        .route(&at("/messages/count_tokens"), post(count::count_tokens))
        .route(&at("/models"), get(models::models))
}

/// SGLang's native protocol, whose route has no version.
fn native_route(base: &str) -> Router<Shared> {
    Router::new().route(&format!("{base}/generate"), call::route(ClientApi::SglangGenerate))
}

/// What a handler gets.
#[derive(Clone)]
struct Shared {
    inner: Arc<Inner>,
    door: Door,
}

/// The proxy. Clones share it.
#[derive(Clone)]
pub struct Proxy {
    inner: Arc<Inner>,
}

struct Inner {
    options: ProxyOptions,
    sink: Arc<dyn CallSink>,
    routes: routes::Routes,
    sessions: Sessions,
    /// Copies of replies whose calls have no record yet.
    tapes: Arc<tape::Tapes>,
    responses: responses::Responses,
    gate: gate::Gate,
    left: rejoin::LeftCount,
    measures: measures::Measures,
    failures: failures::Failures,
    /// Permits for calls in flight.
    slots: Arc<tokio::sync::Semaphore>,
    /// How many there are of them, and why.
    share: files::FileShare,
    /// For connections of clients.
    room: files::Room,
    /// For request bodies.
    bodies: body::Bodies,
    /// Calls that are running or not durable yet, and listeners.
    running: tokio_util::task::TaskTracker,
    /// No new calls.
    closing: CancellationToken,
    /// Running calls end.
    abort: CancellationToken,
}

impl Proxy {
    /// A proxy in front of `upstream` that writes to `sink`. What it counts goes to the metrics recorder that the process
    /// has installed by then.
    #[must_use]
    pub fn new(options: ProxyOptions, sink: Arc<dyn CallSink>, upstream: Upstream) -> Self {
        Self::with_routes(options, sink, Some(Arc::new(upstream)), Vec::new())
    }

    /// A proxy in front of several upstreams. `default` answers calls for models that no route has; without it they
    /// get 404.
    #[must_use]
    pub fn with_routes(
        options: ProxyOptions,
        sink: Arc<dyn CallSink>,
        default: Option<Arc<Upstream>>,
        routes: Vec<RouteOptions>,
    ) -> Self {
        let upstreams = usize::from(default.is_some()) + routes.len();
        let share = files::FileShare::of(options.open_files, options.max_in_flight, upstreams);
        if let Some(warning) = share.warning(options.max_in_flight) {
            tracing::warn!("{warning}");
        }
        let routes = routes::Routes::new(&options, default, routes);
        let slots = Arc::new(tokio::sync::Semaphore::new(share.calls));
        let inner = Inner {
            sink,
            tapes: tape::Tapes::new(options.spill.clone(), options.capture_buffer_bytes),
            routes,
            sessions: Sessions::new(options.session_idle),
            left: rejoin::LeftCount::default(),
            responses: responses::Responses::default(),
            gate: gate::Gate::default(),
            measures: measures::Measures::default(),
            failures: failures::Failures::default(),
            slots,
            room: files::Room::new(&share),
            share,
            bodies: body::Bodies::new(
                options.max_body_bytes,
                options.large_bodies_bytes,
                options.admission_wait,
                options.client_stall,
            ),
            running: tokio_util::task::TaskTracker::new(),
            closing: CancellationToken::new(),
            abort: CancellationToken::new(),
            options,
        };
        Self { inner: Arc::new(inner) }
    }

    /// The public listener's routes.
    pub fn router(&self) -> Router {
        let state = Shared { inner: Arc::clone(&self.inner), door: Door::Public };
        let routes = Router::new()
            .merge(model_routes("/v1"))
            .merge(model_routes("/sessions/{session}/v1"))
            .merge(native_route(""))
            .merge(native_route("/sessions/{session}"))
            .route("/sessions/{session}/end", post(identify::end))
            .route("/metrics", get(models::metrics))
            // What is above needs the client token where there is one; what is below is for load balancers.
            .route_layer(middleware::from_fn_with_state(state.clone(), guard::token))
            .route("/healthz", get(models::healthz))
            .route("/readyz", get(models::readyz));
        layered(routes, state)
    }

    /// The routes of one session's own listener: its model routes and nothing else.
    fn session_router(&self, session: Arc<Session>) -> Router {
        let state = Shared { inner: Arc::clone(&self.inner), door: Door::Session(session) };
        layered(model_routes("/v1").merge(native_route("")), state)
    }

    /// What connections get for which there is no room: 429, but for health and metrics on the public listener.
    fn surplus_router(&self, door: Door) -> Router {
        let is_public = matches!(door, Door::Public);
        let state = Shared { inner: Arc::clone(&self.inner), door };
        let limit = self.inner.options.max_body_bytes;
        let routes = if is_public {
            Router::new()
                .route("/metrics", get(models::metrics))
                .route_layer(middleware::from_fn_with_state(state.clone(), guard::token))
                .route("/healthz", get(models::healthz))
                .route("/readyz", get(models::readyz))
        } else {
            Router::new()
        };
        let routes = routes
            .fallback(move |uri: Uri, headers: HeaderMap, body: Body| {
                files::no_room(limit, uri, headers, body)
            })
            .with_state(state.clone());
        let layers = ServiceBuilder::new()
            .layer(middleware::from_fn(reply::caught))
            .layer(middleware::map_response(files::last))
            .layer(middleware::from_fn_with_state(state, guard::host));
        routes.layer(layers)
    }

    /// Opens a session.
    ///
    /// # Errors
    /// [`ProxyError`] if its id is taken or the proxy is shutting down.
    pub fn open_session(&self, spec: SessionSpec) -> Result<SessionHandle, ProxyError> {
        if self.inner.closing.is_cancelled() {
            return Err(ProxyError::ShuttingDown);
        }
        let id = spec.session_id.clone();
        let session = Session::new(spec, true, self.inner.abort.child_token());
        let session = self.inner.sessions.open(session).ok_or(ProxyError::SessionExists(id))?;
        Ok(SessionHandle::new(Arc::clone(&self.inner), session))
    }

    /// Serves a session's own listener (made inside its sandbox) until the session is closed or the proxy shuts down.
    ///
    /// # Errors
    /// [`ProxyError::NoSuchSession`] if it is not open.
    pub async fn serve_session_listener(
        &self,
        listener: TcpListener,
        session: &SessionId,
    ) -> Result<(), ProxyError> {
        let found = self.inner.sessions.get(session);
        let session = found.ok_or_else(|| ProxyError::NoSuchSession(session.clone()))?;
        let closed = session.closed();
        let stall = self.inner.options.client_stall;
        let surplus = self.surplus_router(Door::Session(Arc::clone(&session)));
        let routers = server::Routers { usual: self.session_router(session), surplus };
        server::serve(listener, routers, &self.inner.room, closed.clone(), closed, stall).await;
        Ok(())
    }

    /// Serves the public listener until [`Proxy::shutdown`].
    pub async fn serve(&self, listener: TcpListener) {
        self.serve_all(vec![listener]).await;
    }

    /// Serves several public listeners until [`Proxy::shutdown`].
    pub async fn serve_all(&self, listeners: Vec<TcpListener>) {
        let stall = self.inner.options.client_stall;
        let routers = server::Routers { usual: self.router(), surplus: self.surplus_router(Door::Public) };
        let serve = |listener| {
            let (closing, abort) = (self.inner.closing.clone(), self.inner.abort.clone());
            server::serve(listener, routers.clone(), &self.inner.room, closing, abort, stall)
        };
        let served = futures_util::future::join_all(listeners.into_iter().map(serve));
        tokio::select! {
            _ = served => {}
            () = self.inner.sessions.keep_tidy() => {}
            () = lull::give_back(&self.inner.slots, self.inner.share.calls) => {}
        }
    }

    /// Refuses new calls, gives running ones `shutdown_grace`, then ends them with an error; returns when every call
    /// is durable.
    pub async fn shutdown(&self) {
        self.inner.closing.cancel();
        self.inner.running.close();
        let grace = self.inner.options.shutdown_grace;
        let is_quiet = tokio::time::timeout(grace, self.inner.running.wait()).await.is_ok();
        self.inner.abort.cancel();
        if !is_quiet {
            self.inner.running.wait().await;
        }
    }
}
