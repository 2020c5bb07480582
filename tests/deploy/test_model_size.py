"""Sizes of models on the hub: those of the same folder here, and when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from peagle.deploy.catalog import facts_of, load_catalog, needed_by
from peagle.deploy.memory import GIB, ModelFacts, facts_of_folder
from peagle.deploy.model_size import facts_of_hub
from peagle.deploy.models import ModelSource
from peagle.deploy.request import Lookups, Request
from peagle.deploy.speculation import Asked
from peagle.deploy.wanted import new_deployment
from peagle.errors import UserError
from tests.conftest import make_target_folder
from tests.fake_hub import FakeHub, serve, used


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    """An empty hub."""
    with serve() as hub, used(hub.url, tmp_path / "home"):
        yield hub


def test_of_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    """Nothing but config.json and headers is fetched, and nothing stays."""
    folder = make_target_folder(tmp_path / "target")
    hub.add("org/model", folder)
    assert facts_of_hub(ModelSource("hub", "org/model")) == facts_of_folder(folder)
    assert hub.fetched() <= {"config.json", "model.safetensors"}
    assert not list((tmp_path / "home").rglob("models--org--model/snapshots"))


def test_of_what_cannot_be_looked_at(hub: FakeHub) -> None:
    hub.add("org/empty")
    for name in ("org/nothing", "org/empty"):
        with pytest.warns(UserWarning, match=f"The model '{name}' could not be looked at on the"):
            assert facts_of_hub(ModelSource("hub", name)) is None
    assert facts_of_hub(ModelSource("s3", "s3://bucket/model/")) is None


def test_only_what_the_catalog_does_not_know_is_looked_at() -> None:
    asked: list[str] = []

    def read_size(source: ModelSource) -> ModelFacts:
        asked.append(source.name)
        return ModelFacts(10, 10, "bf16")

    entries = load_catalog()
    target, head = ModelSource("hub", "me/model"), ModelSource("hub", "me/head")
    ours = ModelSource("hub", "openai/gpt-oss-20b")
    assert facts_of(ours, entries, read_size) == entries["gpt-oss-20b"].target_facts()
    found = needed_by(target, head, {}, entries, read_size=read_size)
    assert found is not None and (found.target_bytes, found.draft_bytes) == (10, 10)
    assert asked == ["me/model", "me/head"]


@pytest.mark.parametrize(
    ("instance_type", "flags", "said"),
    [
        ("ml.g5.xlarge", {}, "does not fit ml.g5.xlarge: it needs 52.0 GiB on one GPU"),
        ("ml.g5.12xlarge", {}, ""),  # 50/4 + 2 GiB on each of 4 GPUs
        ("ml.g5.12xlarge", {"data-parallel-size": "4"}, "it needs 52.0 GiB on one GPU"),
        ("ml.g6e.xlarge", {"gpu-memory-utilization": "0.5"}, r"may be used \(50%\)"),
    ],
)
def test_a_model_of_the_hub_that_is_too_large(
    instance_type: str, flags: dict[str, str], said: str
) -> None:
    facts = ModelFacts(50 * GIB, 50 * GIB, "bf16")
    lookups = Lookups(
        load_catalog(),
        lambda _: None,
        lambda *_: None,
        lambda _: None,
        environ={"SAGEMAKER_ROLE": "arn:aws:iam::123456789012:role/x"},
        read_size=lambda _: facts,
    )
    request = Request(
        "me/model",
        "us-east-1",
        speculative=Asked(speculation=False),
        instance_type=instance_type,
        vllm_flags=flags,
    )
    if said:
        with pytest.raises(UserError, match=said):
            new_deployment(request, "1", lookups)
    else:
        assert new_deployment(request, "1", lookups).instance_type == instance_type
