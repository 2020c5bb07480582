"""Every command that loads a target says which tensor of a quantised one cannot be."""

from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Pair, Peagle
from tests.conftest import byte_tokenizer
from tests.models.test_packed_loading import AWQ, change, dense, edit, write_checkpoint

SCALES = "model.layers.1.mlp.down_proj.scales"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A target whose last layer has scales of another shape."""
    write_checkpoint(tmp_path, "awq", dense())
    byte_tokenizer().save_pretrained(tmp_path)
    change(tmp_path, lambda tensors: tensors.update({SCALES: torch.ones(3, 1)}))
    return tmp_path


@pytest.mark.filterwarnings("ignore:The target is quantised")
@pytest.mark.parametrize(
    "command",
    [
        ("generate", "--no-speculation", "--prompt", "x", "--target"),
        ("doctor", "--draft", "bundled", "--target"),
        ("eval", "--draft", "bundled", "--set", "humaneval", "--limit", 1, "--target"),
    ],
    ids=lambda command: command[0],
)
def test_a_tensor_of_another_shape(peagle: Peagle, target: Path, command: tuple[object]) -> None:
    result = peagle(*command, target)
    assert result.status == 2 and "Traceback" not in result.err
    assert f"The checkpoint has '{SCALES}' as float32 of shape [3, 1]; expected" in result.err
    assert "of shape [3, 64] (awq: integers of 4 bits, a scale for 32 inputs). Copy" in result.err


def test_settings_that_cannot_be(peagle: Peagle, target: Path, pair: Pair) -> None:
    edit(target, quantization_config={**AWQ, "group_size": "32"})
    result = peagle("generate", "--draft", pair.peagle, "--prompt", "x", "--target", target)
    assert result.status == 2 and "has group_size '32'; expected a positive whole" in result.err
