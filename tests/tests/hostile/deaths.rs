//! Clients that die in mid-stream, fork, or leave; and a daemon that is killed.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::thread;
use std::time::Duration;

use llmd_client::{Client, Error, Event, Generation};
use llmd_protocol::message::FinishReason;
use llmd_tests::daemon::{Daemon, Setup, wait_until};
use llmd_tests::load::{self, Mix};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{ForkResult, Pid};

use crate::witness::Witness;
use crate::{Other, assert_complaints, assert_reclaimed, footprint_at_rest};

/// Rounds of killing, and processes killed in each.
const ROUNDS: usize = 4;
const VICTIMS: usize = 6;

fn endless() -> Mix {
    Mix::tiny(13, 10..=200, 3500..=3500)
}

/// Waits for the first token.
fn first_token(generation: &mut Generation) {
    loop {
        if let Event::Tokens(_) = generation.next().expect("more events").expect("no error") {
            return;
        }
    }
}

fn say(line: &str) {
    println!("{line}");
    std::io::stdout().flush().expect("somebody listens");
}

/// The other process: streams until it is killed.
pub fn stream(socket: &Path) {
    let client = Client::connect(socket).expect("connect");
    for number in 0.. {
        let mut generation = client.generate(endless().request(number)).expect("submitted");
        first_token(&mut generation);
        say("STREAMING");
        generation.for_each(|event| drop(event.expect("no error")));
    }
}

/// llama.cpp#11414, sglang#6778, vllm#22545: the client is gone and generation goes on, blocks leak, gauges stick.
#[test]
fn clients_killed_in_mid_stream_leave_nothing_behind() {
    let daemon = Setup::slow().start();
    let before = footprint_at_rest(&daemon);
    let witness = Witness::start(&daemon);
    for round in 0..ROUNDS {
        let mut victims: Vec<_> = (0..VICTIMS).map(|_| Other::start("stream", &daemon)).collect();
        for victim in &mut victims {
            victim.heard("STREAMING");
        }
        // Some at once, some one after the other, at another point of their streams in every round.
        thread::sleep(Duration::from_millis(7 * round as u64));
        for victim in &victims {
            kill(Pid::from_raw(victim.child.id() as i32), Signal::SIGKILL).expect("our child");
        }
        drop(victims);
        witness.still_served();
    }
    // Only the two honest ones are left.
    wait_until("the killed are gone", || daemon.status().clients_total == 2);
    witness.stop();
    let status = daemon.status();
    let cancelled: u64 =
        status.totals.finished.iter().filter(|(reason, _)| reason == "cancelled").map(|(_, count)| count).sum();
    assert!(cancelled >= (ROUNDS * VICTIMS) as u64, "killed in mid-stream: {:?}", status.totals.finished);
    assert_reclaimed(&daemon, before);
    assert_complaints(&daemon, &[]);
}

/// Killed before, while and after they say what they want.
#[test]
fn clients_that_leave_at_any_point_leave_nothing_behind() {
    let daemon = Daemon::tiny(&[]);
    let before = footprint_at_rest(&daemon);
    let client = daemon.client();
    for number in 0..60 {
        let leaver = daemon.client();
        let generation = leaver.generate(endless().request(number)).expect("submitted");
        match number % 3 {
            0 => drop(generation),
            1 => thread::sleep(Duration::from_micros(100 * number)),
            _ => {}
        }
        drop(leaver);
    }
    load::answer(&client, Mix::tiny(1, 5..=5, 5..=5).request(0)).expect("an answer");
    drop(client);
    assert_reclaimed(&daemon, before);
    assert_complaints(&daemon, &[]);
}

/// The other process: forks in mid-stream, and goes on when the child has tried to spoil everything.
pub fn fork(socket: &Path) {
    let client = Client::connect(socket).expect("connect");
    let mut generation = client.generate(Mix::tiny(5, 20..=20, 1000..=1000).request(0)).expect("submitted");
    first_token(&mut generation);
    // SAFETY: the child calls nothing that needs another thread of this process (glibc's malloc is safe after fork), and
    // ends by a signal without running anybody's destructors but those of the two values it drops itself.
    match unsafe { nix::unistd::fork() }.expect("fork") {
        ForkResult::Child => {
            let alien = matches!(client.generate(endless().request(1)), Err(Error::Forked))
                && matches!(generation.next(), Some(Err(Error::Forked)));
            drop(generation);
            drop(client);
            let mapped = fs::read_to_string("/proc/self/maps").is_ok_and(|maps| maps.contains("memfd:llmd-"));
            if alien && !mapped {
                // It lives on with a copy of the session's descriptor, until the test has seen enough.
                thread::sleep(Duration::from_secs(30));
            }
            let _ = nix::sys::signal::raise(Signal::SIGKILL);
            std::process::abort();
        }
        ForkResult::Parent { child } => {
            let tokens: usize = 1 + generation
                .map(|event| match event.expect("no error") {
                    Event::Tokens(ids) => ids.len(),
                    Event::Done { reason, .. } => {
                        assert_eq!(reason, FinishReason::Length);
                        0
                    }
                    _ => 0,
                })
                .sum::<usize>();
            assert_eq!(tokens, 1000);
            drop(client);
            say(&format!("FORKED {child}"));
        }
    }
}

/// A child of a fork holds its parent's descriptors. It must neither end the session nor keep it alive.
#[test]
fn a_forked_child_neither_ends_nor_keeps_the_session() {
    let daemon = Daemon::tiny(&[]);
    let before = footprint_at_rest(&daemon);
    let mut parent = Other::start("fork", &daemon);
    let child = Pid::from_raw(parent.heard("FORKED").parse().expect("a process id"));
    assert!(parent.succeeded(), "the parent's stream was complete");
    assert_reclaimed(&daemon, before);
    wait_until("the forked child has found everything as it should be, and sleeps", || {
        fs::read_to_string(format!("/proc/{child}/stat")).expect("it lives").contains(") S ")
    });
    kill(child, Signal::SIGKILL).expect("it lives");
    assert_complaints(&daemon, &[]);
}

fn shared_memory_files() -> Vec<String> {
    let Ok(folder) = fs::read_dir("/dev/shm") else { return Vec::new() };
    folder.filter_map(|file| file.ok()?.file_name().into_string().ok()).filter(|name| name.contains("llmd")).collect()
}

/// vllm#8803, sglang#40723, iceoryx2#601: shared memory left behind, stale segments break the restart.
#[test]
fn a_killed_daemon_leaves_nothing_that_hinders_the_next() {
    let setup = Setup::tiny();
    let mut daemon = setup.start();
    for _ in 0..3 {
        let client = daemon.client();
        let mut running = client.generate(endless().request(0)).expect("submitted");
        first_token(&mut running);
        daemon.restart(&setup);
        let last = running.last().expect("a terminal event");
        assert!(matches!(last, Err(Error::DaemonRestarted)), "{last:?}");
        assert_eq!(shared_memory_files(), Vec::<String>::new());
        // The same client, by itself.
        load::answer(&client, Mix::tiny(1, 5..=5, 5..=5).request(0)).expect("an answer");
    }
    daemon.signal(Signal::SIGTERM);
    assert!(daemon.wait().success());
    assert!(!daemon.socket().exists() && !daemon.control().exists(), "the sockets are removed");
    assert_eq!(shared_memory_files(), Vec::<String>::new());
}
