//! The rings between two processes, and against a client that lies.
//!
//! Where a second process is needed the test binary starts itself again: `child` is not a test but the other process.

mod ends;
mod lies;
mod oracle;
mod pair;
mod seals;

use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use llmd_protocol::handshake::{self, Hello};

use crate::pair::SECONDS_5;

/// A listening socket, and this binary started again as `role` with the way to it.
struct Other {
    path: PathBuf,
    child: Child,
}

fn start_other(role: &str) -> (UnixListener, Other) {
    let path = std::env::temp_dir().join(format!("llmd-rings-{}-{role}.sock", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path).unwrap();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture"])
        .env("LLMD_RINGS_ROLE", role)
        .env("LLMD_RINGS_SOCKET", &path)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    (listener, Other { path, child })
}

impl Other {
    /// Waits for its end and says whether it found everything as it should be.
    fn succeeded(&mut self) -> bool {
        self.child.wait().unwrap().code() == Some(CHILD_SUCCEEDED)
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Not a test: what the second process does. Passes at once when nobody started it as such.
#[test]
fn child() {
    let Ok(role) = std::env::var("LLMD_RINGS_ROLE") else {
        return;
    };
    let path = PathBuf::from(std::env::var("LLMD_RINGS_SOCKET").unwrap());
    let connect = || handshake::connect(&path, Hello::default(), SECONDS_5).unwrap();
    match role.as_str() {
        "oracle" => oracle::ask_and_check(&mut connect().map().unwrap()),
        "other-uid" => seals::as_another_user(&connect()),
        "reclaim" => ends::reclaim(&path),
        "victim" => {
            let _session = connect().map().unwrap();
            thread::sleep(Duration::from_secs(60));
        }
        other => panic!("no role {other}"),
    }
    // Success of its own kind: a run in which no test was found ends with 0.
    std::process::exit(CHILD_SUCCEEDED);
}

const CHILD_SUCCEEDED: i32 = 42;
