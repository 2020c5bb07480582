"""The `speculators` package reads what peagle writes, and computes the same.

Runs where the package is installed; it needs an environment of its own, because it does not support
every transformers that peagle does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from peagle.models.checkpoint import convert_head, load_drafter
from peagle.models.target import TargetModel
from tests.conftest import make_target_folder

pytest.importorskip("speculators")

FIXTURES = Path(__file__).parent.parent / "fixtures" / "heads"
HEADS = sorted(path.parent.name for path in FIXTURES.glob("*/config.json"))


@torch.no_grad()
@pytest.mark.parametrize("name", HEADS)
def test_the_package_reads_what_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from speculators import SpeculatorModel  # type: ignore[import-not-found]

    folder = make_target_folder(tmp_path / "target", vocab_size=64, hidden_size=16)
    target = TargetModel.load(folder, dtype=torch.float32)
    convert_head(FIXTURES / name, tmp_path / "v", "vllm")
    convert_head(tmp_path / "v", tmp_path / "s", "speculators", target=str(folder))
    drafter = load_drafter(tmp_path / "s", target)
    if drafter.config.hidden_size != target.hidden_size:
        with pytest.raises(Exception, match=r"size mismatch|mismatched"):
            SpeculatorModel.from_pretrained(tmp_path / "s")
        return
    model: Any = SpeculatorModel.from_pretrained(tmp_path / "s").float()
    assert model.config.eagle_aux_hidden_state_layer_ids == [1, 2, 3]
    stored = load_file(tmp_path / "s" / "model.safetensors")
    loaded = model.state_dict()
    assert set(stored) <= set(loaded)
    for tensor_name, value in stored.items():
        assert torch.equal(loaded[tensor_name], value.to(loaded[tensor_name].dtype)), tensor_name

    # One layer stack at depth 0: plain causal attention.
    torch.manual_seed(0)
    length = 9
    tokens = torch.randint(0, 63, (length,))
    features = torch.randn(length, 48)
    logits: list[torch.Tensor] = []
    if "embed_tokens.weight" not in stored:
        model.embed_tokens.weight.copy_(target.embedding_weight())
    model.lm_head.register_forward_hook(lambda *call: logits.append(call[2][0]))
    documents = torch.zeros(1, length, dtype=torch.long)
    parent = type(model).__mro__[1 if drafter.config.is_parallel else 0]
    parent.forward(model, features[None], tokens[None], documents, ttt_steps=1)

    def attend(layer: int, *heads: torch.Tensor) -> torch.Tensor:
        query, key, value = (x.transpose(0, 1) for x in heads)
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        return out.transpose(0, 1)

    hidden = drafter(tokens, drafter.combine_features(features), torch.arange(length), attend)
    torch.testing.assert_close(drafter.compute_logits(hidden), logits[0], atol=1e-5, rtol=0)
