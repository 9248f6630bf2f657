//! The bytes of the two mappings: headers and slots, with their offsets asserted.
//!
//! The structs here are the drawing, not the access: nobody ever holds a reference to a header in shared memory. Code
//! reads and writes single words through [`crate::segment::Mapping`] at the offsets in [`down`] and [`up`], and slots
//! as whole words ([`SubmissionSlot::to_words`], [`crate::completion::CompletionSlot::to_words`]).

use std::mem::{offset_of, size_of};

use crate::limits::{self, HEADER_BYTES};

#[cfg(not(target_endian = "little"))]
compile_error!("the mappings are little-endian and read in whole words; a big-endian port must swap them");

/// First word of `down`: "LLMD" read as little-endian.
pub const MAGIC: u32 = u32::from_le_bytes(*b"LLMD");
/// Versions of this contract that this build speaks: a higher number may change anything.
pub const ABI_MAJOR: u16 = 1;
/// Additions that an older peer may ignore.
pub const ABI_MINOR: u16 = 0;

/// 64-bit words of a submission slot.
pub const SUBMISSION_WORDS: usize = 8;
/// 64-bit words of a completion slot.
pub const COMPLETION_WORDS: usize = 4;
/// Bytes of a submission slot: one cache line.
pub const SUBMISSION_BYTES: u32 = 64;
/// Bytes of a completion slot: two to a cache line.
pub const COMPLETION_BYTES: u32 = 32;

/// Header of `down`. The daemon writes all of it; the client can only read.
#[derive(Debug)]
#[repr(C)]
pub struct DownHeader {
    /// [`MAGIC`].
    pub magic: u32,
    /// [`ABI_MAJOR`] of the session.
    pub abi_major: u16,
    /// [`ABI_MINOR`] of the session.
    pub abi_minor: u16,
    /// Features both sides have; none exist yet, so 0.
    pub features: u64,
    /// Drawn at random when the daemon starts: tells one run of the daemon from the next.
    pub boot_id: u64,
    /// This session, unique within one run of the daemon.
    pub session_id: u64,
    /// Power of two, within [`limits`].
    pub submission_slots: u32,
    /// Power of two, within [`limits`].
    pub completion_slots: u32,
    /// Power of two, within [`limits`].
    pub arena_bytes: u32,
    /// Requests this session may have in flight.
    pub requests_in_flight: u32,
    /// Offset of the completion slots in `down`.
    pub completion_offset: u32,
    /// Offset of the submission slots in `up`.
    pub submission_offset: u32,
    /// Offset of the arena in `up`.
    pub arena_offset: u32,
    reserved0: [u8; 0x80 - 0x3c],
    /// Completion slots published so far, free-running. Written by the engine thread, Release.
    pub cq_tail: u32,
    /// [`SessionState`] as a number. Written by the sessions thread.
    pub state: u32,
    /// When the next step is expected to publish: nanoseconds of CLOCK_MONOTONIC, 0 for unknown. Engine thread, Relaxed.
    pub eta_ns: u64,
    /// Steps of the engine so far: grows while it makes progress. Engine thread, Relaxed.
    pub beat: u64,
    reserved1: [u8; 0x100 - 0x98],
    /// Submission slots read so far, free-running; a slot's bytes in the arena are free once it is counted here.
    /// Written by the sessions thread, Release.
    pub sq_head: u32,
    /// The daemon wants a doorbell when the slot of this index is published. Sessions thread.
    pub sq_wake_at: u32,
    reserved2: [u8; HEADER_BYTES as usize - 0x108],
}

/// Header of `up`. The client writes all of it; the daemon can only read, and believes none of it.
#[derive(Debug)]
#[repr(C)]
pub struct UpHeader {
    reserved0: [u8; 0x80],
    /// Submission slots published so far, free-running. Release.
    pub sq_tail: u32,
    reserved1: [u8; 0x100 - 0x84],
    /// Completion slots read so far, free-running. Release.
    pub cq_head: u32,
    /// The client wants a doorbell when the slot of this index is published.
    pub cq_wake_at: u32,
    reserved2: [u8; HEADER_BYTES as usize - 0x108],
}

/// Offsets of the words of `down` that are read or written after the handshake.
#[allow(missing_docs, reason = "documented at the fields of DownHeader")]
pub mod down {
    use super::*;
    pub const MAGIC: u32 = offset_of!(DownHeader, magic) as u32;
    pub const ABI: u32 = offset_of!(DownHeader, abi_major) as u32;
    pub const FEATURES: u32 = offset_of!(DownHeader, features) as u32;
    pub const BOOT_ID: u32 = offset_of!(DownHeader, boot_id) as u32;
    pub const SESSION_ID: u32 = offset_of!(DownHeader, session_id) as u32;
    pub const SUBMISSION_SLOTS: u32 = offset_of!(DownHeader, submission_slots) as u32;
    pub const COMPLETION_SLOTS: u32 = offset_of!(DownHeader, completion_slots) as u32;
    pub const ARENA_BYTES: u32 = offset_of!(DownHeader, arena_bytes) as u32;
    pub const REQUESTS_IN_FLIGHT: u32 = offset_of!(DownHeader, requests_in_flight) as u32;
    pub const COMPLETION_OFFSET: u32 = offset_of!(DownHeader, completion_offset) as u32;
    pub const SUBMISSION_OFFSET: u32 = offset_of!(DownHeader, submission_offset) as u32;
    pub const ARENA_OFFSET: u32 = offset_of!(DownHeader, arena_offset) as u32;
    pub const CQ_TAIL: u32 = offset_of!(DownHeader, cq_tail) as u32;
    pub const STATE: u32 = offset_of!(DownHeader, state) as u32;
    pub const ETA_NS: u32 = offset_of!(DownHeader, eta_ns) as u32;
    pub const BEAT: u32 = offset_of!(DownHeader, beat) as u32;
    pub const SQ_HEAD: u32 = offset_of!(DownHeader, sq_head) as u32;
    pub const SQ_WAKE_AT: u32 = offset_of!(DownHeader, sq_wake_at) as u32;
}

/// Offsets of the words of `up`.
#[allow(missing_docs, reason = "documented at the fields of UpHeader")]
pub mod up {
    use super::*;
    pub const SQ_TAIL: u32 = offset_of!(UpHeader, sq_tail) as u32;
    pub const CQ_HEAD: u32 = offset_of!(UpHeader, cq_head) as u32;
    pub const CQ_WAKE_AT: u32 = offset_of!(UpHeader, cq_wake_at) as u32;
}

/// What a session's `state` word says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum SessionState {
    /// Requests are taken.
    Open = 1,
    /// New requests are refused; those in flight go on.
    Draining = 2,
    /// The daemon ended this session on purpose (it was lying, or asked to leave); it did not crash.
    Closed = 3,
}

impl SessionState {
    /// The state of a number read from `down`; None for a number of a later version.
    pub fn from_number(number: u32) -> Option<Self> {
        match number {
            1 => Some(Self::Open),
            2 => Some(Self::Draining),
            3 => Some(Self::Closed),
            _ => None,
        }
    }
}

/// Sizes of one session, each a power of two within [`limits`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    submission_slots: u32,
    completion_slots: u32,
    arena_bytes: u32,
}

impl Default for Geometry {
    fn default() -> Self {
        Self {
            submission_slots: limits::SUBMISSION_SLOTS,
            completion_slots: limits::COMPLETION_SLOTS,
            arena_bytes: limits::ARENA_BYTES,
        }
    }
}

impl Geometry {
    /// What a client gets that asks for these sizes: rounded up to a power of two and clamped into the limits; 0 asks
    /// for the default.
    pub fn negotiate(submission_slots: u32, completion_slots: u32, arena_bytes: u32) -> Self {
        fn fit(want: u32, default: u32, min: u32, max: u32) -> u32 {
            if want == 0 { default } else { want.clamp(min, max).next_power_of_two() }
        }
        Self {
            submission_slots: fit(
                submission_slots,
                limits::SUBMISSION_SLOTS,
                limits::SUBMISSION_SLOTS_MIN,
                limits::SUBMISSION_SLOTS_MAX,
            ),
            completion_slots: fit(
                completion_slots,
                limits::COMPLETION_SLOTS,
                limits::COMPLETION_SLOTS_MIN,
                limits::COMPLETION_SLOTS_MAX,
            ),
            arena_bytes: fit(arena_bytes, limits::ARENA_BYTES, limits::ARENA_BYTES_MIN, limits::ARENA_BYTES_MAX),
        }
    }

    /// These sizes exactly, or None where one is no power of two or outside its limits.
    pub fn exact(submission_slots: u32, completion_slots: u32, arena_bytes: u32) -> Option<Self> {
        let asked = Self { submission_slots, completion_slots, arena_bytes };
        (asked == Self::negotiate(submission_slots, completion_slots, arena_bytes)).then_some(asked)
    }

    /// Submission slots.
    pub fn submission_slots(self) -> u32 {
        self.submission_slots
    }

    /// Completion slots.
    pub fn completion_slots(self) -> u32 {
        self.completion_slots
    }

    /// Bytes of the arena.
    pub fn arena_bytes(self) -> u32 {
        self.arena_bytes
    }

    /// Requests a session of this size may have in flight.
    pub fn requests_in_flight(self) -> u32 {
        self.completion_slots / limits::COMPLETION_SLOTS_PER_REQUEST
    }

    /// Offset of the completion slots in `down`.
    pub fn completion_offset(self) -> u32 {
        HEADER_BYTES
    }

    /// Offset of the submission slots in `up`.
    pub fn submission_offset(self) -> u32 {
        HEADER_BYTES
    }

    /// Offset of the arena in `up`: behind the submission slots, on a page of its own.
    pub fn arena_offset(self) -> u32 {
        HEADER_BYTES + (self.submission_slots * SUBMISSION_BYTES).next_multiple_of(HEADER_BYTES)
    }

    /// Bytes of `down`.
    pub fn down_bytes(self) -> usize {
        (HEADER_BYTES + self.completion_slots * COMPLETION_BYTES) as usize
    }

    /// Bytes of `up`.
    pub fn up_bytes(self) -> usize {
        (self.arena_offset() + self.arena_bytes) as usize
    }

    /// Largest part of a request in one submission slot: a quarter of the arena, so that the client fills the next part
    /// while the daemon reads this one.
    pub fn part_bytes_max(self) -> usize {
        (self.arena_bytes / 4) as usize
    }
}

/// What a submission slot asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Op {
    /// The last part (mostly the only one) of a request: bytes in the arena.
    Submit = 1,
    /// A part of a request whose last part is still to come; parts come in order and without another request between.
    More = 2,
    /// End a request early. Offset and length are 0.
    Cancel = 3,
}

impl Op {
    /// The op of a number, or None.
    pub fn from_number(number: u8) -> Option<Self> {
        match number {
            1 => Some(Self::Submit),
            2 => Some(Self::More),
            3 => Some(Self::Cancel),
            _ => None,
        }
    }
}

/// One submission slot as it lies in `up`, copied out. Nothing in it has been checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct SubmissionSlot {
    /// [`Op`] as a number.
    pub op: u8,
    /// No flag is defined; 0.
    pub flags: u8,
    /// 0.
    pub reserved0: u16,
    /// The request this is about, chosen by the client, unique among its requests in flight.
    pub request_id: u32,
    /// Where the bytes start in the arena; a multiple of [`limits::ARENA_ALIGN`].
    pub arena_offset: u32,
    /// How many bytes; the rest of the last 8 is not read as payload.
    pub arena_len: u32,
    /// 0.
    pub reserved1: [u64; 6],
}

impl SubmissionSlot {
    /// The slot as the words stored in the ring.
    pub fn to_words(self) -> [u64; SUBMISSION_WORDS] {
        let first = u64::from(self.op)
            | u64::from(self.flags) << 8
            | u64::from(self.reserved0) << 16
            | u64::from(self.request_id) << 32;
        let second = u64::from(self.arena_offset) | u64::from(self.arena_len) << 32;
        let r = self.reserved1;
        [first, second, r[0], r[1], r[2], r[3], r[4], r[5]]
    }

    /// The slot of words copied from the ring.
    pub fn from_words(words: [u64; SUBMISSION_WORDS]) -> Self {
        let [first, second, rest @ ..] = words;
        Self {
            op: first as u8,
            flags: (first >> 8) as u8,
            reserved0: (first >> 16) as u16,
            request_id: (first >> 32) as u32,
            arena_offset: second as u32,
            arena_len: (second >> 32) as u32,
            reserved1: rest,
        }
    }
}

const _: () = {
    assert!(size_of::<DownHeader>() == HEADER_BYTES as usize);
    assert!(size_of::<UpHeader>() == HEADER_BYTES as usize);
    assert!(down::MAGIC == 0x00 && down::ABI == 0x04 && down::FEATURES == 0x08);
    assert!(down::BOOT_ID == 0x10 && down::SESSION_ID == 0x18 && down::SUBMISSION_SLOTS == 0x20);
    assert!(down::COMPLETION_SLOTS == 0x24 && down::ARENA_BYTES == 0x28 && down::REQUESTS_IN_FLIGHT == 0x2c);
    assert!(down::COMPLETION_OFFSET == 0x30 && down::SUBMISSION_OFFSET == 0x34 && down::ARENA_OFFSET == 0x38);
    assert!(down::CQ_TAIL == 0x80 && down::STATE == 0x84 && down::ETA_NS == 0x88 && down::BEAT == 0x90);
    assert!(down::SQ_HEAD == 0x100 && down::SQ_WAKE_AT == 0x104);
    assert!(up::SQ_TAIL == 0x80 && up::CQ_HEAD == 0x100 && up::CQ_WAKE_AT == 0x104);
    assert!(size_of::<SubmissionSlot>() == SUBMISSION_BYTES as usize && SUBMISSION_WORDS * 8 == 64);
    assert!(size_of::<crate::completion::CompletionSlot>() == COMPLETION_BYTES as usize && COMPLETION_WORDS * 8 == 32);
    assert!(offset_of!(SubmissionSlot, request_id) == 4 && offset_of!(SubmissionSlot, arena_offset) == 8);
    assert!(offset_of!(SubmissionSlot, arena_len) == 12 && offset_of!(SubmissionSlot, reserved1) == 16);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_offsets_are_the_drawn_ones() {
        let g = Geometry::default();
        assert_eq!((g.completion_offset(), g.submission_offset(), g.arena_offset()), (0x1000, 0x1000, 0x2000));
        assert_eq!(g.down_bytes() + g.up_bytes(), 108 * 1024);
    }

    #[test]
    fn sizes_are_clamped_and_rounded() {
        let g = Geometry::negotiate(1, 1_000_000, 20_000);
        assert_eq!((g.submission_slots(), g.completion_slots(), g.arena_bytes()), (8, 8192, 32 * 1024));
        assert!(Geometry::exact(64, 1000, 65536).is_none());
        assert!(Geometry::exact(0, 1024, 65536).is_none());
        assert_eq!(Geometry::exact(64, 1024, 65536), Some(Geometry::default()));
    }

    #[test]
    fn words_are_the_bytes_of_the_slot() {
        let slot = SubmissionSlot {
            op: 1,
            flags: 2,
            reserved0: 0x0403,
            request_id: 5,
            arena_offset: 6,
            arena_len: 7,
            reserved1: [8, 9, 10, 11, 12, 13],
        };
        let words = slot.to_words();
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        assert_eq!(bytes[..16], [1, 2, 3, 4, 5, 0, 0, 0, 6, 0, 0, 0, 7, 0, 0, 0]);
        assert_eq!(SubmissionSlot::from_words(words), slot);
    }
}
