//! Whether a licence expression (SPDX, as in a package's `license`) is satisfied by licences that are allowed.

/// True if choosing among the alternatives of `expression` only allowed licences are left. A slash is the old way of
/// writing OR. A licence WITH an exception is one item, to be allowed as a whole.
pub fn is_allowed(expression: &str, allowed: &[String]) -> bool {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut reader = Reader { words: &words, allowed };
    reader.any() == Some(true) && reader.words.is_empty()
}

struct Reader<'a> {
    words: &'a [&'a str],
    allowed: &'a [String],
}

impl Reader<'_> {
    fn next_is(&mut self, word: &str) -> bool {
        let found = self.words.first() == Some(&word);
        if found {
            self.words = &self.words[1..];
        }
        found
    }

    /// a OR b. AND binds tighter. None is an expression that cannot be read.
    fn any(&mut self) -> Option<bool> {
        let mut value = self.every()?;
        while self.next_is("OR") {
            value |= self.every()?;
        }
        Some(value)
    }

    /// a AND b.
    fn every(&mut self) -> Option<bool> {
        let mut value = self.one()?;
        while self.next_is("AND") {
            value &= self.one()?;
        }
        Some(value)
    }

    fn one(&mut self) -> Option<bool> {
        if self.next_is("(") {
            let value = self.any()?;
            return self.next_is(")").then_some(value);
        }
        let mut name = (*self.words.first()?).to_owned();
        self.words = &self.words[1..];
        if self.next_is("WITH") {
            name = format!("{name} WITH {}", self.words.first()?);
            self.words = &self.words[1..];
        }
        Some(self.allowed.contains(&name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alternatives_and_requirements() {
        let allowed = ["MIT", "Unicode-3.0", "Apache-2.0 WITH LLVM-exception"].map(String::from);
        for (expression, expected) in [
            ("MIT", true),
            ("GPL-3.0", false),
            ("GPL-3.0 OR MIT", true),
            ("GPL-3.0/MIT", true),
            ("GPL-3.0 AND MIT", false),
            ("(GPL-3.0 OR MIT) AND Unicode-3.0", true),
            ("MIT OR GPL-3.0 AND Zlib", true),
            ("Apache-2.0 WITH LLVM-exception", true),
            ("Apache-2.0", false),
            ("", false),
            ("MIT OR", false),
            ("(MIT", false),
            ("MIT MIT", false),
        ] {
            assert_eq!(is_allowed(expression, &allowed), expected, "{expression}");
        }
    }
}
