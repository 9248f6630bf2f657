//! Between text and token ids: [`tokenizer`] and [`chat_template`] on the way in, [`stream`] on the way out.

pub mod chat_template;
pub mod detokenize;
pub mod pretokenize;
pub mod source;
pub mod stop;
pub mod stream;
pub mod tokenizer;
