//! What a client may ask and what the daemon may answer.
//!
//! A [`GenerateRequest`] travels as one encoded payload in the client's arena: a sequence of fields
//! `{tag u16, flags u16, len u32, bytes padded to 8}`, little-endian. An unknown tag whose REQUIRED flag is set is
//! refused, an unknown optional one is skipped, so the message can grow and a client in another language can write it.
//! Answers travel as fixed completion slots; see `layout.rs`.

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
    /// A request with this id is in flight on this session.
    DuplicateRequest = 8,
    /// The model has no chat template, or it failed on these messages.
    ChatTemplate = 9,
    /// The client left completions unread for too long.
    SlowReader = 10,
    /// The key-value cache is exhausted and even the oldest sequence could not go on.
    KvExhausted = 11,
    /// A fault of the daemon's own; its log has the details.
    Internal = 12,
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
