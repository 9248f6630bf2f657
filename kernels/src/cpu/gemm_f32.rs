//! Matrix product in f32, with weights read from the file's own bytes: exact weights, exact activations.
//!
//! Four weight rows at a time are turned to f32 in the thread's scratch and used for a block of activation rows. Each
//! product is a dot of two rows: lane l of an accumulator sums inputs l, l + LANES, ... in turn, and the lanes are added
//! at the end in a fixed order, whatever tile the row is in.

use super::buffer::{ROW_PADDING, Rows};
use super::isa::for_each_isa;
use super::panel::PANEL_ROWS;
use super::simd::Simd;
use super::weight::FileRows;
use crate::quant::dequantize_row_inline;
use std::ops::Range;

/// Weight rows taken together.
const GROUP: usize = 4;
/// The most activation rows of a tile.
const TILE_ROWS_MAX: usize = 6;

/// Elements of scratch that a matrix of `columns` inputs needs for each thread.
pub(crate) fn scratch_len(columns: usize) -> usize {
    GROUP * columns.next_multiple_of(ROW_PADDING)
}

for_each_isa! {
    /// out[rows][column..column + 32] = x * weight^T, for panel p the output features p * 32..p * 32 + 32.
    ///
    /// # Safety
    /// `x` and `out` have the rows, `x` with `weight.columns` columns and padding, `out` with those columns, which
    /// nobody else touches; `scratch` has `scratch_len` elements of this thread's own.
    pub(crate) unsafe fn panel_product = body(
        weight: FileRows<'_>,
        panel: usize,
        x: Rows,
        rows: Range<usize>,
        out: Rows,
        column: usize,
        scratch: *mut f32,
    )
}

#[inline(always)]
unsafe fn body<S: Simd>(
    weight: FileRows<'_>,
    panel: usize,
    x: Rows,
    rows: Range<usize>,
    out: Rows,
    column: usize,
    scratch: *mut f32,
) {
    let padded = x.stride;
    // SAFETY: the caller gives scratch of this size to this thread.
    let scratch = unsafe { std::slice::from_raw_parts_mut(scratch, GROUP * padded) };
    let tile_rows = (S::ACCUMULATORS / GROUP).clamp(1, TILE_ROWS_MAX);
    for group in (0..PANEL_ROWS).step_by(GROUP) {
        let (first, column) = (panel * PANEL_ROWS + group, column + group);
        for (i, to) in scratch.chunks_exact_mut(padded).enumerate() {
            // Beyond the last output feature rows are zero, and so is the output's padding.
            let (values, padding) = to.split_at_mut(if first + i < weight.rows { weight.columns } else { 0 });
            padding.fill(0.0);
            if !values.is_empty() {
                let row = &weight.data[(first + i) * weight.row_bytes..][..weight.row_bytes];
                dequantize_row_inline(weight.ty, row, values);
            }
        }
        let mut row = rows.start;
        while row < rows.end {
            let n = tile_rows.min(rows.end - row);
            // SAFETY: the rows are within `rows`; the scratch has GROUP rows of the stride of x.
            unsafe {
                match n {
                    1 => tile::<S, 1>(scratch.as_ptr(), x, row, out, column),
                    2 => tile::<S, 2>(scratch.as_ptr(), x, row, out, column),
                    3 => tile::<S, 3>(scratch.as_ptr(), x, row, out, column),
                    4 => tile::<S, 4>(scratch.as_ptr(), x, row, out, column),
                    5 => tile::<S, 5>(scratch.as_ptr(), x, row, out, column),
                    _ => tile::<S, 6>(scratch.as_ptr(), x, row, out, column),
                }
            }
            row += n;
        }
    }
}

/// `R` rows from `row` on times `GROUP` weight rows, to the columns from `column` on.
#[inline(always)]
unsafe fn tile<S: Simd, const R: usize>(weights: *const f32, x: Rows, row: usize, out: Rows, column: usize) {
    let padded = x.stride;
    // SAFETY: k stays below the stride, a multiple of LANES, in both; the rest is the contract of `panel_product`.
    unsafe {
        let mut sums = [[S::splat(0.0); GROUP]; R];
        for k in (0..padded).step_by(S::LANES) {
            let mut w = [S::splat(0.0); GROUP];
            for (i, w) in w.iter_mut().enumerate() {
                *w = S::load(weights.add(i * padded + k));
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let x = S::load(x.row(row + r).add(k));
                for (sum, w) in sums.iter_mut().zip(w) {
                    *sum = S::fma(w, x, *sum);
                }
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            let out = out.row(row + r).add(column);
            for (i, sum) in sums.iter().enumerate() {
                *out.add(i) = S::sum(*sum);
            }
        }
    }
}
