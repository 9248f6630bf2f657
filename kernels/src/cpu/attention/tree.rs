//! Attention over pieces of a context, and how pieces are joined.
//!
//! Each piece gives, for every query, the greatest score m, the sum t of e^(score - m), and the sum of such weights times
//! values (as flash decoding does). Pieces are the leaves of a binary tree: 2i and 2i + 1 are joined, then pairs of pairs,
//! and what has no right-hand side stays as it is. So the joins depend on the context's length alone, not on who computed
//! which pieces, and a thread keeps few nodes however many pieces it has.

use super::super::kv::{KvShape, PAGE_TOKENS, value_width};
use super::super::simd::{Simd, exp};
use super::{PIECE, QUERIES_MAX};

/// In place of the number of a unit: nothing is kept.
pub(super) const NO_UNIT: u32 = u32::MAX;

/// Nodes of one unit, in the order of their pieces, in memory of a thread that others may read later.
#[derive(Clone, Copy)]
pub(super) struct Nodes {
    /// Number of the unit, number of nodes, then first piece and level of each node.
    index: *mut u32,
    states: *mut f32,
    width: usize,
    capacity: usize,
}

/// What a node knows of its queries.
#[derive(Clone, Copy)]
pub(super) struct State {
    /// Greatest scores, (queries).
    pub(super) maxima: *mut f32,
    /// (queries); zero where no position of the pieces is known to the query.
    pub(super) totals: *mut f32,
    /// (queries, width).
    pub(super) sums: *mut f32,
}

/// Most nodes of one thread: of a range of pieces, two for each level, and one that is being made.
fn capacity(shape: &KvShape) -> usize {
    let pieces = (shape.blocks * PAGE_TOKENS).div_ceil(PIECE).max(1);
    2 * pieces.next_power_of_two().ilog2() as usize + 3
}

fn state_len(width: usize) -> usize {
    QUERIES_MAX * (width + 2)
}

fn index_len(capacity: usize) -> usize {
    (2 + 2 * capacity).next_multiple_of(16)
}

impl Nodes {
    /// Elements of memory it takes.
    pub(super) fn memory_len(shape: &KvShape) -> usize {
        let capacity = capacity(shape);
        index_len(capacity) + capacity * state_len(value_width(shape.head_dim))
    }

    /// In memory of `memory_len` elements.
    ///
    /// # Safety
    /// There is so much memory, and it stays while this is used.
    pub(super) unsafe fn new(memory: *mut f32, shape: &KvShape) -> Self {
        let capacity = capacity(shape);
        // SAFETY: inside the memory.
        let states = unsafe { memory.add(index_len(capacity)) };
        Self { index: memory.cast(), states, width: value_width(shape.head_dim), capacity }
    }

    /// The number of the unit whose nodes these are.
    ///
    /// # Safety
    /// Here and below: the memory is good, [`Nodes::clear`] was called, and nobody else writes.
    pub(super) unsafe fn unit(self) -> u32 {
        // SAFETY: the contract.
        unsafe { *self.index }
    }

    /// No nodes, of unit `unit`.
    ///
    /// # Safety
    /// As above.
    pub(super) unsafe fn clear(self, unit: u32) {
        // SAFETY: the contract.
        unsafe {
            *self.index = unit;
            *self.index.add(1) = 0;
        }
    }

    unsafe fn len(self) -> usize {
        // SAFETY: the contract.
        unsafe { *self.index.add(1) as usize }
    }

    /// First piece and level of node `i`.
    unsafe fn span(self, i: usize) -> *mut [u32; 2] {
        // SAFETY: the contract, and i is below the capacity.
        unsafe { self.index.add(2 + 2 * i).cast() }
    }

    unsafe fn state(self, i: usize) -> State {
        assert!(i < self.capacity, "node {i} of {}", self.capacity);
        // SAFETY: the contract; just checked.
        unsafe {
            let maxima = self.states.add(i * state_len(self.width));
            State { maxima, totals: maxima.add(QUERIES_MAX), sums: maxima.add(2 * QUERIES_MAX) }
        }
    }

    /// A new piece's state, with no position in it yet; [`Nodes::push`] makes it a node.
    ///
    /// # Safety
    /// As above; at most `QUERIES_MAX` queries.
    #[inline(always)]
    pub(super) unsafe fn next(self, queries: usize) -> State {
        // SAFETY: the contract.
        unsafe {
            let state = self.state(self.len());
            for query in 0..queries {
                *state.maxima.add(query) = f32::NEG_INFINITY;
                *state.totals.add(query) = 0.0;
            }
            std::slice::from_raw_parts_mut(state.sums, queries * self.width).fill(0.0);
            state
        }
    }

    /// Makes what [`Nodes::next`] gave the node of piece `piece`, which follows those before, and joins what it completes.
    ///
    /// # Safety
    /// As above.
    #[inline(always)]
    pub(super) unsafe fn push<S: Simd>(self, piece: u32, queries: usize) {
        // SAFETY: the contract.
        unsafe { self.push_node::<S>([piece, 0], queries) }
    }

    #[inline(always)]
    unsafe fn push_node<S: Simd>(self, span: [u32; 2], queries: usize) {
        // SAFETY: the contract; `next` or `take` has checked that there is room.
        unsafe {
            *self.span(self.len()) = span;
            *self.index.add(1) += 1;
            while self.len() >= 2 {
                let (left, right) = (*self.span(self.len() - 2), *self.span(self.len() - 1));
                if left[1] != right[1] || left[0] >> left[1] & 1 == 1 {
                    break;
                }
                self.join::<S>(queries);
                (*self.span(self.len() - 1))[1] += 1;
            }
        }
    }

    /// Takes over nodes that follow these.
    ///
    /// # Safety
    /// As above, for both.
    #[inline(always)]
    pub(super) unsafe fn take<S: Simd>(self, other: Nodes, queries: usize) {
        // SAFETY: the contract; states are of the same size.
        unsafe {
            for i in 0..other.len() {
                let (from, to) = (other.state(i), self.state(self.len()));
                std::ptr::copy_nonoverlapping(from.maxima, to.maxima, state_len(self.width));
                self.push_node::<S>(*other.span(i), queries);
            }
        }
    }

    /// All nodes as one.
    ///
    /// # Safety
    /// As above; there is at least one.
    #[inline(always)]
    pub(super) unsafe fn root<S: Simd>(self, queries: usize) -> State {
        // SAFETY: the contract.
        unsafe {
            while self.len() > 1 {
                self.join::<S>(queries);
            }
            self.state(0)
        }
    }

    /// Joins the last two nodes.
    #[inline(always)]
    unsafe fn join<S: Simd>(self, queries: usize) {
        // SAFETY: the contract; `width` is whole vectors.
        unsafe {
            let len = self.len();
            let (left, right) = (self.state(len - 2), self.state(len - 1));
            *self.index.add(1) -= 1;
            for query in 0..queries {
                let (l, r) = (left.maxima.add(query), *right.maxima.add(query));
                let (total, added) = (left.totals.add(query), *right.totals.add(query));
                // A query that knows nothing of the right-hand side: the left stays bit by bit.
                if added == 0.0 {
                    continue;
                }
                let maximum = S::greatest(S::max(S::splat(*l), S::splat(r)));
                let scale_left = exp::<S>(S::splat(*l - maximum));
                let scale_right = exp::<S>(S::splat(r - maximum));
                *l = maximum;
                let sum = S::fma(S::splat(added), scale_right, S::mul(S::splat(*total), scale_left));
                *total = S::greatest(sum);
                let (to, from) = (left.sums.add(query * self.width), right.sums.add(query * self.width));
                for d in (0..self.width).step_by(S::LANES) {
                    let kept = S::mul(S::load(to.add(d)), scale_left);
                    S::store(to.add(d), S::fma(S::load(from.add(d)), scale_right, kept));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::simd::Portable;
    use super::*;

    const SHAPE: KvShape = KvShape { layers: 1, kv_heads: 1, head_dim: 16, blocks: 40 * PIECE / PAGE_TOKENS };

    /// Two queries, of which the second knows the first `known` pieces only; any numbers.
    fn leaf(nodes: Nodes, piece: u32, known: u32) {
        // SAFETY: the memory is of `memory_len`, and ours.
        unsafe {
            let state = nodes.next(2);
            for query in 0..if piece < known { 2 } else { 1 } {
                let x = ((piece * 2 + query) as f32 * 0.7).sin();
                *state.maxima.add(query as usize) = 3.0 * x;
                *state.totals.add(query as usize) = 1.5 + x;
                for d in 0..16 {
                    *state.sums.add(query as usize * 16 + d) = x * d as f32 + 0.1;
                }
            }
            nodes.push::<Portable>(piece, 2);
        }
    }

    fn result(nodes: Nodes, query: usize) -> Vec<u32> {
        // SAFETY: as above.
        unsafe {
            let root = nodes.root::<Portable>(2);
            let sums = std::slice::from_raw_parts(root.sums.add(query * 16), 16);
            [*root.maxima.add(query), *root.totals.add(query)].iter().chain(sums).map(|x| x.to_bits()).collect()
        }
    }

    /// However pieces are divided, and whoever else's longer context stands beside, bits are the same.
    #[test]
    fn any_division_gives_the_same_bits() {
        let memory = || vec![0.0_f32; Nodes::memory_len(&SHAPE)];
        let (mut one, mut two, mut three) = (memory(), memory(), memory());
        for pieces in 1..=40_u32 {
            for known in [1, pieces.div_ceil(2), pieces] {
                // SAFETY: the vectors outlive the nodes.
                let [whole, alone, tail] =
                    [&mut one, &mut two, &mut three].map(|memory| unsafe { Nodes::new(memory.as_mut_ptr(), &SHAPE) });
                // SAFETY: as above.
                unsafe {
                    whole.clear(7);
                    alone.clear(7);
                }
                (0..pieces).for_each(|piece| leaf(whole, piece, known));
                (0..known).for_each(|piece| leaf(alone, piece, known));
                let want = [result(whole, 0), result(whole, 1)];
                assert_eq!(result(alone, 1), want[1], "{known} of {pieces} pieces");
                for cut in 1..pieces {
                    // SAFETY: as above.
                    unsafe {
                        whole.clear(7);
                        tail.clear(7);
                        (0..cut).for_each(|piece| leaf(whole, piece, known));
                        (cut..pieces).for_each(|piece| leaf(tail, piece, known));
                        whole.take::<Portable>(tail, 2);
                    }
                    assert_eq!([result(whole, 0), result(whole, 1)], want, "{pieces} pieces cut at {cut}");
                }
            }
        }
    }
}
