//! Many questions at once over one connection: what a service with many users does.
//!
//! ```text
//! cargo run -p llmd-client --example many_at_once -- 8
//! ```
//! The daemon runs all requests in one batch, so eight take far less than eight times as long as one.

use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use llmd_client::{ChatMessage, Client, Error, Event, GenerateRequest, Reject};

const TOPICS: [&str; 8] = ["rivers", "bread", "the Moon", "bees", "glass", "chess", "volcanoes", "paper"];

fn main() -> ExitCode {
    let count = match std::env::args().nth(1).map(|n| n.parse::<usize>()) {
        None => TOPICS.len(),
        Some(Ok(count)) if (1..=256).contains(&count) => count,
        Some(_) => {
            eprintln!("usage: many_at_once [COUNT], at most 256");
            return ExitCode::from(2);
        }
    };
    let client = match Client::connect_default() {
        Ok(client) => client,
        Err(error) => {
            eprintln!("many_at_once: {error}");
            return ExitCode::FAILURE;
        }
    };

    let begun = Instant::now();
    // One thread a request, as in a service with a thread for each user. `Generation` is an async `Stream` too; then one
    // thread serves any number.
    let asking: Vec<_> = (0..count)
        .map(|i| {
            // Clones share the session: no further connection, no further shared memory.
            let client = client.clone();
            thread::spawn(move || one(&client, TOPICS[i % TOPICS.len()]))
        })
        .collect();

    let (mut tokens, mut failed) = (0, false);
    for asked in asking {
        match asked.join().expect("the thread does not panic") {
            Ok(said) => {
                tokens += said.tokens;
                println!("{:>9.0?}  {:.60}", said.first, said.text.replace('\n', " "));
            }
            Err(error) => {
                failed = true;
                eprintln!("many_at_once: {error}");
            }
        }
    }
    let seconds = begun.elapsed().as_secs_f64();
    println!("{count} requests, {tokens} tokens in {seconds:.2} s: {:.0} tokens/s", f64::from(tokens) / seconds);
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

struct Said {
    text: String,
    tokens: u32,
    /// From asking to the first text.
    first: Duration,
}

fn one(client: &Client, topic: &str) -> Result<Said, Error> {
    let content = format!("Tell me one fact about {topic}.");
    let request = GenerateRequest::chat(vec![ChatMessage { role: "user".into(), content }]).max_tokens(64);
    let asked = Instant::now();
    // A daemon at its limit says Busy. How long to go on trying is the service's choice.
    let mut tries = 0;
    loop {
        match listen(client, &request, asked) {
            Err(Error::Rejected { reject: Reject::Busy, .. }) if tries < 50 => {
                tries += 1;
                thread::sleep(Duration::from_millis(100));
            }
            result => return result,
        }
    }
}

fn listen(client: &Client, request: &GenerateRequest, asked: Instant) -> Result<Said, Error> {
    let (mut text, mut first, mut tokens) = (String::new(), None, 0);
    for event in client.generate(request)? {
        match event? {
            Event::Accepted { .. } | Event::Tokens(_) => {}
            Event::Text(piece) => {
                first.get_or_insert_with(|| asked.elapsed());
                text.push_str(&piece);
            }
            Event::Done { usage, .. } => tokens = usage.output_tokens,
        }
    }
    Ok(Said { text, tokens, first: first.unwrap_or_default() })
}
