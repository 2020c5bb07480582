"""Prefix caching: the next turn of a conversation computes little, and nothing else changes.

On the bundled pair, a second turn computes the new message and what stands before it in the last
block: at most 5% of its tokens.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from peagle import LLM, SamplingParams
from peagle.bundled import BUNDLED_EAGLE3, BUNDLED_PEAGLE, BUNDLED_TARGET
from peagle.engine.drafting import HeadDrafting
from peagle.engine.outputs import RequestOutput
from peagle.evaluation.prompts import load_prompt_set
from peagle.messages import ChatMessage
from peagle.models.target import TargetModel
from tests.engine.engines import K, config_of, make_llm, watch_drafts

TEMPLATE = (
    "{% for m in messages %}# {{ m.role }}\n{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant\n{% endif %}"
)
ANSWER = SamplingParams(max_tokens=24)
MOST_COMPUTED = 0.05


def drafts_of(llm: LLM) -> dict[tuple[int, ...], list[int]]:
    """What a head drafts behind which tokens, from now on."""
    return watch_drafts(llm) if isinstance(llm.engine.drafting, HeadDrafting) else {}


def facts(output: RequestOutput) -> tuple[Any, ...]:
    return output.token_ids, output.text, output.finish_reason, output.stats


# ---- a conversation with the bundled pair ----


@pytest.fixture(scope="module")
def bundled_target() -> TargetModel:
    return TargetModel.load(BUNDLED_TARGET, dtype=torch.float64)


def bundled_llm(target: TargetModel, head: Path, **options: Any) -> LLM:
    config = {"model": str(head), "num_speculative_tokens": K}
    return LLM(model=target, speculative_config=config, **options)


def long_code(llm: LLM, num_tokens: int) -> str:
    """Held-out functions, one after the other."""
    code = "\n".join(prompt.text for prompt in load_prompt_set("heldout_code", 9))
    return str(llm.tokenizer.decode(llm.tokenizer.encode(code)[:num_tokens]))


@pytest.mark.slow
@pytest.mark.parametrize("head", [BUNDLED_EAGLE3, BUNDLED_PEAGLE], ids=lambda head: head.name)
def test_the_second_turn_computes_little(bundled_target: TargetModel, head: Path) -> None:
    cached = bundled_llm(bundled_target, head)
    alone = bundled_llm(bundled_target, head, enable_prefix_caching=False)
    drafts = drafts_of(cached), drafts_of(alone)
    question = ChatMessage("user", long_code(cached, 900))
    (first,) = cached.chat([question], ANSWER, chat_template=TEMPLATE)
    assert 850 < len(first.output.prompt_token_ids) < 950
    before = cached.stats

    turn = [*first.messages, ChatMessage("user", "Now write a test of the last function.")]
    (found,) = cached.chat(turn, ANSWER, chat_template=TEMPLATE)
    (expected,) = alone.chat(turn, ANSWER, chat_template=TEMPLATE)
    assert facts(found.output)[:3] == facts(expected.output)[:3]
    # The prompts are longer than the head's window: its context begins where the first one's did.
    same = [drafts[0].get(text) == draft for text, draft in drafts[1].items()]
    assert sum(same) >= 0.8 * len(same)
    assert expected.output.stats.num_accepted_tokens > 0

    num_cached, num_prompt = found.output.num_cached_tokens, len(found.output.prompt_token_ids)
    assert 0 < num_prompt - num_cached < MOST_COMPUTED * num_prompt
    after = cached.stats
    assert after.num_cached_tokens - before.num_cached_tokens == num_cached
    assert after.num_prompt_tokens - before.num_prompt_tokens == num_prompt
    assert alone.stats.num_cached_tokens == 0


# ---- many conversations, little room ----

WAYS = ["plain", "eagle3", "peagle", "peagle probabilistic", "trees", "ngram"]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_prompts_that_part_at_any_token(
    target_folder: Path, heads: dict[bool, Path], way: str
) -> None:
    """A prompt may leave a cached one before, at and behind the border of a block."""
    config = config_of(way, heads)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    cached = make_llm(target_folder, config, block_size=4)
    alone = make_llm(target_folder, config, block_size=4, enable_prefix_caching=False)
    text = list(range(10, 34))
    cached.generate([text], params)
    drafts = drafts_of(cached), drafts_of(alone)
    for length in range(7, 14):
        prompt = [*text[:length], 300, 301, 302, 303]
        (output,), (expected,) = (llm.generate([prompt], params) for llm in (cached, alone))
        assert facts(output) == facts(expected)
        # A block counts with the token after it: the drafter's last slot reads that one.
        assert output.num_cached_tokens == 4 * ((length - 1) // 4)
    assert drafts[0] == drafts[1]


@pytest.mark.parametrize("num_draft_tokens", [0, K])
def test_outputs_of_one_request_share_its_prompt_whether_they_draft_or_not(
    target_folder: Path, heads: dict[bool, Path], num_draft_tokens: int
) -> None:
    llm = make_llm(target_folder, config_of("peagle", heads), block_size=4)
    params = SamplingParams(
        n=3, max_tokens=5, temperature=1.0, seed=3, num_speculative_tokens=num_draft_tokens
    )
    (output,) = llm.generate([list(range(20, 41))], params)
    assert len(output.outputs) == 3
    assert llm.engine.stats.num_cached_tokens == 2 * 20
