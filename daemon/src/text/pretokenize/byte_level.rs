//! The alphabet of byte-level BPE: each of the 256 bytes is written as one printable letter, so that a vocabulary file
//! holds no control characters and no spaces. A byte that is printable in Latin-1 stands for itself; the others, in
//! ascending order, are U+0100, U+0101, ... (so a space is U+0120, "Ġ").

/// Whether a byte is its own letter.
const fn printable(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff)
}

/// The letter of each byte.
const LETTERS: [char; 256] = {
    let mut letters = ['\0'; 256];
    let mut moved = 0;
    let mut byte = 0;
    while byte < 256 {
        letters[byte] = if printable(byte as u8) {
            byte as u8 as char
        } else {
            moved += 1;
            // Every value below U+0200 is a character.
            match char::from_u32(0xff + moved) {
                Some(letter) => letter,
                None => panic!("not a character"),
            }
        };
        byte += 1;
    }
    letters
};

/// The byte of each letter; letters are below U+0180.
const BYTES: [Option<u8>; 0x180] = {
    let mut bytes = [None; 0x180];
    let mut byte = 0;
    while byte < 256 {
        bytes[LETTERS[byte] as usize] = Some(byte as u8);
        byte += 1;
    }
    bytes
};

/// Appends the letters of `bytes` to `out`.
pub fn push_letters(bytes: &[u8], out: &mut String) {
    out.extend(bytes.iter().map(|&byte| LETTERS[byte as usize]));
}

/// Appends the bytes that `letters` stand for; if one is not of the alphabet, appends nothing and says `false`.
pub fn push_bytes(letters: &str, out: &mut Vec<u8>) -> bool {
    let start = out.len();
    for letter in letters.chars() {
        match BYTES.get(letter as usize).copied().flatten() {
            Some(byte) => out.push(byte),
            None => {
                out.truncate(start);
                return false;
            }
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_and_bytes_are_each_others_inverse() {
        let all: Vec<u8> = (0..=255).collect();
        let mut letters = String::new();
        push_letters(&all, &mut letters);
        assert_eq!(letters.chars().filter(|c| c.is_whitespace() || c.is_control()).count(), 0);
        let mut bytes = Vec::new();
        assert!(push_bytes(&letters, &mut bytes));
        assert_eq!(bytes, all);
    }

    #[test]
    fn known_letters() {
        let mut letters = String::new();
        push_letters(b" \n\0A\xad\xff", &mut letters);
        assert_eq!(letters, "ĠĊĀAŃÿ");
    }

    #[test]
    fn a_foreign_letter_changes_nothing() {
        let mut bytes = vec![1];
        assert!(!push_bytes("ab▁", &mut bytes));
        assert!(!push_bytes("a b", &mut bytes));
        assert_eq!(bytes, [1]);
    }
}
