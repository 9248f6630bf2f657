//! Text for people: numbers with units, bars, lines that fit.

/// Columns that text for people keeps to.
pub const COLUMNS: usize = 80;

/// `text` without control characters: what a model's file or a daemon says must not steer the terminal.
pub fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// What streams to the terminal: line breaks and tabs stay, other control characters go.
pub fn streamed(text: &str) -> String {
    text.chars().filter(|c| !c.is_control() || matches!(c, '\n' | '\t')).collect()
}

/// At most `columns` characters of `text`, with the middle left out where it is longer.
pub fn fit(text: &str, columns: usize) -> String {
    let text = plain(text);
    let length = text.chars().count();
    if length <= columns {
        return text;
    }
    let head = columns.saturating_sub(1) / 2;
    let tail = columns.saturating_sub(1) - head;
    text.chars().take(head).chain(['…']).chain(text.chars().skip(length - tail)).collect()
}

/// "1.5 GiB".
pub fn bytes(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", units[unit]) }
}

/// "135 M", "7.2 B" (billions), "12345".
pub fn count(count: u64) -> String {
    let value = count as f64;
    match count {
        0..100_000 => count.to_string(),
        100_000..1_000_000_000 => format!("{} M", significant(value / 1e6)),
        _ => format!("{} B", significant(value / 1e9)),
    }
}

/// "420 us", "42 ms", "1.25 s", "2 min 5 s", "3 h 20 min", "4 d 7 h".
pub fn seconds(seconds: f64) -> String {
    let whole = seconds as u64;
    match seconds {
        s if s < 1e-3 => format!("{} us", significant(s * 1e6)),
        s if s < 1.0 => format!("{} ms", significant(s * 1e3)),
        s if s < 60.0 => format!("{} s", significant(s)),
        s if s < 3600.0 => format!("{} min {} s", whole / 60, whole % 60),
        s if s < 86400.0 => format!("{} h {} min", whole / 3600, whole / 60 % 60),
        _ => format!("{} d {} h", whole / 86400, whole / 3600 % 24),
    }
}

/// Three significant digits, no more.
pub fn significant(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        v if v < 9.995 => format!("{value:.2}"),
        v if v < 99.95 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

/// A bar of `columns` characters: `full` of it '#', then `half` of it '+', the rest '.'.
pub fn bar(full: f64, half: f64, columns: usize) -> String {
    let cells = |part: f64| (part.clamp(0.0, 1.0) * columns as f64).round() as usize;
    let full_cells = cells(full);
    let half_cells = cells(full + half).saturating_sub(full_cells).min(columns - full_cells);
    let rest = columns - full_cells - half_cells;
    format!("[{}{}{}]", "#".repeat(full_cells), "+".repeat(half_cells), ".".repeat(rest))
}

/// `words` in lines of at most [`COLUMNS`], the first after `label` in a column of its own.
pub fn paragraph(label: &str, words: &[String]) -> String {
    let mut out = String::new();
    let mut line = format!("{label:<10}");
    let mut empty = true;
    for word in words {
        if !empty && line.chars().count() + 2 + word.chars().count() > COLUMNS {
            out.push_str(line.trim_end());
            out.push('\n');
            line = " ".repeat(10);
            empty = true;
        }
        if !empty {
            line.push_str(", ");
        }
        line.push_str(&fit(word, COLUMNS - 10));
        empty = false;
    }
    out.push_str(line.trim_end());
    out.push('\n');
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        assert_eq!([0, 1023, 1536, 3 << 30].map(bytes), ["0 B", "1023 B", "1.5 KiB", "3.0 GiB"]);
        assert_eq!([7, 99_999, 134_515_008, 7_241_732_096].map(count), ["7", "99999", "135 M", "7.24 B"]);
        let times = [0.0, 0.00042, 0.042, 1.25, 59.96, 125.0, 12_000.0, 370_000.0].map(seconds);
        assert_eq!(times, ["0 us", "420 us", "42.0 ms", "1.25 s", "60.0 s", "2 min 5 s", "3 h 20 min", "4 d 6 h"]);
        assert_eq!([9.994, 9.996, 99.96, 1234.5].map(significant), ["9.99", "10.0", "100", "1234"]);
    }

    #[test]
    fn bars_are_as_long_as_they_should_be() {
        assert_eq!(bar(0.5, 0.25, 8), "[####++..]");
        assert_eq!(bar(0.0, 0.0, 4), "[....]");
        assert_eq!(bar(0.9, 0.9, 4), "[####]");
        assert_eq!(bar(f64::NAN, 2.0, 4).len(), 6);
    }

    #[test]
    fn text_fits_and_steers_nothing() {
        assert_eq!(fit("/a/very/long/path/model.gguf", 13), "/a/ver…l.gguf");
        assert_eq!(fit("short", 13), "short");
        assert_eq!(plain("a\x1b[2Jb\n"), "a [2Jb ");
        assert_eq!(streamed("a\x1b[2J\n\tb\u{9b}"), "a[2J\n\tb");
        let words: Vec<String> = (0..30).map(|i| format!("{i} of something")).collect();
        let text = paragraph("Totals", &words);
        assert!(text.lines().count() > 3 && text.lines().all(|line| line.len() <= COLUMNS), "{text}");
    }
}
