//! Weights on the device.

use super::buffer::ROW_PADDING;
use super::panel::{FormatKind, PANEL_ROWS};
use super::pool::{Pool, split};
use super::region::Region;
use super::{Activations, CpuError};
use crate::quant::{BLOCK, WeightType, dequantize_row};
use std::sync::atomic::{AtomicBool, Ordering};

/// A matrix (output features, input features), or a vector, which is a matrix of one row.
pub struct Weight {
    rows: usize,
    columns: usize,
    storage: Storage,
}

enum Storage {
    /// For the integer kernels.
    Panels { format: FormatKind, data: Region<u8> },
    /// As in the file, for the f32 kernels.
    Rows { ty: WeightType, row_bytes: usize, data: Region<u8> },
    /// One row in f32, padded with zeros to `ROW_PADDING`.
    Vector(Region<f32>),
}

/// A matrix for the integer kernels.
#[derive(Clone, Copy)]
pub(crate) struct Panels<'a> {
    pub(crate) format: FormatKind,
    /// Panel after panel, each `columns / 32 * format.block_bytes()` bytes.
    pub(crate) data: &'a [u8],
}

/// A matrix for the f32 kernels.
#[derive(Clone, Copy)]
pub(crate) struct FileRows<'a> {
    pub(crate) ty: WeightType,
    pub(crate) row_bytes: usize,
    pub(crate) data: &'a [u8],
    pub(crate) rows: usize,
    pub(crate) columns: usize,
}

/// Which kernels a matrix goes with.
pub(crate) enum Operand<'a> {
    Panels(Panels<'a>),
    Rows(FileRows<'a>),
}

impl Weight {
    pub(crate) fn new(
        pool: &mut Pool,
        activations: Activations,
        ty: WeightType,
        rows: usize,
        columns: usize,
        bytes: &[u8],
    ) -> Result<Self, CpuError> {
        let unsupported = |reason: String| CpuError::Unsupported { reason };
        if rows == 0 || columns == 0 {
            return Err(unsupported(format!("shape ({rows}, {columns}) is empty")));
        }
        let row_bytes = ty
            .row_bytes(columns)
            .ok_or_else(|| unsupported(format!("rows of {columns} elements are not whole blocks of {}", ty.name())))?;
        if row_bytes.checked_mul(rows) != Some(bytes.len()) {
            return Err(unsupported(format!("{} bytes for ({rows}, {columns}) {}", bytes.len(), ty.name())));
        }
        let storage = match FormatKind::of(ty) {
            _ if rows == 1 => {
                let mut data = Region::new("a vector", columns.next_multiple_of(ROW_PADDING))?;
                dequantize_row(ty, bytes, &mut data[..columns]);
                Storage::Vector(data)
            }
            Some(format) if activations != Activations::F32 => {
                Storage::Panels { format, data: pack(pool, format, ty, rows, columns, bytes)? }
            }
            _ => {
                let mut data = Region::new("weights", bytes.len())?;
                data.copy_from_slice(bytes);
                Storage::Rows { ty, row_bytes, data }
            }
        };
        Ok(Self { rows, columns, storage })
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// The elements of a vector, padded with zeros to `ROW_PADDING`.
    pub(crate) fn vector(&self) -> Option<&[f32]> {
        if let Storage::Vector(data) = &self.storage { Some(data) } else { None }
    }

    /// Writes the exact values of row `row` to `out`, (columns).
    pub(crate) fn read_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        assert_eq!(out.len(), self.columns);
        match &self.storage {
            Storage::Panels { format, data } => format.read_row(data, row, out),
            Storage::Rows { ty, row_bytes, data } => dequantize_row(*ty, &data[row * row_bytes..][..*row_bytes], out),
            Storage::Vector(data) => out.copy_from_slice(&data[..self.columns]),
        }
    }

    /// The weight as an operand of a matrix product.
    pub(crate) fn operand(&self) -> Operand<'_> {
        let (rows, columns) = (self.rows, self.columns);
        match &self.storage {
            Storage::Panels { format, data } => Operand::Panels(Panels { format: *format, data }),
            Storage::Rows { ty, row_bytes, data } => {
                Operand::Rows(FileRows { ty: *ty, row_bytes: *row_bytes, data, rows, columns })
            }
            Storage::Vector(data) => {
                let row_bytes = columns * size_of::<f32>();
                // SAFETY: the same memory as bytes, which have no alignment and no invalid patterns.
                let data = unsafe { std::slice::from_raw_parts(data.as_ptr().cast::<u8>(), row_bytes) };
                Operand::Rows(FileRows { ty: WeightType::F32, row_bytes, data, rows, columns })
            }
        }
    }
}

fn pack(
    pool: &mut Pool,
    format: FormatKind,
    ty: WeightType,
    rows: usize,
    columns: usize,
    bytes: &[u8],
) -> Result<Region<u8>, CpuError> {
    let panels = rows.div_ceil(PANEL_ROWS);
    let panel_bytes = columns / BLOCK * format.block_bytes();
    let row_bytes = bytes.len() / rows;
    let len = panels.checked_mul(panel_bytes).ok_or(CpuError::OutOfMemory { what: "weights", bytes: usize::MAX })?;
    let data = Region::<u8>::new("weights", len)?;
    let (threads, fits) = (pool.threads(), AtomicBool::new(true));
    let region = &data;
    pool.run(&|index| {
        for panel in split(panels, index, threads) {
            // SAFETY: panel `panel` of `panels` lies inside the region, and belongs to this thread alone.
            let out = unsafe { std::slice::from_raw_parts_mut(region.as_ptr().add(panel * panel_bytes), panel_bytes) };
            if format.pack(ty, bytes, row_bytes, panel, out).is_none() {
                fits.store(false, Ordering::Relaxed);
            }
        }
    });
    if !fits.into_inner() {
        return Err(CpuError::Unsupported { reason: format!("a {} scale is out of range", ty.name()) });
    }
    Ok(data)
}
