//! What the integration tests share: a model made up on the spot, a daemon of one's own, and its step log.
#![forbid(unsafe_code)]

pub mod daemon;
pub mod gguf;
pub mod licence;
pub mod load;
pub mod source;
pub mod step_log;
pub mod tiny_model;
