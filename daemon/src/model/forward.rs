//! The forward pass of the Llama family, once for every device.
//!
//! T rows of several sequences go through each operation together; what keeps sequences apart is `attention` alone, which
//! reads each row's own blocks. Every operation works row by row, so a row's result does not depend on its company (the
//! contract of `Backend`).

use super::architecture::Architecture;
use super::weights::{LayerWeights, Weights};
use crate::backend::{
    AttentionBuffers, AttentionWeights, Backend, BackendError, FeedForwardBuffers, FeedForwardWeights, LinearOutput,
};
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
    /// What is added to the residual stream, (T, hidden); without rows where the backend adds at once.
    delta: T,
    /// (T, feed_forward).
    gate: T,
    /// (T, feed_forward); without rows where the backend multiplies at once.
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
        let between = Self::rows_between::<B>(rows);
        Ok(Self {
            x: backend.buffer(rows, a.hidden)?,
            normed: backend.buffer(rows, a.hidden)?,
            q: backend.buffer(rows, a.query_columns())?,
            k: backend.buffer(rows, a.kv_columns())?,
            v: backend.buffer(rows, a.kv_columns())?,
            attended: backend.buffer(rows, a.query_columns())?,
            delta: backend.buffer(between, a.hidden)?,
            gate: backend.buffer(rows, a.feed_forward)?,
            up: backend.buffer(between, a.feed_forward)?,
            last: backend.buffer(logit_rows, a.hidden)?,
            last_normed: backend.buffer(logit_rows, a.hidden)?,
            logits: backend.buffer(logit_rows, a.vocab_size)?,
        })
    }

    /// Rows of the buffers that only plain operations need.
    fn rows_between<B: Backend>(rows: usize) -> usize {
        if B::FUSES_LAYERS { 0 } else { rows }
    }

    /// f32 elements of all buffers, as `allocate` makes them.
    pub fn elements<B: Backend>(architecture: &Architecture, rows: usize, logit_rows: usize) -> usize {
        let a = architecture;
        rows * (2 * a.hidden + 2 * a.query_columns() + 2 * a.kv_columns() + a.feed_forward)
            + Self::rows_between::<B>(rows) * (a.hidden + a.feed_forward)
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
    let a = activations;
    let (rows, logit_rows) = (batch.rows(), batch.logit_rows.len());
    backend.embed(&weights.token_embedding, &batch.tokens, &mut a.x);
    let Some((last, layers)) = weights.layers.split_last() else { unreachable!("an architecture has layers") };
    for (index, layer) in layers.iter().enumerate() {
        attention(backend, architecture, index, layer, a, batch);
        feed_forward(backend, architecture, layer, a, rows, Stream::All);
    }
    // What comes after the last layer's keys and values concerns only the rows that are sampled from.
    attention(backend, architecture, layers.len(), last, a, batch);
    if logit_rows == 0 {
        return Ok(());
    }
    backend.gather(&a.x, &batch.logit_rows, &mut a.last);
    feed_forward(backend, architecture, last, a, logit_rows, Stream::Last);
    backend.rms_norm(&a.last, logit_rows, &weights.output_norm, architecture.rms_norm_eps, &mut a.last_normed);
    let output = weights.output.as_ref().unwrap_or(&weights.token_embedding);
    backend.linear(&a.last_normed, logit_rows, &mut [LinearOutput { weight: output, bias: None, out: &mut a.logits }]);
    backend.read(&a.logits, logits)
}

/// Which rows of the residual stream.
enum Stream {
    /// All of the step.
    All,
    /// Those that are sampled from.
    Last,
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
    let weights = AttentionWeights {
        norm: &layer.attn_norm,
        eps: architecture.rms_norm_eps,
        q: &layer.attn_q,
        k: &layer.attn_k,
        v: &layer.attn_v,
        output: &layer.attn_output,
        rope: &architecture.rope,
        spec: architecture.attention(),
    };
    let buffers = AttentionBuffers {
        x: &mut a.x,
        normed: &mut a.normed,
        q: &mut a.q,
        k: &mut a.k,
        v: &mut a.v,
        attended: &mut a.attended,
        delta: &mut a.delta,
    };
    backend.attention_block(index, &weights, batch, buffers);
}

/// x += down(silu(gate(norm(x))) * up(norm(x))), in the rows of `stream`.
fn feed_forward<B: Backend>(
    backend: &mut B,
    architecture: &Architecture,
    layer: &LayerWeights<B::Weight>,
    a: &mut Activations<B::Buffer>,
    rows: usize,
    stream: Stream,
) {
    let weights = FeedForwardWeights {
        norm: &layer.ffn_norm,
        eps: architecture.rms_norm_eps,
        gate: &layer.ffn_gate,
        up: &layer.ffn_up,
        down: &layer.ffn_down,
    };
    let x = match stream {
        Stream::All => &mut a.x,
        Stream::Last => &mut a.last,
    };
    let buffers =
        FeedForwardBuffers { x, normed: &mut a.normed, gate: &mut a.gate, up: &mut a.up, delta: &mut a.delta };
    backend.feed_forward_block(rows, &weights, buffers);
}
