//! What the daemon says about a request: one 32-byte slot a fact, in order, ended by exactly one terminal record.
//!
//! ```text
//! 00 request_id u32   04 kind u8   05 count u8   06 flags u16   08 index u32   0c aux u32   10 payload 16 B
//!
//! kind          count            flags  index                aux             payload
//! 1 ACCEPTED    0                0      0                    prompt tokens   0
//! 2 TOKENS      1..=4 ids        0      index of the first   0               ids u32, unused 0
//! 3 TEXT        1..=16 bytes     MORE?  0                    0               UTF-8, unused 0
//! 4 DETAIL      1..=16 bytes     MORE?  0                    0               UTF-8, unused 0
//! 5 DONE        0                0      0                    FinishReason    prompt, cached, output tokens u32
//! 6 ERROR       0                0      0                    Reject          0
//! ```
//! Longer texts take several slots, cut between characters, all but the last flagged MORE. DETAIL explains the ERROR that
//! follows it. DONE and ERROR are terminal.

use std::fmt;

use crate::layout::COMPLETION_WORDS;
use crate::limits::{DETAIL_BYTES_MAX, TEXT_BYTES_PER_SLOT, TOKENS_PER_SLOT};
use crate::message::{FinishReason, Reject, Usage};

/// Flag of TEXT and DETAIL: the next slot of this request goes on with the same text.
const FLAG_MORE: u16 = 1;

const ACCEPTED: u8 = 1;
const TOKENS: u8 = 2;
const TEXT: u8 = 3;
const DETAIL: u8 = 4;
const DONE: u8 = 5;
const ERROR: u8 = 6;

/// One completion slot, as bytes. Made by the typed constructors, read with [`Self::decode`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct CompletionSlot {
    request_id: u32,
    kind: u8,
    count: u8,
    flags: u16,
    index: u32,
    aux: u32,
    payload: [u8; 16],
}

impl CompletionSlot {
    fn new(request_id: u32, kind: u8) -> Self {
        Self { request_id, kind, count: 0, flags: 0, index: 0, aux: 0, payload: [0; 16] }
    }

    /// The request was taken; its prompt has this many tokens.
    pub fn accepted(request_id: u32, prompt_tokens: u32) -> Self {
        Self { aux: prompt_tokens, ..Self::new(request_id, ACCEPTED) }
    }

    /// Up to four generated ids, the first of which is the output's `index`-th, counted from 0.
    ///
    /// # Panics
    /// If `ids` holds none or more than [`TOKENS_PER_SLOT`].
    pub fn tokens(request_id: u32, index: u32, ids: &[u32]) -> Self {
        assert!((1..=TOKENS_PER_SLOT).contains(&ids.len()), "1..=4 ids fit one slot");
        let mut slot = Self { index, count: ids.len() as u8, ..Self::new(request_id, TOKENS) };
        for (bytes, id) in slot.payload.chunks_exact_mut(4).zip(ids) {
            bytes.copy_from_slice(&id.to_le_bytes());
        }
        slot
    }

    /// Generated text, in as many slots as it takes; none for an empty text.
    pub fn text(request_id: u32, text: &str) -> TextSlots<'_> {
        TextSlots { request_id, kind: TEXT, rest: text }
    }

    /// The explanation of the ERROR that follows, cut to [`DETAIL_BYTES_MAX`].
    pub fn detail(request_id: u32, text: &str) -> TextSlots<'_> {
        TextSlots { request_id, kind: DETAIL, rest: &text[..text.floor_char_boundary(DETAIL_BYTES_MAX)] }
    }

    /// The request ended well. Terminal.
    pub fn done(request_id: u32, reason: FinishReason, usage: Usage) -> Self {
        let mut slot = Self { aux: u32::from(reason.number()), ..Self::new(request_id, DONE) };
        slot.payload[0..4].copy_from_slice(&usage.prompt_tokens.to_le_bytes());
        slot.payload[4..8].copy_from_slice(&usage.cached_tokens.to_le_bytes());
        slot.payload[8..12].copy_from_slice(&usage.output_tokens.to_le_bytes());
        slot
    }

    /// The request ended without an answer. Terminal.
    pub fn error(request_id: u32, reject: Reject) -> Self {
        Self { aux: reject.number(), ..Self::new(request_id, ERROR) }
    }

    /// The request it speaks of.
    pub fn request_id(&self) -> u32 {
        self.request_id
    }

    /// Nothing follows this slot for its request.
    pub fn is_terminal(&self) -> bool {
        matches!(self.kind, DONE | ERROR)
    }

    /// The slot as the words stored in the ring.
    #[inline]
    pub fn to_words(self) -> [u64; COMPLETION_WORDS] {
        let half = |at: usize| u64::from_le_bytes(self.payload[at..at + 8].try_into().expect("8 bytes"));
        [
            u64::from(self.request_id)
                | u64::from(self.kind) << 32
                | u64::from(self.count) << 40
                | u64::from(self.flags) << 48,
            u64::from(self.index) | u64::from(self.aux) << 32,
            half(0),
            half(8),
        ]
    }

    /// The slot of words copied from the ring.
    #[inline]
    pub fn from_words(words: [u64; COMPLETION_WORDS]) -> Self {
        let mut payload = [0; 16];
        payload[..8].copy_from_slice(&words[2].to_le_bytes());
        payload[8..].copy_from_slice(&words[3].to_le_bytes());
        Self {
            request_id: words[0] as u32,
            kind: (words[0] >> 32) as u8,
            count: (words[0] >> 40) as u8,
            flags: (words[0] >> 48) as u16,
            index: words[1] as u32,
            aux: (words[1] >> 32) as u32,
            payload,
        }
    }

    /// What the slot says.
    pub fn decode(&self) -> Result<Completion, BadSlot> {
        let bad = BadSlot { request_id: self.request_id, kind: self.kind };
        let u32_at = |at: usize| u32::from_le_bytes(self.payload[at..at + 4].try_into().expect("4 bytes"));
        match self.kind {
            ACCEPTED => Ok(Completion::Accepted { prompt_tokens: self.aux }),
            TOKENS if (1..=TOKENS_PER_SLOT).contains(&usize::from(self.count)) => {
                let ids = [u32_at(0), u32_at(4), u32_at(8), u32_at(12)];
                Ok(Completion::Tokens { index: self.index, ids: TokenIds { ids, len: self.count } })
            }
            TEXT | DETAIL if (1..=TEXT_BYTES_PER_SLOT).contains(&usize::from(self.count)) => {
                std::str::from_utf8(&self.payload[..usize::from(self.count)]).map_err(|_| bad)?;
                let text = TextPiece { bytes: self.payload, len: self.count, more: self.flags & FLAG_MORE != 0 };
                Ok(if self.kind == TEXT { Completion::Text(text) } else { Completion::Detail(text) })
            }
            DONE => {
                let reason = u8::try_from(self.aux).ok().and_then(FinishReason::from_number).ok_or(bad)?;
                let usage = Usage { prompt_tokens: u32_at(0), cached_tokens: u32_at(4), output_tokens: u32_at(8) };
                Ok(Completion::Done { reason, usage })
            }
            ERROR => Ok(Completion::Error { number: self.aux }),
            _ => Err(bad),
        }
    }
}

/// A slot that says nothing this version understands: the peer is newer, or broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("completion slot of kind {kind} for request {request_id} makes no sense")]
pub struct BadSlot {
    /// The request it names.
    pub request_id: u32,
    /// Its kind.
    pub kind: u8,
}

/// One fact about a request, decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Completion {
    /// The request was taken.
    Accepted {
        /// Tokens of its prompt.
        prompt_tokens: u32,
    },
    /// Generated ids.
    Tokens {
        /// The output index of the first.
        index: u32,
        /// The ids.
        ids: TokenIds,
    },
    /// Generated text.
    Text(TextPiece),
    /// Explanation of the ERROR that follows.
    Detail(TextPiece),
    /// Ended well. Terminal.
    Done {
        /// Why.
        reason: FinishReason,
        /// What it used.
        usage: Usage,
    },
    /// Ended without an answer. Terminal.
    Error {
        /// [`Reject`] as a number: a later daemon may know more of them.
        number: u32,
    },
}

/// One to four token ids, as a slot carries them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct TokenIds {
    ids: [u32; TOKENS_PER_SLOT],
    len: u8,
}

impl std::ops::Deref for TokenIds {
    type Target = [u32];
    fn deref(&self) -> &[u32] {
        &self.ids[..usize::from(self.len)]
    }
}

impl fmt::Debug for TokenIds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// Up to 16 bytes of text, as a slot carries them; whole characters.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct TextPiece {
    bytes: [u8; TEXT_BYTES_PER_SLOT],
    len: u8,
    more: bool,
}

impl TextPiece {
    /// The text.
    pub fn as_str(&self) -> &str {
        // decode() is the only maker and has checked it; "" is never the answer.
        std::str::from_utf8(&self.bytes[..usize::from(self.len)]).unwrap_or_default()
    }

    /// The next slot of this request goes on with the same text.
    pub fn more_follows(&self) -> bool {
        self.more
    }
}

impl fmt::Debug for TextPiece {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}{}", self.as_str(), if self.more { "+" } else { "" })
    }
}

/// The slots of one text; see [`CompletionSlot::text`].
#[derive(Debug, Clone)]
pub struct TextSlots<'a> {
    request_id: u32,
    kind: u8,
    rest: &'a str,
}

impl Iterator for TextSlots<'_> {
    type Item = CompletionSlot;

    fn next(&mut self) -> Option<CompletionSlot> {
        if self.rest.is_empty() {
            return None;
        }
        // A character has at most 4 bytes, so the cut is above 0.
        let (piece, rest) = self.rest.split_at(self.rest.floor_char_boundary(TEXT_BYTES_PER_SLOT));
        self.rest = rest;
        let mut slot = CompletionSlot {
            count: piece.len() as u8,
            flags: if rest.is_empty() { 0 } else { FLAG_MORE },
            ..CompletionSlot::new(self.request_id, self.kind)
        };
        slot.payload[..piece.len()].copy_from_slice(piece.as_bytes());
        Some(slot)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Through the ring's words and back.
    fn through(slot: CompletionSlot) -> Completion {
        let copy = CompletionSlot::from_words(slot.to_words());
        assert_eq!(copy, slot);
        copy.decode().unwrap()
    }

    #[test]
    fn facts_survive() {
        assert_eq!(through(CompletionSlot::accepted(7, 12)), Completion::Accepted { prompt_tokens: 12 });
        let Completion::Tokens { index: 9, ids } = through(CompletionSlot::tokens(7, 9, &[1, u32::MAX, 3])) else {
            panic!("not tokens");
        };
        assert_eq!(*ids, [1, u32::MAX, 3]);
        let usage = Usage { prompt_tokens: 1, cached_tokens: 2, output_tokens: u32::MAX };
        let done = CompletionSlot::done(7, FinishReason::StopString, usage);
        assert!(done.is_terminal());
        assert_eq!(through(done), Completion::Done { reason: FinishReason::StopString, usage });
        let error = CompletionSlot::error(u32::MAX, Reject::Busy);
        assert!(error.is_terminal() && error.request_id() == u32::MAX);
        assert_eq!(through(error), Completion::Error { number: 6 });
    }

    #[test]
    fn a_slot_is_the_drawn_bytes() {
        let words = CompletionSlot::tokens(0x0403_0201, 0x0807_0605, &[0x0c0b_0a09]).to_words();
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        assert_eq!(bytes[..20], [1, 2, 3, 4, 2, 1, 0, 0, 5, 6, 7, 8, 0, 0, 0, 0, 9, 10, 11, 12]);
    }

    #[test]
    fn a_long_detail_is_cut_at_a_character() {
        let text = "é".repeat(DETAIL_BYTES_MAX);
        let joined: String = CompletionSlot::detail(1, &text)
            .map(|s| match s.decode().unwrap() {
                Completion::Detail(piece) => piece.as_str().to_owned(),
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(joined, "é".repeat(DETAIL_BYTES_MAX / 2));
    }

    proptest! {
        #[test]
        fn any_text_survives_in_whole_characters(text in any::<String>()) {
            let mut joined = String::new();
            let mut more = false;
            for slot in CompletionSlot::text(3, &text) {
                let Completion::Text(piece) = through(slot) else { panic!("not text") };
                joined.push_str(piece.as_str());
                more = piece.more_follows();
            }
            prop_assert!(!more);
            prop_assert_eq!(joined, text);
        }

        #[test]
        fn any_words_decode_or_are_refused(words in any::<[u64; COMPLETION_WORDS]>(), kind in 0u8..9, count in 0u8..20) {
            let mut slot = CompletionSlot::from_words(words);
            let _ = slot.decode();
            (slot.kind, slot.count) = (kind, count);
            if let Ok(Completion::Text(piece) | Completion::Detail(piece)) = slot.decode() {
                prop_assert!(!piece.as_str().is_empty());
            }
        }
    }
}
