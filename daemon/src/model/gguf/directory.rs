//! Header, metadata and tensor table: everything in a file before the tensors' data.

use std::collections::HashMap;

use llmd_kernels::quant::WeightType;

use super::cursor::Cursor;
use super::error::{GgufError, ggml_type_name};
use super::limits;
use super::value::{Value, read_value};

/// Files without `general.alignment`; the format's own number.
const ALIGNMENT_DEFAULT: u64 = 32;

/// All that was read, checked.
#[derive(Debug)]
pub(super) struct Directory {
    pub(super) version: u32,
    pub(super) metadata: Metadata,
    pub(super) tensors: Vec<TensorInfo>,
    /// Name -> index in `tensors`.
    index: HashMap<String, usize>,
}

/// Key -> value.
#[derive(Debug, Default)]
pub struct Metadata {
    values: HashMap<String, Value>,
}

/// A tensor's place and shape. `start + bytes` lies within the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name.
    pub name: String,
    /// Element type.
    pub ty: WeightType,
    /// Innermost first: a matrix is (columns, rows). One to four, none zero, the product within u64.
    pub dimensions: Vec<u64>,
    /// Offset of the data from the start of the file.
    pub start: usize,
    /// Bytes of the data.
    pub bytes: usize,
}

impl TensorInfo {
    /// Elements of the innermost dimension.
    pub fn columns(&self) -> usize {
        self.dimensions[0] as usize
    }

    /// The product of the other dimensions.
    pub fn rows(&self) -> usize {
        self.dimensions[1..].iter().product::<u64>() as usize
    }
}

impl Metadata {
    /// The value of `key`.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key)
    }

    /// All keys, in no order.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.values.keys().map(String::as_str)
    }
}

impl Directory {
    pub(super) fn read(file: &[u8]) -> Result<Self, GgufError> {
        let mut cursor = Cursor::new(file);
        let magic = cursor.array::<4>(&"magic")?;
        if magic != *b"GGUF" {
            return Err(GgufError::NotGguf { found: magic });
        }
        let version = cursor.u32(&"version")?;
        if !(2..=3).contains(&version) {
            let big_endian = (1..=3).contains(&version.swap_bytes());
            return Err(GgufError::Version { found: version, big_endian });
        }
        // The smallest tensor entry: an empty name, its dimension count, one dimension, type, offset. The smallest
        // metadata entry: an empty key, a type, one byte.
        let tensor_count = cursor.count(limits::TENSORS_MAX, 8 + 4 + 8 + 4 + 8, &"tensor_count")?;
        let metadata_count = cursor.count(limits::METADATA_ENTRIES_MAX, 8 + 4 + 1, &"metadata_kv_count")?;

        let metadata = read_metadata(&mut cursor, metadata_count)?;
        let alignment = alignment(&metadata)?;
        let mut entries = Vec::with_capacity(tensor_count);
        let mut index = HashMap::with_capacity(tensor_count);
        for i in 0..tensor_count {
            let entry = TensorEntry::read(&mut cursor, i)?;
            if index.insert(entry.name.clone(), i).is_some() {
                return Err(GgufError::DuplicateTensor { name: entry.name });
            }
            entries.push(entry);
        }
        // A file without tensors may end before the padding does.
        let data_start = (cursor.offset() as u64).next_multiple_of(alignment).min(file.len() as u64);
        let data_bytes = file.len() as u64 - data_start;
        let tensors: Vec<TensorInfo> =
            entries.into_iter().map(|e| e.place(alignment, data_start, data_bytes)).collect::<Result<_, _>>()?;
        refuse_overlap(&tensors)?;
        Ok(Self { version, metadata, tensors, index })
    }

    pub(super) fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.index.get(name).map(|&i| &self.tensors[i])
    }
}

fn read_metadata(cursor: &mut Cursor<'_>, count: usize) -> Result<Metadata, GgufError> {
    let mut values = HashMap::with_capacity(count);
    for i in 0..count {
        let key = cursor.string(limits::KEY_BYTES_MAX, &format_args!("key of metadata entry {i}"))?;
        let value = read_value(cursor, &key)?;
        if values.contains_key(&key) {
            return Err(GgufError::DuplicateKey { key });
        }
        values.insert(key, value);
    }
    Ok(Metadata { values })
}

fn alignment(metadata: &Metadata) -> Result<u64, GgufError> {
    let field = || "general.alignment".to_owned();
    let alignment = match metadata.get("general.alignment") {
        None => return Ok(ALIGNMENT_DEFAULT),
        Some(Value::Unsigned(alignment)) => *alignment,
        Some(_) => {
            return Err(GgufError::BadValue { field: field(), found: 0, reason: "it must be an unsigned integer" });
        }
    };
    if !alignment.is_power_of_two() {
        return Err(GgufError::BadValue { field: field(), found: alignment, reason: "it must be a power of two" });
    }
    if alignment > limits::ALIGNMENT_MAX {
        return Err(GgufError::AboveLimit { field: field(), found: alignment, limit: limits::ALIGNMENT_MAX });
    }
    Ok(alignment)
}

/// A line of the tensor table, before its place is checked.
struct TensorEntry {
    name: String,
    ty: WeightType,
    dimensions: Vec<u64>,
    /// From the start of the data section.
    offset: u64,
    bytes: u64,
}

impl TensorEntry {
    fn read(cursor: &mut Cursor<'_>, i: usize) -> Result<Self, GgufError> {
        let name = cursor.string(limits::TENSOR_NAME_BYTES_MAX, &format_args!("name of tensor {i}"))?;
        let dimension_count = cursor.u32(&format_args!("dimension count of tensor {name}"))?;
        if dimension_count == 0 || dimension_count > limits::DIMENSIONS_MAX {
            return Err(GgufError::BadValue {
                field: format!("dimension count of tensor {name}"),
                found: u64::from(dimension_count),
                reason: "a tensor has 1 to 4 dimensions",
            });
        }
        let dimensions: Vec<u64> = (0..dimension_count)
            .map(|d| cursor.u64(&format_args!("dimension {d} of tensor {name}")))
            .collect::<Result<_, _>>()?;
        let number = cursor.u32(&format_args!("type of tensor {name}"))?;
        let offset = cursor.u64(&format_args!("offset of tensor {name}"))?;
        let Some(ty) = WeightType::from_ggml(number) else {
            return Err(GgufError::TensorType { name, number, ty: ggml_type_name(number) });
        };
        match tensor_bytes(ty, &dimensions) {
            Ok(bytes) => Ok(Self { name, ty, dimensions, offset, bytes }),
            Err(reason) => Err(GgufError::Dimensions { name, dimensions, reason }),
        }
    }

    fn place(self, alignment: u64, data_start: u64, data_bytes: u64) -> Result<TensorInfo, GgufError> {
        let Self { name, ty, dimensions, offset, bytes } = self;
        if !offset.is_multiple_of(alignment) {
            return Err(GgufError::Unaligned { name, offset, alignment });
        }
        if offset.checked_add(bytes).is_none_or(|end| end > data_bytes) {
            return Err(GgufError::OutsideFile { name, offset, bytes, available: data_bytes });
        }
        // Both lie within the file, whose length is a usize.
        let (start, bytes) = ((data_start + offset) as usize, bytes as usize);
        Ok(TensorInfo { name, ty, dimensions, start, bytes })
    }
}

/// Bytes of a tensor, or what is wrong with its dimensions.
fn tensor_bytes(ty: WeightType, dimensions: &[u64]) -> Result<u64, &'static str> {
    let (columns, rows) = (dimensions[0], &dimensions[1..]);
    if dimensions.contains(&0) {
        return Err("a dimension is zero");
    }
    const OVERFLOW: &str = "the product overflows";
    let columns = usize::try_from(columns).map_err(|_| OVERFLOW)?;
    if !columns.is_multiple_of(ty.block_elements()) {
        return Err("the first is not a multiple of the type's block");
    }
    let row_bytes = ty.row_bytes(columns).ok_or(OVERFLOW)? as u64;
    let rows = rows.iter().try_fold(1u64, |product, &d| product.checked_mul(d)).ok_or(OVERFLOW)?;
    rows.checked_mul(row_bytes).ok_or(OVERFLOW)
}

fn refuse_overlap(tensors: &[TensorInfo]) -> Result<(), GgufError> {
    let mut order: Vec<&TensorInfo> = tensors.iter().collect();
    order.sort_unstable_by_key(|t| t.start);
    for pair in order.windows(2) {
        if pair[0].start + pair[0].bytes > pair[1].start {
            return Err(GgufError::Overlap { first: pair[0].name.clone(), second: pair[1].name.clone() });
        }
    }
    Ok(())
}
