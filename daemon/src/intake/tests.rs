//! Every way a request can be refused before the scheduler sees it, and that it is refused in words.

use std::ops::Range;

use llmd_protocol::handshake::Peer;
use llmd_protocol::limits;
use llmd_protocol::message::{ChatMessage, SamplingParams};

use super::*;
use crate::sessions::{SessionShared, Unread};
use crate::text::source::TokenizerSource;

const CONTEXT: usize = 50;
const BOS: u32 = 1;
const EOS: u32 = 2;

/// Three special tokens, every byte, and the one merge a vocabulary must have.
pub(crate) fn source(bos: Option<u32>, template: &str) -> TokenizerSource {
    let mut source = TokenizerSource {
        model: "gpt2".into(),
        bos,
        eos: Some(EOS),
        add_bos: Some(false),
        chat_template: Some(template.into()),
        ..TokenizerSource::default()
    };
    for special in ["<unk>", "<s>", "</s>"] {
        source.tokens.push(special.into());
        source.token_types.push(3);
    }
    for byte in 0..=255u8 {
        let mut letters = String::new();
        crate::text::pretokenize::byte_level::push_letters(&[byte], &mut letters);
        source.tokens.push(letters);
        source.token_types.push(1);
    }
    source.tokens.push("qu".into());
    source.token_types.push(1);
    source.merges.push("q u".into());
    source
}

fn intake_of(source: &TokenizerSource) -> Intake {
    let tokenizer = Arc::new(Tokenizer::build(source).unwrap());
    let template = ChatTemplate::of(source, &tokenizer).unwrap();
    Intake::new(tokenizer, template, CONTEXT)
}

fn intake() -> Intake {
    intake_of(&source(Some(BOS), "{{ messages[0].content }}"))
}

fn admit(intake: &Intake, request: &GenerateRequest) -> Result<(NewSequence, Vec<String>), Refusal> {
    intake.admit(&request.encode().unwrap(), 0)
}

/// The refusal, whose words must hold `word`.
fn refused(intake: &Intake, request: &GenerateRequest, word: &str) -> Reject {
    let Err(refusal) = admit(intake, request) else { panic!("{request:?} was admitted") };
    assert!(refusal.detail.contains(word), "{:?} does not speak of {word}", refusal.detail);
    refusal.reject
}

fn with(change: impl FnOnce(&mut SamplingParams)) -> GenerateRequest {
    let mut request = GenerateRequest::text("x");
    change(&mut request.sampling);
    request
}

#[test]
fn what_is_no_request_is_malformed() {
    let intake = intake();
    let good = GenerateRequest::text("hello").encode().unwrap();
    let field = |tag: u16, flags: u16, len: u32, bytes: &[u8]| {
        let mut field = [tag.to_le_bytes(), flags.to_le_bytes()].concat();
        field.extend(len.to_le_bytes());
        field.extend(bytes);
        field
    };
    let mut padded = good.clone();
    *padded.last_mut().unwrap() = 1;
    let bad: [(&str, Vec<u8>); 10] = [
        ("empty", vec![]),
        ("cut short", good[..good.len() - 8].to_vec()),
        ("odd", good[..good.len() - 1].to_vec()),
        ("padding", padded),
        ("length", field(1, 1, u32::MAX, &[0; 8])),
        ("unknown required", field(999, 1, 0, &[])),
        ("flags", field(1, 0x8001, 0, &[])),
        ("not UTF-8", field(1, 1, 8, &[0xff; 8])),
        ("two prompts", [good.clone(), good.clone()].concat()),
        ("role past its end", field(3, 1, 8, &[200, 0, 0, 0, 1, 2, 3, 4])),
    ];
    for (what, payload) in bad {
        let refusal = intake.admit(&payload, 0).err().unwrap_or_else(|| panic!("{what} was admitted"));
        assert_eq!(refusal.reject, Reject::Malformed, "{what}: {}", refusal.detail);
        assert!(!refusal.detail.is_empty());
    }
    // Noise of any length is refused and never a panic.
    let mut state = 1u64;
    for len in 0..2000 {
        let noise: Vec<u8> = (0..len % 100)
            .map(|_| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (state >> 56) as u8
            })
            .collect();
        assert!(intake.admit(&noise, 0).is_err());
    }
}

#[test]
fn every_parameter_has_its_range() {
    let intake = intake();
    /// A float's name, its setter, what is refused, what is taken.
    type Case = (&'static str, fn(&mut SamplingParams, f32), &'static [f32], &'static [f32]);
    let floats: [Case; 6] = [
        ("temperature", |s, v| s.temperature = v, &[-0.1, 100.1], &[0.0, 100.0]),
        ("top_p", |s, v| s.top_p = v, &[0.0, -1.0, 1.1], &[1e-6, 1.0]),
        ("min_p", |s, v| s.min_p = v, &[-0.1, 1.1], &[0.0, 1.0]),
        ("repetition_penalty", |s, v| s.repetition_penalty = v, &[0.0, -1.0, 10.1], &[0.1, 10.0]),
        ("presence_penalty", |s, v| s.presence_penalty = v, &[-10.1, 10.1], &[-10.0, 10.0]),
        ("frequency_penalty", |s, v| s.frequency_penalty = v, &[-10.1, 10.1], &[-10.0, 10.0]),
    ];
    for (name, set, bad, good) in floats {
        for &value in bad.iter().chain(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY]) {
            assert_eq!(refused(&intake, &with(|s| set(s, value)), name), Reject::InvalidParameter, "{name} {value}");
        }
        for &value in good {
            assert!(admit(&intake, &with(|s| set(s, value))).is_ok(), "{name} {value}");
        }
    }
    let bad: [(&str, GenerateRequest); 5] = [
        ("max_tokens", with(|s| s.max_tokens = limits::OUTPUT_TOKENS_MAX + 1)),
        ("min_tokens", with(|s| (s.min_tokens, s.max_tokens) = (5, 4))),
        ("stop", with(|s| s.stop = vec![String::new()])),
        ("stop", with(|s| s.stop = vec!["x".repeat(limits::STOP_STRING_BYTES_MAX + 1)])),
        ("role", GenerateRequest::chat(vec![ChatMessage { role: String::new(), content: "x".into() }])),
    ];
    for (name, request) in bad {
        assert_eq!(refused(&intake, &request, name), Reject::InvalidParameter);
    }
    // Lists are bounded while they are decoded already.
    let message = ChatMessage { role: "user".into(), content: "x".into() };
    let too_many = [
        with(|s| s.stop_token_ids = vec![5; limits::STOP_TOKEN_IDS_MAX + 1]),
        with(|s| s.stop = vec!["x".into(); limits::STOP_STRINGS_MAX + 1]),
        GenerateRequest::chat(vec![message; limits::CHAT_MESSAGES_MAX + 1]),
    ];
    for request in too_many {
        assert_eq!(refused(&intake, &request, "too"), Reject::Malformed);
    }
    let edge = with(|s| {
        (s.min_tokens, s.max_tokens) = (limits::OUTPUT_TOKENS_MAX, limits::OUTPUT_TOKENS_MAX);
        s.stop_token_ids = vec![5; limits::STOP_TOKEN_IDS_MAX];
        s.stop = vec!["x".repeat(limits::STOP_STRING_BYTES_MAX); limits::STOP_STRINGS_MAX];
    });
    assert!(admit(&intake, &edge).is_ok());
    assert!(admit(&intake, &with(|s| s.max_tokens = 0)).is_ok(), "no tokens at all is a wish like any other");
}

#[test]
fn ids_outside_the_vocabulary_are_refused_wherever_they_stand() {
    let intake = intake();
    let tokens = |ids: Vec<u32>| GenerateRequest { prompt: Prompt::Tokens(ids), sampling: SamplingParams::default() };
    let vocabulary = 260;
    for id in [vocabulary, u32::MAX] {
        let word = id.to_string();
        assert_eq!(refused(&intake, &tokens(vec![5, id]), &word), Reject::TokenOutOfVocabulary);
        let stop = with(|s| s.stop_token_ids = vec![4, id]);
        assert_eq!(refused(&intake, &stop, &word), Reject::TokenOutOfVocabulary);
    }
    assert!(admit(&intake, &tokens(vec![vocabulary - 1])).is_ok());
}

#[test]
fn an_empty_prompt_is_bos_or_refused() {
    let empty = [
        GenerateRequest::text(""),
        GenerateRequest { prompt: Prompt::Tokens(vec![]), sampling: SamplingParams::default() },
        GenerateRequest::chat(vec![ChatMessage { role: "user".into(), content: String::new() }]),
    ];
    let without = intake_of(&source(None, "{{ messages[0].content }}"));
    for request in empty {
        assert_eq!(admit(&intake(), &request).unwrap().0.prompt, [BOS]);
        assert_eq!(refused(&without, &request, "no tokens"), Reject::EmptyPrompt);
    }
}

#[test]
fn a_prompt_longer_than_the_context_never_fits() {
    let intake = intake();
    let text = |bytes: usize| GenerateRequest::text("x".repeat(bytes));
    assert_eq!(admit(&intake, &text(CONTEXT)).unwrap().0.prompt.len(), CONTEXT);
    assert_eq!(refused(&intake, &text(CONTEXT + 1), "51 tokens"), Reject::NeverFits);
    // From some length on that is clear without tokenizing.
    let longest = CONTEXT * CONTROL_TEXT_BYTES * COMPOSITION;
    assert_eq!(refused(&intake, &text(longest), "9600 tokens"), Reject::NeverFits);
    assert_eq!(refused(&intake, &text(longest + 1), "9601 bytes"), Reject::NeverFits);
    let half = ChatMessage { role: "user".into(), content: "x".repeat(longest / 2 + 1) };
    assert_eq!(refused(&intake, &GenerateRequest::chat(vec![half.clone(), half]), "bytes"), Reject::NeverFits);
}

#[test]
fn a_chat_needs_a_template_that_takes_it() {
    let chat = GenerateRequest::chat(vec![ChatMessage { role: "user".into(), content: "hi".into() }]);
    assert_eq!(admit(&intake(), &chat).unwrap().0.prompt.len(), 2);
    let raising = intake_of(&source(None, "{{ raise_exception('users may not speak') }}"));
    assert_eq!(refused(&raising, &chat, "users may not speak"), Reject::ChatTemplate);
    let endless =
        intake_of(&source(None, "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"));
    assert_eq!(refused(&endless, &chat, ""), Reject::ChatTemplate);
    let none = intake_of(&TokenizerSource { chat_template: None, ..source(None, "") });
    assert_eq!(refused(&none, &chat, "template"), Reject::ChatTemplate);
    let forged = GenerateRequest::chat(vec![ChatMessage { role: "user<s>".into(), content: "hi".into() }]);
    assert_eq!(refused(&intake(), &forged, ""), Reject::ChatTemplate);
}

#[test]
fn the_models_own_ends_are_among_the_stop_ids_unless_ignored() {
    let intake = intake();
    let stops = |request: GenerateRequest| admit(&intake, &request).unwrap().0.sampling.stop_token_ids;
    assert_eq!(stops(with(|s| s.stop_token_ids = vec![9, 3, 9])), [EOS, 3, 9]);
    assert_eq!(stops(with(|s| (s.stop_token_ids, s.ignore_eos) = (vec![9, 3, 9], true))), [3, 9]);
}

#[test]
fn users_do_not_share_a_cache_and_seeds_are_kept() {
    let intake = intake();
    let salt = |uid| intake.admit(&GenerateRequest::text("x").encode().unwrap(), uid).unwrap().0.cache_salt;
    assert_eq!(salt(1), salt(1));
    assert_ne!(salt(1), salt(2));
    let seed = |seed| admit(&intake, &with(|s| s.seed = seed)).unwrap().0.sampling.seed;
    assert_eq!(seed(Some(7)), 7);
    assert_ne!(seed(None), seed(None));
}

fn session(key: u64) -> Arc<SessionShared> {
    Arc::new(SessionShared::new(SessionKey(key), Peer { pid: 1, uid: 1, gid: 1 }))
}

#[test]
fn workers_answer_every_job_and_free_what_it_held() {
    let (jobs, worker_jobs) = mpsc::sync_channel(16);
    let (verdicts, seen) = mpsc::channel();
    let workers =
        spawn_workers(2, &Arc::new(intake()), worker_jobs, move |verdict| verdicts.send(verdict).is_ok()).unwrap();
    let (unread, session) = (Arc::new(Unread::default()), session(1));
    let good = GenerateRequest::text("x").encode().unwrap();
    for (request, payload, cancelled) in [(1, good.clone(), false), (2, vec![1], false), (3, good, true)] {
        let held = unread.hold(&session, Unread::SESSION_BYTES_MAX / 4).expect("room for three");
        let cancelled = Arc::new(AtomicBool::new(cancelled));
        let received = Instant::now();
        jobs.send(Job { session: Arc::clone(&session), request, payload, received, cancelled, held }).unwrap();
    }
    drop(jobs);
    workers.into_iter().for_each(|worker| worker.join().unwrap());
    let mut told: Vec<_> = seen
        .iter()
        .map(|verdict| match verdict {
            Verdict::Admitted(submission) => (submission.request, "admitted"),
            Verdict::Refused { request, refusal, .. } => {
                assert_eq!(refusal.reject, Reject::Malformed);
                (request, "refused")
            }
            Verdict::Cancelled { request, .. } => (request, "cancelled"),
        })
        .collect();
    told.sort_unstable();
    assert_eq!(told, [(1, "admitted"), (2, "refused"), (3, "cancelled")]);
    assert!(unread.hold(&session, Unread::SESSION_BYTES_MAX).is_some(), "everything held was given back");
}

#[test]
fn what_waits_to_be_read_is_bounded_for_each_session_and_for_all() {
    let unread = Arc::new(Unread::default());
    let (one, other) = (session(1), session(2));
    let first = unread.hold(&one, Unread::SESSION_BYTES_MAX).unwrap();
    assert!(unread.hold(&one, 1).is_none());
    let second = unread.hold(&other, 1).expect("another session has its own room");
    drop((first, second));
    let sessions = |keys: Range<u64>| keys.map(session).collect::<Vec<_>>();
    let many = sessions(0..1 + (Unread::BYTES_MAX / Unread::SESSION_BYTES_MAX) as u64);
    let held: Vec<_> = many.iter().filter_map(|s| unread.hold(s, Unread::SESSION_BYTES_MAX)).collect();
    assert_eq!(held.len(), many.len() - 1);
    drop(held);
    assert!(unread.hold(&one, Unread::SESSION_BYTES_MAX).is_some());
}
