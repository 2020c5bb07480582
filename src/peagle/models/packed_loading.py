"""Load a quantised checkpoint into a transformers model, without transformers' quantisers.

The model is built without weights. The names, shapes and types of all tensors are checked first;
then every tensor is read out of its file straight to the device, one layer's at a time. Packed
weights are unpacked there, or stay packed in layers of `models.packed_layers`. Linear layers and
experts that are made for it multiply FP8 activations (`models.fp8_layers`) where the caller wants
that.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from peagle.errors import CheckpointError
from peagle.kernels.linear.experts import ExpertWeights
from peagle.kernels.linear.packed_weights import PackedWeight
from peagle.models.fp8_layers import (
    device_obstacle,
    experts_obstacle,
    layer_obstacle,
)
from peagle.models.packed_layers import (
    PackedLinear,
    experts_of,
    find_gate,
    hold_experts,
    use_experts,
)
from peagle.models.quantization import (
    PackedLinearWeight,
    StoredLinear,
    check_linear,
    check_mxfp4,
    is_packed,
    read_linear,
    read_mxfp4,
)
from peagle.models.stored_tensors import StoredTensors
from peagle.models.target_facts import build_model, generation_config

_FUSED = ("gate_up_proj", "down_proj")  # weights of an experts module


def load_packed(
    folder: Path,
    config: Any,
    quantization: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    *,
    unpack: bool,
    fp8_activations: bool = False,
) -> transformers.PreTrainedModel:
    """Load a quantised causal LM.

    Args:
        folder: of the checkpoint, in Hugging Face format.
        config: its configuration.
        quantization: as `quantization.quantization_of` returned it.
        dtype: type of the tensors that are not packed.
        device: where the tensors go.
        unpack: compute plain weights of `dtype`; else packed weights stay packed.
        fp8_activations: multiply FP8 activations in the linear layers and experts that are made
            for it, and warn of the others.

    Raises:
        CheckpointError: a tensor is missing, misshapen or of a type that cannot be read; or the
            experts of the model are of a kind that cannot stay packed.
    """
    model = model_without_weights(str(folder), config, dtype)
    described = StoredTensors(folder, torch.device("cpu"))
    stored = described if device.type == "cpu" else StoredTensors(folder, device)
    loader = _Loader(model, stored, described, quantization, dtype, unpack)
    if fp8_activations:
        loader.choose_fp8(device)
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
    """Return the prefix of the decoder's names in the model, and the one in the checkpoint."""
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
        described: StoredTensors,
        quantization: Mapping[str, Any],
        dtype: torch.dtype,
        unpack: bool,
    ) -> None:
        self._model, self._stored, self._quantization = model, stored, quantization
        self._described = described  # on the CPU, where a tensor is mapped, and read when used
        self._dtype, self._unpack = dtype, unpack
        self._prefix = _prefixes(model, stored)
        self._suffixes: dict[str, set[str]] = {}
        for name in stored.names:
            parent, _, last = name.rpartition(".")
            self._suffixes.setdefault(parent, set()).add(last)
        self._tied = set(model.get_expanded_tied_weights_keys(all_submodels=True))
        self._experts: dict[str, Any] = {}  # that are packed, or apart from each other
        self._linears: dict[str, nn.Linear] = {}  # that are packed
        self._find_packed()
        self._fp8: set[str] = set()  # linear layers and experts that multiply FP8 activations
        self.loaded: set[str] = set()

    def choose_fp8(self, device: torch.device) -> None:
        """Let layers multiply FP8 activations; warn of those that cannot, with reasons."""
        obstacle = "weights that are unpacked" if self._unpack else device_obstacle(device)
        reasons = Counter[str]()
        for name, module in self._linears.items():
            if module is not self._model.get_output_embeddings():
                stored = self._check_linear(name, (module.out_features, module.in_features))
                self._choose_fp8(name, obstacle or layer_obstacle(stored), reasons)
        for name, module in self._experts.items():
            parts = self._stored_parts(name, module)
            found = obstacle or experts_obstacle(module, parts, self._dtype, device)
            self._choose_fp8(name, found, reasons)
        if reasons:
            texts = "; ".join(f"{reason}: {count}" for reason, count in reasons.items())
            advice = "" if self._fp8 else " Leave the option out: it changes nothing here."
            warnings.warn(
                f"fp8_activations is 'auto', and {reasons.total()} of "
                f"{reasons.total() + len(self._fp8)} quantised layers keep their activations as "
                f"they are ({texts}).{advice}",
                stacklevel=2,
            )

    def _choose_fp8(self, name: str, obstacle: str | None, reasons: Counter[str]) -> None:
        if obstacle:
            reasons[obstacle] += 1
        else:
            self._fp8.add(name)

    def _stored_parts(self, name: str, module: Any) -> Iterator[StoredLinear | None]:
        """Yield the projections of experts, None for one that is not packed alone."""
        for expert, part, shape in _parts(module):
            key = f"{name}.{expert}.{part}"
            yield self._check_linear(key, shape) if self._is_packed(key) else None

    def load(self) -> None:
        """Check the names, shapes and types of all tensors, and then read them."""
        covered = self._check()
        for name, module in self._experts.items():
            self._load_experts(name, module)
        for name, module in self._linears.items():
            self._load_linear(name, module)
        for name, tensor in self._plain(covered | self.loaded):
            value = self._read(name)
            if value is not None:  # else it is tied, and `tie_weights` sets it
                self._put(name, self._checked(name, value, tensor))

    def _find_packed(self) -> None:
        names = {id(module): name for name, module in self._model.named_modules()}
        for module in experts_of(self._model):
            name = names[id(module)]
            if self._has_mxfp4(name) or self._suffixes.get(self._key(f"{name}.0.gate_proj")):
                self._experts[name] = module
        for name, module in self._model.named_modules():
            if not self._is_packed(name):
                continue
            if type(module) is not nn.Linear:
                raise CheckpointError(
                    f"The target stores {self._key(name)!r} quantised, of the class "
                    f"{type(module).__name__}; peagle reads quantised linear layers and experts. "
                    "`peagle serve --engine vllm` may serve the model."
                )
            if f"{name}.weight" in self._tied:
                raise CheckpointError(
                    f"The target stores {self._key(name)!r} quantised, and its config.json says "
                    "that the layer has the weight of the embedding (tie_word_embeddings). Correct "
                    "its config.json, or copy the checkpoint again."
                )
            self._linears[name] = module

    def _plain(self, covered: set[str]) -> list[tuple[str, Tensor]]:
        """Return the tensors of the model that are stored as they are."""
        kept = set(self._model.state_dict())
        buffers = [(name, buffer) for name, buffer in self._model.named_buffers() if name in kept]
        found = [*self._model.named_parameters(), *buffers]
        return [(name, tensor) for name, tensor in found if name not in covered]

    # ---- checks, before any value is read ----

    def _check(self) -> set[str]:
        """Refuse tensors that are missing, surplus, misshapen or of a type that cannot be read.

        Returns:
            names of the tensors of the model that experts and packed layers fill.
        """
        covered: set[str] = set()
        for name, module in self._experts.items():
            self._check_experts(name, module)
            covered |= {f"{name}.{part}" for part in _FUSED}
        for name, module in self._linears.items():
            self._check_linear(name, (module.out_features, module.in_features))
            covered.add(f"{name}.weight")
        for name, tensor in self._plain(covered):
            value = self._described.read(self._key(name))
            if value is not None or name not in self._tied:
                self._checked(name, value, tensor)
        return covered

    def _check_linear(self, name: str, shape: tuple[int, int]) -> StoredLinear:
        key = self._key(name)
        return check_linear(
            lambda suffix: self._described.read(f"{key}.{suffix}"),
            key,
            shape,
            self._quantization,
            self._suffixes[key],
        )

    def _check_experts(self, name: str, module: Any) -> None:
        if self._has_mxfp4(name):
            for part in _FUSED:
                check_mxfp4(*self._mxfp4(self._described, f"{name}.{part}"), _size(module, part))
        else:
            self._check_apart(name, module)
        if not self._unpack and find_gate(module) is None:
            raise CheckpointError(
                f"The experts {name!r} have an activation that peagle does not compute over packed "
                "weights. `peagle serve --engine vllm` may serve the model."
            )

    def _check_apart(self, name: str, module: Any) -> None:
        """Refuse experts of one mixture that are stored in different formats."""
        formats: dict[str, tuple[str, str]] = {}  # what is stacked: an expert and its format
        for expert, part, shape in _parts(module):
            key = f"{name}.{expert}.{part}"
            if self._is_packed(key):
                found = self._check_linear(key, shape).format_text
            else:
                self._checked_expert(key, self._described, shape)
                found = "plain numbers"
            stack = "down_proj" if part == "down_proj" else "gate_proj and up_proj"
            first, expected = formats.setdefault(stack, (key, found))
            if found != expected:
                raise CheckpointError(
                    f"The target stores the expert {self._key(key)!r} as {found}, and "
                    f"{self._key(first)!r} as {expected}; expected one format for {stack} of all "
                    "experts of a layer. Quantise them alike, or use `peagle serve --engine vllm`."
                )
        surplus = self._key(f"{name}.{module.num_experts}.gate_proj")
        if surplus in self._suffixes:
            raise CheckpointError(
                f"The target stores the expert {surplus!r}, and its config.json says that a layer "
                f"has {module.num_experts} experts. Correct its config.json, or copy the "
                "checkpoint again."
            )

    # ---- names ----

    def _key(self, name: str) -> str:
        ours, theirs = self._prefix
        return theirs + name.removeprefix(ours) if name.startswith(ours) else name

    def _read(self, name: str) -> Tensor | None:
        return self._stored.read(self._key(name))

    def _is_packed(self, name: str) -> bool:
        return is_packed(self._suffixes.get(self._key(name), set()))

    def _has_mxfp4(self, name: str) -> bool:
        found = self._suffixes.get(self._key(name), set())
        return any(last.endswith(("_proj_blocks", "_proj_scales")) for last in found)

    # ---- values ----

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
                f"numbers of shape {list(like.shape)}. Copy or convert the checkpoint again."
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

    def _refuse_bias(self, name: str) -> None:
        """Refuse the bias of a layer that has none; some quantisers store one of zeros."""
        bias = self._read(f"{name}.bias")
        if bias is not None and bool(bias.any()):
            raise CheckpointError(
                f"The target has tensor {self._key(name) + '.bias'!r}, and its config.json says "
                "that the layer has no bias. Correct its config.json, or copy the checkpoint again."
            )

    def _load_linear(self, name: str, module: nn.Linear) -> None:
        shape = (module.out_features, module.in_features)
        bias = module.bias
        if bias is None:
            self._refuse_bias(name)
        else:
            bias = self._checked(f"{name}.bias", self._read(f"{name}.bias"), bias)
            self._put(f"{name}.bias", bias)
        parent, last = _parent(self._model, name), name.rpartition(".")[2]
        found = self._read_linear(name, shape)
        # Heads and sampling use the rows of lm_head as plain numbers.
        if self._unpack or module is self._model.get_output_embeddings():
            weight = found.weight.unpack(self._dtype)
            if found.input_order is not None:
                weight[:, found.input_order] = weight.clone()
            self._put(f"{name}.weight", weight)
        else:
            numbers = found.weight.fp8_numbers() if name in self._fp8 else None
            layer = PackedLinear(found.weight, bias, found.input_order, numbers=numbers)
            setattr(parent, last, layer)

    # ---- experts ----

    def _load_experts(self, name: str, module: Any) -> None:
        """Read the experts of a layer that are packed, or apart from each other."""
        if self._has_mxfp4(name):
            weights = [
                read_mxfp4(*self._mxfp4(self._stored, f"{name}.{part}"), _size(module, part))
                for part in _FUSED
            ]
        else:
            weights = self._one_by_one(name, module)
        if self._unpack:
            for part, weight in zip(_FUSED, weights, strict=True):
                self._put(f"{name}.{part}", self._unpacked(weight, module))
        else:
            self._hold(name, module, weights)

    def _mxfp4(self, stored: StoredTensors, name: str) -> tuple[Tensor, Tensor, str]:
        """Read the blocks and the scales of experts; return them and their name for errors."""
        blocks, scales = (stored.read(f"{self._key(name)}{end}") for end in ("_blocks", "_scales"))
        if blocks is None or scales is None:
            raise CheckpointError(
                f"The target model {str(self._stored.folder)!r} lacks {self._key(name)}_blocks or "
                f"{self._key(name)}_scales. Copy or convert the checkpoint again."
            )
        return blocks, scales, self._key(name)

    def _one_by_one(self, name: str, module: Any) -> list[PackedWeight]:
        """Read experts that the checkpoint stores apart, and stack them: gates and ups together."""
        gate_up: list[PackedWeight] = []
        down: list[PackedWeight] = []
        gates: list[PackedWeight] = []
        for expert, part, shape in _parts(module):
            weight = self._expert(f"{name}.{expert}.{part}", shape)
            if part == "down_proj":
                down.append(weight)
            elif part == "gate_proj":
                gates.append(weight)
            else:
                gate_up.append(PackedWeight.concatenate([gates.pop(), weight]))
        return [PackedWeight.stack(gate_up), PackedWeight.stack(down)]

    def _checked_expert(self, name: str, stored: StoredTensors, shape: tuple[int, int]) -> Tensor:
        """Read the plain weight of one expert."""
        like = torch.empty(shape, dtype=self._dtype, device="meta")
        value = stored.read(self._key(f"{name}.weight"))
        return self._checked(f"{name}.weight", value, like)

    def _expert(self, name: str, shape: tuple[int, int]) -> PackedWeight:
        self._refuse_bias(name)
        if not self._is_packed(name):
            return PackedWeight(self._checked_expert(name, self._stored, shape))
        found = self._read_linear(name, shape)
        if found.input_order is not None:
            raise CheckpointError(
                f"The weight of {self._key(name)!r} orders its inputs by activation (g_idx), which "
                "peagle does not read of experts. `peagle serve --engine vllm` may serve it."
            )
        return found.weight

    def _unpacked(self, weight: PackedWeight, module: Any) -> Tensor:
        """Return the weight in the model's type and order, unpacked expert by expert."""
        plain = torch.stack(
            [weight.expert(i).unpack(self._dtype) for i in range(weight.num_experts)]
        )
        return plain.mT.contiguous() if module.is_transposed else plain

    def _hold(self, name: str, module: Any, weights: list[PackedWeight]) -> None:
        gate = find_gate(module)
        assert gate is not None, "`_check_experts` looks for it"
        gate_up, down = weights
        biases: list[Tensor | None] = [None, None]
        if module.has_bias:
            for i, part in enumerate(("gate_up_proj_bias", "down_proj_bias")):
                like = getattr(module, part)
                biases[i] = self._checked(f"{name}.{part}", self._read(f"{name}.{part}"), like)
        is_fp8 = name in self._fp8
        experts = ExpertWeights(gate_up, down, gate, biases[0], biases[1], is_fp8)
        hold_experts(module, experts)


def _size(module: Any, part: str) -> tuple[int, int, int]:
    """Return the experts, outputs and inputs of an experts module's weights."""
    experts, *size = getattr(module, part).shape
    outputs, inputs = reversed(size) if module.is_transposed else size
    return experts, outputs, inputs


def _parts(module: Any) -> Iterator[tuple[int, str, tuple[int, int]]]:
    """Yield each expert's projections as checkpoints name them, with their outputs and inputs."""
    experts, both, width = _size(module, "gate_up_proj")
    inner = both // 2
    for expert in range(experts):
        yield expert, "gate_proj", (inner, width)
        yield expert, "up_proj", (inner, width)
        yield expert, "down_proj", (width, inner)
