//! Operations that take each row by itself. Rows are whole vectors, padding included.

use super::buffer::Rows;
use super::isa::for_each_isa;
use super::simd::{Simd, exp};
use std::ops::Range;

for_each_isa! {
    /// out = x / sqrt(mean(x^2) + eps) * weight over `columns` of each row; `weight` is padded like a row.
    ///
    /// # Safety
    /// `x` and `out` have the rows with the same stride, which is the length of `weight`; nobody else touches those of `out`.
    pub(crate) unsafe fn rms_norm = rms_norm_body(
        x: Rows, rows: Range<usize>, columns: usize, weight: &[f32], eps: f32, out: Rows,
    )
}

#[inline(always)]
unsafe fn rms_norm_body<S: Simd>(x: Rows, rows: Range<usize>, columns: usize, weight: &[f32], eps: f32, out: Rows) {
    for row in rows {
        // SAFETY: the rows exist by the contract; every offset is below the stride, a multiple of 2 * LANES.
        unsafe {
            let (x, out, stride) = (x.row(row), out.row(row), x.stride);
            // Two chains hide the latency of the sums.
            let mut squares = [S::splat(0.0); 2];
            for i in (0..stride).step_by(2 * S::LANES) {
                for (half, squares) in squares.iter_mut().enumerate() {
                    let v = S::load(x.add(i + half * S::LANES));
                    *squares = S::fma(v, v, *squares);
                }
            }
            let mean = S::sum(S::add(squares[0], squares[1])) / columns as f32;
            let factor = S::splat(1.0 / (mean + eps).sqrt());
            for i in (0..stride).step_by(S::LANES) {
                let v = S::mul(S::load(x.add(i)), factor);
                S::store(out.add(i), S::mul(v, S::load(weight.as_ptr().add(i))));
            }
        }
    }
}

for_each_isa! {
    /// x += y.
    ///
    /// # Safety
    /// Both have the rows with the same stride; nobody else touches those of `x`.
    pub(crate) unsafe fn add = add_body(x: Rows, y: Rows, rows: Range<usize>)
}

#[inline(always)]
unsafe fn add_body<S: Simd>(x: Rows, y: Rows, rows: Range<usize>) {
    for row in rows {
        // SAFETY: the rows exist by the contract; every offset is below the stride, a multiple of LANES.
        unsafe {
            let (x, y, stride) = (x.row(row), y.row(row), x.stride);
            for i in (0..stride).step_by(S::LANES) {
                S::store(x.add(i), S::add(S::load(x.add(i)), S::load(y.add(i))));
            }
        }
    }
}

for_each_isa! {
    /// gate = gate / (1 + e^-gate) * up.
    ///
    /// # Safety
    /// Both have the rows with the same stride; nobody else touches those of `gate`.
    pub(crate) unsafe fn silu_mul = silu_mul_body(gate: Rows, up: Rows, rows: Range<usize>)
}

#[inline(always)]
unsafe fn silu_mul_body<S: Simd>(gate: Rows, up: Rows, rows: Range<usize>) {
    for row in rows {
        // SAFETY: the rows exist by the contract; every offset is below the stride, a multiple of LANES.
        unsafe {
            let (gate, up, stride) = (gate.row(row), up.row(row), gate.stride);
            for i in (0..stride).step_by(S::LANES) {
                let g = S::load(gate.add(i));
                let denominator = S::add(exp::<S>(S::sub(S::splat(0.0), g)), S::splat(1.0));
                S::store(gate.add(i), S::mul(S::div(g, denominator), S::load(up.add(i))));
            }
        }
    }
}

for_each_isa! {
    /// x[rows][column..column + stride of product] += product, whose first row belongs to the first of `rows`.
    ///
    /// # Safety
    /// `x` has the rows and columns, which nobody else touches, and `product` as many rows; its stride is a multiple of LANES.
    pub(crate) unsafe fn add_panel = add_panel_body(x: Rows, rows: Range<usize>, column: usize, product: Rows)
}

#[inline(always)]
unsafe fn add_panel_body<S: Simd>(x: Rows, rows: Range<usize>, column: usize, product: Rows) {
    for (i, row) in rows.enumerate() {
        // SAFETY: the rows and columns exist by the contract.
        unsafe {
            let (x, product_row) = (x.row(row).add(column), product.row(i));
            for lane in (0..product.stride).step_by(S::LANES) {
                S::store(x.add(lane), S::add(S::load(x.add(lane)), S::load(product_row.add(lane))));
            }
        }
    }
}
