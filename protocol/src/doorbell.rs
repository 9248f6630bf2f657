//! The session's socket after the handshake: doorbell and sign of life.
//!
//! A byte in either direction says "look at your ring"; what it holds means nothing. The end of the stream says that the
//! peer is gone. A socket and not an eventfd: an eventfd's description is shared, so a client could clear O_NONBLOCK, fill
//! it up and block the daemon's write for ever; MSG_DONTWAIT belongs to our call and cannot be taken back.
//!
//! Who needs a doorbell is decided in shared memory; see [`crate::ring`].

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, recv, send};

/// One end of a session's socket; clones share it. The connection ends when the last clone is dropped, or at once with
/// [`Self::hang_up`].
#[derive(Debug, Clone)]
pub struct SessionSocket {
    stream: Arc<UnixStream>,
}

/// What became of a doorbell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rang {
    /// It is on its way.
    Sent,
    /// So many are unread that no more fit: the peer will look anyway.
    AlreadyPending,
    /// The peer is gone.
    HungUp,
}

/// What [`SessionSocket::drain`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Drained {
    /// Doorbells taken out of the socket.
    pub doorbells: usize,
    /// The peer is gone.
    pub hung_up: bool,
}

impl SessionSocket {
    /// The socket of a finished handshake.
    pub fn new(stream: UnixStream) -> Self {
        Self { stream: Arc::new(stream) }
    }

    /// Sends a doorbell. Never blocks, never raises SIGPIPE.
    pub fn ring(&self) -> Rang {
        loop {
            return match send(self.stream.as_raw_fd(), &[1], MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL) {
                Ok(_) => Rang::Sent,
                Err(Errno::EINTR) => continue,
                Err(Errno::EAGAIN | Errno::ENOBUFS | Errno::ENOMEM) => Rang::AlreadyPending,
                Err(_) => Rang::HungUp,
            };
        }
    }

    /// Takes waiting doorbells out. Never blocks; takes a bounded number, the rest stays readable for poll.
    pub fn drain(&self) -> Drained {
        let mut buffer = [0; 256];
        loop {
            return match recv(self.stream.as_raw_fd(), &mut buffer, MsgFlags::MSG_DONTWAIT) {
                Ok(0) => Drained { doorbells: 0, hung_up: true },
                Ok(doorbells) => Drained { doorbells, hung_up: false },
                Err(Errno::EINTR) => continue,
                Err(Errno::EAGAIN) => Drained { doorbells: 0, hung_up: false },
                Err(_) => Drained { doorbells: 0, hung_up: true },
            };
        }
    }

    /// Sleeps until the socket has something to say or `timeout` is over (None: for ever), then drains it.
    pub fn wait(&self, timeout: Option<Duration>) -> io::Result<Drained> {
        let deadline = timeout.map(|t| Instant::now() + t);
        loop {
            let left = match deadline {
                None => PollTimeout::NONE,
                // Up to the next millisecond, so that a wait for less does not become a busy loop.
                Some(d) => {
                    let left = d.saturating_duration_since(Instant::now());
                    PollTimeout::try_from(left.as_micros().div_ceil(1000)).unwrap_or(PollTimeout::MAX)
                }
            };
            match poll(&mut [PollFd::new(self.stream.as_fd(), PollFlags::POLLIN)], left) {
                Ok(0) => {
                    return Ok(Drained { doorbells: 0, hung_up: false });
                }
                Ok(_) => return Ok(self.drain()),
                Err(Errno::EINTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Makes this side's next [`Self::drain`] say that the peer is gone, without telling the peer: so one thread asks the
    /// thread that polls the socket to end the session, and that one still has a word to say first.
    pub fn stop_listening(&self) {
        // An error means that it has ended already.
        let _ = self.stream.shutdown(std::net::Shutdown::Read);
    }

    /// Ends the connection for both sides now, whoever else holds a clone.
    pub fn hang_up(&self) {
        // An error means that it has ended already.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }
}

impl AsFd for SessionSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_that_never_reads_cannot_block_the_bell() {
        let (a, b) = UnixStream::pair().unwrap();
        let (a, b) = (SessionSocket::new(a), SessionSocket::new(b));
        assert_eq!(a.ring(), Rang::Sent);
        let full = (0..1_000_000).any(|_| a.ring() == Rang::AlreadyPending);
        assert!(full, "a socket's buffer is finite");
        assert!(b.drain().doorbells > 0);
        b.hang_up();
        assert_eq!(a.ring(), Rang::HungUp);
        let begun = Instant::now();
        assert!(a.wait(Some(Duration::from_secs(5))).unwrap().hung_up);
        assert!(begun.elapsed() < Duration::from_secs(1));
    }

    #[test]
    fn who_stops_listening_hears_the_end_and_the_peer_does_not() {
        let (a, b) = UnixStream::pair().unwrap();
        let (a, b) = (SessionSocket::new(a), SessionSocket::new(b));
        assert_eq!(b.ring(), Rang::Sent);
        a.stop_listening();
        assert_eq!(b.ring(), Rang::HungUp, "the peer cannot put the end off with further doorbells");
        assert_eq!(a.drain(), Drained { doorbells: 1, hung_up: false });
        assert!(a.drain().hung_up);
        assert!(!b.drain().hung_up);
        assert_eq!(a.ring(), Rang::Sent);
        a.hang_up();
        assert_eq!(b.drain(), Drained { doorbells: 1, hung_up: false });
        assert!(b.drain().hung_up);
    }

    #[test]
    fn a_wait_ends_in_time() {
        let (a, _b) = UnixStream::pair().unwrap();
        let begun = Instant::now();
        let drained = SessionSocket::new(a).wait(Some(Duration::from_micros(1500))).unwrap();
        assert_eq!(drained, Drained { doorbells: 0, hung_up: false });
        assert!(begun.elapsed() >= Duration::from_micros(1500));
    }
}
