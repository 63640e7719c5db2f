//! The thread that makes Parquet of sealed segments. What fails stays queued and is tried again.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::compact::compact;
use super::journal::Sealed;
use super::layout;
use super::merger::Merger;
use super::storage::Storage;

/// Pause before a failed segment is tried again.
const RETRY_AFTER: Duration = Duration::from_secs(30);

#[derive(Default)]
struct Queue {
    sealed: VecDeque<Sealed>,
    failed: VecDeque<Sealed>,
    is_closing: bool,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) struct Compactor {
    shared: Arc<Shared>,
    thread: std::io::Result<JoinHandle<Vec<String>>>,
}

impl Compactor {
    /// Starts with the segments of an earlier writer. `merger` is told of new files.
    pub(super) fn start(
        storage: Arc<dyn Storage>,
        dir: PathBuf,
        sealed: Vec<Sealed>,
        merger: Option<Merger>,
    ) -> Self {
        let queue = Queue { sealed: sealed.into(), ..Queue::default() };
        let shared = Arc::new(Shared { queue: Mutex::new(queue), changed: Condvar::new() });
        let for_thread = Arc::clone(&shared);
        let work = move || run(&*storage, &dir, &for_thread, merger);
        let thread = std::thread::Builder::new().name("lego-compact".to_owned()).spawn(work);
        Self { shared, thread }
    }

    pub(super) fn push(&self, sealed: impl IntoIterator<Item = Sealed>) {
        self.shared.queue().sealed.extend(sealed);
        self.shared.changed.notify_one();
    }

    /// Makes Parquet of all that is queued; tells what could not be.
    pub(super) fn finish(self) -> Vec<String> {
        self.shared.queue().is_closing = true;
        self.shared.changed.notify_one();
        match self.thread {
            Ok(thread) => thread.join().unwrap_or_else(|_| vec!["the compacting thread panicked".to_owned()]),
            Err(error) => vec![format!("the compacting thread could not start: {error}")],
        }
    }
}

fn run(storage: &dyn Storage, dir: &Path, shared: &Shared, merger: Option<Merger>) -> Vec<String> {
    let mut left = vec![];
    while let Some((sealed, is_last_try)) = next(shared) {
        if let Some(merger) = merger.as_ref().filter(|_| is_last_try) {
            merger.stop();
        }
        match compact(storage, dir, sealed) {
            Ok(paths) => {
                metrics::counter!("lego_capture_parquet_files_total").increment(paths.len() as u64);
                tracing::debug!(segment = sealed.name.stem(), ?paths, "captures made into Parquet");
                if let Some(merger) = &merger {
                    merger.look(paths.iter().filter_map(|path| layout::date(path)));
                }
            }
            Err(error) => {
                let segment = sealed.name.stem();
                tracing::warn!(%segment, %error, "segment stays in the journal");
                if is_last_try {
                    left.push(format!("{segment}: {error}"));
                } else {
                    shared.queue().failed.push_back(sealed);
                }
            }
        }
    }
    if let Some(merger) = merger {
        merger.finish();
    }
    left
}

/// The next segment, and whether nothing follows its failure; `None` at the end.
fn next(shared: &Shared) -> Option<(Sealed, bool)> {
    let mut queue = shared.queue();
    loop {
        if let Some(sealed) = queue.sealed.pop_front() {
            return Some((sealed, queue.is_closing));
        }
        if queue.is_closing {
            return queue.failed.pop_front().map(|sealed| (sealed, true));
        }
        if queue.failed.is_empty() {
            queue = shared.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        } else {
            let waited = shared.changed.wait_timeout(queue, RETRY_AFTER);
            let (guard, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            queue = guard;
            if timeout.timed_out() {
                let failed = std::mem::take(&mut queue.failed);
                queue.sealed.extend(failed);
            }
        }
    }
}
