//! A layer in two regions has the bits of its operations one by one.

use super::*;
use crate::cpu::{
    AttentionBatch, AttentionBlock, AttentionBuffers, AttentionHeads, FeedForwardBlock, FeedForwardBuffers, KvShape,
    Linear, Output, PAGE_TOKENS, Phase, Rope, Weight,
};
use std::time::Duration;

const HEADS: AttentionHeads = AttentionHeads { heads: 6, kv_heads: 2, head_dim: 32, scale: 0.2 };
const QUERY_COLUMNS: usize = HEADS.heads * HEADS.head_dim;
const KV_COLUMNS: usize = HEADS.kv_heads * HEADS.head_dim;
const EPS: f32 = 1e-5;

/// Weight types of the projections, and sizes.
struct Shape {
    hidden: usize,
    features: usize,
    types: [WeightType; 3],
    has_bias: bool,
}

struct Layer {
    norm: Weight,
    projections: Vec<(Weight, Option<Weight>)>,
}

impl Layer {
    fn new(d: &mut CpuDevice, random: &mut Random, shape: &Shape) -> Self {
        let f32s = |values: Vec<f32>| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let (hidden, features) = (shape.hidden, shape.features);
        let norm = f32s(random.normals(hidden));
        let [first, second, third] = shape.types;
        let projections = [
            (first, QUERY_COLUMNS, hidden),
            (second, KV_COLUMNS, hidden),
            (third, KV_COLUMNS, hidden),
            (first, hidden, QUERY_COLUMNS),
            (first, features, hidden),
            (second, features, hidden),
            (third, hidden, features),
        ];
        let projections = projections.map(|(ty, rows, columns)| {
            let weight = d.weight(ty, rows, columns, &random_matrix(random, ty, rows, columns)).expect("a weight");
            let bias = f32s(random.normals(rows));
            let bias = shape.has_bias.then(|| d.weight(WeightType::F32, 1, rows, &bias).expect("a bias"));
            (weight, bias)
        });
        let norm = d.weight(WeightType::F32, 1, hidden, &norm).expect("a norm");
        Self { norm, projections: projections.into() }
    }

    fn linear(&self, i: usize) -> Linear<'_> {
        let (weight, bias) = &self.projections[i];
        Linear { weight, bias: bias.as_ref() }
    }

    fn output<'a>(&'a self, i: usize, out: &'a mut Buffer) -> Output<'a> {
        let Linear { weight, bias } = self.linear(i);
        Output { weight, bias, out }
    }
}

struct Run {
    x: Vec<f32>,
    attended: Vec<f32>,
}

/// A prompt of `rows` tokens through a layer, one way or the other.
fn run(d: &mut CpuDevice, shape: &Shape, rows: usize, fused: bool) -> Run {
    let mut random = Random::new(rows as u64);
    let random = &mut random;
    let layer = Layer::new(d, random, shape);
    let blocks = rows.div_ceil(PAGE_TOKENS);
    d.allocate_kv(KvShape { layers: 1, kv_heads: HEADS.kv_heads, head_dim: HEADS.head_dim, blocks }).expect("memory");
    let mut x = buffer_of(d, &random.normals(rows * shape.hidden), shape.hidden);
    let mut buffer = |columns| d.buffer(rows, columns).expect("memory");
    let (mut normed, mut delta) = (buffer(shape.hidden), buffer(shape.hidden));
    let (mut q, mut attended) = (buffer(QUERY_COLUMNS), buffer(QUERY_COLUMNS));
    let (mut k, mut v) = (buffer(KV_COLUMNS), buffer(KV_COLUMNS));
    let (mut gate, mut up) = (buffer(shape.features), buffer(shape.features));
    let frequencies: Vec<f32> = (0..HEADS.head_dim / 2).map(|i| 0.7_f32.powi(i as i32)).collect();
    let rope = Rope { dimensions: HEADS.head_dim, neox: false, inverse_frequencies: &frequencies, magnitude: 1.0 };
    let positions: Vec<u32> = (0..rows as u32).collect();
    let table: Vec<u32> = (0..blocks as u32).rev().collect();
    let slots: Vec<u32> = positions.iter().map(|p| table[*p as usize / PAGE_TOKENS] * 16 + p % 16).collect();
    let batch = AttentionBatch {
        positions: &positions,
        cu_seqlens_q: &[0, rows as u32],
        block_tables: &table,
        block_table_starts: &[0, blocks as u32],
    };
    if fused {
        let block = AttentionBlock {
            norm: &layer.norm,
            eps: EPS,
            q: layer.linear(0),
            k: layer.linear(1),
            v: layer.linear(2),
            output: layer.linear(3),
            rope,
            heads: HEADS,
        };
        let buffers = AttentionBuffers {
            x: &mut x,
            normed: &mut normed,
            q: &mut q,
            k: &mut k,
            v: &mut v,
            attended: &mut attended,
        };
        d.attention_block(0, &block, &batch, &slots, buffers);
        let (gate_weights, up_weights, down) = (layer.linear(4), layer.linear(5), layer.linear(6));
        let block = FeedForwardBlock { norm: &layer.norm, eps: EPS, gate: gate_weights, up: up_weights, down };
        let buffers = FeedForwardBuffers { x: &mut x, normed: &mut normed, gate: &mut gate };
        d.feed_forward_block(rows, &block, buffers);
    } else {
        d.rms_norm(&x, rows, &layer.norm, EPS, &mut normed);
        d.linear(&normed, rows, [layer.output(0, &mut q), layer.output(1, &mut k), layer.output(2, &mut v)]);
        d.rope(&mut q, rows, HEADS.head_dim, &positions, &rope);
        d.rope(&mut k, rows, HEADS.head_dim, &positions, &rope);
        d.write_kv(0, &k, &v, &slots);
        d.attention(0, &q, &batch, &HEADS, &mut attended);
        d.linear(&attended, rows, [layer.output(3, &mut delta)]);
        d.add(&mut x, &delta, rows);
        d.rms_norm(&x, rows, &layer.norm, EPS, &mut normed);
        d.linear(&normed, rows, [layer.output(4, &mut gate), layer.output(5, &mut up)]);
        d.silu_mul(&mut gate, &up, rows);
        d.linear(&gate, rows, [layer.output(6, &mut delta)]);
        d.add(&mut x, &delta, rows);
    }
    let padding = |row| x.padded_row(row)[shape.hidden..].iter().all(|x| x.to_bits() == 0);
    assert!((0..rows).all(padding), "padding is zero");
    Run { x: values_of(&x, rows), attended: values_of(&attended, rows) }
}

#[test]
fn a_layer_has_the_bits_of_its_operations() {
    use WeightType::{F16, F32, Q4_1, Q5_0, Q8_0};
    let shapes = [
        Shape { hidden: 96, features: 160, types: [Q4_1, Q8_0, Q4_1], has_bias: true },
        Shape { hidden: 256, features: 256, types: [Q5_0, Q4_1, F16], has_bias: false },
        Shape { hidden: 40, features: 72, types: [F32; 3], has_bias: true },
    ];
    for activations in [Activations::Int8, Activations::Int16, Activations::F32] {
        for threads in [1, 2] {
            for (shape, rows) in shapes.iter().zip([[1, 150], [3, 65], [2, 20]]) {
                check(activations, threads, shape, rows);
            }
        }
    }
}

fn check(activations: Activations, threads: usize, shape: &Shape, rows: [usize; 2]) {
    for rows in rows {
        let pairs = devices(threads, activations, KvType::Bf16).into_iter();
        for (mut one, mut other) in pairs.zip(devices(threads, activations, KvType::Bf16)) {
            let (fused, plain) = (run(&mut one, shape, rows, true), run(&mut other, shape, rows, false));
            let what = format!("{activations:?}, {}, {threads} threads, {rows} rows", one.isa());
            assert!(fused.x.iter().all(|x| x.is_finite()) && fused.x.iter().any(|&x| x != 0.0), "{what}");
            assert_eq!(bits_of(&fused.attended), bits_of(&plain.attended), "{what}: attended");
            assert_eq!(bits_of(&fused.x), bits_of(&plain.x), "{what}");
        }
    }
}

#[test]
fn a_profile_counts_every_phase_once_it_is_on() {
    let shape = Shape { hidden: 96, features: 160, types: [WeightType::Q8_0; 3], has_bias: false };
    let mut d = devices(2, Activations::Int8, KvType::Bf16).pop().expect("a device");
    run(&mut d, &shape, 40, true);
    assert!(d.take_profile().is_empty(), "off");
    d.set_profiling(true);
    run(&mut d, &shape, 40, true);
    let profile = d.take_profile();
    assert_eq!(profile.iter().map(|time| time.phase).collect::<Vec<_>>(), Phase::ALL);
    assert!(profile.iter().all(|time| time.busy > Duration::ZERO), "{profile:?}");
    assert!(d.take_profile().iter().all(|time| time.busy.is_zero()), "taken");
}
