//! The rules of the house: who may use whom, where unsafe code may be, how long a file may get, which licences come in.
//! They are data here; a rule that a change really needs changed is changed here too, in the same commit, with its reason.

use llmd_tests::{licence, source};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Command;

/// Which of our own crates a crate may depend on. Tests and benchmarks may use all.
const CRATES: [(&str, &[&str]); 6] = [
    ("protocol", &[]),
    ("kernels", &[]),
    ("xtask", &[]),
    ("client", &["llmd-protocol"]),
    ("llmctl", &["llmd-client", "llmd-protocol"]),
    ("daemon", &["llmd-kernels", "llmd-protocol"]),
];

/// What a room of the daemon may use.
struct Room {
    name: &'static str,
    /// Rooms beside it; "a::b" allows only that part of room a.
    rooms: &'static [&'static str],
    /// Crates out of [`WATCHED`].
    crates: &'static [&'static str],
    /// Neither clock nor file nor thread: the same inputs give the same outputs.
    pure: bool,
}

/// Crates whose users are worth knowing.
const WATCHED: [&str; 5] = ["llmd_protocol", "llmd_kernels", "tokio", "nix", "libc"];

/// Parts of std that mean a clock, a file, a thread or the outside world, or an order that differs from run to run.
const IMPURE: [&str; 8] = [
    "collections::hash_map::RandomState",
    "env",
    "fs",
    "net",
    "process",
    "thread",
    "time::Instant",
    "time::SystemTime",
];

const PROTOCOL: &[&str] = &["llmd_protocol"];
const KERNELS: &[&str] = &["llmd_kernels"];

const ROOMS: &[Room] = &[
    // Policy and its data: testable without a device, shared memory or a clock.
    Room { name: "sequence", rooms: &["kv_cache::block"], crates: &[], pure: true },
    Room { name: "plan", rooms: &["sequence"], crates: &[], pure: true },
    Room { name: "kv_cache", rooms: &[], crates: &[], pure: true },
    Room { name: "scheduler", rooms: &["kv_cache", "plan", "sequence"], crates: &[], pure: true },
    Room { name: "batch", rooms: &["kv_cache::block", "plan", "sequence"], crates: &[], pure: true },
    // The way from a batch to token ids.
    Room { name: "backend", rooms: &["batch", "config", "kv_cache::block"], crates: KERNELS, pure: false },
    Room {
        name: "model",
        rooms: &["backend", "batch", "config", "kv_cache::block", "text::source"],
        crates: KERNELS,
        pure: false,
    },
    Room { name: "sampler", rooms: &["batch", "config", "sequence"], crates: KERNELS, pure: true },
    // Text: knows ids and strings, not who asked. Not pure: a chat template may ask for today's date.
    Room { name: "text", rooms: &[], crates: PROTOCOL, pure: false },
    // The way in and out.
    Room { name: "listen", rooms: &[], crates: &["llmd_protocol", "nix"], pure: false },
    Room { name: "sessions", rooms: &["listen", "metrics"], crates: &["llmd_protocol", "nix"], pure: false },
    Room { name: "event", rooms: &["sequence", "sessions", "text"], crates: PROTOCOL, pure: false },
    Room { name: "intake", rooms: &["event", "sequence", "sessions", "text"], crates: PROTOCOL, pure: false },
    Room { name: "stream", rooms: &["sequence", "sessions", "text"], crates: PROTOCOL, pure: false },
    Room {
        name: "outbox",
        rooms: &["metrics", "notifier", "sequence", "sessions", "stream", "text"],
        crates: PROTOCOL,
        pure: false,
    },
    Room { name: "notifier", rooms: &["metrics", "sessions"], crates: &["llmd_protocol", "nix"], pure: false },
    // Operation.
    Room { name: "config", rooms: &["kv_cache::block"], crates: PROTOCOL, pure: false },
    Room { name: "metrics", rooms: &["kv_cache::block"], crates: PROTOCOL, pure: false },
    Room { name: "logging", rooms: &[], crates: &[], pure: false },
    Room { name: "step_log", rooms: &["plan", "sequence"], crates: &[], pure: false },
    Room {
        name: "control",
        rooms: &["listen", "logging", "metrics"],
        crates: &["llmd_protocol", "tokio"],
        pure: false,
    },
    // Where rooms are put together: the whole from settings, and the loop.
    Room { name: "serve", rooms: &["*"], crates: &["llmd_protocol", "llmd_kernels"], pure: false },
    Room { name: "engine", rooms: &["*"], crates: &["llmd_protocol", "llmd_kernels", "nix"], pure: false },
];

/// Where unsafe code may be: ring memory and its atomics, SIMD and mappings; and the tests that attack the
/// mappings and fork, which must do what no honest client does.
const UNSAFE_IN: [&str; 4] = ["protocol/", "kernels/", "tests/tests/rings/", "tests/tests/hostile/"];

/// Longest file; "about 600", so that the last comment need not be squeezed.
const LINES_MAX: usize = 620;
/// Files that may be longer, and why.
const LONG_FILES: [(&str, &str); 0] = [];

/// The daemon's rooms that break a rule, as sentences. `files` are paths below `daemon/src` and their texts.
fn broken_room_rules(files: &[(String, String)]) -> Vec<String> {
    let mut broken = Vec::new();
    for (path, text) in files {
        let whole = Path::new(path);
        let stem = whole.file_stem().unwrap_or_default().to_string_lossy();
        if whole.components().count() == 1 && (stem == "lib" || stem == "main") {
            continue;
        }
        if stem == "tests" || stem.ends_with("_tests") || path.contains("/tests/") {
            continue;
        }
        let depth = whole.components().count() - usize::from(stem == "mod");
        let name = path.split(['/', '.']).next().unwrap_or_default();
        let Some(room) = ROOMS.iter().find(|room| room.name == name) else {
            broken.push(format!("{path}: there is no rule for the room {name}"));
            continue;
        };
        let code = source::code(text);
        let code = source::without_tests(&code);
        let mut used = source::paths(code, "crate");
        used.extend(source::paths_upward(code, depth).into_iter().filter(|p| ROOMS.iter().any(|r| r.name == p[0])));
        for target in used {
            let allowed = target[0] == name
                || room.rooms.iter().any(|rule| *rule == "*" || rule.split("::").zip(&target).all(|(r, t)| r == t));
            if !allowed {
                broken.push(format!("{path}: {name} may not use {}", target.join("::")));
            }
        }
        for watched in WATCHED {
            if !room.crates.contains(&watched) && source::has_word(code, watched) {
                broken.push(format!("{path}: {name} may not use the crate {watched}"));
            }
        }
        if room.pure {
            for target in source::paths(code, "std") {
                let target = target.join("::");
                if IMPURE.iter().any(|part| target == *part || target.starts_with(&format!("{part}::"))) {
                    broken.push(format!("{path}: {name} is pure and may not use std::{target}"));
                }
            }
        }
    }
    broken
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|e| panic!("cannot read {}: {e}", path.display()))
}

/// Paths relative to the repository, and texts, of its Rust files.
fn rust_files() -> Vec<(String, String)> {
    let root = source::repository();
    let relative = |path: &Path| path.strip_prefix(root).expect("below the root").to_string_lossy().into_owned();
    source::files(root)
        .iter()
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs"))
        .map(|path| (relative(path), read(path)))
        .collect()
}

fn assert_none(broken: &[String]) {
    assert!(broken.is_empty(), "{} broken:\n{}", broken.len(), broken.join("\n"));
}

#[test]
fn crates_use_only_what_they_may() {
    let mut broken = Vec::new();
    for (name, allowed) in CRATES {
        let manifest: toml::Table = read(&source::repository().join(name).join("Cargo.toml")).parse().expect("TOML");
        // Also below [target.'cfg(...)'].
        let mut tables = vec![&manifest];
        if let Some(targets) = manifest.get("target").and_then(|t| t.as_table()) {
            tables.extend(targets.values().filter_map(|t| t.as_table()));
        }
        for table in tables {
            for section in ["dependencies", "build-dependencies"] {
                let keys = table.get(section).and_then(|s| s.as_table()).into_iter().flat_map(|s| s.keys());
                for key in keys.filter(|key| *key == "llmd" || key.starts_with("llmd-")) {
                    if !allowed.contains(&key.as_str()) {
                        broken.push(format!("{name} may not depend on {key}"));
                    }
                }
            }
        }
    }
    assert_none(&broken);
}

#[test]
fn rooms_of_the_daemon_use_only_what_they_may() {
    let files: Vec<_> = rust_files()
        .into_iter()
        .filter_map(|(path, text)| Some((path.strip_prefix("daemon/src/")?.to_owned(), text)))
        .collect();
    assert!(files.len() > 5, "the daemon's sources were found");
    assert_none(&broken_room_rules(&files));
}

#[test]
fn a_room_that_breaks_a_rule_is_seen() {
    let seen = |path: &str, text: &str| broken_room_rules(&[(path.into(), text.into())]).len();
    assert_eq!(seen("scheduler/mod.rs", "use crate::plan::StepPlan;"), 0);
    assert_eq!(seen("scheduler/mod.rs", "use crate::engine::Event;"), 1);
    assert_eq!(seen("scheduler/mod.rs", "use crate::{plan::StepPlan, sessions, outbox};"), 2);
    assert_eq!(seen("scheduler/fair.rs", "use super::super::sessions::Session;"), 1);
    assert_eq!(seen("scheduler.rs", "use super::sessions::Session;"), 1);
    assert_eq!(seen("scheduler/mod.rs", "fn f() { llmd_protocol::limits::X; tokio::spawn(x); }"), 2);
    assert_eq!(seen("scheduler/mod.rs", "let t = std::time::Instant::now();"), 1);
    assert_eq!(seen("scheduler/mod.rs", "use std::time::{Duration, SystemTime}; std::fs::read(x)"), 2);
    assert_eq!(seen("batch.rs", "use crate::kv_cache::block::BlockId;"), 0);
    assert_eq!(seen("batch.rs", "use crate::kv_cache::pool::BlockPool;"), 1);
    assert_eq!(seen("cellar.rs", ""), 1, "a room without a rule");
    assert_eq!(seen("plan.rs", "// crate::engine\n#[cfg(test)]\nmod tests { use crate::engine; }"), 0);
}

#[test]
fn unsafe_code_is_where_it_may_be_and_nowhere_else() {
    let mut broken = Vec::new();
    let mut seen_where_allowed = false;
    for (path, text) in rust_files() {
        let code = source::code(&text);
        let has = source::has_word(&code, "unsafe");
        let allowed = UNSAFE_IN.iter().any(|folder| path.starts_with(folder));
        seen_where_allowed |= has && allowed;
        if has && !allowed {
            broken.push(format!("{path} has unsafe code"));
        }
        let is_root = path.ends_with("src/lib.rs") || path.ends_with("src/main.rs");
        if is_root && !allowed && !text.contains("#![forbid(unsafe_code)]") {
            broken.push(format!("{path} does not forbid unsafe code"));
        }
    }
    assert!(seen_where_allowed, "the scanner sees unsafe code at all");
    assert_none(&broken);
}

#[test]
fn files_are_short_or_have_a_reason() {
    let mut broken = Vec::new();
    let files = rust_files();
    for (path, text) in &files {
        let lines = text.lines().count();
        let excused = LONG_FILES.iter().any(|(long, _)| long == path);
        if lines > LINES_MAX && !excused {
            broken.push(format!("{path} has {lines} lines"));
        }
        if lines <= LINES_MAX && excused {
            broken.push(format!("{path} has only {lines} lines and needs no excuse any more"));
        }
    }
    for (long, _) in LONG_FILES {
        if !files.iter().any(|(path, _)| path == long) {
            broken.push(format!("{long} is excused and does not exist"));
        }
    }
    assert_none(&broken);
}

/// What has no place in the repository, in two halves, so that this file does not hold it either.
const NEVER: [(&str, &str); 7] = [
    ("/wo", "rk/"),
    ("/ro", "ot/"),
    ("crates", ".io"),
    ("pypi", ".org"),
    ("pythonhosted", ".org"),
    ("TO", "DO"),
    ("FIX", "ME"),
];

#[test]
fn texts_name_no_machine_no_registry_and_no_unfinished_work() {
    let root = source::repository();
    let mut broken = Vec::new();
    let mut texts = 0;
    for path in source::files(root) {
        // Generated, and full of the registry's address.
        if path.ends_with("Cargo.lock") {
            continue;
        }
        let Ok(text) = fs::read_to_string(&path) else { continue };
        texts += 1;
        for (first, second) in NEVER {
            let never = format!("{first}{second}");
            if let Some(line) = text.lines().position(|line| line.contains(&never)) {
                broken.push(format!("{}:{} has {never}", path.display(), line + 1));
            }
        }
        if text.trim() == "//! placeholder" {
            broken.push(format!("{} is empty", path.display()));
        }
    }
    assert!(texts > 30, "the repository's texts were found");
    assert_none(&broken);
}

#[test]
fn dependencies_have_allowed_licences_and_none_is_banned() {
    let deny: toml::Table = read(&source::repository().join("deny.toml")).parse().expect("TOML");
    let allowed: Vec<String> = deny["licenses"]["allow"].as_array().expect("a list").iter().map(text_of).collect();
    let banned: BTreeMap<String, String> = deny["bans"]["deny"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|ban| (text_of(&ban["crate"]), text_of(&ban["reason"])))
        .collect();
    let packages = locked_packages();
    assert!(packages.len() > 50, "cargo listed the tree");
    let mut broken = Vec::new();
    for (name, expression) in &packages {
        if !licence::is_allowed(expression, &allowed) {
            broken.push(format!("{name} has the licence {expression:?}"));
        }
        if let Some(reason) = banned.get(name) {
            broken.push(format!("{name} is banned: {reason}"));
        }
    }
    assert_none(&broken);
}

#[test]
fn every_dependency_has_a_reason_in_design_md() {
    let manifest: toml::Table = read(&source::repository().join("Cargo.toml")).parse().expect("TOML");
    let design = read(&source::repository().join("DESIGN.md"));
    let (_, table) = design.split_once("## Dependencies").expect("a section about dependencies");
    // First cells of the table's rows; one may name several crates, and their versions.
    let cells = table.lines().filter_map(|line| line.strip_prefix("| ")?.split('|').next());
    let explained: BTreeSet<&str> = cells.flat_map(|cell| cell.split([',', ' '])).collect();
    let ours = |name: &str| name == "llmd" || name.starts_with("llmd-");
    let dependencies = manifest["workspace"]["dependencies"].as_table().expect("a table");
    let missing: Vec<String> = dependencies
        .keys()
        .filter(|name| !ours(name) && !explained.contains(name.as_str()))
        .map(|name| format!("DESIGN.md does not say why {name} is needed"))
        .collect();
    assert_none(&missing);
}

#[test]
fn tolerated_advisories_are_still_about_something() {
    let deny: toml::Table = read(&source::repository().join("deny.toml")).parse().expect("TOML");
    let names: BTreeSet<String> = locked_packages().into_iter().map(|(name, _)| name).collect();
    for advisory in deny["advisories"]["ignore"].as_array().expect("a list") {
        let reason = text_of(&advisory["reason"]);
        let about = reason.split(' ').next().unwrap_or_default().to_owned();
        assert!(
            names.contains(&about),
            "{} is tolerated for {about}, which is not in the tree",
            text_of(&advisory["id"])
        );
    }
}

fn text_of(value: &toml::Value) -> String {
    value.as_str().expect("a string").to_owned()
}

/// Name and licence of every package in the locked tree, as far as it is built on Linux.
fn locked_packages() -> Vec<(String, String)> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    // Offline: what was built was downloaded, and that for the other systems does not matter.
    let platform = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let output = Command::new(cargo)
        .args(["metadata", "--format-version=1", "--locked", "--offline", "--filter-platform", &platform])
        .current_dir(source::repository())
        .output()
        .expect("run cargo");
    assert!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let packages = metadata["packages"].as_array().expect("a list of packages");
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    packages.iter().map(|package| (text(&package["name"]), text(&package["license"]))).collect()
}
