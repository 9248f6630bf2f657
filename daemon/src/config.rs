//! Configuration: what was written, and what it means.
//!
//! [`Config`] holds every key as it was written: in a TOML file, as `LLMD_KEY` in the environment, or as `--key` on the
//! command line; a later one of these wins. [`Settings`] holds what the keys mean after all checks. The way from one to
//! the other is [`Config::resolve`], walked once, at start: nothing else in the daemon reads configuration.
//!
//! One name per key everywhere: `kv_blocks` in the file is `LLMD_KV_BLOCKS` and `--kv-blocks`. The keys are documented at
//! the fields of [`Config`]; `llmd --help` and `systemd/llmd.toml` say the same.

mod check;
mod settings;

pub use settings::{Activations, Device, Isa, KvSize, KvType, MetricsAddress, SchedulerPolicy, Settings};

use crate::kv_cache::block::BLOCK_TOKENS;
use check::{Check, parse_bytes};
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, CommandFactory, FromArgMatches, Parser};
use serde::Deserialize;
use settings::{ACTIVATIONS, BOOLS, ISAS, KV_TYPES, LEVELS, SCHEDULERS};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::io::Read as _;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Most bytes of a configuration file.
pub const FILE_BYTES_MAX: u64 = 1 << 20;
/// Most bytes in the path of a Unix socket: `sun_path` with its closing zero is 108.
pub const SOCKET_PATH_BYTES_MAX: usize = 107;
/// Allowed `threads`.
pub const THREADS: RangeInclusive<u64> = 1..=1024;
/// Allowed `kv_blocks`. The upper end keeps block * 16 + offset, a slot's index, within u32.
pub const KV_BLOCKS: RangeInclusive<u64> = 1..=(u32::MAX as u64 / BLOCK_TOKENS as u64);
/// Allowed `kv_memory`, in bytes.
pub const KV_BYTES: RangeInclusive<u64> = (1 << 20)..=(1 << 46);
/// Allowed `sequences_max`.
pub const SEQUENCES: RangeInclusive<u64> = 1..=4096;
/// Allowed `waiting_max`.
pub const WAITING: RangeInclusive<u64> = 0..=(1 << 20);
/// Allowed `tokens_per_step`.
pub const TOKENS_PER_STEP: RangeInclusive<u64> = 1..=65536;
/// Allowed `sessions_max`: what the protocol's SESSIONS_MAX says.
pub const SESSIONS: RangeInclusive<u64> = 1..=1024;
/// Allowed `sessions_per_uid`: what the protocol's SESSIONS_PER_UID_MAX says.
pub const SESSIONS_PER_UID: RangeInclusive<u64> = 1..=256;
/// Allowed `requests_per_session`: what the protocol's REQUESTS_IN_FLIGHT says for a completion ring of 1024 slots.
pub const REQUESTS_PER_SESSION: RangeInclusive<u64> = 1..=256;
/// Allowed `drain_timeout`, in seconds.
pub const DRAIN_SECONDS: RangeInclusive<u64> = 0..=86400;

/// Least `tokens_per_step` for `sequences_max` sequences: a token for each, and what the scheduler reserves for prompts,
/// one eighth of the step or a block.
fn tokens_per_step_least(sequences_max: usize) -> usize {
    (sequences_max + BLOCK_TOKENS).max((sequences_max * 8).div_ceil(7))
}

/// The text of a value, as written in the file (without quotes), in the environment or on the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written(pub String);

impl From<&str> for Written {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}

/// Every key as written. `None` is "not written", so that the default holds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, Args)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The model: path of a GGUF file. Required
    #[arg(long, env = "LLMD_MODEL", value_name = "PATH")]
    pub model: Option<Written>,
    /// Unix socket where clients connect [default: $XDG_RUNTIME_DIR/llmd/llmd.sock]. Not used when systemd passes a
    /// socket named llmd
    #[arg(long, env = "LLMD_SOCKET", value_name = "PATH")]
    pub socket: Option<Written>,
    /// Unix socket where llmctl asks [default: control.sock beside the clients' socket]. Not used when systemd passes a
    /// socket named llmd-control
    #[arg(long, env = "LLMD_CONTROL", value_name = "PATH")]
    pub control: Option<Written>,
    /// What computes: auto or cpu [default: auto]
    #[arg(long, env = "LLMD_DEVICE", value_name = "auto|cpu")]
    pub device: Option<Written>,
    /// Threads that compute: auto (one for each core this process may use) or 1 to 1024 [default: auto]
    #[arg(long, env = "LLMD_THREADS", value_name = "auto|N")]
    pub threads: Option<Written>,
    /// Instructions the CPU kernels use: auto (the best this CPU has), avx512, avx-vnni or avx2 (x86-64), neon-i8mm,
    /// neon-dotprod or neon (64-bit ARM), or portable [default: auto]
    #[arg(long, env = "LLMD_ISA", value_name = "auto|avx512|avx-vnni|avx2|neon-i8mm|neon-dotprod|neon|portable")]
    pub isa: Option<Written>,
    /// Activations within a matrix product: int8 (fast), int16 (as good as exact; about as fast for a few streams, slower
    /// for many and for prompts) or f32 (exact, slow) [default: int8]
    #[arg(long, env = "LLMD_ACTIVATIONS", value_name = "int8|int16|f32")]
    pub activations: Option<Written>,
    /// Elements of the key-value cache: bf16, f16, int8 (half the memory) or f32 [default: bf16]
    #[arg(long, env = "LLMD_KV_TYPE", value_name = "bf16|f16|int8|f32")]
    pub kv_type: Option<Written>,
    /// Key-value cache in blocks of 16 tokens, 1 to 268435455. Excludes kv_memory
    #[arg(long, env = "LLMD_KV_BLOCKS", value_name = "N")]
    pub kv_blocks: Option<Written>,
    /// Key-value cache in bytes, "2GiB" or "512MiB", 1MiB to 64TiB; or auto: as much as sequences_max sequences of full
    /// context need, at most half of the memory that is available, at most 1GiB [default: auto]
    #[arg(long, env = "LLMD_KV_MEMORY", value_name = "auto|SIZE")]
    pub kv_memory: Option<Written>,
    /// Most sequences computed in one step, 1 to 4096 [default: 64]
    #[arg(long, env = "LLMD_SEQUENCES_MAX", value_name = "N")]
    pub sequences_max: Option<Written>,
    /// Most requests that wait for a place; further ones are refused as Busy. 0 to 1048576 [default: 1024]
    #[arg(long, env = "LLMD_WAITING_MAX", value_name = "N")]
    pub waiting_max: Option<Written>,
    /// Most tokens computed in one step, prompts and outputs together; at least sequences_max and one eighth more for
    /// prompts (16 or more). Up to 65536 [default: 512, or the least if that is more]
    #[arg(long, env = "LLMD_TOKENS_PER_STEP", value_name = "N")]
    pub tokens_per_step: Option<Written>,
    /// Most prompt tokens of one sequence computed in one step: the smaller, the steadier the other streams flow. A
    /// multiple of 16, up to tokens_per_step [default: 256, or tokens_per_step if that is less]
    #[arg(long, env = "LLMD_PREFILL_CHUNK_MAX", value_name = "N")]
    pub prefill_chunk_max: Option<Written>,
    /// Whether prompts that begin alike share their key-value blocks: true or false [default: true]
    #[arg(long, env = "LLMD_PREFIX_CACHE", value_name = "true|false")]
    pub prefix_cache: Option<Written>,
    /// Whether weights and cache are locked in memory, never to be swapped out: true or false; the service needs
    /// LimitMEMLOCK=infinity [default: false]
    #[arg(long, env = "LLMD_LOCK_MEMORY", value_name = "true|false")]
    pub lock_memory: Option<Written>,
    /// How steps are put together: continuous, or static (a batch is filled and ends with its last member; only to
    /// compare) [default: continuous]
    #[arg(long, env = "LLMD_SCHEDULER", value_name = "continuous|static")]
    pub scheduler: Option<Written>,
    /// Most clients connected at once, 1 to 1024 [default: 256]
    #[arg(long, env = "LLMD_SESSIONS_MAX", value_name = "N")]
    pub sessions_max: Option<Written>,
    /// Most clients of one user connected at once, 1 to 256 and at most sessions_max [default: 128, or sessions_max if
    /// that is less]
    #[arg(long, env = "LLMD_SESSIONS_PER_UID", value_name = "N")]
    pub sessions_per_uid: Option<Written>,
    /// Most requests of one client in flight, 1 to 256 [default: 64]
    #[arg(long, env = "LLMD_REQUESTS_PER_SESSION", value_name = "N")]
    pub requests_per_session: Option<Written>,
    /// Where Prometheus reads metrics over HTTP: off, ADDRESS:PORT or unix:/PATH. Not used when systemd passes a socket
    /// named llmd-metrics [default: off]
    #[arg(long, env = "LLMD_METRICS", value_name = "off|ADDR")]
    pub metrics: Option<Written>,
    /// Seconds that requests in flight may go on after SIGTERM, 0 to 86400 [default: 30]
    #[arg(long, env = "LLMD_DRAIN_TIMEOUT", value_name = "SECONDS")]
    pub drain_timeout: Option<Written>,
    /// What is logged: off, error, warn, info, debug or trace [default: info]
    #[arg(long, env = "LLMD_LOG_LEVEL", value_name = "LEVEL")]
    pub log_level: Option<Written>,
    /// File that gets one line of JSON for each step: who computed how many tokens. Never text [default: none]
    #[arg(long, env = "LLMD_STEP_LOG", value_name = "PATH")]
    pub step_log: Option<Written>,
}

/// The command line.
#[derive(Debug, Parser)]
#[command(
    name = "llmd",
    version,
    about = "Serves a language model to processes on this host over shared memory",
    max_term_width = 100
)]
struct CommandLine {
    /// Configuration in TOML, with the keys below; `-` instead of `_` in flags
    #[arg(long, env = "LLMD_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print the settings that would hold, as a configuration file, and exit
    #[arg(long)]
    print_config: bool,
    /// Drain and end when standard input is closed: the daemon then outlives no parent that holds the other end
    #[arg(long)]
    stop_on_stdin_eof: bool,
    #[command(flatten)]
    keys: Config,
}

/// What the process was told, gathered and not yet checked.
#[derive(Debug, Clone)]
pub struct Told {
    /// All keys; flags over environment over file.
    pub config: Config,
    /// Where each written key came from, for messages.
    pub origins: Origins,
    /// Print the settings and exit.
    pub print_config: bool,
    /// Drain and end when standard input is closed.
    pub stop_on_stdin_eof: bool,
}

/// For each written key, where: "--threads", "LLMD_THREADS" or the file's path.
pub type Origins = BTreeMap<String, String>;

/// What surrounds the process and decides some defaults; gathered once by [`Surroundings::observe`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Surroundings {
    /// `$XDG_RUNTIME_DIR`.
    pub runtime_dir: Option<PathBuf>,
    /// Cores this process may use.
    pub cores: usize,
    /// systemd passed the clients' socket.
    pub socket_passed: bool,
    /// systemd passed the control socket.
    pub control_passed: bool,
}

impl Surroundings {
    /// Looks at the environment and the affinity of this process; the arguments say what systemd passed.
    pub fn observe(socket_passed: bool, control_passed: bool) -> Self {
        Self {
            runtime_dir: std::env::var_os("XDG_RUNTIME_DIR").filter(|d| !d.is_empty()).map(PathBuf::from),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            socket_passed,
            control_passed,
        }
    }
}

/// Why there are no settings.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The command line itself is wrong, or asks for help; print it and exit with its code.
    #[error(transparent)]
    CommandLine(#[from] clap::Error),
    /// The file cannot be read.
    #[error("cannot read the configuration {path}: {reason}")]
    File {
        /// Its path.
        path: String,
        /// Why.
        reason: String,
    },
    /// The file is no TOML, or has an unknown key.
    #[error("the configuration {path} is wrong: {reason}")]
    Toml {
        /// Its path.
        path: String,
        /// Where and why.
        reason: String,
    },
    /// A required key is not written.
    #[error("no {key} is configured: {hint}")]
    Missing {
        /// The key.
        key: &'static str,
        /// How to write it.
        hint: String,
    },
    /// A value is not allowed.
    #[error("{key} = {value:?} (from {origin}) is not allowed: {allowed}")]
    Value {
        /// The key.
        key: &'static str,
        /// What was written.
        value: String,
        /// Where it was written.
        origin: String,
        /// What may be written.
        allowed: String,
    },
    /// A device that this build does not have.
    #[error("device = {device:?} (from {origin}): support for it is not built in; allowed are auto and cpu")]
    DeviceNotBuiltIn {
        /// The device.
        device: String,
        /// Where it was written.
        origin: String,
    },
}

/// Gathers command line, environment and file. The error of `--help` and `--version` is one too, with exit code 0.
pub fn told(arguments: impl IntoIterator<Item = impl Into<OsString> + Clone>) -> Result<Told, ConfigError> {
    let matches = CommandLine::command().try_get_matches_from(arguments)?;
    let line = CommandLine::from_arg_matches(&matches)?;
    let (file, file_origin) = match &line.config {
        None => (Config::default(), String::new()),
        Some(path) => (read_file(path)?, path.display().to_string()),
    };
    let mut told = Told {
        config: line.keys,
        origins: Origins::new(),
        print_config: line.print_config,
        stop_on_stdin_eof: line.stop_on_stdin_eof,
    };
    let from_file = file.written();
    for ((key, value), (_, in_file)) in told.config.written_mut().into_iter().zip(from_file) {
        match origin_on_line(&matches, key) {
            Some(origin) => {
                told.origins.insert(key.to_owned(), origin);
            }
            None if in_file.is_some() => {
                *value = in_file.clone();
                told.origins.insert(key.to_owned(), file_origin.clone());
            }
            None => {}
        }
    }
    Ok(told)
}

fn origin_on_line(matches: &ArgMatches, key: &str) -> Option<String> {
    match matches.value_source(key)? {
        ValueSource::CommandLine => Some(format!("--{}", key.replace('_', "-"))),
        ValueSource::EnvVariable => Some(format!("LLMD_{}", key.to_uppercase())),
        _ => None,
    }
}

fn read_file(path: &Path) -> Result<Config, ConfigError> {
    let file_error = |reason: String| ConfigError::File { path: path.display().to_string(), reason };
    let file = std::fs::File::open(path).map_err(|e| file_error(e.to_string()))?;
    let mut text = String::new();
    file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text).map_err(|e| file_error(e.to_string()))?;
    if text.len() as u64 > FILE_BYTES_MAX {
        return Err(file_error(format!("it is longer than {FILE_BYTES_MAX} bytes")));
    }
    Config::from_toml(&text).map_err(|reason| ConfigError::Toml { path: path.display().to_string(), reason })
}

impl Config {
    /// The keys of a file's text; the error says where and why.
    pub fn from_toml(text: &str) -> Result<Self, String> {
        toml::from_str(text).map_err(|e: toml::de::Error| {
            let line = e.span().map(|span| text.as_bytes()[..span.start].iter().filter(|b| **b == b'\n').count() + 1);
            let at = line.map(|line| format!("line {line}: ")).unwrap_or_default();
            // serde goes on with a list of all keys, too long to be read.
            match e.message().strip_prefix("unknown field ").and_then(|rest| rest.split_once(',')) {
                Some((key, _)) => format!("{at}unknown key {key}; `llmd --help` lists the keys"),
                None => format!("{at}{}", e.message().replace('\n', ", ")),
            }
        })
    }

    /// Every key with what is written for it, in the order of the struct.
    pub fn written(&self) -> Vec<(&'static str, Option<Written>)> {
        self.clone().written_mut().into_iter().map(|(key, value)| (key, value.clone())).collect()
    }

    fn written_mut(&mut self) -> Vec<(&'static str, &mut Option<Written>)> {
        // Written out without `..`: a new field that is missing here does not compile.
        let Self {
            model,
            socket,
            control,
            device,
            threads,
            isa,
            activations,
            kv_type,
            kv_blocks,
            kv_memory,
            sequences_max,
            waiting_max,
            tokens_per_step,
            prefill_chunk_max,
            prefix_cache,
            lock_memory,
            scheduler,
            sessions_max,
            sessions_per_uid,
            requests_per_session,
            metrics,
            drain_timeout,
            log_level,
            step_log,
        } = self;
        vec![
            ("model", model),
            ("socket", socket),
            ("control", control),
            ("device", device),
            ("threads", threads),
            ("isa", isa),
            ("activations", activations),
            ("kv_type", kv_type),
            ("kv_blocks", kv_blocks),
            ("kv_memory", kv_memory),
            ("sequences_max", sequences_max),
            ("waiting_max", waiting_max),
            ("tokens_per_step", tokens_per_step),
            ("prefill_chunk_max", prefill_chunk_max),
            ("prefix_cache", prefix_cache),
            ("lock_memory", lock_memory),
            ("scheduler", scheduler),
            ("sessions_max", sessions_max),
            ("sessions_per_uid", sessions_per_uid),
            ("requests_per_session", requests_per_session),
            ("metrics", metrics),
            ("drain_timeout", drain_timeout),
            ("log_level", log_level),
            ("step_log", step_log),
        ]
    }

    /// Checks everything once and fills in the defaults.
    pub fn resolve(&self, origins: &Origins, around: &Surroundings) -> Result<Settings, ConfigError> {
        let check = Check { origins };
        let model = match &self.model {
            Some(Written(path)) if !path.is_empty() => PathBuf::from(path),
            Some(empty) => return Err(check.refuse("model", empty, "the path of a GGUF file")),
            None => {
                let hint = "give --model PATH, LLMD_MODEL=PATH or a line model = \"PATH\" in the file of --config";
                return Err(ConfigError::Missing { key: "model", hint: hint.to_owned() });
            }
        };
        let device = match self.device.as_ref().map(|w| (w, w.0.as_str())) {
            None | Some((_, "auto" | "cpu")) => Device::Cpu,
            Some((_, device @ ("cuda" | "gpu"))) => {
                let origin = check.origin("device");
                return Err(ConfigError::DeviceNotBuiltIn { device: device.to_owned(), origin });
            }
            Some((written, _)) => return Err(check.refuse("device", written, "auto or cpu")),
        };
        let threads = match &self.threads {
            Some(Written(text)) if text == "auto" => None,
            Some(written) => Some(check.integer("threads", written, &THREADS, "auto, or ")?),
            None => None,
        }
        .unwrap_or(around.cores.clamp(1, *THREADS.end() as usize));
        let kv = match (&self.kv_blocks, &self.kv_memory) {
            (Some(blocks), Some(_)) => {
                return Err(check.refuse("kv_blocks", blocks, "write kv_blocks or kv_memory, not both"));
            }
            (Some(blocks), None) => KvSize::Blocks(check.integer("kv_blocks", blocks, &KV_BLOCKS, "")? as u32),
            (None, Some(Written(text))) if text == "auto" => KvSize::Auto,
            (None, Some(written)) => {
                let bytes = parse_bytes(&written.0).filter(|bytes| KV_BYTES.contains(bytes));
                KvSize::Bytes(bytes.ok_or_else(|| {
                    check.refuse("kv_memory", written, "auto, or 1MiB to 64TiB, written like 2GiB, 512MiB or in bytes")
                })?)
            }
            (None, None) => KvSize::Auto,
        };
        let number = |key, written: &Option<Written>, range: &RangeInclusive<u64>, default: usize| match written {
            Some(written) => check.integer(key, written, range, ""),
            None => Ok(default),
        };
        let sequences_max = number("sequences_max", &self.sequences_max, &SEQUENCES, 64)?;
        // A default gives way to a neighbour that was written; two written values that contradict each other are an error.
        let step_least = tokens_per_step_least(sequences_max);
        let step_range = step_least as u64..=*TOKENS_PER_STEP.end();
        let tokens_per_step = number("tokens_per_step", &self.tokens_per_step, &step_range, 512.max(step_least))?;
        let prefill_chunk_max = match &self.prefill_chunk_max {
            None => 256.min(tokens_per_step - tokens_per_step % BLOCK_TOKENS),
            Some(written) => {
                let range = BLOCK_TOKENS as u64..=tokens_per_step as u64;
                let tokens = check.integer("prefill_chunk_max", written, &range, "")?;
                if !tokens.is_multiple_of(BLOCK_TOKENS) {
                    return Err(check.refuse("prefill_chunk_max", written, "a multiple of 16, the tokens of a block"));
                }
                tokens
            }
        };
        let sessions_max = number("sessions_max", &self.sessions_max, &SESSIONS, 256)?;
        let uid_range = 1..=(sessions_max as u64).min(*SESSIONS_PER_UID.end());
        let mut settings = Settings {
            model,
            socket: None,
            control: None,
            device,
            threads,
            isa: check.choice("isa", &self.isa, &ISAS, Isa::Auto)?,
            activations: check.choice("activations", &self.activations, &ACTIVATIONS, Activations::Int8)?,
            kv_type: check.choice("kv_type", &self.kv_type, &KV_TYPES, KvType::Bf16)?,
            kv,
            sequences_max,
            waiting_max: number("waiting_max", &self.waiting_max, &WAITING, 1024)?,
            tokens_per_step,
            prefill_chunk_max,
            prefix_cache: check.choice("prefix_cache", &self.prefix_cache, &BOOLS, true)?,
            lock_memory: check.choice("lock_memory", &self.lock_memory, &BOOLS, false)?,
            scheduler: check.choice("scheduler", &self.scheduler, &SCHEDULERS, SchedulerPolicy::Continuous)?,
            sessions_max,
            sessions_per_uid: number("sessions_per_uid", &self.sessions_per_uid, &uid_range, 128.min(sessions_max))?,
            requests_per_session: number(
                "requests_per_session",
                &self.requests_per_session,
                &REQUESTS_PER_SESSION,
                64,
            )?,
            metrics: match &self.metrics {
                Some(written) => check.metrics(written)?,
                None => None,
            },
            drain_timeout: Duration::from_secs(number("drain_timeout", &self.drain_timeout, &DRAIN_SECONDS, 30)? as u64),
            log_level: check.choice("log_level", &self.log_level, &LEVELS, log::LevelFilter::Info)?,
            step_log: match &self.step_log {
                Some(written) if written.0.is_empty() => {
                    return Err(check.refuse("step_log", written, "a path; leave the key out to write none"));
                }
                other => other.as_ref().map(|Written(path)| PathBuf::from(path)),
            },
        };
        // Last: a value that is wrong is told before a default that is missing.
        (settings.socket, settings.control) = self.sockets(&check, around)?;
        Ok(settings)
    }

    /// Paths of the clients' and the control socket.
    fn sockets(
        &self,
        check: &Check<'_>,
        around: &Surroundings,
    ) -> Result<(Option<PathBuf>, Option<PathBuf>), ConfigError> {
        let default = around.runtime_dir.as_ref().map(|dir| dir.join("llmd"));
        let written = |key, value: &Option<Written>| match value {
            Some(written) => check.socket_path(key, written, &written.0).map(Some),
            None => Ok(None),
        };
        let socket = match written("socket", &self.socket)? {
            _ if around.socket_passed => None,
            Some(path) => Some(path),
            None => Some(default.as_ref().map(|dir| dir.join("llmd.sock")).ok_or_else(|| {
                ConfigError::Missing {
                    key: "socket",
                    hint: "XDG_RUNTIME_DIR is not set, so there is no default; give --socket PATH, for example \
                       /tmp/llmd-$USER/llmd.sock in a folder of your own"
                        .to_owned(),
                }
            })?),
        };
        let control = match written("control", &self.control)? {
            _ if around.control_passed => None,
            Some(path) => Some(path),
            None => match socket.as_deref().and_then(Path::parent) {
                Some(folder) => Some(folder.join("control.sock")),
                None => default.map(|dir| dir.join("control.sock")),
            },
        };
        if control.is_some() && control == socket {
            let same = self.control.clone().unwrap_or_else(|| "control.sock".into());
            return Err(check.refuse("control", &same, "a path other than the one of socket"));
        }
        Ok((socket, control))
    }
}

impl<'de> Deserialize<'de> for Written {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Scalar;
        impl serde::de::Visitor<'_> for Scalar {
            type Value = Written;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text, a whole number, true or false")
            }
            fn visit_str<E>(self, text: &str) -> Result<Written, E> {
                Ok(Written(text.to_owned()))
            }
            fn visit_i64<E>(self, number: i64) -> Result<Written, E> {
                Ok(Written(number.to_string()))
            }
            fn visit_bool<E>(self, value: bool) -> Result<Written, E> {
                Ok(Written(value.to_string()))
            }
        }
        deserializer.deserialize_any(Scalar)
    }
}

#[cfg(test)]
mod tests;
