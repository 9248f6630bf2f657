//! The client against a small daemon made of the protocol's own daemon side, without a model: it does what the prompt says.

use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Barrier};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use futures_core::Stream;
use llmd_client::{Client, Error, Event, FinishReason, GenerateRequest, Generation, Prompt, Refusal, Reject, Usage};
use llmd_protocol::completion::CompletionSlot;
use llmd_protocol::handshake::{Handshake, Progress};
use llmd_protocol::layout::SessionState;
use llmd_protocol::session::{CompletionDoorbell, DaemonSession, Submission};

/// A daemon on threads of this process. Its socket and sessions are gone when it is dropped.
struct Daemon {
    path: PathBuf,
    stop: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
    cancels: Receiver<u32>,
}

impl Daemon {
    fn start(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("llmd-client-{}-{name}.sock", std::process::id()));
        Self::start_at(path, None)
    }

    fn start_at(path: PathBuf, refusal: Option<Refusal>) -> Self {
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let (sender, cancels) = channel();
        let stopped = stop.clone();
        let thread = thread::spawn(move || accept(&listener, refusal, &stopped, &sender));
        Self { path, stop, thread: Some(thread), cancels }
    }

    fn client(&self) -> Client {
        Client::connect(&self.path).unwrap()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
        let _ = std::fs::remove_file(&self.path);
    }
}

fn accept(listener: &UnixListener, refusal: Option<Refusal>, stop: &Arc<AtomicBool>, cancels: &Sender<u32>) {
    static SESSIONS: AtomicU64 = AtomicU64::new(1);
    let mut sessions = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let Ok((stream, _)) = listener.accept() else {
            thread::sleep(Duration::from_millis(1));
            continue;
        };
        let mut handshake = Handshake::new(stream).unwrap();
        while handshake.readable() == Progress::Pending {
            thread::sleep(Duration::from_micros(100));
        }
        if let Some(refusal) = refusal {
            handshake.refuse(refusal, Duration::from_millis(250));
            continue;
        }
        let session = handshake.welcome(1, SESSIONS.fetch_add(1, Ordering::Relaxed)).unwrap();
        let (stop, cancels) = (stop.clone(), cancels.clone());
        sessions.push(thread::spawn(move || serve(session, &stop, &cancels)));
    }
    sessions.into_iter().for_each(|s| s.join().unwrap());
}

/// One session, until the client goes, the test stops it, or a prompt says so.
fn serve(mut session: DaemonSession, stop: &AtomicBool, cancels: &Sender<u32>) {
    let mut waiting = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        while let Some(submission) = session.submissions.next().unwrap() {
            match submission {
                Submission::Cancel { request_id } => {
                    let _ = cancels.send(request_id);
                    if let Some(at) = waiting.iter().position(|&id| id == request_id) {
                        waiting.swap_remove(at);
                        let done = CompletionSlot::done(request_id, FinishReason::Cancelled, Usage::default());
                        publish(&mut session, &[done]);
                    }
                }
                Submission::Submit { request_id: id, payload } => {
                    let request = GenerateRequest::decode(&payload).unwrap();
                    let Prompt::Text(text) = request.prompt else { panic!("only texts") };
                    match text.as_str() {
                        "die" => return,
                        "close" => {
                            session.submissions.set_state(SessionState::Closed);
                            return session.socket.hang_up();
                        }
                        "nonsense" => {
                            publish(&mut session, &[CompletionSlot::from_words([u64::from(id) | 99 << 32, 0, 0, 0])])
                        }
                        "reject" => {
                            let mut slots: Vec<_> =
                                CompletionSlot::detail(id, "the reason, in more than one slot").collect();
                            slots.push(CompletionSlot::error(id, Reject::NeverFits));
                            publish(&mut session, &slots);
                        }
                        "wait" => {
                            waiting.push(id);
                            publish(&mut session, &[CompletionSlot::accepted(id, 1)]);
                        }
                        text => echo(&mut session, id, text),
                    }
                }
            }
        }
        if session.submissions.arm_wake().unwrap() {
            let drained = session.socket.wait(Some(Duration::from_millis(5))).unwrap();
            if drained.hung_up {
                return;
            }
            session.submissions.note_doorbells(drained.doorbells).unwrap();
        }
    }
}

/// Answers with the prompt, a word a step.
fn echo(session: &mut DaemonSession, id: u32, text: &str) {
    publish(session, &[CompletionSlot::accepted(id, text.len() as u32)]);
    let mut words = 0;
    for word in text.split_inclusive(' ') {
        let mut slots = vec![CompletionSlot::tokens(id, words, &[words])];
        slots.extend(CompletionSlot::text(id, word));
        publish(session, &slots);
        words += 1;
    }
    let usage = Usage { prompt_tokens: text.len() as u32, cached_tokens: 0, output_tokens: words };
    publish(session, &[CompletionSlot::done(id, FinishReason::Stop, usage)]);
}

fn publish(session: &mut DaemonSession, slots: &[CompletionSlot]) {
    for &slot in slots {
        while session.completions.push(slot).is_err() {
            ring(session);
            session.completions.free().unwrap();
            if session.socket.drain().hung_up {
                return;
            }
            thread::yield_now();
        }
    }
    ring(session);
}

fn ring(session: &mut DaemonSession) {
    if let Some(published) = session.completions.publish() {
        CompletionDoorbell::fence();
        if session.doorbell.needs_wake(published) {
            session.doorbell.ring();
        }
    }
}

fn text(prompt: impl Into<String>) -> GenerateRequest {
    GenerateRequest::text(prompt)
}

#[test]
fn events_come_in_order_and_end() {
    let daemon = Daemon::start("order");
    let words = "one two a-word-of-more-than-sixteen-bytes-äöü 😀";
    let mut generation = daemon.client().generate(text(words)).unwrap();
    let events: Vec<Event> = generation.by_ref().map(Result::unwrap).collect();
    assert!(generation.next().is_none());
    assert_eq!(events[0], Event::Accepted { prompt_tokens: words.len() as u32 });
    assert!(matches!(&events[1], Event::Tokens(ids) if **ids == [0]));
    assert_eq!(events[2], Event::Text("one ".into()));
    let usage = Usage { prompt_tokens: words.len() as u32, cached_tokens: 0, output_tokens: 4 };
    assert_eq!(*events.last().unwrap(), Event::Done { reason: FinishReason::Stop, usage });
    let joined: String =
        events.iter().filter_map(|e| if let Event::Text(t) = e { Some(t.as_str()) } else { None }).collect();
    assert_eq!(joined, words);
}

#[test]
fn many_requests_share_a_session() {
    let daemon = Daemon::start("many");
    let client = daemon.client();
    let together = Barrier::new(16);
    thread::scope(|scope| {
        for i in 0..16 {
            let (client, together) = (client.clone(), &together);
            scope.spawn(move || {
                together.wait();
                for j in 0..20 {
                    let words = format!("thread {i} says {j} ").repeat(1 + j * 7);
                    let answer = client.generate(text(words.as_str())).unwrap().answer().unwrap();
                    assert_eq!(answer.text, words);
                    assert!(answer.tokens.iter().copied().eq(0..answer.usage.output_tokens));
                }
            });
        }
    });
}

#[test]
fn a_request_larger_than_the_arena_goes_in_parts() {
    let daemon = Daemon::start("large");
    let words = "x".repeat(300_000);
    assert_eq!(daemon.client().generate(text(words.as_str())).unwrap().text().unwrap(), words);
}

#[test]
fn dropping_cancels_and_so_does_cancel() {
    let daemon = Daemon::start("cancel");
    let client = daemon.client();
    let mut generation = client.generate(text("wait")).unwrap();
    assert_eq!(generation.next().unwrap().unwrap(), Event::Accepted { prompt_tokens: 1 });
    assert!(generation.next_within(Duration::from_millis(10)).is_pending());
    let mut short = client.generate(text("short")).unwrap();
    assert!(short.next_within(Duration::MAX).is_ready());
    drop(short.text());
    let id = generation.id();
    drop(generation);
    assert_eq!(daemon.cancels.recv_timeout(Duration::from_secs(5)), Ok(id));

    let generation = client.generate(text("wait")).unwrap();
    let canceller = generation.canceller();
    thread::spawn(move || canceller.cancel());
    assert_eq!(generation.answer().unwrap().reason, FinishReason::Cancelled);
    // What has ended is not cancelled.
    let done = client.generate(text("short")).unwrap();
    let late = done.canceller();
    done.text().unwrap();
    late.cancel();
    assert!(daemon.cancels.recv_timeout(Duration::from_millis(50)).is_ok(), "the one of the canceller");
    assert!(daemon.cancels.recv_timeout(Duration::from_millis(50)).is_err());
}

#[test]
fn a_rejection_comes_with_its_reason() {
    let daemon = Daemon::start("reject");
    match daemon.client().generate(text("reject")).unwrap().text() {
        Err(Error::Rejected { reject: Reject::NeverFits, detail }) => {
            assert_eq!(detail, "the reason, in more than one slot")
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_is_invalid_is_not_sent() {
    let daemon = Daemon::start("invalid");
    let mut request = text("x");
    request.sampling.top_p = 2.0;
    let error = daemon.client().generate(&request).unwrap_err();
    assert_eq!(error.to_string(), "invalid request: top_p must be a number above 0 and at most 1");
}

#[test]
fn requests_in_flight_are_bounded() {
    let daemon = Daemon::start("bounded");
    let client = daemon.client();
    let held: Vec<Generation> = (0..256).map(|_| client.generate(text("wait")).unwrap()).collect();
    let error = client.generate(text("one more")).unwrap_err();
    assert!(matches!(error, Error::Rejected { reject: Reject::Busy, .. }) && error.is_transient());
    // A dropped request counts until the daemon has ended it.
    drop(held);
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        match client.generate(text("one more")) {
            Ok(generation) => break assert_eq!(generation.text().unwrap(), "one more"),
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_restart_ends_what_is_in_flight_and_the_next_request_reconnects() {
    let daemon = Daemon::start("restart");
    let client = daemon.client();
    let waiting = client.generate(text("wait")).unwrap();
    let dying = client.generate(text("die")).unwrap();
    assert!(matches!(dying.text(), Err(Error::DaemonRestarted)));
    assert!(matches!(waiting.text(), Err(Error::DaemonRestarted)));
    assert_eq!(client.generate(text("back")).unwrap().text().unwrap(), "back");
    // Ended on purpose is another error.
    assert!(matches!(client.generate(text("close")).unwrap().text(), Err(Error::Disconnected)));
    assert_eq!(client.generate(text("back again")).unwrap().text().unwrap(), "back again");
    // Records that make no sense end the session, not the process.
    assert!(matches!(client.generate(text("nonsense")).unwrap().text(), Err(Error::Protocol(_))));
    assert_eq!(client.generate(text("still here")).unwrap().text().unwrap(), "still here");
    // Gone for good, then there again.
    let path = daemon.path.clone();
    let waiting = client.generate(text("wait")).unwrap();
    drop(daemon);
    assert!(matches!(waiting.text(), Err(Error::DaemonRestarted)));
    let error = client.generate(text("anyone?")).unwrap_err();
    assert!(
        matches!(&error, Error::NotRunning { .. }) && error.to_string().contains("systemctl start llmd"),
        "{error}"
    );
    let _daemon = Daemon::start_at(path, None);
    assert_eq!(client.generate(text("hello")).unwrap().text().unwrap(), "hello");
}

#[test]
fn a_refusal_says_why() {
    let path = std::env::temp_dir().join(format!("llmd-client-{}-refused.sock", std::process::id()));
    let daemon = Daemon::start_at(path, Some(Refusal::Draining));
    match Client::connect(&daemon.path) {
        Err(Error::Refused { refusal: Refusal::Draining, retry_after }) => {
            assert_eq!(retry_after, Duration::from_millis(250))
        }
        other => panic!("{other:?}"),
    }
}

/// Wakes the thread that polls.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

#[test]
fn a_generation_is_a_stream() {
    let daemon = Daemon::start("stream");
    let client = daemon.client();
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut context = Context::from_waker(&waker);
    // Several streams on one thread, polled whenever any has something.
    let mut streams: Vec<_> =
        (0..8).map(|i| (client.generate(text(format!("stream {i} of 8"))).unwrap(), String::new())).collect();
    let mut open = streams.len();
    while open > 0 {
        open = 0;
        for (stream, said) in &mut streams {
            loop {
                match Pin::new(&mut *stream).poll_next(&mut context) {
                    Poll::Ready(Some(Ok(Event::Text(piece)))) => said.push_str(&piece),
                    Poll::Ready(Some(event)) => drop(event.unwrap()),
                    Poll::Ready(None) => break,
                    Poll::Pending => break open += 1,
                }
            }
        }
        if open > 0 {
            thread::park_timeout(Duration::from_secs(5));
        }
    }
    for (i, (_, said)) in streams.iter().enumerate() {
        assert_eq!(*said, format!("stream {i} of 8"));
    }
}
