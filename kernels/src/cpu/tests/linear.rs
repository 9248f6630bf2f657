//! Matrix products and embedding.

use super::*;
use crate::cpu::{Output, Weight};
use crate::quant::BLOCK;
use crate::reference;

struct Case {
    ty: WeightType,
    rows: usize,
    outputs: usize,
    columns: usize,
}

fn cases(random: &mut Random) -> Vec<Case> {
    let mut cases = Vec::new();
    for ty in WeightType::ALL {
        for rows in [1, 2, 7, 70, 1 + random.below(69)] {
            let blocks = ty.block_elements();
            // Types without blocks may have any number of columns.
            let columns = if blocks == 1 { 1 + random.below(200) } else { blocks * (1 + random.below(3)) };
            cases.push(Case { ty, rows, outputs: 2 + random.below(100), columns });
        }
    }
    cases
}

/// What the integer kernels see: rounded to 127 steps of the largest of each 32.
fn rounded(x: &[f32], columns: usize) -> Vec<f32> {
    let mut out = Vec::with_capacity(x.len());
    for row in x.chunks_exact(columns) {
        for block in row.chunks(BLOCK) {
            let max = block.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
            out.extend(block.iter().map(|x| (x * (127.0 / max)).round_ties_even() * (max / 127.0)));
        }
    }
    out
}

fn product(device: &mut CpuDevice, weight: &Weight, bias: Option<&Weight>, x: &[f32], columns: usize) -> Vec<f32> {
    let rows = x.len() / columns;
    let x = buffer_of(device, x, columns);
    let mut out = device.buffer(rows, weight.rows()).expect("memory");
    device.linear(&x, rows, [Output { weight, bias, out: &mut out }]);
    assert!(
        (0..rows).all(|row| (weight.rows()..out.stride()).all(|i| out.padded_row(row)[i].to_bits() == 0)),
        "padding is zero"
    );
    values_of(&out, rows)
}

fn check(activations: Activations) {
    let mut random = Random::new(7);
    for case in cases(&mut random) {
        let Case { ty, rows, outputs, columns } = case;
        let matrix = random_matrix(&mut random, ty, outputs, columns);
        let x = random.normals(rows * columns);
        let bias = random.normals(outputs);
        let bias_bytes: Vec<u8> = bias.iter().flat_map(|x| x.to_le_bytes()).collect();
        let seen = match activations {
            _ if ty.block_elements() == 1 => x.clone(),
            Activations::Int8 => rounded(&x, columns),
            Activations::Int16 => {
                let coarse = rounded(&x, columns);
                let rest: Vec<f32> = x.iter().zip(&coarse).map(|(x, coarse)| x - coarse).collect();
                coarse.iter().zip(rounded(&rest, columns)).map(|(coarse, fine)| coarse + fine).collect()
            }
            Activations::F32 => x.clone(),
        };
        let want = reference::linear(&seen, &dequantized(ty, &matrix, outputs, columns), Some(&bias), columns);
        for mut device in devices(1, activations, KvType::Bf16) {
            let name = format!("{} {} ({rows}, {columns}) -> {outputs}", device.isa(), ty.name());
            let weight = device.weight(ty, outputs, columns, &matrix).expect("a weight");
            let bias = device.weight(WeightType::F32, 1, outputs, &bias_bytes).expect("a bias");
            let got = product(&mut device, &weight, Some(&bias), &x, columns);
            let error = relative_error(&got, &want);
            assert!(error < 2e-6, "{name}: {error:e}");
            for row in some_rows(&mut random, rows) {
                let alone = product(&mut device, &weight, Some(&bias), &x[row * columns..][..columns], columns);
                assert_eq!(bits_of(&alone), bits_of(&got[row * outputs..][..outputs]), "{name}: row {row} alone");
            }
            let options = CpuOptions { threads: Some(2), isa: Some(device.isa()), activations, kv: KvType::Bf16 };
            let mut two = CpuDevice::new(options).expect("two threads");
            let weight = two.weight(ty, outputs, columns, &matrix).expect("a weight");
            let bias = two.weight(WeightType::F32, 1, outputs, &bias_bytes).expect("a bias");
            let same = product(&mut two, &weight, Some(&bias), &x, columns);
            assert_eq!(bits_of(&same), bits_of(&got), "{name}: two threads");
        }
    }
}

#[test]
fn products_with_rounded_activations() {
    check(Activations::Int8);
}

#[test]
fn products_with_activations_rounded_twice() {
    check(Activations::Int16);
}

#[test]
fn products_with_exact_activations() {
    check(Activations::F32);
}

/// The error that the default mode's rounding makes, with and without outliers among the activations.
#[test]
fn rounding_activations_costs_what_is_documented() {
    let mut random = Random::new(8);
    let (rows, columns, outputs) = (32, 512, 256);
    let matrix = random_matrix(&mut random, WeightType::Q4_1, outputs, columns);
    for (outliers, limit) in [(false, 0.01), (true, 0.03)] {
        let mut x = random.normals(rows * columns);
        if outliers {
            x.iter_mut().skip(77).step_by(columns).for_each(|x| *x *= 30.0);
        }
        let want = reference::linear(&x, &dequantized(WeightType::Q4_1, &matrix, outputs, columns), None, columns);
        for mut device in devices(1, Activations::Int8, KvType::Bf16) {
            let weight = device.weight(WeightType::Q4_1, outputs, columns, &matrix).expect("a weight");
            let error = relative_error(&product(&mut device, &weight, None, &x, columns), &want);
            assert!(error > 1e-4 && error < limit, "{} outliers {outliers}: {error}", device.isa());
        }
        for mut device in devices(1, Activations::Int16, KvType::Bf16) {
            let weight = device.weight(WeightType::Q4_1, outputs, columns, &matrix).expect("a weight");
            let error = relative_error(&product(&mut device, &weight, None, &x, columns), &want);
            assert!(error < limit / 200.0, "{} outliers {outliers}, two planes: {error}", device.isa());
        }
    }
}

/// Several outputs at once, of both kinds of kernels, are the same as one after another.
#[test]
fn several_outputs_share_the_input() {
    let mut random = Random::new(9);
    let (rows, columns) = (9, 256);
    let x = random.normals(rows * columns);
    for mut device in devices(2, Activations::Int8, KvType::Bf16) {
        let mut weights = Vec::new();
        for (ty, outputs) in [(WeightType::F16, 33), (WeightType::Q4_1, 64), (WeightType::Q6_K, 7)] {
            let matrix = random_matrix(&mut random, ty, outputs, columns);
            weights.push(device.weight(ty, outputs, columns, &matrix).expect("a weight"));
        }
        let singly: Vec<Vec<f32>> =
            weights.iter().map(|weight| product(&mut device, weight, None, &x, columns)).collect();
        let x = buffer_of(&mut device, &x, columns);
        let mut outs: Vec<Buffer> =
            weights.iter().map(|weight| device.buffer(rows, weight.rows()).expect("memory")).collect();
        let outputs = weights.iter().zip(&mut outs).map(|(weight, out)| Output { weight, bias: None, out });
        device.linear(&x, rows, outputs);
        for (out, want) in outs.iter().zip(&singly) {
            assert_eq!(bits_of(&values_of(out, rows)), bits_of(want));
        }
    }
}

/// Matrices serve lookups exactly, packed or not: one table is embedding and output matrix.
#[test]
fn rows_of_a_table_are_exact() {
    let mut random = Random::new(10);
    for activations in [Activations::Int8, Activations::Int16, Activations::F32] {
        for ty in WeightType::ALL {
            let (rows, columns) = (75, 256);
            let matrix = random_matrix(&mut random, ty, rows, columns);
            let want = dequantized(ty, &matrix, rows, columns);
            let tokens: Vec<u32> = (0..80).map(|_| random.below(rows) as u32).collect();
            for mut device in devices(2, activations, KvType::Bf16) {
                let table = device.weight(ty, rows, columns, &matrix).expect("a weight");
                let mut out = device.buffer(80, columns).expect("memory");
                device.embed(&table, &tokens, &mut out);
                for (row, &token) in tokens.iter().enumerate() {
                    assert_eq!(out.row(row), &want[token as usize * columns..][..columns], "{}", ty.name());
                }
            }
        }
    }
}

/// The sets of one family differ in integer instructions alone, and integer sums are exact.
#[test]
#[cfg(target_arch = "aarch64")]
fn all_kinds_of_neon_give_the_same_bits() {
    let mut random = Random::new(12);
    let neon = |device: &CpuDevice| matches!(device.isa(), Isa::Neon | Isa::NeonDotprod | Isa::NeonI8mm);
    for ty in WeightType::ALL {
        for rows in 1..=9 {
            let (outputs, columns) = (34, 512);
            let matrix = random_matrix(&mut random, ty, outputs, columns);
            let x = random.normals(rows * columns);
            let mut products =
                devices(1, Activations::Int8, KvType::Bf16).into_iter().filter(neon).map(|mut device| {
                    let weight = device.weight(ty, outputs, columns, &matrix).expect("a weight");
                    (device.isa(), product(&mut device, &weight, None, &x, columns))
                });
            if let Some((_, first)) = products.next() {
                products.for_each(|(isa, other)| {
                    assert_eq!(bits_of(&other), bits_of(&first), "{isa}, {}, {rows} rows", ty.name());
                });
            }
        }
    }
}

#[test]
fn what_cannot_be_a_weight_is_an_error() {
    let mut device = CpuDevice::new(CpuOptions::default()).expect("a device");
    for (rows, columns, bytes) in [(0, 32, 0), (2, 0, 0), (2, 33, 40), (2, 32, 39), (usize::MAX, 32, 40)] {
        let got = device.weight(WeightType::Q4_1, rows, columns, &vec![0; bytes]);
        assert!(matches!(got, Err(crate::cpu::CpuError::Unsupported { .. })), "({rows}, {columns}) in {bytes}");
    }
}

/// The largest products of bytes: AVX2 adds pairs of them in 16 bits, which must not saturate.
#[test]
fn the_largest_quants_and_activations_do_not_overflow() {
    let (outputs, columns) = (40, 256);
    let mut random = Random::new(11);
    for ty in WeightType::ALL {
        if ty.block_elements() == 1 {
            continue;
        }
        for pattern in [0x00, 0x7f, 0x80, 0xff] {
            // Scales stay as they are; all other bytes of a block are the pattern's.
            let scales_of = random_matrix(&mut random, ty, outputs, columns);
            let mut matrix = vec![pattern; scales_of.len()];
            let halves: &[usize] = match ty {
                WeightType::Q6_K => &[208],
                WeightType::Q4_0 | WeightType::Q5_0 | WeightType::Q8_0 => &[0],
                _ => &[0, 2],
            };
            let block_bytes = ty.block_bytes();
            for (block, scales) in matrix.chunks_exact_mut(block_bytes).zip(scales_of.chunks_exact(block_bytes)) {
                halves.iter().for_each(|&at| block[at..at + 2].copy_from_slice(&scales[at..at + 2]));
            }
            for sign in [1.0, -1.0] {
                let x = vec![sign; columns];
                let want = reference::linear(&x, &dequantized(ty, &matrix, outputs, columns), None, columns);
                for mut device in devices(1, Activations::Int8, KvType::Bf16) {
                    let weight = device.weight(ty, outputs, columns, &matrix).expect("a weight");
                    let error = relative_error(&product(&mut device, &weight, None, &x, columns), &want);
                    assert!(error < 1e-5, "{} {} {pattern:x} {sign}: {error:e}", device.isa(), ty.name());
                }
            }
        }
    }
}
