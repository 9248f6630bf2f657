//! The llmd process: configuration, threads, readiness, signals.
//!
//! Order of the start: what systemd passed is taken; flags, environment and file become settings; the log begins; sockets are
//! bound (clients that connect meanwhile wait in the backlog); control answers "loading"; the model is loaded; the engine
//! starts; READY. SIGTERM or SIGINT drains: what runs is finished within the bound, what is new is refused, then the process
//! ends with 0. A second signal cuts off what still runs; one that comes while the model is loaded ends the process at once,
//! for nobody is served yet. Exit codes: 0 drained, 1 failed (or cut off what ran), 2 wrong usage.
#![forbid(unsafe_code)]

use std::error::Error;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread;
use std::time::Instant;

use llmd::config::{self, ConfigError, MetricsAddress, Settings, Surroundings};
use llmd::control::{self, ControlOptions};
use llmd::engine::{self, Engine, Event, Outcome};
use llmd::intake::{self, Intake};
use llmd::kv_cache::block::BLOCK_TOKENS;
use llmd::listen::{AnyListener, BoundUnix, Passed};
use llmd::logging;
use llmd::metrics::{Metrics, State};
use llmd::notifier::Notifier;
use llmd::outbox::{Outbox, OutboxLimits};
use llmd::serve::{self, Loaded};
use llmd::sessions::SessionTable;
use llmd::sessions::listener::{self, Outlets, SessionLimits};
use llmd::step_log::StepLog;
use nix::sys::signal::{SigSet, Signal};
use sd_notify::NotifyState;

/// Threads that tokenize. One keeps up with thousands of requests a second; the second keeps a megabyte-long prompt from
/// holding up a short one.
const INTAKE_THREADS: usize = 2;

/// What the main thread waits for.
enum Wake {
    /// SIGTERM or SIGINT.
    Signal,
    /// Standard input has ended, which was asked to mean the same; but it never counts as a second signal.
    StdinEnded,
    /// The model is loaded, or cannot be.
    Loaded(Box<Result<Loaded, String>>),
    /// The engine's loop has ended, for whatever reason.
    EngineEnded,
}

fn main() -> ExitCode {
    let passed = match Passed::take() {
        Ok(passed) => passed,
        Err(error) => return usage(&format!("llmd: {error}")),
    };
    let told = match config::told(std::env::args()) {
        Ok(told) => told,
        Err(error) => return misconfigured(error),
    };
    let around = Surroundings::observe(passed.socket.is_some(), passed.control.is_some());
    let settings = match told.config.resolve(&told.origins, &around) {
        Ok(settings) => settings,
        Err(error) => return misconfigured(error),
    };
    if told.print_config {
        print!("{}", settings.to_toml());
        return ExitCode::SUCCESS;
    }
    // Blocked in every thread from here on, so that only the thread that waits for them sees them.
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGTERM);
    signals.add(Signal::SIGINT);
    if let Err(error) = signals.thread_block() {
        return usage(&format!("llmd: cannot block signals: {error}"));
    }
    let log = match logging::init(settings.log_level) {
        Ok(log) => log,
        Err(error) => return usage(&format!("llmd: cannot log: {error}")),
    };
    end_with_any_thread();
    let (wakes, woken) = mpsc::channel();
    watch_signals(signals, wakes.clone());
    if told.stop_on_stdin_eof {
        watch_stdin(wakes.clone());
    }
    let code = match run(&settings, passed, wakes, &woken) {
        Ok(Outcome::Drained) => ExitCode::SUCCESS,
        Ok(Outcome::Stopped { cut_off }) => {
            log::warn!("{cut_off} requests were cut off: they did not end in time");
            ExitCode::FAILURE
        }
        Err(error) => {
            log::error!("{error}");
            ExitCode::FAILURE
        }
    };
    drop(log);
    code
}

fn usage(message: &str) -> ExitCode {
    eprintln!("{message}");
    ExitCode::from(2)
}

/// Help and version are "errors" too, of exit code 0.
fn misconfigured(error: ConfigError) -> ExitCode {
    match error {
        ConfigError::CommandLine(error) => {
            let _ = error.print();
            ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
        }
        error => usage(&format!("llmd: {error}")),
    }
}

/// A panic is a defect: the daemon ends at once and is restarted, instead of living on with a thread missing. The intake
/// catches panics of its own work before this sees the thread end.
fn end_with_any_thread() {
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        default(info);
        let contained = thread::current().name().is_some_and(|name| name.starts_with("llmd-intake-"));
        if !contained {
            std::process::abort();
        }
    }));
}

/// Tells the main thread of every SIGTERM and SIGINT.
fn watch_signals(signals: SigSet, wakes: mpsc::Sender<Wake>) {
    watch("llmd-signals", move || while signals.wait().is_ok() && wakes.send(Wake::Signal).is_ok() {});
}

/// Tells the main thread when standard input ends.
fn watch_stdin(wakes: mpsc::Sender<Wake>) {
    watch("llmd-stdin", move || {
        let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
        // An error says that the process is at its end anyway.
        let _ = wakes.send(Wake::StdinEnded);
    });
}

/// A thread that nobody joins: it ends with the process.
fn watch(name: &str, work: impl FnOnce() + Send + 'static) {
    if let Err(error) = thread::Builder::new().name(name.into()).spawn(work) {
        // A daemon that cannot be told to stop must not run.
        panic!("cannot start the thread {name}: {error}");
    }
}

/// Loads the model while listening for signals: a large one takes minutes. None: the process was told to stop first.
fn load(
    settings: &Settings,
    wakes: mpsc::Sender<Wake>,
    woken: &mpsc::Receiver<Wake>,
) -> Result<Option<Loaded>, Box<dyn Error>> {
    let settings = settings.clone();
    thread::Builder::new().name("llmd-load".into()).spawn(move || {
        let progress = &mut |done: u64, total: u64| {
            let percent = done * 100 / total.max(1);
            let _ = sd_notify::notify(&[NotifyState::Status(&format!("loading weights: {percent} %"))]);
        };
        let loaded = serve::load(&settings, progress).map_err(|error| error.to_string());
        let _ = wakes.send(Wake::Loaded(Box::new(loaded)));
    })?;
    match woken.recv()? {
        Wake::Loaded(loaded) => Ok(Some((*loaded)?)),
        Wake::Signal | Wake::StdinEnded | Wake::EngineEnded => Ok(None),
    }
}

/// Waits until the process is told to stop, then until the engine has ended or must be cut off.
fn serve_until_told(
    settings: &Settings,
    woken: &mpsc::Receiver<Wake>,
    events: &mpsc::SyncSender<Event>,
    drains: impl FnOnce(),
) {
    if let Ok(Wake::EngineEnded) = woken.recv() {
        return;
    }
    log::info!("draining: what runs is finished, for at most {:?}", settings.drain_timeout);
    drains();
    let _ = events.send(Event::Drain);
    let deadline = Instant::now() + settings.drain_timeout;
    loop {
        match woken.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(Wake::EngineEnded) => return,
            Ok(Wake::StdinEnded | Wake::Loaded(_)) => {}
            Ok(Wake::Signal) => {
                log::warn!("told to stop a second time: what still runs is cut off");
                break;
            }
            Err(_) => break,
        }
    }
    // An error says that the engine has just ended.
    let _ = events.send(Event::Stop);
}

fn run(
    settings: &Settings,
    passed: Passed,
    wakes: mpsc::Sender<Wake>,
    woken: &mpsc::Receiver<Wake>,
) -> Result<Outcome, Box<dyn Error>> {
    let began = Instant::now();
    let metrics = Arc::new(Metrics::new(BLOCK_TOKENS));
    metrics.set_state(State::Loading);
    let table = Arc::new(SessionTable::default());
    let model_info = Arc::new(OnceLock::new());

    // The bound sockets' files go when these guards do.
    let (clients_listener, _clients_file) = match (passed.socket, &settings.socket) {
        (Some(listener), _) => (listener, None),
        (None, Some(path)) => BoundUnix::bind(path).map(|(listener, file)| (listener, Some(file)))?,
        (None, None) => return Err("no socket to listen on; give --socket PATH".into()),
    };
    let (control_listener, _control_file) = match (passed.control, &settings.control) {
        (Some(listener), _) => (Some(listener), None),
        (None, Some(path)) => BoundUnix::bind(path).map(|(listener, file)| (Some(listener), Some(file)))?,
        (None, None) => (None, None),
    };
    let (http_listener, _http_file) = match (passed.metrics, &settings.metrics) {
        (Some(listener), _) => (Some(listener), None),
        (None, Some(MetricsAddress::Tcp(address))) => {
            let listener = std::net::TcpListener::bind(address)
                .map_err(|e| format!("cannot serve metrics on {address}: {e}; choose another with --metrics"))?;
            log::info!("metrics: http://{}/metrics", listener.local_addr()?);
            (Some(AnyListener::Tcp(listener)), None)
        }
        (None, Some(MetricsAddress::Unix(path))) => {
            BoundUnix::bind(path).map(|(listener, file)| (Some(AnyListener::Unix(listener)), Some(file)))?
        }
        (None, None) => (None, None),
    };
    let clients = {
        let table = Arc::clone(&table);
        Arc::new(move || table.status())
    };
    let _control = control::spawn(ControlOptions {
        control: control_listener,
        http: http_listener,
        metrics: Arc::clone(&metrics),
        model: Arc::clone(&model_info),
        clients,
        running_max: settings.sequences_max,
        waiting_max: settings.waiting_max,
        block_tokens: BLOCK_TOKENS,
    })?;

    let Some(loaded) = load(settings, wakes.clone(), woken)? else {
        log::info!("told to stop while the model was being loaded");
        return Ok(Outcome::Drained);
    };
    metrics.set_model(&loaded.info.model.name);
    log::info!(
        "{}: {} parameters, {}, on {}; {} blocks of {BLOCK_TOKENS} tokens ({:.0} MiB) of key-value cache",
        loaded.info.model.name,
        loaded.info.model.parameters,
        loaded.info.model.quantisation,
        loaded.info.device,
        loaded.runner.memory().kv_blocks,
        loaded.info.kv_bytes as f64 / f64::from(1 << 20),
    );
    let _ = model_info.set(loaded.info.clone());

    let draining = Arc::new(AtomicBool::new(false));
    let (events, engine_events) = mpsc::sync_channel::<Event>(engine::EVENTS_MAX);
    let (jobs, worker_jobs) = mpsc::sync_channel(intake::QUEUE_MAX);
    let intake = Arc::new(Intake::new(Arc::clone(&loaded.tokenizer), loaded.chat_template, loaded.context_max));
    let answers = events.clone();
    let answer = move |verdict| answers.send(Event::Intake(verdict)).is_ok();
    intake::spawn_workers(INTAKE_THREADS, &intake, worker_jobs, answer)?;
    let (notifier, _) = Notifier::spawn(Arc::clone(&metrics))?;
    let (step_log, step_log_thread) = match &settings.step_log {
        Some(path) => {
            let (log, thread) = StepLog::create(path).map_err(|e| {
                format!("step_log {}: {e}; give a path in a folder where this user may write", path.display())
            })?;
            (Some(log), Some(thread))
        }
        None => (None, None),
    };
    let engine = Engine {
        scheduler: loaded.scheduler,
        runner: loaded.runner,
        sampler: loaded.sampler,
        tokenizer: loaded.tokenizer,
        outbox: Outbox::new(notifier, Arc::clone(&metrics), OutboxLimits::default()),
        metrics: Arc::clone(&metrics),
        step_log,
        draining: Arc::clone(&draining),
    };
    let engine_thread = thread::Builder::new().name("llmd-engine".into()).spawn(move || {
        let ended = engine.run(&engine_events);
        let _ = wakes.send(Wake::EngineEnded);
        ended
    })?;
    let limits = SessionLimits {
        sessions_max: settings.sessions_max,
        sessions_per_uid_max: settings.sessions_per_uid,
        requests_per_session_max: settings.requests_per_session as u32,
    };
    let outlets = Outlets {
        arrivals: {
            let events = events.clone();
            // An error says that the engine has ended, and with it everything there is to tell.
            Box::new(move |arrival| drop(events.send(Event::Session(arrival))))
        },
        jobs,
        table,
        metrics: Arc::clone(&metrics),
        draining: Arc::clone(&draining),
    };
    let sessions = listener::spawn(clients_listener, limits, outlets)?;

    metrics.set_state(State::Ready);
    let _ = sd_notify::notify(&[NotifyState::Ready, NotifyState::Status("ready")]);
    match &settings.socket {
        Some(path) => log::info!("ready after {:.2} s on {}", began.elapsed().as_secs_f64(), path.display()),
        None => log::info!("ready after {:.2} s on the socket that was passed", began.elapsed().as_secs_f64()),
    }

    serve_until_told(settings, woken, &events, || {
        metrics.set_state(State::Draining);
        draining.store(true, Ordering::Relaxed);
        let _ = sd_notify::notify(&[NotifyState::Stopping, NotifyState::Status("draining")]);
    });
    let ended = engine_thread.join().map_err(|_| "the engine thread panicked")?;
    sessions.stop();
    if let Some(thread) = step_log_thread {
        let _ = thread.join();
    }
    let ended = ended?;
    if ended == Outcome::Drained {
        log::info!("drained after {:.1} s of service", began.elapsed().as_secs_f64());
    }
    Ok(ended)
}
