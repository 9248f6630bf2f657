//! Where the reading thread puts what concerns one request, and where its owner waits for it.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::task::{Poll, Waker};
use std::time::Instant;

use llmd_protocol::completion::{Completion, TokenIds};
use llmd_protocol::limits::DETAIL_BYTES_MAX;
use llmd_protocol::message::{FinishReason, Reject, Usage};

use crate::error::Error;

/// One thing that happened to a request. In order: `Accepted`, then `Tokens` and `Text` as they come, then `Done`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The daemon took the request.
    Accepted {
        /// Tokens of the prompt after templating and tokenizing.
        prompt_tokens: u32,
    },
    /// One to four generated ids.
    Tokens(TokenIds),
    /// Generated text: whole characters. The texts of a generation joined are its whole text.
    Text(String),
    /// The request ended well; nothing follows.
    Done {
        /// Why it ended.
        reason: FinishReason,
        /// What it used.
        usage: Usage,
    },
}

/// The events of one request that its owner has not taken yet.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    state: Mutex<State>,
    arrived: Condvar,
}

#[derive(Debug, Default)]
struct State {
    events: VecDeque<Result<Event, Error>>,
    /// The last text in `events` goes on with the next TEXT record.
    text_goes_on: bool,
    /// The explanation of an ERROR still to come.
    detail: String,
    /// A thread waits on `arrived`.
    waiting: bool,
    /// A task waits.
    waker: Option<Waker>,
    /// Nobody wants the events any more.
    abandoned: bool,
    /// Something came since the last notify.
    touched: bool,
}

impl Inbox {
    /// Puts one record in. Returns true if the owner is to be notified after the batch and is not yet on the list.
    pub(crate) fn put(&self, completion: Completion) -> bool {
        let mut s = self.lock();
        match completion {
            _ if s.abandoned => return false,
            Completion::Accepted { prompt_tokens } => s.events.push_back(Ok(Event::Accepted { prompt_tokens })),
            Completion::Tokens { ids, .. } => s.events.push_back(Ok(Event::Tokens(ids))),
            Completion::Text(piece) => {
                let goes_on = std::mem::replace(&mut s.text_goes_on, piece.more_follows());
                match s.events.back_mut() {
                    // Slots of one text become one event, unless the owner took the first already.
                    Some(Ok(Event::Text(text))) if goes_on => text.push_str(piece.as_str()),
                    _ => s.events.push_back(Ok(Event::Text(piece.as_str().to_owned()))),
                }
            }
            Completion::Detail(piece) => {
                if s.detail.len() < DETAIL_BYTES_MAX {
                    s.detail.push_str(piece.as_str());
                }
                return false;
            }
            Completion::Done { reason, usage } => s.events.push_back(Ok(Event::Done { reason, usage })),
            Completion::Error { number } => {
                let detail = std::mem::take(&mut s.detail);
                let error = match Reject::from_number(number) {
                    Some(reject) => Error::Rejected { reject, detail },
                    None => Error::Protocol(format!("rejected for reason {number}, which this version does not know")),
                };
                s.events.push_back(Err(error));
            }
        }
        !std::mem::replace(&mut s.touched, true)
    }

    /// Ends the request from this side.
    pub(crate) fn fail(&self, error: Error) {
        let mut s = self.lock();
        if !s.abandoned {
            s.events.push_back(Err(error));
        }
        drop(s);
        self.notify();
    }

    /// Wakes who waits.
    pub(crate) fn notify(&self) {
        let mut s = self.lock();
        s.touched = false;
        let (waiting, waker) = (std::mem::take(&mut s.waiting), s.waker.take());
        // Whoever wakes up shall not find the lock taken.
        drop(s);
        if waiting {
            self.arrived.notify_all();
        }
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Waits for the next event, up to the deadline if there is one.
    pub(crate) fn take(&self, deadline: Option<Instant>) -> Option<Result<Event, Error>> {
        let mut s = self.lock();
        loop {
            if let Some(event) = s.events.pop_front() {
                return Some(event);
            }
            s.waiting = true;
            s = match deadline {
                None => self.arrived.wait(s).unwrap_or_else(|e| e.into_inner()),
                Some(deadline) => {
                    let left = deadline.checked_duration_since(Instant::now())?;
                    self.arrived.wait_timeout(s, left).unwrap_or_else(|e| e.into_inner()).0
                }
            };
        }
    }

    /// The next event, or the waker is called when there is one.
    pub(crate) fn poll(&self, waker: &Waker) -> Poll<Result<Event, Error>> {
        let mut s = self.lock();
        match s.events.pop_front() {
            Some(event) => Poll::Ready(event),
            None => {
                match &mut s.waker {
                    Some(old) => old.clone_from(waker),
                    none => *none = Some(waker.clone()),
                }
                Poll::Pending
            }
        }
    }

    /// Throws away what came and what comes.
    pub(crate) fn abandon(&self) {
        let mut s = self.lock();
        s.abandoned = true;
        s.events.clear();
        s.waker = None;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code panics while holding it; if one did, the state would still be whole.
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }
}
