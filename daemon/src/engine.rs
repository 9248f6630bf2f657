//! The loop, and nothing else: one thread owns all scheduling state.
//!
//! Each turn: take in what has arrived, plan a step, flatten it, compute it, sample, commit, turn tokens into text,
//! publish. Requests that end leave in the same step; requests that arrive join in the next. Nothing here waits for a
//! client, and with nothing to compute the thread sleeps on its channel.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use llmd_protocol::doorbell::CompletionDoorbell;
use llmd_protocol::layout::CompletionSlot;
use llmd_protocol::message::{self, Reject, Usage};
use llmd_protocol::ring::CompletionProducer;

use crate::backend::BackendError;
use crate::batch::ForwardBatch;
use crate::intake::{Refusal, Submission};
use crate::metrics::Metrics;
use crate::model::runner::Runner;
use crate::outbox::{Outbox, Pressure};
use crate::sampler::Sampler;
use crate::scheduler::{Scheduler, SubmitError};
use crate::sequence::{FinishReason, SequenceId};
use crate::sessions::{SessionKey, SessionShared};
use crate::step_log::StepLog;
use crate::stream::{Stream, Streams};
use crate::text::tokenizer::Tokenizer;

/// Events that may wait for the engine. Senders are the sessions thread and the intake's workers, which wait when it is
/// full; the engine waits for neither, so a full channel always drains.
pub const EVENTS_MAX: usize = 4096;
/// Events taken in between two steps, so that a flood of them cannot hold up the streams that run.
const EVENTS_PER_STEP_MAX: usize = 1024;
/// How often an idle engine looks whether a slow reader has made room.
const SPILL_POLL: Duration = Duration::from_millis(5);

/// Everything that reaches the engine from outside.
pub enum Event {
    /// A client has connected.
    SessionOpened {
        /// Who.
        shared: Arc<SessionShared>,
        /// Where its answers go.
        completions: CompletionProducer,
        /// How it is woken.
        doorbell: Arc<CompletionDoorbell>,
    },
    /// A client has hung up, or was closed for lying.
    SessionClosed {
        /// Which.
        session: SessionKey,
    },
    /// A request that passed the intake.
    Submit(Box<Submission>),
    /// A request the intake refused.
    Refuse {
        /// Whose.
        session: SessionKey,
        /// The client's number for it.
        request: u32,
        /// Why.
        refusal: Refusal,
    },
    /// A request cancelled before it was read.
    CancelledEarly {
        /// Whose.
        session: SessionKey,
        /// The client's number for it.
        request: u32,
    },
    /// The client wants no more of a request.
    Cancel {
        /// Whose.
        session: SessionKey,
        /// The client's number for it.
        request: u32,
    },
    /// Admit nothing more, finish what runs, then end the loop.
    Drain,
    /// End the loop now, whatever runs: the drain took too long.
    Stop,
}

/// What the engine is made of.
pub struct Engine {
    /// Decides what is computed.
    pub scheduler: Scheduler,
    /// Computes.
    pub runner: Box<dyn Runner>,
    /// Chooses tokens.
    pub sampler: Sampler,
    /// For the text of tokens.
    pub tokenizer: Arc<Tokenizer>,
    /// Where answers go.
    pub outbox: Outbox,
    /// What operators see.
    pub metrics: Arc<Metrics>,
    /// A record of every step, where asked for.
    pub step_log: Option<StepLog>,
    /// Set once draining, so that intake can refuse early.
    pub draining: Arc<AtomicBool>,
}

/// Why the loop ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// Everything in flight was finished.
    Drained,
    /// Requests were cut off.
    Stopped {
        /// How many.
        cut_off: usize,
    },
}

impl Engine {
    /// Serves until told to drain. An error is the device's and ends the process.
    pub fn run(self, events: &Receiver<Event>) -> Result<Ended, BackendError> {
        let mut turn = Turn {
            engine: self,
            batch: ForwardBatch::default(),
            streams: Streams::default(),
            sampled: Vec::new(),
            finished: Vec::new(),
        };
        loop {
            if let Some(ended) = turn.take_in(events) {
                return Ok(ended);
            }
            turn.relieve_slow_readers();
            turn.step()?;
            turn.engine.outbox.publish();
        }
    }
}

/// The engine with what it keeps between steps.
struct Turn {
    engine: Engine,
    batch: ForwardBatch,
    streams: Streams,
    sampled: Vec<(SequenceId, u32)>,
    finished: Vec<SequenceId>,
}

impl Turn {
    /// Takes in what has arrived; sleeps when there is nothing to compute. Returns how the loop ends, when it does.
    fn take_in(&mut self, events: &Receiver<Event>) -> Option<Ended> {
        for _ in 0..EVENTS_PER_STEP_MAX {
            let event = match events.try_recv() {
                Ok(event) => event,
                Err(TryRecvError::Disconnected) => return Some(self.ended()),
                Err(TryRecvError::Empty) if self.engine.scheduler.has_work() => break,
                Err(TryRecvError::Empty) => {
                    self.engine.outbox.publish();
                    self.observe_load();
                    let spilling = self.engine.outbox.is_spilling();
                    if self.engine.draining.load(Ordering::Relaxed) && self.engine.scheduler.drained() && !spilling {
                        return Some(Ended::Drained);
                    }
                    let event = if spilling || self.engine.scheduler.sequences_live() > 0 {
                        events.recv_timeout(SPILL_POLL)
                    } else {
                        events.recv().map_err(|_| RecvTimeoutError::Disconnected)
                    };
                    match event {
                        Ok(event) => event,
                        Err(RecvTimeoutError::Timeout) => break,
                        Err(RecvTimeoutError::Disconnected) => return Some(self.ended()),
                    }
                }
            };
            match event {
                Event::SessionOpened { shared, completions, doorbell } => {
                    self.engine.outbox.open(completions, doorbell, shared);
                }
                Event::SessionClosed { session } => {
                    for sequence in self.engine.outbox.close(session) {
                        self.drop_sequence(sequence, FinishReason::Cancelled);
                    }
                }
                Event::Submit(submission) => self.submit(*submission),
                Event::Refuse { session, request, refusal } => self.refuse(session, request, &refusal),
                Event::CancelledEarly { session, request } => {
                    self.end(session, request, CompletionSlot::done(request, message::FinishReason::Cancelled, Usage::default()));
                }
                Event::Cancel { session, request } => {
                    if let Some(sequence) = self.engine.outbox.sequence(session, request) {
                        self.finish(sequence, FinishReason::Cancelled);
                    }
                }
                Event::Drain => self.engine.draining.store(true, Ordering::Relaxed),
                Event::Stop => return Some(self.ended()),
            }
        }
        None
    }

    fn ended(&self) -> Ended {
        match self.engine.scheduler.sequences_live() {
            0 => Ended::Drained,
            cut_off => Ended::Stopped { cut_off },
        }
    }

    fn submit(&mut self, submission: Submission) {
        let Submission { session, request, received, cancelled, sequence, stop } = submission;
        if !self.engine.outbox.is_open(session) {
            return;
        }
        if self.engine.outbox.sequence(session, request).is_some() {
            // Two requests of one number cannot be told apart in the answers: the client breaks the protocol.
            self.engine.outbox.give_up(session, "used the number of a request that is still in flight");
            return;
        }
        if cancelled.load(Ordering::Relaxed) {
            self.end(session, request, CompletionSlot::done(request, message::FinishReason::Cancelled, Usage::default()));
            return;
        }
        if self.engine.draining.load(Ordering::Relaxed) {
            let detail = "the daemon is draining; try again once it has restarted".into();
            self.refuse(session, request, &Refusal { reject: Reject::Draining, detail });
            return;
        }
        let prompt_tokens = sequence.prompt.len() as u32;
        let min_tokens = sequence.sampling.min_tokens;
        match self.engine.scheduler.submit(sequence) {
            Ok(id) => {
                let begun = self.engine.outbox.begin(session, request, id);
                assert!(begun, "the session is open and the number is free: both were just checked");
                let stream = Stream::new(session, request, received, &self.engine.tokenizer, stop, min_tokens);
                self.streams.insert(id, stream);
                self.engine.metrics.accepted(u64::from(prompt_tokens));
                self.engine.outbox.push(session, CompletionSlot::accepted(request, prompt_tokens), Instant::now());
            }
            Err(error) => {
                let reject = match &error {
                    SubmitError::QueueFull { .. } => Reject::Busy,
                    _ => Reject::NeverFits,
                };
                self.refuse(session, request, &Refusal { reject, detail: error.to_string() });
            }
        }
    }

    /// One step: plan -> batch -> forward -> sample -> commit -> text -> outbox.
    fn step(&mut self) -> Result<(), BackendError> {
        let started = Instant::now();
        let plan = self.engine.scheduler.plan();
        self.engine.metrics.preempted(plan.preempted.len() as u64);
        for &id in &plan.admitted {
            self.streams.get_mut(id).admitted.get_or_insert(started);
        }
        if plan.entries.is_empty() {
            // What ended without a step (a leader that cannot fit alone) is still to be told.
            self.engine.scheduler.recycle(plan);
            return Ok(());
        }
        let Engine { scheduler, runner, sampler, .. } = &mut self.engine;
        let scratch = scheduler.scratch_block();
        self.batch.fill(&plan, scratch, |id| scheduler.sequence(id).expect("a plan names live sequences"));
        let logits = runner.forward(&self.batch)?;
        let vocabulary = logits.len() / self.batch.logit_rows.len().max(1);
        self.sampled.clear();
        for (entry, row) in plan.entries.iter().filter(|e| e.samples).zip(logits.chunks_exact_mut(vocabulary.max(1))) {
            let sequence = scheduler.sequence(entry.sequence).expect("a plan names live sequences");
            let (prompt, output) = sequence.tokens.split_at(sequence.prompt_len);
            self.sampled.push((entry.sequence, sampler.sample(row, &sequence.sampling, prompt, output)));
        }
        let committed = self.engine.scheduler.commit(&plan, &self.sampled);
        let now = Instant::now();
        self.finished.clear();
        // filled in once the scheduler's commit type is known
        let _ = (committed, now);
        Ok(())
    }
}
