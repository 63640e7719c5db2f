//! The thread that puts small Parquet files together while a writer writes. It works at most half of the time, and leaves
//! what it does when the writer is closed: the next one begins again.
//!
//! Files that go to object storage are not merged: they are gone from here in a moment.

use std::collections::{BTreeSet, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::error::CaptureError;
use super::layout;
use super::merge::{Beside, Due, merge_due};
use super::room::Room;
use super::storage::Storage;

/// Time of work after which it rests for as long.
const WORK: Duration = Duration::from_millis(10);
/// Pause before a day is looked at again that somebody reads, and how often that is done before its files are merged all
/// the same, and the small ones deleted later.
const READ: Duration = Duration::from_millis(50);
const READ_LOOKS: u32 = 200;
/// Pause before what could not be merged is tried again.
const RETRY_AFTER: Duration = Duration::from_secs(60);

#[derive(Default)]
struct Days {
    /// Days that got a file.
    changed: BTreeSet<String>,
    /// Days that are to be looked at again.
    later: BTreeSet<String>,
    is_closing: bool,
}

#[derive(Default)]
struct Shared {
    days: Mutex<Days>,
    changed: Condvar,
}

impl Shared {
    /// No code panics while it holds this lock.
    fn days(&self) -> MutexGuard<'_, Days> {
        self.days.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// False: the writer is closed.
    fn rest(&self, pause: Duration) -> bool {
        let rested = self.changed.wait_timeout_while(self.days(), pause, |days| !days.is_closing);
        let (days, _) = rested.unwrap_or_else(PoisonError::into_inner);
        !days.is_closing
    }

    /// The day to look at next; `None` at the end.
    fn next(&self) -> Option<String> {
        let mut days = self.days();
        loop {
            if days.is_closing {
                return None;
            }
            // Newer days have more to read.
            if let Some(date) = days.changed.pop_last() {
                return Some(date);
            }
            if days.later.is_empty() {
                days = self.changed.wait(days).unwrap_or_else(PoisonError::into_inner);
            } else {
                let waited = self.changed.wait_timeout(days, RETRY_AFTER);
                let (guard, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
                days = guard;
                if timeout.timed_out() {
                    let later = std::mem::take(&mut days.later);
                    days.changed.extend(later);
                }
            }
        }
    }
}

pub(super) struct Merger {
    shared: Arc<Shared>,
    /// It is no more than a help: without it files stay small.
    thread: Option<JoinHandle<()>>,
}

impl Merger {
    /// Starts with all days of the folder.
    pub(super) fn start(storage: Arc<dyn Storage>, dir: PathBuf, room: Arc<Room>) -> Self {
        let shared = Arc::new(Shared::default());
        let for_thread = Arc::clone(&shared);
        let work = move || run(&*storage, &dir, &room, &for_thread);
        let thread = std::thread::Builder::new().name("lego-merge".to_owned()).spawn(work);
        let thread = thread.inspect_err(|error| tracing::warn!(%error, "small files are not merged")).ok();
        Self { shared, thread }
    }

    /// Days got new files.
    pub(super) fn look(&self, dates: impl IntoIterator<Item = String>) {
        self.shared.days().changed.extend(dates);
        self.shared.changed.notify_one();
    }

    /// What is being merged is left.
    pub(super) fn stop(&self) {
        self.shared.days().is_closing = true;
        self.shared.changed.notify_one();
    }

    pub(super) fn finish(self) {
        self.stop();
        if self.thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the merging thread panicked");
        }
    }
}

fn run(storage: &dyn Storage, dir: &Path, room: &Room, shared: &Shared) {
    match layout::days(dir) {
        Ok(dates) => shared.days().changed.extend(dates),
        Err(error) => tracing::debug!(%error, "days are not known"),
    }
    let mut passed = HashSet::new();
    while let Some(date) = shared.next() {
        let mut pace = Pace { shared, room, since: Instant::now(), looks: 0 };
        let mut left = vec![];
        let due = merge_due(storage, dir, &date, &mut passed, &mut left, &mut pace);
        for what in left {
            tracing::warn!("not merged: {what}");
        }
        if due.unwrap_or_else(|error| failed(&error)) == Due::Later {
            shared.days().later.insert(date);
        }
    }
}

/// What is there stays readable as it is.
fn failed(error: &CaptureError) -> Due {
    tracing::warn!(%error, "small files could not be merged, and are tried again");
    Due::Later
}

/// Gives way to what the process is there for.
struct Pace<'a> {
    shared: &'a Shared,
    room: &'a Room,
    since: Instant,
    looks: u32,
}

impl Beside for Pace<'_> {
    fn goes_on(&mut self) -> bool {
        let worked = self.since.elapsed();
        if worked < WORK {
            return true;
        }
        let goes_on = self.shared.rest(worked);
        self.since = Instant::now();
        goes_on
    }

    fn waits(&mut self) -> bool {
        self.looks += 1;
        self.looks < READ_LOOKS && self.shared.rest(READ)
    }

    fn has_room(&self, bytes: u64) -> bool {
        self.room.has_spare(bytes)
    }
}
