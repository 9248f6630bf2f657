//! The two halves of a transformer's layer, each in one parallel region: threads meet between its phases instead of going
//! back to the caller, projections of one input are split over threads together, and what a thread has made is used while
//! it lies in its cache: sums are added to the residual stream and gated features quantised panel by panel.
//!
//! Every number has the same bits as from the operations one by one.

use super::attention::{self, AttentionBatch, AttentionHeads};
use super::buffer::{Buffer, Rows};
use super::linear::{self, Input, Projection, Quantized, ROWS_PER_BLOCK, row_blocks};
use super::panel::PANEL_ROWS;
use super::pool::Member;
use super::profile::{Clock, Phase};
use super::rope::Rope;
use super::weight::Weight;
use super::{CpuDevice, elementwise, isa::Selected, kv, rope};
use crate::quant::BLOCK;
use std::ops::Range;

// What comes out of a panel is a block of what goes into the next projection.
const _: () = assert!(PANEL_ROWS == BLOCK);

/// Elements of one panel's products with a block of rows.
const PRODUCT_LEN: usize = ROWS_PER_BLOCK * PANEL_ROWS;
/// Elements of scratch each thread needs for products, beside what the kernels need.
pub(super) const PRODUCTS_LEN: usize = 2 * PRODUCT_LEN;

/// A projection: x * weight^T (+ bias).
#[derive(Clone, Copy)]
pub struct Linear<'a> {
    /// (output features, input features).
    pub weight: &'a Weight,
    /// (output features), or none.
    pub bias: Option<&'a Weight>,
}

/// x += output(attention(rope(q(norm(x))), cache with rope(k(norm(x))) and v(norm(x)))).
pub struct AttentionBlock<'a> {
    /// (hidden).
    pub norm: &'a Weight,
    /// Of the norm.
    pub eps: f32,
    /// (heads * head_dim, hidden).
    pub q: Linear<'a>,
    /// (kv_heads * head_dim, hidden).
    pub k: Linear<'a>,
    /// (kv_heads * head_dim, hidden).
    pub v: Linear<'a>,
    /// (hidden, heads * head_dim).
    pub output: Linear<'a>,
    /// Of queries and keys.
    pub rope: Rope<'a>,
    /// Of the attention.
    pub heads: AttentionHeads,
}

/// Activations of an [`AttentionBlock`].
pub struct AttentionBuffers<'a> {
    /// Residual stream, (rows, hidden), read and written.
    pub x: &'a mut Buffer,
    /// (rows, hidden), overwritten.
    pub normed: &'a mut Buffer,
    /// (rows, heads * head_dim), overwritten.
    pub q: &'a mut Buffer,
    /// (rows, kv_heads * head_dim), overwritten.
    pub k: &'a mut Buffer,
    /// (rows, kv_heads * head_dim), overwritten.
    pub v: &'a mut Buffer,
    /// (rows, heads * head_dim), overwritten.
    pub attended: &'a mut Buffer,
}

/// x += down(silu(gate(norm(x))) * up(norm(x))).
pub struct FeedForwardBlock<'a> {
    /// (hidden).
    pub norm: &'a Weight,
    /// Of the norm.
    pub eps: f32,
    /// (features, hidden).
    pub gate: Linear<'a>,
    /// (features, hidden).
    pub up: Linear<'a>,
    /// (hidden, features).
    pub down: Linear<'a>,
}

/// Activations of a [`FeedForwardBlock`].
pub struct FeedForwardBuffers<'a> {
    /// Residual stream, (rows, hidden), read and written.
    pub x: &'a mut Buffer,
    /// (rows, hidden), overwritten.
    pub normed: &'a mut Buffer,
    /// (rows, features), overwritten where features stay f32.
    pub gate: &'a mut Buffer,
}

impl CpuDevice {
    /// The attention half of layer `layer` for all rows of `batch`, whose keys and values go to `slot_mapping`
    /// (block * `PAGE_TOKENS` + offset).
    pub fn attention_block(
        &mut self,
        layer: usize,
        block: &AttentionBlock<'_>,
        batch: &AttentionBatch<'_>,
        slot_mapping: &[u32],
        buffers: AttentionBuffers<'_>,
    ) {
        let AttentionBlock { norm, eps, heads, .. } = block;
        let AttentionBuffers { x, normed, q, k, v, attended } = buffers;
        let rows = batch.positions.len();
        check_projection(block.q, x, q);
        check_projection(block.k, x, k);
        check_projection(block.v, x, v);
        check_projection(block.output, attended, x);
        let (query_columns, kv_columns) = (heads.heads * heads.head_dim, heads.kv_heads * heads.head_dim);
        assert!(q.columns() == query_columns && attended.columns() == query_columns, "query columns");
        assert!(k.columns() == kv_columns && v.columns() == kv_columns, "key and value columns");
        assert!(norm.columns() == x.columns() && normed.columns() == x.columns(), "columns of the norm");
        assert!([&*x, normed, q, k, v, attended].iter().all(|buffer| rows <= buffer.rows()), "rows");
        assert_eq!(rows, slot_mapping.len(), "rows");
        check_rope(&block.rope, heads.head_dim);
        attention::check(batch, heads);
        let cache = self.kv();
        let (ty, shape, pages) = (cache.ty, cache.shape, cache.layer(layer));
        assert!(heads.kv_heads == shape.kv_heads && heads.head_dim == shape.head_dim, "{heads:?} in {shape:?}");

        let [to_q, to_k, to_v] = [block.q, block.k, block.v].map(Projection::of);
        let output = Projection::of(block.output);
        let is_quantized = [&to_q, &to_k, &to_v].iter().any(|projection| projection.is_quantized());
        let norm = norm.vector().expect("the weight of a norm is a vector");
        let mut table = std::mem::take(&mut self.rope);
        let angles = table.fill(batch.positions, &block.rope);
        let (dimensions, neox) = (block.rope.dimensions, block.rope.neox);
        let input = Input { x: normed.pointer(), quantized: self.activations.view(x.stride() / BLOCK) };
        let attended_input =
            Input { x: attended.pointer(), quantized: self.activations.view(attended.stride() / BLOCK) };
        let (columns, x, q, k, v) = (x.columns(), x.pointer(), q.pointer(), k.pointer(), v.pointer());
        let (isa, profile) = (self.isa, self.profile.as_deref());
        let (weight_scratch, scores) = (&self.weight_scratch, &self.attention_scratch);
        self.pool.run_team(&|member| {
            let clock = Clock::start(profile);
            let scratch = weight_scratch.of(member.index);
            let mine = member.share(rows);
            // SAFETY: here and below, shapes were checked, buffers are borrowed exclusively, and in every phase each thread
            // writes rows, columns or blocks of its own and reads what phases before have written.
            unsafe { norm_rows(isa, x, mine.clone(), columns, norm, *eps, input, is_quantized) };
            clock.end(Phase::AttentionNorm, || member.meet());
            // SAFETY: as above.
            unsafe { project(isa, &member, input, rows, &[(&to_q, q), (&to_k, k), (&to_v, v)], scratch) };
            clock.end(Phase::Qkv, || member.meet());
            let (heads, kv_heads, head_dim) = (heads.heads, heads.kv_heads, heads.head_dim);
            // SAFETY: as above.
            unsafe { rope::rotate(isa, q, mine.clone(), heads, head_dim, dimensions, neox, angles) };
            for (row, &slot) in slot_mapping.iter().enumerate() {
                // By block, so that even a slot named twice is written by one thread only.
                if slot as usize / kv::PAGE_TOKENS % member.threads == member.index {
                    // SAFETY: as above; the block is checked inside.
                    unsafe {
                        rope::rotate(isa, k, row..row + 1, kv_heads, head_dim, dimensions, neox, angles);
                        kv::write(ty, pages, slot, &shape, k.row(row), v.row(row));
                    }
                }
            }
            clock.end(Phase::RopeAndCache, || member.meet());
            let share = (member.index, member.threads);
            let to = attended_input.x;
            // SAFETY: as above.
            unsafe { attention::attention(isa, ty, batch, &block.heads, share, q, pages, &shape, to, scores) };
            clock.end(Phase::Attention, || member.meet());
            if attention::may_split(batch, member.threads) {
                // SAFETY: as above.
                unsafe { attention::join(isa, batch, &block.heads, share, &shape, to, scores) };
                clock.end(Phase::Attention, || member.meet());
            }
            if output.is_quantized() {
                // SAFETY: as above.
                unsafe { linear::quantize_rows(isa, attended_input.x, mine, attended_input.quantized) };
                clock.end(Phase::Quantize, || member.meet());
            }
            // SAFETY: as above.
            unsafe { project_and_add(isa, &member, &output, attended_input, rows, x, scratch) };
            clock.end(Phase::AttentionOutput, || member.meet());
        });
        self.rope = table;
    }

    /// The feed-forward half of a layer for `rows` rows.
    pub fn feed_forward_block(&mut self, rows: usize, block: &FeedForwardBlock<'_>, buffers: FeedForwardBuffers<'_>) {
        let FeedForwardBlock { norm, eps, .. } = block;
        let FeedForwardBuffers { x, normed, gate } = buffers;
        check_projection(block.gate, x, gate);
        check_projection(block.up, x, gate);
        check_projection(block.down, gate, x);
        assert!(norm.columns() == x.columns() && normed.columns() == x.columns(), "columns of the norm");
        assert!([&*x, normed, gate].iter().all(|buffer| rows <= buffer.rows()), "rows");

        let [to_gate, to_up, down] = [block.gate, block.up, block.down].map(Projection::of);
        let is_quantized = to_gate.is_quantized() || to_up.is_quantized();
        let norm = norm.vector().expect("the weight of a norm is a vector");
        let input = Input { x: normed.pointer(), quantized: self.activations.view(x.stride() / BLOCK) };
        let gated = Input { x: gate.pointer(), quantized: self.gated.view(gate.stride() / BLOCK) };
        let (columns, x) = (x.columns(), x.pointer());
        let (isa, profile, weight_scratch) = (self.isa, self.profile.as_deref(), &self.weight_scratch);
        self.pool.run_team(&|member| {
            let clock = Clock::start(profile);
            let scratch = weight_scratch.of(member.index);
            // SAFETY: here and below, as in `attention_block`.
            unsafe { norm_rows(isa, x, member.share(rows), columns, norm, *eps, input, is_quantized) };
            clock.end(Phase::FeedForwardNorm, || member.meet());
            // SAFETY: as above.
            unsafe { gate_up(isa, &member, [&to_gate, &to_up], input, rows, gated, down.is_quantized(), scratch) };
            clock.end(Phase::GateUp, || member.meet());
            // SAFETY: as above.
            unsafe { project_and_add(isa, &member, &down, gated, rows, x, scratch) };
            clock.end(Phase::Down, || member.meet());
        });
    }
}

impl<'a> Projection<'a> {
    fn of(linear: Linear<'a>) -> Self {
        Self::new(linear.weight, linear.bias)
    }
}

fn check_projection(linear: Linear<'_>, x: &Buffer, out: &Buffer) {
    assert_eq!(linear.weight.columns(), x.columns(), "input features");
    assert_eq!(linear.weight.rows(), out.columns(), "output features");
    assert!(linear.bias.is_none_or(|bias| bias.columns() == out.columns()), "bias");
}

/// # Panics
/// When it cannot be applied to heads of `head_dim`.
pub(super) fn check_rope(rope: &Rope<'_>, head_dim: usize) {
    let dimensions = rope.dimensions;
    assert!(dimensions <= head_dim && dimensions >= 2, "{dimensions} rotated of {head_dim}");
    assert_eq!(rope.inverse_frequencies.len() * 2, dimensions, "frequencies");
}

/// Normalises `rows` of `x` into `to`, and quantises them if that is wanted.
///
/// # Safety
/// `x` and `to` have the rows, nobody else touches those of `to`.
#[allow(clippy::too_many_arguments)]
unsafe fn norm_rows(
    isa: Selected,
    x: Rows,
    rows: Range<usize>,
    columns: usize,
    norm: &[f32],
    eps: f32,
    to: Input,
    is_quantized: bool,
) {
    for row in rows {
        // SAFETY: the caller's contract.
        unsafe {
            elementwise::rms_norm(isa, x, row..row + 1, columns, norm, eps, to.x);
            if is_quantized {
                linear::quantize_rows(isa, to.x, row..row + 1, to.quantized);
            }
        }
    }
}

/// This thread's part of the panels of all `outputs` taken together.
///
/// # Safety
/// That of [`Projection::panel`], for all panels of all outputs shared by the threads.
unsafe fn project(
    isa: Selected,
    member: &Member<'_>,
    input: Input,
    rows: usize,
    outputs: &[(&Projection<'_>, Rows)],
    scratch: *mut f32,
) {
    let mine = member.share(outputs.iter().map(|(projection, _)| projection.panels()).sum());
    let mut before = 0;
    for (projection, out) in outputs {
        let n = projection.panels();
        let part = |bound: usize| bound.clamp(before, before + n) - before;
        // SAFETY: the caller's contract.
        unsafe { projection.run(isa, input, rows, part(mine.start)..part(mine.end), *out, scratch) };
        before += n;
    }
}

/// x += the projection, this thread's panels.
///
/// # Safety
/// That of [`Projection::panel`] with the columns of `x`, and of `weight_scratch`.
unsafe fn project_and_add(
    isa: Selected,
    member: &Member<'_>,
    projection: &Projection<'_>,
    input: Input,
    rows: usize,
    x: Rows,
    scratch: *mut f32,
) {
    let panels = member.share(projection.panels());
    for rows in row_blocks(rows) {
        for panel in panels.clone() {
            // SAFETY: the caller's contract; the product has a place of its own at the beginning of the scratch.
            unsafe {
                let (product, scratch) = (Rows::new(scratch, PANEL_ROWS), scratch.add(PRODUCTS_LEN));
                projection.panel(isa, input, rows.clone(), panel, product, 0, scratch);
                elementwise::add_panel(isa, x, rows.clone(), panel * PANEL_ROWS, product);
            }
        }
    }
}

/// silu(gate) * up of this thread's panels, quantised or not as the next projection wants it.
///
/// # Safety
/// That of [`Projection::panel`]; `out` has the rows and columns.
#[allow(clippy::too_many_arguments)]
unsafe fn gate_up(
    isa: Selected,
    member: &Member<'_>,
    [to_gate, to_up]: [&Projection<'_>; 2],
    input: Input,
    rows: usize,
    out: Input,
    is_quantized: bool,
    scratch: *mut f32,
) {
    let panels = member.share(to_gate.panels());
    for rows in row_blocks(rows) {
        for panel in panels.clone() {
            // SAFETY: the caller's contract; both products have places of their own at the beginning of the scratch.
            unsafe {
                let (gate, up) = (Rows::new(scratch, PANEL_ROWS), Rows::new(scratch.add(PRODUCT_LEN), PANEL_ROWS));
                let scratch = scratch.add(PRODUCTS_LEN);
                to_gate.panel(isa, input, rows.clone(), panel, gate, 0, scratch);
                to_up.panel(isa, input, rows.clone(), panel, up, 0, scratch);
                elementwise::silu_mul(isa, gate, up, 0..rows.len());
                if is_quantized {
                    let to: Quantized = out.quantized.beginning_at(rows.start);
                    linear::quantize_panel(isa, gate, rows.len(), to, panel);
                } else {
                    for (i, row) in rows.clone().enumerate() {
                        let to = out.x.row(row).add(panel * PANEL_ROWS);
                        std::ptr::copy_nonoverlapping(gate.row(i), to, PANEL_ROWS);
                    }
                }
            }
        }
    }
}
