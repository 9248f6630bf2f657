//! The loop, and nothing else: one thread owns all scheduling state.
//!
//! Each turn: take in what has arrived, plan a step, flatten it, compute it, sample, commit, turn tokens into text,
//! publish. Requests that end leave in the same step; requests that arrive join in the next. Nothing here waits for a
//! client, and with nothing to compute the thread sleeps on its channel.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use llmd_protocol::completion::CompletionSlot;
use llmd_protocol::control::{finish_name, reject_name};
use llmd_protocol::message::{self, Reject, Usage};

use crate::backend::BackendError;
use crate::batch::ForwardBatch;
use crate::intake::{Submission, Verdict};
use crate::metrics::{Finished, Metrics, StepSample};
use crate::model::runner::Runner;
use crate::outbox::{Outbox, Pressure};
use crate::plan::{PlanEntry, StepPlan};
use crate::sampler::{Sampler, Tokens};
use crate::scheduler::{Ended, Scheduler, SubmitError};
use crate::sequence::{FinishReason, SequenceId};
use crate::sessions::{Arrival, Refusal, SessionKey};
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
    /// From the sessions thread.
    Session(Arrival),
    /// From the intake's workers.
    Intake(Verdict),
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
pub enum Outcome {
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
    pub fn run(self, events: &Receiver<Event>) -> Result<Outcome, BackendError> {
        self.runner.bind_caller();
        let mut turn = Turn {
            engine: self,
            batch: ForwardBatch::default(),
            streams: Streams::default(),
            sampled: Vec::new(),
            finished: Vec::new(),
            stopped: Vec::new(),
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
    /// Sequences that were in a step and have ended since the last one was recorded, in it or between two.
    finished: Vec<SequenceId>,
    /// Sequences whose text has met a stop string in this step.
    stopped: Vec<SequenceId>,
}

impl Turn {
    /// Takes in what has arrived; sleeps when there is nothing to compute. Returns how the loop ends, when it does.
    fn take_in(&mut self, events: &Receiver<Event>) -> Option<Outcome> {
        for _ in 0..EVENTS_PER_STEP_MAX {
            let event = match events.try_recv() {
                Ok(event) => event,
                Err(TryRecvError::Disconnected) => return Some(self.ended()),
                Err(TryRecvError::Empty) if self.engine.scheduler.has_work() => break,
                Err(TryRecvError::Empty) => {
                    self.engine.outbox.publish();
                    self.observe_load();
                    let spilling = self.engine.outbox.is_spilling();
                    // Requests may still be with the intake: each gets its answer, if only a refusal.
                    let answered = !spilling && self.engine.scheduler.drained() && self.engine.outbox.in_flight() == 0;
                    if answered && self.engine.draining.load(Ordering::Relaxed) {
                        return Some(Outcome::Drained);
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
                Event::Session(Arrival::Opened(opened)) => self.engine.outbox.open(*opened),
                Event::Session(Arrival::Closed { session }) => {
                    for sequence in self.engine.outbox.close(session) {
                        self.finish(sequence, FinishReason::Cancelled);
                    }
                }
                Event::Session(Arrival::Cancelled { session, request }) => {
                    if let Some(sequence) = self.engine.outbox.sequence(session, request) {
                        self.finish(sequence, FinishReason::Cancelled);
                    }
                }
                Event::Intake(Verdict::Admitted(submission)) => self.submit(*submission),
                Event::Session(Arrival::Refused { session, request, refusal })
                | Event::Intake(Verdict::Refused { session, request, refusal }) => {
                    self.refuse(session, request, &refusal);
                }
                Event::Intake(Verdict::Cancelled { session, request }) => self.cancelled_early(session, request),
                Event::Drain => self.engine.draining.store(true, Ordering::Relaxed),
                Event::Stop => return Some(self.ended()),
            }
        }
        None
    }

    fn ended(&self) -> Outcome {
        match self.engine.scheduler.sequences_live() {
            0 => Outcome::Drained,
            cut_off => Outcome::Stopped { cut_off },
        }
    }

    fn submit(&mut self, submission: Submission) {
        let Submission { session, request, received, cancelled, sequence, stop } = submission;
        let prompt_end: Vec<u32> = sequence.prompt.last().copied().into_iter().collect();
        if !self.engine.outbox.is_open(session) {
            return;
        }
        if self.is_duplicate(session, request) {
            return;
        }
        if cancelled.load(Ordering::Relaxed) {
            self.cancelled_early(session, request);
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
                if self.engine.outbox.is_suspended(session) {
                    self.engine.scheduler.pause(id);
                }
                let stream =
                    Stream::new(session, request, received, &self.engine.tokenizer, &prompt_end, &stop, min_tokens);
                self.streams.insert(id, stream);
                self.engine.metrics.accepted(prompt_tokens as usize);
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
        // Only steps that compute are numbered: the step log has no gaps but those it speaks of.
        if !self.engine.scheduler.has_work() {
            return Ok(());
        }
        let started = Instant::now();
        let plan = self.engine.scheduler.plan();
        self.engine.metrics.preempted(plan.preempted.len());
        for &id in &plan.admitted {
            self.admitted(id, started);
        }
        if plan.entries.is_empty() {
            self.engine.scheduler.recycle(plan);
            return Ok(());
        }
        let decodes = self.count_decodes(&plan);
        self.compute(&plan)?;
        let mut committed = self.engine.scheduler.commit(&plan, &self.sampled);
        let now = Instant::now();
        for token in &committed.tokens {
            self.deliver(token.id, token.token, token.finished, now);
        }
        for ended in committed.ended.drain(..) {
            self.close(ended, now);
        }
        // Stop strings are found in the text, after the scheduler has taken the token in; the sequence leaves in this
        // same step all the same.
        while let Some(id) = self.stopped.pop() {
            self.finish(id, FinishReason::StopString);
        }
        self.engine.metrics.step(StepSample {
            seconds: started.elapsed().as_secs_f64(),
            prefill_tokens: plan.tokens() - decodes,
            decode_tokens: decodes,
            sampled_tokens: committed.tokens.len(),
            sequences: plan.entries.len(),
        });
        self.observe_load();
        if let Some(log) = &mut self.engine.step_log {
            log.record(&plan, started.elapsed(), self.engine.scheduler.waiting_len(), &self.finished);
        }
        self.finished.clear();
        self.engine.scheduler.recycle_committed(committed);
        self.engine.scheduler.recycle(plan);
        Ok(())
    }

    /// Fills `sampled` with one token for each entry of `plan` that samples.
    fn compute(&mut self, plan: &StepPlan) -> Result<(), BackendError> {
        let Engine { scheduler, runner, sampler, .. } = &mut self.engine;
        let find = |id| scheduler.sequence(id).expect("a plan names live sequences");
        self.batch.fill(plan, scheduler.scratch_block(), find);
        let vocabulary = runner.vocab_size();
        let logits = runner.forward(&self.batch)?;
        self.sampled.clear();
        for (entry, row) in plan.entries.iter().filter(|e| e.samples).zip(logits.chunks_exact_mut(vocabulary)) {
            let sequence = find(entry.sequence);
            let (prompt, output) = sequence.tokens.split_at(sequence.prompt_len);
            let token = sampler.sample(row, &sequence.sampling, Tokens { prompt, output });
            self.sampled.push((entry.sequence, token));
        }
        Ok(())
    }

    /// Rows of `plan` that are their sequence's only one and not part of a prompt.
    fn count_decodes(&self, plan: &StepPlan) -> usize {
        let scheduler = &self.engine.scheduler;
        let decodes = |entry: &&PlanEntry| {
            scheduler.sequence(entry.sequence).is_some_and(|s| entry.start as usize >= s.prompt_len)
        };
        plan.entries.iter().filter(decodes).map(|e| e.tokens as usize).sum()
    }

    fn admitted(&mut self, id: SequenceId, now: Instant) {
        let sequence = self.engine.scheduler.sequence(id).expect("a plan names live sequences");
        let stream = self.streams.get_mut(id);
        if stream.admitted.is_none() {
            stream.admitted = Some(now);
            self.engine.metrics.prefix(sequence.prompt_len, sequence.cached);
        }
    }

    /// A token was taken in: its id, and the text that has become certain, go out.
    fn deliver(&mut self, id: SequenceId, token: u32, finished: Option<FinishReason>, now: Instant) {
        let stream = self.streams.get_mut(id);
        let (session, request) = (stream.session, stream.request);
        match stream.last_token.replace(now) {
            Some(last) => self.engine.metrics.inter_token((now - last).as_secs_f64()),
            None => {
                stream.first_token = Some(now);
                self.engine.metrics.first_token((now - stream.received).as_secs_f64());
            }
        }
        let outbox = &mut self.engine.outbox;
        outbox.push(session, CompletionSlot::tokens(request, stream.tokens, &[token]), now);
        outbox.count_tokens(session, 1);
        stream.tokens += 1;
        // A stop id is part of the output, but its text is not.
        if finished != Some(FinishReason::Stop) {
            let delta = stream.text.push(token);
            for slot in CompletionSlot::text(request, delta.text) {
                outbox.push(session, slot, now);
            }
            if delta.stopped && finished.is_none() {
                self.stopped.push(id);
            }
        }
    }

    /// Ends a live sequence for a reason from outside the scheduler.
    fn finish(&mut self, id: SequenceId, reason: FinishReason) {
        if let Some(ended) = self.engine.scheduler.finish(id, reason) {
            self.close(ended, Instant::now());
        }
    }

    /// The sequence has left the scheduler: the rest of its text, then its last record.
    fn close(&mut self, ended: Ended, now: Instant) {
        let Ended { sequence, mut reason } = ended;
        let mut stream = self.streams.remove(sequence.id);
        let (session, request) = (stream.session, stream.request);
        if stream.admitted.is_some() {
            self.finished.push(sequence.id);
        }
        if stream.text.stopped() {
            // The last token allowed completed a stop string: that is what the client asked to be told.
            reason = FinishReason::StopString;
        }
        if reason != FinishReason::SlowReader {
            let rest = stream.text.finish();
            for slot in CompletionSlot::text(request, &rest) {
                self.engine.outbox.push(session, slot, now);
            }
        }
        let usage = Usage {
            prompt_tokens: sequence.prompt_len as u32,
            cached_tokens: sequence.cached as u32,
            output_tokens: sequence.output_len() as u32,
        };
        let (last, word) = match reason {
            FinishReason::Stop => done(request, message::FinishReason::Stop, usage),
            FinishReason::StopString => done(request, message::FinishReason::StopString, usage),
            FinishReason::Length => done(request, message::FinishReason::Length, usage),
            FinishReason::Cancelled => done(request, message::FinishReason::Cancelled, usage),
            FinishReason::KvExhausted => {
                let detail = "the sequence has filled the whole key-value cache; give the daemon more kv_memory";
                self.explain(session, request, detail, now);
                failed(request, Reject::KvExhausted)
            }
            // No explanation: its spill has room for one record of each request in flight.
            FinishReason::SlowReader => failed(request, Reject::SlowReader),
        };
        self.engine.outbox.end(session, request, last, now);
        let seconds = |from: Instant, to: Instant| (to - from).as_secs_f64();
        let queued_until = stream.admitted.unwrap_or(now);
        self.engine.metrics.finished(Finished {
            reason: word,
            output_tokens: u64::from(usage.output_tokens),
            seconds: seconds(stream.received, now),
            queue_seconds: seconds(stream.received, queued_until),
            prefill_seconds: stream.first_token.map(|first| seconds(queued_until, first)),
            decode_seconds: stream.first_token.zip(stream.last_token).map(|(first, last)| seconds(first, last)),
        });
    }

    /// Whether a request of this number is in flight already. Two of one number cannot be told apart in the answers, so
    /// the client breaks the protocol and its session is closed. Asked for whatever came of the second one: its end must
    /// not be taken for the first one's.
    fn is_duplicate(&mut self, session: SessionKey, request: u32) -> bool {
        let duplicate = self.engine.outbox.sequence(session, request).is_some();
        if duplicate {
            self.engine.outbox.give_up(session, "used the number of a request that is still in flight");
        }
        duplicate
    }

    fn refuse(&mut self, session: SessionKey, request: u32, refusal: &Refusal) {
        if self.is_duplicate(session, request) {
            return;
        }
        let now = Instant::now();
        self.engine.metrics.rejected(reject_name(refusal.reject));
        self.explain(session, request, &refusal.detail, now);
        self.engine.outbox.end(session, request, CompletionSlot::error(request, refusal.reject), now);
    }

    fn explain(&mut self, session: SessionKey, request: u32, detail: &str, now: Instant) {
        for slot in CompletionSlot::detail(request, detail) {
            self.engine.outbox.push(session, slot, now);
        }
    }

    /// A request that was cancelled before it became a sequence.
    fn cancelled_early(&mut self, session: SessionKey, request: u32) {
        if self.is_duplicate(session, request) {
            return;
        }
        let last = CompletionSlot::done(request, message::FinishReason::Cancelled, Usage::default());
        self.engine.outbox.end(session, request, last, Instant::now());
    }

    /// Suspends, resumes or gives up the sequences of clients that do not read.
    fn relieve_slow_readers(&mut self) {
        if !self.engine.outbox.is_spilling() {
            return;
        }
        let mut verdicts = Vec::new();
        self.engine.outbox.drain_spills(Instant::now(), |session, pressure| verdicts.push((session, pressure)));
        for (session, pressure) in verdicts {
            for (_, sequence) in self.engine.outbox.live(session) {
                match pressure {
                    Pressure::Suspend => self.engine.scheduler.pause(sequence),
                    Pressure::Resume => self.engine.scheduler.resume(sequence),
                    Pressure::GiveUp => self.finish(sequence, FinishReason::SlowReader),
                }
            }
        }
        self.engine.outbox.publish();
    }

    fn observe_load(&self) {
        let scheduler = &self.engine.scheduler;
        // Sequences set aside wait too, for their client.
        let waiting = scheduler.waiting_len() + scheduler.paused_len();
        self.engine.metrics.load(waiting, scheduler.running_len());
        let kv = scheduler.kv_usage();
        self.engine.metrics.kv(kv.free, kv.cached, kv.owned, kv.total);
    }
}

fn done(request: u32, reason: message::FinishReason, usage: Usage) -> (CompletionSlot, &'static str) {
    (CompletionSlot::done(request, reason, usage), finish_name(reason))
}

fn failed(request: u32, reject: Reject) -> (CompletionSlot, &'static str) {
    (CompletionSlot::error(request, reject), reject_name(reject))
}

#[cfg(test)]
mod tests;
