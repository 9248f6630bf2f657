//! Clients that do not read: by choice, or because they are stopped.

use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use llmd_protocol::handshake::Hello;
use llmd_protocol::limits::SPILL_BYTES;
use llmd_protocol::message::FinishReason;
use llmd_tests::daemon::{Daemon, Setup, wait_until};
use llmd_tests::load::{self, Mix, Report};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::raw::{End, Raw};
use crate::witness::Witness;
use crate::{assert_complaints, assert_reclaimed, footprint_at_rest};

/// The smallest completion ring there is.
fn small_ring() -> Hello {
    Hello { completion_slots: 64, ..Hello::default() }
}

/// Waits until nothing more is computed for `session`, and returns how many tokens it was given.
fn settled(daemon: &Daemon, session: u64) -> u64 {
    let tokens = || {
        let status = daemon.status();
        status.clients.iter().find(|client| client.session == session).expect("it is connected").tokens_out
    };
    let (mut last, mut same) = (tokens(), 0);
    wait_until("its sequences are set aside", || {
        thread::sleep(Duration::from_millis(80));
        let before = std::mem::replace(&mut last, tokens());
        same = if last > 0 && last == before { same + 1 } else { 0 };
        same == 5
    });
    last
}

/// vllm#45644: a dead reader blocks the writer for ever. Here it costs a bounded spill, and loses nothing when it reads.
#[test]
fn a_client_that_does_not_read_is_set_aside_and_loses_nothing() {
    let daemon = Daemon::tiny(&["--sequences-max=8"]);
    let before = footprint_at_rest(&daemon);
    let mix = Mix::tiny(21, 10..=40, 1500..=1500);
    let requests: Vec<u32> = (1..=4).collect();
    let alone = daemon.client();
    let expected: Vec<_> =
        requests.iter().map(|&n| load::answer(&alone, mix.request(n.into())).expect("an answer")).collect();
    drop(alone);

    let witness = Witness::start(&daemon);
    let mut deaf = Raw::connect_with(&daemon, small_ring());
    for &request in &requests {
        deaf.submit(request, &mix.request(request.into()));
    }
    let given = settled(&daemon, deaf.session);
    let spilled = daemon.metric("llmd_spill_bytes");
    assert!(given < 4 * 1500 && spilled > 0.0, "{given} tokens, {spilled} bytes of spill");
    assert!(spilled <= SPILL_BYTES as f64, "{spilled}");
    assert_eq!(deaf.published(), 64, "what it sees is its ring");
    witness.still_served();
    assert_eq!(settled(&daemon, deaf.session), given);
    // A further request of a session that is set aside waits with the others.
    deaf.submit(5, &mix.request(5));
    witness.still_served();
    assert_eq!(settled(&daemon, deaf.session), given);

    // It reads again.
    let said = deaf.read_to_the_end(&[1, 2, 3, 4, 5]);
    for (request, expected) in requests.iter().zip(&expected) {
        let said = &said[request];
        assert_eq!(said.end, Some(End::Done(FinishReason::Length)));
        assert_eq!(said.tokens, expected.tokens, "request {request}");
        assert_eq!(said.text, expected.text, "request {request}");
    }
    assert_eq!(said[&5].tokens.len(), 1500);
    drop(deaf);
    witness.stop();
    assert_reclaimed(&daemon, before);
    assert_complaints(&daemon, &[]);
}

/// A client that leaves while its spill is full takes it along.
#[test]
fn a_spill_goes_with_its_client() {
    let daemon = Daemon::tiny(&[]);
    let before = footprint_at_rest(&daemon);
    let mut deaf = Raw::connect_with(&daemon, small_ring());
    deaf.submit(1, &Mix::tiny(21, 10..=40, 3000..=3000).request(1));
    settled(&daemon, deaf.session);
    assert!(daemon.metric("llmd_spill_bytes") > 0.0);
    drop(deaf);
    assert_reclaimed(&daemon, before);
    assert_complaints(&daemon, &[]);
}

/// One that keeps asking and never reads overruns even the bound of its spill, and is closed.
#[test]
fn a_client_that_asks_on_and_never_reads_is_closed() {
    let daemon = Daemon::tiny(&[]);
    let before = footprint_at_rest(&daemon);
    let witness = Witness::start(&daemon);
    let mut deaf = Raw::connect_with(&daemon, small_ring());
    // Every refusal is some records to say.
    for request in 0.. {
        if deaf.is_closed() {
            break;
        }
        assert!(request < 10_000, "its spill grows without bound: {}", daemon.metric("llmd_spill_bytes"));
        if deaf.unread() < 32 {
            let op = 1;
            deaf.send(llmd_protocol::layout::SubmissionSlot { op, request_id: request, ..Default::default() });
        } else {
            thread::sleep(Duration::from_micros(200));
        }
    }
    deaf.wait_until_closed();
    witness.stop();
    drop(deaf);
    assert_reclaimed(&daemon, before);
    assert_complaints(&daemon, &["unread"]);
}

/// SIGSTOP stops a client for a while; it goes on as if nothing had been.
#[test]
fn a_stopped_client_goes_on_where_it_was() {
    let daemon = Setup::slow().start();
    let before = footprint_at_rest(&daemon);
    let mix = Mix::tiny(31, 20..=20, 2500..=2500);
    let expected = load::answer(&daemon.client(), mix.request(0)).expect("an answer").tokens;
    let witness = Witness::start(&daemon);
    let reader = Command::new(env!("CARGO_BIN_EXE_client_process"))
        .arg(daemon.socket())
        .args(["31", "0", "1", "20", "20", "2500", "2500"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("start a client process");
    let pid = Pid::from_raw(reader.id() as i32);
    let tokens_out = || {
        let status = daemon.status();
        status.clients.iter().find(|client| client.pid == reader.id()).map_or(0, |client| client.tokens_out)
    };
    wait_until("it streams", || tokens_out() > 0);
    kill(pid, Signal::SIGSTOP).expect("our child");
    // The daemon runs ahead of it until its ring and half its spill are full.
    wait_until("it is set aside", || daemon.metric("llmd_spill_bytes") > 0.0);
    let session = daemon.status().clients.iter().find(|client| client.pid == reader.id()).expect("connected").session;
    let given = settled(&daemon, session);
    witness.still_served();
    assert_eq!(tokens_out(), given);
    kill(pid, Signal::SIGCONT).expect("our child");
    let output = reader.wait_with_output().expect("wait for the client");
    let report: Report = serde_json::from_slice(&output.stdout).expect("a report");
    assert_eq!((report.ended.as_str(), report.tokens), ("Length", expected));
    witness.stop();
    assert_reclaimed(&daemon, before);
    assert_complaints(&daemon, &[]);
}
