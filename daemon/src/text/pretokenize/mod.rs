//! How text is cut into words before byte-pair merging. No merge crosses a word's border.
//!
//! The published patterns end in `\s+(?!\S)|\s+`: a run of white space leaves its last character to the word that
//! follows. Backtracking engines run such a pattern with a limit on their work and give up in the middle of a long
//! text. Here the look-ahead is replaced by a rule in code, so that an automaton without backtracking does the rest in
//! linear time: the run is matched whole, and gives its last character back if a word follows and something is left.

pub mod byte_level;

use regex::Regex;

/// A way of cutting text into words; named as GGUF files name it in `tokenizer.ggml.pre`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pretokenizer {
    /// Words with one leading space, runs of digits, runs of other signs.
    Gpt2,
    /// Each digit alone; what lies between digits as in GPT-2.
    Smollm,
    /// Words with one leading sign, up to three digits together, newlines together.
    LlamaBpe,
    /// As LlamaBpe but with each digit alone, after Unicode composition (NFC).
    Qwen2,
}

/// Every name `tokenizer.ggml.pre` may have, and what it means.
pub const NAMES: &[(&str, Pretokenizer)] = &[
    ("gpt-2", Pretokenizer::Gpt2),
    ("default", Pretokenizer::Gpt2),
    ("smollm", Pretokenizer::Smollm),
    ("llama-bpe", Pretokenizer::LlamaBpe),
    ("llama3", Pretokenizer::LlamaBpe),
    ("llama-v3", Pretokenizer::LlamaBpe),
    ("qwen2", Pretokenizer::Qwen2),
];

impl Pretokenizer {
    /// The pre-tokenizer a model file names, if it is known here.
    pub fn by_name(name: &str) -> Option<Self> {
        NAMES.iter().find(|(known, _)| *known == name).map(|&(_, kind)| kind)
    }

    /// The published pattern without its look-ahead.
    fn pattern(self) -> &'static str {
        match self {
            Self::Gpt2 | Self::Smollm => r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+",
            Self::LlamaBpe => {
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
            }
            Self::Qwen2 => {
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
            }
        }
    }
}

/// A pre-tokenizer ready for use.
#[derive(Debug)]
pub struct Splitter {
    kind: Pretokenizer,
    pattern: Regex,
}

impl Splitter {
    /// Compiles the pattern of `kind`.
    pub fn new(kind: Pretokenizer) -> Self {
        let pattern = Regex::new(kind.pattern()).expect("the patterns are constants and a test compiles each");
        Self { kind, pattern }
    }

    /// Calls `word` with each word of `text` in order; together they are `text`. None is empty.
    pub fn split<'t>(&self, text: &'t str, mut word: impl FnMut(&'t str)) {
        if self.kind != Pretokenizer::Smollm {
            return self.split_segment(text, &mut word);
        }
        // Digits first: what lies between them is cut as if each stretch were a text of its own.
        let mut start = 0;
        for (at, digit) in text.char_indices().filter(|(_, c)| c.is_numeric()) {
            let end = at + digit.len_utf8();
            self.split_segment(&text[start..at], &mut word);
            word(&text[at..end]);
            start = end;
        }
        self.split_segment(&text[start..], &mut word);
    }

    fn split_segment<'t>(&self, text: &'t str, word: &mut impl FnMut(&'t str)) {
        let mut at = 0;
        while at < text.len() {
            let Some(found) = self.pattern.find_at(text, at) else {
                // The alternatives cover every character, so this is never reached; if it were, no text is lost.
                return word(&text[at..]);
            };
            if at < found.start() {
                word(&text[at..found.start()]);
            }
            let end = found.start() + self.kept(found.as_str(), found.end() == text.len());
            word(&text[found.start()..end]);
            at = end;
        }
    }

    /// How many bytes of a match stay when the look-ahead has had its say.
    fn kept(&self, found: &str, at_end: bool) -> usize {
        let Some(last) = found.chars().next_back() else {
            return found.len();
        };
        // Of all alternatives only `\s+` ends in white space, but for those of the newer patterns that end in a line
        // break; and where one of these can match, `\s+` has no turn.
        let line_break =
            matches!(last, '\r' | '\n') && matches!(self.kind, Pretokenizer::LlamaBpe | Pretokenizer::Qwen2);
        let shorter = found.len() - last.len_utf8();
        if last.is_whitespace() && !line_break && !at_end && shorter > 0 { shorter } else { found.len() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn words(kind: Pretokenizer, text: &str) -> Vec<&str> {
        let mut words = Vec::new();
        Splitter::new(kind).split(text, |word| words.push(word));
        words
    }

    #[test]
    fn each_kind_cuts_as_its_pattern_says() {
        let text = "It's  1234\n\n  done";
        assert_eq!(words(Pretokenizer::Gpt2, text), ["It", "'s", " ", " 1234", "\n\n ", " done"]);
        assert_eq!(words(Pretokenizer::Smollm, text), ["It", "'s", "  ", "1", "2", "3", "4", "\n\n ", " done"]);
        assert_eq!(words(Pretokenizer::LlamaBpe, text), ["It", "'s", " ", " ", "123", "4", "\n\n", " ", " done"]);
        assert_eq!(words(Pretokenizer::Qwen2, text), ["It", "'s", " ", " ", "1", "2", "3", "4", "\n\n", " ", " done"]);
    }

    #[test]
    fn names_lead_to_kinds() {
        assert_eq!(Pretokenizer::by_name("llama-v3"), Some(Pretokenizer::LlamaBpe));
        assert_eq!(Pretokenizer::by_name("Qwen2"), None);
    }

    /// The patterns as published, look-ahead and all, in a backtracking engine.
    fn published(kind: Pretokenizer) -> tokenizers::utils::SysRegex {
        tokenizers::utils::SysRegex::new(&kind.pattern().replace(r"|\s+", r"|\s+(?!\S)|\s+")).unwrap()
    }

    proptest! {
        #[test]
        fn words_are_those_of_the_published_pattern(text in "[ \\t\\n\\r\u{a0}a'sS1٣.é中\u{301}\u{17f}]{0,40}") {
            for kind in [Pretokenizer::Gpt2, Pretokenizer::LlamaBpe, Pretokenizer::Qwen2] {
                let expected: Vec<&str> = published(kind).find_iter(&text).map(|(start, end)| &text[start..end]).collect();
                prop_assert_eq!(words(kind, &text), expected);
            }
            prop_assert_eq!(words(Pretokenizer::Smollm, &text).concat(), text);
        }
    }
}
