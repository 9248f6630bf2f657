//! What a file says about its tokenizer, checked against itself.

use super::error::ModelError;
use super::gguf::Metadata;
use super::metadata::Keys;
use crate::text::source::TokenizerSource;

/// Reads the `tokenizer.*` keys. Lists that speak of the same ids must be of one length, and `vocab_size` long; special
/// ids must be among them.
pub(super) fn read(metadata: &Metadata, vocab_size: usize) -> Result<TokenizerSource, ModelError> {
    let keys = Keys { metadata, prefix: "tokenizer.ggml." };
    let tokens = keys.required("tokens", keys.strings("tokens")?)?.to_vec();
    if tokens.len() != vocab_size {
        return Err(keys.bad(
            "tokens",
            format_args!("{} long", tokens.len()),
            format!("the model has {vocab_size} ids"),
        ));
    }
    let token_types = keys.integers("token_type")?.unwrap_or_default();
    let scores = keys.floats("scores")?.unwrap_or_default();
    for (key, length) in [("token_type", token_types.len()), ("scores", scores.len())] {
        if length != 0 && length != vocab_size {
            return Err(keys.bad(key, format_args!("{length} long"), format!("the model has {vocab_size} ids")));
        }
    }
    let special_id = |key: &str| Ok::<_, ModelError>(keys.count(key, 0..=vocab_size - 1)?.map(|id| id as u32));
    Ok(TokenizerSource {
        model: keys.required("model", keys.string("model")?)?.to_owned(),
        pre: keys.string("pre")?.map(str::to_owned),
        tokens,
        token_types,
        scores,
        merges: keys.strings("merges")?.unwrap_or_default().to_vec(),
        bos: special_id("bos_token_id")?,
        eos: special_id("eos_token_id")?,
        eot: special_id("eot_token_id")?,
        unk: special_id("unknown_token_id")?,
        pad: special_id("padding_token_id")?,
        add_bos: keys.bool("add_bos_token")?,
        add_eos: keys.bool("add_eos_token")?,
        add_space_prefix: keys.bool("add_space_prefix")?,
        chat_template: Keys { metadata, prefix: "tokenizer." }.string("chat_template")?.map(str::to_owned),
    })
}
