//! What a service links to talk to llmd, the inference daemon on the same host.
//!
//! A [`Client`] holds one session with the daemon: two pieces of shared memory and a Unix socket. Any number of threads may
//! share it and have requests in flight at once; each [`Generation`] yields the [`Event`]s of one request, as a blocking
//! iterator or as an async [`Stream`](futures_core::Stream). Dropping a `Generation` cancels its request.
//!
//! ```no_run
//! use llmd_client::{Client, Event, GenerateRequest};
//!
//! fn main() -> Result<(), llmd_client::Error> {
//!     let client = Client::connect_default()?;
//!     let request = GenerateRequest::text("The capital of France is").max_tokens(16);
//!     for event in client.generate(&request)? {
//!         match event? {
//!             Event::Text(text) => print!("{text}"),
//!             Event::Done { reason, usage } => println!("\n[{reason}, {} tokens]", usage.output_tokens),
//!             Event::Accepted { .. } | Event::Tokens(_) => {}
//!         }
//!     }
//!     Ok(())
//! }
//! ```
//!
//! What goes wrong before anything is sent is told at once:
//!
//! ```
//! use llmd_client::{Client, Error};
//!
//! let error = Client::connect("/nonexistent/llmd.sock").unwrap_err();
//! assert!(matches!(error, Error::NotRunning { .. }));
//! ```
//!
//! # Restarts
//! When the daemon goes away, requests in flight end with [`Error::DaemonRestarted`] (or [`Error::Disconnected`], if the
//! daemon ended this session on purpose), and the next [`Client::generate`] connects anew. Nothing is sent twice by itself.
//!
//! # Fork
//! A session belongs to the process that made it. In a forked child every call answers [`Error::Forked`], and neither the
//! child's calls nor its end disturb the parent; connect a new `Client` there. Descriptors are closed on exec.
//!
//! # Threads and memory
//! A session has one reading thread, asleep while nothing comes. Events wait in memory until they are taken: at most what
//! `max_tokens` allows, for each request in flight.

#![forbid(unsafe_code)]

mod client;
mod error;
mod generation;
mod inbox;
mod session;

pub use client::{Client, Options};
pub use error::Error;
pub use generation::{Answer, Canceller, Generation};
pub use inbox::Event;
pub use llmd_protocol::completion::TokenIds;
pub use llmd_protocol::handshake::Refusal;
pub use llmd_protocol::message::{
    ChatMessage, FinishReason, GenerateRequest, InvalidParameter, Prompt, Reject, SamplingParams, Usage,
};

/// Compiles the program that README shows.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
