//! Reading fields one after another, with a name for each in case it is not there.

use std::fmt::Display;

use super::error::GgufError;

/// A position in the file's bytes. Every read checks what is left.
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    offset: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, offset: 0 }
    }

    pub(super) fn offset(&self) -> usize {
        self.offset
    }

    /// Bytes not read yet.
    pub(super) fn left(&self) -> usize {
        self.bytes.len() - self.offset
    }

    /// `field` is only turned into text when something is wrong.
    pub(super) fn take(&mut self, length: u64, field: &dyn Display) -> Result<&'a [u8], GgufError> {
        let left = self.left();
        let Some(length) = usize::try_from(length).ok().filter(|&length| length <= left) else {
            return Err(self.truncated(length, field));
        };
        let taken = &self.bytes[self.offset..self.offset + length];
        self.offset += length;
        Ok(taken)
    }

    pub(super) fn array<const N: usize>(&mut self, field: &dyn Display) -> Result<[u8; N], GgufError> {
        let taken = self.take(N as u64, field)?;
        Ok(taken.try_into().expect("take gives the length asked for"))
    }

    pub(super) fn u32(&mut self, field: &dyn Display) -> Result<u32, GgufError> {
        self.array(field).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, field: &dyn Display) -> Result<u64, GgufError> {
        self.array(field).map(u64::from_le_bytes)
    }

    /// A length-prefixed string of at most `limit` bytes; the copy is bounded by the file's own length.
    pub(super) fn string(&mut self, limit: u64, field: &dyn Display) -> Result<String, GgufError> {
        let length = self.u64(field)?;
        if length > limit {
            return Err(GgufError::AboveLimit { field: format!("length of {field}"), found: length, limit });
        }
        let taken = self.take(length, field)?;
        match std::str::from_utf8(taken) {
            Ok(text) => Ok(text.to_owned()),
            Err(_) => Err(GgufError::NotUtf8 { field: field.to_string() }),
        }
    }

    /// A count of things that take at least `bytes_min` bytes each: refused when the rest of the file cannot hold them,
    /// so that it may size an allocation.
    pub(super) fn count(&mut self, limit: u64, bytes_min: u64, field: &dyn Display) -> Result<usize, GgufError> {
        let count = self.u64(field)?;
        if count > limit {
            return Err(GgufError::AboveLimit { field: field.to_string(), found: count, limit });
        }
        let needed = count.saturating_mul(bytes_min);
        if needed > self.left() as u64 {
            return Err(self.truncated(needed, field));
        }
        // At most the number of bytes left, which is a usize.
        Ok(count as usize)
    }

    fn truncated(&self, needed: u64, field: &dyn Display) -> GgufError {
        GgufError::Truncated {
            field: field.to_string(),
            offset: self.offset as u64,
            needed,
            available: self.left() as u64,
        }
    }
}
