//! Operations against `reference`, and the same bits whatever the company.

mod attention;
mod layer;
mod linear;
mod rowwise;

use super::{Activations, Buffer, CpuDevice, CpuOptions, Isa, KvType};
use crate::quant::{WeightType, dequantize_row};

/// A small generator (xorshift64*), seeded, so that failures repeat.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.bits() >> 33) as usize % n
    }

    /// About normal: the sum of twelve uniform numbers.
    pub(crate) fn normal(&mut self) -> f32 {
        (0..12).map(|_| (self.bits() >> 40) as f32 / (1 << 24) as f32).sum::<f32>() - 6.0
    }

    pub(crate) fn normals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }
}

/// Random blocks of `ty` with scales of a weight's usual size.
pub(crate) fn random_matrix(random: &mut Random, ty: WeightType, rows: usize, columns: usize) -> Vec<u8> {
    let len = rows * ty.row_bytes(columns).expect("whole blocks");
    let mut bytes: Vec<u8> = (0..len).map(|_| random.bits() as u8).collect();
    // Where a block has half-precision numbers.
    let halves: &[usize] = match ty {
        WeightType::F32 | WeightType::BF16 | WeightType::F16 => &[0],
        WeightType::Q4_0 | WeightType::Q5_0 | WeightType::Q8_0 => &[0],
        WeightType::Q4_1 | WeightType::Q5_1 | WeightType::Q4_K | WeightType::Q5_K => &[0, 2],
        WeightType::Q6_K => &[208],
    };
    let size = match ty {
        WeightType::Q4_K | WeightType::Q5_K | WeightType::Q6_K => 0.0005,
        WeightType::Q8_0 => 0.0005,
        WeightType::F32 | WeightType::BF16 | WeightType::F16 => 0.05,
        _ => 0.01,
    };
    for block in bytes.chunks_exact_mut(ty.block_bytes()) {
        match ty {
            WeightType::F32 => block.copy_from_slice(&(random.normal() * size).to_le_bytes()),
            WeightType::BF16 => block.copy_from_slice(&half::bf16::from_f32(random.normal() * size).to_le_bytes()),
            _ => {
                for &at in halves {
                    let value = half::f16::from_f32(random.normal() * size);
                    block[at..at + 2].copy_from_slice(&value.to_le_bytes());
                }
            }
        }
    }
    bytes
}

/// A device for each instruction set this processor has.
pub(crate) fn devices(threads: usize, activations: Activations, kv: KvType) -> Vec<CpuDevice> {
    let device = |isa: Isa| {
        let options = CpuOptions { threads: Some(threads), isa: Some(isa), activations, kv };
        CpuDevice::new(options).expect("an available set")
    };
    Isa::available().map(device).collect()
}

/// A buffer that holds `values`, (rows, columns).
pub(crate) fn buffer_of(device: &mut CpuDevice, values: &[f32], columns: usize) -> Buffer {
    let rows = values.len() / columns;
    let mut buffer = device.buffer(rows, columns).expect("memory");
    for (row, values) in values.chunks_exact(columns).enumerate() {
        buffer.row_mut(row).copy_from_slice(values);
    }
    buffer
}

/// The leading rows, without padding.
pub(crate) fn values_of(buffer: &Buffer, rows: usize) -> Vec<f32> {
    (0..rows).flat_map(|row| buffer.row(row).to_vec()).collect()
}

pub(crate) fn bits_of(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

pub(crate) fn dequantized(ty: WeightType, matrix: &[u8], rows: usize, columns: usize) -> Vec<f32> {
    let mut out = vec![0.0; rows * columns];
    let row_bytes = ty.row_bytes(columns).expect("whole blocks");
    for (row, out) in matrix.chunks_exact(row_bytes).zip(out.chunks_exact_mut(columns)) {
        dequantize_row(ty, row, out);
    }
    out
}

/// Root mean square of the difference over that of what is wanted.
pub(crate) fn relative_error(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let squares = |it: &mut dyn Iterator<Item = f64>| it.map(|x| x * x).sum::<f64>();
    let error = squares(&mut got.iter().zip(want).map(|(&a, &b)| f64::from(a) - f64::from(b)));
    (error / squares(&mut want.iter().map(|&x| f64::from(x))).max(1e-30)).sqrt()
}

/// The first and the last `n` of `rows`, and some between, without repetition.
pub(crate) fn some_rows(random: &mut Random, rows: usize) -> Vec<usize> {
    let mut some = vec![0, rows - 1, random.below(rows), random.below(rows)];
    some.sort_unstable();
    some.dedup();
    some
}
