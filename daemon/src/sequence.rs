//! One request as the scheduler sees it: tokens known, tokens computed, blocks held.

use crate::kv_cache::block::BlockId;

/// A sequence's place in the arena. The generation makes an id of a place used again differ from the old one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId {
    /// Index in the arena.
    pub index: u32,
    /// How often the place was used before.
    pub generation: u32,
}

/// How the next token is chosen, after all checks; see `llmd_protocol::message::SamplingParams` for meanings and
/// ranges. What concerns text (stop strings) is not here: the scheduler knows ids only.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs, reason = "documented at the protocol's SamplingParams")]
pub struct Sampling {
    pub temperature: f32,
    pub top_k: u32,
    pub top_p: f32,
    pub min_p: f32,
    pub repetition_penalty: f32,
    pub presence_penalty: f32,
    pub frequency_penalty: f32,
    pub seed: u64,
    pub max_tokens: u32,
    pub min_tokens: u32,
    /// All ids that end the sequence: the request's own and, unless it ignores them, the model's end-of-sequence ids.
    /// Sorted, without repeats.
    pub stop_token_ids: Vec<u32>,
}

/// Why a sequence ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// A stop id was sampled.
    Stop,
    /// A stop string appeared (text decides; the scheduler is told).
    StopString,
    /// `max_tokens` or the context length was reached.
    Length,
    /// The client cancelled or went away.
    Cancelled,
    /// The oldest sequence could not go on with the whole cache to itself.
    KvExhausted,
    /// The client left its completions unread for too long (the outbox decides; the scheduler is told).
    SlowReader,
}

/// Where a sequence stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SequenceState {
    /// In the queue; holds no blocks (new, or preempted).
    Waiting,
    /// Holds blocks and takes part in steps.
    Running,
}

/// What a new sequence is made of.
#[derive(Debug, Clone, PartialEq)]
pub struct NewSequence {
    /// Prompt ids; at least one, each below the vocabulary's size.
    pub prompt: Vec<u32>,
    /// How to continue it.
    pub sampling: Sampling,
    /// Root of the prefix cache this sequence may share: requests with different salts never share a block.
    pub cache_salt: u64,
}

/// One request in the engine. `tokens[..computed]` have keys and values in the cache; every step moves `computed`
/// towards `tokens.len()`, and the step that reaches it samples one more token. Prefill, chunked prefill, decode and
/// recompute after preemption are this one rule with different distances.
#[derive(Debug)]
pub struct Sequence {
    /// Its place in the arena.
    pub id: SequenceId,
    /// Prompt ids, then output ids.
    pub tokens: Vec<u32>,
    /// How many of `tokens` are prompt.
    pub prompt_len: usize,
    /// How many of `tokens` have keys and values in the cache.
    pub computed: usize,
    /// Prompt tokens that were found in the prefix cache at (first) admission.
    pub cached: usize,
    /// Blocks that hold positions `0..block_table.len() * BLOCK_TOKENS`.
    pub block_table: Vec<BlockId>,
    /// How to choose tokens.
    pub sampling: Sampling,
    /// Root of the prefix cache it may share.
    pub cache_salt: u64,
    /// Waiting or running.
    pub state: SequenceState,
    /// Order of arrival; kept through preemption.
    pub arrival: u64,
    /// How often it lost its blocks to another.
    pub preemptions: u32,
}

impl Sequence {
    /// Tokens generated so far.
    pub fn output_len(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// Ids generated so far.
    pub fn output(&self) -> &[u32] {
        &self.tokens[self.prompt_len..]
    }
}
