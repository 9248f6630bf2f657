//! A session's rings in its two mappings; the algorithm is in [`crate::ring`].

use std::sync::Arc;

use crate::layout::{COMPLETION_WORDS, Geometry, SUBMISSION_WORDS, down, up};
use crate::ring::RingMemory;
use crate::segment::Mapping;
use crate::sync::{AtomicU32, Ordering};

/// A ring in a session's two mappings: what the producer writes in one, what the consumer writes in the other.
#[derive(Debug, Clone)]
pub(crate) struct MappedRing<const WORDS: usize> {
    capacity: u32,
    /// Written by the producer: tail and slots.
    pub(crate) writer: Arc<Mapping>,
    tail: u32,
    slots: u32,
    /// Written by the consumer: head and wake request.
    reader: Arc<Mapping>,
    head: u32,
    wake_at: u32,
}

/// The submission and the completion ring of a session.
pub(crate) fn rings(
    g: Geometry,
    down: &Arc<Mapping>,
    up: &Arc<Mapping>,
) -> (MappedRing<SUBMISSION_WORDS>, MappedRing<COMPLETION_WORDS>) {
    assert!(down.bytes() == g.down_bytes() && up.bytes() == g.up_bytes());
    let submission = MappedRing {
        capacity: g.submission_slots(),
        writer: up.clone(),
        tail: up::SQ_TAIL,
        slots: g.submission_offset(),
        reader: down.clone(),
        head: down::SQ_HEAD,
        wake_at: down::SQ_WAKE_AT,
    };
    let completion = MappedRing {
        capacity: g.completion_slots(),
        writer: down.clone(),
        tail: down::CQ_TAIL,
        slots: g.completion_offset(),
        reader: up.clone(),
        head: up::CQ_HEAD,
        wake_at: up::CQ_WAKE_AT,
    };
    (submission, completion)
}

impl<const WORDS: usize> RingMemory<WORDS> for MappedRing<WORDS> {
    #[inline]
    fn capacity(&self) -> u32 {
        self.capacity
    }

    #[inline]
    fn tail(&self) -> &AtomicU32 {
        self.writer.u32_at(self.tail)
    }

    #[inline]
    fn head(&self) -> &AtomicU32 {
        self.reader.u32_at(self.head)
    }

    #[inline]
    fn wake_at(&self) -> &AtomicU32 {
        self.reader.u32_at(self.wake_at)
    }

    #[inline]
    fn load_slot(&self, place: u32) -> [u64; WORDS] {
        let words = self.writer.words_at(self.slots + place * (WORDS as u32 * 8), WORDS);
        std::array::from_fn(|i| words[i].load(Ordering::Relaxed))
    }

    #[inline]
    fn store_slot(&self, place: u32, values: [u64; WORDS]) {
        let words = self.writer.words_at(self.slots + place * (WORDS as u32 * 8), WORDS);
        for (word, value) in words.iter().zip(values) {
            word.store(value, Ordering::Relaxed);
        }
    }
}
