//! How well the default model is computed: perplexity of a text and divergence from exact predictions, for every rounding
//! of activations and of keys and values, and for other types of weights; beside llama.cpp's perplexity of the same.

use crate::figures::{machine, threads};
use llmd::backend::cpu::{Activations, CpuOptions, KvType};
use llmd::model::LoadedModel;
use llmd_tests::quality::{Predictor, SCORED, Scores, TEXT, windows};
use serde::Serialize;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Roundings of activations, the exact one first.
const ACTIVATIONS: [Activations; 3] = [Activations::F32, Activations::Int16, Activations::Int8];
/// What everything else is compared with.
const EXACT: CpuOptions = CpuOptions { threads: None, isa: None, activations: Activations::F32, kv: KvType::F32 };

/// Types that llama-quantize makes of the default model's weights.
const WEIGHTS: [&str; 4] = ["Q4_0", "Q8_0", "Q4_K", "Q6_K"];

/// What may be changed.
#[derive(clap::Args)]
pub struct Options {
    /// Windows of 512 tokens; without, all that the text has.
    #[arg(long, value_parser = clap::value_parser!(u32).range(2..))]
    windows: Option<u32>,
    /// Where llama.cpp/bin/ is, with llama-perplexity and llama-quantize.
    #[arg(long, env = "LLMD_PEERS", value_name = "FOLDER")]
    peers: PathBuf,
}

/// All figures of a run of this benchmark.
#[derive(Serialize)]
pub struct Report {
    benchmark: &'static str,
    machine: String,
    windows: usize,
    /// Scored predictions.
    predictions: usize,
    skipped: Vec<String>,
    results: Vec<Outcome>,
}

/// One model under one setting.
#[derive(Debug, Clone, Serialize)]
struct Outcome {
    program: &'static str,
    weights: String,
    activations: String,
    kv: String,
    perplexity: f64,
    /// From exact predictions of the same program with the same weights.
    divergence: Option<Divergence>,
}

#[derive(Debug, Clone, Copy, Serialize)]
struct Divergence {
    mean_nats: f64,
    p99_nats: f64,
    same_likeliest_share: f64,
}

/// Runs it and prints a table.
pub fn run(options: &Options, model: &Path) -> Result<Report, Box<dyn Error>> {
    let loaded = LoadedModel::load(model)?;
    let mut text = windows(&loaded, TEXT)?;
    text.truncate(options.windows.map_or(usize::MAX, |count| count as usize));
    let mut report = Report {
        benchmark: "quality",
        machine: machine(),
        windows: text.len(),
        predictions: text.len() * SCORED,
        skipped: Vec::new(),
        results: Vec::new(),
    };
    println!("{}; {} windows\n", report.machine, report.windows);
    println!("{:54} divergence from exact, nats", "");
    println!(
        "{:10} {:11} {:12} {:5} {:>10} {:>12} {:>12} {:>15}",
        "program", "weights", "activations", "kv", "perplexity", "mean", "p99", "same likeliest"
    );
    // The default is the first of its types, the exact one the last.
    let with = |activations| KvType::ALL.into_iter().rev().map(move |kv| CpuOptions { activations, kv, ..EXACT });
    let settings: Vec<CpuOptions> = ACTIVATIONS.into_iter().flat_map(with).collect();
    report.results.extend(ours(&loaded, "as in file", &text, &settings)?);
    match Llama::find(&options.peers, text.len()) {
        Err(reason) => {
            println!("SKIPPED: {reason}");
            report.skipped.push(reason);
        }
        Ok(llama) => {
            // With f32 weights of the same values llama.cpp rounds no activations.
            let exact = llama.requantised(model, "F32")?;
            let base = llama.folder.join("predictions");
            let runs = [(exact.as_path(), "f32", "f32", Base::Kept(&base))]
                .into_iter()
                .chain(["f32", "f16", "q8_0"].map(|kv| (model, "int8", kv, Base::Compared(&base))));
            for (file, activations, kv, base) in runs {
                report.results.push(llama.perplexity(file, "as in file", activations, kv, base)?);
            }
            fs::remove_file(&base)?;
            for weights in WEIGHTS {
                let file = llama.requantised(model, weights)?;
                let loaded = LoadedModel::load(&file)?;
                report.results.extend(ours(&loaded, weights, &text, &[EXACT, CpuOptions::default()])?);
                let exact = llama.requantised(&file, "F32")?;
                report.results.push(llama.perplexity(&exact, weights, "f32", "f32", Base::None)?);
                report.results.push(llama.perplexity(&file, weights, "int8", "f16", Base::None)?);
            }
        }
    }
    Ok(report)
}

/// llmd's own; the first of `settings` is what the others are compared with.
fn ours(
    model: &LoadedModel,
    weights: &str,
    text: &[Vec<u32>],
    settings: &[CpuOptions],
) -> Result<Vec<Outcome>, Box<dyn Error>> {
    assert_eq!(settings[0], EXACT);
    let mut exact: Vec<Vec<f32>> = Vec::new();
    let mut outcomes = Vec::new();
    for (number, setting) in settings.iter().enumerate() {
        let mut predictor = Predictor::new(model, *setting)?;
        let mut scores = Scores::default();
        for (i, window) in text.iter().enumerate() {
            let logits = predictor.predict(window)?;
            scores.add(window, logits, exact.get(i).map(Vec::as_slice).filter(|_| number > 0));
            if number == 0 {
                exact.push(logits.to_vec());
            }
        }
        let divergence = (number > 0).then(|| Divergence {
            mean_nats: scores.divergence_mean(),
            p99_nats: scores.divergence_p99(),
            same_likeliest_share: scores.same_likeliest_share(),
        });
        let name = |debug: &dyn std::fmt::Debug| format!("{debug:?}").to_lowercase();
        let outcome = Outcome {
            program: "llmd",
            weights: weights.to_owned(),
            activations: name(&setting.activations),
            kv: name(&setting.kv),
            perplexity: scores.perplexity(),
            divergence,
        };
        outcome.print();
        outcomes.push(outcome);
    }
    Ok(outcomes)
}

/// What llama-perplexity does about the predictions of another run.
#[derive(Clone, Copy)]
enum Base<'a> {
    None,
    /// It keeps its own in this file.
    Kept(&'a Path),
    /// It compares with those in this file.
    Compared(&'a Path),
}

/// llama.cpp's programs, and a folder for what they make, which goes with this.
struct Llama {
    programs: PathBuf,
    folder: PathBuf,
    text: PathBuf,
    windows: usize,
}

impl Llama {
    /// Or why it cannot be compared.
    fn find(peers: &Path, windows: usize) -> Result<Self, String> {
        let programs = peers.join("llama.cpp/bin");
        for name in ["llama-perplexity", "llama-quantize"] {
            let program = programs.join(name);
            if !program.is_file() {
                return Err(format!("llama.cpp: {} is not there", program.display()));
            }
        }
        let folder = std::env::temp_dir().join(format!("llmd-quality-{}", std::process::id()));
        let text = folder.join("text");
        fs::create_dir(&folder)
            .and_then(|()| fs::write(&text, TEXT))
            .map_err(|error| format!("llama.cpp: cannot write to {}: {error}", folder.display()))?;
        Ok(Self { programs, folder, text, windows })
    }

    /// A file of the same model with weights of another type.
    fn requantised(&self, model: &Path, ty: &str) -> Result<PathBuf, Box<dyn Error>> {
        let file = self.folder.join(format!("{ty}.gguf"));
        let mut command = Command::new(self.programs.join("llama-quantize"));
        command.arg("--allow-requantize").arg(model).arg(&file).arg(ty).arg(threads().to_string());
        output(&mut command)?;
        Ok(file)
    }

    fn perplexity(
        &self,
        model: &Path,
        weights: &str,
        activations: &'static str,
        kv: &'static str,
        base: Base<'_>,
    ) -> Result<Outcome, Box<dyn Error>> {
        let mut command = Command::new(self.programs.join("llama-perplexity"));
        command.arg("-m").arg(model).arg("-f").arg(&self.text);
        command.args(["-ctk", kv, "-ctv", kv, "--chunks", &self.windows.to_string(), "-t", &threads().to_string()]);
        // Its flash attention rounds f32 keys and values all the same.
        command.args(["-fa", if kv == "f32" { "off" } else { "auto" }]);
        if let Base::Kept(path) | Base::Compared(path) = base {
            command.arg("--kl-divergence-base").arg(path);
        }
        let compares = matches!(base, Base::Compared(_));
        command.args(compares.then_some("--kl-divergence"));
        let text = output(&mut command)?;
        let perplexity = if compares { statistic(&text, "Mean PPL(Q)") } else { last_window(&text, self.windows) };
        let outcome = Outcome {
            program: "llama.cpp",
            weights: weights.to_owned(),
            activations: activations.to_owned(),
            kv: kv.to_owned(),
            perplexity: perplexity.ok_or("llama-perplexity printed no perplexity")?,
            divergence: compares
                .then(|| divergence(&text).ok_or("llama-perplexity printed no divergence"))
                .transpose()?,
        };
        outcome.print();
        Ok(outcome)
    }
}

impl Outcome {
    fn print(&self) {
        let Outcome { program, weights, activations, kv, perplexity, divergence } = self;
        print!("{program:10} {weights:11} {activations:12} {kv:5} {perplexity:>10.4}");
        match divergence {
            Some(Divergence { mean_nats, p99_nats, same_likeliest_share: share }) => {
                println!(" {mean_nats:>12.6} {p99_nats:>12.6} {:>15.1}", share * 100.0);
            }
            None => println!(),
        }
    }
}

impl Drop for Llama {
    fn drop(&mut self) {
        // Nothing to be done about a folder that stays.
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// What a program printed, if it ended well.
fn output(command: &mut Command) -> Result<String, Box<dyn Error>> {
    let program = command.get_program().to_owned();
    let output = command.stdin(Stdio::null()).stderr(Stdio::null()).output();
    let output = output.map_err(|error| format!("cannot run {program:?}: {error}"))?;
    if !output.status.success() {
        return Err(format!("{program:?} ended with {}", output.status).into());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The perplexity of all windows, of "[1]30.9176,[2]18.7987,"; none if another number of windows was computed.
fn last_window(text: &str, windows: usize) -> Option<f64> {
    let (_, last) = text.rsplit_once(&format!("[{windows}]"))?;
    last.split(',').next()?.trim().parse().ok()
}

/// The first number of the line that begins with `name` and a colon, as in "99.0%   KLD:   0.012376".
fn statistic(text: &str, name: &str) -> Option<f64> {
    let of = |line: &str| {
        let (found, value) = line.split_once(':')?;
        let same = found.split_whitespace().eq(name.split_whitespace());
        same.then(|| value.split_whitespace().next()?.trim_end_matches('%').parse().ok()).flatten()
    };
    text.lines().find_map(of)
}

fn divergence(text: &str) -> Option<Divergence> {
    Some(Divergence {
        mean_nats: statistic(text, "Mean KLD")?,
        p99_nats: statistic(text, "99.0% KLD")?,
        same_likeliest_share: statistic(text, "Same top p")? / 100.0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama_perplexity_is_read() {
        assert_eq!(last_window("[1]30.9176,[2]18.7987,\n", 2), Some(18.7987));
        assert_eq!(last_window("[1]30.9176,[2]18.7987,\n", 3), None);
        let text = "Mean PPL(Q)                   :  28.850124 ±   1.664862\nMean    KLD:   0.002635 ±   0.000043\n\
                    99.9%   KLD:   0.020311\n99.0%   KLD:   0.012376\nSame top p: 96.435 ± 0.350 %\n";
        assert_eq!(statistic(text, "Mean PPL(Q)"), Some(28.850124));
        let read = divergence(text).expect("all there");
        assert_eq!((read.mean_nats, read.p99_nats), (0.002635, 0.012376));
        assert!((read.same_likeliest_share - 0.96435).abs() < 1e-9);
        assert!(divergence("Mean    KLD:   0.002635\n").is_none());
    }
}
