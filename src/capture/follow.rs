//! The newest calls of a folder, and then those that are captured, as they come.
//!
//! A follower keeps each segment of the journal open and goes on where it stopped, so that nothing is lost when the
//! segment becomes Parquet. One that came and went between two looks is known by the name of its Parquet file, and read
//! from there. Every call comes once.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap, HashSet};
use std::fs::File;
use std::io::{self, BufReader, Read, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::error::CaptureError;
use super::frame::{self, Frames, HEADER_LEN, Salt, Step};
use super::layout::{self, DayFileName, SegmentName, date_of};
use super::listing::{ListedFile, Listing, OpenSegment, remote_day};
use super::mark::Mark;
use super::parquet_calls::{self, ParquetCalls};
use super::payload;
use super::place::Place;
use super::reader::{Query, Whole};
use crate::record::{Call, CallId};

/// Looks at damaged bytes until they are passed over: a writer may be taking a failed write back.
const PATIENCE: u32 = 10;
/// Time between two looks at object storage.
const AFAR: Duration = Duration::from_secs(5);

/// Follows one folder.
pub struct Follow {
    dir: PathBuf,
    place: Place,
    /// When object storage was listed last.
    listed: Instant,
    query: Query,
    whole: Whole,
    segments: BTreeMap<SegmentName, Followed>,
    /// Names of the Parquet files whose calls were given, or come from a segment.
    known: HashSet<String>,
    /// Names of files that came with the last look, of segments that were not seen. They may not all be there yet: a
    /// segment of two days becomes two files.
    fresh: HashSet<String>,
    /// The same of files in object storage, by day too: those of one segment do not come at once.
    afar: HashSet<PathBuf>,
    warnings: Vec<String>,
}

/// A segment, and how far it was read.
struct Followed {
    path: PathBuf,
    file: File,
    salt: Option<Salt>,
    at: u64,
    /// A call written twice comes once.
    seen: HashSet<(CallId, u16)>,
    looks_at_damage: u32,
}

/// By time; the newest of a few are kept.
struct ByTime(Call);

impl ByTime {
    fn key(&self) -> (i64, CallId, u16) {
        (self.0.received_at, self.0.call_id, self.0.choice_index)
    }
}

impl PartialEq for ByTime {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for ByTime {}

impl PartialOrd for ByTime {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for ByTime {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.key().cmp(&other.key())
    }
}

/// The newest calls, oldest on top.
struct Newest {
    count: usize,
    calls: BinaryHeap<Reverse<ByTime>>,
}

impl Newest {
    fn push(&mut self, call: Call) {
        self.calls.push(Reverse(ByTime(call)));
        if self.calls.len() > self.count {
            self.calls.pop();
        }
    }

    /// Nothing of an earlier day can be among them.
    fn is_settled(&self, date: &str) -> bool {
        let oldest = self.calls.peek().map(|Reverse(ByTime(call))| date_of(call.received_at));
        self.count == 0 || (self.calls.len() == self.count && oldest.is_some_and(|oldest| *oldest >= *date))
    }
}

impl Follow {
    /// The newest `count` calls that `query` asks for, oldest first, and what follows them. Days before those that hold
    /// them are not read.
    ///
    /// # Errors
    /// The folder is missing, or a file cannot be read.
    pub fn open(
        dir: impl Into<Place>,
        query: Query,
        count: usize,
    ) -> Result<(Vec<Call>, Self), CaptureError> {
        let place: Place = dir.into();
        let dir = place.dir();
        // What comes after this list and before the next is in that one, or not known yet.
        let before = parquet_names(dir)?;
        let Listing { segments, files, .. } = Listing::of(&place, 0, None)?;
        place.expect_some(segments.is_empty() && files.is_empty())?;
        let here = files.iter().filter(|file| !file.is_afar());
        let listed = here.map(|file| file.stem().to_owned());
        let mut follow = Self {
            dir: dir.to_owned(),
            place: place.clone(),
            listed: Instant::now(),
            whole: Whole::new(&place, &query),
            query,
            segments: BTreeMap::new(),
            known: before.into_keys().chain(listed).collect(),
            fresh: HashSet::new(),
            afar: files.iter().filter(|file| file.is_afar()).map(|file| file.path.clone()).collect(),
            warnings: vec![],
        };
        for file in files.iter().filter(|file| !file.is_afar() && file.is_merged()) {
            follow.know_replaced(&file.path);
        }
        let mut newest = Newest { count, calls: BinaryHeap::new() };
        for open in segments {
            let name = open.name;
            let mut followed = Followed::of(open);
            let passed =
                followed.read(&follow.query, &mut follow.whole, false, &mut |call| newest.push(call))?;
            follow.warnings.extend(passed);
            follow.segments.insert(name, followed);
        }
        let mut days: BTreeMap<&str, Vec<&ListedFile>> = BTreeMap::new();
        for file in &files {
            days.entry(&file.date).or_default().push(file);
        }
        for (date, files) in days.into_iter().rev() {
            for file in files {
                let calls = ParquetCalls::of(file, &follow.query)?;
                follow.read_parquet(&file.path, calls, &mut |call| newest.push(call))?;
            }
            if newest.is_settled(date) {
                break;
            }
        }
        let calls = newest.calls.into_sorted_vec();
        Ok((calls.into_iter().rev().map(|Reverse(ByTime(call))| call).collect(), follow))
    }

    /// Files that could not be read since this was last asked.
    pub fn warnings(&mut self) -> Vec<String> {
        std::mem::take(&mut self.warnings)
    }

    /// Gives what was captured since the last look, in the order in which it was written.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn look(&mut self, give: &mut dyn FnMut(Call)) -> Result<(), CaptureError> {
        self.whole.look_again();
        let there = layout::segments(&self.dir)?;
        for name in &there {
            let path = name.journal_path(&self.dir);
            if self.segments.contains_key(name) || self.known.contains(&parquet_stem(*name)) {
                continue;
            }
            match File::open(&path) {
                Ok(file) => {
                    self.segments.insert(*name, Followed::of(OpenSegment { name: *name, path, file }));
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(CaptureError::io("open", &path)(error)),
            }
        }
        let parquet = parquet_names(&self.dir)?;
        let last = there.last();
        for (name, followed) in &mut self.segments {
            // Only of the last one a failed write may be taken back.
            let passed = followed.read(&self.query, &mut self.whole, Some(name) == last, give)?;
            self.warnings.extend(passed);
        }
        // What is no longer there was read to its end just now.
        let known = &mut self.known;
        self.segments.retain(|name, _| {
            let stays = there.contains(name);
            if !stays {
                known.insert(parquet_stem(*name));
            }
            stays
        });
        let is_in_journal = |stem: &str| {
            let name = layout::day_file_name(stem);
            matches!(name, Some(DayFileName::Segment(name)) if there.contains(&name))
        };
        let new = parquet.into_iter().filter(|(stem, _)| !self.known.contains(stem) && !is_in_journal(stem));
        let mut fresh = HashSet::new();
        for (stem, paths) in new.collect::<Vec<_>>() {
            if !self.fresh.contains(&stem) {
                fresh.insert(stem);
                continue;
            }
            // Its segment was there before the last look, and is gone now: so all its files are there.
            if stem.starts_with("merged-") {
                self.check_merged(&paths);
            } else {
                let marks = paths.iter().filter_map(|path| path.parent()).map(Mark::share);
                let _marks = marks.collect::<Result<Vec<_>, _>>()?;
                if !paths.iter().all(|path| path.exists()) {
                    // It was uploaded, or merged, meanwhile.
                    continue;
                }
                for path in &paths {
                    let calls = ParquetCalls::open(path, &self.query);
                    self.read_parquet(path, calls, give)?;
                }
            }
            self.known.insert(stem);
        }
        self.fresh = fresh;
        self.look_afar(&there, give)
    }

    /// What other machines uploaded, and what was uploaded here between two looks: looked for now and then.
    fn look_afar(
        &mut self,
        there: &BTreeSet<SegmentName>,
        give: &mut dyn FnMut(Call),
    ) -> Result<(), CaptureError> {
        let Some(remote) = self.place.remote().cloned().filter(|_| self.listed.elapsed() >= AFAR) else {
            return Ok(());
        };
        // New calls are of the newest days; those of another machine may be a night late.
        for date in remote.days()?.iter().rev().take(2) {
            for file in remote_day(&remote, date)? {
                let stem = file.stem().to_owned();
                let name = layout::day_file_name(&stem);
                let is_in_journal = matches!(name, Some(DayFileName::Segment(name)) if there.contains(&name));
                let is_known = self.known.contains(&stem) || self.fresh.contains(&stem);
                if is_in_journal || is_known || self.afar.contains(&file.path) {
                    continue;
                }
                if !file.is_merged() {
                    let calls = ParquetCalls::of(&file, &self.query)?;
                    self.read_parquet(&file.path, calls, give)?;
                }
                self.afar.insert(file.path);
            }
        }
        self.listed = Instant::now();
        Ok(())
    }

    fn read_parquet(
        &mut self,
        path: &Path,
        calls: Result<ParquetCalls, String>,
        give: &mut dyn FnMut(Call),
    ) -> Result<(), CaptureError> {
        match calls {
            Ok(calls) => {
                for call in calls {
                    if let Some(call) = self.whole.make(call?)? {
                        give(call);
                    }
                }
            }
            Err(reason) => self.warnings.push(format!("left out {}: {reason}", path.display())),
        }
        Ok(())
    }

    /// What is in a merged file is read, or older than what is followed: files that it is merged into say nothing new.
    fn know_replaced(&mut self, path: &Path) {
        // One that cannot be read is told where its calls are.
        if let Ok(file) = parquet_calls::open(path) {
            self.known.extend(parquet_calls::replaces(&file).all());
        }
    }

    /// A merged file has only what was given before, unless files came and were merged between two looks.
    fn check_merged(&mut self, paths: &[PathBuf]) {
        for path in paths {
            let replaces =
                parquet_calls::open(path).map(|file| parquet_calls::replaces(&file)).unwrap_or_default();
            // One that was merged itself has no calls but those of files that are told as well.
            let is_missed = |stem: &String| stem.starts_with("calls-") && !self.known.contains(stem);
            let missed: Vec<String> = replaces.all().filter(is_missed).collect();
            self.known.extend(missed.iter().cloned());
            if !missed.is_empty() {
                let missed = missed.join(", ");
                self.warnings.push(format!(
                    "{missed} became part of {} before it was read: `lego capture ls` has its calls",
                    path.display()
                ));
            }
        }
    }
}

/// All Parquet files by name; a segment of two days has two files of one name.
fn parquet_names(dir: &Path) -> Result<HashMap<String, Vec<PathBuf>>, CaptureError> {
    let mut names: HashMap<String, Vec<PathBuf>> = HashMap::new();
    for date in layout::days(dir)? {
        for (path, _) in layout::day_files(&layout::day_folder(dir, &date))? {
            let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default().to_owned();
            names.entry(stem).or_default().push(path);
        }
    }
    Ok(names)
}

fn parquet_stem(name: SegmentName) -> String {
    format!("calls-{}", name.stem())
}

impl Followed {
    fn of(open: OpenSegment) -> Self {
        let OpenSegment { path, file, .. } = open;
        Self { path, file, salt: None, at: 0, seen: HashSet::new(), looks_at_damage: 0 }
    }

    /// Reads on, up to the last whole frame. Gives what is to be said of bytes that were passed over. `is_patient`: that
    /// is, after some looks.
    fn read(
        &mut self,
        query: &Query,
        whole: &mut Whole,
        is_patient: bool,
        give: &mut dyn FnMut(Call),
    ) -> Result<Option<String>, CaptureError> {
        let mut damaged = 0;
        self.read_on(query, whole, is_patient, &mut damaged, give)?;
        Ok((damaged > 0).then(|| {
            format!("{damaged} damaged bytes in {}: the calls in them are lost", self.path.display())
        }))
    }

    fn read_on(
        &mut self,
        query: &Query,
        whole: &mut Whole,
        is_patient: bool,
        damaged: &mut u64,
        give: &mut dyn FnMut(Call),
    ) -> Result<(), CaptureError> {
        let length = self.file.metadata().map_err(CaptureError::io("read", &self.path))?.len();
        // A writer took back what it could not sync.
        self.at = self.at.min(length);
        if self.at == length {
            return Ok(());
        }
        let Some(salt) = self.salt()? else {
            return Ok(());
        };
        self.file.seek(SeekFrom::Start(self.at)).map_err(CaptureError::io("read", &self.path))?;
        let source = BufReader::with_capacity(1 << 20, &self.file);
        let mut frames = Frames::at_byte(source, salt, self.at);
        loop {
            match frames.step().map_err(CaptureError::io("read", &self.path))? {
                Step::Frame(bytes) => {
                    let calls = payload::decode(&bytes);
                    for call in calls.map_err(|reason| CaptureError::corrupt(&self.path, reason))? {
                        if self.seen.insert((call.call_id, call.choice_index))
                            && query.may_want(&call)
                            && let Some(call) = whole.make(call)?
                        {
                            give(call);
                        }
                    }
                }
                Step::Damage { bytes, .. } => {
                    self.looks_at_damage += 1;
                    if is_patient && self.looks_at_damage < PATIENCE {
                        return Ok(());
                    }
                    *damaged += bytes;
                }
                Step::End { at, .. } => {
                    self.at = at;
                    return Ok(());
                }
            }
            self.at = frames.at();
        }
    }

    fn salt(&mut self) -> Result<Option<Salt>, CaptureError> {
        if self.salt.is_none() {
            let mut head = Vec::new();
            self.file.seek(SeekFrom::Start(0)).map_err(CaptureError::io("read", &self.path))?;
            let read = self.file.by_ref().take(HEADER_LEN as u64).read_to_end(&mut head);
            read.map_err(CaptureError::io("read", &self.path))?;
            self.salt = frame::parse_header(&head);
            self.at = HEADER_LEN as u64;
        }
        Ok(self.salt)
    }
}
