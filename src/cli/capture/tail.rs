//! `lego capture tail`.

use std::io::Write;
use std::time::Duration;

use super::list::{call_head, call_line, lean};
use super::{Folder, Where, time};
use crate::capture::{Follow, Query};
use crate::cli::{Signals, block_on};
use crate::record::Call;

/// Time between two looks.
const PAUSE: Duration = Duration::from_millis(200);

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    folder: Folder,
    /// Go on with what is captured from now on, until Ctrl-C.
    #[arg(short, long)]
    follow: bool,
    /// How many of the newest calls to begin with.
    #[arg(short = 'n', long, value_name = "N", default_value_t = 10)]
    lines: usize,
    #[command(flatten)]
    r#where: Where,
    /// One JSON object a choice, without bodies and routing.
    #[arg(long)]
    json: bool,
}

/// Prints the newest calls, and what follows.
pub(super) fn run(out: &mut dyn Write, args: &Args) -> anyhow::Result<()> {
    let dir = args.folder.captures()?;
    let query = Query { filter: args.r#where.filter.clone(), as_stored: !args.json, ..lean() };
    let (calls, mut follow) = Follow::open(&dir, query, args.lines)?;
    if !args.json {
        writeln!(out, "{:<20} {:<36} {}", "received (UTC)", "session", call_head())?;
    }
    for call in &calls {
        print(out, call, args.json)?;
    }
    out.flush()?;
    warn(&mut follow);
    if !args.follow {
        return Ok(());
    }
    block_on(async {
        let mut signals = Signals::listen();
        while !is_closed() {
            tokio::select! {
                () = signals.next() => break,
                () = tokio::time::sleep(PAUSE) => {}
            }
            let mut written = Ok(());
            follow.look(&mut |call| {
                if written.is_ok() {
                    written = print(out, &call, args.json);
                }
            })?;
            written?;
            out.flush()?;
            warn(&mut follow);
        }
        Ok(())
    })
}

fn warn(follow: &mut Follow) {
    for warning in follow.warnings() {
        errln!("warning: {warning}");
    }
}

fn print(out: &mut dyn Write, call: &Call, is_json: bool) -> anyhow::Result<()> {
    if is_json {
        writeln!(out, "{}", serde_json::to_string(call)?)?;
    } else {
        writeln!(out, "{:<20} {:<36} {}", time(call.received_at), call.session_id.as_str(), call_line(call))?;
    }
    Ok(())
}

/// Whether nobody reads standard output any more, which no write would tell while there is nothing to write.
#[cfg(target_os = "linux")]
fn is_closed() -> bool {
    use std::os::fd::AsFd as _;

    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    let stdout = std::io::stdout();
    let mut asked = [PollFd::new(stdout.as_fd(), PollFlags::empty())];
    let told = poll(&mut asked, PollTimeout::ZERO).is_ok();
    let gone = PollFlags::POLLERR | PollFlags::POLLNVAL;
    told && asked[0].revents().is_some_and(|events| events.intersects(gone))
}

#[cfg(not(target_os = "linux"))]
fn is_closed() -> bool {
    false
}
