"""Heads are looked at before they are deployed: kind, mask_hidden, depth, target."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from peagle.deploy.memory import facts_of_folder
from peagle.deploy.model_files import (
    HeadFacts,
    check_target,
    facts_of_hub,
    head_facts,
    parse_head_facts,
)
from peagle.deploy.models import ModelSource
from peagle.errors import CheckpointError, UserError
from tests.conftest import make_target_folder
from tests.fake_hub import FakeHub, serve, silent_hub, used

Heads = Callable[..., Path]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    """An empty hub."""
    with serve() as hub, used(hub.url, tmp_path / "home"):
        yield hub


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a hub that gives no connection."""
    with silent_hub() as (host, port):
        yield f"http://{host}:{port}"


def local(folder: Path) -> ModelSource:
    return ModelSource("local", str(folder))


def test_what_a_folder_tells(head_folders: Heads, target_folder: Path) -> None:
    """Its kind, the depth it was trained for, and that its target is its target."""
    peagle, eagle3 = head_folders(trained_depth=5), head_folders(parallel=False)
    facts = head_facts(local(peagle))
    assert facts is not None and (facts.is_parallel, facts.trained_depth) == (True, 5)
    assert facts.target["vocab_size"] == 320
    check_target(facts, local(peagle), local(target_folder))
    other = head_facts(local(eagle3))
    assert other is not None and (other.is_parallel, other.trained_depth) == (False, None)


def test_a_head_without_mask_hidden(head_folders: Heads) -> None:
    """As an index lists it, too: only headers are read."""
    from safetensors.torch import load_file, save_file

    folder = head_folders()
    tensors = load_file(folder / "model.safetensors")
    del tensors["mask_hidden"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="mask token but no tensor mask_hidden"):
        head_facts(local(folder))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 330}, "its vocab_size is 320, that of .* is 330"),
        ({"hidden_size": 64, "head_dim": 16}, "its hidden_size is 32, that of .* is 64"),
        ({"num_hidden_layers": 5}, "its num_layers is 4, that of .* is 5"),
    ],
)
def test_a_head_of_another_target(
    head_folders: Heads, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    head, other = local(head_folders()), local(make_target_folder(tmp_path / "other", **change))
    facts = head_facts(head)
    assert facts is not None
    with pytest.raises(CheckpointError, match=f"of another target, 'llama.*': {message}"):
        check_target(facts, head, other)


def test_another_tokenizer_is_another_target(
    head_folders: Heads, target_folder: Path, tmp_path: Path
) -> None:
    import shutil

    other = shutil.copytree(target_folder, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    (other / "tokenizer.json").write_text(json.dumps({**tokenizer, "version": "2.0"}))
    head = local(head_folders())
    facts = head_facts(head)
    assert facts is not None
    check_target(facts, head, local(other))  # saved anew, with the same tokens
    added = [{"id": 0, "content": "another token"}]
    (other / "tokenizer.json").write_text(json.dumps({**tokenizer, "added_tokens": added}))
    with pytest.raises(CheckpointError, match="tokenizer_sha256"):
        check_target(facts, head, local(other))


def test_sizes_of_a_model_with_several_parts(tmp_path: Path) -> None:
    """The decoder's stand in text_config."""
    (tmp_path / "config.json").write_text(
        json.dumps({"vocab_size": 1, "text_config": {"vocab_size": 320, "hidden_size": 33}})
    )
    facts = HeadFacts(True, target={"vocab_size": 320, "hidden_size": 32})
    with pytest.raises(CheckpointError, match=r"hidden_size is 32, that of .* is 33"):
        check_target(facts, ModelSource("hub", "a/b"), local(tmp_path))


def test_the_hubs_heads_are_looked_at(head_folders: Heads, hub: FakeHub, tmp_path: Path) -> None:
    """And nothing is left in the cache, where half a model would be taken for one."""
    hub.add("org/head", head_folders(trained_depth=6))
    facts = head_facts(ModelSource("hub", "org/head"))
    assert facts is not None and (facts.is_parallel, facts.trained_depth) == (True, 6)
    assert not list((tmp_path / "home").rglob("models--org--head/snapshots"))


def test_the_hubs_targets_are_compared_with(
    head_folders: Heads, target_folder: Path, hub: FakeHub, tmp_path: Path
) -> None:
    """By their config.json; what is in S3 is not looked at."""
    head = local(head_folders())
    facts = head_facts(head)
    assert facts is not None
    hub.add("org/same", target_folder)
    hub.add("org/other", make_target_folder(tmp_path / "other", num_hidden_layers=6))
    check_target(facts, head, ModelSource("hub", "org/same"))
    check_target(facts, head, ModelSource("s3", "s3://bucket/other/"))
    with pytest.raises(CheckpointError, match="num_layers"):
        check_target(facts, head, ModelSource("hub", "org/other"))


def test_what_cannot_be_looked_at_is_told(hub: FakeHub) -> None:
    del hub
    with pytest.warns(UserWarning, match="could not read the head 'org/nothing' on the hub"):
        assert head_facts(ModelSource("hub", "org/nothing")) is None
    with pytest.warns(UserWarning, match="could not read the head 's3://bucket/head/' in S3;"):
        assert head_facts(ModelSource("s3", "s3://bucket/head/")) is None


def test_a_hub_that_gives_no_connection(
    hub: FakeHub, silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's library would wait for 10 s and more, and for each file again."""
    monkeypatch.setenv("HF_ENDPOINT", silent)
    monkeypatch.setattr("peagle.models.hub.CONNECT_S", 0.3)
    monkeypatch.setattr("peagle.models.hub._unreachable", {})
    begun = time.monotonic()
    with pytest.warns(UserWarning, match=r"on the hub \(it gave no connection within 0.3 s\);"):
        assert head_facts(ModelSource("hub", "org/head")) is None
    with pytest.warns(UserWarning, match=r"on the hub \(it gave no connection within 0.3 s\);"):
        assert facts_of_hub(ModelSource("hub", "org/model")) is None
    assert time.monotonic() - begun < 8


def test_what_is_no_head() -> None:
    with pytest.raises(UserError, match="is a whole model"):
        parse_head_facts({"architectures": ["GptOssForCausalLM"]}, set(), "x")


def test_sizes_of_a_model_on_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    """Nothing but config.json and headers is fetched, and nothing stays."""
    folder = make_target_folder(tmp_path / "target")
    hub.add("org/model", folder)
    assert facts_of_hub(ModelSource("hub", "org/model")) == facts_of_folder(folder)
    assert hub.fetched() <= {"config.json", "model.safetensors"}
    assert not list((tmp_path / "home").rglob("models--org--model/snapshots"))


def test_sizes_of_what_cannot_be_looked_at(hub: FakeHub) -> None:
    hub.add("org/empty")
    for name in ("org/nothing", "org/empty"):
        with pytest.warns(UserWarning, match=f"could not read the model '{name}' on the"):
            assert facts_of_hub(ModelSource("hub", name)) is None
    assert facts_of_hub(ModelSource("s3", "s3://bucket/model/")) is None
