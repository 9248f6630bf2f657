//! Garbage instead of a handshake, and too many handshakes.

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use llmd_client::{Client, Error};
use llmd_protocol::handshake::{self, ConnectError, HELLO_BYTES, Hello, Refusal};
use llmd_protocol::limits;
use llmd_tests::daemon::{Daemon, PATIENCE, wait_until};
use llmd_tests::load::{self, Mix};
use llmd_tests::tiny_model::Random;

use crate::witness::Witness;
use crate::{assert_complaints, assert_reclaimed, complaints, footprint_at_rest};

/// What the daemon answers to `bytes`.
fn answer(daemon: &Daemon, bytes: &[u8]) -> Result<(), Refusal> {
    let mut stream = UnixStream::connect(daemon.socket()).expect("connect");
    stream.write_all(bytes).expect("a few bytes");
    told(stream)
}

fn told(stream: UnixStream) -> Result<(), Refusal> {
    match handshake::receive_welcome(stream, PATIENCE) {
        Ok(_) => Ok(()),
        Err(ConnectError::Refused { refusal, .. }) => Err(refusal),
        Err(other) => panic!("neither a welcome nor a refusal: {other}"),
    }
}

/// triton#8936: one malformed message crashes the server.
#[test]
fn garbage_is_refused_in_words_and_the_daemon_serves_on() {
    let daemon = Daemon::tiny(&[]);
    let before = footprint_at_rest(&daemon);
    let witness = Witness::start(&daemon);
    let mut random = Random(5);
    let good = Hello::default().to_bytes();
    for _ in 0..50 {
        let noise: Vec<u8> = (0..HELLO_BYTES + 100).map(|_| random.bits() as u8).collect();
        assert_eq!(answer(&daemon, &noise), Err(Refusal::BadHello));
    }
    let future = Hello { abi_min: 7, abi_max: 9, ..Hello::default() };
    assert_eq!(answer(&daemon, &future.to_bytes()), Err(Refusal::Version));
    assert_eq!(answer(&daemon, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"), Err(Refusal::BadHello));
    // Sizes beyond all limits are wishes: clamped.
    let greedy =
        Hello { submission_slots: u32::MAX, completion_slots: u32::MAX, arena_bytes: u32::MAX, ..Hello::default() };
    assert_eq!(answer(&daemon, &greedy.to_bytes()), Ok(()));
    // In pieces but in time.
    let mut stream = UnixStream::connect(daemon.socket()).expect("connect");
    for byte in good {
        stream.write_all(&[byte]).expect("a byte");
    }
    assert_eq!(told(stream), Ok(()));
    // Too little, and then nothing; and too slowly.
    let begun = Instant::now();
    assert_eq!(answer(&daemon, &good[..HELLO_BYTES - 1]), Err(Refusal::TimedOut));
    assert!(begun.elapsed() >= limits::HANDSHAKE_TIMEOUT);
    let mut drip = UnixStream::connect(daemon.socket()).expect("connect");
    for byte in &good[..8] {
        // The daemon may have hung up by now.
        let _ = drip.write_all(&[*byte]);
        thread::sleep(limits::HANDSHAKE_TIMEOUT / 6);
    }
    assert_eq!(told(drip), Err(Refusal::TimedOut));
    // Leave at any point, also just before the answer.
    for sent in 0..=HELLO_BYTES {
        let mut stream = UnixStream::connect(daemon.socket()).expect("connect");
        stream.write_all(&good[..sent]).expect("a few bytes");
        if sent % 2 == 0 {
            let _ = stream.shutdown(Shutdown::Write);
        }
    }
    witness.stop();
    assert_reclaimed(&daemon, before);
    // One line a second and user at most, however many there were.
    let lines = complaints(&daemon);
    assert!((1..=20).contains(&lines.len()), "{lines:#?}");
    assert!(lines.iter().all(|line| line.contains("no session for uid") && line.contains("pid ")), "{lines:#?}");
    assert!(lines[0].contains(&Refusal::BadHello.to_string()), "{lines:#?}");
}

/// More connections that say nothing than there are places for handshakes.
#[test]
fn silent_connections_by_the_hundred_do_not_keep_others_out() {
    let daemon = Daemon::tiny(&[]);
    let before = footprint_at_rest(&daemon);
    let silent: Vec<_> = (0..300).map(|_| UnixStream::connect(daemon.socket()).expect("connect")).collect();
    assert!(silent.len() > 4 * limits::HANDSHAKES_OPEN_MAX);
    // While most of them still wait to be accepted.
    load::answer(&daemon.client(), Mix::tiny(1, 5..=5, 5..=5).request(0)).expect("an answer");
    for stream in silent {
        assert_eq!(told(stream), Err(Refusal::TimedOut));
    }
    assert_reclaimed(&daemon, before);
    let lines = complaints(&daemon);
    assert!((1..=12).contains(&lines.len()), "{lines:#?}");
}

/// A client in a connect loop is told to slow down, and let in again when it has.
#[test]
fn connects_of_a_user_have_a_rate() {
    let daemon = Daemon::tiny(&[]);
    let before = footprint_at_rest(&daemon);
    let client = daemon.client();
    // What counts is the connect; a HELLO costs the daemon more than that.
    let hurry = || (0..100).for_each(|_| drop(UnixStream::connect(daemon.socket()).expect("connect")));
    let mut connects = 0;
    let refusal = loop {
        match answer(&daemon, &Hello::default().to_bytes()) {
            Ok(()) => hurry(),
            Err(refusal) => break refusal,
        }
        connects += 101;
        assert!(connects < 50_000, "no rate at all");
    };
    assert_eq!(refusal, Refusal::TooManyConnects);
    assert!(connects >= limits::CONNECT_BURST_PER_UID - 101, "{connects}");
    // Who is in is not concerned.
    load::answer(&client, Mix::tiny(1, 5..=5, 5..=5).request(0)).expect("an answer");
    wait_until("a connect is allowed again", || match Client::connect(daemon.socket()) {
        Ok(_) => true,
        Err(Error::Refused { refusal, retry_after }) => {
            assert_eq!(refusal, Refusal::TooManyConnects);
            assert!(retry_after > Duration::ZERO);
            false
        }
        Err(error) => panic!("{error}"),
    });
    drop(client);
    assert_reclaimed(&daemon, before);
}

#[test]
fn sessions_have_a_cap_and_a_place_freed_is_a_place() {
    let daemon = Daemon::tiny(&["--sessions-per-uid=3"]);
    let mut clients: Vec<_> = (0..3).map(|_| daemon.client()).collect();
    let full = || match Client::connect(daemon.socket()) {
        Err(Error::Refused { refusal, .. }) => refusal == Refusal::TooManySessions,
        Ok(_) => false,
        Err(error) => panic!("{error}"),
    };
    assert!(full());
    for client in &clients {
        load::answer(client, Mix::tiny(1, 5..=5, 5..=5).request(0)).expect("an answer");
    }
    clients.pop();
    wait_until("a place is free", || !full());
    assert_complaints_are_about(&daemon, Refusal::TooManySessions);
}

fn assert_complaints_are_about(daemon: &Daemon, refusal: Refusal) {
    let lines = complaints(daemon);
    assert!(!lines.is_empty() && lines.iter().all(|line| line.contains(&refusal.to_string())), "{lines:#?}");
}

/// ipc-channel#240: descriptors exhausted, accept spins.
#[test]
fn a_daemon_without_descriptors_serves_whom_it_has_and_recovers() {
    let daemon = Daemon::tiny(&[]);
    let before = footprint_at_rest(&daemon);
    let client = daemon.client();
    // One for its session, some for the control socket and those who are turned away.
    let limit = before.descriptors + 8;
    let set = Command::new("prlimit")
        .arg(format!("--pid={}", daemon.pid()))
        .arg(format!("--nofile={limit}:"))
        .status()
        .expect("run prlimit");
    assert!(set.success());
    let mut held = Vec::new();
    let mut turned_away = 0;
    for _ in 0..40 {
        match handshake::connect(&daemon.socket(), Hello::default(), PATIENCE) {
            Ok(welcome) => held.push(welcome),
            // Told so, or closed unserved.
            Err(ConnectError::Refused { refusal: Refusal::OutOfResources, .. } | ConnectError::Protocol(_)) => {
                turned_away += 1;
            }
            Err(other) => panic!("{other}"),
        }
    }
    assert!(!held.is_empty() && turned_away > 20, "{} welcomed, {turned_away} turned away", held.len());
    let busy = cpu_ticks(&daemon);
    thread::sleep(Duration::from_millis(500));
    let spent = cpu_ticks(&daemon) - busy;
    assert!(spent < 25, "{spent} of 50 ticks spent on waiting for descriptors");
    load::answer(&client, Mix::tiny(1, 5..=5, 5..=5).request(0)).expect("an answer as ever");
    drop(held);
    wait_until("it takes sessions again", || handshake::connect(&daemon.socket(), Hello::default(), PATIENCE).is_ok());
    drop(client);
    assert_reclaimed(&daemon, before);
    let lines = complaints(&daemon);
    assert!((1..=12).contains(&lines.len()), "{lines:#?}");
}

/// Processor time of a process, in ticks of 10 ms.
fn cpu_ticks(daemon: &Daemon) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", daemon.pid())).expect("the daemon runs");
    // Behind the name in parentheses: state is field 3, utime and stime are fields 14 and 15.
    let fields: Vec<_> = stat.rsplit(") ").next().expect("a name").split(' ').collect();
    [11, 12].iter().map(|&at| fields[at].parse::<u64>().expect("a number")).sum()
}

/// Before anything else is said.
#[test]
fn a_hang_up_in_the_backlog_is_nothing() {
    let daemon = Daemon::tiny(&[]);
    let before = footprint_at_rest(&daemon);
    for _ in 0..200 {
        drop(UnixStream::connect(daemon.socket()).expect("connect"));
    }
    load::answer(&daemon.client(), Mix::tiny(1, 5..=5, 5..=5).request(0)).expect("an answer");
    assert_reclaimed(&daemon, before);
    assert_complaints(&daemon, &[]);
}
