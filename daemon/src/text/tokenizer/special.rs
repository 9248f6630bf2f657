//! Special tokens in text, and the shield that keeps a user's text from naming them.

use std::borrow::Cow;
use std::ops::Range;

use aho_corasick::{AhoCorasick, BuildError, Input, MatchKind};

/// Stands behind the first character of what looks like a control token in untrusted text. A noncharacter: no text for
/// interchange contains it. One that does all the same is doubled, and comes out as it went in.
const SHIELD: char = '\u{fdd0}';

/// The special tokens that are found in text.
#[derive(Debug)]
pub(super) struct SpecialTokens {
    /// All of them; the leftmost match wins, of these the longest.
    all: AhoCorasick,
    /// Id of each pattern of `all`.
    ids: Vec<u32>,
    /// Those with authority: control and unknown.
    shielded: AhoCorasick,
}

impl SpecialTokens {
    /// `tokens`: text, id, and whether the shield applies. Texts are not empty; one that has the shield applied and is
    /// a single character can't be shielded and is never found.
    pub(super) fn new(tokens: &[(&str, u32, bool)]) -> Result<Self, BuildError> {
        let found: Vec<_> =
            tokens.iter().filter(|(text, _, shield)| !shield || text.chars().nth(1).is_some()).collect();
        let automaton =
            |patterns: Vec<&str>| AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(patterns);
        Ok(Self {
            all: automaton(found.iter().map(|t| t.0).collect())?,
            ids: found.iter().map(|t| t.1).collect(),
            shielded: automaton(found.iter().filter(|t| t.2).map(|t| t.0).collect())?,
        })
    }

    /// Where special tokens stand in `text`, in order and without overlap, and their ids.
    pub(super) fn find_iter<'a>(&'a self, text: &'a str) -> impl Iterator<Item = (Range<usize>, u32)> + 'a {
        self.all.find_iter(text).map(|found| (found.range(), self.ids[found.pattern().as_usize()]))
    }

    /// See `Tokenizer::shield_control`.
    pub(super) fn shield<'t>(&self, content: &'t str) -> Cow<'t, str> {
        let mut out = String::new();
        let mut copied = 0;
        let mut at = 0;
        // Every place where one begins is broken, not only those of disjoint matches: breaking the longer of two that
        // overlap would leave the shorter.
        while let Some(found) = self.shielded.find(Input::new(content).range(at..)) {
            let first = content[found.start()..].chars().next().map_or(1, char::len_utf8);
            at = found.start() + first;
            push_doubled(&content[copied..at], &mut out);
            out.push(SHIELD);
            copied = at;
        }
        if copied == 0 && !content.contains(SHIELD) {
            return Cow::Borrowed(content);
        }
        push_doubled(&content[copied..], &mut out);
        Cow::Owned(out)
    }
}

fn push_doubled(text: &str, out: &mut String) {
    for c in text.chars() {
        out.push(c);
        if c == SHIELD {
            out.push(c);
        }
    }
}

/// Takes the shields out again: of each pair one stays, a lone one goes.
pub(super) fn unshield(text: &str) -> Cow<'_, str> {
    if !text.contains(SHIELD) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        if c != SHIELD || chars.next_if_eq(&SHIELD).is_some() {
            out.push(c);
        }
    }
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn tokens() -> SpecialTokens {
        SpecialTokens::new(&[
            ("<a>", 1, true),
            ("<a><b>", 2, true),
            ("<b>", 3, true),
            ("<u>", 4, false),
            ("<", 5, true),
        ])
        .unwrap()
    }

    #[test]
    fn the_longest_of_the_leftmost_is_found() {
        let tokens = tokens();
        let found: Vec<_> = tokens.find_iter("x<a><b><a><u><").collect();
        assert_eq!(found, [(1..7, 2), (7..10, 1), (10..13, 4)]);
    }

    proptest! {
        #[test]
        fn a_shielded_text_names_no_control_token_and_comes_back_whole(text in "[<>abu\u{fdd0}é]{0,30}") {
            let tokens = tokens();
            let shielded = tokens.shield(&text);
            prop_assert!(tokens.find_iter(&shielded).all(|(_, id)| id == 4), "{:?}", shielded);
            prop_assert_eq!(&*unshield(&shielded), &*text);
        }
    }
}
