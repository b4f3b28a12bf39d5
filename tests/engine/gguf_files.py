"""GGUF files of tiny models, as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from engine.gguf_convert import llama3_divisors

BYTE_TOKENS = ["<unk>", "<|im_start|>", "<|im_end|>", *map(chr, range(ord("!"), ord("~"))), "ab", "bc"]
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}"


def write_gguf(
    file: Path,
    model: Any,
    quantized: gguf.GGMLQuantizationType | None = None,
    extra_tensors: Iterable[str] = (),
    **metadata: Any,
) -> None:
    """`model` of transformers as llama.cpp's converter would write it, with a small BPE tokenizer.

    In float32, or with matrices in a quantised type. extra_tensors: names of single numbers.
    """
    config = model.config
    writer = gguf.GGUFWriter(file, config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if config.model_type == "qwen3":
        writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    add_tokenizer(writer)
    for name, value in metadata.items():
        add = {float: writer.add_float32, int: writer.add_uint16, str: writer.add_string}[type(value)]
        add(name, value)
    for name in extra_tensors:
        writer.add_tensor(name, np.ones(1, np.float32))
    for name, parameter in model.state_dict().items():
        values = permuted(name, parameter.numpy(), config) if config.model_type == "llama" else parameter.numpy()
        if quantized is not None and values.ndim == 2:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(gguf_name(name), values)
    if (rope := config.rope_parameters)["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(rope, rope["rope_theta"], 8).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(BYTE_TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(BYTE_TOKENS) - 3))
    writer.add_token_merges(["a b", "b c"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)


def gguf_name(name: str) -> str:
    parts = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "self_attn.o_proj": "attn_output",
        "self_attn.": "attn_",
        "mlp.": "ffn_",
        "_proj": "",
        "post_attention_layernorm": "ffn_norm",
        "input_layernorm": "attn_norm",
    }
    for theirs, gguf_part in parts.items():
        name = name.replace(theirs, gguf_part)
    return name


def permuted(name: str, values: np.ndarray, config: Any) -> np.ndarray:
    """llama.cpp's order of rotary pairs in q and k of Llama."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for part, num_heads in heads.items():
        if part in name:
            halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
            return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
    return values
