//! Bytes of tokens to text, as they come. What has been given out never changes, and all of it together is what
//! `String::from_utf8_lossy` makes of all bytes together (after the space the encoding put in front, if there is one):
//! a character split over tokens waits for its rest, bytes that can no longer become a character are U+FFFD at once,
//! and a U+FFFD that the model wrote is a character like any other.

/// Longest beginning of a character that is not yet one.
const INCOMPLETE_MAX: usize = 3;

/// The text of one stream of tokens.
#[derive(Debug, Clone)]
pub struct Detokenizer {
    /// Bytes of a character that is not complete yet.
    pending: [u8; INCOMPLETE_MAX],
    pending_len: usize,
    /// The next byte is the first, and is dropped if it is a space.
    drop_space: bool,
}

impl Detokenizer {
    /// A stream at its start. `drop_space`: one space at the very start is not text, see `Tokenizer::drops_space_after`.
    pub fn new(drop_space: bool) -> Self {
        Self { pending: [0; INCOMPLETE_MAX], pending_len: 0, drop_space }
    }

    /// Takes a token's bytes and appends to `out` what is certain now.
    pub fn push(&mut self, bytes: &[u8], out: &mut String) {
        let mut bytes = bytes;
        if self.drop_space && !bytes.is_empty() {
            self.drop_space = false;
            bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
        }
        // A character begun earlier, byte by byte, until it is complete or broken.
        while self.pending_len > 0
            && let Some((&byte, rest)) = bytes.split_first()
        {
            let mut window = [0; INCOMPLETE_MAX + 1];
            window[..self.pending_len].copy_from_slice(&self.pending[..self.pending_len]);
            window[self.pending_len] = byte;
            let window = &window[..=self.pending_len];
            match std::str::from_utf8(window) {
                Ok(character) => {
                    out.push_str(character);
                    self.pending_len = 0;
                    bytes = rest;
                }
                Err(error) if error.error_len().is_none() => {
                    self.pending[self.pending_len] = byte;
                    self.pending_len += 1;
                    bytes = rest;
                }
                Err(_) => {
                    // What was pending is one maximal broken piece; this byte begins anew.
                    out.push(char::REPLACEMENT_CHARACTER);
                    self.pending_len = 0;
                }
            }
        }
        self.push_fresh(bytes, out);
    }

    /// Appends what `bytes` say, with nothing pending before them.
    fn push_fresh(&mut self, bytes: &[u8], out: &mut String) {
        let mut chunks = bytes.utf8_chunks().peekable();
        while let Some(chunk) = chunks.next() {
            out.push_str(chunk.valid());
            let broken = chunk.invalid();
            if broken.is_empty() {
                continue;
            }
            let may_go_on =
                chunks.peek().is_none() && std::str::from_utf8(broken).is_err_and(|e| e.error_len().is_none());
            if may_go_on {
                self.pending[..broken.len()].copy_from_slice(broken);
                self.pending_len = broken.len();
            } else {
                out.push(char::REPLACEMENT_CHARACTER);
            }
        }
    }

    /// Ends the stream: a character that never got its rest is one U+FFFD.
    pub fn finish(&mut self, out: &mut String) {
        if self.pending_len > 0 {
            self.pending_len = 0;
            out.push(char::REPLACEMENT_CHARACTER);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pieces(tokens: &[&[u8]], drop_space: bool) -> Vec<String> {
        let mut stream = Detokenizer::new(drop_space);
        let mut pieces: Vec<String> = tokens
            .iter()
            .map(|token| {
                let mut piece = String::new();
                stream.push(token, &mut piece);
                piece
            })
            .collect();
        let mut last = String::new();
        stream.finish(&mut last);
        pieces.push(last);
        pieces
    }

    #[test]
    fn a_split_character_waits_for_its_rest() {
        assert_eq!(pieces(&[b"a\xf0", b"\x9f", b"\x98", b"\x80b"], false), ["a", "", "", "😀b", ""]);
    }

    #[test]
    fn broken_bytes_do_not_block_what_follows() {
        assert_eq!(
            pieces(&[b"\xf0\x9f", b"x", b"\xff", b"\xe4\xb8"], false),
            ["", "\u{fffd}x", "\u{fffd}", "", "\u{fffd}"]
        );
    }

    #[test]
    fn a_real_replacement_character_passes_at_once() {
        assert_eq!(
            pieces(&["\u{fffd}".as_bytes(), b"ok", b"\xef\xbf", b"\xbd"], false),
            ["\u{fffd}", "ok", "", "\u{fffd}", ""]
        );
    }

    #[test]
    fn one_leading_space_goes_if_it_is_to_go() {
        assert_eq!(pieces(&[b"", b" ", b" a"], true), ["", "", " a", ""]);
        assert_eq!(pieces(&[b"a", b" b"], true), ["a", " b", ""]);
        assert_eq!(pieces(&[b" a"], false), [" a", ""]);
    }

    /// Bytes as broken streams have them: whole characters, parts of them, and anything.
    fn token() -> impl Strategy<Value = Vec<u8>> {
        let byte = prop_oneof![
            any::<u8>(),
            proptest::sample::select(
                &[
                    0x20u8, 0xc3, 0xa9, 0xe2, 0x96, 0x81, 0xf0, 0x9f, 0x98, 0x80, 0xed, 0xa0, 0xf4, 0x90, 0xef, 0xbf,
                    0xbd
                ][..]
            ),
        ];
        proptest::collection::vec(byte, 0..5)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn the_stream_is_the_whole_decode(tokens in proptest::collection::vec(token(), 0..12), drop_space: bool) {
            let all = tokens.concat();
            let all = if drop_space { all.strip_prefix(b" ").unwrap_or(&all) } else { &all };
            let borrowed: Vec<&[u8]> = tokens.iter().map(Vec::as_slice).collect();
            prop_assert_eq!(pieces(&borrowed, drop_space).concat(), String::from_utf8_lossy(all));
        }

        #[test]
        fn no_more_than_an_unfinished_character_is_held(tokens in proptest::collection::vec(token(), 0..12)) {
            let mut stream = Detokenizer::new(false);
            let (mut text, mut bytes) = (String::new(), Vec::new());
            for token in &tokens {
                stream.push(token, &mut text);
                bytes.extend_from_slice(token);
                let whole = String::from_utf8_lossy(&bytes);
                prop_assert!(whole.starts_with(&text));
                // What is missing is nothing, or the one U+FFFD that stands for bytes that may still become a character.
                let missing = &whole[text.len()..];
                let unfinished = bytes.utf8_chunks().last().is_some_and(|chunk| std::str::from_utf8(chunk.invalid()).is_err_and(|e| e.error_len().is_none()));
                prop_assert_eq!(missing, if unfinished { "\u{fffd}" } else { "" });
            }
        }
    }
}
