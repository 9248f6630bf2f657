//! From what a client wrote to what the engine computes: decode, check, template, tokenize.
//!
//! This runs on worker threads, never on the engine's: a megabyte of text takes milliseconds to tokenize. The payload is
//! the private copy that the sessions thread took out of shared memory once; nothing here looks at shared memory.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Instant;

use llmd_protocol::message::{GenerateRequest, Prompt, Reject};

use crate::sequence::{NewSequence, Sampling};
use crate::sessions::{Job, Refusal, SessionKey, random};
use crate::text::chat_template::ChatTemplate;
use crate::text::tokenizer::Tokenizer;

/// Requests that may wait for a worker; the next one is answered `Busy`.
pub const QUEUE_MAX: usize = 1024;

/// A request that passed every check that needs no scheduler.
pub struct Submission {
    /// Whose.
    pub session: SessionKey,
    /// The client's number for it.
    pub request: u32,
    /// When it was taken from the ring.
    pub received: Instant,
    /// Set when the client has cancelled it meanwhile.
    pub cancelled: Arc<AtomicBool>,
    /// What the scheduler gets.
    pub sequence: NewSequence,
    /// Strings that end it.
    pub stop: Vec<String>,
}

/// What became of a request that was read.
pub enum Verdict {
    /// It passed.
    Admitted(Box<Submission>),
    /// It did not.
    Refused {
        /// Whose.
        session: SessionKey,
        /// The client's number for it.
        request: u32,
        /// Why.
        refusal: Refusal,
    },
    /// Its client had cancelled it already.
    Cancelled {
        /// Whose.
        session: SessionKey,
        /// The client's number for it.
        request: u32,
    },
}

/// Bytes of the longest text that stands for a single control token, taken generously: `<|start_header_id|>` has 19.
const CONTROL_TEXT_BYTES: usize = 64;
/// Unicode composition, which may come before tokenizing, makes a text at most this many times shorter.
const COMPOSITION: usize = 3;

/// What the checks need to know.
pub struct Intake {
    tokenizer: Arc<Tokenizer>,
    chat_template: Option<ChatTemplate>,
    /// Positions a sequence may have.
    context_max: usize,
    /// A longer text has more tokens than the context, whatever it says: it is not worth tokenizing.
    text_bytes_max: usize,
    /// Keys the root of each user's prefix cache; random for each start of the daemon.
    salt: std::hash::RandomState,
}

impl Intake {
    /// For a model's tokenizer, its chat template if it has a usable one, and the positions a sequence may have.
    pub fn new(tokenizer: Arc<Tokenizer>, chat_template: Option<ChatTemplate>, context_max: usize) -> Self {
        let token_bytes_max = tokenizer.token_bytes_max().max(CONTROL_TEXT_BYTES);
        let text_bytes_max = context_max.saturating_mul(token_bytes_max).saturating_mul(COMPOSITION);
        Self { tokenizer, chat_template, context_max, text_bytes_max, salt: std::hash::RandomState::new() }
    }

    /// Checks a request and turns it into a sequence.
    pub fn admit(&self, payload: &[u8], uid: u32) -> Result<(NewSequence, Vec<String>), Refusal> {
        let request = GenerateRequest::decode(payload).map_err(|e| Refusal::new(Reject::Malformed, e.to_string()))?;
        request.validate().map_err(|e| Refusal::new(Reject::InvalidParameter, e.to_string()))?;
        let prompt = self.prompt(request.prompt)?;
        if prompt.len() > self.context_max {
            return Err(Refusal::new(
                Reject::NeverFits,
                format!("the prompt has {} tokens, the context holds {}", prompt.len(), self.context_max),
            ));
        }
        let vocabulary = self.tokenizer.vocab_size() as u32;
        let params = request.sampling;
        let mut stop_token_ids = params.stop_token_ids;
        if let Some(&id) = stop_token_ids.iter().find(|&&id| id >= vocabulary) {
            return Err(Refusal::new(
                Reject::TokenOutOfVocabulary,
                format!("stop_token_ids has {id}, the vocabulary has {vocabulary} tokens"),
            ));
        }
        if !params.ignore_eos {
            stop_token_ids.extend_from_slice(self.tokenizer.eos_ids());
        }
        stop_token_ids.sort_unstable();
        stop_token_ids.dedup();
        let sampling = Sampling {
            temperature: params.temperature,
            top_k: params.top_k,
            top_p: params.top_p,
            min_p: params.min_p,
            repetition_penalty: params.repetition_penalty,
            presence_penalty: params.presence_penalty,
            frequency_penalty: params.frequency_penalty,
            seed: params.seed.unwrap_or_else(random),
            max_tokens: params.max_tokens,
            min_tokens: params.min_tokens,
            stop_token_ids,
        };
        Ok((NewSequence { prompt, sampling, cache_salt: self.cache_salt(uid) }, params.stop))
    }

    fn prompt(&self, prompt: Prompt) -> Result<Vec<u32>, Refusal> {
        let ids = match prompt {
            Prompt::Tokens(ids) => {
                let vocabulary = self.tokenizer.vocab_size() as u32;
                if let Some(&id) = ids.iter().find(|&&id| id >= vocabulary) {
                    return Err(Refusal::new(
                        Reject::TokenOutOfVocabulary,
                        format!("the prompt has token {id}, the vocabulary has {vocabulary} tokens"),
                    ));
                }
                ids
            }
            Prompt::Text(text) => {
                self.check_length(text.len())?;
                self.tokenizer.encode(&text, true)
            }
            Prompt::Chat(messages) => {
                let template = self
                    .chat_template
                    .as_ref()
                    .ok_or_else(|| Refusal::new(Reject::ChatTemplate, "the model has no usable chat template"))?;
                self.check_length(messages.iter().map(|m| m.content.len()).sum())?;
                let messages: Vec<(&str, &str)> =
                    messages.iter().map(|m| (m.role.as_str(), m.content.as_str())).collect();
                template
                    .encode(&self.tokenizer, &messages)
                    .map_err(|e| Refusal::new(Reject::ChatTemplate, e.to_string()))?
            }
        };
        if !ids.is_empty() {
            return Ok(ids);
        }
        // Nothing to read from: BOS alone is the empty text's beginning, where the model has one.
        self.tokenizer
            .bos()
            .map(|bos| vec![bos])
            .ok_or_else(|| Refusal::new(Reject::EmptyPrompt, "the prompt has no tokens and the model has no BOS"))
    }

    fn check_length(&self, bytes: usize) -> Result<(), Refusal> {
        if bytes <= self.text_bytes_max {
            return Ok(());
        }
        let detail = format!("a prompt of {bytes} bytes is too long for a context of {} tokens", self.context_max);
        Err(Refusal::new(Reject::NeverFits, detail))
    }

    /// Keyed by a secret of this process, so that nobody can choose a salt that meets another user's.
    fn cache_salt(&self, uid: u32) -> u64 {
        use std::hash::BuildHasher;
        self.salt.hash_one(uid)
    }
}

/// Starts `threads` workers that share the queue behind `jobs` and give every request's verdict to `answer`. They end when
/// every sender of jobs is dropped, or when `answer` says that nobody listens any more.
pub fn spawn_workers(
    threads: usize,
    intake: &Arc<Intake>,
    jobs: mpsc::Receiver<Job>,
    answer: impl Fn(Verdict) -> bool + Clone + Send + 'static,
) -> std::io::Result<Vec<JoinHandle<()>>> {
    let jobs = Arc::new(std::sync::Mutex::new(jobs));
    (0..threads)
        .map(|n| {
            let (intake, jobs, answer) = (Arc::clone(intake), Arc::clone(&jobs), answer.clone());
            std::thread::Builder::new().name(format!("llmd-intake-{n}")).spawn(move || {
                loop {
                    let job = match jobs.lock() {
                        Ok(receiver) => receiver.recv(),
                        Err(_) => return,
                    };
                    let Ok(job) = job else { return };
                    if !answer(work(&intake, job)) {
                        return;
                    }
                }
            })
        })
        .collect()
}

fn work(intake: &Intake, job: Job) -> Verdict {
    let Job { session, request, payload, received, cancelled, held: _held } = job;
    if cancelled.load(Ordering::Relaxed) {
        return Verdict::Cancelled { session: session.key, request };
    }
    // A defect in a tokenizer or a template is one request's failure, not the daemon's.
    let admitted = catch_unwind(AssertUnwindSafe(|| intake.admit(&payload, session.peer.uid))).unwrap_or_else(|_| {
        log::error!("session {}: the intake of a request panicked; the request is refused", session.key);
        Err(Refusal::new(Reject::Internal, "the request could not be read; the daemon's log has the details"))
    });
    match admitted {
        Ok((sequence, stop)) => Verdict::Admitted(Box::new(Submission {
            session: session.key,
            request,
            received,
            cancelled,
            sequence,
            stop,
        })),
        Err(refusal) => Verdict::Refused { session: session.key, request, refusal },
    }
}

#[cfg(test)]
pub(crate) mod tests;
