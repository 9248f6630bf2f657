//! Writes GGUF version 3 files: just enough for models made up in tests.
//!
//! Written from the format's public description (ggml's `docs/gguf.md`), and not with anything of the reader's: a
//! misunderstanding shared by both would be invisible.
//!
//! ```text
//! "GGUF" | version u32 = 3 | tensors u64 | pairs u64
//! pairs:    key string | type u32 | value
//! tensors:  name string | dimensions u32 | u64 each, the fastest first | type u32 | offset u64
//! padding to 32, then the tensors' bytes, each begun at a multiple of 32; offsets count from the first of them
//! string:   length u64 | bytes          array: type u32 | length u64 | values          all little-endian
//! ```

/// Tensor data begins at multiples of this.
pub const ALIGNMENT: usize = 32;

/// A metadata value.
#[derive(Debug, Clone)]
pub enum Value {
    /// Type 4.
    U32(u32),
    /// Type 6.
    F32(f32),
    /// Type 7.
    Bool(bool),
    /// Type 8.
    Text(String),
    /// Type 9 of type 8.
    Texts(Vec<String>),
    /// Type 9 of type 5.
    I32s(Vec<i32>),
}

/// How a tensor's elements are stored here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(non_camel_case_types, reason = "the format's own names")]
pub enum Encoding {
    /// ggml type 0.
    F32,
    /// ggml type 1.
    F16,
    /// ggml type 3: 32 elements share a scale and a minimum (both f16); 4 bits each.
    Q4_1,
    /// ggml type 8: 32 elements share a scale (f16); 8 bits each.
    Q8_0,
}

/// A file being put together.
#[derive(Debug, Default)]
pub struct Writer {
    pairs: Vec<(String, Value)>,
    tensors: Vec<Tensor>,
}

#[derive(Debug)]
struct Tensor {
    name: String,
    /// Fastest first: columns, then rows.
    dimensions: Vec<u64>,
    ggml_type: u32,
    bytes: Vec<u8>,
}

impl Writer {
    /// Adds a metadata pair.
    pub fn pair(&mut self, key: &str, value: Value) {
        self.pairs.push((key.into(), value));
    }

    /// Adds a tensor of `values`, row-major with `columns` elements a row; one row makes a vector.
    pub fn tensor(&mut self, name: &str, encoding: Encoding, columns: usize, values: &[f32]) {
        assert_eq!(values.len() % columns, 0, "{name}: whole rows");
        let rows = values.len() / columns;
        let dimensions = if rows == 1 { vec![columns as u64] } else { vec![columns as u64, rows as u64] };
        let (ggml_type, bytes) = encode(encoding, columns, values);
        self.tensors.push(Tensor { name: name.into(), dimensions, ggml_type, bytes });
    }

    /// The file's bytes.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.pairs.len() as u64).to_le_bytes());
        for (key, value) in &self.pairs {
            put_text(&mut out, key);
            put_value(&mut out, value);
        }
        let mut offset = 0u64;
        for tensor in &self.tensors {
            put_text(&mut out, &tensor.name);
            out.extend((tensor.dimensions.len() as u32).to_le_bytes());
            out.extend(tensor.dimensions.iter().flat_map(|d| d.to_le_bytes()));
            out.extend(tensor.ggml_type.to_le_bytes());
            out.extend(offset.to_le_bytes());
            offset += tensor.bytes.len().next_multiple_of(ALIGNMENT) as u64;
        }
        out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
        for tensor in &self.tensors {
            out.extend(&tensor.bytes);
            out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
        }
        out
    }
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn put_value(out: &mut Vec<u8>, value: &Value) {
    let number: u32 = match value {
        Value::U32(_) => 4,
        Value::F32(_) => 6,
        Value::Bool(_) => 7,
        Value::Text(_) => 8,
        Value::Texts(_) | Value::I32s(_) => 9,
    };
    out.extend(number.to_le_bytes());
    match value {
        Value::U32(v) => out.extend(v.to_le_bytes()),
        Value::F32(v) => out.extend(v.to_le_bytes()),
        Value::Bool(v) => out.push(u8::from(*v)),
        Value::Text(v) => put_text(out, v),
        Value::Texts(v) => {
            out.extend(8u32.to_le_bytes());
            out.extend((v.len() as u64).to_le_bytes());
            v.iter().for_each(|text| put_text(out, text));
        }
        Value::I32s(v) => {
            out.extend(5u32.to_le_bytes());
            out.extend((v.len() as u64).to_le_bytes());
            out.extend(v.iter().flat_map(|number| number.to_le_bytes()));
        }
    }
}

/// ggml's type number, and the bytes of whole rows.
fn encode(encoding: Encoding, columns: usize, values: &[f32]) -> (u32, Vec<u8>) {
    let f16 = |value: f32| half::f16::from_f32(value).to_le_bytes();
    match encoding {
        Encoding::F32 => (0, values.iter().flat_map(|v| v.to_le_bytes()).collect()),
        Encoding::F16 => (1, values.iter().flat_map(|v| f16(*v)).collect()),
        Encoding::Q4_1 | Encoding::Q8_0 => {
            assert_eq!(columns % 32, 0, "whole blocks");
            let number = if encoding == Encoding::Q4_1 { 3 } else { 8 };
            let mut bytes = Vec::new();
            for block in values.chunks_exact(32) {
                match encoding {
                    Encoding::Q4_1 => {
                        let min = block.iter().copied().fold(f32::INFINITY, f32::min);
                        let max = block.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                        let scale = (max - min) / 15.0;
                        let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
                        let quant = |v: f32| (((v - min) * inverse).round() as u8).min(15);
                        bytes.extend(f16(scale));
                        bytes.extend(f16(min));
                        // Element i lies in the low half of byte i, element i + 16 in the high half.
                        bytes.extend((0..16).map(|i| quant(block[i]) | quant(block[i + 16]) << 4));
                    }
                    _ => {
                        let most = block.iter().fold(0.0f32, |most, v| most.max(v.abs()));
                        let scale = most / 127.0;
                        let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
                        bytes.extend(f16(scale));
                        bytes.extend(block.iter().map(|v| (v * inverse).round() as i8 as u8));
                    }
                }
            }
            (number, bytes)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_of_a_small_file_stay_what_they_are() {
        let mut writer = Writer::default();
        writer.pair("k", Value::U32(7));
        writer.tensor("t", Encoding::F32, 2, &[1.0, 2.0]);
        let bytes = writer.bytes();
        let head = b"GGUF\x03\0\0\0\x01\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\
                     \x01\0\0\0\0\0\0\0k\x04\0\0\0\x07\0\0\0\
                     \x01\0\0\0\0\0\0\0t\x01\0\0\0\x02\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
        assert_eq!(&bytes[..head.len()], head);
        let data = head.len().next_multiple_of(ALIGNMENT);
        assert_eq!(&bytes[data..data + 8], b"\0\0\x80?\0\0\0@");
        assert_eq!(bytes.len() % ALIGNMENT, 0);
    }

    #[test]
    fn quantised_blocks_come_back_within_half_a_step() {
        let values: Vec<f32> = (0..32).map(|i| (i as f32 * 0.7).sin()).collect();
        let half_at = |b: &[u8], at: usize| half::f16::from_le_bytes([b[at], b[at + 1]]).to_f32();
        let (_, q4) = encode(Encoding::Q4_1, 32, &values);
        let (scale, min) = (half_at(&q4, 0), half_at(&q4, 2));
        for (i, value) in values.iter().enumerate() {
            let quant = if i < 16 { q4[4 + i] & 15 } else { q4[4 + i - 16] >> 4 };
            assert!((f32::from(quant) * scale + min - value).abs() <= scale * 0.52, "element {i}");
        }
        let (_, q8) = encode(Encoding::Q8_0, 32, &values);
        let scale = half_at(&q8, 0);
        for (i, value) in values.iter().enumerate() {
            assert!((f32::from(q8[2 + i] as i8) * scale - value).abs() <= scale * 0.6, "element {i}");
        }
    }
}
