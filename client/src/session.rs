//! One session with the daemon: requests go out through a lock, a thread reads what comes back.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use llmd_protocol::completion::CompletionSlot;
use llmd_protocol::doorbell::SessionSocket;
use llmd_protocol::layout::SessionState;
use llmd_protocol::ring::BadIndex;
use llmd_protocol::session::{ClientSession, CompletionConsumer, SubmissionProducer};

use crate::error::Error;
use crate::inbox::Inbox;

/// How long a request may wait for room in the submission ring. The daemon empties it within microseconds unless it
/// is stopped or broken.
const SUBMIT_TIMEOUT: Duration = Duration::from_secs(10);
/// First and longest pause while waiting for room.
const PAUSE: (Duration, Duration) = (Duration::from_micros(20), Duration::from_millis(1));
/// Completions read before their slots are given back to the daemon.
const COMPLETIONS_PER_TURN: usize = 256;

/// Keeps a session alive; the connection ends with the last clone of the Arc around it.
#[derive(Debug)]
pub(crate) struct SessionHandle {
    session: Arc<Session>,
}

impl std::ops::Deref for SessionHandle {
    type Target = Session;
    fn deref(&self) -> &Session {
        &self.session
    }
}

impl Drop for SessionHandle {
    fn drop(&mut self) {
        // A child's copy must not end what is its parent's.
        if !self.session.is_forked() {
            // The reading thread sees the end and goes.
            self.session.socket.hang_up();
        }
    }
}

/// What the owner of requests and the reading thread share.
#[derive(Debug)]
pub(crate) struct Session {
    pid: u32,
    requests_max: usize,
    submit_timeout: Duration,
    socket: SessionSocket,
    submissions: Mutex<SubmissionProducer>,
    /// Cancels still to be sent; at most one for each request in flight.
    cancels: Mutex<VecDeque<u32>>,
    requests: Mutex<Requests>,
}

#[derive(Debug, Default)]
struct Requests {
    /// In flight by the daemon's account: also those whose owner is gone, until their terminal record.
    open: HashMap<u32, Arc<Inbox>>,
    last_id: u32,
    ended: Option<Ended>,
}

/// Why a session is over.
#[derive(Debug, Clone)]
enum Ended {
    /// The daemon ended it on purpose.
    Closed,
    /// The daemon is gone.
    Gone,
    /// The daemon's words made no sense.
    Protocol(String),
}

impl Ended {
    fn error(&self) -> Error {
        match self {
            Self::Closed => Error::Disconnected,
            Self::Gone => Error::DaemonRestarted,
            Self::Protocol(what) => Error::Protocol(what.clone()),
        }
    }
}

/// Why a request could not be begun.
pub(crate) enum NotBegun {
    /// The session is over; a new one may do.
    SessionEnded,
    /// Told to the caller.
    Failed(Error),
}

impl Session {
    /// Takes a mapped session over and starts its reading thread.
    pub(crate) fn start(ends: ClientSession) -> Result<SessionHandle, Error> {
        Self::start_with(ends, SUBMIT_TIMEOUT)
    }

    fn start_with(ends: ClientSession, submit_timeout: Duration) -> Result<SessionHandle, Error> {
        let ClientSession { terms, socket, submissions, completions } = ends;
        let session = Arc::new(Self {
            pid: std::process::id(),
            requests_max: terms.geometry.requests_in_flight() as usize,
            submit_timeout,
            socket,
            submissions: Mutex::new(submissions),
            cancels: Mutex::default(),
            requests: Mutex::default(),
        });
        let readers = session.clone();
        thread::Builder::new().name("llmd-reader".into()).spawn(move || readers.read(completions))?;
        Ok(SessionHandle { session })
    }

    /// This process is a child of the one the session belongs to.
    pub(crate) fn is_forked(&self) -> bool {
        std::process::id() != self.pid
    }

    pub(crate) fn has_ended(&self) -> bool {
        lock(&self.requests).ended.is_some()
    }

    /// Sends a request; its events come into the inbox.
    pub(crate) fn begin(&self, payload: &[u8]) -> Result<(u32, Arc<Inbox>), NotBegun> {
        let inbox = Arc::new(Inbox::default());
        let id = {
            let mut requests = lock(&self.requests);
            if requests.ended.is_some() {
                return Err(NotBegun::SessionEnded);
            }
            if requests.open.len() >= self.requests_max {
                let detail = format!("{} requests are in flight on this session already", self.requests_max);
                let reject = llmd_protocol::message::Reject::Busy;
                return Err(NotBegun::Failed(Error::Rejected { reject, detail }));
            }
            let mut id = requests.last_id;
            loop {
                id = id.wrapping_add(1);
                if !requests.open.contains_key(&id) {
                    break;
                }
            }
            requests.last_id = id;
            requests.open.insert(id, inbox.clone());
            id
        };
        let sent = self.submit(id, payload);
        self.send_cancels();
        match sent {
            Ok(()) => Ok((id, inbox)),
            Err(error) => {
                inbox.abandon();
                Err(error)
            }
        }
    }

    /// Asks for the end of a request. Its terminal record still comes.
    pub(crate) fn cancel(&self, id: u32) {
        if !lock(&self.requests).open.contains_key(&id) {
            return;
        }
        let mut cancels = lock(&self.cancels);
        if !cancels.contains(&id) {
            cancels.push_back(id);
        }
        drop(cancels);
        self.send_cancels();
    }

    fn submit(&self, id: u32, payload: &[u8]) -> Result<(), NotBegun> {
        let mut submissions = lock(&self.submissions);
        let begun = Instant::now();
        let (mut sent, mut pause) = (0, PAUSE.0);
        loop {
            // Cancels first: one may abandon a request that timed out between its parts, and another must not begin
            // before the daemon knows.
            if self.flush_cancels(&mut submissions).map_err(|e| self.broken(e))? {
                sent = submissions.submit(id, payload, sent).map_err(|e| self.broken(e))?;
                if sent == payload.len() {
                    return Ok(());
                }
            }
            if self.has_ended() {
                return Err(NotBegun::SessionEnded);
            }
            if begun.elapsed() > self.submit_timeout {
                if sent > 0 {
                    // The daemon holds the parts that came; this frees them.
                    lock(&self.cancels).push_back(id);
                }
                lock(&self.requests).open.remove(&id);
                return Err(NotBegun::Failed(Error::TimedOut(self.submit_timeout)));
            }
            thread::sleep(pause);
            pause = (pause * 2).min(PAUSE.1);
        }
    }

    /// The daemon stored an index that cannot be: nothing more can be sent on this session.
    fn broken(&self, e: BadIndex) -> NotBegun {
        self.socket.hang_up();
        NotBegun::Failed(Error::Protocol(format!("submission ring: {e}")))
    }

    /// Sends waiting cancels as far as there is room, without waiting for anything. Whoever holds the submission lock
    /// calls it after letting go, so a cancel that finds the lock taken is not forgotten.
    fn send_cancels(&self) {
        loop {
            if lock(&self.cancels).is_empty() {
                return;
            }
            let Ok(mut submissions) = self.submissions.try_lock() else {
                return;
            };
            // No room, or a broken session: the reading thread tries again while something comes.
            if !self.flush_cancels(&mut submissions).unwrap_or(false) {
                return;
            }
        }
    }

    /// Sends waiting cancels as far as there is room. True: none waits any more.
    fn flush_cancels(&self, submissions: &mut SubmissionProducer) -> Result<bool, BadIndex> {
        let mut cancels = lock(&self.cancels);
        while let Some(&id) = cancels.front() {
            if !submissions.cancel(id)? {
                return Ok(false);
            }
            cancels.pop_front();
        }
        Ok(true)
    }

    /// The reading thread.
    fn read(&self, mut completions: CompletionConsumer) {
        let ended = loop {
            match self.turn(&mut completions) {
                Ok(false) => {}
                Ok(true) => match completions.state() {
                    Some(SessionState::Closed) => break Ended::Closed,
                    _ => break Ended::Gone,
                },
                Err(what) => break Ended::Protocol(what),
            }
        };
        self.socket.hang_up();
        let open = {
            let mut requests = lock(&self.requests);
            requests.ended = Some(ended.clone());
            std::mem::take(&mut requests.open)
        };
        for inbox in open.into_values() {
            inbox.fail(ended.error());
        }
    }

    /// Delivers what is there; if there is nothing, sleeps until there may be. True: the daemon is gone, and everything it
    /// had published is delivered.
    fn turn(&self, completions: &mut CompletionConsumer) -> Result<bool, String> {
        if self.deliver(completions)? {
            return Ok(false);
        }
        if !completions.arm().map_err(|e| e.to_string())? {
            return Ok(false);
        }
        self.send_cancels();
        let timeout = if lock(&self.cancels).is_empty() { None } else { Some(PAUSE.1) };
        if !self.socket.wait(timeout).map_err(|e| e.to_string())?.hung_up {
            return Ok(false);
        }
        while self.deliver(completions)? {}
        Ok(true)
    }

    /// Hands up to a turn's worth of completions to their inboxes. False if there was none.
    fn deliver(&self, completions: &mut CompletionConsumer) -> Result<bool, String> {
        let mut touched: Vec<Arc<Inbox>> = Vec::new();
        let mut requests = lock(&self.requests);
        let read = requests.read_turn(completions, &mut touched);
        drop(requests);
        completions.release();
        // One wake-up for each request, however many records came; also for those before a record that makes no sense.
        touched.iter().for_each(|inbox| inbox.notify());
        Ok(read? > 0)
    }
}

impl Requests {
    /// Returns how many completions were read.
    fn read_turn(
        &mut self,
        completions: &mut CompletionConsumer,
        touched: &mut Vec<Arc<Inbox>>,
    ) -> Result<usize, String> {
        let mut read = 0;
        while read < COMPLETIONS_PER_TURN
            && let Some(slot) = completions.pop().map_err(|e| e.to_string())?
        {
            self.deliver(slot, touched)?;
            read += 1;
        }
        Ok(read)
    }

    fn deliver(&mut self, slot: CompletionSlot, touched: &mut Vec<Arc<Inbox>>) -> Result<(), String> {
        let completion = slot.decode().map_err(|e| e.to_string())?;
        let id = slot.request_id();
        // The end of a request that timed out while being sent finds nobody.
        let Some(inbox) = self.open.get(&id) else {
            return Ok(());
        };
        if inbox.put(completion) {
            touched.push(inbox.clone());
        }
        if slot.is_terminal() {
            self.open.remove(&id);
        }
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while holding one of these locks half-way through a change.
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use llmd_protocol::handshake::{self, Handshake, Hello, Progress};
    use llmd_protocol::session::Submission;

    use super::*;

    #[test]
    fn a_request_that_timed_out_between_its_parts_is_abandoned_before_another_begins() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut handshake = Handshake::new(ours).unwrap();
        let hello = Hello { submission_slots: 8, arena_bytes: 16 * 1024, ..Hello::default() };
        handshake::send_hello(&theirs, hello).unwrap();
        assert!(matches!(handshake.readable(), Progress::Hello(_)));
        let mut daemon = handshake.welcome(1, 1).unwrap();
        let ends = handshake::receive_welcome(theirs, Duration::from_secs(5)).unwrap().map().unwrap();
        let session = Session::start_with(ends, Duration::from_millis(50)).unwrap();

        // So many that parts fill the ring: the cancel finds no room.
        let small: Vec<u32> = (0..6).map(|_| session.begin(&[1]).ok().unwrap().0).collect();
        let large = vec![2; 64 * 1024];
        assert!(matches!(session.begin(&large), Err(NotBegun::Failed(Error::TimedOut(_)))));
        assert_eq!(lock(&session.cancels).len(), 1, "the ring is full");
        let mut taken = |count: usize| -> Vec<Submission> {
            let next = || daemon.submissions.next().expect("nothing that an honest client does not do");
            std::iter::from_fn(next).take(count).collect()
        };
        assert_eq!(taken(8).len(), small.len());
        let (last, _) = session.begin(&[3]).ok().unwrap();
        let abandoned = Submission::Cancel { request_id: last - 1 };
        assert_eq!(taken(8), [abandoned, Submission::Submit { request_id: last, payload: vec![3] }]);
    }
}
