"""A saved head, a hub and a sharded model, for the tests of this folder."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.fake_hub import TINY, WEIGHTS, FakeHub, serve, used


@pytest.fixture
def head(head_folders: Callable[..., Path]) -> Path:
    """A saved P-EAGLE head of the tiny Llama, which the test may change."""
    return head_folders()


@pytest.fixture
def hub(tmp_path: Path, target_folder: Path) -> Iterator[FakeHub]:
    """A hub with the tiny Llama; the cache, empty as yet, is in tmp_path/home."""
    with serve() as hub, used(hub.url, tmp_path / "home"):
        hub.add(TINY, target_folder)
        yield hub


@pytest.fixture(scope="module")
def sharded_folder(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama in several files."""
    folder = shutil.copytree(target_folder, tmp_path_factory.mktemp("sharded"), dirs_exist_ok=True)
    (folder / WEIGHTS).unlink()
    model = AutoModelForCausalLM.from_pretrained(target_folder)
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder
