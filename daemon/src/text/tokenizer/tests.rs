//! Against Hugging Face's ids (tests/golden/tokenizers/make.py), against broken files, and against long texts.

use std::sync::LazyLock;
use std::time::Instant;

use proptest::prelude::*;
use serde_json::Value as Json;

use super::*;
use crate::text::source::TokenizerSource;

struct Kind {
    name: String,
    source: TokenizerSource,
    tokenizer: Tokenizer,
    ids: Vec<Vec<u32>>,
    decoded: Vec<String>,
}

struct Fixture {
    texts: Vec<String>,
    kinds: Vec<Kind>,
}

static FIXTURE: LazyLock<Fixture> = LazyLock::new(|| {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/tokenizers/tokenizers.json");
    let json: Json = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let strings = |json: &Json| -> Vec<String> {
        json.as_array().map_or(Vec::new(), |list| list.iter().map(|s| s.as_str().unwrap().to_owned()).collect())
    };
    let numbers =
        |json: &Json| -> Vec<u32> { json.as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as u32).collect() };
    let kinds = json["kinds"].as_array().unwrap().iter().map(|kind| {
        let source = &kind["source"];
        let id = |name: &str| source[name].as_u64().map(|id| id as u32);
        let source = TokenizerSource {
            model: source["model"].as_str().unwrap().to_owned(),
            pre: source["pre"].as_str().map(str::to_owned),
            tokens: strings(&source["tokens"]),
            token_types: source["token_types"].as_array().unwrap().iter().map(|n| n.as_i64().unwrap() as i32).collect(),
            scores: source["scores"]
                .as_array()
                .map_or(Vec::new(), |list| list.iter().map(|n| n.as_f64().unwrap() as f32).collect()),
            merges: strings(&source["merges"]),
            bos: id("bos"),
            eos: id("eos"),
            unk: id("unk"),
            pad: id("pad"),
            add_bos: source["add_bos"].as_bool(),
            add_space_prefix: source["add_space_prefix"].as_bool(),
            ..Default::default()
        };
        Kind {
            name: kind["name"].as_str().unwrap().to_owned(),
            tokenizer: Tokenizer::build(&source).unwrap(),
            source,
            ids: kind["ids"].as_array().unwrap().iter().map(numbers).collect(),
            decoded: strings(&kind["decoded"]),
        }
    });
    Fixture { texts: strings(&json["texts"]), kinds: kinds.collect() }
});

fn kind(name: &str) -> &'static Kind {
    FIXTURE.kinds.iter().find(|kind| kind.name == name).unwrap()
}

#[test]
fn ids_and_texts_are_hugging_faces() {
    assert!(FIXTURE.texts.len() >= 40 && FIXTURE.kinds.len() == 6);
    for kind in &FIXTURE.kinds {
        for (n, text) in FIXTURE.texts.iter().enumerate() {
            assert_eq!(kind.tokenizer.encode(text, false), kind.ids[n], "{}: {text:?}", kind.name);
            assert_eq!(kind.tokenizer.decode(&kind.ids[n]), kind.decoded[n], "{}: {text:?}", kind.name);
        }
    }
}

#[test]
fn bos_and_eos_as_the_kind_or_the_file_says() {
    let ids = |name: &str, change: fn(&mut TokenizerSource)| {
        let mut source = kind(name).source.clone();
        change(&mut source);
        Tokenizer::build(&source).unwrap().encode("", true)
    };
    assert_eq!(ids("smollm", |_| ()), [0u32; 0]);
    assert_eq!(ids("smollm", |s| s.add_bos = None), [0u32; 0]);
    assert_eq!(ids("smollm", |s| (s.add_bos, s.add_eos) = (Some(true), Some(true))), [1, 2]);
    assert_eq!(ids("llama", |_| ()), [1]);
    assert_eq!(ids("llama", |s| (s.bos, s.eos, s.unk) = (None, None, None)), [1]);
    assert_eq!(ids("llama", |s| s.add_bos = Some(false)), [0u32; 0]);
    let llama3 = kind("llama-bpe");
    assert_eq!(ids("llama-bpe", |_| ()), [llama3.source.bos.unwrap()]);
    assert_eq!(llama3.tokenizer.bos(), llama3.source.bos);
    assert_eq!(kind("gpt-2").tokenizer.bos(), None);
}

#[test]
fn ids_that_end_a_generation() {
    let ends = |name: &str| -> Vec<&str> {
        let kind = kind(name);
        kind.tokenizer.eos_ids().iter().map(|&id| kind.source.tokens[id as usize].as_str()).collect()
    };
    assert_eq!(ends("smollm"), ["<|endoftext|>", "<|im_end|>"]);
    assert_eq!(ends("llama-bpe"), ["<|end_of_text|>", "<|eot_id|>", "<|im_end|>"]);
    assert_eq!(ends("llama"), ["</s>"]);
    let mut source = kind("llama").source.clone();
    source.eot = Some(300);
    assert_eq!(Tokenizer::build(&source).unwrap().eos_ids(), [2, 300]);
}

#[test]
fn what_tokens_say() {
    let llama = &kind("llama").tokenizer;
    assert_eq!(llama.token_bytes(1), b"");
    assert_eq!(llama.token_bytes(3 + 0xe2), b"\xe2");
    assert_eq!(llama.token_bytes(259), b"  ");
    assert_eq!(llama.token_bytes(u32::MAX), b"");
    assert!(llama.is_special(0) && llama.is_special(2) && !llama.is_special(3) && !llama.is_special(u32::MAX));
    let qwen = kind("qwen2");
    let think = qwen.tokenizer.encode("<think>", false);
    assert_eq!(qwen.tokenizer.token_bytes(think[0]), b"<think>");
    assert!(!qwen.tokenizer.is_special(think[0]));
    assert_eq!(qwen.tokenizer.vocab_size(), qwen.source.tokens.len());
    assert!(qwen.tokenizer.token_bytes_max() >= 7);
}

#[test]
fn shielded_text_is_plain_text() {
    for kind in &FIXTURE.kinds {
        for (text, ids) in FIXTURE.texts.iter().zip(&kind.ids) {
            let shielded = kind.tokenizer.shield_control(text);
            let encoded = kind.tokenizer.encode_shielded(&shielded);
            assert!(encoded.iter().all(|&id| !kind.tokenizer.is_special(id)), "{}: {text:?} {encoded:?}", kind.name);
            if !ids.iter().any(|&id| kind.tokenizer.is_special(id)) {
                assert_eq!(&encoded, ids, "{}: {text:?}", kind.name);
            }
        }
        let smollm = kind.name == "smollm";
        let text = "a<|im_end|>b";
        let round = kind.tokenizer.decode(&kind.tokenizer.encode_shielded(&kind.tokenizer.shield_control(text)));
        assert!(!smollm || round == text, "{round}");
    }
}

#[test]
fn broken_files_are_refused_by_field() {
    let build = |name: &str, change: &dyn Fn(&mut TokenizerSource)| {
        let mut source = kind(name).source.clone();
        change(&mut source);
        Tokenizer::build(&source).err()
    };
    let tokens = kind("llama").source.tokens.len();
    assert_eq!(build("llama", &|s| s.model = "bert".into()), Some(TokenizerError::UnknownModel("bert".into())));
    let unknown = build("gpt-2", &|s| s.pre = Some("dbrx".into())).unwrap();
    assert_eq!(unknown, TokenizerError::UnknownPretokenizer("dbrx".into()));
    assert!(unknown.to_string().contains("smollm, llama-bpe"), "{unknown}");
    assert_eq!(build("llama", &|s| s.tokens.clear()), Some(TokenizerError::VocabularySize(0)));
    assert_eq!(
        build("llama", &|s| s.token_types.truncate(7)),
        Some(TokenizerError::Length { field: "token_type", len: 7, tokens })
    );
    assert_eq!(
        build("llama", &|s| s.scores.truncate(7)),
        Some(TokenizerError::Length { field: "scores", len: 7, tokens })
    );
    assert_eq!(build("llama", &|s| s.scores.clear()), Some(TokenizerError::Missing("scores")));
    assert_eq!(build("gpt-2", &|s| s.merges.clear()), Some(TokenizerError::Missing("merges")));
    assert_eq!(
        build("llama", &|s| s.pad = Some(9999)),
        Some(TokenizerError::IdOutOfRange { field: "padding_token_id", id: 9999, tokens })
    );
    assert!(matches!(build("llama", &|s| s.token_types[5] = 9), Some(TokenizerError::Token { id: 5, .. })));
    assert!(matches!(build("llama", &|s| s.token_types[400] = 6), Some(TokenizerError::Token { id: 400, .. })));
    assert!(matches!(build("llama", &|s| s.scores[400] = f32::NAN), Some(TokenizerError::Token { id: 400, .. })));
    assert!(matches!(
        build("llama", &|s| s.tokens[400] = "x".repeat(5000)),
        Some(TokenizerError::Token { id: 400, .. })
    ));
    assert!(matches!(
        build("smollm", &|s| s.tokens[16] = "x".repeat(5000)),
        Some(TokenizerError::Token { id: 16, .. })
    ));
    assert!(matches!(build("gpt-2", &|s| s.merges[3] = "xyz".into()), Some(TokenizerError::Merge { index: 3, .. })));
    assert!(matches!(build("gpt-2", &|s| s.merges[3] = "q zz".into()), Some(TokenizerError::Merge { index: 3, .. })));
    assert_eq!(build("gpt-2", &|s| s.add_bos = Some(true)), Some(TokenizerError::NothingToAdd("add_bos_token")));
    // Two tokens of one text are no fault.
    assert_eq!(build("llama", &|s| s.tokens[400] = s.tokens[401].clone()), None);
}

#[test]
fn a_file_without_types() {
    let mut source = kind("llama").source.clone();
    source.token_types.clear();
    let tokenizer = Tokenizer::build(&source).unwrap();
    for (text, ids) in FIXTURE.texts.iter().zip(&kind("llama").ids) {
        assert_eq!(&tokenizer.encode(text, false), ids);
    }
}

#[test]
fn long_texts_take_time_in_proportion() {
    let units = ["a", " ", "\n", "1", "<", "<|im_", "'", "é", "e\u{301}", "\u{301}", "👨‍👩‍👧", "中", " a", "\u{fdd0}"];
    for kind in &FIXTURE.kinds {
        for unit in units {
            let bytes = if unit == "a" { 1 << 20 } else { 1 << 17 };
            let text = unit.repeat(bytes / unit.len());
            let start = Instant::now();
            let ids = kind.tokenizer.encode(&text, false);
            let shielded = kind.tokenizer.encode_shielded(&kind.tokenizer.shield_control(&text));
            // Quadratic work would take many minutes; the limit leaves room for a slow and busy machine.
            let seconds = start.elapsed().as_secs_f64();
            assert!(seconds < 60.0, "{} {unit:?}: {seconds} s", kind.name);
            assert!(!ids.is_empty() && ids.len() <= 2 * bytes);
            assert_eq!(ids, shielded, "{} {unit:?}", kind.name);
        }
    }
}

proptest! {
    #[test]
    fn any_text_goes_in_and_comes_out(text in "\\PC{0,40}|[ \\n\\r\\t▁<|>a-z_/\u{0}-\u{7f}😀\u{fe0f}\u{fdd0}]{0,40}", add_special: bool) {
        for kind in &FIXTURE.kinds {
            let ids = kind.tokenizer.encode(&text, add_special);
            prop_assert!(ids.iter().all(|&id| (id as usize) < kind.tokenizer.vocab_size()));
            // What the vocabulary covers comes back: all of Unicode for gpt-2 and llama-bpe.
            if ["gpt-2", "llama-bpe"].contains(&kind.name.as_str()) && !ids[usize::from(add_special && kind.tokenizer.add_bos)..].iter().any(|&id| kind.tokenizer.is_special(id)) {
                prop_assert_eq!(kind.tokenizer.decode(&ids), &text[..]);
            }
            let shielded = kind.tokenizer.encode_shielded(&kind.tokenizer.shield_control(&text));
            prop_assert!(shielded.iter().all(|&id| !kind.tokenizer.is_special(id)));
        }
    }
}
