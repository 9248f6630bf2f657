//! One connected client as the sessions thread sees it: its socket, its submission ring, its requests on their way.

use std::collections::HashMap;
use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use llmd_protocol::ring::{Submission, SubmissionConsumer, Violation};

use crate::sessions::SessionShared;

/// Submissions taken from one session before the others have their turn.
const SUBMISSIONS_PER_TURN: usize = 64;
/// Doorbells without a submission behind them that a client may send per [`SPURIOUS_WINDOW`]. A correct client sends
/// none but for a rare race, so this is far from anything honest.
const SPURIOUS_DOORBELLS_MAX: u32 = 1000;
const SPURIOUS_WINDOW: Duration = Duration::from_secs(1);
/// Doorbell bytes read at a time.
const DOORBELLS_READ: usize = 64;

/// One client.
pub struct Session {
    /// What the engine knows too.
    pub shared: Arc<SessionShared>,
    /// Doorbell in both directions, and liveness.
    socket: UnixStream,
    submissions: SubmissionConsumer,
    /// Requests that may still be on their way to the engine, with the flag that stops them there. Entries whose flag
    /// nobody else holds any more have arrived and are dropped at the next look.
    on_the_way: HashMap<u32, Arc<AtomicBool>>,
    doorbells_spurious: u32,
    window_start: Instant,
}

/// What the socket said.
#[derive(Debug, PartialEq, Eq)]
pub enum Doorbell {
    /// At least one byte: look at the ring.
    Rang,
    /// Nothing to read after all.
    Silent,
    /// The client is gone.
    HungUp,
}

/// How far a turn got.
pub enum Turn {
    /// The ring is empty and the wake request is set: the next doorbell brings us back.
    Parked,
    /// The turn's share is used up and more is there.
    More,
}

impl Session {
    /// A session whose handshake is done.
    pub fn new(shared: Arc<SessionShared>, socket: UnixStream, submissions: SubmissionConsumer) -> Self {
        Self {
            shared,
            socket,
            submissions,
            on_the_way: HashMap::new(),
            doorbells_spurious: 0,
            window_start: Instant::now(),
        }
    }

    /// Its socket, for polling.
    pub fn socket(&self) -> &UnixStream {
        &self.socket
    }

    /// Reads the doorbell's bytes, of which the number means nothing.
    pub fn read_doorbell(&mut self) -> Doorbell {
        let mut bytes = [0; DOORBELLS_READ];
        match (&self.socket).read(&mut bytes) {
            Ok(0) => Doorbell::HungUp,
            Ok(_) => Doorbell::Rang,
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                Doorbell::Silent
            }
            Err(_) => Doorbell::HungUp,
        }
    }

    /// Takes what the ring holds, at most one turn's share, and parks when it is empty. `take` gets each submission with
    /// the flag that cancels it.
    pub fn turn(&mut self, mut take: impl FnMut(&Arc<SessionShared>, Taken)) -> Result<Turn, Violation> {
        let mut taken = 0;
        loop {
            if taken == SUBMISSIONS_PER_TURN {
                return Ok(Turn::More);
            }
            match self.submissions.next()? {
                Some(Submission::Submit { request_id, payload }) => {
                    taken += 1;
                    let cancelled = Arc::new(AtomicBool::new(false));
                    if self.on_the_way.len() >= 2 * SUBMISSIONS_PER_TURN {
                        self.on_the_way.retain(|_, flag| Arc::strong_count(flag) > 1);
                    }
                    self.on_the_way.insert(request_id, Arc::clone(&cancelled));
                    take(&self.shared, Taken::Submit { request: request_id, payload, cancelled });
                }
                Some(Submission::Cancel { request_id }) => {
                    taken += 1;
                    if let Some(flag) = self.on_the_way.remove(&request_id) {
                        flag.store(true, Ordering::Relaxed);
                    }
                    take(&self.shared, Taken::Cancel { request: request_id });
                }
                None => {
                    if self.submissions.park() {
                        return Ok(Turn::Parked);
                    }
                }
            }
        }
    }

    /// Counts a doorbell that had nothing behind it. False when there were too many.
    pub fn tolerate_spurious(&mut self, now: Instant) -> bool {
        if now.duration_since(self.window_start) > SPURIOUS_WINDOW {
            self.window_start = now;
            self.doorbells_spurious = 0;
        }
        self.doorbells_spurious += 1;
        self.doorbells_spurious <= SPURIOUS_DOORBELLS_MAX
    }

    /// Stops what is still on its way to the engine.
    pub fn cancel_all(&mut self) {
        for flag in self.on_the_way.values() {
            flag.store(true, Ordering::Relaxed);
        }
    }
}

/// One thing a client asked for.
pub enum Taken {
    /// Text, please.
    Submit {
        /// The client's number for it.
        request: u32,
        /// The encoded `GenerateRequest`, our own copy.
        payload: Vec<u8>,
        /// Stops it before it reaches the engine.
        cancelled: Arc<AtomicBool>,
    },
    /// No more of it, please.
    Cancel {
        /// The client's number for it.
        request: u32,
    },
}
