//! `llmctl bench`: load on the daemon, measured where a client stands.
//!
//! Closed loop (`--concurrency`): so many clients, each with a connection of its own, send the next request as soon as one is answered.
//! Open loop (`--rate`): requests arrive at random times (a Poisson process) whether others are answered or not, and latencies
//! count from the time a request should have been sent, so that a stalled daemon cannot hide by stalling the load.
//!
//! Prompts are random token ids, different in every request, so that no prefix cache answers for the model. Outputs have
//! exactly the length asked for. The same seed gives the same requests, whatever the concurrency.

use crate::failure::{FAILED, Failure};
use crate::report::{Outcome, Report};
use crate::{Common, place, status};
use indicatif::{ProgressBar, ProgressStyle};
use llmd_client::{Client, Event, GenerateRequest, Prompt, SamplingParams};
use std::io::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Most clients at once; the daemon allows a user 128 by default and 256 at most.
const CLIENTS_MAX: u32 = 256;
/// Most requests in flight of an open loop; one that comes when all are taken waits, and its waiting counts.
const IN_FLIGHT_MAX: usize = 128;
/// Ids of prompts are below this, where any vocabulary has ordinary words and pieces.
const PROMPT_ID_END: u32 = 4096;
/// ... and from here on, past control tokens and single bytes.
const PROMPT_ID_START: u32 = 300;

/// What `bench` takes.
#[derive(Debug, Clone, clap::Args)]
pub struct Arguments {
    /// Clients that each keep one request in flight
    #[arg(long, short, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=CLIENTS_MAX as i64))]
    concurrency: u32,
    /// Send at random times, so many requests a second on average, instead of one after the other
    #[arg(long, value_name = "R", conflicts_with = "concurrency", value_parser = rate)]
    rate: Option<f64>,
    /// Requests in all
    #[arg(long, short = 'n', value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    requests: u32,
    /// Tokens of each prompt
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    prompt_tokens: u32,
    /// Tokens of each answer
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    output_tokens: u32,
    /// Lengths: all as given, or each drawn between a quarter and four times that
    #[arg(long, value_enum, default_value_t = Mix::Short)]
    mix: Mix,
    /// Seed of lengths, prompts and arrivals
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
}

/// How long prompts and answers are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Mix {
    /// All as given.
    Short,
    /// Each between a quarter and four times that, short ones as likely as long ones on a logarithmic scale.
    Mixed,
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(rate) if (0.001..=100_000.0).contains(&rate) => Ok(rate),
        _ => Err("give requests per second from 0.001 to 100000".to_owned()),
    }
}

/// Runs the load and prints the report. Any failed request makes the exit code 1, after the report.
pub fn run(common: &Common, arguments: &Arguments) -> Result<(), Failure> {
    let vocabulary = status::vocabulary(common).unwrap_or(PROMPT_ID_END);
    let progress = progress(arguments.requests, common.json);
    let (outcomes, duration) = match arguments.rate {
        Some(rate) => open_loop(common, arguments, rate, vocabulary, &progress)?,
        None => closed_loop(common, arguments, vocabulary, &progress)?,
    };
    progress.finish_and_clear();
    let report = Report::of(&outcomes, duration);
    let load = match arguments.rate {
        Some(rate) => format!("{rate} requests/s"),
        None if arguments.concurrency == 1 => "1 client".to_owned(),
        None => format!("{} clients", arguments.concurrency),
    };
    let mut out = std::io::stdout().lock();
    if common.json {
        let mut value = report.json();
        value["concurrency"] = arguments.rate.map_or(arguments.concurrency.into(), |_| serde_json::Value::Null);
        value["rate"] = arguments.rate.map_or(serde_json::Value::Null, Into::into);
        value["mix"] = if arguments.mix == Mix::Short { "short" } else { "mixed" }.into();
        value["seed"] = arguments.seed.into();
        writeln!(out, "{value}")?;
    } else {
        out.write_all(report.human(&load).as_bytes())?;
    }
    out.flush()?;
    match report.errors {
        0 => Ok(()),
        errors => {
            let first = outcomes.iter().find_map(|outcome| outcome.error.clone()).unwrap_or_default();
            Err(Failure::new(FAILED, format!("{errors} of {} requests failed", outcomes.len()))
                .hint(format!("the first: {first}")))
        }
    }
}

fn progress(requests: u32, hidden: bool) -> ProgressBar {
    if hidden {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} requests  {elapsed} gone, {eta} to go")
        .expect("the template is well-formed");
    // Drawn on stderr, and not at all where that is no terminal.
    ProgressBar::new(requests.into()).with_style(style)
}

fn closed_loop(
    common: &Common,
    arguments: &Arguments,
    vocabulary: u32,
    progress: &ProgressBar,
) -> Result<(Vec<Outcome>, f64), Failure> {
    let clients = arguments.concurrency.min(arguments.requests);
    // All connections stand before the clock starts; a daemon that is not there is found out here.
    let connections = (0..clients).map(|_| place::connect(common)).collect::<Result<Vec<_>, _>>()?;
    let next = AtomicUsize::new(0);
    let outcomes = Mutex::new(Vec::with_capacity(arguments.requests as usize));
    let began = Instant::now();
    std::thread::scope(|scope| {
        for connection in connections {
            let (next, outcomes) = (&next, &outcomes);
            scope.spawn(move || {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    if index >= arguments.requests as usize {
                        break;
                    }
                    let outcome = measure(&connection, request(arguments, vocabulary, index), Instant::now());
                    push(outcomes, outcome);
                    progress.inc(1);
                }
            });
        }
    });
    Ok((outcomes.into_inner().expect("no thread panicked"), began.elapsed().as_secs_f64()))
}

fn open_loop(
    common: &Common,
    arguments: &Arguments,
    rate: f64,
    vocabulary: u32,
    progress: &ProgressBar,
) -> Result<(Vec<Outcome>, f64), Failure> {
    // Connections that are free. More are opened when all are taken, up to the limit.
    let free = Mutex::new(vec![place::connect(common)?]);
    let returned = std::sync::Condvar::new();
    let opened = AtomicUsize::new(1);
    let outcomes = Mutex::new(Vec::with_capacity(arguments.requests as usize));
    let began = Instant::now();
    std::thread::scope(|scope| -> Result<(), Failure> {
        for (index, at) in arrivals(arguments.seed, rate, arguments.requests as usize).enumerate() {
            let due = began + Duration::from_secs_f64(at);
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            let mut pool = free.lock().expect("no thread panicked");
            if pool.is_empty() && opened.load(Ordering::Relaxed) < IN_FLIGHT_MAX {
                drop(pool);
                let connection = place::connect(common)?;
                opened.fetch_add(1, Ordering::Relaxed);
                pool = free.lock().expect("no thread panicked");
                pool.push(connection);
            }
            let mut pool = returned.wait_while(pool, |pool| pool.is_empty()).expect("no thread panicked");
            let connection = pool.pop().expect("waited for one");
            drop(pool);
            let (free, returned, outcomes) = (&free, &returned, &outcomes);
            scope.spawn(move || {
                let outcome = measure(&connection, request(arguments, vocabulary, index), due);
                free.lock().expect("no thread panicked").push(connection);
                returned.notify_one();
                push(outcomes, outcome);
                progress.inc(1);
            });
        }
        Ok(())
    })?;
    Ok((outcomes.into_inner().expect("no thread panicked"), began.elapsed().as_secs_f64()))
}

fn push(outcomes: &Mutex<Vec<Outcome>>, outcome: Outcome) {
    outcomes.lock().expect("no thread panicked").push(outcome);
}

/// One request from `due` on.
fn measure(client: &Client, request: GenerateRequest, due: Instant) -> Outcome {
    let mut outcome = Outcome::default();
    let mut last = None;
    let generation = match client.generate(&request) {
        Ok(generation) => generation,
        Err(error) => return Outcome { error: Some(error.to_string()), ..outcome },
    };
    for event in generation {
        match event {
            Ok(Event::Tokens(ids)) => {
                let now = Instant::now();
                match last {
                    None => outcome.first_token_s = Some(now.duration_since(due).as_secs_f64()),
                    Some(last) => outcome.gaps_s.push(now.duration_since(last).as_secs_f64()),
                }
                // Tokens that come in one piece have no time between them.
                outcome.gaps_s.extend(std::iter::repeat_n(0.0, ids.len().saturating_sub(1)));
                last = Some(now);
            }
            Ok(Event::Done { usage, .. }) => {
                outcome.prompt_tokens = usage.prompt_tokens.into();
                outcome.output_tokens = usage.output_tokens.into();
                outcome.whole_s = Some(due.elapsed().as_secs_f64());
            }
            Ok(Event::Accepted { .. } | Event::Text(_)) => {}
            Err(error) => outcome.error = Some(error.to_string()),
        }
    }
    if outcome.whole_s.is_none() && outcome.error.is_none() {
        outcome.error = Some("the answer broke off".to_owned());
    }
    outcome
}

/// Request `index` of the run.
fn request(arguments: &Arguments, vocabulary: u32, index: usize) -> GenerateRequest {
    let mut random = SplitMix64(arguments.seed ^ (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let length = |random: &mut SplitMix64, tokens: u32| match arguments.mix {
        Mix::Short => tokens,
        // 4^u with u from -1 to 1.
        Mix::Mixed => (f64::from(tokens) * 4f64.powf(random.unit() * 2.0 - 1.0)).round().max(1.0) as u32,
    };
    let prompt_tokens = length(&mut random, arguments.prompt_tokens);
    let output_tokens = length(&mut random, arguments.output_tokens);
    let end = vocabulary.clamp(1, PROMPT_ID_END);
    let start = PROMPT_ID_START.min(end / 2);
    let prompt = (0..prompt_tokens).map(|_| start + random.below(end - start)).collect();
    GenerateRequest {
        prompt: Prompt::Tokens(prompt),
        sampling: SamplingParams {
            max_tokens: output_tokens,
            min_tokens: output_tokens,
            ignore_eos: true,
            ..SamplingParams::default()
        },
    }
}

/// Times of arrival in seconds: a Poisson process has exponentially distributed gaps.
fn arrivals(seed: u64, rate: f64, requests: usize) -> impl Iterator<Item = f64> {
    let mut random = SplitMix64(seed);
    let mut at = 0.0;
    (0..requests).map(move |_| {
        let now = at;
        at -= (1.0 - random.unit()).ln() / rate;
        now
    })
}

/// Sebastiano Vigna's splitmix64: small, fast, and the same everywhere.
struct SplitMix64(u64);

impl SplitMix64 {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// 0 <= x < 1.
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// 0 <= x < n, n > 0; the bias is below n / 2^32.
    fn below(&mut self, n: u32) -> u32 {
        (((self.next() >> 32) * u64::from(n)) >> 32) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }

    fn arguments(line: &[&str]) -> Arguments {
        Line::parse_from(["x"].iter().chain(line)).arguments
    }

    fn ids(request: &GenerateRequest) -> &[u32] {
        let Prompt::Tokens(ids) = &request.prompt else { panic!("not tokens") };
        ids
    }

    #[test]
    fn requests_depend_on_seed_and_index_alone() {
        let (one, more) = (arguments(&["--concurrency", "1"]), arguments(&["--concurrency", "32"]));
        assert_eq!(request(&one, 49152, 5), request(&more, 49152, 5));
        assert_ne!(request(&one, 49152, 5).prompt, request(&one, 49152, 6).prompt);
        assert_ne!(request(&one, 49152, 0).prompt, request(&arguments(&["--seed", "2"]), 49152, 0).prompt);
    }

    #[test]
    fn lengths_are_exact_and_ids_are_in_range() {
        let fixed = arguments(&["--prompt-tokens", "100", "--output-tokens", "20"]);
        let made = request(&fixed, 49152, 3);
        assert_eq!(ids(&made).len(), 100);
        assert!(ids(&made).iter().all(|id| (PROMPT_ID_START..PROMPT_ID_END).contains(id)));
        assert_eq!((made.sampling.min_tokens, made.sampling.max_tokens, made.sampling.ignore_eos), (20, 20, true));
        for vocabulary in [1, 2, 260, 301] {
            assert!(ids(&request(&fixed, vocabulary, 0)).iter().all(|id| *id < vocabulary), "{vocabulary}");
        }
    }

    #[test]
    fn mixed_lengths_reach_from_a_quarter_to_four_times() {
        let mixed = arguments(&["--mix", "mixed", "--prompt-tokens", "64", "--output-tokens", "16"]);
        let made: Vec<_> = (0..400).map(|index| request(&mixed, 49152, index)).collect();
        let prompts: Vec<usize> = made.iter().map(|r| ids(r).len()).collect();
        let outputs: Vec<u32> = made.iter().map(|r| r.sampling.max_tokens).collect();
        assert!(prompts.iter().all(|n| (16..=256).contains(n)) && outputs.iter().all(|n| (4..=64).contains(n)));
        assert!(prompts.iter().min() < Some(&20) && prompts.iter().max() > Some(&220));
        let below = prompts.iter().filter(|n| **n < 64).count();
        assert!((150..250).contains(&below), "half are below what was given: {below}");
    }

    #[test]
    fn arrivals_have_the_rate_and_come_at_random() {
        let times: Vec<f64> = arrivals(7, 50.0, 4000).collect();
        assert!(times.is_sorted() && times[0] == 0.0);
        assert!((75.0..85.0).contains(times.last().unwrap()), "{:?}", times.last());
        let gaps: Vec<f64> = times.windows(2).map(|w| w[1] - w[0]).collect();
        let long = gaps.iter().filter(|gap| **gap > 0.02).count() as f64 / gaps.len() as f64;
        assert!((long - (-1f64).exp()).abs() < 0.03, "exponential gaps exceed their mean in 37 %: {long}");
    }

    #[test]
    fn loads_that_exclude_each_other_are_refused() {
        assert!(Line::try_parse_from(["x", "--rate", "3", "--concurrency", "4"]).is_err());
        assert!(Line::try_parse_from(["x", "--rate", "0"]).is_err());
        assert!(Line::try_parse_from(["x", "--concurrency", "0"]).is_err());
        assert_eq!(arguments(&["--rate", "3"]).rate, Some(3.0));
    }
}
