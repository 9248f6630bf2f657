//! The threads that compute.
//!
//! One region at a time: every thread, the caller among them, runs the same closure with its own index, and `run` returns
//! when all have. Work is split by index, statically, so each core keeps meeting the same weights in its cache.
//! A waiting worker spins, then yields, then parks: during a step it answers in a fraction of a microsecond; on a host
//! with more to run than cores it gives way; an idle daemon uses no processor time.

use super::topology::{self, Processors};
use std::cell::UnsafeCell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

/// Rounds of spinning before the first yield: some 50 us, longer than the unevenness of a static split.
const SPIN_ROUNDS: u32 = 4_000;
/// How long a worker yields before it parks: longer than what an engine does between two passes.
const YIELD_FOR: Duration = Duration::from_millis(2);

type Job = dyn Fn(usize) + Sync;

/// What the caller and the workers share. Own cache lines for what different threads write.
struct Shared {
    /// Number of the current region; a change is the signal to begin.
    epoch: Line<AtomicU64>,
    /// Workers that have not finished the current region.
    pending: Line<AtomicUsize>,
    /// Written by the caller while no worker runs; read by workers between `epoch` and `pending`.
    job: UnsafeCell<Option<*const Job>>,
    /// Threads that have come to the present meeting of a region.
    arrived: Line<AtomicUsize>,
    /// Number of meetings that are over.
    meeting: Line<AtomicUsize>,
    /// A closure panicked in the current region.
    panicked: AtomicBool,
    stop: AtomicBool,
    /// One for each worker: it is parked or about to be.
    parked: Vec<Line<AtomicBool>>,
}

#[repr(align(128))]
struct Line<T>(T);

// SAFETY: `job` is the only field that is not Sync by itself; epoch and pending order its accesses (see there), and the
// closure it points to is Sync.
unsafe impl Sync for Shared {}
// SAFETY: as above; the pointer is dereferenced only while `run` keeps its target alive.
unsafe impl Send for Shared {}

/// A fixed set of threads.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<(Thread, Option<JoinHandle<()>>)>,
    /// Where the caller belongs when it asks to be bound.
    caller_processor: Option<usize>,
}

impl Pool {
    /// A pool of `threads` including the caller; at most the processors in the affinity mask, for more threads than
    /// processors wait for each other to be scheduled at every barrier.
    pub(crate) fn new(threads: Option<usize>) -> std::io::Result<Self> {
        let processors = Processors::allowed();
        let most = processors.numbers.len().max(1);
        let threads = threads.unwrap_or_else(|| processors.threads_default()).clamp(1, most);
        let shared = Arc::new(Shared {
            epoch: Line(AtomicU64::new(0)),
            pending: Line(AtomicUsize::new(0)),
            job: UnsafeCell::new(None),
            arrived: Line(AtomicUsize::new(0)),
            meeting: Line(AtomicUsize::new(0)),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            parked: (1..threads).map(|_| Line(AtomicBool::new(false))).collect(),
        });
        let caller_processor = processors.numbers.first().copied();
        let mut pool = Self { shared, workers: Vec::new(), caller_processor };
        for index in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let processor = processors.numbers.get(index).copied();
            let handle = std::thread::Builder::new().name(format!("llmd-compute-{index}")).spawn(move || {
                if let Some(processor) = processor {
                    topology::bind_to(processor);
                }
                shared.work(index);
            })?;
            pool.workers.push((handle.thread().clone(), Some(handle)));
        }
        Ok(pool)
    }

    /// Threads, the caller among them.
    pub(crate) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Binds the calling thread to the processor that no worker is bound to.
    pub(crate) fn bind_caller(&self) {
        if let Some(processor) = self.caller_processor {
            topology::bind_to(processor);
        }
    }

    /// As [`Self::run`], with threads that can wait for each other inside the job.
    pub(crate) fn run_team(&mut self, job: &(dyn Fn(Member<'_>) + Sync)) {
        let (shared, threads) = (Arc::clone(&self.shared), self.threads());
        self.run(&|index| job(Member { index, threads, shared: &shared }));
    }

    /// Runs `job(index)` for every index below `threads`, each on its own thread, and waits for all.
    ///
    /// # Panics
    /// When the closure panicked on any thread.
    pub(crate) fn run(&mut self, job: &(dyn Fn(usize) + Sync)) {
        if self.workers.is_empty() {
            return job(0);
        }
        let shared = &*self.shared;
        shared.panicked.store(false, Ordering::Relaxed);
        // A panic may have left some who had come; nobody is inside a region now.
        shared.arrived.0.store(0, Ordering::Relaxed);
        // SAFETY: only the lifetime changes. `Wait` below does not let this function end, by return or by panic, before
        // every worker is done with the closure.
        let job_static: *const Job = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static Job>(job) };
        // SAFETY: `pending` is 0 and `&mut self` is exclusive: no worker reads `job` until `epoch` changes.
        unsafe { *shared.job.get() = Some(job_static) };
        shared.pending.0.store(self.workers.len(), Ordering::Relaxed);
        // Release (in SeqCst): pairs with the workers' load of `epoch`, which makes job and pending visible to them.
        // SeqCst with the load of `parked`: either we see that a worker parks, or it sees the new epoch first.
        shared.epoch.0.fetch_add(1, Ordering::SeqCst);
        for (parked, (thread, _)) in shared.parked.iter().zip(&self.workers) {
            if parked.0.load(Ordering::SeqCst) {
                thread.unpark();
            }
        }
        let wait = Wait(shared);
        job(0);
        drop(wait);
        assert!(!shared.panicked.load(Ordering::Relaxed), "a compute thread panicked");
    }
}

/// Spins, then yields, until `done`.
#[inline]
fn spin_until(done: impl Fn() -> bool) {
    let mut rounds = 0;
    while !done() {
        rounds += 1;
        if rounds < SPIN_ROUNDS { std::hint::spin_loop() } else { std::thread::yield_now() }
    }
}

/// A thread inside a region.
pub(crate) struct Member<'a> {
    /// Below `threads`.
    pub(crate) index: usize,
    /// Threads of the region.
    pub(crate) threads: usize,
    shared: &'a Shared,
}

impl Member<'_> {
    /// This thread's part of `0..n`.
    pub(crate) fn share(&self, n: usize) -> std::ops::Range<usize> {
        split(n, self.index, self.threads)
    }

    /// Returns when all threads of the region have come here: what they wrote before is there to read after.
    ///
    /// # Panics
    /// When another thread of the region panicked.
    pub(crate) fn meet(&self) {
        if self.threads == 1 {
            return;
        }
        let shared = self.shared;
        // Nobody can end this meeting before we have come, so the number is the present one's.
        let meeting = shared.meeting.0.load(Ordering::Relaxed);
        // Release: what we wrote, for the last to come; Acquire: what the others wrote, if that is us.
        if shared.arrived.0.fetch_add(1, Ordering::AcqRel) + 1 == self.threads {
            shared.arrived.0.store(0, Ordering::Relaxed);
            // Release: pairs with the loads below, and hands on what the last to come has acquired.
            shared.meeting.0.store(meeting.wrapping_add(1), Ordering::Release);
            return;
        }
        spin_until(|| shared.meeting.0.load(Ordering::Acquire) != meeting || shared.panicked.load(Ordering::Acquire));
        if shared.meeting.0.load(Ordering::Acquire) == meeting {
            panic!("another compute thread panicked");
        }
    }
}

/// Waits for the workers when dropped.
struct Wait<'a>(&'a Shared);

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The caller's own job: who waits for it inside the region must not wait for ever.
            self.0.panicked.store(true, Ordering::Release);
        }
        // Acquire: pairs with the workers' decrement, so that their writes are ours to read.
        spin_until(|| self.0.pending.0.load(Ordering::Acquire) == 0);
    }
}

impl Shared {
    fn work(&self, index: usize) {
        let mut seen = 0;
        loop {
            seen = self.next_epoch(seen, &self.parked[index - 1].0);
            if self.stop.load(Ordering::Relaxed) {
                return;
            }
            // SAFETY: the epoch's Acquire load orders this after the caller's write, and the caller writes again only
            // after `pending` has come down to 0.
            let job = unsafe { *self.job.get() }.expect("a region has a job");
            // SAFETY: the caller keeps the closure alive until `pending` is 0.
            let job = unsafe { &*job };
            if panic::catch_unwind(AssertUnwindSafe(|| job(index))).is_err() {
                self.panicked.store(true, Ordering::Release);
            }
            // Release: pairs with the caller's load in `Wait`.
            self.pending.0.fetch_sub(1, Ordering::Release);
        }
    }

    /// Waits for an epoch other than `seen`.
    fn next_epoch(&self, seen: u64, parked: &AtomicBool) -> u64 {
        // Acquire: pairs with the caller's increment.
        let current = || self.epoch.0.load(Ordering::Acquire);
        for _ in 0..SPIN_ROUNDS {
            if current() != seen {
                return current();
            }
            std::hint::spin_loop();
        }
        let since = Instant::now();
        while since.elapsed() < YIELD_FOR {
            if current() != seen {
                return current();
            }
            std::thread::yield_now();
        }
        parked.store(true, Ordering::SeqCst);
        // SeqCst: pairs with the caller, see `run`.
        while self.epoch.0.load(Ordering::SeqCst) == seen {
            std::thread::park();
        }
        parked.store(false, Ordering::Relaxed);
        current()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.epoch.0.fetch_add(1, Ordering::SeqCst);
        for (thread, handle) in &mut self.workers {
            thread.unpark();
            if let Some(handle) = handle.take() {
                // A worker catches its closures' panics; there is nothing left to report.
                let _ = handle.join();
            }
        }
    }
}

/// The part of `0..n` that belongs to `index` of `parts`.
pub(crate) fn split(n: usize, index: usize, parts: usize) -> std::ops::Range<usize> {
    n * index / parts..n * (index + 1) / parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_thread_runs_every_region_once() {
        let mut pool = Pool::new(None).expect("threads");
        let threads = pool.threads();
        let ran: Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
        for round in 1..=300 {
            pool.run(&|index| {
                ran[index].fetch_add(1, Ordering::Relaxed);
            });
            assert!(ran.iter().all(|ran| ran.load(Ordering::Relaxed) == round));
            if round % 100 == 0 {
                // Long enough for the workers to park.
                std::thread::sleep(YIELD_FOR * 5);
            }
        }
    }

    #[test]
    fn a_panic_on_any_thread_reaches_the_caller_and_the_pool_lives_on() {
        let mut pool = Pool::new(Some(2)).expect("threads");
        for bad in 0..pool.threads() {
            let result = panic::catch_unwind(AssertUnwindSafe(|| pool.run(&|index| assert_ne!(index, bad))));
            assert!(result.is_err(), "thread {bad}");
        }
        let sum = AtomicUsize::new(0);
        pool.run(&|index| {
            sum.fetch_add(index + 1, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), (1..=pool.threads()).sum::<usize>());
    }

    #[test]
    fn threads_meet_inside_a_region() {
        let mut pool = Pool::new(None).expect("threads");
        let threads = pool.threads();
        let steps: Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
        pool.run_team(&|member| {
            for step in 1..=2_000 {
                steps[member.index].store(step, Ordering::Relaxed);
                member.meet();
                assert!(steps.iter().all(|other| other.load(Ordering::Relaxed) == step));
                member.meet();
            }
        });
        assert!(steps.iter().all(|steps| steps.load(Ordering::Relaxed) == 2_000));
    }

    #[test]
    fn nobody_waits_for_a_thread_that_panicked() {
        let mut pool = Pool::new(Some(2)).expect("threads");
        let threads = pool.threads();
        for bad in 0..threads {
            let result = panic::catch_unwind(AssertUnwindSafe(|| {
                pool.run_team(&|member| {
                    assert_ne!(member.index, bad);
                    member.meet();
                });
            }));
            assert!(result.is_err(), "thread {bad}");
        }
        let met = AtomicUsize::new(0);
        pool.run_team(&|member| {
            member.meet();
            met.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(met.into_inner(), threads);
    }

    #[test]
    fn splits_cover_everything_once() {
        for (n, parts) in [(0, 3), (1, 2), (17, 4), (64, 1)] {
            let all: Vec<usize> = (0..parts).flat_map(|index| split(n, index, parts)).collect();
            assert_eq!(all, (0..n).collect::<Vec<_>>());
        }
    }
}
