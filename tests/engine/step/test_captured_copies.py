"""Copies of the text in captured steps: outputs of plain decoding, counters of eager steps."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from peagle import LLM, SamplingParams
from peagle.config import StructuredOutput
from peagle.engine.step import graph_runner
from peagle.engine.tree_record import TreeRecord
from tests.kernels.devices import DEVICES

pytest.importorskip("triton")
decode_step = pytest.importorskip("peagle.engine.step.decode_step")
pytestmark = pytest.mark.usefixtures("graphs_everywhere")
GREEDY = SamplingParams(max_tokens=14, ignore_eos=True)
LONG = replace(GREEDY, max_tokens=24)  # until blocks are too few
SAMPLED = replace(GREEDY, temperature=0.4, seed=3)
KINDS = pytest.mark.parametrize("parallel", [True, False], ids=["peagle", "eagle3"])
PROMPTS = [[5, 9, 200, 31, 5, 9], [17] * 8, [8, 8, 9, 9, 8, 8, 9], list(range(20, 40))]


def make(
    target: Path,
    head: Path | None,
    *,
    eager: bool,
    copies: bool = True,
    drawn_chains_from: float | None = None,
    device: str = "cpu",
    **options: Any,
) -> LLM:
    config: dict[str, Any] | None = None
    if head is not None:
        shape = {"num_parallel_trees": 3, "prediction_depth": 3, "max_nodes": 9}
        config = {"model": str(head), "parallel_drafting_spec": shape, "prompt_lookup": copies}
        config["drawn_chains_from"] = drawn_chains_from
        config["num_speculative_tokens"] = 3  # else K would follow the load
    options = {"block_size": 4, "max_model_len": 64, "max_num_seqs": 2, **options}
    return LLM(
        target,
        speculative_config=config,
        dtype="float32",
        device=device,
        enforce_eager=eager,
        **options,
    )


@pytest.mark.parametrize("copies", [False, True])
@KINDS
def test_the_head_is_compiled_for_the_slots_of_its_steps(
    parallel: bool,
    copies: bool,
    target_folder: Path,
    head_folders: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = make(target_folder, head_folders(parallel=parallel), eager=False, copies=copies)
    assert llm.engine._pipeline is not None
    runner, plan, told = llm.engine._pipeline.runner, llm.engine._plan, list[list[int]]()
    monkeypatch.setattr(graph_runner, "accelerate_target", lambda *_: None)
    monkeypatch.setattr(
        graph_runner, "accelerate_drafter", lambda _, slots, **__: told.append(slots)
    )
    graph_runner.accelerate(llm.target, plan.drafter, 2, plan.depth, plan.trees, plan.max_path)
    sizes = [(rows, k) for rows, k in graph_runner.greatest_depths(runner._sizes).items() if k]
    drafts = [runner._make_step(*size)._draft for size in sizes]
    beams = [] if parallel else [3 * rows for rows, _ in sizes]
    slots = [len(draft._hidden_SD) for draft in drafts if draft is not None]
    assert [sorted(slots) for slots in told] == [sorted([*slots, *beams])]
    assert len(sizes) == len(slots) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("torch_attention")
@pytest.mark.parametrize("device", DEVICES)
@KINDS
def test_captured_steps_join_the_copies_of_eager_ones(
    parallel: bool,
    device: str,
    target_folder: Path,
    head_folders: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A captured step learns a step later.
    monkeypatch.setattr(TreeRecord, "looks", False)
    head = head_folders(parallel=parallel)
    build = partial(make, target_folder, device=device)
    params = [GREEDY, GREEDY, SAMPLED, GREEDY]
    alone = build(None, eager=True)
    # Requests go on behind text that begins to repeat.
    begun = alone.generate(PROMPTS, [replace(one, max_tokens=20) for one in params])
    prompts = [prompt + o.token_ids for prompt, o in zip(PROMPTS, begun, strict=True)]
    plain = alone.generate(prompts, params)
    eager = build(head, eager=True)
    wanted = eager.generate(prompts, params)
    captured = build(head, eager=False)
    found = captured.generate(prompts, params)
    assert [o.token_ids for o in found] == [o.token_ids for o in plain]
    assert [o.token_ids for o in wanted] == [o.token_ids for o in plain]
    assert captured.stats.eager_steps == {}
    assert captured.stats.speculation == eager.stats.speculation
    accepted = captured.stats.speculation.num_accepted_tokens_per_pos
    assert len(accepted) > 3 and accepted[4] > 0, "deeper than the head drafts"
    without = build(head, eager=True, copies=False)
    without.generate(prompts, params)
    assert eager.stats.speculation.acceptance_length > without.stats.speculation.acceptance_length
    few = [replace(one, max_tokens=5) for one in params[:2]]
    refusing = [replace(one, prompt_lookup=False) for one in few]
    wanted = without.generate(prompts[:2], few)
    for llm in (eager, captured):
        refused = llm.generate(prompts[:2], refusing)
        assert [o.stats for o in refused] == [o.stats for o in wanted], "a request may say no"


@pytest.mark.slow
@pytest.mark.usefixtures("torch_attention")
@pytest.mark.parametrize("device", DEVICES)
def test_rules_drawn_chains_and_preemption(
    device: str, target_folder: Path, head_folders: Callable[..., Path]
) -> None:
    """A grammar, penalties, and a chain of drawn drafts run beside; blocks are few."""
    head = head_folders(parallel=True)
    build = partial(make, target_folder, device=device)
    letters = StructuredOutput("regex", "[a-c]{18}")
    params = [
        replace(LONG, structured_output=letters, ignore_eos=False),
        replace(LONG, repetition_penalty=1.2, logprobs=1),
        replace(LONG, temperature=1.2, seed=None),
        LONG,
    ]
    plain = build(None, eager=True).generate(PROMPTS, params)
    llm = build(head, eager=False, drawn_chains_from=1.0, num_kv_blocks=20)
    found = llm.generate(PROMPTS, params)
    for i in (0, 1, 3):
        assert found[i].token_ids == plain[i].token_ids
    assert len(found[2].token_ids) == 24
    assert llm.stats.eager_steps == {} and llm.stats.num_preemptions > 0
    assert llm.stats.num_free_kv_blocks == llm.stats.num_kv_blocks


@pytest.mark.slow
@pytest.mark.usefixtures("torch_attention")
@pytest.mark.parametrize("device", DEVICES)
def test_predictions_in_captured_steps(
    device: str,
    target_folder: Path,
    head_folders: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Right, half right, wrong and too long for the row; preemptions write rows anew."""
    monkeypatch.setattr(TreeRecord, "looks", False)
    build = partial(make, target_folder, head_folders(parallel=True), device=device)
    params = [replace(LONG, temperature=0.4, seed=seed) for seed in range(4)]
    without = build(eager=True, copies=False).generate(PROMPTS, params)
    outputs = [o.token_ids for o in without]
    given = [outputs[0], [*outputs[1][:9], 7, *outputs[1][10:]], [7] * 64, outputs[3] * 2]
    params = [replace(o, prediction=p) for o, p in zip(params, given, strict=True)]
    stats = []
    for options in ({"eager": True}, {"eager": False}, {"eager": False, "num_kv_blocks": 20}):
        llm = build(**options)
        found = llm.generate(PROMPTS, params)
        assert [o.token_ids for o in found] == outputs and not llm.stats.eager_steps
        stats.append(llm.stats)
        # A step verifies nine nodes: a good prediction fills them from the first token on.
        assert [found[i].stats.num_drafts for i in (0, 3)] == [3, 3]
    assert stats[0].speculation == stats[1].speculation and stats[2].num_preemptions


@pytest.mark.slow
@pytest.mark.usefixtures("torch_attention")
@pytest.mark.parametrize("device", DEVICES)
def test_long_copies_of_all_sequences_leave_room_for_fewer_mask_slots(
    device: str,
    target_folder: Path,
    head_folders: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All accept long copies at once, and a graph has fewer slots than these need."""
    monkeypatch.setattr(TreeRecord, "looks", False)
    head = head_folders(parallel=True)
    build = partial(make, target_folder, head, device=device, max_num_seqs=4)
    prompts = [PROMPTS[3]] * 4
    (without,) = build(eager=True, copies=False).generate(prompts[:1], [SAMPLED])
    # The prediction's last token is wrong, so that the head's own drafts follow.
    params = replace(SAMPLED, prediction=[*without.token_ids[:10], 7])
    depths, expand = list[list[int]](), decode_step.expand_draft_batch

    def expand_and_tell(*batch: Any, num_draft_tokens_B: Tensor, **options: Any) -> None:
        expand(*batch, num_draft_tokens_B=num_draft_tokens_B, **options)
        if device == "cpu":  # a graph replays without Python
            depths.append(num_draft_tokens_B.tolist())

    monkeypatch.setattr(decode_step, "expand_draft_batch", expand_and_tell)
    llm = build(eager=False)
    found = llm.generate(prompts, [params] * 4)
    assert [o.token_ids for o in found] == [without.token_ids] * 4
    assert llm.stats.eager_steps == {}
    if device == "cpu":
        assert [3, 3, 3, 1] in depths and [3] * 4 in depths, "the last one has room for one draft"


def test_copies_under_a_grammar_in_eager_steps(
    target_folder: Path, head_folders: Callable[..., Path]
) -> None:
    """The grammar lets the text alone draft what the head does not: tokens that repeat."""
    letters = StructuredOutput("regex", "(abcd){12}")
    params = replace(GREEDY, max_tokens=60, structured_output=letters, ignore_eos=False)
    plain = make(target_folder, None, eager=True, max_model_len=96).generate(PROMPTS, params)
    head = head_folders(parallel=True)
    found = make(target_folder, head, eager=True, max_model_len=96).generate(PROMPTS, params)
    assert [o.token_ids for o in found] == [o.token_ids for o in plain]
    for output in found:
        assert output.text == "abcd" * 12
        assert sum(output.stats.num_accepted_text_tokens_per_pos) > 10
