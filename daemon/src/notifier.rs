//! The thread that wakes parked clients, so that the engine thread publishes without a system call.
//!
//! Once per step the engine hands over the list of sessions it has published to. The notifier fences once, asks each
//! session's event index whether its client sleeps behind the new tail, and if so sends one byte. It also carries out
//! the closing of sessions that the engine has given up, since that too is a system call.

use std::io;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::JoinHandle;

use llmd_protocol::doorbell::SessionSocket;
use llmd_protocol::ring::Published;
use llmd_protocol::session::CompletionDoorbell;

use crate::metrics::Metrics;

/// One thing to do outside the engine thread.
pub enum Notice {
    /// New completions stand in the ring: wake the client if it sleeps.
    Published(Arc<CompletionDoorbell>, Published),
    /// The session is given up: the sessions thread sees the end of its socket and closes it, saying why.
    Close(SessionSocket),
}

/// The engine's end. Sending never blocks; the notifier is faster than the engine by orders of magnitude and the number
/// of notices per step is bounded by the number of sessions.
#[derive(Clone)]
pub struct Notifier {
    sender: mpsc::Sender<Vec<Notice>>,
}

impl Notifier {
    /// Starts the thread. It ends when every `Notifier` is dropped.
    pub fn spawn(metrics: Arc<Metrics>) -> io::Result<(Self, JoinHandle<()>)> {
        let (sender, receiver) = mpsc::channel::<Vec<Notice>>();
        let thread =
            std::thread::Builder::new().name("llmd-notifier".into()).spawn(move || run(&receiver, &metrics))?;
        Ok((Self { sender }, thread))
    }

    /// Hands over what one step produced.
    pub fn send(&self, notices: Vec<Notice>) {
        if !notices.is_empty() {
            // The receiver lives as long as any sender; if its thread has panicked the process is about to end.
            let _ = self.sender.send(notices);
        }
    }
}

fn run(receiver: &mpsc::Receiver<Vec<Notice>>, metrics: &Metrics) {
    while let Ok(notices) = receiver.recv() {
        // Pairs with the client's fence between storing its wake request and loading the tail once more: either it sees
        // our tail, or we see its request. One fence serves the whole batch, since all tails were stored before it.
        CompletionDoorbell::fence();
        for notice in &notices {
            match notice {
                Notice::Published(doorbell, published) => {
                    if doorbell.needs_wake(*published) {
                        metrics.wakes(1);
                        // A client that is gone is noticed by the sessions thread, which polls the same socket.
                        doorbell.ring();
                    }
                }
                Notice::Close(socket) => socket.stop_listening(),
            }
        }
    }
}
