//! The rooms of the daemon. `main.rs` puts them together; tests reach them here.
#![forbid(unsafe_code)]

pub mod backend;
pub mod batch;
pub mod config;
pub mod control;
pub mod engine;
pub mod intake;
pub mod kv_cache;
pub mod listen;
pub mod logging;
pub mod metrics;
pub mod model;
pub mod notifier;
pub mod outbox;
pub mod plan;
pub mod sampler;
pub mod scheduler;
pub mod sequence;
pub mod serve;
pub mod sessions;
pub mod step_log;
pub mod stream;
pub mod text;
