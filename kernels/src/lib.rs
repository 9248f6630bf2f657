//! The only crate that knows SIMD, CUDA or file mappings. It uses nothing of ours and knows no model: it computes
//! operations over slices.

pub mod cpu;
pub mod mapping;
pub mod quant;
pub mod reference;
