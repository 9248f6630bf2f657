//! The contract of client and daemon. It imports nothing of ours.

pub mod message;
