//! Small files in object storage, several at a time: each waits for the network on a thread of its own, a few calls ahead
//! of its reader. Their order stays.

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Mutex, PoisonError};

use super::error::CaptureError;
use super::listing::ListedFile;
use super::parquet_calls::ParquetCalls;
use super::reader::Query;
use crate::record::Call;

/// Files that are read at once, and how long they may be together.
const FILES: usize = 8;
const BYTES: u64 = 32 << 20;
/// Calls of a file that wait to be taken.
const CALLS: usize = 16;

/// Calls of a file, or why it is not one of ours, or why that is not known.
pub(super) type Opened = Result<Result<Calls, String>, CaptureError>;

/// The calls of one file.
pub(super) enum Calls {
    Here(Box<ParquetCalls>),
    Ahead(Ahead),
}

/// Those that a thread reads.
pub(super) struct Ahead {
    path: PathBuf,
    /// `None` is its end: a thread that panics sends none.
    calls: Receiver<Option<Result<Call, CaptureError>>>,
    is_over: bool,
}

impl Iterator for Ahead {
    type Item = Result<Call, CaptureError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.is_over {
            return None;
        }
        let next = self.calls.recv().unwrap_or_else(|_| {
            self.is_over = true;
            Some(Err(CaptureError::corrupt(&self.path, "the thread that read it panicked")))
        });
        self.is_over |= next.is_none();
        next
    }
}

impl Iterator for Calls {
    type Item = Result<Call, CaptureError>;

    fn next(&mut self) -> Option<Self::Item> {
        match self {
            Self::Here(calls) => calls.next(),
            Self::Ahead(calls) => calls.next(),
        }
    }
}

/// What was begun of a file before its turn.
#[derive(Debug, Default)]
pub(super) struct Begun(Mutex<Option<Receiver<Opened>>>);

impl Begun {
    fn slot(&self) -> std::sync::MutexGuard<'_, Option<Receiver<Opened>>> {
        // No code panics while it holds this lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self, file: &ListedFile, query: &Query) {
        let mut slot = self.slot();
        if slot.is_some() {
            return;
        }
        let (told, opened) = sync_channel(1);
        let (file, query) = (file.clone(), query.clone());
        let work = move || {
            let calls = match ParquetCalls::of(&file, &query) {
                Ok(Ok(calls)) => calls,
                failed => {
                    return drop(
                        told.send(failed.map(|opened| opened.map(|calls| Calls::Here(Box::new(calls))))),
                    );
                }
            };
            let (give, taken) = sync_channel(CALLS);
            let ahead = Ahead { path: file.path.clone(), calls: taken, is_over: false };
            // Whoever reads them may have seen enough at any time.
            if told.send(Ok(Ok(Calls::Ahead(ahead)))).is_err() {
                return;
            }
            let _ = calls.map(Some).chain([None]).all(|call| give.send(call).is_ok());
        };
        // Without a thread it is read when its turn comes.
        if std::thread::Builder::new().name("lego-ahead".to_owned()).spawn(work).is_ok() {
            *slot = Some(opened);
        }
    }
}

/// The calls of a file, while those of `next` are begun that are in object storage.
pub(super) fn open<'a>(
    file: &ListedFile,
    next: impl Iterator<Item = &'a ListedFile>,
    query: &Query,
) -> Opened {
    let mut bytes = file.bytes();
    for next in next.take(FILES - 1) {
        bytes += next.bytes();
        let Some(begun) = next.begun().filter(|_| bytes <= BYTES) else { break };
        begun.begin(next, query);
    }
    let begun = file.begun().and_then(|begun| begun.slot().take());
    match begun.and_then(|begun| begun.recv().ok()) {
        Some(opened) => opened,
        None => Ok(ParquetCalls::of(file, query)?.map(|calls| Calls::Here(Box::new(calls)))),
    }
}
