//! What a client may ask and what the daemon may answer.
//!
//! A [`GenerateRequest`] travels as one encoded payload in the client's arena: a sequence of fields
//! `{tag u16, flags u16, len u32, bytes padded to 8}`, little-endian. An unknown tag whose REQUIRED flag is set is
//! refused, an unknown optional one is skipped, so the message can grow and a client in another language can write it.
//! Answers travel as fixed completion slots; see `layout.rs`.

use std::fmt;

use crate::limits;

/// Who said a message of a chat, in the words chat templates use ("system", "user", "assistant", "tool").
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatMessage {
    /// The role's name, handed to the chat template as it is.
    pub role: String,
    /// The text of the message.
    pub content: String,
}

/// What the model continues.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt {
    /// Plain text; the daemon tokenizes it and adds BOS where the model's tokenizer says so.
    Text(String),
    /// Token ids, taken as they are; each must be below the vocabulary's size.
    Tokens(Vec<u32>),
    /// A chat, rendered through the model's own template with the generation prompt appended.
    Chat(Vec<ChatMessage>),
}

/// How the next token is chosen and when the generation ends.
///
/// Order of application: repetition, presence and frequency penalty on the logits; temperature; top-k; top-p; min-p;
/// then one draw. `temperature = 0` is greedy and ignores top-k, top-p, min-p and the seed.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits; 0 is greedy. Range 0..=100.
    pub temperature: f32,
    /// Keep the `k` most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set of tokens whose probabilities sum to at least this. Range (0, 1]; 1 keeps all.
    pub top_p: f32,
    /// Drop tokens less likely than this times the most likely one. Range [0, 1]; 0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens seen in prompt or output. Range (0, 10]; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted once from the logit of each token seen in the output. Range -10..=10; 0 is off.
    pub presence_penalty: f32,
    /// Subtracted once per occurrence in the output. Range -10..=10; 0 is off.
    pub frequency_penalty: f32,
    /// Seed of the draw. None lets the daemon choose one.
    pub seed: Option<u64>,
    /// Most tokens to generate; 0 only reads the prompt and ends with `Length`.
    pub max_tokens: u32,
    /// Tokens before which neither end-of-sequence nor a stop id may be sampled, nor a stop string end the generation.
    pub min_tokens: u32,
    /// Token ids that end the generation; their text is not sent.
    pub stop_token_ids: Vec<u32>,
    /// Strings that end the generation; the text is cut before the first one that appears.
    pub stop: Vec<String>,
    /// Go on after the model's end-of-sequence tokens.
    pub ignore_eos: bool,
}

impl Default for SamplingParams {
    /// Greedy, at most 256 tokens, nothing else switched on.
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: None,
            max_tokens: 256,
            min_tokens: 0,
            stop_token_ids: Vec::new(),
            stop: Vec::new(),
            ignore_eos: false,
        }
    }
}

/// One request for text.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerateRequest {
    /// What the model continues.
    pub prompt: Prompt,
    /// How it continues.
    pub sampling: SamplingParams,
}

impl GenerateRequest {
    /// A request with these words as its prompt and the default sampling.
    pub fn text(prompt: impl Into<String>) -> Self {
        Self { prompt: Prompt::Text(prompt.into()), sampling: SamplingParams::default() }
    }

    /// A request for the next answer in this chat, with the default sampling.
    pub fn chat(messages: Vec<ChatMessage>) -> Self {
        Self { prompt: Prompt::Chat(messages), sampling: SamplingParams::default() }
    }

    /// The same request with `max_tokens`.
    pub fn max_tokens(mut self, max_tokens: u32) -> Self {
        self.sampling.max_tokens = max_tokens;
        self
    }

    /// Checks every range that does not depend on the model. The client asks before it sends, the daemon before it
    /// believes.
    pub fn validate(&self) -> Result<(), InvalidParameter> {
        match &self.prompt {
            Prompt::Text(_) | Prompt::Tokens(_) => {}
            Prompt::Chat(messages) => {
                check("messages", (1..=limits::CHAT_MESSAGES_MAX).contains(&messages.len()), "1..=4096 messages")?;
                let roles_fit = messages.iter().all(|m| (1..=limits::CHAT_ROLE_BYTES_MAX).contains(&m.role.len()));
                check("messages.role", roles_fit, "a name of 1..=64 bytes")?;
            }
        }
        self.sampling.validate()
    }
}

impl SamplingParams {
    /// Checks every range that does not depend on the model.
    pub fn validate(&self) -> Result<(), InvalidParameter> {
        // A NaN is in no range, so each of these refuses it.
        check("temperature", (0.0..=limits::TEMPERATURE_MAX).contains(&self.temperature), "a number in 0..=100")?;
        check("top_p", self.top_p > 0.0 && self.top_p <= 1.0, "a number above 0 and at most 1")?;
        check("min_p", (0.0..=1.0).contains(&self.min_p), "a number in 0..=1")?;
        let repetition = self.repetition_penalty;
        let fits = repetition > 0.0 && repetition <= limits::REPETITION_PENALTY_MAX;
        check("repetition_penalty", fits, "a number above 0 and at most 10")?;
        let penalty = -limits::PENALTY_ABS_MAX..=limits::PENALTY_ABS_MAX;
        check("presence_penalty", penalty.contains(&self.presence_penalty), "a number in -10..=10")?;
        check("frequency_penalty", penalty.contains(&self.frequency_penalty), "a number in -10..=10")?;
        check("max_tokens", self.max_tokens <= limits::OUTPUT_TOKENS_MAX, "at most 16777216")?;
        check("min_tokens", self.min_tokens <= self.max_tokens, "at most max_tokens")?;
        check("stop_token_ids", self.stop_token_ids.len() <= limits::STOP_TOKEN_IDS_MAX, "at most 128 ids")?;
        check("stop", self.stop.len() <= limits::STOP_STRINGS_MAX, "at most 16 strings")?;
        let strings_fit = self.stop.iter().all(|s| (1..=limits::STOP_STRING_BYTES_MAX).contains(&s.len()));
        check("stop", strings_fit, "strings of 1..=256 bytes")
    }
}

fn check(field: &'static str, holds: bool, rule: &'static str) -> Result<(), InvalidParameter> {
    if holds { Ok(()) } else { Err(InvalidParameter { field, rule }) }
}

/// A parameter outside its range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{field} must be {rule}")]
pub struct InvalidParameter {
    /// The field's name, as in [`SamplingParams`].
    pub field: &'static str,
    /// What it must be.
    pub rule: &'static str,
}

// The rules are spelled out in words above; this is where the words would go wrong.
const _: () = {
    assert!(limits::CHAT_MESSAGES_MAX == 4096 && limits::CHAT_ROLE_BYTES_MAX == 64);
    assert!(limits::TEMPERATURE_MAX == 100.0 && limits::REPETITION_PENALTY_MAX == 10.0);
    assert!(limits::PENALTY_ABS_MAX == 10.0 && limits::OUTPUT_TOKENS_MAX == 16_777_216);
    assert!(limits::STOP_TOKEN_IDS_MAX == 128 && limits::STOP_STRINGS_MAX == 16);
    assert!(limits::STOP_STRING_BYTES_MAX == 256);
};

/// Why a generation ended well.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum FinishReason {
    /// The model's end-of-sequence token, or one of `stop_token_ids`.
    Stop = 1,
    /// One of the `stop` strings appeared.
    StopString = 2,
    /// `max_tokens` or the model's context length was reached.
    Length = 3,
    /// The client cancelled it.
    Cancelled = 4,
}

/// Why a request ended without an answer. Stable numbers: they travel in the `aux` word of an ERROR slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Reject {
    /// The payload could not be decoded, or a text was not UTF-8.
    Malformed = 1,
    /// A parameter is outside its range; the ERROR record's text names the field.
    InvalidParameter = 2,
    /// A token id is not below the vocabulary's size.
    TokenOutOfVocabulary = 3,
    /// Prompt plus one token can never fit the context or the cache.
    NeverFits = 4,
    /// The prompt has no tokens and the model no BOS to stand in for them.
    EmptyPrompt = 5,
    /// Too many requests of this session or this daemon are in flight or queued; try again later.
    Busy = 6,
    /// The daemon is draining.
    Draining = 7,
    /// The model has no chat template, or it failed on these messages.
    ChatTemplate = 8,
    /// The client left completions unread for too long.
    SlowReader = 9,
    /// The key-value cache is exhausted and even the oldest sequence could not go on.
    KvExhausted = 10,
    /// A fault of the daemon's own; its log has the details.
    Internal = 11,
}

impl FinishReason {
    /// The word for it in metrics, logs and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::StopString => "stop_string",
            Self::Length => "length",
            Self::Cancelled => "cancelled",
        }
    }

    /// The number that travels.
    pub fn number(self) -> u8 {
        self as u8
    }

    /// The reason of a number; None for a number of a later version.
    pub fn from_number(number: u8) -> Option<Self> {
        [Self::Stop, Self::StopString, Self::Length, Self::Cancelled].into_iter().find(|r| r.number() == number)
    }
}

impl fmt::Display for FinishReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Reject {
    /// Every reason there is.
    pub const ALL: [Self; 11] = [
        Self::Malformed,
        Self::InvalidParameter,
        Self::TokenOutOfVocabulary,
        Self::NeverFits,
        Self::EmptyPrompt,
        Self::Busy,
        Self::Draining,
        Self::ChatTemplate,
        Self::SlowReader,
        Self::KvExhausted,
        Self::Internal,
    ];

    /// The number that travels.
    pub fn number(self) -> u32 {
        self as u32
    }

    /// The reason of a number; None for a number of a later version.
    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|r| r.number() == number)
    }

    /// Its name in metrics, logs and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Malformed => "malformed",
            Self::InvalidParameter => "invalid_parameter",
            Self::TokenOutOfVocabulary => "token_out_of_vocabulary",
            Self::NeverFits => "never_fits",
            Self::EmptyPrompt => "empty_prompt",
            Self::Busy => "busy",
            Self::Draining => "draining",
            Self::ChatTemplate => "chat_template",
            Self::SlowReader => "slow_reader",
            Self::KvExhausted => "kv_exhausted",
            Self::Internal => "internal",
        }
    }
}

impl fmt::Display for Reject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a finished request used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Tokens of the prompt after templating and tokenizing.
    pub prompt_tokens: u32,
    /// Of these, tokens found in the prefix cache.
    pub cached_tokens: u32,
    /// Tokens generated.
    pub output_tokens: u32,
}
