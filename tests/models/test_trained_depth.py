"""K where none is given, and whole models named as heads: the same in every command."""

import json
from pathlib import Path
from typing import Any

import pytest

from peagle import LLM, SpeculativeConfig
from peagle.bundled import BUNDLED_TARGET
from peagle.cli.main import run
from peagle.config import CandidateTrees
from peagle.errors import UserError
from peagle.models.head_json import default_k, with_depth
from peagle.models.loading import resolve_model, with_local_head

PAIR2 = Path(__file__).resolve().parents[1] / "fixtures" / "pair2"
TARGET, HEAD = str(PAIR2 / "target"), str(PAIR2 / "peagle")  # trained for K = 6


def head_config(folder: Path, **keys: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(keys))
    return folder


def test_the_trained_depth_bounds_the_default() -> None:
    assert [default_k(k) for k in (None, 1, 3, 7, 8, 16)] == [7, 1, 3, 7, 7, 7]


@pytest.mark.parametrize(
    ("keys", "k"),
    [
        ({"peagle": {"num_speculative_tokens_trained": 3}}, 3),
        ({"peagle": {"num_speculative_tokens_trained": 12}}, 7),
        ({"speculators_config": {"proposal_methods": [{"speculative_tokens": 4}]}}, 4),
        ({"speculative_tokens": 2}, 2),
        ({}, 7),
        ({"peagle": {"num_speculative_tokens_trained": "many"}}, 7),
        ({"speculators_config": {"proposal_methods": "greedy"}}, 7),
    ],
)
def test_it_is_read_in_every_style(tmp_path: Path, keys: dict[str, object], k: int) -> None:
    folder = head_config(tmp_path / "head", **keys)
    for schedule in (None, "auto"):
        given = SpeculativeConfig(model=str(folder), num_speculative_tokens_per_batch_size=schedule)
        found = with_depth(given, folder)
        assert found.k == k
        assert found.num_speculative_tokens_per_batch_size == "auto"
        assert with_depth(found, folder) == found


@pytest.mark.parametrize(
    ("trained", "shape", "expected"),
    [
        (5, {}, (15, 5, 15)),
        (12, {}, (15, 7, 15)),
        (None, {"num_parallel_trees": 4}, (4, 7, 15)),
        (5, {"max_nodes": 3}, (3, 3, 3)),
        (5, {"prediction_depth": 2, "num_parallel_trees": 8}, (8, 2, 15)),
    ],
    ids=str,
)
def test_trees_are_as_deep_as_the_head_was_trained(
    tmp_path: Path, trained: int | None, shape: dict[str, int], expected: tuple[int, int, int]
) -> None:
    folder = head_config(tmp_path, speculative_tokens=trained, mask_token_id=1)
    for schedule in (None, "auto", ((1, 8, 3),)):
        config = SpeculativeConfig(
            model=str(folder),
            parallel_drafting_spec=shape,
            num_speculative_tokens_per_batch_size=schedule,
        )
        found = with_depth(config, folder)
        assert found.trees == CandidateTrees(*expected)
        assert found.num_speculative_tokens_per_batch_size == (schedule or "auto")
        is_auto = schedule in (None, "auto")
        if is_auto or "prediction_depth" not in shape:
            assert found.num_speculative_tokens == expected[1]


@pytest.mark.slow
def test_an_engine_drafts_trees_of_the_defaults() -> None:
    """The head was trained for K = 6: deeper trees are refused, unless nobody asked for them."""
    config = {"model": HEAD, "parallel_drafting_spec": {}, "prompt_lookup": False}
    llm = LLM(TARGET, speculative_config=config)
    assert llm.engine.speculative.trees == CandidateTrees(15, 6, 15)
    assert len(llm.generate("the")[0].stats.num_accepted_tokens_per_pos) == 6
    with pytest.raises(UserError, match="prediction_depth is 7; expected at most 6, which"):
        LLM(TARGET, speculative_config={"model": HEAD, **DEEPER})


PARALLEL: dict[str, Any] = {"mask_token_id": 1}


@pytest.mark.parametrize(
    ("keys", "options", "trees"),
    [
        (PARALLEL, {}, (15, 5, 15)),
        (PARALLEL, {"num_speculative_tokens_per_batch_size": "auto"}, (15, 5, 15)),
        ({}, {}, (4, 5, 15)),
        (PARALLEL, {"draft_sampling": "probabilistic"}, None),
        (PARALLEL, {"num_speculative_tokens": 4}, None),
        (PARALLEL, {"num_speculative_tokens_per_batch_size": ((1, 8, 3),)}, None),
        (PARALLEL, {"synthetic_acceptance_rates": (0.5,) * 7}, None),
        (PARALLEL, {"parallel_drafting_spec": "auto"}, (15, 5, 15)),
        (PARALLEL, {"parallel_drafting_spec": "auto", "num_speculative_tokens": 3}, (15, 3, 15)),
        ({}, {"parallel_drafting_spec": "auto", "num_speculative_tokens": 1}, (4, 1, 15)),
        (
            {"speculative_tokens": 30},
            {"parallel_drafting_spec": "auto", "num_speculative_tokens": 30},
            (2, 30, 30),
        ),
    ],
    ids=str,
)
def test_a_head_drafts_trees_where_steps_are_graphs(
    tmp_path: Path, keys: dict[str, Any], options: dict[str, Any], trees: tuple[int, ...] | None
) -> None:
    """Where nothing gives K; drawn chains then lead the trees of hot requests, of P-EAGLE alone."""
    folder, parallel = head_config(tmp_path, **{"speculative_tokens": 5, **keys}), keys == PARALLEL
    found = with_depth(SpeculativeConfig(model="head", **options), folder)
    assert with_depth(found, folder) == found
    captured, eager = (found.settled(is_captured=x, parallel=parallel) for x in (True, False))
    assert captured.trees == (None if trees is None else CandidateTrees(*trees))
    first = (0.6 if parallel else "never") if trees else None
    assert captured.drawn_chains_from == first
    assert captured.copies_join_trees is (trees is not None)
    assert (eager.trees, eager.drawn_chains_from) == (None, None)
    assert eager.k == captured.k == found.k
    schedule = found.num_speculative_tokens_per_batch_size
    for one in (captured, eager):
        assert one.num_speculative_tokens_per_batch_size == schedule


def test_given_chains_lead_the_trees_by_default(tmp_path: Path) -> None:
    folder = head_config(tmp_path, speculative_tokens=5, mask_token_id=1)
    eagle3 = head_config(tmp_path / "eagle3", speculative_tokens=5)
    for first in (0.2, "never"):
        auto = {"parallel_drafting_spec": "auto", "drawn_chains_from": first}
        found = with_depth(SpeculativeConfig(model="head", **auto), folder)
        assert found.settled(is_captured=True, parallel=True).drawn_chains_from == first
    with pytest.raises(
        UserError, match=r"drawn_chains_from is 0\.2, but 'head' is an EAGLE-3 head"
    ):
        auto = {"parallel_drafting_spec": "auto", "drawn_chains_from": 0.2}
        with_depth(SpeculativeConfig(model="head", **auto), eagle3)


def test_trees_by_default_are_no_deeper_than_the_head_was_trained(tmp_path: Path) -> None:
    config = SpeculativeConfig(model="x", num_speculative_tokens=6, parallel_drafting_spec="auto")
    for kind in ({}, PARALLEL):
        folder = head_config(tmp_path, speculative_tokens=5, **kind)
        with pytest.raises(UserError, match="num_speculative_tokens is 6; expected at most 5, wh"):
            with_depth(config, folder)


def test_trees_by_default_refuse_what_trees_refuse() -> None:
    for options, message in (
        ({"num_speculative_tokens": 64}, "num_speculative_tokens is 64; expected at most 63 with"),
        ({"draft_sampling": "probabilistic"}, 'expected "argmax" with parallel_drafting_spec'),
        ({"synthetic_acceptance_rates": [0.5] * 7}, "expected none with parallel_drafting_spec"),
        ({"parallel_drafting_spec": "none"}, "is 'none'; expected \"auto\" or an object with"),
    ):
        config = {"model": "head", "parallel_drafting_spec": "auto", **options}
        for make in (SpeculativeConfig.parse, lambda config: SpeculativeConfig(**config)):
            with pytest.raises(UserError, match=message):
                make(config)


DEEPER = {"parallel_drafting_spec": {"prediction_depth": 7}}


@pytest.mark.parametrize("others", [{"prompt_lookup": True}, {"parallel_drafting_spec": {}}])
def test_the_refusal_names_the_k_that_was_given(tmp_path: Path, others: dict[str, Any]) -> None:
    folder = head_config(tmp_path, speculative_tokens=5, mask_token_id=1)
    config = SpeculativeConfig(model="head", num_speculative_tokens=20, **others)
    with pytest.raises(
        UserError, match=r"^num_speculative_tokens is 20; expected at most 5, "
    ) as e:
        with_depth(config, folder)
    assert "parallel_drafting_spec" not in str(e.value)


def test_what_is_given_stays(tmp_path: Path) -> None:
    folder = head_config(tmp_path, speculative_tokens=2)
    for config in (
        SpeculativeConfig(model="head", num_speculative_tokens=5),
        SpeculativeConfig(
            model="head", num_speculative_tokens=5, num_speculative_tokens_per_batch_size="auto"
        ),
        SpeculativeConfig(model="head", num_speculative_tokens_per_batch_size=((1, 8, 7),)),
        SpeculativeConfig(model="head", synthetic_acceptance_rates=(0.5,) * 7),
        SpeculativeConfig(method="ngram"),
    ):
        assert with_depth(config, folder) == config
    assert SpeculativeConfig(method="ngram").k == 7


@pytest.mark.slow
def test_every_engine_drafts_so_many() -> None:
    assert with_local_head(SpeculativeConfig(model=HEAD)).k == 6
    llm = LLM(TARGET, speculative_config={"model": HEAD}, device="cpu")
    assert llm.engine.num_speculative_tokens == 6
    assert len(llm.generate("the")[0].stats.num_accepted_tokens_per_pos) == 6


def test_it_is_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = ["serve", TARGET, "--draft", HEAD, "--show-config"]
    for more, k, schedule in (([], 6, "auto"), (["-k", "3"], 3, None)):
        assert run([*command, *more]) == 0
        shown = json.loads(capsys.readouterr().out)["speculative"]
        assert shown["num_speculative_tokens"] == k
        assert shown["num_speculative_tokens_per_batch_size"] == schedule


def test_vllm_is_told_the_same() -> None:
    from peagle.backends.vllm.command import speculative_json
    from peagle.backends.vllm.launch import VllmLaunch, with_head

    launch = with_head(VllmLaunch(TARGET, SpeculativeConfig(model=HEAD)))
    found = speculative_json(launch)
    assert found is not None
    assert found["num_speculative_tokens"] == 6
    assert "num_speculative_tokens_per_batch_size" not in found


WHOLE = ("is a whole model (Qwen3ForCausalLM), not a draft head", "peagle train", "--method ngram")


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "--prompt", "hi", "--target", TARGET, "--draft", TARGET],
        ["serve", TARGET, "--draft", TARGET, "--port", "0"],
        ["chat", "--target", TARGET, "--draft", TARGET],
        ["eval", "--target", TARGET, "--draft", TARGET],
        ["eval", "--target", TARGET, "--draft", HEAD, "--method", f"other={TARGET}"],
        ["bench", "--target", TARGET, "--draft", TARGET],
        ["tune", "--target", TARGET, "--draft", TARGET],
        ["demo", "--target", TARGET, "--draft", TARGET],
        ["doctor", "--target", TARGET, "--draft", TARGET],
        ["convert", TARGET, "out", "--format", "vllm"],
    ],
    ids=lambda command: command[0],
)
def test_a_whole_model_is_no_head(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peagle.models.target.TargetModel.load", None)  # nothing is loaded before
    assert run(command) == 2
    told = capsys.readouterr().err
    assert all(part in told for part in (TARGET, *WHOLE)), told


def test_no_head_is_taken_for_a_whole_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="whole model"):
        LLM(TARGET, speculative_config={"model": str(BUNDLED_TARGET)}, device="cpu")
    assert resolve_model(TARGET).samefile(TARGET)
    for folder in (PAIR2.parent / "heads").iterdir():
        if (folder / "config.json").is_file():
            assert resolve_model(folder, role="draft").samefile(folder)
