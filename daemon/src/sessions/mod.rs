//! Who is connected. The listener accepts and shakes hands, a session holds one client's rings and credentials.
//!
//! One thread, `listener::run`, owns all sockets and all submission rings; the engine owns the completion rings. What both
//! must know of a session stands in [`SessionShared`], in atomics.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use llmd_protocol::control::ClientStatus;
use llmd_protocol::doorbell::SessionSocket;
use llmd_protocol::handshake::Peer;
use llmd_protocol::limits::REQUEST_BYTES_MAX;
use llmd_protocol::message::Reject;
use llmd_protocol::session::{CompletionDoorbell, CompletionProducer};

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
    /// Bytes of its requests that wait to be read.
    unread_bytes: AtomicUsize,
    /// Why the engine wants it closed. The sessions thread closes it, and says so.
    condemned: OnceLock<String>,
}

impl SessionShared {
    /// A session that begins now.
    pub fn new(key: SessionKey, peer: Peer) -> Self {
        Self {
            key,
            peer,
            connected: Instant::now(),
            in_flight: AtomicU32::new(0),
            output_tokens: AtomicU64::new(0),
            unread_bytes: AtomicUsize::new(0),
            condemned: OnceLock::new(),
        }
    }

    /// Says why the session must be closed; the first reason stands.
    pub fn condemn(&self, why: &str) {
        let _ = self.condemned.set(why.to_owned());
    }

    /// Why the session must be closed, if it must.
    pub fn condemned(&self) -> Option<&str> {
        self.condemned.get().map(String::as_str)
    }
}

/// Memory for requests that wait to be read: without a bound a few clients could fill the host's with a few thousand
/// requests of the largest size.
#[derive(Debug, Default)]
pub struct Unread {
    bytes: AtomicUsize,
}

impl Unread {
    /// Bytes of one session's requests that may wait: one request of the largest size and whatever small ones.
    pub const SESSION_BYTES_MAX: usize = 2 * REQUEST_BYTES_MAX;
    /// Bytes of all sessions' requests that may wait.
    pub const BYTES_MAX: usize = 16 * REQUEST_BYTES_MAX;

    /// Room for `bytes` of a request of `session`, held until what is returned is dropped. None: there is no room now.
    pub fn hold(self: &Arc<Self>, session: &Arc<SessionShared>, bytes: usize) -> Option<Held> {
        // Only the sessions thread holds more, so what is free here stays free.
        let fits = |held: &AtomicUsize, max: usize| bytes <= max.saturating_sub(held.load(Ordering::Relaxed));
        if !fits(&self.bytes, Self::BYTES_MAX) || !fits(&session.unread_bytes, Self::SESSION_BYTES_MAX) {
            return None;
        }
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        session.unread_bytes.fetch_add(bytes, Ordering::Relaxed);
        Some(Held { all: Arc::clone(self), session: Arc::clone(session), bytes })
    }
}

/// One request's part of [`Unread`].
#[derive(Debug)]
pub struct Held {
    all: Arc<Unread>,
    session: Arc<SessionShared>,
    bytes: usize,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.all.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        self.session.unread_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// A request as the sessions thread took it from the ring.
pub struct Job {
    /// Whose.
    pub session: Arc<SessionShared>,
    /// The client's number for it.
    pub request: u32,
    /// The encoded `GenerateRequest`.
    pub payload: Vec<u8>,
    /// When it was taken from the ring.
    pub received: Instant,
    /// Set when the client cancels before the engine has the request.
    pub cancelled: Arc<AtomicBool>,
    /// The payload's part of what may wait.
    pub held: Held,
}

/// A refusal with a sentence that says what is wrong.
#[derive(Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The kind, which programs act on.
    pub reject: Reject,
    /// For people.
    pub detail: String,
}

impl Refusal {
    /// A refusal with its sentence.
    pub fn new(reject: Reject, detail: impl Into<String>) -> Self {
        Self { reject, detail: detail.into() }
    }
}

/// A new session's parts that are the engine's.
pub struct Opened {
    /// Who it is.
    pub shared: Arc<SessionShared>,
    /// Where its answers go.
    pub completions: CompletionProducer,
    /// How its client is woken.
    pub doorbell: CompletionDoorbell,
    /// How it is ended from our side.
    pub socket: SessionSocket,
}

/// What the sessions thread has to tell the engine.
pub enum Arrival {
    /// A client has connected.
    Opened(Box<Opened>),
    /// A client has hung up, or was closed for lying.
    Closed {
        /// Which.
        session: SessionKey,
    },
    /// A request that cannot even be read now.
    Refused {
        /// Whose.
        session: SessionKey,
        /// The client's number for it.
        request: u32,
        /// Why.
        refusal: Refusal,
    },
    /// The client wants no more of a request.
    Cancelled {
        /// Whose.
        session: SessionKey,
        /// The client's number for it.
        request: u32,
    },
}

/// A number that nobody can foretell.
pub fn random() -> u64 {
    use std::hash::BuildHasher;
    // RandomState's keys come from the system's random numbers and differ from call to call.
    std::hash::RandomState::new().hash_one(0u8)
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
