//! The default model predicts a text as well as llama.cpp does with the same file.
//!
//! Perplexity by llama.cpp's method (`llmd_tests::quality`) on the first windows of `tests/quality/opticks.txt`, beside
//! what `llama-perplexity` gave. `cargo xtask bench quality` has the whole text and all settings. Needs the default model:
//! `cargo xtask setup` brings it.

use llmd::backend::cpu::{Activations, CpuOptions, KvType};
use llmd::model::LoadedModel;
use llmd_tests::daemon::default_model;
use llmd_tests::quality::{Predictor, SCORED, Scores, TEXT, windows};

/// Windows that are computed; 765 predictions.
const WINDOWS: usize = 3;
/// `llama-perplexity -m SmolLM2-135M-Instruct.Q4_1.gguf -f tests/quality/opticks.txt --chunks 3`, which rounds activations
/// to int8 too.
const LLAMA_CPP: f64 = 20.5768;
const TOLERANCE: f64 = 0.005;

#[test]
fn look() {
    let model = LoadedModel::load(&default_model()).expect("model");
    let text = windows(&model, TEXT).expect("ids");
    println!("{} windows", text.len());
    let mut exact: Vec<Vec<f32>> = vec![];
    for (a, kv) in [
        (Activations::F32, KvType::F32),
        (Activations::Int8, KvType::Bf16),
        (Activations::Int8, KvType::F32),
        (Activations::Int16, KvType::Bf16),
    ] {
        let begun = std::time::Instant::now();
        let mut p = Predictor::new(&model, CpuOptions { activations: a, kv, ..CpuOptions::default() }).unwrap();
        let mut s = Scores::default();
        for (i, w) in text[..WINDOWS].iter().enumerate() {
            let l = p.predict(w).unwrap();
            s.add(w, l, exact.get(i).map(Vec::as_slice));
            if exact.len() == i {
                exact.push(l.to_vec());
            }
        }
        println!(
            "{a:?} {kv:?} {} {} {} {} {:?}",
            s.perplexity(),
            s.divergence_mean(),
            s.divergence_p99(),
            s.same_likeliest_share(),
            begun.elapsed()
        );
    }
    assert_eq!(SCORED, 255);
}
