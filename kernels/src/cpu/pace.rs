//! How many threads compute.
//!
//! Threads that meet several times a layer all have to be running at once. Where other programs take the processors, most of
//! the time may go in waiting for a thread that is not running; then fewer threads compute more. So the time is watched that
//! the caller waits for threads that should long have been there: when it is more than half of all, the threads are halved,
//! and a while later more are tried again. Results don't depend on the number of threads.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Time over which waiting is judged.
const WINDOW: Duration = Duration::from_millis(20);
/// How long fewer threads compute before more are tried again, at first and at most.
const FEWER_FOR: Duration = Duration::from_millis(100);
const FEWER_FOR_MAX: Duration = Duration::from_secs(2);

/// The number of threads, and what it follows from.
pub(super) struct Pace {
    /// Threads of the next region.
    pub(super) threads: usize,
    /// Begin of the window in which waiting is judged.
    window: Instant,
    /// `stalled` at that time.
    stalled_before: u64,
    /// When more threads are tried.
    more_at: Instant,
    fewer_for: Duration,
}

impl Pace {
    pub(super) fn new(threads: usize) -> Self {
        let now = Instant::now();
        Self { threads, window: now, stalled_before: 0, more_at: now, fewer_for: FEWER_FOR }
    }

    /// Called after each region of a pool of at most `most` threads whose caller has waited `stalled` nanoseconds in all for
    /// threads that did not run; reads no clock while it need not wait.
    #[inline]
    pub(super) fn adjust(&mut self, stalled: &AtomicU64, most: usize) {
        let stalled = stalled.load(Ordering::Relaxed);
        if stalled != self.stalled_before || self.threads < most {
            self.judge(Instant::now(), stalled, most);
        }
    }

    fn judge(&mut self, now: Instant, stalled: u64, most: usize) {
        let window = now - self.window;
        if window >= WINDOW {
            let waited = Duration::from_nanos(stalled - self.stalled_before);
            (self.window, self.stalled_before) = (now, stalled);
            // Half the threads do as much as all of them when those wait half of their time.
            if self.threads > 1 && waited * 2 > window {
                self.threads /= 2;
                self.more_at = now + self.fewer_for;
                self.fewer_for = (self.fewer_for * 2).min(FEWER_FOR_MAX);
                return;
            }
            if self.threads == most {
                // All of them are at work again.
                self.fewer_for = FEWER_FOR;
            }
        }
        if self.threads < most && now >= self.more_at {
            self.threads = (self.threads * 2).min(most);
            (self.window, self.stalled_before) = (now, stalled);
            self.more_at = now + WINDOW;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_halved_while_they_wait_and_come_back() {
        let (start, stalled) = (Instant::now(), |ms: u64| ms * 1_000_000);
        let ms = Duration::from_millis;
        let mut pace = Pace { window: start, more_at: start, ..Pace::new(8) };
        pace.judge(start + ms(10), stalled(9), 8);
        assert_eq!(pace.threads, 8, "the window is not over");
        pace.judge(start + ms(20), stalled(9), 8);
        assert_eq!(pace.threads, 8, "less than half is waiting");
        pace.judge(start + ms(40), stalled(20), 8);
        assert_eq!(pace.threads, 4);
        pace.judge(start + ms(60), stalled(40), 8);
        assert_eq!(pace.threads, 2);
        pace.judge(start + ms(240), stalled(40), 8);
        assert_eq!(pace.threads, 2, "twice as long as before");
        pace.judge(start + ms(260), stalled(40), 8);
        assert_eq!(pace.threads, 4);
        pace.judge(start + ms(280), stalled(40), 8);
        assert_eq!(pace.threads, 8);
        // An idle hour is not waiting.
        pace.judge(start + ms(3_600_000), stalled(60), 8);
        assert_eq!((pace.threads, pace.fewer_for), (8, FEWER_FOR));
    }
}
