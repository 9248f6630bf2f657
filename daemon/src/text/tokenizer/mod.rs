//! Text to token ids, and each id's bytes, for the two kinds of vocabulary GGUF files hold: byte-level BPE ("gpt2")
//! and SentencePiece BPE with byte fallback ("llama").
//!
//! Special tokens in text. Tokens of type control, unknown and user-defined have texts of their own (`<|im_end|>`), and
//! a text that contains one of them gets its id: [`Tokenizer::encode`] is meant for prompts written by someone who may
//! say so, as is usual for plain completion. The contents of chat messages come from anyone, so they go through
//! [`Tokenizer::shield_control`] and [`Tokenizer::encode_shielded`] (`ChatTemplate::encode` does both): there only the
//! template's own text yields control and unknown tokens, and the same letters in a message are plain text.
//! User-defined tokens (such as `<think>`) carry no authority and are found everywhere.
//!
//! Work and memory grow with the text's length n as n log n at worst, whatever the text: pre-tokenization is an
//! automaton without backtracking, merging takes the best pair from a heap. Around 150 bytes are held for each byte of
//! the longest word while it is merged (the whole stretch between special tokens for "llama"), so whoever takes texts
//! from clients bounds their length; [`Tokenizer::token_bytes_max`] helps.

mod build;
mod special;

use std::borrow::Cow;

use tokenizers::models::bpe::BPE;
use tokenizers::{Model, NormalizedString};

use crate::text::pretokenize::{Splitter, byte_level};
pub use build::TokenizerError;
use special::SpecialTokens;

/// Most tokens a vocabulary may have; the largest in use have about 260,000.
pub const VOCABULARY_MAX: usize = 1 << 21;
/// Longest text of one token in bytes; the longest in use are runs of a few hundred spaces.
pub const TOKEN_BYTES_MAX: usize = 4096;

/// What a token is for: `tokenizer.ggml.token_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TokenType {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

/// The two kinds of vocabulary.
#[derive(Debug)]
enum Scheme {
    /// Words of letters that stand for bytes. `compose`: Unicode NFC comes first.
    ByteLevel { splitter: Splitter, compose: bool },
    /// "▁" for spaces, no words. `space_prefix`: a space is put before the text and after each special token.
    SentencePiece { space_prefix: bool },
}

/// A model's tokenizer. Immutable; every thread may use one at a time or all at once.
#[derive(Debug)]
pub struct Tokenizer {
    scheme: Scheme,
    bpe: BPE,
    special: SpecialTokens,
    types: Vec<TokenType>,
    /// Bytes of all tokens one after another; token i has `token_bytes[starts[i]..starts[i + 1]]`.
    token_bytes: Vec<u8>,
    starts: Vec<u32>,
    bos: Option<u32>,
    eos: Option<u32>,
    add_bos: bool,
    add_eos: bool,
    eos_ids: Vec<u32>,
    bos_text: String,
    eos_text: String,
}

impl Tokenizer {
    /// Ids of `text`; special tokens in it are found. `add_special` puts BOS in front and EOS at the end where the model
    /// wants them (a text that already begins with the text of BOS then has two).
    ///
    /// Bytes that neither the vocabulary nor its byte fallback nor its unknown token covers are left out, as the
    /// models' own tokenizers do; some vocabularies lack rare control bytes.
    pub fn encode(&self, text: &str, add_special: bool) -> Vec<u32> {
        let mut ids = Vec::with_capacity(text.len() / 3 + 2);
        if add_special && self.add_bos {
            ids.extend(self.bos);
        }
        self.encode_into(text, false, &mut ids);
        if add_special && self.add_eos {
            ids.extend(self.eos);
        }
        ids
    }

    /// Marks the texts of control and unknown tokens in `content`, so that [`Self::encode_shielded`] takes them for
    /// plain text. The mark is a noncharacter behind the first character of each; it passes through a template unseen.
    pub fn shield_control<'t>(&self, content: &'t str) -> Cow<'t, str> {
        self.special.shield(content)
    }

    /// Ids of a text whose untrusted parts went through [`Self::shield_control`]; adds neither BOS nor EOS, for a chat
    /// template writes these itself.
    pub fn encode_shielded(&self, text: &str) -> Vec<u32> {
        let mut ids = Vec::with_capacity(text.len() / 3 + 1);
        self.encode_into(text, true, &mut ids);
        ids
    }

    fn encode_into(&self, text: &str, shielded: bool, ids: &mut Vec<u32>) {
        let mut start = 0;
        for (range, id) in self.special.find_iter(text) {
            self.encode_plain(&text[start..range.start], shielded, ids);
            ids.push(id);
            start = range.end;
        }
        self.encode_plain(&text[start..], shielded, ids);
    }

    /// A stretch without special tokens: it begins at the text's start or behind a special token.
    fn encode_plain(&self, text: &str, shielded: bool, ids: &mut Vec<u32>) {
        let text = if shielded { special::unshield(text) } else { Cow::Borrowed(text) };
        if text.is_empty() {
            return;
        }
        match &self.scheme {
            Scheme::ByteLevel { splitter, compose } => {
                let text = if *compose { composed(text) } else { text };
                let mut letters = String::new();
                splitter.split(&text, |word| {
                    letters.clear();
                    byte_level::push_letters(word.as_bytes(), &mut letters);
                    self.merge(&letters, ids);
                });
            }
            Scheme::SentencePiece { space_prefix } => {
                let spaced = text.replace(' ', "▁");
                let whole = if *space_prefix { format!("▁{spaced}") } else { spaced };
                self.merge(&whole, ids);
            }
        }
    }

    fn merge(&self, word: &str, ids: &mut Vec<u32>) {
        match self.bpe.tokenize(word) {
            Ok(tokens) => ids.extend(tokens.iter().map(|token| token.id)),
            // The one error there is: the unknown token is not in the vocabulary. `build` puts it there.
            Err(error) => debug_assert!(false, "byte-pair merging failed: {error}"),
        }
    }

    /// What a token adds to the text: raw bytes, not always whole characters. Empty for control, unknown and unused
    /// tokens and for ids outside the vocabulary.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        let id = id as usize;
        if id >= self.types.len() {
            return &[];
        }
        &self.token_bytes[self.starts[id] as usize..self.starts[id + 1] as usize]
    }

    /// The whole text of `ids` as it stands at the start of a text: what the stream of the same ids adds up to. Bytes
    /// that are not UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> String {
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| self.token_bytes(id)).copied().collect();
        let bytes = match bytes.split_first() {
            Some((b' ', rest)) if self.drops_space_after(None) => rest,
            _ => &bytes[..],
        };
        String::from_utf8_lossy(bytes).into_owned()
    }

    /// Whether one space at the start of what follows the token `previous` (None: nothing) is an artefact of the
    /// encoding and not text: [`Self::encode`] puts it there.
    pub fn drops_space_after(&self, previous: Option<u32>) -> bool {
        matches!(self.scheme, Scheme::SentencePiece { space_prefix: true })
            && previous.is_none_or(|id| self.is_special(id))
    }

    /// Whether `id` is a control or unknown token: it steers, and has no text.
    pub fn is_special(&self, id: u32) -> bool {
        matches!(self.types.get(id as usize), Some(TokenType::Control | TokenType::Unknown))
    }

    /// How many ids there are.
    pub fn vocab_size(&self) -> usize {
        self.types.len()
    }

    /// Longest text of one token in bytes: a text of n bytes has at least n / this many tokens (but for bytes left out,
    /// see [`Self::encode`], and Unicode composition, which shortens a text to a third at most).
    pub fn token_bytes_max(&self) -> usize {
        self.starts.windows(2).map(|w| (w[1] - w[0]) as usize).max().unwrap_or(0)
    }

    /// Ids that end a generation: EOS, end of turn, and control tokens known by name to mean one of them; ascending.
    pub fn eos_ids(&self) -> &[u32] {
        &self.eos_ids
    }

    /// The token texts begin with, if the model has one (whether `encode` adds it is another matter).
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// BOS as a chat template writes it; empty if there is none.
    pub fn bos_text(&self) -> &str {
        &self.bos_text
    }

    /// EOS as a chat template writes it; empty if there is none.
    pub fn eos_text(&self) -> &str {
        &self.eos_text
    }
}

/// `text` after Unicode composition (NFC).
fn composed(text: Cow<'_, str>) -> Cow<'_, str> {
    // A text made of these alone is composed already: Latin-1 and the like below the first combining mark, Han, Hangul
    // syllables, and most emoji. Only other texts pay for normalization.
    let stable = |c: char| matches!(c, '\0'..='\u{2ff}' | '\u{3400}'..='\u{9fff}' | '\u{ac00}'..='\u{d7a3}' | '\u{1f300}'..='\u{1faff}');
    if text.chars().all(stable) {
        return text;
    }
    let mut normalized = NormalizedString::from(text.as_ref());
    normalized.nfc();
    Cow::Owned(normalized.get().to_owned())
}

#[cfg(test)]
mod tests;
