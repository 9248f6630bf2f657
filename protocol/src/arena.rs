//! Who uses which bytes of the arena. Only the client keeps account: the daemon reads where a slot points.

use std::collections::VecDeque;

use crate::limits;

/// Where each part lies in the arena: a ring of bytes, given back in the order it was taken.
#[derive(Debug)]
pub(crate) struct Arena {
    bytes: u32,
    /// Bytes ever taken, gaps at the end of the arena included; its place is this modulo the size.
    taken: u64,
    /// Bytes ever given back.
    given_back: u64,
    /// The submission slot of each part not yet given back, and `taken` behind it.
    parts: VecDeque<(u32, u64)>,
}

impl Arena {
    pub(crate) fn new(bytes: u32) -> Self {
        Self { bytes, taken: 0, given_back: 0, parts: VecDeque::new() }
    }

    /// Room for `len` bytes in one piece, used by the slot of this index; its offset, or None if there is none now.
    pub(crate) fn take(&mut self, len: u32, slot_index: u32) -> Option<u32> {
        let len = u64::from(len.next_multiple_of(limits::ARENA_ALIGN));
        let size = u64::from(self.bytes);
        let place = self.taken % size;
        // A part never wraps: what is left at the end is skipped when it is too short.
        let gap = if place + len > size { size - place } else { 0 };
        if self.taken - self.given_back + gap + len > size {
            return None;
        }
        let offset = (self.taken + gap) % size;
        self.taken += gap + len;
        self.parts.push_back((slot_index, self.taken));
        Some(offset as u32)
    }

    /// The daemon has read all slots before `head`.
    pub(crate) fn give_back(&mut self, head: u32) {
        // A slot's index lies at most one ring before or after the head, so the sign of the distance tells.
        while let Some((_, end)) = self.parts.pop_front_if(|&mut (index, _)| (head.wrapping_sub(index) as i32) > 0) {
            self.given_back = end;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Parts in flight never overlap, and an empty arena takes the largest part.
        #[test]
        fn parts_never_overlap(steps in proptest::collection::vec((1u32..4096, 0usize..3), 1..200), start in any::<u32>()) {
            let mut arena = Arena::new(16 * 1024);
            let mut live: VecDeque<(u32, u32, u32)> = VecDeque::new();
            let mut index = start;
            for (len, reads) in steps {
                match arena.take(len, index) {
                    Some(offset) => {
                        prop_assert!(offset % 8 == 0 && offset + len <= 16 * 1024);
                        for &(_, o, l) in &live {
                            prop_assert!(offset >= o + l || o >= offset + len);
                        }
                        live.push_back((index, offset, len));
                        index = index.wrapping_add(1);
                    }
                    None => prop_assert!(!live.is_empty()),
                }
                for _ in 0..reads {
                    if let Some((read, ..)) = live.pop_front() { arena.give_back(read.wrapping_add(1)); }
                }
            }
        }
    }
}
