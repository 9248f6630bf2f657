//! One unit of attention: what its pieces give.

use super::super::buffer::Rows;
use super::super::kv::{self, KvElement, PAGE_TOKENS, Pages, value_width};
use super::super::simd::{Simd, exp};
use super::tree::Nodes;
use super::{PIECE, PIECE_PAGES, QUERIES_MAX};
use std::ops::Range;

/// Pages ahead that are asked for while keys are read.
const PREFETCH_PAGES: usize = 4;

/// Some rows of one sequence, some query heads of one key-value head. Query vectors are numbered row by row.
pub(super) struct Unit<'a> {
    /// Among all of the batch.
    pub(super) number: u32,
    /// The first row, in queries and outputs.
    pub(super) first_row: usize,
    /// Of the rows; rows times heads are at most `QUERIES_MAX`.
    pub(super) positions: &'a [u32],
    /// Blocks of the sequence.
    pub(super) table: &'a [u32],
    /// The key-value head.
    pub(super) kv_head: usize,
    /// The first query head.
    pub(super) first_head: usize,
    /// Query heads.
    pub(super) heads: usize,
    /// Elements of a head.
    pub(super) head_dim: usize,
    /// Multiplies the scores.
    pub(super) scale: f32,
}

impl Unit<'_> {
    /// Query vectors.
    pub(super) fn queries(&self) -> usize {
        self.positions.len() * self.heads
    }

    /// Positions that the last row knows: positions of a sequence ascend.
    fn longest(&self) -> usize {
        self.positions.iter().max().map_or(0, |&position| position as usize + 1)
    }

    /// Pieces of the context.
    pub(super) fn pieces(&self) -> usize {
        self.longest().div_ceil(PIECE)
    }

    /// What a page costs, in no particular unit: its loads about as much as four rows' arithmetic on it.
    fn page_cost(&self) -> u64 {
        4 + self.positions.len() as u64
    }

    /// What all pages cost.
    pub(super) fn cost(&self) -> u64 {
        self.longest().div_ceil(PAGE_TOKENS) as u64 * self.page_cost()
    }

    /// The pieces whose middle lies between these costs.
    #[inline(always)]
    pub(super) fn pieces_between(&self, begin: u64, end: u64) -> Range<usize> {
        let (pages, page_cost) = (self.longest().div_ceil(PAGE_TOKENS), self.page_cost());
        let (mut first, mut last) = (0, 0);
        for piece in 0..self.pieces() {
            let before = piece * PIECE_PAGES;
            let middle = (2 * before + PIECE_PAGES.min(pages - before)) as u64 * page_cost / 2;
            first += usize::from(middle < begin);
            last += usize::from(middle < end);
        }
        first..last
    }

    /// Row and first column of a query vector.
    #[inline(always)]
    fn place(&self, query: usize) -> (usize, usize) {
        (self.first_row + query / self.heads, (self.first_head + query % self.heads) * self.head_dim)
    }

    /// Computes `pieces` into `nodes`.
    ///
    /// # Safety
    /// `q` has the rows and heads; `pages` are of a layer with these heads and of type E; `scores` and `packed` have room for
    /// `QUERIES_MAX` times `PIECE`, and padded heads; `nodes` are of this unit; all three are nobody else's.
    #[inline(always)]
    pub(super) unsafe fn run<S: Simd, E: KvElement>(
        &self,
        pieces: Range<usize>,
        q: Rows,
        pages: Pages,
        scores: *mut f32,
        packed: *mut f32,
        nodes: Nodes,
    ) {
        let (head_dim, width) = (self.head_dim, value_width(self.head_dim));
        let queries = self.queries();
        let query_stride = head_dim.next_multiple_of(16);
        let longest = self.longest();
        // SAFETY: the contract; pages of a piece are in the table, as `check` has seen.
        unsafe {
            for i in 0..queries {
                let (row, column) = self.place(i);
                std::ptr::copy_nonoverlapping(q.row(row).add(column), packed.add(i * query_stride), head_dim);
            }
            let mut lens = [0; QUERIES_MAX];
            for piece in pieces {
                let start = piece * PIECE;
                for (i, len) in lens[..queries].iter_mut().enumerate() {
                    let known = self.positions[i / self.heads] as usize + 1;
                    *len = known.saturating_sub(start).min(PIECE);
                }
                let mut keys = [std::ptr::null::<E>(); PIECE_PAGES + PREFETCH_PAGES];
                let mut values = [std::ptr::null::<E>(); PIECE_PAGES];
                let n = (longest - start).min(PIECE).div_ceil(PAGE_TOKENS);
                let table = &self.table[start / PAGE_TOKENS..][..n];
                for (page, &block) in table.iter().enumerate() {
                    let (key, value) = pages.of::<E>(block, self.kv_head);
                    keys[page] = key;
                    values[page] = value;
                }
                // What follows the keys is the values.
                for page in 0..PREFETCH_PAGES {
                    keys[n + page] = values[page.min(n - 1)];
                }
                self.scores::<S, E>(packed, query_stride, queries, &keys[..n + PREFETCH_PAGES], scores);
                let state = nodes.next(queries);
                for (i, &len) in lens[..queries].iter().enumerate() {
                    if len > 0 {
                        let row = scores.add(i * PIECE);
                        (*state.maxima.add(i), *state.totals.add(i)) = numerators::<S>(row, len);
                        if E::SCALED {
                            times_factors::<S, E>(row, len, &values[..n], width);
                        }
                    }
                }
                weighted::<S, E>(scores, &lens[..queries], &values[..n], state.sums, width);
                nodes.push::<S>(piece as u32, queries);
            }
        }
    }

    /// Writes the result of all pieces.
    ///
    /// # Safety
    /// `nodes` are all of this unit's pieces; `out` has the rows and heads, which nobody else writes.
    #[inline(always)]
    pub(super) unsafe fn finish<S: Simd>(&self, nodes: Nodes, out: Rows) {
        let width = value_width(self.head_dim);
        // SAFETY: the contract.
        unsafe {
            let root = nodes.root::<S>(self.queries());
            for i in 0..self.queries() {
                let (row, column) = self.place(i);
                let inverse = 1.0 / *root.totals.add(i);
                let to = out.row(row).add(column);
                for d in 0..self.head_dim {
                    *to.add(d) = *root.sums.add(i * width + d) * inverse;
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
                // Few queries: several pages at once, so that sums are many enough to hide what each addition takes.
                let step = match S::ACCUMULATORS {
                    16.. if page + 4 <= n && queries <= 3 => 4,
                    12.. if page + 2 <= n && queries <= 3 => 2,
                    _ => 1,
                };
                let mut query = 0;
                while query < queries {
                    let left = queries - query;
                    if step > 1 {
                        match (left, step) {
                            (1, 4) => tile!(1, 4, query, page),
                            (2, 4) => tile!(2, 4, query, page),
                            (_, 4) => tile!(3, 4, query, page),
                            (1, _) => tile!(1, 2, query, page),
                            (2, _) => tile!(2, 2, query, page),
                            _ => tile!(3, 2, query, page),
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
    // SAFETY: the contract of `Unit::scores`; factors follow the pairs of a scaled page.
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
                    let mut score = S::mul(*sum, S::splat(scale));
                    if E::SCALED {
                        score = S::mul(score, S::load(kv::factors(keys[p], pairs * 2).add(v * S::LANES)));
                    }
                    S::store(to, score);
                }
            }
        }
    }
}

/// Turns `len` scores into e^(score - their maximum); gives the maximum and the sum of what they became.
///
/// # Safety
/// There are `len` scores, at least one and at most `PIECE`, in memory for `PIECE`.
#[inline(always)]
unsafe fn numerators<S: Simd>(scores: *mut f32, len: usize) -> (f32, f32) {
    // SAFETY: PIECE is whole vectors.
    unsafe {
        let padded = len.next_multiple_of(S::LANES);
        for i in len..padded {
            *scores.add(i) = f32::NEG_INFINITY;
        }
        let mut greatest = S::splat(f32::NEG_INFINITY);
        for i in (0..padded).step_by(S::LANES) {
            greatest = S::max(greatest, S::load(scores.add(i)));
        }
        let maximum = S::greatest(greatest);
        let mut sum = S::splat(0.0);
        for i in (0..padded).step_by(S::LANES) {
            let mut p = exp::<S>(S::sub(S::load(scores.add(i)), S::splat(maximum)));
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
        (maximum, S::sum(sum))
    }
}

/// p[token] *= the factor of the token's value, for `len` tokens (and what else is in their vectors, which nobody reads).
///
/// # Safety
/// As for [`numerators`]; the pages cover the tokens.
#[inline(always)]
unsafe fn times_factors<S: Simd, E: KvElement>(p: *mut f32, len: usize, values: &[*const E], width: usize) {
    for token in (0..len).step_by(S::LANES) {
        // SAFETY: the contract; a vector lies in one page.
        unsafe {
            let factor = kv::factors(values[token / PAGE_TOKENS], width).add(token % PAGE_TOKENS);
            S::store(p.add(token), S::mul(S::load(p.add(token)), S::load(factor)));
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
            let most = match S::ACCUMULATORS {
                16.. => 6,
                12.. => 4,
                _ => 3,
            };
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
