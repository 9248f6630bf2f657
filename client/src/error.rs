//! What can go wrong, in terms a caller can act on.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use llmd_protocol::encoding::TooLong;
use llmd_protocol::handshake::{ConnectError, Refusal};
use llmd_protocol::message::{InvalidParameter, Reject};

/// Why there is no answer, or no more of it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No daemon listens. Start it, or say where it is.
    #[error(
        "no llmd listens at {}; start it (`systemctl start llmd`, or `llmd --model PATH`), or name its socket in LLMD_SOCKET",
        paths.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(" or ")
    )]
    NotRunning {
        /// Where it was looked for.
        paths: Vec<PathBuf>,
        /// What the last try said.
        source: io::Error,
    },
    /// The socket belongs to others.
    #[error("not allowed to connect to {}; join the group that owns the socket (llmd-clients)", path.display())]
    Denied {
        /// The socket.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The daemon takes no session now.
    #[error("{refusal}")]
    Refused {
        /// Why.
        refusal: Refusal,
        /// When it may be worth another try; zero where that makes no sense.
        retry_after: Duration,
    },
    /// The daemon answered the connect, or took the request, too late.
    #[error("the daemon did not answer within {0:?}")]
    TimedOut(Duration),
    /// The daemon did not take this request, or ended it without an answer.
    #[error("{reject}{}{detail}", if detail.is_empty() { "" } else { ": " })]
    Rejected {
        /// Why.
        reject: Reject,
        /// The daemon's explanation; may be empty.
        detail: String,
    },
    /// The daemon ended or crashed while the request was in flight. What was received until then was right.
    #[error("the daemon went away while the request was in flight")]
    DaemonRestarted,
    /// The daemon ended this session on purpose, for instance because it believed it to be broken.
    #[error("the daemon ended the session")]
    Disconnected,
    /// A parameter is outside its range.
    #[error("invalid request: {0}")]
    InvalidRequest(#[from] InvalidParameter),
    /// The request is too long to be sent.
    #[error("invalid request: {0}")]
    TooLong(#[from] TooLong),
    /// This process is a fork of the one that connected. Connect a new client here.
    #[error("this client belongs to the parent process; connect a new one after a fork")]
    Forked,
    /// The peer does not speak this protocol, or is broken.
    #[error("the daemon said something that makes no sense: {0}")]
    Protocol(String),
    /// The system refused something.
    #[error("the system refused: {0}")]
    System(#[from] io::Error),
}

impl Error {
    /// The same request may work in a little while, perhaps on a new session.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::NotRunning { .. } | Self::TimedOut(_) | Self::DaemonRestarted => true,
            Self::Refused { refusal, .. } => !matches!(refusal, Refusal::BadHello | Refusal::Version),
            Self::Rejected { reject, .. } => matches!(reject, Reject::Busy | Reject::Draining | Reject::KvExhausted),
            _ => false,
        }
    }

    pub(crate) fn of_connect(error: ConnectError, path: &std::path::Path) -> Self {
        match error {
            ConnectError::NotRunning(source) => Self::NotRunning { paths: vec![path.into()], source },
            ConnectError::Denied(source) => Self::Denied { path: path.into(), source },
            ConnectError::TimedOut(timeout) => Self::TimedOut(timeout),
            ConnectError::Refused { refusal, retry_after, .. } => Self::Refused { refusal, retry_after },
            ConnectError::Protocol(what) => Self::Protocol(what.into()),
            ConnectError::System(source) => Self::System(source),
        }
    }
}
