//! A random language model of the Llama family, small enough to write, load and run in milliseconds.
//!
//! It talks nonsense, but the same nonsense for the same tokens, and its choices depend on the whole context: what a test
//! about scheduling, memory or rings needs. It has a real byte-level vocabulary with merges and ChatML's special tokens,
//! grouped heads, and weights of several types.

use crate::gguf::{Encoding, Value, Writer};
use std::fs;
use std::path::Path;

/// Id of `<|endoftext|>`.
pub const END_OF_TEXT: u32 = 0;
/// Id of `<|im_start|>`.
pub const IM_START: u32 = 1;
/// Id of `<|im_end|>`, which ends a generation.
pub const IM_END: u32 = 2;

/// Pairs that are merged, most eager first. Ġ stands for the space, as in every byte-level vocabulary.
const MERGES: [&str; 37] = [
    "Ġ t", "Ġ a", "i n", "h e", "r e", "o n", "e r", "Ġt he", "a t", "Ġ s", "Ġ o", "e n", "Ġ c", "e s", "Ġ w", "n d",
    "i t", "o r", "i s", "a l", "Ġ p", "in g", "Ġ f", "a n", "e d", "Ġ b", "o u", "a r", "Ġ in", "Ġo f", "Ġ m",
    "Ġa nd", "i on", "Ġ d", "Ġt o", "l e", "r o",
];

/// Tokens in the vocabulary: specials, bytes, merges.
pub const VOCABULARY: usize = 3 + 256 + MERGES.len();

const CHAT_TEMPLATE: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] \
                             + '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ \
                             '<|im_start|>assistant\n' }}{% endif %}";

/// The shape of the model.
#[derive(Debug, Clone)]
pub struct TinyModel {
    /// Layers.
    pub layers: usize,
    /// Width; a multiple of 32 and of `heads`.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key-value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of the feed-forward part; a multiple of 32.
    pub feed_forward: usize,
    /// Longest sequence.
    pub context: usize,
    /// Another seed makes another model.
    pub seed: u64,
}

impl Default for TinyModel {
    fn default() -> Self {
        Self { layers: 2, hidden: 64, heads: 4, kv_heads: 2, feed_forward: 128, context: 4096, seed: 1 }
    }
}

impl TinyModel {
    /// Larger: a step takes a sizeable part of a millisecond, so that a request of thousands of tokens is surely still
    /// running when a test does something to it.
    pub fn slow() -> Self {
        Self { layers: 8, hidden: 256, heads: 4, kv_heads: 2, feed_forward: 512, context: 4096, seed: 1 }
    }

    /// Writes the model to `path`.
    pub fn write(&self, path: &Path) -> std::io::Result<()> {
        fs::write(path, self.writer().bytes())
    }

    /// The file before it is put together, for tests that change it.
    pub fn writer(&self) -> Writer {
        let mut writer = Writer::default();
        self.describe(&mut writer);
        vocabulary(&mut writer);
        self.weights(&mut writer);
        writer
    }

    fn describe(&self, writer: &mut Writer) {
        let number = |value: usize| Value::U32(u32::try_from(value).expect("a small number"));
        writer.pair("general.architecture", Value::Text("llama".into()));
        writer.pair("general.name", Value::Text("tiny random model".into()));
        writer.pair("llama.block_count", number(self.layers));
        writer.pair("llama.context_length", number(self.context));
        writer.pair("llama.embedding_length", number(self.hidden));
        writer.pair("llama.feed_forward_length", number(self.feed_forward));
        writer.pair("llama.attention.head_count", number(self.heads));
        writer.pair("llama.attention.head_count_kv", number(self.kv_heads));
        writer.pair("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5));
        writer.pair("llama.rope.freq_base", Value::F32(10_000.0));
        writer.pair("llama.rope.dimension_count", number(self.hidden / self.heads));
        writer.pair("llama.vocab_size", number(VOCABULARY));
    }

    fn weights(&self, writer: &mut Writer) {
        let mut random = Random(self.seed);
        let kv_width = self.hidden / self.heads * self.kv_heads;
        let embedding = random.normals(VOCABULARY * self.hidden, 0.5);
        writer.tensor("token_embd.weight", Encoding::Q8_0, self.hidden, &embedding);
        // An output matrix of its own: with the embedding in its place a random model repeats its last token for ever.
        // Of this size it makes logits of a spread about 3: some tokens are likely, none is certain.
        let output = random.normals(VOCABULARY * self.hidden, 3.0 / (self.hidden as f32).sqrt());
        writer.tensor("output.weight", Encoding::Q8_0, self.hidden, &output);
        for layer in 0..self.layers {
            let mut matrix = |name: &str, encoding, rows: usize, columns: usize| {
                // Queries and keys are made large, so that attention is sharp and what it reads matters.
                let gain = if matches!(name, "attn_q" | "attn_k") { 1.5 } else { 1.0 };
                let values = random.normals(rows * columns, gain / (columns as f32).sqrt());
                writer.tensor(&format!("blk.{layer}.{name}.weight"), encoding, columns, &values);
            };
            matrix("attn_q", Encoding::Q8_0, self.hidden, self.hidden);
            matrix("attn_k", Encoding::Q8_0, kv_width, self.hidden);
            matrix("attn_v", Encoding::F16, kv_width, self.hidden);
            matrix("attn_output", Encoding::Q4_1, self.hidden, self.hidden);
            matrix("ffn_gate", Encoding::Q4_1, self.feed_forward, self.hidden);
            matrix("ffn_up", Encoding::Q4_1, self.feed_forward, self.hidden);
            matrix("ffn_down", Encoding::F32, self.hidden, self.feed_forward);
            for norm in ["attn_norm", "ffn_norm"] {
                let near_one: Vec<f32> = random.normals(self.hidden, 0.1).iter().map(|v| 1.0 + v).collect();
                writer.tensor(&format!("blk.{layer}.{norm}.weight"), Encoding::F32, self.hidden, &near_one);
            }
        }
        writer.tensor("output_norm.weight", Encoding::F32, self.hidden, &vec![1.0; self.hidden]);
    }
}

fn vocabulary(writer: &mut Writer) {
    let mut tokens: Vec<String> = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"].map(String::from).to_vec();
    tokens.extend(byte_characters().iter().map(|c| c.to_string()));
    tokens.extend(MERGES.iter().map(|merge| merge.replace(' ', "")));
    assert_eq!(tokens.len(), VOCABULARY);
    let types = (0..VOCABULARY).map(|id| if id < 3 { 3 } else { 1 }).collect();
    writer.pair("tokenizer.ggml.model", Value::Text("gpt2".into()));
    writer.pair("tokenizer.ggml.pre", Value::Text("smollm".into()));
    writer.pair("tokenizer.ggml.tokens", Value::Texts(tokens));
    writer.pair("tokenizer.ggml.token_type", Value::I32s(types));
    writer.pair("tokenizer.ggml.merges", Value::Texts(MERGES.map(String::from).to_vec()));
    writer.pair("tokenizer.ggml.bos_token_id", Value::U32(IM_START));
    writer.pair("tokenizer.ggml.eos_token_id", Value::U32(IM_END));
    writer.pair("tokenizer.ggml.unknown_token_id", Value::U32(END_OF_TEXT));
    writer.pair("tokenizer.ggml.padding_token_id", Value::U32(IM_END));
    writer.pair("tokenizer.ggml.add_bos_token", Value::Bool(false));
    writer.pair("tokenizer.ggml.add_space_prefix", Value::Bool(false));
    writer.pair("tokenizer.chat_template", Value::Text(CHAT_TEMPLATE.into()));
}

/// The character that stands for each byte in byte-level vocabularies: itself where that can be seen, otherwise one of
/// those from U+0100 on.
fn byte_characters() -> [char; 256] {
    let mut unseen = 0x100;
    std::array::from_fn(|byte| match byte {
        0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => char::from(byte as u8),
        _ => {
            unseen += 1;
            char::from_u32(unseen - 1).expect("below U+0200")
        }
    })
}

/// SplitMix64 (Steele, Lea, Flood 2014): the same numbers on every machine, whatever crates do.
#[derive(Debug, Clone)]
pub struct Random(pub u64);

impl Random {
    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number from `low` to `high`, both included.
    pub fn between(&mut self, low: u32, high: u32) -> u32 {
        low + (self.bits() % u64::from(high - low + 1)) as u32
    }

    /// `count` numbers, nearly normal, of the given standard deviation: sums of twelve uniform ones (Irwin-Hall), which
    /// need no logarithm and so are the same bits everywhere.
    pub fn normals(&mut self, count: usize, deviation: f32) -> Vec<f32> {
        let uniform = |bits: u64| (bits >> 40) as f32 / (1u64 << 24) as f32;
        (0..count).map(|_| ((0..12).map(|_| uniform(self.bits())).sum::<f32>() - 6.0) * deviation).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_is_small_and_the_same_every_time() {
        let bytes = TinyModel::default().writer().bytes();
        assert!((100_000..600_000).contains(&bytes.len()), "{}", bytes.len());
        assert_eq!(bytes, TinyModel::default().writer().bytes());
        assert_ne!(bytes, TinyModel { seed: 2, ..TinyModel::default() }.writer().bytes());
    }

    #[test]
    fn every_merge_joins_tokens_there_are() {
        let bytes = byte_characters();
        let mut known: Vec<String> = bytes.iter().map(|c| c.to_string()).collect();
        for merge in MERGES {
            let (left, right) = merge.split_once(' ').unwrap();
            assert!(known.iter().any(|k| k == left) && known.iter().any(|k| k == right), "{merge}");
            known.push(merge.replace(' ', ""));
        }
        known.sort();
        known.dedup();
        assert_eq!(known.len(), 256 + MERGES.len(), "no token twice");
    }

    #[test]
    fn numbers_are_nearly_normal() {
        let numbers = Random(3).normals(20_000, 2.0);
        let mean = numbers.iter().sum::<f32>() / 20_000.0;
        let deviation = (numbers.iter().map(|n| (n - mean).powi(2)).sum::<f32>() / 20_000.0).sqrt();
        assert!(mean.abs() < 0.05 && (deviation - 2.0).abs() < 0.05, "{mean} {deviation}");
    }
}
