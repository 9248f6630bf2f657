//! The forward pass against the formulas: a model of random weights computed plainly in f64, whole sequences at a time,
//! without cache, batch or chunks. What the default model lacks (biases, an output matrix, heads wider than
//! hidden / heads, partly rotated heads) is covered here.

use super::gguf::Gguf;
use super::gguf::writer::{Writer, tiny_llama};
use super::sizing::KvBudget;
use super::{LoadedModel, ModelRunner, Runner, RunnerLimits};
use crate::backend::RopeSpec;
use crate::backend::cpu::{Activations, CpuBackend, CpuOptions, KvType};
use crate::batch::ForwardBatch;
use crate::kv_cache::block::{BLOCK_TOKENS, BlockId};

/// f32 sums of a few hundred products of order 1.
const TOLERANCE: f64 = 2e-4;

/// Everything a file of the family may have and the tiny model does not.
fn all_options() -> Writer {
    let mut w = tiny_llama();
    w.u32("llama.attention.key_length", 32);
    w.f32("llama.attention.scale", 0.3);
    w.string("llama.rope.scaling.type", "linear");
    w.f32("llama.rope.scaling.factor", 2.0);
    for layer in 0..2 {
        let mut set = |part: &str, rows, columns| w.replace_f32(&format!("blk.{layer}.{part}"), rows, columns);
        for (part, rows, columns) in [("attn_q", 128, 64), ("attn_k", 64, 64), ("attn_v", 64, 64)] {
            set(&format!("{part}.weight"), rows, columns);
            set(&format!("{part}.bias"), 1, rows);
        }
        set("attn_output.weight", 64, 128);
        for (part, columns) in [("attn_output", 64), ("ffn_gate", 96), ("ffn_up", 96), ("ffn_down", 64)] {
            set(&format!("{part}.bias"), 1, columns);
        }
    }
    w.replace_f32("output.weight", 32, 64);
    w.replace_f32("rope_freqs.weight", 1, 8);
    let divisors = [1.0f32, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0];
    w.tensors.last_mut().expect("just added").data = divisors.iter().flat_map(|d| d.to_le_bytes()).collect();
    w
}

fn load(writer: &Writer) -> LoadedModel {
    LoadedModel::from_gguf(Gguf::from_bytes(writer.bytes()).expect("a true file"), "tiny").expect("a whole model")
}

/// (rows, columns) of f64.
struct Matrix {
    columns: usize,
    elements: Vec<f64>,
}

fn matrix(model: &LoadedModel, name: &str) -> Option<Matrix> {
    let tensor = model.gguf.tensor(name)?;
    let elements = tensor.bytes.as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect();
    Some(Matrix { columns: tensor.columns, elements })
}

impl Matrix {
    fn row(&self, r: usize) -> &[f64] {
        &self.elements[r * self.columns..(r + 1) * self.columns]
    }

    /// This matrix times x.
    fn times(&self, x: &[f64]) -> Vec<f64> {
        assert_eq!(x.len(), self.columns);
        self.elements.chunks_exact(self.columns).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
    }
}

/// Logits after each of `ids`, (T, vocab).
fn reference(model: &LoadedModel, ids: &[u32]) -> Vec<Vec<f64>> {
    let a = &model.architecture;
    let weight = |name: &str| matrix(model, name).expect(name);
    let norm = |x: &[f64], name: &str| -> Vec<f64> {
        let scale = (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64 + f64::from(a.rms_norm_eps)).sqrt();
        x.iter().zip(weight(name).row(0)).map(|(x, w)| x / scale * w).collect()
    };
    let embedding = weight("token_embd.weight");
    let mut rows: Vec<Vec<f64>> = ids.iter().map(|&id| embedding.row(id as usize).to_vec()).collect();
    for layer in 0..a.layers {
        let linear = |part: &str, x: &[f64]| -> Vec<f64> {
            let mut out = weight(&format!("blk.{layer}.{part}.weight")).times(x);
            if let Some(bias) = matrix(model, &format!("blk.{layer}.{part}.bias")) {
                out.iter_mut().zip(bias.row(0)).for_each(|(o, b)| *o += b);
            }
            out
        };
        let normed: Vec<_> = rows.iter().map(|x| norm(x, &format!("blk.{layer}.attn_norm.weight"))).collect();
        let heads = |part: &str, turn: bool| -> Vec<Vec<Vec<f64>>> {
            let project = |(position, x): (usize, &Vec<f64>)| {
                let row = linear(part, x);
                let head = |h: &[f64]| if turn { rotated(h, position, &a.rope) } else { h.to_vec() };
                row.chunks_exact(a.head_dim).map(head).collect()
            };
            normed.iter().enumerate().map(project).collect()
        };
        let (q, k, v) = (heads("attn_q", true), heads("attn_k", true), heads("attn_v", false));
        for t in 0..ids.len() {
            let attended: Vec<f64> = (0..a.heads)
                .flat_map(|h| {
                    let kv = h / (a.heads / a.kv_heads);
                    let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
                    let scores: Vec<f64> =
                        (0..=t).map(|s| (dot(&q[t][h], &k[s][kv]) * f64::from(a.attention_scale)).exp()).collect();
                    let total: f64 = scores.iter().sum();
                    let mut out = vec![0.0; a.head_dim];
                    for (s, score) in scores.iter().enumerate() {
                        out.iter_mut().zip(&v[s][kv]).for_each(|(o, v)| *o += score / total * v);
                    }
                    out
                })
                .collect();
            let delta = linear("attn_output", &attended);
            rows[t].iter_mut().zip(delta).for_each(|(x, d)| *x += d);
        }
        for x in &mut rows {
            let normed = norm(x, &format!("blk.{layer}.ffn_norm.weight"));
            let gate = linear("ffn_gate", &normed).into_iter().map(|g| g / (1.0 + (-g).exp()));
            let up: Vec<f64> = gate.zip(linear("ffn_up", &normed)).map(|(g, u)| g * u).collect();
            x.iter_mut().zip(linear("ffn_down", &up)).for_each(|(x, d)| *x += d);
        }
    }
    let output = matrix(model, "output.weight").unwrap_or(embedding);
    rows.iter().map(|x| output.times(&norm(x, "output_norm.weight"))).collect()
}

fn rotated(head: &[f64], position: usize, rope: &RopeSpec) -> Vec<f64> {
    let mut out = head.to_vec();
    for (i, frequency) in rope.inverse_frequencies.iter().enumerate() {
        let (a, b) = if rope.neox { (i, i + rope.dimensions / 2) } else { (2 * i, 2 * i + 1) };
        let (sin, cos) = (position as f64 * f64::from(*frequency)).sin_cos();
        out[a] = head[a] * cos - head[b] * sin;
        out[b] = head[a] * sin + head[b] * cos;
    }
    out
}

/// A sequence's part of a batch: its ids, how many are in the cache, how many more are computed, its first block.
struct Part<'a> {
    ids: &'a [u32],
    computed: usize,
    tokens: usize,
    first_block: u32,
}

/// A batch written by hand that wants the logits of every row.
fn batch(parts: &[Part<'_>]) -> ForwardBatch {
    let mut b = ForwardBatch { cu_seqlens_q: vec![0], block_table_starts: vec![0], ..ForwardBatch::default() };
    for part in parts {
        let end = part.computed + part.tokens;
        for position in part.computed..end {
            b.logit_rows.push(b.tokens.len() as u32);
            b.tokens.push(part.ids[position]);
            b.positions.push(position as u32);
            b.slot_mapping.push(part.first_block * BLOCK_TOKENS as u32 + position as u32);
        }
        b.cu_seqlens_q.push(b.tokens.len() as u32);
        b.context_lens.push(end as u32);
        b.block_tables.extend((0..end.div_ceil(BLOCK_TOKENS) as u32).map(|i| part.first_block + i));
        b.block_table_starts.push(b.block_tables.len() as u32);
    }
    b
}

fn runner(model: &LoadedModel, options: CpuOptions) -> Box<dyn Runner> {
    let limits = RunnerLimits { tokens_per_step_max: 64, sequences_max: 64, kv: KvBudget::Blocks(16) };
    let mut steps = Vec::new();
    let backend = CpuBackend::new(options).expect("threads");
    let runner =
        ModelRunner::new(backend, model, limits, &mut |done, total| steps.push((done, total))).expect("memory");
    assert!(steps.is_sorted() && steps.last().is_some_and(|(done, total)| done == total), "{steps:?}");
    Box::new(runner)
}

fn f32_options() -> CpuOptions {
    CpuOptions { activations: Activations::F32, kv: KvType::F32, threads: Some(2), ..CpuOptions::default() }
}

fn ids(count: usize, seed: usize) -> Vec<u32> {
    (0..count).map(|i| ((i * i * 7 + i * 3 + seed) % 32) as u32).collect()
}

#[test]
fn the_runner_computes_the_formulas() {
    for (name, writer) in [("plain", tiny_llama()), ("all options", all_options())] {
        let model = load(&writer);
        let mut runner = runner(&model, f32_options());
        let (first, second) = (ids(37, 1), ids(20, 5));
        let truth = [reference(&model, &first), reference(&model, &second)];
        // The first sequence in parts of 20, 1 and 16, the second joining in between, in other blocks.
        let part = |s: usize, computed, tokens| Part {
            ids: if s == 0 { &first } else { &second },
            computed,
            tokens,
            first_block: [3, 9][s],
        };
        for steps in [vec![(0, 0, 20)], vec![(0, 20, 1), (1, 0, 18)], vec![(1, 18, 2), (0, 21, 16)]] {
            let parts: Vec<_> = steps.iter().map(|&(s, computed, tokens)| part(s, computed, tokens)).collect();
            let logits = runner.forward(&batch(&parts)).expect("a step");
            let expected = steps.iter().flat_map(|&(s, computed, tokens)| &truth[s][computed..computed + tokens]);
            let expected: Vec<f64> = expected.flatten().copied().collect();
            assert_eq!(logits.len(), expected.len());
            for (i, (found, expected)) in logits.iter().zip(&expected).enumerate() {
                assert!((f64::from(*found) - expected).abs() < TOLERANCE, "{name}: {i}: {found}, not {expected}");
            }
        }
    }
}

#[test]
fn only_the_rows_asked_for_have_logits() {
    let model = load(&tiny_llama());
    let mut runner = runner(&model, CpuOptions { threads: Some(1), ..CpuOptions::default() });
    let ids = ids(20, 3);
    let part = || Part { ids: &ids, computed: 0, tokens: 20, first_block: 0 };
    let all = runner.forward(&batch(&[part()])).expect("a step").to_vec();
    let some = ForwardBatch { logit_rows: vec![2, 19], ..batch(&[part()]) };
    let some = runner.forward(&some).expect("a step").to_vec();
    assert_eq!(some, [&all[2 * 32..3 * 32], &all[19 * 32..]].concat());
    let none = ForwardBatch { logit_rows: vec![], ..batch(&[part()]) };
    assert!(runner.forward(&none).expect("a step").is_empty());
}

#[test]
fn a_copied_block_serves_as_the_first_did() {
    let model = load(&tiny_llama());
    let mut runner = runner(&model, CpuOptions { threads: Some(1), ..CpuOptions::default() });
    let ids = ids(17, 2);
    runner.forward(&batch(&[Part { ids: &ids, computed: 0, tokens: 16, first_block: 2 }])).expect("a step");
    let part = |first_block| Part { ids: &ids, computed: 16, tokens: 1, first_block };
    let first = runner.forward(&batch(&[part(2)])).expect("a step").to_vec();
    let empty = runner.forward(&batch(&[part(7)])).expect("a step").to_vec();
    assert_ne!(first, empty, "block 7 holds nothing yet");
    runner.copy_block(BlockId(2), BlockId(7));
    assert_eq!(first, runner.forward(&batch(&[part(7)])).expect("a step"));
}

#[test]
fn figures() {
    let model = load(&tiny_llama());
    let runner = runner(&model, f32_options());
    let memory = runner.memory();
    assert_eq!(memory.kv_blocks, 16);
    // 2 layers, keys and values, 2 heads of 16, f32.
    assert_eq!(memory.kv_bytes, 16 * (BLOCK_TOKENS * 2 * 2 * 2 * 16 * 4) as u64);
    assert_eq!(memory.weight_bytes, model.gguf.tensor_bytes());
    assert!(memory.activation_bytes > 64 * 32 * 4);
    assert_eq!((runner.vocab_size(), runner.architecture()), (32, &model.architecture));
}
