"""Records what Hugging Face transformers computes on the default model, for tests/tests/golden.rs.

    python tests/golden/record.py SmolLM2-135M-Instruct.Q4_1.gguf tests/golden/recordings.json

Made with Python 3.11, torch 2.11.0, transformers 5.24.0, gguf 0.19.0, tokenizers 0.23.3, numpy 2.4.6 (`MADE_WITH`
below; another version is refused unless --any-version is given). Takes about five minutes on two cores.

The GGUF is dequantised by the `gguf` package and put into transformers' Llama in f32 with eager attention, so the
recording is the truth of the quantised weights, free of our own kernels. For each prompt it holds the ids, and of the
logits at the last prompt position the 64 largest and 256 others at fixed places (all 49,152 would be 2 MB a dozen
prompts), and 64 greedily chosen tokens. `greedy_margin_min` is the smallest distance between the best and the second
best logit on the greedy way: equality of tokens is only a fair demand while it is well above the tolerance.
"""

import argparse
import hashlib
import json
import os
import random
from importlib.metadata import version

import gguf
import numpy as np
import torch
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama import modeling_llama

MADE_WITH = {"torch": "2.11.0", "transformers": "5.24.0", "gguf": "0.19.0", "tokenizers": "0.23.3", "numpy": "2.4.6"}
GREEDY_TOKENS = 64
TOP_LOGITS = 64
SAMPLED_LOGITS = 256
LONG_PROMPT_TOKENS = 2000

HF_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def half_split(weight, heads):
    """GGUF stores the rows of Q and K so that rotated pairs are neighbours; transformers wants them half a head apart."""
    rows = weight.shape[0]
    return weight.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def load_model(reader, value):
    heads, kv_heads = value("llama.attention.head_count"), value("llama.attention.head_count_kv")
    state = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if tensor.name == "token_embd.weight":
            key = "model.embed_tokens.weight"
        elif tensor.name == "output_norm.weight":
            key = "model.norm.weight"
        else:
            _, layer, part, _ = tensor.name.split(".")
            key = f"model.layers.{layer}.{HF_NAMES[part]}.weight"
            if part in ("attn_q", "attn_k"):
                weight = half_split(weight, heads if part == "attn_q" else kv_heads)
        state[key] = torch.from_numpy(np.ascontiguousarray(weight))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    config = LlamaConfig(
        hidden_size=value("llama.embedding_length"),
        intermediate_size=value("llama.feed_forward_length"),
        num_hidden_layers=value("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=value("llama.context_length"),
        rms_norm_eps=value("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value("llama.rope.freq_base")},
        vocab_size=value("llama.vocab_size"),
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).to(torch.float32).eval()
    model.load_state_dict(state, strict=True)
    return model


def load_tokenizer(value):
    assert value("tokenizer.ggml.pre") == "smollm"
    tokens, merges = value("tokenizer.ggml.tokens"), value("tokenizer.ggml.merges")
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[tuple(m.split(" ", 1)) for m in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, value("tokenizer.ggml.token_type")) if kind == gguf.TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def long_text():
    """An invented logbook: enough variety that attention has to look far back, enough order that greedy is decided."""
    pick = random.Random(20)
    people = ["Ada", "Bruno", "Chen", "Dalia", "Emeka", "Freya", "Goran", "Hana"]
    places = ["the north pier", "the lamp room", "the boat shed", "the signal mast", "the old cistern", "the lower stairs"]
    deeds = ["repaired the winch", "counted the oil drums", "painted the railing", "logged a passing freighter",
             "replaced a cracked pane", "cleaned the lens", "found a message in a bottle", "measured the tide"]
    weather = ["fog until noon", "a hard westerly wind", "clear skies", "light rain", "snow on the rocks", "a falling barometer"]
    lines = ["Logbook of the lighthouse at Cape Merrow, kept by the watch.\n"]
    for day in range(1, 120):
        lines.append(
            f"Day {day}: {pick.choice(people)} {pick.choice(deeds)} at {pick.choice(places)}; {pick.choice(weather)}, "
            f"{pick.randrange(2, 40)} ships seen, {pick.randrange(100, 999)} litres of oil left.\n"
        )
    return "".join(lines)


def prompts(tokenizer, chat_template):
    """(name, text or None, ids); None where the ids are no tokenisation of a text."""
    texts = {
        "english": "The lighthouse keeper climbed the stairs every evening, lit the lamp, and then",
        "chinese": "人工智能是计算机科学的一个分支。今天的天气很好，我们一起去",
        "code": "def fibonacci(n: int) -> int:\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n    if n < 2:\n        return n\n",
        "emoji": "Party tonight! 🎉🎈🥳 Bring 🍕 and 🍺 — see you at 8 👋🏽👩‍👩‍👧 \U0001f1e9\U0001f1ea",
        "one-letter": "A",
        "whitespace": "  \n\n\tone\n\n\n   two\t\tthree  \n \n    four",
        "numbers": "3.14159 26535 x 1234567890 = 0xFF; 50% of $1,299.00 is",
        "accents": "Où est la bibliothèque? Größe, señor, Łódź, naïve, Ελλάδα, Привет",
    }
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    texts["chat"] = tokenizer.apply_chat_template(chat, chat_template=chat_template, tokenize=False, add_generation_prompt=True)

    def encode(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    for name, text in texts.items():
        yield name, text, encode(text)
    yield "only-bos", None, [1]
    long_ids = encode(long_text())[:LONG_PROMPT_TOKENS]
    assert len(long_ids) == LONG_PROMPT_TOKENS
    text = tokenizer.decode(long_ids)
    assert encode(text) == long_ids
    yield "long", text, long_ids


@torch.no_grad()
def record(model, ids, sampled_ids):
    out = model(torch.tensor([ids]), use_cache=True)
    logits = out.logits[0, -1]
    top = torch.topk(logits, TOP_LOGITS)
    greedy, margin = [], float("inf")
    step = logits
    while True:
        best = torch.topk(step, 2)
        margin = min(margin, (best.values[0] - best.values[1]).item())
        greedy.append(best.indices[0].item())
        if len(greedy) == GREEDY_TOKENS:
            break
        out = model(torch.tensor([[greedy[-1]]]), past_key_values=out.past_key_values, use_cache=True)
        step = out.logits[0, -1]
    return {
        "top_ids": top.indices.tolist(),
        "top_logits": top.values.tolist(),
        "sampled_logits": logits[sampled_ids].tolist(),
        "greedy": greedy,
        "greedy_margin_min": margin,
    }


def round_int8(x):
    blocks = x.unflatten(-1, (-1, 32))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale > 0, torch.round(blocks / scale) * scale, 0.0).reshape(x.shape)


def round_bf16(x):
    return x.to(torch.bfloat16).to(torch.float32)


@torch.no_grad()
def record_rounding(model, ids, entry, sampled_ids):
    """What int8 activations and bf16 keys and values do to the logits recorded in `entry`."""
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            hooks.append(module.register_forward_pre_hook(lambda _, inputs: (round_int8(inputs[0]),)))
        if name.endswith("v_proj"):
            hooks.append(module.register_forward_hook(lambda _, inputs, out: round_bf16(out)))
    rotate = modeling_llama.apply_rotary_pos_emb

    def rotate_and_round(q, k, *rest, **options):
        q, k = rotate(q, k, *rest, **options)
        return q, round_bf16(k)

    modeling_llama.apply_rotary_pos_emb = rotate_and_round
    try:
        logits = model(torch.tensor([ids])).logits[0, -1]
    finally:
        modeling_llama.apply_rotary_pos_emb = rotate
        for hook in hooks:
            hook.remove()
    difference = logits[entry["top_ids"] + sampled_ids] - torch.tensor(entry["top_logits"] + entry["sampled_logits"])
    return {
        "rounded_difference_max": difference.abs().max().item(),
        "rounded_difference_rms": difference.square().mean().sqrt().item(),
    }


def main():
    arguments = argparse.ArgumentParser(description="Record reference logits and tokens.")
    arguments.add_argument("gguf")
    arguments.add_argument("output")
    arguments.add_argument("--any-version", action="store_true")
    arguments = arguments.parse_args()
    have = {package: version(package).split("+")[0] for package in MADE_WITH}
    if have != MADE_WITH and not arguments.any_version:
        raise SystemExit(f"made with {MADE_WITH}, found {have}")
    torch.use_deterministic_algorithms(True)

    reader = gguf.GGUFReader(arguments.gguf)
    value = lambda key: reader.fields[key].contents()  # noqa: E731
    model, tokenizer = load_model(reader, value), load_tokenizer(value)
    sampled_ids = sorted(random.Random(7).sample(range(value("llama.vocab_size")), SAMPLED_LOGITS))
    entries = []
    for name, text, ids in prompts(tokenizer, value("tokenizer.chat_template")):
        entry = {"name": name, "text": text, "ids": ids} | record(model, ids, sampled_ids)
        entry |= record_rounding(model, ids, entry, sampled_ids)
        entries.append(entry)
        print(f"{name:12} {len(ids):5} tokens, margin {entry['greedy_margin_min']:.4f}: {tokenizer.decode(entry['greedy'])[:60]!r}", flush=True)

    with open(arguments.gguf, "rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()
    head = {"model_file": os.path.basename(arguments.gguf), "model_sha256": digest, "made_with": have, "sampled_ids": sampled_ids}
    write(arguments.output, head, entries)


def write(path, head, entries):
    """One prompt a line."""

    # Nine significant digits bring every f32 back exactly.
    def compact(item):
        if isinstance(item, float):
            return float(f"{item:.9g}")
        if isinstance(item, list):
            return [compact(i) for i in item]
        return {k: compact(v) for k, v in item.items()} if isinstance(item, dict) else item

    with open(path, "w", encoding="utf-8") as file:
        lines = ",\n".join(json.dumps(compact(e), ensure_ascii=True, separators=(",", ":")) for e in entries)
        file.write(json.dumps(head, separators=(",", ":"))[:-1] + ',"prompts":[\n' + lines + "\n]}\n")


if __name__ == "__main__":
    main()
