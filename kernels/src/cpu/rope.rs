//! Rotary position embedding.
//!
//! Sine and cosine are computed once for a step's positions and reused by every layer, for queries and keys: the first
//! call with new positions fills the table, the others find it filled.

use super::buffer::Rows;
use super::isa::for_each_isa;
use super::simd::{Simd, multiply_add};
use std::ops::Range;

/// How positions turn pairs of a head's elements.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rope<'a> {
    /// Elements of each head that are rotated; even, at most the head's.
    pub dimensions: usize,
    /// Pairs (i, i + dimensions / 2) when true, (2i, 2i + 1) when false.
    pub neox: bool,
    /// Angle per position of each pair, (dimensions / 2).
    pub inverse_frequencies: &'a [f32],
    /// Multiplies sine and cosine.
    pub magnitude: f32,
}

/// Sines and cosines of the positions of the present step.
#[derive(Default)]
pub(crate) struct RopeTable {
    positions: Vec<u32>,
    inverse_frequencies: Vec<f32>,
    neox: bool,
    magnitude: f32,
    /// (rows, 2, dimensions): cosines, then sines, one for each element: as its own order wants them, with the sine's sign.
    values: Vec<f32>,
}

impl RopeTable {
    /// Makes room for `rows` rows of `dimensions`, so that steps within them allocate nothing.
    pub(crate) fn reserve(&mut self, rows: usize, dimensions: usize) {
        reserve_total(&mut self.positions, rows);
        reserve_total(&mut self.inverse_frequencies, dimensions / 2);
        reserve_total(&mut self.values, rows * dimensions * 2);
    }

    /// The table for `positions`: (rows, 2, dimensions).
    pub(crate) fn fill(&mut self, positions: &[u32], rope: &Rope<'_>) -> &[f32] {
        let same_spec = self.neox == rope.neox
            && self.magnitude == rope.magnitude
            && self.inverse_frequencies == rope.inverse_frequencies;
        if same_spec && self.positions == positions {
            return &self.values;
        }
        self.neox = rope.neox;
        self.magnitude = rope.magnitude;
        self.inverse_frequencies.clear();
        self.inverse_frequencies.extend_from_slice(rope.inverse_frequencies);
        self.positions.clear();
        self.positions.extend_from_slice(positions);
        let (pairs, dimensions) = (rope.dimensions / 2, rope.dimensions);
        self.values.clear();
        self.values.resize(positions.len() * 2 * dimensions, 0.0);
        for (row, &position) in self.values.chunks_exact_mut(2 * dimensions).zip(positions) {
            let (cosines, sines) = row.split_at_mut(dimensions);
            for (i, frequency) in rope.inverse_frequencies.iter().enumerate() {
                // The angle is rounded to f32, as models are trained with; its sine and cosine are exact.
                let (sin, cos) = f64::from(position as f32 * frequency).sin_cos();
                let (sin, cos) = ((sin * f64::from(rope.magnitude)) as f32, (cos * f64::from(rope.magnitude)) as f32);
                let (a, b) = if rope.neox { (i, i + pairs) } else { (2 * i, 2 * i + 1) };
                (cosines[a], cosines[b]) = (cos, cos);
                (sines[a], sines[b]) = (-sin, sin);
            }
        }
        &self.values
    }
}

fn reserve_total<T>(v: &mut Vec<T>, total: usize) {
    v.reserve(total.saturating_sub(v.len()));
}

for_each_isa! {
    /// Rotates `heads` heads of `head_dim` elements in each row by `table`, (all rows, 2, dimensions).
    ///
    /// # Safety
    /// `x` has the rows with heads * head_dim columns, `table` covers them; nobody else touches those rows.
    pub(crate) unsafe fn rotate = rotate_body(
        x: Rows, rows: Range<usize>, heads: usize, head_dim: usize, dimensions: usize, neox: bool, table: &[f32],
    )
}

#[inline(always)]
unsafe fn rotate_body<S: Simd>(
    x: Rows,
    rows: Range<usize>,
    heads: usize,
    head_dim: usize,
    dimensions: usize,
    neox: bool,
    table: &[f32],
) {
    for row in rows {
        let (cos, sin) = table[row * 2 * dimensions..][..2 * dimensions].split_at(dimensions);
        for head in 0..heads {
            // SAFETY: the head is inside the row by the contract, and the table's row has `dimensions` of each.
            unsafe {
                let head = x.row(row).add(head * head_dim);
                if neox {
                    rotate_halves::<S>(head, cos.as_ptr(), sin.as_ptr(), dimensions / 2);
                } else {
                    rotate_pairs::<S>(head, cos.as_ptr(), sin.as_ptr(), dimensions);
                }
            }
        }
    }
}

/// Elements i and i + `pairs`.
#[inline(always)]
unsafe fn rotate_halves<S: Simd>(head: *mut f32, cos: *const f32, sin: *const f32, pairs: usize) {
    // SAFETY: whole vectors while they fit, single elements after; all inside 2 * pairs elements.
    unsafe {
        let mut i = 0;
        while i + S::LANES <= pairs {
            let (a, b) = (S::load(head.add(i)), S::load(head.add(pairs + i)));
            let (c, s) = (S::load(cos.add(i)), S::load(sin.add(pairs + i)));
            let first = S::fma(a, c, S::mul(S::sub(S::splat(0.0), b), s));
            let second = S::fma(b, c, S::mul(a, s));
            S::store(head.add(i), first);
            S::store(head.add(pairs + i), second);
            i += S::LANES;
        }
        for i in i..pairs {
            let (a, b) = (*head.add(i), *head.add(pairs + i));
            let (c, s) = (*cos.add(i), *sin.add(pairs + i));
            *head.add(i) = multiply_add(a, c, -b * s);
            *head.add(pairs + i) = multiply_add(b, c, a * s);
        }
    }
}

/// Elements 2i and 2i + 1.
#[inline(always)]
unsafe fn rotate_pairs<S: Simd>(head: *mut f32, cos: *const f32, sin: *const f32, dimensions: usize) {
    // SAFETY: whole vectors while they fit, single pairs after; all inside `dimensions` elements.
    unsafe {
        let mut i = 0;
        while i + S::LANES <= dimensions {
            let v = S::load(head.add(i));
            let turned = S::mul(S::swap_pairs(v), S::load(sin.add(i)));
            S::store(head.add(i), S::fma(v, S::load(cos.add(i)), turned));
            i += S::LANES;
        }
        for i in (i..dimensions).step_by(2) {
            let (a, b) = (*head.add(i), *head.add(i + 1));
            *head.add(i) = multiply_add(a, *cos.add(i), b * *sin.add(i));
            *head.add(i + 1) = multiply_add(b, *cos.add(i + 1), a * *sin.add(i + 1));
        }
    }
}
