//! Clients that die, stop, lie and shout. Each test has a daemon of its own and does to it what no honest client does,
//! mostly while honest ones stream beside it; afterwards nothing may be left of it but a line in the log.
//!
//! Where another process is needed the test binary starts itself again: `child` is not a test but the other process.

mod deaths;
mod handshakes;
mod input;
mod lies;
mod raw;
mod readers;
mod witness;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};

use llmd_tests::daemon::{Daemon, wait_until};

/// What the daemon holds open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Footprint {
    descriptors: usize,
    /// Mapped ring segments.
    segments: usize,
}

fn footprint(daemon: &Daemon) -> Footprint {
    let proc = PathBuf::from(format!("/proc/{}", daemon.pid()));
    let maps = fs::read_to_string(proc.join("maps")).expect("the daemon runs");
    Footprint {
        descriptors: fs::read_dir(proc.join("fd")).expect("the daemon runs").count(),
        segments: maps.lines().filter(|line| line.contains("memfd:llmd-")).count(),
    }
}

/// What a daemon holds with nobody there, after a first client came and went.
fn footprint_at_rest(daemon: &Daemon) -> Footprint {
    drop(daemon.client());
    wait_until("the first client is gone", || daemon.status().clients_total == 0);
    // The connection that asked for the status is closed a moment after the answer.
    let mut found = footprint(daemon);
    wait_until("the daemon rests", || std::mem::replace(&mut found, footprint(daemon)) == found && found.segments == 0);
    found
}

/// Nobody is there, nothing is in flight, held, mapped or open that was not `before`.
fn assert_reclaimed(daemon: &Daemon, before: Footprint) {
    wait_until("all sessions are gone", || daemon.status().clients_total == 0);
    let status = daemon.wait_until_idle();
    assert_eq!(status.kv.owned, 0, "{:?}", status.kv);
    assert_eq!(status.kv.free + status.kv.cached, status.kv.total, "{:?}", status.kv);
    let ended: u64 = status.totals.finished.iter().map(|(_, count)| count).sum();
    assert_eq!(status.totals.accepted, ended, "{:?}", status.totals);
    for gauge in ["vllm:num_requests_running", "vllm:num_requests_waiting", "llmd_spill_bytes"] {
        assert_eq!(daemon.metric(gauge), 0.0, "{gauge}");
    }
    let mut now = before;
    wait_until("descriptors and mappings are as before", || {
        now = footprint(daemon);
        now.descriptors <= before.descriptors && now.segments == before.segments
    });
}

/// Lines of the log that complain.
fn complaints(daemon: &Daemon) -> Vec<String> {
    let log = daemon.log();
    log.lines().filter(|line| ["WARN", "ERROR"].iter().any(|level| line.contains(level))).map(str::to_owned).collect()
}

/// Waits until the log has a complaint for each of `words`, in any order, and holds none besides.
fn assert_complaints(daemon: &Daemon, words: &[&str]) {
    wait_until("the log is written", || complaints(daemon).len() >= words.len());
    let lines = complaints(daemon);
    assert_eq!(lines.len(), words.len(), "{lines:#?}");
    let user = format!("uid {}", nix::unistd::getuid());
    for word in words {
        let found = lines.iter().filter(|line| line.contains(word)).count();
        let wanted = words.iter().filter(|other| *other == word).count();
        assert_eq!(found, wanted, "{word:?} in {lines:#?}");
    }
    for line in &lines {
        assert!(line.contains(&user) && line.contains("pid "), "{line:?} names user and process");
    }
}

/// This binary, started again as `role`; killed when dropped.
struct Other {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Other {
    fn start(role: &str, daemon: &Daemon) -> Self {
        let mut child = Command::new(std::env::current_exe().expect("a path of one's own"))
            .args(["--exact", "child", "--nocapture"])
            .env("LLMD_HOSTILE_ROLE", role)
            .env("LLMD_HOSTILE_SOCKET", daemon.socket())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("start the other process");
        let lines = BufReader::new(child.stdout.take().expect("a pipe"));
        Self { child, lines }
    }

    /// Waits for the line that begins with `word` and returns the rest of it.
    fn heard(&mut self, word: &str) -> String {
        loop {
            let mut line = String::new();
            assert!(self.lines.read_line(&mut line).expect("a pipe") > 0, "the other process never said {word}");
            // The first line comes behind what the test runner writes.
            if let Some((_, rest)) = line.split_once(word) {
                return rest.trim().to_owned();
            }
        }
    }

    /// Waits for its end and says whether it found everything as it should be.
    fn succeeded(mut self) -> bool {
        self.child.wait().expect("our child").code() == Some(CHILD_SUCCEEDED)
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Success of its own kind: a run in which no test was found ends with 0.
const CHILD_SUCCEEDED: i32 = 42;

/// Not a test: what the other process does. Passes at once when nobody started it as such.
#[test]
fn child() {
    let Ok(role) = std::env::var("LLMD_HOSTILE_ROLE") else { return };
    let socket = PathBuf::from(std::env::var("LLMD_HOSTILE_SOCKET").expect("set with the role"));
    match role.as_str() {
        "stream" => deaths::stream(&socket),
        "fork" => deaths::fork(&socket),
        other => panic!("no role {other}"),
    }
    std::process::exit(CHILD_SUCCEEDED);
}
