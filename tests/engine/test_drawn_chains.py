"""Chains of drawn drafts that lead the trees of some requests, beside others with trees alone.

Eager steps have the exact distribution of the target, and captured steps are eager ones. On a CPU
the latter are not captured and their kernels run under Triton's interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle import LLM, SamplingParams
from peagle.config import SpeculativeConfig, StructuredOutput
from peagle.engine import engine_plan
from peagle.engine.depth import ScheduledDepth
from peagle.engine.drafting import draws_chain
from peagle.engine.tree_record import TreeRecord
from peagle.errors import UserError
from peagle.kernels.sampling.logits_rules import TreeRows
from peagle.models.checkpoint import save_drafter
from peagle.models.target import TargetModel
from peagle.speculation import verification
from tests.conftest import make_drafter
from tests.engine.feature_reference import Reference, fit, make_folder

TREES = {"num_parallel_trees": 3, "prediction_depth": 3, "max_nodes": 6}
interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET is not 1"
)


def make(target: Path, head: Path, *, eager: bool, first: Any = 1.0, **options: Any) -> LLM:
    """An engine with trees; chains lead those of a temperature of at least `first`."""
    speculative = {"model": str(head), "parallel_drafting_spec": TREES, "drawn_chains_from": first}
    sizes: dict[str, Any] = {"max_model_len": 64, "block_size": 4, "max_num_seqs": 2, "seed": 1}
    sizes["device"] = "cpu"
    speculative["num_speculative_tokens"] = 3  # else K would follow the load
    if "schedule" in options:
        speculative["num_speculative_tokens_per_batch_size"] = options.pop("schedule")
    return LLM(
        target,
        speculative_config=speculative,
        dtype="float32",
        enforce_eager=eager,
        **{**sizes, **options},
    )


# ---- the distribution ----

PROMPT = (1, 1, 3, 1, 3, 3, 3)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Reference]:
    """A target of few tokens, a head and the reference."""
    folder, head = make_folder(tmp_path_factory.mktemp("target")), tmp_path_factory.mktemp("head")
    target = TargetModel.load(folder, dtype=torch.float32)
    save_drafter(head, make_drafter(target, num_layers=1, draft_vocab_size=7, seed=5))
    return folder, head, Reference(folder)


def fit_of(
    world: tuple[Path, Path, Reference],
    schedule: list[list[int]] | None = None,
    max_num_seqs: int = 64,
) -> float:
    """P-value of three tokens each, of requests that share steps with others that have trees."""
    folder, head, reference = world
    params = SamplingParams(temperature=1.0, max_tokens=3, ignore_eos=True)
    llm = make(folder, head, eager=True, max_num_seqs=max_num_seqs, schedule=schedule, first=0.9)
    others = [replace(params, temperature=0.7), replace(params, seed=3)]
    num_outputs = 1500
    asked = [*[params] * num_outputs, *others * 40]
    found = llm.generate([PROMPT] * len(asked), asked)[:num_outputs]
    assert sum(one.stats.num_accepted_tokens for one in found) > num_outputs / 5
    outputs = [tuple(output.token_ids) for output in found]
    return fit(outputs, reference.joint(params, PROMPT))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [None, [[1, 40, 5], [41, 64, 2]]], ids=["whole", "cut"])
def test_outputs_have_the_references_distribution(
    world: tuple[Path, Path, Reference], schedule: list[list[int]] | None
) -> None:
    assert fit_of(world, schedule) > 1e-3


class FollowingDepth(ScheduledDepth):
    """Many nodes behind a step in which most requests accepted drafts, and few behind others."""

    def __init__(self) -> None:
        super().__init__(lambda _: 6)
        self.k = 6

    def __call__(self, num_sequences: int) -> int:
        return self.k

    def record(self, k: int, accepted: Any, num_sequences: int, seconds: Any) -> None:
        self.k = 6 if sum(map(bool, accepted)) > 0.4 * len(accepted) else 1


@pytest.mark.slow
def test_k_may_follow_the_acceptance_of_past_steps(
    world: tuple[Path, Path, Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the engine's own choice does where steps run as graphs."""
    monkeypatch.setattr(engine_plan, "make_depth", lambda *_, **__: FollowingDepth())
    assert fit_of(world, max_num_seqs=16) > 1e-3


def own_behind_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a rejected draft stands the target's own token, not the one of rejection."""
    verify_drawn = verification._verify_drawn

    def changed(probs_RV: Any, q_BKV: Any, rows: Any, sampling: Any, tokens_BJ: Any) -> Any:
        found = verify_drawn(probs_RV, q_BKV, rows, sampling, tokens_BJ)
        own_B = tokens_BJ.gather(1, found.num_accepted_B.unsqueeze(1)).squeeze(1)
        return replace(found, next_tokens_B=own_B)

    monkeypatch.setattr(verification, "_verify_drawn", changed)


def siblings_by_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a rejected draft another node passes with p / q, as if it were drawn."""
    with_drawn = verification._with_drawn

    def changed(probs_RV: Any, q_BCV: Any, rows: Any, sampling: Any, tokens_BJ: Any) -> Any:
        found_BJ = with_drawn(probs_RV, q_BCV, rows, sampling, tokens_BJ)
        for b, (drafts, parents) in enumerate(zip(rows.drafts_BK, rows.paths.parents_BN)):
            beside = [n for n in range(int(rows.num_draft_tokens_B[b])) if not parents[n]]
            if q_BCV[b, 0].any() and found_BJ[b, 0] != drafts[0] and len(beside) > 1:
                token = int(drafts[beside[1]])
                p = probs_RV[rows.first_row_B[b], token]
                if torch.rand(()) * q_BCV[b, 0, token] < p:
                    found_BJ[b, 0] = token
        return found_BJ

    monkeypatch.setattr(verification, "_with_drawn", changed)


def lengths_by_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejection sampling sees no chain whose first draft is one of some tokens."""
    leading = TreeRows.leading

    def changed(self: TreeRows, num_leading_B: torch.Tensor, most: int) -> Any:
        return leading(self, torch.where(self.drafts_BK[:, 0] < 4, 0, num_leading_B), most)

    monkeypatch.setattr(TreeRows, "leading", changed)


def children_always_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the token that replaces a draft a node passes whatever the target's own token is."""
    with_drawn = verification._with_drawn

    def changed(probs_RV: Any, q_BCV: Any, rows: Any, sampling: Any, tokens_BJ: Any) -> Any:
        found_BJ = with_drawn(probs_RV, q_BCV, rows, sampling, tokens_BJ)
        for b, (drafts, parents) in enumerate(zip(rows.drafts_BK, rows.paths.parents_BN)):
            for n in range(q_BCV.shape[1], int(rows.num_draft_tokens_B[b])):
                if q_BCV[b, 0].any() and parents[n] > q_BCV.shape[1]:
                    found_BJ[b, parents[n]] = drafts[n]
        return found_BJ

    monkeypatch.setattr(verification, "_with_drawn", changed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plant", [own_behind_a_chain, siblings_by_ratio, lengths_by_drafts, children_always_pass]
)
def test_a_wrong_rule_is_noticed(
    plant: Callable[[pytest.MonkeyPatch], None],
    world: tuple[Path, Path, Reference],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    assert fit_of(world) < 1e-4


# ---- captured steps ----

HOT = SamplingParams(max_tokens=6, temperature=1.5, ignore_eos=True)
PARAMS = [
    HOT,
    replace(HOT, seed=7, max_tokens=5),
    replace(HOT, temperature=0.8, top_k=40, max_tokens=4),
    replace(HOT, top_p=0.9, num_speculative_tokens=2, frequency_penalty=0.5, logprobs=1),
    replace(HOT, temperature=0.0, max_tokens=4),
]
PROMPTS = [[5, 9, 200, 31], [17] * 12, [3], list(range(20, 35)), [8, 8, 1]]


def outputs(llm: LLM) -> list[Any]:
    found = llm.generate(PROMPTS, PARAMS)
    assert llm.stats.num_free_kv_blocks == llm.stats.num_kv_blocks
    logprobs = [[(one.token_id, one.rank) for one in o.logprobs or []] for o in found]
    return [(o.token_ids, o.stats, tops) for o, tops in zip(found, logprobs, strict=True)]


@pytest.fixture(scope="module")
def head(head_folders: Callable[..., Path]) -> Path:
    return head_folders(parallel=True)


@pytest.mark.slow
@pytest.mark.usefixtures("graphs_everywhere")
@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def test_captured_steps_are_eager_ones(target_folder: Path, head: Path, device: str) -> None:
    """Requests with chains and with trees join and leave."""
    pytest.importorskip("triton")
    eager, llm = (make(target_folder, head, eager=eager, device=device) for eager in (True, False))
    expected, found = outputs(eager), outputs(llm)
    assert found == expected
    assert llm.stats.eager_steps == {}
    assert sum(one[1].num_accepted_tokens for one in found) > 1


@pytest.mark.slow
@pytest.mark.usefixtures("graphs_everywhere", "torch_attention")
@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def test_captured_steps_are_eager_ones_where_many_drafts_pass(
    world: tuple[Path, Path, Reference], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few tokens, so that what replaces a draft often is another node."""
    pytest.importorskip("triton")
    folder, head, _ = world
    hot = SamplingParams(temperature=1.6, max_tokens=14, ignore_eos=True)
    asked = [replace(hot, temperature=t) for t in (1.6, 1.6, 1.0, 0.0)]
    asked += [replace(hot, seed=3, max_tokens=5)]
    monkeypatch.setattr(TreeRecord, "looks", False)  # a captured step learns a step later
    found = []
    for eager in (True, False):
        llm = make(folder, head, eager=eager, first=0.0, device=device)
        drawn = llm.generate([PROMPT] * len(asked), asked)
        found.append([(output.token_ids, output.stats) for output in drawn])
        assert eager or llm.stats.eager_steps == {}
    assert found[0] == found[1]
    by_depth = [sum(x) for x in zip(*(s.num_accepted_tokens_per_pos for _, s in found[1]))]
    assert by_depth[0] > by_depth[1] > 3


@pytest.mark.slow
@interpreted
@pytest.mark.usefixtures("graphs_everywhere", "torch_attention")
def test_steps_in_which_no_request_draws_do_nothing_for_chains(
    target_folder: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from peagle.engine.step import decode_step, trees

    called = set[str]()

    def noted(name: str, run: Callable[..., None]) -> Callable[..., None]:
        def wrapped(*given: Any, **named: Any) -> None:
            called.add(name)
            run(*given, **named)

        return wrapped

    of_chains = {"draw_drafts": decode_step, "reject_drafts": decode_step, "merge_chains": trees}
    for name, module in of_chains.items():
        monkeypatch.setattr(module, name, noted(name, getattr(module, name)))
    llm = make(target_folder, head, eager=False, first=0.0)
    llm.generate([[5, 9, 3]] * 2, [replace(HOT, temperature=0.0), replace(HOT, seed=3)])
    assert llm.stats.eager_steps == {} and not called
    llm.generate([[5, 9, 3]], HOT)
    assert called == of_chains.keys()


@pytest.mark.slow
@interpreted
@pytest.mark.usefixtures("graphs_everywhere", "torch_attention")
def test_the_load_cuts_trees(target_folder: Path, head: Path) -> None:
    """Nodes of a step are shared, and each chain comes before all nodes of trees."""
    pytest.importorskip("triton")
    llm = make(target_folder, head, eager=False, schedule=[[1, 2, 2]])
    engine, counts = llm.engine, dict[bool, set[int]]()
    for prompt, params in zip(PROMPTS[:2], PARAMS, strict=False):
        engine.add_request(prompt, params)
    while engine.has_unfinished:
        for output in engine.step():
            seen = counts.setdefault(output.sequence.draws_chain, set())
            seen.add(output.num_drafted)
    assert llm.stats.eager_steps == {}
    assert min(counts[True] - {0}) >= 1 and max(counts[False]) >= 2


# ---- the configuration ----


@pytest.mark.parametrize("first", [0.9, 0, None, "never"])
def test_who_gets_chains(target_folder: Path, head: Path, first: Any) -> None:
    """Requests with a seed, a structured output or a prediction have trees without a chain."""
    engine = make(target_folder, head, eager=True, first=first).engine
    letters, are_led = StructuredOutput("regex", "[a-c]{18}"), first != "never"
    for params, draws in (
        (HOT, are_led),
        (replace(HOT, temperature=0.9), are_led),
        (replace(HOT, temperature=0.89), first in (0, None)),
        (replace(HOT, temperature=0.6), first in (0, None)),
        (replace(HOT, temperature=0.59), first == 0),
        (replace(HOT, seed=1), False),
        (replace(HOT, temperature=0.0), False),
        (replace(HOT, prediction=[5, 6]), False),
        (replace(HOT, structured_output=letters, ignore_eos=False), False),
    ):
        assert draws_chain(params, engine.speculative) is draws
    assert engine.add_request([1, 2], HOT).draws_chain is are_led


@pytest.mark.parametrize("value", [-0.1, "hot", float("nan"), True])
def test_temperatures_that_are_none(value: Any) -> None:
    trees = {"model": "head", "parallel_drafting_spec": TREES}
    with pytest.raises(
        UserError, match=r"drawn_chains_from .* a temperature of at least 0, \"never\""
    ):
        SpeculativeConfig(**trees, drawn_chains_from=value)
    message = r'drawn_chains_from is 1\.0; expected "never" or none without'
    with pytest.raises(UserError, match=message):
        SpeculativeConfig(model="head", drawn_chains_from=1.0)


def test_trees_of_head_and_text_take_a_temperature() -> None:
    """`prompt_lookup` without a shape asks for trees too."""
    config = SpeculativeConfig(model="head", prompt_lookup=True, drawn_chains_from=0.9)
    assert config.trees is not None and config.drawn_chains_from == 0.9
    with pytest.raises(UserError, match='expected "never" or none without'):
        SpeculativeConfig(method="ngram", prompt_lookup=True, drawn_chains_from=0.9)
