//! A session after the handshake: the daemon's three ends and the client's two.
//!
//! The daemon's ends live on different threads. The sessions thread reads submissions and owns the socket, the engine
//! thread writes completions, the notifier thread wakes the client. They share the mappings, which are unmapped when the last is dropped.
//!
//! The daemon believes nothing that lies in `up`: each index is loaded once and checked against what an honest client
//! could have stored; each slot is copied once and only the copy is looked at; payload bytes are copied once. What is wrong comes
//! back as a [`Violation`], after which the session must be ended.

use std::io;
use std::sync::Arc;

use crate::arena::Arena;
use crate::completion::CompletionSlot;
use crate::doorbell::{Rang, SessionSocket};
use crate::layout::{self, COMPLETION_WORDS, Geometry, Op, SUBMISSION_WORDS, SessionState, SubmissionSlot, down};
use crate::limits::{self, REQUEST_BYTES_MAX};
use crate::mapped_ring::{MappedRing, rings};
use crate::ring::{self, BadIndex, Consumer, Full, Producer, Published, RingMemory};
use crate::segment::Mapping;
use crate::sync::Ordering;

/// What both sides agreed on in the handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terms {
    /// The daemon's minor version; the major one is [`layout::ABI_MAJOR`].
    pub abi_minor: u16,
    /// Features both sides have.
    pub features: u64,
    /// Drawn at random when the daemon started.
    pub boot_id: u64,
    /// This session, unique within one run of the daemon.
    pub session_id: u64,
    /// Sizes of the rings.
    pub geometry: Geometry,
}

/// A client did what an honest one cannot do. Its session ends; it is neither ours to trust nor to die for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// `cq_head` is not between what it was and what was published.
    #[error("cq_head: {0}")]
    CompletionHead(BadIndex),
    /// `sq_tail` counts more slots than the ring has, or went back.
    #[error("sq_tail: {0}")]
    SubmissionTail(BadIndex),
    /// No such operation.
    #[error("unknown op {op} in a submission slot")]
    UnknownOp {
        /// The number found.
        op: u8,
    },
    /// A reserved word, a flag, or a field the operation does not use is not 0.
    #[error("reserved bits set in a submission slot")]
    Reserved,
    /// The payload does not lie in the arena, or is not aligned.
    #[error("payload of {len} bytes at {offset} does not lie in the arena")]
    ArenaRange {
        /// Where it is said to start.
        offset: u32,
        /// How long it is said to be.
        len: u32,
    },
    /// The parts of a request together exceed [`REQUEST_BYTES_MAX`].
    #[error("request {request_id} is longer than {max} bytes", max = REQUEST_BYTES_MAX)]
    RequestTooLong {
        /// The request.
        request_id: u32,
    },
    /// A part of another request came before the last part of this one.
    #[error("request {found} began inside the parts of request {unfinished}")]
    PartsMixed {
        /// The request whose last part was still to come.
        unfinished: u32,
        /// The request that came.
        found: u32,
    },
    /// Far more doorbells than submissions.
    #[error("{doorbells} doorbells for {submissions} submissions")]
    SpuriousDoorbells {
        /// Doorbells received.
        doorbells: u64,
        /// Submission slots read.
        submissions: u64,
    },
}

/// What a client asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Submission {
    /// A new request: its parts joined, not yet decoded.
    Submit {
        /// The client's name for it.
        request_id: u32,
        /// One encoded `GenerateRequest`, as far as the client says.
        payload: Vec<u8>,
    },
    /// End a request early. It may have ended already or never have existed.
    Cancel {
        /// The client's name for it.
        request_id: u32,
    },
}

/// The daemon's side, to be taken apart: each end goes to its own thread.
#[derive(Debug)]
pub struct DaemonSession {
    /// What was agreed.
    pub terms: Terms,
    /// Poll it for doorbells and hang-up. Sessions thread.
    pub socket: SessionSocket,
    /// Sessions thread.
    pub submissions: SubmissionConsumer,
    /// Engine thread.
    pub completions: CompletionProducer,
    /// Notifier thread.
    pub doorbell: CompletionDoorbell,
}

impl DaemonSession {
    /// Writes the header and takes the ends apart. `down` must be mapped writable and both must be fresh.
    pub(crate) fn new(terms: Terms, socket: SessionSocket, down: Mapping, up: Mapping) -> Self {
        let g = terms.geometry;
        down.store_u64(down::FEATURES, terms.features);
        down.store_u64(down::BOOT_ID, terms.boot_id);
        down.store_u64(down::SESSION_ID, terms.session_id);
        down.store_u32(down::SUBMISSION_SLOTS, g.submission_slots());
        down.store_u32(down::COMPLETION_SLOTS, g.completion_slots());
        down.store_u32(down::ARENA_BYTES, g.arena_bytes());
        down.store_u32(down::REQUESTS_IN_FLIGHT, g.requests_in_flight());
        down.store_u32(down::COMPLETION_OFFSET, g.completion_offset());
        down.store_u32(down::SUBMISSION_OFFSET, g.submission_offset());
        down.store_u32(down::ARENA_OFFSET, g.arena_offset());
        down.store_u32(down::STATE, SessionState::Open as u32);
        down.store_u32(down::ABI, u32::from(layout::ABI_MAJOR) | u32::from(terms.abi_minor) << 16);
        down.store_u32(down::MAGIC, layout::MAGIC);
        let (down, up) = (Arc::new(down), Arc::new(up));
        let (submission, completion) = rings(g, &down, &up);
        Self {
            terms,
            submissions: SubmissionConsumer {
                ring: Consumer::new(submission),
                down,
                up,
                geometry: g,
                unfinished: None,
                slots_read: 0,
                bytes_read: 0,
                doorbells: 0,
            },
            completions: CompletionProducer { ring: Producer::new(completion.clone()) },
            doorbell: CompletionDoorbell { ring: completion, socket: socket.clone() },
            socket,
        }
    }
}

/// Reads what the client submits. Lives on the sessions thread.
#[derive(Debug)]
pub struct SubmissionConsumer {
    ring: Consumer<MappedRing<SUBMISSION_WORDS>, SUBMISSION_WORDS>,
    down: Arc<Mapping>,
    up: Arc<Mapping>,
    geometry: Geometry,
    /// A request whose last part is still to come.
    unfinished: Option<(u32, Vec<u8>)>,
    slots_read: u64,
    bytes_read: u64,
    doorbells: u64,
}

impl SubmissionConsumer {
    /// The next submission. Reads at most [`limits::SUBMISSIONS_PER_TURN`] slots; None says that none is complete
    /// yet, and [`Self::arm_wake`] tells whether to come back at once or to wait for a doorbell.
    // Not an Iterator: after an error there is no next.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> Result<Option<Submission>, Violation> {
        for _ in 0..limits::SUBMISSIONS_PER_TURN {
            let Some(words) = self.ring.pop().map_err(Violation::SubmissionTail)? else {
                return Ok(None);
            };
            self.slots_read += 1;
            let taken = self.take(SubmissionSlot::from_words(words));
            // The payload is copied: slot and arena bytes may be used again.
            self.ring.release();
            if let Some(submission) = taken? {
                return Ok(Some(submission));
            }
        }
        Ok(None)
    }

    /// Asks the client for a doorbell at its next submission. True: there is nothing to read, waiting is safe. False:
    /// there is, call [`Self::next`]. A session that is being read needs no disarming: an index that has passed is never
    /// met again. A fresh session is armed.
    pub fn arm_wake(&mut self) -> Result<bool, Violation> {
        self.ring.arm().map_err(Violation::SubmissionTail)
    }

    /// Counts doorbells that came in, after what they announced was read. An honest client sends at most one for
    /// each slot it publishes.
    pub fn note_doorbells(&mut self, count: usize) -> Result<(), Violation> {
        self.doorbells += count as u64;
        if self.doorbells > self.slots_read + limits::SPURIOUS_DOORBELLS_MAX {
            return Err(Violation::SpuriousDoorbells { doorbells: self.doorbells, submissions: self.slots_read });
        }
        Ok(())
    }

    /// Slots read and payload bytes copied since the session began: what it has cost, whatever came of it.
    pub fn work_done(&self) -> (u64, u64) {
        (self.slots_read, self.bytes_read)
    }

    /// Tells the client about its session's state: before a drain, and before hanging up on purpose.
    pub fn set_state(&self, state: SessionState) {
        self.down.store_u32(down::STATE, state as u32);
    }

    /// Checks one copied slot and copies its payload.
    fn take(&mut self, slot: SubmissionSlot) -> Result<Option<Submission>, Violation> {
        if slot.flags != 0 || slot.reserved0 != 0 || slot.reserved1 != [0; 6] {
            return Err(Violation::Reserved);
        }
        let request_id = slot.request_id;
        match Op::from_number(slot.op).ok_or(Violation::UnknownOp { op: slot.op })? {
            Op::Cancel => {
                if slot.arena_offset != 0 || slot.arena_len != 0 {
                    return Err(Violation::Reserved);
                }
                // A client that gives up half-way through the parts says so like this.
                self.unfinished.take_if(|(unfinished, _)| *unfinished == request_id);
                Ok(Some(Submission::Cancel { request_id }))
            }
            Op::More => {
                let joined = self.join(slot)?;
                self.unfinished = Some((request_id, joined));
                Ok(None)
            }
            Op::Submit => Ok(Some(Submission::Submit { request_id, payload: self.join(slot)? })),
        }
    }

    /// The parts so far of the slot's request, with its own behind them.
    fn join(&mut self, slot: SubmissionSlot) -> Result<Vec<u8>, Violation> {
        let SubmissionSlot { request_id, arena_offset: offset, arena_len: len, .. } = slot;
        let arena = self.geometry.arena_bytes();
        // Never offset + len, which can wrap.
        if !(offset.is_multiple_of(limits::ARENA_ALIGN) && offset <= arena && len <= arena - offset) {
            return Err(Violation::ArenaRange { offset, len });
        }
        let mut payload = match self.unfinished.take() {
            None => Vec::new(),
            Some((unfinished, payload)) if unfinished == request_id => payload,
            Some((unfinished, _)) => {
                return Err(Violation::PartsMixed { unfinished, found: request_id });
            }
        };
        if len as usize > REQUEST_BYTES_MAX - payload.len() {
            return Err(Violation::RequestTooLong { request_id });
        }
        self.bytes_read += u64::from(len);
        self.up.append_bytes(self.geometry.arena_offset() + offset, len, &mut payload);
        Ok(payload)
    }
}

/// Writes completions. Lives on the engine thread; makes no system call and never waits.
#[derive(Debug)]
pub struct CompletionProducer {
    ring: Producer<MappedRing<COMPLETION_WORDS>, COMPLETION_WORDS>,
}

impl CompletionProducer {
    /// Looks at how far the client has read and returns how many slots are free.
    pub fn free(&mut self) -> Result<u32, Violation> {
        self.ring.refresh().map_err(Violation::CompletionHead)
    }

    /// Slots in the ring, free or not.
    pub fn capacity(&self) -> u32 {
        self.ring.memory().capacity()
    }

    /// Writes one slot, invisible until [`Self::publish`]. Full by the last [`Self::free`].
    pub fn push(&mut self, slot: CompletionSlot) -> Result<(), Full> {
        self.ring.push(slot.to_words())
    }

    /// Makes all pushed slots visible; None if there were none. The answer belongs to the notifier.
    pub fn publish(&mut self) -> Option<Published> {
        self.ring.publish()
    }

    /// Says when the next step is expected to publish (nanoseconds of CLOCK_MONOTONIC, 0 for unknown), before publishing
    /// this one.
    pub fn set_eta(&self, eta_ns: u64) {
        self.ring.memory().writer.u64_at(down::ETA_NS).store(eta_ns, Ordering::Relaxed);
    }

    /// Shows the client that the engine makes progress.
    pub fn set_beat(&self, steps: u64) {
        self.ring.memory().writer.u64_at(down::BEAT).store(steps, Ordering::Relaxed);
    }
}

/// Wakes the client if it sleeps. Lives on the notifier thread.
#[derive(Debug)]
pub struct CompletionDoorbell {
    ring: MappedRing<COMPLETION_WORDS>,
    socket: SessionSocket,
}

impl CompletionDoorbell {
    /// The full fence that must lie between a batch of publishes and the [`Self::needs_wake`] of each.
    pub fn fence() {
        ring::publisher_fence();
    }

    /// Does the client sleep for something in `published`?
    pub fn needs_wake(&self, published: Published) -> bool {
        ring::wants_doorbell(&self.ring, published)
    }

    /// Sends the doorbell; never blocks.
    pub fn ring(&self) -> Rang {
        self.socket.ring()
    }
}

/// The client's side, to be taken apart.
#[derive(Debug)]
pub struct ClientSession {
    /// What was agreed.
    pub terms: Terms,
    /// Doorbell, and sign of life of the daemon.
    pub socket: SessionSocket,
    /// Sends requests.
    pub submissions: SubmissionProducer,
    /// Receives answers.
    pub completions: CompletionConsumer,
}

impl ClientSession {
    /// `up` must be mapped writable; both have the sizes of the terms' geometry.
    pub(crate) fn new(terms: Terms, socket: SessionSocket, down: Mapping, up: Mapping) -> io::Result<Self> {
        let g = terms.geometry;
        let header = [down.load_u32(down::MAGIC), down.load_u32(down::ABI) & 0xffff];
        if header != [layout::MAGIC, u32::from(layout::ABI_MAJOR)]
            || down.load_u64(down::SESSION_ID) != terms.session_id
        {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the segment's header is not the session's"));
        }
        let (down, up) = (Arc::new(down), Arc::new(up));
        let (submission, completion) = rings(g, &down, &up);
        Ok(Self {
            terms,
            submissions: SubmissionProducer {
                ring: Producer::new(submission),
                socket: socket.clone(),
                arena: Arena::new(g.arena_bytes()),
                geometry: g,
            },
            completions: CompletionConsumer { ring: Consumer::new(completion), down },
            socket,
        })
    }
}

/// Sends requests and cancels.
#[derive(Debug)]
pub struct SubmissionProducer {
    ring: Producer<MappedRing<SUBMISSION_WORDS>, SUBMISSION_WORDS>,
    socket: SessionSocket,
    arena: Arena,
    geometry: Geometry,
}

impl SubmissionProducer {
    /// Sends as much of `payload` from `sent` on as there is room for, and returns how much is sent then. At
    /// `payload.len()` the request is submitted; before, wait a little and call again with the answer. No other
    /// request may be begun in between; cancelling this one abandons it. `payload` must not be empty.
    pub fn submit(&mut self, request_id: u32, payload: &[u8], mut sent: usize) -> Result<usize, BadIndex> {
        assert!(sent < payload.len() && payload.len() <= REQUEST_BYTES_MAX, "a payload of 1..=REQUEST_BYTES_MAX bytes");
        self.refresh()?;
        while sent < payload.len() && self.ring.free() > 0 {
            let rest = &payload[sent..];
            let part = &rest[..rest.len().min(self.geometry.part_bytes_max())];
            let Some(offset) = self.arena.take(part.len() as u32, self.ring.next_index()) else {
                break;
            };
            self.ring.memory().writer.store_bytes(self.geometry.arena_offset() + offset, part);
            let op = if part.len() == rest.len() { Op::Submit } else { Op::More };
            let (op, arena_len) = (op as u8, part.len() as u32);
            let slot = SubmissionSlot { op, request_id, arena_offset: offset, arena_len, ..Default::default() };
            let _ = self.ring.push(slot.to_words());
            sent += part.len();
        }
        self.publish();
        Ok(sent)
    }

    /// Asks for the end of a request. False: no slot is free, try again.
    pub fn cancel(&mut self, request_id: u32) -> Result<bool, BadIndex> {
        self.refresh()?;
        let slot = SubmissionSlot { op: Op::Cancel as u8, request_id, ..Default::default() };
        let sent = self.ring.push(slot.to_words()).is_ok();
        self.publish();
        Ok(sent)
    }

    fn refresh(&mut self) -> Result<(), BadIndex> {
        self.ring.refresh()?;
        self.arena.give_back(self.ring.head_seen());
        Ok(())
    }

    fn publish(&mut self) {
        if let Some(published) = self.ring.publish() {
            ring::publisher_fence();
            if ring::wants_doorbell(self.ring.memory(), published) {
                // A daemon that is gone is noticed by whoever waits on the socket.
                self.socket.ring();
            }
        }
    }
}

/// Receives completions.
#[derive(Debug)]
pub struct CompletionConsumer {
    ring: Consumer<MappedRing<COMPLETION_WORDS>, COMPLETION_WORDS>,
    down: Arc<Mapping>,
}

impl CompletionConsumer {
    /// The next completion; None if there is none now.
    pub fn pop(&mut self) -> Result<Option<CompletionSlot>, BadIndex> {
        Ok(self.ring.pop()?.map(CompletionSlot::from_words))
    }

    /// Gives the slots read so far back to the daemon.
    pub fn release(&mut self) {
        self.ring.release();
    }

    /// Asks for a doorbell at the next completion. True: there is none yet, waiting on the socket is safe.
    pub fn arm(&mut self) -> Result<bool, BadIndex> {
        self.ring.arm()
    }

    /// What the daemon says about the session; None for a state of a later version.
    pub fn state(&self) -> Option<SessionState> {
        SessionState::from_number(self.down.load_u32(down::STATE))
    }

    /// When the daemon expects to publish next: nanoseconds of CLOCK_MONOTONIC, 0 for unknown.
    pub fn eta_ns(&self) -> u64 {
        self.down.load_u64(down::ETA_NS)
    }

    /// Steps of the daemon's engine so far.
    pub fn beat(&self) -> u64 {
        self.down.load_u64(down::BEAT)
    }
}
