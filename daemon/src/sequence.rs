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

impl Sampling {
    /// Greedy, `max_tokens` tokens, nothing else switched on.
    pub fn greedy(max_tokens: u32) -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: 0,
            max_tokens,
            min_tokens: 0,
            stop_token_ids: Vec::new(),
        }
    }
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
    /// Set aside until somebody reads what it has produced; holds no blocks and is in no queue.
    Paused,
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
    /// Where it stands.
    pub state: SequenceState,
    /// Order of arrival; kept through preemption.
    pub arrival: u64,
    /// How often it gave up its blocks: to others, by hand, or because it was set aside.
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

    /// Known tokens that have no keys and values in the cache yet.
    pub fn remaining(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// Whether one more token is to be sampled once all known ones are computed; false only for a sequence that asked for
    /// none at all.
    pub fn wants_token(&self) -> bool {
        self.output_len() < self.sampling.max_tokens as usize
    }
}

/// Where all live sequences are, whatever their state. Its size is fixed at start; ids of sequences that are gone stay
/// invalid though their places are used again (until a place has been used 2^32 times).
#[derive(Debug)]
pub struct SequenceArena {
    places: Vec<Place>,
    /// Indices of empty places.
    empty: Vec<u32>,
}

#[derive(Debug)]
struct Place {
    generation: u32,
    sequence: Option<Sequence>,
}

impl SequenceArena {
    /// Room for `sequences_max_total` live sequences.
    pub fn new(sequences_max_total: usize) -> Self {
        let count = u32::try_from(sequences_max_total).expect("the settings bound the number of sequences");
        let places = (0..count).map(|_| Place { generation: 0, sequence: None }).collect();
        Self { places, empty: (0..count).rev().collect() }
    }

    /// Live sequences.
    pub fn len(&self) -> usize {
        self.places.len() - self.empty.len()
    }

    /// Whether none is live.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Takes a new sequence in, waiting, or gives it back when the arena is full.
    pub fn insert(&mut self, new: NewSequence, arrival: u64) -> Result<SequenceId, NewSequence> {
        let Some(index) = self.empty.pop() else {
            return Err(new);
        };
        let place = &mut self.places[index as usize];
        debug_assert!(place.sequence.is_none());
        let id = SequenceId { index, generation: place.generation };
        place.sequence = Some(Sequence {
            id,
            prompt_len: new.prompt.len(),
            tokens: new.prompt,
            computed: 0,
            cached: 0,
            block_table: Vec::new(),
            sampling: new.sampling,
            cache_salt: new.cache_salt,
            state: SequenceState::Waiting,
            arrival,
            preemptions: 0,
        });
        Ok(id)
    }

    /// The sequence, if it is still live.
    pub fn get(&self, id: SequenceId) -> Option<&Sequence> {
        self.places.get(id.index as usize).filter(|p| p.generation == id.generation)?.sequence.as_ref()
    }

    /// The sequence, if it is still live.
    pub fn get_mut(&mut self, id: SequenceId) -> Option<&mut Sequence> {
        self.places.get_mut(id.index as usize).filter(|p| p.generation == id.generation)?.sequence.as_mut()
    }

    /// Takes a sequence out; its id is invalid from now on.
    pub fn remove(&mut self, id: SequenceId) -> Option<Sequence> {
        let place = self.places.get_mut(id.index as usize).filter(|p| p.generation == id.generation)?;
        let sequence = place.sequence.take()?;
        place.generation = place.generation.wrapping_add(1);
        self.empty.push(id.index);
        Some(sequence)
    }

    /// All live sequences, in no meaningful order.
    pub fn iter(&self) -> impl Iterator<Item = &Sequence> + Clone {
        self.places.iter().filter_map(|p| p.sequence.as_ref())
    }
}

/// For ids the holder knows to be live.
impl std::ops::Index<SequenceId> for SequenceArena {
    type Output = Sequence;

    fn index(&self, id: SequenceId) -> &Sequence {
        self.get(id).expect("the sequence is live")
    }
}

/// For ids the holder knows to be live.
impl std::ops::IndexMut<SequenceId> for SequenceArena {
    fn index_mut(&mut self, id: SequenceId) -> &mut Sequence {
        self.get_mut(id).expect("the sequence is live")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new() -> NewSequence {
        let sampling = Sampling::greedy(1);
        NewSequence { prompt: vec![1], sampling, cache_salt: 0 }
    }

    #[test]
    fn an_id_of_a_sequence_that_is_gone_reaches_nobody() {
        let mut arena = SequenceArena::new(1);
        let first = arena.insert(new(), 0).unwrap();
        assert!(arena.remove(first).is_some());
        let second = arena.insert(new(), 1).unwrap();
        assert_eq!(first.index, second.index);
        assert_ne!(first, second);
        assert!(arena.get(first).is_none() && arena.get_mut(first).is_none() && arena.remove(first).is_none());
        assert_eq!(arena[second].arrival, 1);
    }

    #[test]
    fn a_full_arena_gives_the_sequence_back() {
        let mut arena = SequenceArena::new(1);
        arena.insert(new(), 0).unwrap();
        assert_eq!(arena.insert(new(), 1), Err(new()));
        assert_eq!(arena.len(), 1);
    }

    #[test]
    fn an_id_from_elsewhere_is_not_an_index_out_of_bounds() {
        let mut arena = SequenceArena::new(1);
        let foreign = SequenceId { index: 9, generation: 0 };
        assert!(arena.get(foreign).is_none() && arena.remove(foreign).is_none());
    }
}
