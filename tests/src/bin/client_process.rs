//! A client in a process of its own: connects once, asks requests of a mix one after another, prints a line of JSON for
//! each.
//!
//! `client_process SOCKET SEED FIRST COUNT PROMPT_MIN PROMPT_MAX OUTPUT_MIN OUTPUT_MAX`

use llmd_client::Client;
use llmd_tests::load::{Mix, Report, answer};
use std::error::Error;
use std::process::ExitCode;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("client_process: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [socket, seed, first, count, prompt_min, prompt_max, output_min, output_max] = arguments.as_slice() else {
        return Err("give SOCKET SEED FIRST COUNT PROMPT_MIN PROMPT_MAX OUTPUT_MIN OUTPUT_MAX".into());
    };
    let mix =
        Mix::tiny(seed.parse()?, prompt_min.parse()?..=prompt_max.parse()?, output_min.parse()?..=output_max.parse()?);
    let (first, count): (u64, u64) = (first.parse()?, count.parse()?);
    let client = Client::connect(socket)?;
    for number in first..first + count {
        let report = Report::new(number, answer(&client, mix.request(number)));
        println!("{}", serde_json::to_string(&report)?);
    }
    Ok(())
}
