"""Makes a Hugging Face folder in bf16 out of a GGUF file of the Llama family: python gguf_to_hf.py MODEL.gguf FOLDER

For peers that read no GGUF. Weights are dequantised, so the peer computes with what llmd has, rounded to bf16. No
tokenizer's rules are carried over beyond the vocabulary: the benchmark's prompts are ids.
"""

import json
import os
import sys

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file

OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def halves_apart(matrix, heads):
    """GGUF keeps the pairs that RoPE turns side by side; Hugging Face keeps them half a head apart."""
    rows, columns = matrix.shape
    return matrix.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def main(source, folder):
    reader = GGUFReader(source)

    def field(name):
        return reader.fields[name].contents()

    heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    hidden = field("llama.embedding_length")
    weights = {}
    for tensor in reader.tensors:
        matrix = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if tensor.name in OUTER:
            name = OUTER[tensor.name]
        else:
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{INNER[part]}.weight"
            if part in ("attn_q", "attn_k"):
                matrix = halves_apart(matrix, heads if part == "attn_q" else kv_heads)
        weights[name] = torch.from_numpy(np.ascontiguousarray(matrix)).to(torch.bfloat16)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": float(field("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": field("llama.rope.freq_base"),
        "vocab_size": len(field("tokenizer.ggml.tokens")),
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
    }
    os.makedirs(folder, exist_ok=True)
    save_file(weights, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config, file, indent=1)
    tokenizer(field, folder)


def tokenizer(field, folder):
    """A byte-level BPE tokenizer, for servers that insist on one to turn ids into text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, kinds = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in field("tokenizer.ggml.merges")]
    made = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    control = 3  # a token's kind in GGUF
    made.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, kinds) if k == control])
    made.save(os.path.join(folder, "tokenizer.json"))
    end = tokens[field("tokenizer.ggml.eos_token_id")]
    with open(os.path.join(folder, "tokenizer_config.json"), "w") as file:
        json.dump({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "pad_token": end}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
