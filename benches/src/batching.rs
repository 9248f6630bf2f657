//! The control of the whole idea: the same requests, static and continuous.
//!
//! Static: a batch is filled from the queue and ends when its last member ends; rows of members that have ended are
//! computed for nobody. Continuous: whoever arrives joins the next step, whoever is done leaves. Same daemon, same
//! kernels, same requests, one flag apart.

use crate::figures::{Figures, Rows, closed_loop, machine, median, medians, rows};
use crate::workload::IDS;
use llmd_protocol::message::GenerateRequest;
use llmd_tests::daemon::Setup;
use llmd_tests::load::Mix;
use serde::Serialize;
use std::error::Error;
use std::path::Path;

/// What may be changed.
#[derive(clap::Args)]
pub struct Options {
    /// How often each is run; medians are shown.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    repetitions: u32,
    /// Requests in a run.
    #[arg(long, default_value_t = 48)]
    requests: u64,
    /// Clients that ask them.
    #[arg(long, default_value_t = 16)]
    clients: usize,
    /// Sequences in a batch, at most.
    #[arg(long, default_value_t = 16)]
    sequences_max: usize,
    /// Seed of the lengths and prompts.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// All figures of a run of this benchmark.
#[derive(Serialize)]
pub struct Report {
    benchmark: &'static str,
    machine: String,
    requests: u64,
    clients: usize,
    sequences_max: usize,
    prompt_tokens: [u32; 2],
    output_tokens: [u32; 2],
    seed: u64,
    repetitions: u32,
    modes: Vec<Mode>,
}

#[derive(Serialize)]
struct Mode {
    scheduler: &'static str,
    median: Figures,
    utilisation: f64,
    sequences_per_step: f64,
    runs: Vec<Run>,
}

#[derive(Serialize)]
struct Run {
    figures: Figures,
    rows: Rows,
}

/// Runs it and prints a table.
pub fn run(options: &Options, model: &Path) -> Result<Report, Box<dyn Error>> {
    let mix = Mix { seed: options.seed, prompt_tokens: 16..=256, output_tokens: 16..=256, ids: IDS, temperature: 0.0 };
    let requests: Vec<_> = (0..options.requests).map(|number| mix.request(number)).collect();
    let mut runs = [Vec::new(), Vec::new()];
    for repetition in 1..=options.repetitions {
        for (scheduler, runs) in ["static", "continuous"].into_iter().zip(&mut runs) {
            eprintln!("{repetition} of {}: {scheduler}", options.repetitions);
            runs.push(one(options, model, scheduler, &requests)?);
        }
    }
    let [fixed, continuous] = runs;
    let report = Report {
        benchmark: "batching",
        machine: machine(),
        requests: options.requests,
        clients: options.clients,
        sequences_max: options.sequences_max,
        prompt_tokens: [*mix.prompt_tokens.start(), *mix.prompt_tokens.end()],
        output_tokens: [*mix.output_tokens.start(), *mix.output_tokens.end()],
        seed: options.seed,
        repetitions: options.repetitions,
        modes: vec![mode("static", fixed), mode("continuous", continuous)],
    };
    print(&report);
    Ok(report)
}

fn one(options: &Options, model: &Path, scheduler: &str, requests: &[GenerateRequest]) -> Result<Run, Box<dyn Error>> {
    // A fresh daemon each time, without a prefix cache: no run may profit from the one before.
    let daemon = Setup::file(model)
        .with(format!("--scheduler={scheduler}"))
        .with(format!("--sequences-max={}", options.sequences_max))
        .with("--prefix-cache=false")
        .start();
    let figures = closed_loop(&daemon, options.clients, requests)?;
    daemon.wait_until_idle();
    Ok(Run { figures, rows: rows(&daemon.steps()) })
}

fn mode(scheduler: &'static str, runs: Vec<Run>) -> Mode {
    Mode {
        scheduler,
        median: medians(&runs.iter().map(|run| run.figures).collect::<Vec<_>>()),
        utilisation: median(runs.iter().map(|run| run.rows.utilisation)),
        sequences_per_step: median(runs.iter().map(|run| run.rows.sequences_per_step)),
        runs,
    }
}

fn print(report: &Report) {
    println!(
        "{} requests, {} clients, at most {} in a batch; {}",
        report.requests, report.clients, report.sequences_max, report.machine
    );
    println!("medians of {} runs each, alternating\n", report.repetitions);
    let [fixed, continuous] = &report.modes[..] else { unreachable!("there are two modes") };
    println!("{:34} {:>12} {:>12} {:>12}", "", fixed.scheduler, continuous.scheduler, "ratio");
    let line = |what: &str, figure: fn(&Mode) -> f64, digits: usize| {
        let (a, b) = (figure(fixed), figure(continuous));
        println!("{what:34} {a:>12.digits$} {b:>12.digits$} {:>12.2}", b / a);
    };
    line("rows used for a living sequence, %", |m| m.utilisation * 100.0, 1);
    line("living sequences per step", |m| m.sequences_per_step, 1);
    line("output tokens/s", |m| m.median.output_tokens_per_s, 1);
    line("prompt and output tokens/s", |m| m.median.total_tokens_per_s, 1);
    line("time to first token, ms, p50", |m| m.median.ttft_ms.p50, 0);
    line("time to first token, ms, p99", |m| m.median.ttft_ms.p99, 0);
    line("between tokens, ms, p50", |m| m.median.inter_token_ms.p50, 1);
    line("between tokens, ms, p99", |m| m.median.inter_token_ms.p99, 1);
    line("whole request, ms, p50", |m| m.median.end_to_end_ms.p50, 0);
    line("whole request, ms, p99", |m| m.median.end_to_end_ms.p99, 0);
    line("all requests, s", |m| m.median.wall_s, 1);
}
