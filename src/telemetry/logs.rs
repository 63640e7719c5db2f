//! Log lines: stderr and `train.log`.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format::Writer as FormatWriter;
use tracing_subscriber::fmt::time::{FormatTime as _, SystemTime};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::registry::Registry;
use tracing_subscriber::{EnvFilter, Layer, fmt, reload};

use super::TelemetryError;

/// Takes a whole line that would go to stderr; a progress bar prints it above itself.
pub type LogSink = Box<dyn Fn(&[u8]) + Send + Sync>;

type Boxed = Box<dyn Layer<Registry> + Send + Sync>;

/// What can change after the subscriber is installed.
struct Handles {
    format: reload::Handle<Boxed, Registry>,
    filter: Box<dyn Fn(EnvFilter) + Send + Sync>,
}

static HANDLES: OnceLock<Handles> = OnceLock::new();
static SINK: Mutex<Option<LogSink>> = Mutex::new(None);
static FILE: Mutex<Option<Arc<File>>> = Mutex::new(None);

/// Starts logging to stderr: level from `RUST_LOG`, else `info`. Call once, first thing.
///
/// # Errors
/// [`TelemetryError::AlreadyInstalled`] if this process has a subscriber.
pub fn start() -> Result<(), TelemetryError> {
    let (format, format_handle) = reload::Layer::new(stderr_format(false));
    let (filter, filter_handle) = reload::Layer::new(filter("info"));
    let file = fmt::layer().with_ansi(false).with_target(false).with_writer(FileWriter);
    let subscriber = Registry::default().with(format).with(filter).with(file);
    tracing::subscriber::set_global_default(subscriber)
        .map_err(|_| TelemetryError::AlreadyInstalled("a log subscriber"))?;
    let handles = Handles {
        format: format_handle,
        // Fails only when the subscriber is gone, and it is global.
        filter: Box::new(move |new| drop(filter_handle.reload(new))),
    };
    HANDLES.set(handles).map_err(|_| TelemetryError::AlreadyInstalled("a log subscriber"))
}

/// Sets level and form of the lines, as the config says. `RUST_LOG` goes before `level`.
pub fn configure(level: &str, is_json: bool) {
    if let Some(handles) = HANDLES.get() {
        (handles.filter)(filter(level));
        // As above: the subscriber is global.
        drop(handles.format.reload(stderr_format(is_json)));
    }
}

fn filter(level: &str) -> EnvFilter {
    // The client of object storage tells of each try, whose error lego tells once.
    let usual = || EnvFilter::new(format!("{level},object_store=error"));
    EnvFilter::try_from_default_env().unwrap_or_else(|_| usual())
}

fn stderr_format(is_json: bool) -> Boxed {
    let layer = fmt::layer().with_target(false).with_writer(StderrWriter);
    if is_json {
        layer.json().flatten_event(true).boxed()
    } else {
        layer.with_ansi(io::IsTerminal::is_terminal(&io::stderr())).boxed()
    }
}

/// Hands stderr lines to a progress bar from now on.
pub fn set_stderr_sink(sink: LogSink) {
    *SINK.lock().unwrap_or_else(PoisonError::into_inner) = Some(sink);
}

/// Log lines also go to a file until this is dropped.
#[derive(Debug)]
pub struct LogFile {
    path: PathBuf,
}

impl LogFile {
    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for LogFile {
    fn drop(&mut self) {
        *FILE.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// Appends log lines to this file (`train.log`), beside stderr.
///
/// # Errors
/// [`TelemetryError::Io`] when it cannot be opened.
pub fn log_to_file(path: &Path) -> Result<LogFile, TelemetryError> {
    let file = File::options().create(true).append(true).open(path).map_err(TelemetryError::io(path))?;
    *FILE.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(file));
    Ok(LogFile { path: path.to_owned() })
}

/// Writes a line to stderr for people. Nobody may read it any more: that ends nothing.
pub fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Writes a line to the log file alone: what people see by other means.
pub fn note(text: &str) {
    if let Some(file) = &*FILE.lock().unwrap_or_else(PoisonError::into_inner) {
        let mut time = String::new();
        // Neither can fail in a way that a line of a log could mend.
        let _ = SystemTime.format_time(&mut FormatWriter::new(&mut time));
        let _ = writeln!(&**file, "{time}  INFO {text}");
    }
}

struct StderrWriter;

impl<'a> MakeWriter<'a> for StderrWriter {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        Self
    }
}

impl Write for StderrWriter {
    /// The formatter writes each line at once.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        match &*SINK.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(sink) => sink(line),
            None => io::stderr().write_all(line)?,
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct FileWriter;

impl<'a> MakeWriter<'a> for FileWriter {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        Self
    }
}

impl Write for FileWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let file = FILE.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(file) = file {
            (&*file).write_all(line)?;
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
