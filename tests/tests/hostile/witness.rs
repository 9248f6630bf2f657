//! Honest clients that stream while something else goes on, and notice if it concerns them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};

use llmd_tests::daemon::{Daemon, wait_until};
use llmd_tests::load::{self, Mix};

/// Clients at once.
const CLIENTS: usize = 2;
/// Different requests they ask, again and again.
const REQUESTS: u64 = 3;

/// Some honest clients at work.
pub struct Witness {
    stop: Arc<AtomicBool>,
    answers: Arc<AtomicUsize>,
    threads: Vec<JoinHandle<()>>,
}

impl Witness {
    /// Asks each request once with nobody else there, then starts the clients, which compare every answer with that one.
    pub fn start(daemon: &Daemon) -> Self {
        let mix = Mix { temperature: 0.8, ..Mix::tiny(77, 5..=60, 20..=60) };
        let alone = daemon.client();
        let expected: Vec<_> =
            (0..REQUESTS).map(|n| load::answer(&alone, mix.request(n)).expect("an answer").tokens).collect();
        let (stop, answers) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let work = || {
            let (client, mix, expected) = (daemon.client(), mix.clone(), expected.clone());
            let (stop, answers) = (Arc::clone(&stop), Arc::clone(&answers));
            thread::spawn(move || {
                for number in (0..REQUESTS).cycle() {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let answer = load::answer(&client, mix.request(number)).expect("an answer as ever");
                    assert_eq!(answer.tokens, expected[number as usize], "an answer as ever");
                    answers.fetch_add(1, Ordering::Relaxed);
                }
            })
        };
        let threads = (0..CLIENTS).map(|_| work()).collect();
        Self { stop, answers, threads }
    }

    /// Waits until further requests that were begun after this call have been answered.
    pub fn still_served(&self) {
        // Of this many answers, each client has begun and ended one since.
        let enough = self.answers.load(Ordering::Relaxed) + 3 * CLIENTS;
        wait_until("others are served", || {
            assert!(self.threads.iter().all(|thread| !thread.is_finished()), "an honest client has failed");
            self.answers.load(Ordering::Relaxed) >= enough
        });
    }

    /// Lets them finish and go.
    pub fn stop(self) {
        self.still_served();
        self.stop.store(true, Ordering::Relaxed);
        self.threads.into_iter().for_each(|thread| thread.join().expect("an honest client has failed"));
    }
}
