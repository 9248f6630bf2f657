//! How a session begins: one fixed message each way over a Unix stream socket, two descriptors with the answer.
//!
//! ```text
//! HELLO, 32 B, client to daemon           WELCOME or refusal, 64 B, daemon to client
//! 00 magic u32       "LLMD"               00 magic u32       "LLMD"
//! 04 abi_min u16     lowest major         04 kind u16        1 welcome, 2 refusal
//! 06 abi_max u16     highest major        06 abi_major u16   of the session; of the daemon in a refusal
//! 08 features u64    wanted               08 features u64    of those, what the daemon has
//! 10 submission_slots u32   0: default    10 boot_id u64
//! 14 completion_slots u32   0: default    18 session_id u64
//! 18 arena_bytes u32        0: default    20 submission_slots, completion_slots, arena_bytes u32
//! 1c reserved u32    0                    2c abi_minor u16, reserved u16
//!                                         30 refusal u32     0 in a welcome
//!                                         34 retry_after_ms u32
//!                                         38 reserved u64    0
//! ```
//! With a welcome travel the descriptors of `down` (read-only) and `up`, in this order. The daemon never receives
//! descriptors. Afterwards the same socket is doorbell and sign of life; see [`crate::doorbell`].
//!
//! The daemon's side is a state machine that never blocks: [`Handshake`]. The client's blocks up to a time-out:
//! [`connect`].

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::sockopt::{PeerCredentials as PeerCred, SendTimeout};
use nix::sys::socket::{
    self, AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr, getsockopt,
    recvmsg, sendmsg, setsockopt,
};
use nix::sys::time::{TimeVal, TimeValLike};

use crate::doorbell::SessionSocket;
use crate::layout::{ABI_MAJOR, ABI_MINOR, Geometry, MAGIC};
use crate::limits::HANDSHAKE_TIMEOUT;
use crate::segment::{self, Mapping};
use crate::session::{ClientSession, DaemonSession, Terms};

/// Bytes of a HELLO.
pub const HELLO_BYTES: usize = 32;
/// Bytes of a WELCOME or a refusal.
pub const ANSWER_BYTES: usize = 64;
/// Features this version has; a session gets those that both sides have.
pub const FEATURES: u64 = 0;

const KIND_WELCOME: u16 = 1;
const KIND_REFUSAL: u16 = 2;

/// Why the daemon takes no session. Stable numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[repr(u32)]
pub enum Refusal {
    /// The HELLO made no sense.
    #[error("the daemon did not understand the handshake")]
    BadHello = 1,
    /// No common major version.
    #[error("client and daemon share no version of the protocol")]
    Version = 2,
    /// This uid holds as many sessions as it may, or the daemon as many as it can.
    #[error("too many sessions are open")]
    TooManySessions = 3,
    /// This uid connects too often.
    #[error("too many connects in a short time")]
    TooManyConnects = 4,
    /// The daemon is about to end.
    #[error("the daemon is draining and takes no new sessions")]
    Draining = 5,
    /// The daemon has no memory or descriptors left for a session.
    #[error("the daemon is out of memory or descriptors")]
    OutOfResources = 6,
    /// The HELLO took too long.
    #[error("the handshake took too long")]
    TimedOut = 7,
}

impl Refusal {
    /// The refusal of a number; None for one of a later version.
    pub fn from_number(number: u32) -> Option<Self> {
        use Refusal::*;
        [BadHello, Version, TooManySessions, TooManyConnects, Draining, OutOfResources, TimedOut]
            .into_iter()
            .find(|r| *r as u32 == number)
    }
}

/// Who is at the other end, by the kernel's word, as of its connect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Process id, in the daemon's pid namespace.
    pub pid: i32,
    /// Effective user id.
    pub uid: u32,
    /// Effective group id.
    pub gid: u32,
}

/// What a client says first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hello {
    /// Lowest major version it speaks.
    pub abi_min: u16,
    /// Highest major version it speaks.
    pub abi_max: u16,
    /// Features it would use.
    pub features: u64,
    /// Submission slots it would like; 0 for the default.
    pub submission_slots: u32,
    /// Completion slots it would like; 0 for the default.
    pub completion_slots: u32,
    /// Arena bytes it would like; 0 for the default.
    pub arena_bytes: u32,
}

impl Default for Hello {
    /// This version, default sizes.
    fn default() -> Self {
        Self {
            abi_min: ABI_MAJOR,
            abi_max: ABI_MAJOR,
            features: FEATURES,
            submission_slots: 0,
            completion_slots: 0,
            arena_bytes: 0,
        }
    }
}

impl Hello {
    /// As it travels.
    pub fn to_bytes(self) -> [u8; HELLO_BYTES] {
        let mut b = [0; HELLO_BYTES];
        b[0x00..0x04].copy_from_slice(&MAGIC.to_le_bytes());
        b[0x04..0x06].copy_from_slice(&self.abi_min.to_le_bytes());
        b[0x06..0x08].copy_from_slice(&self.abi_max.to_le_bytes());
        b[0x08..0x10].copy_from_slice(&self.features.to_le_bytes());
        b[0x10..0x14].copy_from_slice(&self.submission_slots.to_le_bytes());
        b[0x14..0x18].copy_from_slice(&self.completion_slots.to_le_bytes());
        b[0x18..0x1c].copy_from_slice(&self.arena_bytes.to_le_bytes());
        b
    }

    /// Of bytes that may hold anything; the refusal to answer with where they make no HELLO for this daemon.
    pub fn from_bytes(b: &[u8; HELLO_BYTES]) -> Result<Self, Refusal> {
        let hello = Self {
            abi_min: u16_at(b, 0x04),
            abi_max: u16_at(b, 0x06),
            features: u64_at(b, 0x08),
            submission_slots: u32_at(b, 0x10),
            completion_slots: u32_at(b, 0x14),
            arena_bytes: u32_at(b, 0x18),
        };
        if u32_at(b, 0) != MAGIC || u32_at(b, 0x1c) != 0 || hello.abi_min > hello.abi_max {
            return Err(Refusal::BadHello);
        }
        if !(hello.abi_min..=hello.abi_max).contains(&ABI_MAJOR) {
            return Err(Refusal::Version);
        }
        Ok(hello)
    }
}

/// What the daemon answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    Welcome(Terms),
    Refused { number: u32, abi_major: u16, retry_after: Duration },
}

impl Answer {
    fn to_bytes(self) -> [u8; ANSWER_BYTES] {
        let mut b = [0; ANSWER_BYTES];
        b[0x00..0x04].copy_from_slice(&MAGIC.to_le_bytes());
        b[0x06..0x08].copy_from_slice(&ABI_MAJOR.to_le_bytes());
        match self {
            Self::Welcome(t) => {
                b[0x04..0x06].copy_from_slice(&KIND_WELCOME.to_le_bytes());
                b[0x08..0x10].copy_from_slice(&t.features.to_le_bytes());
                b[0x10..0x18].copy_from_slice(&t.boot_id.to_le_bytes());
                b[0x18..0x20].copy_from_slice(&t.session_id.to_le_bytes());
                b[0x20..0x24].copy_from_slice(&t.geometry.submission_slots().to_le_bytes());
                b[0x24..0x28].copy_from_slice(&t.geometry.completion_slots().to_le_bytes());
                b[0x28..0x2c].copy_from_slice(&t.geometry.arena_bytes().to_le_bytes());
                b[0x2c..0x2e].copy_from_slice(&t.abi_minor.to_le_bytes());
            }
            Self::Refused { number, abi_major, retry_after } => {
                b[0x04..0x06].copy_from_slice(&KIND_REFUSAL.to_le_bytes());
                b[0x06..0x08].copy_from_slice(&abi_major.to_le_bytes());
                b[0x30..0x34].copy_from_slice(&number.to_le_bytes());
                let ms = u32::try_from(retry_after.as_millis()).unwrap_or(u32::MAX);
                b[0x34..0x38].copy_from_slice(&ms.to_le_bytes());
            }
        }
        b
    }

    /// None where the bytes are no answer this version understands.
    fn from_bytes(b: &[u8; ANSWER_BYTES]) -> Option<Self> {
        if u32_at(b, 0) != MAGIC {
            return None;
        }
        let abi_major = u16_at(b, 0x06);
        match u16_at(b, 0x04) {
            KIND_WELCOME if abi_major == ABI_MAJOR => Some(Self::Welcome(Terms {
                abi_minor: u16_at(b, 0x2c),
                features: u64_at(b, 0x08),
                boot_id: u64_at(b, 0x10),
                session_id: u64_at(b, 0x18),
                geometry: Geometry::exact(u32_at(b, 0x20), u32_at(b, 0x24), u32_at(b, 0x28))?,
            })),
            KIND_REFUSAL => Some(Self::Refused {
                number: u32_at(b, 0x30),
                abi_major,
                retry_after: Duration::from_millis(u32_at(b, 0x34).into()),
            }),
            _ => None,
        }
    }
}

/// Where a handshake stands, as the daemon sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// Come back when the socket is readable, or when the deadline is over.
    Pending,
    /// The HELLO is here and makes sense: call [`Handshake::welcome`] or [`Handshake::refuse`].
    Hello(Hello),
    /// The HELLO makes no sense, or took too long: call [`Handshake::refuse`] with this, or drop it.
    Refuse(Refusal),
    /// The client is gone; drop the handshake.
    HungUp,
}

/// One handshake on the daemon's side. No call blocks.
#[derive(Debug)]
pub struct Handshake {
    stream: UnixStream,
    peer: Peer,
    deadline: Instant,
    hello: [u8; HELLO_BYTES],
    received: usize,
}

impl Handshake {
    /// Begins on an accepted connection: makes it non-blocking and asks the kernel who is there.
    pub fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        let cred = getsockopt(&stream, PeerCred)?;
        let peer = Peer { pid: cred.pid(), uid: cred.uid(), gid: cred.gid() };
        Ok(Self { stream, peer, deadline: Instant::now() + HANDSHAKE_TIMEOUT, hello: [0; HELLO_BYTES], received: 0 })
    }

    /// Who is there.
    pub fn peer(&self) -> Peer {
        self.peer
    }

    /// When it must be over; call [`Self::readable`] then too.
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Reads what has come. Reads exactly a HELLO: anything behind it is a doorbell.
    pub fn readable(&mut self) -> Progress {
        while self.received < HELLO_BYTES {
            let rest = &mut self.hello[self.received..];
            match socket::recv(self.stream.as_raw_fd(), rest, MsgFlags::MSG_DONTWAIT) {
                Ok(0) => return Progress::HungUp,
                Ok(n) => self.received += n,
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) if Instant::now() < self.deadline => return Progress::Pending,
                Err(Errno::EAGAIN) => return Progress::Refuse(Refusal::TimedOut),
                Err(_) => return Progress::HungUp,
            }
        }
        match Hello::from_bytes(&self.hello) {
            Ok(hello) => Progress::Hello(hello),
            Err(refusal) => Progress::Refuse(refusal),
        }
    }

    /// Makes the session's memory and hands it to the client. Where memory or descriptors run out the client is told
    /// [`Refusal::OutOfResources`].
    ///
    /// # Panics
    /// If [`Self::readable`] has not returned [`Progress::Hello`].
    pub fn welcome(self, boot_id: u64, session_id: u64) -> io::Result<DaemonSession> {
        assert!(self.received == HELLO_BYTES, "a welcome before the hello");
        let hello = Hello::from_bytes(&self.hello).expect("readable() returned it");
        let geometry = Geometry::negotiate(hello.submission_slots, hello.completion_slots, hello.arena_bytes);
        let features = hello.features & FEATURES;
        let terms = Terms { abi_minor: ABI_MINOR, features, boot_id, session_id, geometry };
        let made = segment::create_down(geometry.down_bytes())
            .and_then(|down| Ok((down, segment::create_up(geometry.up_bytes())?)));
        let ((down, down_fd), (up, up_fd)) = match made {
            Ok(made) => made,
            Err(e) => {
                self.refuse(Refusal::OutOfResources, Duration::from_secs(1));
                return Err(e);
            }
        };
        // The header is complete before the client can see it.
        let socket = SessionSocket::new(self.stream);
        let session = DaemonSession::new(terms, socket, down, up);
        let fds = [down_fd.as_raw_fd(), up_fd.as_raw_fd()];
        send_answer(session.socket.as_fd(), Answer::Welcome(terms), &fds)?;
        Ok(session)
    }

    /// Says no and hangs up.
    pub fn refuse(self, refusal: Refusal, retry_after: Duration) {
        let answer = Answer::Refused { number: refusal as u32, abi_major: ABI_MAJOR, retry_after };
        // Whether it arrives is the client's concern.
        let _ = send_answer(self.stream.as_fd(), answer, &[]);
    }
}

impl AsFd for Handshake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// Sends an answer whole or not at all: the buffer of a connection on which nothing was sent yet takes 64 bytes.
fn send_answer(socket: BorrowedFd<'_>, answer: Answer, fds: &[RawFd]) -> io::Result<()> {
    let bytes = answer.to_bytes();
    let rights = [ControlMessage::ScmRights(fds)];
    let control: &[ControlMessage] = if fds.is_empty() { &[] } else { &rights };
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
    let sent = loop {
        match sendmsg::<()>(socket.as_raw_fd(), &[IoSlice::new(&bytes)], control, flags, None) {
            Err(Errno::EINTR) => {}
            other => break other?,
        }
    };
    if sent == ANSWER_BYTES { Ok(()) } else { Err(io::Error::new(io::ErrorKind::WriteZero, "half an answer")) }
}

/// Why there is no session.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// Nothing listens there: no such socket, or nobody behind it.
    #[error("nothing listens")]
    NotRunning(#[source] io::Error),
    /// The socket belongs to others.
    #[error("not allowed to connect")]
    Denied(#[source] io::Error),
    /// The daemon did not answer in time.
    #[error("no answer within {0:?}")]
    TimedOut(Duration),
    /// The daemon said no.
    #[error("{refusal}")]
    Refused {
        /// Why.
        refusal: Refusal,
        /// When it may be worth another try; zero where that makes no sense.
        retry_after: Duration,
        /// The daemon's major version.
        abi_major: u16,
    },
    /// What listens there is no llmd, or one this version does not understand.
    #[error("what listens there does not speak this protocol: {0}")]
    Protocol(&'static str),
    /// The system refused something.
    #[error("the system refused")]
    System(#[from] io::Error),
}

/// A welcome received, its memory not yet mapped.
#[derive(Debug)]
pub struct Welcome {
    /// What was agreed.
    pub terms: Terms,
    /// The connection.
    pub stream: UnixStream,
    /// Written by the daemon; opened read-only.
    pub down: OwnedFd,
    /// Written by the client.
    pub up: OwnedFd,
}

impl Welcome {
    /// Maps the memory, after checking its sizes and seals, and closes the descriptors.
    pub fn map(self) -> io::Result<ClientSession> {
        let Self { terms, stream, down, up } = self;
        let g = terms.geometry;
        let down = Mapping::of_received(&down, g.down_bytes(), false)?;
        let up = Mapping::of_received(&up, g.up_bytes(), true)?;
        ClientSession::new(terms, SessionSocket::new(stream), down, up)
    }
}

/// Connects to the daemon's socket and says hello; blocks up to `timeout`.
pub fn connect(path: &Path, hello: Hello, timeout: Duration) -> Result<Welcome, ConnectError> {
    let fd =
        socket::socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).map_err(io::Error::from)?;
    // It also bounds connect, which waits while the listener's queue is full.
    setsockopt(&fd, SendTimeout, &TimeVal::milliseconds(timeout.as_millis().clamp(1, 1 << 30) as i64))
        .map_err(io::Error::from)?;
    let address = UnixAddr::new(path).map_err(io::Error::from)?;
    let connected = loop {
        match socket::connect(fd.as_raw_fd(), &address) {
            Err(Errno::EINTR) => {}
            other => break other,
        }
    };
    match connected {
        Ok(()) => {}
        Err(e @ (Errno::ENOENT | Errno::ECONNREFUSED)) => {
            return Err(ConnectError::NotRunning(e.into()));
        }
        Err(e @ (Errno::EACCES | Errno::EPERM)) => return Err(ConnectError::Denied(e.into())),
        Err(Errno::EAGAIN) => return Err(ConnectError::TimedOut(timeout)),
        Err(e) => return Err(io::Error::from(e).into()),
    }
    hello_and_answer(UnixStream::from(fd), hello, timeout)
}

/// Says hello on a connection that exists already, as [`connect`].
pub fn hello_and_answer(stream: UnixStream, hello: Hello, timeout: Duration) -> Result<Welcome, ConnectError> {
    send_hello(&stream, hello)?;
    receive_welcome(stream, timeout)
}

/// The first half of [`hello_and_answer`].
pub fn send_hello(stream: &UnixStream, hello: Hello) -> Result<(), ConnectError> {
    match socket::send(stream.as_raw_fd(), &hello.to_bytes(), MsgFlags::MSG_NOSIGNAL) {
        Ok(HELLO_BYTES) => Ok(()),
        Ok(_) => Err(ConnectError::Protocol("half a hello was sent")),
        // A daemon that refuses before it reads has answered already; the answer is still to be read.
        Err(Errno::EPIPE | Errno::ECONNRESET) => Ok(()),
        Err(e) => Err(io::Error::from(e).into()),
    }
}

/// The second half of [`hello_and_answer`].
pub fn receive_welcome(stream: UnixStream, timeout: Duration) -> Result<Welcome, ConnectError> {
    let (bytes, fds) = receive_answer(&stream, timeout)?;
    match Answer::from_bytes(&bytes).ok_or(ConnectError::Protocol("the answer makes no sense"))? {
        Answer::Refused { number, abi_major, retry_after } => {
            let refusal = Refusal::from_number(number);
            let refusal = refusal.ok_or(ConnectError::Protocol("refused for a reason of a later version"))?;
            Err(ConnectError::Refused { refusal, retry_after, abi_major })
        }
        Answer::Welcome(terms) => {
            let [down, up] = <[OwnedFd; 2]>::try_from(fds)
                .map_err(|_| ConnectError::Protocol("a welcome comes with two descriptors"))?;
            Ok(Welcome { terms, stream, down, up })
        }
    }
}

/// Reads exactly one answer, and the descriptors that come with it.
fn receive_answer(stream: &UnixStream, timeout: Duration) -> Result<([u8; ANSWER_BYTES], Vec<OwnedFd>), ConnectError> {
    let deadline = Instant::now() + timeout;
    let mut bytes = [0; ANSWER_BYTES];
    let (mut received, mut fds) = (0, Vec::new());
    while received < ANSWER_BYTES {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ConnectError::TimedOut(timeout));
        }
        let left = PollTimeout::try_from(left.as_micros().div_ceil(1000)).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(stream.as_fd(), PollFlags::POLLIN)], left) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(e) => return Err(io::Error::from(e).into()),
        }
        let mut control = nix::cmsg_space!([RawFd; 2]);
        let mut iov = [IoSliceMut::new(&mut bytes[received..])];
        let flags = MsgFlags::MSG_CMSG_CLOEXEC | MsgFlags::MSG_DONTWAIT;
        match recvmsg::<()>(stream.as_raw_fd(), &mut iov, Some(&mut control), flags) {
            Ok(message) => {
                for c in message.cmsgs().map_err(io::Error::from)? {
                    if let ControlMessageOwned::ScmRights(raw) = c {
                        // SAFETY: the kernel has just put these descriptors into this process; nobody else owns them.
                        fds.extend(raw.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
                    }
                }
                match message.bytes {
                    0 => return Err(ConnectError::Protocol("it hung up during the handshake")),
                    n => received += n,
                }
            }
            Err(Errno::EINTR | Errno::EAGAIN) => {}
            Err(Errno::ECONNRESET) => {
                return Err(ConnectError::Protocol("it hung up during the handshake"));
            }
            Err(e) => return Err(io::Error::from(e).into()),
        }
    }
    Ok((bytes, fds))
}

fn u16_at(b: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([b[at], b[at + 1]])
}

fn u32_at(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

fn u64_at(b: &[u8], at: usize) -> u64 {
    u64::from(u32_at(b, at)) | u64::from(u32_at(b, at + 4)) << 32
}

#[cfg(test)]
mod tests;
