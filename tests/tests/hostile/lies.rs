//! A client that lies through a good handshake: its session is closed, the log says why, once, and nobody else notices.

use std::collections::HashMap;
use std::thread;
use std::time::{Duration, Instant};

use llmd_protocol::layout::{Op, SubmissionSlot, up};
use llmd_protocol::limits;
use llmd_protocol::message::{FinishReason, GenerateRequest};
use llmd_tests::daemon::{Daemon, wait_until};
use llmd_tests::load::Mix;
use llmd_tests::tiny_model::Random;

use crate::raw::{End, Raw};
use crate::witness::Witness;
use crate::{assert_complaints, assert_reclaimed, complaints, footprint_at_rest};

fn short() -> GenerateRequest {
    Mix::tiny(3, 5..=5, 5..=5).request(0)
}

fn endless() -> GenerateRequest {
    Mix::tiny(3, 5..=5, 4000..=4000).request(1)
}

/// python_backend#406: a size written by the client is believed; triton#8936: one malformed request crashes the server.
#[test]
fn every_lie_in_the_ring_closes_its_session_and_is_told_once() {
    let daemon = Daemon::tiny(&[]);
    let before = footprint_at_rest(&daemon);
    let witness = Witness::start(&daemon);
    let good = SubmissionSlot { op: Op::Submit as u8, request_id: 9, arena_len: 8, ..SubmissionSlot::default() };
    let arena = limits::ARENA_BYTES;
    type Lie<'a> = (&'static str, Box<dyn Fn(&mut Raw) + 'a>);
    let slot = |lie: SubmissionSlot| Box::new(move |raw: &mut Raw| raw.send(lie));
    let tail = |ahead: u32| Box::new(move |raw: &mut Raw| raw.publish(ahead.wrapping_add(2)));
    let lies: Vec<Lie<'_>> = vec![
        ("unknown op 0", slot(SubmissionSlot { op: 0, ..good })),
        ("unknown op 4", slot(SubmissionSlot { op: 4, ..good })),
        ("unknown op 255", slot(SubmissionSlot { op: 255, ..good })),
        ("reserved bits", slot(SubmissionSlot { flags: 1, ..good })),
        ("reserved bits", slot(SubmissionSlot { reserved0: 1 << 15, ..good })),
        ("reserved bits", slot(SubmissionSlot { reserved1: [0, 0, 0, 0, 0, 1 << 63], ..good })),
        ("reserved bits", slot(SubmissionSlot { op: Op::Cancel as u8, ..good })),
        ("does not lie in the arena", slot(SubmissionSlot { arena_len: arena + 1, ..good })),
        ("does not lie in the arena", slot(SubmissionSlot { arena_offset: arena, ..good })),
        ("does not lie in the arena", slot(SubmissionSlot { arena_offset: u32::MAX - 7, arena_len: 16, ..good })),
        ("does not lie in the arena", slot(SubmissionSlot { arena_offset: 4, ..good })),
        ("does not lie in the arena", slot(SubmissionSlot { arena_len: u32::MAX, ..good })),
        ("sq_tail", tail(limits::SUBMISSION_SLOTS + 1)),
        ("sq_tail", tail(1 << 31)),
        ("sq_tail", tail(u32::MAX - 2)),
        (
            "inside the parts",
            Box::new(|raw| {
                raw.send(SubmissionSlot { op: Op::More as u8, ..good });
                raw.send(SubmissionSlot { request_id: 10, ..good });
            }),
        ),
        (
            "longer than",
            Box::new(|raw| {
                // MORE without end.
                while !raw.is_closed() {
                    if raw.unread() < limits::SUBMISSION_SLOTS {
                        raw.send(SubmissionSlot { op: Op::More as u8, arena_len: arena, ..good });
                    }
                }
            }),
        ),
        (
            "doorbells",
            Box::new(|raw| {
                while !raw.is_closed() {
                    raw.socket.ring();
                }
            }),
        ),
    ];
    let words: Vec<_> = lies.iter().map(|(word, _)| *word).collect();
    for (word, lie) in lies {
        // Two good requests first: one has ended, one is running when the lie comes.
        let mut raw = Raw::connect(&daemon);
        raw.submit(1, &short());
        assert_eq!(raw.end_of(1).end, Some(End::Done(FinishReason::Length)));
        raw.submit(2, &endless());
        lie(&mut raw);
        raw.wait_until_closed();
        wait_until(word, || complaints(&daemon).iter().any(|line| line.contains(word)));
    }
    witness.stop();
    assert_reclaimed(&daemon, before);
    assert_complaints(&daemon, &words);
}

/// `cq_head` is only looked at when the ring is full, so its lies need a client that reads nothing.
#[test]
fn a_lie_about_what_was_read_closes_its_session() {
    let daemon = Daemon::tiny(&[]);
    let before = footprint_at_rest(&daemon);
    let witness = Witness::start(&daemon);
    // Nothing of the ring is published yet when the first is stored; the others overtake the daemon or go back.
    for head in [u32::MAX, 5000, 1 << 31] {
        let mut raw = Raw::connect(&daemon);
        raw.up.store_u32(up::CQ_HEAD, head);
        raw.submit(1, &endless());
        raw.wait_until_closed();
    }
    let mut raw = Raw::connect(&daemon);
    raw.submit(1, &endless());
    wait_until("the ring is full", || raw.published() == limits::COMPLETION_SLOTS);
    raw.up.store_u32(up::CQ_HEAD, 500);
    wait_until("the ring is full again", || raw.published() == limits::COMPLETION_SLOTS + 500);
    raw.up.store_u32(up::CQ_HEAD, 499);
    raw.wait_until_closed();
    witness.stop();
    drop(raw);
    assert_reclaimed(&daemon, before);
    assert_complaints(&daemon, &["cq_head"; 4]);
}

/// vllm#10583: a duplicate request id corrupts state.
#[test]
fn a_number_used_twice_closes_the_session_whatever_the_second_request_is() {
    let daemon = Daemon::tiny(&[]);
    let before = footprint_at_rest(&daemon);
    let witness = Witness::start(&daemon);
    let second: [&dyn Fn(&mut Raw); 3] = [
        &|raw| raw.submit(7, &short()),
        // One that is refused must not pass for the end of the first.
        &|raw| raw.submit_bytes(7, b"nonsense"),
        &|raw| raw.submit(7, &GenerateRequest { prompt: llmd_client::Prompt::Tokens(vec![9_999_999]), ..short() }),
    ];
    for second in second {
        let mut raw = Raw::connect(&daemon);
        raw.submit(7, &endless());
        wait_until("the first runs", || raw.published() > 3);
        second(&mut raw);
        raw.wait_until_closed();
        let ends = raw.peek().iter().filter(|slot| slot.is_terminal()).count();
        assert_eq!(ends, 0, "no end of one request in place of the other's");
    }
    witness.stop();
    assert_reclaimed(&daemon, before);
    assert_complaints(&daemon, &["still in flight"; 3]);
}

/// Cancels of what is not there are no lie, however many; they are only work, and of that everyone has a share.
#[test]
fn a_flood_of_cancels_disturbs_nobody() {
    let daemon = Daemon::tiny(&[]);
    let before = footprint_at_rest(&daemon);
    let witness = Witness::start(&daemon);
    let mut raw = Raw::connect(&daemon);
    let begun = Instant::now();
    let mut sent = 0;
    while begun.elapsed() < Duration::from_secs(1) {
        if raw.unread() < limits::SUBMISSION_SLOTS {
            raw.send(SubmissionSlot { op: Op::Cancel as u8, request_id: sent, ..SubmissionSlot::default() });
            sent += 1;
        } else {
            thread::yield_now();
        }
    }
    witness.still_served();
    assert!(sent > 1000, "{sent} cancels are no flood");
    // Cancelled before, while and after it is read, a request still has exactly one end.
    for request in 0..100 {
        raw.submit(request, &endless());
        raw.send(SubmissionSlot { op: Op::Cancel as u8, request_id: request, ..SubmissionSlot::default() });
        raw.send(SubmissionSlot { op: Op::Cancel as u8, request_id: request, ..SubmissionSlot::default() });
        assert_eq!(raw.end_of(request).end, Some(End::Done(FinishReason::Cancelled)));
    }
    raw.submit(1, &short());
    assert_eq!(raw.end_of(1).tokens.len(), 5);
    drop(raw);
    witness.stop();
    assert_reclaimed(&daemon, before);
    assert_complaints(&daemon, &[]);
}

/// More requests at once than a session may have in flight: the rest is refused, not a lie.
#[test]
fn a_flood_of_requests_is_refused_beyond_its_share() {
    let daemon = Daemon::tiny(&["--requests-per-session=4"]);
    let before = footprint_at_rest(&daemon);
    let witness = Witness::start(&daemon);
    let mut raw = Raw::connect(&daemon);
    let requests: Vec<u32> = (0..200).collect();
    for &request in &requests {
        raw.submit(request, &Mix::tiny(3, 5..=5, 400..=400).request(1));
    }
    let said = raw.read_to_the_end(&requests);
    let answered = said.values().filter(|said| said.end == Some(End::Done(FinishReason::Length))).count();
    let refused = said
        .values()
        .filter(|said| {
            let busy = |end: &End| matches!(end, End::Error(reject, detail) if reject.name() == "busy" && detail.contains("in flight"));
            said.end.as_ref().is_some_and(busy)
        })
        .count();
    assert!(answered >= 4 && refused > 0, "{answered} answered, {refused} refused");
    assert_eq!(answered + refused, requests.len());
    witness.stop();
    drop(raw);
    assert_reclaimed(&daemon, before);
    assert_complaints(&daemon, &[]);
}

/// All over its writable segment, as fast as it can.
#[test]
fn scribblers_are_closed_and_told_of_once_each() {
    let daemon = Daemon::tiny(&[]);
    let before = footprint_at_rest(&daemon);
    let witness = Witness::start(&daemon);
    let begun = Instant::now();
    let mut closed = Vec::new();
    let mut seed = 0;
    while begun.elapsed() < Duration::from_millis(1500) {
        seed += 1;
        let mut raw = Raw::connect(&daemon);
        let mut random = Random(seed);
        // Something of its own in flight, so that the engine has ends to look at too.
        raw.submit(1, &endless());
        let until = Instant::now() + Duration::from_millis(150);
        while Instant::now() < until && !raw.is_closed() {
            // Every other one plausible for a while, since pure noise is found out at the first look.
            for _ in 0..200 {
                if seed % 2 == 0 { noise(&raw, &mut random) } else { scribble(&mut raw, &mut random) }
            }
        }
        // On and on after the end, into memory that is still its own.
        (0..10_000).for_each(|_| noise(&raw, &mut random));
        if raw.is_closed() {
            closed.push(raw.session);
        }
    }
    witness.stop();
    assert_reclaimed(&daemon, before);
    assert!(closed.len() > 5, "only {} of {seed} were found out", closed.len());
    let lines = complaints(&daemon);
    let mut by_session: HashMap<u64, usize> = HashMap::new();
    for line in &lines {
        let (_, rest) = line.split_once("session ").unwrap_or_else(|| panic!("about something else: {line}"));
        let number = rest.split(' ').next().expect("a number").parse().expect("a number");
        *by_session.entry(number).or_default() += 1;
        assert!(line.contains("uid ") && line.contains("pid ") && line.contains(" closed: "), "{line}");
    }
    for session in closed {
        assert_eq!(by_session.get(&session), Some(&1), "session {session} in {lines:#?}");
    }
    assert!(by_session.values().all(|&lines| lines == 1), "{lines:#?}");
}

/// One word anywhere.
fn noise(raw: &Raw, random: &mut Random) {
    let words = raw.up.bytes() as u64 / 8;
    raw.up.store_u64((random.bits() % words) as u32 * 8, random.bits());
}

/// Mostly what could be.
fn scribble(raw: &mut Raw, random: &mut Random) {
    let n = random.bits();
    let request_id = (n >> 8) as u32 % 4;
    match n % 64 {
        0..20 => {
            let cancel = SubmissionSlot { op: Op::Cancel as u8, request_id, ..SubmissionSlot::default() };
            let (arena_offset, arena_len) = ((n >> 16) as u32 % 8192 * 8, (n >> 32) as u32 % 512);
            let submit = SubmissionSlot { op: Op::Submit as u8, arena_offset, arena_len, ..cancel };
            let more = SubmissionSlot { op: Op::More as u8, ..submit };
            raw.put((n >> 48) as u32, [cancel, submit, submit, more][(n >> 62) as usize]);
        }
        20..24 if raw.unread() < limits::SUBMISSION_SLOTS - 4 => raw.advance((n >> 8) as u32 % 3),
        24 => raw.up.store_u32(up::CQ_WAKE_AT, (n >> 8) as u32),
        25 => raw.up.store_u32(up::CQ_HEAD, raw.published().wrapping_sub((n >> 8) as u32 % 64)),
        26 if n >> 56 == 0 => noise(raw, random),
        _ => raw.write_arena((n >> 8) as u32 % 8192 * 8, &random.bits().to_le_bytes()),
    }
}
