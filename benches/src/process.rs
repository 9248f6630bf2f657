//! What a process and its descendants used, as /proc tells it; and ending them.

use std::fs;
use std::process::Child;
use std::time::{Duration, Instant};

/// Ticks of /proc's processor times in a second: fixed by Linux for programs, whatever the kernel counts in.
const TICKS_PER_S: f64 = 100.0;
/// How long a server has to end by itself.
const PATIENCE: Duration = Duration::from_secs(15);

/// Processor time and memory.
#[derive(Debug, Clone, Copy, Default)]
pub struct Usage {
    /// Seconds in user and kernel mode.
    pub cpu_s: f64,
    /// Most memory resident at any time, in bytes, mapped files among it; of several processes the sum, in which what they
    /// share counts for each.
    pub peak_bytes: u64,
}

/// What `pid` and its living descendants used so far.
pub fn usage(pid: u32) -> Usage {
    usage_of(&tree(pid))
}

fn usage_of(pids: &[u32]) -> Usage {
    let mut total = Usage::default();
    for pid in pids {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        total.cpu_s += cpu_ticks(&stat).unwrap_or(0) as f64 / TICKS_PER_S;
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB"));
        total.peak_bytes += peak.and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) * 1024;
    }
    total
}

/// What this process alone used so far.
pub fn usage_alone() -> Usage {
    usage_of(&[std::process::id()])
}

/// User and kernel ticks out of /proc/PID/stat. The name in parentheses may hold anything, so fields count from its end.
fn cpu_ticks(stat: &str) -> Option<u64> {
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    Some(fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?)
}

/// `pid` and all its descendants.
fn tree(pid: u32) -> Vec<u32> {
    let mut found = vec![pid];
    let mut at = 0;
    while let Some(pid) = found.get(at).copied() {
        at += 1;
        // Children are listed under the thread that started them.
        for task in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
            let children = fs::read_to_string(task.path().join("children")).unwrap_or_default();
            found.extend(children.split_whitespace().filter_map(|child| child.parse::<u32>().ok()));
        }
    }
    found
}

/// Stops a server and its descendants, so that they take no processor while others are measured.
pub fn pause(child: &Child) {
    signal("-STOP", &tree(child.id()));
}

/// Lets a paused server go on.
pub fn resume(child: &Child) {
    signal("-CONT", &tree(child.id()));
}

/// Ends a server: asks it to, waits, and then kills what is left of it and its descendants.
pub fn end(child: &mut Child) {
    let all = tree(child.id());
    signal("-TERM", &all[..1]);
    // One that is paused would not hear it.
    signal("-CONT", &all);
    let begun = Instant::now();
    while begun.elapsed() < PATIENCE && matches!(child.try_wait(), Ok(None)) {
        std::thread::sleep(Duration::from_millis(20));
    }
    if matches!(child.try_wait(), Ok(None)) {
        signal("-KILL", &all[1..]);
        let _ = child.kill();
        let _ = child.wait();
    }
}

/// Through kill(1): the process ids are those of our own child and what it started.
fn signal(name: &str, pids: &[u32]) {
    if !pids.is_empty() {
        // One that has ended already is what was wanted.
        let _ = std::process::Command::new("kill").arg(name).args(pids.iter().map(u32::to_string)).status();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn processor_times_are_found_behind_any_name() {
        let stat = "7 (a ) b) S 1 7 7 0 -1 4194560 100 0 0 0 250 50 3 4 20 0 1 0 9 8 7";
        assert_eq!(cpu_ticks(stat), Some(300));
        assert_eq!(cpu_ticks("7 (a"), None);
    }

    #[test]
    fn descendants_count_and_end() {
        let mut child = Command::new("sh").args(["-c", "sleep 60 & wait"]).spawn().expect("sh");
        let begun = Instant::now();
        while tree(child.id()).len() < 2 && begun.elapsed() < Duration::from_secs(10) {
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(tree(child.id()).len(), 2, "the shell and its sleep");
        assert!(usage(child.id()).peak_bytes > 0);
        let sleeping = tree(child.id())[1];
        end(&mut child);
        assert!(child.try_wait().expect("wait").is_some());
        // The shell ended when asked; what it left is not ours to have waited for.
        signal("-KILL", &[sleeping]);
    }
}
