//! Quantised matrices as the integer kernels want them: panels of 32 output features, one sequential stream.
//!
//! A panel holds, for each block of 32 input features, first the quants, then the scales, then (some formats) the minima
//! of its 32 rows. Quants lie so that one 64-byte register has 4 consecutive inputs of 16 rows, what one integer dot
//! instruction takes: byte `i / 4 * 128 + row / 16 * 64 + row % 16 * 4 + i % 4` is input `i` of row `row`. Formats of 4 bits put
//! input `i` in the low and `i + 16` in the high half of a byte.
//!
//! Packing loses nothing: every format holds what the file held, so a table of embeddings that is also the output
//! matrix needs no second copy. The price is memory where a file type has no format of its own:
//!
//! | file type | format | bits per weight, file / packed |
//! |---|---|---|
//! | Q4_0 | [`Nibbles`] (minimum -8 d) | 4.5 / 5 |
//! | Q4_1 | [`Nibbles`] | 5 / 5 |
//! | Q4_K | [`NibblesWide`] | 4.5 / 6 |
//! | Q8_0 | [`Bytes`] | 8.5 / 8.5 |
//! | Q5_0 | [`Bytes`] | 5.5 / 8.5 |
//! | Q5_1, Q5_K | [`BytesMin`] | 6, 5.5 / 10 |
//! | Q6_K | [`BytesHalves`] | 6.56 / 10 |

use crate::quant::{self, BLOCK, Block, WeightType, f16_to_f32};
use half::f16;

/// Output features of a panel.
pub(crate) const PANEL_ROWS: usize = 32;

/// What a kernel must know of a format. Integer kernels are generic over it.
pub(crate) trait Format {
    /// Two quants in a byte, unsigned; otherwise one.
    const FOUR_BITS: bool;
    /// Scales and minima are f32; otherwise f16.
    const WIDE: bool;
    /// There are minima, and quants are unsigned, at most 31; otherwise bytes hold q + 128.
    const MIN: bool;
    /// Each half of a block has its own scale.
    const HALVES: bool;
    /// Where scales begin.
    const SCALES_AT: usize = if Self::FOUR_BITS { 512 } else { 1024 };
    /// Bytes of the scales of one kind of a block, (32).
    const SCALE_BYTES: usize = PANEL_ROWS * if Self::WIDE { 4 } else { 2 };
    /// Where minima begin.
    const MINIMA_AT: usize = Self::SCALES_AT + Self::SCALE_BYTES * if Self::HALVES { 2 } else { 1 };
    /// Bytes of a block of 32 inputs of a panel.
    const BLOCK_BYTES: usize = Self::MINIMA_AT + if Self::MIN { Self::SCALE_BYTES } else { 0 };
}

macro_rules! formats {
    ($($(#[$doc:meta])* $name:ident: $four:literal, $wide:literal, $min:literal, $halves:literal;)*) => {
        $(
            $(#[$doc])*
            pub(crate) struct $name;
            impl Format for $name {
                const FOUR_BITS: bool = $four;
                const WIDE: bool = $wide;
                const MIN: bool = $min;
                const HALVES: bool = $halves;
            }
        )*
    };
}

formats! {
    /// 4-bit quants, f16 scale and minimum: 640 bytes a block.
    Nibbles: true, false, true, false;
    /// 4-bit quants, f32 scale and minimum: 768 bytes a block.
    NibblesWide: true, true, true, false;
    /// 8-bit quants, f16 scale: 1088 bytes a block.
    Bytes: false, false, false, false;
    /// Quants up to 31 in a byte, f32 scale and minimum: 1280 bytes a block.
    BytesMin: false, true, true, false;
    /// 8-bit quants, f32 scales of inputs 0..16 and 16..32: 1280 bytes a block.
    BytesHalves: false, true, false, true;
}

/// A [`Format`] chosen at run time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FormatKind {
    Nibbles,
    NibblesWide,
    Bytes,
    BytesMin,
    BytesHalves,
}

/// Calls `$f::<F>` of a module's generic function for a [`FormatKind`].
macro_rules! for_format {
    ($kind:expr, $F:ident => $call:expr) => {
        match $kind {
            $crate::cpu::panel::FormatKind::Nibbles => {
                type $F = $crate::cpu::panel::Nibbles;
                $call
            }
            $crate::cpu::panel::FormatKind::NibblesWide => {
                type $F = $crate::cpu::panel::NibblesWide;
                $call
            }
            $crate::cpu::panel::FormatKind::Bytes => {
                type $F = $crate::cpu::panel::Bytes;
                $call
            }
            $crate::cpu::panel::FormatKind::BytesMin => {
                type $F = $crate::cpu::panel::BytesMin;
                $call
            }
            $crate::cpu::panel::FormatKind::BytesHalves => {
                type $F = $crate::cpu::panel::BytesHalves;
                $call
            }
        }
    };
}
pub(crate) use for_format;

impl FormatKind {
    /// The format that holds `ty` without loss, or None for types without blocks.
    pub(crate) fn of(ty: WeightType) -> Option<Self> {
        Some(match ty {
            WeightType::Q4_0 | WeightType::Q4_1 => Self::Nibbles,
            WeightType::Q4_K => Self::NibblesWide,
            WeightType::Q5_0 | WeightType::Q8_0 => Self::Bytes,
            WeightType::Q5_1 | WeightType::Q5_K => Self::BytesMin,
            WeightType::Q6_K => Self::BytesHalves,
            WeightType::F32 | WeightType::F16 | WeightType::BF16 => return None,
        })
    }

    /// Bytes of a block of 32 inputs of a panel.
    pub(crate) fn block_bytes(self) -> usize {
        for_format!(self, F => F::BLOCK_BYTES)
    }

    /// Packs the rows from `panel * 32` on (32, or fewer at the end) of a matrix into `out`, one panel of zeros before.
    /// None if a number does not fit the format, which only a Q4_0 scale beyond 8188 does.
    pub(crate) fn pack(
        self,
        ty: WeightType,
        matrix: &[u8],
        row_bytes: usize,
        panel: usize,
        out: &mut [u8],
    ) -> Option<()> {
        for_format!(self, F => pack::<F>(ty, matrix, row_bytes, panel, out))
    }

    /// Writes the values of a row, (columns), of packed panels.
    pub(crate) fn read_row(self, panels: &[u8], row: usize, out: &mut [f32]) {
        for_format!(self, F => read_row::<F>(panels, row, out))
    }
}

/// Where byte-sized quant `i` of row `lane` lies.
const fn quant_at(lane: usize, i: usize) -> usize {
    i / 4 * 128 + lane / 16 * 64 + lane % 16 * 4 + i % 4
}

fn write_scale<F: Format>(block: &mut [u8], at: usize, lane: usize, value: f32) -> Option<()> {
    if F::WIDE {
        block[at + lane * 4..][..4].copy_from_slice(&value.to_le_bytes());
        return Some(());
    }
    let half = f16::from_f32(value);
    block[at + lane * 2..][..2].copy_from_slice(&half.to_le_bytes());
    // A value that came from a half, NaN included, always returns to one; -8 d may be too large.
    (half.to_f32() == value || value.is_nan()).then_some(())
}

fn read_scale<F: Format>(block: &[u8], at: usize, lane: usize) -> f32 {
    if F::WIDE {
        f32::from_le_bytes(block[at + lane * 4..][..4].try_into().expect("4 bytes"))
    } else {
        f16_to_f32(u16::from_le_bytes(block[at + lane * 2..][..2].try_into().expect("2 bytes")))
    }
}

fn pack<F: Format>(ty: WeightType, matrix: &[u8], row_bytes: usize, panel: usize, out: &mut [u8]) -> Option<()> {
    let rows = matrix[panel * PANEL_ROWS * row_bytes..].chunks_exact(row_bytes).take(PANEL_ROWS);
    for (lane, row) in rows.enumerate() {
        for (index, out) in out.chunks_exact_mut(F::BLOCK_BYTES).enumerate() {
            let Block { q, scale, mut min } = quant::block(ty, row, index);
            // Q4_0 is symmetric about 8.
            let offset = if ty == WeightType::Q4_0 { 8 } else { 0 };
            if offset != 0 {
                min = -8.0 * scale[0];
            }
            for i in 0..BLOCK / 2 {
                let (low, high) = (q[i], q[i + 16]);
                if F::FOUR_BITS {
                    out[quant_at(lane, i)] = (low + offset) as u8 | ((high + offset) as u8) << 4;
                } else {
                    // q + 128 in symmetric formats: the sign bit turned.
                    let bias = if F::MIN { 0 } else { 0x80 };
                    out[quant_at(lane, i)] = low as u8 ^ bias;
                    out[quant_at(lane, i + 16)] = high as u8 ^ bias;
                }
            }
            write_scale::<F>(out, F::SCALES_AT, lane, scale[0])?;
            if F::HALVES {
                write_scale::<F>(out, F::SCALES_AT + F::SCALE_BYTES, lane, scale[1])?;
            }
            if F::MIN {
                write_scale::<F>(out, F::MINIMA_AT, lane, min)?;
            }
        }
    }
    Some(())
}

/// The quants of row `lane` of a block, signed as the scale wants them.
#[inline(always)]
pub(crate) fn quants<F: Format>(block: &[u8], lane: usize) -> [i8; BLOCK] {
    let mut q = [0; BLOCK];
    for i in 0..BLOCK / 2 {
        if F::FOUR_BITS {
            let byte = block[quant_at(lane, i)];
            q[i] = (byte & 15) as i8;
            q[i + 16] = (byte >> 4) as i8;
        } else {
            let bias = if F::MIN { 0 } else { 0x80 };
            q[i] = (block[quant_at(lane, i)] ^ bias) as i8;
            q[i + 16] = (block[quant_at(lane, i + 16)] ^ bias) as i8;
        }
    }
    q
}

/// Scales of both halves, and minimum, of row `lane` of a block.
#[inline(always)]
pub(crate) fn scales<F: Format>(block: &[u8], lane: usize) -> ([f32; 2], f32) {
    let first = read_scale::<F>(block, F::SCALES_AT, lane);
    let second = if F::HALVES { read_scale::<F>(block, F::SCALES_AT + F::SCALE_BYTES, lane) } else { first };
    ([first, second], if F::MIN { read_scale::<F>(block, F::MINIMA_AT, lane) } else { 0.0 })
}

fn read_row<F: Format>(panels: &[u8], row: usize, out: &mut [f32]) {
    let panel_bytes = out.len() / BLOCK * F::BLOCK_BYTES;
    let panel = &panels[row / PANEL_ROWS * panel_bytes..][..panel_bytes];
    let lane = row % PANEL_ROWS;
    for (block, out) in panel.chunks_exact(F::BLOCK_BYTES).zip(out.chunks_exact_mut(BLOCK)) {
        let (scale, min) = scales::<F>(block, lane);
        for (i, (out, q)) in out.iter_mut().zip(quants::<F>(block, lane)).enumerate() {
            *out = scale[i / 16] * f32::from(q) + min;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::tests::{Random, random_matrix};
    use crate::quant::dequantize_row;

    #[test]
    fn packing_loses_nothing() {
        let mut random = Random::new(3);
        for ty in WeightType::ALL {
            let Some(format) = FormatKind::of(ty) else {
                continue;
            };
            let (rows, columns) = (45, 512);
            let matrix = random_matrix(&mut random, ty, rows, columns);
            let row_bytes = ty.row_bytes(columns).expect("whole blocks");
            let panel_bytes = columns / BLOCK * format.block_bytes();
            let mut panels = vec![0; panel_bytes * 2];
            for (panel, out) in panels.chunks_exact_mut(panel_bytes).enumerate() {
                format.pack(ty, &matrix, row_bytes, panel, out).expect("usual scales");
            }
            for row in 0..rows {
                let (mut want, mut got) = (vec![0.0; columns], vec![0.0; columns]);
                dequantize_row(ty, &matrix[row * row_bytes..][..row_bytes], &mut want);
                format.read_row(&panels, row, &mut got);
                assert_eq!(got, want, "{} row {row}", ty.name());
            }
        }
    }

    #[test]
    fn a_scale_beyond_the_format_is_refused() {
        let mut matrix = [0; 18];
        matrix[..2].copy_from_slice(&f16::from_f32(10_000.0).to_le_bytes());
        let mut out = [0; Nibbles::BLOCK_BYTES];
        assert!(FormatKind::Nibbles.pack(WeightType::Q4_0, &matrix, 18, 0, &mut out).is_none());
    }
}
