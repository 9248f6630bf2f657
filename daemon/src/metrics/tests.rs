//! Tests of `metrics`, through its text.

use super::*;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// The value of the sample whose name and labels are `series`.
fn value(text: &str, series: &str) -> f64 {
    text.lines()
        .find_map(|line| line.strip_prefix(series).and_then(|rest| rest.strip_prefix(' ')))
        .unwrap_or_else(|| panic!("no {series} in\n{text}"))
        .parse()
        .unwrap()
}

fn finished(reason: &'static str) -> Finished {
    let some = Some(0.2);
    Finished {
        reason,
        output_tokens: 5,
        seconds: 0.5,
        queue_seconds: 0.01,
        prefill_seconds: some,
        decode_seconds: some,
    }
}

#[test]
fn every_alias_shows_the_number_of_its_own_name() {
    let metrics = Metrics::new(16);
    metrics.set_model("tiny");
    metrics.accepted(100);
    metrics.accepted(50);
    metrics.load(1, 1);
    metrics.kv(5, 2, 3, 10);
    metrics.step(StepSample { seconds: 0.02, prefill_tokens: 150, decode_tokens: 4, sampled_tokens: 6, sequences: 3 });
    metrics.first_token(0.3);
    metrics.inter_token(0.02);
    metrics.preempted(2);
    metrics.prefix(150, 32);
    metrics.finished(finished("stop_string"));
    let text = metrics.render();
    let model = "model_name=\"tiny\"";
    let vllm = |name: &str| value(&text, &format!("vllm:{name}{{{model},engine=\"0\"}}"));
    assert_eq!(vllm("num_requests_waiting"), 1.0);
    assert_eq!(vllm("num_requests_running"), 1.0);
    assert_eq!(vllm("kv_cache_usage_perc"), 0.3);
    assert_eq!(vllm("prompt_tokens_total"), 150.0);
    assert_eq!(vllm("generation_tokens_total"), 6.0);
    assert_eq!(vllm("num_preemptions_total"), 2.0);
    assert_eq!(vllm("prefix_cache_queries_total"), 150.0);
    assert_eq!(vllm("prefix_cache_hits_total"), 32.0);
    assert_eq!(vllm("iteration_tokens_total_sum"), 154.0);
    for histogram in [
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
    ] {
        assert_eq!(vllm(&format!("{histogram}_count")), 1.0, "{histogram}");
    }
    let success = |word| format!("vllm:request_success_total{{{model},engine=\"0\",finished_reason=\"{word}\"}}");
    assert_eq!(value(&text, &success("stop")), 1.0);
    assert_eq!(value(&text, &success("abort")), 0.0);
    let cache = format!("vllm:cache_config_info{{{model},engine=\"0\",block_size=\"16\",num_gpu_blocks=\"10\"}}");
    assert_eq!(value(&text, &cache), 1.0);
    assert_eq!(value(&text, "llmd_kv_blocks{state=\"owned\"}"), 3.0);
    assert_eq!(value(&text, "llmd_queue_seconds_count{class=\"default\"}"), 1.0);
    assert_eq!(value(&text, "llmd_step_tokens_sum{kind=\"decode\"}"), 4.0);
    assert_eq!(value(&text, "llmd_requests_live"), 1.0);
}

#[test]
fn the_text_is_well_formed() {
    let text = Metrics::new(16).render();
    let mut families = Vec::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            families.push(rest.split(' ').next().unwrap());
            continue;
        }
        if line.starts_with('#') {
            continue;
        }
        let (series, number) = line.rsplit_once(' ').unwrap();
        number.parse::<f64>().unwrap();
        let name = series.split('{').next().unwrap();
        assert!(name.starts_with(families.last().unwrap()), "{line} stands under {:?}", families.last());
    }
    let mut unique = families.clone();
    unique.dedup();
    assert_eq!(unique, families, "each family stands once, in order");
    assert!(families.is_sorted());
}

/// Idle means zero for each gauge that speaks of load; what describes the daemon stays.
#[test]
fn gauges_of_load_are_zero_when_idle() {
    let metrics = Metrics::new(16);
    metrics.accepted(7);
    metrics.load(0, 1);
    metrics.kv(4, 0, 6, 10);
    metrics.finished(finished("length"));
    metrics.load(0, 0);
    metrics.kv(7, 3, 0, 10);
    let text = metrics.render();
    for name in ["requests_waiting", "requests_running", "requests_live", "kv_usage_ratio", "sessions", "spill_bytes"] {
        assert_eq!(value(&text, &format!("llmd_{name}")), 0.0, "{name}");
    }
    assert_eq!(value(&text, "llmd_kv_blocks{state=\"owned\"}"), 0.0);
}

#[test]
fn ready_follows_the_state() {
    let metrics = Metrics::new(16);
    assert_eq!(value(&metrics.render(), "llmd_ready"), 0.0);
    metrics.set_state(State::Ready);
    assert_eq!(value(&metrics.render(), "llmd_ready"), 1.0);
    metrics.set_state(State::Draining);
    assert_eq!((value(&metrics.render(), "llmd_ready"), metrics.state()), (0.0, State::Draining));
}

#[test]
fn every_word_of_the_protocol_is_a_label_of_its_own() {
    use llmd_protocol::message::{FinishReason, Reject};
    let metrics = Metrics::new(16);
    Reject::ALL.iter().for_each(|r| metrics.rejected(r.name()));
    metrics.rejected("something new");
    assert_eq!(metrics.totals().rejected, REJECTED.map(|reason| (reason, 1)));
    for reason in [FinishReason::Stop, FinishReason::StopString, FinishReason::Length, FinishReason::Cancelled] {
        metrics.finished(finished(reason.name()));
    }
    assert!(metrics.totals().ended.iter().all(|(reason, n)| *reason != "other" && *n == 1));
}

/// While requests come and go, no text ever shows more ends than acceptances, or blocks that do not add up.
#[test]
fn numbers_agree_at_every_moment() {
    let metrics = Arc::new(Metrics::new(16));
    metrics.kv(64, 0, 0, 64);
    let stop = Arc::new(AtomicBool::new(false));
    let writer = std::thread::spawn({
        let (metrics, stop) = (metrics.clone(), stop.clone());
        move || {
            let mut n = 0;
            while !stop.load(Ordering::Relaxed) {
                metrics.accepted(3);
                metrics.kv(64 - n % 64, n % 64 / 2, n % 64 - n % 64 / 2, 64);
                metrics.finished(finished("stop"));
                n += 1;
            }
        }
    });
    for _ in 0..30 {
        let text = metrics.render();
        let accepted = value(&text, "llmd_requests_accepted_total");
        let ended: f64 =
            ENDED.iter().map(|(r, _)| value(&text, &format!("llmd_requests_ended_total{{reason=\"{r}\"}}"))).sum();
        assert_eq!(accepted, ended + value(&text, "llmd_requests_live"));
        let blocks = metrics.kv_blocks();
        assert_eq!(blocks.free + blocks.cached + blocks.owned, 64);
    }
    stop.store(true, Ordering::Relaxed);
    writer.join().unwrap();
}

#[test]
fn quantiles_come_from_the_right_bucket() {
    let metrics = Metrics::new(16);
    assert_eq!(metrics.latency(Latency::InterToken).quantile(0.5), None);
    (0..98).for_each(|_| metrics.inter_token(0.012));
    let before = metrics.latency(Latency::InterToken);
    metrics.inter_token(3.0);
    metrics.inter_token(500.0);
    let counts = metrics.latency(Latency::InterToken);
    assert_eq!(counts.total(), 100);
    let p50 = counts.quantile(0.5).unwrap();
    assert!((0.010..0.016).contains(&p50), "{p50}");
    let p99 = counts.quantile(0.99).unwrap();
    assert!((2.5..=4.0).contains(&p99), "{p99}");
    assert_eq!(counts.quantile(1.0), Some(100.0));
    assert_eq!(counts.since(&before).total(), 2);
    assert!(LATENCY_BOUNDS.is_sorted() && COUNT_BOUNDS.is_sorted());
}
