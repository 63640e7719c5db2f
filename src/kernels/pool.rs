//! A fixed set of threads for fork-join loops of a few microseconds.
//!
//! Invariants:
//! - Every index of a loop runs exactly once, and [`Pool::run`] returns only after all have.
//! - A loop that starts while another one runs (from a second thread, or from inside a task) runs on its
//!   caller's thread: never a deadlock, never more threads than the pool has.
//! - A worker may be missing (busy machine): the caller works through the indices itself and waits only
//!   for those that a worker already took.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{JoinHandle, Thread};

/// Looks at the ticket this often before a worker parks: some tens of microseconds.
const SPINS: usize = 4000;
/// Looks at the counter this often before the caller gives its core away while it waits.
const CALLER_SPINS: usize = 2000;
/// Low half of a ticket: the next index; high half: how many there are.
const HALF: u32 = usize::BITS / 2;
const MASK: usize = (1 << HALF) - 1;

/// Threads that share out loop indices; see the module docs. With one thread it owns none and runs loops
/// on the caller.
pub struct Pool {
    shared: Option<Arc<Shared>>,
    /// Held while a loop runs.
    turn: Mutex<()>,
    workers: Vec<JoinHandle<()>>,
    sleepers: Vec<Thread>,
    threads: usize,
}

struct Shared {
    /// `count << HALF | next`. An index is taken by a compare-and-swap that adds 1; a ticket with
    /// `next == count` has nothing to give.
    ticket: AtomicUsize,
    /// Indices of the current loop that have not finished.
    pending: AtomicUsize,
    /// The current loop's closure, as a thin pointer to a `&(dyn Fn(usize) + Sync)`.
    job: AtomicUsize,
    is_parked: Vec<AtomicBool>,
    has_panicked: AtomicBool,
    is_closed: AtomicBool,
}

impl Shared {
    /// Takes an index of whatever loop is current.
    fn take(&self) -> Option<usize> {
        let mut ticket = self.ticket.load(Ordering::Acquire);
        loop {
            let (count, next) = (ticket >> HALF, ticket & MASK);
            if next >= count {
                return None;
            }
            match self.ticket.compare_exchange_weak(ticket, ticket + 1, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some(next),
                Err(now) => ticket = now,
            }
        }
    }

    /// Runs a taken index. `index` must come from [`Shared::take`].
    fn run_taken(&self, index: usize) {
        let job = self.job.load(Ordering::Acquire) as *const &(dyn Fn(usize) + Sync);
        // SAFETY: the index was taken from the current loop and has not finished, so `pending` is not 0 and
        // the caller is still inside `Pool::run`, which keeps the closure that `job` points to alive. `job`
        // was stored before the ticket that the index came from.
        let task = unsafe { *job };
        if std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| task(index))).is_err() {
            self.has_panicked.store(true, Ordering::Release);
        }
        self.pending.fetch_sub(1, Ordering::AcqRel);
    }

    fn work(&self, worker: usize) {
        loop {
            let mut spins = 0;
            while spins < SPINS {
                if let Some(index) = self.take() {
                    self.run_taken(index);
                    spins = 0;
                } else {
                    if self.is_closed.load(Ordering::Acquire) {
                        return;
                    }
                    std::hint::spin_loop();
                    spins += 1;
                }
            }
            self.is_parked[worker].store(true, Ordering::SeqCst);
            // A loop published before the store above would not have seen this worker parked.
            let ticket = self.ticket.load(Ordering::SeqCst);
            if (ticket & MASK) >= (ticket >> HALF) && !self.is_closed.load(Ordering::SeqCst) {
                std::thread::park();
            }
            self.is_parked[worker].store(false, Ordering::SeqCst);
        }
    }
}

impl Pool {
    /// A pool of `threads` threads, the caller of [`Pool::run`] counted as one (at least 1); of fewer where the system
    /// starts no more, which changes no result.
    #[must_use]
    pub fn new(threads: usize) -> Self {
        let threads = threads.max(1);
        if threads == 1 {
            return Self::serial();
        }
        let shared = Arc::new(Shared {
            ticket: AtomicUsize::new(0),
            pending: AtomicUsize::new(0),
            job: AtomicUsize::new(0),
            is_parked: (1..threads).map(|_| AtomicBool::new(false)).collect(),
            has_panicked: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
        });
        let workers: Vec<_> = (0..threads - 1)
            .map(|worker| {
                let shared = shared.clone();
                std::thread::Builder::new().name(format!("math-{worker}")).spawn(move || shared.work(worker))
            })
            .map_while(|started| {
                started.inspect_err(|error| tracing::warn!("fewer than {threads} threads: {error}")).ok()
            })
            .collect();
        let threads = workers.len() + 1;
        let sleepers = workers.iter().map(|worker| worker.thread().clone()).collect();
        Self { shared: Some(shared), turn: Mutex::new(()), workers, sleepers, threads }
    }

    /// A pool without threads of its own: loops run on their caller.
    #[must_use]
    pub const fn serial() -> Self {
        Self { shared: None, turn: Mutex::new(()), workers: Vec::new(), sleepers: Vec::new(), threads: 1 }
    }

    /// Number of threads that work on a loop, the caller counted.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Calls `task(index)` once for every index below `count`, on all threads, and waits for all.
    ///
    /// # Panics
    /// When a task panicked.
    pub fn run(&self, count: usize, task: impl Fn(usize) + Sync) {
        let inline = || (0..count).for_each(&task);
        let Some(shared) = self.shared.as_ref().filter(|_| count > 1 && count < MASK) else {
            return inline();
        };
        // Poisoned only if a task panicked; the pool's own state is whole again by then.
        let turn = match self.turn.try_lock() {
            Ok(turn) => turn,
            Err(std::sync::TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(std::sync::TryLockError::WouldBlock) => return inline(),
        };
        let job: &(dyn Fn(usize) + Sync) = &task;
        // The closure outlives every use: this function waits until `pending` is 0, on panics too, because
        // tasks are caught.
        shared.job.store((&raw const job) as usize, Ordering::Release);
        shared.pending.store(count, Ordering::Release);
        shared.ticket.store(count << HALF, Ordering::SeqCst);
        for (parked, sleeper) in shared.is_parked.iter().zip(&self.sleepers) {
            if parked.load(Ordering::SeqCst) {
                sleeper.unpark();
            }
        }
        while let Some(index) = shared.take() {
            shared.run_taken(index);
        }
        let mut spins = 0;
        while shared.pending.load(Ordering::Acquire) != 0 {
            std::hint::spin_loop();
            spins += 1;
            if spins > CALLER_SPINS {
                std::thread::yield_now();
            }
        }
        let has_panicked = shared.has_panicked.swap(false, Ordering::AcqRel);
        drop(turn);
        assert!(!has_panicked, "a task of the pool panicked; its message is above");
    }

    /// Hands each item to one call of `task`, on all threads, and waits for all.
    ///
    /// # Panics
    /// When a task panicked.
    pub fn each<T: Send>(&self, items: Vec<T>, task: impl Fn(T) + Sync) {
        if self.shared.is_none() || items.len() <= 1 {
            return items.into_iter().for_each(task);
        }
        let items: Vec<Mutex<Option<T>>> = items.into_iter().map(|item| Mutex::new(Some(item))).collect();
        self.run(items.len(), |index| {
            let item = items[index].lock().ok().and_then(|mut item| item.take());
            if let Some(item) = item {
                task(item);
            }
        });
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if let Some(shared) = &self.shared {
            shared.is_closed.store(true, Ordering::SeqCst);
        }
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // Tasks are caught, so a worker ends cleanly.
            let _ = worker.join();
        }
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Pool").field("threads", &self.threads).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn every_index_runs_exactly_once() {
        for threads in 1..4 {
            let pool = Pool::new(threads);
            for count in [0, 1, 2, 3, 17, 300] {
                for _ in 0..200 {
                    let runs: Vec<AtomicU64> = (0..count).map(|_| AtomicU64::new(0)).collect();
                    pool.run(count, |index| {
                        runs[index].fetch_add(1, Ordering::Relaxed);
                    });
                    assert!(runs.iter().all(|runs| runs.load(Ordering::Relaxed) == 1));
                }
            }
        }
    }

    #[test]
    fn loops_may_nest_and_come_from_several_threads() {
        let pool = Pool::new(2);
        let sum = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        pool.run(4, |_| {
                            pool.run(5, |index| {
                                sum.fetch_add(index as u64, Ordering::Relaxed);
                            });
                        });
                    }
                });
            }
        });
        assert_eq!(sum.load(Ordering::Relaxed), 3 * 100 * 4 * 10);
    }

    #[test]
    fn a_panic_in_a_task_reaches_the_caller_and_the_pool_lives_on() {
        let pool = Pool::new(2);
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.run(8, |index| assert!(index != 3, "as asked"));
        }));
        assert!(caught.is_err());
        let total = AtomicU64::new(0);
        pool.each((0..50u64).collect(), |item| {
            total.fetch_add(item, Ordering::Relaxed);
        });
        assert_eq!(total.load(Ordering::Relaxed), 1225);
    }
}
