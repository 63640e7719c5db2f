//! The blocks of a stream until the call's record is written: in memory while it is short, in a file when it
//! is long or there are many.
//!
//! Invariants:
//! - The blocks come back in order, each as it was pushed.
//! - A file that cannot be written is an error of its call, as a store is that cannot be: memory is no place to wait for
//!   space on a disk.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use metrics::{Gauge, gauge};
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::capture::{SLOT_BYTES, Slot, Spill};
use crate::record::SinkError;

/// Copies in memory that together are longer go to the file, all but the last part of each.
const MEMORY_BYTES: usize = 16 << 20;
/// Records of replies that lie in the file are made from this many bytes of them at once.
const RECORD_BYTES: u32 = 16 << 20;
/// Calls that write to the file at once. It takes what they write at memory speed: more would only wait.
const WRITERS: usize = 2;
/// By how much a copy in memory grows at least.
const ROOM: usize = 2 << 10;
/// Before a block: its length.
const HEAD: usize = 4;

/// What the copies of all calls share.
pub(super) struct Tapes {
    spill: Option<Spill>,
    /// Most bytes of one call's copy in memory.
    most: usize,
    in_memory: AtomicUsize,
    buffered: Gauge,
    spilled: Gauge,
    writers: Arc<Semaphore>,
    records: Arc<Semaphore>,
}

impl Tapes {
    /// `spill: None`: copies stay in memory.
    pub(super) fn new(spill: Option<Spill>, most: usize) -> Arc<Self> {
        Arc::new(Self {
            spill,
            most: most.max(1),
            in_memory: AtomicUsize::new(0),
            buffered: gauge!("lego_proxy_buffered_bytes"),
            spilled: gauge!("lego_proxy_spilled_bytes"),
            writers: Arc::new(Semaphore::new(WRITERS)),
            records: Arc::new(Semaphore::new(RECORD_BYTES as usize)),
        })
    }
}

/// One call's copy.
pub(super) struct Tape {
    tapes: Arc<Tapes>,
    /// What lies in the file.
    slots: Vec<Slot>,
    spilled: usize,
    /// What was on its way to the file when the call was given up.
    leaving: Option<Arc<Vec<u8>>>,
    tail: Vec<u8>,
    /// Blocks pushed.
    count: usize,
    /// Bytes of `tail` and `leaving`, as counted in `tapes`.
    counted: usize,
    /// As it is in the gauge, which is put right once for many blocks.
    told: usize,
}

impl Tape {
    pub(super) fn new(tapes: &Arc<Tapes>) -> Self {
        Self {
            tapes: Arc::clone(tapes),
            slots: Vec::new(),
            spilled: 0,
            leaving: None,
            tail: Vec::new(),
            count: 0,
            counted: 0,
            told: 0,
        }
    }

    /// Adds a block.
    pub(super) fn push(&mut self, block: &[u8]) {
        let added = HEAD + block.len();
        let room = self.tail.capacity();
        if room - self.tail.len() < added {
            // By itself it would double: half of that much in each of thousands of streams would never be used.
            self.tail.reserve_exact(added.max(room / 4).max(ROOM));
        }
        // Blocks are far below 4 GiB: the relay passes longer ones unread.
        self.tail.extend_from_slice(&(block.len() as u32).to_le_bytes());
        self.tail.extend_from_slice(block);
        self.count += 1;
        self.counted += added;
        self.tapes.in_memory.fetch_add(added, Ordering::Relaxed);
    }

    /// Number of blocks.
    pub(super) const fn len(&self) -> usize {
        self.count
    }

    /// Bytes of the blocks, and a few more.
    pub(super) const fn bytes(&self) -> usize {
        self.spilled + self.counted
    }

    /// True if a part of it lies in the file.
    pub(super) const fn is_spilled(&self) -> bool {
        !self.slots.is_empty()
    }

    /// True if a part of it should go to the file now.
    pub(super) fn is_full(&self) -> bool {
        let bytes = self.tail.len();
        let is_crowded = bytes >= SLOT_BYTES && self.tapes.in_memory.load(Ordering::Relaxed) > MEMORY_BYTES;
        (bytes >= self.tapes.most || is_crowded) && self.tapes.spill.is_some()
    }

    /// Tells the gauge how much is in memory.
    pub(super) fn tell(&mut self) {
        self.tapes.buffered.increment(self.counted as f64 - self.told as f64);
        self.told = self.counted;
    }

    /// Moves what is in memory to the file, less the rest that fills no slot.
    ///
    /// # Errors
    /// The file cannot be written. Nothing is lost by that: it stays in memory.
    pub(super) async fn spill(&mut self) -> Result<(), SinkError> {
        let Some(spill) = self.tapes.spill.clone() else {
            return Ok(());
        };
        let _turn = Arc::clone(&self.tapes.writers).acquire_owned().await.ok();
        self.stay();
        let bytes = self.tail.len();
        let whole = if bytes < SLOT_BYTES { bytes } else { bytes / SLOT_BYTES * SLOT_BYTES };
        // Kept until it is written: a call whose client leaves now is recorded whole all the same.
        let leaving = Arc::new(std::mem::take(&mut self.tail));
        self.leaving = Some(Arc::clone(&leaving));
        let written = match tokio::task::spawn_blocking(move || spill.write(&leaving[..whole])).await {
            Ok(written) => written,
            Err(error) => Err(SinkError::Io {
                place: "the file with the copies of long replies".to_owned(),
                reason: error.to_string(),
            }),
        };
        let slots = written.inspect_err(|_| self.stay())?;
        self.slots.extend(slots);
        self.spilled += whole;
        if let Some(left) = self.leaving.take() {
            self.tail.extend_from_slice(&left[whole..]);
        }
        self.counted -= whole;
        self.tapes.in_memory.fetch_sub(whole, Ordering::Relaxed);
        self.tapes.spilled.increment(whole as f64);
        Ok(())
    }

    /// Puts what was on its way to the file back in its place.
    fn stay(&mut self) {
        if let Some(left) = self.leaving.take() {
            let mut whole = Arc::unwrap_or_clone(left);
            whole.append(&mut self.tail);
            self.tail = whole;
        }
    }

    /// Waits for the turn to make records of it: of replies that lie in the file a few at a time, so that they do not
    /// fill memory after all.
    pub(super) async fn turn(&self) -> Turn {
        if !self.is_spilled() {
            return Turn::default();
        }
        let bytes = self.spilled + self.counted;
        let weight = u32::try_from(bytes).unwrap_or(u32::MAX).clamp(1, RECORD_BYTES);
        Turn(Arc::clone(&self.tapes.records).acquire_many_owned(weight).await.ok())
    }

    /// Gives the blocks of the next part, in order; false when there is none. Blocks while a file is read.
    pub(super) fn read(&self, at: &mut Place, mut take: impl FnMut(&[u8])) -> Result<bool, SinkError> {
        if at.is_end {
            return Ok(false);
        }
        let used = if let Some(slot) = self.slots.get(at.slots) {
            slot.read(&mut at.part)?;
            at.slots += 1;
            blocks(&at.part, &mut take)
        } else {
            at.is_end = true;
            if let Some(left) = &self.leaving {
                at.part.extend_from_slice(left);
            }
            if at.part.is_empty() {
                blocks(&self.tail, &mut take);
                return Ok(true);
            }
            at.part.extend_from_slice(&self.tail);
            blocks(&at.part, &mut take)
        };
        at.part.drain(..used);
        Ok(true)
    }
}

/// How far a tape was read.
#[derive(Default)]
pub(super) struct Place {
    slots: usize,
    /// The beginning of a block whose end is in the next slot.
    part: Vec<u8>,
    is_end: bool,
}

/// The turn of a call to make its records; it ends when they are in the store.
#[derive(Default)]
pub(super) struct Turn(Option<OwnedSemaphorePermit>);

impl Turn {
    /// Makes the records. What takes milliseconds keeps no other task waiting, where the runtime can help that.
    pub(super) fn run<T>(&self, make: impl FnOnce() -> T) -> T {
        let is_threaded = || Handle::current().runtime_flavor() == RuntimeFlavor::MultiThread;
        if self.0.is_some() && is_threaded() { tokio::task::block_in_place(make) } else { make() }
    }
}

impl Drop for Tape {
    fn drop(&mut self) {
        self.tapes.in_memory.fetch_sub(self.counted, Ordering::Relaxed);
        self.counted = 0;
        self.tell();
        self.tapes.spilled.decrement(self.spilled as f64);
    }
}

/// Gives the whole blocks of `bytes` and tells how long they are.
fn blocks(bytes: &[u8], take: &mut impl FnMut(&[u8])) -> usize {
    let mut used = 0;
    while let Some((head, rest)) = bytes[used..].split_first_chunk::<HEAD>() {
        let Some(block) = rest.get(..u32::from_le_bytes(*head) as usize) else {
            break;
        };
        take(block);
        used += HEAD + block.len();
    }
    used
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn many_copies_are_in_memory_together_as_one_is() {
        let dir = tempfile::tempdir().expect("folder");
        let spill = Spill::in_folder(dir.path());
        let tapes = Tapes::new(Some(spill.clone()), 1 << 20);
        let block = |tape: usize, at: usize| vec![(tape * 31 + at) as u8; 1000 + at % 7];
        let mut open: Vec<Tape> = (0..100).map(|_| Tape::new(&tapes)).collect();
        for at in 0..400 {
            for (index, tape) in open.iter_mut().enumerate() {
                tape.push(&block(index, at));
                if tape.is_full() {
                    tape.spill().await.expect("room");
                }
            }
            let in_memory = tapes.in_memory.load(Ordering::Relaxed);
            assert!(in_memory <= MEMORY_BYTES + 100 * 1100, "{in_memory}");
        }
        assert!(open.iter().all(|tape| tape.len() == 400));
        for (index, tape) in open.iter().enumerate() {
            let (mut place, mut at) = (Place::default(), 0);
            let mut check = |bytes: &[u8]| {
                assert_eq!(bytes, block(index, at));
                at += 1;
            };
            while tape.read(&mut place, &mut check).expect("readable") {}
            assert_eq!(at, 400);
        }
        drop(open);
        assert_eq!((tapes.in_memory.load(Ordering::Relaxed), spill.file_bytes()), (0, 0));
    }
}
