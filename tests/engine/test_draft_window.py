"""A head that looks back no further than it did in training drafts on where the text is longer."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peagle import LLM, SamplingParams
from peagle.bundled import BUNDLED_PEAGLE, BUNDLED_TARGET
from peagle.engine.sequence import Sequence
from peagle.errors import CheckpointError, UserError
from peagle.evaluation.prompts import load_prompt_set
from peagle.models.checkpoint import trained_length
from peagle.speculation import ProposerInput
from tests.engine.engines import (
    PROMPTS,
    K,
    drive,
    look_before_contexts,
    make_llm,
    watch_drafts,
    watch_steps,
)
from tests.models.editing import edit_config


def window_of(llm: LLM) -> int | None:
    """The window of all layers, so many tokens of a prompt being read."""
    drafting: Any = llm.engine.drafting
    drafter = drafting.proposer.drafter
    (window,) = {*drafter.windows, drafter.reach}
    return window


@pytest.fixture
def telling(head_folders: Callable[..., Path], tmp_path: Path) -> Callable[..., str]:
    """telling(length, parallel=...) -> a head whose config.json tells that length of training."""

    def tell(length: object, *, parallel: bool = True) -> str:
        head = Path(shutil.copytree(head_folders(parallel=parallel), tmp_path / "telling"))
        edit_config(head, peagle={"max_sequence_length_trained": length})
        return str(head)

    return tell


@pytest.mark.parametrize("parallel", [True, False], ids=["peagle", "eagle3"])
@pytest.mark.parametrize(
    ("told", "asked", "expected"),
    [(None, None, None), (9, None, 9), (9, 4, 4), (9, 30, 30), (9, 0, None), (None, 7, 7)],
)
def test_the_window_is_what_was_asked_for_or_the_length_of_training(
    target_folder: Path,
    telling: Callable[..., str],
    parallel: bool,
    told: int | None,
    asked: int | None,
    expected: int | None,
) -> None:
    config = {"model": telling(told, parallel=parallel), "num_speculative_tokens": K}
    llm = make_llm(target_folder, {**config, "draft_window": asked})
    assert window_of(llm) == expected


def test_a_length_that_is_none_is_refused(target_folder: Path, telling: Callable[..., str]) -> None:
    with pytest.raises(CheckpointError, match="max_sequence_length_trained is 'long'; expected"):
        make_llm(target_folder, {"model": telling("long"), "num_speculative_tokens": K})


@pytest.mark.parametrize("value", [-1, 2.5, True, "9"])
def test_a_window_that_is_none_is_refused(target_folder: Path, value: object) -> None:
    with pytest.raises(UserError, match=r"draft_window is .*; expected a whole number, 0 for no"):
        make_llm(target_folder, {"model": "head", "draft_window": value})


@pytest.mark.slow
def test_the_bundled_head_drafts_on_beyond_the_lengths_of_its_training() -> None:
    """Without the window mask slots guess badly there; with it they do as before."""
    config = json.loads((BUNDLED_PEAGLE / "config.json").read_text())
    length = trained_length(config["peagle"])
    assert length == 768
    (prompt,) = load_prompt_set("humaneval", 1)
    params = SamplingParams(max_tokens=950, temperature=0.0, ignore_eos=True)
    found = {}
    for window in (None, 0):
        speculative = {"model": str(BUNDLED_PEAGLE), "draft_window": window}
        llm = LLM(BUNDLED_TARGET, speculative_config=speculative)
        size, steps, late = len(llm.requests.encode(prompt.text)), 0, 0
        for chunk in llm.stream([prompt.text], params):
            size += len(chunk.token_ids)
            steps += size > length
            late += len(chunk.token_ids) * (size > length)
        found[window] = late / steps
    assert found[None] > 1.5 * found[0], found


# ---- windows of config.json ----


@pytest.mark.parametrize(
    ("windows", "asked", "expected", "reach"),
    [
        ((6, None, 6), None, (6, None, 6), None),
        ((6, 6, 6), None, (6, 6, 6), 16),
        ((6, None, 6), 4, (4, 4, 4), 4),
        ((6, 6, 6), 0, (None, None, None), None),
    ],
    ids=str,
)
def test_windows_of_the_layers_unless_another_was_asked_for(
    target_folder: Path,
    head_folders: Callable[..., Path],
    windows: tuple[int | None, ...],
    asked: int | None,
    expected: tuple[int | None, ...],
    reach: int | None,
) -> None:
    head = head_folders(num_layers=3, windows=windows)
    edit_config(head, peagle={"max_sequence_length_trained": 9})
    config = {"model": str(head), "num_speculative_tokens": K, "draft_window": asked}
    drafting: Any = make_llm(target_folder, config).engine.drafting
    drafter = drafting.proposer.drafter
    assert (drafter.windows, drafter.reach) == (expected, reach)


@pytest.mark.slow
@pytest.mark.usefixtures("graphs_everywhere")
@pytest.mark.parametrize("shape", [None, {"max_nodes": 6}], ids=["chains", "trees"])
def test_captured_steps_keep_the_windows(
    target_folder: Path, head_folders: Callable[..., Path], shape: dict[str, int] | None
) -> None:
    """Drafts are those of eager steps, and others without the windows."""
    head = head_folders(windows=(4, None))
    found = []
    for eager, window in ((True, None), (False, None), (True, 0)):
        config = {"model": str(head), "draft_window": window, "num_speculative_tokens": 4}
        config |= {} if shape is None else {"parallel_drafting_spec": shape}
        sizes = {"block_size": 4, "max_model_len": 64, "max_num_seqs": 2}
        llm = LLM(
            target_folder,
            speculative_config=config,
            dtype="float32",
            device="cpu",
            enforce_eager=eager,
            **sizes,
        )
        drafts = watch_steps(llm)
        drive(llm, PROMPTS[:2], SamplingParams(max_tokens=5, ignore_eos=True))
        found.append(drafts)
    shared = found[0].keys() & found[1].keys()
    assert len(shared) > 5
    assert all(found[0][text] == found[1][text] for text in shared)
    assert found[0] != found[2]


# ---- prompts that are longer than the window ----

WINDOW, LONG = 8, PROMPTS[3]
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)


def make_windowed(folder: Path, head: Path, **options: Any) -> tuple[LLM, list[int]]:
    """An engine, and the positions that its head reads from now on."""
    config = {"model": str(head), "num_speculative_tokens": K, "draft_window": WINDOW}
    llm = make_llm(folder, {**config, **options.pop("speculative", {})}, **options)
    drafting: Any = llm.engine.drafting
    proposer, positions = drafting.proposer, list[int]()

    def watch(run: Callable[[ProposerInput], Any]) -> Callable[[ProposerInput], Any]:
        def watched(step: ProposerInput) -> Any:
            for start, count in zip(step.start_loc.tolist(), step.num_rows):
                positions.extend(step.positions_T[start : start + count].tolist())
            return run(step)

        return watched

    proposer.read, proposer.propose = watch(proposer.read), watch(proposer.propose)
    return llm, positions


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [True, False], ids=["peagle", "eagle3"])
@pytest.mark.parametrize("budget", [7, 512])
def test_the_head_reads_the_window_of_a_prompt_and_nothing_before_it(
    target_folder: Path, head_folders: Callable[..., Path], parallel: bool, budget: int
) -> None:
    head, options = head_folders(parallel=parallel), {"max_num_batched_tokens": budget}
    (expected,) = drive(make_llm(target_folder), [LONG], GREEDY)
    drafts: list[dict[tuple[int, ...], list[int]]] = []
    for poison, looks in ((0.0, False), (1e6, False), (1e6, True)):
        llm, positions = make_windowed(target_folder, head, block_size=1, **options)
        proposer: Any = llm.engine.drafting.proposer  # type: ignore[union-attr]
        for cache in proposer.caches:
            cache.keys[:] = cache.values[:] = poison
        if looks:
            look_before_contexts(proposer)
        drafts.append(watch_drafts(llm))
        (found,) = drive(llm, [LONG], GREEDY)
        assert found.output_token_ids == expected.output_token_ids
        assert found.drafter_start == min(positions) == len(LONG) - WINDOW
        assert len([p for p in positions if p < len(LONG) - 1]) == WINDOW - 1
    assert drafts[0] == drafts[1] != drafts[2], "the poison shows if attention looks there"


@pytest.mark.slow
def test_prompts_that_are_longer_than_the_window_share_their_blocks(
    target_folder: Path, head_folders: Callable[..., Path]
) -> None:
    llm, positions = make_windowed(target_folder, head_folders(), block_size=2)
    drafts = watch_drafts(llm)

    def run(prompt: list[int]) -> tuple[Sequence, dict[tuple[int, ...], list[int]]]:
        drafts.clear()
        positions.clear()
        (sequence,) = drive(llm, [prompt], GREEDY)
        return sequence, dict(drafts)

    first, expected = run(LONG)
    again, found = run(LONG)
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 34)
    assert found == expected and min(positions) == 34
    # A prompt that parts from it: half a window at least is read, by itself or by the first one.
    for shared, cached, start in ((32, 30, 26), (20, 18, 18)):
        other, _ = run([*LONG[:shared], 3, 4])
        assert (other.num_cached_tokens, other.drafter_start) == (cached, start)
        assert min(positions) == cached
    # A short one reads all of itself: nothing of theirs was read with what stands before it.
    short, _ = run(LONG[:WINDOW])
    assert (short.num_cached_tokens, short.drafter_start, min(positions)) == (0, 0, 0)
    assert run(LONG[:WINDOW])[0].num_cached_tokens == 6


def test_a_seed_of_drawn_drafts_reads_all_of_a_prompt(
    target_folder: Path, head_folders: Callable[..., Path]
) -> None:
    """Its output follows from its drafts, which do not depend on what is cached."""
    drawn = {"draft_sampling": "probabilistic"}
    llm, positions = make_windowed(target_folder, head_folders(), speculative=drawn, block_size=2)
    drive(llm, [LONG], GREEDY)
    positions.clear()
    (sequence,) = drive(llm, [LONG], SamplingParams(max_tokens=4, temperature=1.0, seed=3))
    assert (sequence.num_cached_tokens, sequence.drafter_start, min(positions)) == (0, 0, 0)
