//! What the next step computes.

use super::{Policy, Scheduler};
use crate::kv_cache::block::{BLOCK_TOKENS, blocks_for};
use crate::plan::{PlanEntry, StepPlan};
use crate::sequence::{Sequence, SequenceId, SequenceState};

/// Prefills that may stand unfinished at the end of a step. Each holds the blocks of its whole prompt while it waits for
/// its share of the budget, and a prompt split among many is finished late; so new ones wait in the queue instead.
const PARTIAL_PREFILLS_MAX: usize = 4;

/// After blocks ran out, nobody is admitted until this part of them is available again, in percent. Without it the
/// victim would come straight back and be preempted again.
const RESUME_AVAILABLE_PERCENT: usize = 6;

/// Blocks an admission leaves for each running sequence, the new one included: every decode crosses a block border within
/// `BLOCK_TOKENS` steps, so one block each means nobody has to be preempted sooner than that.
const HEADROOM_BLOCKS_PER_SEQUENCE: usize = 1;

/// What is left of a step's limits while it is planned.
struct Budget {
    tokens: usize,
    partial_prefills: usize,
}

impl Scheduler {
    /// Decides the next step. Decodes come first, one token each; then running prefills; then whoever is admitted. A plan is
    /// empty only if nothing waits or runs. A plan with entries must be committed before anything else happens; an empty
    /// one need not be.
    ///
    /// # Panics
    /// When the last plan has not been committed.
    pub fn plan(&mut self) -> StepPlan {
        self.assert_settled();
        self.step += 1;
        let mut plan = self.empty_plan();
        // Looked at before any decode can preempt: what is preempted in this plan is never admitted again by it.
        let open = self.admission_open();

        self.plan_decodes(&mut plan);
        plan.padding_rows = self.padding_rows(&plan);
        let decoding = plan.tokens() + plan.padding_rows as usize;
        let tokens = self.settings.tokens_per_step.checked_sub(decoding).expect("rows were checked against the budget");
        let mut budget = Budget { tokens, partial_prefills: 0 };
        self.plan_prefills(&mut plan, &mut budget);
        if open && plan.preempted.is_empty() {
            self.admit(&mut plan, &mut budget);
        }

        assert!(plan.tokens() + plan.padding_rows as usize <= self.settings.tokens_per_step);
        assert!(!plan.is_empty() || !self.has_work(), "there is work and none of it is planned");
        self.in_flight = !plan.is_empty();
        plan
    }

    fn empty_plan(&mut self) -> StepPlan {
        let mut plan = std::mem::take(&mut self.spare_plan);
        plan.step = self.step;
        plan.entries.clear();
        plan.preempted.clear();
        plan.admitted.clear();
        plan.padding_rows = 0;
        plan
    }

    /// Whether anybody may join this step, memory and limits permitting.
    fn admission_open(&mut self) -> bool {
        let watermark = (self.settings.usable_blocks() * RESUME_AVAILABLE_PERCENT).div_ceil(100);
        if self.cache.available() >= watermark {
            self.admission_paused = false;
        }
        match self.settings.policy {
            Policy::Continuous => !self.admission_paused,
            Policy::Static => self.running.is_empty(),
        }
    }

    /// Every running sequence that lacks just one token gets it, if need be with the block of a younger one.
    fn plan_decodes(&mut self, plan: &mut StepPlan) {
        let mut i = 0;
        while i < self.running.len() {
            let id = self.running[i];
            if self.arena[id].remaining() == 1 && self.secure_blocks(i, plan) {
                plan.entries.push(entry(&self.arena[id], 1));
            }
            i += 1;
        }
    }

    /// Makes room for all known tokens of the `i`-th running sequence, preempting from the youngest up. False when it was
    /// itself the youngest and gave way to its elders.
    fn secure_blocks(&mut self, i: usize, plan: &mut StepPlan) -> bool {
        let id = self.running[i];
        loop {
            let sequence = &mut self.arena[id];
            let len = sequence.tokens.len();
            if self.cache.extend(&mut sequence.block_table, len) {
                return true;
            }
            let victim = *self.running.last().expect("the sequence itself is running");
            assert!(self.running.len() > 1, "the leader does not fit the cache alone");
            self.suspend(victim);
            self.admission_paused = true;
            plan.preempted.push(victim);
            if victim == id {
                return false;
            }
        }
    }

    /// Members of a static batch that have ended go on costing a row in every decode step.
    fn padding_rows(&self, decodes: &StepPlan) -> u32 {
        match self.settings.policy {
            Policy::Static if !decodes.is_empty() && !self.running.is_empty() => self.members_ended as u32,
            _ => 0,
        }
    }

    /// Running prefills, the oldest first. The settings leave at least one chunk to them whatever the decodes took.
    fn plan_prefills(&mut self, plan: &mut StepPlan, budget: &mut Budget) {
        for &id in &self.running {
            let sequence = &self.arena[id];
            if sequence.remaining() > 1 {
                let tokens = budget.chunk(sequence.remaining(), self.settings.prefill_chunk_max);
                budget.spend(tokens, sequence.remaining());
                if tokens > 0 {
                    plan.entries.push(entry(sequence, tokens));
                }
            }
        }
    }

    /// Takes sequences from the queue, strictly in order, as long as tokens, rows and blocks last.
    fn admit(&mut self, plan: &mut StepPlan, budget: &mut Budget) {
        while self.running.len() < self.settings.sequences_running_max {
            let Some(&id) = self.waiting.front() else {
                return;
            };
            let sequence = &self.arena[id];
            let len = sequence.tokens.len();
            self.cache.find(sequence.cache_salt, &sequence.tokens, &mut self.found);
            let remaining = len - self.found.len() * BLOCK_TOKENS;
            let tokens = budget.chunk(remaining, self.settings.prefill_chunk_max);
            if self.settings.policy == Policy::Continuous
                && (tokens == 0 || (tokens < remaining && budget.partial_prefills >= PARTIAL_PREFILLS_MAX))
            {
                return;
            }
            if !self.has_room(blocks_for(len) - self.found.len()) {
                return;
            }
            self.waiting.pop_front();
            self.start(id);
            budget.spend(tokens, remaining);
            if tokens > 0 {
                plan.entries.push(entry(&self.arena[id], tokens));
            }
            plan.admitted.push(id);
        }
    }

    /// Whether a sequence may have `missing` blocks besides the cached ones in `found`.
    fn has_room(&self, missing: usize) -> bool {
        // Idle blocks that it is about to hold cannot be evicted for it.
        let available = self.cache.available() - self.cache.count_idle(&self.found);
        let headroom = match self.running.len() {
            0 => 0, // alone, everything is its own; submission has refused what does not fit
            running => (running + 1) * HEADROOM_BLOCKS_PER_SEQUENCE,
        };
        missing + headroom <= available
    }

    /// Makes the sequence in `found` running, with blocks for all its known tokens.
    fn start(&mut self, id: SequenceId) {
        if self.running.is_empty() {
            self.members_ended = 0;
        }
        let sequence = &mut self.arena[id];
        let len = sequence.tokens.len();
        let limit = sequence.prompt_len + sequence.sampling.max_tokens as usize;
        sequence.tokens.reserve_exact(limit - len);
        sequence.block_table.reserve_exact(blocks_for(limit).min(self.settings.usable_blocks()));

        self.cache.hold(&self.found, &mut sequence.block_table);
        sequence.computed = self.found.len() * BLOCK_TOKENS;
        if sequence.preemptions == 0 {
            sequence.cached = sequence.computed;
        }
        let extended = self.cache.extend(&mut sequence.block_table, len);
        assert!(extended, "room was found and is gone");
        sequence.state = SequenceState::Running;
        let arrival = sequence.arrival;
        let place = self.running.partition_point(|&id| self.arena[id].arrival < arrival);
        self.running.insert(place, id);
    }
}

impl Budget {
    /// How many of `remaining` tokens this step computes: all, or whole blocks.
    fn chunk(&self, remaining: usize, chunk_max: usize) -> usize {
        let most = remaining.min(self.tokens).min(chunk_max);
        if most == remaining { most } else { most - most % BLOCK_TOKENS }
    }

    fn spend(&mut self, tokens: usize, remaining: usize) {
        self.tokens -= tokens;
        self.partial_prefills += usize::from(tokens < remaining);
    }
}

fn entry(sequence: &Sequence, tokens: usize) -> PlanEntry {
    PlanEntry {
        sequence: sequence.id,
        start: sequence.computed as u32,
        tokens: tokens as u32,
        samples: tokens == sequence.remaining() && sequence.wants_token(),
    }
}
