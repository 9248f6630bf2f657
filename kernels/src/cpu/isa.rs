//! Which instructions this processor has, and how a kernel written once is compiled for each of them.

use std::fmt;

/// Sets of instructions there are kernels for, lowest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Plain Rust; any processor.
    Portable,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// That and AVX-VNNI: integer dot products of 256 bits.
    AvxVnni,
    /// x86-64 with AVX-512 F, BW, DQ, VL and VNNI.
    Avx512Vnni,
    /// 64-bit ARM with NEON, as every one has.
    Neon,
    /// That and `dotprod`: integer dot products of signed bytes.
    NeonDotprod,
    /// That and `i8mm`: integer dot products of unsigned and signed bytes.
    NeonI8mm,
}

impl Isa {
    /// All sets, lowest first.
    pub const ALL: [Isa; 7] =
        [Isa::Portable, Isa::Avx2, Isa::AvxVnni, Isa::Avx512Vnni, Isa::Neon, Isa::NeonDotprod, Isa::NeonI8mm];

    /// The best set this processor has.
    pub fn detect() -> Self {
        Self::available().last().unwrap_or(Isa::Portable)
    }

    /// All sets this processor has, lowest first.
    pub fn available() -> impl Iterator<Item = Isa> {
        Self::ALL.into_iter().filter(|isa| isa.is_available())
    }

    /// Whether this processor has it.
    pub fn is_available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = || {
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
            };
            let avx512 = || {
                avx2()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vnni")
            };
            match self {
                Isa::Portable => true,
                Isa::Avx2 => avx2(),
                Isa::AvxVnni => avx2() && is_x86_feature_detected!("avxvnni"),
                Isa::Avx512Vnni => avx512(),
                Isa::Neon | Isa::NeonDotprod | Isa::NeonI8mm => false,
            }
        }
        #[cfg(target_arch = "aarch64")]
        {
            use std::arch::is_aarch64_feature_detected;
            let neon = || is_aarch64_feature_detected!("neon");
            let dotprod = || neon() && is_aarch64_feature_detected!("dotprod");
            match self {
                Isa::Portable => true,
                Isa::Neon => neon(),
                Isa::NeonDotprod => dotprod(),
                Isa::NeonI8mm => dotprod() && is_aarch64_feature_detected!("i8mm"),
                Isa::Avx2 | Isa::AvxVnni | Isa::Avx512Vnni => false,
            }
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        {
            self == Isa::Portable
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "AVX2",
            Isa::AvxVnni => "AVX-VNNI",
            Isa::Avx512Vnni => "AVX-512 VNNI",
            Isa::Neon => "NEON",
            Isa::NeonDotprod => "NEON dotprod",
            Isa::NeonI8mm => "NEON i8mm",
        })
    }
}

/// An [`Isa`] this processor is known to have: holding one is the proof that its instructions may run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Selected(Isa);

impl Selected {
    /// `isa`, if this processor has it.
    pub(crate) fn new(isa: Isa) -> Option<Self> {
        isa.is_available().then_some(Self(isa))
    }

    pub(crate) fn isa(self) -> Isa {
        self.0
    }
}

/// Makes `name(isa, args)` of `body::<S: Simd>(args)`: the body is compiled once per kind of vectors and the right one called.
macro_rules! for_each_isa {
    ($(#[$meta:meta])* $vis:vis unsafe fn $name:ident = $body:ident($($arg:ident: $ty:ty),* $(,)?)) => {
        $(#[$meta])*
        // Chunks of plain arguments, so that no struct has to be made for each kernel.
        #[allow(clippy::too_many_arguments)]
        $vis unsafe fn $name(isa: $crate::cpu::isa::Selected, $($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
                #[allow(clippy::too_many_arguments)]
                unsafe fn avx512($($arg: $ty),*) {
                    // SAFETY: the contract is the body's, kept by the caller; its instructions are enabled here.
                    unsafe { $body::<$crate::cpu::simd_x86::Avx512>($($arg),*) }
                }
                #[target_feature(enable = "avx2,fma,f16c")]
                #[allow(clippy::too_many_arguments)]
                unsafe fn avx2($($arg: $ty),*) {
                    // SAFETY: the contract is the body's, kept by the caller; its instructions are enabled here.
                    unsafe { $body::<$crate::cpu::simd_x86::Avx2>($($arg),*) }
                }
                use $crate::cpu::Isa;
                match isa.isa() {
                    // SAFETY: the processor has the instructions: `isa` proves it. The rest is the caller's contract.
                    Isa::Avx512Vnni => return unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    Isa::Avx2 | Isa::AvxVnni => return unsafe { avx2($($arg),*) },
                    _ => {}
                }
            }
            #[cfg(target_arch = "aarch64")]
            if isa.isa() != $crate::cpu::Isa::Portable {
                // SAFETY: the contract is the body's, kept by the caller; NEON belongs to the target's baseline.
                return unsafe { $body::<$crate::cpu::simd_neon::Neon>($($arg),*) };
            }
            let _ = isa;
            // SAFETY: the contract is the body's, kept by the caller; portable code needs no special instructions.
            unsafe { $body::<$crate::cpu::simd::Portable>($($arg),*) }
        }
    };
}
pub(crate) use for_each_isa;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_set_is_the_last_available_one() {
        let available: Vec<Isa> = Isa::available().collect();
        assert_eq!(available.first(), Some(&Isa::Portable));
        assert_eq!(available.last(), Some(&Isa::detect()));
        assert!(available.is_sorted());
        // Whoever runs this on a processor of known abilities, an emulated one say, says here what must be found.
        if let Ok(expected) = std::env::var("LLMD_TEST_ISA") {
            assert_eq!(Isa::detect().to_string(), expected);
        }
    }
}
