//! A client that lies: in slots, in indices, in doorbells, everywhere at once.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use llmd_client::GenerateRequest;
use llmd_protocol::completion::CompletionSlot;
use llmd_protocol::layout::{Geometry, SubmissionSlot, up};
use llmd_protocol::limits;
use llmd_protocol::message::Reject;
use llmd_protocol::segment::Mapping;
use llmd_protocol::session::{DaemonSession, Submission, Violation};

use crate::pair::{Numbers, ask, lying_session, next_submission, publish, say, session};

/// What the daemon says of one slot published by hand.
fn verdict(slot: SubmissionSlot) -> Result<Option<Submission>, Violation> {
    let (mut daemon, up, _stream) = lying_session();
    put(&up, 0, slot);
    up.store_u32(up::SQ_TAIL, 1);
    daemon.submissions.next()
}

fn put(up: &Mapping, place: u32, slot: SubmissionSlot) {
    let bytes: Vec<u8> = slot.to_words().iter().flat_map(|w| w.to_le_bytes()).collect();
    up.store_bytes(Geometry::default().submission_offset() + place * 64, &bytes);
}

#[test]
fn lies_in_a_slot_are_found() {
    let good = SubmissionSlot { op: 1, request_id: 3, arena_offset: 8, arena_len: 5, ..SubmissionSlot::default() };
    assert_eq!(verdict(good), Ok(Some(Submission::Submit { request_id: 3, payload: vec![0; 5] })));
    for op in [0, 4, 255] {
        assert_eq!(verdict(SubmissionSlot { op, ..good }), Err(Violation::UnknownOp { op }));
    }
    assert_eq!(verdict(SubmissionSlot { flags: 1, ..good }), Err(Violation::Reserved));
    assert_eq!(verdict(SubmissionSlot { reserved0: 1, ..good }), Err(Violation::Reserved));
    assert_eq!(verdict(SubmissionSlot { reserved1: [0, 0, 0, 0, 0, 1], ..good }), Err(Violation::Reserved));
    assert_eq!(verdict(SubmissionSlot { op: 3, ..good }), Err(Violation::Reserved));
    let arena = limits::ARENA_BYTES;
    // The edges of the arena, and sums that wrap.
    for (offset, len) in [(0, arena), (arena, 0), (arena - 8, 8)] {
        assert!(verdict(SubmissionSlot { arena_offset: offset, arena_len: len, ..good }).is_ok());
    }
    let lies = [
        (0, arena + 1),
        (8, arena),
        (arena, 1),
        (arena + 8, 0),
        (arena - 8, 9),
        (1, 1),
        (u32::MAX - 7, 16),
        (8, u32::MAX),
    ];
    for (offset, len) in lies {
        let slot = SubmissionSlot { arena_offset: offset, arena_len: len, ..good };
        assert_eq!(verdict(slot), Err(Violation::ArenaRange { offset, len }));
    }
}

#[test]
fn lies_in_an_index_are_found() {
    for tail in [65, 1000, u32::MAX, 1 << 31] {
        let (mut daemon, up, _stream) = lying_session();
        up.store_u32(up::SQ_TAIL, tail);
        assert!(matches!(daemon.submissions.next(), Err(Violation::SubmissionTail(_))), "{tail}");
        assert!(matches!(daemon.submissions.arm_wake(), Err(Violation::SubmissionTail(_))), "{tail}");
    }
    for head in [4, 5, 1000, u32::MAX, 1 << 31] {
        let (mut daemon, up, _stream) = lying_session();
        (0..3).for_each(|id| say(&mut daemon, CompletionSlot::accepted(id, 0)));
        publish(&mut daemon);
        up.store_u32(up::CQ_HEAD, head);
        assert!(matches!(daemon.completions.free(), Err(Violation::CompletionHead(_))), "{head}");
    }
    // Going back is a lie too.
    let (mut daemon, up, _stream) = lying_session();
    (0..3).for_each(|id| say(&mut daemon, CompletionSlot::accepted(id, 0)));
    publish(&mut daemon);
    up.store_u32(up::CQ_HEAD, 2);
    assert_eq!(daemon.completions.free(), Ok(1023));
    up.store_u32(up::CQ_HEAD, 1);
    assert!(matches!(daemon.completions.free(), Err(Violation::CompletionHead(_))));
}

#[test]
fn parts_are_bounded_and_belong_together() {
    let part = |op, request_id, arena_len| SubmissionSlot { op, request_id, arena_len, ..SubmissionSlot::default() };
    let (mut daemon, up, _stream) = lying_session();
    put(&up, 0, part(2, 1, 8));
    put(&up, 1, part(1, 2, 8));
    up.store_u32(up::SQ_TAIL, 2);
    assert_eq!(daemon.submissions.next(), Err(Violation::PartsMixed { unfinished: 1, found: 2 }));

    let (mut daemon, up, _stream) = lying_session();
    (0..64).for_each(|place| put(&up, place, part(2, 1, limits::ARENA_BYTES)));
    let parts = (limits::REQUEST_BYTES_MAX / limits::ARENA_BYTES as usize) as u32;
    for tail in 1..=parts {
        up.store_u32(up::SQ_TAIL, tail);
        assert_eq!(daemon.submissions.next(), Ok(None));
    }
    up.store_u32(up::SQ_TAIL, parts + 1);
    assert_eq!(daemon.submissions.next(), Err(Violation::RequestTooLong { request_id: 1 }));
}

#[test]
fn doorbells_for_nothing_are_counted() {
    let (mut daemon, mut client) = session();
    for id in 0..10 {
        client.submissions.cancel(id).unwrap();
    }
    while daemon.submissions.next().unwrap().is_some() {}
    let allowed = 10 + limits::SPURIOUS_DOORBELLS_MAX as usize;
    assert_eq!(daemon.submissions.note_doorbells(allowed), Ok(()));
    assert!(matches!(daemon.submissions.note_doorbells(1), Err(Violation::SpuriousDoorbells { submissions: 10, .. })));
}

/// A client that writes all over its segment, between any two looks of the daemon: every answer of the daemon's side is
/// a value or a violation. One thread and fixed seeds, so that it is the same each time.
#[test]
fn a_scribbler_is_found_out() {
    let (mut violations, mut taken) = (0, 0);
    for seed in 0..100 {
        let (mut daemon, up, _stream) = lying_session();
        let mut scribbler = Scribbler::new(&up, seed);
        for _ in 0..200 {
            (0..8).for_each(|_| scribbler.step());
            if turn(&mut daemon, &mut taken).is_err() {
                violations += 1;
                break;
            }
        }
    }
    assert!(violations > 50 && taken > 500, "{violations} violations, {taken} submissions");
}

/// The same while the daemon looks; an honest session beside it goes on.
#[test]
fn a_scribbler_hurts_only_itself() {
    let (mut honest_daemon, mut honest) = session();
    let begun = Instant::now();
    let mut seed = 100;
    while begun.elapsed() < Duration::from_secs(1) {
        let (mut daemon, up, _stream) = lying_session();
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut scribbler = Scribbler::new(&up, seed);
                while !stop.load(Ordering::Relaxed) {
                    scribbler.step();
                }
            });
            // Until it is found out, or has been watched long enough.
            let watched = Instant::now();
            while turn(&mut daemon, &mut 0).is_ok() && watched.elapsed() < Duration::from_millis(100) {}
            stop.store(true, Ordering::Relaxed);
        });
        seed += 1;
        ask(&mut honest, 1, b"as ever");
        let submission = Submission::Submit { request_id: 1, payload: b"as ever".to_vec() };
        assert_eq!(next_submission(&mut honest_daemon), Some(submission));
    }
}

/// What the daemon does with a session when it looks at it, all ends together.
fn turn(daemon: &mut DaemonSession, taken: &mut u64) -> Result<(), Violation> {
    while let Some(submission) = daemon.submissions.next()? {
        *taken += 1;
        if let Submission::Submit { request_id, payload } = submission
            && GenerateRequest::decode(&payload).is_err()
        {
            let _ = daemon.completions.push(CompletionSlot::error(request_id, Reject::Malformed));
        }
    }
    daemon.completions.free()?;
    publish(daemon);
    daemon.submissions.arm_wake().map(drop)
}

/// Stores mostly plausible values, now and then anything: pure noise would be refused at the first look.
struct Scribbler<'a> {
    up: &'a Mapping,
    numbers: Numbers,
    tail: u32,
}

impl<'a> Scribbler<'a> {
    fn new(up: &'a Mapping, seed: u64) -> Self {
        let cancel = SubmissionSlot { op: 3, ..SubmissionSlot::default() };
        (0..64).for_each(|place| put(up, place, cancel));
        Self { up, numbers: Numbers(seed), tail: 0 }
    }

    fn step(&mut self) {
        let n = self.numbers.next();
        match n % 32 {
            0..12 => {
                let request_id = (n >> 8) as u32 % 4;
                let (arena_offset, arena_len) = ((n >> 16) as u32 % 4200 * 8, (n >> 32) as u32 % 33_000);
                let cancel = SubmissionSlot { op: 3, request_id, ..SubmissionSlot::default() };
                let submit = SubmissionSlot { op: 1, arena_offset, arena_len, ..cancel };
                let slot = match n >> 60 {
                    0 => SubmissionSlot { op: 2, ..submit },
                    1..8 => submit,
                    _ => cancel,
                };
                put(self.up, (n >> 48) as u32 % 64, slot);
            }
            12..24 => {
                self.tail = self.tail.wrapping_add((n >> 8) as u32 % 3);
                self.up.store_u32(up::SQ_TAIL, self.tail);
            }
            24 => self.up.store_u32(up::CQ_HEAD, if n >> 60 == 0 { 1 } else { 0 }),
            25 => self.up.store_u32(up::CQ_WAKE_AT, (n >> 8) as u32),
            _ if (n >> 8).is_multiple_of(64) => {
                let words = self.up.bytes() as u64 / 8;
                self.up.store_u64((self.numbers.next() % words) as u32 * 8, self.numbers.next());
            }
            _ => self.up.store_u64((0x2000 + (n >> 8) % 8192 * 8) as u32, self.numbers.next()),
        }
    }
}
