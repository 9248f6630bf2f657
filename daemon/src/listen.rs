//! Listening sockets: the ones systemd passed, and the ones we bind ourselves.

use llmd_protocol::inherited::inherited_fds;
use nix::sys::socket::{AddressFamily, SockaddrLike, SockaddrStorage, getsockname};
use std::fs::{self, DirBuilder, Permissions};
use std::io::{self, Error, ErrorKind};
use std::net::TcpListener;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// A listener of either family.
#[derive(Debug)]
pub enum AnyListener {
    /// TCP.
    Tcp(TcpListener),
    /// A Unix stream socket.
    Unix(UnixListener),
}

/// What systemd passed, by the `FileDescriptorName=` of its socket units.
#[derive(Debug, Default)]
pub struct Passed {
    /// "llmd": where clients connect.
    pub socket: Option<UnixListener>,
    /// "llmd-control": where llmctl asks.
    pub control: Option<UnixListener>,
    /// "llmd-metrics": where Prometheus reads.
    pub metrics: Option<AnyListener>,
}

impl Passed {
    /// Takes what was passed to this process. Call it first thing in `main`; see [`inherited_fds`].
    pub fn take() -> io::Result<Self> {
        Self::sort(inherited_fds()?)
    }

    /// Gives each descriptor its place. A unit that names nothing passes its own name, "llmd.socket"; a single
    /// descriptor without any name ("unknown") is the clients' socket.
    fn sort(fds: Vec<(String, OwnedFd)>) -> io::Result<Self> {
        let single = fds.len() == 1;
        let mut passed = Self::default();
        for (name, fd) in fds {
            let listener = typed(fd, &name)?;
            let taken = match (name.strip_suffix(".socket").unwrap_or(&name), listener) {
                ("llmd-metrics", listener) => passed.metrics.replace(listener).is_some(),
                ("llmd", AnyListener::Unix(listener)) => passed.socket.replace(listener).is_some(),
                ("llmd-control", AnyListener::Unix(listener)) => passed.control.replace(listener).is_some(),
                ("unknown", AnyListener::Unix(listener)) if single => passed.socket.replace(listener).is_some(),
                ("llmd" | "llmd-control", AnyListener::Tcp(_)) => {
                    return Err(invalid(format!("the passed socket {name} must be a Unix stream socket")));
                }
                _ => {
                    return Err(invalid(format!(
                        "a socket named {name:?} was passed; set FileDescriptorName= to llmd, llmd-control or llmd-metrics"
                    )));
                }
            };
            if taken {
                return Err(invalid(format!("two sockets named {name} were passed")));
            }
        }
        Ok(passed)
    }
}

fn invalid(what: String) -> Error {
    Error::new(ErrorKind::InvalidInput, what)
}

fn typed(fd: OwnedFd, name: &str) -> io::Result<AnyListener> {
    let address: SockaddrStorage = getsockname(fd.as_raw_fd())?;
    match address.family() {
        Some(AddressFamily::Unix) => Ok(AnyListener::Unix(UnixListener::from(fd))),
        Some(AddressFamily::Inet | AddressFamily::Inet6) => Ok(AnyListener::Tcp(TcpListener::from(fd))),
        other => Err(invalid(format!("the passed socket {name} has family {other:?}"))),
    }
}

/// A Unix listener of our own. Its file goes when it is dropped.
#[derive(Debug)]
pub struct BoundUnix {
    path: PathBuf,
    identity: Identity,
}

/// Device, inode and time of making (a socket's file is never written): only our own file is removed. An inode alone is
/// used again at once by some file systems.
type Identity = (u64, u64, i64, i64);

fn identity(path: &Path) -> io::Result<Identity> {
    let file = fs::symlink_metadata(path)?;
    Ok((file.dev(), file.ino(), file.mtime(), file.mtime_nsec()))
}

impl BoundUnix {
    /// Binds `path`, readable and writable by owner and group. Its folder is made (0700) if there is none. A file left by
    /// a daemon that is gone is replaced; one that somebody listens on, or that is no socket, is an error.
    pub fn bind(path: &Path) -> io::Result<(UnixListener, Self)> {
        let named = |e: Error| {
            let next = match e.kind() {
                ErrorKind::PermissionDenied | ErrorKind::NotFound | ErrorKind::ReadOnlyFilesystem => {
                    "; choose a path in a folder where this user may write"
                }
                _ => "",
            };
            Error::new(e.kind(), format!("cannot listen on {}: {e}{next}", path.display()))
        };
        if let Some(folder) = path.parent().filter(|f| !f.as_os_str().is_empty()) {
            DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(named)?;
        }
        remove_stale(path).map_err(named)?;
        let listener = UnixListener::bind(path).map_err(named)?;
        fs::set_permissions(path, Permissions::from_mode(0o660)).map_err(named)?;
        let identity = identity(path).map_err(named)?;
        Ok((listener, Self { path: path.to_owned(), identity }))
    }
}

impl Drop for BoundUnix {
    fn drop(&mut self) {
        if identity(&self.path).is_ok_and(|file| file == self.identity) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn remove_stale(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e),
        Ok(file) if !file.file_type().is_socket() => {
            return Err(Error::new(
                ErrorKind::AlreadyExists,
                "there is a file that is no socket; remove it or choose another path",
            ));
        }
        Ok(_) => {}
    }
    match UnixStream::connect(path) {
        Ok(_) => Err(Error::new(ErrorKind::AddrInUse, "another process listens there; stop it or choose another path")),
        // Refused is what the file of a process that is gone answers.
        Err(e) if e.kind() == ErrorKind::ConnectionRefused => fs::remove_file(path),
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder of this test's own, removed at the end.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("llmd-listen-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            Self(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_stale_socket_is_replaced_and_a_living_one_is_not() {
        let folder = Folder::new("stale");
        let path = folder.0.join("deep/llmd.sock");
        let (listener, bound) = BoundUnix::bind(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o660);
        assert_eq!(fs::metadata(path.parent().unwrap()).unwrap().permissions().mode() & 0o777, 0o700);
        let error = BoundUnix::bind(&path).unwrap_err().to_string();
        assert!(error.contains("another process") && error.contains("llmd.sock"), "{error}");
        drop(listener);
        assert!(path.exists(), "as after a kill: the file stays, nobody listens");
        let (listener, again) = BoundUnix::bind(&path).unwrap();
        drop(bound);
        assert!(path.exists(), "the first owner removes only its own file");
        drop((listener, again));
        assert!(!path.exists());
    }

    #[test]
    fn a_file_that_is_no_socket_is_left_alone() {
        let folder = Folder::new("file");
        fs::create_dir_all(&folder.0).unwrap();
        let path = folder.0.join("notes.txt");
        fs::write(&path, "dear diary").unwrap();
        assert!(BoundUnix::bind(&path).unwrap_err().to_string().contains("no socket"));
        assert_eq!(fs::read_to_string(&path).unwrap(), "dear diary");
    }

    #[test]
    fn passed_sockets_find_their_places_by_name() {
        let folder = Folder::new("passed");
        fs::create_dir_all(&folder.0).unwrap();
        let unix = |n: u32| OwnedFd::from(UnixListener::bind(folder.0.join(n.to_string())).unwrap());
        let tcp = || OwnedFd::from(TcpListener::bind("127.0.0.1:0").unwrap());
        let list = |names: &[&str], fds: Vec<OwnedFd>| {
            Passed::sort(names.iter().map(|n| n.to_string()).zip(fds).collect()).map_err(|e| e.to_string())
        };
        let all = list(&["llmd-control", "llmd-metrics", "llmd"], vec![unix(1), tcp(), unix(2)]).unwrap();
        assert!(all.socket.is_some() && all.control.is_some());
        assert!(matches!(all.metrics, Some(AnyListener::Tcp(_))));
        assert!(list(&["llmd.socket"], vec![unix(3)]).unwrap().socket.is_some());
        assert!(list(&["unknown"], vec![unix(4)]).unwrap().socket.is_some());
        assert!(list(&["llmd-metrics"], vec![unix(5)]).unwrap().socket.is_none());
        assert!(list(&["unknown", "llmd"], vec![unix(6), unix(7)]).unwrap_err().contains("FileDescriptorName="));
        assert!(list(&["llmd"], vec![tcp()]).unwrap_err().contains("Unix"));
        assert!(list(&["llmd", "llmd"], vec![unix(8), unix(9)]).unwrap_err().contains("two sockets"));
        assert!(list(&[], vec![]).unwrap().socket.is_none());
    }
}
