"""Acceptance length of EAGLE-3 with candidate trees, foreseen over outputs of plain decoding.

    python benchmarks/eagle3_trees.py --set humaneval --limit 8
    python benchmarks/eagle3_trees.py --target DIR --eagle3 HEAD --limit 64 --output found.json

The engine drafts chains with an autoregressive head; trees are P-EAGLE's. This is what the trees of
EAGLE-2 (arXiv:2406.16858) would bring an EAGLE-3 head: at each depth the head runs over the W most
probable paths, and each gets W children; of all these the N most probable are verified. The head
sees keys and values of the context and of a node's path, and a child's feature is the output of
its parent. Each output is walked as greedy serving does it. A chain is the tree of W = 1.

Shapes: S tokens of an output with its prompt, P positions after which a tree grows, W paths of a
beam, d head size.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from common import run_guarded, write_result
from torch import Tensor
from transformers import AutoModelForCausalLM

from peagle import LLM, SamplingParams
from peagle.bundled import BUNDLED_EAGLE3, BUNDLED_TARGET
from peagle.cli.setup import quiet_libraries
from peagle.environment import environment
from peagle.errors import UserError
from peagle.evaluation.acceptance import loop_start
from peagle.evaluation.prompts import PROMPT_SETS, load_prompt_set
from peagle.models.checkpoint import load_drafter
from peagle.models.drafter import Drafter

# Attention over a context takes memory by the position.
_POSITIONS_TOGETHER = 64


@dataclass(frozen=True, slots=True)
class Tree:
    """All candidates behind a position, the most probable ones first; none before its parent.

    Attributes:
        tokens: ids of the target.
        parents: index of each one's parent; -1 for a first draft.
    """

    tokens: list[int]
    parents: list[int]

    def num_accepted(self, following: Sequence[int], num_nodes: int) -> int:
        """Return how many of the following tokens the first nodes foresaw."""
        children = {pair: i for i, pair in enumerate(self._pairs(num_nodes))}
        node = -1
        for count, token in enumerate(following):
            if (node, token) not in children:
                return count
            node = children[node, token]
        return len(following)

    def _pairs(self, num_nodes: int) -> zip[tuple[int, int]]:
        return zip(self.parents[:num_nodes], self.tokens[:num_nodes], strict=True)


class Context:
    """Keys and values of the head over the true tokens of an output, each layer's [S - 1, ., d]."""

    def __init__(self, head: Drafter, tokens: Tensor, features_SA: Tensor) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        hidden_SD = head.combine_features(features_SA[:-1])
        positions = torch.arange(len(tokens) - 1, device=tokens.device)
        self.hidden_SD = head(tokens[1:], hidden_SD, positions, self._attend)

    def _attend(self, _: int, query_SHd: Tensor, key_SHd: Tensor, value_SHd: Tensor) -> Tensor:
        self.keys.append(key_SHd)
        self.values.append(value_SHd)
        query, key, value = (x.transpose(0, 1)[None] for x in (query_SHd, key_SHd, value_SHd))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)


class Beams:
    """Paths of drafts behind positions, W each, one deeper with each pass of the head.

    Args:
        slots_P: the last slot of the context that each position's paths see.
    """

    def __init__(self, head: Drafter, context: Context, slots_P: Tensor) -> None:
        self._head, self._context, self._slots_P = head, context, slots_P
        self._paths: list[tuple[Tensor, Tensor]] = []  # keys and values of a layer, [P, W, n, ., d]
        self._depth = 0

    def follow(self, parents_PW: Tensor, tokens_PW: Tensor, hidden_PWD: Tensor) -> Tensor:
        """Go on with a token behind each chosen path; return the head's output, [P, W, D]."""
        rows_P1 = torch.arange(len(parents_PW), device=parents_PW.device).unsqueeze(1)
        self._paths = [(k[rows_P1, parents_PW], v[rows_P1, parents_PW]) for k, v in self._paths]
        self._depth += 1
        positions_P1 = self._slots_P.unsqueeze(1) + self._depth
        return self._head(tokens_PW, hidden_PWD, positions_P1, self._attend)

    def _attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend to the context and to each path, itself included; all [P, W, ., d]."""
        own = key.unsqueeze(2), value.unsqueeze(2)
        if layer < len(self._paths):
            kept = self._paths[layer]
            own = torch.cat((kept[0], own[0]), 2), torch.cat((kept[1], own[1]), 2)
            self._paths[layer] = own
        else:
            self._paths.append(own)
        num_slots = int(self._slots_P.max()) + 1
        context = self._context.keys[layer][:num_slots], self._context.values[layer][:num_slots]
        groups = query.shape[2] // key.shape[2]
        query = query.unflatten(2, (-1, groups))  # [P, W, kv heads, groups, d]
        scale = query.shape[-1] ** -0.5
        seen_PS = torch.arange(num_slots, device=query.device) <= self._slots_P.unsqueeze(1)
        far = torch.einsum("pwhgd,shd->pwhgs", query, context[0]).float() * scale
        far = far.masked_fill(~seen_PS[:, None, None, None], float("-inf"))
        near = torch.einsum("pwhgd,pwnhd->pwhgn", query, own[0]).float() * scale
        weights = torch.cat((far, near), -1).softmax(-1).to(query.dtype)
        far, near = weights.split((num_slots, own[0].shape[2]), -1)
        out = torch.einsum("pwhgs,shd->pwhgd", far, context[1])
        return (out + torch.einsum("pwhgn,pwnhd->pwhgd", near, own[1])).flatten(2, 3)


def grow(
    head: Drafter, context: Context, slots_P: Tensor, depth: int, num_paths: int
) -> list[Tree]:
    """Grow the trees behind some slots.

    Args:
        slots_P: slot p has read the token of position p + 1, behind which the tree begins.
        depth: of the tree.
        num_paths: W.
    """
    hidden_PWD = context.hidden_SD[slots_P].unsqueeze(1)
    beams, device = Beams(head, context, slots_P), slots_P.device
    paths_PW = torch.zeros(len(slots_P), 1, device=device)  # log-probabilities
    nodes_PW = torch.full((len(slots_P), 1), -1, device=device)
    tokens, parents, scores = list[Tensor](), list[Tensor](), list[Tensor]()
    for level in range(depth):
        logits_PWV = head.compute_logits(hidden_PWD).float().log_softmax(-1)
        found_PWC, ids_PWC = logits_PWV.topk(min(num_paths, logits_PWV.shape[-1]), -1)
        first = sum(one.shape[1] for one in tokens)
        parents.append(nodes_PW.unsqueeze(2).expand_as(ids_PWC).flatten(1))
        tokens.append(head.to_target_ids(ids_PWC).flatten(1))
        scores.append((paths_PW.unsqueeze(2) + found_PWC).flatten(1))
        if level + 1 == depth:
            break
        paths_PW, best_PW = scores[-1].topk(min(num_paths, scores[-1].shape[1]), -1)
        from_PW, nodes_PW = best_PW // ids_PWC.shape[2], first + best_PW
        rows_P1 = torch.arange(len(slots_P), device=device).unsqueeze(1)
        hidden_PWD = beams.follow(
            from_PW, tokens[-1][rows_P1, best_PW], hidden_PWD[rows_P1, from_PW]
        )
    return _most_probable(*(torch.cat(many, 1) for many in (tokens, parents, scores)))


def _most_probable(tokens_PC: Tensor, parents_PC: Tensor, scores_PC: Tensor) -> list[Tree]:
    """Order the candidates; no child is more probable than its parent, which stands before it."""
    order_PC = torch.sort(scores_PC, dim=-1, descending=True, stable=True).indices
    places_PC = torch.empty_like(order_PC).scatter_(
        1, order_PC, torch.arange(order_PC.shape[1], device=order_PC.device).expand_as(order_PC)
    )
    parents_PC = parents_PC.gather(1, order_PC)
    moved_PC = places_PC.gather(1, parents_PC.clamp_min(0)).where(parents_PC >= 0, -1)
    both = torch.stack((tokens_PC.gather(1, order_PC), moved_PC), 1)
    return [Tree(*one) for one in both.tolist()]


def walk(trees: Sequence[Tree], output: Sequence[int], num_nodes: int) -> list[int]:
    """Return the accepted drafts of the steps that serving makes of an output.

    Args:
        trees: behind each token of the output; the first token comes from the prompt's pass.
    """
    accepted, at = list[int](), 1
    while at < len(output):
        accepted.append(trees[at - 1].num_accepted(output[at:], num_nodes))
        at += accepted[-1] + 1
    return accepted


def length(steps: Sequence[Sequence[int]]) -> float | None:
    """Return the acceptance length, without the last steps, which the ends of outputs cut."""
    counted = [n for of in steps for n in of[:-1]]
    return round(1 + fmean(counted), 3) if counted else None


def foreseen(
    model: Any,
    head: Drafter,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    depth: int,
    width: int,
) -> list[Tree]:
    """Return the trees behind the tokens of an output."""
    tokens = torch.tensor([*prompt, *output], device=model.device)
    states = model(tokens.unsqueeze(0), output_hidden_states=True).hidden_states
    features_SA = torch.cat([states[i][0] for i in head.config.aux_layer_ids], -1)
    context = Context(head, tokens, features_SA)
    first = len(prompt) - 1  # this slot has read the first token of the output
    slots = torch.arange(first, first + len(output) - 1, device=model.device)
    pieces = slots.split(_POSITIONS_TOGETHER)
    return [one for piece in pieces for one in grow(head, context, piece, depth, width)]


def main() -> None:
    """Run it."""
    args = parser().parse_args()
    quiet_libraries()
    llm = LLM(args.target, dtype=args.dtype, device=args.device)
    prompts = [
        llm.tokenizer(one.text)["input_ids"] for one in load_prompt_set(args.set, args.limit)
    ]
    params = SamplingParams(max_tokens=args.max_new_tokens)
    outputs = [one.token_ids for one in llm.generate(prompts, params)]
    target = llm.target
    head = load_drafter(args.eagle3, target)
    if head.config.is_parallel:
        raise UserError(f"--eagle3 is {args.eagle3!r}, a P-EAGLE head; expected an EAGLE-3 head.")
    model: Any = AutoModelForCausalLM.from_pretrained(args.target, dtype=target.dtype)
    model.to(target.device)
    nodes = [int(n) for n in args.nodes.split(",")]
    grow_all = partial(foreseen, model, head, depth=args.depth)
    steps: dict[str, dict[str, list[list[int]]]] = {"whole": {}, "before_loops": {}}
    with torch.inference_mode():
        for prompt, output in zip(prompts, outputs, strict=True):
            trees = grow_all(prompt, output, width=args.width)
            ways = {f"n={n}": walk(trees, output, n) for n in nodes}
            ways[f"chain K={args.depth}"] = walk(
                grow_all(prompt, output, width=1), output, args.depth
            )
            end = loop_start(output)
            for name, accepted in ways.items():
                steps["whole"].setdefault(name, []).append(accepted)
                cut = steps["before_loops"].setdefault(name, [])
                cut.append(accepted if end is None else _before(accepted, end))
    found = {
        "command": " ".join(["python", *sys.argv]),
        "set": args.set,
        "prompts": len(prompts),
        **{of: {name: length(each) for name, each in ways.items()} for of, ways in steps.items()},
        "environment": environment(target.device),
    }
    write_result(found, args.output)


def _before(accepted: Sequence[int], end: int) -> list[int]:
    """Return the steps that end where a loop begins or earlier, and one that does not count."""
    ends = [1]
    for count in accepted:
        ends.append(ends[-1] + count + 1)
    return [n for n, (_, stop) in zip(accepted, pairwise(ends), strict=True) if stop <= end] + [0]


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--target", default=str(BUNDLED_TARGET), help="folder of the target")
    options.add_argument("--eagle3", default=str(BUNDLED_EAGLE3), help="folder of the head")
    options.add_argument("--set", default="humaneval", choices=PROMPT_SETS, help="prompt set")
    options.add_argument("--limit", type=int, help="the first so many prompts (all)")
    options.add_argument("--max-new-tokens", type=int, default=256)
    options.add_argument("--nodes", default="7,16,32", help="numbers of nodes (7,16,32)")
    options.add_argument("--depth", type=int, default=7, help="of trees and chain (7)")
    options.add_argument("--width", type=int, default=10, help="paths of a beam, children (10)")
    options.add_argument("--dtype", default="auto")
    options.add_argument("--device", default="auto")
    options.add_argument("--output", type=Path, help="file for the result, instead of printing it")
    return options


if __name__ == "__main__":
    run_guarded(main)
