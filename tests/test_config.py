"""The parser of vLLM's speculative configuration, and what it generates with."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from peagle import LLM, SamplingParams, SpeculativeConfig
from peagle.config import speculative_keys
from peagle.errors import UserError

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
HEAD = {"method": "eagle3", "model": "head"}
PUBLISHED = """serve openai/gpt-oss-20b --speculative-config '{"method": "eagle3", \
"model": "amazon/gpt-oss-20b-p-eagle", "num_speculative_tokens": 5, "parallel_drafting": true}'"""


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


@pytest.mark.parametrize(
    ("keys", "fields"),
    [
        ({}, {}),
        ({"revision": "v2"}, {"revision": "v2"}),
        ({"num_speculative_tokens": None, "revision": None}, {}),
        ({"draft_sample_method": "greedy"}, {"draft_sampling": "argmax"}),
        ({"draft_sample_method": "probabilistic"}, {"draft_sampling": "probabilistic"}),
        (
            {"draft_sample_method": "greedy", "draft_sampling": "argmax"},
            {"draft_sampling": "argmax"},
        ),
        ({"parallel_drafting_spec": None}, {}),
        ({"enforce_eager": True}, {}),
        ({"enforce_eager": False, "disable_padded_drafter_batch": True}, {}),
        ({"draft_tensor_parallel_size": 1, "use_local_argmax_reduction": False}, {}),
        ({"rejection_sample_method": "standard", "enforce_eager": None}, {}),
    ],
    ids=str,
)
def test_keys_of_vllm(keys: dict[str, Any], fields: dict[str, Any]) -> None:
    expected = asdict(SpeculativeConfig(**{**HEAD, **fields}))
    for form in ({**HEAD, **keys}, json.dumps({**HEAD, **keys})):
        assert asdict(SpeculativeConfig.parse(form)) == expected
    assert speculative_keys({**HEAD, **keys}) == {**HEAD, **fields}


def test_a_configuration_is_not_changed_by_parsing() -> None:
    keys = {**HEAD, "draft_sample_method": "greedy", "enforce_eager": True}
    before = dict(keys)
    SpeculativeConfig.parse(keys)
    assert keys == before
    config = SpeculativeConfig(model="head")
    assert SpeculativeConfig.parse(config) is config


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            {"parallel_drafting_spec": {"num_trees": 4, "depth": 7}},
            "parallel_drafting_spec is {'num_trees': 4, 'depth': 7}: it asks for candidate trees",
        ),
        ({"parallel_drafting_spec": False}, "parallel_drafting_spec is False"),
        ({"draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size is 2; expected 1."),
        ({"draft_tensor_parallel_size": [1]}, "draft_tensor_parallel_size is [1]; expected 1."),
        ({"enforce_eager": "yes"}, "enforce_eager is 'yes'; expected false or true."),
        ({"draft_sample_method": "gumbel"}, "draft_sample_method is 'gumbel'; expected \"greedy\""),
        (
            {"draft_sample_method": "greedy", "draft_sampling": "probabilistic"},
            "draft_sample_method 'greedy' and draft_sampling 'probabilistic' contradict",
        ),
        ({"quantization": "fp8"}, "Unknown key 'quantization'"),
        ({"modle": "head"}, "Unknown key 'modle' in the speculative configuration; known keys: "),
        ({7: 1}, "Unknown key '7'"),
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
    ],
    ids=str,
)
def test_what_is_refused(keys: dict[Any, Any], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        SpeculativeConfig.parse({**HEAD, **keys})
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is not JSON"),
        ("eagle3", "is not JSON"),
        ("{'method': 'eagle3'}", "is not JSON"),
        ('{"method": "eagle3",}', "is not JSON"),
        ("null", "is None; expected a JSON object"),
        ('["eagle3"]', "expected a JSON object"),
        ('{"model": "a", "model": "b"}', "has the key 'model' twice"),
        ("{}", "model is None"),
    ],
)
def test_text_that_is_no_configuration(text: str, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        SpeculativeConfig.parse(text)
    assert expected in str(caught.value)
