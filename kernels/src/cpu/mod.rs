//! The operations of a transformer on the processor.
//!
//! [`CpuDevice`] owns threads, scratch and the key-value memory; weights and activations are values of their own. All of it
//! is allocated by [`CpuDevice::weight`], [`CpuDevice::buffer`] and [`CpuDevice::allocate_kv`]; operations allocate nothing.
//!
//! Within one instruction set and one [`CpuOptions`], a row's result has the same bits whatever rows stand beside it, however many
//! threads there are, and wherever a prompt was cut: every sum runs in an order fixed by the row's own indices.

mod attention;
mod buffer;
mod elementwise;
#[cfg(target_arch = "x86_64")]
mod gemm_avx2;
#[cfg(target_arch = "x86_64")]
mod gemm_avx512;
mod gemm_f32;
#[cfg(target_arch = "aarch64")]
mod gemm_neon;
mod gemm_portable;
mod isa;
mod kv;
mod layer;
mod linear;
mod pace;
mod panel;
pub mod peaks;
mod pool;
mod profile;
mod region;
mod rope;
mod simd;
#[cfg(target_arch = "aarch64")]
mod simd_neon;
#[cfg(target_arch = "x86_64")]
mod simd_x86;
#[cfg(test)]
mod tests;
mod topology;
mod weight;

pub use attention::{AttentionBatch, AttentionHeads};
pub use buffer::Buffer;
pub use isa::Isa;
pub use kv::{KvShape, PAGE_TOKENS};
pub use layer::{AttentionBlock, AttentionBuffers, FeedForwardBlock, FeedForwardBuffers, Linear};
pub use linear::Output;
pub use profile::{Phase, PhaseTime};
pub use region::lock_memory;
pub use rope::Rope;
pub use weight::Weight;

use crate::quant::WeightType;
use buffer::ROW_PADDING;
use isa::Selected;
use kv::KvCache;
use linear::{ActivationScratch, ScratchPerThread};
use pool::{Pool, split};
use profile::Profile;
use rope::RopeTable;

/// Elements an operation must touch to be worth waking other threads for: some 2 us of one core.
pub(crate) const PARALLEL_ELEMENTS_MIN: usize = 16 * 1024;

/// How activations meet quantised weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Activations {
    /// Rounded to 8 bits per 32 elements, for integer dot products: about 0.5 % (root mean square) of a product's size.
    #[default]
    Int8,
    /// Rounded to 8 bits per 32 elements, and what that leaves to 8 bits more: some 15 bits in two planes, each of which
    /// takes its own integer dot products. Weights are read once for both, so few rows cost hardly more than with `Int8`,
    /// and many rows up to twice as much.
    Int16,
    /// Kept as they are; weights are turned to f32 as they are read. Slower, and exact but for the order of f32 sums.
    F32,
}

impl Activations {
    /// Integer planes that make up an activation; none where activations stay f32.
    pub(crate) fn planes(self) -> usize {
        match self {
            Activations::Int8 => 1,
            Activations::Int16 => 2,
            Activations::F32 => 0,
        }
    }
}

/// How keys and values are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KvType {
    /// bfloat16: half the memory, 0.2 % (root mean square) error of each number.
    #[default]
    Bf16,
    /// Half precision: as much memory, an eighth of the error; what is beyond 65,504 is cut off there.
    F16,
    /// Rounded to 8 bits, with one factor for a token's head: a little more than a quarter of the memory.
    Int8,
    /// As computed.
    F32,
}

impl KvType {
    /// All of them, the default first.
    pub const ALL: [KvType; 4] = [KvType::Bf16, KvType::F16, KvType::Int8, KvType::F32];

    /// Bytes of a number; those of `Int8` have factors beside them.
    pub(crate) fn bytes(self) -> usize {
        match self {
            KvType::Int8 => 1,
            KvType::Bf16 | KvType::F16 => 2,
            KvType::F32 => 4,
        }
    }
}

/// How a device computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CpuOptions {
    /// Compute threads, the caller among them; at most the processors of the affinity mask. None: one for each core in
    /// the mask and the control group's quota.
    pub threads: Option<usize>,
    /// Instructions to use; None: the best there are.
    pub isa: Option<Isa>,
    /// Precision of activations.
    pub activations: Activations,
    /// Precision of keys and values.
    pub kv: KvType,
}

/// What can go wrong. Operations on what was allocated cannot.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    /// The system refused memory.
    #[error("cannot allocate {bytes} bytes for {what}")]
    OutOfMemory {
        /// What it was for.
        what: &'static str,
        /// How much.
        bytes: usize,
    },
    /// A weight or shape there is no kernel for.
    #[error("{reason}")]
    Unsupported {
        /// Why not.
        reason: String,
    },
    /// The processor lacks the instructions asked for.
    #[error("this processor has no {0}")]
    NoSuchIsa(Isa),
    /// Threads could not be started.
    #[error("cannot start compute threads: {0}")]
    Threads(#[from] std::io::Error),
}

/// A processor as a device. Shapes that don't fit each other are a fault of the caller, and panic.
pub struct CpuDevice {
    isa: Selected,
    options: CpuOptions,
    pool: Pool,
    activations: ActivationScratch,
    /// What the feed-forward part's second projection takes, quantised while others still read `activations`.
    gated: ActivationScratch,
    profile: Option<Box<Profile>>,
    weight_scratch: ScratchPerThread,
    attention_scratch: ScratchPerThread,
    rope: RopeTable,
    /// Rows and columns of the largest buffers, which scratch is sized for.
    rows_max: usize,
    columns_max: usize,
    kv: Option<KvCache>,
}

impl CpuDevice {
    /// Starts the threads.
    pub fn new(options: CpuOptions) -> Result<Self, CpuError> {
        let wanted = options.isa.unwrap_or_else(Isa::detect);
        let pool = Pool::new(options.threads)?;
        Ok(Self {
            isa: Selected::new(wanted).ok_or(CpuError::NoSuchIsa(wanted))?,
            options,
            activations: ActivationScratch::new(options.activations.planes(), 0)?,
            gated: ActivationScratch::new(options.activations.planes(), 0)?,
            profile: None,
            weight_scratch: ScratchPerThread::new("products of weights", pool.threads_max(), 0)?,
            attention_scratch: ScratchPerThread::new("attention scores", pool.threads_max(), 0)?,
            rope: RopeTable::default(),
            rows_max: 0,
            columns_max: 0,
            kv: None,
            pool,
        })
    }

    /// The instructions in use.
    pub fn isa(&self) -> Isa {
        self.isa.isa()
    }

    /// Compute threads at most, the caller among them; fewer compute while other programs keep them from running.
    pub fn threads(&self) -> usize {
        self.pool.threads_max()
    }

    /// Counts from now on where the time of layers goes, or stops counting; counting costs a few clock readings a layer.
    pub fn set_profiling(&mut self, on: bool) {
        self.profile = on.then(Box::default);
    }

    /// Time of each phase since the last call, summed over layers and threads; empty unless profiling is on.
    pub fn take_profile(&mut self) -> Vec<PhaseTime> {
        self.profile.as_ref().map_or_else(Vec::new, |profile| profile.take().to_vec())
    }

    /// Binds the calling thread, which is about to compute, to the processor that was left for it. Threads it starts later
    /// inherit that.
    pub fn bind_caller(&self) {
        self.pool.bind_caller();
    }

    /// Takes a weight over: (rows, columns) = (output features, input features), row-major, in blocks of `ty`.
    pub fn weight(&mut self, ty: WeightType, rows: usize, columns: usize, bytes: &[u8]) -> Result<Weight, CpuError> {
        let weight = Weight::new(&mut self.pool, self.options.activations, ty, rows, columns, bytes)?;
        let scratch = match weight.operand() {
            weight::Operand::Rows(_) => gemm_f32::scratch_len(columns),
            weight::Operand::Panels(_) => linear::planes_scratch_len(self.options.activations.planes()),
        };
        let scratch = layer::PRODUCTS_LEN + scratch;
        if scratch > self.weight_scratch.len() {
            self.weight_scratch = ScratchPerThread::new("products of weights", self.pool.threads_max(), scratch)?;
        }
        Ok(weight)
    }

    /// Allocates activations, zeroed, and whatever scratch operations on them need.
    pub fn buffer(&mut self, rows: usize, columns: usize) -> Result<Buffer, CpuError> {
        let buffer = Buffer::new(rows, columns)?;
        let planes = self.options.activations.planes();
        let len = rows * columns.next_multiple_of(ROW_PADDING);
        if planes * len > self.activations.len() {
            self.activations = ActivationScratch::new(planes, len)?;
            self.gated = ActivationScratch::new(planes, len)?;
        }
        self.rows_max = self.rows_max.max(rows);
        self.columns_max = self.columns_max.max(columns);
        self.reserve_rope();
        Ok(buffer)
    }

    /// Allocates the key-value memory, in place of an earlier one.
    pub fn allocate_kv(&mut self, shape: KvShape) -> Result<(), CpuError> {
        self.kv = None;
        self.kv = Some(KvCache::new(shape, self.options.kv)?);
        let len = attention::scratch_len(&shape);
        self.attention_scratch = ScratchPerThread::new("attention scores", self.pool.threads_max(), len)?;
        self.reserve_rope();
        Ok(())
    }

    /// Bytes of one block over all layers, keys and values.
    pub fn kv_block_bytes(&self, shape: KvShape) -> usize {
        shape.block_bytes(self.options.kv)
    }

    fn reserve_rope(&mut self) {
        if let Some(kv) = &self.kv {
            self.rope.reserve(self.rows_max, kv.shape.head_dim);
        }
    }

    fn kv(&self) -> &KvCache {
        self.kv.as_ref().expect("allocate_kv comes before operations on the cache")
    }

    /// Runs `part` over ranges of `rows` that cover them, on all threads when `elements` are worth it.
    fn over_rows(&mut self, rows: usize, elements: usize, part: impl Fn(std::ops::Range<usize>) + Sync) {
        if elements < PARALLEL_ELEMENTS_MIN {
            return part(0..rows);
        }
        let threads = self.pool.threads();
        self.pool.run(&|index| part(split(rows, index, threads)));
    }

    /// out[t] = table[tokens[t]], exactly as the file has it.
    pub fn embed(&mut self, table: &Weight, tokens: &[u32], out: &mut Buffer) {
        assert_eq!(table.columns(), out.columns(), "columns");
        assert!(tokens.len() <= out.rows(), "rows");
        let (columns, rows) = (out.columns(), out.pointer());
        self.over_rows(tokens.len(), tokens.len() * rows.stride, |range| {
            for row in range {
                // SAFETY: the row exists, ranges are disjoint, and `out` is ours alone.
                let out = unsafe { std::slice::from_raw_parts_mut(rows.row(row), rows.stride) };
                let (values, padding) = out.split_at_mut(columns);
                table.read_row(tokens[row] as usize, values);
                padding.fill(0.0);
            }
        });
    }

    /// out = x / sqrt(mean(x^2) + eps) * weight, per row.
    pub fn rms_norm(&mut self, x: &Buffer, rows: usize, weight: &Weight, eps: f32, out: &mut Buffer) {
        assert!(x.columns() == out.columns() && x.columns() == weight.columns(), "columns");
        assert!(rows <= x.rows() && rows <= out.rows(), "rows");
        let weight = weight.vector().expect("the weight of a norm is a vector");
        let (isa, columns, x, out) = (self.isa, x.columns(), x.pointer(), out.pointer());
        assert_eq!(weight.len(), x.stride);
        self.over_rows(rows, rows * x.stride, |range| {
            // SAFETY: rows and strides were checked; ranges are disjoint; `out` is borrowed exclusively.
            unsafe { elementwise::rms_norm(isa, x, range, columns, weight, eps, out) }
        });
    }

    /// x += y.
    pub fn add(&mut self, x: &mut Buffer, y: &Buffer, rows: usize) {
        assert_eq!(x.columns(), y.columns(), "columns");
        assert!(rows <= x.rows() && rows <= y.rows(), "rows");
        let (isa, x, y) = (self.isa, x.pointer(), y.pointer());
        // SAFETY: rows and strides were checked; ranges are disjoint; `x` is borrowed exclusively.
        self.over_rows(rows, rows * x.stride, |range| unsafe { elementwise::add(isa, x, y, range) });
    }

    /// gate = silu(gate) * up.
    pub fn silu_mul(&mut self, gate: &mut Buffer, up: &Buffer, rows: usize) {
        assert_eq!(gate.columns(), up.columns(), "columns");
        assert!(rows <= gate.rows() && rows <= up.rows(), "rows");
        let (isa, gate, up) = (self.isa, gate.pointer(), up.pointer());
        // SAFETY: rows and strides were checked; ranges are disjoint; `gate` is borrowed exclusively.
        self.over_rows(rows, rows * gate.stride, |range| unsafe { elementwise::silu_mul(isa, gate, up, range) });
    }

    /// out[i] = x[rows[i]].
    pub fn gather(&mut self, x: &Buffer, rows: &[u32], out: &mut Buffer) {
        assert_eq!(x.columns(), out.columns(), "columns");
        for (i, &row) in rows.iter().enumerate() {
            out.row_mut(i).copy_from_slice(x.row(row as usize));
        }
    }

    /// For each output: out = x * weight^T (+ bias). x is quantised once for all of them, if any needs it.
    pub fn linear<'a>(&mut self, x: &Buffer, rows: usize, outputs: impl IntoIterator<Item = Output<'a>>) {
        assert!(rows <= x.rows(), "rows");
        let checked = outputs.into_iter().inspect(|output| {
            assert_eq!(output.weight.columns(), x.columns(), "input features");
            assert_eq!(output.weight.rows(), output.out.columns(), "output features");
            assert!(output.bias.is_none_or(|bias| bias.columns() == output.out.columns()), "bias");
            assert!(rows <= output.out.rows(), "rows");
        });
        linear::linear(self.isa, &mut self.pool, &mut self.activations, &self.weight_scratch, x, rows, checked);
    }

    /// Rotates the heads of each row of x, (rows, heads * head_dim), by its position.
    pub fn rope(&mut self, x: &mut Buffer, rows: usize, head_dim: usize, positions: &[u32], rope: &Rope<'_>) {
        assert!(rows <= x.rows() && rows == positions.len(), "rows");
        assert!(x.columns().is_multiple_of(head_dim), "heads of {head_dim}");
        let dimensions = rope.dimensions;
        assert!(dimensions <= head_dim && dimensions >= 2, "{dimensions} rotated of {head_dim}");
        assert_eq!(rope.inverse_frequencies.len() * 2, dimensions, "frequencies");
        let (isa, heads, rows_of_x) = (self.isa, x.columns() / head_dim, x.pointer());
        let mut table = std::mem::take(&mut self.rope);
        let values = table.fill(positions, rope);
        self.over_rows(rows, rows * rows_of_x.stride, |range| {
            // SAFETY: the shapes were checked; ranges are disjoint; `x` is borrowed exclusively.
            unsafe { rope::rotate(isa, rows_of_x, range, heads, head_dim, dimensions, rope.neox, values) }
        });
        self.rope = table;
    }

    /// Writes each row's key and value, (rows, kv_heads * head_dim), into its slot (block * `PAGE_TOKENS` + offset) of `layer`.
    pub fn write_kv(&mut self, layer: usize, k: &Buffer, v: &Buffer, slot_mapping: &[u32]) {
        let kv = self.kv();
        let (ty, shape, pages) = (kv.ty, kv.shape, kv.layer(layer));
        let (heads, head_dim) = (shape.kv_heads, shape.head_dim);
        assert!(k.columns() == heads * head_dim && v.columns() == heads * head_dim, "columns");
        assert!(slot_mapping.len() <= k.rows() && slot_mapping.len() <= v.rows(), "rows");
        let (k, v) = (k.pointer(), v.pointer());
        let write = |share: usize, shares: usize| {
            for (row, &slot) in slot_mapping.iter().enumerate() {
                // By block, so that even a slot named twice is written by one thread only.
                if slot as usize / PAGE_TOKENS % shares != share {
                    continue;
                }
                // SAFETY: the shapes were checked, the block is checked inside, and it belongs to this thread.
                unsafe { kv::write(ty, pages, slot, &shape, k.row(row), v.row(row)) };
            }
        };
        let threads = self.pool.threads();
        // A scattered store takes as long as several elements of other operations.
        if slot_mapping.len() * heads * head_dim * 4 < PARALLEL_ELEMENTS_MIN {
            write(0, 1);
        } else {
            self.pool.run(&|index| write(index, threads));
        }
    }

    /// Causal attention of every row over its own sequence's positions 0..=position, reading the cache.
    pub fn attention(
        &mut self,
        layer: usize,
        q: &Buffer,
        batch: &AttentionBatch<'_>,
        heads: &AttentionHeads,
        out: &mut Buffer,
    ) {
        let kv = self.kv();
        let (ty, shape, pages) = (kv.ty, kv.shape, kv.layer(layer));
        assert!(heads.kv_heads == shape.kv_heads && heads.head_dim == shape.head_dim, "{heads:?} in {shape:?}");
        let columns = heads.heads * heads.head_dim;
        assert!(q.columns() == columns && out.columns() == columns, "columns");
        let rows = batch.positions.len();
        assert!(rows <= q.rows() && rows <= out.rows(), "rows");
        attention::check(batch, heads);
        let (isa, q, out, scratch) = (self.isa, q.pointer(), out.pointer(), &self.attention_scratch);
        self.pool.run_team(&|member| {
            let share = (member.index, member.threads);
            // SAFETY: shapes and batch were checked, scratch was sized with the cache, and `out` is borrowed exclusively.
            unsafe { attention::attention(isa, ty, batch, heads, share, q, pages, &shape, out, scratch) };
            if attention::may_split(batch, member.threads) {
                member.meet();
                // SAFETY: as above, and all threads are through with their parts.
                unsafe { attention::join(isa, batch, heads, share, &shape, out, scratch) };
            }
        });
    }

    /// Copies all layers of block `from` to block `to`.
    pub fn copy_block(&mut self, from: u32, to: u32) {
        self.kv.as_mut().expect("allocate_kv comes before operations on the cache").copy_block(from, to);
    }
}
