//! Operations that take each row by itself.

use super::*;
use crate::cpu::Rope;
use crate::reference;

/// Rows and columns: one, odd, and enough for two threads.
const SHAPES: [(usize, usize); 5] = [(1, 576), (3, 2), (7, 33), (64, 576), (70, 301)];

/// Runs `operation` on all rows and on single ones, with one thread and two, and compares the bits; then all with `want`.
fn check(
    columns: usize,
    inputs: [&[f32]; 2],
    want: &[f32],
    tolerance: f64,
    operation: impl Fn(&mut CpuDevice, &mut Buffer, &mut Buffer, usize, usize),
) {
    let rows = want.len() / columns;
    let mut random = Random::new(rows as u64);
    let run = |device: &mut CpuDevice, first: usize, n: usize| {
        let part = |values: &[f32]| values[first * columns..][..n * columns].to_vec();
        let mut a = buffer_of(device, &part(inputs[0]), columns);
        let mut b = buffer_of(device, &part(inputs[1]), columns);
        operation(device, &mut a, &mut b, first, n);
        values_of(&a, n)
    };
    let devices = |threads| devices(threads, Activations::Int8, KvType::Bf16);
    for (mut one, mut two) in devices(1).into_iter().zip(devices(2)) {
        let got = run(&mut one, 0, rows);
        let error = relative_error(&got, want);
        assert!(error < tolerance, "{} ({rows}, {columns}): {error:e}", one.isa());
        assert_eq!(bits_of(&run(&mut two, 0, rows)), bits_of(&got), "{} two threads", one.isa());
        for row in some_rows(&mut random, rows) {
            let alone = run(&mut one, row, 1);
            assert_eq!(bits_of(&alone), bits_of(&got[row * columns..][..columns]), "{} row {row} alone", one.isa());
        }
    }
}

#[test]
fn rms_norm() {
    let mut random = Random::new(1);
    for (rows, columns) in SHAPES {
        let (x, weight) = (random.normals(rows * columns), random.normals(columns));
        let want: Vec<f32> = x.chunks_exact(columns).flat_map(|x| reference::rms_norm(x, &weight, 1e-5)).collect();
        let bytes: Vec<u8> = weight.iter().flat_map(|x| x.to_le_bytes()).collect();
        check(columns, [&x, &x], &want, 1e-6, |device, out, x, _, n| {
            let weight = device.weight(WeightType::F32, 1, columns, &bytes).expect("a weight");
            device.rms_norm(x, n, &weight, 1e-5, out);
        });
    }
}

#[test]
fn add() {
    let mut random = Random::new(2);
    for (rows, columns) in SHAPES {
        let (x, y) = (random.normals(rows * columns), random.normals(rows * columns));
        let want: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x + y).collect();
        check(columns, [&x, &y], &want, 1e-12, |device, x, y, _, n| device.add(x, y, n));
    }
}

#[test]
fn silu_mul() {
    let mut random = Random::new(3);
    for (rows, columns) in SHAPES {
        let (mut gate, up) = (random.normals(rows * columns), random.normals(rows * columns));
        // Where e^x is clamped, on both sides.
        (gate[0], gate[1]) = (-200.0, 200.0);
        let want = reference::silu_mul(&gate, &up);
        check(columns, [&gate, &up], &want, 1e-6, |device, gate, up, _, n| device.silu_mul(gate, up, n));
    }
}

#[test]
fn rope() {
    let mut random = Random::new(4);
    for (rows, heads, head_dim, dimensions) in [(1, 9, 64, 64), (64, 3, 128, 128), (5, 3, 6, 4), (70, 4, 80, 34)] {
        for neox in [false, true] {
            let columns = heads * head_dim;
            let x = random.normals(rows * columns);
            let positions: Vec<u32> = (0..rows).map(|_| random.below(5000) as u32).collect();
            let frequencies: Vec<f32> =
                (0..dimensions / 2).map(|i| 10_000_f32.powf(-2.0 * i as f32 / dimensions as f32)).collect();
            let rope = Rope { dimensions, neox, inverse_frequencies: &frequencies, magnitude: 1.25 };
            let mut want = x.clone();
            for (row, &position) in want.chunks_exact_mut(columns).zip(&positions) {
                for head in row.chunks_exact_mut(head_dim) {
                    reference::rope(head, position, &frequencies, 1.25, neox);
                }
            }
            check(columns, [&x, &x], &want, 1e-6, |device, x, y, first, n| {
                let positions = &positions[first..first + n];
                device.rope(x, n, head_dim, positions, &rope);
                // Once more with the same positions: the table is kept. Then with others: it is not.
                device.rope(y, n, head_dim, positions, &rope);
                assert_eq!(bits_of(&values_of(x, n)), bits_of(&values_of(y, n)));
                let others: Vec<u32> = positions.iter().map(|position| position + 1).collect();
                device.rope(y, n, head_dim, &others, &rope);
                assert_ne!(bits_of(&values_of(x, n)), bits_of(&values_of(y, n)));
            });
        }
    }
}

#[test]
fn gather() {
    for mut device in devices(1, Activations::Int8, KvType::Bf16) {
        let values: Vec<f32> = (0..35).map(|i| i as f32).collect();
        let x = buffer_of(&mut device, &values, 7);
        let mut out = device.buffer(3, 7).expect("memory");
        device.gather(&x, &[4, 0, 4], &mut out);
        assert_eq!(out.row(0), &values[28..]);
        assert_eq!(out.row(1), &values[..7]);
        assert_eq!(out.row(2), &values[28..]);
    }
}

/// Numbers that are not finite stay in their row, its padding included.
#[test]
fn a_bad_row_spoils_no_other() {
    for mut device in devices(2, Activations::Int8, KvType::Bf16) {
        let columns = 33;
        let weight = device.weight(WeightType::F32, 1, columns, &[0x3f; 33 * 4]).expect("a weight");
        let mut x = device.buffer(2, columns).expect("memory");
        let mut out = device.buffer(2, columns).expect("memory");
        x.row_mut(0).fill(f32::NAN);
        x.row_mut(1).fill(1.0);
        device.rms_norm(&x, 2, &weight, 1e-5, &mut out);
        let finite = |out: &Buffer, row: usize| out.padded_row(row).iter().all(|x| x.is_finite());
        assert!(!finite(&out, 0) && finite(&out, 1));
        // The same rows of the buffer serve another request in the next step.
        x.row_mut(0).fill(2.0);
        device.rms_norm(&x, 2, &weight, 1e-5, &mut out);
        assert!(finite(&out, 0) && finite(&out, 1));
    }
}
