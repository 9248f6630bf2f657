//! llmctl as a program, against a small daemon made of the protocol's own daemon side, without a model.

use llmd_protocol::completion::CompletionSlot;
use llmd_protocol::control::{self, ControlAnswer, ControlRequest, DaemonState, LatencyStatus, LoadStatus, Status};
use llmd_protocol::handshake::{Handshake, Progress};
use llmd_protocol::message::{FinishReason, GenerateRequest, Prompt, Reject, Usage};
use llmd_protocol::session::{CompletionDoorbell, DaemonSession, Submission};
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

/// A daemon on threads of this process, in a folder of its own; both are gone when it is dropped.
struct Daemon {
    folder: PathBuf,
    stop: Arc<AtomicBool>,
    threads: Vec<thread::JoinHandle<()>>,
}

impl Daemon {
    fn start(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("llmctl-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let listen = |file| {
            let listener = UnixListener::bind(folder.join(file)).unwrap();
            listener.set_nonblocking(true).unwrap();
            (listener, stop.clone())
        };
        let (sessions, control) = (listen("llmd.sock"), listen("control.sock"));
        let threads = vec![
            thread::spawn(move || accept(&sessions.0, &sessions.1)),
            thread::spawn(move || answer(&control.0, &control.1)),
        ];
        Self { folder, stop, threads }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = llmctl(arguments);
        command.arg("--socket").arg(self.folder.join("llmd.sock"));
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).stdin(Stdio::null()).output().unwrap()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.threads.drain(..).for_each(|thread| thread.join().unwrap());
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn llmctl(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_llmctl"));
    command.args(arguments).env_remove("LLMD_SOCKET").env_remove("LLMD_CONTROL");
    command
}

/// Answers control requests, one a connection.
fn answer(listener: &UnixListener, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        let Ok((mut stream, _)) = listener.accept() else {
            thread::sleep(Duration::from_millis(1));
            continue;
        };
        stream.set_nonblocking(false).unwrap();
        let answer = match control::read(&mut stream, control::REQUEST_BYTES_MAX).unwrap() {
            ControlRequest::Status => ControlAnswer::Status(Box::new(status())),
            ControlRequest::Metrics => ControlAnswer::Metrics("# TYPE a counter\na{x=\"y\"} 3\n".to_owned()),
        };
        stream.write_all(&control::encode(&answer, control::ANSWER_BYTES_MAX).unwrap()).unwrap();
    }
}

fn status() -> Status {
    Status {
        version: "9.9.9".into(),
        pid: 1,
        uptime_s: 5.0,
        state: DaemonState::Ready,
        device: "cpu".into(),
        model: None,
        load: LoadStatus { running: 3, ..LoadStatus::default() },
        kv: control::KvStatus::default(),
        rate: control::RateStatus::default(),
        totals: control::Totals::default(),
        latency: LatencyStatus::default(),
        clients: Vec::new(),
        clients_total: 0,
    }
}

fn accept(listener: &UnixListener, stop: &Arc<AtomicBool>) {
    static SESSIONS: AtomicU64 = AtomicU64::new(1);
    let mut sessions = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let Ok((stream, _)) = listener.accept() else {
            thread::sleep(Duration::from_millis(1));
            continue;
        };
        let mut handshake = Handshake::new(stream).unwrap();
        while handshake.readable() == Progress::Pending {
            thread::sleep(Duration::from_micros(100));
        }
        let session = handshake.welcome(1, SESSIONS.fetch_add(1, Ordering::Relaxed)).unwrap();
        let stop = stop.clone();
        sessions.push(thread::spawn(move || serve(session, &stop)));
    }
    sessions.into_iter().for_each(|session| session.join().unwrap());
}

fn serve(mut session: DaemonSession, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        while let Some(submission) = session.submissions.next().unwrap() {
            match submission {
                Submission::Submit { request_id, payload } => {
                    let request = GenerateRequest::decode(&payload).unwrap();
                    generate(&mut session, request_id, &request);
                }
                // Only prompts of "wait" are still there to be cancelled.
                Submission::Cancel { request_id: id } => {
                    publish(&mut session, &[CompletionSlot::done(id, FinishReason::Cancelled, Usage::default())]);
                }
            }
        }
        if session.submissions.arm_wake().unwrap() {
            let drained = session.socket.wait(Some(Duration::from_millis(5))).unwrap();
            if drained.hung_up {
                return;
            }
            session.submissions.note_doorbells(drained.doorbells).unwrap();
        }
    }
}

/// Does what the prompt says: refuses, waits to be cancelled, or echoes it, a token a word; ids get as many tokens as asked.
fn generate(session: &mut DaemonSession, id: u32, request: &GenerateRequest) {
    let (text, prompt_tokens) = match &request.prompt {
        Prompt::Tokens(ids) => (String::new(), ids.len() as u32),
        Prompt::Text(text) => (format!("text {text}"), 7),
        Prompt::Chat(messages) => {
            let last = &messages[messages.len() - 1].content;
            (if last.ends_with("wait") { last.clone() } else { format!("chat of {}: {last}", messages.len()) }, 7)
        }
    };
    if text.ends_with("reject") || (text.is_empty() && prompt_tokens == 13) {
        let mut slots: Vec<_> = CompletionSlot::detail(id, "the reason").collect();
        slots.push(CompletionSlot::error(id, Reject::NeverFits));
        return publish(session, &slots);
    }
    publish(session, &[CompletionSlot::accepted(id, prompt_tokens)]);
    if text == "wait" {
        return publish(session, &CompletionSlot::text(id, "waiting").collect::<Vec<_>>());
    }
    let words: Vec<&str> = text.split_inclusive(' ').collect();
    let output_tokens = if text.is_empty() { request.sampling.max_tokens } else { words.len() as u32 };
    for token in 0..output_tokens {
        let mut slots = vec![CompletionSlot::tokens(id, token, &[token])];
        slots.extend(words.get(token as usize).iter().flat_map(|word| CompletionSlot::text(id, word)));
        publish(session, &slots);
    }
    let usage = Usage { prompt_tokens, cached_tokens: 0, output_tokens };
    publish(session, &[CompletionSlot::done(id, FinishReason::Stop, usage)]);
}

fn publish(session: &mut DaemonSession, slots: &[CompletionSlot]) {
    for slot in slots {
        session.completions.push(*slot).unwrap();
    }
    if let Some(published) = session.completions.publish() {
        CompletionDoorbell::fence();
        if session.doorbell.needs_wake(published) {
            session.doorbell.ring();
        }
    }
}

#[track_caller]
fn succeeded(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    assert!(output.stderr.is_empty(), "{output:?}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// The exit code, and what stderr says.
fn failed(output: &Output) -> (i32, String) {
    (output.status.code().unwrap(), String::from_utf8(output.stderr.clone()).unwrap())
}

#[test]
fn generate_streams_the_answer() {
    let daemon = Daemon::start("generate");
    assert_eq!(succeeded(&daemon.run(&["generate", "hello there"])), "chat of 1: hello there\n");
    assert_eq!(succeeded(&daemon.run(&["generate", "--raw", "hello"])), "text hello\n");
    assert_eq!(succeeded(&daemon.run(&["generate", "--system", "be brief", "hi"])), "chat of 2: hi\n");
    let json: Value = serde_json::from_str(&succeeded(&daemon.run(&["generate", "a b", "--json"]))).unwrap();
    assert_eq!((&json["text"], &json["finish_reason"]), (&"chat of 1: a b".into(), &"stop".into()));
    assert_eq!((&json["usage"]["prompt_tokens"], &json["usage"]["output_tokens"]), (&7.into(), &5.into()));
    assert!(json["ttft_ms"].is_f64() && json["duration_ms"].is_f64());
}

#[test]
fn generate_reads_a_prompt_from_a_pipe() {
    let daemon = Daemon::start("piped");
    let mut child =
        daemon.command(&["generate", "--raw"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"from a pipe").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "text from a pipe\n");
}

#[test]
fn exit_codes_are_what_the_help_says() {
    let daemon = Daemon::start("codes");
    let (code, said) = failed(&daemon.run(&["generate", "reject"]));
    assert_eq!(code, 4, "{said}");
    assert!(said.contains("the reason") && said.contains("shorten it"), "{said}");
    let (code, said) = failed(&daemon.run(&["generate", "x", "--top-p", "7"]));
    assert_eq!(code, 2, "{said}");
    assert!(said.contains("top_p"), "{said}");
    assert_eq!(failed(&daemon.run(&["generate", "x", "--no-such-flag"])).0, 2);
    for command in [&["generate", "x"][..], &["chat"], &["status"], &["metrics"], &["bench"]] {
        let nowhere =
            llmctl(command).args(["--socket", "/nonexistent/llmd.sock"]).stdin(Stdio::null()).output().unwrap();
        let (code, said) = failed(&nowhere);
        assert_eq!(code, 3, "{command:?}: {said}");
        assert!(said.contains("/nonexistent/") && said.contains("llmd --model"), "{command:?}: {said}");
    }
}

#[test]
fn chat_takes_lines_from_a_pipe_and_remembers() {
    let daemon = Daemon::start("chat");
    let mut child = daemon.command(&["chat"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"one\n\ntwo\n/clear\nthree\n/exit\nfour\n").unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let said = String::from_utf8(output.stdout).unwrap();
    assert_eq!(said, "chat of 1: one\nchat of 3: two\nchat of 1: three\n");
}

#[test]
fn ctrl_c_stops_the_answer_and_not_the_chat() {
    let daemon = Daemon::start("interrupt");
    let mut child = daemon.command(&["chat", "--json"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut turn = |text: &str| writeln!(input, "{text}").unwrap();
    turn("hello");
    assert!(lines.next().unwrap().unwrap().contains("chat of 1: hello"));
    turn("wait");
    // The answer is under way once the daemon has it; pressed too early, Ctrl-C would rightly end the program.
    thread::sleep(Duration::from_millis(500));
    let kill = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(kill.success());
    let cancelled: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
    assert_eq!((&cancelled["finish_reason"], &cancelled["text"]), (&"cancelled".into(), &"waiting".into()));
    turn("more");
    assert!(lines.next().unwrap().unwrap().contains("chat of 5: more"));
    let kill = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(kill.success());
    assert_eq!(child.wait().unwrap().code(), Some(130), "with no answer under way it ends the program");
}

#[test]
fn bench_counts_what_it_asked_for() {
    let daemon = Daemon::start("bench");
    let load = ["bench", "--json", "-n", "12", "--prompt-tokens", "20", "--output-tokens", "9"];
    for way in [["--concurrency", "3"], ["--rate", "200"]] {
        let output = daemon.run(&[&load[..], &way].concat());
        let report: Value = serde_json::from_str(&succeeded(&output)).unwrap();
        assert_eq!((&report["requests"], &report["errors"]), (&12.into(), &0.into()), "{report}");
        assert_eq!((&report["output_tokens"], &report["prompt_tokens"]), (&108.into(), &240.into()), "{report}");
        for field in ["output_tokens_per_s", "total_tokens_per_s", "duration_s"] {
            assert!(report[field].as_f64().unwrap() > 0.0, "{field} in {report}");
        }
        for field in ["ttft_ms", "inter_token_ms"] {
            let [p50, p99] = ["p50", "p99"].map(|p| report[field][p].as_f64().unwrap());
            assert!(p50 <= p99, "{field} in {report}");
        }
    }
    let text = succeeded(&daemon.run(&["bench", "-n", "2", "-c", "1"]));
    assert!(text.starts_with("2 requests, 1 client, 0 failed") && text.contains("tokens/s"), "{text}");
}

#[test]
fn bench_reports_failures_and_fails() {
    let daemon = Daemon::start("bench-fails");
    // The daemon of this test refuses prompts of 13 ids.
    let output = daemon.run(&["bench", "--json", "-n", "3", "--prompt-tokens", "13"]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["errors"], &report["ttft_ms"]), (&3.into(), &Value::Null));
    let (code, said) = failed(&output);
    assert_eq!(code, 1);
    assert!(said.contains("3 of 3 requests failed") && said.contains("the reason"), "{said}");
}

#[test]
fn status_and_metrics_come_over_the_control_socket() {
    let daemon = Daemon::start("status");
    let text = succeeded(&daemon.run(&["status"]));
    assert!(text.starts_with("llmd 9.9.9   ready") && text.contains("3 running"), "{text}");
    let json: Value = serde_json::from_str(&succeeded(&daemon.run(&["status", "--json"]))).unwrap();
    assert_eq!(json["load"]["running"], 3);
    assert_eq!(succeeded(&daemon.run(&["metrics"])), "# TYPE a counter\na{x=\"y\"} 3\n");
    let json: Value = serde_json::from_str(&succeeded(&daemon.run(&["metrics", "--json"]))).unwrap();
    assert_eq!(json["a{x=\"y\"}"], 3.0);
}
