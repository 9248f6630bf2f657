//! `cargo xtask run`: a daemon of one's own and a chat with it, in one command, without root and without systemd.

use crate::build;
use crate::failure::{Context, Failure, Result};
use crate::place::PrivateFolder;
use crate::setup;
use indicatif::ProgressBar;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// How long the daemon may take from its start until it is ready. A large model from a slow disk takes minutes.
const READY_WITHIN: Duration = Duration::from_secs(600);
/// How long it may take to finish what is in flight once it was told to stop.
const STOPPED_WITHIN: Duration = Duration::from_secs(10);
/// How often a running child is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// How the daemon is to round activations, unless the environment or a flag says otherwise: one person's chat is as fast
/// with the better rounding, and a small model shows the difference.
const ACTIVATIONS: (&str, &str) = ("LLMD_ACTIVATIONS", "int16");
/// How much of the daemon's log is shown when something went wrong.
const LOG_LINES_SHOWN: usize = 30;

/// Builds, starts, waits until ready, opens a chat or prints one answer; returns llmctl's exit code.
pub fn run(model: Option<PathBuf>, daemon_arguments: &[String], prompt: &str) -> Result<ExitCode> {
    let model = match model {
        Some(path) => path,
        None => setup::default_model()?,
    };
    let built = build::build(&["--release", "--package=llmd", "--package=llmctl", "--bins"])?;
    let folder = PrivateFolder::new()?;
    let mut daemon = Daemon::start(built.program("llmd")?, &model, daemon_arguments, &folder)?;
    daemon.wait_until_ready()?;

    // Ctrl-C in the terminal reaches every process of the foreground: llmctl does with it what it likes, we wait for
    // llmctl, and the daemon is in a process group of its own.
    ctrlc::set_handler(|| {}).cannot("take over Ctrl-C")?;
    let mut llmctl = Command::new(built.program("llmctl")?);
    llmctl.arg("--socket").arg(&daemon.socket);
    match prompt {
        "" => llmctl.arg("chat"),
        prompt => llmctl.args(["generate", "--", prompt]),
    };
    let status = llmctl.status().cannot("start llmctl")?;
    if !status.success() && daemon.child.try_wait().is_ok_and(|ended| ended.is_some()) {
        return Err(daemon.failure("the daemon ended in the middle"));
    }
    daemon.stop();
    // A signal has no code; 128 + number is what a shell would report.
    let code = status.code().or_else(|| {
        use std::os::unix::process::ExitStatusExt;
        status.signal().map(|signal| 128 + signal)
    });
    Ok(ExitCode::from(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)))
}

/// A daemon that lives no longer than this process: it was started with `--stop-on-stdin-eof`, and we hold the only
/// other end of that pipe, which the kernel closes even if we are killed.
struct Daemon {
    child: Child,
    stdin: Option<ChildStdin>,
    ready: UnixDatagram,
    socket: PathBuf,
    log: PathBuf,
}

impl Daemon {
    fn start(program: &Path, model: &Path, arguments: &[String], folder: &PrivateFolder) -> Result<Self> {
        let socket = folder.join("llmd.sock");
        let log = folder.join("llmd.log");
        // Readiness as systemd has it: READY=1 in a datagram.
        let notify = folder.join("notify.sock");
        let ready = UnixDatagram::bind(&notify).cannot(format!("make the socket {}", notify.display()))?;
        ready.set_read_timeout(Some(LOOK_EVERY)).cannot("set a time-out")?;
        let (activations, better) = ACTIVATIONS;
        let mut child = Command::new(program)
            .env(activations, std::env::var_os(activations).unwrap_or_else(|| better.into()))
            .arg("--model")
            .arg(model)
            .arg("--socket")
            .arg(&socket)
            .arg("--control")
            .arg(folder.join("control.sock"))
            .arg("--stop-on-stdin-eof")
            .args(arguments)
            .env("NOTIFY_SOCKET", &notify)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(File::create(&log).cannot(format!("make {}", log.display()))?)
            .process_group(0)
            .spawn()
            .cannot(format!("start {}", program.display()))?;
        let stdin = child.stdin.take();
        Ok(Self { child, stdin, ready, socket, log })
    }

    fn wait_until_ready(&mut self) -> Result<()> {
        let deadline = Instant::now() + READY_WITHIN;
        let spinner = ProgressBar::new_spinner().with_message("starting the daemon");
        let mut datagram = [0; 4096];
        while Instant::now() < deadline {
            spinner.tick();
            match self.ready.recv(&mut datagram) {
                Ok(length) => {
                    for line in String::from_utf8_lossy(&datagram[..length]).lines() {
                        if line == "READY=1" {
                            spinner.finish_and_clear();
                            return Ok(());
                        }
                        if let Some(status) = line.strip_prefix("STATUS=") {
                            spinner.set_message(status.to_owned());
                        }
                    }
                }
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error).cannot("hear from the daemon"),
            }
            if let Some(status) = self.child.try_wait().cannot("look at the daemon")? {
                spinner.finish_and_clear();
                return Err(self.failure(&format!("the daemon ended with {status} before it was ready")));
            }
        }
        spinner.finish_and_clear();
        Err(self.failure(&format!("the daemon was not ready within {} s", READY_WITHIN.as_secs())))
    }

    /// `what`, and the end of the daemon's log.
    fn failure(&self, what: &str) -> Failure {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<_> = log.lines().collect();
        let shown = &lines[lines.len().saturating_sub(LOG_LINES_SHOWN)..];
        Failure::new(format!("{what}; its log ends:\n{}", shown.join("\n")))
    }

    /// Closes the pipe and waits; kills it if it takes too long.
    fn stop(&mut self) {
        self.stdin = None;
        let deadline = Instant::now() + STOPPED_WITHIN;
        while Instant::now() < deadline {
            match self.child.try_wait() {
                Ok(None) => sleep(LOOK_EVERY),
                Ok(Some(_)) | Err(_) => return,
            }
        }
        eprintln!("the daemon did not stop within {} s and is killed", STOPPED_WITHIN.as_secs());
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.stop();
    }
}
