"""The campaign over random schemas and expressions, as benchmarks/grammar_campaign.py runs it."""

from types import ModuleType
from typing import Any

import pytest

from peagle import LLM
from peagle.bundled import BUNDLED_PEAGLE
from peagle.config.structured import StructuredOutput

pytest.importorskip("xgrammar")

SPECULATIVE: dict[str, Any] = {"model": str(BUNDLED_PEAGLE), "num_speculative_tokens": 5}
NUM = 20


@pytest.mark.slow
@pytest.mark.parametrize("speculative", [None, SPECULATIVE], ids=["plain", "drafts"])
def test_finished_outputs_are_valid(
    campaign: ModuleType, speculative: dict[str, Any] | None
) -> None:
    llm = LLM(speculative_config=speculative, max_num_seqs=2 * NUM, kv_cache_gib=0.5)
    figures = campaign.run(llm, campaign.structures(NUM, 1), 1, 48)
    assert figures["faults"] == []
    assert figures["num_outputs"] == 2 * NUM
    assert figures["finish_reasons"]["stop"] >= NUM // 2
    assert not figures["finish_reasons"]["error"]


@pytest.mark.parametrize(
    ("structure", "text"),
    [
        (StructuredOutput.regex("a{200,5000}"), "a" * 199),
        (StructuredOutput.regex(r"\d"), "\u0663"),
        (StructuredOutput.json_schema({"type": "string", "maxLength": 3}), '"abcd"'),
        (StructuredOutput.json_schema({"type": "array"}), "[1"),
    ],
)
def test_the_campaign_tells_what_is_not_valid(
    campaign: ModuleType, structure: StructuredOutput, text: str
) -> None:
    assert not campaign.is_valid(structure, text)
