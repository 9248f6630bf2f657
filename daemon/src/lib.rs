//! The rooms of the daemon. `main.rs` puts them together; tests reach them here.
#![forbid(unsafe_code)]

pub mod backend;
pub mod batch;
pub mod kv_cache;
pub mod plan;
pub mod sampler;
pub mod sequence;
pub mod text;
