//! How many blocks of key-value memory to allocate.

use super::error::ModelError;
use crate::kv_cache::block::BLOCK_TOKENS;

/// Part of the memory available at start that the cache may take when nobody says otherwise. The rest is for the page
/// cache that holds the weights' file, the client's segments and everything else on the host.
pub const AVAILABLE_FRACTION: f64 = 0.5;

/// Bytes the cache takes at most when nobody says otherwise: 1 GiB holds 46,000 tokens of a 135M model in bf16, as much as a
/// CPU serves at once; all of it is touched at start, and a daemon that takes half of a large host by default is a bad guest.
pub const DEFAULT_BYTES_MAX: u64 = 1 << 30;

/// Blocks without which no dialogue fits: 256 tokens.
pub const BLOCKS_MIN: usize = 256 / BLOCK_TOKENS;

/// Blocks within the u32 of a slot (`block * BLOCK_TOKENS + offset`).
pub const BLOCKS_MAX: usize = u32::MAX as usize / BLOCK_TOKENS;

/// How many blocks to allocate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvBudget {
    /// Exactly so many.
    Blocks(usize),
    /// As many as fit in so many bytes.
    Bytes(u64),
    /// As many as the defaults of this module allow, and no more than `sequences_max` sequences of the model's whole
    /// context could use.
    Available {
        /// Memory that is free to take, bytes; see [`available_memory`].
        bytes: u64,
        /// Sequences that run at once.
        sequences_max: usize,
    },
}

impl KvBudget {
    /// Blocks of `block_bytes` for a model of `context_length` positions.
    pub fn blocks(self, block_bytes: usize, context_length: usize) -> Result<usize, ModelError> {
        assert!(block_bytes > 0 && context_length > 0);
        let fitting = |bytes: u64| usize::try_from(bytes / block_bytes as u64).unwrap_or(usize::MAX).min(BLOCKS_MAX);
        let (available, blocks) = match self {
            Self::Blocks(blocks) => (blocks as u64 * block_bytes as u64, blocks.min(BLOCKS_MAX)),
            Self::Bytes(bytes) => (bytes, fitting(bytes)),
            Self::Available { bytes, sequences_max } => {
                let bytes = ((bytes as f64 * AVAILABLE_FRACTION) as u64).min(DEFAULT_BYTES_MAX);
                let useful = sequences_max.saturating_mul(context_length.div_ceil(BLOCK_TOKENS)).max(BLOCKS_MIN);
                (bytes, fitting(bytes).min(useful))
            }
        };
        // A tiny model may have a context shorter than the minimum.
        let blocks_min = BLOCKS_MIN.min(context_length.div_ceil(BLOCK_TOKENS));
        if blocks < blocks_min {
            return Err(ModelError::KvTooSmall { available, block_bytes, blocks, blocks_min });
        }
        Ok(blocks)
    }
}

/// Bytes that can be taken without swapping: the kernel's estimate, or what is left of the control group's limit if that
/// is less. None when the kernel does not say.
pub fn available_memory() -> Option<u64> {
    let host = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| mem_available(&text))?;
    Some(host.min(control_group_left().unwrap_or(u64::MAX)))
}

/// `MemAvailable` of /proc/meminfo, in bytes.
fn mem_available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// What the limits of our control group (version 2) and of those around it leave.
fn control_group_left() -> Option<u64> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let root = std::path::Path::new("/sys/fs/cgroup");
    let number = |folder: &std::path::Path, file| -> Option<u64> {
        std::fs::read_to_string(folder.join(file)).ok()?.trim().parse().ok()
    };
    // `memory.max` is the word "max" where there is no limit, which is no number.
    root.join(path)
        .ancestors()
        .take_while(|folder| folder.starts_with(root))
        .filter_map(|folder| Some(number(folder, "memory.max")?.saturating_sub(number(folder, "memory.current")?)))
        .min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets() {
        assert_eq!(KvBudget::Blocks(100).blocks(1000, 8192).unwrap(), 100);
        assert_eq!(KvBudget::Bytes(100_999).blocks(1000, 8192).unwrap(), 100);
        let available = |bytes, sequences_max| KvBudget::Available { bytes, sequences_max };
        assert_eq!(available(100_000, 64).blocks(1000, 8192).unwrap(), 50, "half of what is there");
        assert_eq!(available(1 << 40, 2).blocks(1000, 8192).unwrap(), 1024, "no more than can be used");
        assert_eq!(available(1 << 40, 4096).blocks(368_640, 8192).unwrap(), 2912, "no more than 1 GiB");
        assert_eq!(available(1 << 40, 1).blocks(1000, 20).unwrap(), BLOCKS_MIN);
    }

    #[test]
    fn too_little_is_an_error() {
        for budget in
            [KvBudget::Blocks(0), KvBudget::Bytes(15_999), KvBudget::Available { bytes: 20_000, sequences_max: 8 }]
        {
            let error = budget.blocks(1000, 8192).expect_err("must be refused").to_string();
            assert!(error.contains("16 are needed"), "{error}");
        }
        assert_eq!(KvBudget::Blocks(2).blocks(1000, 32).unwrap(), 2, "a context of two blocks needs no more");
    }

    #[test]
    fn slots_stay_within_u32() {
        let blocks = KvBudget::Bytes(u64::MAX).blocks(1, 8192).unwrap();
        assert!(u32::try_from(blocks * BLOCK_TOKENS - 1).is_ok());
    }

    #[test]
    fn meminfo() {
        assert_eq!(mem_available("MemTotal: 8 kB\nMemAvailable:    1024 kB\n"), Some(1 << 20));
        assert_eq!(mem_available("MemTotal: 8 kB\n"), None);
        assert_eq!(mem_available("MemAvailable: 18446744073709551615 kB"), None);
    }
}
