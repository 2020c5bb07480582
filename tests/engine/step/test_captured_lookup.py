"""Prompt lookup without a head in captured steps: drafts of the host, outputs of plain decoding."""

import random
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle import LLM, SamplingParams
from peagle.config import StructuredOutput
from peagle.engine import Sequence
from peagle.engine.depth import LookupDepth, ScheduledDepth
from peagle.engine.step.decode_step import BufferSizes, DecodeBuffers
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
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True, logit_bias=dict.fromkeys((40, 41), 20.0))
SAMPLED = replace(GREEDY, temperature=0.5, seed=3)
LETTERS = SamplingParams(max_tokens=24, structured_output=StructuredOutput("regex", "(ab|ba){9}"))
PENALISED = replace(SAMPLED, repetition_penalty=1.05, logprobs=1)
PROMPTS = [[5, 9, 200, 31, 5, 9], [17] * 8, [8, 8, 9, 9, 8, 8, 9], list(range(20, 40))]


def make(
    folder: Path, device: str, way: str = "captured", skips: bool = False, **options: Any
) -> LLM:
    config: Any = {"method": "ngram", "num_speculative_tokens": K}
    if skips:  # all drafts pass unverified
        config["synthetic_acceptance_rates"] = [1.0] * K
    options = {"block_size": 4, "max_model_len": 64, "max_num_seqs": 4, **options}
    options |= {"device": device, "dtype": "float32", "enforce_eager": way != "captured"}
    return LLM(folder, speculative_config=None if way == "plain" else config, **options)


def tokens_of(llm: LLM, params: list[SamplingParams]) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("lengths", [(4, 1), (3, 2), (5, 3)])
@torch.inference_mode()
def test_drafts_are_those_of_the_host(device: str, lengths: tuple[int, int]) -> None:
    dice, sizes, found = random.Random(1), LookupSizes(K, *lengths), list[list[int]]()
    buffers = DecodeBuffers(
        BufferSizes(48, 48, 10, 1, 4, 40, 40, lookup=sizes), torch.device(device)
    )
    rows = dict[int, Sequence | None]()
    for row in range(48):
        tokens = dice.choices(range(2 + row % 2), k=dice.choice([1, 2, 3, 20, 30, 38]))
        rows[row] = one = Sequence(row, tokens, GREEDY, row, frozenset(), has_copies=True)
        if row % 3:
            one.prediction = dice.choices(range(3), k=dice.randrange(40 - len(tokens)))
        one.drafts = [0] * dice.randrange(min(K, 40 - len(tokens)) + 1)
        most = len(one.drafts)
        found.append(PromptLookup(*lengths).find(tokens, most, one.prediction) if most else [])
    for _ in range(2):  # a launch leaves nothing behind for the next
        buffers.write(rows, vocab_size=4)
        step = buffers.rows(48, K)
        DecodeLookup(step, sizes).draft()
        buffers.switch(K)  # plain steps keep drafts
        counts = step.state.num_draft_tokens_B.tolist()
        assert [d[:n] for d, n in zip(step.drafts_BK.tolist(), counts, strict=True)] == found
    assert {*map(len, found)} == {0, 1, 2, 3}


@pytest.mark.slow
def test_captured_steps_count_what_eager_ones_do(
    device: str, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The last one ends last, and moves to the first row.
    params = [GREEDY, replace(GREEDY, prompt_lookup=False), SAMPLED]
    params += [replace(PENALISED, max_tokens=36)]
    plain = tokens_of(make(target_folder, device, "plain"), params)
    eager, choosing = (make(target_folder, device, way) for way in ("eager", "captured"))
    assert [tokens_of(llm, params) for llm in (eager, choosing)] == [plain, plain]
    wanted, found = eager.stats.speculation, choosing.stats.speculation
    assert 2 * found.num_accepted_tokens > wanted.num_accepted_tokens > 10
    monkeypatch.setattr(LookupDepth, "captured", ScheduledDepth.__call__)
    captured = make(target_folder, device)
    outputs = captured.generate(PROMPTS, params)
    assert [o.token_ids for o in outputs] == plain and not outputs[1].stats.num_drafts
    assert captured.stats.speculation == wanted
    assert captured.stats.eager_steps == {} and set(captured.stats.decode_steps) == {K}


@pytest.mark.slow
@pytest.mark.parametrize("skips", [False, True], ids=["", "planted fault"])
def test_preemption_plain_steps_and_cached_prefixes(
    device: str, skips: bool, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third step is plain, and a grammar refuses drafts."""
    steps = count()
    monkeypatch.setattr(LookupDepth, "captured", lambda *_: K * (next(steps) % 3 > 0))
    params = [GREEDY, SAMPLED, PENALISED, LETTERS]
    plain = tokens_of(make(target_folder, device, "plain"), params)
    llm = make(target_folder, device, skips=skips, num_kv_blocks=24, max_num_batched_tokens=9)
    assert (tokens_of(llm, params) == plain) != skips
    if skips:
        return
    assert llm.stats.num_preemptions > 0 and llm.stats.speculation.num_accepted_tokens > 10
    for _ in range(2):
        assert llm.generate(PROMPTS[:1], GREEDY)[0].token_ids == plain[0]
    assert llm.stats.num_cached_tokens > 0
    assert llm.stats.eager_steps == {} and set(llm.stats.decode_steps) == {0, K}
    assert llm.stats.num_free_kv_blocks == llm.stats.num_kv_blocks
