//! Integer matrix product with AVX-512 VNNI.
//!
//! A tile is up to 6 rows by a panel's 32 columns: 12 integer and 12 float accumulators, which keep both dot-product
//! units busy. Weights go from memory to registers once for a tile; tiles of the same panel find them in the cache.

use super::buffer::Rows;
use super::linear::Quantized;
use super::panel::Format;
use crate::quant::BLOCK;
use std::arch::x86_64::*;
use std::ops::Range;

/// Rows of a tile at most: more would spill accumulators.
const TILE_ROWS_MAX: usize = 6;
/// 16 columns each.
const HALVES: usize = 2;
const LINE_BYTES: usize = 64;

/// out[rows][panel's 32 columns] = x * panel^T.
///
/// # Safety
/// The processor has AVX-512 F, BW and VNNI. `x` and `out` have the rows; `panel` is a whole panel of format `F` with `x.blocks`
/// blocks; `out` has the columns from `column` on, and nobody else touches them.
pub(crate) unsafe fn panel_product<F: Format>(
    panel: &[u8],
    x: Quantized,
    rows: Range<usize>,
    out: Rows,
    column: usize,
) {
    debug_assert_eq!(panel.len(), x.blocks * F::BLOCK_BYTES);
    // Rows are spread evenly, so that no tile is left with one. While the first tile works, the next panel is fetched.
    let tiles = rows.len().div_ceil(TILE_ROWS_MAX);
    for tile in 0..tiles {
        let first = rows.start + rows.len() * tile / tiles;
        let end = rows.start + rows.len() * (tile + 1) / tiles;
        let ahead = if tile == 0 { panel.len() } else { 0 };
        let panel = panel.as_ptr();
        // SAFETY: the caller's contract, for some of the rows.
        unsafe {
            match end - first {
                1 => tile_product::<F, 1>(panel, ahead, x, first, out, column),
                2 => tile_product::<F, 2>(panel, ahead, x, first, out, column),
                3 => tile_product::<F, 3>(panel, ahead, x, first, out, column),
                4 => tile_product::<F, 4>(panel, ahead, x, first, out, column),
                5 => tile_product::<F, 5>(panel, ahead, x, first, out, column),
                _ => tile_product::<F, 6>(panel, ahead, x, first, out, column),
            }
        }
    }
}

/// 16 scales or minima of format `F`.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load_scales<F: Format>(from: *const u8, half: usize) -> __m512 {
    // SAFETY: the caller points at the 32 scales of a block.
    unsafe {
        if F::WIDE {
            _mm512_loadu_ps(from.add(half * 64).cast())
        } else {
            _mm512_cvtph_ps(_mm256_loadu_si256(from.add(half * 32).cast()))
        }
    }
}

/// Four quantised activations in every lane.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn broadcast(from: *const i8) -> __m512i {
    // SAFETY: the caller points at 4 bytes.
    _mm512_set1_epi32(unsafe { from.cast::<i32>().read_unaligned() })
}

/// `R` rows from `row` on. `ahead` bytes after each block its successor in the next panel is prefetched, unless 0.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn tile_product<F: Format, const R: usize>(
    panel: *const u8,
    ahead: usize,
    x: Quantized,
    row: usize,
    out: Rows,
    column: usize,
) {
    // SAFETY: the contract of `panel_product`: offsets into a block are below F::BLOCK_BYTES, and rows and blocks are
    // inside the activations. A prefetch may point anywhere.
    unsafe {
        let (q, stride) = (x.q.add(row * x.blocks * BLOCK).cast_const(), x.blocks * BLOCK);
        let at = row * x.blocks;
        let low_bits = _mm512_set1_epi8(15);
        let mut sums = [[_mm512_setzero_ps(); HALVES]; R];
        for b in 0..x.blocks {
            let block = panel.add(b * F::BLOCK_BYTES);
            if ahead != 0 {
                for line in 0..F::BLOCK_BYTES / LINE_BYTES {
                    _mm_prefetch::<_MM_HINT_T0>(block.wrapping_add(ahead + line * LINE_BYTES).cast());
                }
            }
            let q = q.add(b * BLOCK);
            let mut dots = [[_mm512_setzero_si512(); HALVES]; R];
            // One pass over a block, or one over each half where halves have their own scale.
            let passes = if F::HALVES { 2 } else { 1 };
            for pass in 0..passes {
                for (r, dots) in dots.iter_mut().enumerate() {
                    // Bytes that hold q + 128 begin with what that is too much.
                    let offsets = x.offset.add((at + r * x.blocks + b) * 2);
                    let offset = match (F::MIN, F::HALVES) {
                        (true, _) => 0,
                        (_, true) => *offsets.add(pass),
                        _ => *offsets + *offsets.add(1),
                    };
                    *dots = [_mm512_set1_epi32(offset); HALVES];
                }
                if F::FOUR_BITS {
                    for j in 0..4 {
                        let mut low = [low_bits; HALVES];
                        let mut high = [low_bits; HALVES];
                        for half in 0..HALVES {
                            let v = _mm512_loadu_si512(block.add((j * HALVES + half) * LINE_BYTES).cast());
                            low[half] = _mm512_and_si512(v, low_bits);
                            high[half] = _mm512_and_si512(_mm512_srli_epi16::<4>(v), low_bits);
                        }
                        for (r, dots) in dots.iter_mut().enumerate() {
                            let a = broadcast(q.add(r * stride + j * 4));
                            for half in 0..HALVES {
                                dots[half] = _mm512_dpbusd_epi32(dots[half], low[half], a);
                            }
                        }
                        for (r, dots) in dots.iter_mut().enumerate() {
                            let a = broadcast(q.add(r * stride + 16 + j * 4));
                            for half in 0..HALVES {
                                dots[half] = _mm512_dpbusd_epi32(dots[half], high[half], a);
                            }
                        }
                    }
                } else {
                    let steps = 8 / passes;
                    for j in pass * steps..(pass + 1) * steps {
                        let mut v = [low_bits; HALVES];
                        for (half, v) in v.iter_mut().enumerate() {
                            *v = _mm512_loadu_si512(block.add((j * HALVES + half) * LINE_BYTES).cast());
                        }
                        for (r, dots) in dots.iter_mut().enumerate() {
                            let a = broadcast(q.add(r * stride + j * 4));
                            for half in 0..HALVES {
                                dots[half] = _mm512_dpbusd_epi32(dots[half], v[half], a);
                            }
                        }
                    }
                }
                for half in 0..HALVES {
                    let scale = load_scales::<F>(block.add(F::SCALES_AT + pass * F::SCALE_BYTES), half);
                    for (r, (sums, dots)) in sums.iter_mut().zip(&dots).enumerate() {
                        let a = _mm512_set1_ps(*x.scale.add(at + r * x.blocks + b));
                        sums[half] =
                            _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[half]), _mm512_mul_ps(scale, a), sums[half]);
                    }
                }
            }
            if F::MIN {
                for half in 0..HALVES {
                    let min = load_scales::<F>(block.add(F::MINIMA_AT), half);
                    for (r, sums) in sums.iter_mut().enumerate() {
                        let a = _mm512_set1_ps(*x.sum.add(at + r * x.blocks + b));
                        sums[half] = _mm512_fmadd_ps(min, a, sums[half]);
                    }
                }
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            for (half, sum) in sums.iter().enumerate() {
                _mm512_storeu_ps(out.row(row + r).add(column + half * 16), *sum);
            }
        }
    }
}
