//! What holds after all checks, and how it is written down again.

use std::fmt::{self, Write as _};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Device {
    /// The CPU.
    Cpu,
}

/// Instructions the CPU kernels use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isa {
    /// The best this CPU has.
    Auto,
    /// AVX-512 with VNNI.
    Avx512,
    /// AVX2 with AVX-VNNI.
    AvxVnni,
    /// AVX2 with FMA.
    Avx2,
    /// NEON with i8mm.
    NeonI8mm,
    /// NEON with dotprod.
    NeonDotprod,
    /// NEON.
    Neon,
    /// What every CPU has.
    Portable,
}

/// Activations within a matrix product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activations {
    /// Rounded to int8 by blocks.
    Int8,
    /// Rounded to twice int8 by blocks.
    Int16,
    /// As they are.
    F32,
}

/// Elements of the key-value cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvType {
    /// Rounded to bfloat16.
    Bf16,
    /// Rounded to half precision.
    F16,
    /// Rounded to bytes, with a factor for each token's head.
    Int8,
    /// As they are.
    F32,
}

/// How large the key-value cache is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvSize {
    /// As much as `sequences_max` sequences of full context need, at most half of the memory that is available and at most 1 GiB.
    Auto,
    /// So many blocks.
    Blocks(u32),
    /// As many whole blocks as fit so many bytes.
    Bytes(u64),
}

/// How steps are put together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SchedulerPolicy {
    /// Sequences join and leave between any two steps.
    Continuous,
    /// A batch is filled and ends with its last member.
    Static,
}

/// Where Prometheus reads metrics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MetricsAddress {
    /// HTTP over TCP.
    Tcp(SocketAddr),
    /// HTTP over a Unix socket.
    Unix(PathBuf),
}

/// What holds: every value within its bounds, every default filled in. See [`Config`](super::Config) for the meaning of each.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "documented at Config, where the keys are defined")]
pub struct Settings {
    pub model: PathBuf,
    /// None when systemd passed the socket.
    pub socket: Option<PathBuf>,
    /// None when systemd passed the socket, or passed the clients' one and there is no place for this one.
    pub control: Option<PathBuf>,
    pub device: Device,
    pub threads: usize,
    pub isa: Isa,
    pub activations: Activations,
    pub kv_type: KvType,
    pub kv: KvSize,
    pub sequences_max: usize,
    pub waiting_max: usize,
    pub tokens_per_step: usize,
    pub prefill_chunk_max: usize,
    pub prefix_cache: bool,
    pub lock_memory: bool,
    pub scheduler: SchedulerPolicy,
    pub sessions_max: usize,
    pub sessions_per_uid: usize,
    pub requests_per_session: usize,
    pub metrics: Option<MetricsAddress>,
    pub drain_timeout: Duration,
    pub log_level: log::LevelFilter,
    pub step_log: Option<PathBuf>,
}

impl Settings {
    /// The settings as a configuration file that means the same; what systemd passes stands as a comment.
    pub fn to_toml(&self) -> String {
        let mut out = String::new();
        let mut line = |key: &str, value: String| writeln!(out, "{key} = {value}").expect("a String takes everything");
        let path = |path: &Path| quoted(&path.to_string_lossy());
        line("model", path(&self.model));
        match &self.socket {
            Some(socket) => line("socket", path(socket)),
            None => line("# socket", "passed by systemd".into()),
        }
        match &self.control {
            Some(control) => line("control", path(control)),
            None => line("# control", "passed by systemd, or none".into()),
        }
        line(
            "device",
            quoted(match self.device {
                Device::Cpu => "cpu",
            }),
        );
        line("threads", self.threads.to_string());
        line("isa", quoted(word(&ISAS, &self.isa)));
        line("activations", quoted(word(&ACTIVATIONS, &self.activations)));
        line("kv_type", quoted(word(&KV_TYPES, &self.kv_type)));
        match self.kv {
            KvSize::Auto => line("kv_memory", quoted("auto")),
            KvSize::Blocks(blocks) => line("kv_blocks", blocks.to_string()),
            KvSize::Bytes(bytes) => line("kv_memory", bytes.to_string()),
        }
        line("sequences_max", self.sequences_max.to_string());
        line("waiting_max", self.waiting_max.to_string());
        line("tokens_per_step", self.tokens_per_step.to_string());
        line("prefill_chunk_max", self.prefill_chunk_max.to_string());
        line("prefix_cache", self.prefix_cache.to_string());
        line("lock_memory", self.lock_memory.to_string());
        line("scheduler", quoted(word(&SCHEDULERS, &self.scheduler)));
        line("sessions_max", self.sessions_max.to_string());
        line("sessions_per_uid", self.sessions_per_uid.to_string());
        line("requests_per_session", self.requests_per_session.to_string());
        line(
            "metrics",
            quoted(&match &self.metrics {
                None => "off".to_owned(),
                Some(MetricsAddress::Tcp(address)) => address.to_string(),
                Some(MetricsAddress::Unix(path)) => format!("unix:{}", path.display()),
            }),
        );
        line("drain_timeout", self.drain_timeout.as_secs().to_string());
        line("log_level", quoted(word(&LEVELS, &self.log_level)));
        match &self.step_log {
            Some(step_log) => line("step_log", path(step_log)),
            None => line("# step_log", "none".into()),
        }
        out
    }
}

pub(super) const ISAS: [(&str, Isa); 8] = [
    ("auto", Isa::Auto),
    ("avx512", Isa::Avx512),
    ("avx-vnni", Isa::AvxVnni),
    ("avx2", Isa::Avx2),
    ("neon-i8mm", Isa::NeonI8mm),
    ("neon-dotprod", Isa::NeonDotprod),
    ("neon", Isa::Neon),
    ("portable", Isa::Portable),
];
pub(super) const ACTIVATIONS: [(&str, Activations); 3] =
    [("int8", Activations::Int8), ("int16", Activations::Int16), ("f32", Activations::F32)];
pub(super) const KV_TYPES: [(&str, KvType); 4] =
    [("bf16", KvType::Bf16), ("f16", KvType::F16), ("int8", KvType::Int8), ("f32", KvType::F32)];
pub(super) const BOOLS: [(&str, bool); 2] = [("true", true), ("false", false)];
pub(super) const SCHEDULERS: [(&str, SchedulerPolicy); 2] =
    [("continuous", SchedulerPolicy::Continuous), ("static", SchedulerPolicy::Static)];
pub(super) const LEVELS: [(&str, log::LevelFilter); 6] = [
    ("off", log::LevelFilter::Off),
    ("error", log::LevelFilter::Error),
    ("warn", log::LevelFilter::Warn),
    ("info", log::LevelFilter::Info),
    ("debug", log::LevelFilter::Debug),
    ("trace", log::LevelFilter::Trace),
];

/// The word that is written for a value of a closed list.
pub(super) fn word<T: PartialEq>(choices: &[(&'static str, T)], value: &T) -> &'static str {
    choices.iter().find(|(_, v)| v == value).map_or("", |(word, _)| word)
}

impl fmt::Display for SchedulerPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(word(&SCHEDULERS, self))
    }
}

/// A TOML basic string.
fn quoted(text: &str) -> String {
    let mut out = String::from('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            c if c.is_control() => write!(out, "\\u{:04X}", c as u32).expect("a String takes everything"),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}
