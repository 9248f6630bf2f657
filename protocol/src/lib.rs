//! The contract of client and daemon. It imports nothing of ours.

pub mod control;
pub mod inherited;
pub mod message;
