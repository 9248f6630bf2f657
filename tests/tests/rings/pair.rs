//! Both ends of a session, and what they say to each other.

use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;
use std::time::{Duration, Instant};

use llmd_protocol::completion::CompletionSlot;
use llmd_protocol::handshake::{self, Handshake, Hello, Progress, Welcome};
use llmd_protocol::layout::Geometry;
use llmd_protocol::segment::Mapping;
use llmd_protocol::session::{ClientSession, CompletionDoorbell, DaemonSession, Submission};

pub(crate) const SECONDS_5: Duration = Duration::from_secs(5);

/// A session whose client has not mapped its memory yet.
pub(crate) fn welcome_on(ours: UnixStream, theirs: UnixStream) -> (DaemonSession, Welcome) {
    let mut handshake = Handshake::new(ours).unwrap();
    handshake::send_hello(&theirs, Hello::default()).unwrap();
    assert!(matches!(handshake.readable(), Progress::Hello(_)));
    let daemon = handshake.welcome(7, 1).unwrap();
    (daemon, handshake::receive_welcome(theirs, SECONDS_5).unwrap())
}

pub(crate) fn welcome() -> (DaemonSession, Welcome) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    welcome_on(ours, theirs)
}

pub(crate) fn session() -> (DaemonSession, ClientSession) {
    let (daemon, client) = welcome();
    (daemon, client.map().unwrap())
}

/// A session with the client's memory mapped by hand, to store into it what no honest client would.
pub(crate) fn lying_session() -> (DaemonSession, Mapping, UnixStream) {
    let (daemon, client) = welcome();
    let up = Mapping::of_received(&client.up, Geometry::default().up_bytes(), true).unwrap();
    (daemon, up, client.stream)
}

/// Waits until a handshake on `listener` is through.
pub(crate) fn accept(listener: &UnixListener) -> DaemonSession {
    let mut handshake = Handshake::new(listener.accept().unwrap().0).unwrap();
    while handshake.readable() == Progress::Pending {
        thread::sleep(Duration::from_micros(100));
    }
    handshake.welcome(7, 1).unwrap()
}

/// The next submission; sleeps by the doorbell as the daemon does. None when the client is gone.
pub(crate) fn next_submission(daemon: &mut DaemonSession) -> Option<Submission> {
    loop {
        if let Some(submission) = daemon.submissions.next().unwrap() {
            return Some(submission);
        }
        if daemon.submissions.arm_wake().unwrap() {
            let drained = daemon.socket.wait(Some(SECONDS_5)).unwrap();
            assert!(drained.hung_up || drained.doorbells > 0, "a wake-up of the daemon was lost");
            daemon.submissions.note_doorbells(drained.doorbells).unwrap();
            if drained.hung_up && daemon.submissions.arm_wake().unwrap() {
                return None;
            }
        }
    }
}

/// The next completion; sleeps by the doorbell as a client does. None when the daemon is gone.
pub(crate) fn next_completion(client: &mut ClientSession) -> Option<CompletionSlot> {
    loop {
        if let Some(slot) = client.completions.pop().unwrap() {
            client.completions.release();
            return Some(slot);
        }
        if client.completions.arm().unwrap() {
            let drained = client.socket.wait(Some(SECONDS_5)).unwrap();
            assert!(drained.hung_up || drained.doorbells > 0, "a wake-up of the client was lost");
            if drained.hung_up && client.completions.arm().unwrap() {
                return None;
            }
        }
    }
}

/// Publishes one slot; waits for room.
pub(crate) fn say(daemon: &mut DaemonSession, slot: CompletionSlot) {
    let begun = Instant::now();
    while daemon.completions.push(slot).is_err() {
        publish(daemon);
        if daemon.completions.free().unwrap() == 0 {
            assert!(begun.elapsed() < SECONDS_5, "the client stopped reading");
            thread::yield_now();
        }
    }
}

pub(crate) fn publish(daemon: &mut DaemonSession) {
    if let Some(published) = daemon.completions.publish() {
        CompletionDoorbell::fence();
        if daemon.doorbell.needs_wake(published) {
            daemon.doorbell.ring();
        }
    }
}

/// Sends a whole request; waits for room.
pub(crate) fn ask(client: &mut ClientSession, id: u32, payload: &[u8]) {
    let (mut sent, begun) = (0, Instant::now());
    while sent < payload.len() {
        sent = client.submissions.submit(id, payload, sent).unwrap();
        assert!(begun.elapsed() < SECONDS_5, "the daemon stopped reading");
    }
}

/// A sequence of numbers that any process can make again: splitmix64.
pub(crate) struct Numbers(pub(crate) u64);

impl Numbers {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}
