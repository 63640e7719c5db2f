//! Captures to other trainers' forms. `docs/exports.md` describes each.
//!
//! ```text
//! index (all calls, once) ─▶ episodes and groups (the run's own files) ─▶ some sessions at a time ─▶ rows ─▶ PATH
//! ```
//!
//! Invariants:
//! - Exact or left out, and what is left out is counted: calls, sessions and rows are each in one bucket, and the
//!   buckets sum to what there is.
//! - Mask 1 stands only on sampled ids, with exactly the context that they were sampled in; where it stands there are a
//!   log-prob, a weight version and a temperature.
//! - One episode, one vote: every row names its episode, its group, and how many rows the episode has. An advantage is
//!   that of an episode in a complete group, computed from the rewards of all of the group's episodes.
//! - A reward that is not known is null.
//! - Memory: [`ROOM`] bytes of calls, or one session that is longer, and something for each session and trial.
//! - `PATH` appears whole or not at all.

mod atif;
mod calls;
mod conversation;
mod counts;
mod episodes;
mod error;
mod index;
mod messages;
mod msgpack;
mod output;
mod pickle;
mod prime_rl;
mod routing;
mod rows;
mod sharegpt;
mod slime;
mod trl;
mod verl;

use std::path::Path;

use crate::capture::Filter;
use crate::telemetry::RunBooks;

pub use counts::Counts;
pub use error::ExportError;

use episodes::Episodes;
use index::Index;
use output::Output;

/// Bytes of calls that are in memory together.
const ROOM: usize = 256 << 20;

/// What is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// A line a sampled choice.
    Calls,
    /// A line a conversation: messages as OpenAI's chat has them.
    Openai,
    /// A line a conversation: turns of `human` and `gpt`.
    Sharegpt,
    /// A line a conversation: a trajectory of ATIF.
    Atif,
    /// A line a sample: what TRL's `rollout_func` returns.
    Trl,
    /// A line a sample: verl's `AgentLoopOutput`.
    Verl,
    /// A folder with a debug-rollout file a policy version.
    Slime,
    /// A folder with the micro batches of each policy version.
    PrimeRl,
}

impl Format {
    /// Its rows are training samples, which only a run's captures give.
    const fn is_of_samples(self) -> bool {
        matches!(self, Self::Trl | Self::Verl | Self::Slime | Self::PrimeRl)
    }

    /// Its rows are to be trained on: what is held out or was broken is not among them.
    const fn is_for_training(self) -> bool {
        !matches!(self, Self::Calls | Self::Atif)
    }

    const fn is_folder(self) -> bool {
        matches!(self, Self::Slime | Self::PrimeRl)
    }

    /// The name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Calls => "calls",
            Self::Openai => "openai",
            Self::Sharegpt => "sharegpt",
            Self::Atif => "atif",
            Self::Trl => "trl",
            Self::Verl => "verl",
            Self::Slime => "slime",
            Self::PrimeRl => "prime-rl",
        }
    }
}

/// What to export.
#[derive(Debug, Clone, Copy)]
pub struct Options<'a> {
    pub format: Format,
    /// Of calls: those for which it is true. Of all else: sessions with such a call, whole.
    pub filter: Option<&'a Filter>,
    /// Conversations of held-out tasks too, which are not to be trained on.
    pub with_evaluations: bool,
    /// prime-rl: data-parallel ranks of its trainer.
    pub ranks: u16,
    /// What is at the path may be replaced.
    pub force: bool,
}

/// Writes the calls of `dir` to `path`. `books` are those of the run that made them. `progress` is told how many calls
/// of how many are done.
///
/// # Errors
/// [`ExportError`]; nothing is at `path` that was not there before.
pub fn export(
    dir: &Path,
    books: Option<&RunBooks>,
    path: &Path,
    options: Options<'_>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Counts, ExportError> {
    within(ROOM, dir, books, path, options, progress)
}

fn within(
    room: usize,
    dir: &Path,
    books: Option<&RunBooks>,
    path: &Path,
    options: Options<'_>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Counts, ExportError> {
    let format = options.format;
    if format.is_of_samples() && books.is_none() {
        return Err(ExportError::NoRun { dir: dir.to_owned(), format: format.name() });
    }
    let mut output = Output::create(path, dir, books.map(RunBooks::root), format.is_folder(), options.force)?;
    let mut counts = Counts::new(format.name());
    if format == Format::Calls {
        calls::write(dir, books, options.filter, output.file()?, &mut counts, progress)?;
    } else {
        let index = Index::of(dir, options.filter, format.is_of_samples(), &mut counts)?;
        let episodes = Episodes::of(&index, books, options, &mut counts)?;
        let sessions = index::Sessions { room, dir, index: &index };
        if format.is_of_samples() {
            rows::write(&sessions, &episodes, options, &mut output, &mut counts, progress)?;
        } else {
            conversation::write(&sessions, &episodes, format, output.file()?, &mut counts, progress)?;
        }
    }
    counts.check()?;
    output.finish(&counts)?;
    Ok(counts)
}
