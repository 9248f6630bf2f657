//! The units, and a daemon whose sockets come from systemd. No systemd needs to be running: its tools are enough.

use llmd_protocol::control::{self, DaemonState};
use llmd_protocol::message::{GenerateRequest, Prompt, SamplingParams};
use llmd_tests::daemon::{PATIENCE, Setup, program};
use llmd_tests::load::{self, Answer};
use llmd_tests::source;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Most exposure `systemd-analyze security` may find, in tenths: 1.0 of 10.
const EXPOSURE_TENTHS_MAX: u32 = 10;

/// Whether systemd's tools are here; says so if not.
fn has(tool: &str) -> bool {
    let found = Command::new(tool).arg("--version").output().is_ok_and(|output| output.status.success());
    if !found {
        println!("SKIPPED: {tool} is not installed");
    }
    found
}

/// A copy of the units in which the daemon is the one under test, so that its path exists.
struct Units {
    folder: PathBuf,
}

impl Units {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("llmd-units-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir(&folder).expect("make a folder");
        let daemon = program("LLMD_BIN", "llmd");
        let mut replaced = false;
        for unit in source::files(&source::repository().join("systemd")) {
            let text = fs::read_to_string(&unit).expect("read a unit");
            let here = text.replace("ExecStart=/usr/bin/llmd ", &format!("ExecStart={} ", daemon.display()));
            replaced |= here != text;
            fs::write(folder.join(unit.file_name().expect("a file")), here).expect("write a unit");
        }
        assert!(replaced, "the service starts /usr/bin/llmd");
        Self { folder }
    }

    fn unit(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }
}

impl Drop for Units {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn analyze(arguments: &[&str], units: &[&Path]) -> Output {
    Command::new("systemd-analyze").args(arguments).args(units).output().expect("run systemd-analyze")
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[test]
fn units_are_clean() {
    if !has("systemd-analyze") {
        return;
    }
    let units = Units::new("verify");
    let names = ["llmd.service", "llmd.socket", "llmd-control.socket", "llmd-metrics.socket"];
    let paths = names.map(|name| units.unit(name));
    let output = analyze(&["verify", "--man=no"], &paths.each_ref().map(PathBuf::as_path));
    assert!(output.status.success() && said(&output).is_empty(), "{}", said(&output));

    // It would have said so: an unknown key is a warning only, and still text.
    let service = units.unit("llmd.service");
    let text = fs::read_to_string(&service).expect("read the unit").replace("KillMode=", "KilMode=");
    fs::write(&service, text).expect("write the unit");
    assert!(said(&analyze(&["verify", "--man=no"], &[&service])).contains("KilMode"));
}

#[test]
fn the_sandbox_is_tight() {
    if !has("systemd-analyze") {
        return;
    }
    let units = Units::new("security");
    let threshold = format!("--threshold={EXPOSURE_TENTHS_MAX}");
    let output = analyze(&["security", "--offline=true", "--no-pager", &threshold], &[&units.unit("llmd.service")]);
    assert!(output.status.success(), "{}", said(&output));
    assert!(said(&output).contains("Overall exposure level"), "{}", said(&output));
}

fn request() -> GenerateRequest {
    GenerateRequest {
        prompt: Prompt::Text("the thing in the sand".into()),
        sampling: SamplingParams { max_tokens: 24, ignore_eos: true, ..SamplingParams::default() },
    }
}

#[test]
fn a_passed_socket_serves_as_an_own_one_does() {
    if !has("systemd-socket-activate") {
        return;
    }
    let own = Setup::tiny().start();
    let expected: Answer = load::answer(&own.client(), request()).expect("an answer");
    assert_eq!(expected.tokens.len(), 24);
    drop(own);

    let passed = Setup::tiny().start_by_socket_activation("llmd:llmd-control");
    let answer = load::answer(&passed.client(), request()).expect("an answer");
    assert_eq!((answer.tokens, answer.text), (expected.tokens, expected.text));
    let status = control::status(&passed.control(), PATIENCE).expect("an answer on the passed control socket");
    assert_eq!(status.state, DaemonState::Ready);
}
