//! A model of one layer, small, for what is counted in steps.

use llmd_kernels::cpu::{
    AttentionBatch, AttentionBlock, AttentionBuffers, AttentionHeads, Buffer, CpuDevice, CpuOptions, FeedForwardBlock,
    FeedForwardBuffers, KvShape, Linear, Output, Rope, Weight,
};
use llmd_kernels::quant::WeightType;

/// Most rows of a step.
pub const ROWS: usize = 200;
/// Context of a step of one row: more than a piece of attention.
pub const CONTEXT: usize = 400;
const COLUMNS: usize = 128;
const BLOCKS: usize = 40;

/// The layer, and an embedding that is also the output.
pub struct Model {
    device: CpuDevice,
    matrix: Weight,
    norm: Weight,
    buffers: [Buffer; 7],
}

impl Model {
    /// On a new device.
    pub fn new(options: CpuOptions) -> Self {
        let mut device = CpuDevice::new(options).expect("a device");
        let bytes = vec![0x11; COLUMNS * WeightType::Q4_1.row_bytes(COLUMNS).expect("whole blocks")];
        let matrix = device.weight(WeightType::Q4_1, COLUMNS, COLUMNS, &bytes).expect("a weight");
        let norm = device.weight(WeightType::F32, 1, COLUMNS, &[0x3f; COLUMNS * 4]).expect("a weight");
        device.allocate_kv(KvShape { layers: 1, kv_heads: 2, head_dim: 64, blocks: BLOCKS }).expect("memory");
        let buffers = [(); 7].map(|()| device.buffer(ROWS, COLUMNS).expect("memory"));
        device.bind_caller();
        Self { device, matrix, norm, buffers }
    }

    /// One forward pass: a prompt of `ROWS`, or one row at `CONTEXT`.
    pub fn step(&mut self, is_prompt: bool) {
        let mut positions = [CONTEXT as u32 - 1; ROWS];
        if is_prompt {
            positions.iter_mut().enumerate().for_each(|(i, position)| *position = i as u32);
        }
        let rows = if is_prompt { ROWS } else { 1 };
        let positions = &positions[..rows];
        let mut blocks = [0; BLOCKS];
        blocks.iter_mut().enumerate().for_each(|(i, block)| *block = i as u32);
        let frequencies = [0.1; 32];
        let batch = AttentionBatch {
            positions,
            cu_seqlens_q: &[0, rows as u32],
            block_tables: &blocks,
            block_table_starts: &[0, BLOCKS as u32],
        };
        let [x, normed, q, k, v, attended, out] = &mut self.buffers;
        let linear = Linear { weight: &self.matrix, bias: Some(&self.norm) };
        let attention = AttentionBlock {
            norm: &self.norm,
            eps: 1e-5,
            q: linear,
            k: linear,
            v: linear,
            output: linear,
            rope: Rope { dimensions: 64, neox: true, inverse_frequencies: &frequencies, magnitude: 1.0 },
            heads: AttentionHeads { heads: 2, kv_heads: 2, head_dim: 64, scale: 0.1 },
        };
        let feed_forward = FeedForwardBlock { norm: &self.norm, eps: 1e-5, gate: linear, up: linear, down: linear };
        self.device.embed(&self.matrix, &[7; ROWS][..rows], x);
        let buffers = AttentionBuffers { x, normed, q, k, v, attended };
        self.device.attention_block(0, &attention, &batch, positions, buffers);
        self.device.feed_forward_block(rows, &feed_forward, FeedForwardBuffers { x, normed, gate: attended });
        self.device.linear(x, rows, [Output { weight: &self.matrix, bias: None, out }]);
    }
}
