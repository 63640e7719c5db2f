//! An upstream as the configuration describes it.

use std::collections::BTreeMap;
use std::path::PathBuf;

use axum::Router;

use super::routing::RoutingHint;
use super::transport::{Timeouts, Upstream, UpstreamError};
use crate::config::{self, Config, ConfigError, Server};
use crate::record::UpstreamKind;

/// A server that cannot be used as it is configured.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("{table}: {cause}")]
    Upstream { table: String, cause: UpstreamError },
    #[error("{table}.upstream_ca_file: cannot read {}: {cause}", path.display())]
    Authorities { table: String, path: PathBuf, cause: std::io::Error },
    #[error("{table}: no embedded engine was started for {}", path.display())]
    NoEngine { table: String, path: PathBuf },
}

impl Upstream {
    /// The upstream that a server of the configuration is. `engines` are the embedded engines, by the folder of their
    /// model.
    ///
    /// # Errors
    /// [`ConnectError`] names the key that is wrong.
    pub fn from_config(
        config: &Config,
        server: &Server,
        engines: &BTreeMap<PathBuf, Router>,
    ) -> Result<Self, ConnectError> {
        let timeouts = Timeouts {
            connect: server.connect_timeout,
            first_byte: server.first_byte_timeout,
            idle: server.idle_timeout,
        };
        let table = || server.table.clone();
        if server.is_embedded() {
            let engine = engines.get(&server.model_path).cloned();
            let path = server.model_path.clone();
            return engine
                .map(|router| Self::in_process(router, timeouts))
                .ok_or_else(|| ConnectError::NoEngine { table: table(), path });
        }
        let kind = match server.kind {
            config::UpstreamKind::Auto | config::UpstreamKind::Vllm => UpstreamKind::Vllm,
            config::UpstreamKind::Embedded => UpstreamKind::Embedded,
            config::UpstreamKind::Sglang => UpstreamKind::Sglang,
            config::UpstreamKind::Openai => UpstreamKind::Openai,
            config::UpstreamKind::Anthropic => UpstreamKind::Anthropic,
        };
        let key = config.server_key(server)?;
        let key = key.as_ref().map(config::Secret::expose);
        let authorities = server.ca_file.as_ref().map(|path| {
            std::fs::read(path).map_err(|cause| ConnectError::Authorities {
                table: table(),
                path: path.clone(),
                cause,
            })
        });
        let authorities = authorities.transpose()?;
        let upstream = Self::http_trusting(&server.base_url, kind, key, timeouts, authorities.as_deref())
            .map_err(|cause| ConnectError::Upstream { table: table(), cause })?;
        let hint = RoutingHint { layers: server.routing_layers, top_k: server.routing_top_k };
        let upstream = upstream.with_responses(server.responses);
        Ok(upstream.with_routing_hint(config.proxy.capture_expert_routing.then_some(hint)))
    }
}
