//! What an earlier writer left: cuts torn tails, removes leftovers, and says what it did.

use std::fs::{self, File};
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

use super::error::CaptureError;
use super::frame::{self, Frames, HEADER_LEN, Step};
use super::journal::Sealed;
use super::layout::{self, SegmentName};
use super::storage::Storage;

/// What [`super::Writer::open`] found in the folder.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recovery {
    /// Appends found whole in segments of earlier writers.
    pub appends: u64,
    /// Tails that were written in part and cut off. Nothing in them was acknowledged.
    pub torn: Vec<TornTail>,
    /// Damage in front of whole records: the disk changed what was written. These bytes are lost.
    pub damaged: Vec<TornTail>,
    /// Calls that were running and whose clients may have acted on a part of them: recorded as aborted.
    pub unfinished: u64,
    /// Files set aside because their header is not a journal's.
    pub quarantined: Vec<PathBuf>,
}

/// Bytes of a segment that hold no record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TornTail {
    /// The segment's file.
    pub segment: PathBuf,
    /// Where they begin.
    pub at: u64,
    /// How many they are.
    pub bytes: u64,
}

/// Makes the folder ready for a new writer. Returns the report and the segments to be made into Parquet.
pub(super) fn recover(storage: &dyn Storage, dir: &Path) -> Result<(Recovery, Vec<Sealed>), CaptureError> {
    remove_temporary(storage, dir)?;
    let mut recovery = Recovery::default();
    let mut sealed = vec![];
    for name in layout::segments(dir)? {
        sealed.extend(recover_segment(storage, dir, name, &mut recovery)?);
    }
    for tail in &recovery.torn {
        let TornTail { segment, at, bytes } = tail;
        tracing::warn!(segment = %segment.display(), at, bytes, "torn tail of the journal cut off");
    }
    for damage in &recovery.damaged {
        let TornTail { segment, at, bytes } = damage;
        tracing::error!(segment = %segment.display(), at, bytes, "damaged bytes in the journal");
    }
    Ok((recovery, sealed))
}

/// Files in the making, which nobody makes any more.
pub(super) fn remove_temporary(storage: &dyn Storage, dir: &Path) -> Result<(), CaptureError> {
    let journal = layout::journal_dir(dir);
    for name in layout::file_names(&journal)?.into_iter().filter(|name| name.ends_with(".tmp")) {
        let path = journal.join(name);
        storage.remove(&path).map_err(CaptureError::io("delete", &path))?;
    }
    Ok(())
}

fn recover_segment(
    storage: &dyn Storage,
    dir: &Path,
    name: SegmentName,
    recovery: &mut Recovery,
) -> Result<Option<Sealed>, CaptureError> {
    let path = name.journal_path(dir);
    let mut file = File::open(&path).map_err(CaptureError::io("open", &path))?;
    let mut head = Vec::new();
    let read = file.by_ref().take(HEADER_LEN as u64).read_to_end(&mut head);
    read.map_err(CaptureError::io("read", &path))?;
    let Some(salt) = frame::parse_header(&head) else {
        return discard_headless(storage, &path, recovery).map(|()| None);
    };
    let mut frames = Frames::new(BufReader::with_capacity(1 << 20, file), salt);
    let mut appends = 0;
    let end = loop {
        match frames.step().map_err(CaptureError::io("read", &path))? {
            Step::Frame(_) => appends += 1,
            Step::Damage { at, bytes } => {
                recovery.damaged.push(TornTail { segment: path.clone(), at, bytes });
            }
            Step::End { at, torn } => {
                // What was written before a kill may not be on disk yet, and what is found here is relied on: drafts go.
                storage.cut(&path, at).map_err(CaptureError::io("truncate", &path))?;
                if torn > 0 {
                    recovery.torn.push(TornTail { segment: path.clone(), at, bytes: torn });
                }
                break at;
            }
        }
    };
    if appends == 0 {
        storage.remove(&path).map_err(CaptureError::io("delete", &path))?;
        return Ok(None);
    }
    recovery.appends += appends;
    Ok(Some(Sealed { name, length: end }))
}

/// A header cut short is a segment that never took a record, also where the file's length came to disk before its bytes
/// did; a wrong one is kept aside for a person to see.
fn discard_headless(storage: &dyn Storage, path: &Path, recovery: &mut Recovery) -> Result<(), CaptureError> {
    let bytes = fs::read(path).map_err(CaptureError::io("read", path))?;
    let written = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    if written < HEADER_LEN {
        if !bytes.is_empty() {
            let tail = TornTail { segment: path.to_owned(), at: 0, bytes: bytes.len() as u64 };
            recovery.torn.push(tail);
        }
        return storage.remove(path).map_err(CaptureError::io("delete", path));
    }
    let aside = layout::damaged_path(path);
    storage.rename(path, &aside).map_err(CaptureError::io("rename", path))?;
    metrics::counter!("lego_capture_damaged_bytes_total").increment(bytes.len() as u64);
    tracing::error!(path = %aside.display(), "not a journal segment: set aside");
    recovery.quarantined.push(aside);
    Ok(())
}
