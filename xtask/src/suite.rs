//! Suites of tests, and reading what a test binary says.

use crate::build::TestBinary;
use crate::failure::{Context, Failure, Result};
use crate::place;
use std::fmt;
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// The name of the suite that is made of all unit and documentation tests.
pub const UNIT: &str = "unit";

/// A suite: the unit tests, or one integration test of `tests/tests/`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Suite {
    /// As typed: "end-to-end".
    pub name: String,
    /// The first sentence of the file.
    pub about: String,
}

impl Suite {
    /// Name of the integration test's target: "end_to_end".
    pub fn target(&self) -> String {
        self.name.replace('-', "_")
    }

    /// Whether its tests read the default model. The others run on a machine that cannot fetch it.
    pub fn needs_model(&self) -> bool {
        !matches!(self.name.as_str(), "rules" | "rings" | "simulation" | "installed")
    }
}

/// All suites there are: the unit tests, then one for each file in `tests/tests/` and each folder there with a `main.rs`,
/// quick ones first.
pub fn all() -> Result<Vec<Suite>> {
    let folder = place::workspace().join("tests/tests");
    let mut suites = vec![Suite { name: UNIT.into(), about: "Unit and documentation tests of every crate.".into() }];
    for entry in fs::read_dir(&folder).cannot(format!("list {}", folder.display()))? {
        let path = entry.cannot(format!("list {}", folder.display()))?.path();
        let root = if path.is_dir() { path.join("main.rs") } else { path.clone() };
        if root.is_file() && root.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&root).cannot(format!("read {}", root.display()))?;
            let stem = path.file_stem().unwrap_or_default().to_string_lossy().replace('_', "-");
            suites.push(Suite { name: stem, about: first_sentence(&text) });
        }
    }
    const ORDER: [&str; 8] = [UNIT, "rules", "rings", "simulation", "golden", "quality", "end-to-end", "hostile"];
    let place = |name: &str| ORDER.iter().position(|o| *o == name).unwrap_or(ORDER.len());
    suites.sort_by(|a, b| (place(&a.name), &a.name).cmp(&(place(&b.name), &b.name)));
    Ok(suites)
}

fn first_sentence(text: &str) -> String {
    let lines = text.lines().map_while(|line| line.strip_prefix("//!")).map(str::trim);
    let paragraph: Vec<_> = lines.take_while(|line| !line.is_empty()).collect();
    let paragraph = paragraph.join(" ");
    match paragraph.find(". ") {
        Some(end) => paragraph[..=end].to_owned(),
        None => paragraph,
    }
}

/// How many tests did what.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Ran and held.
    pub passed: u64,
    /// Ran and did not hold; or did not come to an end.
    pub failed: u64,
    /// Said `SKIPPED: why`, because this machine lacks something.
    pub skipped: u64,
    /// Marked `#[ignore]`.
    pub ignored: u64,
}

impl Counts {
    /// Adds another's.
    pub fn add(&mut self, other: Counts) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
        self.ignored += other.ignored;
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed", self.passed, self.failed)?;
        if self.skipped > 0 {
            write!(f, ", {} skipped", self.skipped)?;
        }
        if self.ignored > 0 {
            write!(f, ", {} ignored", self.ignored)?;
        }
        Ok(())
    }
}

/// Reads the lines of a test binary.
///
/// With `--show-output`, what passing tests printed stands between a line `successes:` and the next `failures:` or
/// result. There a line that begins with `SKIPPED: ` says that one test could not do what it is for.
#[derive(Debug, Default)]
pub struct Reader {
    counts: Counts,
    results: u32,
    in_successes: bool,
}

impl Reader {
    /// Takes one line; returns whether it is worth showing.
    pub fn line(&mut self, line: &str) -> bool {
        match line {
            "successes:" => self.in_successes = true,
            "failures:" => self.in_successes = false,
            _ => {}
        }
        if let Some(result) = line.strip_prefix("test result: ") {
            self.in_successes = false;
            self.results += 1;
            let count = |what: &str| count_before(result, what);
            self.counts.passed += count(" passed");
            self.counts.failed += count(" failed");
            self.counts.ignored += count(" ignored");
        }
        if self.in_successes && line.starts_with("SKIPPED: ") {
            self.counts.skipped += 1;
            return true;
        }
        !self.in_successes && !line.is_empty()
    }

    /// The counts, once the binary has ended, and `ended_well` says how. A binary that died before it could report, or
    /// that reported only good things and yet ended badly, counts as one failure more.
    pub fn finish(self, ended_well: bool) -> Counts {
        let mut counts = self.counts;
        // libtest counts a test that skipped itself as passed.
        counts.passed = counts.passed.saturating_sub(counts.skipped);
        if (!ended_well || self.results == 0) && counts.failed == 0 {
            counts.failed = 1;
        }
        counts
    }
}

/// The number that stands directly before `what`: 5 in "ok. 5 passed; 0 failed" for " passed".
fn count_before(text: &str, what: &str) -> u64 {
    let Some(end) = text.find(what) else { return 0 };
    let digits = text[..end].rsplit(|c: char| !c.is_ascii_digit()).next().unwrap_or("");
    digits.parse().unwrap_or(0)
}

/// Runs a command that speaks as test binaries do, shows what it says and counts. After `limit` it is killed and counts
/// as failed.
pub fn run_counted(mut command: Command, name: &str, limit: Duration, show_output: bool) -> Result<Counts> {
    let deadline = Instant::now() + limit;
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().cannot(format!("start the tests of {name}"))?;
    let stdout = BufReader::new(child.stdout.take().expect("it is piped"));
    let (sender, lines) = mpsc::channel();
    // Ends by itself when the pipe closes; one blocked on a pipe that a grandchild still holds is left to our own end.
    thread::spawn(move || {
        for line in stdout.split(b'\n') {
            let Ok(line) = line else { return };
            if sender.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                return;
            }
        }
    });
    let mut reader = Reader::default();
    loop {
        match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(line) => {
                if reader.line(&line) || show_output {
                    println!("{line}");
                }
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                println!("{name}: not finished after {} s, killed", limit.as_secs());
                child.kill().cannot(format!("kill the tests of {name}"))?;
                break;
            }
        }
    }
    let status = child.wait().cannot(format!("wait for the tests of {name}"))?;
    if status.code().is_none() {
        println!("{name}: {status}");
    }
    Ok(reader.finish(status.success()))
}

/// A command that runs a test binary as cargo would.
pub fn command(binary: &TestBinary) -> Command {
    let mut command = Command::new(&binary.path);
    command.arg("--show-output").current_dir(&binary.folder);
    command
}

/// The suites named, or all; an unknown name is an error that lists the known ones.
pub fn select(names: &[String], all: &[Suite]) -> Result<Vec<Suite>> {
    if names.is_empty() {
        return Ok(all.to_vec());
    }
    let mut selected: Vec<Suite> = Vec::new();
    for name in names {
        let Some(suite) = all.iter().find(|suite| suite.name == *name) else {
            let known: Vec<_> = all.iter().map(|suite| suite.name.as_str()).collect();
            return Err(Failure::new(format!("there is no suite {name}; there are: {}", known.join(", "))));
        };
        if !selected.contains(suite) {
            selected.push(suite.clone());
        }
    }
    Ok(selected)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, ended_well: bool) -> (Counts, Vec<&str>) {
        let mut reader = Reader::default();
        let shown = text.lines().filter(|line| reader.line(line)).collect();
        (reader.finish(ended_well), shown)
    }

    #[test]
    fn passes_failures_and_skips_are_counted() {
        let text = "\nrunning 4 tests\ntest a ... ok\ntest b ... ok\ntest c ... FAILED\ntest d ... ignored\n\nsuccesses:\n\n\
                    ---- a stdout ----\nSKIPPED: no systemd here\n\n---- b stdout ----\nchatter\n\nsuccesses:\n    a\n    b\n\n\
                    failures:\n\n---- c stdout ----\nSKIPPED: not a skip, it failed\n\nfailures:\n    c\n\n\
                    test result: FAILED. 2 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s\n";
        let (counts, shown) = read(text, false);
        assert_eq!(counts, Counts { passed: 1, failed: 1, skipped: 1, ignored: 1 });
        assert!(shown.contains(&"SKIPPED: no systemd here") && !shown.contains(&"chatter"), "{shown:?}");
    }

    #[test]
    fn several_binaries_in_one_stream_add_up() {
        let one = "test result: ok. 12 passed; 0 failed; 0 ignored; 0 measured; 3 filtered out; finished in 0.10s\n";
        assert_eq!(read(&one.repeat(2), true).0, Counts { passed: 24, ..Counts::default() });
    }

    #[test]
    fn a_binary_that_dies_counts_as_a_failure() {
        assert_eq!(read("running 2 tests\ntest a ... ok\n", false).0.failed, 1);
        assert_eq!(read("", true).0.failed, 1);
        let passed = "test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out\n";
        assert_eq!(read(passed, false).0, Counts { passed: 1, failed: 1, ..Counts::default() });
    }

    #[test]
    fn a_binary_that_hangs_is_killed_and_counts_as_a_failure() {
        let mut command = Command::new("sleep");
        command.arg("60");
        let begun = Instant::now();
        let counts = run_counted(command, "sleep", Duration::from_millis(50), false).unwrap();
        assert_eq!(counts, Counts { failed: 1, ..Counts::default() });
        assert!(begun.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn unknown_suites_are_refused_and_known_ones_taken_once() {
        let all = ["unit", "rings"].map(|name| Suite { name: name.into(), about: String::new() });
        let names = |names: &[&str]| names.iter().map(|n| n.to_string()).collect::<Vec<_>>();
        assert_eq!(select(&names(&["rings", "rings"]), &all).unwrap(), all[1..]);
        assert_eq!(select(&[], &all).unwrap(), all);
        assert!(select(&names(&["ring"]), &all).unwrap_err().to_string().contains("unit, rings"));
    }

    #[test]
    fn the_first_sentence_is_found() {
        assert_eq!(first_sentence("//! One thing. Another.\n"), "One thing.");
        assert_eq!(first_sentence("//! One\n//! thing\n//!\n//! More.\nuse x;\n"), "One thing");
        assert_eq!(first_sentence("use x;\n"), "");
    }
}
