//! The text of one generation, token by token: bytes to characters, then the search for stop strings.

use std::sync::Arc;

use super::detokenize::Detokenizer;
use super::stop::StopMatcher;
use super::tokenizer::Tokenizer;

/// What one token adds to the text a client sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Delta<'a> {
    /// New text; empty while a character is incomplete or a stop string may be coming.
    pub text: &'a str,
    /// A stop string is complete: the generation ends, and no text follows.
    pub stopped: bool,
}

/// Turns a sequence's output ids into the text that is sent. All deltas and the last flush together are the decode of
/// all ids, cut before the first stop string. In a steady state pushing allocates nothing.
#[derive(Debug)]
pub struct TextStream {
    tokenizer: Arc<Tokenizer>,
    detokenizer: Detokenizer,
    stops: StopMatcher,
    tokens: u64,
    min_tokens: u32,
    stopped: bool,
    /// The last token's characters.
    piece: String,
    /// What was given out last.
    out: String,
}

impl TextStream {
    /// The stream of a sequence that goes on from text: a space at its start is text. See [`Self::after`].
    ///
    /// A stop string may end the text with the `min_tokens`-th token at the earliest: one that is complete before is
    /// text, even if it is the beginning of something, while one that only begins before ends the text as usual.
    pub fn new(tokenizer: Arc<Tokenizer>, stops: &[String], min_tokens: u32) -> Self {
        Self {
            tokenizer,
            detokenizer: Detokenizer::new(false),
            stops: StopMatcher::new(stops),
            tokens: 0,
            min_tokens,
            stopped: false,
            piece: String::new(),
            out: String::new(),
        }
    }

    /// The stream as it is after this prompt: behind a special token (or nothing) some vocabularies write a space that
    /// is not text. To be said before the first token.
    pub fn after(mut self, prompt: &[u32]) -> Self {
        self.detokenizer = Detokenizer::new(self.tokenizer.drops_space_after(prompt.last().copied()));
        self
    }

    /// Takes the next token. Ids that end a generation have no text of their own, so whether they are pushed makes no
    /// difference to the text.
    pub fn push(&mut self, id: u32) -> Delta<'_> {
        self.tokens += 1;
        self.piece.clear();
        self.detokenizer.push(self.tokenizer.token_bytes(id), &mut self.piece);
        self.pass()
    }

    /// Ends the stream and gives out the rest: what was held back for a stop string that did not come, an unfinished
    /// character as U+FFFD. Empty after a stop.
    pub fn finish(&mut self) -> String {
        self.piece.clear();
        self.detokenizer.finish(&mut self.piece);
        self.pass();
        self.stops.finish(&mut self.out);
        std::mem::take(&mut self.out)
    }

    /// Sends `piece` through the search for stop strings.
    fn pass(&mut self) -> Delta<'_> {
        self.out.clear();
        let armed = self.tokens >= u64::from(self.min_tokens);
        self.stopped = self.stops.push(&self.piece, armed, &mut self.out);
        Delta { text: &self.out, stopped: self.stopped }
    }

    /// Whether a stop string has ended the text.
    pub fn stopped(&self) -> bool {
        self.stopped
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::source::TokenizerSource;
    use proptest::prelude::*;

    /// "llama": specials 0..3, all bytes, then pieces; "gpt2": all bytes by their letters, then pieces, then `<e>`.
    fn tokenizer(kind: &str) -> Arc<Tokenizer> {
        let mut source = TokenizerSource { model: kind.to_owned(), ..Default::default() };
        let mut add = |text: &str, token_type: i32| {
            source.tokens.push(text.to_owned());
            source.token_types.push(token_type);
            source.scores.push(0.0);
        };
        if kind == "llama" {
            add("<unk>", 2);
            add("<s>", 3);
            add("</s>", 3);
            (0..=255u8).for_each(|b| add(&format!("<0x{b:02X}>"), 6));
            ["▁", "▁a", "ab", "b", "é", "▁▁", "😀", "\u{fffd}"].iter().for_each(|text| add(text, 1));
        } else {
            for bytes in (0..=255u8).map(|b| vec![b]).chain([
                b" a".to_vec(),
                b"ab".to_vec(),
                "é".into(),
                b"\xf0\x9f".to_vec(),
                b"\x98\x80b".to_vec(),
            ]) {
                let mut letters = String::new();
                crate::text::pretokenize::byte_level::push_letters(&bytes, &mut letters);
                add(&letters, 1);
            }
            add("<e>", 3);
            source.merges.push("a b".to_owned());
        }
        Arc::new(Tokenizer::build(&source).unwrap())
    }

    fn id(tokenizer: &Tokenizer, bytes: &[u8]) -> u32 {
        (0..tokenizer.vocab_size() as u32).rev().find(|&id| tokenizer.token_bytes(id) == bytes).unwrap()
    }

    #[test]
    fn min_tokens_counts_the_token_that_completes_the_stop() {
        let tokenizer = tokenizer("gpt2");
        let [x, a, b] = [b"x", b"a", b"b"].map(|bytes| id(&tokenizer, bytes));
        let text = |min_tokens| {
            let mut stream = TextStream::new(tokenizer.clone(), &["ab".to_owned()], min_tokens);
            let mut text = String::new();
            for (n, token) in [x, a, b, x, a, b, x].into_iter().enumerate() {
                let delta = stream.push(token);
                text.push_str(delta.text);
                if delta.stopped {
                    return (text, n + 1);
                }
            }
            (text + &stream.finish(), 0)
        };
        assert_eq!(text(0), ("x".to_owned(), 3));
        assert_eq!(text(3), ("x".to_owned(), 3));
        assert_eq!(text(4), ("xabx".to_owned(), 6));
        assert_eq!(text(6), ("xabx".to_owned(), 6));
        assert_eq!(text(7), ("xabxabx".to_owned(), 0));
    }

    #[test]
    fn a_space_after_a_special_token_is_not_text() {
        let tokenizer = tokenizer("llama");
        let a = id(&tokenizer, b" a");
        let first = |prompt: &[u32]| TextStream::new(tokenizer.clone(), &[], 0).after(prompt).push(a).text.to_owned();
        assert_eq!(first(&[]), "a");
        assert_eq!(first(&[1]), "a");
        assert_eq!(first(&[1, a]), " a");
        assert_eq!(TextStream::new(tokenizer.clone(), &[], 0).push(a).text, " a");
    }

    #[test]
    fn the_flush_searches_too() {
        let tokenizer = tokenizer("gpt2");
        let mut stream = TextStream::new(tokenizer.clone(), &["x\u{fffd}".to_owned()], 0);
        for byte in [b'a', b'x', 0xf0] {
            assert!(!stream.push(id(&tokenizer, &[byte])).stopped);
        }
        assert_eq!(stream.finish(), "");
        assert!(stream.stopped());
    }

    #[test]
    fn after_a_stop_nothing_follows() {
        let tokenizer = tokenizer("gpt2");
        let mut stream = TextStream::new(tokenizer.clone(), &["a".to_owned()], 0);
        assert_eq!(stream.push(id(&tokenizer, b"ab")), Delta { text: "", stopped: true });
        assert_eq!(stream.push(id(&tokenizer, b"x")), Delta { text: "", stopped: true });
        assert_eq!(stream.finish(), "");
    }

    /// The naive way: decode everything, and look after each token whether a stop string ends in the text it added.
    fn oracle(tokenizer: &Tokenizer, ids: &[u32], stops: &[String], min_tokens: u32) -> (String, Option<usize>) {
        let mut bytes: Vec<u8> = Vec::new();
        let mut decoded = vec![0];
        let whole = tokenizer.decode(ids);
        for &id in ids {
            bytes.extend_from_slice(tokenizer.token_bytes(id));
            let skip = usize::from(tokenizer.drops_space_after(None) && bytes.first() == Some(&b' '));
            let mut certain = String::from_utf8_lossy(&bytes[skip..]).into_owned();
            if bytes
                .utf8_chunks()
                .last()
                .is_some_and(|c| std::str::from_utf8(c.invalid()).is_err_and(|e| e.error_len().is_none()))
            {
                certain.pop();
            }
            decoded.push(certain.len());
        }
        decoded.push(whole.len());
        let mut found: Option<(usize, usize)> = None;
        for (step, window) in decoded.windows(2).enumerate() {
            // The last step is the flush; no token comes with it.
            if step.min(ids.len() - 1) + 1 < min_tokens as usize {
                continue;
            }
            for stop in stops.iter().filter(|s| !s.is_empty()) {
                for end in window[0] + 1..=window[1] {
                    if whole.as_bytes()[..end].ends_with(stop.as_bytes()) {
                        let this = (end, end - stop.len());
                        found = Some(found.map_or(this, |best| best.min(this)));
                    }
                }
            }
        }
        match found {
            Some((end, start)) => (whole[..start].to_owned(), decoded.iter().skip(1).position(|&len| len >= end)),
            None => (whole, None),
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1500))]
        #[test]
        fn as_the_naive_way(
            llama: bool,
            picks in proptest::collection::vec(prop_oneof![3 => 0u32..14, 1 => 0u32..300], 1..16),
            stops in proptest::collection::vec("[ abé\u{fffd}]{0,3}", 0..3),
            min_tokens in 0u32..8,
        ) {
            let tokenizer = tokenizer(if llama { "llama" } else { "gpt2" });
            // Small picks count from the end of the vocabulary, where the longer pieces are.
            let size = tokenizer.vocab_size() as u32;
            let ids: Vec<u32> = picks.iter().map(|&pick| if pick < 14 { size - 1 - pick } else { pick }).collect();
            let (expected, at) = oracle(&tokenizer, &ids, &stops, min_tokens);
            let mut stream = TextStream::new(tokenizer.clone(), &stops, min_tokens).after(&[]);
            let mut text = String::new();
            let mut stopped = None;
            for (step, &id) in ids.iter().enumerate() {
                let delta = stream.push(id);
                text.push_str(delta.text);
                if delta.stopped {
                    stopped = Some(step);
                    break;
                }
            }
            let rest = stream.finish();
            if stopped.is_none() && stream.stopped() {
                stopped = Some(ids.len());
            }
            text.push_str(&rest);
            prop_assert_eq!(text, expected);
            prop_assert_eq!(stopped, at);
        }
    }
}
