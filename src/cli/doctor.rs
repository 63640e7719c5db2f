//! `lego doctor`: what works on this machine, and what to do about what does not.

use std::path::Path;

use crate::config::{Config, ConfigPaths, Environment};
use crate::proxy::{self, FileShare};
use crate::sandbox::{self, Options, SandboxError};

/// Programs of the host that sandboxes need, with why.
const PROGRAMS: [(&str, &str); 2] = [
    ("/usr/bin/python3", "the bundled tasks are in Python"),
    ("/usr/bin/git", "task workspaces are git repositories"),
];

/// Show what works on this machine, with remedies.
#[derive(Debug, clap::Args)]
pub struct Args {}

/// Prints the report.
///
/// # Errors
/// Something that `lego train` needs does not work.
pub fn run(_args: Args) -> anyhow::Result<()> {
    let examination = super::block_on(async { Ok(sandbox::examine(&Options::default()).await) })?;
    outln!("lego {}", super::VERSION);
    outln!("\nThis machine");
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    outln!("  {:<46} {threads}", "processors");
    for (name, value) in &examination.facts {
        outln!("  {name:<46} {value}");
    }
    let config = proxy_config();
    let settings = config.as_ref().map(|config| config.proxy.clone()).unwrap_or_default();
    let limit = proxy::raise_open_files();
    let wanted = settings.max_in_flight;
    let servers = config.as_ref().map_or(1, |config| config.servers().len());
    let share = FileShare::of(limit, wanted, servers);
    let files = limit.map_or_else(|| "no limit".to_owned(), |limit| limit.to_string());
    outln!("  {:<46} {files}: {} model calls at once", "open files", share.calls);
    if let Some(warning) = share.warning(wanted) {
        outln!("  {:<46} {warning}", "");
    }
    outln!("\nProxy");
    let hosts = settings.listen_host.addresses();
    let places: Vec<_> = hosts.iter().map(|host| format!("{host}:{}", settings.listen_port)).collect();
    let place = places.join(", ");
    outln!("  {:<46} {}", "listens on", if config.is_some() { place } else { "unknown".to_owned() });
    outln!("  {:<46} {}", "from containers and other machines", reach(hosts));
    outln!("\nPrograms");
    let mut missing = Vec::new();
    for (path, why) in PROGRAMS {
        let is_there = Path::new(path).exists();
        outln!("  {path:<46} {}", if is_there { "ok" } else { "missing" });
        if !is_there {
            missing.push(format!("{path} is missing: {why}. Install it with the system's package manager"));
        }
    }
    outln!("\nSandboxes");
    let mut chosen = None;
    for attempt in &examination.attempts {
        match &attempt.outcome {
            Ok(capabilities) => {
                outln!("  {:<46} works", attempt.what);
                outln!(
                    "  {:<46} memory: {:?}, processes: {:?}, workspace: {:?}, /tmp: {:?}",
                    "",
                    capabilities.memory,
                    capabilities.processes,
                    capabilities.disk,
                    capabilities.tmp
                );
                chosen = chosen.or(Some(capabilities));
            }
            Err(SandboxError::Unsupported { cause, remedy }) => {
                outln!("  {:<46} does not work: {cause}", attempt.what);
                outln!("  {:<46} {remedy}", "");
            }
            Err(error) => outln!("  {:<46} does not work: {error}", attempt.what),
        }
    }
    match chosen {
        Some(capabilities) if capabilities.is_isolated => {
            outln!("\nlego will use: {}", capabilities.mode);
        }
        Some(_) => missing.push(
            "only the weak sandbox works: follow a remedy above, or allow it with --weak-sandbox".into(),
        ),
        None => missing.push("no sandbox works: follow a remedy above".into()),
    }
    if missing.is_empty() {
        return Ok(());
    }
    anyhow::bail!(missing.join("\n"))
}

/// The proxy's settings as `lego proxy` would read them in this folder. What is wrong with them is said.
fn proxy_config() -> Option<Config> {
    let beside = ConfigPaths::in_folder(Path::new(".")).proxy;
    let paths = ConfigPaths { proxy: beside, ..ConfigPaths::default() };
    match Config::load(&paths, Environment::from_process()) {
        Ok(config) => Some(config),
        Err(error) => {
            outln!("  {:<46} cannot be read: {error}", "proxy_config.json");
            None
        }
    }
}

/// Who can reach a proxy that listens there, and what to do about it.
fn reach(hosts: &[String]) -> String {
    let address = |host: &String| {
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        bare.parse::<std::net::IpAddr>().ok()
    };
    let addresses: Vec<_> =
        hosts.iter().filter_map(address).filter(|address| !address.is_loopback()).collect();
    let unspecified = addresses.iter().copied().find(std::net::IpAddr::is_unspecified);
    let address = unspecified.or(addresses.first().copied());
    let is_inside = Path::new("/.dockerenv").exists() || Path::new("/run/.containerenv").exists();
    match address {
        Some(address) if address.is_unspecified() => {
            "reachable at this machine's addresses (Docker: --add-host host.docker.internal:host-gateway), with the client \
             token as API key"
                .to_owned()
        }
        Some(_) => {
            let named: Vec<_> = addresses.iter().map(ToString::to_string).collect();
            format!("reachable at {} only, with the client token as API key", named.join(", "))
        }
        _ if is_inside => {
            "not reachable: this is a container, and its loopback is its own. To serve others, set \
             proxy.listen_host = \"0.0.0.0\" and proxy.client_token_env, and publish the port"
                .to_owned()
        }
        _ => "not reachable: loopback is each container's own. For containers run them with --network host, or set \
              proxy.listen_host to the bridge's address (Docker: 172.17.0.1) or 0.0.0.0, and proxy.client_token_env"
            .to_owned(),
    }
}
