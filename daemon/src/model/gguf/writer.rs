//! Writes small GGUF files, true and lying ones, for tests.

/// A file in the making. Keys and tensors keep the order in which they were first set.
#[derive(Debug, Clone)]
pub(crate) struct Writer {
    pub(crate) version: u32,
    pub(crate) alignment: usize,
    /// Key, value type and value, encoded.
    pub(crate) metadata: Vec<(String, Vec<u8>)>,
    pub(crate) tensors: Vec<Tensor>,
}

#[derive(Debug, Clone)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    /// Innermost first.
    pub(crate) dimensions: Vec<u64>,
    pub(crate) ty: u32,
    pub(crate) data: Vec<u8>,
    /// Said instead of the true offset.
    pub(crate) offset: Option<u64>,
}

impl Default for Writer {
    fn default() -> Self {
        Self { version: 3, alignment: 32, metadata: Vec::new(), tensors: Vec::new() }
    }
}

impl Writer {
    /// Sets a key to a value already encoded: its type and its bytes.
    pub(crate) fn value(&mut self, key: &str, ty: u32, value: &[u8]) {
        let encoded = [&ty.to_le_bytes(), value].concat();
        match self.metadata.iter_mut().find(|(k, _)| k == key) {
            Some(entry) => entry.1 = encoded,
            None => self.metadata.push((key.to_owned(), encoded)),
        }
    }

    pub(crate) fn u32(&mut self, key: &str, value: u32) {
        self.value(key, 4, &value.to_le_bytes());
    }

    pub(crate) fn f32(&mut self, key: &str, value: f32) {
        self.value(key, 6, &value.to_le_bytes());
    }

    pub(crate) fn bool(&mut self, key: &str, value: bool) {
        self.value(key, 7, &[u8::from(value)]);
    }

    pub(crate) fn string(&mut self, key: &str, value: &str) {
        self.value(key, 8, &string(value));
    }

    /// `elements` encoded one after another.
    pub(crate) fn array(&mut self, key: &str, ty: u32, count: u64, elements: &[u8]) {
        self.value(key, 9, &array(ty, count, elements));
    }

    pub(crate) fn drop_key(&mut self, key: &str) {
        self.metadata.retain(|(k, _)| k != key);
    }

    pub(crate) fn drop_tensor(&mut self, name: &str) {
        self.tensors.retain(|t| t.name != name);
    }

    /// Adds or replaces a matrix of small numbers that look random and are the same every time.
    pub(crate) fn replace_f32(&mut self, name: &str, rows: usize, columns: usize) {
        let mut state =
            name.bytes().fold(0x2545_f491_4f6c_dd1du64, |s, b| (s ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 24) as f32 - 0.5
        };
        let data = (0..rows * columns).flat_map(|_| (next() * 0.2).to_le_bytes()).collect();
        // A vector has one dimension in real files.
        let dimensions = if rows == 1 { vec![columns as u64] } else { vec![columns as u64, rows as u64] };
        self.drop_tensor(name);
        self.tensors.push(Tensor { name: name.to_owned(), dimensions, ty: 0, data, offset: None });
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            out.extend(string(key));
            out.extend(value);
        }
        let mut data = Vec::new();
        for tensor in &self.tensors {
            data.resize(data.len().next_multiple_of(self.alignment), 0);
            out.extend(string(&tensor.name));
            out.extend((tensor.dimensions.len() as u32).to_le_bytes());
            out.extend(tensor.dimensions.iter().flat_map(|d| d.to_le_bytes()));
            out.extend(tensor.ty.to_le_bytes());
            out.extend(tensor.offset.unwrap_or(data.len() as u64).to_le_bytes());
            data.extend(&tensor.data);
        }
        out.resize(out.len().next_multiple_of(self.alignment), 0);
        out.extend(data);
        out
    }
}

/// A length and the bytes.
pub(crate) fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

/// An element type, a count and the elements.
pub(crate) fn array(ty: u32, count: u64, elements: &[u8]) -> Vec<u8> {
    [&ty.to_le_bytes()[..], &count.to_le_bytes(), elements].concat()
}

/// A whole model of the Llama family: 2 layers, 32 ids, tied embeddings, random weights in f32.
pub(crate) fn tiny_llama() -> Writer {
    const HIDDEN: usize = 64;
    const FEED_FORWARD: usize = 96;
    const KV: usize = 32;
    const VOCAB: usize = 32;
    let mut w = Writer::default();
    w.string("general.architecture", "llama");
    for (key, value) in [
        ("block_count", 2),
        ("embedding_length", HIDDEN as u32),
        ("feed_forward_length", FEED_FORWARD as u32),
        ("context_length", 128),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("rope.dimension_count", 16),
        ("vocab_size", VOCAB as u32),
    ] {
        w.u32(&format!("llama.{key}"), value);
    }
    w.f32("llama.attention.layer_norm_rms_epsilon", 1e-5);
    w.f32("llama.rope.freq_base", 10_000.0);
    w.string("tokenizer.ggml.model", "gpt2");
    w.string("tokenizer.ggml.pre", "smollm");
    let tokens: Vec<u8> = (0..VOCAB).flat_map(|i| string(&format!("<{i}>"))).collect();
    w.array("tokenizer.ggml.tokens", 8, VOCAB as u64, &tokens);
    let types: Vec<u8> = (0..VOCAB as i32).flat_map(|i| if i < 3 { 3 } else { 1i32 }.to_le_bytes()).collect();
    w.array("tokenizer.ggml.token_type", 5, VOCAB as u64, &types);
    w.array("tokenizer.ggml.merges", 8, 1, &string("< 1"));
    w.u32("tokenizer.ggml.bos_token_id", 1);
    w.u32("tokenizer.ggml.eos_token_id", 2);
    w.bool("tokenizer.ggml.add_bos_token", false);
    w.replace_f32("token_embd.weight", VOCAB, HIDDEN);
    for layer in 0..2 {
        for (part, rows, columns) in [
            ("attn_norm", 1, HIDDEN),
            ("attn_q", HIDDEN, HIDDEN),
            ("attn_k", KV, HIDDEN),
            ("attn_v", KV, HIDDEN),
            ("attn_output", HIDDEN, HIDDEN),
            ("ffn_norm", 1, HIDDEN),
            ("ffn_gate", FEED_FORWARD, HIDDEN),
            ("ffn_up", FEED_FORWARD, HIDDEN),
            ("ffn_down", HIDDEN, FEED_FORWARD),
        ] {
            w.replace_f32(&format!("blk.{layer}.{part}.weight"), rows, columns);
        }
    }
    w.replace_f32("output_norm.weight", 1, HIDDEN);
    w
}
