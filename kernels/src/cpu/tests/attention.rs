//! Attention over pages, and the cache itself.

use super::*;
use crate::cpu::{AttentionBatch, AttentionHeads, CpuError, KvShape, PAGE_TOKENS};
use crate::reference;

/// One sequence's queries, keys and values, (len, heads * head_dim), and its blocks.
struct Sequence {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    blocks: Vec<u32>,
}

struct Model {
    heads: AttentionHeads,
    sequences: Vec<Sequence>,
    blocks: usize,
}

impl Model {
    fn new(random: &mut Random, heads: usize, kv_heads: usize, head_dim: usize, lens: &[usize]) -> Self {
        let scale = 1.0 / (head_dim as f32).sqrt();
        let heads = AttentionHeads { heads, kv_heads, head_dim, scale };
        // Blocks in no order, with some that belong to nobody.
        let blocks = lens.iter().map(|len| len.div_ceil(PAGE_TOKENS)).sum::<usize>() + 3;
        let mut free: Vec<u32> = (0..blocks as u32).collect();
        for i in (1..blocks).rev() {
            free.swap(i, random.below(i + 1));
        }
        let sequence = |&len: &usize| Sequence {
            q: random.normals(len * heads.heads * head_dim),
            k: random.normals(len * kv_heads * head_dim),
            v: random.normals(len * kv_heads * head_dim),
            blocks: free.split_off(free.len() - len.div_ceil(PAGE_TOKENS)),
        };
        Self { heads, sequences: lens.iter().map(sequence).collect(), blocks }
    }

    /// Computes the rows `parts` = (sequence, first position, end) in one call; all keys before are already written.
    fn step(&self, device: &mut CpuDevice, parts: &[(usize, usize, usize)]) -> Vec<f32> {
        let AttentionHeads { heads, kv_heads, head_dim, .. } = self.heads;
        let (mut q, mut k, mut v) = (Vec::new(), Vec::new(), Vec::new());
        let (mut positions, mut cu_seqlens_q, mut slots) = (Vec::new(), vec![0], Vec::new());
        let (mut block_tables, mut block_table_starts) = (Vec::new(), vec![0]);
        for &(s, first, end) in parts {
            let sequence = &self.sequences[s];
            q.extend_from_slice(&sequence.q[first * heads * head_dim..end * heads * head_dim]);
            k.extend_from_slice(&sequence.k[first * kv_heads * head_dim..end * kv_heads * head_dim]);
            v.extend_from_slice(&sequence.v[first * kv_heads * head_dim..end * kv_heads * head_dim]);
            positions.extend(first as u32..end as u32);
            slots.extend(
                (first..end).map(|t| sequence.blocks[t / PAGE_TOKENS] * PAGE_TOKENS as u32 + (t % PAGE_TOKENS) as u32),
            );
            cu_seqlens_q.push(positions.len() as u32);
            block_tables.extend_from_slice(&sequence.blocks);
            block_table_starts.push(block_tables.len() as u32);
        }
        let rows = positions.len();
        let q = buffer_of(device, &q, heads * head_dim);
        let (k, v) = (buffer_of(device, &k, kv_heads * head_dim), buffer_of(device, &v, kv_heads * head_dim));
        let mut out = device.buffer(rows, heads * head_dim).expect("memory");
        // The second of two layers.
        device.write_kv(1, &k, &v, &slots);
        let batch = AttentionBatch {
            positions: &positions,
            cu_seqlens_q: &cu_seqlens_q,
            block_tables: &block_tables,
            block_table_starts: &block_table_starts,
        };
        device.attention(1, &q, &batch, &self.heads, &mut out);
        values_of(&out, rows)
    }

    fn allocate(&self, device: &mut CpuDevice) {
        let AttentionHeads { kv_heads, head_dim, .. } = self.heads;
        device.allocate_kv(KvShape { layers: 2, kv_heads, head_dim, blocks: self.blocks }).expect("memory");
    }

    /// Output of the rows of sequence `s` at these positions, with keys and values rounded as `kv` says.
    fn reference(&self, s: usize, kv: KvType, positions: impl IntoIterator<Item = usize>) -> Vec<f32> {
        let AttentionHeads { heads, kv_heads, head_dim, scale } = self.heads;
        let sequence = &self.sequences[s];
        let stored = |values: &[f32], head: usize, len: usize| -> Vec<f32> {
            let token = |t: usize| round_trip(kv, &values[(t * kv_heads + head) * head_dim..][..head_dim]);
            (0..len).flat_map(token).collect()
        };
        let mut out = Vec::new();
        for t in positions {
            for head in 0..heads {
                let q = &sequence.q[(t * heads + head) * head_dim..][..head_dim];
                let kv_head = head / (heads / kv_heads);
                let (k, v) = (stored(&sequence.k, kv_head, t + 1), stored(&sequence.v, kv_head, t + 1));
                out.extend(reference::attention(q, &k, &v, scale));
            }
        }
        out
    }
}

/// What is left of one head's numbers in the cache.
fn round_trip(kv: KvType, head: &[f32]) -> Vec<f32> {
    let max = head.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
    let stored = |&x: &f32| match kv {
        KvType::Bf16 => half::bf16::from_f32(x).to_f32(),
        KvType::F16 => half::f16::from_f32(x).to_f32(),
        KvType::Int8 => (x * (127.0 / max)).round_ties_even() * (max / 127.0),
        KvType::F32 => x,
    };
    head.iter().map(stored).collect()
}

/// (heads, kv_heads, head_dim): grouped and not, one key-value head for many, odd sizes.
const SHAPES: [(usize, usize, usize); 7] =
    [(9, 3, 64), (4, 4, 64), (14, 1, 32), (8, 2, 128), (2, 1, 6), (6, 2, 80), (5, 1, 34)];

#[test]
fn whole_prompts_equal_the_reference_and_decoding_and_any_chunks() {
    let mut random = Random::new(11);
    for (heads, kv_heads, head_dim) in SHAPES {
        let lens = [1 + random.below(40), 33, 1, 70];
        let model = Model::new(&mut random, heads, kv_heads, head_dim, &lens);
        for kv in KvType::ALL {
            let want: Vec<f32> = (0..lens.len()).flat_map(|s| model.reference(s, kv, 0..lens[s])).collect();
            for (mut one, mut two) in
                devices(1, Activations::Int8, kv).into_iter().zip(devices(2, Activations::Int8, kv))
            {
                let name = format!("{} {kv:?} {heads}/{kv_heads} heads of {head_dim}", one.isa());
                let whole: Vec<_> = (0..lens.len()).map(|s| (s, 0, lens[s])).collect();
                model.allocate(&mut one);
                let got = model.step(&mut one, &whole);
                let error = relative_error(&got, &want);
                assert!(error < 2e-6, "{name}: {error:e}");
                model.allocate(&mut two);
                assert_eq!(bits_of(&model.step(&mut two, &whole)), bits_of(&got), "{name}: two threads");

                // Each sequence alone, in chunks of 1 and of 7, gives the same bits.
                let mut row = 0;
                for (s, &len) in lens.iter().enumerate() {
                    for chunk in [1, 7] {
                        model.allocate(&mut two);
                        let mut pieces = Vec::new();
                        for first in (0..len).step_by(chunk) {
                            pieces.extend(model.step(&mut two, &[(s, first, (first + chunk).min(len))]));
                        }
                        let columns = heads * head_dim;
                        let same = &got[row * columns..(row + len) * columns];
                        assert_eq!(bits_of(&pieces), bits_of(same), "{name}: sequence {s} in chunks of {chunk}");
                    }
                    row += len;
                }
            }
        }
    }
}

/// More positions than fit a piece, so that pieces are joined; the last rows of a long context; threads that share units.
#[test]
fn long_contexts() {
    let mut random = Random::new(12);
    let len = 256 * 4 + 20;
    let model = Model::new(&mut random, 6, 2, 64, &[len, 20]);
    for kv in KvType::ALL {
        for mut device in devices(2, Activations::Int8, kv) {
            model.allocate(&mut device);
            let got = model.step(&mut device, &[(0, 0, len)]);
            // Decodes at and around the borders of pieces, alone and beside another sequence's prompt.
            for t in [0, 254, 255, 256, 257, 511, 512, 800, len - 1] {
                let error = relative_error(&got[t * 384..][..384], &model.reference(0, kv, [t]));
                assert!(error < 2e-6, "{} {kv:?} at {t}: {error:e}", device.isa());
                for parts in [&[(0, t, t + 1), (1, 0, 20)][..], &[(0, t, t + 1)]] {
                    let decoded = model.step(&mut device, parts);
                    assert_eq!(bits_of(&decoded[..384]), bits_of(&got[t * 384..][..384]), "{} at {t}", device.isa());
                }
            }
        }
    }
}

/// One key-value head, so that all threads have parts of one unit, for any number of threads.
#[test]
fn threads_share_a_long_context() {
    let mut random = Random::new(16);
    let len = 256 * 9 + 100;
    let model = Model::new(&mut random, 3, 1, 32, &[len]);
    let mut want = None;
    for threads in 1..=4 {
        let options = CpuOptions { threads: Some(threads), kv: KvType::Bf16, ..CpuOptions::default() };
        let mut device = CpuDevice::new(options).expect("a device");
        model.allocate(&mut device);
        model.step(&mut device, &[(0, 0, len - 5)]);
        let got: Vec<f32> = (len - 5..len).flat_map(|t| model.step(&mut device, &[(0, t, t + 1)])).collect();
        let bits = bits_of(&got);
        assert_eq!(&bits, want.get_or_insert_with(|| bits.clone()), "{threads} threads");
    }
    let exact = model.reference(0, KvType::Bf16, len - 5..len);
    let got: Vec<f32> = want.expect("one").iter().map(|&bits| f32::from_bits(bits)).collect();
    assert!(relative_error(&got, &exact) < 2e-6);
}

/// What is beyond a row's own position, another's leavings among it, is never read into its result.
#[test]
fn leavings_in_a_block_are_not_seen() {
    let mut random = Random::new(13);
    let model = Model::new(&mut random, 3, 1, 64, &[21]);
    for kv in KvType::ALL {
        for mut device in devices(1, Activations::Int8, kv) {
            model.allocate(&mut device);
            let clean = model.step(&mut device, &[(0, 0, 21)]);
            let bad = vec![f32::NAN; 64 * PAGE_TOKENS * model.blocks];
            let bad = buffer_of(&mut device, &bad, 64);
            let slots: Vec<u32> = (0..(PAGE_TOKENS * model.blocks) as u32).collect();
            device.write_kv(1, &bad, &bad, &slots);
            for chunk in [1, 4, 21] {
                let mut got = Vec::new();
                for first in (0..21).step_by(chunk) {
                    got.extend(model.step(&mut device, &[(0, first, (first + chunk).min(21))]));
                }
                assert_eq!(bits_of(&got), bits_of(&clean), "{} {kv:?} chunks of {chunk}", device.isa());
            }
        }
    }
}

#[test]
fn a_copied_block_holds_the_same_in_all_layers() {
    let mut random = Random::new(14);
    for kv in KvType::ALL {
        let mut model = Model::new(&mut random, 3, 1, 64, &[16]);
        let mut device = devices(1, Activations::Int8, kv).pop().expect("a device");
        model.allocate(&mut device);
        let want = model.step(&mut device, &[(0, 0, 16)]);
        let from = model.sequences[0].blocks[0];
        let to = (from + 1) % model.blocks as u32;
        device.copy_block(from, to);
        model.sequences[0].blocks[0] = to;
        let got = model.step(&mut device, &[(0, 15, 16)]);
        assert_eq!(bits_of(&got), bits_of(&want[15 * 192..]));
    }
}

#[test]
fn the_size_of_a_block_is_what_is_allocated() {
    let shape = KvShape { layers: 30, kv_heads: 3, head_dim: 64, blocks: 10 };
    // Bytes of a token's head; 8-bit ones have a factor.
    for (kv, bytes) in [(KvType::Bf16, 128), (KvType::F16, 128), (KvType::Int8, 64 + 4), (KvType::F32, 256)] {
        let mut device = devices(1, Activations::Int8, kv).pop().expect("a device");
        assert_eq!(device.kv_block_bytes(shape), 30 * 3 * 2 * PAGE_TOKENS * bytes);
        let too_many = KvShape { blocks: 1 << 28, ..shape };
        assert!(matches!(device.allocate_kv(too_many), Err(CpuError::OutOfMemory { .. })));
        for bad in [
            KvShape { head_dim: 7, ..shape },
            KvShape { kv_heads: 0, ..shape },
            KvShape { layers: usize::MAX / 2, ..shape },
            KvShape { blocks: usize::MAX, ..shape },
        ] {
            assert!(matches!(device.allocate_kv(bad), Err(CpuError::Unsupported { .. })), "{bad:?}");
        }
    }
}

#[test]
#[should_panic(expected = "block 9 of 4")]
fn a_block_that_does_not_exist_is_refused() {
    let mut random = Random::new(15);
    let model = Model::new(&mut random, 3, 1, 64, &[16]);
    let mut device = devices(1, Activations::Int8, KvType::Bf16).pop().expect("a device");
    model.allocate(&mut device);
    let q = device.buffer(1, 192).expect("memory");
    let mut out = device.buffer(1, 192).expect("memory");
    let batch =
        AttentionBatch { positions: &[0], cu_seqlens_q: &[0, 1], block_tables: &[9], block_table_starts: &[0, 1] };
    device.attention(1, &q, &batch, &model.heads, &mut out);
}
