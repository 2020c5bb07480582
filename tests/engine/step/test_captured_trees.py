"""Candidate trees in decode steps as graphs: outputs of plain decoding, counters of eager steps.

On a CPU the steps are not captured and their kernels run under Triton's interpreter; attention's in
the tests of outputs, of beams and of a corrected head alone.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peagle import LLM, SamplingParams
from peagle.bundled import BUNDLED_PEAGLE, BUNDLED_TARGET
from peagle.config import StructuredOutput
from peagle.engine.grammar import GrammarState
from peagle.engine.sequence import SequenceStatus
from peagle.engine.step.graph_runner import Flight, GraphRunner, RowTokens
from peagle.kernels.attention.kv_moves import SlotMoves
from peagle.kernels.paths import TreePaths
from peagle.speculation import Drafts
from tests.engine.engines import replant

pytest.importorskip("triton")

from peagle.engine.step import decode_step
from peagle.engine.step.trees import DecodeTrees

WRITE_TREES = DecodeTrees.write_trees

pytestmark = pytest.mark.usefixtures("graphs_everywhere")
interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET is not 1"
)
PROMPTS = [[5, 9, 200, 31], [17] * 12, [3], list(range(20, 35))]
GREEDY = SamplingParams(max_tokens=7, ignore_eos=True)
# By min-p: the search for a cut by top-k takes the interpreter as long as the rest of a step.
SAMPLED = SamplingParams(max_tokens=6, temperature=0.9, min_p=0.02, seed=5)
PARAMS = [GREEDY, SAMPLED, replace(SAMPLED, seed=7, min_p=0.0), replace(GREEDY, max_tokens=5)]
SHAPE = {"num_parallel_trees": 3, "prediction_depth": 4, "max_nodes": 7}


def make(
    target: Path,
    head: Path | None,
    *,
    eager: bool = False,
    shape: dict[str, int] = SHAPE,
    schedule: list[list[int]] | str | None = None,
    device: str = "cpu",
    **options: Any,
) -> LLM:
    config: dict[str, Any] | None = None
    if head is not None:
        config = {"model": str(head), "parallel_drafting_spec": shape, "prompt_lookup": False}
        config["num_speculative_tokens"] = shape["prediction_depth"]
        config["num_speculative_tokens_per_batch_size"] = schedule
    options = {"block_size": 4, "max_model_len": 64, "max_num_seqs": 2, **options}
    return LLM(
        target,
        speculative_config=config,
        dtype="float32",
        device=device,
        enforce_eager=eager,
        **options,
    )


Trees = dict[tuple[int, ...], tuple[list[int], list[int]]]


def plant_answers(
    llm: LLM, answers: Sequence[list[int]], monkeypatch: pytest.MonkeyPatch, num_right: int = 9
) -> Trees:
    """Put trees of random shapes in the place of the head's, with right paths of some length.

    They depend on the tokens before them alone: a captured step has those of an eager one. Answers
    are prompts with what plain decoding makes of them. Returns where the head's own trees will be,
    by the tokens before them.
    """
    drafting: Any = llm.engine.drafting
    proposer, pipeline = drafting.proposer, llm.engine._pipeline
    seen: Trees = {}

    def planted(step: Any, drafts: Drafts) -> Drafts:
        assert drafts.parents_BK is not None
        for b, (history, count) in enumerate(zip(step.histories, drafts.lens, strict=True)):
            if history and count:
                tree = (x[b, :count].tolist() for x in (drafts.tokens_BK, drafts.parents_BK))
                seen[tuple(history)] = next(tree), next(tree)

        def want(b: int, path: list[int]) -> int | None:
            history = list(step.histories[b])
            if not history:
                return None
            (answer,) = {tuple(a) for a in answers if a[: len(history)] == history}
            right = len(history) * 7 % (num_right + 1)
            rest = answer[len(history) :][:right]
            return next(iter(rest[len(path) :]), None)

        return replant(step, drafts, want)

    if pipeline is None:
        propose = proposer.propose
        proposer.propose = lambda step: planted(step, propose(step))
        return seen
    runner: Any = pipeline.runner
    write_trees = WRITE_TREES

    def write_other(
        self: DecodeTrees,
        tokens_BN: torch.Tensor,
        parents_BN: torch.Tensor,
        scores_BN: torch.Tensor,
        _: None = None,
    ) -> None:
        state, histories, lens = self._state, list[list[int]](), list[int]()
        depths = state.num_draft_tokens_B.tolist()
        for row, (depth, first) in enumerate(zip(depths, state.first_positions_B.tolist())):
            sequence, history = runner._sequences[row], list[int]()
            if sequence is not None and depth:  # the host does not know its newest tokens yet
                known = sequence.token_ids
                history = next(a for a in answers if a[: len(known)] == known)[: first + 1]
            histories.append(history)
            lens.append(proposer.count_nodes(depth) if history else 0)
        step = SimpleNamespace(histories=histories, num_draft_tokens=depths)
        drafts = planted(step, Drafts(tokens_BN, lens, parents_BK=parents_BN))
        assert drafts.parents_BK is not None
        write_trees(self, drafts.tokens_BK, drafts.parents_BK, scores_BN)

    monkeypatch.setattr(DecodeTrees, "write_trees", write_other)
    return seen


def plain_outputs(
    target: Path, prompts: Sequence[list[int]], params: Sequence[SamplingParams], max_model_len: int
) -> list[Any]:
    llm = make(target, None, eager=True, max_model_len=max_model_len)
    without_drafts = [replace(one, num_speculative_tokens=None) for one in params]
    found = llm.generate(list(prompts), without_drafts)
    return [(output.token_ids, output.finish_reason) for output in found]


def answers_of(
    target: Path, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
) -> list[list[int]]:
    """What plain decoding makes of each prompt, longer than anyone asks for."""
    params = [replace(one, max_tokens=40, ignore_eos=True, stop_token_ids=()) for one in params]
    found = plain_outputs(target, prompts, params, max_model_len=128)
    return [prompt + tokens for prompt, (tokens, _) in zip(prompts, found, strict=True)]


def outputs(llm: LLM, params: Sequence[SamplingParams]) -> list[Any]:
    found = llm.generate(PROMPTS, list(params))
    assert llm.stats.num_free_kv_blocks == llm.stats.num_kv_blocks
    return [(o.token_ids, o.finish_reason, o.stats, logprobs_of(o)) for o in found]


def logprobs_of(output: Any) -> list[Any]:
    """Which tokens have log-probabilities, and these as far as kernels round alike."""
    return [
        (one.token_id, one.rank, [(token, round(x, 3)) for token, x in one.top])
        for one in output.logprobs or []
    ]


def check(
    target: Path,
    head: Path,
    params: Sequence[SamplingParams],
    monkeypatch: pytest.MonkeyPatch,
    max_model_len: int = 64,
    answers: list[list[int]] | None = None,
    **options: Any,
) -> LLM:
    """Captured steps give the outputs of plain decoding and the counters of eager steps.

    The head's trees are the same too: it reads what it should. `answers` are those of `answers_of`
    if not given.
    """
    answers = answers or answers_of(target, PROMPTS, params)
    wanted = plain_outputs(target, PROMPTS, params, max_model_len)
    eager, llm = (
        make(target, head, eager=eager, max_model_len=max_model_len, **options)
        for eager in (True, False)
    )
    own = plant_answers(eager, answers, monkeypatch)
    expected = outputs(eager, params)
    seen = plant_answers(llm, answers, monkeypatch)
    found = outputs(llm, params)
    assert [one[:2] for one in found] == wanted
    assert found == expected
    assert llm.stats.eager_steps == {}
    assert llm.stats.speculation == eager.stats.speculation
    both = seen.keys() & own.keys()
    assert len(both) > 4 and all(seen[history] == own[history] for history in both)
    return llm


@pytest.fixture(scope="module")
def head(head_folders: Callable[..., Path]) -> Path:
    return head_folders(parallel=True)


@pytest.fixture(scope="module")
def eagle3_head(head_folders: Callable[..., Path]) -> Path:
    return head_folders(parallel=False, num_layers=1)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("shape", [(1, 1, 1), (4, 5, 20)])
def test_outputs_and_counters(
    target_folder: Path, head: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int]
) -> None:
    """Requests join and leave; each has its own depth, and draws or not."""
    sizes = dict(zip(SHAPE, shape, strict=True))
    params = [*PARAMS[:3], replace(PARAMS[3], max_tokens=8, num_speculative_tokens=1)]
    llm = check(target_folder, head, params, monkeypatch, shape=sizes)
    assert 0 < llm.stats.speculation.num_accepted_tokens < llm.stats.speculation.num_draft_tokens


@pytest.mark.slow
@pytest.mark.usefixtures("torch_attention")
@interpreted
def test_stops_and_the_end_of_the_context(
    target_folder: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop id lies within accepted paths; nodes want more slots than the context has."""
    answers = answers_of(target_folder, PROMPTS, PARAMS)
    ends = [answer[len(prompt) + 4] for answer, prompt in zip(answers, PROMPTS, strict=True)]
    params = [
        replace(one, max_tokens=30, stop_token_ids=stop_ids, num_speculative_tokens=k)
        for one, stop_ids, k in zip(PARAMS, ((ends[0],), (ends[1],), (), ()), (4, 4, 4, 2))
    ]
    llm = check(
        target_folder, head, params, monkeypatch, max_model_len=20, shape=SHAPE | {"max_nodes": 15}
    )
    assert llm.stats.speculation.num_accepted_tokens > 0


@pytest.mark.slow
@interpreted
def test_beams_of_an_eagle3_head(
    target_folder: Path, eagle3_head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The passes over beams are parts of the step; each request has its own depth."""
    params = [*PARAMS[:3], replace(PARAMS[3], num_speculative_tokens=2)]
    llm = check(target_folder, eagle3_head, params, monkeypatch)
    assert 0 < llm.stats.speculation.num_accepted_tokens < llm.stats.speculation.num_draft_tokens


@pytest.mark.slow
@pytest.mark.usefixtures("torch_attention")
@interpreted
@pytest.mark.parametrize("beam", [1, 8])
def test_beams_at_the_end_of_the_context(
    target_folder: Path, eagle3_head: Path, monkeypatch: pytest.MonkeyPatch, beam: int
) -> None:
    """Wide beams find no KV slots there, so that trees are flatter."""
    params = [replace(one, max_tokens=30) for one in PARAMS]
    shape = {"num_parallel_trees": beam, "prediction_depth": 3, "max_nodes": 15}
    llm = check(target_folder, eagle3_head, params, monkeypatch, max_model_len=18, shape=shape)
    assert llm.stats.speculation.num_accepted_tokens > 0


@pytest.mark.slow
@pytest.mark.usefixtures("torch_attention")
@interpreted
@pytest.mark.parametrize("fault", [False, True], ids=["", "planted fault"])
def test_preemption_keeps_trees(
    target_folder: Path, head: Path, monkeypatch: pytest.MonkeyPatch, fault: bool
) -> None:
    """Requests of higher priority come while a step is in flight."""
    params = replace(SAMPLED, max_tokens=16, ignore_eos=True)
    prompts = [PROMPTS[3], PROMPTS[2]]
    answers = answers_of(target_folder, prompts, [params, GREEDY])
    found = []
    for is_disturbed in (False, True):
        llm = make(target_folder, head, max_num_seqs=1)
        plant_answers(llm, answers, monkeypatch)
        engine, num_steps = llm.engine, 0
        sequence = engine.add_request(prompts[0], params, priority=1)
        while engine.has_unfinished:
            engine.step()
            num_steps += 1
            if is_disturbed and num_steps in (3, 9):
                engine.add_request(prompts[1], replace(GREEDY, max_tokens=1))
            if fault and sequence.status is SequenceStatus.WAITING:
                sequence.draft_parents = [0] * len(sequence.drafts)
        assert (sequence.num_preemptions > 0) == is_disturbed
        assert sequence.output_token_ids == answers[0][len(prompts[0]) :][:16]
        assert engine.stats.eager_steps == {}
        found.append(sequence.stats)
    assert (found[0] == found[1]) is not fault and found[0].num_accepted_tokens > 0


@pytest.mark.slow
@pytest.mark.usefixtures("torch_attention")
@interpreted
def test_arrivals_and_cancels(
    target_folder: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts run in chunks, prefixes are shared, steps have padding, and blocks are few."""
    padded = "peagle.engine.step.graph_runner.count_target_rows"
    monkeypatch.setattr(padded, lambda sizes: {(r, k): r * (k + 1) + 3 for r, k in sizes})
    prompts = [*PROMPTS, [*PROMPTS[3], 7], [*PROMPTS[3][:13], 8]]
    params = [PARAMS[i % 3] for i in range(len(prompts))]
    answers = answers_of(target_folder, prompts, params)
    llm = make(target_folder, head, max_num_seqs=4, max_num_batched_tokens=8, num_kv_blocks=24)
    plant_answers(llm, answers, monkeypatch)
    engine: Any = llm.engine
    sequences = []
    for prompt, one in zip(prompts, params, strict=True):
        sequences.append(engine.add_request(prompt, one))
        cancelled = engine.add_request(prompt, one)
        for _ in range(2):
            engine.step()
        engine.cancel(cancelled)
    while engine.has_unfinished:
        engine.step()
    for sequence, answer in zip(sequences, answers, strict=True):
        assert sequence.token_ids == answer[: len(sequence)]
        assert sequence.num_output_tokens == sequence.params.max_tokens
    assert engine.stats.eager_steps == {} and engine.stats.num_cached_tokens > 0
    assert llm.stats.num_free_kv_blocks == llm.stats.num_kv_blocks


@pytest.mark.slow
@pytest.mark.usefixtures("torch_attention")
@interpreted
@pytest.mark.parametrize("kind", ["head", "eagle3_head"])
def test_k_by_load(
    target_folder: Path, kind: str, request: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees of another depth, and steps without any, change no output."""
    head: Path = request.getfixturevalue(kind)
    params = [replace(one, max_tokens=10) for one in PARAMS]
    answers = answers_of(target_folder, PROMPTS, params)
    for schedule in ([[1, 1, 4], [2, 2, 1], [3, 4, 2]], [[1, 2, 3], [3, 4, 0]]):
        llm = make(target_folder, head, schedule=schedule, max_num_seqs=4)
        plant_answers(llm, answers, monkeypatch)
        engine, sequences = llm.engine, []
        for prompt, one in zip(PROMPTS, params, strict=True):
            sequences.append(engine.add_request(prompt, one))
            engine.step()
        while engine.has_unfinished:
            engine.step()
        for sequence, answer in zip(sequences, answers, strict=True):
            assert sequence.token_ids == answer[: len(sequence)]
        assert not llm.stats.eager_steps
        assert len(llm.stats.decode_steps) > 1 and llm.stats.speculation.num_accepted_tokens > 0


@pytest.mark.slow
@pytest.mark.usefixtures("torch_attention")
@interpreted
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("eager", [False, True])
def test_a_head_alone_drafts_trees(
    target_folder: Path,
    heads: dict[bool, Path],
    parallel: bool,
    eager: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where steps are graphs and nothing but the head is named; eager engines draft chains."""
    monkeypatch.setattr(GraphRunner, "time_step", lambda self, rows, n: 1 + 6e-3 * n)
    options = {"block_size": 4, "max_model_len": 64, "max_num_seqs": 2, "enforce_eager": eager}
    options |= {"dtype": "float32", "device": "cpu"}
    llm = LLM(target_folder, speculative_config={"model": str(heads[parallel])}, **options)
    plain = LLM(target_folder, **options)
    speculative, params = llm.engine.speculative, replace(GREEDY, max_tokens=4)
    assert speculative.copies_join_trees is not eager
    assert speculative.num_verified == (speculative.k if eager else 15)
    found, expected = (one.generate(PROMPTS[:2], params) for one in (llm, plain))
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert llm.stats.speculation.num_draft_tokens > 0


@pytest.mark.slow
@pytest.mark.usefixtures("torch_attention")
@interpreted
def test_nodes_by_themselves(
    target_folder: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine chooses how many nodes a step verifies, and the requests share them."""
    monkeypatch.setattr("peagle.engine.depth.RESUME_STEPS", 1)
    monkeypatch.setattr("peagle.engine.depth.CHANGE_COST", 0.05)
    # Nodes of four sequences are dear, and those of one cheap.
    monkeypatch.setattr(GraphRunner, "time_step", lambda self, rows, n: 1 + 6e-3 * n * rows**3)
    params = [replace(one, max_tokens=8 + 4 * i) for i, one in enumerate(PARAMS)]
    answers = answers_of(target_folder, PROMPTS, params)
    llm = make(target_folder, head, schedule="auto", max_num_seqs=4)
    plant_answers(llm, answers, monkeypatch)
    engine, pipeline = llm.engine, llm.engine._pipeline
    assert pipeline is not None
    read, shares = pipeline.runner.read, list[list[int]]()

    def watched(flight: Flight) -> list[RowTokens]:
        reports = read(flight)
        rows, n = len(flight.sequences), flight.k
        num_rows = pipeline.runner._graphs[rows, n].num_rows
        shares.append([one.num_drafted for one in reports if one.new_token_ids])
        assert sum(shares[-1]) <= num_rows - rows <= max(rows * n, 128)
        return reports

    monkeypatch.setattr(pipeline.runner, "read", watched)
    found = outputs(llm, params)
    for (tokens, *_), prompt, answer in zip(found, PROMPTS, answers, strict=True):
        assert tokens == answer[len(prompt) :][: len(tokens)]
    assert not llm.stats.eager_steps
    assert len(llm.stats.decode_steps.keys() - {0}) > 1
    assert any(len(set(counts)) > 1 for counts in shares), "one has more nodes than another"
    assert any(0 < sum(counts) < 7 * len(counts) for counts in shares)
    assert llm.stats.speculation.num_accepted_tokens > 0
    assert engine.stats.calibration.error is not None


def check_rules(target: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """Requests with rules join others, and leave them; what they ask for looks at their paths."""
    answers = answers_of(target, PROMPTS, PARAMS)
    common = [answer[len(prompt) :][3:5] for prompt, answer in zip(PROMPTS, answers, strict=True)]
    params = [
        replace(GREEDY, max_tokens=8, logprobs=2),
        replace(SAMPLED, max_tokens=6, frequency_penalty=0.9, repetition_penalty=1.3, logprobs=1),
        replace(GREEDY, max_tokens=6, bad_words=[common[2]], logit_bias={common[2][0]: 0.5}),
        replace(SAMPLED, max_tokens=8, seed=3, min_tokens=5, stop_token_ids=tuple(common[3])),
    ]
    found = plain_outputs(target, PROMPTS, params, 64)
    answers = [p + tokens + p for p, (tokens, _) in zip(PROMPTS, found, strict=True)]
    return check(target, head, params, monkeypatch, answers=answers)


@pytest.mark.slow
@pytest.mark.usefixtures("torch_attention")
@interpreted
def test_requests_with_rules_stay_in_the_graphs(
    target_folder: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node stands behind its own path."""
    llm = check_rules(target_folder, head, monkeypatch)
    assert llm.stats.speculation.num_accepted_tokens > 5


@pytest.mark.slow
@pytest.mark.usefixtures("torch_attention")
@interpreted
@pytest.mark.parametrize("fault", [False, True], ids=["", "planted fault"])
def test_grammars_stay_in_the_graphs(
    target_folder: Path, head: Path, monkeypatch: pytest.MonkeyPatch, fault: bool
) -> None:
    """Trees are drafted without the grammar; its masks follow the paths of those that are."""
    pytest.importorskip("xgrammar")
    regex = StructuredOutput("regex", "[a-f]{2,4}( [0-9]{2,3}){2,9}")
    structured = {"structured_output": regex, "ignore_eos": False, "max_tokens": 16}
    params = [replace(one, **structured) for one in PARAMS[:3]]
    params.append(PARAMS[3])
    prompts = [list(prompt) for prompt in PROMPTS]
    wanted = plain_outputs(target_folder, prompts, params, 64)
    llm = make(target_folder, head)
    plant_answers(llm, [p + tokens for p, (tokens, _) in zip(prompts, wanted)], monkeypatch)
    if fault:  # the masks of a chain
        prepare = GrammarState.prepare

        def prepare_chain(self: GrammarState, drafts: Sequence[int], parents: Any) -> None:
            prepare(self, drafts, range(len(drafts)))
            assert self.prepared is not None
            self.prepared = replace(self.prepared, parents=tuple(parents or ()))

        monkeypatch.setattr(GrammarState, "prepare", prepare_chain)
        found = outputs(llm, params)
        assert "error" in [one[1] for one in found[:3]], "a matcher refuses what a mask allowed"
        assert found[3][:2] == wanted[3]
        return
    assert [one[:2] for one in outputs(llm, params)] == wanted
    assert llm.stats.eager_steps == {} and llm.stats.speculation.num_accepted_tokens > 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "length", "shape"),
    [
        pytest.param("cpu", 7, SHAPE, marks=interpreted),
        *(
            pytest.param("cuda", 40, dict(zip(SHAPE, shape, strict=True)), marks=pytest.mark.gpu)
            for shape in [(3, 4, 7), (1, 1, 1), (8, 7, 16), (8, 7, 40), (16, 7, 63)]
        ),
    ],
)
def test_a_corrected_head(device: str, length: int, shape: dict[str, int]) -> None:
    """The bundled head: its own trees, of which many nodes pass; requests join, leave and draw."""
    prompts = ["def fibonacci(n):", "def fibonacci(n):", "import os\n"]
    params = [replace(one, max_tokens=length - 2 * i) for i, one in enumerate(PARAMS[:3])]
    build = partial(make, Path(BUNDLED_TARGET), device=device, max_model_len=128)
    plain = build(None, eager=True).generate(prompts, params)
    eager = build(Path(BUNDLED_PEAGLE), eager=True, shape=shape).generate(prompts, params)
    llm = build(Path(BUNDLED_PEAGLE), shape=shape)
    found = llm.generate(prompts, params)
    assert [o.token_ids for o in found] == [o.token_ids for o in plain]
    assert [o.stats for o in found] == [o.stats for o in eager]
    assert llm.stats.eager_steps == {}
    assert all(0 < o.stats.num_accepted_tokens < o.stats.num_draft_tokens for o in found[:2])


@interpreted
def test_slots_ahead_are_those_of_the_nodes_and_of_the_step_in_flight(
    target_folder: Path, head: Path
) -> None:
    for nodes, slots in ((7, 3 * 5), (20, 5 + 21)):
        llm = make(target_folder, head, shape=SHAPE | {"max_nodes": nodes})
        assert llm.engine.memory_plan.num_lookahead_slots == slots


def without_offsets(own_tokens: Any) -> Any:
    return lambda *rest, offsets_R=None: own_tokens(*rest)


def without_features(descend: Any) -> Any:
    def changed(self: DecodeTrees, *rest: Any, **named: Any) -> None:
        descend(self, *rest, **named)
        torch.arange(len(self.rows_X), out=self.rows_X)

    return changed


def check_plain(target: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(target, head, PARAMS, monkeypatch)


def as_chains(paths_of: Any) -> Any:
    def changed(self: DecodeTrees, *rest: torch.Tensor) -> TreePaths:
        parents_BN = torch.zeros_like(paths_of(self, *rest).parents_BN)
        num_nodes = parents_BN.shape[1]
        return TreePaths.of(parents_BN + torch.arange(num_nodes), num_nodes)

    return changed


Check = Callable[[Path, Path, pytest.MonkeyPatch], Any]
FAULTS: dict[str, tuple[Any, str, Callable[[Any], Any], Check]] = {
    "the path is not moved": (SlotMoves, "__call__", lambda _: lambda *_: None, check_plain),
    "a draw goes by the row": (decode_step, "own_tokens", without_offsets, check_plain),
    "features are those of the rows": (DecodeTrees, "descend", without_features, check_plain),
    "rules see a chain": (DecodeTrees, "paths_of", as_chains, check_rules),
}


@pytest.mark.slow
@pytest.mark.usefixtures("torch_attention")
@interpreted
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(
    target_folder: Path, head: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    owner, name, change, run = FAULTS[fault]
    monkeypatch.setattr(owner, name, change(getattr(owner, name)))
    with pytest.raises((AssertionError, RuntimeError)):
        run(target_folder, head, monkeypatch)
