//! The unit of key-value memory.

/// Tokens in one block, in every layer: one block holds the keys and values of 16 consecutive positions.
pub const BLOCK_TOKENS: usize = 16;

/// Index of a block in the pool; also its index in the backend's key-value memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

impl BlockId {
    /// As an index into arrays with one element per block.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Blocks that hold `tokens` consecutive positions from position 0 on.
pub fn blocks_for(tokens: usize) -> usize {
    tokens.div_ceil(BLOCK_TOKENS)
}
