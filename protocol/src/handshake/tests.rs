use super::*;
use crate::session::Submission;
use proptest::prelude::*;

const SECOND: Duration = Duration::from_secs(1);

/// Both ends of a session, made by a handshake in one thread.
fn session_pair(hello: Hello) -> (DaemonSession, ClientSession) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut handshake = Handshake::new(ours).unwrap();
    assert_eq!(handshake.readable(), Progress::Pending);
    send_hello(&theirs, hello).unwrap();
    assert_eq!(handshake.readable(), Progress::Hello(hello));
    let daemon = handshake.welcome(11, 22).unwrap();
    let client = receive_welcome(theirs, SECOND).unwrap().map().unwrap();
    (daemon, client)
}

#[test]
fn both_sides_agree() {
    let (daemon, client) = session_pair(Hello { completion_slots: 100, ..Hello::default() });
    assert_eq!(daemon.terms, client.terms);
    assert_eq!(client.terms.geometry.completion_slots(), 128);
    assert_eq!((client.terms.boot_id, client.terms.session_id), (11, 22));
    assert_eq!(client.completions.state(), Some(crate::layout::SessionState::Open));
}

#[test]
fn a_request_goes_through_whole_or_in_parts() {
    let (mut daemon, mut client) = session_pair(Hello::default());
    for len in [1, 8, 16 * 1024, 16 * 1024 + 1, 64 * 1024, 1_000_003] {
        let payload: Vec<u8> = (0..len).map(|i| (i * 31 % 251) as u8).collect();
        let (mut sent, mut rounds) = (0, 0);
        let got = loop {
            if sent < len {
                sent = client.submissions.submit(5, &payload, sent).unwrap();
            }
            if let Some(submission) = daemon.submissions.next().unwrap() {
                break submission;
            }
            rounds += 1;
            assert!(rounds < 1000, "no progress");
        };
        assert_eq!(got, Submission::Submit { request_id: 5, payload });
    }
    // What was abandoned half-way leaves nothing behind.
    let long = vec![1; 100_000];
    assert!(client.submissions.submit(6, &long, 0).unwrap() < long.len());
    assert_eq!(daemon.submissions.next(), Ok(None));
    assert_eq!(client.submissions.cancel(6), Ok(true));
    assert_eq!(daemon.submissions.next(), Ok(Some(Submission::Cancel { request_id: 6 })));
    client.submissions.submit(7, b"x", 0).unwrap();
    assert_eq!(daemon.submissions.next(), Ok(Some(Submission::Submit { request_id: 7, payload: b"x".to_vec() })));
}

#[test]
fn a_doorbell_rings_only_for_who_sleeps() {
    let (mut daemon, mut client) = session_pair(Hello::default());
    let doorbells = |socket: &SessionSocket| socket.drain().doorbells;
    // A fresh session is armed, both ways.
    client.submissions.cancel(1).unwrap();
    assert_eq!(doorbells(&daemon.socket), 1);
    client.submissions.cancel(1).unwrap();
    assert_eq!(doorbells(&daemon.socket), 0);
    assert_eq!(daemon.submissions.arm_wake(), Ok(false));
    while daemon.submissions.next().unwrap().is_some() {}
    assert_eq!(daemon.submissions.arm_wake(), Ok(true));
    client.submissions.cancel(1).unwrap();
    assert_eq!(doorbells(&daemon.socket), 1);

    let publish = |daemon: &mut DaemonSession, count: u32| {
        for i in 0..count {
            daemon.completions.push(crate::completion::CompletionSlot::accepted(i, 0)).unwrap();
        }
        let published = daemon.completions.publish().unwrap();
        CompletionDoorbell::fence();
        daemon.doorbell.needs_wake(published)
    };
    use crate::session::CompletionDoorbell;
    assert!(publish(&mut daemon, 3));
    assert!(!publish(&mut daemon, 2));
    assert_eq!(client.completions.arm(), Ok(false));
    for _ in 0..5 {
        assert!(client.completions.pop().unwrap().is_some());
    }
    assert_eq!(client.completions.arm(), Ok(true));
    assert!(publish(&mut daemon, 1));
    // Nothing was given back yet.
    assert_eq!(daemon.completions.free(), Ok(1024 - 6));
    client.completions.release();
    assert_eq!(daemon.completions.free(), Ok(1024 - 1));
}

#[test]
fn a_refusal_reaches_the_client() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    Handshake::new(ours).unwrap().refuse(Refusal::Draining, 3 * SECOND);
    match hello_and_answer(theirs, Hello::default(), SECOND) {
        Err(ConnectError::Refused { refusal: Refusal::Draining, retry_after, .. }) => {
            assert_eq!(retry_after, 3 * SECOND)
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn another_version_or_magic_is_refused() {
    let refusal = |change: &dyn Fn(&mut [u8; HELLO_BYTES])| {
        let mut bytes = Hello::default().to_bytes();
        change(&mut bytes);
        Hello::from_bytes(&bytes).unwrap_err()
    };
    assert_eq!(refusal(&|b| b[0] ^= 1), Refusal::BadHello);
    assert_eq!(refusal(&|b| b[0x1c] = 1), Refusal::BadHello);
    assert_eq!(refusal(&|b| b[4..8].copy_from_slice(&[2, 0, 1, 0])), Refusal::BadHello);
    assert_eq!(refusal(&|b| b[4..8].copy_from_slice(&[9, 0, 10, 0])), Refusal::Version);
    assert_eq!(refusal(&|b| b[4..8].copy_from_slice(&[0, 0, 0, 0])), Refusal::Version);
    // Unknown features are not asked for in vain: the session just has none of them.
    let all = Hello { features: u64::MAX, ..Hello::default() };
    let (daemon, _client) = session_pair(all);
    assert_eq!(daemon.terms.features, 0);
}

#[test]
fn a_silent_daemon_is_not_waited_for_for_ever() {
    let (_ours, theirs) = UnixStream::pair().unwrap();
    let begun = Instant::now();
    let result = hello_and_answer(theirs, Hello::default(), Duration::from_millis(50));
    assert!(matches!(result, Err(ConnectError::TimedOut(_))), "{result:?}");
    assert!(begun.elapsed() >= Duration::from_millis(50));
}

#[test]
fn a_daemon_that_is_none_is_told_apart() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    std::io::Write::write_all(&mut &ours, &[b'x'; ANSWER_BYTES]).unwrap();
    assert!(matches!(hello_and_answer(theirs, Hello::default(), SECOND), Err(ConnectError::Protocol(_))));
    let (ours, theirs) = UnixStream::pair().unwrap();
    drop(ours);
    assert!(matches!(hello_and_answer(theirs, Hello::default(), SECOND), Err(ConnectError::Protocol(_))));
    // A welcome without descriptors.
    let (ours, theirs) = UnixStream::pair().unwrap();
    let terms = Terms { abi_minor: 0, features: 0, boot_id: 1, session_id: 2, geometry: Geometry::default() };
    send_answer(ours.as_fd(), Answer::Welcome(terms), &[]).unwrap();
    assert!(matches!(hello_and_answer(theirs, Hello::default(), SECOND), Err(ConnectError::Protocol(_))));
    let nowhere = connect(Path::new("/nonexistent/llmd.sock"), Hello::default(), SECOND);
    assert!(matches!(nowhere, Err(ConnectError::NotRunning(_))), "{nowhere:?}");
}

proptest! {
    #[test]
    fn any_answer_is_understood_or_refused(bytes in any::<[u8; 32]>(), rest in any::<[u8; 32]>(), head in any::<bool>()) {
        let mut answer: [u8; ANSWER_BYTES] = [bytes, rest].concat().try_into().unwrap();
        if head { answer[..8].copy_from_slice(&[b'L', b'L', b'M', b'D', 1, 0, 1, 0]); }
        let _ = Answer::from_bytes(&answer);
    }

    #[test]
    fn any_hello_gets_a_session_of_bounded_size(a in any::<u32>(), b in any::<u32>(), c in any::<u32>()) {
        let g = Geometry::negotiate(a, b, c);
        prop_assert!(g.down_bytes() + g.up_bytes() < 2 * 1024 * 1024);
        prop_assert_eq!(Geometry::exact(g.submission_slots(), g.completion_slots(), g.arena_bytes()), Some(g));
    }
}
