//! Asks the daemon one question and prints the answer as it is written.
//!
//! ```text
//! cargo run -p llmd-client --example ask -- "What is the capital of France?"
//! ```
//! The daemon is looked for where `Client::connect_default` says; set LLMD_SOCKET to name another place.

use std::io::Write;
use std::process::ExitCode;
use std::time::Instant;

use llmd_client::{ChatMessage, Client, Error, Event, GenerateRequest};

fn main() -> ExitCode {
    let question = std::env::args().skip(1).collect::<Vec<_>>().join(" ");
    if question.is_empty() {
        eprintln!("usage: ask QUESTION");
        return ExitCode::from(2);
    }
    match ask(question) {
        Ok(()) => ExitCode::SUCCESS,
        // Each error says what to do about it; `error.is_transient()` tells whether trying again may help.
        Err(error) => {
            eprintln!("ask: {error}");
            ExitCode::FAILURE
        }
    }
}

fn ask(question: String) -> Result<(), Error> {
    // A service connects once and keeps the client: it is cheap to clone, and reconnects by itself after a restart.
    let client = Client::connect_default()?;

    // A chat is rendered through the model's own template. For plain continuation use `GenerateRequest::text`.
    let mut request = GenerateRequest::chat(vec![
        ChatMessage { role: "system".into(), content: "You are a helpful assistant. Answer in one sentence.".into() },
        ChatMessage { role: "user".into(), content: question },
    ]);
    request.sampling.max_tokens = 200;

    let asked = Instant::now();
    let mut first_text = None;
    // The loop sleeps in shared memory until the daemon publishes the next token. Leaving it early, by `break` or an
    // error, drops the generation, and that cancels the request.
    for event in client.generate(&request)? {
        match event? {
            Event::Accepted { .. } => {}
            Event::Text(text) => {
                first_text.get_or_insert_with(|| asked.elapsed());
                print!("{text}");
                std::io::stdout().flush()?;
            }
            // The ids of the same text, for those who need them.
            Event::Tokens(_) => {}
            Event::Done { reason, usage } => {
                println!();
                eprintln!(
                    "[{reason}: {} prompt and {} output tokens; first text after {:.0?}, all after {:.0?}]",
                    usage.prompt_tokens,
                    usage.output_tokens,
                    first_text.unwrap_or_default(),
                    asked.elapsed(),
                );
            }
        }
    }
    Ok(())
}
