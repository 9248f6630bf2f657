//! Looks at this repository's own sources: which files there are, what is code in them, and whom they use.

use std::fs;
use std::path::{Path, PathBuf};

/// The root of the repository.
pub fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("this crate lies in the workspace's root")
}

/// All files under `folder` but those of build output, version control and virtual environments, sorted.
pub fn files(folder: &Path) -> Vec<PathBuf> {
    const SKIPPED: [&str; 5] = ["target", ".git", ".venv", "__pycache__", "node_modules"];
    let mut found = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(&folder).unwrap_or_else(|e| panic!("cannot list {}: {e}", folder.display()));
        for entry in entries {
            let path = entry.expect("list a folder").path();
            if path.is_symlink() || SKIPPED.iter().any(|name| path.ends_with(name)) {
                continue;
            }
            if path.is_dir() { folders.push(path) } else { found.push(path) }
        }
    }
    found.sort();
    found
}

/// The text with comments, strings and character literals blanked, so that only code is left. Line breaks stay.
pub fn code(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = String::with_capacity(text.len());
    let mut at = 0;
    while at < bytes.len() {
        let end = skipped_until(bytes, at);
        if end > at {
            out.extend(bytes[at..end].iter().map(|b| if *b == b'\n' { '\n' } else { ' ' }));
            at = end;
        } else {
            // Code outside of strings and comments is ASCII here; a stray byte of something else becomes a blank.
            out.push(if bytes[at].is_ascii() { char::from(bytes[at]) } else { ' ' });
            at += 1;
        }
    }
    out
}

/// Where the comment or literal that begins at `at` ends; `at` itself if none begins there.
fn skipped_until(bytes: &[u8], at: usize) -> usize {
    let rest = &bytes[at..];
    let previous_is_word = at > 0 && is_word(bytes[at - 1]);
    if rest.starts_with(b"//") {
        return at + rest.iter().position(|b| *b == b'\n').unwrap_or(rest.len());
    }
    if rest.starts_with(b"/*") {
        let (mut depth, mut i) = (0, 0);
        while i + 1 < rest.len() {
            match &rest[i..i + 2] {
                b"/*" => (depth, i) = (depth + 1, i + 2),
                b"*/" => (depth, i) = (depth - 1, i + 2),
                _ => i += 1,
            }
            if depth == 0 {
                return at + i;
            }
        }
        return bytes.len();
    }
    // r"...", r#"..."#, with a b or c before.
    let prefix = rest.iter().take(2).take_while(|b| matches!(b, b'b' | b'c' | b'r')).count();
    if prefix > 0 && rest[prefix - 1] == b'r' && !previous_is_word {
        let hashes = rest[prefix..].iter().take_while(|b| **b == b'#').count();
        if rest.get(prefix + hashes) == Some(&b'"') {
            let close = [b"\"".as_slice(), &b"#".repeat(hashes)].concat();
            let body = prefix + hashes + 1;
            let end = rest[body..].windows(close.len()).position(|w| w == close);
            return end.map_or(bytes.len(), |end| at + body + end + close.len());
        }
    }
    match rest[0] {
        b'"' => at + quoted(rest, b'"'),
        b'\'' => {
            // 'a' or '\n' is a literal; 'a without a closing quote is a lifetime.
            let long = rest.get(1) == Some(&b'\\');
            let character = std::str::from_utf8(&rest[1..rest.len().min(6)]).map_or_else(
                |e| std::str::from_utf8(&rest[1..1 + e.valid_up_to()]).ok().and_then(|s| s.chars().next()),
                |s| s.chars().next(),
            );
            let closes = character.is_some_and(|c| rest.get(1 + c.len_utf8()) == Some(&b'\''));
            if long || closes { at + quoted(rest, b'\'') } else { at }
        }
        _ => at,
    }
}

/// Length of a literal that begins and ends with `quote`.
fn quoted(rest: &[u8], quote: u8) -> usize {
    let mut i = 1;
    while i < rest.len() {
        match rest[i] {
            b'\\' => i += 2,
            b if b == quote => return i + 1,
            _ => i += 1,
        }
    }
    rest.len()
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

/// `code` without what follows `#[cfg(test)]` with a module in braces, which stands last in a file here.
pub fn without_tests(code: &str) -> &str {
    let mut from = 0;
    while let Some(found) = code[from..].find("#[cfg(test)]") {
        let at = from + found;
        let next = code[at..].trim_start_matches("#[cfg(test)]").trim_start();
        if next.starts_with("mod ") && next.split_once('{').is_some_and(|(head, _)| !head.contains(';')) {
            return &code[..at];
        }
        from = at + 1;
    }
    code
}

/// Whether the word stands in `code` by itself.
pub fn has_word(code: &str, word: &str) -> bool {
    words_at(code, word).next().is_some()
}

/// Where `word` stands by itself.
fn words_at<'a>(code: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let bytes = code.as_bytes();
    code.match_indices(word).map(|(at, _)| at).filter(move |at| {
        let before = at.checked_sub(1).is_none_or(|i| !is_word(bytes[i]));
        before && bytes.get(at + word.len()).is_none_or(|b| !is_word(*b))
    })
}

/// The paths below `root` ("crate", or another crate's name) that `code` names, each as its segments after the root. Groups
/// are taken apart: `crate::{a::b, c}` gives a::b and c.
pub fn paths(code: &str, root: &str) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for at in words_at(code, root) {
        let rest = code[at + root.len()..].trim_start();
        if let Some(tree) = rest.strip_prefix("::") {
            take_tree(tree, &mut Vec::new(), &mut found);
        }
    }
    found
}

/// Paths that leave a module through `super`, as segments after the crate's root. `depth` is how deep the file's module
/// lies: 1 for `src/a.rs` and `src/a/mod.rs`, 2 for `src/a/b.rs`. Inline modules are not counted, so a name may be
/// reported that is no room; rooms are never missed.
pub fn paths_upward(code: &str, depth: usize) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for at in words_at(code, "super") {
        if code[..at].trim_end().ends_with("::") {
            continue;
        }
        let (mut rest, mut ups) = (&code[at..], 0);
        while let Some(next) = rest.strip_prefix("super::") {
            (rest, ups) = (next, ups + 1);
        }
        if ups >= depth {
            take_tree(rest, &mut Vec::new(), &mut found);
        }
    }
    found
}

/// Reads one use-tree and returns what follows it.
fn take_tree<'a>(text: &'a str, prefix: &mut Vec<String>, found: &mut Vec<Vec<String>>) -> &'a str {
    let text = text.trim_start();
    if let Some(mut rest) = text.strip_prefix('{') {
        loop {
            rest = rest.trim_start();
            if rest.is_empty() {
                return rest;
            }
            if let Some(after) = rest.strip_prefix('}') {
                return after;
            }
            let before = rest.len();
            rest = take_tree(rest, prefix, found);
            // `a as b`, commas and anything unforeseen: go on behind the next comma or at the closing brace.
            match rest.find([',', '}']) {
                Some(i) if rest.as_bytes()[i] == b',' => rest = &rest[i + 1..],
                Some(i) => rest = &rest[i..],
                None => return "",
            }
            debug_assert!(rest.len() < before);
        }
    }
    let length = text.bytes().take_while(|b| is_word(*b)).count();
    let (name, rest) = text.split_at(length);
    if name.is_empty() {
        if !prefix.is_empty() {
            found.push(prefix.clone());
        }
        return rest;
    }
    prefix.push(name.to_owned());
    let rest = match rest.trim_start().strip_prefix("::") {
        Some(below) => take_tree(below, prefix, found),
        None => {
            found.push(prefix.clone());
            rest
        }
    };
    prefix.pop();
    rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_code_is_left() {
        let text = "a /* b /* c */ d */ \"e \\\" f\" r#\"g \" h\"# 'i' '\\'' 'é' &'j k // l\nm b\"n\" for_r\"o\"";
        let left: Vec<_> = code(text).split_whitespace().map(str::to_owned).collect();
        assert_eq!(left, ["a", "&'j", "k", "m", "b", "for_r"]);
        assert_eq!(code(text).lines().count(), 2);
    }

    #[test]
    fn paths_are_taken_apart() {
        let found = |text: &str| paths(text, "crate").iter().map(|p| p.join("::")).collect::<Vec<_>>();
        assert_eq!(found("use crate::a::B;"), ["a::B"]);
        assert_eq!(found("use crate::{a::{B, c::D as E, self}, f}; x"), ["a::B", "a::c::D", "a::self", "f"]);
        assert_eq!(found("let x = crate::a::f::<T>(crate::b::C);"), ["a::f", "b::C"]);
        assert_eq!(found("use crate::a::*; my_crate::b; crates::c"), ["a"]);
    }

    #[test]
    fn super_that_leaves_the_room_is_seen() {
        let found = |text: &str, depth| paths_upward(text, depth).iter().map(|p| p.join("::")).collect::<Vec<_>>();
        assert_eq!(found("use super::engine::Event;", 1), ["engine::Event"]);
        assert_eq!(found("use super::session::Session;", 2), [""; 0]);
        assert_eq!(found("use super::super::engine;", 2), ["engine"]);
    }

    #[test]
    fn tests_at_the_end_are_left_out() {
        let text = "a #[cfg(test)] use b; c #[cfg(test)]\nmod tests { d }";
        assert_eq!(without_tests(text), "a #[cfg(test)] use b; c ");
        assert_eq!(without_tests("a #[cfg(test)] mod x; b"), "a #[cfg(test)] mod x; b");
    }
}
