//! Causal attention over pages.
//!
//! A unit of work is some rows of one sequence and one key-value head with all query heads that share it, so that each
//! page is loaded once for all of them. Positions are taken in pieces of `PIECE`, each with its own maximum, and the pieces
//! joined by rescaling (as flash attention does): memory does not grow with the context, and as pieces begin at
//! multiples of `PIECE` from position 0, a row's sums run in the same order whether it is decoded or part of a prompt.

use super::KvType;
use super::buffer::Rows;
use super::isa::{Selected, for_each_isa};
use super::kv::{KvElement, PAGE_TOKENS, Pages, value_width};
use super::simd::{Simd, exp};
use std::ops::Range;

/// Positions between two rescalings; whole pages.
const PIECE: usize = 256;
const PIECE_PAGES: usize = PIECE / PAGE_TOKENS;
/// Query vectors (rows times heads) of a unit; more heads than this are taken in several goes.
const QUERIES_MAX: usize = 12;
/// Pages ahead that are asked for while keys are read.
const PREFETCH_PAGES: usize = 4;

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
pub(crate) fn scratch_len(head_dim: usize) -> usize {
    // Scores, queries, outputs.
    QUERIES_MAX * (PIECE + head_dim.next_multiple_of(16) + value_width(head_dim))
}

/// The units of thread `share.0` of `share.1`, over keys and values of type `ty`.
///
/// # Safety
/// `batch` passed [`check`]; `q` and `out` have its rows with all heads; `pages` are a layer of such a cache with these
/// heads; nobody else touches `scratch`, of `scratch_len`; the other threads have the same arguments and other shares.
#[allow(clippy::too_many_arguments)]
pub(crate) unsafe fn attention(
    isa: Selected,
    ty: KvType,
    batch: &AttentionBatch<'_>,
    heads: &AttentionHeads,
    share: (usize, usize),
    q: Rows,
    pages: Pages,
    out: Rows,
    scratch: *mut f32,
) {
    // SAFETY: the caller's contract.
    unsafe {
        match ty {
            KvType::Bf16 => attention_bf16(isa, batch, heads, share, q, pages, out, scratch),
            KvType::F32 => attention_f32(isa, batch, heads, share, q, pages, out, scratch),
        }
    }
}

for_each_isa! {
    /// The units of thread `share.0` of `share.1`, over keys and values in bfloat16.
    ///
    /// # Safety
    /// `batch` passed [`check`]; `q` and `out` have its rows with all heads; `pages` are a layer of such a cache with these
    /// heads; nobody else touches `scratch`, of `scratch_len`; the other threads have the same arguments and other shares.
    unsafe fn attention_bf16 = attention_bf16_body(
        batch: &AttentionBatch<'_>, heads: &AttentionHeads, share: (usize, usize), q: Rows, pages: Pages, out: Rows, scratch: *mut f32,
    )
}
for_each_isa! {
    /// As [`attention_bf16`], over keys and values in f32.
    ///
    /// # Safety
    /// As there.
    unsafe fn attention_f32 = attention_f32_body(
        batch: &AttentionBatch<'_>, heads: &AttentionHeads, share: (usize, usize), q: Rows, pages: Pages, out: Rows, scratch: *mut f32,
    )
}

#[inline(always)]
unsafe fn attention_bf16_body<S: Simd>(
    batch: &AttentionBatch<'_>,
    heads: &AttentionHeads,
    share: (usize, usize),
    q: Rows,
    pages: Pages,
    out: Rows,
    scratch: *mut f32,
) {
    // SAFETY: the same contract.
    unsafe { units::<S, u16>(batch, heads, share, q, pages, out, scratch) }
}

#[inline(always)]
unsafe fn attention_f32_body<S: Simd>(
    batch: &AttentionBatch<'_>,
    heads: &AttentionHeads,
    share: (usize, usize),
    q: Rows,
    pages: Pages,
    out: Rows,
    scratch: *mut f32,
) {
    // SAFETY: the same contract.
    unsafe { units::<S, f32>(batch, heads, share, q, pages, out, scratch) }
}

/// Goes through the tiles of a batch: some rows of one sequence each.
///
/// Not an iterator with closures: a closure is compiled for the baseline instruction set unless it happens to be inlined.
struct Tiles<'a> {
    batch: &'a AttentionBatch<'a>,
    rows_max: usize,
    sequence: usize,
    row: usize,
}

struct Tile {
    sequence: usize,
    rows: Range<usize>,
    /// What reading its context costs, in no particular unit.
    cost: u64,
}

impl<'a> Tiles<'a> {
    #[inline(always)]
    fn new(batch: &'a AttentionBatch<'a>, rows_max: usize) -> Self {
        Self { batch, rows_max, sequence: 0, row: 0 }
    }

    #[inline(always)]
    fn next(&mut self) -> Option<Tile> {
        while self.row == *self.batch.cu_seqlens_q.get(self.sequence + 1)? as usize {
            self.sequence += 1;
        }
        let end = self.batch.cu_seqlens_q[self.sequence + 1] as usize;
        let rows = self.row..(self.row + self.rows_max).min(end);
        self.row = rows.end;
        // A page's loads cost about as much as four rows' arithmetic on it.
        let pages = u64::from(self.batch.positions[rows.end - 1]) / PAGE_TOKENS as u64 + 1;
        let cost = pages * (4 + rows.len() as u64);
        Some(Tile { sequence: self.sequence, rows, cost })
    }
}

#[inline(always)]
unsafe fn units<S: Simd, E: KvElement>(
    batch: &AttentionBatch<'_>,
    heads: &AttentionHeads,
    (index, threads): (usize, usize),
    q: Rows,
    pages: Pages,
    out: Rows,
    scratch: *mut f32,
) {
    let group = heads.heads / heads.kv_heads;
    let tile = (QUERIES_MAX / group).max(1);
    let mut total = 0;
    let mut tiles = Tiles::new(batch, tile);
    while let Some(tile) = tiles.next() {
        total += tile.cost * heads.kv_heads as u64;
    }
    // A thread takes the units whose middle lies in its part of the whole cost.
    let (begin, end) = (total * index as u64 / threads as u64, total * (index as u64 + 1) / threads as u64);
    let mut before = 0;
    let mut tiles = Tiles::new(batch, tile);
    while let Some(Tile { sequence, rows, cost }) = tiles.next() {
        let starts = &batch.block_table_starts[sequence..];
        let table = &batch.block_tables[starts[0] as usize..starts[1] as usize];
        for kv_head in 0..heads.kv_heads {
            let middle = before + cost / 2;
            before += cost;
            if middle < begin || middle >= end {
                continue;
            }
            let end_head = (kv_head + 1) * group;
            for first_head in (kv_head * group..end_head).step_by(QUERIES_MAX) {
                let unit = Unit {
                    positions: &batch.positions[rows.clone()],
                    table,
                    heads: QUERIES_MAX.min(end_head - first_head),
                    head_dim: heads.head_dim,
                    scale: heads.scale,
                    scratch,
                };
                // SAFETY: rows, heads and scratch by the contract; rows times heads is at most QUERIES_MAX, for a tile has
                // QUERIES_MAX / group rows, or one.
                unsafe { unit.run::<S, E>(q, out, rows.start, first_head, kv_head, pages) };
            }
        }
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

/// Some rows of one sequence, some query heads of one key-value head. Query vectors are numbered row by row.
struct Unit<'a> {
    positions: &'a [u32],
    table: &'a [u32],
    heads: usize,
    head_dim: usize,
    scale: f32,
    scratch: *mut f32,
}

impl Unit<'_> {
    /// # Safety
    /// That of `attention_bf16`.
    #[inline(always)]
    unsafe fn run<S: Simd, E: KvElement>(
        &self,
        q: Rows,
        out: Rows,
        first_row: usize,
        first_head: usize,
        kv_head: usize,
        pages: Pages,
    ) {
        let (head_dim, width) = (self.head_dim, value_width(self.head_dim));
        let queries = self.positions.len() * self.heads;
        let query_stride = head_dim.next_multiple_of(16);
        // SAFETY: three parts of the scratch, of the sizes `scratch_len` adds up; rows and heads by the contract.
        unsafe {
            let scores = self.scratch;
            let packed = scores.add(QUERIES_MAX * PIECE);
            let sums = packed.add(QUERIES_MAX * query_stride);
            let row_and_head = |i: usize| (first_row + i / self.heads, (first_head + i % self.heads) * head_dim);
            for i in 0..queries {
                let (row, column) = row_and_head(i);
                std::ptr::copy_nonoverlapping(q.row(row).add(column), packed.add(i * query_stride), head_dim);
            }
            std::slice::from_raw_parts_mut(sums, queries * width).fill(0.0);
            let mut maxima = [f32::NEG_INFINITY; QUERIES_MAX];
            let mut totals = [0.0_f32; QUERIES_MAX];
            let mut lens = [0; QUERIES_MAX];
            let longest = self.positions.iter().max().map_or(0, |&position| position as usize + 1);
            for start in (0..longest).step_by(PIECE) {
                let piece = (longest - start).min(PIECE);
                for (i, len) in lens[..queries].iter_mut().enumerate() {
                    let known = self.positions[i / self.heads] as usize + 1;
                    *len = known.saturating_sub(start).min(PIECE);
                }
                let mut keys = [std::ptr::null::<E>(); PIECE_PAGES + PREFETCH_PAGES];
                let mut values = [std::ptr::null::<E>(); PIECE_PAGES];
                let n = piece.div_ceil(PAGE_TOKENS);
                let table = &self.table[start / PAGE_TOKENS..][..n];
                for (page, &block) in table.iter().enumerate() {
                    let (key, value) = pages.of::<E>(block, kv_head);
                    keys[page] = key;
                    values[page] = value;
                }
                // What follows the keys is the values.
                for page in 0..PREFETCH_PAGES {
                    keys[n + page] = values[page.min(n - 1)];
                }
                self.scores::<S, E>(packed, query_stride, queries, &keys[..n + PREFETCH_PAGES], scores);
                for i in 0..queries {
                    if lens[i] > 0 {
                        let (row, sum) = (scores.add(i * PIECE), sums.add(i * width));
                        numerators::<S>(row, lens[i], &mut maxima[i], &mut totals[i], sum, width);
                    }
                }
                weighted::<S, E>(scores, &lens[..queries], &values[..n], sums, width);
            }
            for (i, total) in totals[..queries].iter().enumerate() {
                let (row, column) = row_and_head(i);
                let inverse = 1.0 / total;
                let to = out.row(row).add(column);
                for d in 0..head_dim {
                    *to.add(d) = *sums.add(i * width + d) * inverse;
                }
            }
        }
    }

    /// scores[query][token] = scale * q . k for all tokens of the pages; one chain over the dimensions each.
    #[inline(always)]
    unsafe fn scores<S: Simd, E: KvElement>(
        &self,
        packed: *const f32,
        query_stride: usize,
        queries: usize,
        keys: &[*const E],
        scores: *mut f32,
    ) {
        let n = keys.len() - PREFETCH_PAGES;
        let (pairs, scale) = (self.head_dim / 2, self.scale);
        macro_rules! tile {
            ($r:literal, $p:literal, $query:expr, $page:expr) => {
                score_tile::<S, E, $r, $p>(
                    packed.add($query * query_stride),
                    query_stride,
                    pairs,
                    &keys[$page..],
                    scale,
                    scores.add($query * PIECE + $page * PAGE_TOKENS),
                )
            };
        }
        // SAFETY: queries and pages are in range; a page's scores lie inside the query's PIECE.
        unsafe {
            let mut page = 0;
            while page < n {
                let step = if S::ACCUMULATORS >= 16 && page + 4 <= n && queries <= 3 { 4 } else { 1 };
                let mut query = 0;
                while query < queries {
                    let left = queries - query;
                    if step == 4 {
                        match left {
                            1 => tile!(1, 4, query, page),
                            2 => tile!(2, 4, query, page),
                            _ => tile!(3, 4, query, page),
                        }
                        query += left.min(3);
                    } else if S::ACCUMULATORS >= 16 && left >= 12 {
                        tile!(12, 1, query, page);
                        query += 12;
                    } else if S::ACCUMULATORS >= 16 && left >= 6 {
                        tile!(6, 1, query, page);
                        query += 6;
                    } else {
                        match left {
                            1 => tile!(1, 1, query, page),
                            2 => tile!(2, 1, query, page),
                            3 => tile!(3, 1, query, page),
                            _ => tile!(4, 1, query, page),
                        }
                        query += left.min(4);
                    }
                }
                page += step;
            }
        }
    }
}

/// `R` queries times `P` pages.
#[inline(always)]
unsafe fn score_tile<S: Simd, E: KvElement, const R: usize, const P: usize>(
    q: *const f32,
    query_stride: usize,
    pairs: usize,
    keys: &[*const E],
    scale: f32,
    scores: *mut f32,
) {
    let vectors = PAGE_TOKENS / S::LANES;
    // SAFETY: the contract of `Unit::scores`.
    unsafe {
        // Two vectors make a page at most.
        let mut sums = [[[S::splat(0.0); 2]; P]; R];
        for pair in 0..pairs {
            for p in 0..P {
                S::prefetch(keys[p + PREFETCH_PAGES].add(pair * PAGE_TOKENS * 2).cast());
                for v in 0..vectors {
                    let (even, odd) = E::load_pair::<S>(keys[p], pair, PAGE_TOKENS, v * S::LANES);
                    for (r, sums) in sums.iter_mut().enumerate() {
                        let q = q.add(r * query_stride + pair * 2);
                        sums[p][v] = S::fma(even, S::splat(*q), sums[p][v]);
                        sums[p][v] = S::fma(odd, S::splat(*q.add(1)), sums[p][v]);
                    }
                }
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            for (p, sums) in sums.iter().enumerate() {
                for (v, sum) in sums[..vectors].iter().enumerate() {
                    let to = scores.add(r * PIECE + p * PAGE_TOKENS + v * S::LANES);
                    S::store(to, S::mul(*sum, S::splat(scale)));
                }
            }
        }
    }
}

/// Turns `len` scores into e^(score - maximum so far), adds them to the total, and rescales what stands for earlier
/// pieces when the maximum has risen.
#[inline(always)]
unsafe fn numerators<S: Simd>(
    scores: *mut f32,
    len: usize,
    maximum: &mut f32,
    total: &mut f32,
    sums: *mut f32,
    width: usize,
) {
    // SAFETY: len is at most PIECE, which is whole vectors; `sums` has `width` elements, whole vectors too.
    unsafe {
        let padded = len.next_multiple_of(S::LANES);
        for i in len..padded {
            *scores.add(i) = f32::NEG_INFINITY;
        }
        let mut greatest = S::splat(*maximum);
        for i in (0..padded).step_by(S::LANES) {
            greatest = S::max(greatest, S::load(scores.add(i)));
        }
        let greatest = S::greatest(greatest);
        // The first piece rescales zeros by a tiny number.
        let rescale = S::greatest(exp::<S>(S::splat(*maximum - greatest)));
        *maximum = greatest;
        let mut sum = S::splat(0.0);
        for i in (0..padded).step_by(S::LANES) {
            let mut p = exp::<S>(S::sub(S::load(scores.add(i)), S::splat(greatest)));
            S::store(scores.add(i), p);
            if i + S::LANES > len {
                // e^x is clamped above zero: the lanes beyond the row's last position must not count.
                for j in len..padded {
                    *scores.add(j) = 0.0;
                }
                p = S::load(scores.add(i));
            }
            sum = S::add(sum, p);
        }
        *total = *total * rescale + S::sum(sum);
        for d in (0..width).step_by(S::LANES) {
            S::store(sums.add(d), S::mul(S::load(sums.add(d)), S::splat(rescale)));
        }
    }
}

/// sums[query] += p[query][token] * value[token], one chain over the tokens for each element.
#[inline(always)]
unsafe fn weighted<S: Simd, E: KvElement>(
    p: *const f32,
    lens: &[usize],
    values: &[*const E],
    sums: *mut f32,
    width: usize,
) {
    // SAFETY: queries are in range; `width` is whole vectors.
    unsafe {
        let mut query = 0;
        while query < lens.len() {
            let most = if S::ACCUMULATORS >= 16 { 6 } else { 3 };
            let n = most.min(lens.len() - query);
            let (p, lens, sums) = (p.add(query * PIECE), &lens[query..query + n], sums.add(query * width));
            let mut d = 0;
            while d < width {
                let vectors = if d + 4 * S::LANES <= width && (S::ACCUMULATORS >= 16 || n == 1) {
                    4
                } else if d + 2 * S::LANES <= width {
                    2
                } else {
                    1
                };
                macro_rules! tile {
                    ($r:literal) => {
                        match vectors {
                            4 => value_tile::<S, E, $r, 4>(p, lens, values, sums, width, d),
                            2 => value_tile::<S, E, $r, 2>(p, lens, values, sums, width, d),
                            _ => value_tile::<S, E, $r, 1>(p, lens, values, sums, width, d),
                        }
                    };
                }
                match n {
                    1 => tile!(1),
                    2 => tile!(2),
                    3 => tile!(3),
                    4 => tile!(4),
                    5 => tile!(5),
                    _ => tile!(6),
                }
                d += vectors * S::LANES;
            }
            query += n;
        }
    }
}

/// `R` queries, `C` vectors of dimensions from `d` on.
#[inline(always)]
unsafe fn value_tile<S: Simd, E: KvElement, const R: usize, const C: usize>(
    p: *const f32,
    lens: &[usize],
    values: &[*const E],
    sums: *mut f32,
    width: usize,
    d: usize,
) {
    // SAFETY: the contract of `weighted`; tokens stay below each query's length, which the pages cover.
    unsafe {
        let mut acc = [[S::splat(0.0); C]; R];
        for (r, acc) in acc.iter_mut().enumerate() {
            for (c, acc) in acc.iter_mut().enumerate() {
                *acc = S::load(sums.add(r * width + d + c * S::LANES));
            }
        }
        // Whole pairs that all queries see; then each its own rest, so that nothing beyond a row's position is touched,
        // not even multiplied by zero: it may be another's, and need not be finite.
        let common = lens.iter().min().map_or(0, |&len| len / 2);
        for pair in 0..common {
            let page = values[pair / (PAGE_TOKENS / 2)];
            for c in 0..C {
                let (even, odd) = E::load_pair::<S>(page, pair % (PAGE_TOKENS / 2), width, d + c * S::LANES);
                for (r, acc) in acc.iter_mut().enumerate() {
                    let p = p.add(r * PIECE + pair * 2);
                    acc[c] = S::fma(even, S::splat(*p), acc[c]);
                    acc[c] = S::fma(odd, S::splat(*p.add(1)), acc[c]);
                }
            }
        }
        for (r, acc) in acc.iter_mut().enumerate() {
            for token in common * 2..lens[r] {
                let page = values[token / PAGE_TOKENS];
                for (c, acc) in acc.iter_mut().enumerate() {
                    let pair = token % PAGE_TOKENS / 2;
                    let (even, odd) = E::load_pair::<S>(page, pair, width, d + c * S::LANES);
                    let value = if token % 2 == 0 { even } else { odd };
                    *acc = S::fma(value, S::splat(*p.add(r * PIECE + token)), *acc);
                }
            }
        }
        for (r, acc) in acc.iter().enumerate() {
            for (c, acc) in acc.iter().enumerate() {
                S::store(sums.add(r * width + d + c * S::LANES), *acc);
            }
        }
    }
}
