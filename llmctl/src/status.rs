//! `llmctl status` and `llmctl metrics`.

use crate::failure::Failure;
use crate::{Common, place, screen};
use llmd_protocol::control::{self, DaemonState, Percentiles, Status};
use serde_json::{Map, Value};
use std::fmt::Write as _;
use std::io::{IsTerminal, Write};
use std::time::Duration;

/// How long the daemon may take to answer.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Most clients listed for people.
const CLIENTS_SHOWN: usize = 20;

/// What `status` takes.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Show it again and again, until Ctrl-C
    #[arg(long, short)]
    watch: bool,
    /// Seconds between two looks of --watch
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = interval)]
    interval: f64,
}

fn interval(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.1..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("give seconds from 0.1 to 3600".to_owned()),
    }
}

/// Shows the status once, or for ever.
pub fn run(common: &Common, arguments: &Arguments) -> Result<(), Failure> {
    let path = place::control(common);
    let mut out = std::io::stdout().lock();
    loop {
        let status = control::status(&path, TIMEOUT)?;
        let text = if common.json { format!("{}\n", json(&status)) } else { human(&status) };
        if arguments.watch && !common.json && out.is_terminal() {
            // Home, then clear what follows each line and the rest: the screen does not flicker as after a full clear.
            write!(out, "\x1b[H{}\x1b[J", text.replace('\n', "\x1b[K\n"))?;
        } else {
            out.write_all(text.as_bytes())?;
        }
        out.flush()?;
        if !arguments.watch {
            return Ok(());
        }
        std::thread::sleep(Duration::from_secs_f64(arguments.interval));
    }
}

/// Prints the metrics, as they are or as one object of series and values.
pub fn metrics(common: &Common) -> Result<(), Failure> {
    let text = control::metrics(&place::control(common), TIMEOUT)?;
    let mut out = std::io::stdout().lock();
    if common.json {
        writeln!(out, "{}", series(&text))?;
    } else {
        out.write_all(text.as_bytes())?;
    }
    out.flush()?;
    Ok(())
}

/// Samples of Prometheus' text format, as an object of name with labels -> value.
fn series(text: &str) -> Value {
    let samples = text.lines().filter(|line| !line.starts_with('#')).filter_map(|line| {
        let (series, value) = line.rsplit_once(' ')?;
        Some((series.to_owned(), value.parse::<f64>().map_or(Value::Null, Value::from)))
    });
    Value::Object(samples.collect())
}

/// The vocabulary of the daemon's model, if the control socket can be asked and the model is loaded.
pub fn vocabulary(common: &Common) -> Option<u32> {
    Some(control::status(&place::control(common), TIMEOUT).ok()?.model?.vocabulary)
}

/// The status as JSON: the fields of [`Status`], counts by reason as objects.
fn json(status: &Status) -> Value {
    let mut value = serde_json::to_value(status).expect("a status has text keys only");
    for key in ["finished", "rejected"] {
        let counts = match key {
            "finished" => &status.totals.finished,
            _ => &status.totals.rejected,
        };
        let counts: Map<String, Value> = counts.iter().map(|(reason, n)| (reason.clone(), (*n).into())).collect();
        value["totals"][key] = Value::Object(counts);
    }
    value
}

/// One screen for people.
fn human(status: &Status) -> String {
    let mut out = String::new();
    let state = match status.state {
        DaemonState::Loading => "loading the model",
        DaemonState::Ready => "ready",
        DaemonState::Draining => "draining: no new requests",
    };
    let up = screen::seconds(status.uptime_s);
    let version = screen::fit(&status.version, 20);
    let _ = writeln!(out, "llmd {version}   {state}   pid {}   up {up}", status.pid);
    model(&mut out, status);
    load(&mut out, status);
    latency(&mut out, status);
    totals(&mut out, status);
    clients(&mut out, status);
    out
}

fn model(out: &mut String, status: &Status) {
    if let Some(model) = &status.model {
        out.push_str(&screen::paragraph(
            "Model",
            &[
                model.name.clone(),
                model.architecture.clone(),
                format!("{} weights", screen::count(model.parameters)),
                model.quantisation.clone(),
                screen::bytes(model.weight_bytes),
                format!("context {}", model.context_max),
                format!("vocabulary {}", model.vocabulary),
                format!("{} batching", model.scheduler),
            ],
        ));
        out.push_str(&screen::paragraph("", std::slice::from_ref(&model.path)));
    }
    if !status.device.is_empty() {
        out.push_str(&screen::paragraph("Device", std::slice::from_ref(&status.device)));
    }
}

fn load(out: &mut String, status: &Status) {
    let load = &status.load;
    out.push_str(&screen::paragraph(
        "Load",
        &[
            format!("{} running of at most {}", load.running, load.running_max),
            format!("{} waiting of at most {}", load.waiting, load.waiting_max),
        ],
    ));
    let rate = &status.rate;
    out.push_str(&screen::paragraph(
        "Now",
        &[
            format!("{} output tokens/s", screen::significant(rate.output_tokens_per_s)),
            format!("{} prompt tokens/s", screen::significant(rate.prompt_tokens_per_s)),
            format!("{} steps/s", screen::significant(rate.steps_per_s)),
        ],
    ));
    let kv = &status.kv;
    if kv.total > 0 {
        let part = |blocks: u64| blocks as f64 / kv.total as f64;
        let bar = screen::bar(part(kv.owned), part(kv.cached), 24);
        let percent = |blocks| format!("{:.0} %", part(blocks) * 100.0);
        let (owned, cached) = (percent(kv.owned), percent(kv.cached));
        out.push_str(&screen::paragraph(
            "KV cache",
            &[
                format!("{bar} {owned} in use"),
                format!("{cached} cached prefixes"),
                format!("{} blocks of {} tokens", kv.total, kv.block_tokens),
                screen::bytes(kv.bytes),
            ],
        ));
    }
}

fn latency(out: &mut String, status: &Status) {
    let latency = &status.latency;
    let rows = [
        ("first token", latency.first_token),
        ("between tokens", latency.inter_token),
        ("whole request", latency.end_to_end),
    ];
    let mut label = "Latency";
    for (name, percentiles) in rows {
        if let Some(Percentiles { p50_s, p99_s }) = percentiles {
            let (p50, p99) = (screen::seconds(p50_s), screen::seconds(p99_s));
            let window = match label {
                "" => String::new(),
                _ => format!("   (last {})", screen::seconds(latency.window_s)),
            };
            let _ = writeln!(out, "{label:<10}{name:<15} p50 {p50:>9}   p99 {p99:>9}{window}");
            label = "";
        }
    }
}

fn totals(out: &mut String, status: &Status) {
    let totals = &status.totals;
    let ended: u64 = totals.finished.iter().map(|(_, n)| n).sum();
    let live = totals.accepted.saturating_sub(ended);
    let mut words = vec![format!("{} accepted", totals.accepted), format!("{live} live")];
    words.extend(totals.finished.iter().map(|(reason, n)| match reason.as_str() {
        "length" => format!("{n} ended at max_tokens"),
        "stop" => format!("{n} ended by themselves"),
        other => format!("{n} ended: {}", other.replace('_', " ")),
    }));
    words.extend(totals.rejected.iter().map(|(reason, n)| format!("{n} rejected: {}", reason.replace('_', " "))));
    out.push_str(&screen::paragraph("Requests", &words));
    let mut words = vec![
        format!("{} prompt", totals.prompt_tokens),
        format!("{} output", totals.output_tokens),
        format!("{} steps", totals.steps),
    ];
    if totals.preemptions > 0 {
        words.push(format!("{} preemptions", totals.preemptions));
    }
    if totals.prefix_queried_tokens > 0 {
        let hit = totals.prefix_hit_tokens as f64 / totals.prefix_queried_tokens as f64 * 100.0;
        words.push(format!("{hit:.0} % of prompt tokens found in the prefix cache"));
    }
    out.push_str(&screen::paragraph("Tokens", &words));
}

fn clients(out: &mut String, status: &Status) {
    if status.clients_total == 0 {
        out.push_str(&screen::paragraph("Clients", &["none".to_owned()]));
        return;
    }
    let _ = writeln!(out, "{:<10}session      pid      uid   in flight   tokens out   connected", "Clients");
    for client in status.clients.iter().take(CLIENTS_SHOWN) {
        let _ = writeln!(
            out,
            "{:<10}{:>7} {:>8} {:>8} {:>11} {:>12}   {}",
            "",
            client.session,
            client.pid,
            client.uid,
            client.requests_in_flight,
            client.tokens_out,
            screen::seconds(client.connected_s),
        );
    }
    let more = status.clients_total.saturating_sub(status.clients.len().min(CLIENTS_SHOWN) as u64);
    if more > 0 {
        let _ = writeln!(out, "{:<10}and {more} more; --json lists them", "");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use llmd_protocol::control::{ClientStatus, KvStatus, LatencyStatus, LoadStatus, ModelStatus, RateStatus, Totals};

    fn busy() -> Status {
        let client = |session| ClientStatus {
            pid: 4711,
            uid: 1000,
            session,
            requests_in_flight: 2,
            connected_s: 75.0,
            tokens_out: 12_345,
        };
        let percentiles = |p50_s, p99_s| Some(Percentiles { p50_s, p99_s });
        Status {
            version: "0.1.0".into(),
            pid: 4242,
            uptime_s: 7980.0,
            state: DaemonState::Ready,
            device: "cpu, AVX-512 VNNI, 2 threads".into(),
            model: Some(ModelStatus {
                name: "SmolLM2 135M Instruct".into(),
                path: format!("/home/someone/{}/model.gguf", "deep/".repeat(20)),
                architecture: "llama".into(),
                parameters: 134_515_008,
                quantisation: "Q4_1".into(),
                weight_bytes: 96_000_000,
                vocabulary: 49152,
                context_max: 8192,
                scheduler: "continuous".into(),
            }),
            load: LoadStatus { waiting: 1, running: 3, running_max: 64, waiting_max: 1024 },
            kv: KvStatus { total: 4096, free: 1024, cached: 1024, owned: 2048, block_tokens: 16, bytes: 3 << 29 },
            rate: RateStatus { prompt_tokens_per_s: 120.46, output_tokens_per_s: 88.21, steps_per_s: 22.0 },
            totals: Totals {
                accepted: 1238,
                finished: vec![("length".into(), 1200), ("stop".into(), 34)],
                rejected: vec![("never_fits".into(), 3)],
                prompt_tokens: 120_000,
                output_tokens: 88_000,
                steps: 9000,
                preemptions: 4,
                prefix_queried_tokens: 100,
                prefix_hit_tokens: 32,
            },
            latency: LatencyStatus {
                window_s: 60.4,
                first_token: percentiles(0.21, 1.2),
                inter_token: percentiles(0.042, 0.08),
                end_to_end: None,
            },
            clients: (1..=2).map(client).collect(),
            clients_total: 24,
        }
    }

    #[test]
    fn a_busy_daemon_on_one_screen() {
        let expected = "\
llmd 0.1.0   ready   pid 4242   up 2 h 13 min
Model     SmolLM2 135M Instruct, llama, 135 M weights, Q4_1, 91.6 MiB
          context 8192, vocabulary 49152, continuous batching
          /home/someone/deep/deep/deep/deep/…eep/deep/deep/deep/deep//model.gguf
Device    cpu, AVX-512 VNNI, 2 threads
Load      3 running of at most 64, 1 waiting of at most 1024
Now       88.2 output tokens/s, 120 prompt tokens/s, 22.0 steps/s
KV cache  [############++++++......] 50 % in use, 25 % cached prefixes
          4096 blocks of 16 tokens, 1.5 GiB
Latency   first token     p50    210 ms   p99    1.20 s   (last 1 min 0 s)
          between tokens  p50   42.0 ms   p99   80.0 ms
Requests  1238 accepted, 4 live, 1200 ended at max_tokens
          34 ended by themselves, 3 rejected: never fits
Tokens    120000 prompt, 88000 output, 9000 steps, 4 preemptions
          32 % of prompt tokens found in the prefix cache
Clients   session      pid      uid   in flight   tokens out   connected
                1     4711     1000           2        12345   1 min 15 s
                2     4711     1000           2        12345   1 min 15 s
          and 22 more; --json lists them
";
        let shown = human(&busy());
        assert_eq!(shown, expected, "\n{shown}");
        assert!(shown.lines().all(|line| line.chars().count() <= screen::COLUMNS));
    }

    #[test]
    fn a_daemon_that_loads_has_little_to_say() {
        let status = Status {
            state: DaemonState::Loading,
            uptime_s: 0.4,
            model: None,
            device: String::new(),
            load: LoadStatus { running_max: 64, waiting_max: 1024, ..LoadStatus::default() },
            kv: KvStatus::default(),
            rate: RateStatus::default(),
            totals: Totals::default(),
            latency: LatencyStatus::default(),
            clients: Vec::new(),
            clients_total: 0,
            ..busy()
        };
        let expected = "\
llmd 0.1.0   loading the model   pid 4242   up 400 ms
Load      0 running of at most 64, 0 waiting of at most 1024
Now       0 output tokens/s, 0 prompt tokens/s, 0 steps/s
Requests  0 accepted, 0 live
Tokens    0 prompt, 0 output, 0 steps
Clients   none
";
        assert_eq!(human(&status), expected);
    }

    #[test]
    fn the_names_in_json_are_stable() {
        let value = json(&busy());
        for pointer in [
            "/version",
            "/pid",
            "/uptime_s",
            "/device",
            "/model/name",
            "/model/quantisation",
            "/model/context_max",
            "/load/waiting",
            "/load/running",
            "/kv/total",
            "/kv/free",
            "/kv/cached",
            "/kv/owned",
            "/kv/bytes",
            "/rate/output_tokens_per_s",
            "/rate/prompt_tokens_per_s",
            "/latency/first_token/p50_s",
            "/latency/inter_token/p99_s",
            "/clients/0/pid",
            "/clients/0/uid",
            "/clients/0/session",
            "/clients/0/requests_in_flight",
        ] {
            assert!(value.pointer(pointer).is_some_and(|v| !v.is_null()), "{pointer} in {value}");
        }
        assert_eq!(value["state"], "ready");
        assert_eq!(value["totals"]["finished"]["length"], 1200);
        assert_eq!(value["totals"]["rejected"]["never_fits"], 3);
    }

    #[test]
    fn metrics_become_an_object() {
        let text = "# HELP a b\n# TYPE a counter\na{x=\"y z\"} 3\nb 0.5\nc NaN\n";
        assert_eq!(series(text), serde_json::json!({"a{x=\"y z\"}": 3.0, "b": 0.5, "c": null}));
    }
}
