//! `lego config`: check, show and document the three config files.

use clap::Subcommand;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Print the reference of every key, as Markdown.
    Docs,
}

/// Runs `lego config`.
///
/// # Errors
/// Bad files.
pub fn run(args: Args) -> anyhow::Result<()> {
    match args.command {
        Command::Docs => Ok(()),
    }
}
