//! What llmctl asks the daemon on the control socket, and what it hears.
//!
//! One frame each way, then the next request on the same connection, or the end:
//!
//! ```text
//! version u16 | length u32 | length bytes          little-endian
//! ```
//!
//! The body is bincode 1.3 with fixed-width little-endian integers. That encoding does not describe itself, so no type
//! here is untagged, flattened or skips a field, new variants go last, and any other change raises [`VERSION`]. The
//! version stands before everything else and never moves: both sides can always tell that they do not understand each
//! other, and which of them is older.
//!
//! Both sides decode under a byte limit that is checked before anything is allocated. This file is free of sockets but
//! for [`ask`]: the daemon reads frames with its async runtime through [`Header`] and [`decode`].

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use crate::message::{FinishReason, Reject};
use bincode::Options;

/// Version of the requests and answers in this file.
pub const VERSION: u16 = 1;
/// Bytes of version and length.
pub const HEADER_BYTES: usize = 6;
/// Most bytes in a request's body.
pub const REQUEST_BYTES_MAX: u32 = 4 << 10;
/// Most bytes in an answer's body: 16384 clients of 64 bytes, or the whole metrics text, fit several times.
pub const ANSWER_BYTES_MAX: u32 = 8 << 20;
/// Most clients listed in a [`Status`]; `clients_total` says how many there are.
pub const CLIENTS_LISTED_MAX: usize = 16384;
const _: () = assert!(CLIENTS_LISTED_MAX * 64 * 2 < ANSWER_BYTES_MAX as usize);

/// What may be asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ControlRequest {
    /// What the daemon is doing now.
    Status,
    /// All metrics in Prometheus' text format.
    Metrics,
}

/// What is answered.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ControlAnswer {
    /// To [`ControlRequest::Status`].
    Status(Box<Status>),
    /// To [`ControlRequest::Metrics`].
    Metrics(String),
    /// The request was understood in part or not at all.
    Refused(Refusal),
}

/// Why a control request got no answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Refusal {
    /// The body could not be decoded.
    Malformed,
    /// The daemon speaks another version of this protocol; the frame's header says which.
    Version,
    /// Too many control connections are open; try again.
    Busy,
}

/// One screen about the daemon.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Version of the daemon, as in its package.
    pub version: String,
    /// Its process id.
    pub pid: u32,
    /// Seconds since it started.
    pub uptime_s: f64,
    /// Whether it takes requests.
    pub state: DaemonState,
    /// What is computed on, for people: "cpu, AVX-512 VNNI, 2 threads". Empty while loading.
    pub device: String,
    /// The model. None while it is being loaded.
    pub model: Option<ModelStatus>,
    /// The load.
    pub load: LoadStatus,
    /// Key-value memory.
    pub kv: KvStatus,
    /// Tokens per second, over about the last two seconds.
    pub rate: RateStatus,
    /// Counters since the start.
    pub totals: Totals,
    /// Latencies as clients' requests saw them in the daemon.
    pub latency: LatencyStatus,
    /// Sessions that are open, by session id; at most [`CLIENTS_LISTED_MAX`].
    pub clients: Vec<ClientStatus>,
    /// Sessions that are open, listed or not.
    pub clients_total: u64,
}

/// Whether the daemon takes requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DaemonState {
    /// Weights are being loaded or warmed up; clients wait.
    Loading,
    /// Requests are taken.
    Ready,
    /// Requests in flight finish; new ones are refused.
    Draining,
}

/// The model being served.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelStatus {
    /// The name in the file, or the file's own name.
    pub name: String,
    /// Path of the file as configured.
    pub path: String,
    /// Architecture, as the file names it: "llama".
    pub architecture: String,
    /// Number of weights.
    pub parameters: u64,
    /// How the weights are stored: "Q4_1".
    pub quantisation: String,
    /// Bytes of weights held.
    pub weight_bytes: u64,
    /// Token ids are below this.
    pub vocabulary: u32,
    /// Most tokens of one sequence, prompt and output.
    pub context_max: u32,
    /// How steps are put together: "continuous" or "static".
    pub scheduler: String,
}

/// How many sequences there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct LoadStatus {
    /// Sequences that hold no blocks yet, or lost them.
    pub waiting: u64,
    /// Sequences that take part in steps.
    pub running: u64,
    /// Most that may run at once.
    pub running_max: u64,
    /// Most that may wait; more are refused.
    pub waiting_max: u64,
}

/// Key-value memory, in blocks. total = free + cached + owned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct KvStatus {
    /// All blocks.
    pub total: u64,
    /// Blocks that hold nothing.
    pub free: u64,
    /// Blocks that only the prefix cache holds; taken when there is no free one.
    pub cached: u64,
    /// Blocks of sequences.
    pub owned: u64,
    /// Tokens in a block.
    pub block_tokens: u32,
    /// Bytes of all blocks, in every layer.
    pub bytes: u64,
}

/// Tokens per second.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct RateStatus {
    /// Prompt tokens computed.
    pub prompt_tokens_per_s: f64,
    /// Tokens generated.
    pub output_tokens_per_s: f64,
    /// Steps.
    pub steps_per_s: f64,
}

/// Counters since the start of the daemon. accepted = sum of `finished` + live requests.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Totals {
    /// Requests taken into the queue.
    pub accepted: u64,
    /// Requests that ended after they were accepted, by reason; reasons that never came up are left out.
    pub finished: Vec<(String, u64)>,
    /// Requests refused before they were accepted, by reason; reasons that never came up are left out.
    pub rejected: Vec<(String, u64)>,
    /// Tokens of accepted prompts.
    pub prompt_tokens: u64,
    /// Tokens generated.
    pub output_tokens: u64,
    /// Steps computed.
    pub steps: u64,
    /// How often a sequence lost its blocks to another.
    pub preemptions: u64,
    /// Prompt tokens looked up in the prefix cache.
    pub prefix_queried_tokens: u64,
    /// Of these, tokens found.
    pub prefix_hit_tokens: u64,
}

/// Latencies, estimated from histograms with five buckets a decade.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct LatencyStatus {
    /// How far back they look: about a minute, or the whole uptime when the last minute saw nothing.
    pub window_s: f64,
    /// From arrival to the first token. None when no request got that far in the window.
    pub first_token: Option<Percentiles>,
    /// Between two tokens of one sequence.
    pub inter_token: Option<Percentiles>,
    /// From arrival to the end.
    pub end_to_end: Option<Percentiles>,
}

/// Two points of a distribution, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Percentiles {
    /// Half are below.
    pub p50_s: f64,
    /// 99 of 100 are below.
    pub p99_s: f64,
}

/// One open session.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ClientStatus {
    /// Process id of the peer when it connected.
    pub pid: u32,
    /// User id of the peer.
    pub uid: u32,
    /// The daemon's name for the session; never used again.
    pub session: u64,
    /// Requests accepted and not ended.
    pub requests_in_flight: u32,
    /// Seconds since the session opened.
    pub connected_s: f64,
    /// Tokens sent to it.
    pub tokens_out: u64,
}

/// [`FinishReason::name`] as a function.
pub fn finish_name(reason: FinishReason) -> &'static str {
    reason.name()
}

/// [`Reject::name`] as a function.
pub fn reject_name(reject: Reject) -> &'static str {
    reject.name()
}

/// What went wrong with a frame or a conversation.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// Nobody listens at the path, or it may not be opened.
    #[error("cannot reach {path}: {source}")]
    Connect {
        /// The socket's path.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// Reading or writing failed, or took too long.
    #[error("the control connection failed: {0}")]
    Io(#[from] std::io::Error),
    /// The peer speaks another version.
    #[error(
        "the daemon speaks version {theirs} of the control protocol, this program version {ours}: use programs of one release"
    )]
    Version {
        /// The peer's.
        theirs: u16,
        /// Ours.
        ours: u16,
    },
    /// A frame says that it is longer than allowed.
    #[error("a control frame of {length} bytes, at most {limit} are allowed")]
    TooLong {
        /// What it says.
        length: u64,
        /// What is allowed.
        limit: u32,
    },
    /// The bytes are not what they should be.
    #[error("a control frame could not be decoded: {0}")]
    Malformed(String),
    /// The daemon answered something else than was asked.
    #[error("the daemon answered something else than was asked")]
    Unexpected,
    /// The daemon refused.
    #[error("the daemon refused the control request: {0:?}")]
    Refused(Refusal),
}

/// The first bytes of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Version the body is written in.
    pub version: u16,
    /// Bytes of the body.
    pub length: u32,
}

impl Header {
    /// Takes the bytes apart. Nothing is checked yet.
    pub fn from_bytes(bytes: [u8; HEADER_BYTES]) -> Self {
        let [v0, v1, l0, l1, l2, l3] = bytes;
        Self { version: u16::from_le_bytes([v0, v1]), length: u32::from_le_bytes([l0, l1, l2, l3]) }
    }

    /// The bytes of this header.
    pub fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let [v0, v1] = self.version.to_le_bytes();
        let [l0, l1, l2, l3] = self.length.to_le_bytes();
        [v0, v1, l0, l1, l2, l3]
    }

    /// The body's length, if version and length are acceptable. The length is checked first: a body that is too long is
    /// not read, whoever wrote it.
    pub fn check(self, limit: u32) -> Result<usize, ControlError> {
        if self.length > limit {
            return Err(ControlError::TooLong { length: self.length.into(), limit });
        }
        if self.version != VERSION {
            return Err(ControlError::Version { theirs: self.version, ours: VERSION });
        }
        Ok(self.length as usize)
    }
}

fn options(limit: u32) -> impl Options {
    // The fixed-width integers keep the length of a message a function of its shape; bytes after the message are refused.
    bincode::DefaultOptions::new()
        .with_fixint_encoding()
        .with_little_endian()
        .reject_trailing_bytes()
        .with_limit(limit.into())
}

/// A whole frame: header and body.
pub fn encode<T: Serialize>(message: &T, limit: u32) -> Result<Vec<u8>, ControlError> {
    let mut frame = Header { version: VERSION, length: 0 }.to_bytes().to_vec();
    options(limit).serialize_into(&mut frame, message).map_err(|e| match *e {
        bincode::ErrorKind::SizeLimit => ControlError::TooLong { length: u64::from(limit) + 1, limit },
        other => ControlError::Malformed(other.to_string()),
    })?;
    let length = u32::try_from(frame.len() - HEADER_BYTES).expect("the limit is a u32");
    frame[..HEADER_BYTES].copy_from_slice(&Header { version: VERSION, length }.to_bytes());
    Ok(frame)
}

/// A frame's body. Never allocates more than a small multiple of `body.len()` or serde's cautious 1 MiB at a time.
pub fn decode<T: DeserializeOwned>(body: &[u8], limit: u32) -> Result<T, ControlError> {
    options(limit).deserialize(body).map_err(|e| ControlError::Malformed(e.to_string()))
}

/// Reads one frame; blocks as long as `stream` does.
pub fn read<T: DeserializeOwned>(stream: &mut impl Read, limit: u32) -> Result<T, ControlError> {
    let mut header = [0; HEADER_BYTES];
    stream.read_exact(&mut header)?;
    let mut body = vec![0; Header::from_bytes(header).check(limit)?];
    stream.read_exact(&mut body)?;
    decode(&body, limit)
}

/// Asks the daemon behind the control socket `path` one thing; no read or write takes longer than `timeout`.
pub fn ask(path: &Path, request: &ControlRequest, timeout: Duration) -> Result<ControlAnswer, ControlError> {
    let mut stream = UnixStream::connect(path)
        .map_err(|source| ControlError::Connect { path: path.display().to_string(), source })?;
    stream.set_read_timeout(Some(timeout))?;
    stream.set_write_timeout(Some(timeout))?;
    stream.write_all(&encode(request, REQUEST_BYTES_MAX)?)?;
    match read(&mut stream, ANSWER_BYTES_MAX)? {
        ControlAnswer::Refused(refusal) => Err(ControlError::Refused(refusal)),
        answer => Ok(answer),
    }
}

/// The daemon's [`Status`].
pub fn status(path: &Path, timeout: Duration) -> Result<Status, ControlError> {
    match ask(path, &ControlRequest::Status, timeout)? {
        ControlAnswer::Status(status) => Ok(*status),
        _ => Err(ControlError::Unexpected),
    }
}

/// The daemon's metrics in Prometheus' text format.
pub fn metrics(path: &Path, timeout: Duration) -> Result<String, ControlError> {
    match ask(path, &ControlRequest::Metrics, timeout)? {
        ControlAnswer::Metrics(text) => Ok(text),
        _ => Err(ControlError::Unexpected),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn text() -> impl Strategy<Value = String> {
        proptest::collection::vec(any::<char>(), 0..24).prop_map(String::from_iter)
    }

    fn percentiles() -> impl Strategy<Value = Option<Percentiles>> {
        proptest::option::of((0.0..1e3, 0.0..1e3).prop_map(|(p50_s, p99_s)| Percentiles { p50_s, p99_s }))
    }

    fn statuses() -> impl Strategy<Value = Status> {
        let model =
            (text(), text(), any::<u64>(), any::<u32>()).prop_map(|(name, path, parameters, vocabulary)| ModelStatus {
                name,
                path,
                architecture: "llama".into(),
                parameters,
                quantisation: "Q4_1".into(),
                weight_bytes: parameters / 2,
                vocabulary,
                context_max: 2048,
                scheduler: "continuous".into(),
            });
        let client = (any::<u32>(), any::<u64>(), 0.0..1e9).prop_map(|(pid, session, connected_s)| ClientStatus {
            pid,
            uid: pid ^ 7,
            session,
            requests_in_flight: 3,
            connected_s,
            tokens_out: session / 3,
        });
        let counts = || proptest::collection::vec((text(), any::<u64>()), 0..5);
        (
            text(),
            prop_oneof![Just(DaemonState::Loading), Just(DaemonState::Ready), Just(DaemonState::Draining)],
            proptest::option::of(model),
            (counts(), counts()),
            (percentiles(), percentiles(), percentiles()),
            proptest::collection::vec(client, 0..20),
        )
            .prop_map(|(version, state, model, (finished, rejected), latency, clients)| Status {
                version,
                pid: 1,
                uptime_s: 0.5,
                state,
                device: "cpu".into(),
                model,
                load: LoadStatus { waiting: 1, running: 2, running_max: 3, waiting_max: 4 },
                kv: KvStatus { total: 9, free: 2, cached: 3, owned: 4, block_tokens: 16, bytes: 1 << 40 },
                rate: RateStatus { prompt_tokens_per_s: 1.0, output_tokens_per_s: 2.0, steps_per_s: 3.0 },
                totals: Totals { accepted: 7, finished, rejected, ..Totals::default() },
                latency: LatencyStatus {
                    window_s: 60.0,
                    first_token: latency.0,
                    inter_token: latency.1,
                    end_to_end: latency.2,
                },
                clients_total: clients.len() as u64,
                clients,
            })
    }

    proptest! {
        #[test]
        fn an_answer_comes_back_as_it_went(status in statuses()) {
            let answer = ControlAnswer::Status(Box::new(status));
            let frame = encode(&answer, ANSWER_BYTES_MAX).unwrap();
            let back: ControlAnswer = read(&mut frame.as_slice(), ANSWER_BYTES_MAX).unwrap();
            prop_assert_eq!(back, answer);
        }

        /// Cut short, lengthened or with one byte changed: an error or another message, never a panic.
        #[test]
        fn a_damaged_answer_is_survived(status in statuses(), at in any::<prop::sample::Index>(), with in any::<u8>(), cut in any::<prop::sample::Index>()) {
            let frame = encode(&ControlAnswer::Status(Box::new(status)), ANSWER_BYTES_MAX).unwrap();
            let mut body = frame[HEADER_BYTES..].to_vec();
            let short = &body[..cut.index(body.len())];
            prop_assert!(decode::<ControlAnswer>(short, ANSWER_BYTES_MAX).is_err());
            let index = at.index(body.len());
            body[index] = with;
            let _ = decode::<ControlAnswer>(&body, ANSWER_BYTES_MAX);
            body = frame[HEADER_BYTES..].to_vec();
            body.push(with);
            prop_assert!(decode::<ControlAnswer>(&body, ANSWER_BYTES_MAX).is_err());
        }

        #[test]
        fn arbitrary_bytes_are_survived(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
            let _ = decode::<ControlRequest>(&bytes, REQUEST_BYTES_MAX);
            let _ = decode::<ControlAnswer>(&bytes, ANSWER_BYTES_MAX);
            let _ = read::<ControlAnswer>(&mut bytes.as_slice(), ANSWER_BYTES_MAX);
        }

        #[test]
        fn a_header_comes_back_as_it_went(version in any::<u16>(), length in any::<u32>()) {
            let header = Header { version, length };
            prop_assert_eq!(Header::from_bytes(header.to_bytes()), header);
        }
    }

    #[test]
    fn the_bytes_of_a_request_stay_what_they_are() {
        assert_eq!(encode(&ControlRequest::Status, REQUEST_BYTES_MAX).unwrap(), [1, 0, 4, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(encode(&ControlRequest::Metrics, REQUEST_BYTES_MAX).unwrap(), [1, 0, 4, 0, 0, 0, 1, 0, 0, 0]);
    }

    #[test]
    fn limits_hold_on_both_sides() {
        let long = ControlAnswer::Metrics("x".repeat(REQUEST_BYTES_MAX as usize));
        assert!(matches!(encode(&long, REQUEST_BYTES_MAX), Err(ControlError::TooLong { .. })));
        let frame = encode(&long, ANSWER_BYTES_MAX).unwrap();
        let read = read::<ControlAnswer>(&mut frame.as_slice(), REQUEST_BYTES_MAX);
        assert!(matches!(read, Err(ControlError::TooLong { .. })));
    }

    #[test]
    fn another_version_is_named() {
        let mut frame = encode(&ControlRequest::Status, REQUEST_BYTES_MAX).unwrap();
        frame[0] = 9;
        let read = read::<ControlRequest>(&mut frame.as_slice(), REQUEST_BYTES_MAX);
        assert!(matches!(read, Err(ControlError::Version { theirs: 9, ours: VERSION })));
    }

    #[test]
    fn nobody_at_the_path_is_its_own_error() {
        let error = status(Path::new("/nonexistent/control.sock"), Duration::from_secs(1)).unwrap_err();
        assert!(matches!(error, ControlError::Connect { .. }), "{error}");
    }
}
