//! What is in a capture folder at one moment, so that every call is there exactly once.
//!
//! Segments are listed and opened before Parquet files are listed. A segment that is made into Parquet in between is
//! still read from its open file, and its Parquet, known by its name, is left out; one that was gone already has its
//! Parquet in the list. A merged file names the files that it replaces: they are left out until they are deleted. Where
//! it replaces the Parquet of a segment that is open here, that segment is gone by now, and the list is made again.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::error::CaptureError;
use super::layout::{self, DayFileName, SegmentName};
use super::mark::Mark;
use super::parquet_calls;

/// Lists are made again only while files are merged, which takes longer than listing.
const TRIES: usize = 16;

/// A segment of the journal, open.
pub(super) struct OpenSegment {
    pub(super) name: SegmentName,
    pub(super) path: PathBuf,
    pub(super) file: File,
}

/// A Parquet file, which stays while this value lives.
#[derive(Debug, Clone)]
pub(super) struct ListedFile {
    pub(super) path: PathBuf,
    /// `YYYY-MM-DD`, as its folder says.
    pub(super) date: String,
    pub(super) _mark: Arc<Mark>,
}

impl ListedFile {
    /// It was made of several files.
    pub(super) fn is_merged(&self) -> bool {
        let stem = self.path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
        matches!(layout::day_file_name(stem), Some(DayFileName::Merged(_)))
    }
}

pub(super) struct Listing {
    /// Oldest first.
    pub(super) segments: Vec<OpenSegment>,
    /// By day and name.
    pub(super) files: Vec<ListedFile>,
}

impl Listing {
    /// All of `dir`, without the files of segments before `since`, and without those of days before that of `from`, µs
    /// since the Unix epoch.
    pub(super) fn of(dir: &Path, since: u64, from: Option<i64>) -> Result<Self, CaptureError> {
        if !dir.is_dir() {
            return Err(CaptureError::NoFolder { dir: dir.to_owned() });
        }
        let first = from.map(layout::date_of);
        for _ in 0..TRIES {
            if let Some(listing) = Self::once(dir, since, first.as_deref())? {
                return Ok(listing);
            }
        }
        let reason = "a merged file replaces a segment that is still in the journal: was a part of the folder copied back?";
        Err(CaptureError::corrupt(dir, reason))
    }

    fn once(dir: &Path, since: u64, first: Option<&str>) -> Result<Option<Self>, CaptureError> {
        let mut open: HashSet<SegmentName> = HashSet::new();
        let mut segments = vec![];
        for name in layout::segments(dir)?.into_iter().filter(|name| name.number >= since) {
            let path = name.journal_path(dir);
            match File::open(&path) {
                Ok(file) => {
                    open.insert(name);
                    segments.push(OpenSegment { name, path, file });
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(CaptureError::io("open", &path)(error)),
            }
        }
        let mut files = vec![];
        let days = layout::days(dir)?.into_iter();
        for date in days.filter(|date| first.is_none_or(|first| date.as_str() >= first)) {
            let folder = layout::day_folder(dir, &date);
            let Some(mark) = Mark::share(&folder)?.map(Arc::new) else {
                continue;
            };
            let found = layout::day_files(&folder)?;
            let mut replaced: HashSet<String> = HashSet::new();
            for (path, name) in &found {
                if matches!(name, Some(DayFileName::Merged(_))) {
                    replaced.extend(parquet_calls::replaces(path));
                }
            }
            let is_open = |stem: &String| {
                let name = layout::day_file_name(stem);
                matches!(name, Some(DayFileName::Segment(name)) if open.contains(&name))
            };
            if replaced.iter().any(is_open) {
                return Ok(None);
            }
            for (path, name) in found {
                let is_read_elsewhere = match name {
                    Some(DayFileName::Segment(name)) => name.number < since || open.contains(&name),
                    Some(DayFileName::Merged(name)) => name.number < since,
                    None => false,
                };
                let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
                if !is_read_elsewhere && !replaced.contains(stem) {
                    files.push(ListedFile { path, date: date.clone(), _mark: Arc::clone(&mark) });
                }
            }
        }
        Ok(Some(Self { segments, files }))
    }
}
