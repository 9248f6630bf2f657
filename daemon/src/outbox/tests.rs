//! The spill, with clients that read, do not read, and lie; time is made up.

use std::os::unix::net::UnixStream;

use llmd_protocol::completion::Completion;
use llmd_protocol::handshake::{self, Handshake, Hello, Progress};
use llmd_protocol::layout::{Geometry, up};
use llmd_protocol::message::{FinishReason, Reject, Usage};
use llmd_protocol::segment::Mapping;
use llmd_protocol::session::{ClientSession, DaemonSession};

use super::*;

/// Slots of the test's rings: the fewest there can be.
const RING: u32 = 64;
const LIMITS: OutboxLimits = OutboxLimits {
    spill_slots_max: 100,
    suspend_after: Duration::from_secs(2),
    give_up_after: Duration::from_secs(30),
};

/// An outbox, and a clock that stands still until told.
struct Room {
    outbox: Outbox,
    metrics: Arc<Metrics>,
    now: Instant,
}

/// What the sessions thread would hold.
struct Held {
    key: SessionKey,
    shared: Arc<SessionShared>,
    socket: SessionSocket,
}

impl Room {
    fn new() -> Self {
        let metrics = Arc::new(Metrics::new(16));
        let (notifier, _) = Notifier::spawn(Arc::clone(&metrics)).unwrap();
        Self { outbox: Outbox::new(notifier, Arc::clone(&metrics), LIMITS), metrics, now: Instant::now() }
    }

    /// A session whose client has not mapped its memory yet.
    fn welcome(&mut self, key: u64) -> (Held, handshake::Welcome) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut handshake = Handshake::new(ours).unwrap();
        handshake::send_hello(&theirs, Hello { completion_slots: RING, ..Hello::default() }).unwrap();
        assert!(matches!(handshake.readable(), Progress::Hello(_)));
        let shared = Arc::new(SessionShared::new(SessionKey(key), handshake.peer()));
        let DaemonSession { socket, completions, doorbell, .. } = handshake.welcome(7, key).unwrap();
        let opened = Opened { shared: Arc::clone(&shared), completions, doorbell, socket: socket.clone() };
        self.outbox.open(opened);
        let welcome = handshake::receive_welcome(theirs, Duration::from_secs(5)).unwrap();
        (Held { key: SessionKey(key), shared, socket }, welcome)
    }

    fn session(&mut self, key: u64) -> (Held, ClientSession) {
        let (held, welcome) = self.welcome(key);
        (held, welcome.map().unwrap())
    }

    /// Pushes tokens of request 1, numbered from `first`.
    fn push(&mut self, held: &Held, first: u32, count: u32) {
        for index in first..first + count {
            self.outbox.push(held.key, CompletionSlot::tokens(1, index, &[index]), self.now);
        }
        self.outbox.publish();
    }

    fn begin(&mut self, held: &Held, request: u32) {
        held.shared.in_flight.fetch_add(1, Ordering::Relaxed);
        assert!(self.outbox.begin(held.key, request, SequenceId { index: request, generation: 0 }));
    }

    /// One look at the spills, `after` later.
    fn drain(&mut self, after: Duration) -> Vec<(SessionKey, Pressure)> {
        self.now += after;
        let mut verdicts = Vec::new();
        self.outbox.drain_spills(self.now, |key, pressure| verdicts.push((key, pressure)));
        self.outbox.publish();
        verdicts
    }
}

impl Held {
    /// Waits until the sessions thread would close the session, and returns why.
    fn closed_for(&self) -> Option<&str> {
        assert!(self.socket.wait(Some(Duration::from_secs(5))).unwrap().hung_up, "nobody asked for its end");
        self.shared.condemned()
    }
}

/// All that is in the ring.
fn read(client: &mut ClientSession) -> Vec<CompletionSlot> {
    let slots = std::iter::from_fn(|| client.completions.pop().unwrap()).collect();
    client.completions.release();
    slots
}

fn indices(slots: &[CompletionSlot]) -> Vec<u32> {
    let index = |slot: &CompletionSlot| match slot.decode().unwrap() {
        Completion::Tokens { index, .. } => index,
        other => panic!("{other:?} among tokens"),
    };
    slots.iter().map(index).collect()
}

const NO_TIME: Duration = Duration::ZERO;
const SECOND: Duration = Duration::from_secs(1);

#[test]
fn what_does_not_fit_waits_and_comes_in_order() {
    let mut room = Room::new();
    let (held, mut client) = room.session(1);
    room.push(&held, 0, RING + 40);
    assert!(room.outbox.is_spilling());
    assert_eq!(room.drain(NO_TIME), [], "40 of 100 for no time is nobody's business");
    let mut seen = indices(&read(&mut client));
    assert_eq!(seen.len() as u32, RING);
    // Room in the ring, but what is older goes first.
    room.push(&held, RING + 40, 3);
    assert!(read(&mut client).is_empty());
    room.drain(NO_TIME);
    assert!(!room.outbox.is_spilling());
    room.push(&held, RING + 43, 2);
    seen.extend(indices(&read(&mut client)));
    assert_eq!(seen, (0..RING + 45).collect::<Vec<_>>());
}

#[test]
fn a_client_that_read_since_the_last_look_spills_nothing() {
    let mut room = Room::new();
    let (held, mut client) = room.session(1);
    room.push(&held, 0, RING);
    assert_eq!(read(&mut client).len() as u32, RING);
    room.push(&held, RING, RING);
    assert!(!room.outbox.is_spilling());
    assert_eq!(read(&mut client).len() as u32, RING);
}

#[test]
fn a_slow_reader_is_suspended_once_and_resumed_when_it_has_read() {
    let mut room = Room::new();
    let (held, mut client) = room.session(1);
    room.push(&held, 0, RING + 10);
    assert_eq!(room.drain(SECOND), []);
    assert!(!room.outbox.is_suspended(held.key));
    assert_eq!(room.drain(SECOND), [(held.key, Pressure::Suspend)]);
    assert_eq!(room.drain(SECOND), [], "once");
    assert!(room.outbox.is_suspended(held.key));
    let mut seen = indices(&read(&mut client));
    assert_eq!(room.drain(SECOND), [(held.key, Pressure::Resume)]);
    assert!(!room.outbox.is_suspended(held.key));
    seen.extend(indices(&read(&mut client)));
    assert_eq!(seen, (0..RING + 10).collect::<Vec<_>>());
    // A new spill has its own two seconds.
    room.push(&held, 0, RING + 1);
    assert_eq!(room.drain(SECOND), []);
    assert_eq!(room.drain(SECOND), [(held.key, Pressure::Suspend)]);
}

#[test]
fn half_a_spill_suspends_at_once() {
    let mut room = Room::new();
    let (held, _client) = room.session(1);
    room.push(&held, 0, RING + 49);
    assert_eq!(room.drain(NO_TIME), []);
    room.push(&held, RING + 49, 1);
    assert_eq!(room.drain(NO_TIME), [(held.key, Pressure::Suspend)]);
}

#[test]
fn requests_left_unread_are_given_up_and_each_says_so() {
    let mut room = Room::new();
    let (held, mut client) = room.session(1);
    let (other, mut reader) = room.session(2);
    for episode in 0..2 {
        (1..=2).for_each(|request| room.begin(&held, request));
        room.push(&held, 0, RING + 10);
        assert_eq!(room.drain(2 * SECOND), [(held.key, Pressure::Suspend)]);
        assert_eq!(room.drain(27 * SECOND), []);
        assert_eq!(room.drain(SECOND), [(held.key, Pressure::GiveUp)], "episode {episode}");
        let mut live = room.outbox.live(held.key);
        live.sort_unstable();
        assert_eq!(live.iter().map(|(request, _)| *request).collect::<Vec<_>>(), [1, 2]);
        for (request, _) in live {
            let last = CompletionSlot::error(request, Reject::SlowReader);
            room.outbox.end(held.key, request, last, room.now);
        }
        assert_eq!(held.shared.in_flight.load(Ordering::Relaxed), 0);
        assert_eq!(room.drain(SECOND), [], "nothing is left to give up");
        // One that asks again and still does not read is given up at once.
        room.begin(&held, 3);
        assert_eq!(room.drain(NO_TIME), [(held.key, Pressure::GiveUp)]);
        let done = CompletionSlot::done(3, FinishReason::Cancelled, Usage::default());
        room.outbox.end(held.key, 3, done, room.now);

        room.push(&other, episode, 1);
        assert_eq!(indices(&read(&mut reader)), [episode], "nobody else notices");

        let mut slots = read(&mut client);
        room.drain(NO_TIME);
        slots.extend(read(&mut client));
        let ends: Vec<_> = slots.iter().filter(|slot| slot.is_terminal()).map(|slot| slot.request_id()).collect();
        assert_eq!(ends, [1, 2, 3]);
        assert_eq!(slots.len() as u32, RING + 10 + 3);
        assert!(!room.outbox.is_spilling() && held.shared.condemned().is_none());
    }
}

#[test]
fn an_overrun_spill_closes_its_session_and_no_other() {
    let mut room = Room::new();
    let (held, mut client) = room.session(1);
    let (other, mut reader) = room.session(2);
    room.begin(&held, 1);
    room.push(&held, 0, RING + 100);
    room.push(&other, 0, RING + 5);
    assert!(room.outbox.is_open(held.key));
    room.push(&held, RING + 100, 1);
    assert!(!room.outbox.is_open(held.key));
    assert!(held.closed_for().is_some_and(|why| why.contains("unread")));
    assert!(room.metrics.render().contains(&format!("llmd_spill_bytes {}", 5 * 32)));
    // Nothing more is written, nothing begins, and no verdict is spoken over it.
    room.push(&held, 0, 50);
    assert!(!room.outbox.begin(held.key, 2, SequenceId { index: 9, generation: 0 }));
    assert_eq!(room.drain(60 * SECOND), [], "the other has read nothing, but has nothing in flight either");
    assert_eq!(read(&mut client).len() as u32, RING);
    assert_eq!(room.outbox.close(held.key), [SequenceId { index: 1, generation: 0 }]);

    let mut seen = indices(&read(&mut reader));
    room.drain(NO_TIME);
    seen.extend(indices(&read(&mut reader)));
    assert_eq!(seen, (0..RING + 5).collect::<Vec<_>>());
    assert!(!room.outbox.is_spilling());
}

#[test]
fn a_lying_head_closes_its_session() {
    let mut room = Room::new();
    let (held, welcome) = room.welcome(1);
    let bytes = Geometry::negotiate(0, RING, 0).up_bytes();
    let up = Mapping::of_received(&welcome.up, bytes, true).unwrap();
    room.push(&held, 0, RING + 1);
    up.store_u32(up::CQ_HEAD, RING + 1);
    assert_eq!(room.drain(NO_TIME), []);
    assert!(held.closed_for().is_some_and(|why| why.contains("cq_head")));
    assert!(!room.outbox.is_spilling());

    let (held, welcome) = room.welcome(2);
    let up = Mapping::of_received(&welcome.up, bytes, true).unwrap();
    room.push(&held, 0, RING);
    up.store_u32(up::CQ_HEAD, u32::MAX);
    room.push(&held, RING, 1);
    assert!(held.closed_for().is_some_and(|why| why.contains("cq_head")));
}

#[test]
fn a_session_that_goes_takes_its_spill_and_gives_its_sequences_back() {
    let mut room = Room::new();
    let (held, client) = room.session(1);
    (1..=3).for_each(|request| room.begin(&held, request));
    room.push(&held, 0, RING + 20);
    drop(client);
    let mut sequences = room.outbox.close(held.key);
    sequences.sort_by_key(|id| id.index);
    assert_eq!(sequences.iter().map(|id| id.index).collect::<Vec<_>>(), [1, 2, 3]);
    assert!(!room.outbox.is_spilling());
    assert!(room.metrics.render().contains("llmd_spill_bytes 0"));
    // What still comes for it is for nobody.
    room.push(&held, 0, 1);
    room.outbox.end(held.key, 1, CompletionSlot::error(1, Reject::Internal), room.now);
    assert_eq!(room.outbox.close(held.key), []);
}

#[test]
fn a_number_in_flight_is_not_given_twice() {
    let mut room = Room::new();
    let (held, _client) = room.session(1);
    room.begin(&held, 7);
    let again = SequenceId { index: 8, generation: 0 };
    assert!(!room.outbox.begin(held.key, 7, again));
    assert_eq!(room.outbox.sequence(held.key, 7), Some(SequenceId { index: 7, generation: 0 }));
    assert!(!room.outbox.begin(SessionKey(99), 7, again));
    let done = CompletionSlot::done(7, FinishReason::Stop, Usage::default());
    room.outbox.end(held.key, 7, done, room.now);
    assert_eq!(room.outbox.sequence(held.key, 7), None);
    assert!(room.outbox.begin(held.key, 7, again));
}
