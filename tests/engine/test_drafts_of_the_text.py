"""Who drafted what was accepted: counts by position, against trees recorded before copies join."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from peagle import LLM, SamplingParams
from peagle.engine.drafting import HeadDrafting
from peagle.engine.engine import LLMEngine
from peagle.engine.tree_record import TreeRecord
from peagle.errors import UserError
from peagle.evaluation.acceptance import figures_of_answers
from peagle.evaluation.decoding import Observation, Request
from peagle.evaluation.engine_backend import EngineBackend
from peagle.kernels.trees.copies import NO_COPY

PROMPTS = [
    "def first(items):\n    return items[0]\n\n\ndef second(items):\n",
    "def area(width, height):\n    return width * height\n\n\nprint(area(",
    "x = 1\ny = 2\nx = 1\ny = 2\nx",
    "def fibonacci(n):",
]
PARAMS = SamplingParams(max_tokens=18, ignore_eos=True)
SHAPE = {"num_parallel_trees": 3, "prediction_depth": 3, "max_nodes": 9}
TEXT, ACCEPTED = "num_accepted_text_tokens_per_pos", "num_accepted_tokens_per_pos"


def make(*, enforce_eager: bool = True, **config: Any) -> LLM:
    """The bundled pair, of which both sources have drafts accepted."""
    speculative = {"model": "bundled", "parallel_drafting_spec": SHAPE, **config}
    options: dict[str, Any] = {"max_num_seqs": 3, "max_model_len": 256, "device": "cpu"}
    return LLM("bundled", speculative_config=speculative, enforce_eager=enforce_eager, **options)


def paths_of(tokens: Sequence[int], parents: Sequence[int]) -> set[tuple[int, ...]]:
    """The tokens on the way to each node."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*paths[parent], token))
    return {*paths[1:]}


@dataclass
class Recount:
    """Counts accepted tokens that are on no path of the head's own trees."""

    own: dict[tuple[int, int], set[tuple[int, ...]]] = field(default_factory=dict)
    accepted: Counter[int] = field(default_factory=Counter)
    of_text: Counter[int] = field(default_factory=Counter)

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        join, emit = HeadDrafting._join_copies, LLMEngine._emit

        def joining(drafting: Any, sequence: Any, survival: Any) -> None:
            own = paths_of(sequence.drafts, sequence.draft_parents)
            self.own[sequence.seq_id, len(sequence)] = own
            join(drafting, sequence, survival)

        def emitting(
            engine: Any, sequence: Any, new: list[int], drafted: int, accepted: int, *rest: Any
        ) -> None:
            own = self.own.get((sequence.seq_id, len(sequence)), set())
            for position in range(accepted):
                self.accepted[position] += 1
                self.of_text[position] += tuple(new[: position + 1]) not in own
            emit(engine, sequence, new, drafted, accepted, *rest)

        monkeypatch.setattr(HeadDrafting, "_join_copies", joining)
        monkeypatch.setattr(LLMEngine, "_emit", emitting)

    def agrees(self, stats: Any) -> bool:
        counts = ((self.accepted, getattr(stats, ACCEPTED)), (self.of_text, getattr(stats, TEXT)))
        return all([*map(ours.__getitem__, range(len(own)))] == own for ours, own in counts)


@pytest.mark.slow
def test_tokens_off_the_paths_of_the_head_are_those_of_the_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recount = Recount()
    recount.watch(monkeypatch)
    backend = EngineBackend(make(prompt_lookup=True))
    requests = [Request(str(number), prompt, PARAMS) for number, prompt in enumerate(PROMPTS)]
    run = backend.run(requests, 3)
    stats = backend.counters
    assert recount.agrees(stats)
    assert run.stats == run.counters == stats
    accepted, of_text = getattr(stats, ACCEPTED), getattr(stats, TEXT)
    assert len(accepted) == len(of_text) > SHAPE["prediction_depth"]
    assert sum(of_text) > 0 and of_text[0] < accepted[0], "both sources have drafts accepted"
    assert of_text[3:] == accepted[3:], "the head drafts no deeper"
    shares = stats.shares_by_source
    pairs = zip(*shares.values(), strict=True)
    assert [h + t for h, t in pairs] == pytest.approx(stats.acceptance_per_pos)

    # The figures of an evaluation follow, and those by position in the output add up to them.
    seen = [Observation("set", "", str(i), 0, "", answer) for i, answer in enumerate(run.answers)]
    figures = figures_of_answers(seen, SHAPE["prediction_depth"])
    assert figures.pooled.num_accepted_text_tokens_per_pos == of_text
    assert figures.pooled.text_per_pos == shares["text_per_pos"]
    parts = [one.slice.num_accepted_text_tokens_per_pos for one in figures.by_output_position]
    added = Counter[int]()
    for part in parts:
        added.update(dict(enumerate(part)))
    assert [added[position] for position in range(len(of_text))] == of_text


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [lambda cell: cell != NO_COPY, lambda cell: False], ids=["any copy", "no copy"]
)
def test_a_wrong_source_is_noticed(
    fault: Callable[[int], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peagle.engine.engine.only_text_has", fault)
    recount = Recount()
    recount.watch(monkeypatch)
    llm = make(prompt_lookup=True)
    llm.generate(PROMPTS, PARAMS)
    assert not recount.agrees(llm.stats.speculation)


@pytest.mark.slow
def test_what_one_source_drafts() -> None:
    """Without copies nothing is said of the text; prompt lookup alone drafts everything."""
    llm = make(prompt_lookup=False)
    chunks = list(llm.stream(PROMPTS, PARAMS))
    assert {chunk.text_from for chunk in chunks} == {None}
    stats = llm.stats.speculation
    assert getattr(stats, TEXT) == [] and stats.shares_by_source == {}
    assert TEXT not in stats.to_json() | chunks[-1].output.to_json()

    lookup = {"method": "ngram", "num_speculative_tokens": 4}
    llm = LLM("bundled", speculative_config=lookup, device="cpu")
    chunks = list(llm.stream(PROMPTS, PARAMS))
    assert {chunk.text_from for chunk in chunks} == {0}
    stats = llm.stats.speculation
    assert getattr(stats, TEXT) == getattr(stats, ACCEPTED) and stats.num_accepted_tokens > 0
    assert set(stats.shares_by_source["head_per_pos"]) == {0}


@pytest.mark.slow
def test_head_and_text_share_k_drafts() -> None:
    k = {"parallel_drafting_spec": None, "num_speculative_tokens": 4}
    chains, shared = make(**k), make(**k, prompt_lookup=True)
    outputs = [[o.token_ids for o in llm.generate(PROMPTS, PARAMS)] for llm in (chains, shared)]
    assert outputs[0] == outputs[1]
    of_chains, stats = chains.stats.speculation, shared.stats.speculation
    assert stats.acceptance_length > of_chains.acceptance_length and sum(getattr(stats, TEXT)) > 0
    assert stats.num_draft_tokens <= 4 * stats.num_drafts and not of_chains.shares_by_source


@pytest.mark.slow
@pytest.mark.usefixtures("graphs_everywhere", "torch_attention")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET is not 1")
def test_captured_steps_count_as_eager_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    # A captured step learns a step later.
    monkeypatch.setattr(TreeRecord, "looks", False)
    eager = make(prompt_lookup=True, num_speculative_tokens=3)
    # One request keeps copies out of its trees.
    params = [PARAMS, replace(PARAMS, prompt_lookup=False), PARAMS, PARAMS]
    wanted = eager.generate(PROMPTS, params)
    captured = make(prompt_lookup=True, num_speculative_tokens=3, enforce_eager=False)
    found = captured.generate(PROMPTS, params)
    assert captured.stats.eager_steps == {}
    assert captured.stats.speculation == eager.stats.speculation
    assert [output.stats for output in found] == [output.stats for output in wanted]
    accepted, of_text = (getattr(captured.stats.speculation, name) for name in (ACCEPTED, TEXT))
    assert 0 < sum(of_text) < sum(accepted)
    assert [bool(getattr(output.stats, TEXT)) for output in found] == [True, False, True, True]


@pytest.mark.slow
@pytest.mark.parametrize("source", ["peagle", "eagle3", "lookup"])
def test_a_good_prediction_takes_fewer_steps(source: str) -> None:
    lookup = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 16}
    if source == "lookup":
        llm = LLM("bundled", speculative_config=lookup)
    else:
        is_eagle3 = source == "eagle3"
        llm = make(model="bundled-eagle3") if is_eagle3 else make(drawn_chains_from=0.5)

    def ask(**changes: Any) -> Any:
        return llm.generate(PROMPTS[3], replace(PARAMS, max_tokens=32, **changes))[0]

    plain, without = ask(num_speculative_tokens=0), ask()
    edited = [*plain.token_ids[:20], *plain.token_ids[21:]]
    for given in (plain.token_ids, plain.text, edited, [1]):
        found = ask(prediction=given)
        assert found.token_ids == plain.token_ids
        assert found.prompt_token_ids == plain.prompt_token_ids
        passes, before = (32 - o.stats.num_accepted_tokens for o in (found, without))
        assert passes < 0.75 * before or given == [1]
    # A tree stays where others draw chains.
    assert ask(temperature=0.8, prediction=edited).stats.num_accepted_text_tokens_per_pos


@pytest.mark.parametrize(
    ("config", "params", "told"),
    [
        ({}, {"prediction": [5, 2**40]}, "is 1099511627776; expected token ids from 0"),
        ({}, {"prediction": [5] * 257}, "has 257 tokens; expected at most 256"),
        ({}, {"prediction": 3}, "is 3; expected a text or a list of token ids"),
        ({}, {"prediction": b"ab"}, "is b'ab'; expected a text or a list of token ids"),
        ({}, {"prediction": [-1]}, "is -1; expected token ids of at least 0"),
        ({}, {"prompt_lookup": False}, "was given and prompt_lookup is false"),
        ({}, {"num_speculative_tokens": 2}, "was given, and"),
        (
            {"prompt_lookup": False},
            {},
            "was given, and no copies .* need trees of a draft head",
        ),
        ({"parallel_drafting_spec": None}, {}, "was given, and"),
        (None, {}, "was given, and"),
    ],
)
def test_predictions_are_refused_by_name(config: Any, params: dict[str, Any], told: str) -> None:
    llm = LLM("bundled", device="cpu") if config is None else make(**config)
    with pytest.raises(UserError, match=f"prediction {told}"):
        llm.generate("x", replace(PARAMS, **{"prediction": "x", **params}))
    assert llm.generate("x", replace(PARAMS, max_tokens=1, prediction=""))
