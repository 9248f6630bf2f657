//! Streaming HTTP to llama.cpp's server and to vLLM's, made to look like an answer of ours.

use llmd_protocol::message::{FinishReason, GenerateRequest, Prompt, Usage};
use llmd_tests::load::Answer;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::time::{Duration, Instant};

/// How long one request may take.
const REQUEST_LIMIT: Duration = Duration::from_secs(600);

/// Whose language is spoken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// llama-server's own `/completion`.
    Llama,
    /// OpenAI's `/v1/completions`, with what vLLM adds to it.
    OpenAi,
}

impl Dialect {
    fn path(self) -> &'static str {
        match self {
            Dialect::Llama => "/completion",
            Dialect::OpenAi => "/v1/completions",
        }
    }

    fn body(self, prompt: &[u32], tokens: u32) -> Value {
        match self {
            Dialect::Llama => json!({
                "prompt": prompt, "n_predict": tokens, "stream": true, "temperature": 0, "ignore_eos": true,
                "cache_prompt": false,
            }),
            Dialect::OpenAi => json!({
                "model": MODEL_NAME, "prompt": prompt, "max_tokens": tokens, "stream": true, "temperature": 0,
                "ignore_eos": true, "stream_options": {"include_usage": true, "continuous_usage_stats": true},
            }),
        }
    }

    /// Tokens of the prompt and tokens written so far, if the event says.
    fn counts(self, event: &Value) -> Option<(u32, u32)> {
        let (prompt, written) = match self {
            Dialect::Llama => (&event["tokens_evaluated"], &event["tokens_predicted"]),
            Dialect::OpenAi => (&event["usage"]["prompt_tokens"], &event["usage"]["completion_tokens"]),
        };
        Some((number(prompt)?, number(written)?))
    }

    /// Tokens of the prompt that were not computed, if the event says; vLLM says so only where it caches.
    fn cached(self, event: &Value) -> Option<u32> {
        number(match self {
            Dialect::Llama => &event["timings"]["cache_n"],
            Dialect::OpenAi => &event["usage"]["prompt_tokens_details"]["cached_tokens"],
        })
    }

    /// Why the answer ended, if the event says.
    fn reason(self, event: &Value) -> Option<FinishReason> {
        let (reason, limit) = match self {
            Dialect::Llama => (&event["stop_type"], "limit"),
            Dialect::OpenAi => (&event["choices"][0]["finish_reason"], "length"),
        };
        match reason.as_str()? {
            "none" => None,
            reason if reason == limit => Some(FinishReason::Length),
            _ => Some(FinishReason::Stop),
        }
    }
}

fn number(value: &Value) -> Option<u32> {
    u32::try_from(value.as_u64()?).ok()
}

/// What servers of the OpenAI kind are told to call their model.
pub const MODEL_NAME: &str = "model";

/// A way to a server. Each request has a connection of its own: a server may close one that waits at the very moment in
/// which the next request goes out on it.
pub struct Connection {
    agent: ureq::Agent,
    url: String,
    dialect: Dialect,
}

impl Connection {
    /// To 127.0.0.1.
    pub fn new(port: u16, dialect: Dialect) -> Self {
        let agent =
            ureq::Agent::config_builder().timeout_global(Some(REQUEST_LIMIT)).max_idle_connections(0).build().into();
        Self { agent, url: format!("http://127.0.0.1:{port}"), dialect }
    }

    /// Whether the server says it is ready.
    pub fn is_ready(&self) -> bool {
        self.agent.get(format!("{}/health", self.url)).call().is_ok()
    }

    /// Submits `request` and reads its answer to the end.
    pub fn answer(&self, request: &GenerateRequest) -> Result<Answer, String> {
        let Prompt::Tokens(prompt) = &request.prompt else {
            return Err("only prompts of ids are the same for every server".into());
        };
        let body = self.dialect.body(prompt, request.sampling.max_tokens).to_string();
        let begun = Instant::now();
        let response = self
            .agent
            .post(format!("{}{}", self.url, self.dialect.path()))
            .header("Content-Type", "application/json")
            .send(body)
            .map_err(|error| error.to_string())?;
        read_answer(BufReader::new(response.into_body().into_reader()), self.dialect, begun)
    }
}

/// Reads server-sent events up to their end.
fn read_answer(events: impl BufRead, dialect: Dialect, begun: Instant) -> Result<Answer, String> {
    let mut usage = Usage { prompt_tokens: 0, cached_tokens: 0, output_tokens: 0 };
    let mut token_times = Vec::new();
    let mut reason = None;
    for line in events.lines() {
        let line = line.map_err(|error| format!("the stream broke: {error}"))?;
        let Some(data) = line.strip_prefix("data:").map(str::trim).filter(|data| *data != "[DONE]") else {
            if line.starts_with("error:") {
                return Err(line);
            }
            continue;
        };
        let event: Value = serde_json::from_str(data).map_err(|error| format!("{error} in {data}"))?;
        if event.get("error").is_some_and(|error| !error.is_null()) {
            return Err(data.to_owned());
        }
        usage.cached_tokens = dialect.cached(&event).unwrap_or(usage.cached_tokens);
        reason = dialect.reason(&event).or(reason);
        if let Some((prompt, written)) = dialect.counts(&event) {
            usage.prompt_tokens = prompt;
            usage.output_tokens = written;
            token_times.resize(token_times.len().max(written as usize), begun.elapsed());
        }
    }
    // Only their number is known: the servers send text.
    let tokens = vec![0; usage.output_tokens as usize];
    let reason = reason.ok_or("the stream ended without a reason")?;
    Ok(Answer { tokens, text: String::new(), reason, usage, token_times, total: begun.elapsed() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_counted_by_what_the_server_counts() {
        let llama = "data: {\"content\":\"a\",\"tokens_evaluated\":5,\"tokens_predicted\":1}\n\n\
                     data: {\"content\":\"bc\",\"tokens_evaluated\":5,\"tokens_predicted\":3}\n\n\
                     data: {\"content\":\"\",\"stop\":true,\"tokens_evaluated\":5,\"tokens_predicted\":3,\
                     \"stop_type\":\"limit\",\"timings\":{\"cache_n\":2}}\n\n";
        let answer = read_answer(llama.as_bytes(), Dialect::Llama, Instant::now()).unwrap();
        assert_eq!((answer.usage.prompt_tokens, answer.tokens.len(), answer.token_times.len()), (5, 3, 3));
        assert_eq!(answer.token_times[1], answer.token_times[2], "two that came at once");
        assert_eq!((answer.usage.cached_tokens, answer.reason), (2, FinishReason::Length));

        let openai = "data: {\"choices\":[{\"text\":\"\",\"finish_reason\":\"length\"}],\"usage\":{\"prompt_tokens\":4,\"completion_tokens\":1}}\n\n\
                      data: {\"choices\":[],\"usage\":{\"prompt_tokens\":4,\"completion_tokens\":2}}\n\ndata: [DONE]\n\n";
        let answer = read_answer(openai.as_bytes(), Dialect::OpenAi, Instant::now()).unwrap();
        assert_eq!((answer.usage.prompt_tokens, answer.token_times.len()), (4, 2));
    }

    #[test]
    fn errors_are_told() {
        let read = |text: &str| read_answer(text.as_bytes(), Dialect::Llama, Instant::now());
        assert!(read("data: {\"error\":{\"message\":\"full\"}}\n\n").unwrap_err().contains("full"));
        assert!(read("data: {not JSON\n\n").is_err());
        assert!(read("data: {\"content\":\"a\",\"stop_type\":\"none\"}\n\n").unwrap_err().contains("reason"));
    }
}
