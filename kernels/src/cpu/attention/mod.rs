//! Causal attention over pages.
//!
//! A unit of work is some rows of one sequence and one key-value head with all query heads that share it, so that each
//! page is loaded once for all of them. Positions are taken in pieces of `PIECE`, joined in a tree (`tree.rs`): memory does
//! not grow with the context, and as pieces begin at multiples of `PIECE` from position 0, a row's sums run in the same
//! order whether it is decoded or part of a prompt. Threads share all pieces of all units, in order; a unit that lies
//! on a border is joined afterwards.

mod tree;
mod unit;

use super::KvType;
use super::buffer::Rows;
use super::isa::{Selected, for_each_isa};
use super::kv::{F16, KvElement, KvShape, PAGE_TOKENS, Pages};
use super::linear::ScratchPerThread;
use super::simd::Simd;
use std::ops::Range;
use tree::{NO_UNIT, Nodes};
use unit::Unit;

/// Positions between two joins; whole pages.
const PIECE: usize = 256;
const PIECE_PAGES: usize = PIECE / PAGE_TOKENS;
/// Query vectors (rows times heads) of a unit; more heads than this are taken in several goes.
const QUERIES_MAX: usize = 12;

/// What one attention call computes. Lengths are checked by [`check`].
#[derive(Clone, Copy)]
pub struct AttentionBatch<'a> {
    /// Position of each row in its sequence, (T).
    pub positions: &'a [u32],
    /// First row of each sequence, and T at the end, (S + 1).
    pub cu_seqlens_q: &'a [u32],
    /// Block ids of all sequences, one table after another.
    pub block_tables: &'a [u32],
    /// Where each sequence's table begins, and the end of the last, (S + 1).
    pub block_table_starts: &'a [u32],
}

/// Heads of one attention call.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionHeads {
    /// Query heads.
    pub heads: usize,
    /// Key-value heads; heads / kv_heads query heads share one.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Multiplies the scores.
    pub scale: f32,
}

/// Checks that rows, sequences and tables fit each other. Block ids are checked where they are used.
///
/// # Panics
/// When they don't.
pub(crate) fn check(batch: &AttentionBatch<'_>, heads: &AttentionHeads) {
    assert!(heads.kv_heads > 0 && heads.heads.is_multiple_of(heads.kv_heads), "{heads:?}");
    let ends = (batch.cu_seqlens_q.first().copied(), batch.cu_seqlens_q.last().copied());
    assert_eq!(ends, (Some(0), Some(batch.positions.len() as u32)), "cu_seqlens_q against positions");
    assert_eq!(batch.cu_seqlens_q.len(), batch.block_table_starts.len());
    assert!(batch.cu_seqlens_q.is_sorted() && batch.block_table_starts.is_sorted());
    assert!(batch.block_table_starts.last().is_some_and(|&end| end as usize <= batch.block_tables.len()));
    for s in 0..batch.cu_seqlens_q.len() - 1 {
        let positions = &batch.positions[batch.cu_seqlens_q[s] as usize..batch.cu_seqlens_q[s + 1] as usize];
        let blocks = (batch.block_table_starts[s + 1] - batch.block_table_starts[s]) as usize;
        let fit = positions.iter().all(|&position| position as usize / PAGE_TOKENS < blocks);
        assert!(fit, "sequence {s}: {blocks} blocks are too few for its positions");
    }
}

/// Elements of scratch each thread needs.
pub(crate) fn scratch_len(shape: &KvShape) -> usize {
    // Scores, queries, nodes of the unit being computed, and of one that another thread has begun.
    NODES_AT + QUERIES_MAX * shape.head_dim.next_multiple_of(16) + 2 * Nodes::memory_len(shape)
}

/// Where a thread's scratch goes on after its scores.
const NODES_AT: usize = QUERIES_MAX * PIECE;

/// A thread's part of the scratch.
#[derive(Clone, Copy)]
struct Scratch {
    /// (queries, `PIECE`).
    scores: *mut f32,
    /// (queries, head_dim padded).
    packed: *mut f32,
    /// Of the unit that this thread computes from its first piece on.
    own: Nodes,
    /// Of the unit whose first piece another thread has.
    continued: Nodes,
}

impl Scratch {
    /// # Safety
    /// The scratch is of `scratch_len` for this shape.
    unsafe fn of(scratch: &ScratchPerThread, index: usize, shape: &KvShape) -> Self {
        let scores = scratch.of(index);
        // SAFETY: the parts that `scratch_len` adds up.
        unsafe {
            let own = scores.add(NODES_AT);
            let continued = own.add(Nodes::memory_len(shape));
            let packed = continued.add(Nodes::memory_len(shape));
            Self { scores, packed, own: Nodes::new(own, shape), continued: Nodes::new(continued, shape) }
        }
    }
}

/// Whether threads may share a unit, so that [`join`] must follow [`attention`].
pub(crate) fn may_split(batch: &AttentionBatch<'_>, threads: usize) -> bool {
    threads > 1 && batch.positions.iter().any(|&position| position as usize >= PIECE)
}

macro_rules! for_each_kv_type {
    ($(#[$meta:meta])* $name:ident = $body:ident<$element:ty>) => {
        for_each_isa! {
            $(#[$meta])*
            unsafe fn $name = $body(
                batch: &AttentionBatch<'_>,
                heads: &AttentionHeads,
                share: (usize, usize),
                q: Rows,
                pages: Pages,
                shape: &KvShape,
                out: Rows,
                scratch: &ScratchPerThread,
            )
        }
        #[inline(always)]
        #[allow(clippy::too_many_arguments)]
        unsafe fn $body<S: Simd>(
            batch: &AttentionBatch<'_>,
            heads: &AttentionHeads,
            share: (usize, usize),
            q: Rows,
            pages: Pages,
            shape: &KvShape,
            out: Rows,
            scratch: &ScratchPerThread,
        ) {
            // SAFETY: the same contract.
            unsafe { units::<S, $element>(batch, heads, share, q, pages, shape, out, scratch) }
        }
    };
}

for_each_kv_type! {
    /// [`attention`] over keys and values in bfloat16.
    attention_bf16 = attention_bf16_body<u16>
}
for_each_kv_type! {
    /// [`attention`] over keys and values in half precision.
    attention_f16 = attention_f16_body<F16>
}
for_each_kv_type! {
    /// [`attention`] over keys and values in bytes with factors.
    attention_int8 = attention_int8_body<i8>
}
for_each_kv_type! {
    /// [`attention`] over keys and values in f32.
    attention_f32 = attention_f32_body<f32>
}

/// The part of thread `share.0` of `share.1`. Where [`may_split`] says so, [`join`] follows when all are through.
///
/// # Safety
/// `batch` passed [`check`]; `q` and `out` have its rows with all heads; `pages` are a layer of a cache of type `ty` and
/// this shape, whose heads these are; the scratch is of `scratch_len` for it and has `share.1` parts; the other threads
/// have the same arguments and other shares.
#[allow(clippy::too_many_arguments)]
pub(crate) unsafe fn attention(
    isa: Selected,
    ty: KvType,
    batch: &AttentionBatch<'_>,
    heads: &AttentionHeads,
    share: (usize, usize),
    q: Rows,
    pages: Pages,
    shape: &KvShape,
    out: Rows,
    scratch: &ScratchPerThread,
) {
    // SAFETY: the caller's contract.
    unsafe {
        match ty {
            KvType::Bf16 => attention_bf16(isa, batch, heads, share, q, pages, shape, out, scratch),
            KvType::F16 => attention_f16(isa, batch, heads, share, q, pages, shape, out, scratch),
            KvType::Int8 => attention_int8(isa, batch, heads, share, q, pages, shape, out, scratch),
            KvType::F32 => attention_f32(isa, batch, heads, share, q, pages, shape, out, scratch),
        }
    }
}

for_each_isa! {
    /// Joins the unit that this thread has begun and others have gone on with.
    ///
    /// # Safety
    /// That of [`attention`], to which all threads have come with the same arguments and are through with.
    pub(crate) unsafe fn join = join_body(
        batch: &AttentionBatch<'_>,
        heads: &AttentionHeads,
        share: (usize, usize),
        shape: &KvShape,
        out: Rows,
        scratch: &ScratchPerThread,
    )
}

/// Goes through the units of a batch in order.
///
/// Not an iterator with closures: a closure is compiled for the baseline instruction set unless it happens to be inlined.
struct Units<'a> {
    batch: &'a AttentionBatch<'a>,
    heads: &'a AttentionHeads,
    sequence: usize,
    rows: Range<usize>,
    kv_head: usize,
    first_head: usize,
    number: u32,
}

impl<'a> Units<'a> {
    #[inline(always)]
    fn new(batch: &'a AttentionBatch<'a>, heads: &'a AttentionHeads) -> Self {
        let mut units = Self { batch, heads, sequence: 0, rows: 0..0, kv_head: 0, first_head: 0, number: 0 };
        units.next_tile();
        units
    }

    fn group(&self) -> usize {
        self.heads.heads / self.heads.kv_heads
    }

    /// Goes to the next rows of one sequence; to none at the end.
    #[inline(always)]
    fn next_tile(&mut self) {
        let start = self.rows.end;
        while self.sequence + 1 < self.batch.cu_seqlens_q.len() {
            let end = self.batch.cu_seqlens_q[self.sequence + 1] as usize;
            if start < end {
                self.rows = start..end.min(start + (QUERIES_MAX / self.group()).max(1));
                return;
            }
            self.sequence += 1;
        }
        self.rows = start..start;
    }

    #[inline(always)]
    fn next(&mut self) -> Option<Unit<'a>> {
        if self.rows.is_empty() {
            return None;
        }
        let end_head = (self.kv_head + 1) * self.group();
        let starts = &self.batch.block_table_starts[self.sequence..];
        let unit = Unit {
            number: self.number,
            first_row: self.rows.start,
            positions: &self.batch.positions[self.rows.clone()],
            table: &self.batch.block_tables[starts[0] as usize..starts[1] as usize],
            kv_head: self.kv_head,
            first_head: self.first_head,
            heads: QUERIES_MAX.min(end_head - self.first_head),
            head_dim: self.heads.head_dim,
            scale: self.heads.scale,
        };
        self.number += 1;
        self.first_head += unit.heads;
        if self.first_head == end_head {
            self.kv_head += 1;
            if self.kv_head == self.heads.kv_heads {
                (self.kv_head, self.first_head) = (0, 0);
                self.next_tile();
            }
        }
        Some(unit)
    }
}

#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn units<S: Simd, E: KvElement>(
    batch: &AttentionBatch<'_>,
    heads: &AttentionHeads,
    (index, threads): (usize, usize),
    q: Rows,
    pages: Pages,
    shape: &KvShape,
    out: Rows,
    scratch: &ScratchPerThread,
) {
    let mut total = 0;
    let mut units = Units::new(batch, heads);
    while let Some(unit) = units.next() {
        total += unit.cost();
    }
    // A thread takes the pieces whose middle lies in its part of the whole cost.
    let (begin, end) = (total * index as u64 / threads as u64, total * (index as u64 + 1) / threads as u64);
    // SAFETY: the scratch is of this shape; here and below it is this thread's own.
    let own = unsafe { Scratch::of(scratch, index, shape) };
    // SAFETY: as above.
    unsafe {
        own.own.clear(NO_UNIT);
        own.continued.clear(NO_UNIT);
    }
    let mut before = 0;
    let mut units = Units::new(batch, heads);
    while let Some(unit) = units.next() {
        let cost = unit.cost();
        if before + cost > begin && before < end {
            let mine = unit.pieces_between(begin.saturating_sub(before), end - before);
            if !mine.is_empty() {
                let nodes = if mine.start == 0 { own.own } else { own.continued };
                // SAFETY: rows, heads and pages by the contract, as `Units` makes them.
                unsafe {
                    nodes.clear(unit.number);
                    unit.run::<S, E>(mine.clone(), q, pages, own.scores, own.packed, nodes);
                    if mine == (0..unit.pieces()) {
                        unit.finish::<S>(nodes, out);
                        nodes.clear(NO_UNIT);
                    }
                }
            }
        }
        before += cost;
    }
    // Rows end in padding that no head covers; one thread zeroes it, so that an output buffer's padding is always zero.
    if index == 0 {
        let used = heads.heads * heads.head_dim;
        for row in 0..batch.positions.len() {
            // SAFETY: the padding of a row of `out`.
            unsafe { std::slice::from_raw_parts_mut(out.row(row).add(used), out.stride - used).fill(0.0) };
        }
    }
}

#[inline(always)]
unsafe fn join_body<S: Simd>(
    batch: &AttentionBatch<'_>,
    heads: &AttentionHeads,
    (index, threads): (usize, usize),
    shape: &KvShape,
    out: Rows,
    scratch: &ScratchPerThread,
) {
    // SAFETY: the scratch is of this shape; nobody computes any more, so that all may read the others' nodes.
    unsafe {
        let nodes = Scratch::of(scratch, index, shape).own;
        if nodes.unit() == NO_UNIT {
            return;
        }
        let mut units = Units::new(batch, heads);
        while let Some(unit) = units.next() {
            if unit.number == nodes.unit() {
                for other in index + 1..threads {
                    let continued = Scratch::of(scratch, other, shape).continued;
                    if continued.unit() == unit.number {
                        nodes.take::<S>(continued, unit.queries());
                    }
                }
                return unit.finish::<S>(nodes, out);
            }
        }
    }
}
