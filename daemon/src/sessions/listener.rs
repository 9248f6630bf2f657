//! The sessions thread: accepts, shakes hands, drains submission rings, notices hang-ups.
//!
//! Everything it waits for is one epoll set, and nothing it does blocks: a handshake that dawdles, a doorbell that never
//! stops, a ring that is always full cost their own session its turn and nobody else anything. A session that breaks the
//! protocol is closed and the log says why, once.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use interprocess::local_socket::traits::Listener as _;
use interprocess::os::unix::uds_local_socket::Listener;
use llmd_protocol::handshake::{Handshake, Peer, Progress, Refusal as Refused};
use llmd_protocol::layout::SessionState;
use llmd_protocol::limits::{HANDSHAKE_TIMEOUT, HANDSHAKES_OPEN_MAX};
use llmd_protocol::message::Reject;
use llmd_protocol::session::DaemonSession;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::metrics::Metrics;
use crate::sessions::connects::{Complaints, ConnectRate};
use crate::sessions::session::{Session, Taken, Turn};
use crate::sessions::{Arrival, Job, Opened, Refusal, SessionKey, SessionShared, SessionTable, Unread, random};

/// Connections accepted before sessions have their turn again.
const ACCEPTS_PER_TURN: usize = 16;
/// Handshakes under way at once; a further one takes the place of one that dawdles, or waits in the listener's backlog.
const HANDSHAKES_MAX: usize = HANDSHAKES_OPEN_MAX;
/// How old a handshake is before another may take its place. An honest client says HELLO at once.
const DAWDLING: Duration = Duration::from_millis(100);
/// How long the listener rests when descriptors or places for handshakes have run out.
const ACCEPT_REST: Duration = Duration::from_millis(100);

/// When a refused client may try again.
const RETRY_AFTER: Duration = Duration::from_secs(1);

const TOKEN_LISTENER: u64 = u64::MAX;
const TOKEN_STOP: u64 = u64::MAX - 1;

/// Bounds on who may connect.
#[derive(Debug, Clone, Copy)]
pub struct SessionLimits {
    /// Sessions of all users.
    pub sessions_max: usize,
    /// Sessions of one user.
    pub sessions_per_uid_max: usize,
    /// Requests of one session in flight at once.
    pub requests_per_session_max: u32,
}

/// Where the thread sends what it finds.
pub struct Outlets {
    /// To the engine, which never waits for this thread; so a wait in here is for a step at most.
    pub arrivals: Box<dyn Fn(Arrival) + Send>,
    /// To the intake's workers.
    pub jobs: mpsc::SyncSender<Job>,
    /// For `llmctl status`.
    pub table: Arc<SessionTable>,
    /// For operators.
    pub metrics: Arc<Metrics>,
    /// Set while the daemon drains: requests are refused here.
    pub draining: Arc<AtomicBool>,
}

/// Stops the thread.
pub struct SessionsHandle {
    stop: Arc<EventFd>,
    thread: JoinHandle<()>,
}

impl SessionsHandle {
    /// Closes every session and waits for the thread.
    pub fn stop(self) {
        // An eventfd write of 1 can only fail when the counter is full, and then the thread is awake anyway.
        let _ = self.stop.write(1);
        let _ = self.thread.join();
    }
}

/// Starts the thread on a listening socket, our own or one that systemd handed in.
pub fn spawn(listener: UnixListener, limits: SessionLimits, outlets: Outlets) -> io::Result<SessionsHandle> {
    let stop = Arc::new(EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?);
    let sessions = Sessions::new(listener, limits, outlets, &stop)?;
    let thread = std::thread::Builder::new().name("llmd-sessions".into()).spawn(move || sessions.run())?;
    Ok(SessionsHandle { stop, thread })
}

struct Sessions {
    epoll: Epoll,
    listener: Listener,
    /// Held so that one more connection can be accepted, and closed, when descriptors have run out: otherwise the
    /// listener would stay readable and epoll would spin.
    spare: Option<File>,
    limits: SessionLimits,
    outlets: Outlets,
    handshakes: HashMap<u64, Handshake>,
    open: HashMap<u64, Session>,
    /// Sessions whose last turn left something in the ring.
    ready: Vec<u64>,
    next_key: u64,
    accept_paused_until: Option<Instant>,
    /// Descriptors have run out, and the log has said so.
    exhausted: bool,
    connects: ConnectRate,
    complaints: Complaints,
    unread: Arc<Unread>,
    /// Drawn at random: tells clients one run of the daemon from another.
    boot_id: u64,
}

impl Sessions {
    fn new(listener: UnixListener, limits: SessionLimits, outlets: Outlets, stop: &EventFd) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        epoll.add(&listener, EpollEvent::new(EpollFlags::EPOLLIN, TOKEN_LISTENER))?;
        epoll.add(stop, EpollEvent::new(EpollFlags::EPOLLIN, TOKEN_STOP))?;
        Ok(Self {
            epoll,
            listener: Listener::from(listener),
            spare: File::open("/dev/null").ok(),
            limits,
            outlets,
            handshakes: HashMap::new(),
            open: HashMap::new(),
            ready: Vec::new(),
            next_key: 1,
            accept_paused_until: None,
            exhausted: false,
            connects: ConnectRate::default(),
            complaints: Complaints::default(),
            unread: Arc::default(),
            boot_id: random(),
        })
    }

    fn run(mut self) {
        let mut events = [EpollEvent::empty(); 128];
        loop {
            let n = match self.epoll.wait(&mut events, self.timeout()) {
                Ok(n) => n,
                Err(nix::errno::Errno::EINTR) => 0,
                Err(error) => {
                    // Without epoll there is no way to serve; the daemon ends and is restarted.
                    log::error!("epoll failed: {error}");
                    std::process::abort();
                }
            };
            for event in &events[..n] {
                match event.data() {
                    TOKEN_STOP => return self.close_all(),
                    TOKEN_LISTENER => self.accept(),
                    token => self.socket_event(token),
                }
            }
            self.turns();
            self.expire();
        }
    }

    /// A turn for each session whose last one left something.
    fn turns(&mut self) {
        for token in std::mem::take(&mut self.ready) {
            if let Some(session) = self.open.get_mut(&token) {
                session.queued = false;
            }
            self.turn(token);
        }
    }

    fn timeout(&self) -> EpollTimeout {
        if !self.ready.is_empty() {
            return EpollTimeout::ZERO;
        }
        let deadlines = self.handshakes.values().map(Handshake::deadline);
        let Some(next) = deadlines.chain(self.accept_paused_until).min() else { return EpollTimeout::NONE };
        // Rounded up, so that the deadline has passed when we wake.
        let wait = next.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
        EpollTimeout::try_from(wait).unwrap_or(EpollTimeout::MAX)
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPTS_PER_TURN {
            if self.handshakes.len() >= HANDSHAKES_MAX && !self.make_room() {
                self.pause_accepting(ACCEPT_REST);
                return;
            }
            match self.listener.accept() {
                Ok(stream) => {
                    self.exhausted = false;
                    self.begin_handshake(UnixStream::from(OwnedFd::from(stream)));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.raw_os_error().is_some_and(is_exhausted) => {
                    if !std::mem::replace(&mut self.exhausted, true) {
                        log::warn!("connections are closed unserved for as long as this lasts: {error}");
                    }
                    self.spare = None;
                    drop(self.listener.accept());
                    self.spare = File::open("/dev/null").ok();
                    self.pause_accepting(ACCEPT_REST);
                    return;
                }
                // The peer went away between connect and accept, or a signal came: the next one, please.
                Err(_) => {}
            }
        }
    }

    fn pause_accepting(&mut self, rest: Duration) {
        if self.epoll.delete(self.listener.as_fd()).is_ok() {
            self.accept_paused_until = Some(Instant::now() + rest);
        }
    }

    fn begin_handshake(&mut self, stream: UnixStream) {
        let token = self.next_key;
        self.next_key += 1;
        let handshake = match Handshake::new(stream) {
            Ok(handshake) => handshake,
            Err(error) => return log::debug!("a connection failed before its handshake: {error}"),
        };
        if !self.connects.allow(handshake.peer().uid, Instant::now()) {
            return self.turn_away(handshake, Refused::TooManyConnects);
        }
        let interest = EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLRDHUP, token);
        if let Err(error) = self.epoll.add(handshake.as_fd(), interest) {
            return log::warn!("cannot poll a new connection: {error}");
        }
        self.handshakes.insert(token, handshake);
    }

    fn socket_event(&mut self, token: u64) {
        if let Some(session) = self.open.get_mut(&token) {
            if session.read_doorbells() {
                if !session.queued {
                    self.turn(token);
                }
            } else {
                self.close(token, None);
            }
        } else if self.handshakes.contains_key(&token) {
            self.shake(token);
        }
    }

    /// Moves a handshake on; on its end the connection becomes a session, or is gone.
    fn shake(&mut self, token: u64) {
        let Some(handshake) = self.handshakes.get_mut(&token) else { return };
        let progress = handshake.readable();
        if progress == Progress::Pending {
            return;
        }
        let handshake = self.handshakes.remove(&token).expect("just looked at");
        match progress {
            Progress::Hello(_) => match self.admits(handshake.peer()) {
                Ok(()) => self.open(token, handshake),
                Err(refusal) => self.turn_away(handshake, refusal),
            },
            Progress::Refuse(refusal) => self.turn_away(handshake, refusal),
            Progress::Pending | Progress::HungUp => self.forget(handshake.as_fd()),
        }
    }

    /// Says no, to the client and in the log.
    fn turn_away(&mut self, handshake: Handshake, refusal: Refused) {
        self.complain(handshake.peer(), &refusal);
        self.forget(handshake.as_fd());
        handshake.refuse(refusal, RETRY_AFTER);
    }

    fn complain(&mut self, Peer { uid, pid, .. }: Peer, why: &dyn std::fmt::Display) {
        match self.complaints.due(uid, Instant::now()) {
            None => {}
            Some(0) => log::warn!("no session for uid {uid}, pid {pid}: {why}"),
            Some(unsaid) => log::warn!("no session for uid {uid}, pid {pid}: {why} (and {unsaid} more before)"),
        }
    }

    /// Ends the oldest handshake of the user that has most of them open, if it dawdles. False: there is none such.
    fn make_room(&mut self) -> bool {
        let mut by_uid: HashMap<u32, (usize, u64)> = HashMap::new();
        for (&token, handshake) in &self.handshakes {
            let (count, oldest) = by_uid.entry(handshake.peer().uid).or_insert((0, token));
            *count += 1;
            *oldest = token.min(*oldest);
        }
        let Some((_, token)) = by_uid.into_values().max() else { return false };
        let age = HANDSHAKE_TIMEOUT.saturating_sub(self.handshakes[&token].deadline().duration_since(Instant::now()));
        if age < DAWDLING {
            return false;
        }
        // Its HELLO may have come since it was last looked at.
        self.shake(token);
        if let Some(handshake) = self.handshakes.remove(&token) {
            self.turn_away(handshake, Refused::TimedOut);
        }
        true
    }

    fn admits(&mut self, peer: Peer) -> Result<(), Refused> {
        if self.outlets.draining.load(Ordering::Relaxed) {
            return Err(Refused::Draining);
        }
        let table = &self.outlets.table;
        if table.len() >= self.limits.sessions_max || table.of_uid(peer.uid) >= self.limits.sessions_per_uid_max {
            return Err(Refused::TooManySessions);
        }
        Ok(())
    }

    fn open(&mut self, token: u64, handshake: Handshake) {
        let peer = handshake.peer();
        let DaemonSession { socket, submissions, completions, doorbell, .. } =
            match handshake.welcome(self.boot_id, token) {
                Ok(session) => session,
                Err(error) => return self.complain(peer, &error),
            };
        let shared = Arc::new(SessionShared::new(SessionKey(token), peer));
        self.outlets.table.insert(Arc::clone(&shared));
        self.outlets.metrics.sessions(self.outlets.table.len());
        let opened = Opened { shared: Arc::clone(&shared), completions, doorbell, socket: socket.clone() };
        self.send(Arrival::Opened(Box::new(opened)));
        self.open.insert(token, Session::new(shared, socket, submissions));
        log::debug!("session {token}: uid {}, pid {}", peer.uid, peer.pid);
        // What the client submitted at once was announced by a doorbell that may have been read with the HELLO's event.
        self.turn(token);
    }

    /// Lets a session have its turn at its ring.
    fn turn(&mut self, token: u64) {
        let Some(session) = self.open.get_mut(&token) else { return };
        let (outlets, limits, unread) = (&self.outlets, &self.limits, &self.unread);
        match session.turn(|shared, taken| outlets.pass_on(shared, taken, limits, unread)) {
            Ok(Turn::Parked) => {}
            Ok(Turn::More) => {
                // Once only, or a client that also rings its doorbell would have ever more turns.
                if !std::mem::replace(&mut session.queued, true) {
                    self.ready.push(token);
                }
            }
            Err(violation) => self.close(token, Some(&violation.to_string())),
        }
    }

    /// Ends a session: the client has gone, or it broke the protocol, by our own finding or the engine's. This is the one
    /// place where that is logged.
    fn close(&mut self, token: u64, violation: Option<&str>) {
        let Some(mut session) = self.open.remove(&token) else { return };
        self.forget(session.socket().as_fd());
        session.cancel_all();
        let Peer { uid, pid, .. } = session.shared.peer;
        match violation.or_else(|| session.shared.condemned()) {
            Some(why) => {
                // Before the hang-up, so that the client does not take it for a crash.
                session.set_state(SessionState::Closed);
                log::warn!("session {token} (uid {uid}, pid {pid}) closed: {why}");
            }
            None => log::debug!("session {token} (uid {uid}, pid {pid}) is gone"),
        }
        session.hang_up();
        self.outlets.table.remove(session.shared.key);
        self.outlets.metrics.sessions(self.outlets.table.len());
        self.send(Arrival::Closed { session: session.shared.key });
    }

    fn forget(&self, socket: BorrowedFd<'_>) {
        // An error says that it is not in the set, which is what is wanted.
        let _ = self.epoll.delete(socket);
    }

    fn send(&self, arrival: Arrival) {
        (self.outlets.arrivals)(arrival);
    }

    fn close_all(mut self) {
        for (_, session) in self.open.drain() {
            session.set_state(SessionState::Closed);
            session.hang_up();
            self.outlets.table.remove(session.shared.key);
        }
    }

    /// Ends handshakes whose time is up and takes connections again after a rest.
    fn expire(&mut self) {
        let now = Instant::now();
        let late: Vec<u64> = self.handshakes.iter().filter(|(_, h)| h.deadline() <= now).map(|(&t, _)| t).collect();
        for token in late {
            self.shake(token);
        }
        if self.accept_paused_until.is_some_and(|until| until <= now) {
            let interest = EpollEvent::new(EpollFlags::EPOLLIN, TOKEN_LISTENER);
            match self.epoll.add(self.listener.as_fd(), interest) {
                Ok(()) => self.accept_paused_until = None,
                Err(_) => self.accept_paused_until = Some(now + ACCEPT_REST),
            }
        }
    }
}

impl Outlets {
    /// Sends a submission on its way, or answers it at once.
    fn pass_on(&self, session: &Arc<SessionShared>, taken: Taken, limits: &SessionLimits, unread: &Arc<Unread>) {
        let (request, payload, cancelled) = match taken {
            Taken::Cancel { request } => {
                (self.arrivals)(Arrival::Cancelled { session: session.key, request });
                return;
            }
            Taken::Submit { request, payload, cancelled } => (request, payload, cancelled),
        };
        let in_flight = session.in_flight.fetch_add(1, Ordering::Relaxed);
        let refuse = |reject, detail: String| {
            let refusal = Refusal { reject, detail };
            (self.arrivals)(Arrival::Refused { session: session.key, request, refusal });
        };
        if self.draining.load(Ordering::Relaxed) {
            return refuse(Reject::Draining, "the daemon is draining; try again once it has restarted".into());
        }
        if in_flight >= limits.requests_per_session_max {
            let max = limits.requests_per_session_max;
            return refuse(Reject::Busy, format!("{max} requests of this session are in flight already"));
        }
        let Some(held) = unread.hold(session, payload.len()) else {
            return refuse(Reject::Busy, "too many bytes of requests are waiting to be read".into());
        };
        let job = Job { session: Arc::clone(session), request, payload, received: Instant::now(), cancelled, held };
        if self.jobs.try_send(job).is_err() {
            refuse(Reject::Busy, "too many requests are waiting to be read".into());
        }
    }
}

fn is_exhausted(errno: i32) -> bool {
    use nix::errno::Errno;
    matches!(Errno::from_raw(errno), Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM | Errno::ENOBUFS)
}

#[cfg(test)]
mod tests;
