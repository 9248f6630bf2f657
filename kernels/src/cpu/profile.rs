//! Where the time of a step goes: what each thread computes, and how long it waits for the others.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A part of a layer, between two points at which all threads meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Normalises and quantises the input of attention.
    AttentionNorm,
    /// Queries, keys and values.
    Qkv,
    /// Rotates queries and keys, writes keys and values to the cache.
    RopeAndCache,
    /// Scores, softmax, weighted values.
    Attention,
    /// Quantises what was attended to.
    Quantize,
    /// Output projection and residual sum.
    AttentionOutput,
    /// Normalises and quantises the input of the feed-forward part.
    FeedForwardNorm,
    /// Gate, up, their product, quantised.
    GateUp,
    /// Down projection and residual sum.
    Down,
}

impl Phase {
    /// All of them, in the order they run.
    pub const ALL: [Phase; 9] = [
        Phase::AttentionNorm,
        Phase::Qkv,
        Phase::RopeAndCache,
        Phase::Attention,
        Phase::Quantize,
        Phase::AttentionOutput,
        Phase::FeedForwardNorm,
        Phase::GateUp,
        Phase::Down,
    ];

    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Phase::AttentionNorm => "norm, quantise",
            Phase::Qkv => "queries, keys, values",
            Phase::RopeAndCache => "rotate, write cache",
            Phase::Attention => "attention",
            Phase::Quantize => "quantise attended",
            Phase::AttentionOutput => "output, add",
            Phase::FeedForwardNorm => "norm, quantise",
            Phase::GateUp => "gate, up, SiLU, quantise",
            Phase::Down => "down, add",
        }
    }
}

/// Time of one phase, summed over threads and layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PhaseTime {
    /// Which.
    pub phase: Phase,
    /// Computing.
    pub busy: Duration,
    /// Waiting for the other threads at its end.
    pub waiting: Duration,
}

/// Sums of all threads.
#[derive(Default)]
pub(crate) struct Profile {
    /// Nanoseconds computing and waiting, per phase.
    nanos: [[AtomicU64; 2]; Phase::ALL.len()],
}

impl Profile {
    /// What was counted since the last call.
    pub(crate) fn take(&self) -> [PhaseTime; Phase::ALL.len()] {
        Phase::ALL.map(|phase| {
            let take = |i: usize| Duration::from_nanos(self.nanos[phase as usize][i].swap(0, Ordering::Relaxed));
            PhaseTime { phase, busy: take(0), waiting: take(1) }
        })
    }
}

/// One thread's clock through the phases of a region; does nothing without a profile.
pub(crate) struct Clock<'a> {
    profile: Option<&'a Profile>,
    since: Cell<Option<Instant>>,
}

impl<'a> Clock<'a> {
    pub(crate) fn start(profile: Option<&'a Profile>) -> Self {
        Self { profile, since: Cell::new(profile.map(|_| Instant::now())) }
    }

    /// Ends the work of `phase`; `wait` returns when the other threads have ended it too.
    #[inline]
    pub(crate) fn end(&self, phase: Phase, wait: impl FnOnce()) {
        let (Some(profile), Some(since)) = (self.profile, self.since.get()) else { return wait() };
        let done = Instant::now();
        wait();
        let met = Instant::now();
        let [busy, waiting] = &profile.nanos[phase as usize];
        busy.fetch_add((done - since).as_nanos() as u64, Ordering::Relaxed);
        waiting.fetch_add((met - done).as_nanos() as u64, Ordering::Relaxed);
        self.since.set(Some(met));
    }
}
