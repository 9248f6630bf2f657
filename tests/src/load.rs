//! Requests of mixed lengths from a seed, and whole answers to them.

use crate::tiny_model::{Random, VOCABULARY};
use llmd_client::{Client, Error, Event};
use llmd_protocol::message::{FinishReason, GenerateRequest, Prompt, SamplingParams, Usage};
use serde::{Deserialize, Serialize};
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

/// A request's whole answer, and when its tokens came.
#[derive(Debug, Clone)]
pub struct Answer {
    /// Ids, in order.
    pub tokens: Vec<u32>,
    /// All text.
    pub text: String,
    /// Why it ended.
    pub reason: FinishReason,
    /// What it used.
    pub usage: Usage,
    /// For each token, how long after the submission it was read.
    pub token_times: Vec<Duration>,
    /// From the submission to the terminal record.
    pub total: Duration,
}

/// Submits `request` and reads its answer to the end. An answer that ends without its terminal record is a panic: the
/// library promises one or an error.
pub fn answer(client: &Client, request: GenerateRequest) -> Result<Answer, Error> {
    let begun = Instant::now();
    let (mut tokens, mut text, mut token_times) = (Vec::new(), String::new(), Vec::new());
    for event in client.generate(request)? {
        match event? {
            Event::Accepted { .. } => {}
            Event::Tokens(ids) => {
                token_times.resize(token_times.len() + ids.len(), begun.elapsed());
                tokens.extend_from_slice(&ids);
            }
            Event::Text(piece) => text.push_str(&piece),
            Event::Done { reason, usage } => {
                return Ok(Answer { tokens, text, reason, usage, token_times, total: begun.elapsed() });
            }
        }
    }
    panic!("the stream ended without a terminal record after {} tokens", tokens.len());
}

/// Requests of mixed lengths. The same seed and number make the same request.
#[derive(Debug, Clone)]
pub struct Mix {
    /// Another seed, other requests.
    pub seed: u64,
    /// Tokens in a prompt.
    pub prompt_tokens: RangeInclusive<u32>,
    /// Tokens generated, whatever the model says.
    pub output_tokens: RangeInclusive<u32>,
    /// Prompts are made of ids in this range.
    pub ids: RangeInclusive<u32>,
    /// 0 is greedy.
    pub temperature: f32,
}

impl Mix {
    /// For the tiny model: any ids but the special ones.
    pub fn tiny(seed: u64, prompt_tokens: RangeInclusive<u32>, output_tokens: RangeInclusive<u32>) -> Self {
        Self { seed, prompt_tokens, output_tokens, ids: 3..=VOCABULARY as u32 - 1, temperature: 0.0 }
    }

    /// Request number `number`.
    pub fn request(&self, number: u64) -> GenerateRequest {
        let mut random = Random(self.seed.wrapping_mul(1_000_003).wrapping_add(number));
        let mut within = |range: &RangeInclusive<u32>| random.between(*range.start(), *range.end());
        let prompt_tokens = within(&self.prompt_tokens);
        let max_tokens = within(&self.output_tokens);
        let prompt = (0..prompt_tokens).map(|_| within(&self.ids)).collect();
        GenerateRequest {
            prompt: Prompt::Tokens(prompt),
            sampling: SamplingParams {
                max_tokens,
                ignore_eos: true,
                temperature: self.temperature,
                seed: Some(self.seed ^ number),
                ..SamplingParams::default()
            },
        }
    }
}

/// What `client_process` prints for each request, one line of JSON.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq)]
pub struct Report {
    /// Which request of the mix.
    pub request: u64,
    /// Ids received.
    pub tokens: Vec<u32>,
    /// Why it ended, or the error.
    pub ended: String,
    /// Tokens of the prompt, as the daemon counted them.
    pub prompt_tokens: u32,
    /// Tokens generated, as the daemon counted them.
    pub output_tokens: u32,
    /// From the submission to the first token.
    pub first_token_ms: f64,
}

impl Report {
    /// Of an answer, or of an error.
    pub fn new(request: u64, answer: Result<Answer, Error>) -> Self {
        match answer {
            Ok(answer) => Self {
                request,
                ended: format!("{:?}", answer.reason),
                prompt_tokens: answer.usage.prompt_tokens,
                output_tokens: answer.usage.output_tokens,
                first_token_ms: answer.token_times.first().map_or(0.0, |time| time.as_secs_f64() * 1e3),
                tokens: answer.tokens,
            },
            Err(error) => Self {
                request,
                tokens: Vec::new(),
                ended: format!("error: {error}"),
                prompt_tokens: 0,
                output_tokens: 0,
                first_token_ms: 0.0,
            },
        }
    }
}
