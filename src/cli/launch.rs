//! `lego launch`.

use std::path::PathBuf;

use super::train::{RunArgs, start};
use crate::config::{Config, ConfigPaths, Environment, FileKind};

/// Start a training run from its three config files.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[arg(long, value_name = "FILE", default_value = "proxy_config.json")]
    proxy_config: PathBuf,
    #[arg(long, value_name = "FILE", default_value = "sandbox.toml")]
    sandbox_config: PathBuf,
    #[arg(long, value_name = "FILE", default_value = "train.toml")]
    train_config: PathBuf,
    #[command(flatten)]
    run: RunArgs,
}

/// # Errors
/// As [`super::train::run`].
pub fn run(args: Args) -> anyhow::Result<()> {
    let paths = ConfigPaths::default()
        .with(FileKind::Proxy, args.proxy_config)
        .with(FileKind::Sandbox, args.sandbox_config)
        .with(FileKind::Train, args.train_config);
    start(Config::load(&paths, Environment::from_process())?, args.run)
}
