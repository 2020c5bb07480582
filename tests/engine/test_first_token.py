"""When drafts are made: the tokens of a step are out before the drafter reads them."""

from pathlib import Path
from typing import Any

import pytest

from peagle import LLM, SamplingParams
from tests.engine.engines import PROMPTS, assert_idle, config_of, make_llm

METHODS = pytest.mark.parametrize("name", ["peagle", "eagle3", "ngram"])
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


def watched(llm: LLM) -> list[int]:
    """The number of drafting calls so far, in a list of one."""
    drafting: Any = llm.engine.drafting
    draft, calls = drafting.draft, [0]

    def counted(*given: Any) -> None:
        calls[0] += 1
        draft(*given)

    drafting.draft = counted
    return calls


@METHODS
def test_tokens_wait_for_no_drafts(target_folder: Path, heads: dict[bool, Path], name: str) -> None:
    llm = make_llm(target_folder, config_of(name, heads))
    calls = watched(llm)
    llm.engine.add_request(PROMPTS[0], PARAMS)
    for step in range(3):
        (output,) = llm.engine.step()
        assert output.new_token_ids and calls == [step]


@METHODS
def test_an_output_of_one_token_is_never_drafted_for(
    target_folder: Path, heads: dict[bool, Path], name: str
) -> None:
    llm = make_llm(target_folder, config_of(name, heads))
    calls = watched(llm)
    (output,) = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=1, ignore_eos=True))
    assert len(output.token_ids) == 1 and calls == [0]
    assert_idle(llm)


@METHODS
def test_a_request_that_ends_before_its_drafts_shares_its_blocks(
    target_folder: Path, heads: dict[bool, Path], name: str
) -> None:
    """Its neighbour is drafted for as if it were alone; the next request finds the prompt."""
    config = config_of(name, heads)
    (alone,) = make_llm(target_folder, config).generate([PROMPTS[1]], PARAMS)
    llm = make_llm(target_folder, config, block_size=4)
    engine = llm.engine
    long = PROMPTS[3]
    leaving, staying = (engine.add_request(prompt, PARAMS) for prompt in (long, PROMPTS[1]))
    engine.step()
    calls = watched(llm)
    engine.cancel(leaving)
    while engine.has_unfinished:
        engine.step()
    assert calls[0] > 0 and staying.output_token_ids == alone.token_ids
    assert staying.stats == alone.stats
    assert_idle(llm)
    plain = SamplingParams(max_tokens=2, ignore_eos=True, num_speculative_tokens=0)
    (again,) = llm.generate([long], plain)
    assert again.num_cached_tokens == (len(long) - 1) // 4 * 4
