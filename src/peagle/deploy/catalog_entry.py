"""An entry of the catalog: a model with a P-EAGLE head and what it takes to deploy it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from peagle.deploy.deployment import Source
from peagle.deploy.memory import (
    GIB,
    IN_FLIGHT_TOKENS,
    KvLayers,
    MemoryNeeded,
    ModelFacts,
    facts_of_folder,
    memory_needed,
)

Precision = Literal["bf16", "fp16", "fp32", "fp8", "mxfp4", "nvfp4", "int8", "int4"]
_UNPACKED = ("bf16", "fp16")
_HALF = ("half", "float16")  # what vLLM calls it
_HUB_ID = r"[A-Za-z0-9][\w.-]*/[\w.-]+"
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]{0,127}$")]
_Model = Annotated[str, Field(pattern=rf"^({_HUB_ID}|s3://[^\s/]+(/\S*)?|/.*)$")]
_Instance = Annotated[str, Field(pattern=r"^ml\.[a-z0-9-]+\.[a-z0-9]+$")]
_Flag = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")]


def _text(value: Any) -> Any:
    """A value of TOML as SM_VLLM_* has it: text as it is, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


_Value = Annotated[str, BeforeValidator(_text)]


class KvLayersEntry(BaseModel):
    """Layers of one shape, as `memory.KvLayers`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    layers: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    window: int | None = Field(None, ge=1)

    def to_layers(self) -> KvLayers:
        """The same, for `memory_needed`."""
        return KvLayers(self.layers, self.kv_heads, self.head_dim, self.window)


class CatalogEntry(BaseModel):
    """A model of the catalog: the table [models.NAME] of a file.

    Attributes:
        name: of the table.
        origin: the file it is from, or "the package".
        replaces: the origin of the entry of the same name that this one replaces; "" for none.
        target, draft: hub ids, s3:// prefixes or folders; no draft where none is published by
            itself.
        num_speculative_tokens: K; none where the source sets it.
        max_speculative_tokens: the deepest K that the head was trained or published for.
        precision: of the target's weights.
        parameters_b: of the target, in 10^9.
        weights_gib, draft_weights_gib: of the checkpoints, in GiB.
        kv_layers, draft_kv_layers: shapes of the KV caches.
        instance_types: of SageMaker, the preferred one first.
        vllm_flags: options of vLLM that it needs, without dashes; values as text.
        environment: further variables of the container.
        sources: containers that can serve it, the preferred one first.
        jumpstart_model_id: its name in SageMaker's public hub.
        gated: whether its licence must be accepted before weights are given out.
        license: as the hub names it.
        estimates: names of the keys above whose values were not published but estimated.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: _Name
    origin: str
    replaces: str = ""
    target: _Model
    draft: _Model | None = None
    num_speculative_tokens: int | None = Field(None, ge=1, le=64)
    max_speculative_tokens: int | None = Field(None, ge=1, le=64)
    precision: Precision
    parameters_b: float | None = Field(None, gt=0, allow_inf_nan=False)
    weights_gib: float | None = Field(None, gt=0, allow_inf_nan=False)
    draft_weights_gib: float | None = Field(None, gt=0, allow_inf_nan=False)
    kv_layers: tuple[KvLayersEntry, ...] = ()
    draft_kv_layers: tuple[KvLayersEntry, ...] = ()
    instance_types: tuple[_Instance, ...] = Field(min_length=1)
    vllm_flags: dict[_Flag, _Value] = Field(default_factory=dict)
    environment: dict[str, _Value] = Field(default_factory=dict)
    sources: tuple[Source, ...] = Field(("managed", "native"), min_length=1)
    jumpstart_model_id: str | None = None
    gated: bool | None = None
    license: str | None = None
    estimates: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> CatalogEntry:
        if self.draft is not None and self.num_speculative_tokens is None:
            raise ValueError("there is a draft and no num_speculative_tokens; give K")
        if self.draft is None and self.sources != ("jumpstart",) and self.num_speculative_tokens:
            raise ValueError("there is a num_speculative_tokens and no draft; name the head")
        k, deepest = self.num_speculative_tokens, self.max_speculative_tokens
        if k is not None and deepest is not None and k > deepest:
            raise ValueError(
                f"num_speculative_tokens is {k}; expected at most max_speculative_tokens, {deepest}"
            )
        if unknown := [key for key in self.estimates if key not in type(self).model_fields]:
            raise ValueError(f"estimates names {unknown[0]!r}, which is no key")
        if self.sources == ("jumpstart",) and self.jumpstart_model_id is None:
            raise ValueError("sources is jumpstart alone and there is no jumpstart_model_id")
        return self

    def target_facts(self) -> ModelFacts | None:
        """Sizes of the target; None where the weights' are not known."""
        facts = _facts(self.target, self.weights_gib, self.kv_layers, self.precision)
        if facts is None or self.precision in _UNPACKED or self.parameters_b is None:
            return facts
        unpacked = int(2e9 * self.parameters_b)
        return ModelFacts(facts.weights_bytes, unpacked, self.precision, facts.kv_layers)

    def draft_facts(self) -> ModelFacts | None:
        """Sizes of the head; None where they are not known."""
        return _facts(self.draft, self.draft_weights_gib, self.draft_kv_layers, "bf16")

    def memory_needed(self, source: Source | None = None) -> MemoryNeeded | None:
        """With the entry's own flags, in the container of a source; None where it is not known."""
        target = self.target_facts()
        native = (source or self.sources[0]) == "native"
        return target and memory_by_flags(
            target, self.draft_facts(), self.vllm_flags, native=native
        )


def _facts(
    model: str | None, weights_gib: float | None, layers: Sequence[KvLayersEntry], precision: str
) -> ModelFacts | None:
    if weights_gib is not None:
        size = int(weights_gib * GIB)
        return ModelFacts(size, size, precision, tuple(kind.to_layers() for kind in layers))
    if model is not None and model.startswith("/") and Path(model).is_dir():
        return facts_of_folder(Path(model))
    return None


def memory_by_flags(
    target: ModelFacts, draft: ModelFacts | None, flags: Mapping[str, str], *, native: bool = False
) -> MemoryNeeded:
    """Memory of a target and its head with these options of vLLM, by name without dashes."""
    if flags.get("dtype") in _HALF and target.precision in ("bf16", "fp32"):
        target = replace(target, precision="fp16")
    return memory_needed(
        target,
        draft,
        max_model_len=_count(flags.get("max-model-len", "")),
        in_flight_tokens=_count(flags.get("max-num-batched-tokens", "")) or IN_FLIGHT_TOKENS,
        kv_value_bytes=1 if flags.get("kv-cache-dtype", "").startswith("fp8") else 2,
        native=native,
    )


def _count(text: str) -> int | None:
    """A number of tokens as vLLM writes it, 32768 or 32k or 32K; None for all else, as "auto"."""
    scale = {"k": 1000, "K": 1024}.get(text[-1:], 1)
    digits = text[:-1] if scale > 1 else text
    return int(digits) * scale or None if digits.isdecimal() else None
