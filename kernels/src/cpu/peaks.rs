//! What this processor can do at most, for benchmarks to compare with: loops of nothing but the multiplying instructions,
//! and one of nothing but loads.
//!
//! Only sets of instructions that kernels are written for, and bf16 products where there are any. Plain Rust has no peak of
//! its own, so [`Isa::Portable`] is not among them.

use super::Isa;
use std::hint::black_box;

/// Multiply-adds in the innermost body keep this many sums apart: more than latency times instructions per cycle of
/// processors there are, so that none waits for another.
#[cfg(target_arch = "x86_64")]
const CHAINS: usize = 12;
#[cfg(target_arch = "aarch64")]
const CHAINS: usize = 16;
/// Bytes that [`read`] adds up at once.
const READ_BYTES: usize = 256;

/// What is multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operands {
    /// Bytes with bytes, summed in 32 bits.
    Int8,
    /// bfloat16 with bfloat16, summed in f32.
    Bf16,
    /// f32 with f32, fused.
    F32,
}

impl Operands {
    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Operands::Int8 => "int8 dot",
            Operands::Bf16 => "bf16 dot",
            Operands::F32 => "f32 FMA",
        }
    }
}

/// A loop that does nothing but multiply and add, of instructions that this processor is known to have.
#[derive(Debug, Clone, Copy)]
pub struct Peak {
    operands: Operands,
    isa: Isa,
    per_round: u64,
    run: unsafe fn(u64),
}

impl Peak {
    /// What it multiplies.
    pub fn operands(&self) -> Operands {
        self.operands
    }

    /// With which instructions.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Runs `rounds` of the loop on the calling thread. Returns how many multiply-adds of elements those were.
    pub fn run(&self, rounds: u64) -> u64 {
        // SAFETY: `available` makes these only where the processor has the instructions, and nothing else does.
        unsafe { (self.run)(rounds) };
        rounds * self.per_round
    }

    /// All that this processor has.
    pub fn available() -> Vec<Peak> {
        #[allow(unused_mut, reason = "processors of other kinds have none")]
        let mut peaks = Vec::new();
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        for isa in Isa::available() {
            let mut add = |operands, per_step: u64, run| {
                peaks.push(Peak { operands, isa, per_round: per_step * CHAINS as u64, run });
            };
            #[cfg(target_arch = "aarch64")]
            match isa {
                Isa::Neon => {
                    add(Operands::Int8, 16, arm::int8_neon);
                    add(Operands::F32, 4, arm::f32_neon);
                }
                Isa::NeonDotprod => add(Operands::Int8, 16, arm::int8_dotprod),
                Isa::NeonI8mm => {
                    add(Operands::Int8, 32, arm::int8_i8mm);
                    if std::arch::is_aarch64_feature_detected!("bf16") {
                        add(Operands::Bf16, 16, arm::bf16_neon);
                    }
                }
                _ => {}
            }
            #[cfg(target_arch = "x86_64")]
            match isa {
                Isa::Avx2 => {
                    add(Operands::Int8, 32, x86::int8_avx2);
                    add(Operands::F32, 8, x86::f32_avx2);
                }
                Isa::AvxVnni => add(Operands::Int8, 32, x86::int8_vnni),
                Isa::Avx512Vnni => {
                    add(Operands::Int8, 64, x86::int8_avx512);
                    add(Operands::F32, 16, x86::f32_avx512);
                    if is_x86_feature_detected!("avx512bf16") {
                        add(Operands::Bf16, 32, x86::bf16_avx512);
                    }
                }
                _ => {}
            }
        }
        peaks
    }
}

/// Reads all of `memory` once, in order; returns the sum of its words, so that no reading can be left out.
pub fn read(memory: &[u64]) -> u64 {
    // Plain code: vectors of the least x86-64 has already ask for more than any memory gives.
    let mut sums = [0u64; READ_BYTES / 8];
    let chunks = memory.chunks_exact(sums.len());
    let rest: u64 = chunks.remainder().iter().fold(0, |sum, word| sum.wrapping_add(*word));
    for chunk in chunks {
        for (sum, word) in sums.iter_mut().zip(chunk) {
            *sum = sum.wrapping_add(*word);
        }
    }
    black_box(sums.iter().fold(rest, |sum, word| sum.wrapping_add(*word)))
}

/// `$name(rounds)`: a loop over [`CHAINS`] sums, each time `$sum = $step` of two operands of type `$operand`.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! peak {
    ($name:ident, $features:literal, $class:ident, $operand:expr, $zero:expr, |$sum:ident, $a:ident, $b:ident| $step:expr) => {
        #[target_feature(enable = $features)]
        pub(super) fn $name(rounds: u64) {
            let (mut a, $b) = (black_box($operand), black_box($operand));
            let mut sums = [$zero; CHAINS];
            for _ in 0..rounds {
                for sum in &mut sums {
                    // SAFETY: no instruction at all. The compiler must take `a` for another value now: it would
                    // multiply once for all sums otherwise.
                    #[cfg(target_arch = "x86_64")]
                    unsafe { asm!("/* {0} */", inout($class) a, options(pure, nomem, nostack, preserves_flags)) };
                    // SAFETY: as above.
                    #[cfg(target_arch = "aarch64")]
                    unsafe { asm!("/* {0:v} */", inout($class) a, options(pure, nomem, nostack, preserves_flags)) };
                    let ($sum, $a) = (*sum, a);
                    *sum = $step;
                }
            }
            black_box(sums);
        }
    };
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{CHAINS, black_box};
    use std::arch::asm;
    use std::arch::x86_64::*;

    // What the kernels do where no instruction sums four products: pairs in 16 bits, pairs of them in 32.
    peak!(int8_avx2, "avx2", ymm_reg, _mm256_set1_epi8(3), _mm256_setzero_si256(), |sum, a, b| {
        let pairs = _mm256_maddubs_epi16(a, b);
        _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
    });
    peak!(f32_avx2, "avx2,fma", ymm_reg, _mm256_set1_ps(0.5), _mm256_setzero_ps(), |sum, a, b| {
        _mm256_fmadd_ps(a, b, sum)
    });
    peak!(int8_vnni, "avx2,avxvnni", ymm_reg, _mm256_set1_epi8(3), _mm256_setzero_si256(), |sum, a, b| {
        _mm256_dpbusd_avx_epi32(sum, a, b)
    });
    peak!(int8_avx512, "avx512f,avx512vnni", zmm_reg, _mm512_set1_epi8(3), _mm512_setzero_si512(), |sum, a, b| {
        _mm512_dpbusd_epi32(sum, a, b)
    });
    peak!(f32_avx512, "avx512f", zmm_reg, _mm512_set1_ps(0.5), _mm512_setzero_ps(), |sum, a, b| {
        _mm512_fmadd_ps(a, b, sum)
    });
    // 0x3f00 is one half.
    peak!(bf16_avx512, "avx512f,avx512bf16", zmm_reg, _mm512_set1_epi16(0x3f00), _mm512_setzero_ps(), |sum, a, b| {
        // SAFETY: both types are 64 bytes of any value.
        let (a, b) = unsafe { std::mem::transmute::<(__m512i, __m512i), (__m512bh, __m512bh)>((a, b)) };
        _mm512_dpbf16_ps(sum, a, b)
    });
}

#[cfg(target_arch = "aarch64")]
mod arm {
    use super::{CHAINS, black_box};
    use std::arch::aarch64::*;
    use std::arch::asm;

    /// `sum` after `$instruction` of it and two operands, where the standard library's function for that is not stable.
    macro_rules! assembly {
        ($instruction:literal, $sum:ident, $a:ident, $b:ident) => {{
            let mut sum = $sum;
            // SAFETY: the function that this stands in enables the instruction; registers are all it touches.
            unsafe {
                asm!($instruction, sum = inout(vreg) sum, a = in(vreg) $a, b = in(vreg) $b,
                    options(pure, nomem, nostack, preserves_flags));
            }
            sum
        }};
    }

    // What the kernels do where no instruction sums four products: pairs in 16 bits, pairs of them in 32.
    peak!(int8_neon, "neon", vreg, vdupq_n_s8(3), vdupq_n_s32(0), |sum, a, b| {
        let low = vmull_s8(vget_low_s8(a), vget_low_s8(b));
        vpadalq_s16(sum, vpaddq_s16(low, vmull_high_s8(a, b)))
    });
    peak!(f32_neon, "neon", vreg, vdupq_n_f32(0.5), vdupq_n_f32(0.0), |sum, a, b| vfmaq_f32(sum, a, b));
    peak!(int8_dotprod, "neon,dotprod", vreg, vdupq_n_s8(3), vdupq_n_s32(0), |sum, a, b| {
        assembly!("sdot {sum:v}.4s, {a:v}.16b, {b:v}.16b", sum, a, b)
    });
    peak!(int8_i8mm, "neon,i8mm", vreg, vdupq_n_s8(3), vdupq_n_s32(0), |sum, a, b| {
        assembly!("usmmla {sum:v}.4s, {a:v}.16b, {b:v}.16b", sum, a, b)
    });
    // 0x3f00 is one half.
    peak!(bf16_neon, "neon,bf16", vreg, vdupq_n_u16(0x3f00), vdupq_n_f32(0.0), |sum, a, b| {
        assembly!("bfmmla {sum:v}.4s, {a:v}.8h, {b:v}.8h", sum, a, b)
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reading_adds_up_every_word() {
        for len in [0, 1, 31, 32, 33, 1000] {
            let memory: Vec<u64> = (0..len).collect();
            assert_eq!(read(&memory), (0..len).sum::<u64>(), "{len}");
        }
    }

    #[test]
    fn every_set_of_instructions_but_the_portable_has_an_integer_peak_and_all_take_time() {
        let peaks = Peak::available();
        let with_integers: Vec<Isa> =
            peaks.iter().filter(|peak| peak.operands() == Operands::Int8).map(Peak::isa).collect();
        assert_eq!(with_integers, Isa::available().filter(|isa| *isa != Isa::Portable).collect::<Vec<_>>());
        for peak in peaks {
            let begun = std::time::Instant::now();
            let done = peak.run(1_000_000);
            // No processor does 10^14 of anything in a second on one thread: a loop that was optimised away would.
            let rate = done as f64 / begun.elapsed().as_secs_f64();
            assert!(rate < 1e14, "{} {}: {rate:e}", peak.operands().name(), peak.isa());
        }
    }
}
