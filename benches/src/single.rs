//! One stream, eight that write with nobody arriving, and closed loops of 1, 8 and 32 clients. With `--llama-bench PATH`, llama.cpp reads and writes the same
//! numbers of tokens with the same file and threads in the same run.

use crate::figures::{Figures, Percentiles, closed_loop, machine, median, medians, percentiles, threads};
use crate::workload::{exactly, mixed};
use llmd_tests::daemon::{Daemon, Setup};
use llmd_tests::load::{self, Answer};
use serde::Serialize;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Tokens read in the prefill figure: llama-bench's `pp512`.
const PREFILL_TOKENS: u32 = 512;
/// Tokens written in the decode figure: llama-bench's `tg128`.
const DECODE_TOKENS: u32 = 128;
/// Clients of the closed loops, and requests in each.
const LOOPS: [(usize, u64); 3] = [(1, 8), (8, 32), (32, 96)];

/// Streams that write beside each other with nobody arriving, and tokens of each.
const STEADY: (usize, u32) = (8, 256);

/// What may be changed.
#[derive(clap::Args)]
pub struct Options {
    /// How often each is run; medians are shown.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    repetitions: u32,
    /// llama.cpp's llama-bench, to run beside.
    #[arg(long, value_name = "PATH")]
    llama_bench: Option<PathBuf>,
    /// Seed of the lengths and prompts.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// All figures of a run of this benchmark.
#[derive(Serialize)]
pub struct Report {
    benchmark: &'static str,
    machine: String,
    repetitions: u32,
    seed: u64,
    one_stream: OneStream,
    llama_cpp: Option<OneStream>,
    /// Milliseconds between tokens of eight streams, from the last one's first token to the first one's last.
    steady_ms: Percentiles,
    closed_loops: Vec<Loop>,
}

/// Figures of one stream, in tokens per second.
#[derive(Debug, Clone, Copy, Serialize)]
struct OneStream {
    prefill_512: f64,
    decode_128: f64,
}

#[derive(Serialize)]
struct Loop {
    clients: usize,
    requests: u64,
    median: Figures,
}

/// Runs it and prints a table.
pub fn run(options: &Options, model: &Path) -> Result<Report, Box<dyn Error>> {
    let (mut ours, mut theirs, mut steadies) = (Vec::new(), Vec::new(), Vec::new());
    let mut loops: [Vec<Figures>; LOOPS.len()] = Default::default();
    for repetition in 1..=options.repetitions {
        eprintln!("{repetition} of {}", options.repetitions);
        {
            let daemon = Setup::file(model).with("--prefix-cache=false").start();
            ours.push(one_stream(&daemon, options.seed + u64::from(repetition))?);
            steadies.push(steady(&daemon, options.seed + u64::from(repetition))?);
            for ((clients, requests), runs) in LOOPS.into_iter().zip(&mut loops) {
                runs.push(closed_loop(&daemon, clients, &mixed(options.seed, requests, 16..=512, 16..=256))?);
            }
        }
        // The daemon is gone: the two never compete for the cores.
        if let Some(program) = &options.llama_bench {
            theirs.push(llama(program, model)?);
        }
    }
    let report = Report {
        benchmark: "single",
        machine: machine(),
        repetitions: options.repetitions,
        seed: options.seed,
        one_stream: median_stream(&ours),
        llama_cpp: options.llama_bench.as_ref().map(|_| median_stream(&theirs)),
        steady_ms: Percentiles {
            mean: median(steadies.iter().map(|run| run.mean)),
            p50: median(steadies.iter().map(|run| run.p50)),
            p99: median(steadies.iter().map(|run| run.p99)),
        },
        closed_loops: LOOPS
            .into_iter()
            .zip(&loops)
            .map(|((clients, requests), runs)| Loop { clients, requests, median: medians(runs) })
            .collect(),
    };
    print(&report);
    Ok(report)
}

fn median_stream(runs: &[OneStream]) -> OneStream {
    OneStream {
        prefill_512: median(runs.iter().map(|run| run.prefill_512)),
        decode_128: median(runs.iter().map(|run| run.decode_128)),
    }
}

/// Times between tokens of streams that all write and none of which arrives or leaves.
fn steady(daemon: &Daemon, seed: u64) -> Result<Percentiles, Box<dyn Error>> {
    let begun = Instant::now();
    // Each answer, and when it was asked for.
    let answers = thread::scope(|scope| {
        let ask = |number: usize| {
            let client = daemon.client();
            let asked = begun.elapsed();
            load::answer(&client, exactly(seed, number as u64, 16, STEADY.1)).map(|answer| (asked, answer))
        };
        let threads: Vec<_> = (0..STEADY.0).map(|number| scope.spawn(move || ask(number))).collect();
        let joined = threads.into_iter().map(|thread| thread.join().expect("no client panics"));
        joined.collect::<Result<Vec<(Duration, Answer)>, _>>()
    })?;
    let times: Vec<Vec<Duration>> =
        answers.iter().map(|(asked, answer)| answer.token_times.iter().map(|time| *asked + *time).collect()).collect();
    let all_write = times.iter().filter_map(|times| times.first()).max().copied().ok_or("no tokens")?;
    let one_ends = times.iter().filter_map(|times| times.last()).min().copied().ok_or("no tokens")?;
    let between = times.iter().flat_map(|times| times.windows(2));
    let steady = between.filter(|pair| pair[0] >= all_write && pair[1] <= one_ends);
    let milliseconds: Vec<f64> = steady.map(|pair| (pair[1] - pair[0]).as_secs_f64() * 1e3).collect();
    if milliseconds.len() < STEADY.0 * 32 {
        return Err("the streams hardly met: nothing to be said about them".into());
    }
    Ok(percentiles(milliseconds))
}

/// One stream with nobody else there.
fn one_stream(daemon: &Daemon, seed: u64) -> Result<OneStream, Box<dyn Error>> {
    let client = daemon.client();
    // Pages touched and threads awake, as llama-bench has it after its warm-up.
    load::answer(&client, exactly(seed, 0, 16, 4))?;
    let read = load::answer(&client, exactly(seed, 1, PREFILL_TOKENS, 1))?;
    let write = load::answer(&client, exactly(seed, 2, 1, DECODE_TOKENS + 1))?;
    let first = write.token_times.first().ok_or("no tokens")?;
    let last = write.token_times.last().ok_or("no tokens")?;
    Ok(OneStream {
        prefill_512: f64::from(PREFILL_TOKENS) / read.total.as_secs_f64(),
        decode_128: f64::from(DECODE_TOKENS) / (*last - *first).as_secs_f64(),
    })
}

/// llama.cpp's figures, from its own benchmark.
fn llama(program: &Path, model: &Path) -> Result<OneStream, Box<dyn Error>> {
    let numbers = [("-p", PREFILL_TOKENS), ("-n", DECODE_TOKENS), ("-t", threads() as u32), ("-r", 1), ("-fa", 1)];
    let output = Command::new(program)
        .arg("-m")
        .arg(model)
        .args(numbers.iter().flat_map(|(flag, number)| [(*flag).to_owned(), number.to_string()]))
        .args(["-o", "json"])
        .stderr(Stdio::null())
        .output()
        .map_err(|error| format!("cannot run {}: {error}", program.display()))?;
    if !output.status.success() {
        return Err(format!("{} ended with {}", program.display(), output.status).into());
    }
    let results: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let rate = |field: &str, tokens: u32| -> Result<f64, String> {
        let of = |result: &&serde_json::Value| result[field] == tokens;
        let found = results.as_array().into_iter().flatten().find(of).and_then(|result| result["avg_ts"].as_f64());
        found.ok_or_else(|| format!("llama-bench reported no {field} of {tokens}"))
    };
    Ok(OneStream { prefill_512: rate("n_prompt", PREFILL_TOKENS)?, decode_128: rate("n_gen", DECODE_TOKENS)? })
}

fn print(report: &Report) {
    println!("{}; medians of {} runs each\n", report.machine, report.repetitions);
    println!("{:26} {:>10} {:>10} {:>8}", "one stream, tokens/s", "llmd", "llama.cpp", "ratio");
    let line = |what: &str, figure: fn(&OneStream) -> f64| {
        let ours = figure(&report.one_stream);
        match &report.llama_cpp {
            Some(theirs) => println!("{what:26} {ours:>10.1} {:>10.1} {:>8.2}", figure(theirs), ours / figure(theirs)),
            None => println!("{what:26} {ours:>10.1} {:>10} {:>8}", "-", "-"),
        }
    };
    line("writing 128 tokens", |stream| stream.decode_128);
    line("reading 512 tokens", |stream| stream.prefill_512);
    let Percentiles { p50, p99, .. } = report.steady_ms;
    println!("\n{} streams, nobody arriving, ms between tokens: {p50:.1} / {p99:.1} (x{:.2})", STEADY.0, p99 / p50);
    println!("\n{:>8} {:>10} {:>10} {:>16} {:>18}", "clients", "output/s", "total/s", "first, ms", "between, ms");
    println!("{:>8} {:>10} {:>10} {:>16} {:>18}", "", "", "", "p50 / p99", "p50 / p99");
    for Loop { clients, median, .. } in &report.closed_loops {
        let first = format!("{:.0} / {:.0}", median.ttft_ms.p50, median.ttft_ms.p99);
        let between = format!("{:.1} / {:.1}", median.inter_token_ms.p50, median.inter_token_ms.p99);
        let (output, total) = (median.output_tokens_per_s, median.total_tokens_per_s);
        println!("{clients:>8} {output:>10.1} {total:>10.1} {first:>16} {between:>18}");
    }
}
