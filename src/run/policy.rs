//! The policy as an upstream of the proxy: the embedded engine behind its router, or a server over HTTP.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;

use super::RunError;
use crate::config::{self, Config, Relay};
use crate::engine::{Engine, EngineOptions};
use crate::model::Model;
use crate::proxy::{Renderer, VersionSource};
use crate::record::PolicyVersion;
use crate::serve::{self, ServeState};
use crate::text::parsers::Forms;
use crate::text::{ChatTemplate, Tokenizer};
use crate::trajectory::IdTexts;
use crate::upstream::{Timeouts, Upstream};

/// What answers the trials' calls.
pub struct ServedPolicy {
    pub upstream: Upstream,
    /// Its name there.
    pub model_name: String,
    /// The version that it samples with now.
    pub version: VersionSource,
    /// Renders its prompts, where it is asked with tokens.
    pub renderer: Option<Arc<Renderer>>,
    /// Texts of its ids.
    pub texts: Option<IdTexts>,
}

/// An embedded engine.
pub(super) struct Embedded {
    pub engine: Engine,
    pub router: Router,
    /// By which it serves the model.
    pub name: String,
    tokenizer: Arc<Tokenizer>,
}

/// Starts the embedded engine with `model`, which was loaded from `folder`, as version `first`.
///
/// # Errors
/// A tokenizer or template that cannot be read, options that cannot work.
pub fn embedded(
    config: &Config,
    folder: &Path,
    model: Arc<Model>,
    first: PolicyVersion,
) -> Result<(Engine, ServedPolicy), RunError> {
    let Embedded { engine, router, name: model_name, tokenizer } = engine(config, folder, model, first)?;
    let version = {
        let engine = engine.clone();
        Arc::new(move || engine.version())
    };
    let upstream = Upstream::in_process(router, timeouts(&config.proxy));
    let renderer = (config.proxy.relay == Relay::TokenIn)
        .then(|| Renderer::configured(config, "proxy.model_path", folder).map(Arc::new))
        .transpose()?;
    let texts = Some(IdTexts::of_embedded(tokenizer));
    Ok((engine, ServedPolicy { upstream, model_name, version, renderer, texts }))
}

/// The engine alone, with its router.
pub(super) fn engine(
    config: &Config,
    folder: &Path,
    model: Arc<Model>,
    first: PolicyVersion,
) -> Result<Embedded, RunError> {
    let tokenizer = Tokenizer::load(folder).map_err(RunError::because("loading the tokenizer"))?;
    let tokenizer = Arc::new(tokenizer);
    let template = ChatTemplate::load(folder).map_err(RunError::because("loading the chat template"))?;
    let policy = &config.policy;
    let options = EngineOptions {
        max_batch: policy.max_batch,
        cache_slots: policy.max_batch.saturating_mul(2),
        max_context: policy.max_context_tokens.unwrap_or(model.config().max_position_embeddings),
        threads: config.training.kernel_threads(),
        first_version: first,
        ..EngineOptions::for_model(&model)
    };
    let engine = Engine::start(model, options).map_err(RunError::because("starting the embedded engine"))?;
    let folder_name = || folder.file_name().map(|name| name.to_string_lossy().into_owned());
    let name = policy.model_name.clone().or_else(folder_name).unwrap_or_else(|| "policy".to_owned());
    let forms = Forms::of_template(template.source());
    let names = vec![name.clone()];
    let state = ServeState::new(engine.clone(), Arc::clone(&tokenizer), Arc::new(template), names, forms);
    Ok(Embedded { engine, router: serve::router(state), name, tokenizer })
}

/// The server at the configured base URL, with its key.
///
/// # Errors
/// A key variable that is not set, a CA file that cannot be read, a URL that is none.
pub fn http_upstream(config: &Config) -> Result<Upstream, RunError> {
    Ok(Upstream::from_config(config, &config.proxy.server(), &BTreeMap::new())?)
}

fn timeouts(settings: &config::Proxy) -> Timeouts {
    Timeouts {
        connect: Duration::from_secs(settings.connect_timeout_secs),
        first_byte: Duration::from_secs(settings.first_byte_timeout_secs),
        idle: Duration::from_secs(settings.idle_timeout_secs),
    }
}
