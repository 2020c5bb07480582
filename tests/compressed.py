"""Quantised layers of a head's file, as the package compressed-tensors unpacks them."""

import json
from pathlib import Path
from typing import Any

from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from safetensors.torch import load_file
from torch import Tensor


def unpacked_weights(folder: Path) -> dict[str, Tensor]:
    """The float32 weights of the quantised layers of a head, by their names."""
    stored = load_file(folder / "model.safetensors")
    data = json.loads((folder / "config.json").read_text())["quantization_config"]
    found = {}
    for scheme in QuantizationConfig.model_validate(data).config_groups.values():
        assert isinstance(scheme, QuantizationScheme)
        compressor: Any = BaseCompressor.get_value_from_registry(str(scheme.format))
        for layer in scheme.targets:
            names = [name for name in stored if name.rpartition(".")[0] == layer]
            own = {name.rpartition(".")[2]: stored[name] for name in names}
            own["weight_scale"] = own["weight_scale"].float()
            found[f"{layer}.weight"] = compressor.decompress(own, scheme)["weight"].float()
    return found
