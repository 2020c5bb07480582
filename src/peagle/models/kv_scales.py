"""Scales of keys and values for an FP8 KV cache, as quantised checkpoints store them.

`model.layers.N.self_attn.k_scale` and `v_scale` are the names of compressed-tensors and vLLM;
`self_attn.k_proj.output_scale` and `v_proj.output_scale` are older names of the same.
"""

import math
import re

from peagle.errors import CheckpointError
from peagle.models.stored_tensors import StoredTensors

_NAME = re.compile(r"(?:^|\.)layers\.(\d+)\.self_attn\.([kv])(?:_scale|_proj\.output_scale)$")


def read_kv_scales(stored: StoredTensors) -> dict[int, tuple[float, float]]:
    """Return the scales of keys and values by layer, for layers that have any; a missing one is 1.

    Raises:
        CheckpointError: a scale is not one positive number.
    """
    found: dict[int, dict[str, float]] = {}
    for name in sorted(stored.names):
        if (match := _NAME.search(name)) is None:
            continue
        tensor = stored.read(name)
        assert tensor is not None, "the name is among `names`"
        numbers = tensor.flatten().tolist()
        if len(numbers) != 1 or not (math.isfinite(numbers[0]) and numbers[0] > 0):
            what = str(numbers[0]) if len(numbers) == 1 else f"{list(tensor.shape)} numbers"
            raise CheckpointError(
                f"The target has {name!r} with {what}; expected one positive number. Quantise its "
                "KV cache with one scale for each layer, or leave --kv-cache-dtype out."
            )
        found.setdefault(int(match[1]), {})[match[2]] = float(numbers[0])
    return {layer: (both.get("k", 1.0), both.get("v", 1.0)) for layer, both in found.items()}
