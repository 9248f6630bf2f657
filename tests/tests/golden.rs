//! The default model computes what Hugging Face transformers computes, and the same bits in any company.
//!
//! `tests/golden/recordings.json` holds prompts, ids, logits and greedy tokens of transformers in f32 on the dequantised
//! weights; `tests/golden/record.py` made it. Needs the default model: `cargo xtask setup` brings it.

use std::path::PathBuf;
use std::sync::{LazyLock, Mutex, MutexGuard};

use llmd::backend::cpu::{Activations, CpuBackend, CpuOptions, KvType};
use llmd::batch::ForwardBatch;
use llmd::kv_cache::block::{BLOCK_TOKENS, BlockId};
use llmd::model::sizing::KvBudget;
use llmd::model::{LoadedModel, ModelRunner, Runner, RunnerLimits};
use llmd::plan::{PlanEntry, StepPlan};
use llmd::sequence::{Sampling, Sequence, SequenceId, SequenceState};
use llmd::text::tokenizer::Tokenizer;
use serde::Deserialize;

/// With f32 activations and f32 keys and values only the order of sums differs from transformers'.
const F32_LOGIT_TOLERANCE: f32 = 1e-3;

/// With int8 activations (a scale per 32 elements) and bf16 keys and values, the most that a logit may differ. Rounding
/// alone, done in transformers itself, moves logits of these prompts (which span about 40) by 0.2 to 1.2
/// (`rounded_difference_max`); rounding errors grow chaotically, so kernels that round a sum differently land elsewhere
/// in that range. Measured: 0.2 to 1.4.
const INT8_LOGIT_TOLERANCE: f32 = 2.0;

/// The mean over all prompts of the root mean square difference is steadier: it may be this much of what rounding alone
/// gives (0.20). Measured: 1.0 to 1.1.
const INT8_RMS_RATIO_MAX: f32 = 1.5;

/// With int16 activations. Measured: 0.007 with an f32 cache; 0.06 with a bf16 one, whose rounding is all that is left.
const INT16_LOGIT_TOLERANCE: f32 = 0.03;
const INT16_BF16_LOGIT_TOLERANCE: f32 = 0.2;
/// Share of greedy tokens that must agree, each prompt counted up to its first difference. Measured: all 704 in both; but
/// recorded margins go down to 0.009, so another order of sums may lose the end of one prompt.
const INT16_AGREEING_MIN: f32 = 0.9;

const TOKENS_PER_STEP_MAX: usize = 512;
const SEQUENCES_MAX: usize = 32;
/// Enough for every test: 32 sequences of 200 tokens and one of 2,100.
const KV_BLOCKS: usize = 640;

#[test]
fn f32_mode_equals_transformers() {
    let _turn = turn();
    let options = CpuOptions { activations: Activations::F32, kv: KvType::F32, ..CpuOptions::default() };
    let outcome = compare(options);
    for (prompt, result) in RECORDINGS.prompts.iter().zip(&outcome) {
        println!("f32  {:12} largest logit difference {:.2e}", prompt.name, result.logit_difference_max);
        assert!(
            result.logit_difference_max <= F32_LOGIT_TOLERANCE,
            "{}: logits differ by {}",
            prompt.name,
            result.logit_difference_max
        );
        assert!(
            prompt.greedy_margin_min > 2.0 * F32_LOGIT_TOLERANCE,
            "{}: recorded tokens are no fair demand, record another prompt",
            prompt.name
        );
        assert_eq!(result.greedy, prompt.greedy, "{}: greedy tokens", prompt.name);
    }
}

#[test]
fn default_mode_is_near_transformers() {
    let _turn = turn();
    let outcome = compare(CpuOptions::default());
    let tokenizer = Tokenizer::build(&load().tokenizer).expect("the default model's tokenizer");
    let (mut agreeing_total, mut rms, mut rms_of_rounding) = (0, 0.0, 0.0);
    for (prompt, result) in RECORDINGS.prompts.iter().zip(&outcome) {
        let agreeing = prompt.greedy.iter().zip(&result.greedy).take_while(|(a, b)| a == b).count();
        agreeing_total += agreeing;
        rms += result.logit_difference_rms;
        rms_of_rounding += prompt.rounded_difference_rms;
        println!(
            "int8 {:12} largest logit difference {:.3}, root mean square {:.3} (rounding alone {:.3}, {:.3}); \
             the first {agreeing} of {} greedy tokens agree: {:?}",
            prompt.name,
            result.logit_difference_max,
            result.logit_difference_rms,
            prompt.rounded_difference_max,
            prompt.rounded_difference_rms,
            prompt.greedy.len(),
            tokenizer.decode(&result.greedy)
        );
        assert!(
            result.logit_difference_max <= INT8_LOGIT_TOLERANCE,
            "{}: logits differ by {}",
            prompt.name,
            result.logit_difference_max
        );
    }
    let ratio = rms / rms_of_rounding;
    println!("int8 {agreeing_total} of {} greedy tokens agree; {ratio:.2} x rounding alone", 64 * outcome.len());
    assert!(ratio <= INT8_RMS_RATIO_MAX, "{ratio:.2} x what rounding explains");
}

#[test]
fn int16_mode_says_what_transformers_says() {
    let _turn = turn();
    for (kv, tolerance) in [(KvType::Bf16, INT16_BF16_LOGIT_TOLERANCE), (KvType::F32, INT16_LOGIT_TOLERANCE)] {
        let options = CpuOptions { activations: Activations::Int16, kv, ..CpuOptions::default() };
        let outcome = compare(options);
        let (mut agreeing_total, mut largest, mut rms) = (0, 0.0_f32, 0.0);
        for (prompt, result) in RECORDINGS.prompts.iter().zip(&outcome) {
            agreeing_total += prompt.greedy.iter().zip(&result.greedy).take_while(|(a, b)| a == b).count();
            largest = largest.max(result.logit_difference_max);
            rms += result.logit_difference_rms / outcome.len() as f32;
        }
        let tokens = 64 * outcome.len();
        println!(
            "int16, {kv:?} cache: largest logit difference {largest:.4}, root mean square {rms:.4}; \
             {agreeing_total} of {tokens} greedy tokens agree"
        );
        assert!(largest <= tolerance, "{kv:?}: logits differ by {largest}");
        assert!(agreeing_total as f32 >= INT16_AGREEING_MIN * tokens as f32, "{kv:?}: {agreeing_total} of {tokens}");
    }
}

#[test]
fn prompts_have_the_recorded_ids() {
    let model = load();
    let tokenizer = Tokenizer::build(&model.tokenizer).expect("the default model's tokenizer");
    let mut texts = 0;
    for prompt in &RECORDINGS.prompts {
        if let Some(text) = &prompt.text {
            assert_eq!(tokenizer.encode(text, true), prompt.ids, "{}", prompt.name);
            texts += 1;
        }
    }
    assert!(texts >= 8);
}

/// The same sequence: prefilled in chunks of 16, 64 and 512, in other blocks, with its beginning taken from another's
/// blocks, and among 31 others that are prefilled and decode beside it.
#[test]
fn logits_have_the_same_bits_in_any_company() {
    let _turn = turn();
    let mut driver = Driver::new(CpuOptions::default());
    let prompt = &recording("long").ids[..700];

    let alone = driver.follow(prompt, 512, &mut []);
    for chunk in [16, 64] {
        driver.next_block += 3;
        let chunked = driver.follow(prompt, chunk, &mut []);
        assert_same_bits(&alone, &chunked, &format!("chunks of {chunk}"));
    }

    // A cache hit: the first 40 blocks were written by somebody else.
    let first = driver.start(prompt);
    driver.prefill(first, 512);
    let mut second = driver.start(prompt);
    let shared = driver.sequences[first].block_table[..40].to_vec();
    driver.sequences[second].block_table[..40].copy_from_slice(&shared);
    driver.sequences[second].computed = 40 * BLOCK_TOKENS;
    let hit = driver.decode(second, 64, &mut []);
    assert_same_bits(&alone, &hit, "a cache hit");

    // A block of its own, copied.
    second = driver.start(prompt);
    let own = driver.sequences[second].block_table[..40].to_vec();
    for (from, to) in shared.iter().zip(&own) {
        driver.runner.copy_block(*from, *to);
    }
    driver.sequences[second].computed = 40 * BLOCK_TOKENS;
    let copied = driver.decode(second, 64, &mut []);
    assert_same_bits(&alone, &copied, "copied blocks");

    driver.clear();
    let mut others: Vec<usize> = (0..SEQUENCES_MAX - 1)
        .map(|i| {
            let ids = &RECORDINGS.prompts[i % RECORDINGS.prompts.len()].ids;
            driver.start(&ids[..ids.len().min(1 + i * 5)])
        })
        .collect();
    let among = driver.follow(prompt, 64, &mut others);
    assert_same_bits(&alone, &among, "among 31 others");
}

fn assert_same_bits(expected: &[Vec<f32>], found: &[Vec<f32>], what: &str) {
    assert_eq!(expected.len(), found.len());
    for (step, (expected, found)) in expected.iter().zip(found).enumerate() {
        let different = expected.iter().zip(found).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
        assert_eq!(different, 0, "{what}: step {step}: {different} of {} logits differ", expected.len());
    }
}

/// How a mode compares with one recording.
struct Comparison {
    logit_difference_max: f32,
    logit_difference_rms: f32,
    greedy: Vec<u32>,
}

/// Prefills every recorded prompt and then generates for all of them in one batch.
fn compare(options: CpuOptions) -> Vec<Comparison> {
    let mut driver = Driver::new(options);
    let mut outcome: Vec<Comparison> = Vec::new();
    for prompt in &RECORDINGS.prompts {
        let sequence = driver.start(&prompt.ids);
        let logits = driver.prefill(sequence, TOKENS_PER_STEP_MAX);
        let recorded = prompt.top_ids.iter().zip(&prompt.top_logits);
        let recorded = recorded.chain(RECORDINGS.sampled_ids.iter().zip(&prompt.sampled_logits));
        let differences: Vec<f32> = recorded.map(|(&id, logit)| (logits[id as usize] - logit).abs()).collect();
        assert!(differences.len() == 64 + 256 && differences.iter().all(|d| d.is_finite()));
        outcome.push(Comparison {
            logit_difference_max: differences.iter().copied().fold(0.0, f32::max),
            logit_difference_rms: (differences.iter().map(|d| d * d).sum::<f32>() / differences.len() as f32).sqrt(),
            greedy: vec![argmax(&logits)],
        });
        driver.sequences[sequence].tokens.push(argmax(&logits));
    }
    let all: Vec<usize> = (0..driver.sequences.len()).collect();
    for _ in 1..RECORDINGS.prompts[0].greedy.len() {
        let entries: Vec<PlanEntry> = all.iter().map(|&s| driver.entry(s, 1)).collect();
        let logits = driver.step(entries);
        for (s, row) in logits.iter().enumerate() {
            outcome[s].greedy.push(argmax(row));
            driver.sequences[s].tokens.push(argmax(row));
        }
    }
    outcome
}

fn argmax(logits: &[f32]) -> u32 {
    let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).expect("a vocabulary");
    best.0 as u32
}

/// Steps sequences through a runner as the engine would, with blocks handed out in a scattered order.
struct Driver {
    runner: Box<dyn Runner>,
    batch: ForwardBatch,
    sequences: Vec<Sequence>,
    /// How many blocks were handed out.
    next_block: usize,
    step: u64,
}

impl Driver {
    fn new(options: CpuOptions) -> Self {
        let limits = RunnerLimits {
            tokens_per_step_max: TOKENS_PER_STEP_MAX,
            sequences_max: SEQUENCES_MAX,
            kv: KvBudget::Blocks(KV_BLOCKS),
        };
        let backend = CpuBackend::new(options).expect("a processor");
        let model = load();
        let (mut done, mut total) = (0, 0);
        let runner = ModelRunner::new(backend, &model, limits, &mut |d, t| (done, total) = (d, t)).expect("memory");
        assert!(done > 0 && done == total, "upload stopped at {done} of {total} bytes");
        let batch = ForwardBatch::with_limits(TOKENS_PER_STEP_MAX, SEQUENCES_MAX, model.architecture.context_length);
        Self { runner: Box::new(runner), batch, sequences: Vec::new(), next_block: 0, step: 0 }
    }

    /// Forgets all sequences; their blocks are handed out again, with what they hold.
    fn clear(&mut self) {
        self.sequences.clear();
        self.next_block = 0;
    }

    /// A new sequence with blocks for 64 tokens more than its prompt.
    fn start(&mut self, prompt: &[u32]) -> usize {
        let blocks = (prompt.len() + 64).div_ceil(BLOCK_TOKENS);
        assert!(self.next_block + blocks <= KV_BLOCKS, "more blocks for the tests, please");
        // 17 and 640 have no common divisor: every block comes once, neighbours far apart.
        let block_table =
            (self.next_block..self.next_block + blocks).map(|i| BlockId((i * 17 % KV_BLOCKS) as u32)).collect();
        self.next_block += blocks;
        let index = self.sequences.len();
        self.sequences.push(Sequence {
            id: SequenceId { index: index as u32, generation: 0 },
            tokens: prompt.to_vec(),
            prompt_len: prompt.len(),
            computed: 0,
            cached: 0,
            block_table,
            sampling: greedy(),
            cache_salt: 0,
            state: SequenceState::Running,
            arrival: index as u64,
            preemptions: 0,
        });
        index
    }

    /// The next part of a sequence, at most `chunk` tokens.
    fn entry(&self, sequence: usize, chunk: usize) -> PlanEntry {
        let s = &self.sequences[sequence];
        let tokens = (s.tokens.len() - s.computed).min(chunk);
        PlanEntry {
            sequence: s.id,
            start: s.computed as u32,
            tokens: tokens as u32,
            samples: s.computed + tokens == s.tokens.len(),
        }
    }

    /// Computes one step; the logits of the entries that sample.
    fn step(&mut self, entries: Vec<PlanEntry>) -> Vec<Vec<f32>> {
        self.step += 1;
        let plan = StepPlan { step: self.step, entries, ..StepPlan::default() };
        let sequences = &self.sequences;
        self.batch.fill(&plan, None, |id| &sequences[id.index as usize]);
        let vocab_size = self.runner.vocab_size();
        let logits = self.runner.forward(&self.batch).expect("a step");
        let rows = logits.chunks_exact(vocab_size).map(<[f32]>::to_vec).collect();
        for entry in &plan.entries {
            self.sequences[entry.sequence.index as usize].computed += entry.tokens as usize;
        }
        rows
    }

    /// Computes a prompt alone; its logits.
    fn prefill(&mut self, sequence: usize, chunk: usize) -> Vec<f32> {
        loop {
            let entry = self.entry(sequence, chunk);
            if let Some(logits) = self.step(vec![entry]).pop() {
                return logits;
            }
        }
    }

    /// Logits of a new sequence after its prompt and after each of eight tokens.
    fn follow(&mut self, prompt: &[u32], chunk: usize, others: &mut [usize]) -> Vec<Vec<f32>> {
        let sequence = self.start(prompt);
        self.decode(sequence, chunk, others)
    }

    /// As `follow`, from wherever the sequence stands. In every step each of the others advances too, by 9 tokens of its
    /// prompt or by one that it generates.
    fn decode(&mut self, sequence: usize, chunk: usize, others: &mut [usize]) -> Vec<Vec<f32>> {
        let mut followed = Vec::new();
        while followed.len() < 9 {
            // The others stand before and behind it.
            let mut entries: Vec<PlanEntry> = others.iter().map(|&other| self.entry(other, 9)).collect();
            let place = entries.len() / 2;
            entries.insert(place, self.entry(sequence, chunk));
            let sampling: Vec<SequenceId> = entries.iter().filter(|e| e.samples).map(|e| e.sequence).collect();
            for (id, logits) in sampling.into_iter().zip(self.step(entries)) {
                self.sequences[id.index as usize].tokens.push(argmax(&logits));
                if id.index as usize == sequence {
                    followed.push(logits);
                }
            }
        }
        followed
    }
}

fn greedy() -> Sampling {
    Sampling::greedy(64)
}

/// The compute threads of one model are enough for a machine: tests that have them take turns.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn load() -> LoadedModel {
    let path = cache().join(&RECORDINGS.model_file);
    assert!(path.is_file(), "{} is not there: run `cargo xtask setup`", path.display());
    LoadedModel::load(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Where `cargo xtask setup` puts models.
fn cache() -> PathBuf {
    let folder = |variable: &str| std::env::var_os(variable).filter(|v| !v.is_empty()).map(PathBuf::from);
    folder("LLMD_CACHE")
        .or_else(|| folder("XDG_CACHE_HOME").map(|cache| cache.join("llmd")))
        .or_else(|| folder("HOME").map(|home| home.join(".cache/llmd")))
        .expect("LLMD_CACHE, XDG_CACHE_HOME or HOME")
}

fn recording(name: &str) -> &'static Recording {
    RECORDINGS.prompts.iter().find(|p| p.name == name).expect("recorded")
}

static RECORDINGS: LazyLock<Recordings> = LazyLock::new(|| {
    serde_json::from_str(include_str!("../golden/recordings.json")).expect("tests/golden/recordings.json")
});

/// What `record.py` writes.
#[derive(Deserialize)]
struct Recordings {
    model_file: String,
    sampled_ids: Vec<u32>,
    prompts: Vec<Recording>,
}

#[derive(Deserialize)]
struct Recording {
    name: String,
    text: Option<String>,
    ids: Vec<u32>,
    top_ids: Vec<u32>,
    top_logits: Vec<f32>,
    sampled_logits: Vec<f32>,
    greedy: Vec<u32>,
    greedy_margin_min: f32,
    rounded_difference_max: f32,
    rounded_difference_rms: f32,
}
