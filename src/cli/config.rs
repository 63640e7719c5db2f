//! `lego config`: check, show and document the three config files.

use std::path::{Path, PathBuf};

use clap::Subcommand;

use super::Usage;
use crate::config::{Config, ConfigPaths, Environment, FileKind, Use, reference_markdown};
use crate::telemetry;

/// Check, show and document the three config files.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Check files: unknown keys, wrong types, impossible values. Without FILES, those in this folder.
    Check(Files),
    /// Print every effective value and where it came from. Without FILES, of those in this folder, if any.
    Show {
        #[command(flatten)]
        files: Files,
        /// Print one JSON object: key to value and origin.
        #[arg(long)]
        json: bool,
    },
    /// Print the reference of every key, as Markdown.
    Docs {
        /// Print the reference of every metric instead.
        #[arg(long)]
        metrics: bool,
    },
}

#[derive(Debug, clap::Args)]
struct Files {
    /// Config files, told apart by name (`proxy_config.json`, `sandbox.toml`, `train.toml`) or by content.
    files: Vec<PathBuf>,
}

impl Files {
    /// Those to look at; `must_exist`: where there are none, that is an error.
    fn paths(self, must_exist: bool) -> anyhow::Result<ConfigPaths> {
        if self.files.is_empty() {
            let paths = ConfigPaths::in_folder(Path::new(""));
            if must_exist && paths == ConfigPaths::default() {
                let names = FileKind::ALL.map(FileKind::file_name).join(", ");
                anyhow::bail!(Usage(format!("no config file in this folder ({names}). Name the files.")));
            }
            return Ok(paths);
        }
        let mut paths = ConfigPaths::default();
        for path in self.files {
            let kind = FileKind::detect(&path)?;
            if let Some(other) = paths.get(kind) {
                let (other, name) = (other.display(), kind.file_name());
                anyhow::bail!(Usage(format!("{other} and {} are both a {name}. Name one.", path.display())));
            }
            paths = paths.with(kind, path);
        }
        Ok(paths)
    }
}

/// Runs `lego config`.
///
/// # Errors
/// Bad files.
pub fn run(args: Args) -> anyhow::Result<()> {
    match args.command {
        Command::Check(files) => {
            let paths = files.paths(true)?;
            let config = Config::load(&paths, Environment::from_process())?;
            for note in config.notes(Use::Train).into_iter().filter(|note| note.was_set) {
                outln!("note: {note}");
            }
            for stray in config.stray_variables() {
                outln!("note: {stray}");
            }
            let keys = config.servers().into_iter().filter_map(|server| config.server_key(&server).err());
            for error in
                keys.chain([config.client_token().err(), config.admin_token().err()].into_iter().flatten())
            {
                outln!("note: {error}");
            }
            for path in FileKind::ALL.iter().filter_map(|kind| paths.get(*kind)) {
                outln!("{}: ok", path.display());
            }
        }
        Command::Show { files, json } => {
            let config = Config::load(&files.paths(false)?, Environment::from_process())?;
            if json {
                let entries: serde_json::Map<_, _> = config
                    .entries()
                    .into_iter()
                    .map(|(key, value, origin)| {
                        (key, serde_json::json!({"value": value, "origin": origin.to_string()}))
                    })
                    .collect();
                outln!("{}", serde_json::to_string_pretty(&entries)?);
            } else {
                for (key, value, origin) in config.entries() {
                    outln!("{:<58} # {origin}", format!("{key} = {value}"));
                }
            }
        }
        Command::Docs { metrics: false } => print!("{}", reference_markdown()?),
        Command::Docs { metrics: true } => print!("{}", telemetry::reference_markdown()),
    }
    Ok(())
}
