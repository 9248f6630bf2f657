//! Every weight type against values of the `gguf` Python package (`fixtures/make_dequant.py`).

use llmd_kernels::quant::{WeightType, dequantize_row};

const FIXTURE: &[u8] = include_bytes!("fixtures/dequant.bin");

fn take<'a>(rest: &mut &'a [u8], bytes: usize) -> &'a [u8] {
    let (head, tail) = rest.split_at(bytes);
    *rest = tail;
    head
}

fn u32_of(bytes: &[u8]) -> u32 {
    u32::from_le_bytes(bytes.try_into().expect("4 bytes"))
}

#[test]
fn all_types_equal_the_gguf_package() {
    let mut rest = FIXTURE;
    let mut seen = Vec::new();
    while !rest.is_empty() {
        let ty = WeightType::from_ggml(u32_of(take(&mut rest, 4))).expect("a type we read");
        let elements = u32_of(take(&mut rest, 4)) as usize;
        let row = take(&mut rest, ty.row_bytes(elements).expect("whole blocks"));
        let want: Vec<f32> = take(&mut rest, elements * 4).chunks(4).map(|b| f32::from_bits(u32_of(b))).collect();
        let mut got = vec![0.0; elements];
        dequantize_row(ty, row, &mut got);
        // Equal as numbers: only the sign of a zero may differ.
        let differing = got.iter().zip(&want).position(|(got, want)| got != want);
        assert_eq!(differing, None, "{}: first differing element", ty.name());
        seen.push(ty);
    }
    assert!(WeightType::ALL.iter().all(|ty| seen.contains(ty)), "fixture holds {seen:?}");
}
