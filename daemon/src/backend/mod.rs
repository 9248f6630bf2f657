//! What a device must be able to do for the one forward pass in `model/forward.rs`.
//!
//! Activations are f32, row-major, (rows, columns); how a backend rounds them inside an operation is its own affair.
//! The contract every backend keeps: **a row's result depends on that row (and its own sequence's cache) alone**, bit for
//! bit: not on how many rows stand beside it, nor on where a prompt was cut into chunks. Sums along K and along positions
//! run in an order fixed by the row's own indices.

pub mod cpu;
pub mod plain;

use crate::batch::ForwardBatch;
use llmd_kernels::quant::WeightType;

/// A weight as a model file has it: (rows, columns) = (output features, input features), row-major, `bytes` holding
/// whole blocks of `ty`. A vector is one row.
#[derive(Debug, Clone, Copy)]
pub struct TensorView<'a> {
    /// The name in the file, for messages.
    pub name: &'a str,
    /// Element type.
    pub ty: WeightType,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub columns: usize,
    /// rows * ty.row_bytes(columns) bytes.
    pub bytes: &'a [u8],
}

/// Shape of the key-value memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvSpec {
    /// Layers of the model.
    pub layers: usize,
    /// Key-value heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Blocks of `BLOCK_TOKENS` positions.
    pub blocks: usize,
}

/// How positions turn pairs of a head's elements.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeSpec {
    /// Elements of each head that are rotated (even; usually head_dim).
    pub dimensions: usize,
    /// Pairs (i, i + dimensions / 2) when true ("neox"), (2i, 2i + 1) when false ("norm": what GGUF's llama has).
    pub neox: bool,
    /// Angle per position of each pair, scaling included, (dimensions / 2).
    pub inverse_frequencies: Vec<f32>,
    /// Multiplies sine and cosine (YaRN's attention factor); 1 otherwise.
    pub magnitude: f32,
}

/// Parameters of one attention call.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionSpec {
    /// Query heads.
    pub heads: usize,
    /// Key-value heads; heads / kv_heads query heads share one.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Multiplies the scores; usually 1 / sqrt(head_dim).
    pub scale: f32,
}

/// A matrix with its bias.
#[derive(Debug)]
pub struct Linear<W> {
    /// (output features, input features).
    pub weight: W,
    /// (output features), or none.
    pub bias: Option<W>,
}

/// Weights and numbers of the attention half of a layer.
pub struct AttentionWeights<'a, W> {
    /// Of the norm, (hidden).
    pub norm: &'a W,
    /// Of the norm.
    pub eps: f32,
    /// (heads * head_dim, hidden).
    pub q: &'a Linear<W>,
    /// (kv_heads * head_dim, hidden).
    pub k: &'a Linear<W>,
    /// (kv_heads * head_dim, hidden).
    pub v: &'a Linear<W>,
    /// (hidden, heads * head_dim).
    pub output: &'a Linear<W>,
    /// Of queries and keys.
    pub rope: &'a RopeSpec,
    /// Of the attention.
    pub spec: AttentionSpec,
}

/// Activations of [`Backend::attention_block`], all but `x` overwritten.
pub struct AttentionBuffers<'a, T> {
    /// Residual stream, (T, hidden).
    pub x: &'a mut T,
    /// (T, hidden).
    pub normed: &'a mut T,
    /// (T, heads * head_dim).
    pub q: &'a mut T,
    /// (T, kv_heads * head_dim).
    pub k: &'a mut T,
    /// (T, kv_heads * head_dim).
    pub v: &'a mut T,
    /// (T, heads * head_dim).
    pub attended: &'a mut T,
    /// (T, hidden), without rows where [`Backend::FUSES_LAYERS`].
    pub delta: &'a mut T,
}

/// Weights and numbers of the feed-forward half of a layer.
pub struct FeedForwardWeights<'a, W> {
    /// Of the norm, (hidden).
    pub norm: &'a W,
    /// Of the norm.
    pub eps: f32,
    /// (features, hidden).
    pub gate: &'a Linear<W>,
    /// (features, hidden).
    pub up: &'a Linear<W>,
    /// (hidden, features).
    pub down: &'a Linear<W>,
}

/// Activations of [`Backend::feed_forward_block`], all but `x` overwritten.
pub struct FeedForwardBuffers<'a, T> {
    /// Residual stream, (T, hidden).
    pub x: &'a mut T,
    /// (T, hidden).
    pub normed: &'a mut T,
    /// (T, features).
    pub gate: &'a mut T,
    /// (T, features), without rows where [`Backend::FUSES_LAYERS`].
    pub up: &'a mut T,
    /// (T, hidden), without rows where [`Backend::FUSES_LAYERS`].
    pub delta: &'a mut T,
}

/// What can go wrong on a device.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// Memory asked for at start could not be had.
    #[error("cannot allocate {bytes} bytes for {what}")]
    OutOfMemory {
        /// What it was for.
        what: &'static str,
        /// How much.
        bytes: usize,
    },
    /// A weight this backend cannot hold.
    #[error("tensor {name}: {reason}")]
    Unsupported {
        /// The tensor's name.
        name: String,
        /// Why not.
        reason: String,
    },
    /// The device failed; the process must end.
    #[error("device failed: {0}")]
    Device(String),
}

/// A device that computes. Everything is allocated before the first step; no operation allocates.
///
/// `rows` is always the number of leading rows of a buffer that an operation concerns.
pub trait Backend: Send {
    /// A weight on the device, in whatever layout it likes best.
    type Weight: Send;
    /// (rows, columns) of f32 activations on the device.
    type Buffer: Send;

    /// Whether the two halves of a layer are operations of their own here, which need no room for what lies between the plain
    /// ones.
    const FUSES_LAYERS: bool = false;

    /// Called once by the thread that will step, before its first step: a backend that computes on its caller's thread binds
    /// it to a processor. Threads started by it afterwards inherit that.
    fn bind_caller(&self) {}
    /// For people: "cpu, AVX-512 VNNI, 2 threads".
    fn describe(&self) -> String;
    /// Takes a weight over.
    fn upload(&mut self, tensor: TensorView<'_>) -> Result<Self::Weight, BackendError>;
    /// Allocates activations, zeroed.
    fn buffer(&mut self, rows: usize, columns: usize) -> Result<Self::Buffer, BackendError>;
    /// Allocates the key-value memory; called once.
    fn allocate_kv(&mut self, spec: KvSpec) -> Result<(), BackendError>;
    /// Bytes of one block over all layers, keys and values.
    fn kv_block_bytes(&self, spec: KvSpec) -> usize;

    /// out[t] = table[tokens[t]].
    fn embed(&mut self, table: &Self::Weight, tokens: &[u32], out: &mut Self::Buffer);
    /// out = x / sqrt(mean(x^2) + eps) * weight, per row.
    fn rms_norm(&mut self, x: &Self::Buffer, rows: usize, weight: &Self::Weight, eps: f32, out: &mut Self::Buffer);
    /// x += y.
    fn add(&mut self, x: &mut Self::Buffer, y: &Self::Buffer, rows: usize);
    /// For each output: out = x * weight^T (+ bias). Several at once share the preparation of x.
    fn linear(&mut self, x: &Self::Buffer, rows: usize, outputs: &mut [LinearOutput<'_, Self>]);
    /// Rotates the heads of each row of x, (rows, heads * head_dim), by its position.
    fn rope(&mut self, x: &mut Self::Buffer, rows: usize, head_dim: usize, positions: &[u32], rope: &RopeSpec);
    /// Writes each row's key and value, (rows, kv_heads * head_dim), into its slot of `layer`.
    fn write_kv(&mut self, layer: usize, k: &Self::Buffer, v: &Self::Buffer, slot_mapping: &[u32]);
    /// Causal attention of every row over its own sequence's positions 0..=position, reading the cache.
    fn attention(
        &mut self,
        layer: usize,
        q: &Self::Buffer,
        batch: &ForwardBatch,
        spec: &AttentionSpec,
        out: &mut Self::Buffer,
    );
    /// gate = silu(gate) * up.
    fn silu_mul(&mut self, gate: &mut Self::Buffer, up: &Self::Buffer, rows: usize);
    /// x += output(attention(q, k and v of norm(x))), for layer `layer` and all rows of the batch.
    fn attention_block(
        &mut self,
        layer: usize,
        weights: &AttentionWeights<'_, Self::Weight>,
        batch: &ForwardBatch,
        buffers: AttentionBuffers<'_, Self::Buffer>,
    ) {
        plain::attention_block(self, layer, weights, batch, buffers);
    }
    /// x += down(silu(gate(norm(x))) * up(norm(x))).
    fn feed_forward_block(
        &mut self,
        rows: usize,
        weights: &FeedForwardWeights<'_, Self::Weight>,
        buffers: FeedForwardBuffers<'_, Self::Buffer>,
    ) {
        plain::feed_forward_block(self, rows, weights, buffers);
    }
    /// out[i] = x[rows[i]].
    fn gather(&mut self, x: &Self::Buffer, rows: &[u32], out: &mut Self::Buffer);
    /// Copies the leading `out.len() / columns` rows to the host.
    fn read(&mut self, x: &Self::Buffer, out: &mut [f32]) -> Result<(), BackendError>;
    /// Copies all layers of block `from` to block `to`.
    fn copy_block(&mut self, from: u32, to: u32);
}

/// One result of [`Backend::linear`].
pub struct LinearOutput<'a, B: Backend + ?Sized> {
    /// (output features, input features).
    pub weight: &'a B::Weight,
    /// (output features), or none.
    pub bias: Option<&'a B::Weight>,
    /// (rows, output features).
    pub out: &'a mut B::Buffer,
}
