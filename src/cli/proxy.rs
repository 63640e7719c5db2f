//! `lego proxy`.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;

use crate::capture::{self, Writer, WriterOptions};
use crate::config::{self, Config, ConfigPaths, Environment, UpstreamKind, Use};
use crate::engine::{Engine, EngineOptions};
use crate::model::Model;
use crate::proxy::{self, Mode, Proxy, ProxyOptions, SessionSampling};
use crate::record;
use crate::serve::{self, ServeState};
use crate::text::{ChatTemplate, Tokenizer};
use crate::upstream::routing::RoutingHint;
use crate::upstream::{Timeouts, Upstream};

/// Run the capture proxy alone: forward model calls and store their exact tokens and log-probabilities.
///
/// Point a harness's base URL at it (http://127.0.0.1:18080/v1). Calls are stored in the capture folder and
/// read back with `lego capture`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Proxy's config [default: proxy_config.json, if it is there].
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Port to listen on; 0 lets the system choose.
    #[arg(long, value_name = "PORT")]
    port: Option<u16>,
    /// What answers model calls: a base URL, or "embedded".
    #[arg(long, value_name = "URL")]
    upstream: Option<String>,
    /// Folder of the capture.
    #[arg(long, value_name = "DIR")]
    capture_dir: Option<PathBuf>,
}

/// Runs until a signal.
///
/// # Errors
/// A config that cannot be used, a port in use, a capture folder that another proxy has.
pub fn run(args: Args) -> anyhow::Result<()> {
    let config = load(args)?;
    config.refuse_unsupported(Use::Proxy)?;
    let observability = &config.training.observability;
    crate::telemetry::configure(observability.log_level.as_str(), observability.log_json);
    super::block_on(serve(&config)).context("lego proxy")
}

fn load(args: Args) -> anyhow::Result<Config> {
    // The proxy alone: a train.toml beside it has a [policy] that would override the upstream.
    let beside = ConfigPaths::in_folder(Path::new(".")).proxy;
    let paths = ConfigPaths { proxy: args.config.or(beside), ..ConfigPaths::default() };
    let mut config = Config::load(&paths, Environment::from_process())?;
    let capture_dir = args.capture_dir.map(|dir| dir.to_string_lossy().into_owned().into());
    for (key, value, flag) in [
        ("proxy.listen_port", args.port.map(Into::into), "--port"),
        ("proxy.upstream_base_url", args.upstream.map(Into::into), "--upstream"),
        ("proxy.capture_dir", capture_dir, "--capture-dir"),
    ] {
        if let Some(value) = value {
            config = config.set(key, value, flag)?;
        }
    }
    Ok(config)
}

async fn serve(config: &Config) -> anyhow::Result<()> {
    let settings = &config.proxy;
    let client_token = config.client_token()?.map(|token| token.expose().to_owned());
    let page = crate::telemetry::install_prometheus()?;
    let (host, port) = (settings.listen_host.as_str(), settings.listen_port);
    let listener = proxy::listen(host, port, client_token.is_some()).await?;
    let upstream = upstream(config).await?;
    let writer_options =
        WriterOptions { durability: durability(settings.durability), ..WriterOptions::default() };
    let writer = Arc::new(Writer::open(&settings.capture_dir, writer_options)?);
    let sampling = match &settings.pinned_sampling {
        Some(pinned) => SessionSampling::Pinned { temperature: pinned.temperature, seed: pinned.seed },
        None => SessionSampling::PassThrough,
    };
    let mode = Mode::StandAlone { sampling, model_map: settings.model_map.clone() };
    let mut options = ProxyOptions::from_config(settings, mode, client_token);
    options.render_metrics = Some(Arc::new(move || page.render()));
    let upstream_name = upstream.name();
    let proxy = Proxy::new(options, Arc::clone(&writer) as _, upstream);
    eprintln!(
        "lego proxy: http://{}/v1 -> {upstream_name}, captures in {}",
        listener.local_addr()?,
        settings.capture_dir.display()
    );
    let admin = match (settings.admin_listen_port, config.admin_token()?) {
        (Some(port), Some(token)) => {
            let listener = proxy::listen(host, port, true).await?;
            eprintln!("lego proxy: admin at http://{}/admin", listener.local_addr()?);
            Some((listener, token))
        }
        _ => None,
    };
    let administering = async {
        if let Some((listener, token)) = admin {
            proxy.serve_admin(listener, token.expose()).await;
        }
    };
    let stop = super::stop_on_signal();
    let serving = proxy.serve(listener);
    tokio::join!(serving, administering, async {
        stop.cancelled().await;
        proxy.shutdown().await;
    });
    for problem in writer.close().await.left_in_journal {
        eprintln!("warning: captures stay in the journal: {problem}");
    }
    Ok(())
}

async fn upstream(config: &Config) -> anyhow::Result<Upstream> {
    let settings = &config.proxy;
    let timeouts = Timeouts {
        connect: Duration::from_secs(settings.connect_timeout_secs),
        first_byte: Duration::from_secs(settings.first_byte_timeout_secs),
        idle: Duration::from_secs(settings.idle_timeout_secs),
    };
    if settings.is_embedded() {
        let path = settings.model_path.clone();
        let router = tokio::task::spawn_blocking(move || embedded(&path)).await??;
        return Ok(Upstream::in_process(router, timeouts));
    }
    let kind = match settings.upstream_kind {
        UpstreamKind::Auto | UpstreamKind::Vllm => record::UpstreamKind::Vllm,
        UpstreamKind::Embedded => record::UpstreamKind::Embedded,
        UpstreamKind::Sglang => record::UpstreamKind::Sglang,
        UpstreamKind::Openai => record::UpstreamKind::Openai,
        UpstreamKind::Anthropic => record::UpstreamKind::Anthropic,
    };
    let key = config.upstream_api_key()?;
    let key = key.as_ref().map(config::Secret::expose);
    let authorities = settings.upstream_ca_file.as_ref().map(|path| {
        std::fs::read(path).with_context(|| format!("proxy.upstream_ca_file: cannot read {}", path.display()))
    });
    let authorities = authorities.transpose()?;
    let url = &settings.upstream_base_url;
    let upstream = Upstream::http_trusting(url, kind, key, timeouts, authorities.as_deref())?;
    let hint = RoutingHint { layers: settings.routing_layers, top_k: settings.routing_top_k };
    Ok(upstream.with_routing_hint(settings.capture_expert_routing.then_some(hint)))
}

/// The embedded engine behind its router.
fn embedded(path: &Path) -> anyhow::Result<axum::Router> {
    let model = Arc::new(Model::load(path)?);
    let tokenizer = Arc::new(Tokenizer::load(path)?);
    let template = Arc::new(ChatTemplate::load(path)?);
    let options = EngineOptions::for_model(&model);
    let engine = Engine::start(model, options)?;
    let name = path.file_name().map_or_else(|| "policy".into(), |name| name.to_string_lossy().into_owned());
    Ok(serve::router(ServeState::new(engine, tokenizer, template, vec![name])))
}

const fn durability(durability: config::Durability) -> capture::Durability {
    match durability {
        config::Durability::PowerLoss => capture::Durability::Full,
        config::Durability::ProcessKill => capture::Durability::None,
    }
}
