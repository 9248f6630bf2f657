//! Integer matrix product with NEON: plain, with the dot products of `dotprod`, and with those and the matrix products of
//! `i8mm`.
//!
//! All three give the same bits, for integer sums are exact and f32 sums run in one order. Tiles of few rows are wide and
//! those of more rows narrow, so that accumulators always fit 32 registers and are always enough to hide latencies.
//!
//! Instructions stand here in assembly where the standard library's functions for them are not stable.

use super::buffer::Rows;
use super::linear::Quantized;
use super::panel::{Format, PANEL_ROWS};
use super::simd_neon::widen;
use crate::quant::BLOCK;
use std::arch::aarch64::*;
use std::arch::asm;
use std::ops::Range;

/// `LEVEL` with multiplications alone: 8 products of 16 bits at once.
pub(crate) const PLAIN: u8 = 0;
/// `LEVEL` with `sdot`: 16 products of signed bytes, added by fours.
pub(crate) const DOTPROD: u8 = 1;
/// `LEVEL` with `usdot`: the same of unsigned and signed bytes, which takes bytes that hold q + 128 as they are; and for
/// more than one row with `usmmla`: 32 such products at once, of two columns with two rows.
pub(crate) const I8MM: u8 = 2;

/// Rows of a tile of dot products at most.
const TILE_ROWS_MAX: usize = 4;
/// Rows of a tile of matrix products at most.
const MATRIX_ROWS_MAX: usize = 6;
/// Columns of a vector.
const LANES: usize = 4;

/// out[rows][panel's 32 columns] = x * panel^T.
///
/// # Safety
/// The processor has what `LEVEL` names. `x` and `out` have the rows; `panel` is a whole panel of format `F` with
/// `x.blocks` blocks; `out` has the columns from `column` on, and nobody else touches them.
pub(crate) unsafe fn panel_product<F: Format, const LEVEL: u8>(
    panel: &[u8],
    x: Quantized,
    rows: Range<usize>,
    out: Rows,
    column: usize,
) {
    debug_assert_eq!(panel.len(), x.blocks * F::BLOCK_BYTES);
    // SAFETY: the contract is the same; the processor has the instructions of the level.
    unsafe {
        match LEVEL {
            PLAIN => tiles::<F, PLAIN>(panel.as_ptr(), x, rows, out, column),
            DOTPROD => tiles_dotprod::<F>(panel.as_ptr(), x, rows, out, column),
            _ => tiles_i8mm::<F>(panel.as_ptr(), x, rows, out, column),
        }
    }
}

/// [`tiles`] with `sdot`.
#[target_feature(enable = "neon,dotprod")]
unsafe fn tiles_dotprod<F: Format>(panel: *const u8, x: Quantized, rows: Range<usize>, out: Rows, column: usize) {
    // SAFETY: the contract is the same, and the instructions are enabled here.
    unsafe { tiles::<F, DOTPROD>(panel, x, rows, out, column) }
}

/// [`tiles`] with `usdot`.
#[target_feature(enable = "neon,dotprod,i8mm")]
unsafe fn tiles_i8mm<F: Format>(panel: *const u8, x: Quantized, rows: Range<usize>, out: Rows, column: usize) {
    // SAFETY: the contract is the same, and the instructions are enabled here.
    unsafe { tiles::<F, I8MM>(panel, x, rows, out, column) }
}

#[inline(always)]
unsafe fn tiles<F: Format, const LEVEL: u8>(
    panel: *const u8,
    x: Quantized,
    rows: Range<usize>,
    out: Rows,
    column: usize,
) {
    // Rows are spread evenly, so that no tile is left with one.
    let tiles = rows.len().div_ceil(if LEVEL == I8MM { MATRIX_ROWS_MAX } else { TILE_ROWS_MAX });
    for tile in 0..tiles {
        let first = rows.start + rows.len() * tile / tiles;
        let end = rows.start + rows.len() * (tile + 1) / tiles;
        // SAFETY: the contract of `panel_product`, for some of the rows.
        unsafe {
            match end - first {
                1 => tile_columns::<F, LEVEL, 1, 8>(panel, x, first, out, column),
                2 if LEVEL == I8MM => matrix_columns::<F, 1, 4>(panel, x, first..end, out, column),
                3 | 4 if LEVEL == I8MM => matrix_columns::<F, 2, 2>(panel, x, first..end, out, column),
                5.. if LEVEL == I8MM => matrix_columns::<F, 3, 2>(panel, x, first..end, out, column),
                2 => tile_columns::<F, LEVEL, 2, 4>(panel, x, first, out, column),
                3 => tile_columns::<F, LEVEL, 3, 2>(panel, x, first, out, column),
                _ => tile_columns::<F, LEVEL, 4, 2>(panel, x, first, out, column),
            }
        }
    }
}

/// `R` rows from `row` on, `V` vectors of columns at a time.
#[inline(always)]
unsafe fn tile_columns<F: Format, const LEVEL: u8, const R: usize, const V: usize>(
    panel: *const u8,
    x: Quantized,
    row: usize,
    out: Rows,
    column: usize,
) {
    for lane in (0..PANEL_ROWS).step_by(V * LANES) {
        // SAFETY: the contract of `panel_product`, for some of the rows and columns.
        unsafe { tile_product::<F, LEVEL, R, V>(panel, lane, x, row, out, column) }
    }
}

/// The `rows`, at most `2 * P`, `V` vectors of columns at a time.
#[inline(always)]
unsafe fn matrix_columns<F: Format, const P: usize, const V: usize>(
    panel: *const u8,
    x: Quantized,
    rows: Range<usize>,
    out: Rows,
    column: usize,
) {
    for lane in (0..PANEL_ROWS).step_by(V * LANES) {
        // SAFETY: the contract of `panel_product`, for some of the rows and columns.
        unsafe { matrix_product::<F, P, V>(panel, lane, x, rows.clone(), out, column) }
    }
}

/// 4 scales or minima of format `F`, from the `at`th of a block's 32 on.
#[inline(always)]
unsafe fn load_scales<F: Format>(from: *const u8, at: usize) -> float32x4_t {
    // SAFETY: the caller points at the 32 scales of a block.
    unsafe {
        if F::WIDE {
            return vld1q_f32(from.add(at * 4).cast());
        }
        widen(vld1_u16(from.add(at * 2).cast()))
    }
}

/// What products with bytes that hold q + 128 are too much, negated, over block `at` or the half `pass` of it.
///
/// # Safety
/// There is such a block.
#[inline(always)]
unsafe fn offset<F: Format>(x: Quantized, at: usize, pass: usize) -> i32 {
    // SAFETY: the caller's contract.
    unsafe {
        let halves = x.offset.add(at * 2);
        if F::HALVES { *halves.add(pass) } else { *halves + *halves.add(1) }
    }
}

/// Sums of products of four columns. The plain level keeps eight sums of 16 bits in each where quants are at most 31, for
/// 31 * 127 * 8 = 31,496; otherwise it, like the others, keeps four of 32 bits in the first alone.
type Dots = [int32x4_t; 2];

/// Adds to each of four columns its four products of `weights` with activations `J * 4..J * 4 + 4` of `a`.
///
/// # Safety
/// The processor has the instructions of the level, and the function this is inlined into enables them.
#[inline(always)]
unsafe fn dot<F: Format, const LEVEL: u8, const J: i32>(dots: Dots, weights: int8x16_t, a: int8x16_t) -> Dots {
    let [mut sum, second] = dots;
    // SAFETY: the instructions are there by the contract; no memory is touched.
    unsafe {
        match LEVEL {
            PLAIN => {
                let a = vreinterpretq_s8_s32(vdupq_laneq_s32::<J>(vreinterpretq_s32_s8(a)));
                if F::MIN {
                    let (low, high) = (vreinterpretq_s16_s32(sum), vreinterpretq_s16_s32(second));
                    let low = vmlal_s8(low, vget_low_s8(weights), vget_low_s8(a));
                    let high = vmlal_high_s8(high, weights, a);
                    return [vreinterpretq_s32_s16(low), vreinterpretq_s32_s16(high)];
                }
                // Two products are at most 128 * 127 * 2 = 32,512.
                let low = vmull_s8(vget_low_s8(weights), vget_low_s8(a));
                sum = vpadalq_s16(sum, vpaddq_s16(low, vmull_high_s8(weights, a)));
            }
            DOTPROD => asm!(
                "sdot {sum:v}.4s, {weights:v}.16b, {a:v}.4b[{j}]",
                sum = inlateout(vreg) sum,
                weights = in(vreg) weights,
                a = in(vreg) a,
                j = const J,
                options(pure, nomem, nostack, preserves_flags),
            ),
            _ => asm!(
                "usdot {sum:v}.4s, {weights:v}.16b, {a:v}.4b[{j}]",
                sum = inlateout(vreg) sum,
                weights = in(vreg) weights,
                a = in(vreg) a,
                j = const J,
                options(pure, nomem, nostack, preserves_flags),
            ),
        }
    }
    [sum, second]
}

/// The four columns' sums.
#[inline(always)]
fn finish<F: Format, const LEVEL: u8>(dots: Dots) -> int32x4_t {
    let [first, second] = dots;
    if LEVEL != PLAIN || !F::MIN {
        return first;
    }
    // SAFETY: NEON belongs to the target's baseline, and no memory is touched.
    unsafe {
        // A column has four neighbours of 16 bits, added in two steps.
        let (low, high) = (vpaddlq_s16(vreinterpretq_s16_s32(first)), vpaddlq_s16(vreinterpretq_s16_s32(second)));
        vpaddq_s32(low, high)
    }
}

/// Writes the body once for each value of the constant: an instruction's lane cannot be a variable, and two rounds of a
/// loop are not always unrolled.
macro_rules! for_each_constant {
    ($name:ident: $ty:ident in [$($value:literal),*] => $body:block) => {{
        $({
            const $name: $ty = $value;
            $body
        })*
    }};
}

/// `R` rows from `row` on, `V` vectors of columns from the `lane`th of the panel on.
#[inline(always)]
unsafe fn tile_product<F: Format, const LEVEL: u8, const R: usize, const V: usize>(
    panel: *const u8,
    lane: usize,
    x: Quantized,
    row: usize,
    out: Rows,
    column: usize,
) {
    // SAFETY: the contract of `panel_product`: offsets into a block are below F::BLOCK_BYTES, and rows and blocks are
    // inside the activations.
    unsafe {
        let (q, stride) = (x.q.add(row * x.blocks * BLOCK).cast_const(), x.blocks * BLOCK);
        let at = row * x.blocks;
        let low_bits = vdupq_n_u8(15);
        let mut sums = [[vdupq_n_f32(0.0); V]; R];
        for b in 0..x.blocks {
            let block = panel.add(b * F::BLOCK_BYTES);
            let q = q.add(b * BLOCK);
            // Inputs of four columns in groups of four: group `j` of vector `v`.
            let weights = |j: usize, v: usize| vld1q_u8(block.add(j * 4 * PANEL_ROWS + (lane + v * LANES) * 4));
            let activations =
                |half: usize| -> [int8x16_t; R] { std::array::from_fn(|r| vld1q_s8(q.add(r * stride + half * 16))) };
            // One pass over a block, or one over each half where halves have their own scale.
            let passes = if F::HALVES { 2 } else { 1 };
            for pass in 0..passes {
                let mut dots = [[[vdupq_n_s32(0); 2]; V]; R];
                if LEVEL == I8MM && !F::MIN {
                    for (r, dots) in dots.iter_mut().enumerate() {
                        *dots = [[vdupq_n_s32(offset::<F>(x, at + r * x.blocks + b, pass)); 2]; V];
                    }
                }
                if F::FOUR_BITS {
                    let (first, second) = (activations(0), activations(1));
                    for_each_constant!(J: i32 in [0, 1, 2, 3] => {
                        for v in 0..V {
                            let bytes = weights(J as usize, v);
                            let low = vreinterpretq_s8_u8(vandq_u8(bytes, low_bits));
                            let high = vreinterpretq_s8_u8(vshrq_n_u8::<4>(bytes));
                            for (r, dots) in dots.iter_mut().enumerate() {
                                let sum = dot::<F, LEVEL, J>(dots[v], low, first[r]);
                                dots[v] = dot::<F, LEVEL, J>(sum, high, second[r]);
                            }
                        }
                    });
                } else {
                    let halves = 2 / passes;
                    for half in pass * halves..(pass + 1) * halves {
                        let a = activations(half);
                        for_each_constant!(J: i32 in [0, 1, 2, 3] => {
                            for v in 0..V {
                                let mut bytes = weights(half * 4 + J as usize, v);
                                if LEVEL != I8MM && !F::MIN {
                                    bytes = veorq_u8(bytes, vdupq_n_u8(0x80));
                                }
                                for (r, dots) in dots.iter_mut().enumerate() {
                                    dots[v] = dot::<F, LEVEL, J>(dots[v], vreinterpretq_s8_u8(bytes), a[r]);
                                }
                            }
                        });
                    }
                }
                for v in 0..V {
                    let scale = load_scales::<F>(block.add(F::SCALES_AT + pass * F::SCALE_BYTES), lane + v * LANES);
                    for (r, (sums, dots)) in sums.iter_mut().zip(&dots).enumerate() {
                        let a = *x.scale.add(at + r * x.blocks + b);
                        let dots = vcvtq_f32_s32(finish::<F, LEVEL>(dots[v]));
                        sums[v] = vfmaq_f32(sums[v], dots, vmulq_n_f32(scale, a));
                    }
                }
            }
            if F::MIN {
                for v in 0..V {
                    let min = load_scales::<F>(block.add(F::MINIMA_AT), lane + v * LANES);
                    for (r, sums) in sums.iter_mut().enumerate() {
                        sums[v] = vfmaq_n_f32(sums[v], min, *x.sum.add(at + r * x.blocks + b));
                    }
                }
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            for (v, sum) in sums.iter().enumerate() {
                vst1q_f32(out.row(row + r).add(column + lane + v * LANES), *sum);
            }
        }
    }
}

/// Adds to `sums`, (2 columns, 2 rows), the products over eight inputs of `weights`, (2 columns, 8), and `a`, (2 rows, 8).
///
/// # Safety
/// The processor has `i8mm`, and the function this is inlined into enables it.
#[inline(always)]
unsafe fn multiply(mut sums: int32x4_t, weights: uint8x16_t, a: int8x16_t) -> int32x4_t {
    // SAFETY: the instruction is there by the contract; no memory is touched.
    unsafe {
        asm!(
            "usmmla {sums:v}.4s, {weights:v}.16b, {a:v}.16b",
            sums = inlateout(vreg) sums,
            weights = in(vreg) weights,
            a = in(vreg) a,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sums
}

/// The `rows`, `2 * P` or one less, `V` vectors of columns from the `lane`th of the panel on, with `usmmla`.
#[inline(always)]
unsafe fn matrix_product<F: Format, const P: usize, const V: usize>(
    panel: *const u8,
    lane: usize,
    x: Quantized,
    rows: Range<usize>,
    out: Rows,
    column: usize,
) {
    // SAFETY: the contract of `panel_product`: offsets into a block are below F::BLOCK_BYTES, and rows and blocks are
    // inside the activations.
    unsafe {
        // The first block of each row; a last row without a partner is its own, and computed twice.
        let at: [[usize; 2]; P] = std::array::from_fn(|p| {
            let row = rows.start + 2 * p;
            [row * x.blocks, (row + 1).min(rows.end - 1) * x.blocks]
        });
        let low_bits = vdupq_n_u8(15);
        let mut sums = [[[vdupq_n_f32(0.0); 2]; V]; P];
        for b in 0..x.blocks {
            let block = panel.add(b * F::BLOCK_BYTES);
            // The `j`th eight inputs of columns 0 and 1, and of 2 and 3, of vector `v`: two groups of four, interleaved.
            let weights = |j: usize, v: usize| {
                let four = |j: usize| vld1q_u32(block.add(j * 4 * PANEL_ROWS + (lane + v * LANES) * 4).cast());
                let (first, second) = (four(2 * j), four(2 * j + 1));
                [vzip1q_u32(first, second), vzip2q_u32(first, second)].map(|v| vreinterpretq_u8_u32(v))
            };
            // The `j`th eight inputs of a half of a block, of both rows of pair `p`.
            let activations = |half: usize, j: usize, p: usize| {
                let row = |i: usize| vreinterpretq_s64_s8(vld1q_s8(x.q.add((at[p][i] + b) * BLOCK + half * 16)));
                let eights = if j == 0 { vzip1q_s64(row(0), row(1)) } else { vzip2q_s64(row(0), row(1)) };
                vreinterpretq_s8_s64(eights)
            };
            // One pass over a block, or one over each half where halves have their own scale.
            let passes = if F::HALVES { 2 } else { 1 };
            for pass in 0..passes {
                // (pairs of rows, vectors, pairs of columns) of 2 columns by 2 rows.
                let mut dots = [[[vdupq_n_s32(0); 2]; V]; P];
                if !F::MIN {
                    for (dots, at) in dots.iter_mut().zip(at) {
                        let [first, second] = at.map(|at| vdupq_n_s32(offset::<F>(x, at + b, pass)));
                        *dots = [[vzip1q_s32(first, second); 2]; V];
                    }
                }
                if F::FOUR_BITS {
                    for_each_constant!(J: usize in [0, 1] => {
                        for v in 0..V {
                            let bytes = weights(J, v);
                            for (p, dots) in dots.iter_mut().enumerate() {
                                for (dots, bytes) in dots[v].iter_mut().zip(bytes) {
                                    *dots = multiply(*dots, vandq_u8(bytes, low_bits), activations(0, J, p));
                                    *dots = multiply(*dots, vshrq_n_u8::<4>(bytes), activations(1, J, p));
                                }
                            }
                        }
                    });
                } else {
                    let halves = 2 / passes;
                    for half in pass * halves..(pass + 1) * halves {
                        for_each_constant!(J: usize in [0, 1] => {
                            for v in 0..V {
                                let bytes = weights(half * 2 + J, v);
                                for (p, dots) in dots.iter_mut().enumerate() {
                                    for (dots, bytes) in dots[v].iter_mut().zip(bytes) {
                                        *dots = multiply(*dots, bytes, activations(half, J, p));
                                    }
                                }
                            }
                        });
                    }
                }
                for v in 0..V {
                    let scale = load_scales::<F>(block.add(F::SCALES_AT + pass * F::SCALE_BYTES), lane + v * LANES);
                    for (p, (sums, dots)) in sums.iter_mut().zip(&dots).enumerate() {
                        let [left, right] = dots[v];
                        let dots = [vuzp1q_s32(left, right), vuzp2q_s32(left, right)];
                        for i in 0..2 {
                            let a = *x.scale.add(at[p][i] + b);
                            sums[v][i] = vfmaq_f32(sums[v][i], vcvtq_f32_s32(dots[i]), vmulq_n_f32(scale, a));
                        }
                    }
                }
            }
            if F::MIN {
                for v in 0..V {
                    let min = load_scales::<F>(block.add(F::MINIMA_AT), lane + v * LANES);
                    for (p, sums) in sums.iter_mut().enumerate() {
                        for i in 0..2 {
                            sums[v][i] = vfmaq_n_f32(sums[v][i], min, *x.sum.add(at[p][i] + b));
                        }
                    }
                }
            }
        }
        for (p, sums) in sums.iter().enumerate() {
            for v in 0..V {
                for (i, row) in (rows.start + 2 * p..rows.end).take(2).enumerate() {
                    vst1q_f32(out.row(row).add(column + lane + v * LANES), sums[v][i]);
                }
            }
        }
    }
}
