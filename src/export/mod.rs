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

use crate::capture::{CaptureError, Filter, Place};
use crate::config::Samples;
use crate::telemetry::RunBooks;
use crate::trajectory::needs_bodies;

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
    dir: impl Into<Place>,
    books: Option<&RunBooks>,
    path: &Path,
    options: Options<'_>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Counts, ExportError> {
    within(ROOM, &dir.into(), books, path, options, progress)
}

fn within(
    room: usize,
    place: &Place,
    books: Option<&RunBooks>,
    path: &Path,
    options: Options<'_>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Counts, ExportError> {
    let format = options.format;
    let dir = place.dir();
    if !place.is_remote() && !dir.is_dir() {
        return Err(CaptureError::NoFolder { dir: dir.to_owned() }.into());
    }
    if format.is_of_samples() && books.is_none() {
        return Err(ExportError::NoRun { dir: place.shown().into(), format: format.name() });
    }
    let mut output = Output::create(path, dir, books.map(RunBooks::root), format.is_folder(), options.force)?;
    let mut counts = Counts::new(format.name());
    if format == Format::Calls {
        calls::write(place, books, options.filter, output.file()?, &mut counts, progress)?;
    } else {
        let policy = books.map_or_else(|| Ok(Samples::default()), RunBooks::samples)?;
        let with_bodies = !format.is_of_samples() || needs_bodies(&policy);
        let index = Index::of(place, options.filter, format.is_of_samples(), with_bodies, &mut counts)?;
        let episodes = Episodes::of(&index, books, options, &mut counts)?;
        let sessions = index::Sessions { room, dir: place, index: &index };
        if format.is_of_samples() {
            rows::write(&sessions, &episodes, (options, &policy), &mut output, &mut counts, progress)?;
        } else {
            conversation::write(&sessions, &episodes, format, output.file()?, &mut counts, progress)?;
        }
    }
    counts.check()?;
    output.finish(&counts)?;
    Ok(counts)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;

    use serde_json::json;

    use super::*;
    use crate::capture::{Writer, WriterOptions};
    use crate::record::{CallSink as _, JsonText, example};
    use crate::telemetry::RunBooks;

    /// A run of six sessions, whose calls are in two files.
    async fn run() -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("folder");
        let at = |name: &str| folder.path().join(name);
        fs::write(at("run.json"), "{}").expect("written");
        let batch = "batch_size = 16\nrollout_batch_size = 16\ngroup_size = 2\n";
        fs::write(at("config.resolved.toml"), format!("[training]\n{batch}")).expect("written");
        let mut events = String::new();
        for number in 0..6 {
            let trial = format!("v{}-g{}-{}", number / 4, number / 2, number % 2);
            let event = json!({
                "at": "t", "event": "trial_finished", "trial_id": trial, "task_id": "t", "reward": number,
                "policy_version": number / 4, "turns": 1, "sampled_tokens": 1, "seconds": 1.0,
                "outcome": {"outcome": "valid", "termination": "completed"},
            });
            events += &format!("{event}\n");
            fs::create_dir_all(at("trials").join(&trial)).expect("folder");
            let result = json!({"session_id": format!("{trial}.1"), "purpose": "training", "reward": number});
            fs::write(at("trials").join(&trial).join("result.json"), result.to_string()).expect("written");
        }
        fs::write(at("events.jsonl"), events).expect("written");
        for _ in 0..2 {
            let writer = Writer::open(&at("captures"), WriterOptions::default()).expect("free folder");
            for number in 0..30_u32 {
                let of = number % 6;
                let trial = format!("v{}-g{}-{}", of / 4, of / 2, of % 2);
                let ids = vec![number; 1 + number as usize % 4];
                let mut call = example::call(json!({
                    "session_id": format!("{trial}.1"), "trial_id": trial, "prompt_token_ids": [number, 1],
                    "prompt_ids_source": "engine", "completion_ids_source": "engine", "finish_reason": "stop",
                    "completion_logprobs": vec![-0.5; ids.len()], "sampling_sent": {"temperature": 1.0},
                    "weight_spans": [{"version": "0", "start": 0, "end": ids.len()}], "text": "x", "trainable": true,
                    "usage": {"prompt_tokens": 2, "completion_tokens": ids.len()}, "completion_token_ids": ids,
                }));
                let messages = json!({"messages": [{"role": "user", "content": number.to_string()}]});
                call.client_request = JsonText::new(messages.to_string()).ok();
                writer.append(vec![call]).await.expect("room");
            }
            writer.close().await;
        }
        folder
    }

    /// All files of an export.
    fn files(path: &Path) -> BTreeMap<String, Vec<u8>> {
        if path.is_file() {
            return BTreeMap::from([(String::new(), fs::read(path).expect("read"))]);
        }
        let entries = fs::read_dir(path).expect("folder").map(|entry| entry.expect("entry").path());
        let of = |path: std::path::PathBuf| {
            let name = path.file_name().expect("name").to_string_lossy().into_owned();
            files(&path).into_iter().map(move |(inside, bytes)| (format!("{name}/{inside}"), bytes))
        };
        entries.flat_map(of).collect()
    }

    #[tokio::test]
    async fn sessions_one_by_one_give_the_same_bytes_as_all_together() {
        let run = run().await;
        let dir = run.path().join("captures");
        let books = RunBooks::of(&dir).expect("read").expect("a run's");
        let folder = tempfile::tempdir().expect("folder");
        for format in
            [Format::Openai, Format::Atif, Format::Trl, Format::Verl, Format::Slime, Format::PrimeRl]
        {
            let options = Options { format, filter: None, with_evaluations: false, ranks: 1, force: false };
            let of = |room: usize| {
                let path = folder.path().join(format!("{}-{room}", format.name()));
                let mut told = 0;
                let counts =
                    within(room, &Place::from(&dir), Some(&books), &path, options, &mut |_, _| told += 1);
                let counts = counts.expect("exported");
                assert_eq!((told, counts.sessions.written()), (6, 6), "{counts:?}");
                (files(&path), counts)
            };
            assert_eq!(of(1), of(ROOM), "{}", format.name());
        }
    }
}
