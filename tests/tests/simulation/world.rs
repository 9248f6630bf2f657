//! A scheduler, a key-value memory that remembers who wrote what, and every promise checked after every step.

use super::oracle::{alone, content, mix, next_token};
use llmd::plan::{PlanEntry, StepPlan};
use llmd::scheduler::{Ended, Policy, Scheduler, SchedulerSettings, SubmitError};
use llmd::sequence::{FinishReason, NewSequence, SequenceId, SequenceState};
use std::collections::{BTreeMap, BTreeSet};

/// A request that was accepted, and what is known of it.
struct Request {
    new: NewSequence,
    /// Of each known token's slot.
    contents: Vec<u64>,
    expected: (Vec<u32>, FinishReason),
}

/// A request that has ended.
#[derive(Debug, Clone)]
pub struct Record {
    pub new: NewSequence,
    pub output: Vec<u32>,
    pub reason: FinishReason,
    pub cached: usize,
    pub preemptions: u32,
    pub last_step: u64,
}

/// A live sequence as it stood before a plan.
#[derive(Clone, Copy)]
struct Before {
    id: SequenceId,
    arrival: u64,
    remaining: usize,
    computed: usize,
    wants_token: bool,
}

pub struct World {
    pub scheduler: Scheduler,
    pub settings: SchedulerSettings,
    /// By block and offset; 0 was never written.
    memory: Vec<[u64; 16]>,
    live: BTreeMap<SequenceId, Request>,
    /// Of each request that has ended, once.
    pub ended: BTreeMap<SequenceId, Record>,
    pub accepted: usize,
    /// All plans in one number.
    pub fingerprint: u64,
    pub steps: u64,
    pub tokens_computed: usize,
    pub padding_rows: usize,
    /// The last plan made.
    pub last: StepPlan,
    /// What the scheduler's own pause of admission must be.
    paused: bool,
    members_ended: u32,
}

impl World {
    pub fn new(settings: SchedulerSettings) -> Self {
        Self {
            scheduler: Scheduler::new(settings).expect("the settings are sound"),
            settings,
            memory: vec![[0; 16]; settings.kv_blocks],
            live: BTreeMap::new(),
            ended: BTreeMap::new(),
            accepted: 0,
            fingerprint: 0,
            steps: 0,
            tokens_computed: 0,
            padding_rows: 0,
            last: StepPlan::default(),
            paused: false,
            members_ended: 0,
        }
    }

    pub fn submit(&mut self, new: NewSequence) -> Result<SequenceId, SubmitError> {
        let id = self.scheduler.submit(new.clone())?;
        let mut last = None;
        let contents = Vec::from_iter(new.prompt.iter().map(|&token| {
            last = Some(content(new.cache_salt, last, token));
            last.unwrap()
        }));
        let expected = alone(&new, &self.settings);
        let before = self.live.insert(id, Request { new, contents, expected });
        assert!(before.is_none() && !self.ended.contains_key(&id), "an id is given twice");
        self.accepted += 1;
        self.check_rest();
        Ok(id)
    }

    /// Submits what must be accepted.
    pub fn add(&mut self, new: NewSequence) -> SequenceId {
        self.submit(new).expect("the request is accepted")
    }

    pub fn live(&self) -> Vec<SequenceId> {
        self.live.keys().copied().collect()
    }

    /// Ends a sequence from outside. Returns whether it was live.
    pub fn finish(&mut self, id: SequenceId, reason: FinishReason) -> bool {
        let was_live = self.live.contains_key(&id);
        let member = self.scheduler.sequence(id).is_some_and(|s| s.state == SequenceState::Running);
        let ended = match reason {
            FinishReason::Cancelled => self.scheduler.cancel(id),
            _ => self.scheduler.finish(id, reason),
        };
        assert_eq!(ended.is_some(), was_live, "exactly the live can be finished");
        if let Some(ended) = ended {
            self.members_ended += u32::from(member);
            self.settle(ended, false);
        }
        self.check_rest();
        was_live
    }

    pub fn preempt(&mut self, id: SequenceId) -> bool {
        let done = self.scheduler.preempt(id);
        self.check_rest();
        done
    }

    /// Sets a sequence aside, or has it go on.
    pub fn pause(&mut self, id: SequenceId, aside: bool) {
        if aside {
            self.scheduler.pause(id);
        } else {
            self.scheduler.resume(id);
        }
        let paused = self.scheduler.sequence(id).map(|s| s.state == SequenceState::Paused);
        assert_eq!(paused, self.live.contains_key(&id).then_some(aside));
        self.check_rest();
    }

    /// One step. False when there was nothing to compute.
    pub fn step(&mut self) -> bool {
        let before: Vec<Before> = self.scheduler.running().map(stand).collect();
        assert_eq!(self.scheduler.has_work(), self.scheduler.sequences_live() > self.scheduler.paused_len());
        let waiting: Vec<Before> = self.scheduler.waiting().map(stand).collect();
        if self.available() >= (self.settings.usable_blocks() * 6).div_ceil(100) {
            self.paused = false;
        }
        let plan = self.scheduler.plan();
        self.note(&plan);
        self.check_plan(&plan, &before, &waiting);
        self.paused |= !plan.preempted.is_empty();
        if plan.is_empty() {
            assert!(before.is_empty() && waiting.is_empty(), "an empty plan while something waits or runs");
            self.scheduler.recycle(plan);
            return false;
        }
        let sampled = self.compute(&plan);
        let members: BTreeSet<_> = self.scheduler.running().map(|s| s.id).collect();
        let committed = self.scheduler.commit(&plan, &sampled);

        assert!(committed.tokens.iter().map(|t| (t.id, t.token)).eq(sampled.iter().copied()), "tokens as sampled");
        let with_token = committed.tokens.iter().filter_map(|t| t.finished.map(|reason| (t.id, reason)));
        let without = committed.ended.iter().filter(|e| e.sequence.sampling.max_tokens == 0);
        let mut announced: Vec<_> = with_token.chain(without.map(|e| (e.sequence.id, e.reason))).collect();
        let mut told: Vec<_> = committed.ended.iter().map(|e| (e.sequence.id, e.reason)).collect();
        announced.sort_by_key(|e| e.0);
        told.sort_by_key(|e| e.0);
        assert_eq!(announced, told, "what ends is told once, with its reason");
        let mut committed = committed;
        for ended in committed.ended.drain(..) {
            self.members_ended += u32::from(members.contains(&ended.sequence.id));
            self.settle(ended, true);
        }
        self.scheduler.recycle_committed(committed);
        self.last.clone_from(&plan);
        self.scheduler.recycle(plan);
        self.check_rest();
        true
    }

    /// One step, where there is something to compute.
    pub fn advance(&mut self) {
        assert!(self.step(), "nothing is live any more");
    }

    /// Has whatever is set aside go on, and steps until nothing is live. Panics when it takes longer than the work that is left can explain.
    pub fn drain(&mut self) {
        for id in self.live() {
            self.pause(id, false);
        }
        // The oldest running sequence moves at least one position a step.
        let work: usize = self.live.values().map(|r| r.new.prompt.len() + r.expected.0.len() + 2).sum();
        for _ in 0..=2 * work {
            if !self.step() {
                let usage = self.scheduler.kv_usage();
                assert_eq!(usage.owned, 0, "blocks are owned and nobody is live");
                let Self { scheduler, .. } = self;
                assert_eq!((scheduler.waiting_len(), scheduler.running_len(), scheduler.paused_len()), (0, 0, 0));
                assert!(self.scheduler.drained() && !self.scheduler.has_work());
                assert_eq!(self.accepted, self.ended.len());
                return;
            }
        }
        panic!("{} sequences are live after {} steps for {work} positions", self.live.len(), 2 * work);
    }

    pub fn record(&self, id: SequenceId) -> &Record {
        &self.ended[&id]
    }

    fn available(&self) -> usize {
        let usage = self.scheduler.kv_usage();
        usage.free + usage.cached
    }

    fn note(&mut self, plan: &StepPlan) {
        self.steps += u64::from(!plan.is_empty());
        self.tokens_computed += plan.tokens();
        self.padding_rows += plan.padding_rows as usize;
        let ids = plan.preempted.iter().chain([&SequenceId { index: u32::MAX, generation: 0 }]).chain(&plan.admitted);
        let numbers = ids.flat_map(|id| [id.index, id.generation]).chain([plan.padding_rows]).chain(
            plan.entries
                .iter()
                .flat_map(|e| [e.sequence.index, e.sequence.generation, e.start, e.tokens, u32::from(e.samples)]),
        );
        self.fingerprint = numbers.fold(self.fingerprint, |hash, n| mix(hash ^ u64::from(n)));
    }

    /// The forward pass and the sampler: reads what the plan says is there, writes what it says is computed.
    fn compute(&mut self, plan: &StepPlan) -> Vec<(SequenceId, u32)> {
        // What is in the cache must have been written by an earlier step.
        for entry in &plan.entries {
            self.read(entry.sequence, entry.start as usize);
        }
        for &PlanEntry { sequence: id, start, tokens, .. } in &plan.entries {
            let sequence = self.scheduler.sequence(id).expect("a plan names live sequences");
            for position in start as usize..(start + tokens) as usize {
                let block = sequence.block_table[position / 16];
                assert_ne!(Some(block), self.scheduler.scratch_block(), "a sequence has the scratch block");
                self.memory[block.index()][position % 16] = self.live[&id].contents[position];
            }
        }
        // And no step writes over what another entry reads.
        let mut sampled = Vec::new();
        for entry in &plan.entries {
            let end = (entry.start + entry.tokens) as usize;
            self.read(entry.sequence, end);
            if entry.samples {
                let request = self.live.get_mut(&entry.sequence).expect("a plan names live sequences");
                assert_eq!(end, request.contents.len(), "sampled from another token than the last");
                let last = request.contents[end - 1];
                let token = next_token(last, request.new.sampling.seed, end - request.new.prompt.len());
                request.contents.push(content(request.new.cache_salt, Some(last), token));
                sampled.push((entry.sequence, token));
            }
        }
        sampled
    }

    fn read(&self, id: SequenceId, positions: usize) {
        let (table, contents) = (&self.scheduler.sequence(id).unwrap().block_table, &self.live[&id].contents);
        for (position, wanted) in contents[..positions].iter().enumerate() {
            let found = self.memory[table[position / 16].index()][position % 16];
            assert_ne!(found, 0, "{id:?} reads position {position}, which was never written");
            assert_eq!(found, *wanted, "{id:?} reads what others wrote at position {position}");
        }
    }

    /// Breaks the memory, so that a test can show that reading it is noticed.
    pub fn forget_memory(&mut self) {
        self.memory.fill([0; 16]);
    }

    fn settle(&mut self, ended: Ended, of_itself: bool) {
        let Ended { sequence, reason } = ended;
        let request = self.live.remove(&sequence.id).expect("a sequence ends once, and was accepted");
        let (output, expected_reason) = &request.expected;
        if of_itself {
            assert_eq!((sequence.output(), reason), (&output[..], *expected_reason), "not what it gets alone");
        } else {
            assert!(output.starts_with(sequence.output()), "not the beginning of what it gets alone");
        }
        assert_eq!(sequence.tokens[..sequence.prompt_len], request.new.prompt);
        assert!(sequence.block_table.is_empty());
        assert!(sequence.cached < sequence.prompt_len && sequence.cached.is_multiple_of(16));
        assert!(sequence.cached == 0 || self.settings.prefix_cache);
        let record = Record {
            new: request.new,
            output: sequence.output().to_vec(),
            reason,
            cached: sequence.cached,
            preemptions: sequence.preemptions,
            last_step: self.steps,
        };
        assert!(self.ended.insert(sequence.id, record).is_none(), "a sequence ends once");
    }

    /// What must hold whenever no step is in flight.
    fn check_rest(&self) {
        self.scheduler.check_integrity().unwrap_or_else(|e| panic!("{e}"));
        let usage = self.scheduler.kv_usage();
        assert_eq!(usage.free + usage.cached + usage.owned, usage.total);
        let held: BTreeSet<_> = self.scheduler.running().flat_map(|s| &s.block_table).collect();
        assert_eq!(usage.owned, held.len(), "blocks are owned by nobody who runs");
        assert_eq!(usage.total, self.settings.usable_blocks());
        assert_eq!(self.scheduler.sequences_live(), self.live.len());
        assert_eq!(self.accepted, self.live.len() + self.ended.len(), "accepted = ended + live");
        assert!(self.scheduler.sequences_live() <= self.settings.sequences_max_total());
        assert!(self.scheduler.running_len() <= self.settings.sequences_running_max);
    }

    fn check_plan(&mut self, plan: &StepPlan, before: &[Before], waiting: &[Before]) {
        let settings = self.settings;
        let computed = plan.tokens() + plan.padding_rows as usize;
        assert!(computed <= settings.tokens_per_step, "the budget is exceeded");
        assert!(plan.entries.len() + plan.padding_rows as usize <= settings.sequences_running_max, "too many rows");
        let entries: BTreeMap<_, _> = plan.entries.iter().map(|e| (e.sequence, e)).collect();
        assert_eq!(entries.len(), plan.entries.len(), "a sequence has two entries");
        let left = settings.tokens_per_step - computed;
        let preempted: BTreeSet<_> = plan.preempted.iter().copied().collect();

        // Who was running: decodes get their token, prefills all the budget allows, victims are the youngest.
        let stays = |b: &&Before| !preempted.contains(&b.id);
        let mut prefills_unserved = 0;
        for b in before.iter().filter(stays) {
            let tokens = entries.get(&b.id).map_or(0, |e| e.tokens as usize);
            if b.remaining == 1 {
                assert_eq!(tokens, 1, "a running decode gets no token");
            } else {
                let most = b.remaining.min(settings.prefill_chunk_max);
                assert!(tokens == most || left < 16, "a prefill waits while {left} tokens are left");
                assert!(tokens > 0 || prefills_unserved > 0 || left < 16);
                prefills_unserved += usize::from(tokens < b.remaining);
            }
        }
        if let Some(first) = before.iter().filter(stays).find(|b| b.remaining > 1) {
            let tokens = entries.get(&first.id).map_or(0, |e| e.tokens as usize);
            assert!(tokens >= first.remaining.min(16), "the oldest prefill does not get its reserve");
        }
        let decodes = before.iter().filter(stays).filter(|b| b.remaining == 1).count();
        let firsts: Vec<_> = plan.entries[..decodes].iter().map(|e| e.sequence).collect();
        assert!(before.iter().filter(stays).filter(|b| b.remaining == 1).map(|b| b.id).eq(firsts), "decodes first");
        if let Some(leader) = before.first() {
            assert!(!preempted.contains(&leader.id), "the leader is preempted");
            let youngest_left = before.iter().filter(stays).map(|b| b.arrival).max().unwrap();
            let victims = before.iter().filter(|b| preempted.contains(&b.id));
            assert!(victims.into_iter().all(|v| v.arrival > youngest_left), "an older one was preempted");
        }

        // Each entry.
        for e in &plan.entries {
            let b = before.iter().chain(waiting).find(|b| b.id == e.sequence).expect("it was live before");
            let admitted = plan.admitted.contains(&e.sequence);
            assert_eq!(admitted, waiting.iter().any(|w| w.id == b.id), "what was waiting was admitted");
            let (start, tokens) = (e.start as usize, e.tokens as usize);
            let remaining = b.computed + b.remaining - start;
            assert!(start == b.computed || (admitted && start.is_multiple_of(16)));
            assert!((1..=remaining.min(settings.prefill_chunk_max)).contains(&tokens));
            assert!(tokens == remaining || tokens.is_multiple_of(16), "a chunk ends inside a block");
            assert_eq!(e.samples, tokens == remaining && b.wants_token);
        }

        // Who was waiting: admitted in order, and whoever has room.
        let count = plan.admitted.len();
        assert!(waiting[..count].iter().map(|w| w.id).eq(plan.admitted.iter().copied()), "admitted out of order");
        assert!(plan.preempted.is_empty() || count == 0, "admitted in the step that ran out of blocks");
        let running = self.scheduler.running_len();
        let headroom = self.available() >= running;
        assert!(count == 0 || running == 1 || headroom, "an admission leaves less than a block for each");
        match settings.policy {
            Policy::Continuous => {
                assert_eq!(plan.padding_rows, 0);
                assert!(count == 0 || !self.paused || before.is_empty(), "admitted below the watermark");
                let partial = self.partial_prefills(plan);
                assert!(partial <= 4, "{partial} prefills stand half done");
                self.check_admission_is_complete(plan, &waiting[count..], left);
            }
            Policy::Static => {
                assert!(count == 0 || before.is_empty(), "joined a static batch");
                if count > 0 {
                    self.members_ended = 0;
                }
                let padding = if decodes > 0 { self.members_ended } else { 0 };
                assert_eq!(plan.padding_rows, padding, "members that have ended cost a row each");
            }
        }
    }

    /// Nobody waits who, judged without the prefix cache, has tokens, a row and blocks.
    fn check_admission_is_complete(&self, plan: &StepPlan, waiting: &[Before], left: usize) {
        let Some(head) = waiting.first().filter(|_| plan.preempted.is_empty() && !self.paused) else { return };
        let partial = self.partial_prefills(plan);
        let running = self.scheduler.running_len();
        let room = self.available() > head.remaining.div_ceil(16) + running;
        let admissible = running < self.settings.sequences_running_max && left >= 16 && partial < 4 && room;
        assert!(!admissible, "{:?} waits for nothing", head.id);
    }

    /// Running sequences that `plan` does not bring to their last token.
    fn partial_prefills(&self, plan: &StepPlan) -> usize {
        let unfinished = |s: &&llmd::sequence::Sequence| {
            let tokens = plan.entries.iter().find(|e| e.sequence == s.id).map_or(0, |e| e.tokens as usize);
            tokens < s.remaining()
        };
        self.scheduler.running().filter(unfinished).count()
    }
}

fn stand(s: &llmd::sequence::Sequence) -> Before {
    Before {
        id: s.id,
        arrival: s.arrival,
        remaining: s.remaining(),
        computed: s.computed,
        wants_token: s.wants_token(),
    }
}
