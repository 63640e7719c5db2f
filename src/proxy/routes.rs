//! Which upstream answers a call: by the name of the model that it asks for.
//!
//! A trainer's sessions get the policy whatever name they ask for, except for the names of routes of kind `aux`, and
//! in a session that was opened for a judge or a teacher those of its kind: what runs in a trial's sandbox does not
//! reach the judge that grades it, nor a teacher that would do its task.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;

use super::Inner;
use super::limits::Limits;
use super::local_ids::{LocalTokenizer, LocalTokenizers};
use super::options::{Mode, ProxyOptions, Retries};
use super::session::{Session, SessionSampling};
use super::token_in::Renderer;
use crate::config::{self, Config, RouteKind, UpstreamResponses};
use crate::protocol::error::{ApiError, ErrorType};
use crate::record::{CallKind, ClientApi};
use crate::upstream::dialect::{SamplingPlan, Wanted};
use crate::upstream::{ConnectError, Upstream};

/// Where calls for some model names go. What is `None` is as for calls without a route.
#[derive(Debug, Clone)]
pub struct RouteOptions {
    /// For metrics and messages.
    pub name: String,
    /// Model names that clients ask for.
    pub models: Vec<String>,
    pub upstream: Arc<Upstream>,
    /// The upstream's name for the model; `None`: what the client asked for.
    pub upstream_model: Option<String>,
    pub kind: Option<CallKind>,
    pub sampling: Option<SessionSampling>,
    pub wanted: Option<Wanted>,
    pub max_concurrent: Option<usize>,
    pub requests_per_minute: Option<u32>,
    pub requests_per_second: Option<u32>,
    /// Longest wait for these limits.
    pub admission_wait: Option<Duration>,
    pub max_retries: Option<u16>,
    /// Longest time of a whole call.
    pub total_timeout: Option<Option<Duration>>,
    /// Variable that holds the upstream's key, for messages.
    pub upstream_key_env: Option<String>,
    /// Fills in the ids of replies that carry none.
    pub local_tokenizer: Option<Arc<LocalTokenizer>>,
    /// Its model is asked with tokens; this renders its prompts.
    pub renderer: Option<Arc<Renderer>>,
}

impl RouteOptions {
    /// A route that differs by its upstream alone.
    #[must_use]
    pub fn new(name: impl Into<String>, upstream: Arc<Upstream>) -> Self {
        let name = name.into();
        Self {
            models: vec![name.clone()],
            name,
            upstream,
            upstream_model: None,
            kind: None,
            sampling: None,
            wanted: None,
            max_concurrent: None,
            requests_per_minute: None,
            requests_per_second: None,
            admission_wait: None,
            max_retries: None,
            total_timeout: None,
            upstream_key_env: None,
            local_tokenizer: None,
            renderer: None,
        }
    }

    /// The routes that a configuration has. `shared` is the upstream of `proxy`, for routes without one of their own;
    /// `engines` are the embedded engines, by the folder of their model; `tokenizers` those that were loaded.
    ///
    /// # Errors
    /// [`ConnectError`] names the key of a server that cannot be used.
    pub fn from_config(
        config: &Config,
        shared: Option<&Arc<Upstream>>,
        engines: &BTreeMap<PathBuf, Router>,
        tokenizers: &LocalTokenizers,
    ) -> Result<Vec<Self>, ConnectError> {
        let proxy = &config.proxy;
        let mut routes = Vec::new();
        for (name, route) in &proxy.routes {
            let server = proxy.server_of(name, route);
            let upstream = match shared.filter(|_| !route.has_own_server()) {
                Some(shared) => Arc::clone(shared),
                None => Arc::new(Upstream::from_config(config, &server, engines)?),
            };
            let local = route.local_tokenizer(name, proxy).map(|(_, folder)| folder);
            let renderer = tokenizers.renderer(&server, local);
            let seconds = Duration::from_secs;
            routes.push(Self {
                models: route.model_names(name),
                upstream_model: route.upstream_model.clone(),
                kind: route.kind.map(|kind| match kind {
                    RouteKind::Policy => CallKind::Policy,
                    RouteKind::Aux => CallKind::Aux,
                    RouteKind::Judge => CallKind::Judge,
                    RouteKind::Teacher => CallKind::Teacher,
                }),
                sampling: route.pinned_sampling.as_ref().map(SessionSampling::from),
                wanted: Some(Wanted {
                    token_ids: route.capture_token_ids.unwrap_or(proxy.capture_token_ids),
                    logprobs: route.capture_logprobs.unwrap_or(proxy.capture_logprobs),
                }),
                max_concurrent: route.max_concurrent,
                requests_per_minute: route.requests_per_minute,
                requests_per_second: route.requests_per_second,
                admission_wait: route.admission_wait_secs.map(seconds),
                max_retries: route.max_retries,
                total_timeout: route.total_timeout_secs.map(|secs| (secs > 0).then(|| seconds(secs))),
                upstream_key_env: server.api_key_env,
                local_tokenizer: local.and_then(|folder| tokenizers.get(folder)),
                renderer,
                ..Self::new(name.clone(), upstream)
            });
        }
        Ok(routes)
    }
}

impl From<&config::PinnedSampling> for SessionSampling {
    fn from(pinned: &config::PinnedSampling) -> Self {
        Self::Pinned { temperature: pinned.temperature, seed: pinned.seed }
    }
}

/// A route as calls see it.
pub(super) struct Route {
    /// `None`: the default.
    pub(super) name: Option<String>,
    pub(super) upstream: Arc<Upstream>,
    upstream_model: Option<String>,
    pub(super) kind: Option<CallKind>,
    sampling: Option<SessionSampling>,
    pub(super) wanted: Wanted,
    pub(super) limits: Limits,
    pub(super) retries: Retries,
    pub(super) total_timeout: Option<Duration>,
    pub(super) upstream_key_env: Option<String>,
    /// The key of the configuration that names the key's variable.
    pub(super) key_of_key: String,
    pub(super) local_tokenizer: Option<Arc<LocalTokenizer>>,
    pub(super) renderer: Option<Arc<Renderer>>,
}

impl Route {
    fn new(options: &ProxyOptions, name: Option<String>, route: RouteOptions) -> Self {
        let table = name.as_ref().map_or_else(|| "proxy".to_owned(), |name| format!("proxy.routes.{name}"));
        let wait = route.admission_wait.unwrap_or(options.admission_wait);
        Self {
            key_of_key: format!("{table}.upstream_api_key_env"),
            limits: Limits::new(table, &route, wait),
            name,
            wanted: route.wanted.unwrap_or(options.wanted),
            retries: Retries { most: route.max_retries.unwrap_or(options.retries.most), ..options.retries },
            total_timeout: route.total_timeout.unwrap_or(options.total_timeout),
            upstream: route.upstream,
            upstream_model: route.upstream_model,
            kind: route.kind,
            sampling: route.sampling,
            upstream_key_env: route.upstream_key_env,
            local_tokenizer: route.local_tokenizer,
            renderer: route.renderer,
        }
    }

    /// True if its calls may be the policy's: a trainer pauses them, says their weights' version and pins their
    /// sampling.
    pub(super) const fn is_policy(&self) -> bool {
        matches!(self.kind, None | Some(CallKind::Policy | CallKind::Unknown))
    }

    /// The upstream's model for a requested name; `None`: the name passes through.
    pub(super) fn upstream_model<'a>(
        &'a self,
        options: &'a ProxyOptions,
        requested: &str,
    ) -> Option<&'a str> {
        match self.name {
            None => options.upstream_model(requested),
            Some(_) => self.upstream_model.as_deref(),
        }
    }

    /// True if some calls of Responses may pass to the upstream as they are.
    pub(super) fn may_pass_responses(&self) -> bool {
        match self.upstream.responses_choice() {
            UpstreamResponses::Translate => false,
            UpstreamResponses::PassThrough => true,
            // Ids of texts are those of chat requests.
            UpstreamResponses::Auto => self.local_tokenizer.is_none(),
        }
    }

    /// True if a call of Responses for this model is passed to the upstream as it is: that has the route, or nobody
    /// knows yet.
    pub(super) fn passes_responses(&self, options: &ProxyOptions, requested: &str) -> bool {
        let model = self.upstream_model(options, requested).unwrap_or(requested);
        let is_set = self.upstream.responses_choice() == UpstreamResponses::PassThrough;
        self.may_pass_responses() && (is_set || self.upstream.has_responses(model) != Some(false))
    }

    /// The upstream wrote a response for this model.
    pub(super) fn wrote_response(&self, options: &ProxyOptions, requested: &str) {
        let model = self.upstream_model(options, requested).unwrap_or(requested);
        self.upstream.set_has_responses(model, true);
    }

    /// The weights' version by lego's own clock: the session's trainer's, or what the admin was told last. It is the
    /// policy's.
    pub(super) fn version_now(&self, inner: &Inner, session: &Session) -> Option<String> {
        if !self.is_policy() {
            return None;
        }
        match &session.spec.policy_version {
            Some(version) => Some(version().0.to_string()),
            None => inner.gate.version(),
        }
    }

    /// How a session's call with this index is sampled.
    pub(super) fn plan(&self, session: &Session, index: u64) -> SamplingPlan {
        match self.sampling {
            Some(sampling) => sampling.of_session(&session.spec.session_id).plan(index),
            None if self.is_policy() => session.plan(index),
            None => SamplingPlan::PassThrough,
        }
    }
}

/// All routes of a proxy.
pub(super) struct Routes {
    default: Option<Arc<Route>>,
    /// By names, or beginnings of them.
    by_model: BTreeMap<String, Arc<Route>>,
    /// The same names, in the order in which they are listed.
    models: Vec<String>,
    /// When this proxy began, in seconds since the Unix epoch.
    pub(super) since: u64,
}

impl Routes {
    pub(super) fn new(
        options: &ProxyOptions,
        default: Option<Arc<Upstream>>,
        routes: Vec<RouteOptions>,
    ) -> Self {
        let default = default.map(|upstream| {
            let key_env = options.upstream_key_env.clone();
            let route = RouteOptions {
                upstream_key_env: key_env,
                local_tokenizer: options.local_tokenizer.clone(),
                renderer: options.renderer.clone(),
                ..RouteOptions::new("default", upstream)
            };
            Arc::new(Route::new(options, None, route))
        });
        let (mut by_model, mut models) = (BTreeMap::new(), Vec::new());
        for route in routes {
            let names = route.models.clone();
            let route = Arc::new(Route::new(options, Some(route.name.clone()), route));
            for name in names {
                models.push(name.clone());
                by_model.insert(name, Arc::clone(&route));
            }
        }
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        Self { default, by_model, models, since: since.as_secs() }
    }

    /// What answers names that no route has.
    pub(super) const fn default(&self) -> Option<&Arc<Route>> {
        self.default.as_ref()
    }

    /// The routes that must answer for the proxy to be ready.
    pub(super) fn needed(&self) -> Vec<&Arc<Route>> {
        match &self.default {
            Some(default) => vec![default],
            None => self.models.iter().filter_map(|model| self.by_model.get(model)).collect(),
        }
    }

    /// The routes' model names, and beginnings of names, that a client may ask for. `session`: it is a trainer's.
    pub(super) fn served<'a>(&'a self, inner: &'a Inner, session: Option<&'a Session>) -> Vec<&'a str> {
        let is_served = |model: &&String| {
            self.by_model.get(*model).is_some_and(|route| is_reached(inner, session, route))
        };
        self.models.iter().filter(is_served).map(String::as_str).collect()
    }

    /// The route of a call for this model. `session`: it is a trainer's.
    ///
    /// # Errors
    /// 404, with the names that are served.
    pub(super) fn find(
        &self,
        inner: &Inner,
        api: ClientApi,
        model: Option<&str>,
        session: Option<&Session>,
    ) -> Result<Arc<Route>, ApiError> {
        let named = model.and_then(|model| config::fitting(&self.by_model, model));
        let named = named.filter(|route| is_reached(inner, session, route));
        if let Some(route) = named.or(self.default.as_ref()) {
            return Ok(Arc::clone(route));
        }
        let Some(model) = model else {
            let message = "the request body has no `model` string";
            return Err(ApiError::new(400, ErrorType::InvalidRequest, "bad_request", message));
        };
        let served = self.served(inner, session).join(", ");
        // Clients of either protocol look for its own words.
        let message = match api {
            ClientApi::AnthropicMessages => format!("model: {model}. This proxy serves {served}"),
            _ => format!("The model `{model}` does not exist. This proxy serves {served}"),
        };
        Err(ApiError::new(404, ErrorType::InvalidRequest, "model_not_found", message))
    }
}

fn is_reached(inner: &Inner, session: Option<&Session>, route: &Route) -> bool {
    match (&inner.options.mode, route.kind) {
        (Mode::StandAlone { .. }, _) | (Mode::Trainer { .. }, Some(CallKind::Aux)) => true,
        (Mode::Trainer { .. }, Some(kind @ (CallKind::Judge | CallKind::Teacher))) => {
            session.is_some_and(|session| session.spec.kind == kind)
        }
        (Mode::Trainer { .. }, _) => false,
    }
}
