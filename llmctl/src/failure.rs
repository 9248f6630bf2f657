//! Why a command failed, what to do next, and the exit code.

use llmd_client::{Error, Refusal, Reject};
use llmd_protocol::control::ControlError;
use std::io;

/// Something went wrong.
pub const FAILED: u8 = 1;
/// The command line is wrong.
pub const USAGE: u8 = 2;
/// The daemon cannot be reached.
pub const UNREACHABLE: u8 = 3;
/// The daemon refused.
pub const REFUSED: u8 = 4;

/// What is said before the program ends with `code`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Exit code.
    pub code: u8,
    /// What happened.
    pub message: String,
    /// What to do next.
    pub hint: Option<String>,
    /// Say nothing: whoever read our output is gone.
    pub quiet: bool,
}

impl Failure {
    /// A failure with a message alone.
    pub fn new(code: u8, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), hint: None, quiet: false }
    }

    /// The same with what to do next.
    pub fn hint(self, hint: impl Into<String>) -> Self {
        Self { hint: Some(hint.into()), ..self }
    }

    /// Nobody listens at `path`.
    pub fn unreachable(path: &str, error: &io::Error) -> Self {
        let hint = match error.kind() {
            io::ErrorKind::PermissionDenied => {
                "the socket is there; ask to be put into its group (ls -l shows it), then log in again".to_owned()
            }
            io::ErrorKind::ConnectionRefused => {
                "the socket is left over from a daemon that is gone; start llmd again".to_owned()
            }
            _ => "is llmd running? Start it with `llmd --model PATH`, or name its socket with --socket and --control"
                .to_owned(),
        };
        Self::new(UNREACHABLE, format!("cannot reach the daemon at {path}: {error}")).hint(hint)
    }

    /// The daemon refused a request.
    pub fn rejected(reject: Reject, detail: &str) -> Self {
        let (what, hint) = match reject {
            Reject::Malformed => ("it could not decode the request", "use an llmctl of the daemon's release"),
            Reject::InvalidParameter => ("a parameter is out of its range", "see `llmctl generate --help`"),
            Reject::TokenOutOfVocabulary => ("a token id is not in the vocabulary", "see `llmctl status`"),
            Reject::NeverFits => {
                ("the prompt is longer than context or cache allow", "shorten it; `llmctl status` shows the context")
            }
            Reject::EmptyPrompt => ("the prompt is empty", "give a text"),
            Reject::Busy => ("too many requests are in flight", "try again later; `llmctl status` shows the load"),
            Reject::Draining => ("the daemon is shutting down", "try again when it is back"),
            Reject::ChatTemplate => ("the model has no usable chat template", "try --raw, which sends the bare text"),
            Reject::SlowReader => ("the answer was not read in time", "read llmctl's output faster"),
            Reject::KvExhausted => {
                ("the key-value cache is full", "raise kv_memory in the daemon's configuration, or ask for less")
            }
            Reject::Internal => ("it met a fault of its own", "its log says more: journalctl -u llmd"),
        };
        let detail = if detail.is_empty() { String::new() } else { format!(": {}", crate::screen::plain(detail)) };
        Self::new(REFUSED, format!("the daemon refused: {what}{detail}")).hint(hint)
    }
}

impl From<ControlError> for Failure {
    fn from(error: ControlError) -> Self {
        match error {
            ControlError::Connect { path, source } => Self::unreachable(&path, &source),
            ControlError::Refused(_) => {
                Self::new(REFUSED, error.to_string()).hint("try again; other programs are asking too")
            }
            ControlError::Version { .. } => Self::new(FAILED, error.to_string()),
            ControlError::Io(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                Self::new(FAILED, "the daemon did not answer in time").hint("it may be stuck: journalctl -u llmd")
            }
            other => Self::new(FAILED, other.to_string()),
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        match error {
            Error::NotRunning { ref paths, ref source } => {
                let paths: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
                Self::unreachable(&paths.join(" or "), source)
            }
            Error::Denied { ref path, ref source } => Self::unreachable(&path.display().to_string(), source),
            Error::Rejected { reject, ref detail } => Self::rejected(reject, detail),
            Error::Refused { refusal, retry_after } => {
                let hint = match refusal {
                    Refusal::Version | Refusal::BadHello => "use an llmctl of the daemon's release".to_owned(),
                    _ if retry_after.is_zero() => "try again later; `llmctl status` shows the load".to_owned(),
                    _ => format!("try again in {}", crate::screen::seconds(retry_after.as_secs_f64())),
                };
                Self::new(REFUSED, refusal.to_string()).hint(hint)
            }
            Error::TimedOut(_) => Self::new(UNREACHABLE, error.to_string())
                .hint("it may still be loading the model, or be stuck: see `llmctl status`"),
            Error::DaemonRestarted | Error::Disconnected => {
                Self::new(FAILED, error.to_string()).hint("its log says why: journalctl -u llmd")
            }
            Error::InvalidRequest(_) | Error::TooLong(_) => Self::new(USAGE, error.to_string()),
            other => Self::new(FAILED, other.to_string()),
        }
    }
}

impl From<io::Error> for Failure {
    /// Of our own standard streams. A reader that went away (`llmctl ... | head`) is no news.
    fn from(error: io::Error) -> Self {
        let quiet = error.kind() == io::ErrorKind::BrokenPipe;
        Self { quiet, ..Self::new(FAILED, format!("cannot write or read: {error}")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_failure_says_what_to_do_and_has_its_code() {
        for reject in Reject::ALL {
            let failure = Failure::rejected(reject, "top_p");
            assert!(failure.code == REFUSED && failure.hint.is_some() && failure.message.ends_with(": top_p"));
            assert!(failure.hint.unwrap().len() < 72 && failure.message.len() < 80, "{}", failure.message);
        }
        for kind in [io::ErrorKind::NotFound, io::ErrorKind::PermissionDenied, io::ErrorKind::ConnectionRefused] {
            let failure = Failure::unreachable("/run/llmd/llmd.sock", &kind.into());
            assert!(failure.code == UNREACHABLE && failure.hint.is_some());
        }
    }

    #[test]
    fn a_closed_pipe_is_quiet() {
        assert!(Failure::from(io::Error::from(io::ErrorKind::BrokenPipe)).quiet);
        assert!(!Failure::from(io::Error::from(io::ErrorKind::StorageFull)).quiet);
    }
}
