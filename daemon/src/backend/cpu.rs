//! The processor as a backend: `llmd_kernels::cpu` behind the trait, and nothing more.

use super::{AttentionSpec, Backend, BackendError, KvSpec, LinearOutput, RopeSpec, TensorView};
use crate::batch::ForwardBatch;
use crate::kv_cache::block::BLOCK_TOKENS;
pub use llmd_kernels::cpu::{Activations, CpuOptions, Isa, KvType};
use llmd_kernels::cpu::{
    AttentionBatch, AttentionHeads, Buffer, CpuDevice, CpuError, KvShape, Output, PAGE_TOKENS, Rope, Weight,
};

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

    /// Binds the calling thread, which is to be the one that calls all operations, to the processor left for it. Threads
    /// it starts later inherit that. Without it the scheduler may put the caller on a worker's processor for a while.
    pub fn bind_caller(&self) {
        self.device.bind_caller();
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

impl Backend for CpuBackend {
    type Weight = Weight;
    type Buffer = Buffer;

    fn describe(&self) -> String {
        let (threads, isa) = (self.device.threads(), self.device.isa());
        let plural = if threads == 1 { "" } else { "s" };
        let activations = match self.options.activations {
            Activations::Int8 => "int8",
            Activations::F32 => "f32",
        };
        let kv = match self.options.kv {
            KvType::Bf16 => "bf16",
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
        let rope = Rope {
            dimensions: rope.dimensions,
            neox: rope.neox,
            inverse_frequencies: &rope.inverse_frequencies,
            magnitude: rope.magnitude,
        };
        self.device.rope(x, rows, head_dim, positions, &rope);
    }

    fn write_kv(&mut self, layer: usize, k: &Buffer, v: &Buffer, slot_mapping: &[u32]) {
        self.device.write_kv(layer, k, v, slot_mapping);
    }

    fn attention(&mut self, layer: usize, q: &Buffer, batch: &ForwardBatch, spec: &AttentionSpec, out: &mut Buffer) {
        let batch = AttentionBatch {
            positions: &batch.positions,
            cu_seqlens_q: &batch.cu_seqlens_q,
            block_tables: &batch.block_tables,
            block_table_starts: &batch.block_table_starts,
        };
        let AttentionSpec { heads, kv_heads, head_dim, scale } = *spec;
        self.device.attention(layer, q, &batch, &AttentionHeads { heads, kv_heads, head_dim, scale }, out);
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
