"""Prompt lookup without a head in captured steps: drafts of the host, outputs of plain decoding."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle import LLM, SamplingParams
from peagle.config import StructuredOutput
from peagle.engine import Sequence
from peagle.engine.depth import LookupDepth, ScheduledDepth
from peagle.engine.step.decode_step import BufferSizes, DecodeBuffers, DecodeStep
from peagle.engine.step.lookup import DecodeLookup, LookupSizes
from peagle.speculation import PromptLookup
from tests.kernels.devices import DEVICES

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.usefixtures("graphs_everywhere", "torch_attention"),
    pytest.mark.parametrize("device", DEVICES),
]
K = 3
# Few tokens are likely, so that the text says itself again.
GREEDY = SamplingParams(
    max_tokens=24, ignore_eos=True, logit_bias=dict.fromkeys((40, 41, 99), 20.0)
)
SAMPLED = replace(GREEDY, temperature=0.5, seed=3)
LETTERS = SamplingParams(max_tokens=24, structured_output=StructuredOutput("regex", "(ab|ba){9}"))
PARAMS = [GREEDY, SAMPLED, replace(SAMPLED, repetition_penalty=1.05, logprobs=1), GREEDY]
PROMPTS = [[5, 9, 200, 31, 5, 9], [17] * 8, [8, 8, 9, 9, 8, 8, 9], list(range(20, 40))]


def make(folder: Path, device: str, way: str = "captured", **options: Any) -> LLM:
    config = {"method": "ngram", "num_speculative_tokens": K} if way != "plain" else None
    options |= {"block_size": 4, "max_model_len": 64, "max_num_seqs": 2, "dtype": "float32"}
    eager = way != "captured"
    return LLM(folder, speculative_config=config, device=device, enforce_eager=eager, **options)


def tokens_of(llm: LLM, params: list[SamplingParams]) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("lengths", [(4, 1), (3, 2), (7, 5)])
@torch.inference_mode()
def test_drafts_are_those_of_the_host(device: str, lengths: tuple[int, int]) -> None:
    dice, max_len, rows = random.Random(sum(lengths)), 40, list[Sequence]()
    lookup = LookupSizes(K, *lengths)
    sizes = BufferSizes(48, 48 * (K + 1), 10, 1, 4, max_len, max_len, lookup=lookup)
    wanted = list[list[int]]()
    for row in range(48):
        length = dice.choice([1, 2, 3, max_len - 2, dice.randrange(4, max_len - 1)])
        tokens = dice.choices(range(dice.choice([2, 4])), k=length)
        k, reads = dice.randrange(K + 1), row != 5
        rows.append(Sequence(row, tokens, GREEDY, row, frozenset(), has_copies=reads))
        rows[-1].drafts = [0] * min(k, max_len - length)
        count = len(rows[-1].drafts)
        wanted.append(PromptLookup(*lengths).find(tokens, count) if count and reads else [])
    buffers = DecodeBuffers(sizes, torch.device(device))
    for _ in range(2):  # a launch leaves nothing behind for the next
        buffers.write(dict(enumerate(rows)), vocab_size=4)
        step = buffers.rows(48, K)
        DecodeLookup(step, lookup).draft()
        counts = step.state.num_drafts_B.tolist()
        assert [d[:n] for d, n in zip(step.drafts_BK.tolist(), counts, strict=True)] == wanted
    assert {len(found) for found in wanted} == set(range(K + 1))


@pytest.mark.slow
def test_captured_steps_count_what_eager_ones_do(
    device: str, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tokens_of(make(target_folder, device, "plain"), PARAMS)
    eager, choosing = (make(target_folder, device, way) for way in ("eager", "captured"))
    assert [tokens_of(llm, PARAMS) for llm in (eager, choosing)] == [plain, plain]
    wanted, found = eager.stats.speculation, choosing.stats.speculation
    assert 2 * found.num_accepted_tokens > wanted.num_accepted_tokens > 20
    monkeypatch.setattr(LookupDepth, "captured", ScheduledDepth.__call__)
    captured = make(target_folder, device)
    assert tokens_of(captured, PARAMS) == plain
    assert captured.stats.speculation == wanted and wanted.num_accepted_tokens_per_pos[-1]
    assert captured.stats.eager_steps == {} and set(captured.stats.decode_steps) == {K}
    # A request may say no, or ask for fewer.
    params = [replace(GREEDY, prompt_lookup=False), replace(SAMPLED, num_speculative_tokens=1)] * 2
    counts = [[o.stats for o in llm.generate(PROMPTS, params)] for llm in (eager, captured)]
    assert counts[0] == counts[1] and not counts[1][0].num_drafts and counts[1][1].num_drafts


def trusting(step: DecodeStep) -> None:
    """The step's drafts skip verification."""
    own, tokens_T = step.rows, step.scratch.tokens_R
    columns_K = torch.arange(K, device=tokens_T.device)
    is_draft_BK = columns_K < own.state.num_drafts_B[:, None]
    at_BK = step.batch.query_start_loc[:-1, None] + columns_K
    at_BK = at_BK.clamp_max(len(tokens_T) - 1)
    change_BK = torch.where(is_draft_BK, own.drafts_BK - tokens_T[at_BK], 0)
    tokens_T.index_add_(0, at_BK.flatten(), change_BK.flatten())


@pytest.mark.slow
@pytest.mark.parametrize("skips", [False, True], ids=["", "planted fault"])
def test_preemption_plain_steps_and_cached_prefixes(
    device: str, skips: bool, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third step is plain, and a grammar refuses drafts."""
    steps, verify = iter(range(10**9)), DecodeStep.verify
    monkeypatch.setattr(LookupDepth, "captured", lambda *_: K * (next(steps) % 3 > 0))
    if skips:
        monkeypatch.setattr(DecodeStep, "verify", lambda step: (trusting(step), verify(step)))
    params = [*PARAMS[:3], LETTERS]
    plain = tokens_of(make(target_folder, device, "plain"), params)
    llm = make(target_folder, device, num_kv_blocks=17, max_num_batched_tokens=9)
    assert (tokens_of(llm, params) == plain) != skips
    if skips:
        return
    assert llm.stats.num_preemptions > 0 and llm.stats.speculation.num_accepted_tokens > 10
    for _ in range(2):
        assert llm.generate(PROMPTS[:1], GREEDY)[0].token_ids == plain[0]
    assert llm.stats.num_cached_tokens > 0
    assert llm.stats.eager_steps == {} and set(llm.stats.decode_steps) == {0, K}
    assert llm.stats.num_free_kv_blocks == llm.stats.num_kv_blocks
