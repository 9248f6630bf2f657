//! Where the daemon's sockets are.

use crate::Common;
use crate::failure::Failure;
use llmd_client::Client;
use std::path::{Path, PathBuf};

/// Folder of a daemon that systemd runs.
const SYSTEM: &str = "/run/llmd";

/// A session with the daemon.
pub fn connect(common: &Common) -> Result<Client, Failure> {
    Client::connect(socket(common)).map_err(Failure::from)
}

/// The clients' socket: as said, or the user's own daemon if there is one, or the system's.
pub fn socket(common: &Common) -> PathBuf {
    common.socket.clone().unwrap_or_else(|| folder(runtime_dir().as_deref(), "llmd.sock").join("llmd.sock"))
}

/// The control socket: as said, or beside the clients' socket.
pub fn control(common: &Common) -> PathBuf {
    match (&common.control, common.socket.as_deref().and_then(Path::parent)) {
        (Some(path), _) => path.clone(),
        (None, Some(beside)) => beside.join("control.sock"),
        (None, None) => folder(runtime_dir().as_deref(), "control.sock").join("control.sock"),
    }
}

fn runtime_dir() -> Option<PathBuf> {
    std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty()).map(PathBuf::from)
}

/// The user's folder, unless only the system's has the file.
fn folder(runtime_dir: Option<&Path>, file: &str) -> PathBuf {
    let system = PathBuf::from(SYSTEM);
    match runtime_dir.map(|dir| dir.join("llmd")) {
        Some(own) if own.join(file).exists() || !system.join(file).exists() => own,
        _ => system,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_wins() {
        let common = |socket: Option<&str>, control: Option<&str>| Common {
            socket: socket.map(Into::into),
            control: control.map(Into::into),
            json: false,
        };
        assert_eq!(socket(&common(Some("/a/b.sock"), None)), Path::new("/a/b.sock"));
        assert_eq!(control(&common(Some("/a/b.sock"), None)), Path::new("/a/control.sock"));
        assert_eq!(control(&common(Some("/a/b.sock"), Some("/c"))), Path::new("/c"));
    }

    #[test]
    fn without_anything_said_the_users_daemon_comes_first() {
        assert_eq!(folder(None, "no-such.sock"), Path::new(SYSTEM));
        assert_eq!(folder(Some(Path::new("/nonexistent")), "no-such.sock"), Path::new("/nonexistent/llmd"));
    }
}
