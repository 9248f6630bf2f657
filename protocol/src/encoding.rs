//! A [`GenerateRequest`] as bytes.
//!
//! A payload is a sequence of fields, each padded with zeros to a multiple of 8:
//!
//! ```text
//! tag u16 | flags u16 | len u32 | len bytes | 0..7 zeros
//!
//! tag  name                 bytes                                    how often
//!   1  PROMPT_TEXT          UTF-8                                    one prompt: a text, a list of ids,
//!   2  PROMPT_TOKENS        u32 ids                                  or one and more messages
//!   3  CHAT_MESSAGE         u32 length of role, role, content
//!  16  TEMPERATURE          f32                                      at most once each, default where absent
//!  17  TOP_K                u32
//!  18  TOP_P                f32
//!  19  MIN_P                f32
//!  20  REPETITION_PENALTY   f32
//!  21  PRESENCE_PENALTY     f32
//!  22  FREQUENCY_PENALTY    f32
//!  23  SEED                 u64
//!  24  MAX_TOKENS           u32
//!  25  MIN_TOKENS           u32
//!  26  STOP_TOKEN_IDS       u32 ids
//!  27  STOP                 UTF-8                                    once for each string
//!  28  IGNORE_EOS           u32, 0 or 1
//! ```
//! Bit 0 of the flags is REQUIRED: a reader that does not know the tag must refuse the request instead of skipping the
//! field. The other bits are 0. Fields come in any order; chat messages and stop strings keep theirs.
//! A decoded request has the right shape, not yet the right ranges: call [`GenerateRequest::validate`].

use crate::limits;
use crate::message::{ChatMessage, GenerateRequest, Prompt, SamplingParams};

const REQUIRED: u16 = 1;
const FIELD_HEADER_BYTES: usize = 8;

mod tag {
    pub const PROMPT_TEXT: u16 = 1;
    pub const PROMPT_TOKENS: u16 = 2;
    pub const CHAT_MESSAGE: u16 = 3;
    pub const TEMPERATURE: u16 = 16;
    pub const TOP_K: u16 = 17;
    pub const TOP_P: u16 = 18;
    pub const MIN_P: u16 = 19;
    pub const REPETITION_PENALTY: u16 = 20;
    pub const PRESENCE_PENALTY: u16 = 21;
    pub const FREQUENCY_PENALTY: u16 = 22;
    pub const SEED: u16 = 23;
    pub const MAX_TOKENS: u16 = 24;
    pub const MIN_TOKENS: u16 = 25;
    pub const STOP_TOKEN_IDS: u16 = 26;
    pub const STOP: u16 = 27;
    pub const IGNORE_EOS: u16 = 28;
}

/// Why bytes are no request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// Longer than [`limits::REQUEST_BYTES_MAX`].
    #[error("a request of {bytes} bytes is longer than {max}", max = limits::REQUEST_BYTES_MAX)]
    TooLong {
        /// Its length.
        bytes: usize,
    },
    /// A field's header or bytes end beyond the payload.
    #[error("the field at byte {at} ends beyond the payload")]
    Truncated {
        /// Where the field starts.
        at: usize,
    },
    /// A flag bit that must be 0, or padding that is not zero.
    #[error("the field at byte {at} has reserved bits set")]
    Reserved {
        /// Where the field starts.
        at: usize,
    },
    /// A required field of a tag this version does not know.
    #[error("field {tag} is required and unknown here")]
    UnknownRequired {
        /// The tag.
        tag: u16,
    },
    /// A second field of a tag that may come once, or a second kind of prompt.
    #[error("field {tag} comes twice")]
    Duplicate {
        /// The tag.
        tag: u16,
    },
    /// More messages, stop strings or ids than the limits allow.
    #[error("field {tag} comes too often or holds too much")]
    TooMany {
        /// The tag.
        tag: u16,
    },
    /// A field whose bytes do not have the form its tag asks for.
    #[error("field {tag} has a wrong length or value")]
    Form {
        /// The tag.
        tag: u16,
    },
    /// Text that is not UTF-8.
    #[error("field {tag} is not UTF-8")]
    Utf8 {
        /// The tag.
        tag: u16,
    },
    /// Nothing to continue.
    #[error("the request has no prompt")]
    NoPrompt,
}

/// The request is longer than [`limits::REQUEST_BYTES_MAX`] when encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the request takes {bytes} bytes; at most {max} are allowed", max = limits::REQUEST_BYTES_MAX)]
pub struct TooLong {
    /// What it would take.
    pub bytes: usize,
}

impl GenerateRequest {
    /// The request as bytes.
    pub fn encode(&self) -> Result<Vec<u8>, TooLong> {
        let mut out = Fields(Vec::new());
        match &self.prompt {
            Prompt::Text(text) => out.required(tag::PROMPT_TEXT, &[text.as_bytes()]),
            Prompt::Tokens(ids) => out.required(tag::PROMPT_TOKENS, &[&ids_bytes(ids)]),
            Prompt::Chat(messages) => {
                for m in messages {
                    let role_len = (m.role.len() as u32).to_le_bytes();
                    out.required(tag::CHAT_MESSAGE, &[&role_len, m.role.as_bytes(), m.content.as_bytes()]);
                }
            }
        }
        // Everything that changes the answer is REQUIRED: an older daemon must say so instead of ignoring it.
        let (s, default) = (&self.sampling, SamplingParams::default());
        let floats = [
            (tag::TEMPERATURE, s.temperature, default.temperature),
            (tag::TOP_P, s.top_p, default.top_p),
            (tag::MIN_P, s.min_p, default.min_p),
            (tag::REPETITION_PENALTY, s.repetition_penalty, default.repetition_penalty),
            (tag::PRESENCE_PENALTY, s.presence_penalty, default.presence_penalty),
            (tag::FREQUENCY_PENALTY, s.frequency_penalty, default.frequency_penalty),
        ];
        for (tag, value, default) in floats {
            if value.to_bits() != default.to_bits() {
                out.required(tag, &[&value.to_le_bytes()]);
            }
        }
        let words = [
            (tag::TOP_K, s.top_k, default.top_k),
            (tag::MAX_TOKENS, s.max_tokens, default.max_tokens),
            (tag::MIN_TOKENS, s.min_tokens, default.min_tokens),
            (tag::IGNORE_EOS, u32::from(s.ignore_eos), u32::from(default.ignore_eos)),
        ];
        for (tag, value, default) in words {
            if value != default {
                out.required(tag, &[&value.to_le_bytes()]);
            }
        }
        if let Some(seed) = s.seed {
            out.required(tag::SEED, &[&seed.to_le_bytes()]);
        }
        if !s.stop_token_ids.is_empty() {
            out.required(tag::STOP_TOKEN_IDS, &[&ids_bytes(&s.stop_token_ids)]);
        }
        for stop in &s.stop {
            out.required(tag::STOP, &[stop.as_bytes()]);
        }
        if out.0.len() > limits::REQUEST_BYTES_MAX {
            return Err(TooLong { bytes: out.0.len() });
        }
        Ok(out.0)
    }

    /// The request of bytes that may hold anything. Allocates no more than a small multiple of their length.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        if bytes.len() > limits::REQUEST_BYTES_MAX {
            return Err(DecodeError::TooLong { bytes: bytes.len() });
        }
        let mut prompt: Option<Prompt> = None;
        let mut sampling = SamplingParams::default();
        // Which tags below 64 have come, for those that may come once.
        let mut seen = 0u64;
        let mut at = 0;
        while at < bytes.len() {
            let Field { tag, required, value, next } = field_at(bytes, at)?;
            at = next;
            let known = (1..=3).contains(&tag) || (16..=28).contains(&tag);
            if !known {
                if required {
                    return Err(DecodeError::UnknownRequired { tag });
                }
                continue;
            }
            let repeats = matches!(tag, tag::CHAT_MESSAGE | tag::STOP);
            if !repeats && seen & 1 << tag != 0 {
                return Err(DecodeError::Duplicate { tag });
            }
            seen |= 1 << tag;
            match tag {
                tag::PROMPT_TEXT => only(&mut prompt, tag, Prompt::Text(utf8(tag, value)?))?,
                tag::PROMPT_TOKENS => only(&mut prompt, tag, Prompt::Tokens(ids(tag, value)?))?,
                tag::CHAT_MESSAGE => {
                    let message = chat_message(value)?;
                    match &mut prompt {
                        None => prompt = Some(Prompt::Chat(vec![message])),
                        Some(Prompt::Chat(messages)) if messages.len() < limits::CHAT_MESSAGES_MAX => {
                            messages.push(message);
                        }
                        Some(Prompt::Chat(_)) => return Err(DecodeError::TooMany { tag }),
                        Some(_) => return Err(DecodeError::Duplicate { tag }),
                    }
                }
                tag::TEMPERATURE => sampling.temperature = float(tag, value)?,
                tag::TOP_K => sampling.top_k = word(tag, value)?,
                tag::TOP_P => sampling.top_p = float(tag, value)?,
                tag::MIN_P => sampling.min_p = float(tag, value)?,
                tag::REPETITION_PENALTY => sampling.repetition_penalty = float(tag, value)?,
                tag::PRESENCE_PENALTY => sampling.presence_penalty = float(tag, value)?,
                tag::FREQUENCY_PENALTY => sampling.frequency_penalty = float(tag, value)?,
                tag::SEED => sampling.seed = Some(u64::from_le_bytes(fixed(tag, value)?)),
                tag::MAX_TOKENS => sampling.max_tokens = word(tag, value)?,
                tag::MIN_TOKENS => sampling.min_tokens = word(tag, value)?,
                tag::STOP_TOKEN_IDS if value.len() > limits::STOP_TOKEN_IDS_MAX * 4 => {
                    return Err(DecodeError::TooMany { tag });
                }
                tag::STOP_TOKEN_IDS => sampling.stop_token_ids = ids(tag, value)?,
                tag::STOP if sampling.stop.len() == limits::STOP_STRINGS_MAX => {
                    return Err(DecodeError::TooMany { tag });
                }
                tag::STOP => sampling.stop.push(utf8(tag, value)?),
                tag::IGNORE_EOS => {
                    sampling.ignore_eos = match word(tag, value)? {
                        0 => false,
                        1 => true,
                        _ => return Err(DecodeError::Form { tag }),
                    }
                }
                // `known` above is the same list.
                _ => return Err(DecodeError::UnknownRequired { tag }),
            }
        }
        Ok(Self { prompt: prompt.ok_or(DecodeError::NoPrompt)?, sampling })
    }
}

/// Fields being written.
struct Fields(Vec<u8>);

impl Fields {
    fn required(&mut self, tag: u16, parts: &[&[u8]]) {
        let len: usize = parts.iter().map(|p| p.len()).sum();
        self.0.extend_from_slice(&tag.to_le_bytes());
        self.0.extend_from_slice(&REQUIRED.to_le_bytes());
        // A length beyond u32 is far beyond REQUEST_BYTES_MAX, and the whole is refused by its caller.
        self.0.extend_from_slice(&(len as u32).to_le_bytes());
        parts.iter().for_each(|p| self.0.extend_from_slice(p));
        self.0.resize(self.0.len().next_multiple_of(8), 0);
    }
}

struct Field<'a> {
    tag: u16,
    required: bool,
    value: &'a [u8],
    next: usize,
}

fn field_at(bytes: &[u8], at: usize) -> Result<Field<'_>, DecodeError> {
    let truncated = DecodeError::Truncated { at };
    let (header, rest) = bytes[at..].split_first_chunk::<FIELD_HEADER_BYTES>().ok_or(truncated)?;
    let [t0, t1, f0, f1, len @ ..] = *header;
    let flags = u16::from_le_bytes([f0, f1]);
    let len = u32::from_le_bytes(len) as usize;
    let (value, behind) = rest.split_at_checked(len).ok_or(truncated)?;
    let padding = behind.get(..len.next_multiple_of(8) - len).ok_or(truncated)?;
    if flags & !REQUIRED != 0 || padding.iter().any(|&b| b != 0) {
        return Err(DecodeError::Reserved { at });
    }
    Ok(Field {
        tag: u16::from_le_bytes([t0, t1]),
        required: flags & REQUIRED != 0,
        value,
        next: at + FIELD_HEADER_BYTES + len + padding.len(),
    })
}

fn only(prompt: &mut Option<Prompt>, tag: u16, new: Prompt) -> Result<(), DecodeError> {
    if prompt.is_some() {
        return Err(DecodeError::Duplicate { tag });
    }
    *prompt = Some(new);
    Ok(())
}

fn chat_message(value: &[u8]) -> Result<ChatMessage, DecodeError> {
    let tag = tag::CHAT_MESSAGE;
    let (len, rest) = value.split_first_chunk::<4>().ok_or(DecodeError::Form { tag })?;
    let (role, content) = rest.split_at_checked(u32::from_le_bytes(*len) as usize).ok_or(DecodeError::Form { tag })?;
    Ok(ChatMessage { role: utf8(tag, role)?, content: utf8(tag, content)? })
}

fn utf8(tag: u16, value: &[u8]) -> Result<String, DecodeError> {
    std::str::from_utf8(value).map(str::to_owned).map_err(|_| DecodeError::Utf8 { tag })
}

fn ids(tag: u16, value: &[u8]) -> Result<Vec<u32>, DecodeError> {
    let (words, rest) = value.as_chunks::<4>();
    if !rest.is_empty() {
        return Err(DecodeError::Form { tag });
    }
    Ok(words.iter().map(|w| u32::from_le_bytes(*w)).collect())
}

fn ids_bytes(ids: &[u32]) -> Vec<u8> {
    ids.iter().flat_map(|id| id.to_le_bytes()).collect()
}

fn fixed<const N: usize>(tag: u16, value: &[u8]) -> Result<[u8; N], DecodeError> {
    value.try_into().map_err(|_| DecodeError::Form { tag })
}

fn word(tag: u16, value: &[u8]) -> Result<u32, DecodeError> {
    fixed(tag, value).map(u32::from_le_bytes)
}

fn float(tag: u16, value: &[u8]) -> Result<f32, DecodeError> {
    fixed(tag, value).map(f32::from_le_bytes)
}

#[cfg(all(test, not(loom)))]
mod tests;
