//! The vector operations that kernels are written in, and their portable form.
//!
//! A kernel is an `#[inline(always)]` function over `S: Simd`, compiled per instruction set by `for_each_isa!`. Results may differ
//! between instruction sets (lanes set the order of sums, and the portable form doesn't fuse), never within one.

/// Vectors of f32.
///
/// # Safety
/// Every function may only run on a processor that has the implementor's instructions. Pointers must be valid for a
/// whole vector; they need no alignment.
pub(crate) trait Simd: Copy + 'static {
    /// A vector of `LANES` numbers.
    type F: Copy;
    /// 8 or 16: a divisor of the 16 tokens of a page and of the padding of rows.
    const LANES: usize;
    /// Accumulators the registers can hold beside what feeds them.
    const ACCUMULATORS: usize;

    unsafe fn splat(x: f32) -> Self::F;
    unsafe fn load(from: *const f32) -> Self::F;
    unsafe fn store(to: *mut f32, v: Self::F);
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F;
    /// a * b + c, in one rounding where the processor can.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The greater; b where either is NaN.
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F;
    /// The lesser; b where either is NaN.
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F;
    /// The sum of the lanes, in a fixed order.
    unsafe fn sum(v: Self::F) -> f32;
    /// The greatest lane.
    unsafe fn greatest(v: Self::F) -> f32;
    /// Rounded to integers, ties to even.
    unsafe fn round(v: Self::F) -> Self::F;
    /// v * 2^n for integral n in -126..=127.
    unsafe fn scale_by_power(v: Self::F, n: Self::F) -> Self::F;
    /// Lanes 2i and 2i + 1 exchanged.
    unsafe fn swap_pairs(v: Self::F) -> Self::F;
    /// `LANES` pairs of bfloat16: the even elements, the odd elements.
    unsafe fn load_bf16_pairs(from: *const u16) -> (Self::F, Self::F);
    /// `LANES` numbers in half precision.
    unsafe fn load_f16(from: *const u16) -> Self::F;
    /// `LANES` bytes.
    unsafe fn load_i8(from: *const i8) -> Self::F;
    /// Quantises 32 numbers to q = round(x / d) with d = max|x| / 127; gives d and the sums of q over each half.
    unsafe fn quantize_block(x: *const f32, q: *mut i8) -> (f32, [i32; 2]);
    /// Asks for the line at `at`, which need not be valid.
    unsafe fn prefetch(at: *const u8);
}

/// e^x to about one unit in the last place for -87 <= x <= 88; clamped outside; NaN stays NaN.
///
/// # Safety
/// That of [`Simd`].
#[inline(always)]
pub(crate) unsafe fn exp<S: Simd>(x: S::F) -> S::F {
    /// Taylor coefficients 1/7! ... 1/0!, highest first; |r| <= ln 2 / 2 leaves an error of 5e-9.
    const COEFFICIENTS: [f32; 8] = [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];
    // ln 2 in two parts (Cody and Waite): n times the first is exact.
    const LN2_HIGH: f32 = 0.693_145_75;
    const LN2_LOW: f32 = 1.428_606_8e-6;
    // SAFETY: the caller's contract; no memory is touched.
    unsafe {
        let x = S::min(S::splat(88.0), S::max(S::splat(-87.0), x));
        let n = S::round(S::mul(x, S::splat(std::f32::consts::LOG2_E)));
        let r = S::fma(n, S::splat(-LN2_HIGH), x);
        let r = S::fma(n, S::splat(-LN2_LOW), r);
        let mut p = S::splat(COEFFICIENTS[0]);
        for c in &COEFFICIENTS[1..] {
            p = S::fma(p, r, S::splat(*c));
        }
        S::scale_by_power(p, n)
    }
}

/// Arrays of eight that the compiler may or may not turn into vectors.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

/// a * b + c: fused only where that is one instruction; the library's software form is a hundred times slower.
#[inline(always)]
pub(crate) fn multiply_add(a: f32, b: f32, c: f32) -> f32 {
    if cfg!(any(target_feature = "fma", target_arch = "aarch64")) { a.mul_add(b, c) } else { a * b + c }
}

/// 1.5 * 2^23: adding it rounds a small number to an integer, ties to even, and leaves that integer in the low bits.
const ROUNDER: f32 = 12_582_912.0;

#[inline(always)]
fn each(f: impl Fn(usize) -> f32) -> [f32; 8] {
    std::array::from_fn(f)
}

impl Simd for Portable {
    type F = [f32; 8];
    const LANES: usize = 8;
    const ACCUMULATORS: usize = 4;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::F {
        [x; 8]
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::F {
        // SAFETY: valid for a vector by the trait's contract.
        unsafe { from.cast::<Self::F>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, v: Self::F) {
        // SAFETY: valid for a vector by the trait's contract.
        unsafe { to.cast::<Self::F>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        each(|i| a[i] + b[i])
    }
    #[inline(always)]
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F {
        each(|i| a[i] - b[i])
    }
    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        each(|i| a[i] * b[i])
    }
    #[inline(always)]
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F {
        each(|i| a[i] / b[i])
    }
    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        each(|i| multiply_add(a[i], b[i], c[i]))
    }
    #[inline(always)]
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F {
        each(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F {
        each(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn sum(v: Self::F) -> f32 {
        let four: [f32; 4] = std::array::from_fn(|i| v[i] + v[i + 4]);
        (four[0] + four[2]) + (four[1] + four[3])
    }
    #[inline(always)]
    unsafe fn greatest(v: Self::F) -> f32 {
        v.into_iter().fold(f32::NEG_INFINITY, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    unsafe fn round(v: Self::F) -> Self::F {
        each(|i| (v[i] + ROUNDER) - ROUNDER)
    }
    #[inline(always)]
    unsafe fn scale_by_power(v: Self::F, n: Self::F) -> Self::F {
        each(|i| {
            let exponent = (n[i] + ROUNDER).to_bits().wrapping_sub(ROUNDER.to_bits());
            v[i] * f32::from_bits(exponent.wrapping_add(127) << 23)
        })
    }
    #[inline(always)]
    unsafe fn swap_pairs(v: Self::F) -> Self::F {
        each(|i| v[i ^ 1])
    }
    #[inline(always)]
    unsafe fn load_bf16_pairs(from: *const u16) -> (Self::F, Self::F) {
        // SAFETY: valid for LANES pairs by the trait's contract.
        let pairs = unsafe { from.cast::<[[u16; 2]; 8]>().read_unaligned() };
        let half = |h: usize| each(|i| f32::from_bits(u32::from(pairs[i][h]) << 16));
        (half(0), half(1))
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self::F {
        // SAFETY: valid for LANES numbers by the trait's contract.
        let bits = unsafe { from.cast::<[u16; 8]>().read_unaligned() };
        each(|i| half::f16::from_bits(bits[i]).to_f32())
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self::F {
        // SAFETY: valid for LANES bytes by the trait's contract.
        let bytes = unsafe { from.cast::<[i8; 8]>().read_unaligned() };
        each(|i| f32::from(bytes[i]))
    }
    #[inline(always)]
    unsafe fn quantize_block(x: *const f32, q: *mut i8) -> (f32, [i32; 2]) {
        // SAFETY: the caller gives 32 numbers to read and 32 bytes to write.
        let (x, q) = unsafe { (&*x.cast::<[f32; 32]>(), &mut *q.cast::<[i8; 32]>()) };
        let max = x.iter().fold(0.0f32, |max, x| if x.abs() > max { x.abs() } else { max });
        let inverse = if max > 0.0 { 127.0 / max } else { 0.0 };
        let mut sums = [0; 2];
        for i in 0..32 {
            let rounded = (x[i] * inverse + ROUNDER).to_bits().wrapping_sub(ROUNDER.to_bits()) as i8;
            q[i] = rounded;
            sums[i / 16] += i32::from(rounded);
        }
        (max / 127.0, sums)
    }
    #[inline(always)]
    unsafe fn prefetch(_at: *const u8) {}
}
