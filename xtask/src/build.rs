//! Building through cargo, and learning what was built.

use crate::failure::{Context, Failure, Result};
use crate::place;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::env;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// What a build made, as far as it can be run.
#[derive(Debug, Default)]
pub struct Built {
    /// Programs, by name.
    programs: BTreeMap<String, PathBuf>,
    /// Test binaries, in the order cargo finished them.
    pub tests: Vec<TestBinary>,
}

/// One binary with tests in it.
#[derive(Debug, PartialEq, Eq)]
pub struct TestBinary {
    /// Name of the target: a crate's for unit tests, a file's for integration tests.
    pub target: String,
    /// Whether it holds the unit tests of a library or program, rather than a file of `tests/`.
    pub unit: bool,
    /// The binary.
    pub path: PathBuf,
    /// The package's folder, in which cargo runs tests.
    pub folder: PathBuf,
}

impl Built {
    /// The path of a program that this build made.
    pub fn program(&self, name: &str) -> Result<&Path> {
        match self.programs.get(name) {
            Some(path) => Ok(path),
            None => Err(Failure::new(format!("cargo built no program named {name}"))),
        }
    }
}

/// cargo itself: the one that runs us, if one does.
pub fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(place::workspace());
    command
}

/// `cargo build` with `arguments`. Progress and messages of the compiler go to standard error as always.
pub fn build(arguments: &[&str]) -> Result<Built> {
    let mut child = cargo()
        .arg("build")
        .args(arguments)
        .arg("--message-format=json-render-diagnostics")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .cannot("start cargo")?;
    let mut built = Built::default();
    for line in BufReader::new(child.stdout.take().expect("it is piped")).lines() {
        built.take(&line.cannot("read what cargo says")?);
    }
    if child.wait().cannot("wait for cargo")?.success() {
        Ok(built)
    } else {
        Err(Failure::new("the build failed, see above"))
    }
}

/// A line of cargo's JSON messages, as much of it as concerns us.
#[derive(Deserialize)]
struct Message {
    reason: String,
    #[serde(default)]
    manifest_path: PathBuf,
    target: Option<Target>,
    profile: Option<Profile>,
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Target {
    kind: Vec<String>,
    name: String,
}

#[derive(Deserialize)]
struct Profile {
    test: bool,
}

impl Built {
    fn take(&mut self, line: &str) {
        // Anything that is not such a message (a build script may print to standard output) is not ours to judge.
        let Ok(message) = serde_json::from_str::<Message>(line) else {
            return;
        };
        let Message { reason, manifest_path, target: Some(target), profile: Some(profile), executable: Some(path) } =
            message
        else {
            return;
        };
        if reason != "compiler-artifact" {
            return;
        }
        if profile.test {
            let unit = !target.kind.iter().any(|kind| kind == "test" || kind == "bench" || kind == "example");
            let folder = manifest_path.parent().unwrap_or(Path::new("/")).to_path_buf();
            self.tests.push(TestBinary { target: target.name, unit, path, folder });
        } else if target.kind.iter().any(|kind| kind == "bin") {
            self.programs.insert(target.name, path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_and_tests_are_told_apart() {
        let mut built = Built::default();
        for line in [
            r#"{"reason":"compiler-artifact","manifest_path":"/w/daemon/Cargo.toml","target":{"kind":["bin"],"name":"llmd"},"profile":{"test":false},"executable":"/t/llmd"}"#,
            r#"{"reason":"compiler-artifact","manifest_path":"/w/daemon/Cargo.toml","target":{"kind":["bin"],"name":"llmd"},"profile":{"test":true},"executable":"/t/llmd-1"}"#,
            r#"{"reason":"compiler-artifact","manifest_path":"/w/tests/Cargo.toml","target":{"kind":["test"],"name":"rings"},"profile":{"test":true},"executable":"/t/rings-1"}"#,
            r#"{"reason":"compiler-artifact","manifest_path":"/w/x/Cargo.toml","target":{"kind":["example"],"name":"chat"},"profile":{"test":true},"executable":"/t/chat-1"}"#,
            r#"{"reason":"compiler-artifact","manifest_path":"/w/p/Cargo.toml","target":{"kind":["lib"],"name":"p"},"profile":{"test":false},"executable":null}"#,
            r#"{"reason":"build-finished","success":true}"#,
            "a build script's own line",
        ] {
            built.take(line);
        }
        assert_eq!(built.program("llmd").unwrap(), Path::new("/t/llmd"));
        assert!(built.program("chat").is_err());
        let names: Vec<_> = built.tests.iter().map(|t| (t.target.as_str(), t.unit)).collect();
        assert_eq!(names, [("llmd", true), ("rings", false), ("chat", false)]);
        assert_eq!(built.tests[0].folder, Path::new("/w/daemon"));
    }
}
