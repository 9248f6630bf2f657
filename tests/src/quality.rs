//! How well a model is computed, measured on a text: perplexity, and how far predictions are from exact ones.
//!
//! The method is that of llama.cpp's `llama-perplexity`, so that its figures can be put beside ours: the text's ids are cut
//! into windows of 512 without overlap, what is left is dropped; the first id of each window is replaced by the
//! beginning-of-sequence token where the model wants one; and of each window the last 255 ids are scored, each given all
//! before it in the window. Perplexity is e to the mean of their surprises.

use llmd::backend::cpu::{CpuBackend, CpuOptions};
use llmd::batch::ForwardBatch;
use llmd::kv_cache::block::BLOCK_TOKENS;
use llmd::model::sizing::KvBudget;
use llmd::model::{LoadedModel, ModelRunner, Runner, RunnerLimits};
use llmd::text::tokenizer::Tokenizer;
use std::error::Error;

/// The text that is predicted; `tests/quality/README.md` says where it comes from.
pub const TEXT: &str = include_str!("../quality/opticks.txt");

/// Ids of a window.
pub const WINDOW: usize = 512;
/// The first position whose prediction counts: before it there is too little to go by.
const FIRST: usize = WINDOW / 2;
/// Predictions of a window that count. The last position's does not: what follows is another window's.
pub const SCORED: usize = WINDOW - 1 - FIRST;

/// The text as ids, in windows.
pub fn windows(model: &LoadedModel, text: &str) -> Result<Vec<Vec<u32>>, Box<dyn Error>> {
    let tokenizer = Tokenizer::build(&model.tokenizer)?;
    let ids = tokenizer.encode(text, true);
    let bos = tokenizer.bos().filter(|bos| ids.first() == Some(bos));
    let window = |ids: &[u32]| {
        let mut window = ids.to_vec();
        window[0] = bos.unwrap_or(window[0]);
        window
    };
    Ok(ids.chunks_exact(WINDOW).map(window).collect())
}

/// A model on this processor, computing window after window.
pub struct Predictor {
    runner: Box<dyn Runner>,
    batch: ForwardBatch,
}

impl Predictor {
    /// Uploads the weights.
    pub fn new(model: &LoadedModel, options: CpuOptions) -> Result<Self, Box<dyn Error>> {
        let blocks = WINDOW.div_ceil(BLOCK_TOKENS);
        let limits = RunnerLimits { tokens_per_step_max: WINDOW, sequences_max: SCORED, kv: KvBudget::Blocks(blocks) };
        let runner = ModelRunner::new(CpuBackend::new(options)?, model, limits, &mut |_, _| {})?;
        let positions: Vec<u32> = (0..WINDOW as u32).collect();
        let batch = ForwardBatch {
            tokens: Vec::new(),
            slot_mapping: positions.clone(),
            logit_rows: positions[FIRST..FIRST + SCORED].to_vec(),
            positions,
            cu_seqlens_q: vec![0, WINDOW as u32],
            context_lens: vec![WINDOW as u32],
            block_tables: (0..blocks as u32).collect(),
            block_table_starts: vec![0, blocks as u32],
        };
        Ok(Self { runner: Box::new(runner), batch })
    }

    /// Logits of the scored predictions of a window, one row of the vocabulary's size after another.
    pub fn predict(&mut self, window: &[u32]) -> Result<&[f32], Box<dyn Error>> {
        assert_eq!(window.len(), WINDOW);
        window.clone_into(&mut self.batch.tokens);
        Ok(self.runner.forward(&self.batch)?)
    }
}

/// What was found at every scored position of some windows.
#[derive(Debug, Clone, Default)]
pub struct Scores {
    /// -ln of the probability that was given to the id that came.
    pub surprises: Vec<f64>,
    /// Kullback-Leibler divergence of the prediction from the exact one, in nats; empty without exact ones.
    pub divergences: Vec<f64>,
    /// How often both hold the same id for the likeliest.
    pub same_likeliest: usize,
}

impl Scores {
    /// Adds a window and what was predicted; `exact` are the logits to compare with, as many.
    pub fn add(&mut self, window: &[u32], logits: &[f32], exact: Option<&[f32]>) {
        let vocabulary = logits.len() / SCORED;
        let targets = &window[FIRST + 1..];
        assert!(targets.len() == SCORED && logits.len() == SCORED * vocabulary);
        let rows = logits.chunks_exact(vocabulary);
        self.surprises.extend(rows.clone().zip(targets).map(|(row, &target)| surprise(row, target)));
        if let Some(exact) = exact {
            assert_eq!(exact.len(), logits.len());
            for (exact, row) in exact.chunks_exact(vocabulary).zip(rows) {
                self.divergences.push(divergence(exact, row));
                self.same_likeliest += usize::from(likeliest(exact) == likeliest(row));
            }
        }
    }

    /// e to the mean surprise.
    pub fn perplexity(&self) -> f64 {
        mean(&self.surprises).exp()
    }

    /// Mean divergence, nats.
    pub fn divergence_mean(&self) -> f64 {
        mean(&self.divergences)
    }

    /// The divergence that 99 of 100 positions are at or below, nats.
    pub fn divergence_p99(&self) -> f64 {
        let mut sorted = self.divergences.clone();
        sorted.sort_by(f64::total_cmp);
        let rank = (sorted.len() as f64 * 0.99).ceil() as usize;
        sorted.get(rank.saturating_sub(1)).copied().unwrap_or(f64::NAN)
    }

    /// Share of positions where both hold the same id for the likeliest.
    pub fn same_likeliest_share(&self) -> f64 {
        self.same_likeliest as f64 / self.divergences.len() as f64
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// ln of the sum of e to each, without overflow.
fn log_sum_exp(row: &[f32]) -> f64 {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = row.iter().map(|&logit| f64::from(logit - max).exp()).sum();
    f64::from(max) + sum.ln()
}

fn surprise(row: &[f32], target: u32) -> f64 {
    log_sum_exp(row) - f64::from(row[target as usize])
}

/// KL(exact || row) = sum of p (ln p - ln q), with ln p and ln q as logits less their log-sum.
fn divergence(exact: &[f32], row: &[f32]) -> f64 {
    let (of_exact, of_row) = (log_sum_exp(exact), log_sum_exp(row));
    let term = |(&p, &q): (&f32, &f32)| (f64::from(p) - of_exact).exp() * (f64::from(p) - f64::from(q));
    exact.iter().zip(row).map(term).sum::<f64>() - of_exact + of_row
}

fn likeliest(row: &[f32]) -> Option<usize> {
    (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(found: f64, expected: f64) {
        assert!((found - expected).abs() < 1e-6, "{found}, not {expected}");
    }

    #[test]
    fn surprise_is_minus_the_logarithm_of_the_probability() {
        near(surprise(&[3.0; 8], 5), 8f64.ln());
        // Logits that e itself could not take.
        near(surprise(&[1000.0, 1001.0], 0), (1.0 + 1f64.exp()).ln());
    }

    #[test]
    fn divergence_is_that_of_the_formula() {
        let (even, uneven) = ([0.0, 0.0], [0.0, 3f32.ln()]);
        near(divergence(&even, &even), 0.0);
        near(divergence(&even, &[7.0, 7.0]), 0.0);
        near(divergence(&even, &uneven), 0.5 * (0.5f64 / 0.25).ln() + 0.5 * (0.5f64 / 0.75).ln());
        near(divergence(&uneven, &even), 0.25 * (0.25f64 / 0.5).ln() + 0.75 * (0.75f64 / 0.5).ln());
    }

    #[test]
    fn scores_count_what_comes_after_each_position() {
        // A vocabulary of two ids; the row of a position says 1 with 3/4. Ids before the scored part don't matter.
        let window: Vec<u32> = (0..WINDOW).map(|i| u32::from(i > FIRST + 100)).collect();
        let logits = [0.0, 3f32.ln()].repeat(SCORED);
        let mut scores = Scores::default();
        scores.add(&window, &logits, Some(&[1.0, 0.5].repeat(SCORED)));
        let (zeros, ones) = (100.0, (SCORED - 100) as f64);
        near(scores.perplexity(), ((zeros * 4f64.ln() + ones * (4f64 / 3.0).ln()) / SCORED as f64).exp());
        assert_eq!((scores.divergences.len(), scores.same_likeliest), (SCORED, 0));
        near(scores.divergence_mean(), scores.divergence_p99());
        scores.add(&window, &logits, Some(&logits));
        near(scores.same_likeliest_share(), 0.5);
    }
}
