//! The blocks of a stream until the call's record is written: in memory while it is short, in a file when it
//! is long or there are many.
//!
//! Invariants:
//! - The blocks come back in order, each as it was pushed, less those that were superseded.
//! - A file that cannot be written is an error of its call, as a store is that cannot be: memory is no place to wait for
//!   space on a disk.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use metrics::{Gauge, gauge};
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::capture::{SLOT_BYTES, Slot, Spill};
use crate::record::SinkError;

/// Copies in memory that together are longer go to the file, all but the last part of each.
const MEMORY_BYTES: usize = 16 << 20;
/// What was read of replies whose copies lie in the file takes this much together at most.
const READ_BYTES: usize = 4 << 20;
/// Records are made from this many bytes of streams at once: each is there twice until it is in the store.
const RECORD_BYTES: u32 = 8 << 20;
/// Calls that write to the file at once. It takes what they write at memory speed: more would only wait.
const WRITERS: usize = 2;
/// By how much a copy in memory grows at least.
const ROOM: usize = 2 << 10;
/// Before a block: its length.
const HEAD: usize = 4;
/// A length with this bit stands for no block: as many as the rest of it says were here and are superseded.
const GONE: u32 = 1 << 31;

/// What the copies of all calls share.
pub(super) struct Tapes {
    spill: Option<Spill>,
    /// Most bytes of one call's copy in memory.
    most: usize,
    in_memory: AtomicUsize,
    buffered: Gauge,
    spilled: Gauge,
    /// Copies that there are.
    open: AtomicUsize,
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
            open: AtomicUsize::new(0),
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
    /// Where the first block begins in what is in memory, and its number: before it is the end of another one.
    first: (usize, usize),
    /// Superseded blocks of the file.
    gone: BTreeSet<usize>,
    /// Blocks pushed.
    count: usize,
    /// Bytes of `tail` and `leaving`, as counted in `tapes`.
    counted: usize,
    /// As it is in the gauge, which is put right once for many blocks.
    told: usize,
}

impl Tape {
    pub(super) fn new(tapes: &Arc<Tapes>) -> Self {
        tapes.open.fetch_add(1, Ordering::Relaxed);
        Self {
            tapes: Arc::clone(tapes),
            slots: Vec::new(),
            spilled: 0,
            leaving: None,
            tail: Vec::new(),
            first: (0, 0),
            gone: BTreeSet::new(),
            count: 0,
            counted: 0,
            told: 0,
        }
    }

    /// Makes room for blocks of this many bytes together.
    pub(super) fn reserve(&mut self, bytes: usize) {
        let room = self.tail.capacity();
        if room - self.tail.len() < bytes {
            // To double what is in memory of thousands of streams would be twice the memory. Where it grows long there are
            // few of them.
            let more = if room < 2 * SLOT_BYTES { 0 } else { room };
            self.tail.reserve_exact(bytes.max(more).max(ROOM));
        }
    }

    /// Adds a block.
    pub(super) fn push(&mut self, block: &[u8]) {
        let added = HEAD + block.len();
        self.reserve(added);
        // Blocks are far below 4 GiB: the relay passes longer ones unread.
        self.tail.extend_from_slice(&(block.len() as u32).to_le_bytes());
        self.tail.extend_from_slice(block);
        self.count += 1;
        self.counted += added;
        self.tapes.in_memory.fetch_add(added, Ordering::Relaxed);
    }

    /// Lets go of a block: it does not come back. Others keep their numbers.
    pub(super) fn supersede(&mut self, block: usize) {
        self.stay();
        let (mut at, number) = self.first;
        if block < number {
            self.gone.insert(block);
            return;
        }
        // Its place is taken by a mark, and marks side by side become one.
        let mut marks: Option<(Range<usize>, u32)> = None;
        let mut number = number;
        let mut is_found = false;
        while let Some(entry) = Entry::first_of(&self.tail[at..]) {
            let end = at + entry.bytes();
            let count = match entry {
                Entry::Block(_) if number == block => 1,
                Entry::Block(_) if is_found => break,
                Entry::Block(_) => {
                    marks = None;
                    number += 1;
                    at = end;
                    continue;
                }
                Entry::Gone(count) => count,
            };
            is_found |= number == block && matches!(entry, Entry::Block(_));
            let (start, before) = marks.map_or((at, 0), |(range, before)| (range.start, before));
            marks = Some((start..end, before + count));
            number += count as usize;
            at = end;
        }
        if let Some((range, count)) = marks.filter(|_| is_found) {
            let freed = range.len() - HEAD;
            drop(self.tail.splice(range, (GONE | count).to_le_bytes()));
            self.counted -= freed;
            self.tapes.in_memory.fetch_sub(freed, Ordering::Relaxed);
        }
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

    /// What one copy may take of what all have together, besides their blocks.
    pub(super) fn share(&self) -> usize {
        READ_BYTES / self.tapes.open.load(Ordering::Relaxed).max(1)
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
            let (mut at, mut number) = self.first;
            while at < whole
                && let Some(entry) = Entry::first_of(&left[at..])
            {
                at += entry.bytes();
                number += entry.blocks();
            }
            // Blocks are pushed whole, so one begins behind the last one.
            self.first = (at - whole, number);
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

    /// Waits for the turn to make records of it: a few at a time, so that many that end together do not fill memory after
    /// all.
    pub(super) async fn turn(&self) -> Turn {
        let weight = u32::try_from(self.bytes()).unwrap_or(u32::MAX).clamp(1, RECORD_BYTES);
        let permit = Arc::clone(&self.tapes.records).acquire_many_owned(weight).await.ok();
        Turn { _permit: permit, is_spilled: self.is_spilled() }
    }

    /// Gives the blocks of the next part with their numbers, in order; false when there is none. Blocks while a file is
    /// read.
    pub(super) fn read(&self, at: &mut Place, mut take: impl FnMut(usize, &[u8])) -> Result<bool, SinkError> {
        if at.is_end {
            return Ok(false);
        }
        let mut take = |number: usize, block: &[u8]| {
            if !self.gone.contains(&number) {
                take(number, block);
            }
        };
        let used = if let Some(slot) = self.slots.get(at.slots) {
            slot.read(&mut at.part)?;
            at.slots += 1;
            blocks(&at.part, &mut at.number, &mut take)
        } else {
            at.is_end = true;
            if let Some(left) = &self.leaving {
                at.part.extend_from_slice(left);
            }
            if at.part.is_empty() {
                blocks(&self.tail, &mut at.number, &mut take);
                return Ok(true);
            }
            at.part.extend_from_slice(&self.tail);
            blocks(&at.part, &mut at.number, &mut take)
        };
        at.part.drain(..used);
        Ok(true)
    }
}

/// How far a tape was read.
#[derive(Default)]
pub(super) struct Place {
    slots: usize,
    /// That of the next block.
    number: usize,
    /// The beginning of a block whose end is in the next slot.
    part: Vec<u8>,
    is_end: bool,
}

/// The turn of a call to make its records; it ends when they are in the store.
#[derive(Default)]
pub(super) struct Turn {
    _permit: Option<OwnedSemaphorePermit>,
    is_spilled: bool,
}

impl Turn {
    /// Makes the records. What reads a file keeps no other task waiting, where the runtime can help that.
    pub(super) fn run<T>(&self, make: impl FnOnce() -> T) -> T {
        let is_threaded = || Handle::current().runtime_flavor() == RuntimeFlavor::MultiThread;
        if self.is_spilled && is_threaded() { tokio::task::block_in_place(make) } else { make() }
    }
}

impl Drop for Tape {
    fn drop(&mut self) {
        self.tapes.open.fetch_sub(1, Ordering::Relaxed);
        self.tapes.in_memory.fetch_sub(self.counted, Ordering::Relaxed);
        self.counted = 0;
        self.tell();
        self.tapes.spilled.decrement(self.spilled as f64);
    }
}

/// What a head stands before.
#[derive(Clone, Copy)]
enum Entry<'a> {
    Block(&'a [u8]),
    /// This many blocks that are superseded.
    Gone(u32),
}

impl<'a> Entry<'a> {
    /// `None`: it is not whole.
    fn first_of(bytes: &'a [u8]) -> Option<Self> {
        let (head, rest) = bytes.split_first_chunk::<HEAD>()?;
        let head = u32::from_le_bytes(*head);
        if head & GONE != 0 {
            return Some(Self::Gone(head & !GONE));
        }
        rest.get(..head as usize).map(Self::Block)
    }

    const fn bytes(&self) -> usize {
        match self {
            Self::Block(block) => HEAD + block.len(),
            Self::Gone(_) => HEAD,
        }
    }

    const fn blocks(&self) -> usize {
        match self {
            Self::Block(_) => 1,
            Self::Gone(count) => *count as usize,
        }
    }
}

/// Gives the whole blocks of `bytes` and tells how long they are. `number`: that of the first one, then of the next.
fn blocks(bytes: &[u8], number: &mut usize, take: &mut impl FnMut(usize, &[u8])) -> usize {
    let mut used = 0;
    while let Some(entry) = Entry::first_of(&bytes[used..]) {
        if let Entry::Block(block) = entry {
            take(*number, block);
        }
        *number += entry.blocks();
        used += entry.bytes();
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
            let mut check = |number: usize, bytes: &[u8]| {
                assert_eq!((number, bytes), (at, block(index, at).as_slice()));
                at += 1;
            };
            while tape.read(&mut place, &mut check).expect("readable") {}
            assert_eq!(at, 400);
        }
        drop(open);
        assert_eq!((tapes.in_memory.load(Ordering::Relaxed), spill.file_bytes()), (0, 0));
    }
    #[tokio::test]
    async fn superseded_blocks_do_not_come_back_wherever_they_lie() {
        let dir = tempfile::tempdir().expect("folder");
        let spill = Spill::in_folder(dir.path());
        for most in [1, 5_000, 40_000, usize::MAX] {
            let tapes = Tapes::new(Some(spill.clone()), most);
            let mut tape = Tape::new(&tapes);
            let mut expected = std::collections::BTreeMap::new();
            let mut last = [None; 3];
            for at in 0..300_usize {
                let block = vec![at as u8; at * 97 % 20_000];
                tape.push(&block);
                expected.insert(at, block);
                // Some are nobody's, and stay.
                let is_of_one = at % 5 != 0;
                if let Some(old) = is_of_one.then(|| last[at % 3].replace(at)).flatten() {
                    tape.supersede(old);
                    expected.remove(&old);
                }
                if tape.is_full() && at % 7 == 3 {
                    // Given up on the way.
                    tokio::select! {
                        biased;
                        _ = tape.spill() => {}
                        () = std::future::ready(()) => {}
                    }
                } else if tape.is_full() && at % 2 == 0 {
                    tape.spill().await.expect("room");
                }
                let in_memory = tape.tail.len() + tape.leaving.as_ref().map_or(0, |left| left.len());
                assert_eq!((tape.counted, tapes.in_memory.load(Ordering::Relaxed)), (in_memory, in_memory));
                if !tape.is_spilled() {
                    let live: usize = expected.values().map(Vec::len).sum();
                    assert!(in_memory <= live + (2 * expected.len() + 1) * HEAD, "{in_memory} for {live}");
                }
                if at % 11 == 0 {
                    let (mut place, mut found) = (Place::default(), std::collections::BTreeMap::new());
                    let mut take = |number: usize, block: &[u8]| {
                        assert!(found.insert(number, block.to_vec()).is_none());
                    };
                    while tape.read(&mut place, &mut take).expect("readable") {}
                    assert!(found == expected, "block {at} of {most}");
                }
            }
            assert_eq!(tape.len(), 300);
            assert_eq!(tape.is_spilled(), most != usize::MAX);
        }
    }
}
