//! Who is connected. The listener accepts and shakes hands, a session holds one client's rings and credentials.
//!
//! One thread, `listener::run`, owns all sockets and all submission rings; the engine owns the completion rings. What both
//! must know of a session stands in [`SessionShared`], in atomics.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use llmd_protocol::control::ClientStatus;
use llmd_protocol::handshake::Peer;

pub mod connects;
pub mod listener;
pub mod session;

/// Names a session for the life of the daemon; never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionKey(pub u64);

impl std::fmt::Display for SessionKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// What the sessions thread and the engine both know of a session.
#[derive(Debug)]
pub struct SessionShared {
    /// Its name.
    pub key: SessionKey,
    /// Who it serves.
    pub peer: Peer,
    /// When the handshake was done.
    pub connected: Instant,
    /// Requests taken from the ring and not yet ended: raised by the sessions thread, lowered by the engine.
    pub in_flight: AtomicU32,
    /// Tokens delivered so far; the engine counts.
    pub output_tokens: AtomicU64,
}

/// All sessions there are, for `llmctl status`.
#[derive(Debug, Default)]
pub struct SessionTable {
    sessions: Mutex<HashMap<SessionKey, Arc<SessionShared>>>,
}

impl SessionTable {
    /// Adds a session.
    pub fn insert(&self, session: Arc<SessionShared>) {
        self.lock().insert(session.key, session);
    }

    /// Takes a session out.
    pub fn remove(&self, key: SessionKey) {
        self.lock().remove(&key);
    }

    /// Sessions there are.
    pub fn len(&self) -> usize {
        self.lock().len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Sessions of one user.
    pub fn of_uid(&self, uid: u32) -> usize {
        self.lock().values().filter(|s| s.peer.uid == uid).count()
    }

    /// What an operator sees, oldest session first.
    pub fn status(&self) -> Vec<ClientStatus> {
        let mut sessions: Vec<_> = self.lock().values().cloned().collect();
        sessions.sort_by_key(|s| s.key);
        sessions
            .iter()
            .map(|s| ClientStatus {
                session: s.key.0,
                pid: s.peer.pid.cast_unsigned(),
                uid: s.peer.uid,
                requests_in_flight: s.in_flight.load(Ordering::Relaxed),
                connected_s: s.connected.elapsed().as_secs_f64(),
                tokens_out: s.output_tokens.load(Ordering::Relaxed),
            })
            .collect()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<SessionKey, Arc<SessionShared>>> {
        // The map is whole between any two of our statements, so a panic elsewhere leaves nothing half done.
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
