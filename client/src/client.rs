//! Where the daemon is, and the session with it.

use std::borrow::Borrow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use llmd_protocol::handshake::{self, Hello};
use llmd_protocol::message::GenerateRequest;

use crate::error::Error;
use crate::generation::Generation;
use crate::session::{NotBegun, Session, SessionHandle};

/// Where a system service listens.
const SYSTEM_SOCKET: &str = "/run/llmd/llmd.sock";

/// How to connect.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Options {
    /// How long to wait for the daemon's answer; a daemon started by this very connect first loads its model.
    pub connect_timeout: Duration,
    /// Submission slots to ask for; 0 for the default of 64.
    pub submission_slots: u32,
    /// Completion slots to ask for; 0 for the default of 1024. A quarter as many requests may be in flight at once.
    pub completion_slots: u32,
    /// Bytes to ask for in which requests travel; 0 for the default of 64 KiB.
    pub arena_bytes: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self { connect_timeout: Duration::from_secs(30), submission_slots: 0, completion_slots: 0, arena_bytes: 0 }
    }
}

/// A connection to the daemon on this host. Clones share one session; use it from as many threads as you like.
#[derive(Debug, Clone)]
pub struct Client {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    pid: u32,
    /// Tried in this order.
    paths: Vec<PathBuf>,
    options: Options,
    session: Mutex<Arc<SessionHandle>>,
}

impl Client {
    /// Connects to the daemon that listens at `path`.
    pub fn connect(path: impl AsRef<Path>) -> Result<Self, Error> {
        Self::connect_with(path, Options::default())
    }

    /// Connects to the daemon at its usual place: the socket that LLMD_SOCKET names; else `llmd/llmd.sock` under
    /// XDG_RUNTIME_DIR; else `/run/llmd/llmd.sock`.
    pub fn connect_default() -> Result<Self, Error> {
        Self::open(default_paths(|name| std::env::var_os(name)), Options::default())
    }

    /// [`Self::connect`] with other than the default options.
    pub fn connect_with(path: impl AsRef<Path>, options: Options) -> Result<Self, Error> {
        Self::open(vec![path.as_ref().to_owned()], options)
    }

    fn open(paths: Vec<PathBuf>, options: Options) -> Result<Self, Error> {
        let session = Mutex::new(Arc::new(open_session(&paths, &options)?));
        Ok(Self { shared: Arc::new(Shared { pid: std::process::id(), paths, options, session }) })
    }

    /// Sends a request and returns its events to come. Takes microseconds, unless the session must be connected anew, or
    /// the request is longer than its part of the shared memory and goes in parts.
    pub fn generate(&self, request: impl Borrow<GenerateRequest>) -> Result<Generation, Error> {
        // Before any lock: another thread may have held it at the moment of the fork.
        if std::process::id() != self.shared.pid {
            return Err(Error::Forked);
        }
        let request = request.borrow();
        request.validate()?;
        let payload = request.encode()?;
        // A session found dead is replaced once; what then fails is told.
        for _ in 0..2 {
            let session = self.session()?;
            match session.begin(&payload) {
                Ok((id, inbox)) => return Ok(Generation::new(session, id, inbox)),
                Err(NotBegun::SessionEnded) => {}
                Err(NotBegun::Failed(error)) => return Err(error),
            }
        }
        Err(Error::DaemonRestarted)
    }

    /// The session, connected anew if the last one is over.
    fn session(&self) -> Result<Arc<SessionHandle>, Error> {
        let mut session = self.shared.session.lock().unwrap_or_else(|e| e.into_inner());
        if session.has_ended() {
            *session = Arc::new(open_session(&self.shared.paths, &self.shared.options)?);
        }
        Ok(session.clone())
    }
}

fn open_session(paths: &[PathBuf], options: &Options) -> Result<SessionHandle, Error> {
    let hello = Hello {
        submission_slots: options.submission_slots,
        completion_slots: options.completion_slots,
        arena_bytes: options.arena_bytes,
        ..Hello::default()
    };
    let mut not_running = None;
    for path in paths {
        match handshake::connect(path, hello, options.connect_timeout) {
            Ok(welcome) => return Session::start(welcome.map()?),
            Err(handshake::ConnectError::NotRunning(source)) => not_running = Some(source),
            Err(error) => return Err(Error::of_connect(error, path)),
        }
    }
    let source = not_running.unwrap_or_else(|| std::io::ErrorKind::NotFound.into());
    Err(Error::NotRunning { paths: paths.to_vec(), source })
}

fn default_paths(variable: impl Fn(&str) -> Option<std::ffi::OsString>) -> Vec<PathBuf> {
    let set = |name| variable(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    if let Some(path) = set("LLMD_SOCKET") {
        return vec![path];
    }
    let user = set("XDG_RUNTIME_DIR").map(|folder| folder.join("llmd/llmd.sock"));
    user.into_iter().chain([SYSTEM_SOCKET.into()]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_usual_places() {
        let paths = |pairs: &[(&str, &str)]| {
            default_paths(|name| pairs.iter().find(|(n, _)| *n == name).map(|(_, v)| v.into()))
        };
        assert_eq!(paths(&[]), [PathBuf::from(SYSTEM_SOCKET)]);
        assert_eq!(paths(&[("LLMD_SOCKET", "/a"), ("XDG_RUNTIME_DIR", "/b")]), [PathBuf::from("/a")]);
        let both = [PathBuf::from("/b/llmd/llmd.sock"), SYSTEM_SOCKET.into()];
        assert_eq!(paths(&[("LLMD_SOCKET", ""), ("XDG_RUNTIME_DIR", "/b")]), both);
    }

    #[test]
    fn a_client_may_be_shared() {
        fn shared<T: Send + Sync + Clone>() {}
        fn moved<T: Send>() {}
        shared::<Client>();
        moved::<Generation>();
    }
}
