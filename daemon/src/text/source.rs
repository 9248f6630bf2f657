//! What a model file says about its tokenizer, as plain data.

/// Everything a tokenizer is built from; `model/` fills it from a file's metadata, `text/` builds from it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TokenizerSource {
    /// `tokenizer.ggml.model`: "gpt2" (byte-level BPE) or "llama" (SentencePiece BPE with byte fallback).
    pub model: String,
    /// `tokenizer.ggml.pre`: the pre-tokenizer's name ("smollm", "llama-bpe", "qwen2", "gpt-2", "default", ...).
    pub pre: Option<String>,
    /// `tokenizer.ggml.tokens`: one string an id.
    pub tokens: Vec<String>,
    /// `tokenizer.ggml.token_type`: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte; empty if absent.
    pub token_types: Vec<i32>,
    /// `tokenizer.ggml.scores`; empty if absent.
    pub scores: Vec<f32>,
    /// `tokenizer.ggml.merges`: "left right"; empty if absent.
    pub merges: Vec<String>,
    /// `tokenizer.ggml.bos_token_id`.
    pub bos: Option<u32>,
    /// `tokenizer.ggml.eos_token_id`.
    pub eos: Option<u32>,
    /// `tokenizer.ggml.eot_token_id` (end of turn; ends a generation too).
    pub eot: Option<u32>,
    /// `tokenizer.ggml.unknown_token_id`.
    pub unk: Option<u32>,
    /// `tokenizer.ggml.padding_token_id`.
    pub pad: Option<u32>,
    /// `tokenizer.ggml.add_bos_token`; None: the kind's default ("llama" adds, "gpt2" does not).
    pub add_bos: Option<bool>,
    /// `tokenizer.ggml.add_eos_token`; None: no.
    pub add_eos: Option<bool>,
    /// `tokenizer.ggml.add_space_prefix`; None: the kind's default.
    pub add_space_prefix: Option<bool>,
    /// `tokenizer.chat_template`, Jinja.
    pub chat_template: Option<String>,
}
