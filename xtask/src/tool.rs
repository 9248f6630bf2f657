//! Running other programs.

use crate::failure::{Failure, Result};
use std::io;
use std::process::{Command, Stdio};

/// Whether `program` (a name and its first arguments) exists and ends well with `arguments`.
pub fn answers(program: &[&str], arguments: &[&str]) -> bool {
    command(program, arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// Runs it with everything it says on standard error, so that standard output stays the caller's own.
pub fn run_to_stderr(program: &[&str], arguments: &[&str]) -> Result<()> {
    let status = command(program, arguments).stdin(Stdio::null()).stdout(io::stderr()).status();
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(Failure::new(format!("{} ended with {status}", program.join(" ")))),
        Err(error) => Err(Failure::new(format!("{} did not start: {error}", program.join(" ")))),
    }
}

/// Runs it and returns the first line it prints, or None if it fails.
pub fn first_line(program: &[&str], arguments: &[&str]) -> Option<String> {
    output(program, arguments)?.lines().next().map(str::to_owned)
}

/// Runs it and returns what it prints, or None if it fails.
pub fn output(program: &[&str], arguments: &[&str]) -> Option<String> {
    let output = command(program, arguments).stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    String::from_utf8(output.stdout).ok().filter(|_| output.status.success())
}

fn command(program: &[&str], arguments: &[&str]) -> Command {
    let mut command = Command::new(program[0]);
    command.args(&program[1..]).args(arguments);
    command
}
