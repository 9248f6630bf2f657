//! The processor as a backend: `llmd_kernels::cpu` behind the trait, and nothing more.

use super::{
    AttentionBuffers, AttentionSpec, AttentionWeights, Backend, BackendError, FeedForwardBuffers, FeedForwardWeights,
    KvSpec, Linear, LinearOutput, RopeSpec, TensorView,
};
use crate::batch::ForwardBatch;
use crate::kv_cache::block::BLOCK_TOKENS;
use llmd_kernels::cpu::{
    self, AttentionBatch, AttentionHeads, Buffer, CpuDevice, CpuError, KvShape, Output, PAGE_TOKENS, Rope, Weight,
};
pub use llmd_kernels::cpu::{Activations, CpuOptions, Isa, KvType};

// A block of the cache is a page of the kernels.
const _: () = assert!(BLOCK_TOKENS == PAGE_TOKENS);

/// Computes on the processor, with threads of its own beside the caller's.
pub struct CpuBackend {
    device: CpuDevice,
    options: CpuOptions,
}

impl CpuBackend {
    /// Starts the compute threads.
    pub fn new(options: CpuOptions) -> Result<Self, BackendError> {
        let device = CpuDevice::new(options).map_err(|error| device_error("", error))?;
        Ok(Self { device, options })
    }

    /// Compute threads, the caller's among them: no more than the processors this process may use.
    pub fn threads(&self) -> usize {
        self.device.threads()
    }
}

/// `name` is the tensor's, where there is one.
fn device_error(name: &str, error: CpuError) -> BackendError {
    match error {
        CpuError::OutOfMemory { what, bytes } => BackendError::OutOfMemory { what, bytes },
        CpuError::Unsupported { reason } => BackendError::Unsupported { name: name.to_owned(), reason },
        CpuError::NoSuchIsa(_) | CpuError::Threads(_) => BackendError::Device(error.to_string()),
    }
}

fn shape(spec: KvSpec) -> KvShape {
    let KvSpec { layers, kv_heads, head_dim, blocks } = spec;
    KvShape { layers, kv_heads, head_dim, blocks }
}

fn rope(spec: &RopeSpec) -> Rope<'_> {
    let RopeSpec { dimensions, neox, inverse_frequencies, magnitude } = spec;
    Rope { dimensions: *dimensions, neox: *neox, inverse_frequencies, magnitude: *magnitude }
}

fn attention_batch(batch: &ForwardBatch) -> AttentionBatch<'_> {
    AttentionBatch {
        positions: &batch.positions,
        cu_seqlens_q: &batch.cu_seqlens_q,
        block_tables: &batch.block_tables,
        block_table_starts: &batch.block_table_starts,
    }
}

fn heads(spec: AttentionSpec) -> AttentionHeads {
    let AttentionSpec { heads, kv_heads, head_dim, scale } = spec;
    AttentionHeads { heads, kv_heads, head_dim, scale }
}

fn linear(linear: &Linear<Weight>) -> cpu::Linear<'_> {
    cpu::Linear { weight: &linear.weight, bias: linear.bias.as_ref() }
}

impl Backend for CpuBackend {
    type Weight = Weight;
    type Buffer = Buffer;

    const FUSES_LAYERS: bool = true;

    fn bind_caller(&self) {
        self.device.bind_caller();
    }

    fn describe(&self) -> String {
        let (threads, isa) = (self.device.threads(), self.device.isa());
        let plural = if threads == 1 { "" } else { "s" };
        let activations = match self.options.activations {
            Activations::Int8 => "int8",
            Activations::Int16 => "int16",
            Activations::F32 => "f32",
        };
        let kv = match self.options.kv {
            KvType::Bf16 => "bf16",
            KvType::F16 => "f16",
            KvType::Int8 => "int8",
            KvType::F32 => "f32",
        };
        format!("cpu, {isa}, {threads} thread{plural}, {activations} activations, {kv} keys and values")
    }

    fn upload(&mut self, tensor: TensorView<'_>) -> Result<Weight, BackendError> {
        let weight = self.device.weight(tensor.ty, tensor.rows, tensor.columns, tensor.bytes);
        weight.map_err(|error| device_error(tensor.name, error))
    }

    fn buffer(&mut self, rows: usize, columns: usize) -> Result<Buffer, BackendError> {
        self.device.buffer(rows, columns).map_err(|error| device_error("activations", error))
    }

    fn allocate_kv(&mut self, spec: KvSpec) -> Result<(), BackendError> {
        self.device.allocate_kv(shape(spec)).map_err(|error| device_error("key-value cache", error))
    }

    fn kv_block_bytes(&self, spec: KvSpec) -> usize {
        self.device.kv_block_bytes(shape(spec))
    }

    fn embed(&mut self, table: &Weight, tokens: &[u32], out: &mut Buffer) {
        self.device.embed(table, tokens, out);
    }

    fn rms_norm(&mut self, x: &Buffer, rows: usize, weight: &Weight, eps: f32, out: &mut Buffer) {
        self.device.rms_norm(x, rows, weight, eps, out);
    }

    fn add(&mut self, x: &mut Buffer, y: &Buffer, rows: usize) {
        self.device.add(x, y, rows);
    }

    fn linear(&mut self, x: &Buffer, rows: usize, outputs: &mut [LinearOutput<'_, Self>]) {
        let outputs =
            outputs.iter_mut().map(|output| Output { weight: output.weight, bias: output.bias, out: output.out });
        self.device.linear(x, rows, outputs);
    }

    fn rope(&mut self, x: &mut Buffer, rows: usize, head_dim: usize, positions: &[u32], rope: &RopeSpec) {
        self.device.rope(x, rows, head_dim, positions, &self::rope(rope));
    }

    fn write_kv(&mut self, layer: usize, k: &Buffer, v: &Buffer, slot_mapping: &[u32]) {
        self.device.write_kv(layer, k, v, slot_mapping);
    }

    fn attention(&mut self, layer: usize, q: &Buffer, batch: &ForwardBatch, spec: &AttentionSpec, out: &mut Buffer) {
        self.device.attention(layer, q, &attention_batch(batch), &heads(*spec), out);
    }

    fn attention_block(
        &mut self,
        layer: usize,
        weights: &AttentionWeights<'_, Weight>,
        batch: &ForwardBatch,
        buffers: AttentionBuffers<'_, Buffer>,
    ) {
        let block = cpu::AttentionBlock {
            norm: weights.norm,
            eps: weights.eps,
            q: linear(weights.q),
            k: linear(weights.k),
            v: linear(weights.v),
            output: linear(weights.output),
            rope: rope(weights.rope),
            heads: heads(weights.spec),
        };
        let AttentionBuffers { x, normed, q, k, v, attended, delta: _ } = buffers;
        let buffers = cpu::AttentionBuffers { x, normed, q, k, v, attended };
        self.device.attention_block(layer, &block, &attention_batch(batch), &batch.slot_mapping, buffers);
    }

    fn feed_forward_block(
        &mut self,
        rows: usize,
        weights: &FeedForwardWeights<'_, Weight>,
        buffers: FeedForwardBuffers<'_, Buffer>,
    ) {
        let block = cpu::FeedForwardBlock {
            norm: weights.norm,
            eps: weights.eps,
            gate: linear(weights.gate),
            up: linear(weights.up),
            down: linear(weights.down),
        };
        let FeedForwardBuffers { x, normed, gate, up: _, delta: _ } = buffers;
        self.device.feed_forward_block(rows, &block, cpu::FeedForwardBuffers { x, normed, gate });
    }

    fn silu_mul(&mut self, gate: &mut Buffer, up: &Buffer, rows: usize) {
        self.device.silu_mul(gate, up, rows);
    }

    fn gather(&mut self, x: &Buffer, rows: &[u32], out: &mut Buffer) {
        self.device.gather(x, rows, out);
    }

    fn read(&mut self, x: &Buffer, out: &mut [f32]) -> Result<(), BackendError> {
        for (row, out) in out.chunks_mut(x.columns()).enumerate() {
            out.copy_from_slice(x.row(row));
        }
        Ok(())
    }

    fn copy_block(&mut self, from: u32, to: u32) {
        self.device.copy_block(from, to);
    }
}

#[cfg(test)]
mod tests {
    use super::super::plain;
    use super::*;
    use llmd_kernels::quant::WeightType;
    use llmd_kernels::reference;

    fn backend(options: CpuOptions) -> CpuBackend {
        CpuBackend::new(options).expect("threads")
    }

    fn numbers(n: usize, seed: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * 7919 + seed * 104_729) % 2003) as f32 / 1000.0 - 1.0).collect()
    }

    fn upload(backend: &mut CpuBackend, name: &str, rows: usize, columns: usize, values: &[f32]) -> Weight {
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let tensor = TensorView { name, ty: WeightType::F32, rows, columns, bytes: &bytes };
        backend.upload(tensor).expect("a weight")
    }

    fn assert_near(got: &[f32], want: &[f32]) {
        assert_eq!(got.len(), want.len());
        for (i, (got, want)) in got.iter().zip(want).enumerate() {
            assert!((got - want).abs() < 1e-4, "{i}: {got} for {want}");
        }
    }

    /// One layer's operations through the trait, against the reference, for two sequences of which one decodes.
    #[test]
    fn a_layer_through_the_trait() {
        const HIDDEN: usize = 24;
        const HEAD_DIM: usize = 8;
        let options = CpuOptions { kv: KvType::F32, activations: Activations::F32, ..CpuOptions::default() };
        let mut b = backend(options);
        let spec = KvSpec { layers: 1, kv_heads: 1, head_dim: HEAD_DIM, blocks: 4 };
        b.allocate_kv(spec).expect("memory");
        assert_eq!(b.kv_block_bytes(spec), (HEAD_DIM + 16) * BLOCK_TOKENS * 4, "values are padded to 16");

        let table_values = numbers(50 * HIDDEN, 1);
        let table = upload(&mut b, "token_embd", 50, HIDDEN, &table_values);
        let norm_values = numbers(HIDDEN, 2);
        let norm = upload(&mut b, "norm", 1, HIDDEN, &norm_values);
        let q_values = numbers(3 * HEAD_DIM * HIDDEN, 3);
        let q_weight = upload(&mut b, "q", 3 * HEAD_DIM, HIDDEN, &q_values);
        let bias_values = numbers(3 * HEAD_DIM, 4);
        let bias = upload(&mut b, "q.bias", 1, 3 * HEAD_DIM, &bias_values);
        let (k_values, v_values) = (numbers(HEAD_DIM * HIDDEN, 5), numbers(HEAD_DIM * HIDDEN, 6));
        let k_weight = upload(&mut b, "k", HEAD_DIM, HIDDEN, &k_values);
        let v_weight = upload(&mut b, "v", HEAD_DIM, HIDDEN, &v_values);

        // Sequence 0: 19 tokens in blocks 2 and 0; sequence 1: 3 tokens in block 3.
        let lens = [19_u32, 3];
        let blocks = [vec![2, 0], vec![3]];
        let tokens: Vec<u32> = (0..22).map(|i| i * 13 % 50).collect();
        let positions: Vec<u32> = (0..lens[0]).chain(0..lens[1]).collect();
        let slot = |s: usize, p: u32| blocks[s][p as usize / BLOCK_TOKENS] * BLOCK_TOKENS as u32 + p % 16;
        let batch = ForwardBatch {
            slot_mapping: positions.iter().enumerate().map(|(row, &p)| slot(usize::from(row >= 19), p)).collect(),
            tokens,
            positions,
            cu_seqlens_q: vec![0, 19, 22],
            context_lens: lens.to_vec(),
            block_tables: blocks.concat(),
            block_table_starts: vec![0, 2, 3],
            logit_rows: vec![18, 21],
        };
        let rows = batch.rows();

        let mut x = b.buffer(rows, HIDDEN).expect("memory");
        let mut h = b.buffer(rows, HIDDEN).expect("memory");
        let mut q = b.buffer(rows, 3 * HEAD_DIM).expect("memory");
        let (mut k, mut v) = (b.buffer(rows, HEAD_DIM).expect("memory"), b.buffer(rows, HEAD_DIM).expect("memory"));
        let mut attended = b.buffer(rows, 3 * HEAD_DIM).expect("memory");
        let mut last = b.buffer(2, 3 * HEAD_DIM).expect("memory");
        b.embed(&table, &batch.tokens, &mut x);
        b.rms_norm(&x, rows, &norm, 1e-5, &mut h);
        b.linear(
            &h,
            rows,
            &mut [
                LinearOutput { weight: &q_weight, bias: Some(&bias), out: &mut q },
                LinearOutput { weight: &k_weight, bias: None, out: &mut k },
                LinearOutput { weight: &v_weight, bias: None, out: &mut v },
            ],
        );
        let rope = RopeSpec {
            dimensions: HEAD_DIM,
            neox: false,
            inverse_frequencies: vec![1.0, 0.3, 0.1, 0.03],
            magnitude: 1.0,
        };
        b.rope(&mut q, rows, HEAD_DIM, &batch.positions, &rope);
        b.rope(&mut k, rows, HEAD_DIM, &batch.positions, &rope);
        b.write_kv(0, &k, &v, &batch.slot_mapping);
        let attention = AttentionSpec { heads: 3, kv_heads: 1, head_dim: HEAD_DIM, scale: 0.35 };
        b.attention(0, &q, &batch, &attention, &mut attended);
        b.add(&mut attended, &q, rows);
        b.silu_mul(&mut attended, &q, rows);
        b.gather(&attended, &batch.logit_rows, &mut last);
        let mut got = vec![0.0; 2 * 3 * HEAD_DIM];
        b.read(&last, &mut got).expect("memory");

        // The same in plain arithmetic.
        let embedded = batch.tokens.iter().flat_map(|&t| table_values[t as usize * HIDDEN..][..HIDDEN].to_vec());
        let h: Vec<f32> = embedded
            .collect::<Vec<f32>>()
            .chunks_exact(HIDDEN)
            .flat_map(|x| reference::rms_norm(x, &norm_values, 1e-5))
            .collect();
        let rotated = |weight: &[f32], bias: Option<&[f32]>, heads: usize| -> Vec<f32> {
            let mut out = reference::linear(&h, weight, bias, HIDDEN);
            for (i, head) in out.chunks_exact_mut(HEAD_DIM).enumerate() {
                reference::rope(head, batch.positions[i / heads], &rope.inverse_frequencies, 1.0, false);
            }
            out
        };
        let (q, k) = (rotated(&q_values, Some(&bias_values), 3), rotated(&k_values, None, 1));
        let v = reference::linear(&h, &v_values, None, HIDDEN);
        let mut want = Vec::new();
        for (row, first) in [(18, 0), (21, 19)] {
            let of = |values: &[f32]| values[first * HEAD_DIM..(row + 1) * HEAD_DIM].to_vec();
            for head in 0..3 {
                let q = &q[(row * 3 + head) * HEAD_DIM..][..HEAD_DIM];
                let attended = reference::attention(q, &of(&k), &of(&v), 0.35);
                let sum: Vec<f32> = attended.iter().zip(q).map(|(a, q)| a + q).collect();
                want.extend(reference::silu_mul(&sum, q));
            }
        }
        assert_near(&got, &want);

        // A decode of sequence 0's last token alone, from a copy of its second block, attends to the same.
        b.copy_block(0, 1);
        let decode = ForwardBatch {
            positions: vec![18],
            cu_seqlens_q: vec![0, 1],
            block_tables: vec![2, 1],
            block_table_starts: vec![0, 2],
            ..ForwardBatch::default()
        };
        let mut one = b.buffer(1, 3 * HEAD_DIM).expect("memory");
        let mut out = b.buffer(1, 3 * HEAD_DIM).expect("memory");
        let rows_of_q = q.chunks_exact(3 * HEAD_DIM).nth(18).expect("a row").to_vec();
        one.row_mut(0).copy_from_slice(&rows_of_q);
        b.attention(0, &one, &decode, &attention, &mut out);
        let mut got = vec![0.0; 3 * HEAD_DIM];
        b.read(&out, &mut got).expect("memory");
        let (k, v) = (&k[..19 * HEAD_DIM], &v[..19 * HEAD_DIM]);
        let want: Vec<f32> =
            rows_of_q.chunks_exact(HEAD_DIM).flat_map(|q| reference::attention(q, k, v, 0.35)).collect();
        assert_near(&got, &want);
    }

    /// Both halves of a layer as operations of the device, and out of plain ones: the same bits.
    #[test]
    fn fused_halves_are_the_plain_operations() {
        const HIDDEN: usize = 40;
        const HEAD_DIM: usize = 8;
        const FEATURES: usize = 72;
        let rope = RopeSpec {
            dimensions: HEAD_DIM,
            neox: true,
            inverse_frequencies: vec![1.0, 0.3, 0.1, 0.03],
            magnitude: 1.0,
        };
        let batch = ForwardBatch {
            tokens: vec![0; 20],
            positions: (0..20).collect(),
            slot_mapping: (0..20).map(|p| if p < 16 { 16 + p } else { p - 16 }).collect(),
            cu_seqlens_q: vec![0, 20],
            context_lens: vec![20],
            block_tables: vec![1, 0],
            block_table_starts: vec![0, 2],
            logit_rows: vec![19],
        };
        let run = |fused: bool| {
            let mut b = backend(CpuOptions { threads: Some(2), ..CpuOptions::default() });
            b.allocate_kv(KvSpec { layers: 1, kv_heads: 2, head_dim: HEAD_DIM, blocks: 2 }).expect("memory");
            let linear = |b: &mut CpuBackend, rows: usize, columns: usize, seed: usize| Linear {
                weight: upload(b, "w", rows, columns, &numbers(rows * columns, seed)),
                bias: Some(upload(b, "bias", 1, rows, &numbers(rows, seed + 100))),
            };
            let norm = upload(&mut b, "norm", 1, HIDDEN, &numbers(HIDDEN, 1));
            let [q, output] =
                [(4 * HEAD_DIM, HIDDEN, 2), (HIDDEN, 4 * HEAD_DIM, 3)].map(|(r, c, s)| linear(&mut b, r, c, s));
            let [k, v] = [4, 5].map(|seed| linear(&mut b, 2 * HEAD_DIM, HIDDEN, seed));
            let [gate, up] = [6, 7].map(|seed| linear(&mut b, FEATURES, HIDDEN, seed));
            let down = linear(&mut b, HIDDEN, FEATURES, 8);
            let spec = AttentionSpec { heads: 4, kv_heads: 2, head_dim: HEAD_DIM, scale: 0.35 };
            let (q, k, v, output) = (&q, &k, &v, &output);
            let attention = AttentionWeights { norm: &norm, eps: 1e-5, q, k, v, output, rope: &rope, spec };
            let feed_forward = FeedForwardWeights { norm: &norm, eps: 1e-5, gate: &gate, up: &up, down: &down };
            let mut buffers = [HIDDEN, HIDDEN, 32, 16, 16, 32, HIDDEN, FEATURES, FEATURES]
                .map(|columns| b.buffer(batch.rows(), columns).expect("memory"));
            let [x, normed, q, k, v, attended, delta, gate, up] = &mut buffers;
            for row in 0..batch.rows() {
                x.row_mut(row).copy_from_slice(&numbers(HIDDEN, row + 9));
            }
            if fused {
                b.attention_block(0, &attention, &batch, AttentionBuffers { x, normed, q, k, v, attended, delta });
                b.feed_forward_block(batch.rows(), &feed_forward, FeedForwardBuffers { x, normed, gate, up, delta });
            } else {
                let buffers = AttentionBuffers { x, normed, q, k, v, attended, delta };
                plain::attention_block(&mut b, 0, &attention, &batch, buffers);
                let buffers = FeedForwardBuffers { x, normed, gate, up, delta };
                plain::feed_forward_block(&mut b, batch.rows(), &feed_forward, buffers);
            }
            let mut values = vec![0.0; batch.rows() * HIDDEN];
            b.read(&buffers[0], &mut values).expect("memory");
            values
        };
        let (fused, plain) = (run(true), run(false));
        assert!(fused.iter().all(|x| x.is_finite()) && fused != vec![0.0; fused.len()]);
        assert!(fused.iter().zip(&plain).all(|(a, b)| a.to_bits() == b.to_bits()));
    }

    #[test]
    fn errors_carry_the_tensor_or_the_bytes() {
        let mut b = backend(CpuOptions::default());
        let tensor =
            TensorView { name: "blk.3.ffn_up.weight", ty: WeightType::Q4_K, rows: 2, columns: 100, bytes: &[0; 99] };
        let error = b.upload(tensor).err().expect("100 is not whole blocks");
        assert!(matches!(&error, BackendError::Unsupported { name, .. } if name == "blk.3.ffn_up.weight"), "{error}");
        let spec = KvSpec { layers: 30, kv_heads: 3, head_dim: 64, blocks: 1 << 27 };
        assert!(matches!(b.allocate_kv(spec), Err(BackendError::OutOfMemory { .. })));
        assert!(matches!(b.buffer(usize::MAX, 2), Err(BackendError::OutOfMemory { .. })));
    }

    #[test]
    fn it_describes_itself() {
        let b = backend(CpuOptions { threads: Some(1), isa: Some(Isa::Portable), ..CpuOptions::default() });
        assert_eq!(b.describe(), "cpu, portable, 1 thread, int8 activations, bf16 keys and values");
    }
}
