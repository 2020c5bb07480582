"""Projections of one input as one matrix product: q/k/v, and gate/up.

    [q | k | v] = x [W_q; W_k; W_v]^T + [b_q; b_k; b_v]

The transformers module keeps its own forward code, which calls `self.q_proj(x)`, `self.k_proj(x)`
and `self.v_proj(x)`: these become thin stand-ins. The first that is called computes the whole
product, the others return their columns. No table says which structure is safe: every
module is run before and after on the same input, and put back where the results differ.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from peagle.attention.torch_backend import DenseCausalAttention
from peagle.kernels.linear.fp8_linear import Norm
from peagle.models.comparison import relative_difference, tolerance
from peagle.models.packed_layers import PackedLinear
from peagle.models.target_attention import decoder_layers

# What the one product is called in the module, and the projections that it may replace.
FUSION_PATTERNS = {
    "fused_qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "fused_gate_up_proj": ("gate_proj", "up_proj"),
}
_NUM_PROBE_TOKENS = 5


class FusedProjections(nn.Module, ABC):
    """Several linear projections of one input as one product.

    Its tensors appear in `parameters()` or `buffers()`. The tensors of `FusedLinear` keep, in
    `state_dict()`, the names and shapes of the projections that they came from, see `FusedPart`.

    Attributes:
        sizes: outputs of each projection.
    """

    def __init__(self, linears: Sequence[nn.Linear] | Sequence[PackedLinear]) -> None:
        super().__init__()
        self.sizes = [linear.out_features for linear in linears]
        self.in_features = linears[0].in_features
        # The input of the last product, and its columns that no projection has taken yet.
        self._input: Tensor | None = None
        self._columns: list[Tensor | None] = []

    @abstractmethod
    def tensors(self, rows: slice) -> dict[str, Tensor]:
        """Return views of the weight and the bias of some outputs, if they are stored plainly."""

    def project(self, index: int, x: Tensor) -> Tensor:
        """Return the columns of projection `index` for the input `x`, computed with the first call.

        Another input object, or the same projection again, starts a new product.
        """
        if self._input is not x or self._columns[index] is None:
            self._input = x
            self._columns = list(self(x).split(self.sizes, dim=-1))
        columns, self._columns[index] = self._columns[index], None
        assert columns is not None
        if self.is_idle:
            self._input, self._columns = None, []
        return columns

    @property
    def is_idle(self) -> bool:
        """Return whether no output is kept for a projection still to be asked for."""
        return all(columns is None for columns in self._columns)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Save nothing: the parts save themselves."""

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load nothing: the parts load themselves."""


class FusedLinear(FusedProjections):
    """Projections with one weight [sum of outputs, inputs]."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        super().__init__(linears)
        with torch.no_grad():
            weight = torch.cat([linear.weight for linear in linears])
            bias = None if linears[0].bias is None else torch.cat([x.bias for x in linears])
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def tensors(self, rows: slice) -> dict[str, Tensor]:
        bias = {} if self.bias is None else {"bias": self.bias[rows]}
        return {"weight": self.weight[rows], **bias}


class FusedPackedLinear(FusedProjections):
    """Projections with one packed weight.

    Attributes:
        norm: the RMSNorm of their input, if it is computed here (`models.joined_norms`).
    """

    def __init__(self, linears: Sequence[PackedLinear]) -> None:
        super().__init__(linears)
        self.linear = PackedLinear.concatenate(linears)
        self.norm: nn.Module | None = None
        self._before: Norm | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x, self._before)

    def take_norm(self, norm: Any) -> None:
        """Compute a norm of the input from now on: one with a weight and an epsilon, or none."""
        self.norm = norm
        self._before = None if norm is None else Norm(norm.weight, norm.variance_epsilon)

    def tensors(self, rows: slice) -> dict[str, Tensor]:
        return {}


class FusedPart(nn.Module):
    """Stands where one of the fused projections stood: called, saved and loaded as that was."""

    def __init__(self, fused: FusedProjections, index: int) -> None:
        super().__init__()
        self._fused = (fused,)  # in a tuple: it is a child of the module above, once
        self._index = index
        start = sum(fused.sizes[:index])
        self._rows = slice(start, start + fused.sizes[index])
        self.in_features, self.out_features = fused.in_features, fused.sizes[index]

    def forward(self, x: Tensor) -> Tensor:
        return self._fused[0].project(self._index, x)

    @property
    def weight(self) -> Tensor:
        """[outputs, inputs], a view; packed projections have none."""
        return self._tensors()["weight"]

    @property
    def bias(self) -> Tensor | None:
        """Return the projection's bias, [outputs], a view; None if it has none."""
        return self._tensors().get("bias")

    def _tensors(self) -> dict[str, Tensor]:
        return self._fused[0].tensors(self._rows)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name, tensor in self._tensors().items():
            destination[prefix + name] = tensor if keep_vars else tensor.detach()

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for name, tensor in self._tensors().items():
            given = state_dict.get(prefix + name)
            if given is None:
                missing_keys.append(prefix + name)
            elif given.shape != tensor.shape:
                error_msgs.append(f"{prefix + name} is {given.shape}, expected {tensor.shape}")
            else:
                with torch.no_grad():
                    tensor.copy_(given)


@dataclass(frozen=True, slots=True)
class FusionResult:
    """The outcome of fusing one group of projections.

    Attributes:
        layer: index of the decoder layer.
        module: the module that holds them, by its name in the layer.
        projections: their names.
        reason: why they stay as they are; None: they are fused.
    """

    layer: int
    module: str
    projections: tuple[str, ...]
    reason: str | None = None


@torch.no_grad()
def fuse(model: transformers.PreTrainedModel) -> list[FusionResult]:
    """Fuse q/k/v and gate/up of every decoder layer where that leaves the results as they are.

    The weights move into the fused ones one group at a time: beyond the model, memory for the
    largest group is needed, and only during the call.

    Args:
        model: a transformers model under the attention function of `models.target_attention`
            (`TargetModel.model`), in eval mode.

    Returns:
        the projections fused, and the others with the reason. An unknown structure is no error.
    """
    layers = decoder_layers(model)
    groups = list(_groups(layers))
    uses = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    recordings = record_calls(model, [group.module for group in groups])
    results = []
    for group in groups:
        reason = group.obstacle(uses) or group.fuse(recordings[id(group.module)])
        results.append(FusionResult(group.layer, group.name, group.projections, reason))
        if reason is None and model.device.type == "cuda":
            # What was freed is too small for the next fused weight: without this, memory doubles.
            torch.cuda.empty_cache()
    found = {(group.layer, group.fused_name) for group in groups}
    return results + [
        FusionResult(layer, "layer", projections, "it has none of these")
        for layer in range(len(layers))
        for name, projections in FUSION_PATTERNS.items()
        if (layer, name) not in found
    ]


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call of a module in a pass over a few random tokens."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor


@dataclass(frozen=True, slots=True)
class _Group:
    """Projections of one module that may be one product."""

    layer: int
    name: str
    module: nn.Module
    fused_name: str
    projections: tuple[str, ...]

    def obstacle(self, uses: Counter[int]) -> str | None:
        """Say why these cannot be fused, as far as can be told without running them."""
        linears: list[Any] = [getattr(self.module, name) for name in self.projections]
        if len(linears) == 1:
            return "no other projection beside it"
        for name, linear in zip(self.projections, linears, strict=True):
            if type(linear) not in (nn.Linear, PackedLinear):
                return f"{name} is a {type(linear).__name__}, not a Linear"
            if linear._forward_hooks or linear._forward_pre_hooks:
                return f"{name} has hooks"
            if any(uses[id(parameter)] > 1 for parameter in linear.parameters()):
                return f"{name} shares its weight"
        if len({_kind(linear) for linear in linears}) > 1:
            return "they differ in input size, type, format or device"
        if any(isinstance(x, PackedLinear) and x.input_order is not None for x in linears):
            return "each orders its inputs by activation"
        if len({linear.bias is None for linear in linears}) > 1:
            return "some have a bias and some have none"
        return None

    def fuse(self, recordings: Sequence[RecordedCall]) -> str | None:
        """Fuse, run the module again, and put the projections back if the results differ.

        Returns:
            why they were put back.
        """
        if not recordings:
            return "the module did not run in the probe"
        originals = {name: getattr(self.module, name) for name in self.projections}
        is_plain = isinstance(originals[self.projections[0]], nn.Linear)
        fused = (FusedLinear if is_plain else FusedPackedLinear)(list(originals.values()))
        self.module.add_module(self.fused_name, fused)
        for index, name in enumerate(self.projections):
            setattr(self.module, name, FusedPart(fused, index))
        reason = self._difference(fused, recordings)
        if reason is not None:
            delattr(self.module, self.fused_name)
            for name, original in originals.items():
                setattr(self.module, name, original)
        return reason

    def _difference(
        self, fused: FusedProjections, recordings: Sequence[RecordedCall]
    ) -> str | None:
        runs: list[None] = []
        hook = fused.register_forward_hook(lambda *_: runs.append(None))
        try:
            outputs = [_first(self.module(*r.args, **r.kwargs)) for r in recordings]
        except Exception as error:  # whatever it is: it does not run with stand-ins
            return f"the module fails when fused: {type(error).__name__}: {error}"
        finally:
            hook.remove()
        if len(runs) != len(recordings) or not fused.is_idle:
            return "the projections do not read one input"
        for recording, output in zip(recordings, outputs, strict=True):
            difference = relative_difference(output, recording.output)
            if not difference <= tolerance(output.dtype):
                return f"the results differ by {difference:.1e}"
        return None


def _kind(linear: nn.Linear | PackedLinear) -> tuple[Any, ...]:
    """Return the properties that projections must share to become one product."""
    if isinstance(linear, nn.Linear):
        return (linear.in_features, linear.weight.dtype, linear.weight.device)
    packed = linear.packed
    inputs = packed.block[1] if packed.scale is not None else 0
    kind = (packed.format, packed.data.device, inputs, packed.zero is None)
    return (linear.in_features, *kind, linear.numbers is None)


def _groups(layers: Sequence[nn.Module]) -> Iterator[_Group]:
    for index, layer in enumerate(layers):
        for name, module in layer.named_modules():
            children = {child for child, found in module.named_children() if found is not None}
            for fused_name, names in FUSION_PATTERNS.items():
                projections = tuple(name for name in names if name in children)
                if projections:
                    yield _Group(index, name, module, fused_name, projections)


def record_calls(
    model: transformers.PreTrainedModel, modules: Sequence[nn.Module]
) -> dict[int, list[RecordedCall]]:
    """Return the calls of modules in one pass over a few random tokens, by the modules' ids.

    Positions are spread over the model's context.

    Args:
        model: as in `fuse`.
        modules: of the model.
    """
    found: dict[int, list[RecordedCall]] = {id(module): [] for module in modules}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        # The caller may go on to change these in place.
        kept = tuple(x.clone() if isinstance(x, Tensor) else x for x in args)
        named = {k: x.clone() if isinstance(x, Tensor) else x for k, x in kwargs.items()}
        found[id(module)].append(RecordedCall(kept, named, _first(output).clone()))

    # A module with several groups is in the list as often.
    hooks = [
        module.register_forward_hook(note, with_kwargs=True)
        for module in {id(module): module for module in modules}.values()
    ]
    config = model.config.get_text_config()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (1, _NUM_PROBE_TOKENS), generator=generator)
    # What a module does may depend on the position.
    positions = torch.linspace(0, config.max_position_embeddings - 1, _NUM_PROBE_TOKENS).long()
    decoder: Any = model.get_decoder()
    try:
        decoder(
            input_ids=tokens.to(model.device),
            position_ids=positions.to(model.device).unsqueeze(0),
            use_cache=False,
            attend=DenseCausalAttention(1),
        )
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output
