//! Key-value memory in blocks: who owns which block, and which blocks hold a prefix somebody may meet again.
//!
//! Every block is in exactly one of three states: **free**; **owned** (at least one block table lists it); or **cached**
//! (no table lists it, but the prefix cache knows what it holds and may hand it out or give it up). A block in the
//! prefix cache is full and never written again; the block a table is still filling belongs to that table alone.
//!
//! Blocks change state at once, because nothing is in flight between a commit and the next plan. An engine that plans
//! while a step computes has to hold back what `release` and `publish` free until that step is done: those are the only two
//! places where a block becomes free or evictable.

pub mod block;
mod integrity;
pub mod pool;
pub mod prefix;
#[cfg(test)]
mod tests;

pub use integrity::{Holder, IntegrityError};

use block::{BLOCK_TOKENS, BlockId, blocks_for};
use pool::BlockPool;
use prefix::{Parent, PrefixCache};
use std::ops::Range;

/// Where the blocks are. `free + cached + owned == total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KvUsage {
    /// All blocks sequences can have.
    pub total: usize,
    /// Blocks that hold nothing.
    pub free: usize,
    /// Blocks only the prefix cache holds; they can be taken back at any time.
    pub cached: usize,
    /// Blocks that at least one running sequence holds.
    pub owned: usize,
}

/// The pool and, unless switched off, the prefix cache over it.
#[derive(Debug)]
pub struct KvCache {
    pool: BlockPool,
    prefix: Option<PrefixCache>,
}

impl KvCache {
    /// `blocks` free blocks.
    pub fn new(blocks: usize, prefix_cache: bool) -> Self {
        Self { pool: BlockPool::new(blocks), prefix: prefix_cache.then(|| PrefixCache::new(blocks)) }
    }

    /// Where the blocks are now.
    pub fn usage(&self) -> KvUsage {
        let (total, free, cached) = (self.pool.total(), self.pool.free(), self.idle());
        KvUsage { total, free, cached, owned: total - free - cached }
    }

    /// Blocks that [`extend`](Self::extend) could hand out: free ones and those it may evict.
    pub fn available(&self) -> usize {
        // Every idle block is evictable: whoever holds a block holds its ancestors, so nothing held hangs from an idle one.
        self.pool.free() + self.idle()
    }

    fn idle(&self) -> usize {
        self.prefix.as_ref().map_or(0, PrefixCache::idle)
    }

    /// Puts the cached blocks of the longest known prefix of `tokens` into `found`, without holding them. At most
    /// `tokens.len() - 1` tokens match: at least one is left to compute, for its logits are wanted.
    pub fn find(&self, salt: u64, tokens: &[u32], found: &mut Vec<BlockId>) {
        found.clear();
        let Some(prefix) = &self.prefix else { return };
        let matchable = &tokens[..tokens.len().saturating_sub(1)];
        let mut parent = Parent::Root(salt);
        for edge in matchable.chunks_exact(BLOCK_TOKENS) {
            let Some(block) = prefix.child(parent, edge) else {
                return;
            };
            found.push(block);
            parent = Parent::Block(block);
        }
    }

    /// How many of `blocks` nobody holds.
    pub fn count_idle(&self, blocks: &[BlockId]) -> usize {
        blocks.iter().filter(|&&b| self.pool.holders(b) == 0).count()
    }

    /// Makes `found` (of [`find`](Self::find), nothing having changed since) the beginning of an empty table.
    pub fn hold(&mut self, found: &[BlockId], table: &mut Vec<BlockId>) {
        assert!(table.is_empty(), "a cached prefix is the beginning of a table");
        for &block in found {
            self.hold_one(block);
            table.push(block);
        }
    }

    fn hold_one(&mut self, block: BlockId) {
        let prefix = self.prefix.as_mut().expect("only cached blocks are shared");
        debug_assert!(prefix.contains(block));
        if self.pool.hold(block) == 1 {
            prefix.wake(block);
        }
    }

    /// Lengthens `table` until it has room for `tokens` positions, evicting cached blocks where none is free. False, and
    /// nothing changed, when there are not enough.
    #[must_use]
    pub fn extend(&mut self, table: &mut Vec<BlockId>, tokens: usize) -> bool {
        let missing = blocks_for(tokens).saturating_sub(table.len());
        if missing > self.available() {
            return false;
        }
        for _ in 0..missing {
            if self.pool.free() == 0 {
                let evicted = self.prefix.as_mut().and_then(PrefixCache::evict);
                self.pool.put_free(evicted.expect("enough blocks were available"));
            }
            table.push(self.pool.take().expect("a block was free or has been evicted"));
        }
        true
    }

    /// Makes `blocks` of `table`, all of whose positions have been written by a step that is done, known to the prefix
    /// cache. All blocks before them are known already.
    ///
    /// When the same content is known in another block (two sequences computed it side by side), the table changes over to
    /// that block and its own becomes free: the same tokens give the same bits whoever computed them, so one copy is
    /// enough, and every table holds the ancestors of each block it holds.
    pub fn publish(&mut self, salt: u64, tokens: &[u32], table: &mut [BlockId], blocks: Range<usize>) {
        if self.prefix.is_none() {
            return;
        }
        for i in blocks {
            let edge = &tokens[i * BLOCK_TOKENS..(i + 1) * BLOCK_TOKENS];
            let parent = if i == 0 { Parent::Root(salt) } else { Parent::Block(table[i - 1]) };
            let prefix = self.prefix.as_mut().expect("checked above");
            match prefix.child(parent, edge) {
                None => prefix.insert(parent, edge, table[i]),
                Some(known) if known == table[i] => {}
                Some(known) => {
                    self.hold_one(known);
                    let own = std::mem::replace(&mut table[i], known);
                    self.release_one(own);
                }
            }
        }
    }

    /// Empties `table`. Blocks the prefix cache knows stay cached, the others are free.
    pub fn release(&mut self, table: &mut Vec<BlockId>) {
        // Deepest first: the eviction order depends on it (see prefix.rs).
        while let Some(block) = table.pop() {
            self.release_one(block);
        }
    }

    fn release_one(&mut self, block: BlockId) {
        if self.pool.release(block) > 0 {
            return;
        }
        match &mut self.prefix {
            Some(prefix) if prefix.contains(block) => prefix.rest(block),
            _ => self.pool.put_free(block),
        }
    }

    /// Whether everything this module promises holds, given all tables that hold blocks. For tests and for an idle
    /// moment: it looks at every block.
    pub fn check_integrity(&self, holders: &[Holder<'_>]) -> Result<(), IntegrityError> {
        integrity::check(&self.pool, self.prefix.as_ref(), holders)
    }
}
