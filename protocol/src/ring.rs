//! A ring with one producer and one consumer, neither of which trusts the other's index.
//!
//! Indices are free-running u32; a slot's place is its index masked by the capacity, a power of two. `tail` counts
//! what was published and only the producer stores it; `head` counts what was read and only the consumer stores it. Each
//! side keeps its own index privately, and a copy of the last value it saw of the other's, so that it touches
//! the shared word of the other only when the copy says "full" or "empty".
//!
//! ```text
//! producer   push: write slot words (Relaxed)                 consumer   t = tail.load(Relaxed); fence(Acquire)
//!            publish: tail.store(next, Release)                          pop: read slot words (Relaxed)
//!            h = head.load(Relaxed); fence(Acquire)                      release: head.store(next, Release)
//! ```
//! A load and a fence stand in place of a load-acquire because the daemon's mapping of what the client writes is
//! read-only, and only a relaxed load is promised to work on read-only memory.
//!
//! Wake and park: the consumer stores the index it waits for in `wake_at` and looks at the tail once more; the producer looks at
//! `wake_at` after each publish and sends a doorbell if that index lies in what it just published. Both have a full
//! fence between their store and their load; without either, both can read the old value and the wake-up is lost.
//! A `wake_at` once passed is never hit again (short of 2^32 slots, and then costs a spurious doorbell), so a consumer that
//! is awake has nothing to take back. Both words start as 0: a new ring is armed for its first slot.

use crate::sync::{AtomicU32, Ordering, Site, fence_at, release_at};

/// Where a ring's words live: the mappings of a session, or loom's memory in the models.
pub trait RingMemory<const WORDS: usize> {
    /// Number of slots, a power of two.
    fn capacity(&self) -> u32;
    /// Slots published. Stored by the producer.
    fn tail(&self) -> &AtomicU32;
    /// Slots read. Stored by the consumer.
    fn head(&self) -> &AtomicU32;
    /// Index the consumer wants a doorbell for. Stored by the consumer.
    fn wake_at(&self) -> &AtomicU32;
    /// Copies the slot at `place` (below the capacity) out, word by word.
    fn load_slot(&self, place: u32) -> [u64; WORDS];
    /// Writes the slot at `place` (below the capacity), word by word.
    fn store_slot(&self, place: u32, words: [u64; WORDS]);
}

/// The peer's index is one that an honest peer cannot have stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("index {found} is outside {low}..={high} (wrapping)")]
pub struct BadIndex {
    /// What the shared word held.
    pub found: u32,
    /// Lowest value it could have.
    pub low: u32,
    /// Highest value it could have.
    pub high: u32,
}

/// The ring, as far as the producer knows, has no free slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the ring is full")]
pub struct Full;

/// What one publish made visible: the slots of index `old..new` (wrapping). Two publishes in a row join into one
/// with the first's `old` and the second's `new`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Published {
    /// The tail before.
    pub old: u32,
    /// The tail after.
    pub new: u32,
}

impl Published {
    /// Does a consumer that asked to be woken for index `wake_at` want to know of this?
    #[inline]
    pub fn covers(self, wake_at: u32) -> bool {
        // wake_at in old..new, wrapping: the distance from wake_at to the last published slot is below the count.
        self.new.wrapping_sub(wake_at).wrapping_sub(1) < self.new.wrapping_sub(self.old)
    }
}

/// The writing end.
#[derive(Debug)]
pub struct Producer<M, const WORDS: usize> {
    memory: M,
    /// Index of the next slot to write.
    next: u32,
    /// What the shared tail holds.
    published: u32,
    /// The head when last looked at, checked.
    head_seen: u32,
}

impl<M: RingMemory<WORDS>, const WORDS: usize> Producer<M, WORDS> {
    /// The producer of a ring nobody has written to yet.
    pub fn new(memory: M) -> Self {
        assert!(memory.capacity().is_power_of_two());
        Self { memory, next: 0, published: 0, head_seen: 0 }
    }

    /// The memory it writes to.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// Looks at the consumer's head and returns how many slots are free. Only what was published can have been read,
    /// and a head never moves back.
    pub fn refresh(&mut self) -> Result<u32, BadIndex> {
        let head = self.memory.head().load(Ordering::Relaxed);
        // Pairs with the consumer's Release of the head: its reads of the slots we may now overwrite are over.
        fence_at(Site::HeadAcquire, Ordering::Acquire);
        if head.wrapping_sub(self.head_seen) > self.published.wrapping_sub(self.head_seen) {
            return Err(BadIndex { found: head, low: self.head_seen, high: self.published });
        }
        self.head_seen = head;
        Ok(self.free())
    }

    /// Free slots by the last look.
    #[inline]
    pub fn free(&self) -> u32 {
        self.memory.capacity() - self.next.wrapping_sub(self.head_seen)
    }

    /// The consumer's head by the last look.
    pub fn head_seen(&self) -> u32 {
        self.head_seen
    }

    /// Index that the next pushed slot gets.
    pub fn next_index(&self) -> u32 {
        self.next
    }

    /// Writes one slot, invisible until [`Self::publish`]. Does not look at the consumer's head: see [`Self::refresh`].
    #[inline]
    pub fn push(&mut self, words: [u64; WORDS]) -> Result<(), Full> {
        if self.free() == 0 {
            return Err(Full);
        }
        self.memory.store_slot(self.next & (self.memory.capacity() - 1), words);
        self.next = self.next.wrapping_add(1);
        Ok(())
    }

    /// Makes all pushed slots visible; None if there were none. Whoever gets the answer must then look whether the
    /// consumer sleeps: [`wants_doorbell`].
    #[inline]
    pub fn publish(&mut self) -> Option<Published> {
        if self.next == self.published {
            return None;
        }
        let published = Published { old: self.published, new: self.next };
        // Release pairs with the consumer's Acquire fence after its load of the tail: it sees the slots' words.
        self.memory.tail().store(self.next, release_at(Site::TailRelease));
        self.published = self.next;
        Some(published)
    }
}

/// The full fence a publisher owes between its publishes and [`wants_doorbell`]; one serves any number of rings.
#[inline]
pub fn publisher_fence() {
    // Pairs with the fence in Consumer::arm: of the two loads behind the fences at least one sees the other side's store.
    fence_at(Site::PublisherFence, Ordering::SeqCst);
}

/// Does the consumer sleep for something in `published`? [`publisher_fence`] must lie between the publish and this.
#[inline]
pub fn wants_doorbell<M: RingMemory<WORDS>, const WORDS: usize>(memory: &M, published: Published) -> bool {
    published.covers(memory.wake_at().load(Ordering::Relaxed))
}

/// The reading end.
#[derive(Debug)]
pub struct Consumer<M, const WORDS: usize> {
    memory: M,
    /// Index of the next slot to read.
    next: u32,
    /// What the shared head holds.
    released: u32,
    /// The tail when last looked at, checked.
    tail_seen: u32,
}

impl<M: RingMemory<WORDS>, const WORDS: usize> Consumer<M, WORDS> {
    /// The consumer of a ring nobody has read from yet.
    pub fn new(memory: M) -> Self {
        assert!(memory.capacity().is_power_of_two());
        Self { memory, next: 0, released: 0, tail_seen: 0 }
    }

    /// The memory it reads from.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// Slots read so far, free-running.
    pub fn next_index(&self) -> u32 {
        self.next
    }

    /// Copies the next slot out; None if there is none. The index is loaded only when the last look is used up.
    /// The producer may not reuse the slot before [`Self::release`].
    #[inline]
    pub fn pop(&mut self) -> Result<Option<[u64; WORDS]>, BadIndex> {
        if self.next == self.tail_seen && !self.look()? {
            return Ok(None);
        }
        let words = self.memory.load_slot(self.next & (self.memory.capacity() - 1));
        self.next = self.next.wrapping_add(1);
        Ok(Some(words))
    }

    /// Gives all slots read so far back to the producer.
    #[inline]
    pub fn release(&mut self) {
        if self.released != self.next {
            // Release pairs with the producer's Acquire fence in refresh: our reads come before its next writes.
            self.memory.head().store(self.next, release_at(Site::HeadRelease));
            self.released = self.next;
        }
    }

    /// Asks for a doorbell at the next slot and looks once more. True: nothing came, the caller may sleep. False:
    /// there is something to read now.
    pub fn arm(&mut self) -> Result<bool, BadIndex> {
        if self.next != self.tail_seen {
            return Ok(false);
        }
        self.memory.wake_at().store(self.next, Ordering::Relaxed);
        // Pairs with publisher_fence: either we see its tail below, or it sees our wake_at.
        fence_at(Site::ParkerFence, Ordering::SeqCst);
        Ok(!self.look()?)
    }

    /// Loads the tail once, checks it, and says whether it lies ahead. What is between the slots not yet given back and
    /// the tail can never exceed the capacity.
    #[inline]
    fn look(&mut self) -> Result<bool, BadIndex> {
        let tail = self.memory.tail().load(Ordering::Relaxed);
        // Pairs with the producer's Release of the tail. Before the first use of what it counts.
        fence_at(Site::TailAcquire, Ordering::Acquire);
        let capacity = self.memory.capacity();
        // From `released`, because a producer that believes only our stored head has at most that much room.
        let span = tail.wrapping_sub(self.released);
        if span > capacity || span < self.next.wrapping_sub(self.released) {
            return Err(BadIndex { found: tail, low: self.next, high: self.released.wrapping_add(capacity) });
        }
        self.tail_seen = tail;
        Ok(tail != self.next)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::sync::AtomicU64;
    use proptest::prelude::*;
    use std::collections::VecDeque;
    use std::sync::Arc;

    /// A ring in ordinary memory, its indices starting anywhere so that wrap-around is met at once.
    struct Heap {
        tail: AtomicU32,
        head: AtomicU32,
        wake_at: AtomicU32,
        slots: Vec<AtomicU64>,
    }

    impl RingMemory<1> for Arc<Heap> {
        fn capacity(&self) -> u32 {
            self.slots.len() as u32
        }
        fn tail(&self) -> &AtomicU32 {
            &self.tail
        }
        fn head(&self) -> &AtomicU32 {
            &self.head
        }
        fn wake_at(&self) -> &AtomicU32 {
            &self.wake_at
        }
        fn load_slot(&self, place: u32) -> [u64; 1] {
            [self.slots[place as usize].load(Ordering::Relaxed)]
        }
        fn store_slot(&self, place: u32, words: [u64; 1]) {
            self.slots[place as usize].store(words[0], Ordering::Relaxed);
        }
    }

    fn ring(capacity: u32, start: u32) -> (Arc<Heap>, Producer<Arc<Heap>, 1>, Consumer<Arc<Heap>, 1>) {
        let heap = Arc::new(Heap {
            tail: AtomicU32::new(start),
            head: AtomicU32::new(start),
            wake_at: AtomicU32::new(start),
            slots: (0..capacity).map(|_| AtomicU64::new(0)).collect(),
        });
        let producer = Producer { memory: heap.clone(), next: start, published: start, head_seen: start };
        let consumer = Consumer { memory: heap.clone(), next: start, released: start, tail_seen: start };
        (heap, producer, consumer)
    }

    #[derive(Debug, Clone)]
    enum Step {
        Push,
        Publish,
        Refresh,
        Pop,
        Release,
        Arm,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => Just(Step::Push), 2 => Just(Step::Publish), 2 => Just(Step::Refresh),
            4 => Just(Step::Pop), 2 => Just(Step::Release), 1 => Just(Step::Arm),
        ]
    }

    proptest! {
        /// The ring against a queue: same contents in the same order, and never more than the capacity.
        #[test]
        fn behaves_like_a_queue(
            steps in proptest::collection::vec(step(), 0..400),
            log2 in 0u32..5,
            start in prop_oneof![Just(0u32), Just(u32::MAX - 3), any::<u32>()],
        ) {
            let capacity = 1 << log2;
            let (heap, mut producer, mut consumer) = ring(capacity, start);
            let (mut pushed, mut visible) = (VecDeque::new(), VecDeque::new());
            let (mut value, mut unreleased, mut known_free) = (0u64, 0u32, capacity);
            let mut asleep_at = Some(start);
            for s in steps {
                match s {
                    Step::Push => {
                        let fits = producer.push([value]).is_ok();
                        prop_assert_eq!(fits, known_free > 0);
                        if fits { pushed.push_back(value); value += 1; known_free -= 1; }
                    }
                    Step::Publish => {
                        prop_assert_eq!(producer.publish().is_some_and(|p| {
                            assert_eq!(p.new.wrapping_sub(p.old) as usize, pushed.len());
                            // The event index, against its meaning spelled out.
                            let w = heap.wake_at.load(Ordering::Relaxed);
                            let inside = (0..pushed.len() as u32).any(|i| p.old.wrapping_add(i) == w);
                            assert_eq!(p.covers(w), inside);
                            if let Some(at) = asleep_at { assert!(at == w && inside); }
                            true
                        }), !pushed.is_empty());
                        if !pushed.is_empty() { asleep_at = None; }
                        visible.append(&mut pushed);
                    }
                    Step::Refresh => {
                        known_free = capacity - pushed.len() as u32 - visible.len() as u32 - unreleased;
                        prop_assert_eq!(producer.refresh(), Ok(known_free));
                    }
                    Step::Pop => {
                        let got = consumer.pop().unwrap().map(|w| w[0]);
                        prop_assert_eq!(got, visible.pop_front());
                        unreleased += u32::from(got.is_some());
                    }
                    Step::Release => { consumer.release(); unreleased = 0; }
                    Step::Arm => {
                        prop_assert_eq!(consumer.arm().unwrap(), visible.is_empty());
                        if visible.is_empty() { asleep_at = Some(consumer.next); }
                    }
                }
            }
        }

        /// Whatever a lying peer stores, the answer is an error or an index it could have had.
        #[test]
        fn any_index_is_refused_or_possible(head in any::<u32>(), tail in any::<u32>(), start in any::<u32>(), sent in 0u32..8, read in 0u32..8) {
            let (heap, mut producer, mut consumer) = ring(8, start);
            for i in 0..sent { producer.push([u64::from(i)]).unwrap(); }
            producer.publish();
            for _ in 0..read.min(sent) { consumer.pop().unwrap().unwrap(); }
            heap.head.store(head, Ordering::Relaxed);
            heap.tail.store(tail, Ordering::Relaxed);
            let possible_head = (0..=sent).any(|i| start.wrapping_add(i) == head);
            prop_assert_eq!(producer.refresh().is_ok(), possible_head);
            let possible_tail = (read.min(sent)..=8).any(|i| start.wrapping_add(i) == tail);
            prop_assert_eq!(consumer.look().is_ok(), possible_tail);
        }
    }
}
