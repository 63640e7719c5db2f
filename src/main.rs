//! The `lego` binary: branches to the sandbox's init, parses arguments, starts telemetry, calls one command.

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    // Before any thread or runtime exists: this process is to be the sandboxes' nursery.
    if std::env::args_os().nth(1).is_some_and(|argument| argument == lego::sandbox::INIT_ARGUMENT) {
        lego::sandbox::init_main();
    }
    let cli = lego::cli::Cli::parse();
    if let Err(error) = lego::telemetry::start() {
        lego::telemetry::say(&format!("error: {error}"));
        return ExitCode::FAILURE;
    }
    match cli.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            lego::telemetry::say(&format!("error: {}", lego::cli::message(&error)));
            ExitCode::from(lego::cli::exit_code(&error))
        }
    }
}
