//! The numbers that describe a model, read from a file's metadata and checked against each other.

use super::error::ModelError;
use super::gguf::Gguf;
use super::metadata::Keys;
use super::rope::{self, RopeScaling};
use super::weights::names;
use crate::backend::{AttentionSpec, KvSpec, RopeSpec};

/// What separates one architecture's files from another's. All have pre-norm layers of RMSNorm, attention with grouped
/// heads and rotary positions, and a SiLU-gated MLP; biases are there when their tensors are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Family {
    /// `general.architecture`, also the prefix of its keys.
    name: &'static str,
    /// Which elements the rotation pairs; see `RopeSpec::neox`.
    rope_neox: bool,
}

/// The architectures we know. Llama, Mistral, SmolLM and many others write "llama".
const FAMILIES: [Family; 1] = [Family { name: "llama", rope_neox: false }];

/// Upper bounds of what a file may claim; the largest public models stay well below.
#[allow(missing_docs, reason = "the names are those of Architecture's fields")]
pub mod limits {
    pub const LAYERS_MAX: usize = 1024;
    pub const HIDDEN_MAX: usize = 1 << 17;
    pub const FEED_FORWARD_MAX: usize = 1 << 20;
    pub const HEADS_MAX: usize = 1024;
    pub const HEAD_DIM_MAX: usize = 1024;
    pub const VOCAB_MAX: usize = 1 << 22;
    /// Positions are u32 and angles f32: beyond this, neighbouring positions are no longer told apart well.
    pub const CONTEXT_MAX: usize = 1 << 24;
}

/// The numbers of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Architecture {
    /// `general.architecture`.
    pub name: &'static str,
    /// Layers.
    pub layers: usize,
    /// Elements of the residual stream.
    pub hidden: usize,
    /// Elements between the MLP's projections.
    pub feed_forward: usize,
    /// Query heads.
    pub heads: usize,
    /// Key-value heads; divides `heads`.
    pub kv_heads: usize,
    /// Elements of a head; even. heads * head_dim need not be `hidden`.
    pub head_dim: usize,
    /// Added to the mean square before the root.
    pub rms_norm_eps: f32,
    /// Positions the model was made for.
    pub context_length: usize,
    /// Ids.
    pub vocab_size: usize,
    /// How positions are stretched.
    pub rope_scaling: RopeScaling,
    /// The angles that follow from it.
    pub rope: RopeSpec,
    /// Multiplies attention scores.
    pub attention_scale: f32,
    /// Logits come from the embedding table: the file has no matrix of their own.
    pub tied_embeddings: bool,
}

impl Architecture {
    /// Reads and checks the description of a model.
    pub fn read(gguf: &Gguf) -> Result<Self, ModelError> {
        let family = family(gguf)?;
        let prefix = format!("{}.", family.name);
        let keys = Keys { metadata: gguf.metadata(), prefix: &prefix };
        refuse_unsupported(&keys)?;

        let need = |suffix: &str, max: usize| keys.required(suffix, keys.count(suffix, 1..=max)?);
        let layers = need("block_count", limits::LAYERS_MAX)?;
        let hidden = need("embedding_length", limits::HIDDEN_MAX)?;
        let feed_forward = need("feed_forward_length", limits::FEED_FORWARD_MAX)?;
        let context_length = need("context_length", limits::CONTEXT_MAX)?;
        let heads = need("attention.head_count", limits::HEADS_MAX)?;
        let kv_heads = keys.count("attention.head_count_kv", 1..=limits::HEADS_MAX)?.unwrap_or(heads);
        if !heads.is_multiple_of(kv_heads) {
            return Err(keys.bad("attention.head_count_kv", kv_heads, format!("it must divide the {heads} heads")));
        }
        let head_dim = head_dim(&keys, hidden, heads)?;
        let eps_key = "attention.layer_norm_rms_epsilon";
        let rms_norm_eps = keys.required(eps_key, keys.float(eps_key, f64::from(f32::MIN_POSITIVE)..=1.0)?)? as f32;
        let scale = keys.float("attention.scale", 0.0..=1e3)?.filter(|&scale| scale != 0.0);

        let dimensions = keys.count("rope.dimension_count", 2..=head_dim)?.unwrap_or(head_dim);
        if !dimensions.is_multiple_of(2) {
            return Err(keys.bad("rope.dimension_count", dimensions, "it must be even"));
        }
        let base = keys.float("rope.freq_base", 2.0..=1e12)?.unwrap_or(10_000.0);
        let rope_scaling = RopeScaling::read(&keys, context_length)?;
        let divisors = rope::frequency_divisors(gguf, dimensions)?;

        Ok(Self {
            name: family.name,
            layers,
            hidden,
            feed_forward,
            heads,
            kv_heads,
            head_dim,
            rms_norm_eps,
            context_length,
            vocab_size: vocab_size(gguf, &keys)?,
            rope_scaling,
            rope: rope_scaling.spec(dimensions, base, family.rope_neox, divisors.as_deref()),
            attention_scale: scale.map_or_else(|| 1.0 / (head_dim as f32).sqrt(), |scale| scale as f32),
            tied_embeddings: gguf.tensor(names::OUTPUT).is_none(),
        })
    }

    /// Columns of all query heads together.
    pub fn query_columns(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Columns of all key (or value) heads together.
    pub fn kv_columns(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Parameters of its attention.
    pub fn attention(&self) -> AttentionSpec {
        AttentionSpec {
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            scale: self.attention_scale,
        }
    }

    /// The shape of `blocks` blocks of its key-value memory.
    pub fn kv_spec(&self, blocks: usize) -> KvSpec {
        KvSpec { layers: self.layers, kv_heads: self.kv_heads, head_dim: self.head_dim, blocks }
    }
}

fn family(gguf: &Gguf) -> Result<Family, ModelError> {
    let keys = Keys { metadata: gguf.metadata(), prefix: "general." };
    let found = keys.required("architecture", keys.string("architecture")?)?;
    FAMILIES.into_iter().find(|f| f.name == found).ok_or_else(|| ModelError::UnknownArchitecture {
        found: found.to_owned(),
        known: FAMILIES.map(|f| f.name).join(", "),
    })
}

/// What files of a known architecture may ask for beyond what the forward pass computes.
fn refuse_unsupported(keys: &Keys<'_>) -> Result<(), ModelError> {
    if let Some(experts) = keys.count("expert_count", 0..=usize::MAX)?.filter(|&n| n > 0) {
        return Err(ModelError::Unsupported(format!("a mixture of {experts} experts ({})", keys.key("expert_count"))));
    }
    if keys.bool("attention.causal")? == Some(false) {
        return Err(ModelError::Unsupported(format!(
            "attention that is not causal ({})",
            keys.key("attention.causal")
        )));
    }
    let window = keys.count("attention.sliding_window", 0..=usize::MAX)?.filter(|&n| n > 0);
    let context = keys.count("context_length", 0..=usize::MAX)?.unwrap_or(0);
    match window {
        Some(window) if window < context => Err(ModelError::Unsupported(format!(
            "a sliding window of {window} in a context of {context} ({})",
            keys.key("attention.sliding_window")
        ))),
        _ => Ok(()),
    }
}

fn head_dim(keys: &Keys<'_>, hidden: usize, heads: usize) -> Result<usize, ModelError> {
    let key_length = keys.count("attention.key_length", 1..=limits::HEAD_DIM_MAX)?;
    let head_dim = match key_length {
        Some(length) => length,
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => {
            return Err(keys.bad("attention.head_count", heads, format!("it must divide the {hidden} elements")));
        }
    };
    let value_length = keys.count("attention.value_length", 1..=limits::HEAD_DIM_MAX)?.unwrap_or(head_dim);
    if value_length != head_dim {
        return Err(ModelError::Unsupported(format!("keys of {head_dim} elements with values of {value_length}")));
    }
    if !head_dim.is_multiple_of(2) || head_dim > limits::HEAD_DIM_MAX {
        return Err(ModelError::Unsupported(format!("heads of {head_dim} elements")));
    }
    Ok(head_dim)
}

/// The embedding table's rows; `vocab_size`, where the file has it, must say the same.
fn vocab_size(gguf: &Gguf, keys: &Keys<'_>) -> Result<usize, ModelError> {
    let table = gguf.tensor(names::TOKEN_EMBEDDING);
    let rows = table.ok_or_else(|| ModelError::MissingTensor { name: names::TOKEN_EMBEDDING.to_owned() })?.rows;
    if rows > limits::VOCAB_MAX {
        return Err(ModelError::Unsupported(format!("a vocabulary of {rows} ids")));
    }
    match keys.count("vocab_size", 1..=limits::VOCAB_MAX)? {
        Some(stated) if stated != rows => {
            Err(keys.bad("vocab_size", stated, format!("the embedding table has {rows} rows")))
        }
        _ => Ok(rows),
    }
}

#[cfg(test)]
mod tests {
    use super::super::gguf::writer::{Writer, tiny_llama};
    use super::super::{LoadedModel, ModelError};
    use super::*;

    fn load(writer: &Writer) -> Result<LoadedModel, ModelError> {
        LoadedModel::from_gguf(Gguf::from_bytes(writer.bytes())?, "tiny")
    }

    /// What the loader says of the tiny model after a change.
    fn complaint(change: impl FnOnce(&mut Writer)) -> String {
        let mut writer = tiny_llama();
        change(&mut writer);
        load(&writer).expect_err("must be refused").to_string()
    }

    #[test]
    fn a_whole_model_is_read() {
        let model = load(&tiny_llama()).unwrap();
        let a = &model.architecture;
        assert_eq!((a.layers, a.hidden, a.feed_forward, a.heads, a.kv_heads, a.head_dim), (2, 64, 96, 4, 2, 16));
        assert_eq!((a.vocab_size, a.context_length, a.tied_embeddings), (32, 128, true));
        assert_eq!(a.attention_scale, 0.25);
        assert_eq!((a.rope.dimensions, a.rope.neox, a.rope.magnitude), (16, false, 1.0));
        assert_eq!(model.name, "tiny");
        assert_eq!(model.tokenizer.tokens.len(), 32);
        assert_eq!((model.tokenizer.bos, model.tokenizer.eos, model.tokenizer.eot), (Some(1), Some(2), None));
        assert_eq!(model.tokenizer.add_bos, Some(false));
    }

    #[test]
    fn optional_keys() {
        let mut writer = tiny_llama();
        writer.u32("llama.attention.key_length", 32);
        writer.f32("llama.attention.scale", 0.5);
        writer.string("llama.rope.scaling.type", "linear");
        writer.f32("llama.rope.scaling.factor", 2.0);
        writer.drop_key("llama.attention.head_count_kv");
        writer.drop_key("llama.rope.freq_base");
        for layer in 0..2 {
            for (part, rows, columns) in
                [("attn_q", 128, 64), ("attn_k", 128, 64), ("attn_v", 128, 64), ("attn_output", 64, 128)]
            {
                writer.replace_f32(&format!("blk.{layer}.{part}.weight"), rows, columns);
            }
            writer.replace_f32(&format!("blk.{layer}.attn_q.bias"), 1, 128);
        }
        writer.replace_f32("output.weight", 32, 64);
        let a = load(&writer).unwrap().architecture;
        assert_eq!((a.kv_heads, a.head_dim, a.query_columns(), a.attention_scale), (4, 32, 128, 0.5));
        assert_eq!(a.rope_scaling, RopeScaling::Linear { factor: 2.0 });
        assert_eq!(a.rope.dimensions, 16, "rope.dimension_count is still said");
        assert_eq!(a.rope.inverse_frequencies[0], 0.5);
        assert!(!a.tied_embeddings);
    }

    #[test]
    fn what_makes_no_sense_is_refused_by_name() {
        for (key, value, part) in [
            ("llama.block_count", 0, "llama.block_count"),
            ("llama.block_count", 3, "blk.2."),
            ("llama.embedding_length", 96, "token_embd.weight"),
            ("llama.attention.head_count", 0, "llama.attention.head_count"),
            ("llama.attention.head_count", 5, "must divide"),
            ("llama.attention.head_count_kv", 3, "must divide the 4 heads"),
            ("llama.context_length", u32::MAX, "llama.context_length"),
            ("llama.rope.dimension_count", 15, "even"),
            ("llama.rope.dimension_count", 18, "2 to 16"),
            ("llama.vocab_size", 33, "32 rows"),
            ("llama.expert_count", 8, "8 experts"),
            ("llama.attention.sliding_window", 64, "sliding window"),
            ("llama.attention.value_length", 8, "values of 8"),
            ("tokenizer.ggml.eos_token_id", 32, "tokenizer.ggml.eos_token_id"),
        ] {
            let message = complaint(|w| w.u32(key, value));
            assert!(message.contains(part), "{key} = {value}: {message}");
        }
        for key in ["llama.block_count", "llama.attention.layer_norm_rms_epsilon", "tokenizer.ggml.tokens"] {
            let message = complaint(|w| w.drop_key(key));
            assert_eq!(message, format!("metadata key {key} is missing"));
        }
        assert!(complaint(|w| w.string("llama.block_count", "two")).contains("must be a whole number, found a string"));
        assert!(complaint(|w| w.string("general.architecture", "mamba")).contains("known: llama"));
        assert!(complaint(|w| w.string("llama.rope.scaling.type", "longrope")).contains("longrope"));
        assert!(complaint(|w| w.f32("llama.attention.layer_norm_rms_epsilon", f32::NAN)).contains("NaN"));
        assert!(complaint(|w| w.drop_tensor("blk.1.ffn_up.weight")).contains("blk.1.ffn_up.weight is missing"));
        assert!(complaint(|w| w.replace_f32("blk.1.ffn_up.weight", 64, 96)).contains("(96, 64)"));
        assert!(complaint(|w| w.replace_f32("blk.0.attn_q.bias", 1, 63)).contains("blk.0.attn_q.bias"));
        assert!(complaint(|w| w.replace_f32("rope_freqs.weight", 1, 7)).contains("rope_freqs.weight"));
        assert!(complaint(|w| w.replace_f32("blk.0.attn_q_norm.weight", 1, 16)).contains("blk.0.attn_q_norm.weight"));
    }
}
