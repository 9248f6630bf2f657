//! The tensors of a model: their names in a file, their shapes, and the way onto a device.

use super::architecture::Architecture;
use super::error::ModelError;
use super::gguf::Gguf;
use super::rope::FREQUENCY_DIVISORS;
use crate::backend::{Backend, Linear, TensorView};

/// Names of the tensors that stand once.
pub(super) mod names {
    pub(crate) const TOKEN_EMBEDDING: &str = "token_embd.weight";
    pub(crate) const OUTPUT_NORM: &str = "output_norm.weight";
    pub(crate) const OUTPUT: &str = "output.weight";
}

/// The tensors of a layer, `blk.N.` before each: name, and how shapes follow from the architecture.
struct Part {
    name: &'static str,
    rows: fn(&Architecture) -> usize,
    columns: fn(&Architecture) -> usize,
    optional: bool,
}

const fn matrix(name: &'static str, rows: fn(&Architecture) -> usize, columns: fn(&Architecture) -> usize) -> Part {
    Part { name, rows, columns, optional: false }
}

const fn bias(name: &'static str, columns: fn(&Architecture) -> usize) -> Part {
    Part { name, rows: |_| 1, columns, optional: true }
}

const ATTN_NORM: Part = matrix("attn_norm.weight", |_| 1, |a| a.hidden);
const ATTN_Q: Part = matrix("attn_q.weight", Architecture::query_columns, |a| a.hidden);
const ATTN_K: Part = matrix("attn_k.weight", Architecture::kv_columns, |a| a.hidden);
const ATTN_V: Part = matrix("attn_v.weight", Architecture::kv_columns, |a| a.hidden);
const ATTN_OUTPUT: Part = matrix("attn_output.weight", |a| a.hidden, Architecture::query_columns);
const FFN_NORM: Part = matrix("ffn_norm.weight", |_| 1, |a| a.hidden);
const FFN_GATE: Part = matrix("ffn_gate.weight", |a| a.feed_forward, |a| a.hidden);
const FFN_UP: Part = matrix("ffn_up.weight", |a| a.feed_forward, |a| a.hidden);
const FFN_DOWN: Part = matrix("ffn_down.weight", |a| a.hidden, |a| a.feed_forward);
const ATTN_Q_BIAS: Part = bias("attn_q.bias", Architecture::query_columns);
const ATTN_K_BIAS: Part = bias("attn_k.bias", Architecture::kv_columns);
const ATTN_V_BIAS: Part = bias("attn_v.bias", Architecture::kv_columns);
const ATTN_OUTPUT_BIAS: Part = bias("attn_output.bias", |a| a.hidden);
const FFN_GATE_BIAS: Part = bias("ffn_gate.bias", |a| a.feed_forward);
const FFN_UP_BIAS: Part = bias("ffn_up.bias", |a| a.feed_forward);
const FFN_DOWN_BIAS: Part = bias("ffn_down.bias", |a| a.hidden);

/// Everything a layer may hold.
const PARTS: [Part; 16] = [
    ATTN_NORM,
    ATTN_Q,
    ATTN_K,
    ATTN_V,
    ATTN_OUTPUT,
    FFN_NORM,
    FFN_GATE,
    FFN_UP,
    FFN_DOWN,
    ATTN_Q_BIAS,
    ATTN_K_BIAS,
    ATTN_V_BIAS,
    ATTN_OUTPUT_BIAS,
    FFN_GATE_BIAS,
    FFN_UP_BIAS,
    FFN_DOWN_BIAS,
];

/// One layer on a device.
#[derive(Debug)]
#[allow(missing_docs, reason = "the names are the file's")]
pub struct LayerWeights<W> {
    pub attn_norm: W,
    pub attn_q: Linear<W>,
    pub attn_k: Linear<W>,
    pub attn_v: Linear<W>,
    pub attn_output: Linear<W>,
    pub ffn_norm: W,
    pub ffn_gate: Linear<W>,
    pub ffn_up: Linear<W>,
    pub ffn_down: Linear<W>,
}

/// A model on a device.
#[derive(Debug)]
pub struct Weights<W> {
    /// (vocab, hidden).
    pub token_embedding: W,
    /// In order.
    pub layers: Vec<LayerWeights<W>>,
    /// (hidden).
    pub output_norm: W,
    /// (vocab, hidden); none when the embedding table serves.
    pub output: Option<W>,
}

/// Checks that every tensor the architecture needs is there in its shape, and that no tensor is there that the forward
/// pass would leave out: a model with more in it than we compute gives wrong answers, not an error.
pub(super) fn check(gguf: &Gguf, architecture: &Architecture) -> Result<(), ModelError> {
    let mut used = 0;
    let mut find = |name: &str, rows: usize, columns: usize, optional: bool| match find(gguf, name, rows, columns) {
        Ok(_) => {
            used += 1;
            Ok(())
        }
        Err(ModelError::MissingTensor { .. }) if optional => Ok(()),
        Err(error) => Err(error),
    };
    let a = architecture;
    find(names::TOKEN_EMBEDDING, a.vocab_size, a.hidden, false)?;
    find(names::OUTPUT_NORM, 1, a.hidden, false)?;
    find(names::OUTPUT, a.vocab_size, a.hidden, true)?;
    for layer in 0..a.layers {
        for part in &PARTS {
            find(&part.name_in(layer), (part.rows)(a), (part.columns)(a), part.optional)?;
        }
    }
    used += usize::from(gguf.tensor(FREQUENCY_DIVISORS).is_some());
    if used == gguf.tensors().len() {
        return Ok(());
    }
    let unknown = gguf.tensors().iter().find(|t| !known(&t.name, a)).map_or("", |t| &t.name);
    Err(ModelError::Unsupported(format!("tensor {unknown}: the architecture {} has no use for it", a.name)))
}

fn known(name: &str, architecture: &Architecture) -> bool {
    [names::TOKEN_EMBEDDING, names::OUTPUT_NORM, names::OUTPUT, FREQUENCY_DIVISORS].contains(&name)
        || (0..architecture.layers).any(|layer| PARTS.iter().any(|part| part.name_in(layer) == name))
}

impl Part {
    fn name_in(&self, layer: usize) -> String {
        format!("blk.{layer}.{}", self.name)
    }
}

fn find<'a>(gguf: &'a Gguf, name: &str, rows: usize, columns: usize) -> Result<TensorView<'a>, ModelError> {
    let tensor = gguf.tensor(name).ok_or_else(|| ModelError::MissingTensor { name: name.to_owned() })?;
    let (expected, found) = ((rows, columns), (tensor.rows, tensor.columns));
    if found != expected {
        return Err(ModelError::TensorShape { name: name.to_owned(), expected, found });
    }
    Ok(tensor)
}

/// Brings a model that was checked onto a device. `progress(done, total)` is called after every tensor, in bytes of the
/// file.
pub fn upload<B: Backend>(
    backend: &mut B,
    gguf: &Gguf,
    architecture: &Architecture,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Weights<B::Weight>, ModelError> {
    // The divisors went into the architecture's angles.
    let divisors = gguf.tensor(FREQUENCY_DIVISORS).map_or(0, |t| t.bytes.len() as u64);
    let total = gguf.tensor_bytes() - divisors;
    let mut upload = Upload { backend, gguf, architecture, progress, done: 0, total };
    let a = architecture;
    Ok(Weights {
        token_embedding: upload.tensor(names::TOKEN_EMBEDDING, a.vocab_size, a.hidden)?,
        layers: (0..a.layers).map(|layer| upload.layer(layer)).collect::<Result<_, _>>()?,
        output_norm: upload.tensor(names::OUTPUT_NORM, 1, a.hidden)?,
        output: match a.tied_embeddings {
            true => None,
            false => Some(upload.tensor(names::OUTPUT, a.vocab_size, a.hidden)?),
        },
    })
}

struct Upload<'a, B> {
    backend: &'a mut B,
    gguf: &'a Gguf,
    architecture: &'a Architecture,
    progress: &'a mut dyn FnMut(u64, u64),
    done: u64,
    total: u64,
}

impl<B: Backend> Upload<'_, B> {
    fn tensor(&mut self, name: &str, rows: usize, columns: usize) -> Result<B::Weight, ModelError> {
        let tensor = find(self.gguf, name, rows, columns)?;
        let weight = self.backend.upload(tensor)?;
        self.done += tensor.bytes.len() as u64;
        (self.progress)(self.done, self.total);
        Ok(weight)
    }

    fn part(&mut self, part: &Part, layer: usize) -> Result<B::Weight, ModelError> {
        self.tensor(&part.name_in(layer), (part.rows)(self.architecture), (part.columns)(self.architecture))
    }

    fn linear(&mut self, weight: &Part, bias: &Part, layer: usize) -> Result<Linear<B::Weight>, ModelError> {
        Ok(Linear {
            weight: self.part(weight, layer)?,
            bias: match self.gguf.tensor(&bias.name_in(layer)) {
                Some(_) => Some(self.part(bias, layer)?),
                None => None,
            },
        })
    }

    fn layer(&mut self, layer: usize) -> Result<LayerWeights<B::Weight>, ModelError> {
        Ok(LayerWeights {
            attn_norm: self.part(&ATTN_NORM, layer)?,
            attn_q: self.linear(&ATTN_Q, &ATTN_Q_BIAS, layer)?,
            attn_k: self.linear(&ATTN_K, &ATTN_K_BIAS, layer)?,
            attn_v: self.linear(&ATTN_V, &ATTN_V_BIAS, layer)?,
            attn_output: self.linear(&ATTN_OUTPUT, &ATTN_OUTPUT_BIAS, layer)?,
            ffn_norm: self.part(&FFN_NORM, layer)?,
            ffn_gate: self.linear(&FFN_GATE, &FFN_GATE_BIAS, layer)?,
            ffn_up: self.linear(&FFN_UP, &FFN_UP_BIAS, layer)?,
            ffn_down: self.linear(&FFN_DOWN, &FFN_DOWN_BIAS, layer)?,
        })
    }
}
