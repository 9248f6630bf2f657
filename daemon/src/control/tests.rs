//! Tests of `control.rs`, through its sockets.

use super::*;
use crate::metrics::{Finished, StepSample};
use llmd_protocol::control;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

const LONG: Duration = Duration::from_secs(5);

struct Served {
    metrics: Arc<Metrics>,
    model: Arc<OnceLock<ModelInfo>>,
    path: PathBuf,
    http: std::net::SocketAddr,
    handle: Option<ControlHandle>,
}

fn client(session: u64) -> ClientStatus {
    ClientStatus { pid: 7, uid: 1000, session, requests_in_flight: 2, connected_s: 1.5, tokens_out: 99 }
}

fn served(name: &str) -> Served {
    let path = std::env::temp_dir().join(format!("llmd-control-{name}-{}.sock", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let http = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = http.local_addr().unwrap();
    let metrics = Arc::new(Metrics::new(16));
    let model = Arc::new(OnceLock::new());
    let handle = spawn(ControlOptions {
        control: Some(UnixListener::bind(&path).unwrap()),
        http: Some(AnyListener::Tcp(http)),
        metrics: metrics.clone(),
        model: model.clone(),
        clients: Arc::new(|| vec![client(9), client(4)]),
        running_max: 64,
        waiting_max: 1024,
        block_tokens: 16,
    })
    .unwrap();
    Served { metrics, model, path, http: address, handle: Some(handle) }
}

impl Drop for Served {
    fn drop(&mut self) {
        drop(self.handle.take());
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Served {
    fn http(&self, request: &[u8]) -> String {
        let mut stream = TcpStream::connect(self.http).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream.write_all(request).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }
}

fn model_info() -> ModelInfo {
    ModelInfo {
        model: ModelStatus {
            name: "tiny".into(),
            path: "/m.gguf".into(),
            architecture: "llama".into(),
            parameters: 135_000_000,
            quantisation: "Q4_1".into(),
            weight_bytes: 91_000_000,
            vocabulary: 49152,
            context_max: 8192,
            scheduler: "continuous".into(),
        },
        device: "cpu, portable, 1 thread".into(),
        kv_bytes: 1 << 30,
    }
}

#[test]
fn status_says_what_the_counters_say() {
    let served = served("status");
    let loading = control::status(&served.path, LONG).unwrap();
    assert_eq!((loading.state, loading.model, loading.clients_total), (DaemonState::Loading, None, 2));
    served.model.set(model_info()).unwrap();
    served.metrics.set_state(State::Ready);
    served.metrics.accepted(100);
    served.metrics.accepted(20);
    served.metrics.rejected("busy");
    served.metrics.load(1, 3);
    served.metrics.kv(5, 2, 3, 10);
    served.metrics.first_token(0.2);
    served.metrics.finished(Finished {
        reason: "length",
        output_tokens: 8,
        seconds: 0.5,
        queue_seconds: 0.0,
        prefill_seconds: Some(0.1),
        decode_seconds: None,
    });
    let status = control::status(&served.path, LONG).unwrap();
    assert_eq!((status.state, status.pid), (DaemonState::Ready, std::process::id()));
    assert_eq!(status.model.unwrap().name, "tiny");
    assert_eq!(status.load, LoadStatus { waiting: 1, running: 3, running_max: 64, waiting_max: 1024 });
    assert_eq!(status.kv, KvStatus { total: 10, free: 5, cached: 2, owned: 3, block_tokens: 16, bytes: 1 << 30 });
    assert_eq!((status.totals.accepted, status.totals.prompt_tokens), (2, 120));
    assert_eq!(status.totals.finished, [("length".to_owned(), 1)]);
    assert_eq!(status.totals.rejected, [("busy".to_owned(), 1)]);
    assert_eq!(status.clients, [client(4), client(9)], "in order of session");
    let first_token = status.latency.first_token.unwrap();
    assert!((0.16..=0.25).contains(&first_token.p50_s), "{first_token:?}");
    assert_eq!(status.latency.inter_token, None);
}

#[test]
fn metrics_are_the_same_on_both_ways() {
    let served = served("metrics");
    served.metrics.accepted(5);
    let text = control::metrics(&served.path, LONG).unwrap();
    assert!(text.contains("llmd_requests_accepted_total 1\n"));
    let answer = served.http(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4"), "{head}");
    assert!(head.contains(&format!("Content-Length: {}\r\n", body.len())), "{head}");
    assert!(body.contains("llmd_requests_accepted_total 1\n"));
}

#[test]
fn alive_and_ready_are_two_things() {
    let served = served("ready");
    let status = |path: &str| {
        served.http(format!("GET {path} HTTP/1.1\r\n\r\n").as_bytes()).split(' ').nth(1).unwrap().parse::<u16>()
    };
    assert_eq!((status("/health"), status("/ready")), (Ok(200), Ok(503)));
    served.metrics.set_state(State::Ready);
    assert_eq!((status("/health"), status("/ready")), (Ok(200), Ok(200)));
    served.metrics.set_state(State::Draining);
    assert_eq!((status("/health"), status("/ready")), (Ok(200), Ok(503)));
}

#[test]
fn http_that_is_not_understood_gets_an_answer() {
    let served = served("http");
    let cases: [(&[u8], &str); 6] = [
        (b"GET /other HTTP/1.1\r\n\r\n", "404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", "405"),
        (b"GET /metrics HTTP/2\r\n\r\n", "400"),
        (b"\xff\xfe\r\n\r\n", "400"),
        (b"GET /ready?x=1 HTTP/1.0\r\n\r\n", "503"),
        (&[b'a'; HTTP_HEAD_BYTES_MAX], "431"),
    ];
    for (request, status) in cases {
        let answer = served.http(request);
        assert_eq!(answer.split(' ').nth(1), Some(status), "{}", String::from_utf8_lossy(request));
    }
    let head = served.http(b"HEAD /health HTTP/1.1\r\n\r\n");
    assert!(head.contains("Content-Length: 6\r\n") && head.ends_with("\r\n\r\n"), "{head}");
}

#[test]
fn a_strange_control_client_is_answered_and_does_not_disturb_others() {
    let served = served("strange");
    let ask = |bytes: &[u8]| -> Result<ControlAnswer, ControlError> {
        let mut stream = UnixStream::connect(&served.path).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream.write_all(bytes).unwrap();
        control::read(&mut stream, ANSWER_BYTES_MAX)
    };
    let refused = |refusal| ControlAnswer::Refused(refusal);
    assert_eq!(ask(&[9, 0, 1, 0, 0, 0, 0]).unwrap(), refused(Refusal::Version));
    assert_eq!(ask(&[1, 0, 0xff, 0xff, 0xff, 0xff]).unwrap(), refused(Refusal::Malformed));
    assert_eq!(ask(&[1, 0, 4, 0, 0, 0, 77, 0, 0, 0]).unwrap(), refused(Refusal::Malformed));
    // Half a request holds its place until the time-out, and nothing else.
    let mut half = UnixStream::connect(&served.path).unwrap();
    half.write_all(&[1, 0]).unwrap();
    assert!(control::status(&served.path, LONG).is_ok());
}

#[test]
fn connections_are_bounded() {
    let served = served("bounded");
    let held: Vec<UnixStream> = (0..CONTROL_CONNECTIONS_MAX)
        .map(|_| {
            let mut stream = UnixStream::connect(&served.path).unwrap();
            // Asked once, so that it is known to be accepted.
            stream.write_all(&encode(&ControlRequest::Status, REQUEST_BYTES_MAX).unwrap()).unwrap();
            let _: ControlAnswer = control::read(&mut stream, ANSWER_BYTES_MAX).unwrap();
            stream
        })
        .collect();
    let error = control::status(&served.path, LONG).unwrap_err();
    assert!(matches!(error, ControlError::Refused(Refusal::Busy) | ControlError::Io(_)), "{error}");
    drop(held);
    let again = (0..50).any(|_| {
        std::thread::sleep(Duration::from_millis(20));
        control::status(&served.path, LONG).is_ok()
    });
    assert!(again, "places are given back");
}

#[test]
fn rates_are_differences_over_time() {
    let metrics = Metrics::new(16);
    let mut history = History::default();
    let began = Instant::now();
    assert_eq!(history.rate(), RateStatus::default());
    for tick in 0..40 {
        history.sample(&metrics, began + RATE_PERIOD * tick);
        metrics.step(StepSample {
            seconds: 0.1,
            prefill_tokens: 50,
            decode_tokens: 3,
            sampled_tokens: 4,
            sequences: 4,
        });
    }
    let rate = history.rate();
    assert_eq!((rate.prompt_tokens_per_s, rate.output_tokens_per_s, rate.steps_per_s), (200.0, 16.0, 4.0));
    // Two seconds without steps: nothing is computed now.
    (40..50).for_each(|tick| history.sample(&metrics, began + RATE_PERIOD * tick));
    assert_eq!(history.rate().output_tokens_per_s, 0.0);
}

#[test]
fn percentiles_forget_what_is_older_than_a_minute() {
    let metrics = Metrics::new(16);
    let mut history = History::default();
    let began = Instant::now();
    let at = |tick: u32| began + RATE_PERIOD * tick;
    (0..1000).for_each(|_| metrics.first_token(50.0));
    let minutes_two = 480;
    (0..minutes_two).for_each(|tick| history.sample(&metrics, at(tick)));
    let quiet = history.latency(&metrics, at(minutes_two), began);
    assert!(quiet.first_token.unwrap().p50_s > 40.0 && quiet.window_s == 120.0, "{quiet:?}");
    metrics.first_token(0.001);
    let recent = history.latency(&metrics, at(minutes_two), began);
    assert!(recent.first_token.unwrap().p99_s <= 0.001, "{recent:?}");
    assert!((55.0..=65.0).contains(&recent.window_s), "{recent:?}");
}

#[test]
fn the_thread_stops_when_told() {
    let mut served = served("stop");
    let _held = UnixStream::connect(&served.path).unwrap();
    served.handle.take().unwrap().stop();
    assert!(control::status(&served.path, Duration::from_millis(200)).is_err());
    assert_eq!(Arc::strong_count(&served.metrics), 1, "nothing of the thread is left");
}
