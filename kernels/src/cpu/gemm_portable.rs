//! Integer matrix product in plain Rust.

use super::buffer::Rows;
use super::linear::{Quantized, ROWS_PER_PRODUCT};
use super::panel::{self, Format, PANEL_ROWS};
use super::simd::multiply_add;
use crate::quant::BLOCK;
use std::ops::Range;

/// out[rows][panel's 32 columns] = x * panel^T for `rows` (at most `ROWS_PER_PRODUCT`).
///
/// # Safety
/// `x` and `out` have the rows; `panel` is a whole panel of format `F` with `x.blocks` blocks; `out` has the columns from
/// `column` on, and nobody else touches them.
pub(crate) unsafe fn panel_product<F: Format>(
    panel: &[u8],
    x: Quantized,
    rows: Range<usize>,
    out: Rows,
    column: usize,
) {
    assert!(rows.len() <= ROWS_PER_PRODUCT);
    // The sums stand here while blocks are taken in turn, so that a block is unpacked once for all rows.
    let mut sums = [[0.0_f32; PANEL_ROWS]; ROWS_PER_PRODUCT];
    for (b, block) in panel.chunks_exact(F::BLOCK_BYTES).enumerate() {
        let weights: [[i8; BLOCK]; PANEL_ROWS] = std::array::from_fn(|lane| panel::quants::<F>(block, lane));
        let scales: [([f32; 2], f32); PANEL_ROWS] = std::array::from_fn(|lane| panel::scales::<F>(block, lane));
        for (sums, row) in sums.iter_mut().zip(rows.clone()) {
            // SAFETY: the caller's contract: row and block are inside the quantised activations.
            let (a, d, s) = unsafe {
                let at = row * x.blocks + b;
                (&*x.q.add(at * BLOCK).cast::<[i8; BLOCK]>(), *x.scale.add(at), *x.sum.add(at))
            };
            for ((sum, w), (scale, min)) in sums.iter_mut().zip(&weights).zip(&scales) {
                let half = |h: usize| dot(&w[h * 16..], &a[h * 16..]);
                if F::HALVES {
                    *sum = multiply_add(half(0) as f32, scale[0] * d, *sum);
                    *sum = multiply_add(half(1) as f32, scale[1] * d, *sum);
                } else {
                    *sum = multiply_add((half(0) + half(1)) as f32, scale[0] * d, *sum);
                }
                if F::MIN {
                    *sum = multiply_add(*min, s, *sum);
                }
            }
        }
    }
    for (sums, row) in sums.iter().zip(rows) {
        // SAFETY: the caller's contract: the row has these columns, and they are ours.
        unsafe { out.row(row).add(column).cast::<[f32; PANEL_ROWS]>().write_unaligned(*sums) };
    }
}

/// Of the first 16 elements.
#[inline(always)]
fn dot(w: &[i8], a: &[i8]) -> i32 {
    w[..16].iter().zip(&a[..16]).map(|(&w, &a)| i32::from(i16::from(w) * i16::from(a))).sum()
}
