//! What chat templates expect of Python's library: `json.dumps` and `strftime`.

use std::io;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

/// `json.dumps(value, indent, separators, ensure_ascii)`.
pub(super) fn json(
    value: &impl Serialize,
    indent: Option<usize>,
    separators: Option<&[String]>,
    ascii: bool,
) -> Result<String, serde_json::Error> {
    let mut bytes = Vec::new();
    match (indent, separators) {
        (Some(indent), None) => {
            let indent = " ".repeat(indent.min(16));
            value.serialize(&mut Serializer::with_formatter(
                &mut bytes,
                PrettyFormatter::with_indent(indent.as_bytes()),
            ))?;
        }
        (None, separators) => {
            let (comma, colon) = match separators {
                Some([comma, colon]) => (comma.as_str(), colon.as_str()),
                Some(_) => {
                    return Err(serde::ser::Error::custom("separators are a comma and a colon"));
                }
                None => (", ", ": "),
            };
            value.serialize(&mut Serializer::with_formatter(&mut bytes, Separators { comma, colon }))?;
        }
        (Some(_), Some(_)) => {
            return Err(serde::ser::Error::custom("indent and separators together are not known here"));
        }
    }
    let text = String::from_utf8(bytes).map_err(serde::ser::Error::custom)?;
    Ok(if ascii { escape_non_ascii(&text) } else { text })
}

/// Python's compact form, with its separators.
struct Separators<'a> {
    comma: &'a str,
    colon: &'a str,
}

impl Formatter for Separators<'_> {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { out.write_all(self.comma.as_bytes()) }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { out.write_all(self.comma.as_bytes()) }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(self.colon.as_bytes())
    }
}

fn escape_non_ascii(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_ascii() {
            out.push(c);
        } else {
            for unit in c.encode_utf16(&mut [0; 2]) {
                out.push_str(&format!("\\u{unit:04x}"));
            }
        }
    }
    out
}

/// Seconds since 1970 in UTC; 0 if the clock stands before that.
pub(super) fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// `strftime` in the C locale, for the directives templates use; an unknown one stays as it is.
pub(super) fn strftime(format: &str, seconds: u64) -> String {
    let days = seconds / 86_400;
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let month_name = MONTHS[month as usize - 1];
    let day_name = DAYS[((days + 4) % 7) as usize];
    let day_of_year = days - days_before(year) + 1;
    let hour12 = (hour + 11) % 12 + 1;
    let mut out = String::with_capacity(format.len() + 16);
    let mut rest = format;
    while let Some((plain, directive)) = rest.split_once('%') {
        out.push_str(plain);
        // A '-' takes the padding away.
        let (padded, letter) = match directive.strip_prefix('-') {
            Some(after) => (false, after),
            None => (true, directive),
        };
        let two = |value: u64| {
            if padded { format!("{value:02}") } else { value.to_string() }
        };
        let Some(c) = letter.chars().next() else {
            out.push('%');
            rest = directive;
            continue;
        };
        let text = match c {
            'Y' => year.to_string(),
            'y' => two(year % 100),
            'm' => two(month),
            'd' => two(day),
            'e' => format!("{day:2}"),
            'H' => two(hour),
            'I' => two(hour12),
            'M' => two(minute),
            'S' => two(second),
            'j' => {
                if padded {
                    format!("{day_of_year:03}")
                } else {
                    day_of_year.to_string()
                }
            }
            'p' => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            'B' => month_name.to_owned(),
            'b' | 'h' => month_name[..3].to_owned(),
            'A' => day_name.to_owned(),
            'a' => day_name[..3].to_owned(),
            'w' => ((days + 4) % 7).to_string(),
            'F' => format!("{year}-{month:02}-{day:02}"),
            'T' => format!("{hour:02}:{minute:02}:{second:02}"),
            'Z' => "UTC".to_owned(),
            'z' => "+0000".to_owned(),
            '%' => "%".to_owned(),
            other => format!("%{}{other}", if padded { "" } else { "-" }),
        };
        out.push_str(&text);
        rest = &letter[c.len_utf8()..];
    }
    out + rest
}

/// Days from 1970-01-01 to the first of January of `year`.
fn days_before(year: u64) -> u64 {
    let past = year - 1;
    (past * 365 + past / 4 - past / 100 + past / 400) - 719_162
}

/// Year, month and day of the Gregorian calendar.
fn civil(days: u64) -> (u64, u64, u64) {
    // A first guess that is never too late, then at most one step.
    let mut year = 1970 + days / 366;
    while days_before(year + 1) <= days {
        year += 1;
    }
    let leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let lengths = [31, 28 + u64::from(leap), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut day = days - days_before(year);
    let mut month = 0;
    while day >= lengths[month] {
        day -= lengths[month];
        month += 1;
    }
    (year, month as u64 + 1, day + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_as_python_writes_them() {
        // python3 -c 'import datetime as d; print(d.datetime.fromtimestamp(S, d.UTC).strftime(F))'
        let all = "%Y-%m-%d %H:%M:%S %a %A %b %B %j %y %I %p %-d %e %%";
        assert_eq!(strftime(all, 0), "1970-01-01 00:00:00 Thu Thursday Jan January 001 70 12 AM 1  1 %");
        assert_eq!(strftime(all, 1_709_210_096), "2024-02-29 12:34:56 Thu Thursday Feb February 060 24 12 PM 29 29 %");
        assert_eq!(strftime("%d %b %Y", 4_107_542_400), "01 Mar 2100");
        assert_eq!(strftime("%d %b %Y", 1_735_689_599), "31 Dec 2024");
        assert_eq!(strftime("%Q %-q é%", 0), "%Q %-q é%");
    }

    #[test]
    fn json_as_python_writes_it() {
        let value = serde_json::json!([1, {"é😀": "</a>"}, []]);
        assert_eq!(json(&value, None, None, false).unwrap(), "[1, {\"é😀\": \"</a>\"}, []]");
        assert_eq!(json(&value, None, None, true).unwrap(), "[1, {\"\\u00e9\\ud83d\\ude00\": \"</a>\"}, []]");
        let compact = [",".to_owned(), ":".to_owned()];
        assert_eq!(json(&value, None, Some(&compact), false).unwrap(), "[1,{\"é😀\":\"</a>\"},[]]");
        assert!(json(&value, None, Some(&compact[..1]), false).is_err());
    }
}
