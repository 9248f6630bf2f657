//! llmctl's socket and the endpoint for Prometheus, on a thread of their own.
//!
//! The thread answers from shared counters alone and asks the engine nothing, so it answers also while weights are loaded
//! and while a step takes long; and nothing that is asked here can slow a step down. It runs tokio, single-threaded.
//!
//! The HTTP side is written by hand: three fixed paths, GET and HEAD, one answer a connection. Every read and write has a
//! time-out and every buffer a bound; an HTTP crate would be the daemon's largest dependency for that.
//!
//! | path | 200 when |
//! |---|---|
//! | `/metrics` | always: Prometheus text |
//! | `/health` | always: this thread is alive |
//! | `/ready` | the model is loaded and requests are taken; else 503 |

use crate::listen::AnyListener;
use crate::metrics::{Latency, LatencyCounts, Metrics, State};
use llmd_protocol::control::{
    ANSWER_BYTES_MAX, CLIENTS_LISTED_MAX, ClientStatus, ControlAnswer, ControlError, ControlRequest, DaemonState,
    HEADER_BYTES, Header, KvStatus, LatencyStatus, LoadStatus, ModelStatus, Percentiles, REQUEST_BYTES_MAX, RateStatus,
    Refusal, Status, Totals, decode, encode,
};
use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::{Semaphore, watch};
use tokio::time::timeout;

/// Most control connections at once; one more is told to come again.
pub const CONTROL_CONNECTIONS_MAX: usize = 32;
/// Most HTTP connections at once; one more waits in the backlog.
pub const HTTP_CONNECTIONS_MAX: usize = 16;
/// Most bytes of an HTTP request's head.
pub const HTTP_HEAD_BYTES_MAX: usize = 8 << 10;
/// How long a control connection may stay without a request.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the rest of a request, or the writing of an answer, may take.
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(5);
/// How long accepting rests after it failed (no descriptors left), so that it does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How often counters are sampled for rates, and how many samples are kept: two seconds.
const RATE_PERIOD: Duration = Duration::from_millis(250);
const RATE_SAMPLES: usize = 9;
/// Every so many rate samples, latencies are sampled too; twelve such periods make a minute.
const LATENCY_EVERY: u32 = 20;
const LATENCY_SAMPLES: usize = 13;

/// What is known once the model is loaded.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelInfo {
    /// The model.
    pub model: ModelStatus,
    /// What is computed on, for people.
    pub device: String,
    /// Bytes of all key-value blocks.
    pub kv_bytes: u64,
}

/// Lists the open sessions. Called at most once a request of llmctl; should be quick.
pub type Clients = Arc<dyn Fn() -> Vec<ClientStatus> + Send + Sync>;

/// What the thread serves, and from what.
pub struct ControlOptions {
    /// llmctl's socket, if there is one.
    pub control: Option<UnixListener>,
    /// Prometheus' socket, if there is one.
    pub http: Option<AnyListener>,
    /// The numbers.
    pub metrics: Arc<Metrics>,
    /// Filled in when the model is loaded; status says "loading" until then.
    pub model: Arc<OnceLock<ModelInfo>>,
    /// The open sessions.
    pub clients: Clients,
    /// Most sequences that run.
    pub running_max: usize,
    /// Most sequences that wait.
    pub waiting_max: usize,
    /// Tokens in a block of key-value memory.
    pub block_tokens: usize,
}

/// The running thread; stopped by dropping this.
#[derive(Debug)]
pub struct ControlHandle {
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
}

/// Starts the thread.
pub fn spawn(options: ControlOptions) -> io::Result<ControlHandle> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
    let (stop, stopped) = watch::channel(false);
    let (control, http) = {
        // Registering a listener needs the runtime's context; done here so that a failure is the caller's to see.
        let _context = runtime.enter();
        (options.control.map(tokio_unix).transpose()?, options.http.map(tokio_any).transpose()?)
    };
    let shared = Arc::new(Shared {
        metrics: options.metrics,
        model: options.model,
        clients: options.clients,
        running_max: options.running_max,
        waiting_max: options.waiting_max,
        block_tokens: options.block_tokens,
        began: Instant::now(),
        history: Mutex::new(History::default()),
    });
    let thread = std::thread::Builder::new()
        .name("llmd-control".into())
        .spawn(move || runtime.block_on(serve(control, http, shared, stopped)))?;
    Ok(ControlHandle { stop, thread: Some(thread) })
}

impl ControlHandle {
    /// Ends the thread; answers under way are cut off.
    pub fn stop(self) {}
}

impl Drop for ControlHandle {
    fn drop(&mut self) {
        self.stop.send_replace(true);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("the control thread panicked");
        }
    }
}

fn tokio_unix(listener: UnixListener) -> io::Result<tokio::net::UnixListener> {
    listener.set_nonblocking(true)?;
    tokio::net::UnixListener::from_std(listener)
}

enum HttpListener {
    Tcp(tokio::net::TcpListener),
    Unix(tokio::net::UnixListener),
}

fn tokio_any(listener: AnyListener) -> io::Result<HttpListener> {
    match listener {
        AnyListener::Unix(listener) => tokio_unix(listener).map(HttpListener::Unix),
        AnyListener::Tcp(listener) => {
            listener.set_nonblocking(true)?;
            tokio::net::TcpListener::from_std(listener).map(HttpListener::Tcp)
        }
    }
}

struct Shared {
    metrics: Arc<Metrics>,
    model: Arc<OnceLock<ModelInfo>>,
    clients: Clients,
    running_max: usize,
    waiting_max: usize,
    block_tokens: usize,
    began: Instant,
    history: Mutex<History>,
}

async fn serve(
    control: Option<tokio::net::UnixListener>,
    http: Option<HttpListener>,
    shared: Arc<Shared>,
    mut stopped: watch::Receiver<bool>,
) {
    tokio::spawn(sample(shared.clone()));
    if let Some(listener) = control {
        tokio::spawn(accept_control(listener, shared.clone()));
    }
    match http {
        Some(HttpListener::Tcp(listener)) => {
            let listener = Arc::new(listener);
            let accept = move || {
                let listener = listener.clone();
                async move { listener.accept().await.map(|(stream, _)| stream) }
            };
            tokio::spawn(accept_http(accept, shared));
        }
        Some(HttpListener::Unix(listener)) => {
            let listener = Arc::new(listener);
            let accept = move || {
                let listener = listener.clone();
                async move { listener.accept().await.map(|(stream, _)| stream) }
            };
            tokio::spawn(accept_http(accept, shared));
        }
        None => {}
    }
    // Leaving ends the runtime, and with it every task above.
    let _ = stopped.wait_for(|stop| *stop).await;
}

async fn accept_control(listener: tokio::net::UnixListener, shared: Arc<Shared>) {
    let places = Arc::new(Semaphore::new(CONTROL_CONNECTIONS_MAX));
    loop {
        let Ok((mut stream, _)) = listener.accept().await else {
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        match places.clone().try_acquire_owned() {
            Ok(place) => {
                let shared = shared.clone();
                tokio::spawn(async move {
                    // A connection that fails is the peer's affair.
                    let _ = converse(&mut stream, &shared).await;
                    drop(place);
                });
            }
            Err(_) => {
                // The socket is new, its buffer empty: this does not wait.
                if let Ok(frame) = encode(&ControlAnswer::Refused(Refusal::Busy), ANSWER_BYTES_MAX) {
                    let _ = stream.try_write(&frame);
                }
            }
        }
    }
}

/// Answers requests until the peer goes, errs, or asks nothing for a while.
async fn converse(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), shared: &Shared) -> Result<(), ControlError> {
    loop {
        let mut header = [0; HEADER_BYTES];
        within(IDLE_TIMEOUT, stream.read_exact(&mut header)).await?;
        let (answer, last) = match Header::from_bytes(header).check(REQUEST_BYTES_MAX) {
            Ok(length) => {
                let mut body = vec![0; length];
                within(TRANSFER_TIMEOUT, stream.read_exact(&mut body)).await?;
                match decode(&body, REQUEST_BYTES_MAX) {
                    Ok(request) => (shared.answer(&request), false),
                    Err(_) => (ControlAnswer::Refused(Refusal::Malformed), true),
                }
            }
            Err(ControlError::Version { .. }) => (ControlAnswer::Refused(Refusal::Version), true),
            Err(_) => (ControlAnswer::Refused(Refusal::Malformed), true),
        };
        within(TRANSFER_TIMEOUT, stream.write_all(&encode(&answer, ANSWER_BYTES_MAX)?)).await?;
        if last {
            return Ok(());
        }
    }
}

async fn within<T>(limit: Duration, work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    timeout(limit, work).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

async fn accept_http<S, F, A>(accept: A, shared: Arc<Shared>)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    F: Future<Output = io::Result<S>>,
    A: Fn() -> F,
{
    let places = Arc::new(Semaphore::new(HTTP_CONNECTIONS_MAX));
    while let Ok(place) = places.clone().acquire_owned().await {
        let Ok(mut stream) = accept().await else {
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        let shared = shared.clone();
        tokio::spawn(async move {
            let _ = within(TRANSFER_TIMEOUT, respond(&mut stream, &shared)).await;
            drop(place);
        });
    }
}

/// Reads one HTTP request's head and answers it.
async fn respond(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), shared: &Shared) -> io::Result<()> {
    let mut head = Vec::with_capacity(512);
    let answer = loop {
        if head.windows(4).any(|end| end == b"\r\n\r\n") {
            break http_answer(&head, shared);
        }
        if head.len() >= HTTP_HEAD_BYTES_MAX {
            break Http { status: "431 Request Header Fields Too Large", body: String::new(), head_only: false };
        }
        if (&mut *stream).take((HTTP_HEAD_BYTES_MAX - head.len()) as u64).read_buf(&mut head).await? == 0 {
            return Ok(());
        }
    };
    let body = if answer.head_only { "" } else { &answer.body };
    let text = format!(
        "HTTP/1.1 {}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n{body}",
        answer.status,
        answer.body.len(),
    );
    stream.write_all(text.as_bytes()).await?;
    stream.shutdown().await
}

struct Http {
    status: &'static str,
    body: String,
    head_only: bool,
}

fn http_answer(head: &[u8], shared: &Shared) -> Http {
    let line = head.split(|b| *b == b'\r').next().unwrap_or_default();
    let words: Vec<&str> = std::str::from_utf8(line).unwrap_or_default().split(' ').collect();
    let [method, target, "HTTP/1.1" | "HTTP/1.0"] = words[..] else {
        return Http { status: "400 Bad Request", body: String::new(), head_only: false };
    };
    let head_only = match method {
        "GET" => false,
        "HEAD" => true,
        _ => return Http { status: "405 Method Not Allowed", body: String::new(), head_only: false },
    };
    let (status, body) = match target.split('?').next().unwrap_or_default() {
        "/metrics" => ("200 OK", shared.metrics.render()),
        "/health" => ("200 OK", "alive\n".to_owned()),
        "/ready" => match shared.metrics.state() {
            State::Ready => ("200 OK", "ready\n".to_owned()),
            State::Loading => ("503 Service Unavailable", "loading\n".to_owned()),
            State::Draining => ("503 Service Unavailable", "draining\n".to_owned()),
        },
        _ => ("404 Not Found", "there are /metrics, /health and /ready\n".to_owned()),
    };
    Http { status, body, head_only }
}

async fn sample(shared: Arc<Shared>) {
    let mut ticks = tokio::time::interval(RATE_PERIOD);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        shared.metrics.log_dropped(crate::logging::lines_dropped());
        shared.history().sample(&shared.metrics, Instant::now());
    }
}

/// Recent values of counters, for rates and for percentiles of the last minute.
#[derive(Debug, Default)]
struct History {
    rates: VecDeque<RateSample>,
    latencies: VecDeque<LatencySample>,
    ticks: u32,
}

#[derive(Debug, Clone, Copy)]
struct RateSample {
    at: Instant,
    prompt: u64,
    output: u64,
    steps: u64,
}

/// First token, inter-token, end to end.
type Counts = [LatencyCounts; 3];

#[derive(Debug, Clone, Copy)]
struct LatencySample {
    at: Instant,
    counts: Counts,
}

fn latency_counts(metrics: &Metrics) -> Counts {
    [Latency::FirstToken, Latency::InterToken, Latency::EndToEnd].map(|which| metrics.latency(which))
}

impl History {
    fn sample(&mut self, metrics: &Metrics, at: Instant) {
        let totals = metrics.totals();
        if self.rates.len() == RATE_SAMPLES {
            self.rates.pop_front();
        }
        self.rates.push_back(RateSample {
            at,
            prompt: totals.prefill_tokens,
            output: totals.output_tokens,
            steps: totals.steps,
        });
        if self.ticks.is_multiple_of(LATENCY_EVERY) {
            if self.latencies.len() == LATENCY_SAMPLES {
                self.latencies.pop_front();
            }
            self.latencies.push_back(LatencySample { at, counts: latency_counts(metrics) });
        }
        self.ticks = self.ticks.wrapping_add(1);
    }

    fn rate(&self) -> RateStatus {
        let (Some(first), Some(last)) = (self.rates.front(), self.rates.back()) else { return RateStatus::default() };
        let seconds = last.at.duration_since(first.at).as_secs_f64();
        if seconds == 0.0 {
            return RateStatus::default();
        }
        RateStatus {
            prompt_tokens_per_s: (last.prompt - first.prompt) as f64 / seconds,
            output_tokens_per_s: (last.output - first.output) as f64 / seconds,
            steps_per_s: (last.steps - first.steps) as f64 / seconds,
        }
    }

    fn latency(&self, metrics: &Metrics, now: Instant, began: Instant) -> LatencyStatus {
        let all = latency_counts(metrics);
        let (since, counts) = match self.latencies.front() {
            Some(first) if all != first.counts => (first.at, std::array::from_fn(|i| all[i].since(&first.counts[i]))),
            _ => (began, all),
        };
        let [first_token, inter_token, end_to_end] = counts.map(|counts: LatencyCounts| {
            Some(Percentiles { p50_s: counts.quantile(0.5)?, p99_s: counts.quantile(0.99)? })
        });
        let window_s = now.duration_since(since).as_secs_f64();
        LatencyStatus { window_s, first_token, inter_token, end_to_end }
    }
}

impl Shared {
    fn history(&self) -> std::sync::MutexGuard<'_, History> {
        // A panic while sampling leaves old samples behind, which are still samples.
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answer(&self, request: &ControlRequest) -> ControlAnswer {
        match request {
            ControlRequest::Status => ControlAnswer::Status(Box::new(self.status())),
            ControlRequest::Metrics => ControlAnswer::Metrics(self.metrics.render()),
        }
    }

    fn status(&self) -> Status {
        let now = Instant::now();
        let model = self.model.get();
        let (waiting, running) = self.metrics.loaded();
        let kv = self.metrics.kv_blocks();
        let mut clients = (self.clients)();
        let clients_total = clients.len() as u64;
        clients.sort_by_key(|client| client.session);
        clients.truncate(CLIENTS_LISTED_MAX);
        let history = self.history();
        Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            uptime_s: now.duration_since(self.began).as_secs_f64(),
            state: match self.metrics.state() {
                State::Loading => DaemonState::Loading,
                State::Ready => DaemonState::Ready,
                State::Draining => DaemonState::Draining,
            },
            device: model.map(|m| m.device.clone()).unwrap_or_default(),
            model: model.map(|m| m.model.clone()),
            load: LoadStatus {
                waiting,
                running,
                running_max: self.running_max as u64,
                waiting_max: self.waiting_max as u64,
            },
            kv: KvStatus {
                total: kv.total,
                free: kv.free,
                cached: kv.cached,
                owned: kv.owned,
                block_tokens: self.block_tokens as u32,
                bytes: model.map_or(0, |m| m.kv_bytes),
            },
            rate: history.rate(),
            totals: totals(&self.metrics),
            latency: history.latency(&self.metrics, now, self.began),
            clients,
            clients_total,
        }
    }
}

fn totals(metrics: &Metrics) -> Totals {
    let totals = metrics.totals();
    let named = |list: Vec<(&'static str, u64)>| list.into_iter().map(|(name, n)| (name.to_owned(), n)).collect();
    Totals {
        accepted: totals.accepted,
        finished: named(totals.ended),
        rejected: named(totals.rejected),
        prompt_tokens: totals.prompt_tokens,
        output_tokens: totals.output_tokens,
        steps: totals.steps,
        preemptions: totals.preemptions,
        prefix_queried_tokens: totals.prefix_queried_tokens,
        prefix_hit_tokens: totals.prefix_hit_tokens,
    }
}

#[cfg(test)]
mod tests;
