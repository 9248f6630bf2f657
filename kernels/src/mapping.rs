//! Read-only file mappings, so that no other crate needs unsafe code to read a model file.

use std::fs::File;
use std::io;
use std::path::Path;

/// A file mapped read-only and private.
///
/// The bytes belong to whoever may write the file: a model that is overwritten in place while the daemon runs changes
/// under it, and one that is truncated raises SIGBUS. Replace model files by rename, as package managers do. Every
/// parser of the bytes checks what it reads, so a change can give wrong numbers but no access out of bounds.
#[derive(Debug)]
pub struct MappedFile {
    map: memmap2::Mmap,
}

impl MappedFile {
    /// Maps the whole of `path`.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        // SAFETY: the mapping is private and read-only; the type's documentation states what a concurrent change of
        // the file means, and nothing here relies on the bytes staying equal between two reads for memory safety.
        let map = unsafe { memmap2::Mmap::map(&file)? };
        Ok(Self { map })
    }

    /// The file's bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }
}
