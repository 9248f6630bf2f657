//! Latencies by bucket, read back for llmctl's percentiles.

/// Upper bounds of latencies, in seconds: 100 us to 100 s, five to a decade (Renard's R5 series).
pub const LATENCY_BOUNDS: [f64; 31] = [
    1.0e-4, 1.6e-4, 2.5e-4, 4.0e-4, 6.3e-4, 1.0e-3, 1.6e-3, 2.5e-3, 4.0e-3, 6.3e-3, 1.0e-2, 1.6e-2, 2.5e-2, 4.0e-2,
    6.3e-2, 1.0e-1, 1.6e-1, 2.5e-1, 4.0e-1, 6.3e-1, 1.0, 1.6, 2.5, 4.0, 6.3, 10.0, 16.0, 25.0, 40.0, 63.0, 100.0,
];

/// How often a latency fell below each of [`LATENCY_BOUNDS`] but not below the one before, and above the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LatencyCounts(pub(super) [u64; LATENCY_BOUNDS.len() + 1]);

impl LatencyCounts {
    /// What came since `earlier`.
    pub fn since(&self, earlier: &Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i].saturating_sub(earlier.0[i])))
    }

    /// Number of observations.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// The latency that a part `q` (0 to 1) of the observations stays below, in seconds, taken as spread evenly within a
    /// bucket; None without observations. Above the last bound the bound itself is given.
    pub fn quantile(&self, q: f64) -> Option<f64> {
        let total = self.total();
        if total == 0 {
            return None;
        }
        let rank = q.clamp(0.0, 1.0) * total as f64;
        let mut below = 0.0;
        for (i, count) in self.0.iter().map(|n| *n as f64).enumerate() {
            if count > 0.0 && below + count >= rank {
                let upper = LATENCY_BOUNDS.get(i).copied().unwrap_or(LATENCY_BOUNDS[LATENCY_BOUNDS.len() - 1]);
                let lower = if i == 0 { 0.0 } else { LATENCY_BOUNDS[i - 1] };
                return Some(lower + (upper - lower).max(0.0) * (rank - below) / count);
            }
            below += count;
        }
        Some(LATENCY_BOUNDS[LATENCY_BOUNDS.len() - 1])
    }
}
