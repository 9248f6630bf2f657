//! [`Simd`] in NEON, which every 64-bit ARM processor has.

use super::simd::Simd;
use std::arch::aarch64::*;
use std::arch::asm;

/// 256 bits in two vectors.
#[derive(Clone, Copy)]
pub(crate) struct Neon;

/// A pair of vectors: lanes 0..4 and 4..8.
type Pair = [float32x4_t; 2];

/// Functions of the trait that are one expression of intrinsics each.
macro_rules! operations {
    ($(fn $name:ident($($arg:ident: $ty:ty),*) $(-> $ret:ty)? = $body:expr;)*) => {
        $(
            #[inline(always)]
            #[allow(unused_unsafe, reason = "some bodies touch no memory and call only what the baseline has")]
            unsafe fn $name($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: the trait's contract: the instructions are there, pointers are good for a vector.
                unsafe { $body }
            }
        )*
    };
}

/// The greater of each lane; b where either is NaN, which `fmax` would keep.
#[inline(always)]
fn max4(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    // SAFETY: NEON belongs to the target's baseline, and no memory is touched.
    unsafe { vbslq_f32(vcgtq_f32(a, b), a, b) }
}

/// Four numbers in half precision, widened. In assembly, for the standard library's function is not stable.
#[inline(always)]
pub(crate) fn widen(half: uint16x4_t) -> float32x4_t {
    let wide: float32x4_t;
    // SAFETY: an instruction of the target's baseline, which touches registers alone.
    unsafe {
        asm!(
            "fcvtl {wide:v}.4s, {half:v}.4h",
            wide = lateout(vreg) wide,
            half = in(vreg) half,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    wide
}

impl Simd for Neon {
    type F = Pair;
    const LANES: usize = 8;
    const ACCUMULATORS: usize = 8;

    operations! {
        fn splat(x: f32) -> Pair = [vdupq_n_f32(x); 2];
        fn load(from: *const f32) -> Pair = [vld1q_f32(from), vld1q_f32(from.add(4))];
        fn store(to: *mut f32, v: Pair) = {
            vst1q_f32(to, v[0]);
            vst1q_f32(to.add(4), v[1]);
        };
        fn add(a: Pair, b: Pair) -> Pair = [vaddq_f32(a[0], b[0]), vaddq_f32(a[1], b[1])];
        fn sub(a: Pair, b: Pair) -> Pair = [vsubq_f32(a[0], b[0]), vsubq_f32(a[1], b[1])];
        fn mul(a: Pair, b: Pair) -> Pair = [vmulq_f32(a[0], b[0]), vmulq_f32(a[1], b[1])];
        fn div(a: Pair, b: Pair) -> Pair = [vdivq_f32(a[0], b[0]), vdivq_f32(a[1], b[1])];
        fn fma(a: Pair, b: Pair, c: Pair) -> Pair = [vfmaq_f32(c[0], a[0], b[0]), vfmaq_f32(c[1], a[1], b[1])];
        fn max(a: Pair, b: Pair) -> Pair = [max4(a[0], b[0]), max4(a[1], b[1])];
        fn min(a: Pair, b: Pair) -> Pair = [
            vbslq_f32(vcltq_f32(a[0], b[0]), a[0], b[0]),
            vbslq_f32(vcltq_f32(a[1], b[1]), a[1], b[1]),
        ];
        fn round(v: Pair) -> Pair = [vrndnq_f32(v[0]), vrndnq_f32(v[1])];
        fn swap_pairs(v: Pair) -> Pair = [vrev64q_f32(v[0]), vrev64q_f32(v[1])];
        fn sum(v: Pair) -> f32 = {
            let four = vaddq_f32(v[0], v[1]);
            let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
            vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two)
        };
        fn greatest(v: Pair) -> f32 = {
            let four = max4(v[0], v[1]);
            let two = max4(four, vextq_f32::<2>(four, four));
            vgetq_lane_f32::<0>(max4(two, vrev64q_f32(two)))
        };
        fn scale_by_power(v: Pair, n: Pair) -> Pair = [0, 1].map(|i| {
            let exponent = vaddq_s32(vcvtnq_s32_f32(n[i]), vdupq_n_s32(127));
            vmulq_f32(v[i], vreinterpretq_f32_s32(vshlq_n_s32::<23>(exponent)))
        });
        fn load_bf16_pairs(from: *const u16) -> (Pair, Pair) = {
            let pairs = [vreinterpretq_u32_u16(vld1q_u16(from)), vreinterpretq_u32_u16(vld1q_u16(from.add(8)))];
            let even = pairs.map(|v| vreinterpretq_f32_u32(vshlq_n_u32::<16>(v)));
            (even, pairs.map(|v| vreinterpretq_f32_u32(vandq_u32(v, vdupq_n_u32(0xffff_0000)))))
        };
        fn load_f16(from: *const u16) -> Pair = [widen(vld1_u16(from)), widen(vld1_u16(from.add(4)))];
        fn load_i8(from: *const i8) -> Pair = {
            let eight = vmovl_s8(vld1_s8(from));
            [vcvtq_f32_s32(vmovl_s16(vget_low_s16(eight))), vcvtq_f32_s32(vmovl_high_s16(eight))]
        };
        fn quantize_block(x: *const f32, q: *mut i8) -> (f32, [i32; 2]) = {
            let mut max = vdupq_n_f32(0.0);
            for i in 0..8 {
                max = max4(vabsq_f32(vld1q_f32(x.add(i * 4))), max);
            }
            let max = Self::greatest([max, max]);
            let inverse = vdupq_n_f32(if max > 0.0 { 127.0 / max } else { 0.0 });
            let mut sums = [0; 2];
            for (half, sum) in sums.iter_mut().enumerate() {
                let four = |i: usize| {
                    let x = vld1q_f32(x.add(half * 16 + i * 4));
                    vqmovn_s32(vcvtnq_s32_f32(vmulq_f32(x, inverse)))
                };
                let bytes = vcombine_s8(
                    vqmovn_s16(vcombine_s16(four(0), four(1))),
                    vqmovn_s16(vcombine_s16(four(2), four(3))),
                );
                // -128 could only come of numbers whose 127 / max overflows; kernels rely on its absence.
                let bytes = vmaxq_s8(bytes, vdupq_n_s8(-127));
                vst1q_s8(q.add(half * 16), bytes);
                *sum = i32::from(vaddlvq_s8(bytes));
            }
            (max / 127.0, sums)
        };
        fn prefetch(at: *const u8) = asm!(
            "prfm pldl1keep, [{at}]", at = in(reg) at, options(nostack, preserves_flags, readonly)
        );
    }
}
