//! Stop strings in text that comes in pieces.
//!
//! The text ends at the first place where a stop string is complete (the earliest end, whatever the pieces), and is cut
//! before that string; of several that are complete at the same place the longest counts. So nothing that could still
//! become a stop string may leave: the longest end of the text that is the beginning of a stop string is held back, and
//! not a byte more.

/// One stop string and how much of it the text ends with (Knuth, Morris and Pratt).
#[derive(Debug, Clone)]
struct Pattern {
    bytes: Box<[u8]>,
    /// `border[n]`: length of the longest proper beginning of `bytes[..n]` that is also its end.
    border: Box<[u32]>,
    matched: usize,
}

impl Pattern {
    fn new(text: &str) -> Self {
        let bytes: Box<[u8]> = text.as_bytes().into();
        let mut border = vec![0u32; bytes.len() + 1].into_boxed_slice();
        let mut length = 0;
        for n in 1..bytes.len() {
            while length > 0 && bytes[n] != bytes[length] {
                length = border[length] as usize;
            }
            if bytes[n] == bytes[length] {
                length += 1;
            }
            border[n + 1] = length as u32;
        }
        Self { bytes, border, matched: 0 }
    }

    /// Takes one byte; whether the pattern is complete with it.
    fn step(&mut self, byte: u8) -> bool {
        if self.matched == self.bytes.len() {
            self.matched = self.border[self.matched] as usize;
        }
        while self.matched > 0 && self.bytes[self.matched] != byte {
            self.matched = self.border[self.matched] as usize;
        }
        if self.bytes[self.matched] == byte {
            self.matched += 1;
        }
        self.matched == self.bytes.len()
    }

    /// How many bytes at the end of the text may still become the pattern.
    fn open(&self) -> usize {
        if self.matched == self.bytes.len() { self.border[self.matched] as usize } else { self.matched }
    }
}

/// Finds stop strings and holds back what may become one. Work per byte of text grows with the number of strings, not
/// with their lengths; memory is about five bytes for each of theirs.
#[derive(Debug, Clone)]
pub struct StopMatcher {
    patterns: Vec<Pattern>,
    /// What may still become a stop string.
    held: String,
    stopped: bool,
}

impl StopMatcher {
    /// Looks for each of `stops`. Empty strings are never found; how many and how long they may be is intake's business.
    pub fn new(stops: &[String]) -> Self {
        let patterns = stops.iter().filter(|stop| !stop.is_empty()).map(|stop| Pattern::new(stop)).collect();
        Self { patterns, held: String::new(), stopped: false }
    }

    /// Takes the next piece and appends to `out` what may leave. A stop string that is complete within a piece that is
    /// not `armed` is text like any other. After a stop nothing leaves any more. Returns whether the text has stopped.
    pub fn push(&mut self, piece: &str, armed: bool, out: &mut String) -> bool {
        if self.stopped {
            return true;
        }
        if self.patterns.is_empty() {
            out.push_str(piece);
            return false;
        }
        for (at, &byte) in piece.as_bytes().iter().enumerate() {
            // No `any` or the like: every pattern has to take every byte.
            let mut complete = 0;
            for pattern in &mut self.patterns {
                if pattern.step(byte) {
                    complete = complete.max(pattern.bytes.len());
                }
            }
            if complete > 0 && armed {
                self.stopped = true;
                self.held.push_str(&piece[..=at]);
                // What is held reaches back at least as far as the longest string that was about to be complete.
                out.push_str(&self.held[..self.held.len() - complete]);
                self.held = String::new();
                return true;
            }
        }
        let open = self.patterns.iter().map(Pattern::open).max().unwrap_or(0);
        // A stop string begins with a whole character, so the border between free and held text is one of characters.
        let free = self.held.len() + piece.len() - open;
        if free <= self.held.len() {
            out.extend(self.held.drain(..free));
            self.held.push_str(piece);
        } else {
            let of_piece = free - self.held.len();
            out.push_str(&self.held);
            out.push_str(&piece[..of_piece]);
            self.held.clear();
            self.held.push_str(&piece[of_piece..]);
        }
        false
    }

    /// The text ends here: what was held is text after all.
    pub fn finish(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (Vec<String>, bool) {
        let stops: Vec<String> = stops.iter().map(|s| s.to_string()).collect();
        let mut matcher = StopMatcher::new(&stops);
        let mut stopped = false;
        let mut out: Vec<String> = pieces
            .iter()
            .map(|piece| {
                let mut out = String::new();
                stopped = matcher.push(piece, true, &mut out);
                out
            })
            .collect();
        let mut last = String::new();
        matcher.finish(&mut last);
        out.push(last);
        (out, stopped)
    }

    #[test]
    fn a_stop_string_over_borders_does_not_leak() {
        assert_eq!(
            run(&["STOP"], &["ab S", "TO", "P c", "d"]),
            (vec!["ab ".into(), "".into(), "".into(), "".into(), "".into()], true)
        );
    }

    #[test]
    fn what_can_no_longer_match_is_released_at_once() {
        let (out, stopped) = run(&["STOP"], &["S", "T", "A", "ST"]);
        assert_eq!((out, stopped), (vec!["".into(), "".into(), "STA".into(), "".into(), "ST".into()], false));
        // The end of a failed match may begin another.
        assert_eq!(run(&["aab"], &["aa", "a", "b"]).0, ["", "a", "", ""]);
    }

    #[test]
    fn the_earliest_end_counts_then_the_longest() {
        assert_eq!(run(&["abcd", "bc"], &["xabcd"]).0.concat(), "xa");
        assert_eq!(run(&["bc", "abc"], &["xabc"]).0.concat(), "x");
    }

    #[test]
    fn empty_stops_are_never_found() {
        assert_eq!(run(&[""], &["abc", "d"]), (vec!["abc".into(), "d".into(), "".into()], false));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn as_a_search_in_the_whole_text(
            pieces in proptest::collection::vec("[abé]{0,3}", 0..10),
            stops in proptest::collection::vec("[abé]{0,4}", 0..4),
        ) {
            let text = pieces.concat();
            let first = stops.iter().filter(|s| !s.is_empty())
                .filter_map(|s| text.find(s.as_str()).map(|start| (start + s.len(), start))).min();
            let (out, stopped) = run(&stops.iter().map(String::as_str).collect::<Vec<_>>(), &pieces.iter().map(String::as_str).collect::<Vec<_>>());
            prop_assert_eq!(stopped, first.is_some());
            prop_assert_eq!(out.concat(), &text[..first.map_or(text.len(), |(_, start)| start)]);
        }

        #[test]
        fn not_a_byte_more_is_held_than_may_match(
            pieces in proptest::collection::vec("[abé]{0,3}", 0..10),
            stops in proptest::collection::vec("[abé]{1,4}", 1..4),
        ) {
            let mut matcher = StopMatcher::new(&stops);
            let (mut out, mut text) = (String::new(), String::new());
            for piece in &pieces {
                text.push_str(piece);
                if matcher.push(piece, true, &mut out) {
                    break;
                }
                let open = (0..=text.len()).filter(|&at| text.is_char_boundary(at))
                    .find(|&at| stops.iter().any(|s| s.len() > text.len() - at && s.starts_with(&text[at..])));
                prop_assert_eq!(&out, &text[..open.unwrap_or(text.len())]);
            }
        }
    }
}
