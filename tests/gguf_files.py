"""GGUF files for tests: written by hand down to the bytes, or of tiny models by the package."""

import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}<|endoftext|>"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
TOKENIZER = {"tokenizer.ggml.model": "gpt2"}
LLAMA = {"general.architecture": "llama", "general.type": "model", **TOKENIZER}
WHOLE = [("token_embd.weight", (4, 2), 0, 32)]


def require_gguf() -> Any:
    """Skip the test without the packages of the extra."""
    pytest.importorskip("accelerate", reason="needs the extra gguf")
    return pytest.importorskip("gguf", reason="needs the extra gguf")


# ---- by hand ----


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _typed(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    items = b"".join(map(_text, value))
    return struct.pack("<IIQ", 9, 8, len(value)) + items


def gguf_bytes(
    metadata: Mapping[str, Any] = LLAMA,
    tensors: Sequence[tuple[str, tuple[int, ...], int, int]] = WHOLE,
    *,
    version: int = 3,
    order: str = "<",
) -> bytes:
    """The bytes of a GGUF file; a tensor is its name, shape (innermost first), type and size."""
    head = b"GGUF" + struct.pack(order + "IQQ", version, len(tensors), len(metadata))
    head += b"".join(_text(key) + _typed(value) for key, value in metadata.items())
    place = 0
    for name, shape, kind, size in tensors:
        head += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, place)
        place += size
    return head + b"\0" * (-len(head) % 32) + b"\1" * place


# ---- of tiny models ----

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NORMS = {"post_attention_layernorm": "ffn_norm"}
_GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as tokens, and "re" as one; 0 ends text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<|endoftext|>": 0, **{c: i + 1 for i, c in enumerate(alphabet)}, "re": 257}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[("r", "e")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|endoftext|>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|endoftext|>")


def _gguf_name(name: str, architecture: str) -> str:
    ends = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, _, kind = name.rpartition(".")
    if stem in ends:
        return f"{ends[stem]}.{kind}"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    norms = _GEMMA_NORMS if architecture.startswith("gemma") else _NORMS
    return f"blk.{layer}.{(_LAYER_NAMES | norms)[part]}.{kind}"


def _stored(name: str, value: Tensor, architecture: str, config: Any) -> Tensor:
    """A weight as llama.cpp stores it: of Llama, halves of a rotary head alternate."""
    if architecture.startswith("gemma") and "norm" in name:
        return value + 1
    for part, heads in (
        ("q_proj", config.num_attention_heads),
        ("k_proj", config.num_key_value_heads),
    ):
        if architecture == "llama" and part in name:
            halves = value.unflatten(0, (heads, 2, -1))
            return halves.transpose(1, 2).reshape(value.shape)
    return value


def write_gguf(
    model: Any,
    file: Path,
    architecture: str = "llama",
    kind_of: Callable[[str, Tensor], str] = lambda name, value: "F32",
    **extra: Any,
) -> Path:
    """Write a tiny model of transformers with `merging_tokenizer`.

    `kind_of` names the type of each tensor, `extra` further ids of tokens.
    """
    gguf = require_gguf()
    config = model.config
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_type("model")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = model.model.layers[0].self_attn.head_dim
    writer.add_key_length(head_dim)
    if not architecture.startswith("gemma"):
        writer.add_rope_dimension_count(head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if architecture.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    tokenizer = merging_tokenizer()
    tokens = {index: token for token, index in tokenizer.get_vocab().items()}
    texts = [tokens.get(index, f"<unused{index}>") for index in range(config.vocab_size)]
    special = set(tokenizer.all_special_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(texts)
    writer.add_token_types([3 if text in special else 1 for text in texts])
    writer.add_token_merges(["r e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    for key, value in extra.items():
        writer.add_uint32(f"tokenizer.ggml.{key}", value)
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = _stored(name, value.detach().float(), architecture, config).numpy()
        kind = gguf.GGMLQuantizationType[kind_of(name, value)]
        packed = gguf.quants.quantize(stored, kind)
        writer.add_tensor(_gguf_name(name, architecture), packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
