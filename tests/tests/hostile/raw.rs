//! A client by hand: every word it stores is the test's own choice.

use std::collections::HashMap;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use llmd_protocol::completion::{Completion, CompletionSlot};
use llmd_protocol::doorbell::SessionSocket;
use llmd_protocol::handshake::{self, Hello, Welcome};
use llmd_protocol::layout::{COMPLETION_BYTES, Geometry, Op, SUBMISSION_BYTES, SessionState, SubmissionSlot, down, up};
use llmd_protocol::message::{FinishReason, GenerateRequest, Reject};
use llmd_protocol::segment::Mapping;
use llmd_tests::daemon::{Daemon, PATIENCE, wait_until};

/// One session with its memory mapped.
pub struct Raw {
    /// Its number in the daemon's log.
    pub session: u64,
    /// Doorbell and sign of life.
    pub socket: SessionSocket,
    /// What it may write to.
    pub up: Mapping,
    down: Mapping,
    geometry: Geometry,
    tail: u32,
    head: u32,
}

/// How a request ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// DONE.
    Done(FinishReason),
    /// ERROR, and what was said about it.
    Error(Reject, String),
}

/// What was read about one request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Said {
    /// Ids, each at its index.
    pub tokens: Vec<u32>,
    /// All text.
    pub text: String,
    /// All explanations.
    pub detail: String,
    /// The terminal record.
    pub end: Option<End>,
}

impl Raw {
    /// A session with rings of the default sizes.
    pub fn connect(daemon: &Daemon) -> Self {
        Self::connect_with(daemon, Hello::default())
    }

    /// A session with other rings.
    pub fn connect_with(daemon: &Daemon, hello: Hello) -> Self {
        let welcome = handshake::connect(&daemon.socket(), hello, PATIENCE).expect("a welcome");
        let Welcome { terms, stream, down, up } = welcome;
        let geometry = terms.geometry;
        Self {
            session: terms.session_id,
            socket: SessionSocket::new(stream),
            up: Mapping::of_received(&up, geometry.up_bytes(), true).expect("a segment to write to"),
            down: Mapping::of_received(&down, geometry.down_bytes(), false).expect("a segment to read"),
            geometry,
            tail: 0,
            head: 0,
        }
    }

    /// Writes a submission slot at `place`, which nobody sees before [`Self::publish`].
    pub fn put(&self, place: u32, slot: SubmissionSlot) {
        let place = place % self.geometry.submission_slots();
        let bytes: Vec<u8> = slot.to_words().iter().flat_map(|word| word.to_le_bytes()).collect();
        self.up.store_bytes(self.geometry.submission_offset() + place * SUBMISSION_BYTES, &bytes);
    }

    /// Stores `tail` as the number of slots published, and rings.
    pub fn publish(&mut self, tail: u32) {
        self.tail = tail;
        fence(Ordering::Release);
        self.up.store_u32(up::SQ_TAIL, tail);
        self.socket.ring();
    }

    /// Publishes `count` more slots, whatever is in them.
    pub fn advance(&mut self, count: u32) {
        self.publish(self.tail.wrapping_add(count));
    }

    /// Writes and publishes one slot.
    pub fn send(&mut self, slot: SubmissionSlot) {
        self.put(self.tail, slot);
        self.publish(self.tail.wrapping_add(1));
    }

    /// Bytes at `offset` of the arena.
    pub fn write_arena(&self, offset: u32, bytes: &[u8]) {
        self.up.store_bytes(self.geometry.arena_offset() + offset, bytes);
    }

    /// Slots the daemon has not read yet.
    pub fn unread(&self) -> u32 {
        self.tail.wrapping_sub(self.down.load_u32(down::SQ_HEAD))
    }

    /// Submits `payload` in one piece and waits until the daemon has read it.
    pub fn submit_bytes(&mut self, request_id: u32, payload: &[u8]) {
        self.write_arena(0, payload);
        let (op, arena_len) = (Op::Submit as u8, payload.len() as u32);
        self.send(SubmissionSlot { op, request_id, arena_len, ..SubmissionSlot::default() });
        wait_until("the daemon has read the slot", || self.unread() == 0);
    }

    /// Submits a request.
    pub fn submit(&mut self, request_id: u32, request: &GenerateRequest) {
        self.submit_bytes(request_id, &request.encode().expect("not too long"));
    }

    /// Completions published since the last look. The daemon does not learn that they were read.
    pub fn peek(&mut self) -> Vec<CompletionSlot> {
        let tail = self.down.load_u32(down::CQ_TAIL);
        fence(Ordering::Acquire);
        let mut slots = Vec::new();
        while self.head != tail {
            let place = self.head % self.geometry.completion_slots();
            let at = self.geometry.completion_offset() + place * COMPLETION_BYTES;
            let words = std::array::from_fn(|i| self.down.load_u64(at + 8 * i as u32));
            slots.push(CompletionSlot::from_words(words));
            self.head = self.head.wrapping_add(1);
        }
        slots
    }

    /// Completions published since the last look; their slots are given back.
    pub fn read(&mut self) -> Vec<CompletionSlot> {
        let slots = self.peek();
        fence(Ordering::Release);
        self.up.store_u32(up::CQ_HEAD, self.head);
        slots
    }

    /// Completions the daemon has published in all.
    pub fn published(&self) -> u32 {
        self.down.load_u32(down::CQ_TAIL)
    }

    /// Reads until every request of `requests` has ended.
    pub fn read_to_the_end(&mut self, requests: &[u32]) -> HashMap<u32, Said> {
        let mut said: HashMap<u32, Said> = HashMap::new();
        wait_until("the requests have ended", || {
            for slot in self.read() {
                said.entry(slot.request_id()).or_default().take(slot);
            }
            requests.iter().all(|id| said.get(id).is_some_and(|said| said.end.is_some()))
        });
        said
    }

    /// Reads until `request` has ended.
    pub fn end_of(&mut self, request: u32) -> Said {
        self.read_to_the_end(&[request]).remove(&request).expect("it has ended")
    }

    /// Waits until the daemon has ended the session.
    pub fn wait_until_closed(&self) {
        wait_until("the daemon has closed the session", || {
            self.socket.wait(Some(Duration::from_millis(5))).expect("a socket").hung_up
        });
        let state = SessionState::from_number(self.down.load_u32(down::STATE));
        assert_eq!(state, Some(SessionState::Closed), "the client is told that it was on purpose");
    }

    /// Whether the daemon has ended the session.
    pub fn is_closed(&self) -> bool {
        self.socket.drain().hung_up
    }
}

impl Said {
    fn take(&mut self, slot: CompletionSlot) {
        assert!(self.end.is_none(), "nothing follows the terminal record: {slot:?}");
        match slot.decode().expect("a slot that makes sense") {
            Completion::Accepted { .. } => {}
            Completion::Tokens { index, ids } => {
                assert_eq!(index as usize, self.tokens.len(), "no token is lost or comes twice");
                self.tokens.extend_from_slice(&ids);
            }
            Completion::Text(piece) => self.text.push_str(piece.as_str()),
            Completion::Detail(piece) => self.detail.push_str(piece.as_str()),
            Completion::Done { reason, .. } => self.end = Some(End::Done(reason)),
            Completion::Error { number } => {
                let reject = Reject::from_number(number).expect("a known reason");
                self.end = Some(End::Error(reject, std::mem::take(&mut self.detail)));
            }
        }
    }
}
