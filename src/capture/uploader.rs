//! The thread that takes Parquet files to object storage, and their copies here away once they are known to be there.
//!
//! It looks for them in the folder, so that what an earlier writer left is found like what the compacting thread has just
//! made. While the storage cannot be reached the files wait: calls go on being captured, and the log and two gauges tell
//! it. A crash at any point leaves a file here, there, or in both places, and readers take the two as one.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::error::CaptureError;
use super::layout::{self, DayFileName};
use super::mark::Mark;
use super::merge;
use super::place::Place;
use super::remote::{Remote, Uploaded};

/// Time between two looks at the folder.
const PAUSE: Duration = Duration::from_secs(1);
/// Longest pause after a failure; pauses double until then.
const LONGEST: Duration = Duration::from_secs(60);
/// How often the log tells that files wait.
const TELL: Duration = Duration::from_secs(60);

/// Uploads the files of a folder until it is told to finish.
pub struct Uploader {
    shared: Arc<Shared>,
    thread: io::Result<JoinHandle<Vec<String>>>,
}

#[derive(Default)]
struct Shared {
    /// Until when to go on, once that is known.
    until: Mutex<Option<Instant>>,
    changed: Condvar,
}

impl Shared {
    /// No code panics while it holds this lock.
    fn until(&self) -> MutexGuard<'_, Option<Instant>> {
        self.until.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Uploader {
    /// Starts, if `place` is in object storage. Its writer is open, and stays so at least until [`Uploader::finish`].
    #[must_use]
    pub fn start(place: &Place) -> Option<Self> {
        let remote = place.remote()?.clone();
        let shared = Arc::new(Shared::default());
        let (dir, for_thread) = (place.dir().to_owned(), Arc::clone(&shared));
        let work = move || Work::new(dir, remote).run(&for_thread);
        let thread = std::thread::Builder::new().name("lego-upload".to_owned()).spawn(work);
        Some(Self { shared, thread })
    }

    /// Uploads what there is, for as long as `patience` if it fails, and tells why files still wait. Blocks.
    pub fn finish(self, patience: Duration) -> Vec<String> {
        *self.shared.until() = Some(Instant::now() + patience);
        self.shared.changed.notify_one();
        match self.thread {
            Ok(thread) => thread.join().unwrap_or_else(|_| vec!["the uploading thread panicked".to_owned()]),
            Err(error) => vec![format!("the uploading thread could not start: {error}")],
        }
    }
}

struct Work {
    dir: PathBuf,
    remote: Remote,
    /// Files that are there, whose copies here are being read.
    done: HashSet<PathBuf>,
    /// Since when it fails, and when that was told last.
    failing: Option<Instant>,
    told: Option<Instant>,
}

/// What is in the folder for the storage.
#[derive(Default)]
struct Waiting {
    files: Vec<(PathBuf, String)>,
    bytes: u64,
}

impl Work {
    fn new(dir: PathBuf, remote: Remote) -> Self {
        Self { dir, remote, done: HashSet::new(), failing: None, told: None }
    }

    fn run(mut self, shared: &Shared) -> Vec<String> {
        let (mut pause, mut is_last) = (PAUSE, false);
        loop {
            // Before the look, so that the last one sees all that there will be.
            let until = *shared.until();
            if until.is_some() && !is_last {
                is_last = true;
                self.tell_of_the_last();
            }
            let failed = self.round();
            if until.is_some_and(|until| failed.is_empty() || Instant::now() >= until) {
                return failed;
            }
            pause = if failed.is_empty() { PAUSE } else { LONGEST.min(pause * 2) };
            let now = shared.until();
            // It goes on at once if it was told to finish meanwhile.
            if until.is_some() == now.is_some() {
                let pause = if until.is_some() { PAUSE } else { pause };
                drop(shared.changed.wait_timeout(now, pause));
            }
        }
    }

    /// Uploads what waits, up to what fails for want of the storage. Gives back what went wrong.
    fn round(&mut self) -> Vec<String> {
        let mut failed = vec![];
        match self.waiting() {
            Ok(waiting) => {
                self.gauge(&waiting);
                for (path, rest) in &waiting.files {
                    match self.upload(path, rest) {
                        Ok(()) => {}
                        Err(error) => {
                            metrics::counter!("lego_capture_failed_uploads_total").increment(1);
                            failed.push(error.to_string());
                            // Another file may fare better only where it is the file.
                            if matches!(error, CaptureError::Remote { .. }) {
                                break;
                            }
                        }
                    }
                }
            }
            Err(error) => failed.push(error.to_string()),
        }
        let left = self.waiting().unwrap_or_default();
        self.gauge(&left);
        self.tell(&failed, &left);
        if let (Some(first), false) = (failed.first(), left.files.is_empty()) {
            let count = left.files.len();
            return vec![format!("{count} files, {} bytes, in {}: {first}", left.bytes, self.dir.display())];
        }
        failed
    }

    /// Parquet files whose segments are gone from the journal for good: until then one may be made again, and that by
    /// another lego.
    fn waiting(&self) -> Result<Waiting, CaptureError> {
        let journal = layout::journal_dir(&self.dir);
        let mut waiting = Waiting::default();
        for date in layout::days(&self.dir)? {
            for (path, name) in layout::day_files(&layout::day_folder(&self.dir, &date))? {
                let is_in_journal = match name {
                    Some(DayFileName::Segment(name)) => name.journal_path(&self.dir).exists(),
                    Some(DayFileName::Merged(_)) => false,
                    None => continue,
                };
                let file = path.file_name().and_then(|name| name.to_str());
                if let (Some(file), false) = (file, is_in_journal) {
                    waiting.bytes += fs::metadata(&path).map_or(0, |metadata| metadata.len());
                    waiting.files.push((path.clone(), format!("date={date}/{file}")));
                }
            }
        }
        if !waiting.files.is_empty() {
            layout::sync_folder(&journal).map_err(CaptureError::io("sync", &journal))?;
        }
        Ok(waiting)
    }

    fn upload(&mut self, path: &Path, rest: &str) -> Result<(), CaptureError> {
        let folder = path.parent().unwrap_or(path);
        if !self.done.contains(path) {
            // Nobody takes it away meanwhile.
            let _mark = Mark::share(folder)?;
            if !path.exists() {
                return Ok(());
            }
            let is_merged = rest.contains("/merged-");
            merge::sound(path, is_merged).map_err(|reason| {
                CaptureError::corrupt(path, format!("{reason}; so it is not uploaded, and stays here"))
            })?;
            let bytes = fs::metadata(path).map_or(0, |metadata| metadata.len());
            let uploaded = self.remote.put(path, rest)?;
            if uploaded == Uploaded::Now {
                metrics::counter!("lego_capture_uploads_total").increment(1);
                metrics::counter!("lego_capture_uploaded_bytes_total").increment(bytes);
            }
            tracing::debug!(path = %path.display(), ?uploaded, "captures are in object storage");
            self.done.insert(path.to_owned());
        }
        // Whoever reads it here keeps it until then.
        let Some(_mark) = Mark::alone(folder)? else {
            return Ok(());
        };
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(CaptureError::io("delete", path)(error));
            }
            _ => self.done.remove(path),
        };
        Ok(())
    }

    /// Before lego ends there may be much to do.
    fn tell_of_the_last(&self) {
        let waiting = self.waiting().unwrap_or_default();
        if !waiting.files.is_empty() {
            let (url, files, bytes) = (self.remote.url(), waiting.files.len(), waiting.bytes);
            tracing::info!(%url, files, bytes, "captures are uploaded before lego ends");
        }
    }

    fn gauge(&self, waiting: &Waiting) {
        metrics::gauge!("lego_capture_waiting_files").set(waiting.files.len() as f64);
        metrics::gauge!("lego_capture_waiting_bytes").set(waiting.bytes as f64);
    }

    /// Says it once when it begins to fail, then now and then, and when that is over.
    fn tell(&mut self, failed: &[String], left: &Waiting) {
        let (now, url) = (Instant::now(), self.remote.url());
        let Some(error) = failed.first() else {
            if let Some(since) = self.failing.take() {
                let seconds = now.duration_since(since).as_secs();
                tracing::info!(%url, seconds, "captures are being uploaded again");
            }
            self.told = None;
            return;
        };
        self.failing.get_or_insert(now);
        if self.told.is_none_or(|told| now.duration_since(told) >= TELL) {
            self.told = Some(now);
            let (files, bytes) = (left.files.len(), left.bytes);
            tracing::warn!(%url, files, bytes, %error, "captures wait on this machine: they cannot be uploaded");
        }
    }
}
