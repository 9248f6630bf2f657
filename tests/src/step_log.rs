//! Reads what `--step-log` writes: one line of JSON for each step the engine computed.

use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// One step.
#[derive(Debug, Clone, Deserialize)]
pub struct Step {
    /// Its number.
    pub step: u64,
    /// How long it took.
    pub seconds: f64,
    /// Sequences in the queue after it.
    pub waiting: u64,
    /// Who computed how many tokens.
    pub entries: Vec<Entry>,
    /// Sequences taken from the queue for this step.
    pub admitted: Vec<String>,
    /// Sequences that lost their blocks while this step was planned.
    pub preempted: Vec<String>,
    /// Sequences that ended with this step, or before it was planned (cancelled, or their client gone).
    pub finished: Vec<String>,
    /// Rows computed for nobody (static scheduling only).
    pub padding_rows: u64,
}

/// One sequence's part of a step.
#[derive(Debug, Clone, Deserialize)]
pub struct Entry {
    /// "index.generation".
    pub sequence: String,
    /// Position of the first token computed.
    pub start: u64,
    /// How many.
    pub tokens: u64,
    /// Whether a token was sampled after them.
    pub samples: bool,
}

/// Reads the whole log. A line that is still being written at the end is left out.
pub fn read(path: &Path) -> Vec<Step> {
    let text = fs::read_to_string(path).unwrap_or_else(|e| panic!("cannot read {}: {e}", path.display()));
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e} in {line}"))).collect()
}

/// How sequences came and went.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Movement {
    /// Sequences admitted while another, admitted before, went on computing in the same step.
    pub joined_in_flight: usize,
    /// Sequences that ended in a step while another went on computing in the next.
    pub left_in_flight: usize,
    /// Sequences that were preempted, counted each time.
    pub preempted: usize,
    /// Most sequences in one step.
    pub width_max: usize,
}

/// Counts joins and leaves, and checks on the way what must hold in every log of the continuous scheduler:
/// steps are numbered one by one; nobody computes before being admitted or after having ended; no row is padding; and a
/// sequence that has sampled a token computes in every following step until it ends or is preempted, so no step ever
/// waited for another sequence.
pub fn check_continuous(steps: &[Step]) -> Result<Movement, String> {
    let mut movement = Movement::default();
    let mut live: BTreeSet<&str> = BTreeSet::new();
    let mut ended: BTreeSet<&str> = BTreeSet::new();
    // Sequences that have sampled since they were last admitted.
    let mut decoding: BTreeSet<&str> = BTreeSet::new();
    for (index, step) in steps.iter().enumerate() {
        let number = step.step;
        if index > 0 && steps[index - 1].step + 1 != number {
            return Err(format!("step {number} follows step {}", steps[index - 1].step));
        }
        if step.padding_rows != 0 {
            return Err(format!("step {number} has {} rows of padding", step.padding_rows));
        }
        for sequence in &step.preempted {
            decoding.remove(sequence.as_str());
            live.remove(sequence.as_str());
        }
        movement.preempted += step.preempted.len();
        let entries: BTreeMap<&str, &Entry> = step.entries.iter().map(|e| (e.sequence.as_str(), e)).collect();
        if entries.len() != step.entries.len() {
            return Err(format!("step {number} has a sequence twice"));
        }
        // Who ended between two steps is in no step after that.
        for sequence in step.finished.iter().filter(|sequence| !entries.contains_key(sequence.as_str())) {
            live.remove(sequence.as_str());
            decoding.remove(sequence.as_str());
        }
        let others_compute = live.iter().any(|sequence| entries.contains_key(sequence));
        for sequence in &step.admitted {
            if ended.contains(sequence.as_str()) || !live.insert(sequence) {
                return Err(format!("step {number} admits {sequence}, which is running or has ended"));
            }
            movement.joined_in_flight += usize::from(others_compute);
        }
        if let Some(waits) = decoding.iter().find(|sequence| !entries.contains_key(*sequence)) {
            return Err(format!("step {number} leaves out {waits}, which is decoding"));
        }
        for (sequence, entry) in &entries {
            if !live.contains(sequence) {
                return Err(format!("step {number} computes {sequence}, which is not running"));
            }
            if entry.tokens == 0 {
                return Err(format!("step {number} computes nothing for {sequence}"));
            }
            if entry.samples {
                decoding.insert(sequence);
            }
        }
        movement.width_max = movement.width_max.max(entries.len());
        let next = steps.get(index + 1);
        for sequence in &step.finished {
            live.remove(sequence.as_str());
            decoding.remove(sequence.as_str());
            ended.insert(sequence);
        }
        let survivors = next.is_some_and(|next| next.entries.iter().any(|e| live.contains(e.sequence.as_str())));
        movement.left_in_flight += if survivors { step.finished.len() } else { 0 };
    }
    Ok(movement)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(number: u64, entries: &[(&str, u64, bool)], admitted: &[&str], finished: &[&str]) -> Step {
        let own = |names: &[&str]| names.iter().map(|n| n.to_string()).collect::<Vec<_>>();
        let entry = |e: &(&str, u64, bool)| Entry { sequence: e.0.into(), start: 0, tokens: e.1, samples: e.2 };
        Step {
            step: number,
            seconds: 0.001,
            waiting: 0,
            entries: entries.iter().map(entry).collect(),
            admitted: own(admitted),
            preempted: vec![],
            finished: own(finished),
            padding_rows: 0,
        }
    }

    #[test]
    fn joins_and_leaves_in_mid_flight_are_counted() {
        let steps = [
            step(1, &[("a", 5, true)], &["a"], &[]),
            step(2, &[("a", 1, true), ("b", 4, true)], &["b"], &[]),
            step(3, &[("a", 1, true), ("b", 1, true)], &[], &["a"]),
            step(4, &[("b", 1, true)], &[], &["b"]),
        ];
        let expected = Movement { joined_in_flight: 1, left_in_flight: 1, preempted: 0, width_max: 2 };
        assert_eq!(check_continuous(&steps), Ok(expected));
    }

    #[test]
    fn a_batch_that_waits_is_seen() {
        let left_out = [
            step(1, &[("a", 5, true)], &["a"], &[]),
            step(2, &[("b", 4, true)], &["b"], &[]),
            step(3, &[("a", 1, true), ("b", 1, true)], &[], &["a", "b"]),
        ];
        assert!(check_continuous(&left_out).unwrap_err().contains("leaves out a"));
        let after_end = [step(1, &[("a", 5, true)], &["a"], &["a"]), step(2, &[("a", 1, true)], &[], &[])];
        assert!(check_continuous(&after_end).unwrap_err().contains("not running"));
        let mut padded = [step(1, &[("a", 5, true)], &["a"], &[])];
        padded[0].padding_rows = 1;
        assert!(check_continuous(&padded).unwrap_err().contains("padding"));
    }

    #[test]
    fn who_is_cancelled_between_two_steps_is_not_left_out() {
        let mut steps = [
            step(1, &[("a", 5, true), ("b", 5, true)], &["a", "b"], &[]),
            step(2, &[("b", 1, true)], &[], &["a"]),
            step(3, &[("b", 1, true)], &[], &["b"]),
        ];
        assert_eq!(check_continuous(&steps).map(|movement| movement.left_in_flight), Ok(1));
        steps[1].finished.clear();
        assert!(check_continuous(&steps).unwrap_err().contains("leaves out a"));
    }

    #[test]
    fn one_batch_after_another_shows_no_movement() {
        let steps = [
            step(1, &[("a", 5, true), ("b", 5, true)], &["a", "b"], &["a", "b"]),
            step(2, &[("c", 5, true)], &["c"], &["c"]),
        ];
        let movement = check_continuous(&steps).unwrap();
        assert_eq!((movement.joined_in_flight, movement.left_in_flight), (0, 0));
    }
}
