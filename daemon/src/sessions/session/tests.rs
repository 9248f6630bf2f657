//! How much one session may ask for before others have their turn.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use llmd_protocol::handshake::{self, Handshake, Hello, Progress};
use llmd_protocol::layout::{Op, SubmissionSlot, up};
use llmd_protocol::limits;
use llmd_protocol::segment::Mapping;

use super::*;
use crate::sessions::SessionKey;

/// A session with the largest rings, and the client's memory.
fn session() -> (Session, Mapping, u32) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut handshake = Handshake::new(ours).unwrap();
    let largest = Hello { submission_slots: 1 << 20, arena_bytes: 1 << 30, ..Hello::default() };
    handshake::send_hello(&theirs, largest).unwrap();
    assert!(matches!(handshake.readable(), Progress::Hello(_)));
    let shared = Arc::new(SessionShared::new(SessionKey(1), handshake.peer()));
    let daemon = handshake.welcome(7, 1).unwrap();
    let welcome = handshake::receive_welcome(theirs, Duration::from_secs(5)).unwrap();
    let geometry = welcome.terms.geometry;
    let up = Mapping::of_received(&welcome.up, geometry.up_bytes(), true).unwrap();
    (Session::new(shared, daemon.socket, daemon.submissions), up, geometry.submission_offset())
}

/// Fills the ring with `slot`, and returns how many submissions each turn takes until the session parks.
fn turns(slot: impl Fn(u32) -> SubmissionSlot) -> Vec<usize> {
    let (mut session, up, offset) = session();
    for place in 0..limits::SUBMISSION_SLOTS_MAX {
        let bytes: Vec<u8> = slot(place).to_words().iter().flat_map(|word| word.to_le_bytes()).collect();
        up.store_bytes(offset + place * 64, &bytes);
    }
    up.store_u32(up::SQ_TAIL, limits::SUBMISSION_SLOTS_MAX);
    let mut turns = Vec::new();
    loop {
        let mut taken = 0;
        let turn = session.turn(|_, _| taken += 1).expect("no lie");
        turns.push(taken);
        if matches!(turn, Turn::Parked) {
            return turns;
        }
    }
}

#[test]
fn a_turn_is_bounded_in_slots() {
    let cancel = |request_id| SubmissionSlot { op: Op::Cancel as u8, request_id, ..SubmissionSlot::default() };
    assert_eq!(turns(cancel), [64, 64, 64, 64, 0]);
}

#[test]
fn a_turn_is_bounded_in_bytes() {
    let arena_len = (BYTES_PER_TURN / 4) as u32;
    let submit =
        |request_id| SubmissionSlot { op: Op::Submit as u8, request_id, arena_len, ..SubmissionSlot::default() };
    let mut turns = turns(submit);
    assert_eq!(turns.pop(), Some(0));
    assert_eq!(turns, [4; limits::SUBMISSION_SLOTS_MAX as usize / 4]);
}

#[test]
fn parts_without_end_have_their_turn_like_anything_else() {
    let part = |_| SubmissionSlot { op: Op::More as u8, ..SubmissionSlot::default() };
    assert_eq!(turns(part), [0; limits::SUBMISSION_SLOTS_MAX as usize / 64]);
}

#[test]
fn a_cancel_meets_what_is_still_on_the_way() {
    let (mut session, up, offset) = session();
    let put = |place: u32, op: Op, request_id: u32| {
        let slot = SubmissionSlot { op: op as u8, request_id, ..SubmissionSlot::default() };
        let bytes: Vec<u8> = slot.to_words().iter().flat_map(|word| word.to_le_bytes()).collect();
        up.store_bytes(offset + place * 64, &bytes);
        up.store_u32(up::SQ_TAIL, place + 1);
    };
    put(0, Op::Submit, 5);
    put(1, Op::Submit, 6);
    put(2, Op::Cancel, 5);
    put(3, Op::Cancel, 99);
    let mut flags = HashMap::new();
    let mut cancels = Vec::new();
    let turn = session
        .turn(|_, taken| match taken {
            Taken::Submit { request, cancelled, .. } => drop(flags.insert(request, cancelled)),
            Taken::Cancel { request } => cancels.push(request),
        })
        .unwrap();
    assert!(matches!(turn, Turn::Parked));
    let is_set = |request: &u32| flags[request].load(Ordering::Relaxed);
    assert_eq!((is_set(&5), is_set(&6)), (true, false));
    assert_eq!(cancels, [5, 99], "the engine may have it already, so it is told too");
    session.cancel_all();
    assert!(is_set(&6));
}
