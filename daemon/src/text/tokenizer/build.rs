//! From a file's metadata to a tokenizer. Whatever the file says is checked here, once.

use std::collections::HashMap;

use tokenizers::models::bpe::{BPE, Vocab};

use super::special::SpecialTokens;
use super::{Scheme, TOKEN_BYTES_MAX, TokenType, Tokenizer, VOCABULARY_MAX};
use crate::text::pretokenize::{self, Pretokenizer, Splitter, byte_level};
use crate::text::source::TokenizerSource;

/// Names under which control tokens that end an answer go, besides those the file points out as EOS or EOT: models
/// tuned for chat end a turn with one and leave the base model's EOS in the metadata.
const END_NAMES: &[&str] = &[
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|eot|>",
    "<|end|>",
    "<|end_of_turn|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<end_of_turn>",
    "<eos>",
    "<EOT>",
    "</s>",
    "<｜end▁of▁sentence｜>",
];

/// Why a file's tokenizer can't be used.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum TokenizerError {
    /// `tokenizer.ggml.model` is of a kind that is not built in.
    #[error("tokenizer.ggml.model is {0:?}; known are \"gpt2\" and \"llama\"")]
    UnknownModel(String),
    /// `tokenizer.ggml.pre` names a pre-tokenizer that is not built in; taking another would give wrong ids silently.
    #[error("tokenizer.ggml.pre is {0:?}; known are {known}", known = known_pretokenizers())]
    UnknownPretokenizer(String),
    /// No tokens, or more than VOCABULARY_MAX.
    #[error("tokenizer.ggml.tokens has {0} entries; 1 to {VOCABULARY_MAX} are possible")]
    VocabularySize(usize),
    /// A list that goes with the tokens has another length than they.
    #[error("tokenizer.ggml.{field} has {len} entries, tokenizer.ggml.tokens has {tokens}")]
    Length {
        /// Which list.
        field: &'static str,
        /// Its length.
        len: usize,
        /// The vocabulary's size.
        tokens: usize,
    },
    /// The kind of tokenizer needs a list the file lacks.
    #[error("tokenizer.ggml.{0} is missing")]
    Missing(&'static str),
    /// A special token's id is outside the vocabulary.
    #[error("tokenizer.ggml.{field} is {id}, the vocabulary has {tokens} tokens")]
    IdOutOfRange {
        /// Which one.
        field: &'static str,
        /// What it says.
        id: u32,
        /// The vocabulary's size.
        tokens: usize,
    },
    /// One token is broken.
    #[error("token {id}: {what}")]
    Token {
        /// Which one.
        id: u32,
        /// What is wrong with it.
        what: &'static str,
    },
    /// One merge is broken.
    #[error("tokenizer.ggml.merges entry {index} ({merge:?}): {what}")]
    Merge {
        /// Its place in the list.
        index: usize,
        /// What it says.
        merge: String,
        /// What is wrong with it.
        what: &'static str,
    },
    /// BOS or EOS is to be added, but the file names none.
    #[error("tokenizer.ggml.{0} is true, but the file names no such token")]
    NothingToAdd(&'static str),
    /// A table is too large to build.
    #[error("the tokenizer can't be built: {0}")]
    TooLarge(String),
}

fn known_pretokenizers() -> String {
    pretokenize::NAMES.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
}

impl Tokenizer {
    /// Builds the tokenizer a file describes.
    ///
    /// BOS is added by default for "llama" and for the pre-tokenizer llama-bpe, EOS for none. "llama" files that name no
    /// unknown, BOS or EOS token mean ids 0, 1 and 2. Of tokens with the same text the first is used for encoding; each
    /// decodes. No plain text becomes a control, unknown or unused token by merging.
    pub fn build(source: &TokenizerSource) -> Result<Self, TokenizerError> {
        let tokens = source.tokens.len();
        if tokens == 0 || tokens > VOCABULARY_MAX {
            return Err(TokenizerError::VocabularySize(tokens));
        }
        let (scheme, pre) = scheme(source)?;
        let sentence_piece = matches!(scheme, Scheme::SentencePiece { .. });
        let named = named_ids(source, sentence_piece)?;
        let types = token_types(source, &named)?;
        let mut vocabulary = vocabulary(source, &types);
        let merges =
            if sentence_piece { merges_of_scores(source, &types)? } else { merges_of_file(source, &vocabulary)? };

        let mut bpe = BPE::builder().ignore_merges(pre == Some(Pretokenizer::LlamaBpe));
        if sentence_piece {
            bpe = bpe.byte_fallback(true).fuse_unk(true);
            if let Some(unk) = named.unk {
                let text = &source.tokens[unk as usize];
                vocabulary.entry(text.clone()).or_insert(unk);
                bpe = bpe.unk_token(text.clone());
            }
        }
        let bpe = bpe
            .vocab_and_merges(vocabulary, merges)
            .build()
            .map_err(|error| TokenizerError::TooLarge(error.to_string()))?;

        let (token_bytes, starts) = token_bytes(source, &types, sentence_piece)?;
        let add_bos =
            source.add_bos.unwrap_or(named.bos.is_some() && (sentence_piece || pre == Some(Pretokenizer::LlamaBpe)));
        let add_eos = source.add_eos.unwrap_or(false);
        if add_bos && named.bos.is_none() {
            return Err(TokenizerError::NothingToAdd("add_bos_token"));
        }
        if add_eos && named.eos.is_none() {
            return Err(TokenizerError::NothingToAdd("add_eos_token"));
        }
        let text_of = |id: Option<u32>| id.map_or(String::new(), |id| source.tokens[id as usize].clone());
        Ok(Self {
            special: special_tokens(source, &types, sentence_piece)?,
            eos_ids: end_ids(source, &types, &named),
            bos_text: text_of(named.bos),
            eos_text: text_of(named.eos),
            bos: named.bos,
            eos: named.eos,
            scheme,
            bpe,
            types,
            token_bytes,
            starts,
            add_bos,
            add_eos,
        })
    }
}

fn scheme(source: &TokenizerSource) -> Result<(Scheme, Option<Pretokenizer>), TokenizerError> {
    match source.model.as_str() {
        "gpt2" => {
            let name = source.pre.as_deref().unwrap_or("default");
            let pre =
                Pretokenizer::by_name(name).ok_or_else(|| TokenizerError::UnknownPretokenizer(name.to_owned()))?;
            let scheme = Scheme::ByteLevel { splitter: Splitter::new(pre), compose: pre == Pretokenizer::Qwen2 };
            Ok((scheme, Some(pre)))
        }
        "llama" => Ok((Scheme::SentencePiece { space_prefix: source.add_space_prefix.unwrap_or(true) }, None)),
        other => Err(TokenizerError::UnknownModel(other.to_owned())),
    }
}

/// Ids with a role, each inside the vocabulary.
struct NamedIds {
    bos: Option<u32>,
    eos: Option<u32>,
    eot: Option<u32>,
    unk: Option<u32>,
    pad: Option<u32>,
}

fn named_ids(source: &TokenizerSource, sentence_piece: bool) -> Result<NamedIds, TokenizerError> {
    let tokens = source.tokens.len();
    let check = |field, id: Option<u32>, usual: u32| match id {
        Some(id) if id as usize >= tokens => Err(TokenizerError::IdOutOfRange { field, id, tokens }),
        None if sentence_piece && (usual as usize) < tokens => Ok(Some(usual)),
        id => Ok(id),
    };
    Ok(NamedIds {
        bos: check("bos_token_id", source.bos, 1)?,
        eos: check("eos_token_id", source.eos, 2)?,
        eot: check("eot_token_id", source.eot, u32::MAX)?,
        unk: check("unknown_token_id", source.unk, 0)?,
        pad: check("padding_token_id", source.pad, u32::MAX)?,
    })
}

/// The type of each token. A file without types has normal tokens only, but for those with a role and, in "llama"
/// vocabularies, `<0xNN>`.
fn token_types(source: &TokenizerSource, named: &NamedIds) -> Result<Vec<TokenType>, TokenizerError> {
    let tokens = source.tokens.len();
    let mut types = Vec::with_capacity(tokens);
    if source.token_types.is_empty() {
        let byte = |text: &String| source.model == "llama" && byte_of(text).is_some();
        types.extend(source.tokens.iter().map(|text| if byte(text) { TokenType::Byte } else { TokenType::Normal }));
        for id in [named.bos, named.eos, named.eot, named.pad].into_iter().flatten() {
            types[id as usize] = TokenType::Control;
        }
        if let Some(unk) = named.unk {
            types[unk as usize] = TokenType::Unknown;
        }
        return Ok(types);
    }
    if source.token_types.len() != tokens {
        return Err(TokenizerError::Length { field: "token_type", len: source.token_types.len(), tokens });
    }
    for (id, number) in source.token_types.iter().enumerate() {
        types.push(match number {
            0 | 1 => TokenType::Normal,
            2 => TokenType::Unknown,
            3 => TokenType::Control,
            4 => TokenType::UserDefined,
            5 => TokenType::Unused,
            6 => TokenType::Byte,
            _ => {
                return Err(TokenizerError::Token { id: id as u32, what: "its type is none of 0 to 6" });
            }
        });
    }
    Ok(types)
}

/// The tokens that plain text may become.
fn vocabulary(source: &TokenizerSource, types: &[TokenType]) -> Vocab {
    let mut vocabulary = Vocab::with_capacity(types.len());
    for (id, (text, kind)) in source.tokens.iter().zip(types).enumerate() {
        if matches!(kind, TokenType::Normal | TokenType::UserDefined | TokenType::Byte) {
            vocabulary.entry(text.clone()).or_insert(id as u32);
        }
    }
    vocabulary
}

/// The merges of a byte-level vocabulary, in order of rank.
fn merges_of_file(source: &TokenizerSource, vocabulary: &Vocab) -> Result<Vec<(String, String)>, TokenizerError> {
    if source.merges.is_empty() && source.tokens.len() > 256 {
        return Err(TokenizerError::Missing("merges"));
    }
    let mut whole = String::new();
    source
        .merges
        .iter()
        .enumerate()
        .map(|(index, merge)| {
            let broken = |what| TokenizerError::Merge { index, merge: merge.clone(), what };
            let (left, right) = merge.split_once(' ').ok_or_else(|| broken("not two parts with a space between"))?;
            whole.clear();
            whole.push_str(left);
            whole.push_str(right);
            if ![left, right, &whole].iter().all(|part| vocabulary.contains_key(*part)) {
                return Err(broken("a part or the whole is not a normal token of the vocabulary"));
            }
            Ok((left.to_owned(), right.to_owned()))
        })
        .collect()
}

/// The merges that SentencePiece's scores imply: every way to put a piece together from two others, the piece with the
/// highest score first, and of one score the longest left part first (the order Hugging Face's converter gives).
fn merges_of_scores(source: &TokenizerSource, types: &[TokenType]) -> Result<Vec<(String, String)>, TokenizerError> {
    let tokens = source.tokens.len();
    if source.scores.is_empty() {
        return Err(TokenizerError::Missing("scores"));
    }
    if source.scores.len() != tokens {
        return Err(TokenizerError::Length { field: "scores", len: source.scores.len(), tokens });
    }
    let mut pieces: HashMap<&str, u32> = HashMap::with_capacity(tokens);
    for (id, text) in source.tokens.iter().enumerate().filter(|(id, _)| types[*id] == TokenType::Normal) {
        if source.scores[id].is_nan() {
            return Err(TokenizerError::Token { id: id as u32, what: "its score is not a number" });
        }
        if text.len() > TOKEN_BYTES_MAX {
            return Err(TokenizerError::Token { id: id as u32, what: "its text is too long" });
        }
        pieces.entry(text).or_insert(id as u32);
    }
    // (score, characters on the left and right, id of the whole, ids of the parts): ids break ties as in the vocabulary.
    let mut merges = Vec::new();
    for (id, text) in source.tokens.iter().enumerate() {
        if pieces.get(text.as_str()) != Some(&(id as u32)) {
            continue;
        }
        let length = text.chars().count();
        for (left_length, (at, _)) in text.char_indices().enumerate().skip(1) {
            if let (Some(&left), Some(&right)) = (pieces.get(&text[..at]), pieces.get(&text[at..])) {
                merges.push((source.scores[id], left_length, length - left_length, id as u32, left, right));
            }
        }
    }
    merges.sort_by(|a, b| {
        b.0.total_cmp(&a.0)
            .then(b.1.cmp(&a.1))
            .then(b.2.cmp(&a.2))
            .then(a.3.cmp(&b.3))
            .then((a.4, a.5).cmp(&(b.4, b.5)))
    });
    let text = |id: u32| source.tokens[id as usize].clone();
    Ok(merges.into_iter().map(|merge| (text(merge.4), text(merge.5))).collect())
}

fn special_tokens(
    source: &TokenizerSource,
    types: &[TokenType],
    sentence_piece: bool,
) -> Result<SpecialTokens, TokenizerError> {
    // Some files write the spaces of user-defined tokens as "▁", but they are looked for in the text as it came.
    let spaced: Vec<String> = source
        .tokens
        .iter()
        .zip(types)
        .map(|(text, kind)| match kind {
            TokenType::UserDefined if sentence_piece => text.replace('▁', " "),
            TokenType::Control | TokenType::Unknown | TokenType::UserDefined => text.clone(),
            _ => String::new(),
        })
        .collect();
    let found: Vec<_> = spaced
        .iter()
        .enumerate()
        .filter(|(_, text)| !text.is_empty())
        .map(|(id, text)| (text.as_str(), id as u32, types[id] != TokenType::UserDefined))
        .collect();
    SpecialTokens::new(&found).map_err(|error| TokenizerError::TooLarge(error.to_string()))
}

fn end_ids(source: &TokenizerSource, types: &[TokenType], named: &NamedIds) -> Vec<u32> {
    let by_name = source.tokens.iter().zip(types).enumerate().filter(|(_, (text, kind))| {
        matches!(kind, TokenType::Control | TokenType::UserDefined) && END_NAMES.contains(&text.as_str())
    });
    let mut ids: Vec<u32> = by_name.map(|(id, _)| id as u32).chain(named.eos).chain(named.eot).collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// The byte that `<0xNN>` stands for.
fn byte_of(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() != 2 || !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    u8::from_str_radix(digits, 16).ok()
}

/// Bytes of all tokens one after another, and where each begins.
fn token_bytes(
    source: &TokenizerSource,
    types: &[TokenType],
    sentence_piece: bool,
) -> Result<(Vec<u8>, Vec<u32>), TokenizerError> {
    let mut bytes = Vec::new();
    let mut starts = Vec::with_capacity(types.len() + 1);
    starts.push(0);
    for (id, (text, kind)) in source.tokens.iter().zip(types).enumerate() {
        let broken = |what| TokenizerError::Token { id: id as u32, what };
        if text.len() > TOKEN_BYTES_MAX {
            return Err(broken("its text is too long"));
        }
        match kind {
            TokenType::Control | TokenType::Unknown | TokenType::Unused => {}
            TokenType::Byte => {
                bytes.push(byte_of(text).ok_or_else(|| broken("a byte token, but its text is not <0xNN>"))?)
            }
            _ if sentence_piece => bytes.extend_from_slice(text.replace('▁', " ").as_bytes()),
            // Tokens added by hand may hold characters that are no letters of bytes; they are what they say.
            TokenType::UserDefined => bytes.extend_from_slice(text.as_bytes()),
            TokenType::Normal => {
                if !byte_level::push_bytes(text, &mut bytes) {
                    bytes.extend_from_slice(text.as_bytes());
                }
            }
        }
        let end = u32::try_from(bytes.len())
            .map_err(|_| TokenizerError::TooLarge("texts of all tokens exceed 4 GiB".into()))?;
        starts.push(end);
    }
    Ok((bytes, starts))
}
