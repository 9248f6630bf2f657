//! Key-value memory in blocks: who owns which block, and which blocks hold a prefix somebody may meet again.

pub mod block;
