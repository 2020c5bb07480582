"""Load a quantised checkpoint into a transformers model, without transformers' quantisers.

The model is built without weights; every tensor is then read out of its file straight to the
device, one layer's at a time. Packed weights are unpacked there, or stay packed in layers of
`models.packed_layers`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from peagle.errors import CheckpointError
from peagle.kernels.experts import ExpertWeights
from peagle.kernels.packed_weights import PackedWeight
from peagle.models.packed_layers import (
    PackedLinear,
    experts_of,
    find_gate,
    hold_experts,
    use_experts,
)
from peagle.models.quantization import PackedLinearWeight, is_packed, read_linear, read_mxfp4
from peagle.models.stored_tensors import StoredTensors
from peagle.models.target_facts import build_model, generation_config

# How checkpoints name the projections of one expert.
_GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")


def load_packed(
    folder: Path,
    config: Any,
    quantization: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    *,
    unpack: bool,
) -> transformers.PreTrainedModel:
    """Load a quantised causal LM.

    Args:
        folder: of the checkpoint, in Hugging Face format.
        config: its configuration.
        quantization: as `quantization.quantization_of` returned it.
        dtype: type of what is not packed.
        device: where the tensors go.
        unpack: compute plain weights of `dtype`; else packed weights stay packed.

    Raises:
        CheckpointError: a tensor is missing, misshapen or of a type that cannot be read; or the
            experts of the model are of a kind that cannot stay packed.
    """
    model = model_without_weights(str(folder), config, dtype)
    loader = _Loader(model, StoredTensors(folder, device), quantization, dtype, unpack)
    loader.load()
    model.tie_weights()
    if not unpack:
        use_experts(model)
    for name, buffer in model.named_buffers():
        if name not in loader.loaded:
            _parent(model, name)._buffers[name.rpartition(".")[2]] = buffer.to(device)
    model.generation_config = generation_config(folder, model)
    return model.eval()


def model_without_weights(name: str, config: Any, dtype: torch.dtype) -> Any:
    """Build a causal LM of transformers with its buffers, and parameters without values.

    Args:
        name: name of the model, for errors.
        config: its configuration; a quantization_config in it is left out.
        dtype: type of the parameters.

    Raises:
        CheckpointError: transformers cannot build it.
    """
    plain = copy.deepcopy(config)
    for part in {id(plain): plain, id(plain.get_text_config()): plain.get_text_config()}.values():
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config

    def make() -> Any:
        with _parameters_on_meta():
            return transformers.AutoModelForCausalLM.from_config(plain, dtype=dtype)

    return build_model(name, make)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Let every parameter that a module gets lose its values at once."""
    register = nn.Module.register_parameter

    def without_values(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=False)
        register(self, name, param)

    nn.Module.register_parameter = without_values
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _parent(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _prefixes(model: Any, stored: StoredTensors) -> tuple[str, str]:
    """What the names of the decoder begin with in the model, and in the checkpoint."""
    embedding = model.get_input_embeddings()
    name = next(name for name, module in model.named_modules() if module is embedding)
    prefix, _, last = name.rpartition(".")
    end = f"{last}.weight"
    found = stored.find(f"{name}.weight")
    return f"{prefix}.", f"{prefix}." if found is None else found.removesuffix(end)


class _Loader:
    """Fills one model.

    Attributes:
        loaded: names of the tensors of the model that have their values.
    """

    def __init__(
        self,
        model: Any,
        stored: StoredTensors,
        quantization: Mapping[str, Any],
        dtype: torch.dtype,
        unpack: bool,
    ) -> None:
        self._model, self._stored, self._quantization = model, stored, quantization
        self._dtype, self._unpack = dtype, unpack
        self._prefix = _prefixes(model, stored)
        self._suffixes: dict[str, set[str]] = {}
        for name in stored.names:
            parent, _, last = name.rpartition(".")
            self._suffixes.setdefault(parent, set()).add(last)
        self.loaded: set[str] = set()

    def load(self) -> None:
        names = {id(module): name for name, module in self._model.named_modules()}
        for module in experts_of(self._model):
            self._load_experts(names[id(module)], module)
        for name, module in list(self._model.named_modules()):
            if type(module) is nn.Linear and self._is_packed(name):
                self._load_linear(name, module)
        tied = self._model.get_expanded_tied_weights_keys(all_submodels=True)
        for name, tensor in [*self._model.named_parameters(), *self._persistent_buffers()]:
            if name in self.loaded:
                continue
            value = self._read(name)
            if value is None and name in tied:
                continue  # `tie_weights` sets it
            self._put(name, self._checked(name, value, tensor))

    # ---- names --------------------------------------------------------------------------------

    def _key(self, name: str) -> str:
        ours, theirs = self._prefix
        return theirs + name.removeprefix(ours) if name.startswith(ours) else name

    def _read(self, name: str) -> Tensor | None:
        return self._stored.read(self._key(name))

    def _is_packed(self, name: str) -> bool:
        return is_packed(self._suffixes.get(self._key(name), set()))

    def _persistent_buffers(self) -> list[tuple[str, Tensor]]:
        kept = set(self._model.state_dict())
        return [(name, buffer) for name, buffer in self._model.named_buffers() if name in kept]

    # ---- values -------------------------------------------------------------------------------

    def _checked(self, name: str, value: Tensor | None, like: Tensor) -> Tensor:
        if value is None:
            raise CheckpointError(
                f"The target model {str(self._stored.folder)!r} lacks tensor {self._key(name)!r}. "
                "Its weights are incomplete: copy or convert them again."
            )
        if value.itemsize == 1:
            raise CheckpointError(
                f"The target model {str(self._stored.folder)!r} has {self._key(name)!r} as "
                f"{value.dtype} without a scale; expected weight_scale or weight_scale_inv beside "
                "it. Copy or convert the checkpoint again."
            )
        if value.shape != like.shape or not value.is_floating_point():
            raise CheckpointError(
                f"The target model {str(self._stored.folder)!r} has {self._key(name)!r} as "
                f"{value.dtype} of shape {list(value.shape)}; expected plain floating-point "
                f"numbers of shape {list(like.shape)}."
            )
        return value.to(like.dtype)

    def _put(self, name: str, value: Tensor) -> None:
        module, last = _parent(self._model, name), name.rpartition(".")[2]
        if last in module._buffers:
            module._buffers[last] = value
        else:
            module._parameters[last] = nn.Parameter(value, requires_grad=False)
        self.loaded.add(name)

    def _read_linear(self, name: str, shape: tuple[int, int]) -> PackedLinearWeight:
        key = self._key(name)
        return read_linear(
            lambda suffix: self._stored.read(f"{key}.{suffix}"), key, shape, self._quantization
        )

    def _load_linear(self, name: str, module: nn.Linear) -> None:
        shape = (module.out_features, module.in_features)
        found = self._read_linear(name, shape)
        bias = module.bias
        if bias is not None:
            bias = self._checked(f"{name}.bias", self._read(f"{name}.bias"), bias)
            self._put(f"{name}.bias", bias)
        if self._unpack:
            weight = found.weight.unpack(self._dtype)
            if found.input_order is not None:
                weight[:, found.input_order] = weight.clone()
            self._put(f"{name}.weight", weight)
        else:
            parent, last = _parent(self._model, name), name.rpartition(".")[2]
            setattr(parent, last, PackedLinear(found.weight, bias, found.input_order))

    # ---- experts ------------------------------------------------------------------------------

    def _load_experts(self, name: str, module: Any) -> None:
        """Read the experts of a layer if they are packed, or apart from each other."""
        if f"{self._key(name)}.gate_up_proj_blocks" in self._stored.names:
            weights = [self._mxfp4(f"{name}.{part}") for part in ("gate_up_proj", "down_proj")]
        elif self._suffixes.get(f"{self._key(name)}.0.{_GATE_UP_DOWN[0]}"):
            weights = self._one_by_one(name, module)
        else:
            return  # plain and together: as other parameters
        if self._unpack:
            for part, weight in zip(("gate_up_proj", "down_proj"), weights, strict=True):
                self._put(f"{name}.{part}", self._unpacked(weight, module))
        else:
            self._hold(name, module, weights)

    def _mxfp4(self, name: str) -> PackedWeight:
        tensors = [self._read(f"{name}{suffix}") for suffix in ("_blocks", "_scales")]
        if tensors[0] is None or tensors[1] is None:
            raise CheckpointError(
                f"The target model {str(self._stored.folder)!r} lacks {self._key(name)}_blocks or "
                f"{self._key(name)}_scales. Copy or convert the checkpoint again."
            )
        return read_mxfp4(tensors[0], tensors[1], self._key(name))

    def _one_by_one(self, name: str, module: Any) -> list[PackedWeight]:
        """Experts that the checkpoint stores apart, stacked: gates and ups together."""
        width = module.gate_up_proj.shape[2 if not module.is_transposed else 1]
        inner = module.gate_up_proj.shape[1 if not module.is_transposed else 2] // 2
        shapes = {"gate_proj": (inner, width), "up_proj": (inner, width)}
        shapes["down_proj"] = (width, inner)
        gate_up: list[PackedWeight] = []
        down: list[PackedWeight] = []
        for expert in range(module.num_experts):
            gate, up, last = (
                self._expert(f"{name}.{expert}.{part}", shapes[part]) for part in _GATE_UP_DOWN
            )
            gate_up.append(PackedWeight.concatenate([gate, up]))
            down.append(last)
        return [PackedWeight.stack(gate_up), PackedWeight.stack(down)]

    def _expert(self, name: str, shape: tuple[int, int]) -> PackedWeight:
        if not self._is_packed(name):
            like = torch.empty(shape, dtype=self._dtype, device="meta")
            plain = self._checked(f"{name}.weight", self._read(f"{name}.weight"), like)
            return PackedWeight(plain)
        found = self._read_linear(name, shape)
        if found.input_order is not None:
            raise CheckpointError(
                f"The weight of {self._key(name)!r} orders its inputs by activation (g_idx), which "
                "peagle does not read of experts. `peagle serve --engine vllm` may serve it."
            )
        return found.weight

    def _unpacked(self, weight: PackedWeight, module: Any) -> Tensor:
        """The weight in the model's type and order, expert by expert."""
        plain = torch.stack(
            [weight.expert(i).unpack(self._dtype) for i in range(weight.num_experts)]
        )
        return plain.mT.contiguous() if module.is_transposed else plain

    def _hold(self, name: str, module: Any, weights: list[PackedWeight]) -> None:
        gate = find_gate(module)
        if gate is None:
            raise CheckpointError(
                f"The experts {name!r} have an activation that peagle does not compute over packed "
                "weights. `peagle serve --engine vllm` may serve the model."
            )
        gate_up, down = weights
        biases: list[Tensor | None] = [None, None]
        if module.has_bias:
            for i, part in enumerate(("gate_up_proj_bias", "down_proj_bias")):
                like = getattr(module, part)
                biases[i] = self._checked(f"{name}.{part}", self._read(f"{name}.{part}"), like)
        hold_experts(module, ExpertWeights(gate_up, down, gate, biases[0], biases[1]))
