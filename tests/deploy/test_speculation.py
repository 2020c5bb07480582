"""The speculative configuration: options, the catalog, what a head's files say, what vLLM lacks."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest

from peagle.config import SpeculativeConfig
from peagle.deploy.model_files import HeadFacts
from peagle.deploy.models import ModelSource
from peagle.deploy.speculation import Defaults, SpeculationOptions, decide
from peagle.errors import UserError

HEAD = ModelSource("hub", "owner/head")
KNOWN = Defaults(HEAD, {"num_speculative_tokens": 5}, 8)
PEAGLE, EAGLE3 = HeadFacts(True, 8), HeadFacts(False, None)


def decided(
    asked: SpeculationOptions,
    defaults: Defaults = KNOWN,
    facts: HeadFacts | None = PEAGLE,
    source: Any = "managed",
):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return decide(asked, source, defaults, lambda _: facts)


def full(k: int, parallel: bool = True, **more: object) -> dict[str, object]:
    return {
        "method": "eagle3",
        "num_speculative_tokens": k,
        "parallel_drafting": parallel,
        **more,
    }


OTHER = ModelSource("hub", "other/head")


@pytest.mark.parametrize(
    ("asked", "defaults", "facts", "expected"),
    [
        (SpeculationOptions(), KNOWN, PEAGLE, (HEAD, full(5))),
        (SpeculationOptions(speculation=True), KNOWN, PEAGLE, (HEAD, full(5))),
        (SpeculationOptions(num_speculative_tokens=7), KNOWN, PEAGLE, (HEAD, full(7))),
        (SpeculationOptions(draft="other/head"), Defaults(), PEAGLE, (OTHER, full(7))),
        (SpeculationOptions(draft="other/head"), KNOWN, EAGLE3, (OTHER, full(5, False))),
        # What holds for the head that is there does not for another: its kind is looked up.
        (
            SpeculationOptions(draft="other/head"),
            Defaults(HEAD, full(3)),
            EAGLE3,
            (OTHER, full(3, False)),
        ),
        # A head that cannot be looked at is taken for a P-EAGLE one, unless something else is said.
        (SpeculationOptions(draft="other/head"), Defaults(), None, (OTHER, full(7))),
        (
            SpeculationOptions(draft="other/head", config='{"parallel_drafting": false}'),
            Defaults(),
            None,
            (OTHER, full(7, False)),
        ),
        (
            SpeculationOptions(
                config='{"model": "other/head", "revision": "v1", "num_speculative_tokens": 2}'
            ),
            KNOWN,
            PEAGLE,
            (ModelSource("hub", "other/head", "v1"), full(2)),
        ),
        (
            SpeculationOptions(config='{"max_model_len": 4096}'),
            KNOWN,
            PEAGLE,
            (HEAD, full(5, max_model_len=4096)),
        ),
        (
            SpeculationOptions(config='{"method": "ngram", "num_speculative_tokens": 4}'),
            KNOWN,
            PEAGLE,
            (None, {"method": "ngram", "num_speculative_tokens": 4}),
        ),
        # Of SageMaker's hub: the head is among the files, and named in the configuration.
        (
            SpeculationOptions(num_speculative_tokens=3),
            Defaults(None, {"method": "eagle3", "model": "/x", "num_speculative_tokens": 9}),
            PEAGLE,
            (None, {"method": "eagle3", "model": "/x", "num_speculative_tokens": 3}),
        ),
        (SpeculationOptions(), Defaults(), PEAGLE, (None, None)),
        (SpeculationOptions(speculation=False), KNOWN, PEAGLE, (None, None)),
    ],
)
def test_decided(
    asked: SpeculationOptions, defaults: Defaults, facts: HeadFacts | None, expected
) -> None:
    assert decided(asked, defaults, facts) == expected


@pytest.mark.parametrize(
    ("asked", "facts", "message"),
    [
        (
            SpeculationOptions(speculation=False, draft="a/b"),
            PEAGLE,
            "--no-speculation contradicts",
        ),
        (
            SpeculationOptions(speculation=False, num_speculative_tokens=3),
            PEAGLE,
            "--no-speculation contradicts",
        ),
        (
            SpeculationOptions(draft="a/b", config='{"model": "c/d"}'),
            PEAGLE,
            "leave one of them out",
        ),
        (SpeculationOptions(config="{"), PEAGLE, "--speculative-config is not JSON"),
        (SpeculationOptions(config="[]"), PEAGLE, "expected a JSON object"),
        (
            SpeculationOptions(config='{"model": "a/b", "model": "c/d"}'),
            PEAGLE,
            "the key 'model' twice",
        ),
        (
            SpeculationOptions(config='{"parallel_drafting": true}'),
            EAGLE3,
            "it has no mask_hidden. Set it to false",
        ),
        (
            SpeculationOptions(config='{"parallel_drafting": false}'),
            PEAGLE,
            "is a P-EAGLE head. Set it to true",
        ),
        (SpeculationOptions(num_speculative_tokens=0), PEAGLE, "from 1 to 64"),
        (SpeculationOptions(num_speculative_tokens=65), PEAGLE, "from 1 to 64"),
        (SpeculationOptions(config='{"num_speculative_tokens": "5"}'), PEAGLE, "from 1 to 64"),
        (SpeculationOptions(draft="head"), PEAGLE, "The draft head is 'head'; expected a hub id"),
    ],
)
@pytest.mark.parametrize("source", ["managed", "native"])
def test_refused(asked: SpeculationOptions, facts: HeadFacts, message: str, source) -> None:
    with pytest.raises(UserError, match=message):
        decided(asked, facts=facts, source=source)


@pytest.mark.parametrize(
    "asked", [SpeculationOptions(speculation=True), SpeculationOptions(num_speculative_tokens=3)]
)
def test_no_head_is_known(asked: SpeculationOptions) -> None:
    with pytest.raises(UserError, match="No draft head is known for this model"):
        decided(asked, Defaults())


TREES = '{"parallel_drafting_spec": {"trees": 4, "depth": 5}}'


@pytest.mark.parametrize("source", ["managed", "jumpstart"])
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TREES, "candidate trees, which the managed vLLM container does not have"),
        (
            '{"num_speculative_tokens_per_batch_size": {"1-8": 5}}',
            "vLLM fails with a schedule of K and a head that drafts in parallel",
        ),
        ('{"check_target": false}', "'check_target', which vLLM does not know"),
        ('{"draft_sampling": "argmax"}', "'draft_sampling', which vLLM does not know"),
    ],
)
def test_what_vllm_does_not_do(source, config: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        decided(SpeculationOptions(config=config), source=source)


@pytest.mark.parametrize(
    "config",
    [
        *('{"num_speculative_tokens_per_batch_size": {"1-8": 5}}', '{"check_target": false}'),
        *(TREES, '{"nonsense": 1}', '{"max_model_len": 0}', '{"draft_sampling": "probabilistic"}'),
    ],
)
def test_our_container_takes_what_our_engine_takes(config: str) -> None:
    """What its parser refuses is refused before anything is created, with its own message."""
    try:
        SpeculativeConfig.parse({"model": "x", "num_speculative_tokens": 5, **json.loads(config)})
    except UserError as error:
        with pytest.raises(UserError) as caught:
            decided(SpeculationOptions(config=config), source="native")
        assert str(caught.value) == str(error)
    else:
        _, made = decided(SpeculationOptions(config=config), source="native")
        assert json.loads(config).items() <= (made or {}).items()


def test_deeper_than_the_head_was_trained_for() -> None:
    with pytest.warns(UserWarning, match="is 9, but the head 'owner/head' was trained for 8"):
        decide(SpeculationOptions(num_speculative_tokens=9), "managed", KNOWN, lambda _: PEAGLE)
    with pytest.warns(UserWarning, match="trained for 8"):
        decide(SpeculationOptions(num_speculative_tokens=9), "managed", KNOWN, lambda _: None)
