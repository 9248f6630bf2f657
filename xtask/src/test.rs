//! `cargo xtask test`: builds once, runs suites one after another, counts.
//!
//! The last line of standard output is always `N passed, N failed` alone; the exit code is 0 only if something passed and
//! nothing failed.

use crate::aarch64;
use crate::build::{self, Built};
use crate::failure::Result;
use crate::place;
use crate::report::{Line, write_full};
use crate::setup;
use crate::suite::{self, Counts, Suite, UNIT};
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

/// How long one test binary may take. The slowest takes about two minutes on two cores.
const BINARY_LIMIT: Duration = Duration::from_secs(900);
/// The same with `--full`.
const BINARY_LIMIT_FULL: Duration = Duration::from_secs(7200);
/// Seeds of the scheduler's simulation with `--full`; without, the suite's own small number.
const SIMULATION_SEEDS_FULL: &str = "50000";

/// What was asked for.
pub struct Options {
    /// Names of suites; empty means all.
    pub suites: Vec<String>,
    /// Also what takes long.
    pub full: bool,
    /// Suites in which a skip is a failure.
    pub require: Vec<String>,
    /// Show what passing tests print.
    pub show_output: bool,
}

/// `--list`.
pub fn list() -> Result<ExitCode> {
    for suite in suite::all()? {
        println!("{:12} {}", suite.name, suite.about);
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs the suites.
pub fn test(options: &Options) -> Result<ExitCode> {
    let all = suite::all()?;
    let suites = suite::select(&options.suites, &all)?;
    let required = suite::select(&options.require, &all)?;
    let required = if options.require.is_empty() { Vec::new() } else { required };
    if suites.iter().any(Suite::needs_model) {
        setup::default_model()?;
    }
    let begun = Instant::now();
    let built = build::build(&["--workspace", "--all-targets"])?;
    println!("build: {:.0} s", begun.elapsed().as_secs_f64());

    let mut lines = Vec::new();
    for suite in &suites {
        println!("\n== {}: {}", suite.name, suite.about);
        let begun = Instant::now();
        let mut counts = run_suite(suite, &built, options)?;
        if counts.skipped > 0 && required.contains(suite) {
            println!("{}: skipping is not allowed here", suite.name);
            counts.failed += std::mem::take(&mut counts.skipped);
        }
        if counts == Counts::default() {
            println!("{}: nothing ran", suite.name);
            counts.failed = 1;
        }
        lines.push(close(&suite.name, counts, begun));
    }
    if options.full {
        println!("\n== loom: the rings' orderings under every interleaving");
        let begun = Instant::now();
        let counts = suite::run_counted(loom()?, "loom", BINARY_LIMIT_FULL, options.show_output)?;
        lines.push(close("loom", counts, begun));
        println!("\n== aarch64: the kernels' tests on an emulated 64-bit ARM processor");
        let begun = Instant::now();
        lines.push(close("aarch64", run_aarch64(options)?, begun));
        write_full(&place::workspace().join("benches/full.md"), &lines)?;
    }
    Ok(conclude(&lines))
}

/// Prints the closing line of a suite.
fn close(name: &str, counts: Counts, begun: Instant) -> Line {
    let seconds = begun.elapsed().as_secs_f64();
    println!("{name}: {counts} ({seconds:.1} s)");
    Line { name: name.to_owned(), counts, seconds }
}

fn conclude(lines: &[Line]) -> ExitCode {
    let mut total = Counts::default();
    println!("\n{:12} {:>8} {:>8} {:>8} {:>8} {:>9}", "suite", "passed", "failed", "skipped", "ignored", "seconds");
    for Line { name, counts, seconds } in lines {
        let Counts { passed, failed, skipped, ignored } = counts;
        println!("{name:12} {passed:>8} {failed:>8} {skipped:>8} {ignored:>8} {seconds:>9.1}");
        total.add(*counts);
    }
    println!("{} passed, {} failed", total.passed, total.failed);
    if total.passed > 0 && total.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn run_suite(suite: &Suite, built: &Built, options: &Options) -> Result<Counts> {
    let limit = if options.full { BINARY_LIMIT_FULL } else { BINARY_LIMIT };
    let mut counts = Counts::default();
    let wanted = |unit: bool, target: &str| {
        if suite.name == UNIT { unit } else { !unit && target == suite.target() }
    };
    for binary in built.tests.iter().filter(|binary| wanted(binary.unit, &binary.target)) {
        let mut command = suite::command(binary);
        environment(&mut command, built, options)?;
        // A crate without unit tests still reports; one that reports nothing died.
        counts.add(suite::run_counted(command, &binary.target, limit, options.show_output)?);
    }
    if suite.name == UNIT {
        let mut command = build::cargo();
        command.args(["test", "--quiet", "--doc", "--workspace", "--", "--show-output"]);
        counts.add(suite::run_counted(command, "documentation", limit, options.show_output)?);
    }
    Ok(counts)
}

/// What the tests are told: where the programs are, and how much to do.
fn environment(command: &mut Command, built: &Built, options: &Options) -> Result<()> {
    command.env("LLMD_BIN", built.program("llmd")?).env("LLMCTL_BIN", built.program("llmctl")?);
    if options.full {
        command.env("LLMD_SIM_SEEDS", SIMULATION_SEEDS_FULL);
    }
    Ok(())
}

/// A machine without the tools, and without a way to them, is no failure; whatever the tools then say may be one.
fn run_aarch64(options: &Options) -> Result<Counts> {
    match aarch64::Tools::ensure() {
        Ok(tools) => suite::run_counted(tools.tests()?, "aarch64", BINARY_LIMIT_FULL, options.show_output),
        Err(why) => {
            println!("SKIPPED: {why}");
            Ok(Counts { skipped: 1, ..Counts::default() })
        }
    }
}

/// The loom models, in a target folder of their own: the flag changes every crate.
fn loom() -> Result<Command> {
    let folder = place::target()?.join("loom");
    let mut flags = std::env::var("RUSTFLAGS").unwrap_or_default();
    flags.push_str(" --cfg loom");
    let mut command = build::cargo();
    command
        .args(["test", "--quiet", "--release", "--package=llmd-protocol", "--lib", "--target-dir"])
        .arg(Path::new(&folder))
        .args(["--", "--show-output", "loom"])
        .env("RUSTFLAGS", flags.trim());
    Ok(command)
}
