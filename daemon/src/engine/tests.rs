//! The loop with a model that computes nothing, and clients by hand: what happens to those that do not read, with times
//! short enough to wait for.

use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc;
use std::thread::JoinHandle;

use llmd_protocol::completion::Completion;
use llmd_protocol::handshake::{self, Handshake, Hello, Progress};
use llmd_protocol::session::{ClientSession, DaemonSession};

use super::*;
use crate::kv_cache::block::BlockId;
use crate::model::architecture::Architecture;
use crate::model::runner::MemoryFigures;
use crate::notifier::Notifier;
use crate::outbox::OutboxLimits;
use crate::scheduler::{Policy, SchedulerSettings};
use crate::sequence::{NewSequence, Sampling};
use crate::sessions::{Opened, SessionShared};

const PATIENCE: Duration = Duration::from_secs(20);
/// Any time shorter than this is not waited for.
const LIMITS: OutboxLimits = OutboxLimits {
    spill_slots_max: 2048,
    suspend_after: Duration::from_millis(20),
    give_up_after: Duration::from_millis(200),
};

/// Says the letter x whatever it is asked.
struct Parrot {
    logits: Vec<f32>,
}

/// Special tokens come first, then the bytes.
const LETTER: u32 = 3 + b'x' as u32;

impl Runner for Parrot {
    fn forward(&mut self, batch: &ForwardBatch) -> Result<&mut [f32], BackendError> {
        self.logits.clear();
        self.logits.resize(batch.logit_rows.len() * self.vocab_size(), 0.0);
        for row in self.logits.chunks_exact_mut(260) {
            row[LETTER as usize] = 1.0;
        }
        // A step takes its time, as a model's does.
        std::thread::sleep(Duration::from_micros(50));
        Ok(&mut self.logits)
    }
    fn bind_caller(&self) {}
    fn copy_block(&mut self, _: BlockId, _: BlockId) {}
    fn vocab_size(&self) -> usize {
        260
    }
    fn architecture(&self) -> &Architecture {
        unreachable!("the engine does not ask")
    }
    fn memory(&self) -> MemoryFigures {
        unreachable!("the engine does not ask")
    }
    fn describe(&self) -> String {
        "a parrot".into()
    }
}

struct Running {
    events: mpsc::SyncSender<Event>,
    thread: JoinHandle<Result<Outcome, BackendError>>,
}

fn start() -> Running {
    start_with(None)
}

fn start_with(step_log: Option<StepLog>) -> Running {
    let metrics = Arc::new(Metrics::new(16));
    let (notifier, _) = Notifier::spawn(Arc::clone(&metrics)).unwrap();
    let tokenizer = Arc::new(Tokenizer::build(&crate::intake::tests::source(Some(1), "")).unwrap());
    let scheduler = Scheduler::new(SchedulerSettings {
        policy: Policy::Continuous,
        tokens_per_step: 64,
        sequences_running_max: 8,
        prefill_chunk_max: 16,
        context_max: 100_000,
        kv_blocks: 20_000,
        prefix_cache: false,
        waiting_max: 8,
    })
    .unwrap();
    let engine = Engine {
        scheduler,
        runner: Box::new(Parrot { logits: Vec::new() }),
        sampler: Sampler::new(260),
        tokenizer,
        outbox: Outbox::new(notifier, Arc::clone(&metrics), LIMITS),
        metrics,
        step_log,
        draining: Arc::new(AtomicBool::new(false)),
    };
    let (events, received) = mpsc::sync_channel(EVENTS_MAX);
    Running { events, thread: std::thread::spawn(move || engine.run(&received)) }
}

impl Running {
    fn session(&self, key: u64) -> (Arc<SessionShared>, ClientSession) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut handshake = Handshake::new(ours).unwrap();
        handshake::send_hello(&theirs, Hello { completion_slots: 64, ..Hello::default() }).unwrap();
        assert!(matches!(handshake.readable(), Progress::Hello(_)));
        let shared = Arc::new(SessionShared::new(SessionKey(key), handshake.peer()));
        let DaemonSession { socket, completions, doorbell, .. } = handshake.welcome(7, key).unwrap();
        let opened = Opened { shared: Arc::clone(&shared), completions, doorbell, socket };
        self.events.send(Event::Session(Arrival::Opened(Box::new(opened)))).ok().unwrap();
        (shared, handshake::receive_welcome(theirs, PATIENCE).unwrap().map().unwrap())
    }

    fn submit(&self, session: &SessionShared, request: u32, max_tokens: u32) {
        session.in_flight.fetch_add(1, Ordering::Relaxed);
        let sampling = Sampling { seed: 1, ..Sampling::greedy(max_tokens) };
        let submission = Submission {
            session: session.key,
            request,
            received: Instant::now(),
            cancelled: Arc::default(),
            sequence: NewSequence { prompt: vec![LETTER; 3], sampling, cache_salt: 0 },
            stop: vec![],
        };
        self.events.send(Event::Intake(Verdict::Admitted(Box::new(submission)))).ok().unwrap();
    }

    fn drain(self) -> Outcome {
        self.events.send(Event::Drain).ok().unwrap();
        self.thread.join().unwrap().unwrap()
    }
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "waited until {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Reads until each of `requests` has ended; returns their numbers of tokens and last records.
fn ends_of<const N: usize>(client: &mut ClientSession, requests: [u32; N]) -> [(u32, Completion); N] {
    let mut tokens = [0; N];
    let mut ends = [None; N];
    wait_until("the requests have ended", || {
        while let Some(slot) = client.completions.pop().unwrap() {
            client.completions.release();
            let at = requests.iter().position(|&request| request == slot.request_id()).expect("one of those in flight");
            assert!(ends[at].is_none(), "nothing follows the last record");
            match slot.decode().unwrap() {
                Completion::Tokens { index, ids } => {
                    assert_eq!(index, tokens[at], "no token is lost");
                    tokens[at] += ids.len() as u32;
                }
                last @ (Completion::Done { .. } | Completion::Error { .. }) => ends[at] = Some(last),
                _ => {}
            }
        }
        ends.iter().all(Option::is_some)
    });
    std::array::from_fn(|at| (tokens[at], ends[at].expect("it has ended")))
}

fn end_of(client: &mut ClientSession, request: u32) -> (u32, Completion) {
    let [end] = ends_of(client, [request]);
    end
}

#[test]
fn who_never_reads_is_given_up_again_and_again_while_others_are_served() {
    let engine = start();
    let (deaf, mut ring) = engine.session(1);
    let (other, mut reader) = engine.session(2);
    for episode in 0..2 {
        engine.submit(&deaf, 1, 50_000);
        engine.submit(&other, 1, 200);
        assert_eq!(end_of(&mut reader, 1).0, 200);
        wait_until("it is given up", || deaf.in_flight.load(Ordering::Relaxed) == 0);
        // And at once, since it still has not read.
        engine.submit(&deaf, 2, 50_000);
        wait_until("it is given up", || deaf.in_flight.load(Ordering::Relaxed) == 0);
        let [(tokens, first), (_, second)] = ends_of(&mut ring, [1, 2]);
        assert!((32..2048).contains(&tokens), "{tokens} tokens in episode {episode}");
        let slow_reader = Completion::Error { number: Reject::SlowReader.number() };
        assert_eq!((first, second), (slow_reader, slow_reader));
        engine.submit(&deaf, 3, 5);
        assert_eq!(end_of(&mut ring, 3).0, 5, "the session lives on");
        assert_eq!(deaf.condemned(), None);
    }
    assert_eq!(engine.drain(), Outcome::Drained);
}

#[test]
fn who_reads_again_in_time_loses_nothing() {
    let engine = start();
    let (slow, mut ring) = engine.session(1);
    engine.submit(&slow, 1, 3000);
    // Longer than until it is suspended, shorter than until it is given up.
    std::thread::sleep(Duration::from_millis(60));
    let (tokens, end) = end_of(&mut ring, 1);
    assert_eq!(tokens, 3000);
    assert!(matches!(end, Completion::Done { reason: message::FinishReason::Length, .. }));
    assert_eq!(engine.drain(), Outcome::Drained);
}

/// vllm#24885: a drain that drops what runs. A request set aside is finished too, or given up, before the loop ends.
#[test]
fn a_drain_waits_for_who_does_not_read_as_long_as_anybody_else_would() {
    let engine = start();
    let (deaf, mut ring) = engine.session(1);
    engine.submit(&deaf, 1, 50_000);
    wait_until("it runs", || deaf.output_tokens.load(Ordering::Relaxed) > 0);
    engine.events.send(Event::Drain).ok().unwrap();
    wait_until("it is given up", || deaf.in_flight.load(Ordering::Relaxed) == 0);
    assert_eq!(end_of(&mut ring, 1).1, Completion::Error { number: Reject::SlowReader.number() });
    assert_eq!(engine.thread.join().unwrap().unwrap(), Outcome::Drained);
}

#[test]
fn a_refusal_is_never_taken_for_the_end_of_another_request() {
    let engine = start();
    let (session, mut ring) = engine.session(1);
    let refusal = || Refusal::new(Reject::Malformed, "nonsense");
    let key = session.key;
    engine.submit(&session, 7, 50_000);
    engine.events.send(Event::Intake(Verdict::Refused { session: key, request: 7, refusal: refusal() })).ok().unwrap();
    wait_until("the session is condemned", || session.condemned().is_some());
    engine.events.send(Event::Session(Arrival::Closed { session: key })).ok().unwrap();
    assert_eq!(engine.drain(), Outcome::Drained, "the first is cancelled with its session");
    while let Some(slot) = ring.completions.pop().unwrap() {
        assert!(!slot.is_terminal(), "{slot:?}");
    }
}

/// A drain that ends while a request is being read: nobody would ever tell its client.
#[test]
fn a_drain_waits_for_what_is_still_being_read() {
    let engine = start();
    let (session, mut ring) = engine.session(1);
    // Taken from the ring, and with the intake's workers.
    session.in_flight.fetch_add(1, Ordering::Relaxed);
    engine.events.send(Event::Drain).ok().unwrap();
    std::thread::sleep(Duration::from_millis(50));
    let refusal = Refusal::new(Reject::Malformed, "nonsense");
    let verdict = Event::Intake(Verdict::Refused { session: session.key, request: 7, refusal });
    assert!(engine.events.send(verdict).is_ok(), "the loop has ended");
    assert_eq!(end_of(&mut ring, 7).1, Completion::Error { number: Reject::Malformed.number() });
    assert_eq!(engine.thread.join().unwrap().unwrap(), Outcome::Drained);
}

#[test]
fn the_step_log_counts_on_while_nothing_runs_and_names_who_was_cancelled() {
    let path = std::env::temp_dir().join(format!("llmd-engine-steps-{}.jsonl", std::process::id()));
    let (log, writer) = StepLog::create(&path).unwrap();
    let engine = start_with(Some(log));
    let (slow, mut ring) = engine.session(1);
    engine.submit(&slow, 1, 3000);
    // Set aside: the engine looks after it again and again and computes nothing.
    std::thread::sleep(Duration::from_millis(60));
    assert_eq!(end_of(&mut ring, 1).0, 3000);
    engine.submit(&slow, 2, 50_000);
    wait_until("it runs", || slow.output_tokens.load(Ordering::Relaxed) > 3000);
    engine.events.send(Event::Session(Arrival::Cancelled { session: slow.key, request: 2 })).ok().unwrap();
    assert!(matches!(end_of(&mut ring, 2).1, Completion::Done { reason: message::FinishReason::Cancelled, .. }));
    engine.submit(&slow, 3, 1);
    end_of(&mut ring, 3);
    assert_eq!(engine.drain(), Outcome::Drained);
    writer.join().unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let steps: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let numbers: Vec<u64> = steps.iter().map(|step| step["step"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (1..=steps.len() as u64).collect::<Vec<_>>());
    let names = |key: &str| -> Vec<String> {
        let all = steps.iter().flat_map(|step| step[key].as_array().unwrap());
        all.map(|name| name.as_str().unwrap().to_owned()).collect()
    };
    // The first was admitted again after it had been set aside.
    let mut admitted = names("admitted");
    admitted.dedup();
    assert_eq!(admitted.len(), 3);
    assert_eq!(names("finished"), admitted, "each ends in the log, once");
}
