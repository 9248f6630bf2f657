//! The limits a scheduler keeps, and what may not be asked of it.

use crate::kv_cache::block::BLOCK_TOKENS;

/// Part of each step's tokens that decodes cannot take from prefills: 1 / 8 = 12.5 %, at least one block. Without it a full
/// house of decodes would keep every new request from its first token.
const PREFILL_RESERVE_DIVISOR: usize = 8;

/// Slots are numbered in u32: block * BLOCK_TOKENS + offset.
const KV_BLOCKS_LIMIT: usize = u32::MAX as usize / BLOCK_TOKENS;

/// Sequences live at once: far more than one host serves, and within u32.
const SEQUENCES_LIMIT: usize = 1 << 20;

/// Who may join whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Policy {
    /// Requests join at the next step and leave in the step that ends them.
    Continuous,
    /// The control experiment. A batch is filled from the queue, nobody joins until its last member has ended, and members
    /// that have ended go on costing a padding row per decode step. All else is the same code.
    Static,
}

/// The limits of a scheduler. All are fixed at start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SchedulerSettings {
    /// Who may join whom.
    pub policy: Policy,
    /// Most tokens one step computes, padding rows included. At least `sequences_running_max` and the prefill reserve.
    pub tokens_per_step: usize,
    /// Most sequences that hold blocks at once.
    pub sequences_running_max: usize,
    /// Most tokens of one prefill per step; a multiple of `BLOCK_TOKENS`.
    pub prefill_chunk_max: usize,
    /// Most tokens of one sequence, prompt and output.
    pub context_max: usize,
    /// Blocks of the backend's key-value memory. Static scheduling keeps the last of them as scratch.
    pub kv_blocks: usize,
    /// Whether blocks are kept for requests that begin the same.
    pub prefix_cache: bool,
    /// Most new sequences that wait.
    pub waiting_max: usize,
}

/// Settings that contradict each other or themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SettingsError {
    /// Decodes could starve, or leave nothing for prefills.
    #[error("tokens_per_step must be at least {needed} for {rows} running sequences and a prefill reserve")]
    TokensPerStepTooFew {
        /// The least that works.
        needed: usize,
        /// `sequences_running_max`.
        rows: usize,
    },
    /// Chunks end at block borders.
    #[error("prefill_chunk_max must be a positive multiple of {BLOCK_TOKENS}")]
    ChunkNotInBlocks,
    /// A number is outside its range.
    #[error("{name} must be in {least}..={most}")]
    OutOfRange {
        /// The setting.
        name: &'static str,
        /// Smallest value allowed.
        least: usize,
        /// Largest value allowed.
        most: usize,
    },
}

impl SchedulerSettings {
    /// Whether a scheduler can keep these.
    pub fn check(&self) -> Result<(), SettingsError> {
        let scratch = usize::from(self.policy == Policy::Static);
        for (name, value, least, most) in [
            ("sequences_running_max", self.sequences_running_max, 1, SEQUENCES_LIMIT),
            ("waiting_max", self.waiting_max, 1, SEQUENCES_LIMIT),
            ("context_max", self.context_max, 1, u32::MAX as usize),
            ("tokens_per_step", self.tokens_per_step, 1, u32::MAX as usize),
            ("kv_blocks", self.kv_blocks, 1 + scratch, KV_BLOCKS_LIMIT),
        ] {
            if !(least..=most).contains(&value) {
                return Err(SettingsError::OutOfRange { name, least, most });
            }
        }
        if self.prefill_chunk_max == 0 || !self.prefill_chunk_max.is_multiple_of(BLOCK_TOKENS) {
            return Err(SettingsError::ChunkNotInBlocks);
        }
        let rows = self.sequences_running_max;
        if self.tokens_per_step < rows + prefill_reserve(self.tokens_per_step) {
            return Err(SettingsError::TokensPerStepTooFew { needed: tokens_per_step_least(rows), rows });
        }
        Ok(())
    }

    /// Blocks sequences can have.
    pub fn usable_blocks(&self) -> usize {
        self.kv_blocks - usize::from(self.policy == Policy::Static)
    }

    /// Live sequences at most, whatever their state.
    pub fn sequences_max_total(&self) -> usize {
        self.sequences_running_max + self.waiting_max
    }
}

/// Tokens of a step that decodes leave to prefills.
fn prefill_reserve(tokens_per_step: usize) -> usize {
    BLOCK_TOKENS.max(tokens_per_step.div_ceil(PREFILL_RESERVE_DIVISOR))
}

/// The least `tokens_per_step` for `rows` running sequences.
pub fn tokens_per_step_least(rows: usize) -> usize {
    // t - ceil(t / 8) = floor(7 t / 8) >= rows, hence t >= 8 rows / 7.
    (rows + BLOCK_TOKENS).max((rows * PREFILL_RESERVE_DIVISOR).div_ceil(PREFILL_RESERVE_DIVISOR - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> SchedulerSettings {
        SchedulerSettings {
            policy: Policy::Continuous,
            tokens_per_step: 512,
            sequences_running_max: 64,
            prefill_chunk_max: 64,
            context_max: 2048,
            kv_blocks: 128,
            prefix_cache: true,
            waiting_max: 64,
        }
    }

    #[test]
    fn the_least_budget_is_the_least_that_passes() {
        for rows in 1..2000 {
            let least = tokens_per_step_least(rows);
            let with =
                |tokens_per_step| SchedulerSettings { tokens_per_step, sequences_running_max: rows, ..settings() };
            assert_eq!(with(least).check(), Ok(()), "{rows} rows");
            let short = SettingsError::TokensPerStepTooFew { needed: least, rows };
            assert_eq!(with(least - 1).check(), Err(short), "{rows} rows");
        }
    }

    #[test]
    fn what_cannot_work_is_refused() {
        let chunk = |prefill_chunk_max| SchedulerSettings { prefill_chunk_max, ..settings() }.check();
        assert_eq!(chunk(0), Err(SettingsError::ChunkNotInBlocks));
        assert_eq!(chunk(24), Err(SettingsError::ChunkNotInBlocks));
        let scratch_only = SchedulerSettings { policy: Policy::Static, kv_blocks: 1, ..settings() };
        assert!(matches!(scratch_only.check(), Err(SettingsError::OutOfRange { name: "kv_blocks", .. })));
        let beyond = SchedulerSettings { kv_blocks: KV_BLOCKS_LIMIT + 1, ..settings() };
        assert!(matches!(beyond.check(), Err(SettingsError::OutOfRange { name: "kv_blocks", .. })));
    }
}
