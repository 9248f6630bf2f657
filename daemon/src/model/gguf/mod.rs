//! GGUF, versions 2 and 3: the file format of quantised models.
//!
//! ```text
//! magic "GGUF"   u32 version   u64 tensors   u64 metadata entries
//! metadata entry: string key   u32 value type   value
//! tensor:         string name  u32 dimensions   u64 x dimensions (innermost first)  u32 element type   u64 offset
//! padding to `general.alignment`, then the tensors' data; offsets count from here
//! ```
//!
//! Little-endian; a string is a u64 length and UTF-8 bytes. The file is an allegation: every count is checked against
//! the bytes that are left before anything is allocated for it, every offset against the file's length, and a file
//! that lies gets a [`GgufError`] that names the field. The metadata is copied out once; only the tensors' data stays in
//! the mapping. Format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>.

mod cursor;
mod directory;
mod error;
#[cfg(test)]
mod tests;
mod value;
#[cfg(test)]
pub(crate) mod writer;

use std::path::Path;

use llmd_kernels::mapping::MappedFile;

use crate::backend::TensorView;
pub use directory::{Metadata, TensorInfo};
pub use error::GgufError;
pub use value::{Array, Value};

use directory::Directory;

/// Bounds on what a file may claim, beyond what its length already bounds.
pub mod limits {
    /// Metadata entries.
    pub const METADATA_ENTRIES_MAX: u64 = 65_536;
    /// Tensors.
    pub const TENSORS_MAX: u64 = 65_536;
    /// Bytes of a metadata key; the format's own bound.
    pub const KEY_BYTES_MAX: u64 = 65_535;
    /// Bytes of a tensor's name. The format says 64; some converters go beyond.
    pub const TENSOR_NAME_BYTES_MAX: u64 = 256;
    /// Elements of one metadata array. The largest vocabularies have about 260,000 entries, their merges about twice that.
    pub const ARRAY_ELEMENTS_MAX: u64 = 8 << 20;
    /// Arrays within arrays.
    pub const ARRAY_DEPTH_MAX: usize = 4;
    /// Dimensions of a tensor; the format's own bound.
    pub const DIMENSIONS_MAX: u32 = 4;
    /// `general.alignment`. Files have 32; a page is the most anybody could want.
    pub const ALIGNMENT_MAX: u64 = 1 << 20;
}

/// Where a file's bytes are.
#[derive(Debug)]
enum Bytes {
    Mapped(MappedFile),
    Owned(Vec<u8>),
}

/// A GGUF file whose directory has been read and found consistent with its length.
#[derive(Debug)]
pub struct Gguf {
    bytes: Bytes,
    directory: Directory,
}

impl Gguf {
    /// Maps and reads `path`.
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        let file = MappedFile::open(path).map_err(|source| GgufError::Io { path: path.to_owned(), source })?;
        let directory = Directory::read(file.bytes())?;
        Ok(Self { bytes: Bytes::Mapped(file), directory })
    }

    /// Reads a file that is in memory already.
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Self, GgufError> {
        let directory = Directory::read(&bytes)?;
        Ok(Self { bytes: Bytes::Owned(bytes), directory })
    }

    /// The version the file states, 2 or 3.
    pub fn version(&self) -> u32 {
        self.directory.version
    }

    /// Everything the file says but for the tensors.
    pub fn metadata(&self) -> &Metadata {
        &self.directory.metadata
    }

    /// All tensors, in the file's order.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.directory.tensors
    }

    /// The tensor called `name`.
    pub fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        self.directory.tensor(name).map(|info| self.view(info))
    }

    /// Bytes of all tensors' data.
    pub fn tensor_bytes(&self) -> u64 {
        self.tensors().iter().map(|t| t.bytes as u64).sum()
    }

    /// All leading dimensions count as rows: nothing of the Llama family has a tensor of more than two.
    fn view<'a>(&'a self, info: &'a TensorInfo) -> TensorView<'a> {
        let bytes = match &self.bytes {
            Bytes::Mapped(file) => file.bytes(),
            Bytes::Owned(bytes) => bytes,
        };
        TensorView {
            name: &info.name,
            ty: info.ty,
            rows: info.rows(),
            columns: info.columns(),
            bytes: &bytes[info.start..info.start + info.bytes],
        }
    }
}
