//! Times a whole forward step in the shape of SmolLM2-135M (Q4_1, embeddings Q8_0, random numbers), without sampling:
//!
//! `cargo run --release -p llmd-kernels --example step_speed [ISA] [f32] [profile]`, where ISA is one of `portable`, `avx2`,
//! `avx-vnni`, `avx512`, `neon`, `neon-dotprod` and `neon-i8mm`.
//!
//! Decoding 1, 8 and 32 sequences at a context of 256, and a prompt of 512 (with `f32`: 2,000) tokens in one go.
//! With `profile`, where the time of the layers goes.

use llmd_kernels::cpu::{
    Activations, AttentionBatch, AttentionBlock, AttentionBuffers, AttentionHeads, Buffer, CpuDevice, CpuError,
    CpuOptions, FeedForwardBlock, FeedForwardBuffers, Isa, KvShape, KvType, Linear, Output, Rope, Weight,
};
use llmd_kernels::quant::WeightType;
use std::time::{Duration, Instant};

const HIDDEN: usize = 576;
const HEADS: usize = 9;
const KV_HEADS: usize = 3;
const HEAD_DIM: usize = 64;
const FEED_FORWARD: usize = 1536;
const LAYERS: usize = 30;
const VOCABULARY: usize = 49_152;
const CONTEXT: usize = 256;
const BLOCK: usize = 16;
const TIME_PER_CASE: Duration = Duration::from_millis(700);

struct Layer {
    norms: [Weight; 2],
    q: Weight,
    k: Weight,
    v: Weight,
    o: Weight,
    gate: Weight,
    up: Weight,
    down: Weight,
}

struct Buffers {
    x: Buffer,
    h: Buffer,
    q: Buffer,
    k: Buffer,
    v: Buffer,
    gate: Buffer,
    attended: Buffer,
    last: Buffer,
    logits: Buffer,
}

/// Random blocks with small scales.
fn matrix(device: &mut CpuDevice, ty: WeightType, rows: usize, columns: usize) -> Result<Weight, CpuError> {
    let mut state = (rows * 31 + columns) as u64 | 1;
    let mut bytes = vec![0; rows * ty.row_bytes(columns).expect("whole blocks")];
    for block in bytes.chunks_exact_mut(ty.block_bytes()) {
        for byte in block.iter_mut() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            *byte = (state >> 56) as u8;
        }
        // Half-precision scale 0.001 (and minimum -0.0075 for Q4_1).
        let halves: &[u8] = if ty == WeightType::Q4_1 { &[0x19, 0x14, 0xae, 0x9f] } else { &[0x19, 0x04] };
        block[..halves.len()].copy_from_slice(halves);
    }
    device.weight(ty, rows, columns, &bytes)
}

fn ones(device: &mut CpuDevice, columns: usize) -> Result<Weight, CpuError> {
    device.weight(WeightType::F32, 1, columns, &1_f32.to_le_bytes().repeat(columns))
}

fn layer(device: &mut CpuDevice) -> Result<Layer, CpuError> {
    let q4 = WeightType::Q4_1;
    Ok(Layer {
        norms: [ones(device, HIDDEN)?, ones(device, HIDDEN)?],
        q: matrix(device, q4, HEADS * HEAD_DIM, HIDDEN)?,
        k: matrix(device, q4, KV_HEADS * HEAD_DIM, HIDDEN)?,
        v: matrix(device, q4, KV_HEADS * HEAD_DIM, HIDDEN)?,
        o: matrix(device, q4, HIDDEN, HIDDEN)?,
        gate: matrix(device, q4, FEED_FORWARD, HIDDEN)?,
        up: matrix(device, q4, FEED_FORWARD, HIDDEN)?,
        down: matrix(device, q4, HIDDEN, FEED_FORWARD)?,
    })
}

struct Step {
    tokens: Vec<u32>,
    positions: Vec<u32>,
    slots: Vec<u32>,
    cu_seqlens_q: Vec<u32>,
    block_tables: Vec<u32>,
    block_table_starts: Vec<u32>,
    logit_rows: Vec<u32>,
}

impl Step {
    /// `sequences` sequences that compute positions `first..end` each.
    fn new(sequences: usize, first: usize, end: usize) -> Self {
        let blocks = end.div_ceil(BLOCK);
        let rows = sequences * (end - first);
        let position = |row: usize| first + row % (end - first);
        // Neighbouring blocks of a sequence lie apart.
        let block = |s: usize, i: usize| (i * sequences + s) as u32;
        Self {
            tokens: (0..rows).map(|row| (row * 7919 % VOCABULARY) as u32).collect(),
            positions: (0..rows).map(|row| position(row) as u32).collect(),
            slots: (0..rows)
                .map(|row| block(row / (end - first), position(row) / BLOCK) * 16 + (position(row) % BLOCK) as u32)
                .collect(),
            cu_seqlens_q: (0..=sequences).map(|s| (s * (end - first)) as u32).collect(),
            block_tables: (0..sequences * blocks).map(|i| block(i / blocks, i % blocks)).collect(),
            block_table_starts: (0..=sequences).map(|s| (s * blocks) as u32).collect(),
            logit_rows: (1..=sequences).map(|s| (s * (end - first) - 1) as u32).collect(),
        }
    }
}

/// Where the time of steps goes.
#[derive(Default)]
struct Times {
    logits: Duration,
    all: Duration,
}

fn forward(
    d: &mut CpuDevice,
    layers: &[Layer],
    table: &Weight,
    norm: &Weight,
    b: &mut Buffers,
    s: &Step,
    t: &mut Times,
) {
    let rows = s.tokens.len();
    let frequencies: [f32; HEAD_DIM / 2] = std::array::from_fn(|i| 100_000_f32.powf(-2.0 * i as f32 / HEAD_DIM as f32));
    let rope = Rope { dimensions: HEAD_DIM, neox: false, inverse_frequencies: &frequencies, magnitude: 1.0 };
    let heads = AttentionHeads { heads: HEADS, kv_heads: KV_HEADS, head_dim: HEAD_DIM, scale: 0.125 };
    let batch = AttentionBatch {
        positions: &s.positions,
        cu_seqlens_q: &s.cu_seqlens_q,
        block_tables: &s.block_tables,
        block_table_starts: &s.block_table_starts,
    };
    let linear = |weight| Linear { weight, bias: None };
    let begin = Instant::now();
    d.embed(table, &s.tokens, &mut b.x);
    let n = s.logit_rows.len();
    for (index, layer) in layers.iter().enumerate() {
        let block = AttentionBlock {
            norm: &layer.norms[0],
            eps: 1e-5,
            q: linear(&layer.q),
            k: linear(&layer.k),
            v: linear(&layer.v),
            output: linear(&layer.o),
            rope,
            heads,
        };
        let buffers = AttentionBuffers {
            x: &mut b.x,
            normed: &mut b.h,
            q: &mut b.q,
            k: &mut b.k,
            v: &mut b.v,
            attended: &mut b.attended,
        };
        d.attention_block(index, &block, &batch, &s.slots, buffers);
        let is_last = index + 1 == layers.len();
        if is_last {
            d.gather(&b.x, &s.logit_rows, &mut b.last);
        }
        let (rows, x) = if is_last { (n, &mut b.last) } else { (rows, &mut b.x) };
        let (gate, up, down) = (linear(&layer.gate), linear(&layer.up), linear(&layer.down));
        let block = FeedForwardBlock { norm: &layer.norms[1], eps: 1e-5, gate, up, down };
        d.feed_forward_block(rows, &block, FeedForwardBuffers { x, normed: &mut b.h, gate: &mut b.gate });
    }
    d.rms_norm(&b.last, n, norm, 1e-5, &mut b.h);
    let since = Instant::now();
    d.linear(&b.h, n, [Output { weight: table, bias: None, out: &mut b.logits }]);
    t.logits += since.elapsed();
    t.all += begin.elapsed();
}

fn main() -> Result<(), CpuError> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let has = |word: &str| words.iter().any(|w| w == word);
    let isa = match () {
        () if has("portable") => Some(Isa::Portable),
        () if has("avx2") => Some(Isa::Avx2),
        () if has("avx-vnni") => Some(Isa::AvxVnni),
        () if has("avx512") => Some(Isa::Avx512Vnni),
        () if has("neon") => Some(Isa::Neon),
        () if has("neon-dotprod") => Some(Isa::NeonDotprod),
        () if has("neon-i8mm") => Some(Isa::NeonI8mm),
        () => None,
    };
    let exact = has("f32");
    let (activations, kv) = if exact { (Activations::F32, KvType::F32) } else { (Activations::Int8, KvType::Bf16) };
    let mut device = CpuDevice::new(CpuOptions { threads: None, isa, activations, kv })?;
    device.bind_caller();
    device.set_profiling(has("profile"));
    println!("{}, {} threads, {activations:?} activations, {kv:?} keys and values", device.isa(), device.threads());
    let layers = (0..LAYERS).map(|_| layer(&mut device)).collect::<Result<Vec<_>, _>>()?;
    let table = matrix(&mut device, WeightType::Q8_0, VOCABULARY, HIDDEN)?;
    let norm = ones(&mut device, HIDDEN)?;
    let prompt: usize = if exact { 2000 } else { 512 };
    let blocks = (32 * CONTEXT.div_ceil(BLOCK)).max(prompt.div_ceil(BLOCK));
    device.allocate_kv(KvShape { layers: LAYERS, kv_heads: KV_HEADS, head_dim: HEAD_DIM, blocks })?;
    let mut buffers = Buffers {
        x: device.buffer(prompt, HIDDEN)?,
        h: device.buffer(prompt, HIDDEN)?,
        q: device.buffer(prompt, HEADS * HEAD_DIM)?,
        k: device.buffer(prompt, KV_HEADS * HEAD_DIM)?,
        v: device.buffer(prompt, KV_HEADS * HEAD_DIM)?,
        gate: device.buffer(prompt, FEED_FORWARD)?,
        attended: device.buffer(prompt, HEADS * HEAD_DIM)?,
        last: device.buffer(32, HIDDEN)?,
        logits: device.buffer(32, VOCABULARY)?,
    };
    println!("{:24} {:>9} {:>9} {:>10} {:>12}", "step", "median ms", "best ms", "tok/s", "logits ms");
    for (name, sequences, first, end) in [
        ("decode 1, context 256", 1, CONTEXT - 1, CONTEXT),
        ("decode 8, context 256", 8, CONTEXT - 1, CONTEXT),
        ("decode 32, context 256", 32, CONTEXT - 1, CONTEXT),
        ("prompt, one chunk", 1, 0, prompt),
    ] {
        let step = Step::new(sequences, first, end);
        let (mut times, mut each) = (Times::default(), Vec::new());
        let begin = Instant::now();
        device.take_profile();
        while each.len() < 3 || begin.elapsed() < TIME_PER_CASE {
            let before = times.all;
            forward(&mut device, &layers, &table, &norm, &mut buffers, &step, &mut times);
            each.push(times.all - before);
        }
        each.sort_unstable();
        let (median, steps) = (each[each.len() / 2], each.len() as u32);
        println!(
            "{name:24} {:9.2} {:9.2} {:10.0} {:12.2}",
            median.as_secs_f64() * 1e3,
            each[0].as_secs_f64() * 1e3,
            step.tokens.len() as f64 / median.as_secs_f64(),
            (times.logits / steps).as_secs_f64() * 1e3,
        );
        // Milliseconds of a step, on average over threads.
        let shares = f64::from(steps) * device.threads() as f64;
        let each = |time: Duration| time.as_secs_f64() * 1e3 / shares;
        for time in device.take_profile() {
            println!("    {:28} {:9.3} busy {:9.3} waiting", time.phase.name(), each(time.busy), each(time.waiting));
        }
    }
    Ok(())
}
