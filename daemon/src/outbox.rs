//! Tokens on their way to clients: completion rings, and the bounded spill behind each of them.
//!
//! The engine never blocks on a client and never drops a record. What does not fit a client's ring waits in that
//! session's private spill, in order. A session whose spill stays filled is first suspended (its sequences take no part
//! in steps), then its requests are cancelled as `SlowReader`; one that overruns even the bound of its spill, or whose
//! indices lie, is closed. No other session notices.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use llmd_protocol::completion::CompletionSlot;
use llmd_protocol::doorbell::SessionSocket;
use llmd_protocol::limits::{REQUESTS_IN_FLIGHT, SPILL_BYTES, SPILL_CANCEL, SPILL_DESCHEDULE};
use llmd_protocol::session::{CompletionDoorbell, CompletionProducer};

use crate::metrics::Metrics;
use crate::notifier::{Notice, Notifier};
use crate::sequence::SequenceId;
use crate::sessions::{Opened, SessionKey, SessionShared};

/// What a session may leave unread.
#[derive(Debug, Clone, Copy)]
pub struct OutboxLimits {
    /// Slots of one spill. At half of it the session is suspended whatever the time; the rest is room for what its requests
    /// in flight still have to say.
    pub spill_slots_max: usize,
    /// How long a spill may stay filled before the session is suspended.
    pub suspend_after: Duration,
    /// How long a spill may stay filled before the session's requests are ended.
    pub give_up_after: Duration,
}

impl Default for OutboxLimits {
    /// The protocol's.
    fn default() -> Self {
        Self {
            spill_slots_max: SPILL_BYTES / size_of::<CompletionSlot>(),
            suspend_after: SPILL_DESCHEDULE,
            give_up_after: SPILL_CANCEL,
        }
    }
}

// A suspended session's requests can all end in the other half of its spill, each with one record.
const _: () = assert!(SPILL_BYTES / size_of::<CompletionSlot>() / 2 >= REQUESTS_IN_FLIGHT as usize);

/// What a session's backlog asks of the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pressure {
    /// Compute no more for it until its client has read.
    Suspend,
    /// Its client reads again.
    Resume,
    /// It has had its time: end its requests.
    GiveUp,
}

/// The engine's end of one session.
struct Lane {
    completions: CompletionProducer,
    doorbell: Arc<CompletionDoorbell>,
    socket: SessionSocket,
    shared: Arc<SessionShared>,
    spill: VecDeque<CompletionSlot>,
    spilling_since: Option<Instant>,
    suspended: bool,
    /// Pushed to since the last publish.
    dirty: bool,
    /// Its indices lied or its spill overran; the sessions thread has been asked to close it, and nothing more is written.
    closed: bool,
    /// Requests in flight by the client's own numbers.
    live: HashMap<u32, SequenceId>,
}

/// All completion rings.
pub struct Outbox {
    lanes: HashMap<SessionKey, Lane>,
    dirty: Vec<SessionKey>,
    notifier: Notifier,
    notices: Vec<Notice>,
    metrics: Arc<Metrics>,
    limits: OutboxLimits,
    /// Slots in all spills together.
    spilled: usize,
}

impl Outbox {
    /// No sessions yet.
    pub fn new(notifier: Notifier, metrics: Arc<Metrics>, limits: OutboxLimits) -> Self {
        Self { lanes: HashMap::new(), dirty: Vec::new(), notifier, notices: Vec::new(), metrics, limits, spilled: 0 }
    }

    /// A session has come.
    pub fn open(&mut self, opened: Opened) {
        let Opened { shared, completions, doorbell, socket } = opened;
        let key = shared.key;
        let lane = Lane {
            completions,
            doorbell: Arc::new(doorbell),
            socket,
            shared,
            spill: VecDeque::new(),
            spilling_since: None,
            suspended: false,
            dirty: false,
            closed: false,
            live: HashMap::new(),
        };
        let previous = self.lanes.insert(key, lane);
        assert!(previous.is_none(), "session keys are never used twice");
    }

    /// A session has gone. Returns its sequences, which the engine cancels.
    pub fn close(&mut self, key: SessionKey) -> Vec<SequenceId> {
        let Some(lane) = self.lanes.remove(&key) else { return Vec::new() };
        self.spilled -= lane.spill.len();
        self.metrics.spill(self.spilled * size_of::<CompletionSlot>());
        lane.live.into_values().collect()
    }

    /// Notes that `request` of session `key` is now `sequence`. False when the session has gone or has such a request
    /// already; the caller then drops the sequence.
    #[must_use]
    pub fn begin(&mut self, key: SessionKey, request: u32, sequence: SequenceId) -> bool {
        let Some(lane) = self.lanes.get_mut(&key) else { return false };
        if lane.closed || lane.live.contains_key(&request) {
            return false;
        }
        lane.live.insert(request, sequence);
        true
    }

    /// Whether `request` is in flight on session `key`.
    pub fn sequence(&self, key: SessionKey, request: u32) -> Option<SequenceId> {
        self.lanes.get(&key)?.live.get(&request).copied()
    }

    /// Whether the session's client is expected to read what is pushed.
    pub fn is_open(&self, key: SessionKey) -> bool {
        self.lanes.get(&key).is_some_and(|lane| !lane.closed)
    }

    /// Whether the session's sequences take no part in steps now; a new one must not either.
    pub fn is_suspended(&self, key: SessionKey) -> bool {
        self.lanes.get(&key).is_some_and(|lane| lane.suspended)
    }

    /// Requests of all open sessions that were taken from a ring and have not ended, wherever they are now.
    pub fn in_flight(&self) -> u64 {
        let open = self.lanes.values().filter(|lane| !lane.closed);
        open.map(|lane| u64::from(lane.shared.in_flight.load(Ordering::Relaxed))).sum()
    }

    /// Counts delivered tokens for `llmctl status`.
    pub fn count_tokens(&self, key: SessionKey, tokens: u64) {
        if let Some(lane) = self.lanes.get(&key) {
            lane.shared.output_tokens.fetch_add(tokens, Ordering::Relaxed);
        }
    }

    /// Appends a record for the client; it becomes visible at the next [`Outbox::publish`].
    pub fn push(&mut self, key: SessionKey, slot: CompletionSlot, now: Instant) {
        let Some(lane) = self.lanes.get_mut(&key) else { return };
        if lane.closed {
            return;
        }
        if !lane.dirty {
            lane.dirty = true;
            self.dirty.push(key);
        }
        if lane.spill.is_empty() {
            if lane.completions.push(slot).is_ok() {
                return;
            }
            // Full by the last look; the client may have read since.
            match lane.completions.free() {
                Ok(0) => {}
                Ok(_) => return lane.completions.push(slot).expect("a slot is free"),
                Err(violation) => return self.give_up(key, &violation.to_string()),
            }
        }
        if lane.spill.len() >= self.limits.spill_slots_max {
            return self.give_up(key, "left its completions unread until the spill was full");
        }
        lane.spill.push_back(slot);
        lane.spilling_since.get_or_insert(now);
        self.spilled += 1;
    }

    /// Appends a request's last record and forgets the request.
    pub fn end(&mut self, key: SessionKey, request: u32, slot: CompletionSlot, now: Instant) {
        self.push(key, slot, now);
        if let Some(lane) = self.lanes.get_mut(&key) {
            lane.live.remove(&request);
            lane.shared.in_flight.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Makes everything pushed since the last call visible, and asks the notifier to wake who sleeps.
    pub fn publish(&mut self) {
        for key in self.dirty.drain(..) {
            let Some(lane) = self.lanes.get_mut(&key) else { continue };
            lane.dirty = false;
            if lane.closed {
                continue;
            }
            if let Some(published) = lane.completions.publish() {
                self.notices.push(Notice::Published(Arc::clone(&lane.doorbell), published));
            }
        }
        if !self.notices.is_empty() {
            self.notifier.send(std::mem::take(&mut self.notices));
        }
    }

    /// Moves spilled records into rings that have room again and says which sessions must be suspended, resumed or given
    /// up. `verdict` is called at most once per session; call this once per step, and every few milliseconds when idle
    /// while [`Outbox::is_spilling`].
    pub fn drain_spills(&mut self, now: Instant, mut verdict: impl FnMut(SessionKey, Pressure)) {
        if self.spilled == 0 && !self.lanes.values().any(|lane| lane.suspended) {
            return;
        }
        let mut liars = Vec::new();
        for (&key, lane) in &mut self.lanes {
            if lane.closed || (lane.spill.is_empty() && !lane.suspended) {
                continue;
            }
            match lane.completions.free() {
                Ok(free) => {
                    for slot in lane.spill.drain(..lane.spill.len().min(free as usize)) {
                        lane.completions.push(slot).expect("as many as are free");
                        self.spilled -= 1;
                        if !lane.dirty {
                            lane.dirty = true;
                            self.dirty.push(key);
                        }
                    }
                }
                Err(violation) => {
                    liars.push((key, violation.to_string()));
                    continue;
                }
            }
            if lane.spill.is_empty() {
                lane.spilling_since = None;
                if lane.suspended {
                    lane.suspended = false;
                    verdict(key, Pressure::Resume);
                }
                continue;
            }
            let waited = lane.spilling_since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
            let half_full = lane.spill.len() >= self.limits.spill_slots_max / 2;
            if waited >= self.limits.give_up_after {
                // Also what came since the last time: a client that asks and does not read gets no more than its spill.
                if !lane.live.is_empty() {
                    verdict(key, Pressure::GiveUp);
                }
            } else if !lane.suspended && (waited >= self.limits.suspend_after || half_full) {
                lane.suspended = true;
                verdict(key, Pressure::Suspend);
            }
        }
        for (key, why) in liars {
            self.give_up(key, &why);
        }
        self.metrics.spill(self.spilled * size_of::<CompletionSlot>());
    }

    /// Whether any spill waits for its client.
    pub fn is_spilling(&self) -> bool {
        self.spilled > 0
    }

    /// Sequences in flight of one session, with the client's numbers.
    pub fn live(&self, key: SessionKey) -> Vec<(u32, SequenceId)> {
        self.lanes.get(&key).map(|lane| lane.live.iter().map(|(&r, &s)| (r, s)).collect()).unwrap_or_default()
    }

    /// Has the sessions thread close a session; that then reaches us like any other hang-up and frees what it holds.
    pub fn give_up(&mut self, key: SessionKey, why: &str) {
        let Some(lane) = self.lanes.get_mut(&key) else { return };
        if lane.closed {
            return;
        }
        lane.closed = true;
        self.spilled -= lane.spill.len();
        lane.spill.clear();
        lane.spilling_since = None;
        self.metrics.spill(self.spilled * size_of::<CompletionSlot>());
        lane.shared.condemn(why);
        self.notices.push(Notice::Close(lane.socket.clone()));
    }
}

#[cfg(test)]
mod tests;
