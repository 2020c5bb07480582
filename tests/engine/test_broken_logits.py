"""A request for which the target gives NaN ends with an error; the others do not notice."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from peagle import LLM, SamplingParams
from tests.engine.engines import assert_idle, make_llm

BROKEN = 300  # the token whose embedding is NaN
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True, bad_words=((BROKEN,),))
# With these seeds the head never drafts BROKEN, whose keys would be NaN for the rows before it too.
WAYS = {
    "greedy": replace(GREEDY, bad_words=()),
    "sampled": replace(GREEDY, temperature=1.0, top_p=0.9, seed=6),
    "greedy, logprobs": replace(GREEDY, logprobs=2),
    "sampled, prompt logprobs": replace(
        GREEDY, temperature=1.0, seed=6, prompt_logprobs=3, presence_penalty=0.5
    ),
}
GOOD = [[*range(20, 20 + size)] for size in (1, 9, 30)]
BAD = [[BROKEN, *range(40, 75)], [*range(50, 60), BROKEN, 7]]


@pytest.fixture(scope="module", params=["plain", "peagle"])
def make(
    request: pytest.FixtureRequest, target_folder: Path, head_folders: Callable[..., Path]
) -> Callable[[], LLM]:
    head = {"model": str(head_folders(parallel=True)), "num_speculative_tokens": 3}
    options: dict[str, Any] = {"block_size": 4, "num_kv_blocks": 60, "max_num_batched_tokens": 16}

    def build() -> LLM:
        return make_llm(target_folder, head if request.param == "peagle" else None, **options)

    return build


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_only_the_request_with_nan_fails(make: Callable[[], LLM], way: str) -> None:
    params = WAYS[way]
    healthy = make()
    expected = [healthy.generate([prompt], params)[0] for prompt in GOOD]
    llm = make()
    llm.target.embedding_weight().data[BROKEN] = math.nan
    for _ in range(2):  # the second time over blocks that NaN stood in
        outputs = llm.generate([BAD[0], *GOOD, BAD[1]], params)
        for output in (outputs[0], outputs[-1]):
            assert output.finish_reason == "error" and output.token_ids == []
            assert output.error is not None
            assert f"NaN or infinite after {len(output.prompt_token_ids)} tokens" in output.error
            assert output.to_json()["error"] == output.error
        for output, wanted in zip(outputs[1:-1], expected, strict=True):
            assert (output.token_ids, output.finish_reason) == (wanted.token_ids, "length")
            assert output.error is None and "error" not in output.to_json()
            for one, other in zip(output.logprobs or [], wanted.logprobs or [], strict=True):
                assert one.logprob == pytest.approx(other.logprob)
        assert_idle(llm)


def test_a_request_fails_where_nan_begins(make: Callable[[], LLM]) -> None:
    """What was given before stays; drafts behind the place are not given."""
    healthy = make()
    (whole,) = healthy.generate([GOOD[2]], WAYS["greedy"])
    llm = make()
    target: Any = llm.target
    compute, size = target.compute_logits, len(GOOD[2])
    target.compute_logits = lambda hidden: compute(hidden) * (math.nan if late() else 1.0)

    def late() -> bool:
        return any(len(s) >= size + 5 for s in llm.engine.scheduler.running)

    (output,) = llm.generate([GOOD[2]], WAYS["greedy"])
    assert output.finish_reason == "error" and 5 <= len(output.token_ids) < 12
    assert output.token_ids == whole.token_ids[: len(output.token_ids)]
    assert f"({len(output.token_ids)} of them output)" in (output.error or "")
    assert_idle(llm)
