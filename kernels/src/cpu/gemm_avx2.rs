//! Integer matrix product with AVX2, and with AVX-VNNI on top.
//!
//! AVX-VNNI sums four products of bytes at once, as `gemm_avx512.rs` does. AVX2 has no such instruction: `maddubs` makes
//! pairs of them in 16 bits, which saturate. Quants up to 31 cannot reach that, and 4-bit ones not even summed over a whole
//! block. Bytes that hold q + 128 are turned to |q| and the activations given q's sign; |q| * 127 * 2 is at most 32,512.

use super::buffer::Rows;
use super::linear::Quantized;
use super::panel::Format;
use crate::quant::BLOCK;
use std::arch::x86_64::*;
use std::ops::Range;

/// Rows of a tile at most: with two vectors of columns, what 16 registers hold.
const TILE_ROWS_MAX: usize = 2;
/// Vectors of 8 columns that a tile has; two such tiles make a panel.
const VECTORS: usize = 2;

/// out[rows][panel's 32 columns] = x * panel^T.
///
/// # Safety
/// The processor has AVX2, FMA and F16C, and AVX-VNNI if `VNNI`. `x` and `out` have the rows; `panel` is a whole panel of format `F` with `x.blocks` blocks; `out` has
/// the columns from `column` on, and nobody else touches them.
pub(crate) unsafe fn panel_product<F: Format, const VNNI: bool>(
    panel: &[u8],
    x: Quantized,
    rows: Range<usize>,
    out: Rows,
    column: usize,
) {
    debug_assert_eq!(panel.len(), x.blocks * F::BLOCK_BYTES);
    let panel = panel.as_ptr();
    for row in rows.clone().step_by(TILE_ROWS_MAX) {
        for half in 0..2 {
            // SAFETY: the caller's contract, for some of the rows and half of the columns.
            unsafe {
                match (VNNI, row + 1 < rows.end) {
                    (true, true) => tile_vnni::<F, 2>(panel, half, x, row, out, column),
                    (true, false) => tile_vnni::<F, 1>(panel, half, x, row, out, column),
                    (false, true) => tile_pairs::<F, 2>(panel, half, x, row, out, column),
                    (false, false) => tile_pairs::<F, 1>(panel, half, x, row, out, column),
                }
            }
        }
    }
}

/// 8 scales or minima of format `F`, from the `at`th of a block's 32 on.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn load_scales<F: Format>(from: *const u8, at: usize) -> __m256 {
    // SAFETY: the caller points at the 32 scales of a block.
    unsafe {
        if F::WIDE {
            _mm256_loadu_ps(from.add(at * 4).cast())
        } else {
            _mm256_cvtph_ps(_mm_loadu_si128(from.add(at * 2).cast()))
        }
    }
}

/// Adds four products each of 32 weight bytes (eight columns) of format `F` with four activations. With `VNNI`, bytes that hold
/// q + 128 are taken as they are.
///
/// # Safety
/// The processor has AVX2, and AVX-VNNI if `VNNI`.
#[inline(always)]
unsafe fn dot<F: Format, const VNNI: bool>(sum: __m256i, weights: __m256i, a: __m256i) -> __m256i {
    // SAFETY: the instructions are there by the contract.
    unsafe { if VNNI { _mm256_dpbusd_avx_epi32(sum, weights, a) } else { dot_pairs::<F>(sum, weights, a) } }
}

#[inline]
#[target_feature(enable = "avx2")]
fn dot_pairs<F: Format>(sum: __m256i, weights: __m256i, a: __m256i) -> __m256i {
    let pairs = if F::MIN {
        _mm256_maddubs_epi16(weights, a)
    } else {
        let q = _mm256_xor_si256(weights, _mm256_set1_epi8(-128));
        _mm256_maddubs_epi16(_mm256_abs_epi8(q), _mm256_sign_epi8(a, q))
    };
    _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
}

/// Four quantised activations in every lane.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn broadcast(from: *const i8) -> __m256i {
    // SAFETY: the caller points at 4 bytes.
    _mm256_set1_epi32(unsafe { from.cast::<i32>().read_unaligned() })
}

/// [`tile_product`] with AVX-VNNI.
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
unsafe fn tile_vnni<F: Format, const R: usize>(
    panel: *const u8,
    half: usize,
    x: Quantized,
    row: usize,
    out: Rows,
    column: usize,
) {
    // SAFETY: the contract is the same, and the instructions are enabled here.
    unsafe { tile_product::<F, true, R>(panel, half, x, row, out, column) }
}

/// [`tile_product`] with AVX2 alone.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tile_pairs<F: Format, const R: usize>(
    panel: *const u8,
    half: usize,
    x: Quantized,
    row: usize,
    out: Rows,
    column: usize,
) {
    // SAFETY: the contract is the same, and the instructions are enabled here.
    unsafe { tile_product::<F, false, R>(panel, half, x, row, out, column) }
}

/// `R` rows from `row` on, columns `half * 16..half * 16 + 16` of the panel.
#[inline(always)]
unsafe fn tile_product<F: Format, const VNNI: bool, const R: usize>(
    panel: *const u8,
    half: usize,
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
        let low_bits = _mm256_set1_epi8(15);
        let mut sums = [[_mm256_setzero_ps(); VECTORS]; R];
        for b in 0..x.blocks {
            let block = panel.add(b * F::BLOCK_BYTES);
            let q = q.add(b * BLOCK);
            let passes = if F::HALVES { 2 } else { 1 };
            for pass in 0..passes {
                let mut dots = [[_mm256_setzero_si256(); VECTORS]; R];
                if VNNI && !F::MIN {
                    // Bytes that hold q + 128 begin with what that is too much.
                    for (r, dots) in dots.iter_mut().enumerate() {
                        let offsets = x.offset.add((at + r * x.blocks + b) * 2);
                        let offset = if F::HALVES { *offsets.add(pass) } else { *offsets + *offsets.add(1) };
                        *dots = [_mm256_set1_epi32(offset); VECTORS];
                    }
                }
                if F::FOUR_BITS {
                    for j in 0..4 {
                        for vector in 0..VECTORS {
                            let v = _mm256_loadu_si256(block.add((j * 2 + half) * 64 + vector * 32).cast());
                            let low = _mm256_and_si256(v, low_bits);
                            let high = _mm256_and_si256(_mm256_srli_epi16::<4>(v), low_bits);
                            for (r, dots) in dots.iter_mut().enumerate() {
                                let q = q.add(r * stride + j * 4);
                                if VNNI {
                                    let sum = dot::<F, VNNI>(dots[vector], low, broadcast(q));
                                    dots[vector] = dot::<F, VNNI>(sum, high, broadcast(q.add(16)));
                                    continue;
                                }
                                // Sums of 8 such pairs stay below 2^15: 15 * 127 * 2 * 8 = 30,480.
                                let pairs = _mm256_add_epi16(
                                    _mm256_maddubs_epi16(low, broadcast(q)),
                                    _mm256_maddubs_epi16(high, broadcast(q.add(16))),
                                );
                                dots[vector] = _mm256_add_epi16(dots[vector], pairs);
                            }
                        }
                    }
                    for dots in dots.iter_mut().flatten().filter(|_| !VNNI) {
                        *dots = _mm256_madd_epi16(*dots, _mm256_set1_epi16(1));
                    }
                } else {
                    let steps = 8 / passes;
                    for j in pass * steps..(pass + 1) * steps {
                        for vector in 0..VECTORS {
                            let v = _mm256_loadu_si256(block.add((j * 2 + half) * 64 + vector * 32).cast());
                            for (r, dots) in dots.iter_mut().enumerate() {
                                dots[vector] = dot::<F, VNNI>(dots[vector], v, broadcast(q.add(r * stride + j * 4)));
                            }
                        }
                    }
                }
                for vector in 0..VECTORS {
                    let scales = block.add(F::SCALES_AT + pass * F::SCALE_BYTES);
                    let scale = load_scales::<F>(scales, half * 16 + vector * 8);
                    for (r, (sums, dots)) in sums.iter_mut().zip(&dots).enumerate() {
                        let a = _mm256_set1_ps(*x.scale.add(at + r * x.blocks + b));
                        let dots = _mm256_cvtepi32_ps(dots[vector]);
                        sums[vector] = _mm256_fmadd_ps(dots, _mm256_mul_ps(scale, a), sums[vector]);
                    }
                }
            }
            if F::MIN {
                for vector in 0..VECTORS {
                    let min = load_scales::<F>(block.add(F::MINIMA_AT), half * 16 + vector * 8);
                    for (r, sums) in sums.iter_mut().enumerate() {
                        let a = _mm256_set1_ps(*x.sum.add(at + r * x.blocks + b));
                        sums[vector] = _mm256_fmadd_ps(min, a, sums[vector]);
                    }
                }
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            for (vector, sum) in sums.iter().enumerate() {
                _mm256_storeu_ps(out.row(row + r).add(column + half * 16 + vector * 8), *sum);
            }
        }
    }
}
