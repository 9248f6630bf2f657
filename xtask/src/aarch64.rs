//! The kernels' tests for 64-bit ARM on an x86-64 machine: Debian's Rust compiler, which has that target's standard
//! library as a package, linked by the linker in our own toolchain and run by QEMU.
//!
//! Nothing is installed. apt fetches packages of Debian's next release from the mirror that this machine is set up with;
//! they are unpacked in the cache folder, where programs run with their own C library, newer perhaps than the machine's:
//!
//! ```text
//! aarch64.part/...        being made; thrown away at the next start
//! aarch64/rustc           starts the compiler
//! aarch64/system/...      what the packages hold
//! ```

use crate::build;
use crate::failure::{Context, Failure, Result};
use crate::place;
use crate::tool;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The compiler's name of the target.
const TARGET: &str = "aarch64-unknown-linux-gnu";
/// What the kernels must find on the processor that QEMU plays with `-cpu max`.
const BEST_ISA: &str = "NEON i8mm";
/// Debian's next release: the last one's compiler is soon too old.
const SUITE: &str = "testing";
/// What is needed; apt finds what that needs itself.
const PACKAGES: [&str; 4] = ["rustc", "libstd-rust-dev:arm64", "libc6-dev:arm64", "qemu-user"];
/// Of the target's packages only these: its compiler's libraries, say, are not needed for it.
const ARM_PACKAGES: [&str; 4] = ["libstd-rust-dev", "libc6", "libc6-dev", "libgcc-s1"];
const MACHINE_LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
const ARM_LIBRARIES: &str = "usr/lib/aarch64-linux-gnu";

/// Compiler, linker and emulator.
pub struct Tools {
    /// The folder in the cache.
    folder: PathBuf,
    linker: PathBuf,
}

impl Tools {
    /// Makes sure that they are there; the error says why this machine cannot have them.
    pub fn ensure() -> Result<Self> {
        if !cfg!(target_arch = "x86_64") {
            return Err(Failure::new("only an x86-64 machine is set up for this"));
        }
        let linker = linker()?;
        let cache = std::path::absolute(place::cache()?).cannot("find the cache folder")?;
        if cache.to_string_lossy().contains(char::is_whitespace) {
            return Err(Failure::new(
                "the cache folder has a space in its path, where cargo would part the emulator's",
            ));
        }
        fs::create_dir_all(&cache).cannot(format!("make the cache folder {}", cache.display()))?;
        let folder = cache.join("aarch64");
        if !folder.join("rustc").is_file() {
            let part = cache.join("aarch64.part");
            if part.exists() {
                fs::remove_dir_all(&part).cannot(format!("remove {}", part.display()))?;
            }
            make(&part)?;
            if folder.exists() {
                fs::remove_dir_all(&folder).cannot(format!("remove {}", folder.display()))?;
            }
            fs::rename(&part, &folder).cannot(format!("move {} into place", folder.display()))?;
        }
        Ok(Self { folder, linker })
    }

    /// A command that builds and runs the kernels' tests.
    pub fn tests(&self) -> Result<Command> {
        let system = self.folder.join("system");
        let libraries = system.join(ARM_LIBRARIES);
        let mut flags = vec!["-Clinker-flavor=ld.lld".to_owned(), format!("-L{}", libraries.display())];
        flags.push(format!("-Clink-arg=--sysroot={}", system.display()));
        flags.push("-Clink-arg=--dynamic-linker=/lib/ld-linux-aarch64.so.1".to_owned());
        // What a C compiler would add.
        for object in ["Scrt1.o", "crti.o", "crtn.o"] {
            flags.push(format!("-Clink-arg={}", libraries.join(object).display()));
        }
        let variable = |what: &str| format!("CARGO_TARGET_{}_{what}", TARGET.to_uppercase().replace('-', "_"));
        let emulator =
            [system.join("usr/bin/qemu-aarch64").as_path(), "-L".as_ref(), &system, "-cpu".as_ref(), "max".as_ref()]
                .map(|part| part.display().to_string());
        let mut command = build::cargo();
        command
            .args(["test", "--quiet", "--package=llmd-kernels", "--lib", "--tests", "--target", TARGET, "--target-dir"])
            .arg(place::target()?.join("aarch64"))
            .args(["--", "--show-output"])
            .env("RUSTC", self.folder.join("rustc"))
            .env(variable("LINKER"), &self.linker)
            .env(variable("RUNNER"), emulator.join(" "))
            // Flags for this machine's processor would not fit the other; spaces in paths are no separators here.
            .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\u{1f}"))
            .env("LLMD_TEST_ISA", BEST_ISA);
        Ok(command)
    }
}

/// The LLVM linker, which comes with every x86-64 toolchain and links for all targets.
fn linker() -> Result<PathBuf> {
    let sysroot = tool::first_line(&["rustc"], &["--print", "sysroot"]);
    let linker = sysroot.map(|sysroot| Path::new(&sysroot).join("lib/rustlib/x86_64-unknown-linux-gnu/bin/rust-lld"));
    linker.filter(|linker| linker.is_file()).ok_or_else(|| Failure::new("this Rust toolchain has no rust-lld"))
}

/// Fetches the packages and unpacks them into `part`.
fn make(part: &Path) -> Result<()> {
    let downloads = part.join("download");
    fs::create_dir_all(&downloads).cannot(format!("make {}", downloads.display()))?;
    let mirror = mirror()?;
    eprintln!("aarch64: fetching a compiler and QEMU from {mirror} (about 230 MB, once)");
    let configuration = format!("APT_CONFIG={}", configure(&downloads, &mirror)?.display());
    let packages = downloads.join("packages");
    fs::create_dir_all(&packages).cannot(format!("make {}", packages.display()))?;
    let chdir = format!("--chdir={}", packages.display());
    // A variable, for apt reads some options on its command line too late.
    let apt = ["env", &chdir, &configuration, "apt-get", "--quiet"];
    tool::run_to_stderr(&apt, &["update"]).cannot("learn what packages there are")?;
    let plan = tool::output(&apt, &[&["install", "--simulate", "--no-install-recommends"], &PACKAGES[..]].concat())
        .ok_or_else(|| Failure::new(format!("Debian {SUITE} lacks one of {} at the moment", PACKAGES.join(", "))))?;
    let wanted: Vec<String> = plan.lines().filter_map(planned).collect();
    let wanted: Vec<&str> = wanted.iter().map(String::as_str).collect();
    tool::run_to_stderr(&apt, &[&["download"], &wanted[..]].concat()).cannot("fetch packages")?;

    let system = part.join("system");
    fs::create_dir_all(system.join("usr/lib")).cannot(format!("make {}", system.display()))?;
    // The merged /usr that packages take for granted.
    symlink("usr/lib", system.join("lib")).cannot("make a link to usr/lib")?;
    for entry in fs::read_dir(&packages).cannot("list the packages")? {
        let package = entry.cannot("list the packages")?.path();
        let (package, system) = (package.to_string_lossy(), system.to_string_lossy());
        tool::run_to_stderr(&["dpkg-deb"], &["--extract", &package, &system]).cannot(format!("unpack {package}"))?;
    }
    keep_one_emulator(&system.join("usr/bin"))?;
    // Else in a package with a whole C compiler.
    let libraries = system.join(ARM_LIBRARIES);
    symlink("libgcc_s.so.1", libraries.join("libgcc_s.so")).cannot("make a link to libgcc_s")?;
    fs::remove_dir_all(&downloads).cannot(format!("remove {}", downloads.display()))?;
    write_compiler(part)
}

/// Where this machine's own Debian packages come from.
fn mirror() -> Result<String> {
    let format = ["indextargets", "--format", "$(ORIGIN)/$(LABEL) $(REPO_URI)", "Created-By: Packages"];
    let sources = tool::output(&["apt-get"], &format).ok_or_else(|| Failure::new("this machine has no apt"))?;
    let mirror = sources.lines().find_map(|line| line.strip_prefix("Debian/Debian "));
    mirror.map(str::to_owned).ok_or_else(|| Failure::new("apt knows no packages of Debian's; try apt-get update"))
}

/// Writes a configuration for apt that keeps everything in `folder` and takes nothing to be installed. Proxies and
/// credentials stay those of the machine.
fn configure(folder: &Path, mirror: &str) -> Result<PathBuf> {
    for name in ["lists/partial", "archives/partial", "preferences"] {
        fs::create_dir_all(folder.join(name)).cannot(format!("make {name}"))?;
    }
    let keys = "/usr/share/keyrings/debian-archive-keyring.gpg";
    let signed = if Path::new(keys).exists() { format!(" signed-by={keys}") } else { String::new() };
    let write = |name: &str, text: String| {
        let path = folder.join(name);
        fs::write(&path, text).cannot(format!("write {}", path.display())).map(|()| path)
    };
    write("status", String::new())?;
    write("sources.list", format!("deb [arch=amd64,arm64{signed}] {mirror} {SUITE} main\n"))?;
    let folder = folder.display();
    let options = [
        ("Dir::Etc::sourcelist", "/sources.list"),
        ("Dir::Etc::preferencesparts", "/preferences"),
        ("Dir::State", ""),
        ("Dir::State::lists", "/lists"),
        ("Dir::State::status", "/status"),
        ("Dir::Cache", ""),
    ];
    let mut text: String = options.iter().map(|(option, at)| format!("{option} \"{folder}{at}\";\n")).collect();
    text.push_str("Dir::Etc::sourceparts \"-\";\nAPT::Architecture \"amd64\";\n");
    text.push_str("APT::Architectures { \"amd64\"; \"arm64\"; };\nAcquire::Languages \"none\";\n");
    // The user that downloads otherwise may not enter the folder.
    text.push_str("APT::Sandbox::User \"\";\n");
    write("apt.conf", text)
}

/// What to download for a line of apt's plan, such as "Inst libc6:arm64 (2.43-7 Debian:testing [arm64])"; None for what a
/// package of the plan asks for and we have no use of: C compilers, files for C programs.
fn planned(line: &str) -> Option<String> {
    let (name, rest) = line.strip_prefix("Inst ")?.split_once(" (")?;
    let version = rest.split(' ').next()?;
    let (name, arm) = match name.strip_suffix(":arm64") {
        Some(name) => (name, true),
        None => (name, false),
    };
    let wanted = if arm {
        ARM_PACKAGES.contains(&name)
    } else {
        let useless =
            ["gcc", "cpp", "binutils"].iter().any(|prefix| name.starts_with(prefix)) || name.ends_with("-dev");
        !useless || name == "libstd-rust-dev"
    };
    wanted.then(|| format!("{name}:{}={version}", if arm { "arm64" } else { "amd64" }))
}

/// There is one for each kind of processor, of 400 MB together.
fn keep_one_emulator(programs: &Path) -> Result<()> {
    for entry in fs::read_dir(programs).cannot(format!("list {}", programs.display()))? {
        let path = entry.cannot(format!("list {}", programs.display()))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with("qemu-") && name != "qemu-aarch64" {
            fs::remove_file(&path).cannot(format!("remove {}", path.display()))?;
        }
    }
    Ok(())
}

/// Writes the program that starts the compiler, last of all.
fn write_compiler(folder: &Path) -> Result<()> {
    let script = format!(
        "#!/bin/sh\n# The compiler, with the C library it was made for.\nsystem=$(dirname \"$0\")/system\n\
         exec \"$system/{MACHINE_LIBRARIES}/ld-linux-x86-64.so.2\" --library-path \"$system/{MACHINE_LIBRARIES}\" \
         \"$system/usr/bin/rustc\" --sysroot \"$system/usr\" \"$@\"\n"
    );
    let path = folder.join("rustc");
    fs::write(&path, script).cannot(format!("write {}", path.display()))?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755))
        .cannot(format!("make {} a program", path.display()))?;
    if tool::answers(&[&path.to_string_lossy()], &["--version"]) {
        return Ok(());
    }
    Err(Failure::new("the compiler that was fetched does not run"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_plan_only_what_is_used_is_fetched() {
        for (line, fetched) in [
            ("Inst rustc (1.97.1+dfsg1-1 Debian:testing [amd64])", Some("rustc:amd64=1.97.1+dfsg1-1")),
            ("Inst libgcc-s1:arm64 (16.2.0-3 Debian:testing [arm64]) []", Some("libgcc-s1:arm64=16.2.0-3")),
            ("Inst libstd-rust-dev (1.97 Debian:testing [amd64])", Some("libstd-rust-dev:amd64=1.97")),
            ("Inst libllvm22 (1:22.1.8-1+b2 Debian:testing [amd64])", Some("libllvm22:amd64=1:22.1.8-1+b2")),
            ("Inst libllvm22:arm64 (1:22.1.8-1+b2 Debian:testing [arm64])", None),
            ("Inst gcc-16 (16.2.0-3 Debian:testing [amd64])", None),
            ("Inst libc6-dev (2.43-7 Debian:testing [amd64])", None),
            ("Conf rustc (1.97.1+dfsg1-1 Debian:testing [amd64])", None),
            ("Reading package lists...", None),
        ] {
            assert_eq!(planned(line).as_deref(), fetched, "{line}");
        }
    }
}
