//! Names in a capture folder.
//!
//! ```text
//! LOCK                                     who writes
//! journal/00000007-9f3ab2c1d4e5f607.journal          a segment: number, salt
//! journal/….tmp                            a Parquet file in the making, or a part of what is being merged, sorted
//! journal/….damaged                        a segment that could not be read in full, for a person to see
//! date=2026-11-29/calls-00000007-9f3ab2c1d4e5f607.parquet   the same segment, for good
//! date=2026-11-29/merged-00000007-0a1b2c3d4e5f6071.parquet  several such files in one; it says which
//! .pruned-date=2026-10-01                  a day that is being removed: no reader looks into it
//! ```
//! Whatever matches `*.parquet` is whole. A Parquet file carries its segment's name, so that a segment whose
//! Parquet exists, but which is not deleted yet, is counted once. A merged file has the highest number of those that it
//! replaces.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::error::CaptureError;
use super::frame::Salt;

/// What the name of a day begins with that is being removed.
const PRUNED: &str = ".pruned-";

/// Number and salt of a segment: its name, unique for all time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct SegmentName {
    pub(super) number: u64,
    pub(super) salt: Salt,
}

impl SegmentName {
    pub(super) fn stem(self) -> String {
        let salt: String = self.salt.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{:08}-{salt}", self.number)
    }

    fn parse(stem: &str) -> Option<Self> {
        let (number, hex) = stem.split_once('-')?;
        let mut salt = [0; 8];
        if hex.len() != 16 || !hex.is_ascii() {
            return None;
        }
        for (i, byte) in salt.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).ok()?;
        }
        Some(Self { number: number.parse().ok()?, salt })
    }

    pub(super) fn journal_path(self, dir: &Path) -> PathBuf {
        journal_dir(dir).join(format!("{}.journal", self.stem()))
    }

    /// Of a part of what is being merged, sorted.
    pub(super) fn run_path(self, dir: &Path, date: &str, number: usize) -> PathBuf {
        journal_dir(dir).join(format!("{}-{date}-run{number}.tmp", self.stem()))
    }

    pub(super) fn temporary_path(self, dir: &Path, date: &str) -> PathBuf {
        journal_dir(dir).join(format!("{}-{date}.tmp", self.stem()))
    }

    pub(super) fn parquet_path(self, dir: &Path, date: &str) -> PathBuf {
        day_folder(dir, date).join(format!("calls-{}.parquet", self.stem()))
    }

    pub(super) fn merged_path(self, dir: &Path, date: &str) -> PathBuf {
        day_folder(dir, date).join(format!("merged-{}.parquet", self.stem()))
    }
}

pub(super) fn journal_dir(dir: &Path) -> PathBuf {
    dir.join("journal")
}

/// The segments in `dir`, oldest first.
pub(super) fn segments(dir: &Path) -> Result<BTreeSet<SegmentName>, CaptureError> {
    let names = file_names(&journal_dir(dir))?;
    Ok(names.iter().filter_map(|n| SegmentName::parse(n.strip_suffix(".journal")?)).collect())
}

/// Where a segment is set aside.
pub(super) fn damaged_path(segment: &Path) -> PathBuf {
    segment.with_extension("damaged")
}

/// The segments in `dir` that were set aside.
pub(super) fn damaged(dir: &Path) -> Result<Vec<PathBuf>, CaptureError> {
    let journal = journal_dir(dir);
    let names = file_names(&journal)?.into_iter().filter(|name| name.ends_with(".damaged"));
    Ok(names.map(|name| journal.join(name)).collect())
}

/// What the name of a Parquet file tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DayFileName {
    /// It was made of this segment.
    Segment(SegmentName),
    /// It was made of several files.
    Merged(SegmentName),
}

/// What the name of a Parquet file tells, without its ending; `None` if it is not one of ours.
pub(super) fn day_file_name(stem: &str) -> Option<DayFileName> {
    if let Some(segment) = stem.strip_prefix("calls-") {
        return SegmentName::parse(segment).map(DayFileName::Segment);
    }
    stem.strip_prefix("merged-").and_then(SegmentName::parse).map(DayFileName::Merged)
}

/// The days in `dir` that have a folder, `YYYY-MM-DD`, sorted.
pub(super) fn days(dir: &Path) -> Result<Vec<String>, CaptureError> {
    let names = file_names(dir)?;
    Ok(names.iter().filter_map(|name| Some(name.strip_prefix("date=")?.to_owned())).collect())
}

pub(super) fn day_folder(dir: &Path, date: &str) -> PathBuf {
    dir.join(format!("date={date}"))
}

/// The day of a file in its folder.
pub(super) fn date(file: &Path) -> Option<String> {
    file.parent()?.file_name()?.to_str()?.strip_prefix("date=").map(str::to_owned)
}

/// Where a day lies that is being removed.
pub(super) fn pruned_folder(dir: &Path, date: &str) -> PathBuf {
    dir.join(format!("{PRUNED}date={date}"))
}

/// The days whose removal was begun and not ended, each with its folder.
pub(super) fn half_pruned(dir: &Path) -> Result<Vec<(String, PathBuf)>, CaptureError> {
    let date = |name: &String| Some(name.strip_prefix(PRUNED)?.strip_prefix("date=")?.to_owned());
    let names = file_names(dir)?.into_iter();
    Ok(names.filter_map(|name| Some((date(&name)?, dir.join(name)))).collect())
}

/// The Parquet files of a day, sorted, each with what its name tells.
pub(super) fn day_files(folder: &Path) -> Result<Vec<(PathBuf, Option<DayFileName>)>, CaptureError> {
    let mut files = vec![];
    for name in file_names(folder)? {
        if let Some(stem) = name.strip_suffix(".parquet") {
            files.push((folder.join(&name), day_file_name(stem)));
        }
    }
    Ok(files)
}

/// The highest number in the name of a Parquet file.
pub(super) fn last_number(dir: &Path) -> Result<Option<u64>, CaptureError> {
    let mut last = None;
    for date in days(dir)? {
        for (_, name) in day_files(&day_folder(dir, &date))? {
            if let Some(DayFileName::Segment(name) | DayFileName::Merged(name)) = name {
                last = last.max(Some(name.number));
            }
        }
    }
    Ok(last)
}

/// Names in a folder, sorted; a folder that is not there is empty.
pub(super) fn file_names(folder: &Path) -> Result<Vec<String>, CaptureError> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(vec![]);
        }
        Err(error) => return Err(CaptureError::io("list", folder)(error)),
    };
    let mut names = vec![];
    for entry in entries {
        let entry = entry.map_err(CaptureError::io("list", folder))?;
        // A name that is no text is none of lego's, and is seen all the same.
        names.push(entry.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

/// Makes what was created or renamed in `folder` survive a power loss.
pub(super) fn sync_folder(folder: &Path) -> io::Result<()> {
    fs::File::open(folder)?.sync_all()
}

/// Microseconds of a UTC day.
pub(super) const DAY_US: i64 = 86_400_000_000;

/// `YYYY-MM-DD`, UTC, of a time in µs since the Unix epoch.
///
/// Days to civil date: H. Hinnant, "chrono-compatible low-level date algorithms", `civil_from_days`.
pub fn date_of(received_at_us: i64) -> String {
    let days = received_at_us.div_euclid(DAY_US) + 719_468;
    let era = days.div_euclid(146_097);
    let day_of_era = days.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_utc_days() {
        for (seconds, date) in [
            (0, "1970-01-01"),
            (-1, "1969-12-31"),
            (951_782_399, "2000-02-28"),
            (951_782_400, "2000-02-29"),
            (951_868_800, "2000-03-01"),
            (1_796_083_199, "2026-11-30"),
            (4_107_542_400, "2100-03-01"),
        ] {
            assert_eq!(date_of(seconds * 1_000_000), date);
        }
    }

    #[test]
    fn a_segment_name_reads_back() {
        let name = SegmentName { number: 7, salt: [0, 1, 2, 0xff, 4, 5, 6, 7] };
        assert_eq!(name.stem(), "00000007-000102ff04050607");
        assert_eq!(SegmentName::parse(&name.stem()), Some(name));
        assert_eq!(SegmentName::parse("7-zz"), None);
    }
}
