//! What integration tests and benchmarks share: a model made up on the spot, a daemon of one's own, its step log, and how
//! well a model is computed.
#![forbid(unsafe_code)]

pub mod daemon;
pub mod gguf;
pub mod licence;
pub mod load;
pub mod quality;
pub mod source;
pub mod step_log;
pub mod tiny_model;
