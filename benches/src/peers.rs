//! llmd beside others, with the same requests: llama.cpp's server and vLLM, on the same machine in the same run.
//!
//! One program makes the load for all: ours through the rings, theirs over streaming HTTP. Prompts are ids and ends are
//! ignored, so that all read and write as many tokens, which is checked. Caches of prompts are off everywhere.

use crate::figures::{Figures, closed_loop_of, machine, median, medians, threads};
use crate::http::{Connection, Dialect, MODEL_NAME};
use crate::process;
use crate::workload::{exactly, mixed, share_prefix};
use indicatif::{ProgressBar, ProgressStyle};
use llmd_protocol::message::{FinishReason, GenerateRequest, Prompt};
use llmd_tests::daemon::{Daemon, Setup};
use llmd_tests::load::{self, Answer};
use serde::Serialize;
use std::error::Error;
use std::fs::{self, File};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Most tokens of a request, prompt and output together.
const CONTEXT: usize = 1024;
/// How long a server may take to be ready; vLLM takes minutes.
const READY_LIMIT: Duration = Duration::from_secs(600);
/// Tokens read in the prefill figure.
const PREFILL_TOKENS: u32 = 512;

/// Asks a server one request.
type Ask = dyn Fn(&GenerateRequest) -> Result<Answer, String>;

/// What may be changed.
#[derive(clap::Args)]
pub struct Options {
    /// How often each is run; medians are shown [default: 5, with --quick 1].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    runs: Option<u32>,
    /// A quarter of the requests, at least one for each client.
    #[arg(long)]
    quick: bool,
    /// Seed of the lengths and prompts.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Where the peers are: llama.cpp/bin/llama-server, Q4_0.gguf, vllm/bin/python, hf-bf16/.
    #[arg(long, env = "LLMD_PEERS", value_name = "FOLDER")]
    peers: PathBuf,
}

/// All figures of a run of this benchmark.
#[derive(Serialize)]
pub struct Report {
    benchmark: &'static str,
    machine: String,
    runs: u32,
    quick: bool,
    seed: u64,
    skipped: Vec<String>,
    results: Vec<Outcome>,
}

/// Medians of one server under one load.
#[derive(Serialize)]
struct Outcome {
    workload: &'static str,
    server: &'static str,
    /// What the load is about: tokens per second read, written by one stream, or written by all.
    rate: f64,
    /// llmd's rate divided by this one's.
    llmd_is_faster_by: f64,
    median: Figures,
    load_cpu_s: f64,
    server_cpu_s: f64,
    server_peak_mib: f64,
    rates: Vec<f64>,
}

/// What a load's rate is.
#[derive(Clone, Copy)]
enum Rate {
    Writing,
    Reading,
    Output,
}

struct Workload {
    name: &'static str,
    clients: usize,
    rate: Rate,
    requests: Vec<GenerateRequest>,
}

/// A server that may be compared.
struct Peer {
    name: &'static str,
    kind: Kind,
    /// Kept from load to load and paused between, where starting takes minutes.
    kept: Option<Server>,
    /// Why it takes no further part.
    failed: Option<String>,
}

enum Kind {
    Llmd(PathBuf),
    Llama { program: PathBuf, model: PathBuf },
    Vllm { python: PathBuf, model: PathBuf },
}

enum Server {
    Llmd(Daemon),
    Http { child: Child, port: u16, dialect: Dialect },
}

struct Run {
    figures: Figures,
    load_cpu_s: f64,
    server: process::Usage,
}

/// Runs it and prints a table.
pub fn run(options: &Options, model: &Path) -> Result<Report, Box<dyn Error>> {
    let runs = options.runs.unwrap_or(if options.quick { 1 } else { 5 });
    let workloads = workloads(options.seed, options.quick);
    let (mut peers, mut skipped) = peers(&options.peers, model);
    for reason in &skipped {
        println!("SKIPPED: {reason}");
    }
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} {msg}").expect("the template is constant");
    let bar = ProgressBar::new(u64::from(runs) * (peers.len() * workloads.len()) as u64).with_style(style);
    let mut all: Vec<Vec<Vec<Run>>> = workloads.iter().map(|_| peers.iter().map(|_| Vec::new()).collect()).collect();
    for number in 1..=runs {
        for (workload, of_peers) in workloads.iter().zip(&mut all) {
            for (peer, of_peer) in peers.iter_mut().zip(of_peers) {
                bar.inc(1);
                if peer.failed.is_some() {
                    continue;
                }
                let what = format!("{number} of {runs}: {}, {}", workload.name, peer.name);
                bar.set_message(what.clone());
                match one(peer, workload) {
                    Ok(run) => {
                        let line = format!("{what}: {:.1} tokens/s", rate(workload, &run.figures));
                        bar.suspend(|| eprintln!("{line}"));
                        of_peer.push(run);
                    }
                    Err(error) if matches!(peer.kind, Kind::Llmd(_)) => return Err(format!("{what}: {error}").into()),
                    Err(error) => {
                        let reason = format!("{what}: {error}");
                        bar.suspend(|| eprintln!("SKIPPED from here on: {reason}"));
                        peer.kept = None;
                        peer.failed = Some(reason.clone());
                        skipped.push(reason);
                    }
                }
            }
        }
    }
    bar.finish_and_clear();
    let mut results = Vec::new();
    for (workload, of_peers) in workloads.iter().zip(&all) {
        let mut ours = f64::NAN;
        for (peer, runs) in peers.iter().zip(of_peers).filter(|(_, runs)| !runs.is_empty()) {
            let outcome = outcome(workload, peer.name, runs, ours);
            if matches!(peer.kind, Kind::Llmd(_)) {
                ours = outcome.rate;
            }
            results.push(outcome);
        }
    }
    let report = Report {
        benchmark: "peers",
        machine: machine(),
        runs,
        quick: options.quick,
        seed: options.seed,
        skipped,
        results,
    };
    print(&report);
    Ok(report)
}

fn workloads(seed: u64, quick: bool) -> Vec<Workload> {
    let count = |full: u64, clients: u64| if quick { full.div_ceil(4).max(clients) } else { full };
    let several = |number, prompt, output| (1..=count(number, 1)).map(|n| exactly(seed, n, prompt, output)).collect();
    let mix = |number, clients| mixed(seed, count(number, clients), 16..=512, 16..=256);
    let mut shared = mixed(seed, count(48, 16), 16..=256, 16..=256);
    share_prefix(seed, 256, &mut shared);
    let of = |name, clients, rate, requests| Workload { name, clients, rate, requests };
    vec![
        of("one stream, writing at 256", 1, Rate::Writing, several(4, 256, 128)),
        of("one stream, reading 512", 1, Rate::Reading, several(8, PREFILL_TOKENS, 1)),
        of("8 clients, mixed", 8, Rate::Output, mix(32, 8)),
        of("32 clients, mixed", 32, Rate::Output, mix(96, 32)),
        of("16 clients, 256 shared", 16, Rate::Output, shared),
    ]
}

/// Those that are there, and why others are not. llmd comes first: the others are compared with it.
fn peers(folder: &Path, model: &Path) -> (Vec<Peer>, Vec<String>) {
    let program = folder.join("llama.cpp/bin/llama-server");
    let (python, hf) = (folder.join("vllm/bin/python"), folder.join("hf-bf16"));
    let llama = |model: PathBuf| Kind::Llama { program: program.clone(), model };
    let all = [
        ("llmd", Kind::Llmd(model.to_path_buf())),
        ("llama.cpp, same file", llama(model.to_path_buf())),
        ("llama.cpp, Q4_0", llama(folder.join("Q4_0.gguf"))),
        ("vLLM, bf16", Kind::Vllm { python, model: hf }),
    ];
    let (mut found, mut skipped) = (Vec::new(), Vec::new());
    for (name, kind) in all {
        let needs = match &kind {
            Kind::Llmd(model) => vec![model],
            Kind::Llama { program, model } => vec![program, model],
            Kind::Vllm { python, model } => vec![python, model],
        };
        match needs.into_iter().find(|path| !path.exists()) {
            None => found.push(Peer { name, kind, kept: None, failed: None }),
            Some(missing) => {
                // Whoever could not set it up may have left the reason.
                let reason = fs::read_to_string(folder.join("vllm-skipped.txt")).ok();
                let reason = reason.filter(|_| matches!(kind, Kind::Vllm { .. }));
                let reason = reason.unwrap_or_else(|| format!("{} is not there", missing.display()));
                skipped.push(format!("{name}: {}", reason.trim()));
            }
        }
    }
    (found, skipped)
}

fn one(peer: &mut Peer, workload: &Workload) -> Result<Run, Box<dyn Error>> {
    let server = match peer.kept.take() {
        Some(server) => {
            server.resume();
            server
        }
        None => start(peer, workload.clients)?,
    };
    // Pages touched, threads awake, memory taken: by as many as will come.
    let warm: Vec<_> = (0..workload.clients as u64).map(|number| exactly(0, number, 16, 4)).collect();
    server.load(workload.clients, &warm)?;
    let (server_before, load_before) = (process::usage(server.pid()), process::usage_alone());
    let figures = server.load(workload.clients, &workload.requests)?;
    let (server_after, load_after) = (process::usage(server.pid()), process::usage_alone());
    if matches!(peer.kind, Kind::Vllm { .. }) {
        server.pause();
        peer.kept = Some(server);
    }
    Ok(Run {
        figures,
        load_cpu_s: load_after.cpu_s - load_before.cpu_s,
        server: process::Usage { cpu_s: server_after.cpu_s - server_before.cpu_s, ..server_after },
    })
}

fn start(peer: &Peer, clients: usize) -> Result<Server, Box<dyn Error>> {
    let (mut command, dialect) = match &peer.kind {
        Kind::Llmd(model) => return Ok(Server::Llmd(Setup::file(model).with("--prefix-cache=false").start())),
        Kind::Llama { program, model } => {
            let mut command = Command::new(program);
            command.arg("-m").arg(model).args(["-fa", "on", "-cb", "--no-webui", "--cache-ram", "0"]);
            for (flag, number) in [("-np", clients), ("-c", clients * CONTEXT), ("-t", threads())] {
                command.arg(flag).arg(number.to_string());
            }
            (command, Dialect::Llama)
        }
        Kind::Vllm { python, model } => {
            let mut command = Command::new(python);
            command.args(["-m", "vllm.entrypoints.openai.api_server", "--model"]).arg(model);
            command.args(["--max-num-seqs", "32", "--dtype", "bfloat16", "--no-enable-prefix-caching"]);
            command.args(["--served-model-name", MODEL_NAME, "--max-model-len", &CONTEXT.to_string()]);
            command.env("VLLM_CPU_OMP_THREADS_BIND", format!("0-{}", threads() - 1));
            command.envs([("VLLM_CPU_KVCACHE_SPACE", "2"), ("VLLM_NO_USAGE_STATS", "1"), ("HF_HUB_OFFLINE", "1")]);
            // As its documentation wants it.
            let openmp = python.parent().and_then(Path::parent).map(|folder| folder.join("lib/libiomp5.so"));
            command.envs(openmp.filter(|path| path.exists()).map(|path| ("LD_PRELOAD", path)));
            (command, Dialect::OpenAi)
        }
    };
    // Free now; nobody else is expected to take it in the moment until the server does.
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let log = std::env::temp_dir().join(format!("llmd-bench-peers-{}.log", std::process::id()));
    let output = File::create(&log).map_err(|error| format!("cannot write {}: {error}", log.display()))?;
    let child = command
        .args(["--host", "127.0.0.1", "--port", &port.to_string()])
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(output)
        .spawn()
        .map_err(|error| format!("cannot start {:?}: {error}", command.get_program()))?;
    let mut server = Server::Http { child, port, dialect };
    match server.wait_until_ready() {
        Ok(()) => Ok(server),
        Err(error) => Err(format!("{error}; its last words: {}", last_words(&log)).into()),
    }
}

/// The last lines of a server's output.
fn last_words(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().rev().take(5).collect();
    lines.into_iter().rev().collect::<Vec<_>>().join(" | ")
}

impl Server {
    fn pid(&self) -> u32 {
        match self {
            Server::Llmd(daemon) => daemon.pid(),
            Server::Http { child, .. } => child.id(),
        }
    }

    fn pause(&self) {
        if let Server::Http { child, .. } = self {
            process::pause(child);
        }
    }

    fn resume(&self) {
        if let Server::Http { child, .. } = self {
            process::resume(child);
        }
    }

    fn wait_until_ready(&mut self) -> Result<(), Box<dyn Error>> {
        let Server::Http { child, port, dialect } = self else { return Ok(()) };
        let (begun, connection) = (Instant::now(), Connection::new(*port, *dialect));
        while !connection.is_ready() {
            if let Some(status) = child.try_wait()? {
                return Err(format!("the server ended with {status} before it was ready").into());
            }
            if begun.elapsed() > READY_LIMIT {
                return Err(format!("the server was not ready after {} s", READY_LIMIT.as_secs()).into());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    fn load(&self, clients: usize, requests: &[GenerateRequest]) -> Result<Figures, Box<dyn Error>> {
        closed_loop_of(clients, requests, || {
            let ask: Box<Ask> = match self {
                Server::Llmd(daemon) => {
                    let client = daemon.client();
                    Box::new(move |r| load::answer(&client, r.clone()).map_err(|error| error.to_string()))
                }
                Server::Http { port, dialect, .. } => {
                    let connection = Connection::new(*port, *dialect);
                    Box::new(move |r| connection.answer(r))
                }
            };
            Ok(move |request: &GenerateRequest| ask(request).and_then(|answer| checked(request, answer)))
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Server::Http { child, .. } = self {
            process::end(child);
        }
    }
}

/// The answer, if exactly what was asked was read and written, from nobody's cache.
fn checked(request: &GenerateRequest, answer: Answer) -> Result<Answer, String> {
    let Prompt::Tokens(prompt) = &request.prompt else { return Err("prompts are ids here".into()) };
    let asked = (prompt.len(), request.sampling.max_tokens as usize, 0, FinishReason::Length);
    let got = (answer.usage.prompt_tokens as usize, answer.tokens.len(), answer.usage.cached_tokens, answer.reason);
    if asked == got {
        Ok(answer)
    } else {
        Err(format!("(read, written, cached, ended by) should be {asked:?} and is {got:?}"))
    }
}

fn rate(workload: &Workload, figures: &Figures) -> f64 {
    match workload.rate {
        Rate::Writing => 1e3 / figures.inter_token_ms.mean,
        Rate::Reading => f64::from(PREFILL_TOKENS) * 1e3 / figures.ttft_ms.p50,
        Rate::Output => figures.output_tokens_per_s,
    }
}

/// `ours` is llmd's rate, or not a number while there is none: then this is llmd.
fn outcome(workload: &Workload, server: &'static str, runs: &[Run], ours: f64) -> Outcome {
    let rates: Vec<f64> = runs.iter().map(|run| rate(workload, &run.figures)).collect();
    let rate = median(rates.iter().copied());
    Outcome {
        workload: workload.name,
        server,
        rate,
        llmd_is_faster_by: if ours.is_nan() { 1.0 } else { ours / rate },
        median: medians(&runs.iter().map(|run| run.figures).collect::<Vec<_>>()),
        load_cpu_s: median(runs.iter().map(|run| run.load_cpu_s)),
        server_cpu_s: median(runs.iter().map(|run| run.server.cpu_s)),
        server_peak_mib: median(runs.iter().map(|run| run.server.peak_bytes as f64 / f64::from(1 << 20))),
        rates,
    }
}

fn print(report: &Report) {
    println!("{}; medians of {} runs each, alternating", report.machine, report.runs);
    let mut last = "";
    for outcome in &report.results {
        if outcome.workload != last {
            last = outcome.workload;
            println!("\n{last}");
            println!(
                "  {:22} {:>9} {:>7} {:>17} {:>17} {:>8} {:>8} {:>8}",
                "", "tokens/s", "llmd x", "first, ms", "between, ms", "load CPU", "CPU, s", "MiB"
            );
        }
        let Figures { ttft_ms, inter_token_ms, .. } = outcome.median;
        println!(
            "  {:22} {:>9.1} {:>7.2} {:>17} {:>17} {:>8.2} {:>8.2} {:>8.0}",
            outcome.server,
            outcome.rate,
            outcome.llmd_is_faster_by,
            format!("{:.0} / {:.0}", ttft_ms.p50, ttft_ms.p99),
            format!("{:.1} / {:.1}", inter_token_ms.p50, inter_token_ms.p99),
            outcome.load_cpu_s,
            outcome.server_cpu_s,
            outcome.server_peak_mib
        );
    }
}
