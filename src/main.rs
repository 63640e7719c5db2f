//! The `lego` binary: parses arguments and calls one command.

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    // Before any thread or runtime exists: this process is to be the sandboxes' nursery.
    if std::env::args_os().nth(1).is_some_and(|argument| argument == lego::sandbox::INIT_ARGUMENT) {
        lego::sandbox::init_main();
    }
    match lego::cli::Cli::parse().run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(lego::cli::exit_code(&error))
        }
    }
}
