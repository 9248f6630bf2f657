//! What this machine can do at most, measured, and what share of it llmd uses.

use crate::figures::{closed_loop, machine, median, threads};
use crate::workload::exactly;
use llmd::model::LoadedModel;
use llmd_kernels::cpu::peaks::{self, Operands, Peak};
use llmd_tests::daemon::Setup;
use serde::Serialize;
use std::error::Error;
use std::path::Path;
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// Words that each thread reads: 256 MiB, more than caches hold.
const WORDS: usize = 256 << 17;
/// Rounds of a peak's loop between two looks at the clock: some 100 us.
const ROUNDS: u64 = 50_000;
/// How long each is measured.
const MEASURED: Duration = Duration::from_millis(400);
/// Tokens read in the prefill figure.
const PREFILL_TOKENS: u32 = 512;

/// What may be changed.
#[derive(clap::Args)]
pub struct Options {
    /// How often each is measured; medians are shown.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
}

/// All figures of a run of this benchmark.
#[derive(Serialize)]
pub struct Report {
    benchmark: &'static str,
    machine: String,
    runs: u32,
    threads: usize,
    /// Bytes per second, with one thread and with all.
    read_bytes_per_s: [f64; 2],
    multiply_adds: Vec<Rate>,
    /// Bytes of weights that a step reads, as the file has them.
    weight_bytes: u64,
    decode_tokens_per_s: f64,
    decode_share_of_bandwidth: f64,
    /// Of one token of a prompt of 512, in matrices; attention and the logits of the last one left out.
    multiply_adds_per_token: u64,
    prefill_tokens_per_s: f64,
    /// Of the best integer peak with all threads, if there is one.
    prefill_share_of_int8: Option<f64>,
}

/// Multiply-adds per second.
#[derive(Debug, Clone, Serialize)]
struct Rate {
    what: &'static str,
    isa: String,
    one_thread: f64,
    all_threads: f64,
}

/// Runs it and prints a table.
pub fn run(options: &Options, model: &Path) -> Result<Report, Box<dyn Error>> {
    let (available, all) = (Peak::available(), threads());
    let (mut reads, mut decode, mut prefill) = ([Vec::new(), Vec::new()], Vec::new(), Vec::new());
    let mut products: Vec<[Vec<f64>; 2]> = available.iter().map(|_| Default::default()).collect();
    for number in 1..=options.runs {
        eprintln!("{number} of {}", options.runs);
        for (threads, reads) in [1, all].into_iter().zip(&mut reads) {
            reads.push(bandwidth(threads));
            for (peak, products) in available.iter().zip(&mut products) {
                products[usize::from(all > 1 && threads == all)].push(on_threads(threads, || peak.run(ROUNDS)));
            }
        }
        let daemon = Setup::file(model).with("--prefix-cache=false").start();
        let seed = u64::from(number);
        closed_loop(&daemon, 1, &[exactly(seed, 0, 16, 4)])?;
        decode.push(1e3 / closed_loop(&daemon, 1, &[exactly(seed, 1, 1, 129)])?.inter_token_ms.mean);
        let read = closed_loop(&daemon, 1, &[exactly(seed, 2, PREFILL_TOKENS, 1)])?;
        prefill.push(f64::from(PREFILL_TOKENS) * 1e3 / read.ttft_ms.p50);
    }
    let multiply_adds: Vec<Rate> = available
        .iter()
        .zip(&products)
        .map(|(peak, [one, many])| Rate {
            what: peak.operands().name(),
            isa: peak.isa().to_string(),
            one_thread: median(one.iter().copied()),
            all_threads: median(if all > 1 { many } else { one }.iter().copied()),
        })
        .collect();
    let integer = |rate: &&Rate| rate.what == Operands::Int8.name();
    let best = multiply_adds.iter().filter(integer).map(|rate| rate.all_threads).reduce(f64::max);
    let read_bytes_per_s = reads.map(median);
    let (weight_bytes, multiply_adds_per_token) = work(model)?;
    let (decode, prefill) = (median(decode), median(prefill));
    let report = Report {
        benchmark: "machine",
        machine: machine(),
        runs: options.runs,
        threads: all,
        read_bytes_per_s,
        weight_bytes,
        decode_tokens_per_s: decode,
        decode_share_of_bandwidth: weight_bytes as f64 * decode / read_bytes_per_s[1],
        multiply_adds_per_token,
        prefill_tokens_per_s: prefill,
        prefill_share_of_int8: best.map(|best| multiply_adds_per_token as f64 * prefill / best),
        multiply_adds,
    };
    print(&report);
    Ok(report)
}

/// Bytes of weights that a step reads, and multiply-adds in matrices for a token whose logits nobody wants.
fn work(model: &Path) -> Result<(u64, u64), Box<dyn Error>> {
    let model = LoadedModel::load(model)?;
    let (mut bytes, mut products) = (model.gguf.tensor_bytes(), 0);
    for tensor in model.gguf.tensors() {
        let elements = (tensor.rows() * tensor.columns()) as u64;
        let is_table = tensor.name == "token_embd.weight";
        if tensor.rows() > 1 && !is_table && tensor.name != "output.weight" {
            products += elements;
        }
        // A table that is not the output's matrix too is hardly read: a row for each token.
        if is_table && !model.architecture.tied_embeddings {
            bytes -= model.gguf.tensor(&tensor.name).map_or(0, |view| view.bytes.len() as u64);
        }
    }
    Ok((bytes, products))
}

/// Bytes per second that `threads` threads read, each its own memory.
fn bandwidth(threads: usize) -> f64 {
    let memories: Vec<Vec<u64>> = (0..threads).map(|_| vec![1; WORDS]).collect();
    let next = std::sync::atomic::AtomicUsize::new(0);
    on_threads_with(
        threads,
        || &memories[next.fetch_add(1, std::sync::atomic::Ordering::Relaxed)],
        |memory| {
            peaks::read(memory);
            (memory.len() * 8) as u64
        },
    )
}

/// What `work` does per second on `threads` threads at once; it returns how much it did.
fn on_threads(threads: usize, work: impl Fn() -> u64 + Sync) -> f64 {
    on_threads_with(threads, || (), |()| work())
}

fn on_threads_with<T: Copy>(threads: usize, prepare: impl Fn() -> T + Sync, work: impl Fn(T) -> u64 + Sync) -> f64 {
    let barrier = Barrier::new(threads);
    let one = || {
        let with = prepare();
        barrier.wait();
        let (begun, mut done) = (Instant::now(), 0);
        while begun.elapsed() < MEASURED {
            done += work(with);
        }
        done as f64 / begun.elapsed().as_secs_f64()
    };
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|_| scope.spawn(one)).collect();
        all.into_iter().map(|thread| thread.join().expect("measuring does not panic")).sum()
    })
}

fn print(report: &Report) {
    println!("{}; medians of {}\n", report.machine, report.runs);
    println!("{:36} {:>12} {:>12}", "", "one thread", "all threads");
    let [one, all] = report.read_bytes_per_s.map(|rate| rate / 1e9);
    println!("{:36} {one:>12.1} {all:>12.1}", "reading memory, GB/s");
    for rate in &report.multiply_adds {
        let what = format!("{} {}, 10^9 multiply-adds/s", rate.isa, rate.what);
        println!("{what:36} {:>12.1} {:>12.1}", rate.one_thread / 1e9, rate.all_threads / 1e9);
    }
    println!(
        "\nwriting, one stream: {:.1} tokens/s x {:.1} MB of weights: {:.0} % of the bandwidth",
        report.decode_tokens_per_s,
        report.weight_bytes as f64 / 1e6,
        report.decode_share_of_bandwidth * 100.0
    );
    if let Some(share) = report.prefill_share_of_int8 {
        println!(
            "reading 512: {:.0} tokens/s x {:.1} million multiply-adds: {:.0} % of the int8 peak",
            report.prefill_tokens_per_s,
            report.multiply_adds_per_token as f64 / 1e6,
            share * 100.0
        );
    }
}
