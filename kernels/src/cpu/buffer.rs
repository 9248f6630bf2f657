//! Activations.

use super::CpuError;
use super::region::Region;

/// Rows are padded to a multiple of this many elements: one panel of output features, one block of input features.
pub(crate) const ROW_PADDING: usize = 32;

/// (rows, columns) of f32, row-major. Rows are padded with zeros, which no operation leaves different from zero as long
/// as a row's numbers are finite, and every operation that writes a row writes its padding too; so kernels need no tails.
pub struct Buffer {
    data: Region<f32>,
    rows: usize,
    columns: usize,
}

impl Buffer {
    pub(crate) fn new(rows: usize, columns: usize) -> Result<Self, CpuError> {
        let len = columns.checked_next_multiple_of(ROW_PADDING).and_then(|stride| stride.checked_mul(rows));
        let len = len.ok_or(CpuError::OutOfMemory { what: "activations", bytes: usize::MAX })?;
        Ok(Self { data: Region::new("activations", len)?, rows, columns })
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns, without padding.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Elements from one row to the next.
    pub(crate) fn stride(&self) -> usize {
        self.columns.next_multiple_of(ROW_PADDING)
    }

    /// Row `row`, (columns).
    ///
    /// # Panics
    /// When there is no such row.
    pub fn row(&self, row: usize) -> &[f32] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        &self.data[row * self.stride()..][..self.columns]
    }

    /// Row `row`, (columns), to write.
    ///
    /// # Panics
    /// When there is no such row.
    pub fn row_mut(&mut self, row: usize) -> &mut [f32] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        let (stride, columns) = (self.stride(), self.columns);
        &mut self.data[row * stride..][..columns]
    }

    /// Row `row` with its padding.
    #[cfg(test)]
    pub(crate) fn padded_row(&self, row: usize) -> &[f32] {
        &self.data[row * self.stride()..][..self.stride()]
    }

    /// The rows for kernels. They may write them only while the caller holds the buffer exclusively.
    pub(crate) fn pointer(&self) -> Rows {
        Rows { first: self.data.as_ptr(), stride: self.stride() }
    }
}

/// Rows of a [`Buffer`] as kernels see them, from several threads at once.
#[derive(Clone, Copy)]
pub(crate) struct Rows {
    first: *mut f32,
    /// Elements from one row to the next, a multiple of `ROW_PADDING`; all of them may be read and written.
    pub(crate) stride: usize,
}

// SAFETY: a pointer and a length; whoever dereferences it answers for the accesses being disjoint.
unsafe impl Send for Rows {}
// SAFETY: as above.
unsafe impl Sync for Rows {}

impl Rows {
    /// Rows of `stride` elements from `first` on.
    pub(crate) fn new(first: *mut f32, stride: usize) -> Self {
        Self { first, stride }
    }

    /// The first element of row `row`.
    ///
    /// # Safety
    /// The buffer lives and has such a row.
    #[inline(always)]
    pub(crate) unsafe fn row(self, row: usize) -> *mut f32 {
        // SAFETY: inside the buffer by the contract.
        unsafe { self.first.add(row * self.stride) }
    }
}
