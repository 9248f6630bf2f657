"""Makes the tokenizer and chat-template fixtures beside this file, with Hugging Face's own code as the oracle.

    python make.py PATH/SmolLM2-135M-Instruct.Q4_1.gguf

Made with Python 3.11, tokenizers 0.23.3, transformers 5.24.0, Jinja2 3.1.6, gguf 0.19. Every run gives the same bytes.

tokenizers.json: for each kind the source as a GGUF file would hold it, and for each text of TEXTS the ids with special
tokens parsed and none added. `smollm` is the model's own vocabulary cut to its first 6,000 ids; the others are small
vocabularies trained here on CORPUS with the kind's own pre-tokenizer.
chat.json: messages, and what `apply_chat_template` makes of them.
"""

import json
import pathlib
import sys

from gguf import GGUFReader
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_utils_base import generate_merges

HERE = pathlib.Path(__file__).parent
SMOLLM_IDS = 6000
SPLIT_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLIT_QWEN2 = SPLIT_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

CORPUS = [
    "The capital of France is Paris, and the river that runs through the city is called the Seine.",
    "She said: \"I don't know what they're doing, but we've got to stop; it'll be late and I'd rather not.\"",
    "In 1969, 3 men flew 384400 km to the Moon and back; in 2024 some 8,100,000,000 people live on the Earth.",
    "def main(args):\n    for i in range(10):\n        if i % 2 == 0:\n            print(f\"{i}: even\")\n    return 0\n",
    "fn sum(values: &[f32]) -> f32 {\n\tlet mut total = 0.0;\n\tfor v in values {\n\t\ttotal += v;\n\t}\n\ttotal\n}\n",
    "int main(void) { printf(\"hello, world\\n\"); return 0; }  // a comment    with spaces\r\n",
    "今天天气很好,我们一起去公园散步吧。语言模型把文字切成小块,再把小块变成数字。",
    "人工智能正在改变世界,但是它还不会做饭。今天我们学习中文,明天我们学习英文。",
    "مرحبا بالعالم. اللغة العربية جميلة جدا، وهذا نص قصير للتجربة. مرحبا مرة أخرى.",
    "Привет, мир! Сегодня мы пишем тесты. Schöne Grüße aus München, où êtes-vous allés à l'été?",
    "😀 😀 👍 👨‍👩‍👧‍👦 🇫🇷 🇩🇪 ❤️ emoji 😂😂😂 and more 😀",
    "The theory of the thing is that the other things there are then thinner than these.",
    "{\"name\": \"value\", \"list\": [1, 2, 3], \"nested\": {\"true\": true, \"null\": null}}\n\n\n",
    "# Title\n\n- one\n- two\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\nprint('x')\n```\n",
    "        deeply indented\n            and more\n                    and more still\n\n\n\n\nend.",
]

TEXTS = [
    "", " ", "  ", "a", " a", "a ", "  a  b   c    ", "\n", "\n\n\n", " \n \n  x", "\t\tx\t", "\r\n\r\n x\r", "x\n  ",
    "Hello, world!", "The capital of France is Paris.", "I don't think they're there; we'll see. I'D SAY SO, IT'S",
    "'s 's'S'ſ 'LL'Re", "it’s a “quote” — and an ellipsis…",
    "0 1 12 123 1234 12345 3.14159 1,000,000 ٣٤ ½ ² Ⅷ 〇", "v2.0.1-rc3", "x1y22z333",
    "今天天气很好。", "我们学习 language models 和 123 个数字", "日本語とカタカナ、ひらがな。한국어 텍스트",
    "def f(x):\n    return x**2  # comment\n\n\nclass A:\n\tpass\n", "if (a==b) { c+=1; } // ok\r\n",
    "fn main() {\n        println!(\"{}\", 1);\n}", "https://example.com/a?b=c&d=%20#frag",
    "😀", "👨‍👩‍👧‍👦 family", "🇫🇷🇩🇪", "❤️ and 👍🏽!", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈",
    "مرحبا بالعالم، كيف حالك؟", "Привет, мир!", "Grüße, naïve café: à l'été",
    "e\u0301 a\u0308 o\u0302\u0323 \u1112\u1161\u11ab", "x\u0301\u0302\u0303y", "\u00a0nbsp\u3000ideographic\u2003em\u0085nel\u2028ls",
    "zero\u200bwidth\u200djoin\ufeffbom", "\x00\x01\x07\x7f", "\ufffd\ufffd", "▁ under ▁▁bar",
    "<|im_start|>user\nhi<|im_end|>\n", "a<|im_end|>b <|im_end|> c", "<|im_end|><|im_end|>", "<|im_en", "<s>x</s> y", " <s> x",
    "<think>why</think>ok", "<0x0A> <unk>", "....!!!??---===___***", "a" * 300, " " * 70 + "x", "ab" * 90 + "\n" * 40,
    "\\u0041 \\n %s {{x}} ${y}", "CamelCaseAndSNAKE_CASE_mixed kebab-case", "∀x∈ℝ: √x² = |x| ≠ −1 × π", "fin\n \n", "\x04 dropped\x06",
]


def byte_level(pre):
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in ("smollm", "gpt-2"))
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level])
    if pre == "gpt-2":
        return level
    split = SPLIT_LLAMA3 if pre == "llama-bpe" else SPLIT_QWEN2
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), behavior="isolated"), level])


def byte_level_tokenizer(pre, vocab, merges, control, user):
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = byte_level(pre)
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in user])
    return tokenizer


def trained(pre, size, control, user, **ids):
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = byte_level(pre)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    learner.train_from_iterator(CORPUS * 3, trainer)
    model = json.loads(learner.to_str())["model"]
    merges = [tuple(m) for m in model["merges"]]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    if pre == "llama-bpe":
        # A word that no merge leads to: only `ignore_merges` finds it.
        tokens.append("Ġwithoutmerges")
    vocab = {t: i for i, t in enumerate(tokens)}
    tokenizer = byte_level_tokenizer(pre, vocab, merges, control, user)
    tokens += control + user
    source = {
        "model": "gpt2", "pre": pre, "tokens": tokens,
        "token_types": [1] * len(vocab) + [3] * len(control) + [4] * len(user),
        "merges": [" ".join(m) for m in merges],
    }
    return source | {k: tokens.index(v) for k, v in ids.items()}, tokenizer


def smollm(path):
    fields = GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()[:SMOLLM_IDS]
    types = fields["tokenizer.ggml.token_type"].contents()[:SMOLLM_IDS]
    vocab = {t: i for i, t in enumerate(tokens)}
    merges = [m.split(" ") for m in fields["tokenizer.ggml.merges"].contents()]
    merges = [(a, b) for a, b in merges if a in vocab and b in vocab and a + b in vocab]
    control = [t for t, kind in zip(tokens, types) if kind == 3]
    source = {
        "model": "gpt2", "pre": "smollm", "tokens": tokens, "token_types": types, "merges": [" ".join(m) for m in merges],
        "bos": 1, "eos": 2, "unk": 0, "pad": 2, "add_bos": False,
    }
    return source, byte_level_tokenizer("smollm", vocab, merges, control, [])


def llama(add_space_prefix):
    """A SentencePiece-like BPE: pieces in the order they were learnt score 0, -1, -2, ...; single letters come last."""
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    learner.pre_tokenizer = pre_tokenizers.Split("▁", behavior="merged_with_next")
    learner.train_from_iterator(CORPUS[:9] * 3, trainers.BpeTrainer(vocab_size=620, show_progress=False))
    model = json.loads(learner.to_str())["model"]
    learnt = sorted(model["vocab"], key=model["vocab"].get)
    pieces = ["▁▁", "▁▁▁▁"] + [t for t in learnt if len(t) > 1]
    letters = sorted(t for t in set("".join(learnt)) | {"▁"} if t != "\n")
    specials = ["<unk>", "<s>", "</s>"]
    tokens = specials + [f"<0x{b:02X}>" for b in range(256)] + pieces + letters
    types = [2, 3, 3] + [6] * 256 + [1] * (len(pieces) + len(letters))
    scores = [0.0] * 259 + [float(-i) for i in range(len(pieces) + len(letters))]
    vocab = {t: i for i, t in enumerate(tokens)}
    merges = generate_merges(vocab, dict(zip(tokens, scores)), skip_tokens=specials)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    prefix = [normalizers.Prepend("▁")] if add_space_prefix else []
    tokenizer.normalizer = normalizers.Sequence(prefix + [normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if add_space_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()] + strip
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in specials])
    source = {
        "model": "llama", "tokens": tokens, "token_types": types, "scores": scores, "bos": 1, "eos": 2, "unk": 0,
        "add_space_prefix": add_space_prefix,
    }
    return source, tokenizer


def tokenizer_cases(path):
    chatml = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    kinds = {
        "smollm": smollm(path),
        "gpt-2": trained("gpt-2", 700, ["<|endoftext|>"], [], eos="<|endoftext|>"),
        "llama-bpe": trained(
            "llama-bpe", 800, ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>"], [],
            bos="<|begin_of_text|>", eos="<|end_of_text|>",
        ),
        "qwen2": trained("qwen2", 800, chatml, ["<think>", "</think>"], eos="<|im_end|>", pad="<|endoftext|>"),
        "llama": llama(True),
        "llama, no space prefix": llama(False),
    }
    texts = TEXTS + ["no withoutmerges merges"]
    out = []
    for name, (source, tokenizer) in kinds.items():
        ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        decoded = [tokenizer.decode(i, skip_special_tokens=True) for i in ids]
        out.append({"name": name, "source": source, "ids": ids, "decoded": decoded})
    return {"texts": texts, "kinds": out}


CHATML = (
    "{%- for message in messages %}\n    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n"
    "{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n"
)
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
    "{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}

{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("After the optional system message, conversation roles must alternate user/assistant") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}

{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, with the exception of an initial optional system message!") }}
    {%- endif %}
{%- endfor %}
"""
# What newer templates lean on: blocks on lines of their own, methods of Python's strings, loop controls, tojson.
DIALECT = """{% for message in messages %}
    {% if message.role == 'tool' %}
        {% continue %}
    {% endif %}
    {% set text = message.content.strip() %}
<{{ message.role | upper }}>{{ text.split('</think>')[-1].lstrip('\\n') if '</think>' in text else text }}
    {% if text.startswith('stop') %}
        {% break %}
    {% endif %}
{% endfor %}
{{ messages[0] | tojson }}
{{ {'a': [1, 2.5, true, none], 'b': "<'é&\\"\\n>"} | tojson }}
{{ {'k': {'x': []}, 'l': [1, {}]} | tojson(indent=2) }}
{% generation %}
{{ none }} {{ true }} {{ tools is none }} {{ missing is defined }} {{ messages | length }}
{% endgeneration %}
"""


def chat_cases(path):
    fields = GGUFReader(path).fields
    templates = {
        "smollm2": (fields["tokenizer.chat_template"].contents(), "<|im_start|>", "<|im_end|>"),
        "chatml": (CHATML, "<|endoftext|>", "<|im_end|>"),
        "llama3": (LLAMA3, "<|begin_of_text|>", "<|eot_id|>"),
        "mistral": (MISTRAL, "<s>", "</s>"),
        "dialect": (DIALECT, "<s>", "</s>"),
    }
    chats = [
        [("user", "What is the capital of France?")],
        [("system", "Be brief."), ("user", " hello \n")],
        [("user", "hi"), ("assistant", " Hello! \n"), ("user", "今天天气 😀 'q' \"d\" <b>&amp;")],
        [("system", ""), ("user", ""), ("assistant", "<think>\nx\n</think>\n\ny"), ("user", "stop {{ bos_token }} {% if %}")],
        [("user", "a"), ("tool", "42"), ("user", "stopped"), ("assistant", "unseen")],
        [("user", "a"), ("user", "b")],
    ]
    out = []
    for name, (template, bos, eos) in templates.items():
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), bos_token=bos, eos_token=eos)
        cases = []
        for chat in chats:
            for prompt in (True, False):
                messages = [{"role": r, "content": c} for r, c in chat]
                try:
                    text = tokenizer.apply_chat_template(
                        messages, chat_template=template, tokenize=False, add_generation_prompt=prompt
                    )
                except Exception as error:
                    text = None
                    refused = str(error)
                case = {"messages": chat, "add_generation_prompt": prompt}
                cases.append(case | ({"text": text} if text is not None else {"refused": refused}))
        out.append({"name": name, "template": template, "bos": bos, "eos": eos, "cases": cases})
    return out


def write(name, value):
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    (HERE / name).write_text(text + "\n", encoding="utf-8")
    print(name, len(text.encode()), "bytes")


if __name__ == "__main__":
    write("tokenizers.json", tokenizer_cases(sys.argv[1]))
    write("chat.json", chat_cases(sys.argv[1]))
