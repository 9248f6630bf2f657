//! Which blocks are free, and how many holders each of the others has.
//!
//! A holder is a block table that lists the block. The pool knows neither sequences nor prefixes: a block without
//! holders that is not on the free list is somebody else's to remember (the prefix cache's).

use super::block::BlockId;

/// Reference counts and the free list. Everything is allocated at start.
#[derive(Debug)]
pub struct BlockPool {
    /// Block tables that list each block.
    holders: Vec<u32>,
    /// Last in, first out: a block freed a moment ago is the one most likely still in a processor's cache.
    free: Vec<BlockId>,
}

impl BlockPool {
    /// All of `blocks` free; the lowest ids go first.
    pub fn new(blocks: usize) -> Self {
        let count = u32::try_from(blocks).expect("the settings bound the number of blocks");
        Self { holders: vec![0; blocks], free: (0..count).rev().map(BlockId).collect() }
    }

    /// Blocks in all.
    pub fn total(&self) -> usize {
        self.holders.len()
    }

    /// Blocks on the free list.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// The free list, for the integrity check.
    pub(super) fn free_list(&self) -> &[BlockId] {
        &self.free
    }

    /// How many block tables list `block`.
    pub fn holders(&self, block: BlockId) -> u32 {
        self.holders[block.index()]
    }

    /// Takes a block off the free list, with one holder.
    pub fn take(&mut self) -> Option<BlockId> {
        let block = self.free.pop()?;
        assert_eq!(self.holders[block.index()], 0, "a block on the free list has a holder");
        self.holders[block.index()] = 1;
        Some(block)
    }

    /// Adds a holder to a block that is not on the free list; returns how many it has now.
    pub fn hold(&mut self, block: BlockId) -> u32 {
        self.holders[block.index()] += 1;
        self.holders[block.index()]
    }

    /// Removes a holder; returns how many are left. At 0 the caller frees the block or keeps it as cached.
    pub fn release(&mut self, block: BlockId) -> u32 {
        assert!(self.holders[block.index()] > 0, "block {} is released by nobody who held it", block.0);
        self.holders[block.index()] -= 1;
        self.holders[block.index()]
    }

    /// Puts a block without holders on the free list.
    pub fn put_free(&mut self, block: BlockId) {
        assert_eq!(self.holders[block.index()], 0, "a held block is freed");
        debug_assert!(self.free.len() < self.holders.len());
        self.free.push(block);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_block_is_handed_out_once_lowest_first() {
        let mut pool = BlockPool::new(3);
        let taken: Vec<_> = std::iter::from_fn(|| pool.take()).collect();
        assert_eq!(taken, [BlockId(0), BlockId(1), BlockId(2)]);
        assert_eq!((pool.free(), pool.total()), (0, 3));
    }

    #[test]
    fn a_shared_block_stays_until_its_last_holder_goes() {
        let mut pool = BlockPool::new(1);
        let block = pool.take().unwrap();
        assert_eq!(pool.hold(block), 2);
        assert_eq!(pool.release(block), 1);
        assert_eq!(pool.release(block), 0);
        pool.put_free(block);
        assert_eq!(pool.take(), Some(block));
    }

    #[test]
    #[should_panic(expected = "released by nobody")]
    fn a_double_release_is_caught_where_it_happens() {
        let mut pool = BlockPool::new(1);
        let block = pool.take().unwrap();
        pool.release(block);
        pool.release(block);
    }

    #[test]
    #[should_panic(expected = "a held block is freed")]
    fn a_held_block_cannot_be_freed() {
        let mut pool = BlockPool::new(1);
        let block = pool.take().unwrap();
        pool.put_free(block);
    }
}
