//! A `StepPlan` flattened into the arrays a forward pass reads. T tokens of S sequences stand one after another without
//! padding. The vectors are allocated once and refilled every step.

use crate::kv_cache::block::{BLOCK_TOKENS, BlockId};
use crate::plan::{PlanEntry, StepPlan};
use crate::sequence::{Sequence, SequenceId};

/// The arrays of one forward pass. Names are the field's own.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ForwardBatch {
    /// Token ids, (T).
    pub tokens: Vec<u32>,
    /// Position of each token in its sequence, (T).
    pub positions: Vec<u32>,
    /// Where each token's key and value go: block * BLOCK_TOKENS + offset, (T).
    pub slot_mapping: Vec<u32>,
    /// First row of each sequence, and T at the end, (S + 1).
    pub cu_seqlens_q: Vec<u32>,
    /// Tokens of each sequence that are in the cache once this step's have been written, (S).
    pub context_lens: Vec<u32>,
    /// Block ids of all sequences, one table after another; sequence s has
    /// `block_tables[block_table_starts[s]..block_table_starts[s + 1]]`, at least
    /// `ceil(context_lens[s] / BLOCK_TOKENS)`.
    pub block_tables: Vec<u32>,
    /// (S + 1), see `block_tables`.
    pub block_table_starts: Vec<u32>,
    /// Rows whose logits are wanted, ascending, (L); L <= S.
    pub logit_rows: Vec<u32>,
}

impl ForwardBatch {
    /// A batch that never allocates again while steps keep within `tokens_per_step_max` rows of `sequences_max`
    /// sequences of `context_max` positions.
    pub fn with_limits(tokens_per_step_max: usize, sequences_max: usize, context_max: usize) -> Self {
        Self {
            tokens: Vec::with_capacity(tokens_per_step_max),
            positions: Vec::with_capacity(tokens_per_step_max),
            slot_mapping: Vec::with_capacity(tokens_per_step_max),
            cu_seqlens_q: Vec::with_capacity(sequences_max + 1),
            context_lens: Vec::with_capacity(sequences_max),
            block_tables: Vec::with_capacity(sequences_max * context_max.div_ceil(BLOCK_TOKENS)),
            block_table_starts: Vec::with_capacity(sequences_max + 1),
            logit_rows: Vec::with_capacity(sequences_max),
        }
    }

    /// T, the number of rows.
    pub fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// S, the number of sequences.
    pub fn sequences(&self) -> usize {
        self.context_lens.len()
    }

    /// Block ids of sequence `s`.
    pub fn block_table(&self, s: usize) -> &[u32] {
        &self.block_tables[self.block_table_starts[s] as usize..self.block_table_starts[s + 1] as usize]
    }

    /// Takes over a plan, whose sequences `lookup` finds. Row by row as the plan has it: entry s of the plan is sequence
    /// s of the batch, and the rows of `logit_rows` are those of the entries that sample, in order.
    ///
    /// Padding rows (static scheduling only) come last, each a sequence of one token at position 0 that writes into
    /// `scratch`, a block that belongs to nobody. They cost what a row's projections cost, but neither attention over a
    /// context nor logits: less than the padding of a real static batch.
    pub fn fill<'a>(&mut self, plan: &StepPlan, scratch: Option<BlockId>, lookup: impl Fn(SequenceId) -> &'a Sequence) {
        self.clear();
        for entry in &plan.entries {
            self.push(entry, lookup(entry.sequence));
        }
        for _ in 0..plan.padding_rows {
            self.push_padding(scratch.expect("padding rows have a block to write to"));
        }
        assert_eq!(self.rows(), plan.tokens() + plan.padding_rows as usize);
        assert_eq!(self.sequences(), plan.entries.len() + plan.padding_rows as usize);
        debug_assert!(self.logit_rows.is_sorted());
    }

    fn clear(&mut self) {
        for array in [
            &mut self.tokens,
            &mut self.positions,
            &mut self.slot_mapping,
            &mut self.cu_seqlens_q,
            &mut self.context_lens,
            &mut self.block_tables,
            &mut self.block_table_starts,
            &mut self.logit_rows,
        ] {
            array.clear();
        }
        self.cu_seqlens_q.push(0);
        self.block_table_starts.push(0);
    }

    fn push(&mut self, entry: &PlanEntry, sequence: &Sequence) {
        let (start, end) = (entry.start as usize, (entry.start + entry.tokens) as usize);
        assert_eq!(sequence.id, entry.sequence, "a plan names a sequence of another generation");
        assert!(entry.tokens > 0, "an entry computes at least one token");
        assert!(end <= sequence.tokens.len(), "a plan goes beyond the tokens known");
        assert!(!entry.samples || end == sequence.tokens.len(), "only the last known token is sampled from");
        // What is attended to must be in the cache, or be written by this very step.
        assert!(start <= sequence.computed, "a plan leaves a gap in the cache");
        let blocks = end.div_ceil(BLOCK_TOKENS);
        assert!(blocks <= sequence.block_table.len(), "a plan goes beyond the blocks held");

        self.tokens.extend_from_slice(&sequence.tokens[start..end]);
        self.positions.extend(entry.start..entry.start + entry.tokens);
        self.slot_mapping.extend((start..end).map(|position| {
            let block = sequence.block_table[position / BLOCK_TOKENS].0;
            block * BLOCK_TOKENS as u32 + (position % BLOCK_TOKENS) as u32
        }));
        self.cu_seqlens_q.push(self.tokens.len() as u32);
        self.context_lens.push(end as u32);
        self.block_tables.extend(sequence.block_table[..blocks].iter().map(|block| block.0));
        self.block_table_starts.push(self.block_tables.len() as u32);
        if entry.samples {
            self.logit_rows.push(self.tokens.len() as u32 - 1);
        }
    }

    fn push_padding(&mut self, scratch: BlockId) {
        self.tokens.push(0);
        self.positions.push(0);
        self.slot_mapping.push(scratch.0 * BLOCK_TOKENS as u32);
        self.cu_seqlens_q.push(self.tokens.len() as u32);
        self.context_lens.push(1);
        self.block_tables.push(scratch.0);
        self.block_table_starts.push(self.block_tables.len() as u32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sequence::{Sampling, SequenceState};

    fn sequence(index: u32, tokens: std::ops::Range<u32>, computed: usize, blocks: &[u32]) -> Sequence {
        Sequence {
            id: SequenceId { index, generation: 1 },
            tokens: tokens.collect(),
            prompt_len: 1,
            computed,
            cached: 0,
            block_table: blocks.iter().map(|&b| BlockId(b)).collect(),
            sampling: Sampling::greedy(1),
            cache_salt: 0,
            state: SequenceState::Running,
            arrival: u64::from(index),
            preemptions: 0,
        }
    }

    fn entry(index: u32, start: u32, tokens: u32, samples: bool) -> PlanEntry {
        PlanEntry { sequence: SequenceId { index, generation: 1 }, start, tokens, samples }
    }

    fn plan(entries: &[PlanEntry]) -> StepPlan {
        StepPlan { entries: entries.to_vec(), ..StepPlan::default() }
    }

    fn fill(batch: &mut ForwardBatch, sequences: &[Sequence], entries: &[PlanEntry]) {
        batch.fill(&plan(entries), None, |id| &sequences[id.index as usize]);
    }

    #[test]
    fn a_decode_a_chunk_and_a_last_chunk() {
        let sequences =
            [sequence(0, 100..118, 17, &[9, 4]), sequence(1, 200..240, 14, &[2, 3, 5]), sequence(2, 300..303, 0, &[7])];
        let mut batch = ForwardBatch::with_limits(16, 4, 64);
        // Whatever stood there before is gone.
        fill(&mut batch, &sequences, &[entry(2, 0, 3, true)]);
        fill(&mut batch, &sequences, &[entry(0, 17, 1, true), entry(1, 14, 4, false), entry(2, 0, 3, true)]);
        assert_eq!(batch.tokens, [117, 214, 215, 216, 217, 300, 301, 302]);
        assert_eq!(batch.positions, [17, 14, 15, 16, 17, 0, 1, 2]);
        assert_eq!(batch.slot_mapping, [65, 46, 47, 48, 49, 112, 113, 114]);
        assert_eq!(batch.cu_seqlens_q, [0, 1, 5, 8]);
        assert_eq!(batch.context_lens, [18, 18, 3]);
        assert_eq!(batch.logit_rows, [0, 7]);
        // Only the blocks that are read: the third of sequence 1 is not yet.
        assert_eq!([batch.block_table(0), batch.block_table(1), batch.block_table(2)], [&[9, 4][..], &[2, 3], &[7]]);
        assert_eq!((batch.rows(), batch.sequences()), (8, 3));
    }

    #[test]
    fn steps_within_the_limits_do_not_allocate() {
        let sequences = [sequence(0, 0..64, 0, &[0, 1, 2, 3]), sequence(1, 0..64, 0, &[0, 1, 2, 4])];
        let mut batch = ForwardBatch::with_limits(128, 2, 64);
        let places = |b: &ForwardBatch| {
            [
                &b.tokens,
                &b.positions,
                &b.slot_mapping,
                &b.cu_seqlens_q,
                &b.context_lens,
                &b.block_tables,
                &b.block_table_starts,
                &b.logit_rows,
            ]
            .map(|array| (array.as_ptr(), array.capacity()))
        };
        let before = places(&batch);
        fill(&mut batch, &sequences, &[entry(0, 0, 64, true), entry(1, 0, 64, true)]);
        assert_eq!(batch.rows(), 128);
        assert_eq!(places(&batch), before);
    }

    #[test]
    fn an_empty_plan_is_an_empty_batch() {
        let mut batch = ForwardBatch::default();
        fill(&mut batch, &[], &[]);
        assert_eq!((batch.rows(), batch.sequences()), (0, 0));
        assert_eq!((&batch.cu_seqlens_q, &batch.block_table_starts), (&vec![0], &vec![0]));
    }

    #[test]
    fn padding_rows_write_where_nobody_reads() {
        let sequences = [sequence(0, 100..118, 17, &[9, 4])];
        let mut batch = ForwardBatch::with_limits(4, 4, 64);
        let plan = StepPlan { padding_rows: 2, ..plan(&[entry(0, 17, 1, true)]) };
        batch.fill(&plan, Some(BlockId(6)), |id| &sequences[id.index as usize]);
        assert_eq!(batch.tokens, [117, 0, 0]);
        assert_eq!(batch.positions, [17, 0, 0]);
        assert_eq!(batch.slot_mapping, [65, 96, 96]);
        assert_eq!((&batch.cu_seqlens_q[..], &batch.context_lens[..]), (&[0, 1, 2, 3][..], &[18, 1, 1][..]));
        assert_eq!([batch.block_table(0), batch.block_table(1), batch.block_table(2)], [&[9, 4][..], &[6], &[6]]);
        assert_eq!(batch.logit_rows, [0]);
    }

    #[test]
    fn plans_that_cannot_be_are_caught() {
        let cases = [
            ("goes beyond the tokens", entry(0, 17, 2, true)),
            ("at least one token", entry(0, 17, 0, false)),
            ("last known token", entry(0, 10, 4, true)),
            ("a gap", entry(1, 4, 1, false)),
            ("beyond the blocks", entry(1, 0, 17, false)),
            (
                "another generation",
                PlanEntry { sequence: SequenceId { index: 0, generation: 2 }, ..entry(0, 17, 1, true) },
            ),
        ];
        for (part, bad) in cases {
            let result = std::panic::catch_unwind(|| {
                let sequences = [sequence(0, 0..18, 17, &[0, 1]), sequence(1, 0..18, 3, &[2])];
                fill(&mut ForwardBatch::default(), &sequences, &[bad]);
            });
            let message = *result
                .expect_err(part)
                .downcast::<String>()
                .unwrap_or_else(|other| Box::new(other.downcast_ref::<&str>().expect("a message").to_string()));
            assert!(message.contains(part), "{message}");
        }
    }
}
