//! Sockets that a service manager opened for us: `LISTEN_PID`, `LISTEN_FDS`, `LISTEN_FDNAMES`, as in sd_listen_fds(3).
//!
//! The numbers in the environment become owned descriptors here, in the crate that may hold unsafe code, and only once
//! in the life of the process.

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::socket::{getsockopt, sockopt};
use std::io::{Error, ErrorKind, Result};
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// The first descriptor that is passed; SD_LISTEN_FDS_START.
const FIRST: RawFd = 3;
/// Most descriptors that are taken.
pub const INHERITED_MAX: usize = 64;

static TAKEN: AtomicBool = AtomicBool::new(false);

/// Listening sockets passed to this process, with their names ("unknown" where the manager gave none), close-on-exec.
///
/// Empty when none were passed, when they were meant for another process, and from the second call on. Call it first thing in
/// `main`, before anything opens a descriptor. A variable that cannot be understood, and a number that is no open listening socket, are errors.
pub fn inherited_fds() -> Result<Vec<(String, OwnedFd)>> {
    if TAKEN.swap(true, Ordering::Relaxed) {
        return Ok(Vec::new());
    }
    let variable = |name| std::env::var(name).ok();
    let names = names(
        variable("LISTEN_PID").as_deref(),
        variable("LISTEN_FDS").as_deref(),
        variable("LISTEN_FDNAMES").as_deref(),
        std::process::id(),
    )?;
    // All are checked before the first is taken, so that an error leaves nothing closed.
    for number in 0..names.len() {
        check(FIRST + number as RawFd)?;
    }
    Ok(names
        .into_iter()
        .enumerate()
        .map(|(number, name)| {
            // SAFETY: the descriptor is open (checked above) and nobody else owns it: it was passed to this process by the
            // service manager for us to take (LISTEN_PID is this process), it is a listening socket, which nothing in
            // this process has made before this call as documented, and TAKEN lets only one call come here.
            let fd = unsafe { OwnedFd::from_raw_fd(FIRST + number as RawFd) };
            (name, fd)
        })
        .collect())
}

/// The names of the descriptors that the variables announce to process `own_pid`.
fn names(pid: Option<&str>, count: Option<&str>, names: Option<&str>, own_pid: u32) -> Result<Vec<String>> {
    let invalid = |what: String| Error::new(ErrorKind::InvalidInput, what);
    let (Some(pid), Some(count)) = (pid, count) else { return Ok(Vec::new()) };
    let pid: u32 = pid.parse().map_err(|_| invalid(format!("LISTEN_PID={pid} is not a process id")))?;
    if pid != own_pid {
        return Ok(Vec::new());
    }
    let count = count
        .parse()
        .ok()
        .filter(|n| *n <= INHERITED_MAX)
        .ok_or_else(|| invalid(format!("LISTEN_FDS={count} is not a number from 0 to {INHERITED_MAX}")))?;
    match names {
        None => Ok(vec!["unknown".to_owned(); count]),
        Some(text) => {
            let list: Vec<String> = text.split(':').map(str::to_owned).collect();
            if list.len() == count || (count == 0 && text.is_empty()) {
                Ok(list.into_iter().take(count).collect())
            } else {
                Err(invalid(format!("LISTEN_FDNAMES={text} names {} descriptors, LISTEN_FDS={count}", list.len())))
            }
        }
    }
}

/// Whether `number` is an open listening socket; sets its close-on-exec flag.
fn check(number: RawFd) -> Result<()> {
    let invalid = |what: &str| Error::new(ErrorKind::InvalidInput, format!("descriptor {number} of LISTEN_FDS {what}"));
    // SAFETY: borrowed for this function only, and only handed to fcntl and getsockopt, which answer EBADF or ENOTSOCK for
    // a number that is not open or no socket; nothing in this process closes descriptors meanwhile, as documented at `inherited_fds`.
    let fd = unsafe { BorrowedFd::borrow_raw(number) };
    fcntl(fd, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)).map_err(|_| invalid("is not open"))?;
    match getsockopt(&fd, sockopt::AcceptConn) {
        Ok(true) => Ok(()),
        _ => Err(invalid("is not a listening socket")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variables_are_read_as_sd_listen_fds_reads_them() {
        let got = |pid, count, list| names(pid, count, list, 42).map_err(|e| e.to_string());
        assert_eq!(got(None, None, None).unwrap(), [""; 0]);
        assert_eq!(got(Some("41"), Some("2"), Some("a:b")).unwrap(), [""; 0], "meant for another process");
        assert_eq!(got(Some("42"), Some("2"), Some("llmd:llmd-control")).unwrap(), ["llmd", "llmd-control"]);
        assert_eq!(got(Some("42"), Some("2"), None).unwrap(), ["unknown", "unknown"]);
        assert_eq!(got(Some("42"), Some("0"), Some("")).unwrap(), [""; 0]);
        for (pid, count, list) in
            [("x", "1", None), ("42", "many", None), ("42", "65", None), ("42", "-1", None), ("42", "2", Some("one"))]
        {
            assert!(got(Some(pid), Some(count), list).is_err(), "{pid} {count} {list:?}");
        }
    }

    #[test]
    fn only_an_open_listening_socket_passes() {
        use std::os::fd::AsRawFd;
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        check(listener.as_raw_fd()).unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(check(file.as_raw_fd()).unwrap_err().to_string().contains("listening"));
        assert!(check(1_000_000).unwrap_err().to_string().contains("not open"));
    }
}
