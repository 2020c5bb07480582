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
pytestmark = pytest.mark.usefixtures("graphs_everywhere", "torch_attention")
# Few tokens are likely, so that the text says itself again.
GREEDY = SamplingParams(
    max_tokens=24, ignore_eos=True, logit_bias=dict.fromkeys((40, 41, 99), 20.0)
)
SAMPLED = replace(GREEDY, temperature=0.5, seed=3)
LETTERS = SamplingParams(max_tokens=24, structured_output=StructuredOutput("regex", "(ab|ba){9}"))
PARAMS = [GREEDY, SAMPLED, replace(SAMPLED, repetition_penalty=1.05, logprobs=1), LETTERS]
PROMPTS = [[5, 9, 200, 31, 5, 9], [17] * 8, [8, 8, 9, 9, 8, 8, 9], list(range(20, 40))]
K = 3


def make(target: Path, device: str, *, k: int = K, eager: bool = False, **options: Any) -> LLM:
    config = {"method": "ngram", "num_speculative_tokens": k} if k else None
    options = {"block_size": 4, "max_model_len": 64, "max_num_seqs": 2, **options}
    options |= {"dtype": "float32", "device": device, "enforce_eager": eager}
    return LLM(target, speculative_config=config, **options)


def tokens_of(llm: LLM, params: list[SamplingParams]) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS, params)]


def num_accepted(llm: LLM) -> int:
    return llm.stats.speculation.num_accepted_tokens


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths", [(4, 1), (3, 2), (7, 5)])
@torch.inference_mode()
def test_drafts_are_those_of_the_host(device: str, lengths: tuple[int, int]) -> None:
    dice, max_len, num_seqs = random.Random(sum(lengths)), 40, 48
    sizes = BufferSizes(
        *(num_seqs, num_seqs * (K + 1), 10, 1, 4, max_len, max_len),
        lookup=LookupSizes(K, *lengths),
    )
    buffers = DecodeBuffers(sizes, torch.device(device))
    wanted, sequences = [], list[Sequence]()
    for row in range(num_seqs):
        length = dice.choice([1, 2, 3, max_len - 2, dice.randrange(4, max_len - 1)])
        tokens = dice.choices(range(dice.choice([2, 4])), k=length)
        sequences.append(Sequence(row, tokens, GREEDY, row, frozenset(), has_copies=row != 5))
        sequences[-1].num_speculative_tokens = dice.randrange(K + 1)
        room = min(sequences[-1].num_speculative_tokens, max_len - length)
        found = PromptLookup(*lengths).find(tokens, room) if room and row != 5 else []
        wanted.append(found)
    buffers.write(dict(enumerate(sequences)), vocab_size=4)
    rows = buffers.rows(num_seqs, K)
    lookup = DecodeLookup(rows, sizes.lookup or LookupSizes(0, 0, 0))
    for _ in range(2):  # a launch leaves nothing behind for the next
        room_B = max_len - 1 - rows.state.first_positions_B
        rows.state.num_drafts_B.copy_(torch.minimum(rows.limits.k_B, room_B))
        lookup.draft()
        counts = rows.state.num_drafts_B.tolist()
        drafts = rows.drafts_BK.tolist()
        assert [row[:count] for row, count in zip(drafts, counts, strict=True)] == wanted
        assert not any(any(row[count:]) for row, count in zip(drafts, counts, strict=True))
    assert {len(found) for found in wanted} == set(range(K + 1))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_captured_steps_count_what_eager_ones_do(
    device: str, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The host leaves out what a grammar refuses, which a graph verifies.
    params = [*PARAMS[:3], GREEDY]
    plain = tokens_of(make(target_folder, device, k=0, eager=True), params)
    eager = make(target_folder, device, eager=True)
    assert tokens_of(eager, params) == plain
    choosing = make(target_folder, device)
    assert tokens_of(choosing, params) == plain
    assert 2 * num_accepted(choosing) > num_accepted(eager) > 20
    monkeypatch.setattr(LookupDepth, "captured", ScheduledDepth.__call__)
    captured = make(target_folder, device)
    assert tokens_of(captured, params) == plain
    assert captured.stats.eager_steps == {} and set(captured.stats.decode_steps) == {K}
    assert captured.stats.speculation == eager.stats.speculation
    assert captured.stats.speculation.num_accepted_tokens_per_pos[-1] > 0
    # A request may say no, or ask for fewer.
    params = [replace(GREEDY, prompt_lookup=False), replace(SAMPLED, num_speculative_tokens=1)] * 2
    counts = [[o.stats for o in llm.generate(PROMPTS, params)] for llm in (eager, captured)]
    assert counts[0] == counts[1] and not counts[1][0].num_drafts and counts[1][1].num_drafts


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("skips", [False, True], ids=["", "planted fault"])
def test_preemption_plain_steps_and_cached_prefixes(
    device: str, skips: bool, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third step is plain. The fault: drafts of the text skip verification."""
    monkeypatch.setattr(LookupDepth, "captured", lambda self, _: K * (next(steps) % 3 > 0))
    steps = iter(range(10**9))
    if skips:
        verify = DecodeStep.verify

        def trusting(step: DecodeStep) -> None:
            own, tokens_T = step.rows, step.scratch.tokens_R
            columns = torch.arange(K, device=tokens_T.device)
            at_BK = step.batch.query_start_loc[:-1].unsqueeze(1) + columns
            is_draft_BK = columns < own.state.num_drafts_B.unsqueeze(1)
            tokens_T[at_BK[is_draft_BK]] = own.drafts_BK[is_draft_BK]
            verify(step)

        monkeypatch.setattr(DecodeStep, "verify", trusting)
    reference = make(target_folder, device, k=0, eager=True)
    plain, again = tokens_of(reference, PARAMS), reference.generate(PROMPTS[2], GREEDY)[0].token_ids
    llm = make(target_folder, device, num_kv_blocks=17, max_num_batched_tokens=9)
    assert (tokens_of(llm, PARAMS) == plain) != skips
    assert num_accepted(llm) > 10
    if skips:
        return
    assert llm.stats.num_preemptions > 0 and llm.stats.num_cached_tokens == 0
    for _ in range(2):
        assert llm.generate(PROMPTS[2], GREEDY)[0].token_ids == again
    assert llm.stats.num_cached_tokens > 0
    assert llm.stats.eager_steps == {} and set(llm.stats.decode_steps) == {0, K}
    assert llm.stats.num_free_kv_blocks == llm.stats.num_kv_blocks
