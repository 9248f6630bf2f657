//! The service as README installs it, in a systemd of its own, booted for this test. Needs root and namespaces.
//!
//! The commands under "Under systemd" in README.md are taken from there and run as they stand; then `installed/checks.sh`
//! does what an operator does. The units are the repository's, the programs those under test, the model a tiny one.

use llmd_tests::daemon::program;
use llmd_tests::source;
use llmd_tests::tiny_model::TinyModel;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What `boot.sh` exits with where it cannot boot anything.
const NOT_POSSIBLE: i32 = 77;
/// Least checks that must have held: a script that ends early has not shown anything.
const CHECKS_LEAST: usize = 30;

/// A folder that looks like the repository after `cargo build --release`, removed at the end.
struct Checkout(PathBuf);

impl Checkout {
    fn new() -> Self {
        let folder = Self(env::temp_dir().join(format!("llmd-installed-{}", std::process::id())));
        let _ = fs::remove_dir_all(&folder.0);
        let release = folder.0.join("target/release");
        fs::create_dir_all(&release).expect("make a folder");
        for (variable, name) in [("LLMD_BIN", "llmd"), ("LLMCTL_BIN", "llmctl")] {
            fs::copy(program(variable, name), release.join(name)).expect("copy a program");
        }
        // Copied, not linked: the repository may lie on a file system that the overlay of the root does not show.
        fs::copy(source::repository().join("README.md"), folder.0.join("README.md")).expect("copy README.md");
        fs::create_dir(folder.0.join("systemd")).expect("make a folder");
        for file in source::files(&source::repository().join("systemd")) {
            let name = file.file_name().expect("a file");
            fs::copy(&file, folder.0.join("systemd").join(name)).expect("copy a unit");
        }
        TinyModel::slow().write(&folder.0.join("MODEL.gguf")).expect("write the tiny model");
        folder
    }
}

impl Drop for Checkout {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The shell commands of README's section on systemd.
fn installation(readme: &str) -> &str {
    let section = readme.split_once("Under systemd, as root:").expect("README says how to install under systemd").1;
    let block = section.split_once("```sh\n").expect("in a block of shell commands").1;
    block.split_once("```").expect("that ends").0
}

#[test]
fn an_operator_installs_uses_breaks_and_stops_it() {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("installed");
    let checkout = Checkout::new();
    let readme = fs::read_to_string(source::repository().join("README.md")).expect("read README.md");
    let checks = fs::read_to_string(tests.join("checks.sh")).expect("read the checks");
    let script = format!("set -ex\n{}\nset +ex\n{checks}", installation(&readme));
    fs::write(checkout.0.join("script"), script).expect("write the script");

    let booted = Command::new("bash").arg(tests.join("boot.sh")).arg(&checkout.0).output().expect("run bash");
    let said = String::from_utf8_lossy(&booted.stderr);
    if booted.status.code() == Some(NOT_POSSIBLE) {
        println!("SKIPPED: {}", said.lines().last().unwrap_or("this machine boots no systemd"));
        return;
    }
    let output = fs::read_to_string(checkout.0.join("output")).unwrap_or_default();
    assert!(booted.status.success(), "{}\n{output}{said}", booted.status);
    assert!(!output.contains("FAILED"), "{output}");
    let held = output.lines().filter(|line| line.starts_with("holds: ")).count();
    assert!(held >= CHECKS_LEAST, "{held} checks held, {CHECKS_LEAST} are there:\n{output}");
}
