//! What is in a capture folder at one moment, so that every call is there exactly once.
//!
//! Segments are listed and opened before Parquet files are listed. A segment that is made into Parquet in between is
//! still read from its open file, and its Parquet, known by its name, is left out; one that was gone already has its
//! Parquet in the list. A merged file names the files that it replaces: they are left out until they are deleted. Where
//! it replaces the Parquet of a segment that is open here, that segment is gone by now, and the list is made again.
//!
//! Object storage is listed last: what went there in between is in the list of the folder too, and stays there until
//! this list is dropped. A file that is in both places is read from the folder.

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use super::ahead::Begun;
use super::error::CaptureError;
use super::layout::{self, DayFileName, SegmentName};
use super::mark::Mark;
use super::parquet_calls;
use super::place::Place;
use super::remote::{self, Footer, Object, Remote, RemoteFile, Stored, Tally};

/// Lists are made again only while files are merged, which takes longer than listing.
const TRIES: usize = 16;

/// A segment of the journal, open.
pub(super) struct OpenSegment {
    pub(super) name: SegmentName,
    pub(super) path: PathBuf,
    pub(super) file: File,
}

/// A Parquet file. One of this machine stays while this value lives; one in object storage only `prune` takes away.
#[derive(Debug, Clone)]
pub(super) struct ListedFile {
    /// For people, and for its name: of one in object storage its URL.
    pub(super) path: PathBuf,
    /// `YYYY-MM-DD`, as its folder says.
    pub(super) date: String,
    /// Of all files that were listed together.
    read: Tally,
    at: At,
}

#[derive(Debug, Clone)]
enum At {
    Local { _mark: Arc<Mark>, footer: Footer },
    Remote { remote: Remote, object: Object, begun: Arc<Begun> },
}

impl ListedFile {
    /// It was made of several files.
    pub(super) fn is_merged(&self) -> bool {
        matches!(layout::day_file_name(self.stem()), Some(DayFileName::Merged(_)))
    }

    /// One of this machine, in a day that is marked.
    pub(super) fn here(path: PathBuf, date: &str, mark: &Arc<Mark>) -> Self {
        let at = At::Local { _mark: Arc::clone(mark), footer: Footer::default() };
        Self { path, date: date.to_owned(), read: Tally::default(), at }
    }

    /// Opens it for `look`, whose error says what is wrong with the file.
    ///
    /// # Errors
    /// Object storage could not be reached, or the file cannot be opened now, for want of file descriptors or of a right:
    /// nobody knows then what is in it.
    pub(super) fn look<T>(
        &self,
        look: impl FnOnce(&Stored) -> Result<T, String>,
    ) -> Result<Result<T, String>, CaptureError> {
        let file = match self.open() {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Err(error.to_string())),
            Err(error) => return Err(CaptureError::io("open", &self.path)(error)),
        };
        let looked = look(&file);
        file.failure().map_or(Ok(looked), Err)
    }

    /// It is in object storage.
    pub(super) const fn is_afar(&self) -> bool {
        matches!(self.at, At::Remote { .. })
    }

    /// Of one in object storage: what was read of it before its turn.
    pub(super) fn begun(&self) -> Option<&Begun> {
        match &self.at {
            At::Local { .. } => None,
            At::Remote { begun, .. } => Some(begun),
        }
    }

    /// Of its segment, or the last of those that are in it.
    fn number(&self) -> Option<u64> {
        let (DayFileName::Segment(name) | DayFileName::Merged(name)) = layout::day_file_name(self.stem())?;
        Some(name.number)
    }

    /// Its name without an ending.
    pub(super) fn stem(&self) -> &str {
        self.path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default()
    }

    /// Opens it; nothing is read yet.
    pub(super) fn open(&self) -> io::Result<Stored> {
        Ok(match &self.at {
            At::Local { footer, .. } => Stored::here(File::open(&self.path)?, &self.read, footer),
            At::Remote { remote, object, .. } => {
                Stored::Remote(RemoteFile::new(remote.clone(), object.clone(), &self.read))
            }
        })
    }

    /// All of it as a file of this machine.
    pub(super) fn whole(&self) -> Result<File, CaptureError> {
        match &self.at {
            At::Local { .. } => File::open(&self.path).map_err(CaptureError::io("open", &self.path)),
            At::Remote { remote, object, .. } => remote::copied(remote, object),
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        match &self.at {
            At::Local { .. } => fs::metadata(&self.path).map_or(0, |metadata| metadata.len()),
            At::Remote { object, .. } => object.bytes,
        }
    }

    /// What [`parquet_calls::replaces`] says of it.
    fn replaces(&self) -> Result<Vec<String>, CaptureError> {
        // One that is gone is told where it is read.
        Ok(self.look(|file| Ok(parquet_calls::replaces(file).all().collect()))?.unwrap_or_default())
    }
}

pub(super) struct Listing {
    /// Oldest first.
    pub(super) segments: Vec<OpenSegment>,
    /// By day and number.
    pub(super) files: Vec<ListedFile>,
    /// Counts what is read of them, by the list itself too.
    pub(super) read: Tally,
}

impl Listing {
    /// All that is in a place, without the files of segments before `since`, and without those of days before that of
    /// `from`, µs since the Unix epoch.
    pub(super) fn of(place: &Place, since: u64, from: Option<i64>) -> Result<Self, CaptureError> {
        place.require()?;
        let first = from.map(layout::date_of);
        for _ in 0..TRIES {
            if let Some(listing) = Self::once(place, since, first.as_deref())? {
                return Ok(listing);
            }
        }
        let reason = "a merged file replaces a segment that is still in the journal: was a part of the folder copied \
                      back, or copied while lego wrote? The next `lego proxy` on this folder puts that right";
        Err(CaptureError::corrupt(place.dir(), reason))
    }

    fn once(place: &Place, since: u64, first: Option<&str>) -> Result<Option<Self>, CaptureError> {
        let dir = place.dir();
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
        let is_wanted = |date: &String| first.is_none_or(|first| date.as_str() >= first);
        let mut days: BTreeMap<String, Vec<ListedFile>> = BTreeMap::new();
        for date in layout::days(dir)?.into_iter().filter(is_wanted) {
            let folder = layout::day_folder(dir, &date);
            let Some(mark) = Mark::share(&folder)?.map(Arc::new) else {
                continue;
            };
            for (path, _) in layout::day_files(&folder)? {
                days.entry(date.clone()).or_default().push(ListedFile::here(path, &date, &mark));
            }
        }
        // After the folder, from which files go only once they are there.
        if let Some(remote) = place.remote() {
            for date in remote.days()?.into_iter().filter(is_wanted) {
                let day = days.entry(date.clone()).or_default();
                let here: HashSet<String> = day.iter().map(|file| file.stem().to_owned()).collect();
                let files = remote_day(remote, &date)?.into_iter();
                day.extend(files.filter(|file| !here.contains(file.stem())));
            }
        }
        let (mut files, read) = (vec![], Tally::default());
        for mut day in days.into_values() {
            day.iter_mut().for_each(|file| file.read = read.clone());
            day.sort_by_cached_key(|file| (file.number(), file.stem().to_owned()));
            let mut replaced: HashSet<String> = HashSet::new();
            for file in day.iter().filter(|file| file.is_merged()) {
                replaced.extend(file.replaces()?);
            }
            let is_open = |stem: &String| {
                let name = layout::day_file_name(stem);
                matches!(name, Some(DayFileName::Segment(name)) if open.contains(&name))
            };
            // Whoever reads from some segment on wants to know what is there, be it twice.
            if since == 0 && replaced.iter().any(is_open) {
                return Ok(None);
            }
            files.extend(day.into_iter().filter(|file| {
                let is_read_elsewhere = match layout::day_file_name(file.stem()) {
                    Some(DayFileName::Segment(name)) => name.number < since || open.contains(&name),
                    Some(DayFileName::Merged(name)) => name.number < since,
                    None => false,
                };
                !is_read_elsewhere && !replaced.contains(file.stem())
            }));
        }
        Ok(Some(Self { segments, files, read }))
    }
}

/// The Parquet files of a day of a bucket.
pub(super) fn remote_day(remote: &Remote, date: &str) -> Result<Vec<ListedFile>, CaptureError> {
    let objects = remote.objects(date)?.into_iter();
    let files = objects.filter(|object| object.name.ends_with(".parquet") && !object.name.contains('/'));
    let file = |object: Object| ListedFile {
        path: remote.path(&object),
        date: date.to_owned(),
        read: Tally::default(),
        at: At::Remote { remote: remote.clone(), object, begun: Arc::default() },
    };
    Ok(files.map(file).collect())
}
