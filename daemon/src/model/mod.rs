//! Models: what a file says, the weights it holds, and the forward pass, written once for every architecture and device.
//!
//! ```text
//! gguf/          bytes -> metadata and tensors, every claim checked
//! architecture   metadata -> the numbers that describe a model of the Llama family
//! rope           positions: frequencies and their scaling
//! tokenizer      metadata -> what the tokenizer is built from
//! weights        tensors -> weights on a device, their shapes checked
//! forward        the layers, over `trait Backend`
//! runner         a model on a device, ready to step
//! sizing         how many blocks of key-value memory
//! ```

pub mod architecture;
mod error;
pub mod forward;
pub mod gguf;
mod metadata;
#[cfg(test)]
mod reference_tests;
pub mod rope;
pub mod runner;
pub mod sizing;
mod tokenizer;
pub mod weights;

use std::path::Path;

use crate::text::source::TokenizerSource;
use architecture::Architecture;
pub use error::ModelError;
use gguf::Gguf;
pub use runner::{ModelRunner, Runner, RunnerLimits};

/// A model file that was read and found whole: everything but the upload to a device.
#[derive(Debug)]
pub struct LoadedModel {
    /// `general.name`, or the file's name.
    pub name: String,
    /// The numbers of the model.
    pub architecture: Architecture,
    /// What its tokenizer is built from.
    pub tokenizer: TokenizerSource,
    /// The file, for its tensors.
    pub gguf: Gguf,
}

impl LoadedModel {
    /// Reads a GGUF file: directory, architecture, tokenizer, and the presence and shape of every weight. The weights
    /// themselves are only mapped.
    pub fn load(path: &Path) -> Result<Self, ModelError> {
        let stem = path.file_stem().map_or_else(|| "model".into(), |s| s.to_string_lossy().into_owned());
        Self::from_gguf(Gguf::open(path)?, &stem)
    }

    /// As `load`, from a file already read; `fallback_name` serves if the file does not name itself.
    pub fn from_gguf(gguf: Gguf, fallback_name: &str) -> Result<Self, ModelError> {
        let architecture = Architecture::read(&gguf)?;
        let tokenizer = tokenizer::read(gguf.metadata(), architecture.vocab_size)?;
        weights::check(&gguf, &architecture)?;
        let name = match gguf.metadata().get("general.name") {
            Some(gguf::Value::String(name)) if !name.is_empty() => name.clone(),
            _ => fallback_name.to_owned(),
        };
        Ok(Self { name, architecture, tokenizer, gguf })
    }
}
