//! Benchmarks of the whole system. `cargo xtask bench NAME` builds everything in release and runs one.
//!
//! Every benchmark runs what it compares in one go, alternating, several times, and shows medians: machines differ, and
//! one machine differs from minute to minute, so only ratios within a run say something.
#![forbid(unsafe_code)]

mod batching;
mod figures;
mod http;
mod machine;
mod peers;
mod process;
mod quality;
mod single;
mod workload;

use clap::{Parser, Subcommand};
use llmd_tests::daemon;
use serde::Serialize;
use std::error::Error;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

/// Benchmarks of llmd.
#[derive(Parser)]
#[command(name = "cargo xtask bench", bin_name = "cargo xtask bench", arg_required_else_help = true)]
struct Arguments {
    #[command(subcommand)]
    benchmark: Benchmark,
    /// Also writes the figures to this file, as JSON.
    #[arg(long, global = true, value_name = "FILE")]
    json: Option<PathBuf>,
    /// The model [default: the one in the cache folder].
    #[arg(long, global = true, env = "LLMD_MODEL", value_name = "PATH")]
    model: Option<PathBuf>,
}

#[derive(Subcommand)]
enum Benchmark {
    /// The same mixed load with static and with continuous batching.
    Batching(batching::Options),
    /// One stream, and closed loops of 1, 8 and 32 clients; beside them llama.cpp's figures for one stream.
    Single(single::Options),
    /// The same loads on llmd, llama.cpp's server and vLLM, in turn.
    Peers(peers::Options),
    /// What this machine can do at most, and how much of it llmd uses.
    Machine(machine::Options),
    /// How well the model is computed, by rounding of activations, of keys and values, and of weights.
    Quality(quality::Options),
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let model = arguments.model.clone().unwrap_or_else(daemon::default_model);
    match &arguments.benchmark {
        Benchmark::Batching(options) => conclude(arguments, &batching::run(options, &model)?),
        Benchmark::Single(options) => conclude(arguments, &single::run(options, &model)?),
        Benchmark::Peers(options) => conclude(arguments, &peers::run(options, &model)?),
        Benchmark::Machine(options) => conclude(arguments, &machine::run(options, &model)?),
        Benchmark::Quality(options) => conclude(arguments, &quality::run(options, &model)?),
    }
}

fn conclude(arguments: &Arguments, report: &impl Serialize) -> Result<(), Box<dyn Error>> {
    if let Some(path) = &arguments.json {
        let text = serde_json::to_string_pretty(report)?;
        fs::write(path, text + "\n").map_err(|e| format!("cannot write {}: {e}", path.display()))?;
    }
    Ok(())
}
