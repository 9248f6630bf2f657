//! [`Simd`] in AVX2 and AVX-512.

use super::simd::Simd;
use std::arch::x86_64::*;

/// 256-bit vectors.
#[derive(Clone, Copy)]
pub(crate) struct Avx2;

/// 512-bit vectors.
#[derive(Clone, Copy)]
pub(crate) struct Avx512;

/// Functions of the trait that are one expression of intrinsics each.
macro_rules! operations {
    ($(fn $name:ident($($arg:ident: $ty:ty),*) $(-> $ret:ty)? = $body:expr;)*) => {
        $(
            #[inline(always)]
            unsafe fn $name($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: the trait's contract: the instructions are there, pointers are good for a vector.
                unsafe { $body }
            }
        )*
    };
}

const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

impl Simd for Avx512 {
    type F = __m512;
    const LANES: usize = 16;
    const ACCUMULATORS: usize = 24;

    operations! {
        fn splat(x: f32) -> __m512 = _mm512_set1_ps(x);
        fn load(from: *const f32) -> __m512 = _mm512_loadu_ps(from);
        fn store(to: *mut f32, v: __m512) = _mm512_storeu_ps(to, v);
        fn add(a: __m512, b: __m512) -> __m512 = _mm512_add_ps(a, b);
        fn sub(a: __m512, b: __m512) -> __m512 = _mm512_sub_ps(a, b);
        fn mul(a: __m512, b: __m512) -> __m512 = _mm512_mul_ps(a, b);
        fn div(a: __m512, b: __m512) -> __m512 = _mm512_div_ps(a, b);
        fn fma(a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fmadd_ps(a, b, c);
        fn max(a: __m512, b: __m512) -> __m512 = _mm512_max_ps(a, b);
        fn min(a: __m512, b: __m512) -> __m512 = _mm512_min_ps(a, b);
        fn round(v: __m512) -> __m512 = _mm512_roundscale_ps::<NEAREST>(v);
        fn scale_by_power(v: __m512, n: __m512) -> __m512 = _mm512_scalef_ps(v, n);
        fn swap_pairs(v: __m512) -> __m512 = _mm512_permute_ps::<0b1011_0001>(v);
        fn prefetch(at: *const u8) = _mm_prefetch::<_MM_HINT_T0>(at.cast());
        fn load_f16(from: *const u16) -> __m512 = _mm512_cvtph_ps(_mm256_loadu_si256(from.cast()));
        fn load_i8(from: *const i8) -> __m512 = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast())));
        fn sum(v: __m512) -> f32 = {
            let eight = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
            Avx2::sum(eight)
        };
        fn greatest(v: __m512) -> f32 = {
            let eight = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
            Avx2::greatest(eight)
        };
        fn load_bf16_pairs(from: *const u16) -> (__m512, __m512) = {
            let pairs = _mm512_loadu_si512(from.cast());
            let even = _mm512_slli_epi32::<16>(pairs);
            let odd = _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000_u32 as i32));
            (_mm512_castsi512_ps(even), _mm512_castsi512_ps(odd))
        };
        fn quantize_block(x: *const f32, q: *mut i8) -> (f32, [i32; 2]) = {
            let x = [_mm512_loadu_ps(x), _mm512_loadu_ps(x.add(16))];
            let max = Self::greatest(_mm512_max_ps(_mm512_abs_ps(x[0]), _mm512_abs_ps(x[1])));
            let inverse = _mm512_set1_ps(if max > 0.0 { 127.0 / max } else { 0.0 });
            let mut sums = [0; 2];
            for half in 0..2 {
                let rounded = _mm512_cvtps_epi32(_mm512_mul_ps(x[half], inverse));
                sums[half] = _mm512_reduce_add_epi32(rounded);
                _mm_storeu_si128(q.add(half * 16).cast(), _mm512_cvtsepi32_epi8(rounded));
            }
            (max / 127.0, sums)
        };
    }
}

impl Simd for Avx2 {
    type F = __m256;
    const LANES: usize = 8;
    const ACCUMULATORS: usize = 12;

    operations! {
        fn splat(x: f32) -> __m256 = _mm256_set1_ps(x);
        fn load(from: *const f32) -> __m256 = _mm256_loadu_ps(from);
        fn store(to: *mut f32, v: __m256) = _mm256_storeu_ps(to, v);
        fn add(a: __m256, b: __m256) -> __m256 = _mm256_add_ps(a, b);
        fn sub(a: __m256, b: __m256) -> __m256 = _mm256_sub_ps(a, b);
        fn mul(a: __m256, b: __m256) -> __m256 = _mm256_mul_ps(a, b);
        fn div(a: __m256, b: __m256) -> __m256 = _mm256_div_ps(a, b);
        fn fma(a: __m256, b: __m256, c: __m256) -> __m256 = _mm256_fmadd_ps(a, b, c);
        fn max(a: __m256, b: __m256) -> __m256 = _mm256_max_ps(a, b);
        fn min(a: __m256, b: __m256) -> __m256 = _mm256_min_ps(a, b);
        fn round(v: __m256) -> __m256 = _mm256_round_ps::<NEAREST>(v);
        fn swap_pairs(v: __m256) -> __m256 = _mm256_permute_ps::<0b1011_0001>(v);
        fn prefetch(at: *const u8) = _mm_prefetch::<_MM_HINT_T0>(at.cast());
        fn load_f16(from: *const u16) -> __m256 = _mm256_cvtph_ps(_mm_loadu_si128(from.cast()));
        fn load_i8(from: *const i8) -> __m256 = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast())));
        fn scale_by_power(v: __m256, n: __m256) -> __m256 = {
            let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
            _mm256_mul_ps(v, _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent)))
        };
        fn sum(v: __m256) -> f32 = {
            let four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
        };
        fn greatest(v: __m256) -> f32 = {
            let four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
        };
        fn load_bf16_pairs(from: *const u16) -> (__m256, __m256) = {
            let pairs = _mm256_loadu_si256(from.cast());
            let even = _mm256_slli_epi32::<16>(pairs);
            let odd = _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff_0000_u32 as i32));
            (_mm256_castsi256_ps(even), _mm256_castsi256_ps(odd))
        };
        fn quantize_block(x: *const f32, q: *mut i8) -> (f32, [i32; 2]) = {
            let sign = _mm256_set1_ps(-0.0);
            let mut max = _mm256_setzero_ps();
            for i in 0..4 {
                max = _mm256_max_ps(_mm256_andnot_ps(sign, _mm256_loadu_ps(x.add(i * 8))), max);
            }
            let max = Self::greatest(max);
            let inverse = _mm256_set1_ps(if max > 0.0 { 127.0 / max } else { 0.0 });
            let mut r = [_mm256_setzero_si256(); 4];
            for (i, r) in r.iter_mut().enumerate() {
                *r = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x.add(i * 8)), inverse));
            }
            // Packing works within 128-bit halves; the permutation puts groups of four back in order.
            let packed = _mm256_packs_epi16(_mm256_packs_epi32(r[0], r[1]), _mm256_packs_epi32(r[2], r[3]));
            let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
            _mm256_storeu_si256(q.cast(), _mm256_permutevar8x32_epi32(packed, order));
            let mut sums = [0; 2];
            for half in 0..2 {
                let eight = _mm256_add_epi32(r[half * 2], r[half * 2 + 1]);
                let four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256::<1>(eight));
                let two = _mm_add_epi32(four, _mm_shuffle_epi32::<0b0100_1110>(four));
                sums[half] = _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32::<1>(two)));
            }
            (max / 127.0, sums)
        };
    }
}
