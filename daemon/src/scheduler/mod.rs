//! Which tokens are computed next, and what becomes of the results.
//!
//! One step is one transaction: [`Scheduler::plan`] decides, the engine computes and samples, [`Scheduler::commit`] takes
//! the tokens in. Between a commit and the next plan sequences may be submitted, finished, cancelled or preempted. There is
//! no I/O, no clock and no thread here: the same calls give the same plans.
//!
//! **Order.** Everything goes by arrival: rows of a plan, admission, and, backwards, preemption. A preempted sequence keeps
//! its place, so the oldest live sequence only ever moves forward. What replaces first come, first served (classes,
//! fairness between clients) replaces this one order.
//!
//! **Memory.** Admission takes blocks for every known token, so a prefill never stops half way for want of memory; a decode
//! takes one block each time it crosses a border, and if there is none the youngest running sequence gives up its own. The
//! oldest running sequence (the leader) is never the victim: with the cache to itself it either fits or, decided at
//! commit by its length alone, ends `KvExhausted`. Nothing waits for something that cannot come.

mod commit;
mod planning;
mod settings;
#[cfg(test)]
mod tests;

pub use commit::{Committed, CommittedToken, Ended};
pub use settings::{Policy, SchedulerSettings, SettingsError, tokens_per_step_least};

use crate::kv_cache::block::{BlockId, blocks_for};
use crate::kv_cache::{Holder, IntegrityError, KvCache, KvUsage};
use crate::plan::StepPlan;
use crate::sequence::{FinishReason, NewSequence, Sequence, SequenceArena, SequenceId, SequenceState};
use std::collections::VecDeque;

/// Why a sequence was not taken in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// There is nothing to continue.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// The prompt leaves no room for a token in the context.
    #[error("a prompt of {prompt_len} tokens does not fit a context of {context_max}")]
    PromptTooLong {
        /// Tokens of the prompt.
        prompt_len: usize,
        /// Tokens of the context.
        context_max: usize,
    },
    /// Prompt and one token would not fit the cache even alone.
    #[error("the request needs {needed_blocks} blocks of the key-value cache, which has {total_blocks}")]
    NeverFits {
        /// Blocks of prompt and one token.
        needed_blocks: usize,
        /// Blocks sequences can have.
        total_blocks: usize,
    },
    /// Too many are waiting; later there may be room.
    #[error("the queue is full; {waiting_max} requests may wait")]
    QueueFull {
        /// The limit.
        waiting_max: usize,
    },
}

/// All live sequences, the cache they share, and the rules between them.
#[derive(Debug)]
pub struct Scheduler {
    settings: SchedulerSettings,
    arena: SequenceArena,
    cache: KvCache,
    /// In order of arrival.
    waiting: VecDeque<SequenceId>,
    /// In order of arrival; the first is the leader.
    running: Vec<SequenceId>,
    arrivals: u64,
    /// Number of the last plan.
    step: u64,
    /// Whether the last plan has to be committed yet.
    in_flight: bool,
    /// Blocks ran out; nobody is admitted until the watermark is reached.
    admission_paused: bool,
    /// Members of the current static batch that have ended.
    members_ended: usize,
    /// Cached blocks of the sequence being admitted.
    found: Vec<BlockId>,
    spare_plan: StepPlan,
    spare_committed: Committed,
}

impl Scheduler {
    /// An idle scheduler. Everything that is bounded by the settings is allocated here; a sequence's own vectors are
    /// allocated when it is admitted.
    pub fn new(settings: SchedulerSettings) -> Result<Self, SettingsError> {
        settings.check()?;
        Ok(Self {
            arena: SequenceArena::new(settings.sequences_max_total()),
            cache: KvCache::new(settings.usable_blocks(), settings.prefix_cache),
            waiting: VecDeque::with_capacity(settings.sequences_max_total()),
            running: Vec::with_capacity(settings.sequences_running_max),
            arrivals: 0,
            step: 0,
            in_flight: false,
            admission_paused: false,
            members_ended: 0,
            found: Vec::with_capacity(settings.usable_blocks().min(blocks_for(settings.context_max))),
            spare_plan: StepPlan::default(),
            spare_committed: Committed::default(),
            settings,
        })
    }

    /// Takes a sequence in, to be computed when its turn comes, or says at once why it never will be. `max_tokens` is cut to
    /// what the context leaves; the sequence then ends with `Length`.
    pub fn submit(&mut self, mut new: NewSequence) -> Result<SequenceId, SubmitError> {
        let SchedulerSettings { context_max, waiting_max, .. } = self.settings;
        let prompt_len = new.prompt.len();
        if prompt_len == 0 {
            return Err(SubmitError::EmptyPrompt);
        }
        let least = usize::from(new.sampling.max_tokens > 0);
        if prompt_len + least > context_max {
            return Err(SubmitError::PromptTooLong { prompt_len, context_max });
        }
        let (needed_blocks, total_blocks) = (blocks_for(prompt_len + least), self.settings.usable_blocks());
        if needed_blocks > total_blocks {
            return Err(SubmitError::NeverFits { needed_blocks, total_blocks });
        }
        // Those set aside are in no queue, but they will come back.
        if self.waiting.len() >= waiting_max || self.arena.len() >= self.settings.sequences_max_total() {
            return Err(SubmitError::QueueFull { waiting_max });
        }
        let room = u32::try_from(context_max - prompt_len).expect("the context is bounded");
        new.sampling.max_tokens = new.sampling.max_tokens.min(room);
        debug_assert!(new.sampling.stop_token_ids.is_sorted(), "stop ids are searched by halves");

        let id = self.arena.insert(new, self.arrivals).expect("the arena had room");
        self.arrivals += 1;
        self.waiting.push_back(id);
        Ok(id)
    }

    /// Ends a sequence for a reason from outside (a stop string, a client that went away). It is in no later plan and its
    /// blocks are free at once. None, and nothing happens, when it has ended before.
    ///
    /// # Panics
    /// Between a plan and its commit.
    pub fn finish(&mut self, id: SequenceId, reason: FinishReason) -> Option<Ended> {
        self.assert_settled();
        self.arena.get(id)?;
        Some(self.end(id, reason))
    }

    /// [`finish`](Self::finish) with `Cancelled`.
    pub fn cancel(&mut self, id: SequenceId) -> Option<Ended> {
        self.finish(id, FinishReason::Cancelled)
    }

    /// Takes a running sequence's blocks and puts it back into the queue, at the place of its arrival. It recomputes its
    /// tokens, those generated included, when it is admitted again. False when it isn't running.
    ///
    /// # Panics
    /// Between a plan and its commit.
    pub fn preempt(&mut self, id: SequenceId) -> bool {
        self.assert_settled();
        let running = self.state(id) == Some(SequenceState::Running);
        if running {
            self.suspend(id);
        }
        running
    }

    /// Sets a live sequence aside until [`resume`](Self::resume): nobody reads what it would produce. It is in no plan and
    /// holds no blocks meanwhile, so that nobody waits for the reader it waits for; its full ones stay cached as long as
    /// nobody needs them. Nothing happens when it is set aside already or not live.
    ///
    /// # Panics
    /// Between a plan and its commit.
    pub fn pause(&mut self, id: SequenceId) {
        self.assert_settled();
        match self.state(id) {
            Some(SequenceState::Running) => self.give_up_blocks(id),
            Some(SequenceState::Waiting) => self.leave_waiting(id),
            Some(SequenceState::Paused) | None => return,
        }
        self.arena[id].state = SequenceState::Paused;
    }

    /// Puts a sequence that was set aside back into the queue, at the place of its arrival.
    pub fn resume(&mut self, id: SequenceId) {
        if self.state(id) == Some(SequenceState::Paused) {
            self.enter_waiting(id);
        }
    }

    /// A live sequence. The engine's batch reads `tokens` and `block_table` here.
    pub fn sequence(&self, id: SequenceId) -> Option<&Sequence> {
        self.arena.get(id)
    }

    /// Sequences in the queue, new and preempted ones, in the order in which they will be admitted.
    pub fn waiting(&self) -> impl Iterator<Item = &Sequence> {
        self.waiting.iter().map(|&id| &self.arena[id])
    }

    /// Sequences that hold blocks, the oldest first.
    pub fn running(&self) -> impl Iterator<Item = &Sequence> {
        self.running.iter().map(|&id| &self.arena[id])
    }

    /// Sequences in the queue.
    pub fn waiting_len(&self) -> usize {
        self.waiting.len()
    }

    /// Sequences that hold blocks.
    pub fn running_len(&self) -> usize {
        self.running.len()
    }

    /// Sequences set aside.
    pub fn paused_len(&self) -> usize {
        self.arena.len() - self.waiting.len() - self.running.len()
    }

    /// Sequences waiting, running and set aside.
    pub fn sequences_live(&self) -> usize {
        self.arena.len()
    }

    /// Whether the next plan will have entries. What waits or runs can always be computed.
    pub fn has_work(&self) -> bool {
        !self.waiting.is_empty() || !self.running.is_empty()
    }

    /// Whether no sequence is live.
    pub fn drained(&self) -> bool {
        self.arena.is_empty()
    }

    /// Where the blocks are.
    pub fn kv_usage(&self) -> KvUsage {
        self.cache.usage()
    }

    /// The limits kept.
    pub fn settings(&self) -> &SchedulerSettings {
        &self.settings
    }

    /// The block no sequence ever has, into which padding rows write; only static scheduling needs one.
    pub fn scratch_block(&self) -> Option<BlockId> {
        (self.settings.policy == Policy::Static).then(|| BlockId(self.settings.usable_blocks() as u32))
    }

    /// Gives a plan's memory back, so that the next one needs none.
    pub fn recycle(&mut self, plan: StepPlan) {
        self.spare_plan = plan;
    }

    /// Gives a commit's memory back, so that the next one needs none.
    pub fn recycle_committed(&mut self, committed: Committed) {
        self.spare_committed = committed;
    }

    /// Whether queue, arena, block tables and cache agree. For tests and for an idle moment.
    pub fn check_integrity(&self) -> Result<(), IntegrityError> {
        let fault = |text: String| Err(IntegrityError(text));
        let paused = self.arena.iter().filter(|s| s.state == SequenceState::Paused);
        if self.waiting.len() + self.running.len() + paused.clone().count() != self.arena.len() {
            return fault(format!("{} live sequences are not all waiting, running or paused", self.arena.len()));
        }
        if !self.waiting().is_sorted_by_key(|s| s.arrival) || !self.running().is_sorted_by_key(|s| s.arrival) {
            return fault("a queue is out of order".into());
        }
        if self.waiting().any(|s| s.state != SequenceState::Waiting) {
            return fault("the queue has one that does not wait".into());
        }
        for s in self.waiting().chain(paused) {
            if s.computed != 0 || !s.block_table.is_empty() {
                return fault(format!("{:?} holds blocks and does not run", s.id));
            }
        }
        for s in self.running() {
            if s.state != SequenceState::Running || s.remaining() == 0 {
                return fault(format!("{:?} runs and has nothing to compute", s.id));
            }
        }
        let holders: Vec<_> = self
            .arena
            .iter()
            .map(|s| Holder { salt: s.cache_salt, tokens: &s.tokens, computed: s.computed, table: &s.block_table })
            .collect();
        self.cache.check_integrity(&holders)
    }

    /// Takes a live sequence out of everything.
    fn end(&mut self, id: SequenceId, reason: FinishReason) -> Ended {
        match self.arena[id].state {
            SequenceState::Waiting => self.leave_waiting(id),
            SequenceState::Paused => {}
            SequenceState::Running => {
                self.leave_running(id);
                self.members_ended += usize::from(self.settings.policy == Policy::Static);
            }
        }
        let mut sequence = self.arena.remove(id).expect("the sequence is live");
        self.cache.release(&mut sequence.block_table);
        Ended { sequence, reason }
    }

    /// Takes a running sequence's blocks and puts it back into the queue.
    fn suspend(&mut self, id: SequenceId) {
        self.give_up_blocks(id);
        self.enter_waiting(id);
    }

    /// A running sequence stops running; it will have to compute all its tokens again, those generated included.
    fn give_up_blocks(&mut self, id: SequenceId) {
        self.leave_running(id);
        let sequence = &mut self.arena[id];
        self.cache.release(&mut sequence.block_table);
        sequence.computed = 0;
        sequence.preemptions += 1;
    }

    /// A sequence that is neither queued nor running gets its place in the queue.
    fn enter_waiting(&mut self, id: SequenceId) {
        self.arena[id].state = SequenceState::Waiting;
        let arrival = self.arena[id].arrival;
        let place = self.waiting.partition_point(|&id| self.arena[id].arrival < arrival);
        self.waiting.insert(place, id);
    }

    fn state(&self, id: SequenceId) -> Option<SequenceState> {
        self.arena.get(id).map(|s| s.state)
    }

    fn leave_waiting(&mut self, id: SequenceId) {
        let arrival = self.arena[id].arrival;
        let place = self.waiting.binary_search_by_key(&arrival, |&id| self.arena[id].arrival);
        self.waiting.remove(place.expect("a waiting sequence is in the queue"));
    }

    fn leave_running(&mut self, id: SequenceId) {
        let arrival = self.arena[id].arrival;
        let place = self.running.binary_search_by_key(&arrival, |&id| self.arena[id].arrival);
        self.running.remove(place.expect("a running sequence is in the list"));
    }

    /// Blocks that a plan in flight reads or writes must not change hands.
    fn assert_settled(&self) {
        assert!(!self.in_flight, "step {} is planned and not committed", self.step);
    }
}
