//! llmctl: looks at a running llmd, talks to its model and measures it.
//!
//! Exit codes, stable for scripts: 0 fine, 1 failed, 2 wrong usage, 3 the daemon cannot be reached, 4 it refused.
#![forbid(unsafe_code)]

mod bench;
mod chat;
mod failure;
mod generate;
mod place;
mod report;
mod screen;
mod status;

use clap::{Args, Parser, Subcommand};
use failure::Failure;
use std::path::PathBuf;
use std::process::ExitCode;

/// Looks at a running llmd, talks to its model and measures it.
#[derive(Debug, Parser)]
#[command(
    version,
    max_term_width = 100,
    after_help = "Exit codes: 0 fine, 1 failed, 2 usage, 3 daemon not reached, 4 it refused."
)]
struct CommandLine {
    #[command(flatten)]
    common: Common,
    #[command(subcommand)]
    command: Command,
}

/// What every command takes.
#[derive(Debug, Clone, Args)]
struct Common {
    /// Socket where clients connect [default: llmd/llmd.sock under $XDG_RUNTIME_DIR, or under /run]
    #[arg(long, global = true, env = "LLMD_SOCKET", value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Socket where the daemon is asked about itself [default: control.sock beside the other]
    #[arg(long, global = true, env = "LLMD_CONTROL", value_name = "PATH")]
    control: Option<PathBuf>,
    /// Print JSON instead of text
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show what the daemon is doing: model, load, memory, speed, clients
    Status(status::Arguments),
    /// Continue one prompt and print the answer as it comes
    Generate(generate::Arguments),
    /// Talk with the model, line by line
    Chat(chat::Arguments),
    /// Put load on the daemon and measure speed and latency
    Bench(bench::Arguments),
    /// Print all metrics, in Prometheus' text format
    Metrics,
}

fn main() -> ExitCode {
    let line = CommandLine::parse();
    let done = match line.command {
        Command::Status(arguments) => status::run(&line.common, &arguments),
        Command::Generate(arguments) => generate::run(&line.common, &arguments),
        Command::Chat(arguments) => chat::run(&line.common, &arguments),
        Command::Bench(arguments) => bench::run(&line.common, &arguments),
        Command::Metrics => status::metrics(&line.common),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure { quiet: true, code, .. }) => ExitCode::from(code),
        Err(failure) => {
            eprintln!("llmctl: {}", failure.message);
            if let Some(hint) = &failure.hint {
                eprintln!("        {hint}");
            }
            ExitCode::from(failure.code)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_well_formed() {
        CommandLine::command().debug_assert();
    }

    #[test]
    fn help_fits_80_columns() {
        let mut command = CommandLine::command().term_width(80);
        command.build();
        let help = command.render_long_help().to_string();
        for command in command.get_subcommands_mut() {
            let help = command.render_long_help().to_string();
            assert!(help.lines().all(|line| line.chars().count() <= 80), "{help}");
        }
        assert!(help.lines().all(|line| line.chars().count() <= 80), "{help}");
        for command in ["status", "generate", "chat", "bench", "metrics"] {
            assert!(help.contains(&format!("  {command} ")), "{help}");
        }
    }

    #[test]
    fn common_flags_stand_before_or_after_the_command() {
        for line in [["llmctl", "--socket", "/a", "--json", "status"], ["llmctl", "status", "--json", "--socket", "/a"]]
        {
            let line = CommandLine::parse_from(line);
            assert_eq!(line.common.socket, Some(PathBuf::from("/a")));
            assert!(line.common.json);
        }
    }
}
