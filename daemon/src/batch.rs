//! A `StepPlan` flattened into the arrays a forward pass reads. T tokens of S sequences stand one after another without
//! padding. The vectors are allocated once and refilled every step.

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
    /// `block_tables[block_table_starts[s]..block_table_starts[s + 1]]`, at least ceil(context_lens[s] / BLOCK_TOKENS).
    pub block_tables: Vec<u32>,
    /// (S + 1), see `block_tables`.
    pub block_table_starts: Vec<u32>,
    /// Rows whose logits are wanted, ascending, (L); L <= S.
    pub logit_rows: Vec<u32>,
}

impl ForwardBatch {
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
        &self.block_tables
            [self.block_table_starts[s] as usize..self.block_table_starts[s + 1] as usize]
    }
}
