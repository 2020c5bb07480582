"""A seed gives the output of plain decoding, whatever is drafted; drawn drafts keep their K."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle import LLM, SamplingParams
from peagle.engine import Sequence, sampler
from peagle.engine.drafting import Drafting, HeadDrafting
from peagle.speculation.verification import Verified, verify
from tests.engine.engines import config_of, drive, know_the_answer, make_llm

SEEDED = SamplingParams(max_tokens=24, temperature=0.9, ignore_eos=True)
# What is asked for, each by a request of its own.
REQUESTS = [
    replace(SEEDED, seed=0),
    replace(SEEDED, seed=2**62, top_k=20),
    replace(SEEDED, seed=2, top_p=0.8, temperature=1.4),
    replace(SEEDED, seed=3, min_p=0.05, logit_bias={5: 3.0, 9: -5.0}),
    replace(SEEDED, seed=4, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2),
    replace(SEEDED, seed=5, typical_p=0.6, temperature=0.3),
    replace(SEEDED, temperature=0.0),
]
# The text says itself again, so that prompt lookup finds drafts.
PROMPTS = [[5, 9, 200, 31, 8] * 3 + [i] for i in range(len(REQUESTS))]
LIKELY = dict.fromkeys((5, 9, 200, 31, 8), 6.0)
MOST = 5
BY_LOAD = [[1, 1, 5], [2, 2, 2], [3, 4, 0], [5, 8, 3]]


def requests_of(way: str) -> list[SamplingParams]:
    """Requests that prompt lookup can draft for: their output is of few tokens."""
    if way != "ngram":
        return REQUESTS
    return [replace(r, logit_bias={**dict(r.logit_bias), **LIKELY}) for r in REQUESTS]


def make(
    folder: Path,
    heads: dict[bool, Path],
    way: str,
    answers: list[list[int]] | None = None,
    *,
    schedule: list[list[int]] | None = None,
    **options: Any,
) -> LLM:
    """An engine that drafts up to MOST tokens; six of ten drafts of a head are the answers'."""
    config = config_of(way, heads)
    if config is not None:
        config |= {
            "num_speculative_tokens": MOST,
            "num_speculative_tokens_per_batch_size": schedule,
        }
        if way.endswith("trees"):
            shape = {"num_parallel_trees": 2, "prediction_depth": MOST, "max_nodes": 2 * MOST}
            config["parallel_drafting_spec"] = shape
    llm = make_llm(folder, config, **options)
    if answers and way not in ("plain", "ngram"):
        know_the_answer(llm, answers, MOST, share=0.6)
    return llm


@cache
def plain_outputs(folder: Path, of_likely: bool) -> list[list[int]]:
    """Each request alone, without drafts."""
    llm = make_llm(folder)
    requests = requests_of("ngram" if of_likely else "")
    return [
        llm.generate(prompt, params)[0].token_ids
        for prompt, params in zip(PROMPTS, requests, strict=True)
    ]


def texts(outputs: list[list[int]]) -> list[list[int]]:
    return [prompt + output for prompt, output in zip(PROMPTS, outputs, strict=True)]


def num_by_acceptance(llm: LLM) -> tuple[int, int]:
    stats = llm.stats.speculation
    return stats.num_accepted_tokens, stats.num_draft_tokens - stats.num_accepted_tokens


WAYS = pytest.mark.parametrize("way", ["peagle", "trees", "eagle3", "eagle3 trees", "ngram"])


@pytest.mark.slow
@WAYS
def test_a_k_that_follows_the_load(
    target_folder: Path, heads: dict[bool, Path], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other requests come and go meanwhile, and K with them."""
    monkeypatch.setattr("peagle.engine.depth.RESUME_STEPS", 1)
    requests = requests_of(way)
    plain = plain_outputs(target_folder, way == "ngram")
    llm = make(target_folder, heads, way, texts(plain), schedule=BY_LOAD)
    late: list[Sequence] = []
    depths = set[int]()

    def come(step: int, sequences: list[Sequence]) -> None:
        depths.add(llm.engine.drafting.max_drafts if llm.engine.drafting and step else MOST)
        if step in (3, 6, 7, 10, 12):
            one = 2 + len(late)
            late.append(llm.engine.add_request(PROMPTS[one], requests[one]))

    first = drive(llm, PROMPTS[:2], requests[:2], come)
    assert [s.output_token_ids for s in (*first, *late)] == plain
    assert len(depths) > 2 and min(num_by_acceptance(llm)) > 10


@pytest.mark.slow
@WAYS
def test_preemption(target_folder: Path, heads: dict[bool, Path], way: str) -> None:
    requests = requests_of(way)
    plain = plain_outputs(target_folder, way == "ngram")
    llm = make(target_folder, heads, way, texts(plain), num_kv_blocks=26, block_size=4)
    assert [o.token_ids for o in llm.generate(PROMPTS, requests)] == plain
    assert llm.stats.num_preemptions > 0
    assert min(num_by_acceptance(llm)) > 10, "drafts pass, and drafts are refused"


@pytest.mark.slow
def test_rejection_sampling_would_be_noticed(
    target_folder: Path, heads: dict[bool, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule of drawn drafts, with a q that is one-hot, gives other tokens."""
    requests = requests_of("ngram")
    plain = plain_outputs(target_folder, True)
    llm = make(target_folder, heads, "ngram")

    def by_rejection(logits: Any, rows: Any, sampling: Any, *_: Any) -> Verified:
        q = torch.nn.functional.one_hot(rows.drafts_BK, logits.shape[1]).double()
        return verify(logits, rows, sampling, q)

    monkeypatch.setattr(sampler, "verify", by_rejection)
    assert [o.token_ids for o in llm.generate(PROMPTS, requests)] != plain


# ---- drawn drafts ----

DRAWN = [replace(SEEDED, seed=i, num_speculative_tokens=k) for i, k in enumerate((5, 3, 1, 5))]
# Whoever runs beside them: without a seed, or greedy, K follows the load.
OTHERS = [SEEDED, replace(SEEDED, temperature=0.0), SEEDED]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["peagle", "eagle3"])
@pytest.mark.parametrize("follows", [False, True], ids=["", "planted fault"])
def test_drawn_drafts_of_a_seed_keep_their_k(
    target_folder: Path,
    heads: dict[bool, Path],
    kind: str,
    follows: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    way = f"{kind} probabilistic"
    alone = make(target_folder, heads, way)
    prompts = PROMPTS[: len(DRAWN)]
    wanted = [alone.generate(p, params)[0] for p, params in zip(prompts, DRAWN, strict=True)]
    assert min(num_by_acceptance(alone)) > 0
    if follows:
        monkeypatch.setattr(HeadDrafting, "max_drafts_of", Drafting.max_drafts_of)
    llm = make(target_folder, heads, way, schedule=[[1, 1, 5], [2, 2, 2], [3, 8, 0]])
    found = llm.generate(PROMPTS, [*DRAWN, *OTHERS])
    seeded = [output.token_ids for output in found[: len(DRAWN)]]
    assert (seeded == [output.token_ids for output in wanted]) is not follows
    if not follows:
        for output, params in zip(found, DRAWN, strict=False):
            k = params.num_speculative_tokens or 0
            assert output.stats.num_draft_tokens == k * output.stats.num_drafts
    assert not any(output.stats.num_draft_tokens for output in found[len(DRAWN) :])
