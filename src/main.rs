//! The `lego` binary: parses arguments and calls one command.

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    match lego::cli::Cli::parse().run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(lego::cli::exit_code(&error))
        }
    }
}
