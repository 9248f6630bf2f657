//! What one step computes. A plan is made by the scheduler and never changed afterwards.

use crate::sequence::SequenceId;

/// One sequence's part of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanEntry {
    /// Whose tokens.
    pub sequence: SequenceId,
    /// Position of the first token computed in this step (= `computed` when the plan was made).
    pub start: u32,
    /// How many tokens are computed; at least one.
    pub tokens: u32,
    /// Whether the last of them is the sequence's last known token, so that the next one is sampled from it (never, for a
    /// sequence that asked for no tokens).
    pub samples: bool,
}

/// What one iteration computes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StepPlan {
    /// Number of the step, counted from 1.
    pub step: u64,
    /// Rows in order: decodes first, then prefills. Empty when there is nothing to compute.
    pub entries: Vec<PlanEntry>,
    /// Sequences that lost their blocks while this plan was made.
    pub preempted: Vec<SequenceId>,
    /// Sequences taken from the queue while this plan was made.
    pub admitted: Vec<SequenceId>,
    /// Rows computed for members that have already ended (static scheduling only, and only in steps that decode; always 0
    /// when continuous). They count towards the step's tokens, and write into `Scheduler::scratch_block`, which is
    /// nobody's; see `ForwardBatch::fill`.
    pub padding_rows: u32,
}

impl StepPlan {
    /// Tokens this step computes.
    pub fn tokens(&self) -> usize {
        self.entries.iter().map(|e| e.tokens as usize).sum()
    }

    /// Whether there is nothing to compute.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Entries whose next token is sampled, in the order in which `Scheduler::commit` wants the tokens.
    pub fn sampling(&self) -> impl Iterator<Item = SequenceId> {
        self.entries.iter().filter(|e| e.samples).map(|e| e.sequence)
    }
}
