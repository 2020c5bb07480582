"""The speculative configuration: options, the catalog, what a head's files say, what vLLM lacks."""

import json
import warnings
from typing import Any

import pytest

from peagle.config import SpeculativeConfig
from peagle.deploy.model_files import HeadFacts
from peagle.deploy.models import ModelSource
from peagle.deploy.speculation import Defaults, SpeculationFlags, configure_drafts, wanted_drafts
from peagle.errors import UserError

HEAD = ModelSource("hub", "owner/head")
KNOWN = Defaults(HEAD, {"num_speculative_tokens": 5}, 8)
PEAGLE, EAGLE3 = HeadFacts(True, 8), HeadFacts(False, None)


def decide(
    flags: SpeculationFlags, source: Any, defaults: Defaults, facts: HeadFacts | None
) -> tuple[ModelSource | None, dict[str, Any] | None]:
    """The head and the configuration of flags, with these facts about the head."""
    if (wanted := wanted_drafts(flags, defaults)) is None:
        return None, None
    read = None if wanted.draft is None else facts
    return wanted.draft, configure_drafts(wanted, source, defaults, read)


def decided(
    asked: SpeculationFlags,
    defaults: Defaults = KNOWN,
    facts: HeadFacts | None = PEAGLE,
    source: Any = "managed",
):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return decide(asked, source, defaults, facts)


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
        (SpeculationFlags(), KNOWN, PEAGLE, (HEAD, full(5))),
        (SpeculationFlags(speculation=True), KNOWN, PEAGLE, (HEAD, full(5))),
        (SpeculationFlags(num_speculative_tokens=7), KNOWN, PEAGLE, (HEAD, full(7))),
        (SpeculationFlags(draft="other/head"), Defaults(), PEAGLE, (OTHER, full(7))),
        (SpeculationFlags(draft="other/head"), KNOWN, EAGLE3, (OTHER, full(5, False))),
        # What holds for the head that is there does not for another: its kind is looked up.
        (
            SpeculationFlags(draft="other/head"),
            Defaults(HEAD, full(3)),
            EAGLE3,
            (OTHER, full(3, False)),
        ),
        # A head that cannot be looked at is taken for a P-EAGLE one, unless something else is said.
        (SpeculationFlags(draft="other/head"), Defaults(), None, (OTHER, full(7))),
        (
            SpeculationFlags(draft="other/head", config='{"parallel_drafting": false}'),
            Defaults(),
            None,
            (OTHER, full(7, False)),
        ),
        (
            SpeculationFlags(
                config='{"model": "other/head", "revision": "v1", "num_speculative_tokens": 2}'
            ),
            KNOWN,
            PEAGLE,
            (ModelSource("hub", "other/head", "v1"), full(2)),
        ),
        (
            SpeculationFlags(config='{"max_model_len": 4096}'),
            KNOWN,
            PEAGLE,
            (HEAD, full(5, max_model_len=4096)),
        ),
        (
            SpeculationFlags(config='{"method": "ngram", "num_speculative_tokens": 4}'),
            KNOWN,
            PEAGLE,
            (None, {"method": "ngram", "num_speculative_tokens": 4}),
        ),
        # Of SageMaker's hub: the head is among the files, and named in the configuration.
        (
            SpeculationFlags(num_speculative_tokens=3),
            Defaults(None, {"method": "eagle3", "model": "/x", "num_speculative_tokens": 9}),
            PEAGLE,
            (None, {"method": "eagle3", "model": "/x", "num_speculative_tokens": 3}),
        ),
        (SpeculationFlags(), Defaults(), PEAGLE, (None, None)),
        (SpeculationFlags(speculation=False), KNOWN, PEAGLE, (None, None)),
    ],
)
def test_decided(
    asked: SpeculationFlags, defaults: Defaults, facts: HeadFacts | None, expected
) -> None:
    assert decided(asked, defaults, facts) == expected


@pytest.mark.parametrize(
    ("asked", "facts", "message"),
    [
        (
            SpeculationFlags(speculation=False, draft="a/b"),
            PEAGLE,
            "--no-speculation contradicts",
        ),
        (
            SpeculationFlags(speculation=False, num_speculative_tokens=3),
            PEAGLE,
            "--no-speculation contradicts",
        ),
        (
            SpeculationFlags(draft="a/b", config='{"model": "c/d"}'),
            PEAGLE,
            "leave one of them out",
        ),
        (SpeculationFlags(config="{"), PEAGLE, "--speculative-config is not JSON"),
        (SpeculationFlags(config="[]"), PEAGLE, "expected a JSON object"),
        (
            SpeculationFlags(config='{"model": "a/b", "model": "c/d"}'),
            PEAGLE,
            "the key 'model' twice",
        ),
        (
            SpeculationFlags(config='{"parallel_drafting": true}'),
            EAGLE3,
            "it has no mask_hidden. Set it to false",
        ),
        (
            SpeculationFlags(config='{"parallel_drafting": false}'),
            PEAGLE,
            "is a P-EAGLE head. Set it to true",
        ),
        (SpeculationFlags(num_speculative_tokens=0), PEAGLE, "from 1 to 64"),
        (SpeculationFlags(num_speculative_tokens=65), PEAGLE, "from 1 to 64"),
        (SpeculationFlags(config='{"num_speculative_tokens": "5"}'), PEAGLE, "from 1 to 64"),
        (SpeculationFlags(draft="head"), PEAGLE, "The draft head is 'head'; expected a hub id"),
    ],
)
@pytest.mark.parametrize("source", ["managed", "native"])
def test_refused(asked: SpeculationFlags, facts: HeadFacts, message: str, source) -> None:
    with pytest.raises(UserError, match=message):
        decided(asked, facts=facts, source=source)


@pytest.mark.parametrize(
    "asked", [SpeculationFlags(speculation=True), SpeculationFlags(num_speculative_tokens=3)]
)
def test_no_head_is_known(asked: SpeculationFlags) -> None:
    with pytest.raises(UserError, match="No draft head is known for this model"):
        decided(asked, Defaults())


TREES = (
    '{"parallel_drafting_spec": {"num_parallel_trees": 4, "prediction_depth": 5, "max_nodes": 16}}'
)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TREES, "candidate trees, which the managed vLLM container does not have"),
        ('{"parallel_drafting_spec": {}}', "candidate trees, which the managed vLLM container"),
        (
            '{"num_speculative_tokens_per_batch_size": {"1-8": 5}}',
            "vLLM fails with a schedule of K and a head that drafts in parallel",
        ),
        ('{"check_target": false}', "'check_target', which vLLM does not know"),
        ('{"correction": false}', "'correction', which vLLM does not know"),
        ('{"draft_window": 512}', "'draft_window', which vLLM does not know"),
        ('{"drawn_chains_from": 1.0}', "'drawn_chains_from', which vLLM does not know"),
        ('{"prompt_lookup": false}', "'prompt_lookup', which vLLM does not know"),
        ('{"draft_sampling": "argmax"}', "'draft_sampling', which vLLM does not know"),
    ],
)
def test_what_vllm_does_not_do(config: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        decided(SpeculationFlags(config=config))


@pytest.mark.parametrize(
    "config",
    [
        *('{"num_speculative_tokens_per_batch_size": {"1-8": 5}}', '{"check_target": false}'),
        *(TREES, '{"parallel_drafting_spec": {"trees": 4}}', '{"nonsense": 1}'),
        *('{"max_model_len": 0}', '{"draft_sampling": "probabilistic"}'),
    ],
)
def test_our_container_takes_what_our_engine_takes(config: str) -> None:
    """What its parser refuses is refused before anything is created, with its own message."""
    try:
        SpeculativeConfig.parse({"model": "x", "num_speculative_tokens": 5, **json.loads(config)})
    except UserError as error:
        with pytest.raises(UserError) as caught:
            decided(SpeculationFlags(config=config), source="native")
        assert str(caught.value) == str(error)
    else:
        _, made = decided(SpeculationFlags(config=config), source="native")
        assert json.loads(config).items() <= (made or {}).items()


BY_FLAG = {"num_parallel_trees": 4, "prediction_depth": 5}


@pytest.mark.parametrize(
    ("asked", "defaults", "k", "shape"),
    [
        # The catalog's K follows the depth, in --speculative-config and in the option of its own.
        (SpeculationFlags(config=TREES), Defaults(HEAD, {"num_speculative_tokens": 7}, 8), 5, None),
        (
            SpeculationFlags(trees=BY_FLAG),
            Defaults(HEAD, {"num_speculative_tokens": 7}),
            5,
            BY_FLAG,
        ),
        (SpeculationFlags(trees={}), Defaults(HEAD, {"num_speculative_tokens": 7}), 7, {}),
        (SpeculationFlags(trees={}), Defaults(HEAD, {"num_speculative_tokens": 12}), 8, {}),
        (SpeculationFlags(trees={}, num_speculative_tokens=3), KNOWN, 3, {}),
        (SpeculationFlags(trees={"max_nodes": 2}), KNOWN, 2, {"max_nodes": 2}),
        (SpeculationFlags(trees={}, config='{"num_speculative_tokens": 4}'), KNOWN, 4, {}),
    ],
)
def test_k_is_the_depth_of_trees(
    asked: SpeculationFlags, defaults: Defaults, k: int, shape: dict[str, int] | None
) -> None:
    shape = json.loads(TREES)["parallel_drafting_spec"] if shape is None else shape
    made = decided(asked, defaults, source="native")
    assert made == (HEAD, full(k, parallel_drafting_spec=shape))
    config = SpeculativeConfig.parse({"model": "x", **(made[1] or {})})
    assert config.trees is not None and config.trees.prediction_depth == k


@pytest.mark.parametrize(
    "asked",
    [
        SpeculationFlags(trees="auto"),
        SpeculationFlags(config='{"parallel_drafting_spec": "auto"}'),
    ],
)
def test_our_container_decides_on_automatic_trees(asked: SpeculationFlags) -> None:
    made = decided(asked, Defaults(HEAD), source="native")
    assert made == (HEAD, full(7, parallel_drafting_spec="auto"))
    with pytest.raises(UserError, match="is 'auto': it asks for candidate trees"):
        decided(asked, KNOWN, source="managed")


@pytest.mark.parametrize(
    ("asked", "facts", "message"),
    [
        (
            SpeculationFlags(trees={"prediction_depth": 9}),
            PEAGLE,
            "is 9; expected at most 8, which",
        ),
        (
            SpeculationFlags(trees={"trees": 4}),
            PEAGLE,
            "unknown key 'trees'.* Each key may be left",
        ),
        (SpeculationFlags(trees={"num_parallel_trees": 0}), PEAGLE, "num_parallel_trees is 0; exp"),
        (SpeculationFlags(trees={"num_parallel_trees": 9}), EAGLE3, "is 9; expected 1 to 8: the"),
        (
            SpeculationFlags(trees=BY_FLAG, num_speculative_tokens=4),
            PEAGLE,
            "is 4; expected 5, the",
        ),
        (SpeculationFlags(trees={}, config=TREES), PEAGLE, "both give parallel_drafting_spec"),
        (SpeculationFlags(trees={}, speculation=False), PEAGLE, "--no-speculation contradicts"),
    ],
)
def test_trees_that_are_refused(asked: SpeculationFlags, facts: HeadFacts, message: str) -> None:
    with pytest.raises(UserError, match=message):
        decided(asked, facts=facts, source="native")


def test_deeper_than_the_head_was_trained_for() -> None:
    with pytest.warns(UserWarning, match="is 9, but the head 'owner/head' was trained for 8"):
        decide(SpeculationFlags(num_speculative_tokens=9), "managed", KNOWN, PEAGLE)
    with pytest.warns(UserWarning, match="trained for 8"):
        decide(SpeculationFlags(num_speculative_tokens=9), "managed", KNOWN, None)
