"""Mixes of requests: who asks for what, and files that are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from peagle.cli.mix import apply_mix, read_mix
from peagle.config import SamplingParams
from peagle.errors import UserError
from peagle.evaluation.decoding import Request

SCHEMA = {"kind": "json_schema", "source": {"type": "object"}}
MIX = [
    {"every": 4, "sampling": {"repetition_penalty": 1.1}},
    {"every": 8, "sampling": {"logprobs": 5}},
    {"every": 16, "sampling": {"structured_output": SCHEMA}},
]


def written(tmp_path: Path, mix: Any) -> Path:
    path = tmp_path / "mix.json"
    path.write_text(mix if isinstance(mix, str) else json.dumps(mix))
    return path


def test_each_share_takes_its_requests(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=9, temperature=0.5, seed=3)
    requests = [Request(str(i), "x", params) for i in range(32)]
    mixed = apply_mix(requests, read_mix(written(tmp_path, MIX)))
    assert [r.id for r in mixed] == [r.id for r in requests]
    asks = {
        "repetition_penalty": [
            i for i, r in enumerate(mixed) if r.params.repetition_penalty == 1.1
        ],
        "logprobs": [i for i, r in enumerate(mixed) if r.params.logprobs == 5],
        "structured_output": [i for i, r in enumerate(mixed) if r.params.structured_output],
    }
    assert asks == {
        "repetition_penalty": [0, 4, 8, 12, 16, 20, 24, 28],
        "logprobs": [1, 9, 17, 25],
        "structured_output": [2, 18],
    }
    assert all((r.params.max_tokens, r.params.seed) == (9, 3) for r in mixed)
    assert all(r.params is params for i, r in enumerate(mixed) if i % 4 == 3), "others stay"


def test_where_shares_meet_all_apply(tmp_path: Path) -> None:
    shares = read_mix(
        written(
            tmp_path,
            [
                {"every": 1, "sampling": {"presence_penalty": 0.5}},
                {"every": 1, "sampling": {"frequency_penalty": 0.25}},
            ],
        )
    )
    (one,) = apply_mix([Request("a", "x", SamplingParams())], shares)
    assert (one.params.presence_penalty, one.params.frequency_penalty) == (0.5, 0.25)


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        ("[", r"--mix: '.*mix.json' is not JSON"),
        ({}, r"holds \{\}; expected a list, like \[\{\"every\": 4"),
        ([], r"holds \[\]; expected a list"),
        ([{"every": 4}], r"entry 1 is \{'every': 4\}; expected an object with every and sampling"),
        ([*MIX, {"every": 2, "sampling": {}, "share": 1}], "entry 4 is .* with every and sampling"),
        ([{"every": 0, "sampling": {}}], "entry 1: every is 0; expected a whole number of at"),
        ([{"every": True, "sampling": {}}], "entry 1: every is True; expected a whole number"),
        ([{"every": 1, "sampling": 3}], "entry 1: sampling is 3; expected an object"),
        ([{"every": 1, "sampling": {"penalty": 2}}], "entry 1: sampling has 'penalty'; expected"),
        ([{"every": 1, "sampling": {"n": 2}}], "entry 1: sampling has 'n'; expected some of"),
        ([{"every": 1, "sampling": {"logprobs": 99}}], "entry 1: logprobs is 99; expected"),
    ],
)
def test_a_file_that_is_no_mix(tmp_path: Path, mix: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_mix(written(tmp_path, mix))


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--mix: '.*none.json' is not readable: No such file"):
        read_mix(tmp_path / "none.json")


def test_parameters_that_contradict_each_other(tmp_path: Path) -> None:
    shares = read_mix(written(tmp_path, MIX))
    requests = [Request(str(i), "x", SamplingParams(ignore_eos=True)) for i in range(4)]
    with pytest.raises(UserError, match="--mix: entry 3: structured_output and ignore_eos"):
        apply_mix(requests, shares)
