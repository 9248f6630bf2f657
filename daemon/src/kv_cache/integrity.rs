//! The promises of the cache, checked from outside: nothing here is used to keep them.

use super::block::{BLOCK_TOKENS, BlockId, blocks_for};
use super::pool::BlockPool;
use super::prefix::{Parent, PrefixCache};

/// One block table and what it is for.
#[derive(Debug, Clone, Copy)]
pub struct Holder<'a> {
    /// Root of the prefix cache it may share.
    pub salt: u64,
    /// All known tokens.
    pub tokens: &'a [u32],
    /// How many of them have been written to the blocks.
    pub computed: usize,
    /// The blocks.
    pub table: &'a [BlockId],
}

/// A promise that does not hold; the text says which, where.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("key-value cache: {0}")]
pub struct IntegrityError(pub String);

macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err(IntegrityError(format!($($message)+)));
        }
    };
}

pub(super) fn check(
    pool: &BlockPool,
    prefix: Option<&PrefixCache>,
    holders: &[Holder<'_>],
) -> Result<(), IntegrityError> {
    check_counts(pool, prefix, holders)?;
    if let Some(prefix) = prefix {
        check_tree(pool, prefix)?;
        check_idle_order(pool, prefix)?;
    }
    holders.iter().try_for_each(|holder| check_holder(pool, prefix, holder))
}

fn all(pool: &BlockPool) -> impl Iterator<Item = BlockId> {
    (0..pool.total() as u32).map(BlockId)
}

/// free + cached + owned = N, each block once; reference count = live holders.
fn check_counts(pool: &BlockPool, prefix: Option<&PrefixCache>, holders: &[Holder<'_>]) -> Result<(), IntegrityError> {
    let mut live = vec![0u32; pool.total()];
    for &block in holders.iter().flat_map(|h| h.table) {
        live[block.index()] += 1;
    }
    let mut free = vec![false; pool.total()];
    for &block in pool.free_list() {
        ensure!(!free[block.index()], "block {} is free twice", block.0);
        free[block.index()] = true;
    }
    for block in all(pool) {
        let (count, held) = (pool.holders(block), live[block.index()]);
        ensure!(count == held, "block {} counts {count} holders but has {held}", block.0);
        let known = prefix.is_some_and(|p| p.contains(block));
        let states = [free[block.index()], held == 0 && known, held > 0];
        ensure!(states.iter().filter(|&&s| s).count() == 1, "block {} is free, cached, owned: {states:?}", block.0);
        ensure!(!(free[block.index()] && known), "block {} is free and cached", block.0);
    }
    Ok(())
}

/// Edges and nodes agree; the tree is one.
fn check_tree(pool: &BlockPool, prefix: &PrefixCache) -> Result<(), IntegrityError> {
    let mut children = vec![0u32; pool.total()];
    let mut nodes = 0;
    for block in all(pool) {
        let Some(node) = prefix.node(block) else {
            continue;
        };
        nodes += 1;
        ensure!(prefix.child(node.parent, &node.edge) == Some(block), "no edge leads to block {}", block.0);
        if let Parent::Block(above) = node.parent {
            ensure!(prefix.contains(above), "block {} hangs from block {}, which is not cached", block.0, above.0);
            ensure!(
                pool.holders(above) >= pool.holders(block),
                "block {} has fewer holders than its child {}",
                above.0,
                block.0
            );
            children[above.index()] += 1;
        }
    }
    ensure!(prefix.edges() == nodes, "{} edges for {nodes} nodes", prefix.edges());
    for block in all(pool) {
        let counted = prefix.node(block).map_or(0, |n| n.children);
        ensure!(counted == children[block.index()], "block {} counts {counted} children", block.0);
    }
    Ok(())
}

/// The idle list is exactly the cached blocks without holders, descendants before ancestors.
fn check_idle_order(pool: &BlockPool, prefix: &PrefixCache) -> Result<(), IntegrityError> {
    let order = prefix.idle_order();
    ensure!(order.len() == prefix.idle(), "the idle list's length is wrong");
    let mut place = vec![usize::MAX; pool.total()];
    for (i, &block) in order.iter().enumerate() {
        ensure!(place[block.index()] == usize::MAX, "block {} is idle twice", block.0);
        place[block.index()] = i;
    }
    for block in all(pool) {
        let idle = prefix.contains(block) && pool.holders(block) == 0;
        ensure!(
            idle == (place[block.index()] != usize::MAX),
            "block {} is wrongly in or out of the idle list",
            block.0
        );
        if let (true, Some(Parent::Block(above))) = (idle, prefix.node(block).map(|n| n.parent))
            && pool.holders(above) == 0
        {
            ensure!(place[block.index()] < place[above.index()], "block {} would be evicted first", above.0);
        }
    }
    Ok(())
}

/// Full blocks are known under exactly this holder's salt and tokens; the rest is its own and unknown.
fn check_holder(pool: &BlockPool, prefix: Option<&PrefixCache>, holder: &Holder<'_>) -> Result<(), IntegrityError> {
    let Holder { salt, tokens, computed, table } = *holder;
    ensure!(computed <= tokens.len(), "{computed} of {} tokens are computed", tokens.len());
    ensure!(table.len() >= blocks_for(computed), "{} blocks for {computed} tokens", table.len());
    let full = computed / BLOCK_TOKENS;
    for (i, &block) in table.iter().enumerate() {
        let Some(prefix) = prefix.filter(|_| i < full) else {
            ensure!(pool.holders(block) == 1, "block {} can be written and is shared", block.0);
            ensure!(!prefix.is_some_and(|p| p.contains(block)), "block {} can be written and is cached", block.0);
            continue;
        };
        let Some(node) = prefix.node(block) else {
            return Err(IntegrityError(format!("block {} is full but not published", block.0)));
        };
        let parent = if i == 0 { Parent::Root(salt) } else { Parent::Block(table[i - 1]) };
        ensure!(node.parent == parent, "block {} is known under another path or salt", block.0);
        ensure!(
            node.edge == tokens[i * BLOCK_TOKENS..(i + 1) * BLOCK_TOKENS],
            "block {} is known under other tokens",
            block.0
        );
    }
    Ok(())
}
