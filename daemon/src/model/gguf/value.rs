//! Metadata values. The format's ten kinds of number become three: what reads them checks ranges, not widths.

use super::cursor::Cursor;
use super::error::GgufError;
use super::limits::{ARRAY_DEPTH_MAX, ARRAY_ELEMENTS_MAX};

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// u8, u16, u32, u64.
    Unsigned(u64),
    /// i8, i16, i32, i64.
    Signed(i64),
    /// f32 (exactly) and f64.
    Float(f64),
    /// One byte, 0 or 1.
    Bool(bool),
    /// UTF-8.
    String(String),
    /// Elements of one type.
    Array(Array),
}

/// The elements of an array.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs, reason = "as in Value")]
pub enum Array {
    Unsigned(Vec<u64>),
    Signed(Vec<i64>),
    Float(Vec<f64>),
    Bool(Vec<bool>),
    String(Vec<String>),
    Array(Vec<Array>),
}

impl Value {
    /// What a message calls it.
    pub fn kind(&self) -> &'static str {
        match self {
            Value::Unsigned(_) => "an unsigned integer",
            Value::Signed(_) => "a signed integer",
            Value::Float(_) => "a number with a fraction",
            Value::Bool(_) => "a boolean",
            Value::String(_) => "a string",
            Value::Array(Array::String(_)) => "an array of strings",
            Value::Array(Array::Array(_)) => "an array of arrays",
            Value::Array(Array::Bool(_)) => "an array of booleans",
            Value::Array(_) => "an array of numbers",
        }
    }
}

/// The format's value types.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

impl ValueType {
    fn read(cursor: &mut Cursor<'_>, key: &str) -> Result<Self, GgufError> {
        let number = cursor.u32(&format_args!("value type of {key}"))?;
        Ok(match number {
            0 => Self::U8,
            1 => Self::I8,
            2 => Self::U16,
            3 => Self::I16,
            4 => Self::U32,
            5 => Self::I32,
            6 => Self::F32,
            7 => Self::Bool,
            8 => Self::String,
            9 => Self::Array,
            10 => Self::U64,
            11 => Self::I64,
            12 => Self::F64,
            _ => {
                return Err(GgufError::BadValue {
                    field: format!("value type of {key}"),
                    found: u64::from(number),
                    reason: "the format has types 0 to 12",
                });
            }
        })
    }

    /// The fewest bytes a value takes in the file: strings and arrays begin with a count.
    fn bytes_min(self) -> u64 {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 | Self::String => 8,
            Self::Array => 12,
        }
    }
}

/// Reads a type and a value of it.
pub(super) fn read_value(cursor: &mut Cursor<'_>, key: &str) -> Result<Value, GgufError> {
    let ty = ValueType::read(cursor, key)?;
    Ok(match ty {
        ValueType::Array => Value::Array(read_array(cursor, key, 1)?),
        ValueType::String => Value::String(read_string(cursor, key)?),
        ValueType::Bool => Value::Bool(read_bool(cursor, key)?),
        ValueType::U8 | ValueType::U16 | ValueType::U32 | ValueType::U64 => {
            Value::Unsigned(read_unsigned(cursor, ty, key)?)
        }
        ValueType::I8 | ValueType::I16 | ValueType::I32 | ValueType::I64 => {
            Value::Signed(read_signed(cursor, ty, key)?)
        }
        ValueType::F32 | ValueType::F64 => Value::Float(read_float(cursor, ty, key)?),
    })
}

/// Reads an element type, a count and the elements. The vectors take at most eight bytes for one of the file (three for
/// one where the elements are strings or arrays), so the file's length bounds the memory.
fn read_array(cursor: &mut Cursor<'_>, key: &str, depth: usize) -> Result<Array, GgufError> {
    if depth > ARRAY_DEPTH_MAX {
        return Err(GgufError::TooDeep { field: key.to_owned(), limit: ARRAY_DEPTH_MAX });
    }
    let ty = ValueType::read(cursor, key)?;
    let count = cursor.count(ARRAY_ELEMENTS_MAX, ty.bytes_min(), &format_args!("array length of {key}"))?;
    Ok(match ty {
        ValueType::Array => {
            Array::Array((0..count).map(|_| read_array(cursor, key, depth + 1)).collect::<Result<_, _>>()?)
        }
        ValueType::String => Array::String((0..count).map(|_| read_string(cursor, key)).collect::<Result<_, _>>()?),
        ValueType::Bool => Array::Bool((0..count).map(|_| read_bool(cursor, key)).collect::<Result<_, _>>()?),
        ValueType::U8 | ValueType::U16 | ValueType::U32 | ValueType::U64 => {
            Array::Unsigned((0..count).map(|_| read_unsigned(cursor, ty, key)).collect::<Result<_, _>>()?)
        }
        ValueType::I8 | ValueType::I16 | ValueType::I32 | ValueType::I64 => {
            Array::Signed((0..count).map(|_| read_signed(cursor, ty, key)).collect::<Result<_, _>>()?)
        }
        ValueType::F32 | ValueType::F64 => {
            Array::Float((0..count).map(|_| read_float(cursor, ty, key)).collect::<Result<_, _>>()?)
        }
    })
}

fn read_string(cursor: &mut Cursor<'_>, key: &str) -> Result<String, GgufError> {
    cursor.string(u64::MAX, &format_args!("value of {key}"))
}

fn read_bool(cursor: &mut Cursor<'_>, key: &str) -> Result<bool, GgufError> {
    match cursor.array::<1>(&format_args!("value of {key}"))? {
        [0] => Ok(false),
        [1] => Ok(true),
        [found] => Err(GgufError::BadValue {
            field: format!("value of {key}"),
            found: u64::from(found),
            reason: "a boolean is 0 or 1",
        }),
    }
}

fn read_unsigned(cursor: &mut Cursor<'_>, ty: ValueType, key: &str) -> Result<u64, GgufError> {
    let field = &format_args!("value of {key}");
    Ok(match ty {
        ValueType::U8 => u64::from(u8::from_le_bytes(cursor.array(field)?)),
        ValueType::U16 => u64::from(u16::from_le_bytes(cursor.array(field)?)),
        ValueType::U32 => u64::from(cursor.u32(field)?),
        _ => cursor.u64(field)?,
    })
}

fn read_signed(cursor: &mut Cursor<'_>, ty: ValueType, key: &str) -> Result<i64, GgufError> {
    let field = &format_args!("value of {key}");
    Ok(match ty {
        ValueType::I8 => i64::from(i8::from_le_bytes(cursor.array(field)?)),
        ValueType::I16 => i64::from(i16::from_le_bytes(cursor.array(field)?)),
        ValueType::I32 => i64::from(i32::from_le_bytes(cursor.array(field)?)),
        _ => i64::from_le_bytes(cursor.array(field)?),
    })
}

fn read_float(cursor: &mut Cursor<'_>, ty: ValueType, key: &str) -> Result<f64, GgufError> {
    let field = &format_args!("value of {key}");
    Ok(match ty {
        ValueType::F32 => f64::from(f32::from_le_bytes(cursor.array(field)?)),
        _ => f64::from_le_bytes(cursor.array(field)?),
    })
}
