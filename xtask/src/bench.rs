//! `cargo xtask bench`: builds daemon, llmctl and benchmarks in release and runs one of them.

use crate::build;
use crate::failure::{Context, Failure, Result};
use crate::place;
use crate::setup;
use std::path::Path;
use std::process::{Command, ExitCode};

/// Runs the benchmark `name`, or lists them; figures also go to `json` if there is one.
pub fn bench(name: Option<&str>, json: Option<&Path>, arguments: &[String]) -> Result<ExitCode> {
    if name.is_none() && (json.is_some() || !arguments.is_empty()) {
        return Err(Failure::new("which benchmark? `cargo xtask bench` lists them"));
    }
    let built = build::build(&["--release", "--package=llmd", "--package=llmctl", "--package=llmd-benches", "--bins"])?;
    let mut command = Command::new(built.program("llmd-benches")?);
    if let Some(name) = name {
        command
            .arg(name)
            .args(json.map(|path| [Path::new("--json"), path]).into_iter().flatten())
            .args(arguments)
            .env("LLMD_MODEL", setup::default_model()?)
            .env("LLMD_PEERS", place::cache()?.join("peers"));
    } else {
        command.arg("--help");
    }
    let status = command
        .env("LLMD_BIN", built.program("llmd")?)
        .env("LLMCTL_BIN", built.program("llmctl")?)
        .status()
        .cannot("start the benchmark")?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
