//! `benches/full.md`: when everything was last run, on what, and how it went.

use crate::failure::{Context, Result};
use crate::suite::Counts;
use crate::tool;
use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// One suite's outcome.
pub struct Line {
    /// Its name.
    pub name: String,
    /// How many tests did what.
    pub counts: Counts,
    /// How long it took.
    pub seconds: f64,
}

/// Writes the summary of a `--full` run to `path`.
pub fn write_full(path: &Path, lines: &[Line]) -> Result<()> {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let mut text = String::from("# The last full run\n\nWritten by `cargo xtask test --full`.\n\n");
    let _ = writeln!(text, "- Date: {} (UTC)", date(seconds / 86400));
    let _ = writeln!(text, "- Machine: {}", machine());
    let commit = tool::first_line(&["git"], &["describe", "--always", "--dirty"]);
    let _ = writeln!(text, "- Commit: {}", commit.as_deref().unwrap_or("not in a git checkout"));
    text.push_str("\n| suite | passed | failed | skipped | ignored | seconds |\n|---|---|---|---|---|---|\n");
    for Line { name, counts, seconds } in lines {
        let Counts { passed, failed, skipped, ignored } = counts;
        let _ = writeln!(text, "| {name} | {passed} | {failed} | {skipped} | {ignored} | {seconds:.0} |");
    }
    fs::write(path, text).cannot(format!("write {}", path.display()))
}

/// Processor, number of threads and kernel: what makes figures comparable, and nothing that names a machine.
fn machine() -> String {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let processor = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": ")).map(|p| p.1);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let kernel = tool::first_line(&["uname"], &["-sr"]).unwrap_or_default();
    format!("{}, {threads} threads, {kernel}", processor.unwrap_or("unknown processor"))
}

/// The calendar date of a day counted from 1970-01-01 (Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms",
/// `civil_from_days`): years begin in March, so that the leap day is the last of its year.
fn date(days: u64) -> String {
    let shifted = days + 719_468;
    let era = shifted / 146_097;
    let day_of_era = shifted % 146_097;
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 { march_month + 3 } else { march_month - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_right_around_leap_days() {
        for (days, expected) in [
            (0, "1970-01-01"),
            (11_016, "2000-02-29"),
            (11_017, "2000-03-01"),
            (20_453, "2025-12-31"),
            (47_540, "2100-02-28"),
            (47_541, "2100-03-01"),
        ] {
            assert_eq!(date(days), expected);
        }
    }
}
