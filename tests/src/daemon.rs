//! A daemon of one's own: its process, its private folder, and questions to it.
//!
//! Everything panics with what went wrong: these are tests, and the reader wants to see where. When a test fails, the end
//! of the daemon's log is shown.

use crate::step_log::{self, Step};
use crate::tiny_model::TinyModel;
use llmd_client::Client;
use llmd_protocol::control::{self, DaemonState, Status};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::env;
use std::fs::{self, File};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// How long anything here may take before the test fails.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// How often it is looked again.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// How much of the daemon's log a failed test shows.
const LOG_LINES_SHOWN: usize = 40;

/// A running daemon. It ends when this is dropped, or when the test's process dies, however it dies.
pub struct Daemon {
    child: Child,
    /// The daemon stops when this closes (`--stop-on-stdin-eof`); the kernel does that even if we are killed.
    stdin: Option<ChildStdin>,
    folder: Folder,
}

/// What a daemon is started with.
#[derive(Debug, Clone)]
pub struct Setup {
    model: Model,
    arguments: Vec<String>,
}

#[derive(Debug, Clone)]
enum Model {
    Tiny(TinyModel),
    File(PathBuf),
}

impl Setup {
    /// The tiny model, and whatever defaults the daemon has.
    pub fn tiny() -> Self {
        Self { model: Model::Tiny(TinyModel::default()), arguments: Vec::new() }
    }

    /// The tiny model's larger brother, for requests that must still be running in a moment.
    pub fn slow() -> Self {
        Self { model: Model::Tiny(TinyModel::slow()), arguments: Vec::new() }
    }

    /// A model file.
    pub fn file(path: &Path) -> Self {
        Self { model: Model::File(path.to_path_buf()), arguments: Vec::new() }
    }

    /// One more argument, as "--kv-blocks=24".
    pub fn with(mut self, argument: impl Into<String>) -> Self {
        self.arguments.push(argument.into());
        self
    }

    /// Starts it and waits until it is ready.
    pub fn start(&self) -> Daemon {
        let mut daemon = self.spawn(Folder::new(), Command::new(program("LLMD_BIN", "llmd")));
        daemon.wait_until_ready();
        daemon
    }

    /// Starts it and does not wait.
    pub fn start_unready(&self) -> Daemon {
        self.spawn(Folder::new(), Command::new(program("LLMD_BIN", "llmd")))
    }

    /// Has `systemd-socket-activate` open both sockets and start the daemon, with the sockets as descriptors under these
    /// names, when the first connection comes; waits until it is ready.
    pub fn start_by_socket_activation(&self, names: &str) -> Daemon {
        let folder = Folder::new();
        let mut command = Command::new("systemd-socket-activate");
        command
            .arg("--listen")
            .arg(folder.path.join("llmd.sock"))
            .arg("--listen")
            .arg(folder.path.join("control.sock"))
            .arg(format!("--fdname={names}"))
            .arg(program("LLMD_BIN", "llmd"));
        let mut daemon = self.spawn(folder, command);
        daemon.wait_until_ready();
        daemon
    }

    /// Adds everything the daemon is told to `command`, which already names it, and starts that.
    fn spawn(&self, folder: Folder, mut command: Command) -> Daemon {
        let model = match &self.model {
            Model::File(path) => path.clone(),
            Model::Tiny(shape) => {
                let path = folder.path.join("tiny.gguf");
                shape.write(&path).expect("write the tiny model");
                path
            }
        };
        let log = File::options().create(true).append(true).open(folder.path.join("llmd.log")).expect("open the log");
        // Nothing from outside decides what is tested, but for the instructions: LLMD_ISA=avx2 runs any suite with those.
        for (name, _) in env::vars_os() {
            if name.to_str().is_some_and(|name| name.starts_with("LLMD_") && name != "LLMD_ISA") {
                command.env_remove(name);
            }
        }
        command
            .arg("--model")
            .arg(model)
            .arg("--socket")
            .arg(folder.path.join("llmd.sock"))
            .arg("--control")
            .arg(folder.path.join("control.sock"))
            .arg("--step-log")
            .arg(folder.path.join("steps.jsonl"))
            .arg("--stop-on-stdin-eof")
            .args(&self.arguments)
            .env_remove("NOTIFY_SOCKET")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(log);
        let mut child = command.spawn().unwrap_or_else(|e| panic!("cannot start {:?}: {e}", command.get_program()));
        let stdin = child.stdin.take();
        Daemon { child, stdin, folder }
    }
}

impl Daemon {
    /// The tiny model with these further arguments, ready.
    pub fn tiny(arguments: &[&str]) -> Self {
        arguments.iter().fold(Setup::tiny(), |setup, argument| setup.with(*argument)).start()
    }

    /// Where clients connect.
    pub fn socket(&self) -> PathBuf {
        self.folder.path.join("llmd.sock")
    }

    /// Where llmctl asks.
    pub fn control(&self) -> PathBuf {
        self.folder.path.join("control.sock")
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// A new connection.
    pub fn client(&self) -> Client {
        Client::connect(self.socket()).expect("connect to the daemon")
    }

    /// What it says about itself.
    pub fn status(&self) -> Status {
        control::status(&self.control(), PATIENCE).expect("ask for the status")
    }

    /// A metric's value, summed over its labels; 0 if it is not there.
    pub fn metric(&self, name: &str) -> f64 {
        let text = control::metrics(&self.control(), PATIENCE).expect("ask for the metrics");
        metric_in(&text, name)
    }

    /// All steps computed so far. The log is written by a thread that may lag behind, so this waits for it.
    pub fn steps(&self) -> Vec<Step> {
        let computed = self.status().totals.steps;
        let mut steps = Vec::new();
        wait_until("the step log is complete", || {
            steps = step_log::read(&self.folder.path.join("steps.jsonl"));
            computed == 0 || steps.last().is_some_and(|last| last.step >= computed)
        });
        steps
    }

    /// What it logged so far.
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.path.join("llmd.log")).unwrap_or_default()
    }

    /// Waits until no request is anywhere in it, and returns its status then.
    pub fn wait_until_idle(&self) -> Status {
        let mut status = self.status();
        wait_until("the daemon is idle", || {
            status = self.status();
            let in_flight: u32 = status.clients.iter().map(|client| client.requests_in_flight).sum();
            status.load.waiting == 0 && status.load.running == 0 && in_flight == 0
        });
        status
    }

    /// Runs llmctl against it.
    pub fn llmctl(&self, arguments: &[&str]) -> Output {
        Command::new(program("LLMCTL_BIN", "llmctl"))
            .args(arguments)
            .arg("--socket")
            .arg(self.socket())
            .stdin(Stdio::null())
            .output()
            .expect("run llmctl")
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id() as i32), signal).expect("the daemon is our child and not yet waited for");
    }

    /// Waits until it has ended.
    pub fn wait(&mut self) -> ExitStatus {
        let mut ended = None;
        let child = &mut self.child;
        wait_until("the daemon has ended", || {
            ended = child.try_wait().expect("wait for the daemon");
            ended.is_some()
        });
        ended.expect("the loop ends only with it")
    }

    /// Kills it and starts another with the same sockets; waits until that one is ready.
    pub fn restart(&mut self, setup: &Setup) {
        self.signal(Signal::SIGKILL);
        self.wait();
        let folder = std::mem::replace(&mut self.folder, Folder { path: PathBuf::new(), remove: false });
        // The old process left its step log and its sockets.
        let _ = fs::remove_file(folder.path.join("steps.jsonl"));
        let new = setup.spawn(folder, Command::new(program("LLMD_BIN", "llmd")));
        *self = new;
        self.wait_until_ready();
    }

    fn wait_until_ready(&mut self) {
        if !self.try_wait_until_ready() {
            panic!("the daemon ended before it was ready:\n{}", self.folder.log_end());
        }
    }

    /// Waits until it is ready, or has ended, which gives false.
    pub fn try_wait_until_ready(&mut self) -> bool {
        let control = self.control();
        let child = &mut self.child;
        let mut has_ended = false;
        wait_until("the daemon is ready", || {
            has_ended = child.try_wait().expect("look at the daemon").is_some();
            let state = control::status(&control, PATIENCE).map(|status| status.state);
            has_ended || matches!(state, Ok(DaemonState::Ready))
        });
        !has_ended
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if std::thread::panicking() && !self.folder.path.as_os_str().is_empty() {
            eprintln!("the daemon's log ends:\n{}", self.folder.log_end());
        }
        self.stdin = None;
        // A test that cares how the daemon stops has waited for it already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A private folder, removed at the end.
struct Folder {
    path: PathBuf,
    remove: bool,
}

impl Folder {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        // Short: a Unix socket's path must stay under 108 bytes.
        let path = env::temp_dir().join(format!("llmd-t-{}-{number}", std::process::id()));
        // Left by a killed test whose process id came round again.
        let _ = fs::remove_dir_all(&path);
        fs::DirBuilder::new().mode(0o700).create(&path).expect("make a folder for the test");
        Self { path, remove: true }
    }

    fn log_end(&self) -> String {
        let log = fs::read_to_string(self.path.join("llmd.log")).unwrap_or_default();
        let lines: Vec<_> = log.lines().collect();
        lines[lines.len().saturating_sub(LOG_LINES_SHOWN)..].join("\n")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if self.remove {
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

/// Looks again and again until `done`; panics after [`PATIENCE`].
pub fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "waited {} s until {what}", PATIENCE.as_secs());
        sleep(LOOK_EVERY);
    }
}

/// A program of this workspace: from the environment, where `cargo xtask test` puts it, or from beside the test binary.
pub fn program(variable: &str, name: &str) -> PathBuf {
    if let Some(path) = env::var_os(variable) {
        return path.into();
    }
    // <target>/<profile>/deps/TEST or <target>/<profile>/BENCHMARK.
    let own = env::current_exe().expect("a path of one's own");
    let beside = own.ancestors().skip(1).take(2).map(|folder| folder.join(name)).find(|path| path.is_file());
    beside.unwrap_or_else(|| panic!("{name} is not built: run `cargo build`, or the tests with `cargo xtask test`"))
}

/// The default model in the cache folder, where `cargo xtask setup` puts it.
pub fn default_model() -> PathBuf {
    let variable = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let folder = variable("LLMD_CACHE")
        .or_else(|| variable("XDG_CACHE_HOME").map(|folder| folder.join("llmd")))
        .or_else(|| variable("HOME").map(|home| home.join(".cache/llmd")))
        .expect("HOME is set");
    let path = folder.join("SmolLM2-135M-Instruct.Q4_1.gguf");
    assert!(path.is_file(), "{} is missing: run `cargo xtask setup`", path.display());
    path
}

/// The sum of the samples named `name` in Prometheus' text format.
pub fn metric_in(text: &str, name: &str) -> f64 {
    let sample = |line: &str| -> Option<f64> {
        let rest = line.strip_prefix(name)?;
        if !rest.starts_with([' ', '{']) {
            return None;
        }
        rest.rsplit(' ').next()?.parse().ok()
    };
    text.lines().filter_map(sample).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_summed_over_labels_and_not_over_longer_names() {
        let text = "# TYPE a counter\na{x=\"1\"} 2\na{x=\"2 3\"} 0.5\na_total 7\n";
        assert_eq!(metric_in(text, "a"), 2.5);
        assert_eq!(metric_in(text, "a_total"), 7.0);
        assert_eq!(metric_in(text, "b"), 0.0);
    }
}
