//! Integer matrix product with AVX2, and with AVX-VNNI on top.
//!
//! AVX-VNNI sums four products of bytes at once, as `gemm_avx512.rs` does. AVX2 has no such instruction: `maddubs` makes
//! pairs of them in 16 bits, which saturate, out of an unsigned and a signed factor. Quants of 4 bits cannot reach that, not
//! even summed over a whole block (15 * 127 * 2 * 8 = 30,480). Signed bytes are taken without their sign, which goes to the
//! activation; a pair then fits (128 * 127 * 2 = 32,512), and is widened at once.
//!
//! 16 registers hold few accumulators. Many rows are taken in tiles of four by 8 columns, which unpack weights once for four;
//! a single row in one of all 32 columns, which loads activations once for them.

use super::buffer::Rows;
use super::linear::Quantized;
use super::panel::{Format, PANEL_ROWS};
use crate::quant::BLOCK;
use std::arch::x86_64::*;
use std::ops::Range;

/// Columns of a vector of sums.
const LANES: usize = 8;
const VECTORS: usize = PANEL_ROWS / LANES;
const VECTOR_BYTES: usize = 32;
/// Bytes of weights that are asked for ahead: memory answers in the time that so many take.
const AHEAD: usize = 4096;

/// out[rows][panel's 32 columns] = x * panel^T.
///
/// # Safety
/// The processor has AVX2, FMA and F16C, and AVX-VNNI if `VNNI`. `x` and `out` have the rows; `panel` is a whole panel of format
/// `F` with `x.blocks` blocks; `out` has the columns from `column` on, and nobody else touches them.
pub(crate) unsafe fn panel_product<F: Format, const VNNI: bool>(
    panel: &[u8],
    x: Quantized,
    rows: Range<usize>,
    out: Rows,
    column: usize,
) {
    debug_assert_eq!(panel.len(), x.blocks * F::BLOCK_BYTES);
    let panel = panel.as_ptr();
    let mut row = rows.start;
    while row < rows.end {
        let left = rows.end - row;
        let is_first = row == rows.start;
        // SAFETY: the caller's contract, for some of the rows.
        row += unsafe {
            match left {
                1 => tiles::<F, VNNI, 1, 4>(panel, x, row, out, column, is_first),
                2 => tiles::<F, VNNI, 2, 2>(panel, x, row, out, column, is_first),
                3 => tiles::<F, VNNI, 3, 1>(panel, x, row, out, column, is_first),
                // Not 4 and 1 where 3 and 2 will do.
                5 => tiles::<F, VNNI, 3, 1>(panel, x, row, out, column, is_first),
                _ => tiles::<F, VNNI, 4, 1>(panel, x, row, out, column, is_first),
            }
        };
    }
}

/// All columns of `R` rows, `V` vectors at a time. Gives `R`.
#[inline(always)]
unsafe fn tiles<F: Format, const VNNI: bool, const R: usize, const V: usize>(
    panel: *const u8,
    x: Quantized,
    row: usize,
    out: Rows,
    column: usize,
    is_first: bool,
) -> usize {
    for vector in (0..VECTORS).step_by(V) {
        // SAFETY: the caller's contract; V divides the vectors.
        unsafe {
            if VNNI {
                tile_vnni::<F, R, V>(panel, vector, x, row, out, column, is_first && vector == 0);
            } else {
                tile_pairs::<F, R, V>(panel, vector, x, row, out, column, is_first && vector == 0);
            }
        }
    }
    R
}

/// 8 scales or minima of format `F`, from vector `vector` of a block's 32 on.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn load_scales<F: Format>(from: *const u8, vector: usize) -> __m256 {
    // SAFETY: the caller points at the 32 scales of a block.
    unsafe {
        if F::WIDE {
            _mm256_loadu_ps(from.add(vector * LANES * 4).cast())
        } else {
            _mm256_cvtph_ps(_mm_loadu_si128(from.add(vector * LANES * 2).cast()))
        }
    }
}

/// Four quantised activations in every lane.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn broadcast(from: *const i8) -> __m256i {
    // SAFETY: the caller points at 4 bytes.
    _mm256_set1_epi32(unsafe { from.cast::<i32>().read_unaligned() })
}

/// Low and high halves of bytes.
#[inline]
#[target_feature(enable = "avx2")]
fn nibbles(v: __m256i) -> (__m256i, __m256i) {
    let low_bits = _mm256_set1_epi8(15);
    (_mm256_and_si256(v, low_bits), _mm256_and_si256(_mm256_srli_epi16::<4>(v), low_bits))
}

/// [`tile_product`] with AVX-VNNI.
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
#[allow(clippy::too_many_arguments)]
unsafe fn tile_vnni<F: Format, const R: usize, const V: usize>(
    panel: *const u8,
    vector: usize,
    x: Quantized,
    row: usize,
    out: Rows,
    column: usize,
    is_first: bool,
) {
    // SAFETY: the contract is the same, and the instructions are enabled here.
    unsafe { tile_product::<F, true, R, V>(panel, vector, x, row, out, column, is_first) }
}

/// [`tile_product`] with AVX2 alone.
#[target_feature(enable = "avx2,fma,f16c")]
#[allow(clippy::too_many_arguments)]
unsafe fn tile_pairs<F: Format, const R: usize, const V: usize>(
    panel: *const u8,
    vector: usize,
    x: Quantized,
    row: usize,
    out: Rows,
    column: usize,
    is_first: bool,
) {
    // SAFETY: the contract is the same, and the instructions are enabled here.
    unsafe { tile_product::<F, false, R, V>(panel, vector, x, row, out, column, is_first) }
}

/// `R` rows from `row` on, `V` vectors of columns of the panel from `first` on. `is_first`: nobody has read the panel yet.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn tile_product<F: Format, const VNNI: bool, const R: usize, const V: usize>(
    panel: *const u8,
    first: usize,
    x: Quantized,
    row: usize,
    out: Rows,
    column: usize,
    is_first: bool,
) {
    // SAFETY: the contract of `panel_product`: offsets into a block are below F::BLOCK_BYTES, and rows and blocks are
    // inside the activations.
    unsafe {
        let (q, stride) = (x.q.add(row * x.blocks * BLOCK).cast_const(), x.blocks * BLOCK);
        let at = row * x.blocks;
        let mut sums = [[_mm256_setzero_ps(); V]; R];
        for b in 0..x.blocks {
            let block = panel.add(b * F::BLOCK_BYTES);
            if is_first {
                for line in (0..F::BLOCK_BYTES).step_by(64) {
                    // What follows the panel is the next one; beyond the last, a hint at nothing.
                    _mm_prefetch::<_MM_HINT_T0>(block.wrapping_add(AHEAD + line).cast());
                }
            }
            let q = q.add(b * BLOCK);
            let passes = if F::HALVES { 2 } else { 1 };
            for pass in 0..passes {
                // What bytes that hold q + 128 are too much.
                let offset = |r: usize| {
                    let offsets = x.offset.add((at + r * x.blocks + b) * 2);
                    let offset = match (F::FOUR_BITS || F::MIN, F::HALVES) {
                        (true, _) => 0,
                        (_, true) => *offsets.add(pass),
                        _ => *offsets + *offsets.add(1),
                    };
                    _mm256_set1_epi32(offset)
                };
                let start = |r| if VNNI { offset(r) } else { _mm256_setzero_si256() };
                let mut dots: [[__m256i; V]; R] = std::array::from_fn(|r| [start(r); V]);
                let steps = if F::FOUR_BITS { 4 } else { 8 / passes };
                for j in pass * steps..(pass + 1) * steps {
                    for v in 0..V {
                        let w = _mm256_loadu_si256(block.add((j * VECTORS + first + v) * VECTOR_BYTES).cast());
                        let q = |r: usize| q.add(r * stride + j * 4);
                        if !F::FOUR_BITS {
                            // What holds q + 128 is made q; what has a minimum is positive as it stands.
                            let top = _mm256_set1_epi8(if F::MIN || VNNI { 0 } else { -128 });
                            let w = _mm256_xor_si256(w, top);
                            let size = _mm256_abs_epi8(w);
                            for (r, dots) in dots.iter_mut().enumerate() {
                                let a = broadcast(q(r));
                                dots[v] = if VNNI {
                                    _mm256_dpbusd_avx_epi32(dots[v], w, a)
                                } else {
                                    let pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(a, w));
                                    _mm256_add_epi32(dots[v], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
                                };
                            }
                            continue;
                        }
                        let (low, high) = nibbles(w);
                        for (r, dots) in dots.iter_mut().enumerate() {
                            // The high halves are inputs 16 further on.
                            let (a, b) = (broadcast(q(r)), broadcast(q(r).add(16)));
                            dots[v] = if VNNI {
                                _mm256_dpbusd_avx_epi32(_mm256_dpbusd_avx_epi32(dots[v], low, a), high, b)
                            } else {
                                let (low, high) = (_mm256_maddubs_epi16(low, a), _mm256_maddubs_epi16(high, b));
                                _mm256_add_epi16(dots[v], _mm256_add_epi16(low, high))
                            };
                        }
                    }
                }
                for v in 0..V {
                    let scales = block.add(F::SCALES_AT + pass * F::SCALE_BYTES);
                    let scale = load_scales::<F>(scales, first + v);
                    for r in 0..R {
                        let mut dot = dots[r][v];
                        if !VNNI && F::FOUR_BITS {
                            dot = _mm256_madd_epi16(dot, _mm256_set1_epi16(1));
                        }
                        let a = _mm256_set1_ps(*x.scale.add(at + r * x.blocks + b));
                        sums[r][v] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), _mm256_mul_ps(scale, a), sums[r][v]);
                    }
                }
            }
            if F::MIN {
                for v in 0..V {
                    let min = load_scales::<F>(block.add(F::MINIMA_AT), first + v);
                    for (r, sums) in sums.iter_mut().enumerate() {
                        let a = _mm256_set1_ps(*x.sum.add(at + r * x.blocks + b));
                        sums[v] = _mm256_fmadd_ps(min, a, sums[v]);
                    }
                }
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            for (v, sum) in sums.iter().enumerate() {
                _mm256_storeu_ps(out.row(row + r).add(column + (first + v) * LANES), *sum);
            }
        }
    }
}
