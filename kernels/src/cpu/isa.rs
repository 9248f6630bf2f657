//! Which instructions this processor has, and how a kernel written once is compiled for each of them.

use std::fmt;

/// Sets of instructions there are kernels for, lowest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Plain Rust; any processor.
    Portable,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ, VL and VNNI.
    Avx512Vnni,
}

impl Isa {
    /// The best set this processor has.
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 =
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
            let avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vnni");
            if avx2 && avx512 {
                return Isa::Avx512Vnni;
            }
            if avx2 {
                return Isa::Avx2;
            }
        }
        Isa::Portable
    }

    /// All sets this processor has, lowest first.
    pub fn available() -> impl Iterator<Item = Isa> {
        let best = Self::detect();
        [Isa::Portable, Isa::Avx2, Isa::Avx512Vnni].into_iter().filter(move |&isa| isa <= best)
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "AVX2",
            Isa::Avx512Vnni => "AVX-512 VNNI",
        })
    }
}

/// An [`Isa`] this processor is known to have: holding one is the proof that its instructions may run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Selected(Isa);

impl Selected {
    /// `isa`, if this processor has it.
    pub(crate) fn new(isa: Isa) -> Option<Self> {
        (isa <= Isa::detect()).then_some(Self(isa))
    }

    pub(crate) fn isa(self) -> Isa {
        self.0
    }
}

/// Makes `name(isa, args)` of `body::<S: Simd>(args)`: the body is compiled once per instruction set and the right one called.
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
                match isa.isa() {
                    // SAFETY: the processor has the instructions: `isa` proves it. The rest is the caller's contract.
                    $crate::cpu::Isa::Avx512Vnni => return unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    $crate::cpu::Isa::Avx2 => return unsafe { avx2($($arg),*) },
                    $crate::cpu::Isa::Portable => {}
                }
            }
            let _ = isa;
            // SAFETY: the contract is the body's, kept by the caller; portable code needs no special instructions.
            unsafe { $body::<$crate::cpu::simd::Portable>($($arg),*) }
        }
    };
}
pub(crate) use for_each_isa;
