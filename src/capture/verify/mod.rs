//! Looks for whatever should not be in a folder: bytes that changed, records that contradict themselves or each other.
//!
//! Everything is read once, a row group or a frame at a time. What holds between records (no call twice, ids against
//! usage, other calls that a record names) needs the ids of all of them; where they are too many, some are looked at in
//! each of several passes ([`cross`]).

mod cross;
mod invariants;

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{BufReader, Read, Seek as _, SeekFrom};
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ParquetRecordBatchReaderBuilder};
use serde::Serialize;

use self::cross::Cross;
use super::error::CaptureError;
use super::filter::Filter;
use super::frame::{self, Frames, HEADER_LEN, Step};
use super::history::{Joiner, Parts};
use super::layout::{self, date_of};
use super::listing::{ListedFile, Listing, OpenSegment};
use super::parquet_calls::{self, RowGroup};
use super::place::Place;
use super::reader::{self, Query};
use super::remote::{Footer, Stored, Tally};
use super::summed::{self, Sum};
use super::{decode, drafts, footer, lock, payload};
use crate::record::{Call, CallId, SessionId};

/// Something that should not be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Which call, if that is known.
    pub call_id: Option<CallId>,
    pub choice_index: Option<u16>,
    pub session_id: Option<SessionId>,
    /// Where it lies.
    pub file: PathBuf,
    /// What should hold; one word that stays the same.
    pub invariant: &'static str,
    /// What was found instead.
    pub found: String,
}

impl Finding {
    fn of_file(file: &Path, invariant: &'static str, found: impl Into<String>) -> Self {
        let (file, found) = (file.to_owned(), found.into());
        Self { call_id: None, choice_index: None, session_id: None, file, invariant, found }
    }

    fn of_call(call: &Call, file: &Path, invariant: &'static str, found: impl Into<String>) -> Self {
        Self {
            call_id: Some(call.call_id),
            choice_index: Some(call.choice_index),
            session_id: Some(call.session_id.clone()),
            ..Self::of_file(file, invariant, found)
        }
    }
}

/// What was looked at.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Verified {
    /// Records whose invariants were looked at: one a choice.
    pub records: u64,
    pub parquet_files: u64,
    /// Parquet files from before there were checksums: only decoded.
    pub files_without_checksum: u64,
    pub segments: u64,
    pub bytes: u64,
    pub findings: u64,
    /// Process id of the writer that has the folder.
    pub writer: Option<String>,
    /// Bytes at the end of the open segment that the running writer has not finished.
    pub open_bytes: u64,
}

/// Is told of findings and of progress.
pub trait Watch {
    /// Something was found. `Break` ends the work.
    fn found(&mut self, finding: &Finding) -> ControlFlow<()>;
    /// So many bytes of so many are done.
    fn progress(&mut self, done: u64, all: u64);
}

/// Looks at all files of `dir`, and at the invariants of all records, or of those for which `filter` is true.
///
/// # Errors
/// The folder is missing, or a file cannot be read at all. Whatever is wrong inside a file is a finding.
pub fn verify(
    dir: impl Into<Place>,
    filter: Option<&Filter>,
    watch: &mut dyn Watch,
) -> Result<Verified, CaptureError> {
    let place = &dir.into();
    let dir = place.dir();
    // One that began or ended in between had a hand in what is listed.
    let writer = lock::writer(dir)?;
    let Listing { segments, files, .. } = Listing::of(place, 0, None)?;
    place.expect_some(segments.is_empty() && files.is_empty())?;
    let writer = writer.map_or_else(|| lock::writer(dir), |pid| Ok(Some(pid)))?;
    let size = |path: &Path| fs::metadata(path).map_or(0, |metadata| metadata.len());
    let all = segments.iter().map(|open| size(&open.path)).sum::<u64>()
        + files.iter().map(ListedFile::bytes).sum::<u64>();
    let verified = Verified { writer, ..Verified::default() };
    let joiner = Joiner::new(Parts { ids: true, bodies: true, routing: true });
    let cross = Cross::new(cross::MAX_CALLS);
    let mut work = Work { dir: place, filter, watch, verified, all, joiner, cross, is_stopped: false };
    for file in files {
        work.parquet(&file)?;
        work.done(file.bytes());
    }
    let active = work.verified.writer.as_ref().and(segments.last().map(|open| open.name));
    for open in segments {
        let bytes = size(&open.path);
        let is_active = active == Some(open.name);
        work.segment(open, is_active, false)?;
        work.done(bytes);
    }
    // What is known of calls that run, or that a writer left which died.
    for name in layout::segments(&drafts::folder(dir))? {
        let path = name.journal_path(&drafts::folder(dir));
        if let Ok(file) = File::open(&path) {
            let is_active = work.verified.writer.is_some();
            work.segment(OpenSegment { name, path, file }, is_active, true)?;
        }
    }
    for path in layout::damaged(dir)? {
        let found =
            "a writer set it aside: not all of it could be read. Delete it when its calls are not missed";
        work.tell(Finding::of_file(&path, "journal_set_aside", found));
    }
    work.across()?;
    Ok(work.verified)
}

struct Work<'a> {
    dir: &'a Place,
    filter: Option<&'a Filter>,
    watch: &'a mut dyn Watch,
    verified: Verified,
    all: u64,
    joiner: Joiner,
    cross: Cross,
    is_stopped: bool,
}

impl Work<'_> {
    fn tell(&mut self, finding: Finding) {
        if !self.is_stopped {
            self.verified.findings += 1;
            self.is_stopped = self.watch.found(&finding).is_break();
        }
    }

    fn done(&mut self, bytes: u64) {
        self.verified.bytes += bytes;
        self.watch.progress(self.verified.bytes, self.all.max(self.verified.bytes));
    }

    fn parquet(&mut self, listed: &ListedFile) -> Result<(), CaptureError> {
        if self.is_stopped {
            return Ok(());
        }
        self.verified.parquet_files += 1;
        let path = &listed.path;
        let mut file = listed.whole()?;
        let metadata = match footer::read(&file) {
            Ok(metadata) => metadata,
            Err(error) => {
                self.tell(Finding::of_file(path, "parquet_footer", error.to_string()));
                return Ok(());
            }
        };
        if let Err(reason) = parquet_calls::check_version(metadata.metadata()) {
            self.tell(Finding::of_file(path, "parquet_footer", reason));
            return Ok(());
        }
        if let Err(error) = footer::check_places(&file, &metadata) {
            self.tell(Finding::of_file(path, "parquet_checksum", error.to_string()));
        }
        file.seek(SeekFrom::Start(0)).map_err(CaptureError::io("read", path))?;
        let pairs = metadata.metadata().file_metadata().key_value_metadata();
        match summed::check(&file, pairs).map_err(CaptureError::io("read", path))? {
            Sum::Right => {}
            Sum::Absent if listed.is_merged() => {
                self.tell(Finding::of_file(path, "parquet_checksum", "it has lost its checksum".to_owned()));
            }
            Sum::Absent => self.verified.files_without_checksum += 1,
            Sum::Wrong(found) => self.tell(Finding::of_file(path, "parquet_checksum", found)),
        }
        for group in 0..metadata.metadata().num_row_groups() {
            // Damage may lead the library to what its authors thought impossible.
            let looked = catch_unwind(AssertUnwindSafe(|| self.row_group(listed, &file, &metadata, group)));
            let failed = match looked {
                Ok(looked) => looked?,
                Err(_) => Some("the Parquet library panicked".to_owned()),
            };
            if let Some(reason) = failed {
                let found = format!("row group {group}: {reason}");
                self.tell(Finding::of_file(path, "parquet_page", found));
            }
            if self.is_stopped {
                break;
            }
        }
        Ok(())
    }

    /// The rest of the row group cannot be read for the reason that is given back.
    fn row_group(
        &mut self,
        listed: &ListedFile,
        file: &File,
        metadata: &ArrowReaderMetadata,
        group: usize,
    ) -> Result<Option<String>, CaptureError> {
        let path = &listed.path;
        let open = || file.try_clone().map_err(CaptureError::io("open", path));
        let builder = ParquetRecordBatchReaderBuilder::new_with_metadata(open()?, metadata.clone());
        let rows = parquet_calls::batch_rows(builder.metadata(), &[group]);
        let batches = match builder.with_row_groups(vec![group]).with_batch_size(rows).build() {
            Ok(batches) => batches,
            Err(error) => return Ok(Some(error.to_string())),
        };
        let mut found = Found::default();
        for batch in batches {
            let batch = match batch {
                Ok(batch) => batch,
                Err(error) => return Ok(Some(error.to_string())),
            };
            for row in 0..batch.num_rows() {
                match decode::call_at(&batch, row) {
                    Ok(call) => {
                        found.add(&call);
                        self.record(call, path, Some(&listed.date))?;
                    }
                    Err(reason) => {
                        let call_id = decode::call_id_at(&batch, row);
                        let finding = Finding::of_file(path, "record_readable", reason);
                        self.tell(Finding { call_id, ..finding });
                    }
                }
            }
        }
        let file = Stored::here(open()?, &Tally::default(), &Footer::default());
        let builder = ParquetRecordBatchReaderBuilder::new_with_metadata(file, metadata.clone());
        let described = RowGroup::new(&builder, group);
        for (column, value, filter) in found.values() {
            if filter.is_some_and(|filter| !filter.may_hold(&described)) {
                let found = format!(
                    "row group {group}: statistics or Bloom filter say that {column} {value} is not in it"
                );
                self.tell(Finding::of_file(path, "parquet_statistics", found));
            }
        }
        Ok(None)
    }

    /// Drafts only have to be readable: their calls have records, or will.
    fn segment(&mut self, open: OpenSegment, is_active: bool, is_draft: bool) -> Result<(), CaptureError> {
        if self.is_stopped {
            return Ok(());
        }
        self.verified.segments += u64::from(!is_draft);
        let OpenSegment { path, mut file, .. } = open;
        let mut head = Vec::new();
        let read = file.by_ref().take(HEADER_LEN as u64).read_to_end(&mut head);
        read.map_err(CaptureError::io("read", &path))?;
        let Some(salt) = frame::parse_header(&head) else {
            if head.len() < HEADER_LEN && is_active {
                self.verified.open_bytes += head.len() as u64;
            } else if head.len() < HEADER_LEN {
                self.torn(&path, 0, head.len() as u64);
            } else {
                self.tell(Finding::of_file(
                    &path,
                    "journal_header",
                    "it is not a journal's: nothing of it is read",
                ));
            }
            return Ok(());
        };
        let mut frames = Frames::new(BufReader::with_capacity(1 << 20, file), salt);
        let mut suspects = vec![];
        while !self.is_stopped {
            let at = frames.at();
            match frames.step().map_err(CaptureError::io("read", &path))? {
                Step::Frame(bytes) => match payload::decode(&bytes) {
                    Ok(calls) => {
                        for call in calls.into_iter().filter(|_| !is_draft) {
                            self.record(call, &path, None)?;
                        }
                    }
                    Err(reason) => {
                        let found = format!("the frame at byte {at}: {reason}");
                        self.tell(Finding::of_file(&path, "record_readable", found));
                    }
                },
                Step::Damage { at, bytes } => suspects.push((at, bytes)),
                Step::End { at, torn } => {
                    match (torn, is_active) {
                        (0, _) => {}
                        (_, true) => self.verified.open_bytes += torn,
                        (_, false) => self.torn(&path, at, torn),
                    }
                    break;
                }
            }
        }
        // The running writer may have taken a failed write back while it was read.
        if is_active && !suspects.is_empty() {
            suspects.retain(|(at, _)| is_damaged_still(&path, salt, *at));
        }
        for (at, bytes) in suspects {
            let found =
                format!("{bytes} bytes at byte {at} have a wrong checksum: the calls in them are lost");
            self.tell(Finding::of_file(&path, "journal_checksum", found));
        }
        Ok(())
    }

    fn torn(&mut self, path: &Path, at: u64, bytes: u64) {
        let found = format!(
            "{bytes} bytes at byte {at}, its end, are no whole frame: a writer died while it wrote them, or the disk \
             changed them. `lego capture compact`, or the next writer, cuts them off"
        );
        self.tell(Finding::of_file(path, "journal_torn_tail", found));
    }

    /// A record as it lies in the store.
    fn record(&mut self, mut call: Call, file: &Path, date: Option<&str>) -> Result<(), CaptureError> {
        let (dir, filter) = (self.dir, self.filter);
        let read =
            |call: &Call, give: &mut dyn FnMut(&Call)| reader::stored(dir, call, &Query::default(), give);
        let is_wanted = match filter {
            Some(filter) if filter.uses_bodies() => filter.matches(&self.joiner.with_bodies(&call, read)?),
            filter => filter.is_none_or(|filter| filter.matches(&call)),
        };
        self.cross.see(&call, file, is_wanted);
        if !is_wanted || self.is_stopped {
            return Ok(());
        }
        self.verified.records += 1;
        let own = date_of(call.received_at);
        if date.is_some_and(|date| date != own) {
            self.tell(Finding::of_call(&call, file, "day", format!("it was received on {own}")));
        }
        // As the store says it: what is put back here has not got it.
        let base = call.shared.as_ref().and_then(|shared| shared.base);
        let rows = call.routing.as_ref().and_then(|routing| Some((routing.base()?, routing.shape().start)));
        let reasons = call.not_trainable_reasons.clone();
        let trainable = call.trainable;
        self.joiner.join(&mut call, read)?;
        let lost = call.not_trainable_reasons.split_off(reasons.len());
        call.trainable = trainable;
        for reason in lost {
            match (reason.as_str(), rows, base) {
                ("routing_base_missing", Some((base, start)), _) => {
                    let found = format!(
                        "its rows before {start} are to be in call {} choice {}, which is not there or has not got them",
                        base.call_id, base.choice_index
                    );
                    self.tell(Finding::of_call(&call, file, "routing_base", found));
                }
                (_, _, Some(base)) => {
                    let found = format!(
                        "a part of its bodies or ids is to be in call {} choice {}, which is not there or has other ones",
                        base.call_id, base.choice_index
                    );
                    self.tell(Finding::of_call(&call, file, "history_base", found));
                }
                _ => {
                    let found = "upstream_request cannot be made of client_request".to_owned();
                    self.tell(Finding::of_call(&call, file, "history_base", found));
                }
            }
        }
        let mut found = vec![];
        invariants::check(&call, &mut |invariant, text| found.push((invariant, text)));
        for (invariant, text) in found {
            self.tell(Finding::of_call(&call, file, invariant, text));
        }
        Ok(())
    }

    /// What holds between records.
    fn across(&mut self) -> Result<(), CaptureError> {
        loop {
            for finding in self.cross.findings() {
                self.tell(finding);
            }
            if self.is_stopped || !self.cross.next_pass() {
                return Ok(());
            }
            self.cross.read(self.dir, self.filter)?;
        }
    }
}

/// The values of a row group that statistics and Bloom filters speak of.
#[derive(Default)]
struct Found {
    sessions: HashSet<String>,
    trials: HashSet<String>,
    calls: Option<(CallId, CallId)>,
    /// The first and the last.
    received_at: Option<(i64, i64)>,
}

impl Found {
    fn add(&mut self, call: &Call) {
        if !self.sessions.contains(call.session_id.as_str()) {
            self.sessions.insert(call.session_id.to_string());
        }
        self.trials.extend(call.trial_id.as_ref().map(ToString::to_string));
        let (first, last) = self.calls.unwrap_or((call.call_id, call.call_id));
        self.calls = Some((first.min(call.call_id), last.max(call.call_id)));
        let at = call.received_at;
        let (first, last) = self.received_at.unwrap_or((at, at));
        self.received_at = Some((first.min(at), last.max(at)));
    }

    /// Columns, values, and the predicates that they are equal.
    fn values(self) -> impl Iterator<Item = (&'static str, String, Option<Filter>)> {
        let calls = self.calls.into_iter().flat_map(|(first, last)| [first, last]);
        let named =
            |name: &'static str| move |value: String| (name, value.clone(), Filter::equals(name, value));
        let sessions = self.sessions.into_iter().map(named("session_id"));
        let trials = self.trials.into_iter().map(named("trial_id"));
        let calls = calls.map(|id| id.to_string()).map(named("call_id"));
        let times = self.received_at.into_iter().flat_map(|(first, last)| [first, last]);
        let times =
            times.map(|at| ("received_at", at.to_string(), format!("received_at = {at}").parse().ok()));
        sessions.chain(trials).chain(calls).chain(times)
    }
}

/// Reads a segment again up to `wanted`. One that is gone has become Parquet, or was set aside.
fn is_damaged_still(path: &Path, salt: frame::Salt, wanted: u64) -> bool {
    let Ok(mut file) = File::open(path) else {
        return true;
    };
    if file.seek(SeekFrom::Start(HEADER_LEN as u64)).is_err() {
        return true;
    }
    let mut frames = Frames::new(BufReader::with_capacity(1 << 20, file), salt);
    loop {
        match frames.step() {
            Ok(Step::Damage { at, .. }) if at == wanted => return true,
            Ok(Step::End { .. }) => return false,
            Ok(_) if frames.at() > wanted => return false,
            Ok(_) => {}
            Err(_) => return true,
        }
    }
}
