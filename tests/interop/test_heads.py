"""Our heads in real vLLM: they load, outputs are ours, and so is every count of accepted drafts.

Float32, greedy, K = 5, one request at a time, without prefix caching. Outputs may part where the
target itself is undecided: its two best logits there differ by less than 1e-4 (`NEAR_TIE`), by
transformers' own logits. Counts are compared exactly, for every prompt whose outputs are equal.
Both sides count drafts before stop conditions trim the output, so that the last draft of an output,
which may be cut off, counts on both as if it were not: nothing needs to be left out.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.evaluation.certify.reference import Reference, first_difference, load_reference
from peagle.models.checkpoint.formats import trained_length
from peagle.models.checkpoint.stored import read_head
from tests.interop.cases import CASES, SPLIT, STYLES, Case, K, Ours

pytestmark = pytest.mark.vllm
PARALLEL = [case for case in CASES if case.is_parallel]
# Prompts, of eight, whose outputs may part at a near-tie.
MOST_PARTED = 2


@pytest.fixture(scope="module")
def told_by_us(
    sides: dict[str, Ours], folders: dict[str, dict[str, Path]]
) -> dict[str, list[tuple[list[int], list[int]]]]:
    """Our output tokens and counts of every head in vLLM's style, by case."""
    return {one.name: sides[one.pair].speculate(folders[one.name]["vllm"]) for one in CASES}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_vllm_drafts_what_we_draft(
    case: Case,
    style: str,
    theirs: dict[str, dict[str, Any]],
    told_by_us: dict[str, list[tuple[list[int], list[int]]]],
    sides: dict[str, Ours],
) -> None:
    their = theirs[f"{case.name}/{style}"]
    assert "error" not in their, their["error"]
    assert_alike(their, told_by_us[case.name], sides[case.pair])


@pytest.fixture(scope="module")
def corrected_by_us(
    sides: dict[str, Ours], corrected_folders: dict[str, dict[str, Path]]
) -> dict[str, list[tuple[list[int], list[int]]]]:
    """Our output tokens and counts of every head with its correction, by case."""
    return {
        one.name: sides[one.pair].speculate(corrected_folders[one.name]["vllm"], correction=True)
        for one in PARALLEL
    }


@pytest.mark.parametrize("case", PARALLEL, ids=lambda case: case.name)
def test_with_the_plugin_vllm_corrects_as_we_do(
    case: Case,
    corrected_theirs: dict[str, dict[str, Any]],
    corrected_by_us: dict[str, list[tuple[list[int], list[int]]]],
    told_by_us: dict[str, list[tuple[list[int], list[int]]]],
    sides: dict[str, Ours],
) -> None:
    their = corrected_theirs[f"{case.name}/vllm"]
    assert "error" not in their, their["error"]
    assert_alike(their, corrected_by_us[case.name], sides[case.pair])
    without = [counts for _, counts in told_by_us[case.name]]
    assert their["counts"] != without, "the correction changes drafts"


@pytest.mark.parametrize("name", SPLIT)
def test_with_the_plugin_two_workers_correct_as_we_do(
    name: str,
    split_theirs: dict[str, dict[str, Any]],
    corrected_by_us: dict[str, list[tuple[list[int], list[int]]]],
    sides: dict[str, Ours],
) -> None:
    their = split_theirs[f"{name}/vllm"]
    assert "error" not in their, their["error"]
    assert_alike(their, corrected_by_us[name], sides["llama"])


@pytest.mark.parametrize("name", SPLIT[:2])
def test_with_the_plugin_a_schedule_gets_the_first_drafts_of_each_request(
    name: str,
    scheduled_theirs: dict[str, dict[str, Any]],
    corrected_folders: dict[str, dict[str, Path]],
    sides: dict[str, Ours],
) -> None:
    """Counts are those of our engine with K = 2."""
    their = scheduled_theirs[f"{name}/vllm/two"]
    assert "error" not in their, their["error"]
    options = {"correction": True, "num_speculative_tokens": 2}
    ours = sides["llama"].speculate(corrected_folders[name]["vllm"], **options)
    assert not any(any(counts[3:]) for counts in their["counts"])
    assert_alike({**their, "counts": [c[:3] for c in their["counts"]]}, ours, sides["llama"])


@pytest.mark.parametrize("name", SPLIT[:2])
@pytest.mark.parametrize("schedule", ["none", "by load"])
def test_with_the_plugin_outputs_do_not_follow_the_schedule(
    name: str,
    schedule: str,
    scheduled_theirs: dict[str, dict[str, Any]],
    sides: dict[str, Ours],
) -> None:
    their = scheduled_theirs[f"{name}/vllm/{schedule}"]
    assert "error" not in their, their["error"]
    parted = [a != b for a, b in zip(their["outputs"], sides["llama"].answers, strict=True)]
    assert sum(parted) <= MOST_PARTED
    drafts, *accepted = map(sum, zip(*their["counts"], strict=True))
    if schedule == "none":
        assert not drafts
        return
    # Two requests run after six that drafted nothing, at last one of them alone with all K.
    assert drafts > accepted[0] >= accepted[1] > 0
    assert accepted[0] > drafts / 2


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_counts_say_something(
    case: Case, told_by_us: dict[str, list[tuple[list[int], list[int]]]]
) -> None:
    """Heads that draft nothing right would have equal counts whatever vLLM made of them."""
    drafts, *accepted = map(sum, zip(*(counts for _, counts in told_by_us[case.name])))
    assert len(accepted) == K
    assert sum(count > 0 for count in accepted) >= 3
    assert sum(accepted) > drafts / 2
    assert accepted[0] < drafts or case.pair == "qwen3"


@pytest.mark.parametrize(
    "case", [one for one in CASES if one.name.endswith("windows")], ids=lambda case: case.name
)
def test_windows_change_what_is_drafted(
    case: Case,
    told_by_us: dict[str, list[tuple[list[int], list[int]]]],
    folders: dict[str, dict[str, Path]],
    sides: dict[str, Ours],
) -> None:
    """Counts that are the same without windows would be equal in a vLLM that does not read them."""
    folder, ours = folders[case.name]["vllm"], sides[case.pair]
    head = read_head(folder)
    config, facts = head.config, head.facts
    (window,) = set(config.windows)
    if case.pair == "llama-long":
        assert window == trained_length(facts)
        assert window is not None and window < min(map(len, ours.prompts))
    whole = ours.speculate(folder, draft_window=0)
    assert [counts for _, counts in whole] != [counts for _, counts in told_by_us[case.name]]


def test_styles_are_one_head(theirs: dict[str, dict[str, Any]]) -> None:
    for case in CASES:
        one, other = (theirs[f"{case.name}/{style}"] for style in STYLES)
        assert (one["outputs"], one["counts"]) == (other["outputs"], other["counts"]), case.name


def assert_alike(
    their: dict[str, Any], told_by_us: list[tuple[list[int], list[int]]], ours: Ours
) -> None:
    """That counts are equal for every prompt whose outputs are, and that few outputs part."""
    parted = 0
    for row, (tokens, counts) in enumerate(told_by_us):
        if their["outputs"][row] == tokens:
            assert their["counts"][row] == counts, f"prompt {row}"
        else:
            parted += 1
            assert_near_tie(ours, row, tokens, their["outputs"][row])
    assert parted <= MOST_PARTED


def assert_near_tie(ours: Ours, row: int, tokens: list[int], their: list[int]) -> None:
    """That two outputs part where the target itself is undecided."""
    prompt = ours.prompts[row]
    model = load_reference(ours.pair.target, torch.float32)
    with torch.inference_mode():
        logits_TV = model(torch.tensor([prompt + tokens])).logits[0]
    reference = Reference(tokens, logits_TV[len(prompt) - 1 : -1])
    difference = first_difference(str(row), their, reference)
    assert difference is not None and difference.is_near_tie, difference
