//! The two halves of a layer out of a backend's plain operations: for backends that have nothing better, and what those that
//! have are compared with.

use super::{
    AttentionBuffers, AttentionWeights, Backend, FeedForwardBuffers, FeedForwardWeights, Linear, LinearOutput,
};
use crate::batch::ForwardBatch;

/// [`Backend::attention_block`] by operations.
pub fn attention_block<B: Backend + ?Sized>(
    backend: &mut B,
    layer: usize,
    weights: &AttentionWeights<'_, B::Weight>,
    batch: &ForwardBatch,
    buffers: AttentionBuffers<'_, B::Buffer>,
) {
    let (w, b) = (weights, buffers);
    let (rows, head_dim) = (batch.rows(), w.spec.head_dim);
    backend.rms_norm(b.x, rows, w.norm, w.eps, b.normed);
    backend.linear(b.normed, rows, &mut [w.q.to(&mut *b.q), w.k.to(&mut *b.k), w.v.to(&mut *b.v)]);
    backend.rope(b.q, rows, head_dim, &batch.positions, w.rope);
    backend.rope(b.k, rows, head_dim, &batch.positions, w.rope);
    // All rows' keys are written before any row attends: within a chunk, later rows see earlier ones in the cache.
    backend.write_kv(layer, b.k, b.v, &batch.slot_mapping);
    backend.attention(layer, b.q, batch, &w.spec, b.attended);
    backend.linear(b.attended, rows, &mut [w.output.to(&mut *b.delta)]);
    backend.add(b.x, b.delta, rows);
}

/// [`Backend::feed_forward_block`] by operations.
pub fn feed_forward_block<B: Backend + ?Sized>(
    backend: &mut B,
    rows: usize,
    weights: &FeedForwardWeights<'_, B::Weight>,
    buffers: FeedForwardBuffers<'_, B::Buffer>,
) {
    let (w, b) = (weights, buffers);
    backend.rms_norm(b.x, rows, w.norm, w.eps, b.normed);
    backend.linear(b.normed, rows, &mut [w.gate.to(&mut *b.gate), w.up.to(&mut *b.up)]);
    backend.silu_mul(b.gate, b.up, rows);
    backend.linear(b.gate, rows, &mut [w.down.to(&mut *b.delta)]);
    backend.add(b.x, b.delta, rows);
}

impl<W> Linear<W> {
    /// This projection with its place to go.
    fn to<'a, B: Backend<Weight = W> + ?Sized>(&'a self, out: &'a mut B::Buffer) -> LinearOutput<'a, B> {
        LinearOutput { weight: &self.weight, bias: self.bias.as_ref(), out }
    }
}
