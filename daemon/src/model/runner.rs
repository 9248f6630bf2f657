//! A model on a device, ready to step: weights, activations and key-value memory, all allocated at start.

use super::LoadedModel;
use super::architecture::Architecture;
use super::error::ModelError;
use super::forward::{self, Activations};
use super::sizing::KvBudget;
use super::weights::{self, Weights};
use crate::backend::{Backend, BackendError};
use crate::batch::ForwardBatch;
use crate::kv_cache::block::{BLOCK_TOKENS, BlockId};

/// What a runner is allocated for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunnerLimits {
    /// Rows of a step, at most.
    pub tokens_per_step_max: usize,
    /// Sequences of a step, and so rows whose logits are wanted, at most.
    pub sequences_max: usize,
    /// Key-value memory.
    pub kv: KvBudget,
}

/// Where a runner's memory went, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryFigures {
    /// The weights as the file has them; a backend's layout takes about as much.
    pub weight_bytes: u64,
    /// Activations and logits.
    pub activation_bytes: u64,
    /// Key-value memory.
    pub kv_bytes: u64,
    /// Blocks of key-value memory.
    pub kv_blocks: usize,
}

/// A model that steps, whatever the device: what the engine holds.
pub trait Runner: Send {
    /// Computes a step and returns the logits of `batch.logit_rows`, (L, vocab), which the caller may change (penalties
    /// work in place). The batch must keep within the limits and the blocks the runner was made with; an error ends the
    /// process.
    fn forward(&mut self, batch: &ForwardBatch) -> Result<&mut [f32], BackendError>;
    /// Called once by the thread that will step; see [`Backend::bind_caller`].
    fn bind_caller(&self);
    /// Copies a block's keys and values, all layers.
    fn copy_block(&mut self, from: BlockId, to: BlockId);
    /// Ids of the model; the length of a row of logits.
    fn vocab_size(&self) -> usize;
    /// The numbers of the model.
    fn architecture(&self) -> &Architecture;
    /// Where the memory went.
    fn memory(&self) -> MemoryFigures;
    /// The device, for people.
    fn describe(&self) -> String;
}

/// A model on the device of a backend.
pub struct ModelRunner<B: Backend> {
    backend: B,
    architecture: Architecture,
    weights: Weights<B::Weight>,
    activations: Activations<B::Buffer>,
    /// (sequences_max, vocab).
    logits: Vec<f32>,
    limits: RunnerLimits,
    memory: MemoryFigures,
}

impl<B: Backend> ModelRunner<B> {
    /// Uploads the weights and allocates the rest. `progress(done, total)` is called after every tensor, in bytes.
    pub fn new(
        mut backend: B,
        model: &LoadedModel,
        limits: RunnerLimits,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, ModelError> {
        assert!(limits.tokens_per_step_max > 0 && limits.sequences_max > 0);
        let architecture = model.architecture.clone();
        let block_bytes = backend.kv_block_bytes(architecture.kv_spec(1));
        let kv_blocks = limits.kv.blocks(block_bytes, architecture.context_length)?;
        let weights = weights::upload(&mut backend, &model.gguf, &architecture, progress)?;
        let (rows, logit_rows) = (limits.tokens_per_step_max, limits.sequences_max);
        let activations = Activations::allocate(&mut backend, &architecture, rows, logit_rows)?;
        backend.allocate_kv(architecture.kv_spec(kv_blocks))?;
        let logits = host_buffer(logit_rows * architecture.vocab_size)?;
        let elements = Activations::<B::Buffer>::elements::<B>(&architecture, rows, logit_rows) + logits.len();
        let memory = MemoryFigures {
            weight_bytes: model.gguf.tensor_bytes(),
            activation_bytes: (elements * size_of::<f32>()) as u64,
            kv_bytes: kv_blocks as u64 * block_bytes as u64,
            kv_blocks,
        };
        Ok(Self { backend, architecture, weights, activations, logits, limits, memory })
    }

    /// The scheduler never plans more than it was told; what it was told is what was allocated here.
    fn check(&self, batch: &ForwardBatch) {
        assert!(batch.rows() > 0, "a step computes something");
        assert!(batch.rows() <= self.limits.tokens_per_step_max, "more rows than were allocated");
        assert!(batch.logit_rows.len() <= self.limits.sequences_max, "more logits than were allocated");
        let slots = self.memory.kv_blocks * BLOCK_TOKENS;
        assert!(batch.slot_mapping.iter().all(|&slot| (slot as usize) < slots), "a slot outside the cache");
        assert!(
            batch.block_tables.iter().all(|&block| (block as usize) < self.memory.kv_blocks),
            "a block outside the cache"
        );
        let vocab_size = self.architecture.vocab_size;
        assert!(batch.tokens.iter().all(|&token| (token as usize) < vocab_size), "an id outside the vocabulary");
    }
}

impl<B: Backend> Runner for ModelRunner<B> {
    fn forward(&mut self, batch: &ForwardBatch) -> Result<&mut [f32], BackendError> {
        self.check(batch);
        let logits = &mut self.logits[..batch.logit_rows.len() * self.architecture.vocab_size];
        forward::forward(&mut self.backend, &self.architecture, &self.weights, &mut self.activations, batch, logits)?;
        Ok(logits)
    }

    fn bind_caller(&self) {
        self.backend.bind_caller();
    }

    fn copy_block(&mut self, from: BlockId, to: BlockId) {
        let blocks = self.memory.kv_blocks;
        assert!(from != to && (from.0 as usize) < blocks && (to.0 as usize) < blocks, "{from:?} to {to:?}");
        self.backend.copy_block(from.0, to.0);
    }

    fn vocab_size(&self) -> usize {
        self.architecture.vocab_size
    }

    fn architecture(&self) -> &Architecture {
        &self.architecture
    }

    fn memory(&self) -> MemoryFigures {
        self.memory
    }

    fn describe(&self) -> String {
        self.backend.describe()
    }
}

/// Zeroed f32, or an error instead of an abort when there is no room.
fn host_buffer(elements: usize) -> Result<Vec<f32>, BackendError> {
    let mut buffer = Vec::new();
    buffer
        .try_reserve_exact(elements)
        .map_err(|_| BackendError::OutOfMemory { what: "logits", bytes: elements.saturating_mul(size_of::<f32>()) })?;
    buffer.resize(elements, 0.0);
    Ok(buffer)
}
