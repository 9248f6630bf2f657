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
    let bytes: Vec<u8> = slot
        .to_words()
        .iter()
        .flat_map(|w| w.to_le_bytes())
        .collect();
    up.store_bytes(Geometry::default().submission_offset() + place * 64, &bytes);
}

#[test]
fn lies_in_a_slot_are_found() {
    let good = SubmissionSlot {
        op: 1,
        request_id: 3,
        arena_offset: 8,
        arena_len: 5,
        ..SubmissionSlot::default()
    };
    assert_eq!(
        verdict(good),
        Ok(Some(Submission::Submit {
            request_id: 3,
            payload: vec![0; 5]
        }))
    );
    for op in [0, 4, 255] {
        assert_eq!(
            verdict(SubmissionSlot { op, ..good }),
            Err(Violation::UnknownOp { op })
        );
    }
    assert_eq!(
        verdict(SubmissionSlot { flags: 1, ..good }),
        Err(Violation::Reserved)
    );
    assert_eq!(
        verdict(SubmissionSlot {
            reserved0: 1,
            ..good
        }),
        Err(Violation::Reserved)
    );
    assert_eq!(
        verdict(SubmissionSlot {
            reserved1: [0, 0, 0, 0, 0, 1],
            ..good
        }),
        Err(Violation::Reserved)
    );
    assert_eq!(
        verdict(SubmissionSlot { op: 3, ..good }),
        Err(Violation::Reserved)
    );
    let arena = limits::ARENA_BYTES;
    // The edges of the arena, and sums that wrap.
    for (offset, len) in [(0, arena), (arena, 0), (arena - 8, 8)] {
        assert!(
            verdict(SubmissionSlot {
                arena_offset: offset,
                arena_len: len,
                ..good
            })
            .is_ok()
        );
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
        let slot = SubmissionSlot {
            arena_offset: offset,
            arena_len: len,
            ..good
        };
        assert_eq!(verdict(slot), Err(Violation::ArenaRange { offset, len }));
    }
}

#[test]
fn lies_in_an_index_are_found() {
    for tail in [65, 1000, u32::MAX, 1 << 31] {
        let (mut daemon, up, _stream) = lying_session();
        up.store_u32(up::SQ_TAIL, tail);
        assert!(
            matches!(daemon.submissions.next(), Err(Violation::SubmissionTail(_))),
            "{tail}"
        );
        assert!(
            matches!(
                daemon.submissions.arm_wake(),
                Err(Violation::SubmissionTail(_))
            ),
            "{tail}"
        );
    }
    for head in [4, 5, 1000, u32::MAX, 1 << 31] {
        let (mut daemon, up, _stream) = lying_session();
        (0..3).for_each(|id| say(&mut daemon, CompletionSlot::accepted(id, 0)));
        publish(&mut daemon);
        up.store_u32(up::CQ_HEAD, head);
        assert!(
            matches!(daemon.completions.free(), Err(Violation::CompletionHead(_))),
            "{head}"
        );
    }
    // Going back is a lie too.
    let (mut daemon, up, _stream) = lying_session();
    (0..3).for_each(|id| say(&mut daemon, CompletionSlot::accepted(id, 0)));
    publish(&mut daemon);
    up.store_u32(up::CQ_HEAD, 2);
    assert_eq!(daemon.completions.free(), Ok(1023));
    up.store_u32(up::CQ_HEAD, 1);
    assert!(matches!(
        daemon.completions.free(),
        Err(Violation::CompletionHead(_))
    ));
}

#[test]
fn parts_are_bounded_and_belong_together() {
    let part = |op, request_id, arena_len| SubmissionSlot {
        op,
        request_id,
        arena_len,
        ..SubmissionSlot::default()
    };
    let (mut daemon, up, _stream) = lying_session();
    put(&up, 0, part(2, 1, 8));
    put(&up, 1, part(1, 2, 8));
    up.store_u32(up::SQ_TAIL, 2);
    assert_eq!(
        daemon.submissions.next(),
        Err(Violation::PartsMixed {
            unfinished: 1,
            found: 2
        })
    );

    let (mut daemon, up, _stream) = lying_session();
    (0..64).for_each(|place| put(&up, place, part(2, 1, limits::ARENA_BYTES)));
    let parts = (limits::REQUEST_BYTES_MAX / limits::ARENA_BYTES as usize) as u32;
    for tail in 1..=parts {
        up.store_u32(up::SQ_TAIL, tail);
        assert_eq!(daemon.submissions.next(), Ok(None));
    }
    up.store_u32(up::SQ_TAIL, parts + 1);
    assert_eq!(
        daemon.submissions.next(),
        Err(Violation::RequestTooLong { request_id: 1 })
    );
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
    assert!(matches!(
        daemon.submissions.note_doorbells(1),
        Err(Violation::SpuriousDoorbells {
            submissions: 10,
            ..
        })
    ));
}

/// A client that writes all over its segment while the daemon reads. Every answer of the daemon's side is a value or a
/// violation; an honest session beside it goes on.
#[test]
fn a_scribbler_hurts_only_itself() {
    let (mut honest_daemon, mut honest) = session();
    let stop = AtomicBool::new(false);
    let (mut violations, mut taken) = (0, 0);
    thread::scope(|scope| {
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(1500) {
            let (mut daemon, up, _stream) = lying_session();
            stop.store(false, Ordering::Relaxed);
            let scribbler = scope.spawn({
                let (stop, seed) = (&stop, violations);
                move || scribble(&up, seed, stop)
            });
            let lie = serve_scribbler(&mut daemon, &mut taken, begun + Duration::from_millis(1500));
            violations += u64::from(lie.is_some());
            stop.store(true, Ordering::Relaxed);
            scribbler.join().unwrap();
            ask(&mut honest, 1, b"as ever");
            let submission = Submission::Submit {
                request_id: 1,
                payload: b"as ever".to_vec(),
            };
            assert_eq!(next_submission(&mut honest_daemon), Some(submission));
        }
    });
    assert!(
        violations > 20 && taken > 20,
        "{violations} violations, {taken} submissions"
    );
}

/// Mostly plausible values, now and then anything: pure noise would be refused at the first look.
fn scribble(up: &Mapping, seed: u64, stop: &AtomicBool) {
    let mut numbers = Numbers(seed);
    let words = up.bytes() as u64 / 8;
    let cancel = SubmissionSlot {
        op: 3,
        ..SubmissionSlot::default()
    };
    (0..64).for_each(|place| put(up, place, cancel));
    let mut tail = 0;
    while !stop.load(Ordering::Relaxed) {
        let n = numbers.next();
        match n % 32 {
            0..12 => {
                let request_id = (n >> 8) as u32 % 4;
                let (arena_offset, arena_len) =
                    ((n >> 16) as u32 % 4200 * 8, (n >> 32) as u32 % 33_000);
                let submit = SubmissionSlot {
                    op: 1,
                    request_id,
                    arena_offset,
                    arena_len,
                    ..cancel
                };
                let slot = [
                    submit,
                    SubmissionSlot { op: 2, ..submit },
                    SubmissionSlot {
                        request_id,
                        ..cancel
                    },
                ];
                put(
                    up,
                    (n >> 48) as u32 % 64,
                    slot[if (n >> 56).is_multiple_of(16) {
                        1
                    } else {
                        (n >> 60) as usize % 2 * 2
                    }],
                );
            }
            12..24 => {
                tail += (n >> 8) as u32 % 3;
                up.store_u32(up::SQ_TAIL, tail);
                thread::yield_now();
            }
            24 => up.store_u32(up::CQ_HEAD, (n >> 8) as u32 % 4),
            25 => up.store_u32(up::CQ_WAKE_AT, (n >> 8) as u32),
            26..31 => up.store_u64((0x2000 + (n >> 8) % 8192 * 8) as u32, numbers.next()),
            _ if (n >> 8).is_multiple_of(16) => {
                up.store_u64((numbers.next() % words) as u32 * 8, numbers.next())
            }
            _ => thread::yield_now(),
        }
    }
}

fn serve_scribbler(
    daemon: &mut DaemonSession,
    taken: &mut u64,
    until: Instant,
) -> Option<Violation> {
    let mut turn = || -> Result<(), Violation> {
        while let Some(submission) = daemon.submissions.next()? {
            *taken += 1;
            if let Submission::Submit {
                request_id,
                payload,
            } = submission
                && GenerateRequest::decode(&payload).is_err()
            {
                let _ = daemon
                    .completions
                    .push(CompletionSlot::error(request_id, Reject::Malformed));
            }
        }
        daemon.completions.free()?;
        publish(daemon);
        daemon.submissions.arm_wake().map(drop)
    };
    while Instant::now() < until {
        if let Err(violation) = turn() {
            return Some(violation);
        }
    }
    None
}
