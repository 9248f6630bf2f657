//! One connected client as the sessions thread sees it: its socket, its submission ring, its requests on their way.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use llmd_protocol::doorbell::SessionSocket;
use llmd_protocol::layout::SessionState;
use llmd_protocol::limits::SUBMISSIONS_PER_TURN;
use llmd_protocol::session::{Submission, SubmissionConsumer, Violation};

use crate::sessions::SessionShared;

/// Slots read from one session before the others have their turn.
const SLOTS_PER_TURN: u64 = SUBMISSIONS_PER_TURN as u64;
/// Bytes copied from one session before the others have their turn; about 0.1 ms of copying. A request in parts may exceed
/// it once, up to the largest request.
const BYTES_PER_TURN: u64 = 1 << 20;
/// Entries of `on_the_way` at which those that have arrived are dropped.
const ON_THE_WAY_KEPT: usize = 128;

/// One client.
pub struct Session {
    /// What the engine knows too.
    pub shared: Arc<SessionShared>,
    /// Doorbell in both directions, and liveness.
    socket: SessionSocket,
    submissions: SubmissionConsumer,
    /// Requests that may still be on their way to the engine, with the flag that stops them there. Entries whose flag
    /// nobody else holds any more have arrived and are dropped at the next look.
    on_the_way: HashMap<u32, Arc<AtomicBool>>,
    /// Doorbells read and not yet set against what they announced.
    doorbells: usize,
    /// It stands in the list of those whose turn comes again.
    pub queued: bool,
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
    pub fn new(shared: Arc<SessionShared>, socket: SessionSocket, submissions: SubmissionConsumer) -> Self {
        Self { shared, socket, submissions, on_the_way: HashMap::new(), doorbells: 0, queued: false }
    }

    /// Its socket, for polling.
    pub fn socket(&self) -> &SessionSocket {
        &self.socket
    }

    /// Takes waiting doorbells out of the socket. False: the client is gone.
    pub fn read_doorbells(&mut self) -> bool {
        let drained = self.socket.drain();
        self.doorbells += drained.doorbells;
        !drained.hung_up
    }

    /// Tells the client where the daemon stands.
    pub fn set_state(&self, state: SessionState) {
        self.submissions.set_state(state);
    }

    /// Ends the connection.
    pub fn hang_up(&self) {
        self.socket.hang_up();
    }

    /// Takes what the ring holds, at most one turn's share, and parks when it is empty. `take` gets each submission with
    /// the flag that cancels it.
    pub fn turn(&mut self, mut take: impl FnMut(&Arc<SessionShared>, Taken)) -> Result<Turn, Violation> {
        let (slots_before, bytes_before) = self.submissions.work_done();
        loop {
            let (slots, bytes) = self.submissions.work_done();
            if slots - slots_before >= SLOTS_PER_TURN || bytes - bytes_before >= BYTES_PER_TURN {
                return Ok(Turn::More);
            }
            match self.submissions.next()? {
                Some(Submission::Submit { request_id, payload }) => {
                    let cancelled = Arc::new(AtomicBool::new(false));
                    if self.on_the_way.len() >= ON_THE_WAY_KEPT {
                        self.on_the_way.retain(|_, flag| Arc::strong_count(flag) > 1);
                    }
                    self.on_the_way.insert(request_id, Arc::clone(&cancelled));
                    take(&self.shared, Taken::Submit { request: request_id, payload, cancelled });
                }
                Some(Submission::Cancel { request_id }) => {
                    if let Some(flag) = self.on_the_way.remove(&request_id) {
                        flag.store(true, Ordering::Relaxed);
                    }
                    take(&self.shared, Taken::Cancel { request: request_id });
                }
                None => {
                    self.submissions.note_doorbells(std::mem::take(&mut self.doorbells))?;
                    if self.submissions.arm_wake()? {
                        return Ok(Turn::Parked);
                    }
                }
            }
        }
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

#[cfg(test)]
mod tests;
