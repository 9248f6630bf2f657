//! Operations allocate nothing: everything is allocated before the first step.

mod common;

use common::Model;
use llmd_kernels::cpu::{
    Activations, AttentionBatch, AttentionHeads, CpuDevice, CpuOptions, Isa, KvShape, KvType, Output, Rope,
};
use llmd_kernels::quant::WeightType;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Counts what the system's allocator is asked for, on any thread.
struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator unchanged; `realloc` does by its default through `alloc`.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's contract is the same.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract is the same.
        unsafe { System.dealloc(ptr, layout) }
    }
}

/// Only one test at a time may make anything while another counts.
static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn no_step_allocates() {
    const ROWS: usize = 200;
    const COLUMNS: usize = 128;
    let _alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    // The counter counts.
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    drop(std::hint::black_box(vec![1_u8; 10]));
    assert_ne!(ALLOCATIONS.load(Ordering::Relaxed), before);

    let both = [(Activations::Int8, KvType::Bf16), (Activations::F32, KvType::F32)];
    for (isa, (activations, kv)) in Isa::available().flat_map(|isa| both.map(|kind| (isa, kind))) {
        let options = CpuOptions { threads: Some(2), isa: Some(isa), activations, kv };
        let mut d = CpuDevice::new(options).expect("a device");
        let matrix = vec![0x11; COLUMNS * WeightType::Q4_1.row_bytes(COLUMNS).expect("whole blocks")];
        let weight = d.weight(WeightType::Q4_1, COLUMNS, COLUMNS, &matrix).expect("a weight");
        let exact = d.weight(WeightType::F16, COLUMNS, COLUMNS, &[0x11; COLUMNS * COLUMNS * 2]).expect("a weight");
        let norm = d.weight(WeightType::F32, 1, COLUMNS, &[0x3f; COLUMNS * 4]).expect("a weight");
        d.allocate_kv(KvShape { layers: 1, kv_heads: 2, head_dim: 64, blocks: 20 }).expect("memory");
        let [mut x, mut y, mut z] = [(); 3].map(|()| d.buffer(ROWS, COLUMNS).expect("memory"));
        let frequencies = [0.1; 32];
        let blocks: Vec<u32> = (0..20).collect();
        // Threads that are still starting allocate for themselves; an operation on all of them waits for that.
        d.add(&mut x, &y, ROWS);
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        for step in 0..3 {
            // Decodes, then a prompt, then decodes again.
            let rows = if step == 1 { ROWS } else { 1 };
            let mut positions = [0; ROWS];
            positions.iter_mut().enumerate().for_each(|(i, position)| *position = (i + step) as u32);
            let positions = &positions[..rows];
            // The table has as many rows as columns.
            d.embed(&weight, &positions[..rows.min(COLUMNS - 3)], &mut x);
            d.rms_norm(&x, rows, &norm, 1e-5, &mut y);
            d.linear(&y, rows, [Output { weight: &weight, bias: Some(&norm), out: &mut z }]);
            d.linear(&y, rows, [Output { weight: &exact, bias: None, out: &mut x }]);
            let rope = Rope { dimensions: 64, neox: true, inverse_frequencies: &frequencies, magnitude: 1.0 };
            d.rope(&mut x, rows, 64, positions, &rope);
            d.write_kv(0, &x, &z, positions);
            let batch = AttentionBatch {
                positions,
                cu_seqlens_q: &[0, rows as u32],
                block_tables: &blocks,
                block_table_starts: &[0, 20],
            };
            let heads = AttentionHeads { heads: 2, kv_heads: 2, head_dim: 64, scale: 0.1 };
            d.attention(0, &x, &batch, &heads, &mut y);
            d.add(&mut y, &z, rows);
            d.silu_mul(&mut y, &z, rows);
            d.gather(&y, &[rows as u32 - 1], &mut z);
            d.copy_block(0, 1);
        }
        assert_eq!(ALLOCATIONS.load(Ordering::Relaxed), before, "{isa} {activations:?} {kv:?}");
    }
}

#[test]
fn no_step_of_fused_layers_allocates() {
    let _alone = ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    for (isa, kv) in Isa::available().flat_map(|isa| KvType::ALL.map(|kv| (isa, kv))) {
        let options = CpuOptions { threads: Some(2), isa: Some(isa), activations: Activations::Int8, kv };
        let mut model = Model::new(options);
        model.step(true);
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        for is_prompt in [false, true, false] {
            model.step(is_prompt);
        }
        assert_eq!(ALLOCATIONS.load(Ordering::Relaxed), before, "{isa} {kv:?}");
    }
}
