"""The attention function that transformers calls, and what one pass tells about a model's layers.

Shapes: T packed tokens, H target width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from peagle.attention import Prepared
from peagle.attention.torch_backend import DenseCausalAttention
from peagle.errors import CheckpointError

_NAME = "peagle"
# Keywords that models pass along and that do not change the result of attention.
_BENIGN_KEYWORDS = frozenset({"position_ids", "use_cache", "output_router_logits", "is_causal"})


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of the attention function: the calling module and its arguments."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    sliding_window: int | None
    softcap: float | None


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The attention of one decoder layer.

    Attributes:
        module: the one that calls the attention function.
        cache: index of its KV cache; a layer that takes over an earlier layer's keys and values
            has the same.
        kv_shape: (key/value heads, head size).
    """

    module: Any
    cache: int
    kv_shape: tuple[int, int]


@dataclass(frozen=True, slots=True)
class DryRun:
    """One token through the whole model.

    Attributes:
        calls: calls of the attention function, in order.
        hidden_TH: after the last norm.
        logits_TV: as the model itself makes them of these.
    """

    calls: list[AttentionCall]
    hidden_TH: Tensor
    logits_TV: Tensor


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    attend: Prepared | None = None,
    calls: list[AttentionCall] | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers calls it: [1, heads, T, d] in, [1, T, heads, d] out.

    `attend` and `calls` are ours: the pass, and where a dry run notes its calls.
    """
    if attend is None:
        raise RuntimeError('attention "peagle" runs only inside peagle: call TargetModel.forward')
    unknown = {name for name, given in keywords.items() if given is not None} - _BENIGN_KEYWORDS
    if unknown or attention_mask is not None or dropout:
        what = ", ".join(sorted(unknown)) or "attention_mask or dropout"
        raise RuntimeError(
            f"{type(module).__name__} passes {what}, which peagle does not implement"
        )
    factor = scaling if scaling is not None else query.shape[-1] ** -0.5
    if calls is not None:
        calls.append(AttentionCall(module, query, key, value, factor, sliding_window, softcap))
    out_THd = attend(
        *(x.squeeze(0).transpose(0, 1) for x in (query, key, value)),
        cache=getattr(module, "peagle_cache", None),
        scaling=factor,
        sliding_window=sliding_window,
        sinks=s_aux,
        softcap=softcap,
    )
    return out_THd.unsqueeze(0), None


def register_attention() -> str:
    """Make `attention` known to transformers, and return the name under which models take it."""
    transformers.AttentionInterface.register(_NAME, attention)
    return _NAME


def dry_run(model: transformers.PreTrainedModel, position: int = 0) -> DryRun:
    """Run a model over one token, without a cache.

    Args:
        position: of the token.

    Raises:
        CheckpointError: the model does not run over this attention function.
    """
    calls: list[AttentionCall] = []
    hidden: list[Tensor] = []
    positions = torch.full((1, 1), position, device=model.device)
    # From the middle of the vocabulary: the ends hold special tokens, padding may be embedded as 0.
    token = torch.full_like(positions, model.config.get_text_config().vocab_size // 2)
    decoder: Any = model.get_decoder()
    hook = decoder.register_forward_hook(lambda *io: hidden.append(io[-1].last_hidden_state))
    try:
        with torch.no_grad():
            output = model(
                input_ids=token,
                position_ids=positions,
                use_cache=False,
                attend=DenseCausalAttention(1),
                calls=calls,
            )
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise _refusal(model, f"it does not run over paged attention: {error}") from None
    finally:
        hook.remove()
    if len(hidden) != 1:
        raise _refusal(model, f"its decoder runs {len(hidden)} times a pass, not once")
    return DryRun(calls, hidden[0].squeeze(0), output.logits.squeeze(0))


def decoder_layers(model: transformers.PreTrainedModel) -> list[nn.Module]:
    """Return the model's decoder layers.

    Raises:
        CheckpointError: it has no list of them where transformers' decoders keep it.
    """
    if model.config.is_encoder_decoder:
        raise _refusal(model, "it is an encoder-decoder")
    layers = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise _refusal(model, "its decoder has no list of layers called `layers`")
    return list(layers)


def attention_layers(
    model: transformers.PreTrainedModel, calls: Sequence[AttentionCall]
) -> list[AttentionLayer]:
    """Find which module attends in each decoder layer, and which KV cache it needs.

    Raises:
        CheckpointError: a layer does not attend exactly once, looks ahead, or keeps keys and
            values of unlike shapes.
    """
    layers = decoder_layers(model)
    layer_of = {id(module): i for i, layer in enumerate(layers) for module in layer.modules()}
    order = [layer_of.get(id(call.module)) for call in calls]
    if order != list(range(len(layers))):
        raise _refusal(
            model,
            f"attention is called by layers {order}, expected 0 to {len(layers) - 1} once each; "
            "the others would run without state",
        )
    found: list[AttentionLayer] = []
    cached: list[AttentionCall] = []
    for index, call in enumerate(calls):
        if not getattr(call.module, "is_causal", True):
            raise _refusal(model, f"the attention of layer {index} looks ahead")
        if call.key.shape != call.value.shape:
            raise _refusal(model, f"keys and values of layer {index} differ in size")
        shared = [i for i, c in enumerate(cached) if c.key is call.key and c.value is call.value]
        if not shared:
            cached.append(call)
        cache = shared[0] if shared else len(cached) - 1
        found.append(AttentionLayer(call.module, cache, (call.key.shape[1], call.key.shape[3])))
    return found


def windowed_modules(model: transformers.PreTrainedModel) -> list[Any]:
    """Return the modules whose attribute `sliding_window` is for the attention function alone.

    One token is run with the attribute and without it. The list is empty if anything but the window
    that the function is given changes.
    """
    if not any(getattr(module, "sliding_window", None) for module in model.modules()):
        return []
    with_windows = dry_run(model, position=7)  # at 0 RoPE changes nothing
    modules: list[Any] = [
        call.module
        for call in with_windows.calls
        if call.sliding_window is not None
        and getattr(call.module, "sliding_window", None) == call.sliding_window
    ]
    windows = [module.sliding_window for module in modules]
    for module in modules:
        module.sliding_window = None
    try:
        without = dry_run(model, position=7)
    finally:
        for module, window in zip(modules, windows, strict=True):
            module.sliding_window = window

    def is_same(call: AttentionCall, other: AttentionCall) -> bool:
        tensors = ((call.query, other.query), (call.key, other.key), (call.value, other.value))
        window = None if call.module in modules else call.sliding_window
        options = (window, call.scaling, call.softcap)
        has_same = options == (other.sliding_window, other.scaling, other.softcap)
        return has_same and all(torch.equal(*pair) for pair in tensors)

    is_sound = all(map(is_same, with_windows.calls, without.calls))
    is_sound &= torch.equal(with_windows.logits_TV, without.logits_TV)
    return modules if is_sound else []


def _refusal(model: transformers.PreTrainedModel, reason: str) -> CheckpointError:
    first_line = reason.strip().splitlines()[0].rstrip(".")
    return CheckpointError(f"{type(model).__name__} cannot be a target: {first_line}.")
