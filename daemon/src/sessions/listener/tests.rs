//! The sessions thread with an engine that only takes notes.

use std::path::PathBuf;
use std::sync::Mutex;

use llmd_protocol::handshake::{ConnectError, Hello};
use llmd_protocol::limits::{REQUEST_BYTES_MAX, SUBMISSIONS_PER_TURN};
use llmd_protocol::session::ClientSession;

use super::*;

const PATIENCE: Duration = Duration::from_secs(20);

struct Room {
    path: PathBuf,
    arrivals: Notes,
    jobs: mpsc::Receiver<Job>,
    table: Arc<SessionTable>,
    draining: Arc<AtomicBool>,
    handle: Option<SessionsHandle>,
}

type Notes = Arc<Mutex<Vec<Arrival>>>;

fn outlets() -> (Outlets, Notes, mpsc::Receiver<Job>) {
    let arrivals = Notes::default();
    let (sender, jobs) = mpsc::sync_channel(16);
    let notes = Arc::clone(&arrivals);
    let outlets = Outlets {
        arrivals: Box::new(move |arrival| notes.lock().unwrap().push(arrival)),
        jobs: sender,
        table: Arc::default(),
        metrics: Arc::new(Metrics::new(16)),
        draining: Arc::default(),
    };
    (outlets, arrivals, jobs)
}

impl Room {
    fn new(name: &str, limits: SessionLimits) -> Self {
        let path = std::env::temp_dir().join(format!("llmd-listener-{name}-{}.sock", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).unwrap();
        let (outlets, arrivals, jobs) = outlets();
        let (table, draining) = (Arc::clone(&outlets.table), Arc::clone(&outlets.draining));
        let handle = Some(spawn(listener, limits, outlets).unwrap());
        Self { path, arrivals, jobs, table, draining, handle }
    }

    fn connect(&self) -> Result<ClientSession, Refused> {
        match llmd_protocol::handshake::connect(&self.path, Hello::default(), PATIENCE) {
            Ok(welcome) => Ok(welcome.map().unwrap()),
            Err(ConnectError::Refused { refusal, .. }) => Err(refusal),
            Err(error) => panic!("{error}"),
        }
    }

    /// Waits for an arrival that `find` finds something in.
    fn arrival<T>(&self, mut find: impl FnMut(&Arrival) -> Option<T>) -> T {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(found) = self.arrivals.lock().unwrap().iter().find_map(&mut find) {
                return found;
            }
            assert!(Instant::now() < deadline, "no such arrival");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn refused(&self, number: u32) -> (Reject, String) {
        self.arrival(|arrival| match arrival {
            Arrival::Refused { request, refusal, .. } if *request == number => {
                Some((refusal.reject, refusal.detail.clone()))
            }
            _ => None,
        })
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.handle.take().expect("stopped once").stop();
        let _ = std::fs::remove_file(&self.path);
    }
}

const LIMITS: SessionLimits = SessionLimits { sessions_max: 3, sessions_per_uid_max: 2, requests_per_session_max: 5 };

fn submit(client: &mut ClientSession, request: u32, payload: &[u8]) {
    let begun = Instant::now();
    let mut sent = 0;
    while sent < payload.len() {
        sent = client.submissions.submit(request, payload, sent).unwrap();
        assert!(begun.elapsed() < PATIENCE);
    }
}

#[test]
fn what_the_engine_condemns_is_closed_and_its_client_told() {
    let room = Room::new("condemned", LIMITS);
    let client = room.connect().unwrap();
    let (shared, socket) = room.arrival(|arrival| match arrival {
        Arrival::Opened(opened) => Some((Arc::clone(&opened.shared), opened.socket.clone())),
        _ => None,
    });
    shared.condemn("it must go");
    shared.condemn("for another reason");
    assert_eq!(shared.condemned(), Some("it must go"));
    socket.stop_listening();
    let closed = room.arrival(|arrival| match arrival {
        Arrival::Closed { session } => Some(*session),
        _ => None,
    });
    assert_eq!(closed, shared.key);
    assert!(client.socket.wait(Some(PATIENCE)).unwrap().hung_up);
    assert_eq!(client.completions.state(), Some(SessionState::Closed));
    assert!(room.table.is_empty());
}

#[test]
fn a_cap_counts_those_that_are_there() {
    let room = Room::new("cap", LIMITS);
    let first = room.connect().unwrap();
    let _second = room.connect().unwrap();
    assert_eq!(room.connect().err(), Some(Refused::TooManySessions));
    drop(first);
    let begun = Instant::now();
    while room.table.len() == 2 {
        assert!(begun.elapsed() < PATIENCE, "the place is not freed");
        std::thread::sleep(Duration::from_millis(2));
    }
    let _third = room.connect().unwrap();
    room.draining.store(true, Ordering::Relaxed);
    assert_eq!(room.connect().err(), Some(Refused::Draining));
}

#[test]
fn requests_beyond_a_sessions_share_are_refused_in_words() {
    let room = Room::new("share", LIMITS);
    let mut client = room.connect().unwrap();
    // Nobody takes the jobs, so they wait.
    submit(&mut client, 1, &vec![1; REQUEST_BYTES_MAX]);
    submit(&mut client, 2, &vec![2; REQUEST_BYTES_MAX - 8]);
    submit(&mut client, 3, &[3; 16]);
    let (reject, detail) = room.refused(3);
    assert_eq!((reject, detail.contains("bytes")), (Reject::Busy, true), "{detail}");
    submit(&mut client, 4, &[4; 8]);
    // The first is taken, which makes room again.
    let job = room.jobs.recv_timeout(PATIENCE).unwrap();
    assert_eq!((job.request, job.payload.len()), (1, REQUEST_BYTES_MAX));
    drop(job);
    submit(&mut client, 5, &[5; 16]);
    // The refused one counts until the engine has answered it, which this one never does.
    submit(&mut client, 6, &[6; 16]);
    let (reject, detail) = room.refused(6);
    assert_eq!((reject, detail.contains("in flight")), (Reject::Busy, true), "{detail}");
    let waiting: Vec<_> = (0..3).map(|_| room.jobs.recv_timeout(PATIENCE).unwrap().request).collect();
    assert_eq!(waiting, [2, 4, 5]);
    room.draining.store(true, Ordering::Relaxed);
    submit(&mut client, 7, &[7; 16]);
    assert_eq!(room.refused(7).0, Reject::Draining);
}

#[test]
fn a_client_that_goes_cancels_what_is_on_its_way() {
    let room = Room::new("goes", LIMITS);
    let mut client = room.connect().unwrap();
    submit(&mut client, 1, &[1; 16]);
    let job = room.jobs.recv_timeout(PATIENCE).unwrap();
    assert!(!job.cancelled.load(Ordering::Relaxed));
    client.socket.hang_up();
    room.arrival(|arrival| matches!(arrival, Arrival::Closed { .. }).then_some(()));
    assert!(job.cancelled.load(Ordering::Relaxed));
}

/// With the thread's work done by hand, so that its order is known.
#[test]
fn a_client_that_fills_its_ring_and_rings_on_has_one_turn_a_round() {
    let path = std::env::temp_dir().join(format!("llmd-listener-turns-{}.sock", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let stop = EventFd::new().unwrap();
    let (outlets, arrivals, _jobs) = outlets();
    let mut sessions = Sessions::new(UnixListener::bind(&path).unwrap(), LIMITS, outlets, &stop).unwrap();
    std::fs::remove_file(&path).unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    llmd_protocol::handshake::send_hello(&theirs, Hello { submission_slots: 256, ..Hello::default() }).unwrap();
    let token = sessions.next_key;
    sessions.begin_handshake(ours);
    sessions.socket_event(token);
    let mut client = llmd_protocol::handshake::receive_welcome(theirs, PATIENCE).unwrap().map().unwrap();
    let cancels = || arrivals.lock().unwrap().iter().filter(|a| matches!(a, Arrival::Cancelled { .. })).count();
    let turn = SUBMISSIONS_PER_TURN as usize;
    (0..256).for_each(|request| assert!(client.submissions.cancel(request).unwrap()));
    for _ in 0..5 {
        client.socket.ring();
        sessions.socket_event(token);
    }
    assert_eq!((sessions.ready.len(), cancels()), (1, turn), "one turn, however often it rings");
    for round in 2..=4 {
        client.socket.ring();
        sessions.socket_event(token);
        sessions.turns();
        assert_eq!(cancels(), round * turn);
        assert!(sessions.ready.len() <= 1);
    }
    sessions.turns();
    assert!(sessions.ready.is_empty(), "it is parked");
}

/// A handshake in which nothing is said gives its place to another when it dawdles, and one that has been said does not.
#[test]
fn a_dawdling_handshake_makes_room() {
    let path = std::env::temp_dir().join(format!("llmd-listener-room-{}.sock", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let stop = EventFd::new().unwrap();
    let (outlets, _arrivals, _jobs) = outlets();
    let mut sessions = Sessions::new(UnixListener::bind(&path).unwrap(), LIMITS, outlets, &stop).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert!(!sessions.make_room(), "there is none to end");
    let begin = |sessions: &mut Sessions| {
        let (ours, theirs) = UnixStream::pair().unwrap();
        sessions.begin_handshake(ours);
        theirs
    };
    let (early, silent) = (begin(&mut sessions), begin(&mut sessions));
    assert!(!sessions.make_room(), "they have only just begun");
    std::thread::sleep(DAWDLING);
    llmd_protocol::handshake::send_hello(&early, Hello::default()).unwrap();
    // The oldest has said what it wants meanwhile: it becomes a session, which is room too.
    assert!(sessions.make_room());
    assert_eq!((sessions.handshakes.len(), sessions.open.len()), (1, 1));
    assert!(sessions.make_room());
    assert_eq!((sessions.handshakes.len(), sessions.open.len()), (0, 1));
    assert!(llmd_protocol::handshake::receive_welcome(early, PATIENCE).is_ok());
    match llmd_protocol::handshake::receive_welcome(silent, PATIENCE) {
        Err(ConnectError::Refused { refusal, .. }) => assert_eq!(refusal, Refused::TimedOut),
        other => panic!("{other:?}"),
    }
}
