//! The sessions thread: accepts, shakes hands, drains submission rings, notices hang-ups.
//!
//! Everything it waits for is one epoll set, and nothing it does blocks: a handshake that dawdles, a doorbell that never
//! stops, a ring that is always full cost their own session its turn and nobody else anything. A session that breaks the
//! protocol is closed and the log says why, once.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use interprocess::local_socket::traits::Listener as _;
use interprocess::os::unix::uds_local_socket::Listener;
use llmd_protocol::handshake::{Handshake, Progress, Refused};
use llmd_protocol::message::Reject;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::engine::Event;
use crate::intake::{Job, Refusal};
use crate::metrics::Metrics;
use crate::sessions::session::{Doorbell, Session, Taken, Turn};
use crate::sessions::{Peer, SessionKey, SessionShared, SessionTable};

/// Connections accepted before sessions have their turn again.
const ACCEPTS_PER_TURN: usize = 16;
/// Handshakes under way at once; further connections wait in the listener's backlog.
const HANDSHAKES_MAX: usize = 256;
/// How long the listener rests when descriptors have run out.
const EMFILE_REST: Duration = Duration::from_millis(100);

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
    /// To the engine.
    pub events: mpsc::SyncSender<Event>,
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

/// Binds `path`, replacing the socket file of a daemon that is no longer there.
pub fn bind(path: &Path, mode: u32) -> io::Result<UnixListener> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    match UnixStream::connect(path) {
        Ok(_) => {
            return Err(io::Error::new(io::ErrorKind::AddrInUse, "another daemon is serving on this socket"));
        }
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => std::fs::remove_file(path)?,
        Err(_) => {}
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
    Ok(listener)
}

/// Starts the thread on a listening socket, our own or one that systemd handed in.
pub fn spawn(listener: UnixListener, limits: SessionLimits, outlets: Outlets) -> io::Result<SessionsHandle> {
    listener.set_nonblocking(true)?;
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
    epoll.add(&listener, EpollEvent::new(EpollFlags::EPOLLIN, TOKEN_LISTENER))?;
    let stop = Arc::new(EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?);
    epoll.add(&*stop, EpollEvent::new(EpollFlags::EPOLLIN, TOKEN_STOP))?;
    let sessions = Sessions {
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
    };
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
}

impl Sessions {
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
            for token in std::mem::take(&mut self.ready) {
                self.turn(token);
            }
            self.expire_handshakes();
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
            if self.handshakes.len() >= HANDSHAKES_MAX {
                self.pause_accepting(EMFILE_REST);
                return;
            }
            match self.listener.accept() {
                Ok(stream) => self.begin_handshake(UnixStream::from(std::os::fd::OwnedFd::from(stream))),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if matches!(error.raw_os_error(), Some(libc_emfile) if is_exhausted(libc_emfile)) => {
                    log::warn!("out of file descriptors: a connection was closed unserved ({error})");
                    self.spare = None;
                    drop(self.listener.accept());
                    self.spare = File::open("/dev/null").ok();
                    self.pause_accepting(EMFILE_REST);
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
        let handshake = match Handshake::new(stream, token) {
            Ok(handshake) => handshake,
            Err(error) => return log::debug!("a connection failed before its handshake: {error}"),
        };
        let interest = EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLRDHUP, token);
        if let Err(error) = self.epoll.add(handshake.socket(), interest) {
            return log::warn!("cannot poll a new connection: {error}");
        }
        self.handshakes.insert(token, handshake);
    }

    fn socket_event(&mut self, token: u64) {
        if let Some(session) = self.open.get_mut(&token) {
            match session.read_doorbell() {
                Doorbell::HungUp => self.close(token, None),
                Doorbell::Rang => self.turn(token),
                Doorbell::Silent => {}
            }
        } else if self.handshakes.contains_key(&token) {
            self.shake(token);
        }
    }

    /// Moves a handshake on; on its end the connection becomes a session, or is gone.
    fn shake(&mut self, token: u64) {
        let Some(mut handshake) = self.handshakes.remove(&token) else { return };
        let (table, limits) = (&self.outlets.table, self.limits);
        let admit = |peer: Peer| {
            if table.len() >= limits.sessions_max {
                Err(Refused::TooManySessions)
            } else if table.of_uid(peer.uid) >= limits.sessions_per_uid_max {
                Err(Refused::TooManySessionsOfUser)
            } else {
                Ok(())
            }
        };
        match handshake.progress(|credentials| admit(Peer { uid: credentials.uid, pid: credentials.pid })) {
            Progress::Waiting => {
                self.handshakes.insert(token, handshake);
            }
            Progress::Done(done) => self.open(token, done),
            Progress::Failed(failure) => {
                log::info!("a connection ended in its handshake: {failure}");
            }
        }
    }

}

fn is_exhausted(errno: i32) -> bool {
    use nix::errno::Errno;
    matches!(Errno::from_raw(errno), Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM | Errno::ENOBUFS)
}
