//! Which blocks hold a prefix that somebody may meet again.
//!
//! A radix tree whose edges are whole blocks: each node is one cached block, its edge the block's 16 token ids, its
//! path from the root all tokens up to the block's last. There is one root per cache salt, so a path never leads from
//! one salt's tokens into another's blocks. The nodes live in an array indexed by block (a block holds one path's content
//! or none), the edges in one map from (parent, tokens) to block: finding a child is one exact lookup.
//!
//! **Order of eviction.** Blocks without holders wait in a list, the longest unused in front. A table holds all
//! ancestors of each block it holds, and tables let go of their deepest block first; so a node always stands in front
//! of its ancestors, and the front of the list is always a leaf: the least recently used one.

use super::block::{BLOCK_TOKENS, BlockId};
use std::collections::HashMap;

/// The token ids of one block.
pub(super) type Edge = [u32; BLOCK_TOKENS];

/// What a node hangs from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Parent {
    /// The first block of a prompt, in the tree of this salt.
    Root(u64),
    /// The block before it.
    Block(BlockId),
}

/// One cached block.
#[derive(Debug, Clone)]
pub(super) struct Node {
    pub parent: Parent,
    pub edge: Edge,
    /// Nodes that hang from it.
    pub children: u32,
}

/// The tree, and the order in which its blocks may be taken back. Everything is allocated at start.
#[derive(Debug)]
pub struct PrefixCache {
    /// By block.
    nodes: Vec<Option<Node>>,
    /// Only ever asked for one key, never iterated for a decision: its order is random and must not show in a plan.
    edges: HashMap<(Parent, Edge), BlockId>,
    idle: IdleList,
}

impl PrefixCache {
    /// An empty tree over a pool of `blocks`.
    pub fn new(blocks: usize) -> Self {
        Self { nodes: vec![None; blocks], edges: HashMap::with_capacity(blocks), idle: IdleList::new(blocks) }
    }

    /// The block that holds `edge` after `parent`.
    pub fn child(&self, parent: Parent, edge: &[u32]) -> Option<BlockId> {
        let edge = Edge::try_from(edge).expect("an edge is one whole block");
        self.edges.get(&(parent, edge)).copied()
    }

    /// Whether `block` is in the tree.
    pub fn contains(&self, block: BlockId) -> bool {
        self.nodes[block.index()].is_some()
    }

    /// Blocks in the tree without holders.
    pub fn idle(&self) -> usize {
        self.idle.len
    }

    /// Adds a held block below `parent`, where no such edge is yet.
    pub fn insert(&mut self, parent: Parent, edge: &[u32], block: BlockId) {
        let edge = Edge::try_from(edge).expect("an edge is one whole block");
        assert!(!self.contains(block), "block {} would hold two contents", block.0);
        if let Parent::Block(above) = parent {
            self.nodes[above.index()].as_mut().expect("a parent is in the tree").children += 1;
        }
        let before = self.edges.insert((parent, edge), block);
        assert!(before.is_none(), "one content would be indexed twice");
        self.nodes[block.index()] = Some(Node { parent, edge, children: 0 });
    }

    /// The last holder of a cached block went: from now on it may be evicted.
    pub fn rest(&mut self, block: BlockId) {
        debug_assert!(self.contains(block));
        self.idle.push_back(block);
    }

    /// A cached block without holders gets one again.
    pub fn wake(&mut self, block: BlockId) {
        self.idle.remove(block);
    }

    /// Takes the least recently used leaf without holders out of the tree.
    pub fn evict(&mut self) -> Option<BlockId> {
        let block = self.idle.front()?;
        self.idle.remove(block);
        let node = self.nodes[block.index()].take().expect("an idle block is in the tree");
        assert_eq!(node.children, 0, "block {} is evicted from under its children", block.0);
        if let Parent::Block(above) = node.parent {
            self.nodes[above.index()].as_mut().expect("a parent outlives its children").children -= 1;
        }
        let edge = self.edges.remove(&(node.parent, node.edge));
        assert_eq!(edge, Some(block));
        Some(block)
    }

    pub(super) fn node(&self, block: BlockId) -> Option<&Node> {
        self.nodes[block.index()].as_ref()
    }

    pub(super) fn edges(&self) -> usize {
        self.edges.len()
    }

    /// Front (evicted next) to back, for the integrity check.
    pub(super) fn idle_order(&self) -> Vec<BlockId> {
        self.idle.iter().collect()
    }
}

/// A doubly linked list threaded through two arrays: constant time everywhere, no allocation.
#[derive(Debug)]
struct IdleList {
    /// By block; the element after the last block is the list's head and tail.
    next: Vec<u32>,
    previous: Vec<u32>,
    len: usize,
}

/// A block that is not in the list.
const OUTSIDE: u32 = u32::MAX;

impl IdleList {
    fn new(blocks: usize) -> Self {
        let mut links = vec![OUTSIDE; blocks + 1];
        links[blocks] = u32::try_from(blocks).expect("the pool is bounded");
        Self { next: links.clone(), previous: links, len: 0 }
    }

    fn ends(&self) -> usize {
        self.next.len() - 1
    }

    fn front(&self) -> Option<BlockId> {
        (self.len > 0).then(|| BlockId(self.next[self.ends()]))
    }

    fn push_back(&mut self, block: BlockId) {
        let (ends, i) = (self.ends(), block.index());
        assert_eq!(self.next[i], OUTSIDE, "block {} rests twice", block.0);
        let last = self.previous[ends];
        self.next[last as usize] = block.0;
        self.previous[i] = last;
        self.next[i] = ends as u32;
        self.previous[ends] = block.0;
        self.len += 1;
    }

    fn remove(&mut self, block: BlockId) {
        let i = block.index();
        let (next, previous) = (self.next[i], self.previous[i]);
        assert_ne!(next, OUTSIDE, "block {} does not rest", block.0);
        self.next[previous as usize] = next;
        self.previous[next as usize] = previous;
        self.next[i] = OUTSIDE;
        self.previous[i] = OUTSIDE;
        self.len -= 1;
    }

    fn iter(&self) -> impl Iterator<Item = BlockId> {
        let ends = self.ends() as u32;
        let mut at = self.next[ends as usize];
        std::iter::from_fn(move || {
            let here = at;
            (here != ends).then(|| {
                at = self.next[here as usize];
                BlockId(here)
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edge(first: u32) -> Vec<u32> {
        (first..first + BLOCK_TOKENS as u32).collect()
    }

    #[test]
    fn the_idle_list_keeps_order_through_removals() {
        let mut list = IdleList::new(4);
        for b in [2, 0, 3, 1] {
            list.push_back(BlockId(b));
        }
        list.remove(BlockId(3));
        list.remove(BlockId(2));
        list.push_back(BlockId(2));
        assert_eq!(list.iter().map(|b| b.0).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!((list.front(), list.len), (Some(BlockId(0)), 3));
    }

    #[test]
    fn a_salt_sees_only_its_own_tree() {
        let mut tree = PrefixCache::new(2);
        tree.insert(Parent::Root(1), &edge(0), BlockId(0));
        assert_eq!(tree.child(Parent::Root(1), &edge(0)), Some(BlockId(0)));
        assert_eq!(tree.child(Parent::Root(2), &edge(0)), None);
        assert_eq!(tree.child(Parent::Block(BlockId(0)), &edge(0)), None);
    }

    #[test]
    fn leaves_go_first_and_an_evicted_edge_is_gone() {
        let mut tree = PrefixCache::new(3);
        tree.insert(Parent::Root(7), &edge(0), BlockId(2));
        tree.insert(Parent::Block(BlockId(2)), &edge(16), BlockId(1));
        tree.rest(BlockId(1));
        tree.rest(BlockId(2));
        assert_eq!(tree.evict(), Some(BlockId(1)));
        assert_eq!(tree.child(Parent::Block(BlockId(2)), &edge(16)), None);
        assert_eq!(tree.evict(), Some(BlockId(2)));
        assert_eq!(tree.evict(), None);
        assert_eq!((tree.edges(), tree.idle()), (0, 0));
    }
}
