"""The configurations: vLLM's speculative configuration, the engine's options, outputs."""

import json
import math
import shlex
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from peagle import LLM, EngineConfig, SamplingParams, SpeculativeConfig
from peagle.config import (
    CandidateTrees,
    require_writable_file,
    require_writable_folder,
    speculative_keys,
)
from peagle.errors import UserError

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
HEAD = {"method": "eagle3", "model": "head"}
RATES = {"num_speculative_tokens": 3, "synthetic_acceptance_rates": [0.7, 0.5, 0.5]}
PUBLISHED = """serve openai/gpt-oss-20b --speculative-config '{"method": "eagle3", \
"model": "amazon/gpt-oss-20b-p-eagle", "num_speculative_tokens": 5, "parallel_drafting": true}'"""


@pytest.mark.slow
def test_the_published_command_line(target_folder: Path, head_folders: Callable[..., Path]) -> None:
    head = head_folders(parallel=True)
    command = PUBLISHED.replace("openai/gpt-oss-20b", str(target_folder))
    command = command.replace("amazon/gpt-oss-20b-p-eagle", str(head))
    _, target, option, text = shlex.split(command)
    assert option == "--speculative-config"
    config = SpeculativeConfig.parse(text)
    assert config == SpeculativeConfig(
        method="eagle3", model=str(head), num_speculative_tokens=5, parallel_drafting=True
    )
    prompts = ["def f(x):", "import"]
    plain = LLM(target, dtype="float64").generate(prompts, GREEDY)
    for form in (text, json.loads(text), config):
        drafted = LLM(target, dtype="float64", speculative_config=form).generate(prompts, GREEDY)
        assert [o.token_ids for o in drafted] == [o.token_ids for o in plain]
        assert len(drafted[0].stats.num_accepted_tokens_per_pos) == 5


def test_the_published_ids_are_hub_ids() -> None:
    config = SpeculativeConfig.parse(shlex.split(PUBLISHED)[-1])
    assert config.model == "amazon/gpt-oss-20b-p-eagle"
    assert config.revision is None


def trees(**changes: Any) -> dict[str, Any]:
    shape = {"num_parallel_trees": 4, "prediction_depth": 5, "max_nodes": 16}
    return {"parallel_drafting_spec": {**shape, **changes}}


TREES = trees()


@pytest.mark.parametrize(
    ("keys", "fields"),
    [
        ({}, {}),
        ({"revision": "v2"}, {"revision": "v2"}),
        ({"num_speculative_tokens": None, "revision": None}, {}),
        ({"draft_sample_method": "greedy"}, {"draft_sampling": "argmax"}),
        ({"drawn_chains_from": "never"}, {"drawn_chains_from": "never"}),
        ({"draft_sample_method": "probabilistic"}, {"draft_sampling": "probabilistic"}),
        (
            {"draft_sample_method": "greedy", "draft_sampling": "argmax"},
            {"draft_sampling": "argmax"},
        ),
        ({"parallel_drafting_spec": None}, {}),
        (TREES, TREES),
        ({**TREES, "num_speculative_tokens": 5}, {**TREES, "num_speculative_tokens": 5}),
        ({"enforce_eager": True}, {}),
        ({"enforce_eager": False, "disable_padded_drafter_batch": True}, {}),
        ({"draft_tensor_parallel_size": 1, "use_local_argmax_reduction": False}, {}),
        ({"rejection_sample_method": "standard", "enforce_eager": None}, {}),
        ({"rejection_sample_method": None, "synthetic_acceptance_rates": None}, {}),
        ({"rejection_sample_method": "synthetic", **RATES}, RATES),
        (RATES, RATES),
    ],
    ids=str,
)
def test_keys_of_vllm(keys: dict[str, Any], fields: dict[str, Any]) -> None:
    expected = asdict(SpeculativeConfig(**{**HEAD, **fields}))
    for form in ({**HEAD, **keys}, json.dumps({**HEAD, **keys})):
        assert asdict(SpeculativeConfig.parse(form)) == expected
    assert speculative_keys({**HEAD, **keys}) == {**HEAD, **fields}


@pytest.mark.parametrize(
    ("given", "k", "expected"),
    [
        ({}, None, (15, 7, 15)),
        ({"num_parallel_trees": None, "max_nodes": None}, None, (15, 7, 15)),
        ({"num_parallel_trees": 8, "prediction_depth": 5}, None, (8, 5, 15)),
        ({"num_parallel_trees": 20, "prediction_depth": 5}, None, (20, 5, 20)),
        ({"prediction_depth": 30}, None, (30, 30, 30)),
        ({"max_nodes": 4}, None, (4, 4, 4)),
        ({"max_nodes": 32, "num_parallel_trees": 2}, None, (2, 7, 32)),
        ({}, 5, (15, 5, 15)),
        ({"max_nodes": 9}, 3, (9, 3, 9)),
        ({}, 20, (20, 20, 20)),
    ],
    ids=str,
)
def test_keys_of_trees_that_are_left_out(
    given: dict[str, Any], k: int | None, expected: tuple[int, int, int]
) -> None:
    config = SpeculativeConfig(
        model="head", num_speculative_tokens=k, parallel_drafting_spec={**given}
    )
    assert config.trees == CandidateTrees(*expected)
    assert (config.k, config.num_verified) == expected[1:]
    again = replace(config, num_speculative_tokens=config.k)
    assert again.trees == config.trees


def test_a_configuration_is_not_changed_by_parsing() -> None:
    keys = {**HEAD, "draft_sample_method": "greedy", "enforce_eager": True}
    before = dict(keys)
    SpeculativeConfig.parse(keys)
    assert keys == before
    config = SpeculativeConfig(model="head")
    assert SpeculativeConfig.parse(config) is config


LOOKUP = {"method": "ngram", "model": None}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            {"parallel_drafting_spec": {"num_trees": 4, "depth": 7}},
            "parallel_drafting_spec has the unknown key 'depth'; expected an object with the keys "
            "num_parallel_trees, prediction_depth, max_nodes.",
        ),
        (
            {"parallel_drafting_spec": {"num_parallel_trees": 0, "prediction_depth": 5}},
            "num_parallel_trees is 0; expected a whole number from 1 to max_nodes (15). Each",
        ),
        (
            {"parallel_drafting_spec": {"prediction_depth": 0}},
            "prediction_depth is 0; expected a whole number from 1 to max_nodes (15). Each",
        ),
        (
            {"parallel_drafting_spec": {"num_parallel_trees": 64}},
            "num_parallel_trees is 64; expected a whole number from 1 to max_nodes (63)",
        ),
        (
            {"parallel_drafting_spec": {"max_nodes": "9"}},
            "max_nodes is '9'; expected a whole number from 1 to 63",
        ),
        (
            {"parallel_drafting_spec": {"max_nodes": 4}, "num_speculative_tokens": 5},
            "num_speculative_tokens is 5; expected at most 4, the most nodes of a tree",
        ),
        (
            {"prompt_lookup": True, "num_speculative_tokens": 64},
            "num_speculative_tokens is 64; expected at most 63, the most nodes of a tree, or none",
        ),
        ({"drawn_chains_from": 1.0}, 'is 1.0; expected "never" or none without parallel_drafting'),
        ({**LOOKUP, "drawn_chains_from": 1.0}, "Leave it out"),
        (trees(max_nodes=64), "max_nodes is 64; expected a whole number from 1 to 63"),
        (trees(num_parallel_trees=17), "num_parallel_trees is 17; expected a whole number from 1"),
        (trees(prediction_depth=True), "prediction_depth is True; expected a whole number from 1"),
        ({**TREES, "draft_sampling": "probabilistic"}, 'expected "argmax" with parallel_draft'),
        ({**TREES, "num_speculative_tokens": 4}, "num_speculative_tokens is 4; expected 5, the"),
        ({**TREES, "synthetic_acceptance_rates": [0.5] * 5}, "expected none with parallel_drafti"),
        ({**LOOKUP, **TREES}, 'expected no parallel_drafting_spec with method "ngram"'),
        ({"parallel_drafting_spec": False}, 'is False; expected "auto" or an object with the keys'),
        ({"draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size is 2; expected 1."),
        ({"draft_tensor_parallel_size": [1]}, "draft_tensor_parallel_size is [1]; expected 1."),
        ({"enforce_eager": "yes"}, "enforce_eager is 'yes'; expected false or true."),
        ({"draft_sample_method": "gumbel"}, "draft_sample_method is 'gumbel'; expected \"greedy\""),
        (
            {"draft_sample_method": "greedy", "draft_sampling": "probabilistic"},
            "draft_sample_method 'greedy' and draft_sampling 'probabilistic' contradict",
        ),
        (
            {"quantization": "fp4"},
            "quantization is 'fp4'; expected one of fp8, int8, int4, or none",
        ),
        (
            {"method": "ngram", "model": None, "quantization": "fp8"},
            "expected no quantization with",
        ),
        ({"modle": "head"}, "Unknown key 'modle' in the speculative configuration; known keys: "),
        ({"modle": "head"}, "use_local_argmax_reduction. Did you mean 'model'?"),
        ({7: 1}, "Unknown key '7'"),
        ({"max_nodes": 9}, "Did you mean 'parallel_drafting_spec.max_nodes'?"),
        ({"draft_sample_metod": "greedy"}, "Did you mean 'draft_sample_method'?"),
        (
            {"parallel_drafting_spec": {"num_parallel_tree": 4}},
            "has the unknown key 'num_parallel_tree'; expected an object with the keys "
            "num_parallel_trees, prediction_depth, max_nodes. Did you mean 'num_parallel_trees'?",
        ),
        (
            {"parallel_drafting_spec": {"num_trees": 4}},
            "prediction_depth, max_nodes. Did you mean 'num_parallel_trees'? Each key may be left",
        ),
        ({"method": "mtp"}, 'method is \'mtp\'; expected "eagle3" or "ngram"'),
        ({"method": "ngram"}, "model is 'head'; expected no model with method \"ngram\""),
        (
            {"method": "ngram", "model": None, "revision": "v1"},
            "revision is 'v1'; expected no revision with method \"ngram\"",
        ),
        ({"revision": ""}, "revision is ''; expected a branch, a tag or a commit"),
        ({"revision": 5}, "revision is 5; expected a branch"),
        ({"model": 5}, "model is 5; expected the folder of a draft head, or its hub id"),
        ({"model": ""}, "model is ''"),
        ({"num_speculative_tokens": "5"}, "num_speculative_tokens is '5'; expected a whole"),
        ({"num_speculative_tokens": 0}, "leave the speculative configuration out"),
        ({"parallel_drafting": "true"}, "parallel_drafting is 'true'; expected true, false"),
        ({"num_speculative_tokens": 65}, "num_speculative_tokens is 65; expected a whole number"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens is True"),
        ({"draft_sampling": "beam"}, "draft_sampling is 'beam'; expected \"argmax\" or"),
        ({"check_target": "no"}, "check_target is 'no'; expected true or false"),
        ({**LOOKUP, "prompt_lookup": False}, "prompt_lookup is False; expected true, or none"),
        (
            {"prompt_lookup": True, "draft_sampling": "probabilistic"},
            "draft_sampling is 'probabilistic'; expected \"argmax\" with prompt_lookup",
        ),
        ({**LOOKUP, "prompt_lookup_min": 0}, "prompt_lookup_min is 0; expected 1 to prompt_lookup"),
        ({**LOOKUP, "prompt_lookup_min": 5}, "prompt_lookup_min is 5; expected 1 to prompt_lookup"),
        ({**LOOKUP, "prompt_lookup_max": "4"}, "prompt_lookup_max is '4'; expected a whole number"),
        (
            {"rejection_sample_method": "synthetic"},
            "rejection_sample_method is 'synthetic', without synthetic_acceptance_rates; expected "
            "one rate for each of num_speculative_tokens",
        ),
        (
            {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": None},
            "rejection_sample_method is 'synthetic', without synthetic_acceptance_rates",
        ),
        (
            {"rejection_sample_method": "standard", **RATES},
            "rejection_sample_method 'standard' and synthetic_acceptance_rates [0.7, 0.5, 0.5] "
            "contradict each other",
        ),
        (
            {"rejection_sample_method": "block"},
            'rejection_sample_method is \'block\'; expected "standard" or "synthetic".',
        ),
        ({"rejection_sample_method": ["synthetic"]}, "rejection_sample_method is ['synthetic']"),
    ],
    ids=str,
)
def test_what_is_refused(keys: dict[Any, Any], expected: str) -> None:
    data = {**HEAD, **keys}
    with pytest.raises(UserError) as caught:
        SpeculativeConfig.parse(data)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is not JSON"),
        ("eagle3", "is not JSON"),
        ("{'method': 'eagle3'}", "is not JSON"),
        ('{"method": "eagle3",}', "is not JSON"),
        ("null", "is None; expected a JSON object"),
        (7, "is 7; expected a JSON object"),
        ('["eagle3"]', "expected a JSON object"),
        ('{"model": "a", "model": "b"}', "has the key 'model' twice"),
        ("{}", "model is None"),
    ],
)
def test_text_that_is_no_configuration(text: Any, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        SpeculativeConfig.parse(text)
    assert expected in str(caught.value)


# ---- K by the number of sequences that run together ----


def parse(schedule: Any, k: int = 7) -> SpeculativeConfig:
    keys = {"model": "head", "num_speculative_tokens": k}
    return SpeculativeConfig.parse({**keys, "num_speculative_tokens_per_batch_size": schedule})


@pytest.mark.parametrize("schedule", [[[2, 16, 7], [20, 64, 4]], {"2-16": 7, "20-64": 4}])
def test_ranges_and_gaps(schedule: Any) -> None:
    config = parse(schedule, k=6)
    found = [config.tokens_for(size) for size in (1, 2, 16, 17, 19, 20, 64, 500)]
    assert found == [6, 6, 6, 6, 6, 4, 4, 4], "gaps have the K before them, and K is the most"
    assert config.num_speculative_tokens_per_batch_size == ((2, 16, 7), (20, 64, 4))


def test_no_drafts_from_some_load_on() -> None:
    for schedule in ([[1, 16, 7], [17, 64, 0]], {"1-16": 7, "17-64": 0}):
        config = parse(schedule)
        assert [config.tokens_for(size) for size in (1, 16, 17, 500)] == [7, 7, 0, 0]


def test_without_a_schedule_k_is_k() -> None:
    assert {parse(None).tokens_for(size) for size in (1, 7, 1000)} == {7}
    assert [parse({"1": 3}).tokens_for(size) for size in (1, 2)] == [3, 3]


def test_the_engine_may_choose_k() -> None:
    config = parse("auto", k=5)
    assert config.num_speculative_tokens_per_batch_size == "auto"
    assert {config.tokens_for(size) for size in (1, 1000)} == {5}, "where it does not"


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ([], 'batch sizes with their K, like [[1, 16, 7], [17, 64, 4]], or "auto"'),
        ("automatic", "is 'automatic'; expected ranges"),
        (5, "is 5; expected ranges"),
        ([[1, 4]], "is [[1, 4]]; expected ranges"),
        ([[1, 4, "5"]], "expected ranges"),
        ({"1-": 3}, "is {'1-': 3}; expected ranges"),
        ({"one": 3}, "expected ranges"),
        ([[0, 4, 5]], "expected batch sizes from 1"),
        ([[5, 4, 3]], "last not below first"),
        ([[1, 4, -1]], "K of at least 0"),
        ([[1, 4, 5], [4, 8, 3]], "expected ascending ranges that do not overlap"),
    ],
    ids=str,
)
def test_schedules_that_are_refused(schedule: Any, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(schedule)
    assert str(caught.value).startswith("num_speculative_tokens_per_batch_size is ")
    assert expected in str(caught.value)


def test_prompt_lookup_has_one_k() -> None:
    with pytest.raises(UserError, match="is 'auto'; expected ranges or none with method \"ngram\""):
        SpeculativeConfig(method="ngram", num_speculative_tokens_per_batch_size="auto")


# ---- synthetic acceptance ----


@pytest.mark.parametrize("rates", [[1, 1, 0], (1.0, 1.0, 0.0), [1e-9, 0, 0], [0, 0, 0]], ids=str)
def test_the_ends_of_the_range(rates: Any) -> None:
    found = SpeculativeConfig.parse({**HEAD, **RATES, "synthetic_acceptance_rates": rates})
    assert found.synthetic_acceptance_rates == tuple(rates)
    assert all(type(rate) is float for rate in found.synthetic_acceptance_rates or ())


def test_prompt_lookup_takes_them_too() -> None:
    config = SpeculativeConfig(
        method="ngram", num_speculative_tokens=1, synthetic_acceptance_rates=(0.5,)
    )
    assert config.synthetic_acceptance_rates == (0.5,)


THREE = "expected a list of 3 numbers, one for each of num_speculative_tokens. Rate i is"
RANGE = "expected probabilities from 0 to 1. Rate i is the probability that at least the first i"
ORDER = "expected no rate above the one before it. Rate i is"


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([0.7, 0.5], THREE),
        ([0.7, 0.5, 0.3, 0.1], THREE),
        ([], THREE),
        (0.7, THREE),
        ("0.7", THREE),
        ({"1": 0.7}, THREE),
        ([0.7, 0.5, -0.1], RANGE),
        ([1.1, 0.5, 0.1], RANGE),
        ([0.7, 0.5, True], RANGE),
        ([0.7, 0.5, "0.1"], RANGE),
        ([0.7, 0.5, None], RANGE),
        ([float("nan"), 0.5, 0.1], RANGE),
        ([0.5, 0.7, 0.1], ORDER),
        ([0.5, 0.0, 1e-9], ORDER),
    ],
    ids=str,
)
def test_rates_that_are_refused(rates: Any, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        SpeculativeConfig.parse({**HEAD, **RATES, "synthetic_acceptance_rates": rates})
    assert str(caught.value).startswith(f"synthetic_acceptance_rates is {rates!r}; {expected}")


# ---- the engine, and outputs ----


BAD_OPTIONS: list[tuple[str, Any, str]] = [
    ("dtype", "float8", "one of auto, float32, float64, bfloat16, float16"),
    ("dtype", None, "one of auto, float32"),
    ("device", 0, '"auto", "cpu" or "cuda"'),
    *(
        (name, value, "a whole number of at least 1")
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size")
        for value in (0, 1.5, None)
    ),
    *(
        (name, value, "a whole number of at least 1, or none")
        for name in ("max_model_len", "num_kv_blocks")
        for value in (0, -1, "9")
    ),
    *(("kv_cache_gib", value, "a number above 0, or none") for value in (0, -1, math.inf, "2")),
    *(
        ("gpu_memory_utilization", value, "a number above 0, at most 1")
        for value in (0, -0.1, 1.01, math.nan, True, None, "0.5")
    ),
    *(("seed", value, "a whole number from 0 to 2**63 - 1") for value in (-1, 2**63, None)),
]


@pytest.mark.parametrize(("name", "value", "expected"), BAD_OPTIONS)
def test_bad_engine_options(name: str, value: Any, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        EngineConfig(**{name: value})
    assert str(caught.value).startswith(f"{name} is {value!r}; expected {expected}")


def test_what_can_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "new", tmp_path / "new" / "below"):
        assert require_writable_folder(folder, "The output") == folder
        assert require_writable_file(folder / "a.jsonl", "The output") == folder / "a.jsonl"
    assert list(tmp_path.iterdir()) == []


def test_a_relative_output_is_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert require_writable_folder("out", "The output") == Path("out")
    assert require_writable_file("a.jsonl", "The output") == Path("a.jsonl")


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (file := tmp_path / "file").touch()
    for folder in (file, file / "below", Path("/proc/below"), tmp_path / ("x" * 300)):
        with pytest.raises(UserError, match=r"^The output '.*' cannot be written: "):
            require_writable_folder(folder, "The output")
    with pytest.raises(UserError, match=r"^The folder of the output '.*' cannot be written: "):
        require_writable_file(file / "a.jsonl", "The output")
    with pytest.raises(UserError, match="is a folder; expected the name of a file"):
        require_writable_file(tmp_path, "The output")


def test_lengths_of_a_lookup() -> None:
    trees = {"model": "head", "parallel_drafting_spec": {}}
    lengths = [
        SpeculativeConfig.parse({**method, **given}).lookup_lengths
        for method in (LOOKUP, trees)
        for given in ({}, {"prompt_lookup_max": 3}, {"prompt_lookup_max": 1})
    ]
    assert lengths == [(4, 1), (3, 1), (1, 1), (16, 2), (3, 2), (1, 1)]
    long = {"prompt_lookup_max": 100, "prompt_lookup_min": 20}
    assert SpeculativeConfig.parse({**LOOKUP, **long}).lookup_lengths == (100, 20)
    assert SpeculativeConfig.parse({**trees, **long}).lookup_lengths == (16, 16), "of copies"
    joins = [
        SpeculativeConfig.parse({**trees, **given}).copies_join_trees
        for given in ({}, {"prompt_lookup": True}, {"prompt_lookup": False})
    ]
    assert joins == [True, True, False]


@pytest.mark.parametrize(("given", "nodes"), [({}, 7), ({"num_speculative_tokens": 5}, 5)])
def test_head_and_text_share_k_drafts(given: dict[str, int], nodes: int) -> None:
    config = SpeculativeConfig.parse({"model": "head", "prompt_lookup": True, **given})
    assert config.copies_join_trees and config.trees == CandidateTrees(nodes, nodes, nodes)
    assert config.num_speculative_tokens == given.get("num_speculative_tokens")
