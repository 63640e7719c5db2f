//! The writer: `append` waits until its calls are on disk; a thread of its own syncs once for all who wait.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicI64;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::sync::{OnceCell, mpsc, oneshot};

use super::compact::memory_bytes;
use super::compactor::Compactor;
use super::drafts::{self, Drafts};
use super::error::{CaptureError, sink_error};
use super::history::Held;
use super::journal::{self, Journal, Sealed};
use super::layout;
use super::lock::Lock;
use super::merger::Merger;
use super::payload::{self, Payload};
use super::place::Place;
use super::recovery::{self, Recovery};
use super::room::{Limits, Room};
use super::storage::{Files, Storage, make_folder};
use crate::record::{Call, CallId, CallSink, SinkError};

/// When `append` resolves.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Durability {
    /// After the calls are synced to disk: neither kill -9 nor power loss loses them.
    #[default]
    Full,
    /// After they are written: kill -9 does not lose them, power loss may.
    None,
}

/// How a [`Writer`] writes.
#[derive(Debug, Clone, Copy)]
pub struct WriterOptions {
    /// When `append` resolves.
    pub durability: Durability,
    /// A segment this long is sealed and becomes Parquet.
    pub segment_bytes: u64,
    /// So is one this old.
    pub segment_age: Duration,
    /// What the folder may take.
    pub limits: Limits,
}

impl Default for WriterOptions {
    fn default() -> Self {
        Self {
            durability: Durability::Full,
            segment_bytes: 64 << 20,
            segment_age: Duration::from_secs(600),
            limits: Limits::default(),
        }
    }
}

/// Appends that may wait for the writer thread.
const QUEUE: usize = 256;
/// Calls of so many bytes are encoded where nothing else waits for it.
const LONG_WORK: usize = 1 << 20;
/// Bytes that one commit gathers at most, unless a single append is longer.
const COMMIT_BYTES: usize = 64 << 20;

struct Append {
    payload: Payload,
    calls: Vec<CallId>,
    is_draft: bool,
    done: oneshot::Sender<Result<(), SinkError>>,
}

/// What a writer did, told when it is closed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Closed {
    /// Appends that were acknowledged.
    pub appends: u64,
    /// Commits they took (with full durability: syncs).
    pub commits: u64,
    /// Segments that could not be made into Parquet, with the reason. They stay in the journal and readable,
    /// and the next writer tries again.
    pub left_in_journal: Vec<String>,
}

/// The one writer of a capture folder.
pub struct Writer {
    dir: PathBuf,
    recovery: Recovery,
    room: Arc<Room>,
    queue: Mutex<Option<mpsc::Sender<Append>>>,
    thread: Mutex<Option<JoinHandle<Closed>>>,
    closed: OnceCell<Closed>,
    held: Arc<Held>,
}

impl Writer {
    /// Opens `dir`, making it if need be, and recovers what an earlier writer left: torn tails are cut off and
    /// reported, old segments become Parquet in the background.
    ///
    /// # Errors
    /// Another writer has the folder, or it cannot be read or written.
    pub fn open(place: impl Into<Place>, options: WriterOptions) -> Result<Self, CaptureError> {
        let files = Files::default();
        let bytes = Arc::clone(&files.bytes);
        Self::open_on(&place.into(), options, Arc::new(files), bytes)
    }

    pub(super) fn open_on(
        place: &Place,
        options: WriterOptions,
        storage: Arc<dyn Storage>,
        bytes: Arc<AtomicI64>,
    ) -> Result<Self, CaptureError> {
        let dir = place.dir();
        let journal_dir = layout::journal_dir(dir);
        for folder in [dir, &journal_dir] {
            make_folder(&*storage, folder).map_err(CaptureError::io("create", folder))?;
        }
        let lock = Lock::take(dir)?;
        place.claim()?;
        let (mut recovery, mut sealed) = recovery::recover(&*storage, dir)?;
        let (unfinished, old_drafts) = drafts::recover(place)?;
        let numbers = place.last_number()?.into_iter().chain(sealed.iter().map(|s| s.name.number));
        let next_number = numbers.max().map_or(1, |last| last + 1);
        let mut journal = Journal::new(dir.to_owned(), options, next_number, Arc::clone(&storage));
        recovery.unfinished = unfinished.len() as u64;
        keep(&*storage, &mut journal, dir, unfinished, &old_drafts, &mut sealed)?;
        let drafts = Drafts::new(dir, options.durability, next_number, Arc::clone(&storage));
        let room = Arc::new(Room::new(dir, options.limits, bytes));
        let (queue, appends) = mpsc::channel(QUEUE);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .map_err(CaptureError::io("start the writer of", dir))?;
        let (writing, written) = std::sync::mpsc::sync_channel(1);
        let (watched, probed) = (Arc::clone(&room), Arc::clone(&storage));
        let watch = move || watched.watch(&*probed, &written);
        let watch = std::thread::Builder::new().name("lego-room".to_owned()).spawn(watch);
        let watch = watch.map_err(CaptureError::io("watch", dir))?;
        let (folder, measured, is_kept_here) = (dir.to_owned(), Arc::clone(&room), !place.is_remote());
        let work = move || {
            let merger = is_kept_here
                .then(|| Merger::start(Arc::clone(&storage), folder.clone(), Arc::clone(&measured)));
            let compactor = Compactor::start(storage, folder.clone(), sealed, merger);
            let mut closed =
                runtime.block_on(write(journal, drafts, &folder, appends, &compactor, &measured));
            closed.left_in_journal = compactor.finish();
            drop(writing);
            let _ = watch.join();
            drop(lock);
            closed
        };
        let thread = std::thread::Builder::new().name("lego-capture".to_owned()).spawn(work);
        let thread = thread.map_err(CaptureError::io("start the writer of", dir))?;
        Ok(Self {
            dir: dir.to_owned(),
            recovery,
            room,
            queue: Mutex::new(Some(queue)),
            thread: Mutex::new(Some(thread)),
            closed: OnceCell::new(),
            held: Arc::default(),
        })
    }

    /// What was found when the folder was opened.
    #[must_use]
    pub fn recovery(&self) -> &Recovery {
        &self.recovery
    }

    /// The capture folder.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Writes what is queued, seals the journal, makes Parquet of it and frees the folder. Later appends
    /// fail with [`SinkError::Closed`]; closing again tells the same.
    pub async fn close(&self) -> Closed {
        let finish = async || {
            lock(&self.queue).take();
            let Some(thread) = lock(&self.thread).take() else {
                return Closed::default();
            };
            let joined = tokio::task::spawn_blocking(move || thread.join()).await;
            joined.ok().and_then(Result::ok).unwrap_or_else(|| Closed {
                left_in_journal: vec!["the writer thread panicked".to_owned()],
                ..Closed::default()
            })
        };
        self.closed.get_or_init(finish).await.clone()
    }

    fn closed_error(&self) -> SinkError {
        SinkError::Closed { place: self.dir.display().to_string() }
    }
}

#[async_trait::async_trait]
impl CallSink for Writer {
    async fn append(&self, calls: Vec<Call>) -> Result<(), SinkError> {
        self.send(calls, false).await
    }

    async fn draft(&self, calls: Vec<Call>) -> Result<(), SinkError> {
        self.send(calls, true).await
    }

    fn admits(&self) -> Result<(), SinkError> {
        self.room.admits()
    }
}

impl Writer {
    async fn send(&self, mut calls: Vec<Call>, is_draft: bool) -> Result<(), SinkError> {
        let queue = lock(&self.queue).clone().ok_or_else(|| self.closed_error())?;
        if calls.is_empty() {
            return Ok(());
        }
        let ids = calls.iter().map(|call| call.call_id).collect();
        let bytes: usize = calls.iter().map(memory_bytes).sum();
        let held = Arc::clone(&self.held);
        let encode = move || {
            // A draft may stay alone.
            let contexts = if is_draft { vec![] } else { held.shorten(&mut calls) };
            payload::encode(calls).map(|payload| (contexts, payload))
        };
        let (contexts, payload) = if bytes >= LONG_WORK {
            tokio::task::spawn_blocking(encode).await.map_err(|_| self.closed_error())??
        } else {
            encode()?
        };
        let (done, committed) = oneshot::channel();
        let stored = async {
            let append = Append { payload, calls: ids, is_draft, done };
            queue.send(append).await.map_err(|_| self.closed_error())?;
            drop(queue);
            committed.await.map_err(|_| self.closed_error())??;
            self.held.hold(contexts);
            Ok(())
        };
        match self.room.patience() {
            None => stored.await,
            // What has its place in the queue is written even so, once the disk takes it.
            Some(patience) => {
                let stored = tokio::time::timeout(patience, stored).await;
                stored.unwrap_or_else(|_| Err(self.room.stalled()))
            }
        }
    }
}

/// No code panics while it holds one of these locks, so a poisoned one is still whole.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// The writer thread: gathers what waits, commits it, tells the waiting; seals by size and age.
async fn write(
    mut journal: Journal,
    mut drafts: Drafts,
    dir: &Path,
    mut appends: mpsc::Receiver<Append>,
    compactor: &Compactor,
    room: &Room,
) -> Closed {
    let mut closed = Closed::default();
    let mut sealed: Vec<Sealed> = vec![];
    loop {
        let first = match journal.due() {
            None => appends.recv().await,
            Some(due) => match tokio::time::timeout(journal::until(due), appends.recv()).await {
                Ok(first) => first,
                Err(_) => {
                    compactor.push(journal.seal());
                    continue;
                }
            },
        };
        let Some(first) = first else { break };
        let mut bytes = first.payload.len();
        let mut batch = vec![first];
        while bytes < COMMIT_BYTES
            && let Ok(next) = appends.try_recv()
        {
            bytes += next.payload.len();
            batch.push(next);
        }
        let (early, batch): (Vec<Append>, Vec<Append>) = batch.into_iter().partition(|a| a.is_draft);
        if !early.is_empty() {
            let wanted: Vec<(&Payload, &[CallId])> =
                early.iter().map(|a| (&a.payload, a.calls.as_slice())).collect();
            room.begins();
            tell(dir, room, drafts.write(&wanted), early);
        }
        if !batch.is_empty() {
            let payloads: Vec<&Payload> = batch.iter().map(|append| &append.payload).collect();
            room.begins();
            let committed = journal.commit(&payloads, &mut sealed);
            if committed.is_ok() {
                closed.appends += batch.len() as u64;
                closed.commits += 1;
                metrics::counter!("lego_capture_commits_total").increment(1);
                metrics::counter!("lego_capture_appends_total").increment(batch.len() as u64);
                metrics::counter!("lego_capture_bytes_total").increment(bytes as u64);
                drafts.settle(batch.iter().flat_map(|append| &append.calls));
            }
            tell(dir, room, committed, batch);
        }
        compactor.push(sealed.drain(..));
        // A steady stream of appends must not keep an old segment open.
        if journal.due().is_some_and(|due| journal::until(due).is_zero()) {
            compactor.push(journal.seal());
        }
    }
    compactor.push(journal.seal());
    drafts.close();
    closed
}

/// Tells those who wait how their commit went.
fn tell(dir: &Path, room: &Room, committed: std::io::Result<()>, waiting: Vec<Append>) {
    if let Err(error) = &committed {
        tracing::error!(dir = %dir.display(), %error, "captures could not be written");
        metrics::counter!("lego_capture_failed_commits_total").increment(1);
    }
    let committed = committed.map_err(|error| sink_error(dir, &error));
    room.ended(committed.as_ref().copied());
    for append in waiting {
        // Whoever stopped waiting does not need the answer.
        let _ = append.done.send(committed.clone());
    }
}

/// Makes records of the drafts of an earlier writer; then their files are not needed any more.
fn keep(
    storage: &dyn Storage,
    journal: &mut Journal,
    dir: &Path,
    unfinished: Vec<Call>,
    files: &[PathBuf],
    sealed: &mut Vec<Sealed>,
) -> Result<(), CaptureError> {
    if !unfinished.is_empty() {
        tracing::warn!(calls = unfinished.len(), "calls that ran when lego ended are recorded as aborted");
        let payload =
            payload::encode(unfinished).map_err(|error| CaptureError::corrupt(dir, error.to_string()))?;
        journal.commit(&[&payload], sealed).map_err(CaptureError::io("write to", dir))?;
    }
    for file in files {
        storage.remove(file).map_err(CaptureError::io("delete", file))?;
    }
    Ok(())
}

#[cfg(test)]
mod power;
#[cfg(test)]
mod tests;
