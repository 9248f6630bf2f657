//! Matrix products: what both kinds of kernels share, and how their work is cut.
//!
//! Quantised matrices meet activations quantised to 8 bits per block of 32 (integer dots, `gemm_*.rs`), or to twice 8 bits
//! in two planes, which the kernels see as two rows whose products are added; matrices in F16,
//! BF16 or F32, and every matrix when activations stay f32, go through `gemm_f32.rs`. The choice hangs on the weight
//! alone, never on the number of rows.

use super::buffer::{Buffer, Rows};
use super::isa::{Selected, for_each_isa};
use super::panel::{PANEL_ROWS, for_format};
use super::pool::{Pool, split};
use super::region::Region;
use super::simd::Simd;
use super::weight::{Operand, Panels, Weight};
use super::{CpuError, PARALLEL_ELEMENTS_MIN, gemm_f32, gemm_portable};
#[cfg(target_arch = "x86_64")]
use super::{Isa, gemm_avx2, gemm_avx512};
#[cfg(target_arch = "aarch64")]
use super::{Isa, gemm_neon};
use crate::quant::BLOCK;
use std::ops::Range;

/// Activation rows that a panel is used for before the next is read: as many as stay in the second-level cache.
pub(crate) const ROWS_PER_BLOCK: usize = 64;

/// Rows that a kernel gets at once: those of a block, in all their planes.
pub(crate) const ROWS_PER_PRODUCT: usize = 2 * ROWS_PER_BLOCK;

/// One result of [`super::CpuDevice::linear`].
pub struct Output<'a> {
    /// (output features, input features).
    pub weight: &'a Weight,
    /// (output features), or none.
    pub bias: Option<&'a Weight>,
    /// (rows, output features).
    pub out: &'a mut Buffer,
}

/// Memory for quantised activations, of at most `len` elements over all planes.
pub(crate) struct ActivationScratch {
    planes: usize,
    q: Region<i8>,
    scale: Region<f32>,
    sum: Region<f32>,
    offset: Region<i32>,
}

/// Activations quantised per block of 32, as kernels see them: x = scale * q, or with two planes the sum of that over the
/// rows 2 * row and 2 * row + 1.
#[derive(Clone, Copy)]
pub(crate) struct Quantized {
    /// 1 or 2.
    planes: usize,
    /// (rows, blocks, 32).
    pub(crate) q: *mut i8,
    /// (rows, blocks).
    pub(crate) scale: *mut f32,
    /// scale * sum(q), (rows, blocks): what a minimum is multiplied by.
    pub(crate) sum: *mut f32,
    /// -128 * sum(q) over the first and the second half of a block, (rows, blocks, 2): takes the bias of 128 out.
    pub(crate) offset: *mut i32,
    /// Blocks of a row.
    pub(crate) blocks: usize,
}

// SAFETY: pointers into the scratch of the device; whoever dereferences them answers for the accesses being disjoint.
unsafe impl Send for Quantized {}
// SAFETY: as above.
unsafe impl Sync for Quantized {}

impl ActivationScratch {
    /// For `planes` times `len` elements.
    pub(crate) fn new(planes: usize, len: usize) -> Result<Self, CpuError> {
        let what = "quantised activations";
        let len = len.checked_mul(planes).ok_or(CpuError::OutOfMemory { what, bytes: usize::MAX })?;
        let blocks = len / BLOCK;
        Ok(Self {
            planes,
            q: Region::new(what, len)?,
            scale: Region::new(what, blocks)?,
            sum: Region::new(what, blocks)?,
            offset: Region::new(what, blocks * 2)?,
        })
    }

    /// The most elements over all planes, padding included.
    pub(crate) fn len(&self) -> usize {
        self.q.len()
    }

    /// Rows of `blocks` blocks each.
    pub(crate) fn view(&mut self, blocks: usize) -> Quantized {
        Quantized {
            planes: self.planes,
            q: self.q.as_ptr(),
            scale: self.scale.as_ptr(),
            sum: self.sum.as_ptr(),
            offset: self.offset.as_ptr(),
            blocks,
        }
    }
}

impl Quantized {
    /// The same, beginning with what stands for row `row`.
    ///
    /// # Safety
    /// There is such a row.
    pub(crate) unsafe fn beginning_at(self, row: usize) -> Self {
        let blocks = row * self.planes * self.blocks;
        // SAFETY: inside the arrays, by the contract.
        unsafe {
            Self {
                q: self.q.add(blocks * BLOCK),
                scale: self.scale.add(blocks),
                sum: self.sum.add(blocks),
                offset: self.offset.add(blocks * 2),
                ..self
            }
        }
    }
}

for_each_isa! {
    /// Quantises `rows` of `x` into the same rows of `to`.
    ///
    /// # Safety
    /// Both have the rows, of the same width; nobody else touches those of `to`.
    pub(crate) unsafe fn quantize_rows = quantize_body(x: Rows, rows: Range<usize>, to: Quantized)
}

#[inline(always)]
unsafe fn quantize_body<S: Simd>(x: Rows, rows: Range<usize>, to: Quantized) {
    for row in rows {
        for block in 0..to.blocks {
            // SAFETY: row and block are inside both, by the contract.
            unsafe {
                let at = row * to.planes * to.blocks + block;
                quantize_planes::<S>(x.row(row).add(block * BLOCK), to, at);
            }
        }
    }
}

for_each_isa! {
    /// Quantises the 32 columns of `x` into block `block` of the first `rows` rows of `to`.
    ///
    /// # Safety
    /// Both have the rows, and `to` the block, which nobody else touches.
    pub(crate) unsafe fn quantize_panel = quantize_panel_body(x: Rows, rows: usize, to: Quantized, block: usize)
}

#[inline(always)]
unsafe fn quantize_panel_body<S: Simd>(x: Rows, rows: usize, to: Quantized, block: usize) {
    for row in 0..rows {
        // SAFETY: row and block are inside both, by the contract.
        unsafe { quantize_planes::<S>(x.row(row), to, row * to.planes * to.blocks + block) };
    }
}

/// Quantises 32 elements into block `at` of `to`, and what that leaves into the same block of the next plane, if there is one.
///
/// # Safety
/// That of [`quantize_rows`].
#[inline(always)]
unsafe fn quantize_planes<S: Simd>(x: *const f32, to: Quantized, at: usize) {
    // SAFETY: the caller's contract.
    unsafe {
        let scale = quantize_plane::<S>(x, to, at);
        if to.planes == 2 {
            // What the first plane leaves, exact but for its last bit: |rest| <= scale / 2.
            let q = to.q.add(at * BLOCK);
            let rest: [f32; BLOCK] = std::array::from_fn(|i| *x.add(i) - scale * f32::from(*q.add(i)));
            quantize_plane::<S>(rest.as_ptr(), to, at + to.blocks);
        }
    }
}

/// Quantises one block into block `at` of `to`; gives its scale.
///
/// # Safety
/// That of [`quantize_rows`].
#[inline(always)]
unsafe fn quantize_plane<S: Simd>(x: *const f32, to: Quantized, at: usize) -> f32 {
    // SAFETY: the caller's contract.
    unsafe {
        let (scale, sums) = S::quantize_block(x, to.q.add(at * BLOCK));
        *to.scale.add(at) = scale;
        *to.sum.add(at) = scale * (sums[0] + sums[1]) as f32;
        *to.offset.add(at * 2) = -128 * sums[0];
        *to.offset.add(at * 2 + 1) = -128 * sums[1];
        scale
    }
}

/// Elements of scratch that a thread needs for products of `planes` planes, before they are added.
pub(crate) fn planes_scratch_len(planes: usize) -> usize {
    if planes > 1 { ROWS_PER_PRODUCT * PANEL_ROWS } else { 0 }
}

for_each_isa! {
    /// out[rows.start + i] = products[2i] + products[2i + 1], in the columns of the panel at `column`.
    ///
    /// # Safety
    /// `products` has two rows of `PANEL_ROWS` elements for each of `rows`, and `out` has the rows and columns, which nobody
    /// else touches.
    unsafe fn add_planes = add_planes_body(products: Rows, rows: Range<usize>, out: Rows, column: usize)
}

#[inline(always)]
unsafe fn add_planes_body<S: Simd>(products: Rows, rows: Range<usize>, out: Rows, column: usize) {
    for (i, row) in rows.enumerate() {
        for lane in (0..PANEL_ROWS).step_by(S::LANES) {
            // SAFETY: rows and columns exist by the contract; PANEL_ROWS is a multiple of LANES.
            unsafe {
                let coarse = S::load(products.row(2 * i).add(lane));
                let fine = S::load(products.row(2 * i + 1).add(lane));
                S::store(out.row(row).add(column + lane), S::add(coarse, fine));
            }
        }
    }
}

/// A matrix and its bias, as all threads see them.
pub(crate) struct Projection<'a> {
    operand: Operand<'a>,
    bias: Option<&'a [f32]>,
    panels: usize,
}

/// The input of projections: rows in f32 and, where an operand needs it, quantised.
#[derive(Clone, Copy)]
pub(crate) struct Input {
    pub(crate) x: Rows,
    pub(crate) quantized: Quantized,
}

impl<'a> Projection<'a> {
    pub(crate) fn new(weight: &'a Weight, bias: Option<&'a Weight>) -> Self {
        Self {
            operand: weight.operand(),
            bias: bias.map(|bias| bias.vector().expect("a bias is a vector")),
            panels: weight.rows().div_ceil(PANEL_ROWS),
        }
    }

    /// Panels of 32 output features.
    pub(crate) fn panels(&self) -> usize {
        self.panels
    }

    /// Whether the input must be quantised.
    pub(crate) fn is_quantized(&self) -> bool {
        matches!(self.operand, Operand::Panels(_))
    }

    /// out[i][column..column + 32] = the output features of `panel` of row `rows.start + i`, with bias.
    ///
    /// # Safety
    /// `input` has the rows, quantised if the operand needs that; `out` has rows and columns, which nobody else touches, nor
    /// `scratch`, of `scratch_len`.
    #[allow(clippy::too_many_arguments)]
    pub(crate) unsafe fn panel(
        &self,
        isa: Selected,
        input: Input,
        rows: Range<usize>,
        panel: usize,
        out: Rows,
        column: usize,
        scratch: *mut f32,
    ) {
        let n = rows.len();
        // SAFETY: the contract of this function, with everything beginning at the first of the rows.
        unsafe {
            match self.operand {
                Operand::Panels(p) => {
                    let x = input.quantized.beginning_at(rows.start);
                    if x.planes == 1 {
                        integer_product(isa, p, panel, x, 0..n, out, column);
                    } else {
                        let products = Rows::new(scratch, PANEL_ROWS);
                        integer_product(isa, p, panel, x, 0..2 * n, products, 0);
                        add_planes(isa, products, 0..n, out, column);
                    }
                }
                Operand::Rows(w) => {
                    let x = Rows::new(input.x.row(rows.start), input.x.stride);
                    gemm_f32::panel_product(isa, w, panel, x, 0..n, out, column, scratch);
                }
            }
            if let Some(bias) = self.bias {
                let bias = &bias[panel * PANEL_ROWS..][..PANEL_ROWS];
                for row in 0..n {
                    let out = out.row(row).add(column);
                    for (i, bias) in bias.iter().enumerate() {
                        *out.add(i) += bias;
                    }
                }
            }
        }
    }

    /// The output features of `panels` of all `rows` rows, to where they belong in `out`.
    ///
    /// # Safety
    /// That of [`Self::panel`].
    pub(crate) unsafe fn run(
        &self,
        isa: Selected,
        input: Input,
        rows: usize,
        panels: Range<usize>,
        out: Rows,
        scratch: *mut f32,
    ) {
        for rows in row_blocks(rows) {
            for panel in panels.clone() {
                // SAFETY: the contract of this function, cut into blocks of rows and single panels.
                unsafe {
                    let out = Rows::new(out.row(rows.start), out.stride);
                    self.panel(isa, input, rows.clone(), panel, out, panel * PANEL_ROWS, scratch);
                }
            }
        }
    }
}

/// `0..rows` in parts of at most `ROWS_PER_BLOCK`, as even as can be.
pub(crate) fn row_blocks(rows: usize) -> impl Iterator<Item = Range<usize>> {
    let blocks = rows.div_ceil(ROWS_PER_BLOCK);
    (0..blocks).map(move |block| split(rows, block, blocks))
}

/// Computes all outputs; see [`super::CpuDevice::linear`], which has checked the shapes.
pub(crate) fn linear<'a>(
    isa: Selected,
    pool: &mut Pool,
    activations: &mut ActivationScratch,
    scratch: &ScratchPerThread,
    x: &Buffer,
    rows: usize,
    outputs: impl Iterator<Item = Output<'a>>,
) {
    let input = Input { x: x.pointer(), quantized: activations.view(x.stride() / BLOCK) };
    let mut is_quantized = false;
    for output in outputs {
        let projection = Projection::new(output.weight, output.bias);
        if projection.is_quantized() && !is_quantized {
            let quantize = |rows: Range<usize>| {
                // SAFETY: the caller has checked that x has the rows and that they fit the scratch; ranges are disjoint.
                unsafe { quantize_rows(isa, input.x, rows, input.quantized) }
            };
            if rows * x.stride() >= PARALLEL_ELEMENTS_MIN {
                let threads = pool.threads();
                pool.run(&|index| quantize(split(rows, index, threads)));
            } else {
                quantize(0..rows);
            }
            is_quantized = true;
        }
        let (out, threads) = (output.out.pointer(), pool.threads());
        pool.run(&|index| {
            let panels = split(projection.panels(), index, threads);
            // SAFETY: shapes are checked by the caller; panels of different threads are different columns; the scratch is
            // of this thread; the output buffer is borrowed exclusively by `output`.
            unsafe { projection.run(isa, input, rows, panels, out, scratch.of(index)) };
        });
    }
}

/// The product of one panel, to be stored from `column` on.
///
/// # Safety
/// That of the `panel_product` functions.
unsafe fn integer_product(
    isa: Selected,
    p: Panels<'_>,
    panel: usize,
    x: Quantized,
    rows: Range<usize>,
    out: Rows,
    column: usize,
) {
    let panel_bytes = x.blocks * p.format.block_bytes();
    let data = &p.data[panel * panel_bytes..][..panel_bytes];
    // SAFETY: `isa` proves the instructions; the rest is the caller's contract.
    unsafe {
        match isa.isa() {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => {
                for_format!(p.format, F => gemm_avx512::panel_product::<F>(data, x, rows, out, column))
            }
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => {
                for_format!(p.format, F => gemm_avx2::panel_product::<F, true>(data, x, rows, out, column))
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                for_format!(p.format, F => gemm_avx2::panel_product::<F, false>(data, x, rows, out, column))
            }
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => {
                for_format!(p.format, F => gemm_neon::panel_product::<F, { gemm_neon::PLAIN }>(data, x, rows, out, column))
            }
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDotprod => {
                for_format!(p.format, F => gemm_neon::panel_product::<F, { gemm_neon::DOTPROD }>(data, x, rows, out, column))
            }
            #[cfg(target_arch = "aarch64")]
            Isa::NeonI8mm => {
                for_format!(p.format, F => gemm_neon::panel_product::<F, { gemm_neon::I8MM }>(data, x, rows, out, column))
            }
            _ => for_format!(p.format, F => gemm_portable::panel_product::<F>(data, x, rows, out, column)),
        }
    }
}

/// f32 scratch that each thread has a part of.
pub(crate) struct ScratchPerThread {
    data: Region<f32>,
    len: usize,
}

impl ScratchPerThread {
    /// `len` elements for each of `threads`.
    pub(crate) fn new(what: &'static str, threads: usize, len: usize) -> Result<Self, CpuError> {
        // A line more, so that no two threads write one.
        let len = len.next_multiple_of(32) + 32;
        let all = len.checked_mul(threads).ok_or(CpuError::OutOfMemory { what, bytes: usize::MAX })?;
        Ok(Self { data: Region::new(what, all)?, len })
    }

    /// Elements of each thread.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The part of thread `index`.
    pub(crate) fn of(&self, index: usize) -> *mut f32 {
        assert!((index + 1) * self.len <= self.data.len(), "thread {index}");
        // SAFETY: just checked to be inside.
        unsafe { self.data.as_ptr().add(index * self.len) }
    }
}
