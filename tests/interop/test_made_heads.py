"""The heads that are held against vLLM are what they are said to be, in our engine (no vLLM)."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from peagle import LLM, SamplingParams
from peagle.chat import render_chat
from peagle.models.target import TargetModel, load_tokenizer
from tests.interop.heads import SavedHead, longer_heads, pruned, widened
from tests.interop.trained import PAIR2, make_pair2

Told = tuple[list[list[int]], list[int]]


def spoken(target: TargetModel, head: Path) -> Told:
    """Outputs, and accepted drafts by position."""
    llm = LLM(model=target, speculative_config={"model": str(head), "num_speculative_tokens": 4})
    tokenizer = load_tokenizer(PAIR2 / "target")
    asked = ([{"role": "user", "content": text}] for text in ("Dependency?", "What is a PEP?"))
    prompts = [render_chat(tokenizer, one, thinking=True) for one in asked]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True))
    per_pos = [output.stats.num_accepted_tokens_per_pos for output in outputs]
    return [output.token_ids for output in outputs], [sum(column) for column in zip(*per_pos)]


@pytest.fixture(scope="module")
def of_pair2() -> tuple[TargetModel, SavedHead, Told]:
    """The second pair, and what it says."""
    target = TargetModel.load(PAIR2 / "target", dtype=torch.float32)
    return target, SavedHead.read(PAIR2 / "peagle"), spoken(target, PAIR2 / "peagle")


def test_a_wider_head_drafts_the_same(
    of_pair2: tuple[TargetModel, SavedHead, Told], tmp_path: Path
) -> None:
    target, head, told = of_pair2
    wider = widened(head, 96)
    assert wider.tensors["fc.weight"].shape == (96, 144)
    assert spoken(target, wider.write(tmp_path)) == told
    assert told[1][-1] > 0


def test_longer_attention_heads_are_the_same_pair(
    of_pair2: tuple[TargetModel, SavedHead, Told], tmp_path: Path
) -> None:
    _, head, told = of_pair2
    target = TargetModel.load(make_pair2(tmp_path / "target"), dtype=torch.float32)
    assert target.text_config.head_dim == 32
    assert spoken(target, longer_heads(head, 32).write(tmp_path / "head")) == told


def test_a_pruned_head_keeps_these_tokens(of_pair2: tuple[TargetModel, SavedHead, Told]) -> None:
    _, head, _ = of_pair2
    rows = torch.arange(768.0)[:, None].expand(768, 48)
    config = replace(head.config, draft_vocab_size=768)
    whole = SavedHead(config, head.facts, head.tensors | {"lm_head.weight": rows})
    kept = pruned(whole, [7, 700, 3])
    assert kept.config.draft_vocab_size == 3
    assert kept.tensors["lm_head.weight"][:, 0].tolist() == [3, 7, 700]
    assert (kept.tensors["d2t"] + torch.arange(3)).tolist() == [3, 7, 700]
    assert kept.tensors["t2d"].nonzero().flatten().tolist() == [3, 7, 700]
