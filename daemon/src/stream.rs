//! What the engine keeps of a request beside its sequence: where its answer goes, how far its text is, its timings.

use std::sync::Arc;
use std::time::Instant;

use crate::sequence::SequenceId;
use crate::sessions::SessionKey;
use crate::text::stream::TextStream;
use crate::text::tokenizer::Tokenizer;

/// One request's answer under way.
pub struct Stream {
    /// Whose.
    pub session: SessionKey,
    /// The client's number for it.
    pub request: u32,
    /// From ids to text, stop strings included.
    pub text: TextStream,
    /// Tokens delivered.
    pub tokens: u32,
    /// When it was taken from the ring.
    pub received: Instant,
    /// When it first got blocks.
    pub admitted: Option<Instant>,
    /// When its first token was sampled.
    pub first_token: Option<Instant>,
    /// When its latest token was sampled.
    pub last_token: Option<Instant>,
}

impl Stream {
    /// An answer of which nothing is there yet.
    pub fn new(
        session: SessionKey,
        request: u32,
        received: Instant,
        tokenizer: &Arc<Tokenizer>,
        prompt: &[u32],
        stop: &[String],
        min_tokens: u32,
    ) -> Self {
        Self {
            session,
            request,
            text: TextStream::new(Arc::clone(tokenizer), stop, min_tokens).after(prompt),
            tokens: 0,
            received,
            admitted: None,
            first_token: None,
            last_token: None,
        }
    }
}

/// All answers under way, by the place of their sequence in the scheduler's arena.
#[derive(Default)]
pub struct Streams {
    places: Vec<Option<(SequenceId, Stream)>>,
}

impl Streams {
    /// Adds the stream of a new sequence.
    pub fn insert(&mut self, id: SequenceId, stream: Stream) {
        let index = id.index as usize;
        if self.places.len() <= index {
            self.places.resize_with(index + 1, || None);
        }
        let previous = self.places[index].replace((id, stream));
        assert!(previous.is_none(), "a sequence's stream is taken out when the sequence ends");
    }

    /// The stream of a live sequence.
    ///
    /// # Panics
    /// When there is none: every live sequence has one, so its absence is a defect of the engine.
    pub fn get_mut(&mut self, id: SequenceId) -> &mut Stream {
        match self.places.get_mut(id.index as usize) {
            Some(Some((holder, stream))) if *holder == id => stream,
            _ => panic!("sequence {id:?} has no stream"),
        }
    }

    /// Takes the stream of an ended sequence out.
    ///
    /// # Panics
    /// As [`Streams::get_mut`].
    pub fn remove(&mut self, id: SequenceId) -> Stream {
        match self.places.get_mut(id.index as usize).map(|place| place.take_if(|(holder, _)| *holder == id)) {
            Some(Some((_, stream))) => stream,
            _ => panic!("sequence {id:?} has no stream"),
        }
    }
}
