//! The whole way: client processes, rings, daemon, model and back. Most tests run the tiny model; one asks the default
//! model for something only a real one knows.

use llmd_client::{Error, Event};
use llmd_protocol::control::{self, DaemonState, Status};
use llmd_protocol::message::{FinishReason, GenerateRequest, Prompt, Reject, SamplingParams};
use llmd_tests::daemon::{Daemon, PATIENCE, Setup, default_model, wait_until};
use llmd_tests::load::{self, Mix, Report};
use llmd_tests::step_log;
use nix::sys::signal::Signal;
use std::process::{Child, Command, Stdio};
use std::sync::Barrier;
use std::thread;

/// Client processes at once.
const PROCESSES: u64 = 16;
/// Requests each asks, one after another.
const REQUESTS: u64 = 8;

/// A client process that asks `count` requests of `mix`, from number `first` on.
fn client_process(daemon: &Daemon, mix: &Mix, first: u64, count: u64) -> Child {
    let (prompt, output) = (&mix.prompt_tokens, &mix.output_tokens);
    let numbers = [
        mix.seed,
        first,
        count,
        *prompt.start() as u64,
        *prompt.end() as u64,
        *output.start() as u64,
        *output.end() as u64,
    ];
    Command::new(env!("CARGO_BIN_EXE_client_process"))
        .arg(daemon.socket())
        .args(numbers.map(|number| number.to_string()))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("start a client process")
}

fn reports(child: Child) -> Vec<Report> {
    let output = child.wait_with_output().expect("wait for a client process");
    assert!(output.status.success(), "a client process ended with {}", output.status);
    let text = String::from_utf8(output.stdout).expect("JSON is UTF-8");
    text.lines().map(|line| serde_json::from_str(line).expect("a report")).collect()
}

/// Nothing runs, waits or is held: what every test leaves behind.
fn assert_nothing_is_left(daemon: &Daemon) -> Status {
    let status = daemon.wait_until_idle();
    assert_eq!(status.kv.owned, 0, "{:?}", status.kv);
    assert_eq!(status.kv.free + status.kv.cached, status.kv.total, "{:?}", status.kv);
    let ended: u64 = status.totals.finished.iter().map(|(_, count)| count).sum();
    assert_eq!(status.totals.accepted, ended, "{:?}", status.totals);
    for gauge in ["vllm:num_requests_running", "vllm:num_requests_waiting"] {
        assert_eq!(daemon.metric(gauge), 0.0, "{gauge}");
    }
    status
}

#[test]
fn many_processes_share_one_batch_that_never_waits() {
    let daemon = Daemon::tiny(&["--sequences-max=16", "--kv-blocks=512", "--tokens-per-step=256"]);
    let mix = Mix::tiny(1, 3..=200, 1..=120);
    let clients: Vec<_> =
        (0..PROCESSES).map(|client| client_process(&daemon, &mix, client * REQUESTS, REQUESTS)).collect();
    let mut seen = 0;
    for report in clients.into_iter().flat_map(reports) {
        let request = mix.request(report.request);
        let Prompt::Tokens(prompt) = request.prompt else { unreachable!("the mix is made of ids") };
        assert_eq!(report.ended, "Length", "request {}", report.request);
        assert_eq!(report.prompt_tokens as usize, prompt.len());
        assert_eq!(report.output_tokens, request.sampling.max_tokens);
        assert_eq!(report.tokens.len() as u32, request.sampling.max_tokens);
        seen += 1;
    }
    assert_eq!(seen, PROCESSES * REQUESTS);

    let status = assert_nothing_is_left(&daemon);
    assert_eq!(status.totals.accepted, PROCESSES * REQUESTS);
    let movement = step_log::check_continuous(&daemon.steps()).expect("a continuous log");
    // Each client asks again as soon as it has its answer, so nearly every request but the very first joins a running
    // batch, and leaves one that runs on. Half is far from what a batch that waits for its members could show: none.
    let half = (PROCESSES * REQUESTS / 2) as usize;
    assert!(movement.joined_in_flight > half && movement.left_in_flight > half, "{movement:?}");
    assert!(movement.width_max >= 8, "{movement:?}");
}

/// What was asked in all circumstances of the next test: some greedy, some drawn with a seed, short and long.
fn watched() -> Vec<GenerateRequest> {
    let lengths = [(1, 40), (17, 33), (100, 60), (333, 48), (700, 20)];
    let watch = |(i, (prompt, output)): (usize, (u32, u32))| {
        let temperature = if i % 2 == 0 { 0.0 } else { 0.9 };
        Mix { temperature, ..Mix::tiny(40 + i as u64, prompt..=prompt, output..=output) }.request(0)
    };
    lengths.into_iter().enumerate().map(watch).collect()
}

/// The tokens of the watched requests, asked one after another with nobody else there.
fn alone(daemon: &Daemon) -> Vec<Vec<u32>> {
    let client = daemon.client();
    watched().into_iter().map(|request| load::answer(&client, request).expect("an answer").tokens).collect()
}

/// The tokens of the watched requests, asked all at once and with `others` more requests around them.
fn in_company(daemon: &Daemon, others: u64) -> Vec<Vec<u32>> {
    let mix = Mix::tiny(7, 3..=150, 10..=90);
    let mut requests = watched();
    let count = requests.len();
    requests.extend((0..others).map(|number| mix.request(number)));
    let mut tokens = all_at_once(daemon, &requests);
    tokens.truncate(count);
    tokens
}

/// The tokens of requests that are asked at the same moment, each on a connection of its own.
fn all_at_once(daemon: &Daemon, requests: &[GenerateRequest]) -> Vec<Vec<u32>> {
    let start = Barrier::new(requests.len());
    let ask = |request: GenerateRequest| {
        let client = daemon.client();
        start.wait();
        load::answer(&client, request).expect("an answer").tokens
    };
    thread::scope(|scope| {
        let threads: Vec<_> = requests.iter().map(|request| scope.spawn(|| ask(request.clone()))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a client")).collect()
    })
}

#[test]
fn tokens_do_not_depend_on_the_company() {
    let quiet = Daemon::tiny(&["--prefix-cache=false"]);
    let expected = alone(&quiet);
    assert!(expected.iter().all(|tokens| tokens.len() >= 20), "the watched requests have something to say");
    // A model that always says the same could not show a difference.
    let distinct: std::collections::BTreeSet<_> = expected.iter().flatten().collect();
    assert!(distinct.len() > 40, "only {} different tokens", distinct.len());

    assert_eq!(in_company(&quiet, 31 - 4), expected, "among 31 others");
    assert_nothing_is_left(&quiet);
    drop(quiet);

    for chunk in [16, 64, 512] {
        let daemon = Daemon::tiny(&["--prefix-cache=false", &format!("--prefill-chunk-max={chunk}")]);
        assert_eq!(alone(&daemon), expected, "alone, prompts cut into pieces of {chunk}");
        assert_eq!(in_company(&daemon, 8), expected, "in company, prompts cut into pieces of {chunk}");
    }
}

#[test]
fn more_threads_than_processors_are_said_and_do_not_matter() {
    let expected = alone(&Daemon::tiny(&[]));
    let daemon = Daemon::tiny(&["--threads=1000"]);
    assert!(daemon.log().contains("threads = 1000, but this process may use"), "{}", daemon.log());
    assert_eq!(alone(&daemon), expected);
}

#[test]
fn memory_is_locked_on_request_or_the_limit_is_named() {
    let mut daemon = Setup::tiny().with("--lock-memory=true").start_unready();
    if daemon.try_wait_until_ready() {
        let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.pid())).expect("a running daemon");
        let locked = status.lines().find_map(|line| line.strip_prefix("VmLck:")).expect("a line of locked memory");
        assert_ne!(locked.trim(), "0 kB");
    } else {
        assert!(daemon.log().contains("LimitMEMLOCK=infinity"), "{}", daemon.log());
    }
}

#[test]
fn tokens_do_not_depend_on_a_cache_hit() {
    let cached = Daemon::tiny(&["--prefix-cache=true"]);
    let first = alone(&cached);
    assert_eq!(alone(&cached), first, "the same again, from the prefix cache");
    let status = assert_nothing_is_left(&cached);
    assert!(status.totals.prefix_hit_tokens > 0, "{:?}", status.totals);
    assert_eq!(alone(&Daemon::tiny(&["--prefix-cache=false"])), first, "without a prefix cache");
}

#[test]
fn tokens_do_not_depend_on_preemption() {
    // Eight requests that begin with 2 or 3 blocks each and end with 14 or 15: all are admitted to the 48 blocks, and
    // then there are not enough. The slower model has them all there before the first is done.
    let mix = Mix { temperature: 0.7, ..Mix::tiny(11, 20..=40, 200..=200) };
    let requests: Vec<_> = (0..8).map(|number| mix.request(number)).collect();
    let quiet = Setup::slow().with("--prefix-cache=false").start();
    let expected: Vec<_> =
        requests.iter().map(|r| load::answer(&quiet.client(), r.clone()).expect("an answer").tokens).collect();
    drop(quiet);
    for prefix_cache in [false, true] {
        let tight = Setup::slow().with("--kv-blocks=48").with(format!("--prefix-cache={prefix_cache}")).start();
        assert_eq!(
            all_at_once(&tight, &requests),
            expected,
            "in a cache too small for all, prefix cache {prefix_cache}"
        );
        let status = assert_nothing_is_left(&tight);
        assert!(status.totals.preemptions > 0, "nobody was preempted, so nothing was tested");
        assert_eq!(tight.metric("llmd_preemptions_total"), status.totals.preemptions as f64);
        let movement = step_log::check_continuous(&tight.steps()).expect("a continuous log");
        assert_eq!(movement.preempted as u64, status.totals.preemptions);
    }
}

#[test]
fn the_static_scheduler_waits_for_its_batch() {
    let daemon = Daemon::tiny(&["--scheduler=static", "--sequences-max=8", "--prefix-cache=false"]);
    let mix = Mix::tiny(5, 3..=60, 2..=60);
    let clients: Vec<_> = (0..8).map(|client| client_process(&daemon, &mix, client * 3, 3)).collect();
    let ended = clients.into_iter().flat_map(reports).filter(|report| report.ended == "Length").count();
    assert_eq!(ended, 24);
    assert_nothing_is_left(&daemon);
    // The control: with this policy the check of the continuous one must fail, or it proves nothing.
    let steps = daemon.steps();
    assert!(steps.iter().any(|step| step.padding_rows > 0), "no row of padding in {} steps", steps.len());
    assert!(step_log::check_continuous(&steps).is_err());
}

#[test]
fn a_dropped_generation_frees_its_memory() {
    let daemon = Setup::slow().start();
    let client = daemon.client();
    let mut generation = client.generate(Mix::tiny(3, 50..=50, 3000..=3000).request(0)).expect("submitted");
    loop {
        match generation.next().expect("more events").expect("no error") {
            Event::Tokens(_) => break,
            Event::Done { reason, .. } => panic!("ended at once: {reason:?}"),
            _ => {}
        }
    }
    drop(generation);
    let status = assert_nothing_is_left(&daemon);
    assert!(status.totals.output_tokens < 3000, "{:?}", status.totals);
    assert!(status.totals.finished.iter().any(|(reason, count)| reason.contains("cancel") && *count == 1));
    // The session goes on.
    load::answer(&client, Mix::tiny(3, 5..=5, 5..=5).request(1)).expect("an answer");
}

#[test]
fn bad_requests_are_refused_and_hurt_nobody() {
    let daemon = Daemon::tiny(&["--kv-blocks=32"]);
    let client = daemon.client();
    let refused =
        |prompt: Prompt, sampling: SamplingParams| match load::answer(&client, GenerateRequest { prompt, sampling }) {
            Err(Error::Rejected { reject, .. }) => reject,
            other => panic!("not refused: {other:?}"),
        };
    let usual = SamplingParams::default;
    assert_eq!(refused(Prompt::Tokens(vec![5, 1_000_000]), usual()), Reject::TokenOutOfVocabulary);
    assert_eq!(refused(Prompt::Tokens(vec![5; 600]), usual()), Reject::NeverFits);
    // The library refuses this before it is sent; what the daemon does with it when sent is for the suite hostile.
    let too_hot = SamplingParams { temperature: f32::NAN, ..usual() };
    let request = GenerateRequest { prompt: Prompt::Text("x".into()), sampling: too_hot };
    assert!(matches!(load::answer(&client, request), Err(Error::InvalidRequest(_))));
    let answer = load::answer(&client, Mix::tiny(3, 5..=5, 5..=5).request(0)).expect("an answer");
    assert_eq!((answer.reason, answer.tokens.len()), (FinishReason::Length, 5));
    assert_nothing_is_left(&daemon);
}

#[test]
fn nothing_asked_and_nothing_said_are_answers_too() {
    let daemon = Daemon::tiny(&[]);
    // The model has a beginning-of-sequence token, which stands in for an empty prompt.
    let sampling = SamplingParams { max_tokens: 3, ignore_eos: true, ..SamplingParams::default() };
    let request = GenerateRequest { prompt: Prompt::Text(String::new()), sampling };
    let answer = load::answer(&daemon.client(), request).expect("an answer");
    assert_eq!((answer.usage.prompt_tokens, answer.tokens.len()), (1, 3));
    let answer = load::answer(&daemon.client(), Mix::tiny(3, 20..=20, 0..=0).request(0)).expect("an answer");
    assert_eq!((answer.reason, answer.tokens.len(), answer.text.as_str()), (FinishReason::Length, 0, ""));
    assert_eq!(answer.usage.prompt_tokens, 20);
}

#[test]
fn sigterm_finishes_what_runs_and_refuses_what_comes() {
    let mut daemon = Setup::slow().start();
    let client = daemon.client();
    let request = Mix::tiny(9, 20..=20, 3000..=3000).request(0);
    let mut generation = client.generate(request).expect("submitted");
    let mut tokens = 0;
    while tokens == 0 {
        if let Event::Tokens(ids) = generation.next().expect("more events").expect("no error") {
            tokens += ids.len();
        }
    }
    daemon.signal(Signal::SIGTERM);
    // The signal takes a moment to be seen; from then on every new request is refused.
    wait_until("the daemon refuses", || match load::answer(&client, Mix::tiny(9, 3..=3, 1..=1).request(1)) {
        Err(Error::Rejected { reject, .. }) => {
            assert_eq!(reject, Reject::Draining);
            true
        }
        Ok(_) => false,
        Err(error) => panic!("neither answered nor refused: {error}"),
    });
    let mut reason = None;
    for event in generation {
        match event.expect("no error") {
            Event::Tokens(ids) => tokens += ids.len(),
            Event::Done { reason: why, .. } => reason = Some(why),
            _ => {}
        }
    }
    assert_eq!((reason, tokens), (Some(FinishReason::Length), 3000));
    assert!(daemon.wait().success(), "drained and ended with 0");
}

#[test]
fn a_second_signal_cuts_off_what_runs() {
    let mut daemon = Setup::slow().start();
    let client = daemon.client();
    let mut generation = client.generate(Mix::tiny(9, 20..=20, 4000..=4000).request(0)).expect("submitted");
    assert!(generation.next().is_some_and(|event| event.is_ok()));
    daemon.signal(Signal::SIGTERM);
    wait_until("it drains", || daemon.log().contains("draining"));
    daemon.signal(Signal::SIGINT);
    assert_eq!(daemon.wait().code(), Some(1), "something was cut off");
    assert!(daemon.log().contains("1 requests were cut off"), "{}", daemon.log());
    assert!(generation.last().is_some_and(|last| matches!(last, Err(Error::Disconnected))));
}

#[test]
fn a_signal_while_the_model_is_loaded_ends_the_daemon_at_once() {
    let model = std::env::temp_dir().join(format!("llmd-t-fifo-{}.gguf", std::process::id()));
    let _ = std::fs::remove_file(&model);
    // Opening it waits for a writer that never comes: a model that takes for ever to load.
    nix::unistd::mkfifo(&model, nix::sys::stat::Mode::S_IRWXU).expect("a FIFO");
    let mut daemon = Setup::file(&model).start_unready();
    wait_until("it answers", || control::status(&daemon.control(), PATIENCE).is_ok());
    assert_eq!(daemon.status().state, DaemonState::Loading);
    daemon.signal(Signal::SIGTERM);
    assert!(daemon.wait().success(), "nobody was cut off");
    assert!(!daemon.socket().exists() && !daemon.control().exists(), "the sockets are removed");
    let _ = std::fs::remove_file(&model);
}

#[test]
fn a_client_connects_again_after_a_restart() {
    let setup = Setup::slow();
    let mut daemon = setup.start();
    let client = daemon.client();
    let request = || Mix::tiny(9, 20..=20, 10..=10).request(0);
    let before = load::answer(&client, request()).expect("an answer");
    let running = client.generate(Mix::tiny(9, 20..=20, 4000..=4000).request(0)).expect("submitted");
    daemon.restart(&setup);
    let last = running.last().expect("a terminal event");
    assert!(last.is_err(), "a request in flight ends with an error: {last:?}");
    // The old connection is gone for good or comes back by itself; a new one always works.
    let after = load::answer(&daemon.client(), request()).expect("an answer");
    assert_eq!(after.tokens, before.tokens);
}

#[test]
fn llmctl_answers_people_and_scripts() {
    let mut daemon = Daemon::tiny(&[]);
    let json = |arguments: &[&str]| {
        let output = daemon.llmctl(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap_or_else(|e| panic!("{arguments:?}: {e}"))
    };
    let status = json(&["status", "--json"]);
    assert_eq!(status["pid"], daemon.pid());
    assert_eq!(status["load"]["running"], 0);
    let kv = &status["kv"];
    assert_eq!(kv["free"].as_u64().zip(kv["cached"].as_u64()).map(|(f, c)| f + c), kv["total"].as_u64());

    json(&["generate", "--json", "--max-tokens=8", "the thing"]);
    let plain = daemon.llmctl(&["generate", "--max-tokens=8", "the thing"]);
    assert!(plain.status.success() && !plain.stdout.is_empty());
    let bench =
        json(&["bench", "--json", "--concurrency=4", "--requests=12", "--prompt-tokens=20", "--output-tokens=8"]);
    assert_eq!(bench["errors"], 0);
    for field in ["output_tokens_per_s", "total_tokens_per_s"] {
        assert!(bench[field].as_f64().is_some_and(|v| v > 0.0), "{field} in {bench}");
    }
    for field in ["ttft_ms", "inter_token_ms"] {
        let [p50, p99] = ["p50", "p99"].map(|p| bench[field][p].as_f64().expect("a number"));
        assert!(p50 > 0.0 && p99 >= p50, "{field} in {bench}");
    }
    let metrics = daemon.llmctl(&["metrics"]);
    assert!(String::from_utf8_lossy(&metrics.stdout).contains("llmd_build_info"));

    assert_eq!(daemon.llmctl(&["nonsense"]).status.code(), Some(2), "usage");
    daemon.signal(Signal::SIGTERM);
    daemon.wait();
    for arguments in [&["status"][..], &["generate", "x"], &["metrics"], &["bench", "--requests=1"]] {
        let output = daemon.llmctl(arguments);
        assert_eq!(output.status.code(), Some(3), "{arguments:?} without a daemon");
        assert!(!output.stderr.is_empty(), "{arguments:?} says why");
    }
}

#[test]
fn the_default_model_knows_the_capital_of_france() {
    let daemon = Setup::file(&default_model()).with("--activations=int16").start();
    let output = daemon.llmctl(&["generate", "--max-tokens=40", "What is the capital of France?"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("Paris"), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert_nothing_is_left(&daemon);
}
