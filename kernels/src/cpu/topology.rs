//! Which processors this process may compute on.

/// The processors of the caller's affinity mask, one of each core first, then their hyperthread siblings.
pub(crate) struct Processors {
    /// Numbers as the kernel counts them.
    pub(crate) numbers: Vec<usize>,
    /// How many cores they belong to: as many leading entries of `numbers` share nothing.
    pub(crate) cores: usize,
}

impl Processors {
    /// Reads the affinity mask; empty where it cannot be read.
    pub(crate) fn allowed() -> Self {
        let mut mask = [0_u64; 128];
        // SAFETY: the kernel writes at most the size it is told of into `mask`.
        let read = unsafe { libc::sched_getaffinity(0, size_of_val(&mask), mask.as_mut_ptr().cast()) };
        let bits = if read == 0 { mask.len() * 64 } else { 0 };
        let allowed: Vec<usize> = (0..bits).filter(|bit| mask[bit / 64] >> (bit % 64) & 1 == 1).collect();
        let (first, siblings): (Vec<usize>, Vec<usize>) = allowed.iter().partition(|&&cpu| {
            // The lowest allowed processor of a core is its first; without the file every processor is a core.
            let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
            let list = std::fs::read_to_string(path).unwrap_or_default();
            parse_list(&list).into_iter().filter(|sibling| allowed.contains(sibling)).min().is_none_or(|min| min == cpu)
        });
        let cores = first.len();
        Self { numbers: [first, siblings].concat(), cores }
    }

    /// Threads to compute with when nobody says otherwise: one a core, within the control group's quota.
    pub(crate) fn threads_default(&self) -> usize {
        // The standard library reads cpu.max (or its older form) of the control group and its parents.
        let quota = std::thread::available_parallelism().map_or(1, |n| n.get());
        quota.min(self.cores).max(1)
    }
}

/// "0-2,8" -> 0, 1, 2, 8; what cannot be read is left out.
fn parse_list(list: &str) -> Vec<usize> {
    let range = |part: &str| {
        let (first, last) = part.trim().split_once('-').unwrap_or((part.trim(), part.trim()));
        Some(first.parse::<usize>().ok()?..=last.parse::<usize>().ok()?)
    };
    list.split(',').filter_map(range).flatten().collect()
}

/// Binds the calling thread to one processor. Refusal is harmless: the thread floats.
pub(crate) fn bind_to(processor: usize) {
    let mut mask = [0_u64; 128];
    if let Some(word) = mask.get_mut(processor / 64) {
        *word = 1 << (processor % 64);
        // SAFETY: reads the mask, nothing else; 0 is the calling thread.
        unsafe { libc::sched_setaffinity(0, size_of_val(&mask), mask.as_ptr().cast()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_processors_are_read() {
        assert_eq!(parse_list("0-2,8\n"), [0, 1, 2, 8]);
        assert_eq!(parse_list("3"), [3]);
        assert_eq!(parse_list("?,-"), Vec::<usize>::new());
    }

    #[test]
    fn threads_stay_within_the_mask() {
        let processors = Processors::allowed();
        assert!(processors.threads_default() >= 1);
        assert!(processors.threads_default() <= processors.cores.max(1));
        assert!(processors.cores <= processors.numbers.len());
    }
}
