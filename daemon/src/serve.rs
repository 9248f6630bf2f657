//! From settings to everything the engine is made of: the model on its device, the scheduler sized to it, the text side.

use std::collections::HashMap;
use std::error::Error;
use std::sync::Arc;

use llmd_kernels::cpu;
use llmd_protocol::control::ModelStatus;

use crate::backend::cpu::CpuBackend;
use crate::config::{Activations, Device, Isa, KvSize, KvType, SchedulerPolicy, Settings};
use crate::control::ModelInfo;
use crate::kv_cache::block::BLOCK_TOKENS;
use crate::model::LoadedModel;
use crate::model::runner::{ModelRunner, Runner, RunnerLimits};
use crate::model::sizing::{KvBudget, available_memory};
use crate::sampler::Sampler;
use crate::scheduler::{Policy, Scheduler, SchedulerSettings};
use crate::text::chat_template::ChatTemplate;
use crate::text::tokenizer::Tokenizer;

/// Assumed when the kernel does not say how much memory is available: enough for some dialogues, too little to hurt.
const AVAILABLE_UNKNOWN: u64 = 1 << 30;

/// What was made.
pub struct Loaded {
    /// The model on its device.
    pub runner: Box<dyn Runner>,
    /// Sized to it.
    pub scheduler: Scheduler,
    /// Sized to its vocabulary.
    pub sampler: Sampler,
    /// Its tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Its chat template, if it has one that works.
    pub chat_template: Option<ChatTemplate>,
    /// Positions a sequence may have: the model's context, or less when the whole cache holds less.
    pub context_max: usize,
    /// For status.
    pub info: ModelInfo,
}

/// Loads the model that `settings` name. `progress` gets bytes of weights done and in all.
pub fn load(settings: &Settings, progress: &mut dyn FnMut(u64, u64)) -> Result<Loaded, Box<dyn Error>> {
    let named = |error: &dyn std::fmt::Display| format!("model {}: {error}", settings.model.display());
    let model = LoadedModel::load(&settings.model).map_err(|e| named(&e))?;
    let tokenizer = Arc::new(Tokenizer::build(&model.tokenizer).map_err(|e| named(&e))?);
    let chat_template = match ChatTemplate::of(&model.tokenizer, &tokenizer) {
        Ok(template) => template,
        Err(error) => {
            log::warn!("the model's chat template cannot be used, chats will be refused: {error}");
            None
        }
    };
    let kv = match settings.kv {
        KvSize::Auto => KvBudget::Available {
            bytes: available_memory().unwrap_or(AVAILABLE_UNKNOWN),
            sequences_max: settings.sequences_max,
        },
        KvSize::Blocks(blocks) => KvBudget::Blocks(blocks as usize),
        KvSize::Bytes(bytes) => KvBudget::Bytes(bytes),
    };
    let limits =
        RunnerLimits { tokens_per_step_max: settings.tokens_per_step, sequences_max: settings.sequences_max, kv };
    let runner: Box<dyn Runner> = match settings.device {
        Device::Cpu => {
            let backend = CpuBackend::new(cpu_options(settings))?;
            if backend.threads() < settings.threads {
                log::warn!(
                    "threads = {}, but this process may use {} processors: computing with as many threads",
                    settings.threads,
                    backend.threads()
                );
            }
            Box::new(ModelRunner::new(backend, &model, limits, progress).map_err(|e| named(&e))?)
        }
    };
    if settings.lock_memory {
        lock_memory()?;
    }
    let memory = runner.memory();
    let context_max = model.architecture.context_length.min(memory.kv_blocks * BLOCK_TOKENS);
    let scheduler = Scheduler::new(SchedulerSettings {
        policy: match settings.scheduler {
            SchedulerPolicy::Continuous => Policy::Continuous,
            SchedulerPolicy::Static => Policy::Static,
        },
        tokens_per_step: settings.tokens_per_step,
        sequences_running_max: settings.sequences_max,
        waiting_max: settings.waiting_max,
        prefill_chunk_max: settings.prefill_chunk_max,
        context_max,
        kv_blocks: memory.kv_blocks,
        prefix_cache: settings.prefix_cache,
    })?;
    let model_status = ModelStatus {
        name: model.name.clone(),
        path: settings.model.display().to_string(),
        architecture: model.architecture.name.to_owned(),
        parameters: parameters(&model),
        quantisation: quantisation(&model),
        weight_bytes: memory.weight_bytes,
        vocabulary: runner.vocab_size() as u32,
        context_max: context_max as u32,
        scheduler: match settings.scheduler {
            SchedulerPolicy::Continuous => "continuous".into(),
            SchedulerPolicy::Static => "static".into(),
        },
    };
    let info = ModelInfo { model: model_status, device: runner.describe(), kv_bytes: memory.kv_bytes };
    let sampler = Sampler::new(runner.vocab_size());
    Ok(Loaded { runner, scheduler, sampler, tokenizer, chat_template, context_max, info })
}

/// Locks all that is mapped now: weights, cache, activations, code.
fn lock_memory() -> Result<(), String> {
    cpu::lock_memory().map_err(|error| {
        format!("lock_memory: {error}; raise the limit (LimitMEMLOCK=infinity in the service, ulimit -l unlimited in a shell)")
    })
}

/// Number of weights.
fn parameters(model: &LoadedModel) -> u64 {
    model.gguf.tensors().iter().map(|t| (t.rows() * t.columns()) as u64).sum()
}

/// The element type that most bytes have: what people call the file's quantisation.
fn quantisation(model: &LoadedModel) -> String {
    let mut bytes: HashMap<&'static str, u64> = HashMap::new();
    for tensor in model.gguf.tensors() {
        *bytes.entry(tensor.ty.name()).or_default() += tensor.bytes as u64;
    }
    bytes.into_iter().max_by_key(|&(_, bytes)| bytes).map_or_else(|| "none".into(), |(name, _)| name.to_owned())
}

fn cpu_options(settings: &Settings) -> cpu::CpuOptions {
    cpu::CpuOptions {
        threads: Some(settings.threads),
        isa: match settings.isa {
            Isa::Auto => None,
            Isa::Avx512 => Some(cpu::Isa::Avx512Vnni),
            Isa::AvxVnni => Some(cpu::Isa::AvxVnni),
            Isa::Avx2 => Some(cpu::Isa::Avx2),
            Isa::NeonI8mm => Some(cpu::Isa::NeonI8mm),
            Isa::NeonDotprod => Some(cpu::Isa::NeonDotprod),
            Isa::Neon => Some(cpu::Isa::Neon),
            Isa::Portable => Some(cpu::Isa::Portable),
        },
        activations: match settings.activations {
            Activations::Int8 => cpu::Activations::Int8,
            Activations::Int16 => cpu::Activations::Int16,
            Activations::F32 => cpu::Activations::F32,
        },
        kv: match settings.kv_type {
            KvType::Bf16 => cpu::KvType::Bf16,
            KvType::F16 => cpu::KvType::F16,
            KvType::Int8 => cpu::KvType::Int8,
            KvType::F32 => cpu::KvType::F32,
        },
    }
}
