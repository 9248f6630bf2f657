//! The forward pass of the Llama family, once for every device.
//!
//! T rows of several sequences go through each operation together; what keeps sequences apart is `attention` alone, which
//! reads each row's own blocks. Every operation works row by row, so a row's result does not depend on its company (the
//! contract of `Backend`).

use super::architecture::Architecture;
use super::weights::{LayerWeights, Linear, Weights};
use crate::backend::{Backend, BackendError, LinearOutput};
use crate::batch::ForwardBatch;

/// Activations of one step, allocated at start and used again by every layer of every step.
#[derive(Debug)]
pub struct Activations<T> {
    /// Residual stream, (T, hidden).
    x: T,
    /// Input of the next projections, (T, hidden).
    normed: T,
    /// (T, heads * head_dim).
    q: T,
    /// (T, kv_heads * head_dim).
    k: T,
    /// (T, kv_heads * head_dim).
    v: T,
    /// (T, heads * head_dim).
    attended: T,
    /// What is added to the residual stream, (T, hidden).
    delta: T,
    /// (T, feed_forward).
    gate: T,
    /// (T, feed_forward).
    up: T,
    /// Residual stream of the rows whose logits are wanted, (L, hidden).
    last: T,
    /// (L, hidden).
    last_normed: T,
    /// (L, vocab).
    logits: T,
}

impl<T> Activations<T> {
    /// Allocates for steps of at most `rows` tokens, `logit_rows` of which are sampled from.
    pub fn allocate<B: Backend<Buffer = T>>(
        backend: &mut B,
        architecture: &Architecture,
        rows: usize,
        logit_rows: usize,
    ) -> Result<Self, BackendError> {
        let a = architecture;
        Ok(Self {
            x: backend.buffer(rows, a.hidden)?,
            normed: backend.buffer(rows, a.hidden)?,
            q: backend.buffer(rows, a.query_columns())?,
            k: backend.buffer(rows, a.kv_columns())?,
            v: backend.buffer(rows, a.kv_columns())?,
            attended: backend.buffer(rows, a.query_columns())?,
            delta: backend.buffer(rows, a.hidden)?,
            gate: backend.buffer(rows, a.feed_forward)?,
            up: backend.buffer(rows, a.feed_forward)?,
            last: backend.buffer(logit_rows, a.hidden)?,
            last_normed: backend.buffer(logit_rows, a.hidden)?,
            logits: backend.buffer(logit_rows, a.vocab_size)?,
        })
    }

    /// f32 elements of all buffers, as `allocate` makes them.
    pub fn elements(architecture: &Architecture, rows: usize, logit_rows: usize) -> usize {
        let a = architecture;
        rows * (3 * a.hidden + 2 * a.query_columns() + 2 * a.kv_columns() + 2 * a.feed_forward)
            + logit_rows * (2 * a.hidden + a.vocab_size)
    }
}

/// Computes a step: writes the keys and values of all its tokens, and the logits of `batch.logit_rows` into `logits`,
/// (L, vocab).
pub fn forward<B: Backend>(
    backend: &mut B,
    architecture: &Architecture,
    weights: &Weights<B::Weight>,
    activations: &mut Activations<B::Buffer>,
    batch: &ForwardBatch,
    logits: &mut [f32],
) -> Result<(), BackendError> {
    debug_assert_eq!(logits.len(), batch.logit_rows.len() * architecture.vocab_size);
    backend.embed(&weights.token_embedding, &batch.tokens, &mut activations.x);
    for (index, layer) in weights.layers.iter().enumerate() {
        attention(backend, architecture, index, layer, activations, batch);
        feed_forward(backend, architecture, layer, activations, batch.rows());
    }
    if batch.logit_rows.is_empty() {
        return Ok(());
    }
    let (a, rows) = (activations, batch.logit_rows.len());
    backend.gather(&a.x, &batch.logit_rows, &mut a.last);
    backend.rms_norm(&a.last, rows, &weights.output_norm, architecture.rms_norm_eps, &mut a.last_normed);
    let output = weights.output.as_ref().unwrap_or(&weights.token_embedding);
    backend.linear(&a.last_normed, rows, &mut [LinearOutput { weight: output, bias: None, out: &mut a.logits }]);
    backend.read(&a.logits, logits)
}

/// x += attention(norm(x)).
fn attention<B: Backend>(
    backend: &mut B,
    architecture: &Architecture,
    index: usize,
    layer: &LayerWeights<B::Weight>,
    a: &mut Activations<B::Buffer>,
    batch: &ForwardBatch,
) {
    let (rows, head_dim) = (batch.rows(), architecture.head_dim);
    backend.rms_norm(&a.x, rows, &layer.attn_norm, architecture.rms_norm_eps, &mut a.normed);
    backend.linear(
        &a.normed,
        rows,
        &mut [layer.attn_q.to(&mut a.q), layer.attn_k.to(&mut a.k), layer.attn_v.to(&mut a.v)],
    );
    backend.rope(&mut a.q, rows, head_dim, &batch.positions, &architecture.rope);
    backend.rope(&mut a.k, rows, head_dim, &batch.positions, &architecture.rope);
    // All rows' keys are written before any row attends: within a chunk, later rows see earlier ones in the cache.
    backend.write_kv(index, &a.k, &a.v, &batch.slot_mapping);
    backend.attention(index, &a.q, batch, &architecture.attention(), &mut a.attended);
    backend.linear(&a.attended, rows, &mut [layer.attn_output.to(&mut a.delta)]);
    backend.add(&mut a.x, &a.delta, rows);
}

/// x += down(silu(gate(norm(x))) * up(norm(x))).
fn feed_forward<B: Backend>(
    backend: &mut B,
    architecture: &Architecture,
    layer: &LayerWeights<B::Weight>,
    a: &mut Activations<B::Buffer>,
    rows: usize,
) {
    backend.rms_norm(&a.x, rows, &layer.ffn_norm, architecture.rms_norm_eps, &mut a.normed);
    backend.linear(&a.normed, rows, &mut [layer.ffn_gate.to(&mut a.gate), layer.ffn_up.to(&mut a.up)]);
    backend.silu_mul(&mut a.gate, &a.up, rows);
    backend.linear(&a.gate, rows, &mut [layer.ffn_down.to(&mut a.delta)]);
    backend.add(&mut a.x, &a.delta, rows);
}

impl<W> Linear<W> {
    /// This projection with its place to go.
    fn to<'a, B: Backend<Weight = W>>(&'a self, out: &'a mut B::Buffer) -> LinearOutput<'a, B> {
        LinearOutput { weight: &self.weight, bias: self.bias.as_ref(), out }
    }
}
