//! What answers the calls of a proxy that stands alone: the upstream of `proxy`, and those of its routes.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::RunError;
use super::policy::engine;
use crate::config::Config;
use crate::model::Model;
use crate::proxy::{LocalTokenizers, RouteOptions};
use crate::record::PolicyVersion;
use crate::upstream::{ConnectError, Upstream};

/// The upstream of models that no route has, if there is one, and the routes. Embedded engines are started.
///
/// # Errors
/// A key variable that is not set, a server or a model that cannot be used.
pub fn upstreams(
    config: &Config,
    tokenizers: &LocalTokenizers,
) -> Result<(Option<Arc<Upstream>>, Vec<RouteOptions>), RunError> {
    let mut engines = BTreeMap::new();
    for folder in config.embedded_models() {
        let model = Model::load(&folder).map_err(RunError::because("loading a model"))?;
        let embedded = engine(config, &folder, Arc::new(model), PolicyVersion::default())?;
        engines.insert(folder, embedded.router);
    }
    let is_shared = config.proxy.routes.values().any(|route| !route.has_own_server());
    let has_default = config.has_default_route();
    let shared = (is_shared || has_default)
        .then(|| Upstream::from_config(config, &config.proxy.server(), &engines).map(Arc::new))
        .transpose()?;
    let routes = RouteOptions::from_config(config, shared.as_ref(), &engines, tokenizers)?;
    Ok((shared.filter(|_| has_default), routes))
}

impl From<ConnectError> for RunError {
    fn from(error: ConnectError) -> Self {
        match error {
            ConnectError::Config(error) => error.into(),
            error => Self::because("setting up the upstreams")(error),
        }
    }
}
