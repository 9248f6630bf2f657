//! Every bound of the contract, checked against each other at compile time.
//!
//! Sizes are bytes unless the name says otherwise. The defaults give the offsets drawn at the crate's root; a client may
//! ask for other sizes in its HELLO, and the daemon clamps them into the ranges below.

use std::time::Duration;

/// Submission slots a session has by default; a power of two.
pub const SUBMISSION_SLOTS: u32 = 64;
/// Fewest submission slots a client may ask for.
pub const SUBMISSION_SLOTS_MIN: u32 = 8;
/// Most submission slots a client may ask for.
pub const SUBMISSION_SLOTS_MAX: u32 = 256;

/// Completion slots a session has by default; a power of two.
pub const COMPLETION_SLOTS: u32 = 1024;
/// Fewest completion slots a client may ask for.
pub const COMPLETION_SLOTS_MIN: u32 = 64;
/// Most completion slots a client may ask for.
pub const COMPLETION_SLOTS_MAX: u32 = 8192;

/// Size of the arena for request bytes by default; a power of two.
pub const ARENA_BYTES: u32 = 64 * 1024;
/// Smallest arena a client may ask for.
pub const ARENA_BYTES_MIN: u32 = 16 * 1024;
/// Largest arena a client may ask for.
pub const ARENA_BYTES_MAX: u32 = 1024 * 1024;
/// Alignment of each payload in the arena: it is copied in whole 64-bit words.
pub const ARENA_ALIGN: u32 = 8;

/// Bytes of each mapping's header; one page, so that slots start on a page of their own.
pub const HEADER_BYTES: u32 = 4096;

/// Largest encoded request. A request larger than its part of the arena travels as MORE parts; the daemon holds at
/// most one unfinished request a session, so this is also what an unfinished request may cost it.
pub const REQUEST_BYTES_MAX: usize = 8 * 1024 * 1024;

/// Of the completion slots, one in this many may belong to a request in flight. Each request keeps one slot free for
/// its terminal record, so the rest is what carries tokens.
pub const COMPLETION_SLOTS_PER_REQUEST: u32 = 4;
/// Requests one session of default size may have in flight.
pub const REQUESTS_IN_FLIGHT: u32 = COMPLETION_SLOTS / COMPLETION_SLOTS_PER_REQUEST;

/// Completions the daemon keeps for a session whose ring is full, before it deschedules the session's sequences.
pub const SPILL_BYTES: usize = 64 * 1024;
/// How long a session may leave its spill filled before its sequences are descheduled.
pub const SPILL_DESCHEDULE: Duration = Duration::from_secs(2);
/// How long a session may leave its spill filled before its requests end with `SlowReader`.
pub const SPILL_CANCEL: Duration = Duration::from_secs(30);

/// Sessions the daemon holds at once.
pub const SESSIONS_MAX: usize = 1024;
/// Sessions one uid may hold at once.
pub const SESSIONS_PER_UID_MAX: usize = 256;
/// Connects one uid may make at once before the rate below applies.
pub const CONNECT_BURST_PER_UID: u32 = 512;
/// Connects a second one uid may make in the long run.
pub const CONNECTS_PER_UID_PER_S: u32 = 256;
/// Handshakes the daemon holds open at once, over all uids.
pub const HANDSHAKES_OPEN_MAX: usize = 64;
/// How long a client has for its HELLO once the daemon accepted its connection.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(1);

/// Submission slots the daemon reads from one session before it looks at the next.
pub const SUBMISSIONS_PER_TURN: u32 = 64;
/// Doorbells a session may send beyond the submission slots it published, before it counts as lying.
pub const SPURIOUS_DOORBELLS_MAX: u64 = 1024;

/// Text in one completion slot.
pub const TEXT_BYTES_PER_SLOT: usize = 16;
/// Token ids in one completion slot.
pub const TOKENS_PER_SLOT: usize = 4;
/// Longest explanation that goes before an ERROR record; longer ones are cut at a character.
pub const DETAIL_BYTES_MAX: usize = 256;

/// Strings in `stop`.
pub const STOP_STRINGS_MAX: usize = 16;
/// Bytes of one string in `stop`.
pub const STOP_STRING_BYTES_MAX: usize = 256;
/// Ids in `stop_token_ids`.
pub const STOP_TOKEN_IDS_MAX: usize = 128;
/// Messages of a chat.
pub const CHAT_MESSAGES_MAX: usize = 4096;
/// Bytes of a chat role's name.
pub const CHAT_ROLE_BYTES_MAX: usize = 64;
/// Largest `max_tokens`. A context is shorter than this for any model known.
pub const OUTPUT_TOKENS_MAX: u32 = 1 << 24;
/// Largest `temperature`.
pub const TEMPERATURE_MAX: f32 = 100.0;
/// Largest `repetition_penalty`.
pub const REPETITION_PENALTY_MAX: f32 = 10.0;
/// Largest absolute `presence_penalty` and `frequency_penalty`.
pub const PENALTY_ABS_MAX: f32 = 10.0;

const _: () = {
    // Free-running u32 indices are masked, and a full ring must differ from an empty one.
    assert!(SUBMISSION_SLOTS.is_power_of_two() && COMPLETION_SLOTS.is_power_of_two() && ARENA_BYTES.is_power_of_two());
    assert!(SUBMISSION_SLOTS_MIN.is_power_of_two() && SUBMISSION_SLOTS_MAX.is_power_of_two());
    assert!(COMPLETION_SLOTS_MIN.is_power_of_two() && COMPLETION_SLOTS_MAX.is_power_of_two());
    assert!(ARENA_BYTES_MIN.is_power_of_two() && ARENA_BYTES_MAX.is_power_of_two());
    assert!(COMPLETION_SLOTS_MAX < 1 << 31 && SUBMISSION_SLOTS_MAX < 1 << 31);
    // The defaults lie in their own ranges.
    assert!(SUBMISSION_SLOTS_MIN <= SUBMISSION_SLOTS && SUBMISSION_SLOTS <= SUBMISSION_SLOTS_MAX);
    assert!(COMPLETION_SLOTS_MIN <= COMPLETION_SLOTS && COMPLETION_SLOTS <= COMPLETION_SLOTS_MAX);
    assert!(ARENA_BYTES_MIN <= ARENA_BYTES && ARENA_BYTES <= ARENA_BYTES_MAX);
    // A terminal record must always fit, and so must an explanation before it, while tokens flow.
    assert!(REQUESTS_IN_FLIGHT < COMPLETION_SLOTS);
    assert!(COMPLETION_SLOTS_MIN / COMPLETION_SLOTS_PER_REQUEST >= 1);
    assert!((DETAIL_BYTES_MAX / (TEXT_BYTES_PER_SLOT - 3)) as u32 + 1 < COMPLETION_SLOTS_MIN);
    // A character is at most 4 bytes: a slot always takes at least one.
    assert!(TEXT_BYTES_PER_SLOT >= 4 && TOKENS_PER_SLOT * 4 == TEXT_BYTES_PER_SLOT);
    // The smallest arena holds several parts, and a request of the largest size comes in a bounded number of them.
    assert!(ARENA_BYTES_MIN.is_multiple_of(ARENA_ALIGN) && ARENA_BYTES_MIN >= 4 * 1024);
    assert!(REQUEST_BYTES_MAX as u64 <= u32::MAX as u64);
    // A request always has room for its sampling parameters.
    assert!(STOP_STRINGS_MAX * (STOP_STRING_BYTES_MAX + 8) + STOP_TOKEN_IDS_MAX * 4 < REQUEST_BYTES_MAX / 64);
    // The spill holds at least one ring's worth.
    assert!(SPILL_BYTES >= COMPLETION_SLOTS as usize * 32);
    assert!(SESSIONS_PER_UID_MAX <= SESSIONS_MAX && CONNECT_BURST_PER_UID as usize >= SESSIONS_PER_UID_MAX);
    // What the daemon reads in one turn is no more than a default ring holds.
    assert!(SUBMISSIONS_PER_TURN <= SUBMISSION_SLOTS);
};
