//! What an operator can measure, in Prometheus' text format.
//!
//! Each fact is recorded once, under a name of our own (`llmd_*`, base units). When the text is rendered, the names that
//! existing dashboards and schedulers read (`vllm:*`, with labels `model_name` and `engine`) are made from the same
//! numbers, so the two can never disagree and cost nothing in a step.
//!
//! Recording takes no lock and makes no system call: atomic additions and, for a histogram, a walk along 31 bounds.
//!
//! Numbers that belong together are stored or read together, so that every text agrees with itself: accepted = ended +
//! live, and free + cached + owned = all blocks. Waiting and running are as of the engine's last step.

mod latency;
mod text;

pub use latency::{LATENCY_BOUNDS, LatencyCounts};

use prometheus::core::Collector;
use prometheus::proto::{Metric, MetricFamily, MetricType};
use prometheus::{Histogram, HistogramOpts, IntCounter, IntGauge, Registry, TextEncoder};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use text::{counter, family, gauge, renamed};

/// Upper bounds of counts of tokens and sequences in a step.
pub const COUNT_BOUNDS: [f64; 16] =
    [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0];

/// Reasons a request may end with after it was accepted, with vLLM's word for each. The last takes whatever is not listed.
const ENDED: [(&str, &str); 9] = [
    ("stop", "stop"),
    ("stop_string", "stop"),
    ("length", "length"),
    ("cancelled", "abort"),
    ("kv_exhausted", "error"),
    ("slow_reader", "error"),
    ("draining", "abort"),
    ("internal", "error"),
    ("other", "error"),
];
/// Reasons a request may be refused with before it is accepted. The last takes whatever is not listed.
const REJECTED: [&str; 12] = [
    "malformed",
    "invalid_parameter",
    "token_out_of_vocabulary",
    "never_fits",
    "empty_prompt",
    "busy",
    "draining",
    "chat_template",
    "slow_reader",
    "kv_exhausted",
    "internal",
    "other",
];

/// vLLM's name for a number of ours. The alias has the same type and value, without our labels.
const ALIASES: [(&str, &str); 15] = [
    ("vllm:num_requests_waiting", "llmd_requests_waiting"),
    ("vllm:num_requests_running", "llmd_requests_running"),
    ("vllm:kv_cache_usage_perc", "llmd_kv_usage_ratio"),
    ("vllm:time_to_first_token_seconds", "llmd_first_token_seconds"),
    ("vllm:inter_token_latency_seconds", "llmd_inter_token_seconds"),
    ("vllm:e2e_request_latency_seconds", "llmd_request_seconds"),
    ("vllm:request_queue_time_seconds", "llmd_queue_seconds"),
    ("vllm:request_prefill_time_seconds", "llmd_prefill_seconds"),
    ("vllm:request_decode_time_seconds", "llmd_decode_seconds"),
    ("vllm:prompt_tokens_total", "llmd_prompt_tokens_total"),
    ("vllm:generation_tokens_total", "llmd_output_tokens_total"),
    ("vllm:num_preemptions_total", "llmd_preemptions_total"),
    ("vllm:prefix_cache_queries_total", "llmd_prefix_queried_tokens_total"),
    ("vllm:prefix_cache_hits_total", "llmd_prefix_hit_tokens_total"),
    ("vllm:iteration_tokens_total", "llmd_batch_tokens"),
];

/// Whether the daemon takes requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum State {
    /// Weights are being loaded or warmed up.
    Loading = 0,
    /// Requests are taken.
    Ready = 1,
    /// Requests in flight finish, new ones are refused.
    Draining = 2,
}

/// What one step did.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StepSample {
    /// From planning to publishing, in seconds.
    pub seconds: f64,
    /// Prompt tokens computed.
    pub prefill_tokens: usize,
    /// Tokens computed for sequences whose prompt was done before.
    pub decode_tokens: usize,
    /// Tokens sampled.
    pub sampled_tokens: usize,
    /// Sequences that took part.
    pub sequences: usize,
}

/// How one accepted request went.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Finished {
    /// Why it ended: a word of the protocol's `FinishReason::name` or `Reject::name`.
    pub reason: &'static str,
    /// Tokens generated.
    pub output_tokens: u64,
    /// From arrival to the end, in seconds.
    pub seconds: f64,
    /// From arrival to the first step it took part in, in seconds.
    pub queue_seconds: f64,
    /// From then to its first token; None if it never got there.
    pub prefill_seconds: Option<f64>,
    /// From the first token to the last; None if there was none.
    pub decode_seconds: Option<f64>,
}

/// Latencies that [`Metrics::latency`] reads back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Latency {
    /// From arrival to the first token.
    FirstToken,
    /// Between two tokens of one sequence.
    InterToken,
    /// From arrival to the end.
    EndToEnd,
}

/// Counters since the start.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[allow(missing_docs, reason = "each is named as the llmd_* metric it reads")]
pub struct Totals {
    pub accepted: u64,
    pub ended: Vec<(&'static str, u64)>,
    pub rejected: Vec<(&'static str, u64)>,
    pub prompt_tokens: u64,
    pub output_tokens: u64,
    pub prefill_tokens: u64,
    pub steps: u64,
    pub preemptions: u64,
    pub prefix_queried_tokens: u64,
    pub prefix_hit_tokens: u64,
}

/// Blocks of key-value memory by what holds them; free + cached + owned = total.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(missing_docs, reason = "the sum above says what they are")]
pub struct KvBlocks {
    pub free: u64,
    pub cached: u64,
    pub owned: u64,
    pub total: u64,
}

/// Everything that is measured. Shared by all threads; every method takes `&self`.
pub struct Metrics {
    registry: Registry,
    /// Tokens in a block, for `vllm:cache_config_info`.
    block_tokens: usize,
    model: OnceLock<String>,
    state: AtomicU8,
    /// waiting << 32 | running.
    load: AtomicU64,
    /// free << 32 | cached.
    kv: AtomicU64,
    kv_total: AtomicU64,
    accepted: AtomicU64,
    ended: [AtomicU64; ENDED.len()],
    rejected: [AtomicU64; REJECTED.len()],
    steps: IntCounter,
    step_seconds: Histogram,
    step_prefill: Histogram,
    step_decode: Histogram,
    batch_tokens: Histogram,
    batch_sequences: Histogram,
    prefill_tokens: IntCounter,
    decode_tokens: IntCounter,
    prompt_tokens: IntCounter,
    output_tokens: IntCounter,
    request_output_tokens: Histogram,
    first_token: Histogram,
    inter_token: Histogram,
    end_to_end: Histogram,
    queue: Histogram,
    prefill: Histogram,
    decode: Histogram,
    preemptions: IntCounter,
    prefix_queried: IntCounter,
    prefix_hit: IntCounter,
    sessions: IntGauge,
    wakes: IntCounter,
    spill: IntGauge,
    log_dropped: IntGauge,
}

/// Makes metrics and registers them; the names are literals of this file, so a refusal is a mistake in it.
struct Maker(Registry);

impl Maker {
    fn keep<C: Collector + Clone + 'static>(&self, made: prometheus::Result<C>) -> C {
        let metric = made.expect("names and bounds of this file are well-formed");
        self.0.register(Box::new(metric.clone())).expect("names of this file differ");
        metric
    }

    fn counter(&self, name: &str, help: &str) -> IntCounter {
        self.keep(IntCounter::new(name, help))
    }

    fn gauge(&self, name: &str, help: &str) -> IntGauge {
        self.keep(IntGauge::new(name, help))
    }

    fn seconds(&self, name: &str, help: &str) -> Histogram {
        self.keep(Histogram::with_opts(HistogramOpts::new(name, help).buckets(LATENCY_BOUNDS.to_vec())))
    }

    fn counts(&self, name: &str, help: &str, label: Option<(&str, &str)>) -> Histogram {
        let mut options = HistogramOpts::new(name, help).buckets(COUNT_BOUNDS.to_vec());
        if let Some((label, value)) = label {
            options = options.const_label(label, value);
        }
        self.keep(Histogram::with_opts(options))
    }
}

impl Metrics {
    /// All zero, loading. `block_tokens` is the number of tokens in a block of key-value memory.
    pub fn new(block_tokens: usize) -> Self {
        let make = Maker(Registry::new());
        let queue = HistogramOpts::new("llmd_queue_seconds", "From a request's arrival to its first step.")
            .buckets(LATENCY_BOUNDS.to_vec())
            .const_label("class", "default");
        let step_tokens = "Tokens computed in a step, by kind.";
        let kind = |kind| Some(("kind", kind));
        Self {
            block_tokens,
            model: OnceLock::new(),
            state: AtomicU8::new(State::Loading as u8),
            load: AtomicU64::new(0),
            kv: AtomicU64::new(0),
            kv_total: AtomicU64::new(0),
            accepted: AtomicU64::new(0),
            ended: std::array::from_fn(|_| AtomicU64::new(0)),
            rejected: std::array::from_fn(|_| AtomicU64::new(0)),
            steps: make.counter("llmd_steps_total", "Steps computed."),
            step_seconds: make.seconds("llmd_step_seconds", "Time of a step, from planning to publishing."),
            step_prefill: make.counts("llmd_step_tokens", step_tokens, kind("prefill")),
            step_decode: make.counts("llmd_step_tokens", step_tokens, kind("decode")),
            batch_tokens: make.counts("llmd_batch_tokens", "Tokens computed in a step, of both kinds.", None),
            batch_sequences: make.counts("llmd_batch_sequences", "Sequences in a step.", None),
            prefill_tokens: make
                .counter("llmd_prefill_tokens_total", "Prompt tokens computed, again after preemption."),
            decode_tokens: make.counter("llmd_decode_tokens_total", "Tokens computed past the prompt."),
            prompt_tokens: make.counter("llmd_prompt_tokens_total", "Tokens of accepted prompts."),
            output_tokens: make.counter("llmd_output_tokens_total", "Tokens generated."),
            request_output_tokens: make.counts("llmd_request_output_tokens", "Tokens generated for a request.", None),
            first_token: make.seconds("llmd_first_token_seconds", "From a request's arrival to its first token."),
            inter_token: make.seconds("llmd_inter_token_seconds", "Between two tokens of a sequence."),
            end_to_end: make.seconds("llmd_request_seconds", "From a request's arrival to its end."),
            queue: make.keep(Histogram::with_opts(queue)),
            prefill: make.seconds("llmd_prefill_seconds", "From a request's first step to its first token."),
            decode: make.seconds("llmd_decode_seconds", "From a request's first token to its last."),
            preemptions: make.counter("llmd_preemptions_total", "Sequences that lost their blocks to others."),
            prefix_queried: make
                .counter("llmd_prefix_queried_tokens_total", "Prompt tokens looked up in the prefix cache."),
            prefix_hit: make.counter("llmd_prefix_hit_tokens_total", "Prompt tokens found in the prefix cache."),
            sessions: make.gauge("llmd_sessions", "Clients connected."),
            wakes: make.counter("llmd_ring_wakes_total", "Parked clients woken."),
            spill: make.gauge("llmd_spill_bytes", "Completions kept back for clients whose rings are full."),
            log_dropped: make.gauge("llmd_log_dropped_lines", "Log lines lost because the log could not keep up."),
            registry: make.0,
        }
    }

    /// Names the model; the first call counts.
    pub fn set_model(&self, name: &str) {
        let _ = self.model.set(name.to_owned());
    }

    /// Says whether the daemon takes requests.
    pub fn set_state(&self, state: State) {
        self.state.store(state as u8, Ordering::Relaxed);
    }

    /// Whether the daemon takes requests.
    pub fn state(&self) -> State {
        match self.state.load(Ordering::Relaxed) {
            0 => State::Loading,
            1 => State::Ready,
            _ => State::Draining,
        }
    }

    /// A step was computed and published.
    pub fn step(&self, step: StepSample) {
        self.steps.inc();
        self.step_seconds.observe(step.seconds);
        self.step_prefill.observe(step.prefill_tokens as f64);
        self.step_decode.observe(step.decode_tokens as f64);
        self.batch_tokens.observe((step.prefill_tokens + step.decode_tokens) as f64);
        self.batch_sequences.observe(step.sequences as f64);
        self.prefill_tokens.inc_by(step.prefill_tokens as u64);
        self.decode_tokens.inc_by(step.decode_tokens as u64);
        self.output_tokens.inc_by(step.sampled_tokens as u64);
    }

    /// So many sequences wait and run; said after each step and whenever the engine falls idle.
    pub fn load(&self, waiting: usize, running: usize) {
        self.load.store(pack(waiting, running), Ordering::Relaxed);
    }

    /// Sequences (waiting, running).
    pub fn loaded(&self) -> (u64, u64) {
        unpack(self.load.load(Ordering::Relaxed))
    }

    /// How key-value memory is held; `owned` is what is left of `total`.
    pub fn kv(&self, free: usize, cached: usize, owned: usize, total: usize) {
        debug_assert_eq!(free + cached + owned, total);
        self.kv_total.store(total as u64, Ordering::Relaxed);
        self.kv.store(pack(free, cached), Ordering::Relaxed);
    }

    /// Blocks by what holds them.
    pub fn kv_blocks(&self) -> KvBlocks {
        let (free, cached) = unpack(self.kv.load(Ordering::Relaxed));
        let total = self.kv_total.load(Ordering::Relaxed);
        KvBlocks { free, cached, owned: total.saturating_sub(free + cached), total }
    }

    /// A request was taken into the queue.
    pub fn accepted(&self, prompt_tokens: usize) {
        self.accepted.fetch_add(1, Ordering::Relaxed);
        self.prompt_tokens.inc_by(prompt_tokens as u64);
    }

    /// A request was refused before it was accepted; `reason` is a word of the protocol's `Reject::name`.
    pub fn rejected(&self, reason: &'static str) {
        let index = REJECTED.iter().position(|r| *r == reason).unwrap_or(REJECTED.len() - 1);
        self.rejected[index].fetch_add(1, Ordering::Relaxed);
    }

    /// An accepted request ended; called exactly once for each.
    pub fn finished(&self, request: Finished) {
        self.end_to_end.observe(request.seconds);
        self.queue.observe(request.queue_seconds);
        self.request_output_tokens.observe(request.output_tokens as f64);
        if let Some(seconds) = request.prefill_seconds {
            self.prefill.observe(seconds);
        }
        if let Some(seconds) = request.decode_seconds {
            self.decode.observe(seconds);
        }
        let index = ENDED.iter().position(|(r, _)| *r == request.reason).unwrap_or(ENDED.len() - 1);
        // Release pairs with Acquire in `ended`: who sees the end also sees the acceptance before it.
        self.ended[index].fetch_add(1, Ordering::Release);
    }

    /// A request's first token came so long after its arrival.
    pub fn first_token(&self, seconds: f64) {
        self.first_token.observe(seconds);
    }

    /// A sequence's token came so long after the one before.
    pub fn inter_token(&self, seconds: f64) {
        self.inter_token.observe(seconds);
    }

    /// So many sequences lost their blocks.
    pub fn preempted(&self, sequences: usize) {
        self.preemptions.inc_by(sequences as u64);
    }

    /// A prompt of so many tokens was looked up in the prefix cache, and so many were found.
    pub fn prefix(&self, queried_tokens: usize, hit_tokens: usize) {
        self.prefix_queried.inc_by(queried_tokens as u64);
        self.prefix_hit.inc_by(hit_tokens as u64);
    }

    /// So many clients are connected.
    pub fn sessions(&self, open: usize) {
        self.sessions.set(open as i64);
    }

    /// A parked client was woken so many times.
    pub fn wakes(&self, wakes: usize) {
        self.wakes.inc_by(wakes as u64);
    }

    /// So many bytes of completions are kept back, over all clients.
    pub fn spill(&self, bytes: usize) {
        self.spill.set(bytes as i64);
    }

    /// So many log lines were lost since the start.
    pub fn log_dropped(&self, lines: u64) {
        self.log_dropped.set(lines as i64);
    }

    /// (accepted, ended by reason), read so that accepted >= the sum of ended.
    fn requests(&self) -> (u64, [u64; ENDED.len()]) {
        // The ends first: an end seen here is of a request whose acceptance is seen below.
        let ended = std::array::from_fn(|i| self.ended[i].load(Ordering::Acquire));
        (self.accepted.load(Ordering::Relaxed), ended)
    }

    /// Counters since the start; reasons that never came up are left out.
    pub fn totals(&self) -> Totals {
        let (accepted, ended) = self.requests();
        let ended = ENDED.iter().zip(ended).map(|((reason, _), n)| (*reason, n));
        let rejected = REJECTED.iter().zip(&self.rejected).map(|(reason, n)| (*reason, n.load(Ordering::Relaxed)));
        Totals {
            accepted,
            ended: ended.filter(|(_, n)| *n > 0).collect(),
            rejected: rejected.filter(|(_, n)| *n > 0).collect(),
            prompt_tokens: self.prompt_tokens.get(),
            output_tokens: self.output_tokens.get(),
            prefill_tokens: self.prefill_tokens.get(),
            steps: self.steps.get(),
            preemptions: self.preemptions.get(),
            prefix_queried_tokens: self.prefix_queried.get(),
            prefix_hit_tokens: self.prefix_hit.get(),
        }
    }

    /// How often each latency was seen since the start.
    pub fn latency(&self, which: Latency) -> LatencyCounts {
        let histogram = match which {
            Latency::FirstToken => &self.first_token,
            Latency::InterToken => &self.inter_token,
            Latency::EndToEnd => &self.end_to_end,
        };
        let families = histogram.collect();
        let histogram = families[0].get_metric()[0].get_histogram();
        let mut counts = LatencyCounts::default();
        let mut below = 0;
        for (count, bucket) in counts.0.iter_mut().zip(histogram.get_bucket()) {
            *count = bucket.cumulative_count() - below;
            below = bucket.cumulative_count();
        }
        counts.0[LATENCY_BOUNDS.len()] = histogram.get_sample_count() - below;
        counts
    }

    /// Everything in Prometheus' text format, version 0.0.4.
    pub fn render(&self) -> String {
        let mut families = self.registry.gather();
        self.push_requests(&mut families);
        self.push_gauges(&mut families);
        let labels = [("model_name", self.model.get().map_or("", String::as_str)), ("engine", "0")];
        for (alias, name) in ALIASES {
            let own = families.iter().find(|f| f.name() == name).expect("every alias names a metric of this file");
            families.push(renamed(own, alias, &labels));
        }
        families.sort_by(|a, b| a.name().cmp(b.name()));
        TextEncoder::new().encode_to_string(&families).expect("a family of this file has a name and metrics")
    }

    fn push_requests(&self, families: &mut Vec<MetricFamily>) {
        let (accepted, ended) = self.requests();
        let live = accepted.saturating_sub(ended.iter().sum());
        families.push(family(
            "llmd_requests_accepted_total",
            "Requests taken into the queue.",
            MetricType::COUNTER,
            [counter(accepted, &[])],
        ));
        families.push(family(
            "llmd_requests_ended_total",
            "Accepted requests that ended, by reason; accepted = ended + live.",
            MetricType::COUNTER,
            ENDED.iter().zip(ended).map(|((reason, _), n)| counter(n, &[("reason", reason)])),
        ));
        families.push(family(
            "llmd_requests_live",
            "Accepted requests that have not ended.",
            MetricType::GAUGE,
            [gauge(live as f64, &[])],
        ));
        families.push(family(
            "llmd_rejects_total",
            "Requests refused before they were accepted, by reason.",
            MetricType::COUNTER,
            REJECTED.iter().zip(&self.rejected).map(|(r, n)| counter(n.load(Ordering::Relaxed), &[("reason", r)])),
        ));
        let model = self.model.get().map_or("", String::as_str);
        let successes = ["stop", "length", "abort", "error"].map(|word| {
            let n = ENDED.iter().zip(ended).filter(|((_, w), _)| *w == word).map(|(_, n)| n).sum();
            counter(n, &[("model_name", model), ("engine", "0"), ("finished_reason", word)])
        });
        let help = "Requests that ended, by vLLM's reasons.";
        families.push(family("vllm:request_success_total", help, MetricType::COUNTER, successes));
    }

    fn push_gauges(&self, families: &mut Vec<MetricFamily>) {
        let mut push = |name, help, metrics: Vec<Metric>| families.push(family(name, help, MetricType::GAUGE, metrics));
        let (waiting, running) = self.loaded();
        push("llmd_requests_waiting", "Sequences that wait for a place.", vec![gauge(waiting as f64, &[])]);
        push("llmd_requests_running", "Sequences that take part in steps.", vec![gauge(running as f64, &[])]);
        let kv = self.kv_blocks();
        let states = [("free", kv.free), ("cached", kv.cached), ("owned", kv.owned)];
        let help = "Blocks of key-value memory, by what holds them: nothing, the prefix cache alone, sequences.";
        push("llmd_kv_blocks", help, states.map(|(state, n)| gauge(n as f64, &[("state", state)])).into());
        let usage = kv.owned as f64 / kv.total.max(1) as f64;
        push("llmd_kv_usage_ratio", "Part of the blocks that sequences hold, 0 to 1.", vec![gauge(usage, &[])]);
        let ready = f64::from(u8::from(self.state() == State::Ready));
        push("llmd_ready", "1 when requests are taken.", vec![gauge(ready, &[])]);
        let model = self.model.get().map_or("", String::as_str);
        let build = [("version", env!("CARGO_PKG_VERSION")), ("model", model)];
        push("llmd_build_info", "Always 1; the labels say what runs.", vec![gauge(1.0, &build)]);
        let (size, blocks) = (self.block_tokens.to_string(), kv.total.to_string());
        let cache = [
            ("model_name", model),
            ("engine", "0"),
            ("block_size", size.as_str()),
            ("num_gpu_blocks", blocks.as_str()),
        ];
        push("vllm:cache_config_info", "Always 1; the labels say how the cache is laid out.", vec![gauge(1.0, &cache)]);
    }
}

/// Two counts in one word, so that they are stored and read together. Counts above u32 do not occur: sequences and blocks
/// are both numbered in u32.
fn pack(high: usize, low: usize) -> u64 {
    debug_assert!(high <= u32::MAX as usize && low <= u32::MAX as usize);
    (high as u64) << 32 | (low as u64 & u64::from(u32::MAX))
}

fn unpack(word: u64) -> (u64, u64) {
    (word >> 32, word & u64::from(u32::MAX))
}

#[cfg(test)]
mod tests;
