//! The threads that compute.
//!
//! One region at a time: every thread, the caller among them, runs the same closure with its own index, and `run` returns
//! when all have. Work is split by index, statically, so each core keeps meeting the same weights in its cache.
//! A waiting worker spins, then yields, then parks: during a step it answers in a fraction of a microsecond; on a host
//! with more to run than cores it gives way, and fewer threads compute (`pace.rs`); an idle daemon uses no processor time.

use super::pace::Pace;
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
/// Bits of `epoch` that hold the number of threads.
const THREADS_BITS: u32 = 16;
const THREADS_MASK: u64 = (1 << THREADS_BITS) - 1;

type Job = dyn Fn(usize) + Sync;

/// What the caller and the workers share. Own cache lines for what different threads write.
struct Shared {
    /// Number of the current region and, in the low `THREADS_BITS`, how many threads it has; a change is their signal to begin.
    epoch: Line<AtomicU64>,
    /// Workers of the current region that have not finished it.
    pending: Line<AtomicUsize>,
    /// Written by the caller while no worker runs; read by workers between `epoch` and `pending`.
    job: UnsafeCell<Option<*const Job>>,
    /// Threads that have come to the present meeting of a region.
    arrived: Line<AtomicUsize>,
    /// Number of meetings that are over.
    meeting: Line<AtomicUsize>,
    /// A closure panicked in the current region.
    panicked: AtomicBool,
    /// Nanoseconds the caller has waited for threads that did not run.
    stalled: AtomicU64,
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
    pace: Pace,
    /// Where the caller belongs when it asks to be bound.
    caller_processor: Option<usize>,
}

impl Pool {
    /// A pool of `threads` including the caller; at most the processors in the affinity mask, for more threads than
    /// processors wait for each other to be scheduled at every barrier.
    pub(crate) fn new(threads: Option<usize>) -> std::io::Result<Self> {
        let processors = Processors::allowed();
        let most = processors.numbers.len().max(1);
        let threads = threads.unwrap_or_else(|| processors.threads_default()).clamp(1, most.min(THREADS_MASK as usize));
        let shared = Arc::new(Shared {
            epoch: Line(AtomicU64::new(0)),
            pending: Line(AtomicUsize::new(0)),
            job: UnsafeCell::new(None),
            arrived: Line(AtomicUsize::new(0)),
            meeting: Line(AtomicUsize::new(0)),
            panicked: AtomicBool::new(false),
            stalled: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            parked: (1..threads).map(|_| Line(AtomicBool::new(false))).collect(),
        });
        let caller_processor = processors.numbers.first().copied();
        let mut pool = Self { shared, workers: Vec::new(), pace: Pace::new(threads), caller_processor };
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

    /// Threads at most, the caller among them.
    pub(crate) fn threads_max(&self) -> usize {
        self.workers.len() + 1
    }

    /// Threads of the next region.
    pub(crate) fn threads(&self) -> usize {
        self.pace.threads
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

    /// Runs `job(index)` for every index below [`Self::threads`], each on its own thread, and waits for all.
    ///
    /// # Panics
    /// When the closure panicked on any thread.
    pub(crate) fn run(&mut self, job: &(dyn Fn(usize) + Sync)) {
        match self.threads() {
            1 => job(0),
            threads => self.run_on(threads, job),
        }
        if !self.workers.is_empty() {
            self.pace.adjust(&self.shared.stalled, self.workers.len() + 1);
        }
    }

    fn run_on(&self, threads: usize, job: &(dyn Fn(usize) + Sync)) {
        let shared = &*self.shared;
        shared.panicked.store(false, Ordering::Relaxed);
        // A panic may have left some who had come; nobody is inside a region now.
        shared.arrived.0.store(0, Ordering::Relaxed);
        // SAFETY: only the lifetime changes. `Wait` below does not let this function end, by return or by panic, before
        // every worker is done with the closure.
        let job_static: *const Job = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static Job>(job) };
        // SAFETY: `pending` is 0 and the caller, `run`, has `self` exclusively: no worker reads `job` until `epoch` changes.
        unsafe { *shared.job.get() = Some(job_static) };
        shared.pending.0.store(threads - 1, Ordering::Relaxed);
        // Release (in SeqCst): pairs with the workers' load of `epoch`, which makes job and pending visible to them.
        // SeqCst with the load of `parked`: either we see that a worker parks, or it sees the new epoch first.
        let number = shared.epoch.0.load(Ordering::Relaxed) >> THREADS_BITS;
        shared.epoch.0.store(((number + 1) << THREADS_BITS) | threads as u64, Ordering::SeqCst);
        for (parked, (thread, _)) in shared.parked.iter().zip(&self.workers).take(threads - 1) {
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

/// Spins, then yields, until `done`. What is waited after spinning is added to `stalled`, nanoseconds.
#[inline]
fn spin_until(stalled: Option<&AtomicU64>, done: impl Fn() -> bool) {
    for _ in 0..SPIN_ROUNDS {
        if done() {
            return;
        }
        std::hint::spin_loop();
    }
    let since = Instant::now();
    while !done() {
        std::thread::yield_now();
    }
    if let Some(stalled) = stalled {
        stalled.fetch_add(since.elapsed().as_nanos() as u64, Ordering::Relaxed);
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
        let stalled = (self.index == 0).then_some(&shared.stalled);
        spin_until(stalled, || {
            shared.meeting.0.load(Ordering::Acquire) != meeting || shared.panicked.load(Ordering::Acquire)
        });
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
        spin_until(Some(&self.0.stalled), || self.0.pending.0.load(Ordering::Acquire) == 0);
    }
}

impl Shared {
    fn work(&self, index: usize) {
        let mut seen = 0;
        loop {
            seen = self.next_epoch(seen, index);
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

    /// Waits for an epoch other than `seen` that has work for thread `index`.
    fn next_epoch(&self, seen: u64, index: usize) -> u64 {
        let parked = &self.parked[index - 1].0;
        // An epoch with work for us stays until we have done it.
        let called = |order: Ordering| {
            let epoch = self.epoch.0.load(order);
            (epoch != seen && (epoch & THREADS_MASK) as usize > index).then_some(epoch)
        };
        // Acquire: pairs with the caller's store.
        for _ in 0..SPIN_ROUNDS {
            if let Some(epoch) = called(Ordering::Acquire) {
                return epoch;
            }
            std::hint::spin_loop();
        }
        let since = Instant::now();
        while since.elapsed() < YIELD_FOR {
            if let Some(epoch) = called(Ordering::Acquire) {
                return epoch;
            }
            std::thread::yield_now();
        }
        parked.store(true, Ordering::SeqCst);
        // SeqCst: pairs with the caller, see `run_on`.
        let epoch = loop {
            if let Some(epoch) = called(Ordering::SeqCst) {
                break epoch;
            }
            std::thread::park();
        };
        parked.store(false, Ordering::Relaxed);
        epoch
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        // Another number, and work for everyone: to stop.
        let number = self.shared.epoch.0.load(Ordering::Relaxed) >> THREADS_BITS;
        self.shared.epoch.0.store(((number + 1) << THREADS_BITS) | THREADS_MASK, Ordering::SeqCst);
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
        let threads = pool.threads_max();
        let ran: Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
        for round in 1..=300 {
            pool.pace = Pace::new(threads);
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
        for bad in 0..pool.threads_max() {
            pool.pace = Pace::new(pool.threads_max());
            let result = panic::catch_unwind(AssertUnwindSafe(|| pool.run(&|index| assert_ne!(index, bad))));
            assert!(result.is_err(), "thread {bad}");
        }
        let (sum, threads) = (AtomicUsize::new(0), pool.threads());
        pool.run(&|index| {
            sum.fetch_add(index + 1, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), (1..=threads).sum::<usize>());
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
        for bad in 0..pool.threads_max() {
            pool.pace = Pace::new(pool.threads_max());
            let result = panic::catch_unwind(AssertUnwindSafe(|| {
                pool.run_team(&|member| {
                    assert_ne!(member.index, bad);
                    member.meet();
                });
            }));
            assert!(result.is_err(), "thread {bad}");
        }
        let (met, threads) = (AtomicUsize::new(0), pool.threads());
        pool.run_team(&|member| {
            member.meet();
            met.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(met.into_inner(), threads);
    }

    #[test]
    fn a_region_has_as_many_threads_as_the_pace_says() {
        let mut pool = Pool::new(Some(2)).expect("threads");
        let most = pool.threads_max();
        let ran: Vec<AtomicUsize> = (0..most).map(|_| AtomicUsize::new(0)).collect();
        let mut expected = vec![0; most];
        for round in 0..20_000 {
            // `run` may choose otherwise on a busy host, so it is told each time.
            pool.pace = Pace::new(if round % 3 == 0 { 1 } else { most });
            let threads = pool.threads();
            pool.run(&|index| {
                ran[index].fetch_add(1, Ordering::Relaxed);
            });
            expected[..threads].iter_mut().for_each(|n| *n += 1);
            let ran: Vec<usize> = ran.iter().map(|n| n.load(Ordering::Relaxed)).collect();
            assert_eq!(ran, expected, "round {round}");
        }
    }

    #[test]
    fn splits_cover_everything_once() {
        for (n, parts) in [(0, 3), (1, 2), (17, 4), (64, 1)] {
            let all: Vec<usize> = (0..parts).flat_map(|index| split(n, index, parts)).collect();
            assert_eq!(all, (0..n).collect::<Vec<_>>());
        }
    }
}
