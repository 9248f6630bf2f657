//! One request in flight.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures_core::Stream;
use llmd_protocol::message::{FinishReason, Usage};

use crate::error::Error;
use crate::inbox::{Event, Inbox};
use crate::session::SessionHandle;

/// The events of one request, as a blocking iterator and as a [`Stream`]. The last item is [`Event::Done`] or an
/// error; then it ends. Dropping it earlier cancels the request.
#[derive(Debug)]
#[must_use = "dropping a generation cancels it"]
pub struct Generation {
    session: Arc<SessionHandle>,
    id: u32,
    inbox: Arc<Inbox>,
    ended: bool,
}

/// A whole generation, collected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The generated text.
    pub text: String,
    /// The generated ids.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub reason: FinishReason,
    /// What it used.
    pub usage: Usage,
}

impl Generation {
    pub(crate) fn new(session: Arc<SessionHandle>, id: u32, inbox: Arc<Inbox>) -> Self {
        Self { session, id, inbox, ended: false }
    }

    /// The request's id on its session, as the daemon's log and `llmctl` show it.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Asks the daemon to end the request. Events go on until the last, mostly `Done` with the reason `Cancelled`.
    pub fn cancel(&self) {
        if !self.session.is_forked() {
            self.session.cancel(self.id);
        }
    }

    /// A handle that cancels this request from another thread.
    pub fn canceller(&self) -> Canceller {
        Canceller { session: self.session.clone(), id: self.id }
    }

    /// Waits for the next event no longer than `timeout`. `Pending` says that none came in time; the request goes on.
    pub fn next_within(&mut self, timeout: Duration) -> Poll<Option<Result<Event, Error>>> {
        if let Some(over) = self.over() {
            return Poll::Ready(over);
        }
        // A time too far away to be said is for ever.
        match self.inbox.take(Instant::now().checked_add(timeout)) {
            Some(event) => Poll::Ready(Some(self.seen(event))),
            None => Poll::Pending,
        }
    }

    /// Waits for the next event without blocking the thread. (With `StreamExt` in scope `next()` would be ambiguous,
    /// because this type is an iterator too.)
    pub async fn next_event(&mut self) -> Option<Result<Event, Error>> {
        std::future::poll_fn(|context| Pin::new(&mut *self).poll_next(context)).await
    }

    /// Waits for the end and returns the text.
    pub fn text(self) -> Result<String, Error> {
        Ok(self.answer()?.text)
    }

    /// Waits for the end and returns everything.
    pub fn answer(self) -> Result<Answer, Error> {
        let (mut text, mut tokens) = (String::new(), Vec::new());
        for event in self {
            match event? {
                Event::Accepted { .. } => {}
                Event::Tokens(ids) => tokens.extend_from_slice(&ids),
                Event::Text(piece) => text.push_str(&piece),
                Event::Done { reason, usage } => {
                    return Ok(Answer { text, tokens, reason, usage });
                }
            }
        }
        // Only a generation that was read to its end before has nothing to say here.
        Err(Error::Protocol("the generation had ended before".into()))
    }

    /// What to answer without looking into the inbox, if anything.
    fn over(&mut self) -> Option<Option<Result<Event, Error>>> {
        if self.ended {
            return Some(None);
        }
        // Before the lock: the reading thread may have held it at the moment of the fork, for ever.
        if self.session.is_forked() {
            self.ended = true;
            return Some(Some(Err(Error::Forked)));
        }
        None
    }

    fn seen(&mut self, event: Result<Event, Error>) -> Result<Event, Error> {
        self.ended = matches!(event, Err(_) | Ok(Event::Done { .. }));
        event
    }
}

impl Iterator for Generation {
    type Item = Result<Event, Error>;

    /// Waits for the next event.
    fn next(&mut self) -> Option<Self::Item> {
        if let Some(over) = self.over() {
            return over;
        }
        let event = self.inbox.take(None)?;
        Some(self.seen(event))
    }
}

impl Stream for Generation {
    type Item = Result<Event, Error>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(over) = self.over() {
            return Poll::Ready(over);
        }
        self.inbox.poll(context.waker()).map(|event| Some(self.seen(event)))
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        if !self.ended && !self.session.is_forked() {
            self.inbox.abandon();
            self.session.cancel(self.id);
        }
    }
}

/// Cancels one request, from anywhere. See [`Generation::canceller`].
#[derive(Debug, Clone)]
pub struct Canceller {
    session: Arc<SessionHandle>,
    id: u32,
}

impl Canceller {
    /// Asks the daemon to end the request; nothing happens if it has ended.
    pub fn cancel(&self) {
        if !self.session.is_forked() {
            self.session.cancel(self.id);
        }
    }
}
