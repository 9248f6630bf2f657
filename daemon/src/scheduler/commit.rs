//! What becomes of a step's results.

use super::Scheduler;
use crate::kv_cache::block::{BLOCK_TOKENS, blocks_for};
use crate::plan::StepPlan;
use crate::sequence::{FinishReason, Sequence, SequenceId};

/// A sequence that has ended: its tokens, counts and parameters, but no blocks. Usage is `prompt_len`, `cached` and
/// `output_len()`.
#[derive(Debug)]
pub struct Ended {
    /// As it was at its end; its id is no longer valid.
    pub sequence: Sequence,
    /// Why it ended.
    pub reason: FinishReason,
}

/// A token that was sampled and taken in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CommittedToken {
    /// Whose token.
    pub id: SequenceId,
    /// The token; the last of the sequence's output. A stop id is part of the output, too (its text is not).
    pub token: u32,
    /// Set when it was the last one; the sequence is then among the ended.
    pub finished: Option<FinishReason>,
}

/// What a step came to.
#[derive(Debug, Default)]
pub struct Committed {
    /// One for each entry that samples, in the plan's order.
    pub tokens: Vec<CommittedToken>,
    /// Every sequence that ended in this step, whether with a token or (having asked for none) without.
    pub ended: Vec<Ended>,
}

impl Scheduler {
    /// Takes the results of `plan` in. `sampled` has one token for each entry that samples, in the plan's order. Blocks that
    /// have become full are published, sequences that ended leave, and their blocks are free for the next plan.
    ///
    /// # Panics
    /// When `plan` is not the one made last, or `sampled` does not answer it.
    pub fn commit(&mut self, plan: &StepPlan, sampled: &[(SequenceId, u32)]) -> Committed {
        assert_eq!(plan.step, self.step, "the plan committed is not the last one");
        assert!(self.in_flight || plan.is_empty(), "step {} is committed twice", plan.step);
        self.in_flight = false;
        let mut committed = std::mem::take(&mut self.spare_committed);
        committed.tokens.clear();
        committed.ended.clear();

        let mut sampled = sampled.iter();
        for entry in &plan.entries {
            let id = entry.sequence;
            self.take_in_computed(id, entry.start as usize, entry.tokens as usize);
            let finished = if entry.samples {
                let &(of, token) = sampled.next().expect("a token was sampled for every entry that samples");
                assert_eq!(of, id, "tokens come in the plan's order");
                let finished = self.take_in_token(id, token);
                committed.tokens.push(CommittedToken { id, token, finished });
                finished
            } else {
                // Only a sequence that asked for no tokens is computed to its end without sampling.
                (self.arena[id].remaining() == 0).then_some(FinishReason::Length)
            };
            if let Some(reason) = finished {
                committed.ended.push(self.end(id, reason));
            }
        }
        assert!(sampled.next().is_none(), "a token was sampled that nobody planned");
        committed
    }

    /// `tokens` positions from `start` on are in the cache now; blocks they have filled are published.
    fn take_in_computed(&mut self, id: SequenceId, start: usize, tokens: usize) {
        let sequence = &mut self.arena[id];
        assert_eq!(sequence.computed, start, "a step was computed from another position");
        sequence.computed += tokens;
        assert!(sequence.computed <= sequence.tokens.len());
        let filled = start / BLOCK_TOKENS..sequence.computed / BLOCK_TOKENS;
        self.cache.publish(sequence.cache_salt, &sequence.tokens, &mut sequence.block_table, filled);
    }

    /// Appends a sampled token; says whether it was the last one.
    fn take_in_token(&mut self, id: SequenceId, token: u32) -> Option<FinishReason> {
        let total_blocks = self.settings.usable_blocks();
        let sequence = &mut self.arena[id];
        // The first min_tokens tokens never end a sequence; the one after them may.
        let may_stop = sequence.output_len() >= sequence.sampling.min_tokens as usize;
        sequence.tokens.push(token);
        if may_stop && sequence.sampling.stop_token_ids.binary_search(&token).is_ok() {
            Some(FinishReason::Stop)
        } else if !sequence.wants_token() {
            Some(FinishReason::Length)
        } else if blocks_for(sequence.tokens.len()) > total_blocks {
            // Going on would need more than the whole cache. It depends on the length alone, so a request ends at the same
            // token whatever company it had.
            Some(FinishReason::KvExhausted)
        } else {
            None
        }
    }
}
