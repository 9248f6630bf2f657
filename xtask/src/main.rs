//! The few doors to automation: `cargo xtask setup | run | test | bench`.
//!
//! Everything a person or a machine does with this repository besides editing goes through here, so that what CI runs
//! and what a newcomer types are the same commands.
#![forbid(unsafe_code)]

mod aarch64;
mod bench;
mod build;
mod failure;
mod place;
mod report;
mod run;
mod setup;
mod setup_peers;
mod suite;
mod test;
mod tool;

use clap::{Parser, Subcommand};
use failure::Result;
use std::path::PathBuf;
use std::process::ExitCode;

/// Sets up, runs, tests and measures llmd.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Brings the default model into the cache folder ($LLMD_CACHE, else the user's own) and checks it.
    Setup {
        /// Also builds llama.cpp and installs vLLM beside it, for `cargo xtask bench peers`: ten minutes, 4 GB.
        #[arg(long)]
        peers: bool,
    },
    /// Builds in release, starts a daemon of its own and opens a chat with it.
    Run {
        /// A GGUF file to serve instead of the default model.
        #[arg(long, value_name = "PATH")]
        model: Option<PathBuf>,
        /// An argument for the daemon, such as --daemon-arg=--threads=1. May be given several times.
        #[arg(long, value_name = "ARGUMENT", allow_hyphen_values = true)]
        daemon_arg: Vec<String>,
        /// A prompt: print one answer to it and end, instead of opening a chat.
        #[arg(last = true)]
        prompt: Vec<String>,
    },
    /// Builds and runs the tests: all suites, or those named.
    Test {
        /// Which suites; `--list` names them.
        suites: Vec<String>,
        /// Names the suites and ends.
        #[arg(long)]
        list: bool,
        /// Also what takes long: the loom models, the kernels of 64-bit ARM under QEMU, many more simulation seeds; writes
        /// benches/full.md.
        #[arg(long)]
        full: bool,
        /// A suite in which a skipped test is a failure. May be given several times.
        #[arg(long, value_name = "SUITE")]
        require: Vec<String>,
        /// Shows what passing tests print.
        #[arg(long)]
        show_output: bool,
    },
    /// Runs a benchmark in release, or lists them.
    Bench {
        /// Which one.
        name: Option<String>,
        /// Also writes the figures to this file.
        #[arg(long, value_name = "FILE")]
        json: Option<PathBuf>,
        /// Arguments for the benchmark itself.
        #[arg(last = true)]
        arguments: Vec<String>,
    },
}

fn main() -> ExitCode {
    match dispatch(Arguments::parse().command) {
        Ok(code) => code,
        Err(failure) => {
            eprintln!("error: {failure}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch(command: Command) -> Result<ExitCode> {
    match command {
        Command::Setup { peers } => {
            let path = if peers { setup_peers::peers()? } else { setup::default_model()? };
            println!("{}", path.display());
            Ok(ExitCode::SUCCESS)
        }
        Command::Run { model, daemon_arg, prompt } => run::run(model, &daemon_arg, &prompt.join(" ")),
        Command::Test { list: true, .. } => test::list(),
        Command::Test { suites, list: false, full, require, show_output } => {
            test::test(&test::Options { suites, full, require, show_output })
        }
        Command::Bench { name, json, arguments } => bench::bench(name.as_deref(), json.as_deref(), &arguments),
    }
}
