"""Small tokenizers of nine families: their chat templates, special tokens and kinds of vocabulary.

The templates are written here, in the form of the published ones: they read the same variables, in
the same order, and treat roles, calls, reasoning and white space alike. That of gpt-oss is the
published one.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

FIXTURES = Path(__file__).parent / "fixtures"

_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
_CALLS = ("<tool_call>", "</tool_call>")
_THINK = ("<think>", "</think>")


@dataclass(frozen=True)
class Family:
    """What is known of a family's tokenizer.

    Attributes:
        special: added tokens with `special: true`.
        ordinary: added tokens without.
        kind: "bytes" (byte-level BPE), "spaces" (as sentencepiece, of Gemma) or "prefix" (with a
            space before the text, of Llama 2).
        bos, eos: the tokens of these names.
        has_tools: the template reads tools.
        thinking: the template has a thinking mode to set.
    """

    special: tuple[str, ...]
    ordinary: tuple[str, ...] = ()
    kind: str = "bytes"
    bos: str | None = None
    eos: str = "<|im_end|>"
    has_tools: bool = True
    thinking: bool = False


FAMILIES = {
    "qwen-2.5": Family((*_CHATML, *_VISION), (*_CALLS, "<|fim_prefix|>", "<|repo_name|>")),
    "qwen-3": Family(
        (*_CHATML, *_VISION),
        (*_CALLS, "<tool_response>", "</tool_response>", *_THINK),
        thinking=True,
    ),
    "qwen-3.5": Family(
        (*_CHATML, *_VISION),
        (*_CALLS, "<tool_response>", "</tool_response>", *_THINK),
        thinking=True,
    ),
    "llama-3.1": Family(
        (
            *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
            *("<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
            *(f"<|reserved_special_token_{i}|>" for i in range(8)),
        ),
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
    ),
    "gemma-3": Family(
        ("<bos>", "<eos>", "<pad>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>"),
        ("\n\n", "\n\n\n", "  ", "<unused0>"),
        kind="spaces",
        bos="<bos>",
        eos="<end_of_turn>",
        has_tools=False,
    ),
    "phi-3": Family(
        ("<s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        ("</s>",),
        kind="prefix",
        bos="<s>",
        eos="<|end|>",
        has_tools=False,
    ),
    "gpt-oss": Family(
        (
            *("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>"),
            *("<|start|>", "<|end|>", "<|message|>", "<|call|>"),
        ),
        eos="<|return|>",
    ),
    "smollm2": Family((*_CHATML, "<repo_name>", "<file_sep>"), has_tools=False),
    "glm": Family(
        (
            *("<|endoftext|>", "[gMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>"),
            *("<|assistant|>", "<|observation|>"),
        ),
        (*_THINK, *_CALLS, "<tool_response>", "</tool_response>", "/nothink", "<arg_key>"),
        eos="<|endoftext|>",
        thinking=True,
    ),
}


def template_of(family: str) -> str:
    """The chat template of a family."""
    folder = "chat_templates" if family == "gpt-oss" else "family_templates"
    return (FIXTURES / folder / f"{family}.jinja").read_text()


@cache
def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    """A tokenizer of some hundred merges, and of the family's added tokens."""
    facts = FAMILIES[family]
    core = small_tokenizer(facts.kind)
    rstrip = facts.kind == "prefix"  # as Phi 3 has it
    for names, special in ((facts.ordinary, False), (facts.special, True)):
        core.add_tokens(
            [AddedToken(n, special=special, rstrip=rstrip, normalized=False) for n in names]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=facts.eos,
        **({"bos_token": facts.bos} if facts.bos else {}),
    )
    tokenizer.chat_template = template_of(family)
    return tokenizer


# Merges go across the borders of special tokens: "<|", "|>", "im", "_end" and the like.
_TEXT = [
    "<|im_start|>user How is the weather in Oslo today? <|im_end|> Let me look it up.",
    'The answer is {"city": "Oslo", "days": [1, 2]}, as <b>HTML</b> or |a table|.',
    "<|start|>assistant<|channel|>final<|message|> <start_of_turn>model <end_of_turn> It is cold.",
    "Think first: <think> why? </think> then <tool_call> and </tool_call> end. [gMASK]<sop>",
]


@cache
def _merges(kind: str) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Merges learnt on some text, and the tokens that they make."""
    core = Tokenizer(models.BPE())
    if kind == "bytes":
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        core.normalizer = normalizers.Replace(" ", "▁")
    core.train_from_iterator(_TEXT * 3, BpeTrainer(vocab_size=260, show_progress=False))
    model = json.loads(core.to_str())["model"]
    return tuple(map(tuple, model["merges"])), tuple(model["vocab"])


def small_tokenizer(kind: str) -> Tokenizer:
    """A tokenizer without added tokens, of one of the kinds of `Family`, or "first".

    "first" puts a space before the text as the later tokenizers of Llama 2 do: before its first
    piece alone.
    """
    merges, pieces = _merges("bytes" if kind == "bytes" else "spaces")
    if kind == "bytes":
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    else:
        alphabet = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    vocab = {piece: id for id, piece in enumerate(dict.fromkeys([*alphabet, *pieces]))}
    if kind == "bytes":
        core = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        return core
    model: Any = models.BPE(
        vocab=vocab, merges=list(merges), unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    core = Tokenizer(model)
    replaced = normalizers.Replace(" ", "▁")
    if kind == "first":
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        steps = [normalizers.Prepend("▁"), replaced] if kind == "prefix" else [replaced]
        core.normalizer = normalizers.Sequence(steps)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence(steps)
    return core
