//! Key-value memory in pages of 16 tokens.
//!
//! A page holds one head of one block in one layer. Keys: (head_dim / 2, 16 tokens, 2 dimensions); values: (8, head_dim
//! padded to 16, 2 tokens) in bfloat16. In f32 the innermost pair is not interleaved: (head_dim / 2, 2, 16) and (8, 2,
//! padded head_dim). So 16 scores, or 16 dimensions of the output, form in one register, and both kinds of pages are read
//! the same way: row pairs of some width. Half precision and bytes lie as f32 does; after a page of bytes come 16 f32, what
//! each token's bytes are multiplied by. Pages lie as (layers, blocks, heads, keys then values).

use super::region::Region;
use super::simd::Simd;
use super::{CpuError, KvType};

/// Tokens of a page.
pub const PAGE_TOKENS: usize = 16;

/// Layers, heads and elements of a head: far above any model's, and low enough that no product of sizes overflows.
const DIMENSION_MAX: usize = 1 << 14;
/// Blocks: slots (block * `PAGE_TOKENS` + offset) are 32-bit.
const BLOCKS_MAX: usize = 1 << 28;
const _: () = assert!(BLOCKS_MAX * PAGE_TOKENS <= 1 << 32);

/// Shape of the key-value memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    /// Layers of the model.
    pub layers: usize,
    /// Key-value heads.
    pub kv_heads: usize,
    /// Elements of a head; even.
    pub head_dim: usize,
    /// Blocks of `PAGE_TOKENS` positions.
    pub blocks: usize,
}

/// Storage of one number in a page.
///
/// # Safety
/// Pointers must be good for what is read or written, as each function says.
pub(crate) trait KvElement: Copy + 'static {
    /// Whether each token's numbers are multiplied by a factor of their own, which stands behind the page.
    const SCALED: bool = false;
    /// The page row pair `pair` of width `width`: `LANES` elements from `offset` on of rows 2 * pair and 2 * pair + 1.
    unsafe fn load_pair<S: Simd>(page: *const Self, pair: usize, width: usize, offset: usize) -> (S::F, S::F);
    /// Where the element `offset` of row `row` lies in a page of rows of `width`.
    fn index(row: usize, width: usize, offset: usize) -> usize;
    /// `x` in this type, rounded to nearest even.
    fn from_f32(x: f32) -> Self;
}

/// Half precision.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct F16(u16);

/// bfloat16.
impl KvElement for u16 {
    #[inline(always)]
    unsafe fn load_pair<S: Simd>(page: *const u16, pair: usize, width: usize, offset: usize) -> (S::F, S::F) {
        // SAFETY: the pair's 2 * width elements are inside the page, and offset + LANES <= width.
        unsafe { S::load_bf16_pairs(page.add((pair * width + offset) * 2)) }
    }
    #[inline(always)]
    fn index(row: usize, width: usize, offset: usize) -> usize {
        (row / 2 * width + offset) * 2 + row % 2
    }
    #[inline(always)]
    fn from_f32(x: f32) -> u16 {
        let bits = x.to_bits();
        let rounded = (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16;
        // Rounding could carry a NaN's payload into infinity or round it off.
        if x.is_nan() { (bits >> 16) as u16 | 0x40 } else { rounded }
    }
}

impl KvElement for f32 {
    #[inline(always)]
    unsafe fn load_pair<S: Simd>(page: *const f32, pair: usize, width: usize, offset: usize) -> (S::F, S::F) {
        // SAFETY: as above.
        unsafe {
            let even = page.add(pair * 2 * width + offset);
            (S::load(even), S::load(even.add(width)))
        }
    }
    #[inline(always)]
    fn index(row: usize, width: usize, offset: usize) -> usize {
        row * width + offset
    }
    #[inline(always)]
    fn from_f32(x: f32) -> f32 {
        x
    }
}

impl KvElement for F16 {
    #[inline(always)]
    unsafe fn load_pair<S: Simd>(page: *const F16, pair: usize, width: usize, offset: usize) -> (S::F, S::F) {
        // SAFETY: as above.
        unsafe {
            let even = page.add(pair * 2 * width + offset).cast::<u16>();
            (S::load_f16(even), S::load_f16(even.add(width)))
        }
    }
    #[inline(always)]
    fn index(row: usize, width: usize, offset: usize) -> usize {
        row * width + offset
    }
    #[inline(always)]
    fn from_f32(x: f32) -> F16 {
        // The greatest there is, rather than an infinity that would make the whole sequence's output NaN.
        let max = 65_504.0;
        F16(half::f16::from_f32(if x.is_finite() { x.clamp(-max, max) } else { x }).to_bits())
    }
}

/// What is multiplied by the token's factor.
impl KvElement for i8 {
    const SCALED: bool = true;
    #[inline(always)]
    unsafe fn load_pair<S: Simd>(page: *const i8, pair: usize, width: usize, offset: usize) -> (S::F, S::F) {
        // SAFETY: as above.
        unsafe {
            let even = page.add(pair * 2 * width + offset);
            (S::load_i8(even), S::load_i8(even.add(width)))
        }
    }
    #[inline(always)]
    fn index(row: usize, width: usize, offset: usize) -> usize {
        row * width + offset
    }
    #[inline(always)]
    fn from_f32(x: f32) -> i8 {
        x.round_ties_even() as i8
    }
}

/// Where the factors of a page of rows of `width` stand.
///
/// # Safety
/// The page is of a cache of this type, and the type is SCALED.
#[inline(always)]
pub(crate) unsafe fn factors<E: KvElement>(page: *const E, width: usize) -> *mut f32 {
    // SAFETY: they follow the page's 16 * width elements.
    unsafe { page.add(width * PAGE_TOKENS).cast_mut().cast() }
}

/// The pages.
pub(crate) struct KvCache {
    data: Region<u8>,
    pub(crate) shape: KvShape,
    pub(crate) ty: KvType,
}

/// Elements of a value row: the head padded to whole vectors.
pub(crate) fn value_width(head_dim: usize) -> usize {
    head_dim.next_multiple_of(16)
}

/// Bytes of a page of rows of `width`: whole lines, so that every page begins with one.
fn page_bytes(width: usize, ty: KvType) -> usize {
    let factors = if ty == KvType::Int8 { PAGE_TOKENS * size_of::<f32>() } else { 0 };
    (width * PAGE_TOKENS * ty.bytes() + factors).next_multiple_of(64)
}

impl KvShape {
    fn key_page_bytes(&self, ty: KvType) -> usize {
        page_bytes(self.head_dim, ty)
    }

    fn value_page_bytes(&self, ty: KvType) -> usize {
        page_bytes(value_width(self.head_dim), ty)
    }

    /// Bytes of one block over all layers, keys and values.
    pub fn block_bytes(&self, ty: KvType) -> usize {
        self.layers.saturating_mul(self.layer_block_bytes(ty))
    }

    fn layer_block_bytes(&self, ty: KvType) -> usize {
        self.kv_heads.saturating_mul(self.key_page_bytes(ty) + self.value_page_bytes(ty))
    }
}

/// Raw pages of one layer, for kernels.
#[derive(Clone, Copy)]
pub(crate) struct Pages {
    layer: *mut u8,
    block_bytes: usize,
    head_bytes: usize,
    key_bytes: usize,
    blocks: usize,
}

// SAFETY: a pointer and sizes; whoever dereferences it answers for the accesses being disjoint.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// Key and value page of `head` in `block`.
    ///
    /// # Panics
    /// When there is no such block.
    ///
    /// # Safety
    /// `head` is one of the cache's, E its element type.
    #[inline(always)]
    pub(crate) unsafe fn of<E: KvElement>(self, block: u32, head: usize) -> (*mut E, *mut E) {
        assert!((block as usize) < self.blocks, "block {block} of {}", self.blocks);
        // SAFETY: the block was checked, the head by contract; so both pages are inside the layer.
        unsafe {
            let key = self.layer.add(block as usize * self.block_bytes + head * self.head_bytes);
            (key.cast(), key.add(self.key_bytes).cast())
        }
    }
}

impl KvCache {
    pub(crate) fn new(shape: KvShape, ty: KvType) -> Result<Self, CpuError> {
        let dimensions = [shape.layers, shape.kv_heads, shape.head_dim];
        let is_usual = dimensions.iter().all(|n| (1..=DIMENSION_MAX).contains(n)) && shape.head_dim.is_multiple_of(2);
        if !is_usual || shape.blocks > BLOCKS_MAX {
            let limits = format!("layers, heads and elements of a head are 1 to {DIMENSION_MAX}, the last even");
            return Err(CpuError::Unsupported { reason: format!("{shape:?}: {limits}; blocks at most {BLOCKS_MAX}") });
        }
        let out_of_memory = CpuError::OutOfMemory { what: "key-value cache", bytes: usize::MAX };
        let bytes = shape.block_bytes(ty).checked_mul(shape.blocks).ok_or(out_of_memory)?;
        Ok(Self { data: Region::new("key-value cache", bytes)?, shape, ty })
    }

    /// # Panics
    /// When there is no such layer.
    pub(crate) fn layer(&self, layer: usize) -> Pages {
        assert!(layer < self.shape.layers, "layer {layer} of {}", self.shape.layers);
        let block_bytes = self.shape.layer_block_bytes(self.ty);
        Pages {
            // SAFETY: the layer was checked, so its first byte is inside (or at the end of an empty cache).
            layer: unsafe { self.data.as_ptr().add(layer * self.shape.blocks * block_bytes) },
            block_bytes,
            head_bytes: block_bytes / self.shape.kv_heads,
            key_bytes: self.shape.key_page_bytes(self.ty),
            blocks: self.shape.blocks,
        }
    }

    /// Copies all layers of block `from` to block `to`.
    pub(crate) fn copy_block(&mut self, from: u32, to: u32) {
        let (from, to, blocks) = (from as usize, to as usize, self.shape.blocks);
        assert!(from < blocks && to < blocks, "blocks {from} and {to} of {blocks}");
        let bytes = self.shape.layer_block_bytes(self.ty);
        for layer in 0..self.shape.layers {
            let at = |block: usize| (layer * blocks + block) * bytes;
            self.data.copy_within(at(from)..at(from) + bytes, at(to));
        }
    }
}

/// Writes one token's keys and values, (kv_heads * head_dim) each, into `slot` of pages of type `ty`.
///
/// # Safety
/// That of [`write_token`].
pub(crate) unsafe fn write(ty: KvType, pages: Pages, slot: u32, shape: &KvShape, k: *const f32, v: *const f32) {
    let (heads, head_dim) = (shape.kv_heads, shape.head_dim);
    // SAFETY: the caller's contract.
    unsafe {
        match ty {
            KvType::Bf16 => write_token::<u16>(pages, slot, heads, head_dim, k, v),
            KvType::F16 => write_token::<F16>(pages, slot, heads, head_dim, k, v),
            KvType::Int8 => write_token::<i8>(pages, slot, heads, head_dim, k, v),
            KvType::F32 => write_token::<f32>(pages, slot, heads, head_dim, k, v),
        }
    }
}

/// Writes one token's keys and values, (kv_heads * head_dim) each, into `slot`.
///
/// # Safety
/// The pages are of type E with these heads, `k` and `v` have the elements, and nobody else touches the slot's block.
unsafe fn write_token<E: KvElement>(
    pages: Pages,
    slot: u32,
    heads: usize,
    head_dim: usize,
    k: *const f32,
    v: *const f32,
) {
    let (block, token) = (slot / PAGE_TOKENS as u32, slot as usize % PAGE_TOKENS);
    let width = value_width(head_dim);
    for head in 0..heads {
        // SAFETY: the contract; token < 16 and d < head_dim are inside the pages by their layout.
        unsafe {
            let (keys, values) = pages.of::<E>(block, head);
            let k = std::slice::from_raw_parts(k.add(head * head_dim), head_dim);
            let v = std::slice::from_raw_parts(v.add(head * head_dim), head_dim);
            if E::SCALED {
                let (key_factor, key_inverse) = factor_of(k);
                let (value_factor, value_inverse) = factor_of(v);
                *factors(keys, head_dim).add(token) = key_factor;
                *factors(values, width).add(token) = value_factor;
                for d in 0..head_dim {
                    *keys.add(E::index(d, PAGE_TOKENS, token)) = E::from_f32(k[d] * key_inverse);
                    *values.add(E::index(token, width, d)) = E::from_f32(v[d] * value_inverse);
                }
            } else {
                for d in 0..head_dim {
                    *keys.add(E::index(d, PAGE_TOKENS, token)) = E::from_f32(k[d]);
                    *values.add(E::index(token, width, d)) = E::from_f32(v[d]);
                }
            }
        }
    }
}

/// What bytes are multiplied by so that the greatest is 127, and the inverse.
fn factor_of(x: &[f32]) -> (f32, f32) {
    let max = x.iter().fold(0.0_f32, |max, x| if x.abs() > max || x.is_nan() { x.abs() } else { max });
    (max / 127.0, if max > 0.0 { 127.0 / max } else { 0.0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bfloat16_rounds_to_nearest_even() {
        for x in [0.0, -0.0, 1.0, 1.003_906_2, 1.011_718_8, -3.017_578_1, 1e-40, f32::MAX, f32::INFINITY, f32::NAN] {
            let want = half::bf16::from_f32(x);
            assert_eq!(<u16 as KvElement>::from_f32(x), want.to_bits(), "{x}");
        }
    }
}
