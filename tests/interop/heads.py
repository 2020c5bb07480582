"""Heads made of other heads, so that they draft well without having been trained for long.

`widened` and `longer_heads` are exact: the new head drafts what the old one drafts. `pruned` drafts
the same among the tokens that it keeps. Shapes: D and W the old and the new width, V tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.models.checkpoint.head import write_head
from peagle.models.checkpoint.stored import read_head
from peagle.models.checkpoint.weights import read_tensors
from peagle.models.drafter import DrafterConfig

_ATTENTION = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True)
class SavedHead:
    """A head's shape, the "peagle" object of its config.json, and its tensors in float32."""

    config: DrafterConfig
    facts: dict[str, Any]
    tensors: dict[str, Tensor]

    @classmethod
    def read(cls, folder: Path) -> SavedHead:
        head = read_head(folder)
        config, facts = head.config, dict(head.facts)
        tensors, _ = read_tensors(folder)
        floats = {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()}
        return cls(config, facts, floats)

    def write(self, folder: Path) -> Path:
        """Export it, in vLLM's style."""
        write_head(folder, self.config, self.facts, self.tensors, "vllm")
        return folder


def pruned(head: SavedHead, token_ids: Sequence[int]) -> SavedHead:
    """The head with a draft vocabulary of these tokens; it has the whole one yet."""
    assert not head.config.is_pruned
    ids_D = torch.tensor(sorted(set(token_ids)))
    kept_V = torch.zeros(head.config.vocab_size, dtype=torch.bool)
    kept_V[ids_D] = True
    tensors = head.tensors | {
        "lm_head.weight": head.tensors["lm_head.weight"][ids_D],
        "d2t": ids_D - torch.arange(len(ids_D)),
        "t2d": kept_V,
    }
    return SavedHead(replace(head.config, draft_vocab_size=len(ids_D)), head.facts, tensors)


def widened(head: SavedHead, width: int, seed: int = 0) -> SavedHead:
    """The same function in a greater width, with weights that have nothing in common with the old.

    Residual stream and embeddings are turned into W dimensions, x' = Q x with orthonormal columns
    in Q, each by a Q of its own. RMSNorm(x') is Q RMSNorm(x) sqrt(W / D) if its epsilon is D / W of
    the old one; its weights are random, and the matrix behind each norm undoes that.
    """
    config, old = head.config, head.tensors
    # With it the residual stream would be a norm's output, which is no rotation.
    assert not config.norm_before_residual and width > config.hidden_size
    generator = torch.Generator().manual_seed(seed)
    of_stream, of_tokens = (_rotation(width, config.hidden_size, generator) for _ in range(2))
    shrink = (config.hidden_size / width) ** 0.5
    new = dict(old)

    def behind(norm: str, matrix: Tensor, rotation: Tensor) -> Tensor:
        """A matrix that read a norm's output, for the norm in the new width."""
        if new[norm].numel() != width:
            random = torch.rand(width, generator=generator, dtype=torch.float64)
            new[norm] = (0.5 + random).float()
        return (matrix.double() * old[norm].double()) @ rotation.T * (shrink / new[norm].double())

    new["embed_tokens.weight"] = old["embed_tokens.weight"].double() @ of_tokens.T
    new["fc.weight"] = of_stream @ old["fc.weight"].double()
    for number in range(config.num_layers):
        layer = f"layers.{number}."
        before = layer + "input_layernorm.weight"
        for name in _ATTENTION:
            key = f"{layer}self_attn.{name}.weight"
            if number:
                new[key] = behind(before, old[key], of_stream)
            else:
                tokens, stream = old[key].chunk(2, dim=1)
                parts = behind(before, tokens, of_tokens)
                new[key] = torch.cat(
                    [parts, behind(layer + "hidden_norm.weight", stream, of_stream)], dim=1
                )
        for name in ("gate_proj", "up_proj"):
            key = f"{layer}mlp.{name}.weight"
            new[key] = behind(layer + "post_attention_layernorm.weight", old[key], of_stream)
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            new[f"{layer}{name}.weight"] = of_stream @ old[f"{layer}{name}.weight"].double()
    new["lm_head.weight"] = behind("norm.weight", old["lm_head.weight"], of_stream)
    eps = config.rms_norm_eps * config.hidden_size / width
    floats = {n: t.float().contiguous() if t.is_floating_point() else t for n, t in new.items()}
    return SavedHead(replace(config, hidden_size=width, rms_norm_eps=eps), head.facts, floats)


def longer_attention(tensors: Mapping[str, Tensor], old: int, new: int) -> dict[str, Tensor]:
    """Tensors of a model whose attention heads have `new` dimensions in place of `old`.

    The added dimensions are zeros. The old ones go where RoPE turns them as before, and queries are
    scaled against the smaller 1 / sqrt(dimension) of the scores.
    """
    half = torch.arange(old // 2) * (new // old)
    places = torch.cat([half, half + new // 2])
    scale = (new / old) ** 0.5
    changed = dict(tensors)
    for name, value in tensors.items():
        kind = name.removesuffix(".weight").rpartition(".")[2]
        if kind in ("q_proj", "k_proj", "v_proj"):
            rows = value.view(-1, old, value.shape[1])
            longer = value.new_zeros(rows.shape[0], new, value.shape[1])
            longer[:, places] = rows
            # A norm of each head would undo a scale that stands before it.
            scaled = kind == "q_proj" and name.replace("q_proj", "q_norm") not in tensors
            changed[name] = longer.flatten(0, 1) * (scale if scaled else 1)
        elif kind == "o_proj":
            columns = value.view(value.shape[0], -1, old)
            longer = value.new_zeros(*columns.shape[:2], new)
            longer[..., places] = columns
            changed[name] = longer.flatten(1)
        elif kind in ("q_norm", "k_norm"):
            # Zeros make the mean square smaller: what the norm gives is `scale` times as large.
            changed[name] = value.new_ones(new)
            changed[name][places] = value if kind == "q_norm" else value / scale
    return changed


def longer_heads(head: SavedHead, new: int) -> SavedHead:
    """The same function with attention heads of `new` dimensions."""
    tensors = longer_attention(head.tensors, head.config.head_dim, new)
    return SavedHead(replace(head.config, head_dim=new), head.facts, tensors)


def _rotation(width: int, old: int, generator: torch.Generator) -> Tensor:
    """A random [W, D] with orthonormal columns."""
    random = torch.randn(width, old, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(random).Q
