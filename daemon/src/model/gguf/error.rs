//! What can be wrong with a GGUF file.

use std::path::PathBuf;

/// Why a file was refused. `field` names the place: a header field, a metadata key or a tensor.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum GgufError {
    /// The file could not be opened or mapped.
    #[error("cannot read {}: {source}; give the path of a GGUF file that this user may read", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    /// The first four bytes are not "GGUF".
    #[error("not a GGUF file: it begins with \"{}\", not with \"GGUF\"; convert the model to GGUF first", found.escape_ascii())]
    NotGguf { found: [u8; 4] },
    /// A version whose layout differs.
    #[error("GGUF version {found}: versions 2 and 3, little-endian, are read{}", if *big_endian { " (this file is big-endian)" } else { "" })]
    Version { found: u32, big_endian: bool },
    /// The file ends inside a field.
    #[error(
        "the file ends in {field} ({needed} bytes wanted at offset {offset}, {available} left): it is incomplete, copy or \
         download it again"
    )]
    Truncated { field: String, offset: u64, needed: u64, available: u64 },
    /// A count or length above its limit.
    #[error("{field}: {found} is above the limit of {limit}")]
    AboveLimit { field: String, found: u64, limit: u64 },
    /// A value that is not one of those allowed.
    #[error("{field}: {found} is not allowed: {reason}")]
    BadValue { field: String, found: u64, reason: &'static str },
    /// Bytes that are no UTF-8.
    #[error("{field} is not UTF-8")]
    NotUtf8 { field: String },
    /// Arrays nested too deeply.
    #[error("{field}: arrays nested more than {limit} deep")]
    TooDeep { field: String, limit: usize },
    /// A metadata key that stands twice.
    #[error("metadata key {key} stands twice")]
    DuplicateKey { key: String },
    /// A tensor that stands twice.
    #[error("tensor {name} stands twice")]
    DuplicateTensor { name: String },
    /// An element type we do not read.
    #[error("tensor {name} is of type {ty} ({number}); types read: {}", known_types())]
    TensorType { name: String, number: u32, ty: &'static str },
    /// Dimensions that make no tensor.
    #[error("tensor {name}: dimensions {dimensions:?}: {reason}")]
    Dimensions { name: String, dimensions: Vec<u64>, reason: &'static str },
    /// Data that does not start on the alignment.
    #[error("tensor {name}: offset {offset} is not a multiple of the alignment {alignment}")]
    Unaligned { name: String, offset: u64, alignment: u64 },
    /// Data outside the file.
    #[error(
        "tensor {name}: {bytes} bytes at offset {offset} of the data do not fit in the {available} that the file has: it is \
         incomplete, copy or download it again"
    )]
    OutsideFile { name: String, offset: u64, bytes: u64, available: u64 },
    /// Two tensors that share bytes.
    #[error("tensors {first} and {second} overlap")]
    Overlap { first: String, second: String },
}

fn known_types() -> String {
    llmd_kernels::quant::WeightType::ALL.map(|t| t.name()).join(", ")
}

/// ggml's names of the types it has and we do not read, for messages.
pub(super) fn ggml_type_name(number: u32) -> &'static str {
    match number {
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        39 => "MXFP4",
        _ => "unknown",
    }
}
