//! True files are read; lying, truncated and foreign ones are refused by name, and nothing panics.

use std::path::Path;

use llmd_kernels::quant::WeightType;
use proptest::prelude::*;

use super::writer::{self, Tensor, Writer};
use super::*;

/// A file with a value of every kind and tensors of three types.
fn sample() -> Writer {
    let mut w = Writer::default();
    w.string("general.architecture", "llama");
    w.value("u8", 0, &[200]);
    w.value("i8", 1, &[0xff]);
    w.value("u16", 2, &60_000u16.to_le_bytes());
    w.value("i16", 3, &(-2i16).to_le_bytes());
    w.u32("u32", 7);
    w.value("i32", 5, &(-7i32).to_le_bytes());
    w.f32("f32", 1e-5);
    w.bool("bool", true);
    w.value("u64", 10, &u64::MAX.to_le_bytes());
    w.value("i64", 11, &i64::MIN.to_le_bytes());
    w.value("f64", 12, &1e-300f64.to_le_bytes());
    w.array("strings", 8, 2, &[writer::string("Ġa"), writer::string("")].concat());
    w.array("nested", 9, 2, &[writer::array(4, 1, &9u32.to_le_bytes()), writer::array(6, 0, &[])].concat());
    w.replace_f32("vector", 1, 5);
    w.tensors.push(Tensor { name: "q8".into(), dimensions: vec![64, 3], ty: 8, data: vec![1; 204], offset: None });
    w.tensors.push(Tensor { name: "cube".into(), dimensions: vec![2, 3, 4], ty: 1, data: vec![2; 48], offset: None });
    w
}

fn refused(w: &Writer) -> String {
    Gguf::from_bytes(w.bytes()).expect_err("must be refused").to_string()
}

/// What is said of the sample after a change.
fn complaint(change: impl FnOnce(&mut Writer)) -> String {
    let mut w = sample();
    change(&mut w);
    refused(&w)
}

/// What is said when the first tensor is changed.
fn tensor_complaint(change: impl FnOnce(&mut Tensor)) -> String {
    complaint(|w| change(&mut w.tensors[0]))
}

#[test]
fn every_kind_of_value_and_tensor_is_read() {
    for version in [2, 3] {
        let gguf = Gguf::from_bytes(Writer { version, ..sample() }.bytes()).unwrap();
        assert_eq!(gguf.version(), version);
        let get = |key| gguf.metadata().get(key).unwrap().clone();
        assert_eq!(get("general.architecture"), Value::String("llama".into()));
        assert_eq!([get("u8"), get("u16"), get("u32"), get("u64")], [200, 60_000, 7, u64::MAX].map(Value::Unsigned));
        assert_eq!([get("i8"), get("i16"), get("i32"), get("i64")], [-1, -2, -7, i64::MIN].map(Value::Signed));
        assert_eq!([get("f32"), get("f64")], [f64::from(1e-5f32), 1e-300].map(Value::Float));
        assert_eq!(get("bool"), Value::Bool(true));
        assert_eq!(get("strings"), Value::Array(Array::String(vec!["Ġa".into(), String::new()])));
        let nested = vec![Array::Unsigned(vec![9]), Array::Float(vec![])];
        assert_eq!(get("nested"), Value::Array(Array::Array(nested)));
        assert!(gguf.metadata().get("absent").is_none());
        assert_eq!(gguf.metadata().keys().count(), 14);

        let tensor = gguf.tensor("q8").unwrap();
        assert_eq!((tensor.ty, tensor.rows, tensor.columns, tensor.bytes), (WeightType::Q8_0, 3, 64, &[1; 204][..]));
        let tensor = gguf.tensor("cube").unwrap();
        assert_eq!((tensor.ty, tensor.rows, tensor.columns, tensor.bytes), (WeightType::F16, 12, 2, &[2; 48][..]));
        let tensor = gguf.tensor("vector").unwrap();
        assert_eq!((tensor.ty, tensor.rows, tensor.columns, tensor.bytes.len()), (WeightType::F32, 1, 5, 20));
        assert!(gguf.tensor("absent").is_none());
        assert_eq!(gguf.tensor_bytes(), 204 + 48 + 20);
        assert_eq!(gguf.tensors().len(), 3);
    }
}

#[test]
fn another_alignment() {
    let mut w = Writer { alignment: 256, ..sample() };
    w.u32("general.alignment", 256);
    assert_eq!(Gguf::from_bytes(w.bytes()).unwrap().tensor("q8").unwrap().bytes, [1; 204]);
}

#[test]
fn no_tensors_and_no_metadata() {
    let gguf = Gguf::from_bytes(Writer { alignment: 1, ..Writer::default() }.bytes()).unwrap();
    assert!(gguf.tensors().is_empty() && gguf.metadata().keys().next().is_none());
}

#[test]
fn foreign_files() {
    assert!(complaint(|w| w.version = 1).contains("version 1"));
    assert!(complaint(|w| w.version = 3u32.swap_bytes()).contains("big-endian"));
    assert!(complaint(|w| w.version = 4).contains("version 4"));
    let refused = |bytes: &[u8]| Gguf::from_bytes(bytes.to_vec()).expect_err("must be refused").to_string();
    assert!(refused(b"").contains("magic"));
    assert!(refused(b"PK\x03\x04 and so on").contains("not a GGUF file"));
    let missing = Gguf::open(Path::new("/nonexistent/model.gguf")).expect_err("must be refused").to_string();
    assert!(missing.contains("/nonexistent/model.gguf"), "{missing}");
    let folder = Gguf::open(Path::new("/")).expect_err("must be refused").to_string();
    assert!(folder.contains("not a regular file"), "{folder}");
}

/// The two counts of the header, at bytes 8 and 16.
#[test]
fn counts_that_lie() {
    for (offset, field) in [(8, "tensor_count"), (16, "metadata_kv_count")] {
        for count in [u64::MAX, 1 << 40, 65_537, 60_000] {
            let mut bytes = sample().bytes();
            bytes[offset..offset + 8].copy_from_slice(&count.to_le_bytes());
            let message = Gguf::from_bytes(bytes).expect_err("must be refused").to_string();
            assert!(message.contains(field), "{message}");
        }
    }
}

#[test]
fn metadata_that_lies() {
    assert!(complaint(|w| w.value("k", 13, &[0])).contains("value type of k"));
    assert!(complaint(|w| w.value("k", 7, &[2])).contains("value of k"));
    assert!(complaint(|w| w.value("k", 8, &u64::MAX.to_le_bytes())).contains("value of k"));
    assert!(complaint(|w| w.value("k", 8, &[1, 0, 0, 0, 0, 0, 0, 0, 0xff])).contains("value of k is not UTF-8"));
    for count in [u64::MAX, 1 << 23, 1 << 24] {
        // Types of one byte each: bool and u8; strings of at least eight; arrays of at least twelve.
        for ty in [7, 0, 8, 9, 12] {
            let message = complaint(|w| w.array("k", ty, count, &[]));
            assert!(message.contains("array length of k"), "{message}");
        }
    }
    assert!(complaint(|w| w.array("k", 99, 0, &[])).contains("value type of k"));
    assert!(complaint(|w| w.metadata.push(w.metadata[0].clone())).contains("general.architecture stands twice"));
    assert!(complaint(|w| w.metadata.push(("k".repeat(70_000), vec![0, 0, 0, 0, 1]))).contains("above the limit"));
}

#[test]
fn nesting_is_bounded() {
    let nested = |depth| (1..depth).fold(writer::array(4, 0, &[]), |inner, _| writer::array(9, 1, &inner));
    let read = |depth: usize| {
        let mut w = sample();
        w.value("deep", 9, &nested(depth));
        Gguf::from_bytes(w.bytes())
    };
    assert!(read(limits::ARRAY_DEPTH_MAX).is_ok());
    for depth in [limits::ARRAY_DEPTH_MAX + 1, 10_000] {
        let message = read(depth).expect_err("must be refused").to_string();
        assert!(message.contains("deep: arrays nested"), "{message}");
    }
}

#[test]
fn alignments_that_lie() {
    for (alignment, part) in [(0, "power of two"), (48, "power of two"), (1 << 31, "above the limit")] {
        let message = complaint(|w| w.u32("general.alignment", alignment));
        assert!(message.starts_with("general.alignment") && message.contains(part), "{message}");
    }
    assert!(complaint(|w| w.string("general.alignment", "32")).contains("general.alignment"));
}

#[test]
fn tensors_that_lie() {
    for (number, name) in [(10, "Q2_K"), (20, "IQ4_NL"), (4, "unknown (4)"), (u32::MAX, "unknown")] {
        let message = tensor_complaint(|t| t.ty = number);
        assert!(message.contains("tensor vector is of type") && message.contains(name), "{message}");
    }
    let dimensions = |d: &[u64]| tensor_complaint(|t| t.dimensions = d.to_vec());
    assert!(dimensions(&[]).contains("dimension count of tensor vector"));
    assert!(dimensions(&[1; 5]).contains("dimension count of tensor vector"));
    assert!(dimensions(&[0]).contains("zero"));
    assert!(dimensions(&[4, 0]).contains("zero"));
    assert!(dimensions(&[u64::MAX]).contains("overflows"));
    assert!(dimensions(&[1 << 32, 1 << 32]).contains("overflows"));
    assert!(dimensions(&[1, 1 << 32, 1 << 32, 1 << 32]).contains("overflows"));
    assert!(dimensions(&[1 << 40]).contains("do not fit"));
    assert!(complaint(|w| w.tensors[1].dimensions = vec![33]).contains("multiple of the type's block"));
    let offset = |o: u64| tensor_complaint(|t| t.offset = Some(o));
    assert!(offset(16).contains("tensor vector: offset 16 is not a multiple"));
    assert!(offset(1 << 20).contains("tensor vector: 20 bytes at offset"));
    assert!(offset(u64::MAX - 31).contains("do not fit"));
    assert!(offset(32).contains("overlap"));
    assert!(complaint(|w| w.tensors[2].name = "q8".into()).contains("tensor q8 stands twice"));
    assert!(complaint(|w| w.tensors[2].name = "n".repeat(300)).contains("name of tensor 2"));
}

#[test]
fn every_truncation_is_refused() {
    let whole = sample().bytes();
    for length in 0..whole.len() {
        let error = Gguf::from_bytes(whole[..length].to_vec()).expect_err("a part of a file is no file");
        assert!(
            matches!(error, GgufError::Truncated { .. } | GgufError::OutsideFile { .. }),
            "{length} of {} bytes: {error}",
            whole.len()
        );
    }
}

/// Whatever comes out, it comes out as a value; what is accepted can be read to the last byte.
fn survive(bytes: Vec<u8>) {
    if let Ok(gguf) = Gguf::from_bytes(bytes) {
        for info in gguf.tensors() {
            let tensor = gguf.tensor(&info.name).expect("listed");
            assert_eq!(tensor.ty.row_bytes(tensor.columns).unwrap() * tensor.rows, tensor.bytes.len());
        }
        // A file that still reads may say anything; describing it must not panic either.
        let _ = crate::model::LoadedModel::from_gguf(gguf, "flipped");
    }
}

#[test]
fn every_byte_set_to_extremes() {
    for whole in [sample().bytes(), sample_model()] {
        for place in 0..whole.len().min(4096) {
            for value in [0x00, 0x01, 0x7f, 0x80, 0xff] {
                let mut bytes = whole.clone();
                bytes[place] = value;
                survive(bytes);
            }
        }
    }
}

/// The tiny model up to its tensors' data, most of which is cut: flips hit the directory.
fn sample_model() -> Vec<u8> {
    writer::tiny_llama().bytes()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4096, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_flips_do_not_panic(flips in prop::collection::vec((any::<prop::sample::Index>(), 0u8..8), 1..12)) {
        let mut bytes = sample().bytes();
        for (place, bit) in flips {
            let place = place.index(bytes.len());
            bytes[place] ^= 1 << bit;
        }
        survive(bytes);
    }

    #[test]
    fn random_tails_do_not_panic(tail in prop::collection::vec(any::<u8>(), 0..256), version in 2u32..4) {
        survive([b"GGUF", &version.to_le_bytes()[..], &tail].concat());
    }
}
