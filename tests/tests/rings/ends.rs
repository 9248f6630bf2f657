//! How sessions begin and end: garbage and slow handshakes, kill -9, fork.

use std::io::Write;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use llmd_client::{Client, Error, Event, GenerateRequest};
use llmd_protocol::completion::CompletionSlot;
use llmd_protocol::handshake::{self, ConnectError, HELLO_BYTES, Handshake, Hello, Progress, Refusal};
use llmd_protocol::limits;
use llmd_protocol::message::{FinishReason, Usage};
use llmd_protocol::session::Submission;
use nix::sys::signal::{Signal, raise};

use crate::pair::{Numbers, SECONDS_5, accept, next_submission, publish, say};
use crate::start_other;

#[test]
fn garbage_handshakes_are_refused() {
    let mut numbers = Numbers(3);
    let (mut refused, mut pending) = (0, 0);
    for round in 0..2000 {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut handshake = Handshake::new(ours).unwrap();
        assert_eq!(handshake.peer().uid, nix::unistd::getuid().as_raw());
        let len = (numbers.next() % 100) as usize;
        let mut bytes: Vec<u8> = (0..len).map(|_| numbers.next() as u8).collect();
        if round % 2 == 0 && len >= 8 {
            // Right up to the version.
            bytes[..8].copy_from_slice(&Hello::default().to_bytes()[..8]);
        }
        theirs.write_all(&bytes).unwrap();
        match handshake.readable() {
            Progress::Refuse(refusal) => {
                refused += 1;
                handshake.refuse(refusal, Duration::ZERO);
                match handshake::receive_welcome(theirs, SECONDS_5) {
                    Err(ConnectError::Refused { refusal: told, .. }) => assert_eq!(told, refusal),
                    other => panic!("{other:?}"),
                }
            }
            Progress::Pending => {
                pending += 1;
                assert!(len < HELLO_BYTES);
                drop(theirs);
                assert_eq!(handshake.readable(), Progress::HungUp);
            }
            Progress::Hello(_) => assert!(round % 2 == 0 && len >= HELLO_BYTES),
            Progress::HungUp => panic!("the client is there"),
        }
    }
    assert!(refused > 200 && pending > 200);
}

#[test]
fn a_slow_handshake_ends_in_time_and_blocks_nobody() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let mut slow = Handshake::new(ours).unwrap();
    let begun = Instant::now();
    let hello = Hello::default().to_bytes();
    let mut sent = 0;
    loop {
        if sent < HELLO_BYTES - 1 {
            theirs.write_all(&hello[sent..=sent]).unwrap();
            sent += 1;
        }
        let looked = Instant::now();
        let progress = slow.readable();
        assert!(looked.elapsed() < Duration::from_millis(200), "readable() waited");
        match progress {
            Progress::Pending => assert!(begun.elapsed() < SECONDS_5),
            Progress::Refuse(refusal) => break assert_eq!(refusal, Refusal::TimedOut),
            other => panic!("{other:?}"),
        }
        thread::sleep(Duration::from_millis(20));
    }
    assert!(Instant::now() >= slow.deadline() && begun.elapsed() >= limits::HANDSHAKE_TIMEOUT);
    // A client that sends its hello in pieces, in time, is welcome.
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let mut pieces = Handshake::new(ours).unwrap();
    for byte in &hello[..HELLO_BYTES - 1] {
        theirs.write_all(&[*byte]).unwrap();
        assert_eq!(pieces.readable(), Progress::Pending);
    }
    theirs.write_all(&hello[HELLO_BYTES - 1..]).unwrap();
    assert_eq!(pieces.readable(), Progress::Hello(Hello::default()));
}

/// In a process of its own, because it counts all of its descriptors and mappings.
#[test]
fn a_killed_client_leaves_nothing_behind() {
    let (_listener, mut other) = start_other("reclaim");
    assert!(other.succeeded());
}

pub(crate) fn reclaim(path: &std::path::Path) {
    let _ = std::fs::remove_file(path);
    let listener = UnixListener::bind(path).unwrap();
    let held = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let segments = maps.lines().filter(|line| line.contains("llmd-") && line.contains("memfd:")).count();
        (segments, std::fs::read_dir("/proc/self/fd").unwrap().count())
    };
    let before = held();
    assert_eq!(before.0, 0);
    for _ in 0..5 {
        let mut victim = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--nocapture"])
            .env("LLMD_RINGS_ROLE", "victim")
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let daemon = accept(&listener);
        assert_eq!(held(), (2, before.1 + 1), "two mappings and one descriptor for a session");
        victim.kill().unwrap();
        let killed = Instant::now();
        assert!(daemon.socket.wait(Some(SECONDS_5)).unwrap().hung_up);
        drop(daemon);
        assert!(killed.elapsed() < Duration::from_secs(1));
        assert_eq!(held(), before);
        victim.wait().unwrap();
    }
}

/// A child of a fork shares neither memory nor the right to end the session.
#[test]
fn a_forked_child_leaves_its_parents_session_alone() {
    let path = std::env::temp_dir().join(format!("llmd-rings-{}-fork.sock", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path).unwrap();
    let (go, gone) = std::sync::mpsc::channel();
    let serving = thread::spawn(move || {
        let mut daemon = accept(&listener);
        let Some(Submission::Submit { request_id, .. }) = next_submission(&mut daemon) else { panic!("no request") };
        gone.recv().unwrap();
        say(&mut daemon, CompletionSlot::done(request_id, FinishReason::Stop, Usage::default()));
        publish(&mut daemon);
        // Nothing of the child's came: no cancel, no hang-up before the parent's own.
        assert_eq!(next_submission(&mut daemon), None);
    });
    let client = Client::connect(&path).unwrap();
    let mut generation = client.generate(GenerateRequest::text("x")).unwrap();
    // SAFETY: the child calls nothing that needs another thread of this process (glibc's malloc is safe after fork) and ends
    // by a signal, without running anybody's destructors but those of the two values it drops itself.
    match unsafe { nix::unistd::fork() }.unwrap() {
        nix::unistd::ForkResult::Child => {
            let forked = matches!(client.generate(GenerateRequest::text("y")), Err(Error::Forked))
                && matches!(generation.next(), Some(Err(Error::Forked)))
                && generation.next().is_none();
            drop(generation);
            drop(client);
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_else(|_| "memfd:llmd-".into());
            let clean = !maps.contains("memfd:llmd-");
            // Ends at once by a signal that tells the outcome: exit() would run the parent's handlers.
            let _ = raise(if forked && clean { Signal::SIGTERM } else { Signal::SIGKILL });
            std::process::abort();
        }
        nix::unistd::ForkResult::Parent { child } => {
            let status = nix::sys::wait::waitpid(child, None).unwrap();
            assert_eq!(status, nix::sys::wait::WaitStatus::Signaled(child, Signal::SIGTERM, false));
        }
    }
    go.send(()).unwrap();
    assert!(matches!(generation.next(), Some(Ok(Event::Done { .. }))));
    drop(generation);
    drop(client);
    serving.join().unwrap();
    let _ = std::fs::remove_file(&path);
}
