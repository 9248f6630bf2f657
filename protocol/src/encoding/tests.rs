use super::*;
use proptest::prelude::*;

fn prompt() -> impl Strategy<Value = Prompt> {
    let message = (".{1,20}", ".{0,60}").prop_map(|(role, content)| ChatMessage { role, content });
    prop_oneof![
        any::<String>().prop_map(Prompt::Text),
        proptest::collection::vec(any::<u32>(), 0..50).prop_map(Prompt::Tokens),
        proptest::collection::vec(message, 1..6).prop_map(Prompt::Chat),
    ]
}

fn sampling() -> impl Strategy<Value = SamplingParams> {
    let floats = proptest::collection::vec(-20.0f32..200.0, 6);
    let words = (any::<u32>(), any::<u32>(), any::<u32>(), any::<bool>(), any::<Option<u64>>());
    let ids = proptest::collection::vec(any::<u32>(), 0..=limits::STOP_TOKEN_IDS_MAX);
    let stop = proptest::collection::vec(".{0,20}", 0..=limits::STOP_STRINGS_MAX);
    (floats, words, ids, stop).prop_map(
        |(f, (top_k, max_tokens, min_tokens, ignore_eos, seed), stop_token_ids, stop)| SamplingParams {
            temperature: f[0],
            top_k,
            top_p: f[1],
            min_p: f[2],
            repetition_penalty: f[3],
            presence_penalty: f[4],
            frequency_penalty: f[5],
            seed,
            max_tokens,
            min_tokens,
            stop_token_ids,
            stop,
            ignore_eos,
        },
    )
}

proptest! {
    #[test]
    fn any_request_survives(prompt in prompt(), sampling in sampling()) {
        let request = GenerateRequest { prompt, sampling };
        let bytes = request.encode().unwrap();
        prop_assert!(bytes.len().is_multiple_of(8));
        prop_assert_eq!(GenerateRequest::decode(&bytes).unwrap(), request);
    }

    #[test]
    fn any_bytes_decode_or_are_refused(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = GenerateRequest::decode(&bytes);
    }

    /// Closer to the truth than random bytes: a request with some bytes changed and its end cut.
    #[test]
    fn damaged_requests_decode_or_are_refused(
        prompt in prompt(),
        sampling in sampling(),
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
        keep in any::<prop::sample::Index>(),
    ) {
        let mut bytes = GenerateRequest { prompt, sampling }.encode().unwrap();
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        bytes.truncate(keep.index(bytes.len() + 1));
        if let Ok(request) = GenerateRequest::decode(&bytes) {
            // What was understood is a request like any other. (NaN differs from itself, so compare the bytes.)
            let again = request.encode().unwrap();
            prop_assert_eq!(GenerateRequest::decode(&again).unwrap().encode().unwrap(), again);
        }
    }
}

/// One field, as a client in another language would write it.
fn field(tag: u16, flags: u16, value: &[u8]) -> Vec<u8> {
    let mut out = [tag.to_le_bytes(), flags.to_le_bytes()].concat();
    out.extend((value.len() as u32).to_le_bytes());
    out.extend(value);
    out.resize(out.len().next_multiple_of(8), 0);
    out
}

fn decode(fields: &[Vec<u8>]) -> Result<GenerateRequest, DecodeError> {
    GenerateRequest::decode(&fields.concat())
}

#[test]
fn a_request_written_by_hand_is_understood() {
    let request = decode(&[
        field(24, 1, &7u32.to_le_bytes()),
        field(3, 1, b"\x06\0\0\0systemBe brief."),
        field(3, 0, b"\x04\0\0\0userHi"),
        field(27, 1, b"\n\n"),
    ])
    .unwrap();
    let message = |role: &str, content: &str| ChatMessage { role: role.into(), content: content.into() };
    let mut expected = GenerateRequest::chat(vec![message("system", "Be brief."), message("user", "Hi")]).max_tokens(7);
    expected.sampling.stop = vec!["\n\n".into()];
    assert_eq!(request, expected);
}

#[test]
fn an_unknown_field_is_skipped_unless_required() {
    let text = field(1, 1, b"x");
    assert_eq!(decode(&[field(999, 0, b"news"), text.clone()]), Ok(GenerateRequest::text("x")));
    assert_eq!(decode(&[text.clone(), field(999, 1, b"news")]), Err(DecodeError::UnknownRequired { tag: 999 }));
    assert_eq!(decode(&[text, field(4, 1, b"")]), Err(DecodeError::UnknownRequired { tag: 4 }));
}

#[test]
fn each_fault_has_its_error() {
    let text = || field(1, 1, b"hello");
    assert_eq!(decode(&[]), Err(DecodeError::NoPrompt));
    assert_eq!(decode(&[field(16, 1, &[0; 4])]), Err(DecodeError::NoPrompt));
    assert_eq!(decode(&[text(), text()]), Err(DecodeError::Duplicate { tag: 1 }));
    assert_eq!(decode(&[text(), field(2, 1, &[0; 8])]), Err(DecodeError::Duplicate { tag: 2 }));
    assert_eq!(decode(&[text(), field(3, 1, &[0; 4])]), Err(DecodeError::Duplicate { tag: 3 }));
    assert_eq!(decode(&[field(3, 1, &[0; 4]), text()]), Err(DecodeError::Duplicate { tag: 1 }));
    let seed = || field(23, 1, &[0; 8]);
    assert_eq!(decode(&[text(), seed(), seed()]), Err(DecodeError::Duplicate { tag: 23 }));
    assert_eq!(decode(&[text(), field(16, 1, &[0; 8])]), Err(DecodeError::Form { tag: 16 }));
    assert_eq!(decode(&[field(2, 1, &[0; 7])]), Err(DecodeError::Form { tag: 2 }));
    assert_eq!(decode(&[field(3, 1, &[9, 0, 0, 0, b'a'])]), Err(DecodeError::Form { tag: 3 }));
    assert_eq!(decode(&[field(3, 1, &[255, 255, 255, 255])]), Err(DecodeError::Form { tag: 3 }));
    assert_eq!(decode(&[field(3, 1, &[0])]), Err(DecodeError::Form { tag: 3 }));
    assert_eq!(decode(&[text(), field(28, 1, &2u32.to_le_bytes())]), Err(DecodeError::Form { tag: 28 }));
    assert_eq!(decode(&[field(1, 1, &[0xff])]), Err(DecodeError::Utf8 { tag: 1 }));
    assert_eq!(decode(&[text(), field(1, 2, b"")]), Err(DecodeError::Reserved { at: 16 }));
    let mut padded = text();
    *padded.last_mut().unwrap() = 1;
    assert_eq!(decode(&[padded]), Err(DecodeError::Reserved { at: 0 }));
    let whole = text();
    for cut in 1..whole.len() {
        assert_eq!(GenerateRequest::decode(&whole[..cut]), Err(DecodeError::Truncated { at: 0 }), "{cut}");
    }
    let mut huge = text();
    huge[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
    assert_eq!(decode(&[huge]), Err(DecodeError::Truncated { at: 0 }));
}

#[test]
fn counts_are_bounded() {
    let text = field(1, 1, b"x");
    let stops = vec![field(27, 1, b"s"); limits::STOP_STRINGS_MAX + 1];
    assert_eq!(decode(&[vec![text.clone()], stops].concat()), Err(DecodeError::TooMany { tag: 27 }));
    let ids = field(26, 1, &vec![0; 4 * limits::STOP_TOKEN_IDS_MAX + 4]);
    assert_eq!(decode(&[text, ids]), Err(DecodeError::TooMany { tag: 26 }));
    let messages = vec![field(3, 1, b"\x01\0\0\0u"); limits::CHAT_MESSAGES_MAX + 1];
    assert_eq!(decode(&messages), Err(DecodeError::TooMany { tag: 3 }));
    let long = vec![0; limits::REQUEST_BYTES_MAX + 8];
    assert_eq!(GenerateRequest::decode(&long), Err(DecodeError::TooLong { bytes: long.len() }));
    let text = GenerateRequest::text("x".repeat(limits::REQUEST_BYTES_MAX));
    assert_eq!(text.encode(), Err(TooLong { bytes: limits::REQUEST_BYTES_MAX + 8 }));
}

#[test]
fn numbers_of_reasons_are_stable() {
    use crate::message::{FinishReason, Reject};
    for (number, reject) in (1..).zip(Reject::ALL) {
        assert_eq!((reject.number(), Reject::from_number(number)), (number, Some(reject)));
    }
    assert_eq!([0, 13, u32::MAX].map(Reject::from_number), [None; 3]);
    assert_eq!(FinishReason::from_number(3), Some(FinishReason::Length));
    assert_eq!([0, 5].map(FinishReason::from_number), [None; 2]);
}

#[test]
fn ranges_are_checked_and_named() {
    let field_of = |change: &dyn Fn(&mut SamplingParams)| {
        let mut request = GenerateRequest::text("");
        change(&mut request.sampling);
        request.validate().err().map(|e| e.field)
    };
    assert_eq!(field_of(&|_| ()), None);
    for bad in [f32::NAN, f32::INFINITY, -f32::INFINITY, -1.0, 101.0] {
        assert_eq!(field_of(&|s| s.temperature = bad), Some("temperature"));
        assert_eq!(field_of(&|s| s.top_p = bad), Some("top_p"));
        assert_eq!(field_of(&|s| s.min_p = bad), Some("min_p"));
        assert_eq!(field_of(&|s| s.repetition_penalty = bad), Some("repetition_penalty"));
        assert_eq!(field_of(&|s| s.presence_penalty = bad * 11.0), Some("presence_penalty"));
        assert_eq!(field_of(&|s| s.frequency_penalty = bad * 11.0), Some("frequency_penalty"));
    }
    assert_eq!(field_of(&|s| s.top_p = 0.0), Some("top_p"));
    assert_eq!(field_of(&|s| s.repetition_penalty = 0.0), Some("repetition_penalty"));
    assert_eq!(field_of(&|s| s.max_tokens = 0), None);
    assert_eq!(field_of(&|s| s.min_tokens = s.max_tokens + 1), Some("min_tokens"));
    assert_eq!(field_of(&|s| s.max_tokens = u32::MAX), Some("max_tokens"));
    assert_eq!(field_of(&|s| s.stop = vec![String::new()]), Some("stop"));
    assert_eq!(field_of(&|s| s.stop = vec!["x".repeat(257)]), Some("stop"));
    assert_eq!(field_of(&|s| s.stop = vec!["x".into(); 17]), Some("stop"));
    assert_eq!(field_of(&|s| s.stop_token_ids = vec![0; 129]), Some("stop_token_ids"));
    let error = GenerateRequest::chat(vec![]).validate().unwrap_err();
    assert_eq!(error.to_string(), "messages must be 1..=4096 messages");
    let nameless = ChatMessage { role: String::new(), content: "x".into() };
    assert_eq!(GenerateRequest::chat(vec![nameless]).validate().unwrap_err().field, "messages.role");
}
