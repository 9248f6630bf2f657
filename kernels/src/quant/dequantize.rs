//! Weights back to f32, one row at a time.
//!
//! Every quantised type is read through one form: 32 consecutive elements are small integers with one scale per 16 and one
//! minimum, `value = scale * q + min` ([`Block`]). The CPU's packing (`cpu/pack.rs`) takes the same form, so what the
//! fast kernels hold is what this file reads, without a second rounding. The products and sums are those of the `gguf`
//! Python package, in its order; `tests/dequantize.rs` compares with its values.

use super::WeightType;

/// Elements of a [`Block`].
pub const BLOCK: usize = 32;

/// 32 consecutive elements of a quantised row: `scale[i / 16] * q[i] + min`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Block {
    /// Small integers: -128..=127 (Q8_0), else -32..=31.
    pub q: [i8; BLOCK],
    /// Of elements 0..16 and 16..32; equal for all types but Q6_K.
    pub scale: [f32; 2],
    /// 0 for symmetric types.
    pub min: f32,
}

/// A half-precision number's value, without a branch on the hardware's abilities, so that loops over it vectorise.
#[inline(always)]
pub fn f16_to_f32(bits: u16) -> f32 {
    let magnitude = u32::from(bits & 0x7fff);
    // Moved into f32's fields the exponent is 112 too small; a product by 2^112 corrects it, subnormals included.
    let finite = f32::from_bits(magnitude << 13) * f32::from_bits((112 + 127) << 23);
    let value = if magnitude >= 0x7c00 { f32::from_bits(magnitude << 13 | 0x7f80_0000) } else { finite };
    f32::from_bits(value.to_bits() | u32::from(bits & 0x8000) << 16)
}

/// The value of a bfloat16.
#[inline(always)]
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

#[inline(always)]
fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

#[inline(always)]
fn f16_at(bytes: &[u8], at: usize) -> f32 {
    f16_to_f32(u16_at(bytes, at))
}

/// Low nibbles are elements 0..16, high nibbles 16..32 (Q4_0, Q4_1, Q5_0, Q5_1).
#[inline(always)]
fn nibbles(qs: &[u8; 16]) -> [i8; BLOCK] {
    let mut q = [0; BLOCK];
    for (i, &byte) in qs.iter().enumerate() {
        q[i] = (byte & 15) as i8;
        q[i + 16] = (byte >> 4) as i8;
    }
    q
}

/// Bit i of `high` is the fifth bit of element i (Q5_0, Q5_1).
#[inline(always)]
fn fifth_bits(mut q: [i8; BLOCK], high: u32) -> [i8; BLOCK] {
    for (i, q) in q.iter_mut().enumerate() {
        *q |= ((high >> i & 1) << 4) as i8;
    }
    q
}

/// Six-bit scale and minimum of sub-block `sub` of Q4_K and Q5_K.
#[inline(always)]
fn scale_min(scales: &[u8], sub: usize) -> (f32, f32) {
    let (scale, min) = if sub < 4 {
        (scales[sub] & 63, scales[sub + 4] & 63)
    } else {
        (scales[sub + 4] & 15 | (scales[sub - 4] >> 6) << 4, scales[sub + 4] >> 4 | (scales[sub] >> 6) << 4)
    };
    (f32::from(scale), f32::from(min))
}

/// Reads the 32 elements from `index * 32` on of a row of a quantised type.
///
/// # Panics
/// For F32, F16 and BF16, which have no blocks, and when `row` ends before the block.
#[inline(always)]
pub fn block(ty: WeightType, row: &[u8], index: usize) -> Block {
    let per_block = ty.block_elements() / BLOCK;
    assert!(per_block > 0, "{} has no blocks", ty.name());
    let start = index / per_block * ty.block_bytes();
    let bytes = &row[start..start + ty.block_bytes()];
    // Sub-block inside a block of 256.
    let sub = index % per_block;
    let nibbles_from = |at: usize| nibbles(bytes[at..at + 16].try_into().expect("16 bytes"));
    let high_bits = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
    match ty {
        WeightType::Q4_0 => {
            let d = f16_at(bytes, 0);
            Block { q: nibbles_from(2).map(|q| q - 8), scale: [d; 2], min: 0.0 }
        }
        WeightType::Q4_1 => Block { q: nibbles_from(4), scale: [f16_at(bytes, 0); 2], min: f16_at(bytes, 2) },
        WeightType::Q5_0 => {
            let q = fifth_bits(nibbles_from(6), high_bits(2));
            Block { q: q.map(|q| q - 16), scale: [f16_at(bytes, 0); 2], min: 0.0 }
        }
        WeightType::Q5_1 => {
            let q = fifth_bits(nibbles_from(8), high_bits(4));
            Block { q, scale: [f16_at(bytes, 0); 2], min: f16_at(bytes, 2) }
        }
        WeightType::Q8_0 => {
            let mut q = [0; BLOCK];
            for (q, &byte) in q.iter_mut().zip(&bytes[2..34]) {
                *q = byte as i8;
            }
            Block { q, scale: [f16_at(bytes, 0); 2], min: 0.0 }
        }
        WeightType::Q4_K | WeightType::Q5_K => {
            let (scale, min) = scale_min(&bytes[4..16], sub);
            let five = ty == WeightType::Q5_K;
            let qs = &bytes[if five { 48 } else { 16 }..][sub / 2 * 32..][..32];
            let shift = sub % 2 * 4;
            let mut q = [0; BLOCK];
            for (q, &byte) in q.iter_mut().zip(qs) {
                *q = (byte >> shift & 15) as i8;
            }
            if five {
                for (q, &byte) in q.iter_mut().zip(&bytes[16..48]) {
                    *q |= ((byte >> sub & 1) << 4) as i8;
                }
            }
            Block { q, scale: [f16_at(bytes, 0) * scale; 2], min: -(f16_at(bytes, 2) * min) }
        }
        WeightType::Q6_K => {
            // Two halves of 128 elements: 64 bytes of low nibbles and 32 of high bit pairs each.
            let (half, k) = (sub / 4, sub % 4);
            let low = &bytes[half * 64 + k % 2 * 32..][..32];
            let high = &bytes[128 + half * 32..][..32];
            let mut q = [0; BLOCK];
            for i in 0..BLOCK {
                q[i] = (low[i] >> (k / 2 * 4) & 15 | (high[i] >> (2 * k) & 3) << 4) as i8 - 32;
            }
            let d = f16_at(bytes, 208);
            let scale = |i: usize| d * f32::from(bytes[192 + sub * 2 + i] as i8);
            Block { q, scale: [scale(0), scale(1)], min: 0.0 }
        }
        WeightType::F32 | WeightType::F16 | WeightType::BF16 => unreachable!("asserted above"),
    }
}

#[inline(always)]
fn row_of_blocks(ty: WeightType, row: &[u8], out: &mut [f32]) {
    for (index, out) in out.chunks_exact_mut(BLOCK).enumerate() {
        let block = block(ty, row, index);
        for (half, out) in out.chunks_exact_mut(BLOCK / 2).enumerate() {
            for (i, out) in out.iter_mut().enumerate() {
                *out = block.scale[half] * f32::from(block.q[half * (BLOCK / 2) + i]) + block.min;
            }
        }
    }
}

/// Writes the f32 values of one row, (columns), given its `ty.row_bytes(columns)` bytes. Inlined, so that it is compiled
/// for the instruction set of whoever calls it.
///
/// # Panics
/// When `row` is not the bytes of `out.len()` elements.
#[inline(always)]
pub fn dequantize_row_inline(ty: WeightType, row: &[u8], out: &mut [f32]) {
    assert_eq!(ty.row_bytes(out.len()), Some(row.len()), "bytes of a row of {} {}", out.len(), ty.name());
    match ty {
        WeightType::F32 => {
            for (out, bytes) in out.iter_mut().zip(row.as_chunks::<4>().0) {
                *out = f32::from_le_bytes(*bytes);
            }
        }
        WeightType::F16 => {
            for (out, bytes) in out.iter_mut().zip(row.as_chunks::<2>().0) {
                *out = f16_to_f32(u16::from_le_bytes(*bytes));
            }
        }
        WeightType::BF16 => {
            for (out, bytes) in out.iter_mut().zip(row.as_chunks::<2>().0) {
                *out = bf16_to_f32(u16::from_le_bytes(*bytes));
            }
        }
        // The type is a constant in each arm, so that each gets its own loop.
        WeightType::Q4_0 => row_of_blocks(WeightType::Q4_0, row, out),
        WeightType::Q4_1 => row_of_blocks(WeightType::Q4_1, row, out),
        WeightType::Q5_0 => row_of_blocks(WeightType::Q5_0, row, out),
        WeightType::Q5_1 => row_of_blocks(WeightType::Q5_1, row, out),
        WeightType::Q8_0 => row_of_blocks(WeightType::Q8_0, row, out),
        WeightType::Q4_K => row_of_blocks(WeightType::Q4_K, row, out),
        WeightType::Q5_K => row_of_blocks(WeightType::Q5_K, row, out),
        WeightType::Q6_K => row_of_blocks(WeightType::Q6_K, row, out),
    }
}

/// [`dequantize_row_inline`] compiled for the baseline instruction set.
///
/// # Panics
/// When `row` is not the bytes of `out.len()` elements.
pub fn dequantize_row(ty: WeightType, row: &[u8], out: &mut [f32]) {
    dequantize_row_inline(ty, row, out);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_precision_number_is_read_exactly() {
        for bits in 0..=u16::MAX {
            let want = half::f16::from_bits(bits).to_f32();
            let got = f16_to_f32(bits);
            assert!(got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(), "{bits:04x}: {got} for {want}");
        }
    }

    #[test]
    #[should_panic(expected = "bytes of a row")]
    fn a_row_of_the_wrong_length_is_refused() {
        dequantize_row(WeightType::Q4_1, &[0; 39], &mut [0.0; 64]);
    }
}
