//! A socket passed the way systemd passes it: as descriptor 3 of a process that the variables name.

use llmd_protocol::inherited::inherited_fds;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Command, Stdio};

const INNER: &str = "LLMD_TEST_INNER_INHERITED";

/// The test starts itself again through a shell, which puts the listener at descriptor 3 and its own pid, kept by exec, into LISTEN_PID.
#[test]
fn a_passed_socket_is_taken_once_and_works() {
    if std::env::var_os(INNER).is_some() {
        let mut fds = inherited_fds().unwrap();
        assert_eq!(fds.len(), 1);
        let (name, fd) = fds.pop().unwrap();
        assert_eq!(name, "llmd");
        let (mut stream, _) = UnixListener::from(fd).accept().unwrap();
        stream.write_all(b"served").unwrap();
        assert!(inherited_fds().unwrap().is_empty(), "taken only once");
        return;
    }
    let path = std::env::temp_dir().join(format!("llmd-inherited-{}.sock", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path).unwrap();
    let child = Command::new("sh")
        .args(["-c", "exec 3<&0 0</dev/null; export LISTEN_PID=$$; exec \"$@\"", "sh"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "a_passed_socket_is_taken_once_and_works"])
        .env(INNER, "1")
        .env("LISTEN_FDS", "1")
        .env("LISTEN_FDNAMES", "llmd")
        .stdin(Stdio::from(OwnedFd::from(listener)))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // The parent's copy of the listener went into the child: who answers can only be the child.
    let mut said = String::new();
    let mut stream = UnixStream::connect(&path).unwrap();
    stream.set_read_timeout(Some(std::time::Duration::from_secs(20))).unwrap();
    let read = stream.read_to_string(&mut said);
    let output = child.wait_with_output().unwrap();
    let _ = std::fs::remove_file(&path);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    read.unwrap();
    assert_eq!(said, "served");
}
