//! `lego proxy`.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use tokio::net::TcpListener;

use crate::capture::{Place, Uploader, Writer};
use crate::config::{Config, ConfigPaths, Environment, Use};
use crate::proxy::{self, LocalTokenizers, Mode, Proxy, ProxyOptions, SessionSampling};
use crate::run;

/// How long uploads that fail are tried again when lego ends.
const LAST_UPLOADS: Duration = Duration::from_secs(10);

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
    /// Folder of the capture, or a place in object storage (s3://bucket/prefix).
    #[arg(long, value_name = "DIR")]
    capture_dir: Option<PathBuf>,
    /// Log lines as JSON objects. `RUST_LOG` sets the level.
    #[arg(long)]
    log_json: bool,
}

/// Runs until a signal.
///
/// # Errors
/// A config that cannot be used, a port in use, a capture folder that another proxy has.
pub fn run(args: Args) -> anyhow::Result<()> {
    let config = load(args)?;
    config.refuse_unsupported(Use::Proxy)?;
    super::warn_of_stray_variables(&config);
    let observability = &config.training.observability;
    crate::telemetry::configure(observability.log_level.as_str(), observability.log_json);
    proxy::settle_heaps();
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
        ("training.observability.log_json", args.log_json.then(|| true.into()), "--log-json"),
    ] {
        if let Some(value) = value {
            config = config.set(key, value, flag)?;
        }
    }
    Ok(config)
}

async fn serve(config: &Config) -> anyhow::Result<()> {
    let open_files = proxy::raise_open_files();
    let settings = &config.proxy;
    // A variable that is missing is told before anything is loaded.
    for server in config.servers() {
        config.server_key(&server)?;
    }
    let tokenizers = {
        let config = config.clone();
        tokio::task::spawn_blocking(move || LocalTokenizers::load(&config)).await??
    };
    let client_token = config.client_token()?.map(|token| token.expose().to_owned());
    let admin = settings.admin_listen_port.zip(config.admin_token()?);
    let page = crate::telemetry::install_prometheus()?;
    let (hosts, port) = (settings.listen_host.addresses(), settings.listen_port);
    let listeners = proxy::listen_on(hosts, port, client_token.is_some()).await?;
    let (default, routes) = {
        let (config, tokenizers) = (config.clone(), tokenizers.clone());
        tokio::task::spawn_blocking(move || run::upstreams(&config, &tokenizers)).await??
    };
    let place = Place::named(&settings.capture_dir, settings.capture_local_dir.as_deref())?;
    let writer = {
        let (place, options) = (place.clone(), run::writer_options(settings));
        tokio::task::spawn_blocking(move || {
            place.check()?;
            Writer::open(&place, options)
        })
        .await??
    };
    let writer = Arc::new(writer);
    let uploader = Uploader::start(&place);
    let sampling = match &settings.pinned_sampling {
        Some(pinned) => SessionSampling::from(pinned),
        None => SessionSampling::PassThrough,
    };
    let mode = Mode::StandAlone { sampling, model_map: settings.model_map.clone() };
    let mut options = ProxyOptions::from_config(settings, mode, client_token);
    options.open_files = open_files;
    options.spill = Some(crate::capture::Spill::in_folder(place.dir()));
    options.local_tokenizer = tokenizers.of_proxy(config);
    options.renderer = tokenizers.renderer(&settings.server(), settings.local_tokenizer.as_deref());
    options.render_metrics = Some(Arc::new(move || page.render()));
    let mut answers: Vec<String> = default.iter().map(|upstream| upstream.place()).collect();
    answers.extend(
        routes.iter().map(|route| format!("{} ({})", route.upstream.place(), route.models.join(", "))),
    );
    let proxy = Proxy::with_routes(options, Arc::clone(&writer) as _, default, routes);
    let stop = super::stop_on_signal();
    errln!(
        "lego proxy: {} -> {}, captures in {}",
        places(&listeners, "/v1")?,
        answers.join("; "),
        place.shown()
    );
    if place.is_remote() {
        errln!("lego proxy: captures that are not there yet in {}", place.dir().display());
    }
    let admin = match admin {
        Some((port, token)) => {
            let listeners = proxy::listen_on(hosts, port, true).await?;
            errln!("lego proxy: admin at {}", places(&listeners, "/admin")?);
            Some((listeners, token))
        }
        None => None,
    };
    let administering = async {
        if let Some((listeners, token)) = admin {
            proxy.serve_admin_all(listeners, token.expose()).await;
        }
    };
    let serving = proxy.serve_all(listeners);
    tokio::join!(serving, administering, async {
        stop.cancelled().await;
        proxy.shutdown().await;
    });
    for problem in writer.close().await.left_in_journal {
        errln!("warning: captures stay in the journal: {problem}");
    }
    if let Some(uploader) = uploader {
        for problem in tokio::task::spawn_blocking(|| uploader.finish(LAST_UPLOADS)).await? {
            errln!(
                "warning: captures wait on this machine for the next lego proxy, or lego capture compact: {problem}"
            );
        }
    }
    Ok(())
}

/// The URLs of listeners.
fn places(listeners: &[TcpListener], path: &str) -> std::io::Result<String> {
    let url = |listener: &TcpListener| Ok(format!("http://{}{path}", listener.local_addr()?));
    Ok(listeners.iter().map(url).collect::<std::io::Result<Vec<_>>>()?.join(", "))
}
