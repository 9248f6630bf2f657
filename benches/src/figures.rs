//! A closed loop of clients, and the figures taken from it.

use llmd_protocol::message::GenerateRequest;
use llmd_tests::daemon::Daemon;
use llmd_tests::load::{self, Answer};
use llmd_tests::step_log::Step;
use serde::Serialize;
use std::collections::BTreeMap;
use std::error::Error;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// What a load gave. Rates in tokens per second of wall time, times in milliseconds.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Figures {
    /// From the first submission to the last answer.
    pub wall_s: f64,
    /// Tokens generated per second.
    pub output_tokens_per_s: f64,
    /// Tokens of prompts and outputs per second.
    pub total_tokens_per_s: f64,
    /// Submission to first token.
    pub ttft_ms: Percentiles,
    /// Between two tokens of one stream; tokens that are read at once count as no time apart.
    pub inter_token_ms: Percentiles,
    /// Submission to end.
    pub end_to_end_ms: Percentiles,
}

/// The mean and two points of a distribution.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Percentiles {
    /// The mean.
    pub mean: f64,
    /// Half are below.
    pub p50: f64,
    /// 99 of 100 are below.
    pub p99: f64,
}

/// Has `clients` threads, each with a connection of its own, ask the requests one after another: whoever has its answer
/// takes the next.
pub fn closed_loop(daemon: &Daemon, clients: usize, requests: &[GenerateRequest]) -> Result<Figures, Box<dyn Error>> {
    closed_loop_of(clients, requests, || {
        let client = daemon.client();
        Ok(move |request: &GenerateRequest| load::answer(&client, request.clone()).map_err(|error| error.to_string()))
    })
}

/// The same with any server: `connect` makes a connection, which answers one request after another.
pub fn closed_loop_of<C>(
    clients: usize,
    requests: &[GenerateRequest],
    connect: impl Fn() -> Result<C, String> + Sync,
) -> Result<Figures, Box<dyn Error>>
where
    C: Fn(&GenerateRequest) -> Result<Answer, String>,
{
    let next = AtomicUsize::new(0);
    let begun = Instant::now();
    let answers: Vec<Answer> = thread::scope(|scope| {
        let client = || -> Result<Vec<Answer>, String> {
            let ask = connect()?;
            let mut answers = Vec::new();
            while let Some(request) = requests.get(next.fetch_add(1, Ordering::Relaxed)) {
                answers.push(ask(request)?);
            }
            Ok(answers)
        };
        let threads: Vec<_> = (0..clients).map(|_| scope.spawn(client)).collect();
        let answers: Result<Vec<_>, String> =
            threads.into_iter().map(|thread| thread.join().map_err(|_| "a client panicked")?).collect();
        answers.map(|answers| answers.into_iter().flatten().collect())
    })?;
    Ok(figures(&answers, begun.elapsed()))
}

fn figures(answers: &[Answer], wall: Duration) -> Figures {
    let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
    let output: usize = answers.iter().map(|answer| answer.tokens.len()).sum();
    let prompt: usize = answers.iter().map(|answer| answer.usage.prompt_tokens as usize).sum();
    let first = answers.iter().filter_map(|answer| answer.token_times.first().copied()).map(milliseconds);
    let between = answers.iter().flat_map(|answer| answer.token_times.windows(2).map(|pair| pair[1] - pair[0]));
    let wall_s = wall.as_secs_f64();
    Figures {
        wall_s,
        output_tokens_per_s: output as f64 / wall_s,
        total_tokens_per_s: (output + prompt) as f64 / wall_s,
        ttft_ms: percentiles(first.collect()),
        inter_token_ms: percentiles(between.map(milliseconds).collect()),
        end_to_end_ms: percentiles(answers.iter().map(|answer| milliseconds(answer.total)).collect()),
    }
}

/// Mean and nearest ranks of any values.
pub fn percentiles(mut values: Vec<f64>) -> Percentiles {
    values.sort_by(f64::total_cmp);
    // The nearest rank: the smallest value that so many are at or below.
    let at = |share: f64| match values.len() {
        0 => f64::NAN,
        count => values[((count as f64 * share).ceil() as usize).clamp(1, count) - 1],
    };
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    Percentiles { mean, p50: at(0.5), p99: at(0.99) }
}

/// The middle one; of an even number, the mean of the two in the middle.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        count if count % 2 == 1 => values[middle],
        _ => (values[middle - 1] + values[middle]) / 2.0,
    }
}

/// Figure by figure, the median over several runs.
pub fn medians(runs: &[Figures]) -> Figures {
    let of = |figure: fn(&Figures) -> f64| median(runs.iter().map(figure));
    let each = |part: fn(&Figures) -> Percentiles| {
        let of = |point: fn(Percentiles) -> f64| median(runs.iter().map(part).map(point));
        Percentiles { mean: of(|p| p.mean), p50: of(|p| p.p50), p99: of(|p| p.p99) }
    };
    Figures {
        wall_s: of(|f| f.wall_s),
        output_tokens_per_s: of(|f| f.output_tokens_per_s),
        total_tokens_per_s: of(|f| f.total_tokens_per_s),
        ttft_ms: each(|f| f.ttft_ms),
        inter_token_ms: each(|f| f.inter_token_ms),
        end_to_end_ms: each(|f| f.end_to_end_ms),
    }
}

/// What a step log says about how well the rows of all steps were used.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Rows {
    /// Steps.
    pub steps: u64,
    /// Rows computed: one for each token, and padding.
    pub computed: u64,
    /// Rows computed for a token of a living sequence for the first time.
    pub useful: u64,
    /// useful / computed.
    pub utilisation: f64,
    /// Living sequences per step, on average.
    pub sequences_per_step: f64,
}

/// Counts the rows of all steps. What is computed again after a preemption is not useful, and neither is padding.
pub fn rows(steps: &[Step]) -> Rows {
    let mut reached: BTreeMap<&str, u64> = BTreeMap::new();
    let (mut computed, mut useful, mut sequences) = (0, 0, 0);
    for step in steps {
        computed += step.padding_rows;
        for entry in &step.entries {
            computed += entry.tokens;
            let end = entry.start + entry.tokens;
            let before = reached.entry(&entry.sequence).or_insert(0);
            useful += end.saturating_sub((*before).max(entry.start));
            *before = end.max(*before);
        }
        sequences += step.entries.len();
    }
    let share = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { f64::NAN };
    Rows {
        steps: steps.len() as u64,
        computed,
        useful,
        utilisation: share(useful as f64, computed as f64),
        sequences_per_step: share(sequences as f64, steps.len() as f64),
    }
}

/// Processor and number of threads, for reports.
pub fn machine() -> String {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": ")).map(|pair| pair.1);
    format!("{}, {} threads", name.unwrap_or("unknown processor"), threads())
}

/// Threads this process may use; the daemon takes as many.
pub fn threads() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use llmd_tests::step_log::Entry;

    #[test]
    fn percentiles_are_nearest_ranks() {
        let all = percentiles((1..=100).rev().map(f64::from).collect());
        assert_eq!((all.p50, all.p99), (50.0, 99.0));
        let one = percentiles(vec![7.0]);
        assert_eq!((one.p50, one.p99), (7.0, 7.0));
        assert!(percentiles(vec![]).p50.is_nan());
        assert_eq!((median([3.0, 1.0, 2.0]), median([4.0, 1.0])), (2.0, 2.5));
    }

    #[test]
    fn padding_and_recomputing_are_not_useful() {
        let step = |number, entries: &[(u64, u64)], padding_rows| Step {
            step: number,
            seconds: 0.1,
            waiting: 0,
            entries: entries
                .iter()
                .map(|(start, tokens)| Entry { sequence: "0.0".into(), start: *start, tokens: *tokens, samples: true })
                .collect(),
            admitted: vec![],
            preempted: vec![],
            finished: vec![],
            padding_rows,
        };
        // Six tokens; preempted, computed again with one more; one row of padding.
        let rows = rows(&[step(1, &[(0, 6)], 0), step(2, &[(0, 7)], 1)]);
        assert_eq!((rows.computed, rows.useful, rows.steps), (14, 7, 2));
        assert_eq!(rows.utilisation, 0.5);
        // A cached prefix is not computed, so it is neither.
        assert_eq!(super::rows(&[step(1, &[(32, 4)], 0)]).useful, 4);
    }
}
