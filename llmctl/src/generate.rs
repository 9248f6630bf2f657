//! `llmctl generate`: one prompt, one answer, streamed to standard output.

use crate::failure::{FAILED, Failure, USAGE};
use crate::{Common, place, screen};
use llmd_client::{ChatMessage, Event, FinishReason, GenerateRequest, Generation, Prompt, SamplingParams, Usage};
use serde_json::{Value, json};
use std::io::{IsTerminal, Read, Write};
use std::time::Instant;

/// Most bytes of a prompt read from standard input.
const PROMPT_BYTES_MAX: u64 = 8 << 20;

/// What `generate` takes.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// The prompt; `-`, or none with something piped in, reads standard input
    prompt: Option<String>,
    /// Send the prompt as bare text, without the model's chat template
    #[arg(long, conflicts_with = "system")]
    raw: bool,
    /// Instructions that stand before the prompt, in the role "system"
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    #[command(flatten)]
    sampling: Sampling,
}

/// How tokens are chosen, as flags. The daemon checks the ranges.
#[derive(Debug, Clone, clap::Args)]
#[command(allow_negative_numbers = true)]
pub struct Sampling {
    /// Most tokens to generate
    #[arg(long, value_name = "N", default_value_t = 256)]
    max_tokens: u32,
    /// Tokens before which the answer may not end
    #[arg(long, value_name = "N", default_value_t = 0)]
    min_tokens: u32,
    /// 0 always takes the most likely token; higher is more varied, up to 100
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    temperature: f32,
    /// Keep the most likely tokens that together have this probability; 1 keeps all
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    top_p: f32,
    /// Keep so many of the most likely tokens; 0 keeps all
    #[arg(long, value_name = "K", default_value_t = 0)]
    top_k: u32,
    /// Drop tokens less likely than this times the most likely one
    #[arg(long, value_name = "P", default_value_t = 0.0)]
    min_p: f32,
    /// Above 1, tokens that were seen become less likely
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    repetition_penalty: f32,
    /// Taken once from each token that was generated, -10 to 10
    #[arg(long, value_name = "X", default_value_t = 0.0)]
    presence_penalty: f32,
    /// Taken from a token each time it was generated, -10 to 10
    #[arg(long, value_name = "X", default_value_t = 0.0)]
    frequency_penalty: f32,
    /// The same seed gives the same answer
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// End before this text; may be given several times
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Go on after the model wants to end
    #[arg(long)]
    ignore_eos: bool,
}

impl From<&Sampling> for SamplingParams {
    fn from(flags: &Sampling) -> Self {
        Self {
            temperature: flags.temperature,
            top_k: flags.top_k,
            top_p: flags.top_p,
            min_p: flags.min_p,
            repetition_penalty: flags.repetition_penalty,
            presence_penalty: flags.presence_penalty,
            frequency_penalty: flags.frequency_penalty,
            seed: flags.seed,
            max_tokens: flags.max_tokens,
            min_tokens: flags.min_tokens,
            stop_token_ids: Vec::new(),
            stop: flags.stop.clone(),
            ignore_eos: flags.ignore_eos,
        }
    }
}

/// A finished answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// Its text.
    pub text: String,
    /// Why it ended.
    pub reason: FinishReason,
    /// What it used.
    pub usage: Usage,
    /// Seconds to the first token, and in all.
    pub seconds: (Option<f64>, f64),
}

impl Answer {
    /// As an object with stable names.
    pub fn json(&self) -> Value {
        json!({
            "text": self.text,
            "finish_reason": self.reason.name(),
            "usage": {
                "prompt_tokens": self.usage.prompt_tokens,
                "cached_tokens": self.usage.cached_tokens,
                "output_tokens": self.usage.output_tokens,
            },
            "ttft_ms": self.seconds.0.map(|s| s * 1e3),
            "duration_ms": self.seconds.1 * 1e3,
        })
    }
}

/// Sends the prompt and prints the answer.
pub fn run(common: &Common, arguments: &Arguments) -> Result<(), Failure> {
    let text = prompt(arguments.prompt.as_deref())?;
    let prompt = if arguments.raw {
        Prompt::Text(text)
    } else {
        let message = |role: &str, content: &str| ChatMessage { role: role.to_owned(), content: content.to_owned() };
        let system = arguments.system.as_deref().map(|content| message("system", content));
        Prompt::Chat(system.into_iter().chain([message("user", &text)]).collect())
    };
    let client = place::connect(common)?;
    let request = GenerateRequest { prompt, sampling: (&arguments.sampling).into() };
    let began = Instant::now();
    let generation = client.generate(&request)?;
    let mut out = std::io::stdout().lock();
    if common.json {
        let answer = stream(generation, began, |_| Ok(()))?;
        writeln!(out, "{}", answer.json())?;
    } else {
        let to_terminal = out.is_terminal();
        let answer = stream(generation, began, |text| {
            // A file or a pipe gets the text as it is; a terminal is not to be steered by a model.
            let text = if to_terminal { screen::streamed(text) } else { text.to_owned() };
            out.write_all(text.as_bytes())?;
            Ok(out.flush()?)
        })?;
        if !answer.text.ends_with('\n') {
            writeln!(out)?;
        }
    }
    Ok(out.flush()?)
}

/// Reads a generation that began at `began` to its end, handing each piece of text to `show`. An error of `show` drops the generation,
/// which cancels it.
pub fn stream(
    generation: Generation,
    began: Instant,
    mut show: impl FnMut(&str) -> Result<(), Failure>,
) -> Result<Answer, Failure> {
    let mut first = None;
    let mut answer = String::new();
    for event in generation {
        match event? {
            Event::Accepted { .. } => {}
            Event::Tokens(_) => {
                first.get_or_insert_with(|| began.elapsed().as_secs_f64());
            }
            Event::Text(text) => {
                answer.push_str(&text);
                show(&text)?;
            }
            Event::Done { reason, usage } => {
                return Ok(Answer { text: answer, reason, usage, seconds: (first, began.elapsed().as_secs_f64()) });
            }
        }
    }
    Err(Failure::new(FAILED, "the answer broke off").hint("the daemon may have been stopped: see `llmctl status`"))
}

fn prompt(argument: Option<&str>) -> Result<String, Failure> {
    match argument {
        Some(text) if text != "-" => Ok(text.to_owned()),
        None if std::io::stdin().is_terminal() => {
            Err(Failure::new(USAGE, "there is no prompt").hint("llmctl generate \"Why is the sky blue?\""))
        }
        _ => read_prompt(std::io::stdin().lock(), PROMPT_BYTES_MAX),
    }
}

fn read_prompt(input: impl Read, limit: u64) -> Result<String, Failure> {
    let mut text = String::new();
    input
        .take(limit + 1)
        .read_to_string(&mut text)
        .map_err(|e| Failure::new(FAILED, format!("cannot read the prompt from standard input: {e}")))?;
    if text.len() as u64 > limit {
        return Err(Failure::new(USAGE, format!("the prompt on standard input is longer than {limit} bytes")));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }

    #[test]
    fn without_flags_the_protocols_defaults_hold() {
        let line = Line::parse_from(["x", "hello"]);
        assert_eq!(SamplingParams::from(&line.arguments.sampling), SamplingParams::default());
    }

    #[test]
    fn flags_reach_the_request() {
        let line = Line::parse_from([
            "x",
            "--max-tokens",
            "7",
            "--temperature",
            "0.7",
            "--top-p",
            "0.9",
            "--presence-penalty",
            "-0.5",
            "--stop",
            "a",
            "--stop",
            "b",
            "--seed",
            "3",
            "hello",
        ]);
        let sampling = SamplingParams::from(&line.arguments.sampling);
        assert_eq!((sampling.max_tokens, sampling.temperature, sampling.top_p), (7, 0.7, 0.9));
        assert_eq!((sampling.presence_penalty, sampling.seed), (-0.5, Some(3)));
        assert_eq!(sampling.stop, ["a", "b"]);
        assert_eq!(prompt(line.arguments.prompt.as_deref()).unwrap(), "hello");
        assert!(Line::try_parse_from(["x", "--raw", "--system", "s", "p"]).is_err());
    }

    #[test]
    fn a_piped_prompt_has_an_end_and_is_text() {
        assert_eq!(read_prompt("four".as_bytes(), 4).unwrap(), "four");
        assert_eq!(read_prompt("fiver".as_bytes(), 4).unwrap_err().code, USAGE);
        assert_eq!(read_prompt(&b"\xff"[..], 4).unwrap_err().code, FAILED);
    }

    #[test]
    fn the_names_in_json_are_stable() {
        let answer = Answer {
            text: "Paris".into(),
            reason: FinishReason::Stop,
            usage: Usage { prompt_tokens: 9, cached_tokens: 0, output_tokens: 2 },
            seconds: (Some(0.5), 0.75),
        };
        let expected = json!({
            "text": "Paris", "finish_reason": "stop", "ttft_ms": 500.0, "duration_ms": 750.0,
            "usage": {"prompt_tokens": 9, "cached_tokens": 0, "output_tokens": 2},
        });
        assert_eq!(answer.json(), expected);
    }
}
