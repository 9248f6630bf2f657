//! The contract of client and daemon: two shared mappings, one socket, a fixed set of words. It imports nothing of ours.
//!
//! # The map
//!
//! A session has two mappings, each written by one side only. Numbers are little-endian, offsets hexadecimal, sizes the defaults
//! (the handshake may agree on others). Indices are free-running u32: a slot's place is its index modulo the count.
//!
//! ```text
//! down: 36 KiB, written by the daemon            up: 72 KiB, written by the client
//!
//! 0000 magic u32 "LLMD", abi major, minor u16
//! 0008 features u64
//! 0010 boot_id u64
//! 0018 session_id u64
//! 0020 submission_slots, completion_slots,
//!      arena_bytes, requests_in_flight u32
//! 0030 offsets of completion slots, of
//!      submission slots, of the arena u32
//! 0080 cq_tail u32      engine thread            0080 sq_tail u32      submitting thread
//! 0084 state u32        sessions thread
//! 0088 eta_ns u64       engine thread
//! 0090 beat u64         engine thread
//! 0100 sq_head u32      sessions thread          0100 cq_head u32      reading thread
//! 0104 sq_wake_at u32   sessions thread          0104 cq_wake_at u32   reading thread
//! 1000 1024 completion slots of 32 B             1000 64 submission slots of 64 B
//!                                                2000 arena, 64 KiB of request bytes
//!
//! submission slot                                completion slot
//! 00 op u8: 1 SUBMIT, 2 MORE, 3 CANCEL           00 request_id u32
//! 01 flags u8, reserved u16: 0                   04 kind u8, count u8, flags u16
//! 04 request_id u32                              08 index u32
//! 08 arena offset u32, a multiple of 8           0c aux u32
//! 0c length u32                                  10 payload, 16 B
//! 10 reserved, 48 B: 0
//! ```
//!
//! # How to read it
//!
//! The client: connect to the socket, send a HELLO, receive a WELCOME with two descriptors ([`handshake`]), map both. To
//! ask: write an encoded request ([`encoding`]) into free arena bytes, fill the slot at `sq_tail`, store `sq_tail + 1` with Release,
//! fence, and if `sq_wake_at` is the index just published (or lies among those), send one byte on the socket. The bytes
//! and the slot are free again when `sq_head` has passed the slot's index. A request longer than its part of the arena goes
//! as MORE slots in order, then a SUBMIT slot with the last part. To listen: for each index from `cq_head` to `cq_tail`
//! read the slot ([`completion`]), then store `cq_head` with Release. To sleep: store `cq_head` to `cq_wake_at`, fence,
//! look at `cq_tail` once more, poll the socket. The end of the stream means that the daemon is gone.
//!
//! The daemon does the same mirrored, but believes nothing: it maps `up` read-only, copies every word once, and
//! checks the copy ([`session`]). Neither side can make the other wait or fault.
//!
//! Every request ends with exactly one terminal completion, DONE or ERROR.

#[cfg(not(loom))]
mod arena;
pub mod completion;
#[cfg(not(loom))]
pub mod control;
#[cfg(not(loom))]
pub mod doorbell;
pub mod encoding;
#[cfg(not(loom))]
pub mod handshake;
#[cfg(not(loom))]
pub mod inherited;
pub mod layout;
pub mod limits;
#[cfg(all(loom, test))]
mod loom_models;
#[cfg(not(loom))]
mod mapped_ring;
pub mod message;
pub mod ring;
#[cfg(not(loom))]
pub mod segment;
#[cfg(not(loom))]
pub mod session;
pub mod sync;
