//! Memory of thousands of calls, within a burst and after it.
//!
//! glibc keeps what is freed between blocks that are still in use, so the holes that thousands of replies leave stay
//! resident for good. Trimming gives them back, but it walks every heap under its lock: it waits until few calls are in
//! flight. And each thread would have a heap of its own, with holes of its own: they share two.

use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::{Instant, MissedTickBehavior};

/// How often calls in flight are looked at.
const PERIOD: Duration = Duration::from_millis(500);
/// Fewer at once are no burst: what they leave is small, and soon used again.
const BURST: usize = 128;
/// When memory is given back after a burst: at once, and after what went on in the background is done.
const AFTER: [Duration; 3] = [Duration::from_secs(1), Duration::from_secs(10), Duration::from_secs(60)];

/// Gives memory back whenever a burst of calls is over. `slots`: permits of calls in flight, `all` if there is none.
pub(super) async fn give_back(slots: &Semaphore, all: usize) {
    let mut look = tokio::time::interval(PERIOD);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut burst = Burst::default();
    loop {
        let now = look.tick().await;
        if burst.is_over(all.saturating_sub(slots.available_permits()), now) {
            let trimmed = tokio::task::spawn_blocking(trim).await;
            tracing::debug!(ok = trimmed.is_ok(), "memory given back after a burst of calls");
        }
    }
}

#[derive(Default)]
struct Burst {
    /// Calls in flight at most since the last one was over.
    most: usize,
    over_since: Option<Instant>,
    given_back: usize,
}

impl Burst {
    /// True if it is time to give memory back.
    fn is_over(&mut self, in_flight: usize, now: Instant) -> bool {
        self.most = self.most.max(in_flight);
        if self.most >= BURST && in_flight <= self.most / 8 {
            (self.most, self.over_since, self.given_back) = (in_flight, Some(now), 0);
        }
        let next = AFTER.get(self.given_back).copied();
        let is_due = self.over_since.zip(next).is_some_and(|(since, after)| now - since >= after);
        // A new burst uses again what would be given back.
        let is_lull = is_due && in_flight < BURST;
        self.given_back += usize::from(is_due);
        is_lull
    }
}

/// Heaps of a process that only relays. Fewer than its threads: what one of them frees the others use.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const HEAPS: libc::c_int = 2;

/// A block of this many bytes is large.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const LARGE_BLOCK: libc::c_int = 1 << 20;

/// Has all threads that begin after this share few heaps, and large blocks go back to the system when they are freed. By
/// itself glibc takes the first large one that is freed for a sign that more will come, and keeps all up to 32 MiB between
/// those that are in use. Other allocators are left as they are.
pub fn settle_heaps() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: takes no pointer; glibc sets numbers under its lock.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, HEAPS);
        libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE_BLOCK);
        // What shrinks now and grows again a moment later is kept.
        libc::mallopt(libc::M_TRIM_THRESHOLD, 16 * LARGE_BLOCK);
    }
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn trim() {
    // SAFETY: takes no pointer; glibc locks each of its heaps while it looks at it.
    unsafe { libc::malloc_trim(0) };
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
const fn trim() {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_given_back_after_a_burst_and_not_within_it() {
        let (mut burst, start) = (Burst::default(), Instant::now());
        let mut due = Vec::new();
        let in_flight = |second| match second {
            0..10 => 1000,
            10..40 => 20,
            // Under way again while the last one is due.
            40..80 => 500,
            _ => 0,
        };
        for second in 0..200_u64 {
            if burst.is_over(in_flight(second), start + Duration::from_secs(second)) {
                due.push(second);
            }
        }
        assert_eq!(due, [11, 20, 81, 90, 140]);
    }

    #[test]
    fn few_calls_are_no_burst() {
        let (mut burst, start) = (Burst::default(), Instant::now());
        let is_due = |second| {
            let in_flight = if second % 2 == 0 { BURST - 1 } else { 0 };
            burst.is_over(in_flight, start + Duration::from_secs(second as u64))
        };
        assert_eq!((0..100).map(is_due).filter(|is_due| *is_due).count(), 0);
    }
}
