//! Why a model cannot be served.

use super::gguf::GgufError;
use crate::backend::BackendError;

/// Why a model file was refused, or could not be brought onto a device.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum ModelError {
    /// The file itself is broken or foreign.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A model of a kind we do not know.
    #[error("architecture {found:?} is not known; known: {known}")]
    UnknownArchitecture { found: String, known: String },
    /// Metadata without which nothing goes.
    #[error("metadata key {key} is missing")]
    MissingKey { key: String },
    /// Metadata of another type.
    #[error("metadata key {key} must be {wanted}, found {found}")]
    WrongType { key: String, wanted: &'static str, found: &'static str },
    /// Metadata that makes no sense.
    #[error("metadata key {key} is {value}: {reason}")]
    BadValue { key: String, value: String, reason: String },
    /// Something real that we do not compute; better refused than computed wrongly.
    #[error("not supported: {0}")]
    Unsupported(String),
    /// A weight that is not there.
    #[error("tensor {name} is missing")]
    MissingTensor { name: String },
    /// A weight of another shape than the metadata says.
    #[error("tensor {name} has (rows, columns) {found:?}, the metadata asks for {expected:?}")]
    TensorShape { name: String, expected: (usize, usize), found: (usize, usize) },
    /// Less memory than the smallest useful cache needs.
    #[error(
        "key-value memory: {available} bytes allow {blocks} blocks of {block_bytes} bytes, {blocks_min} are needed"
    )]
    KvTooSmall { available: u64, block_bytes: usize, blocks: usize, blocks_min: usize },
    /// The device refused.
    #[error(transparent)]
    Backend(#[from] BackendError),
}
