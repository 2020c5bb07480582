"""The messages between the front end and an engine process, pickled over a private pipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from peagle.config import EngineConfig, SpeculativeConfig
from peagle.engine import EngineStats
from peagle.engine.loop import Add as Add
from peagle.engine.outputs import StreamChunk


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine process loads, and the limits that it keeps.

    Attributes:
        target: folder of the target.
        proposers: how each proposer drafts, by name; the first one is the default. They share the
            target's weights and split the KV budget.
        engine: sizes.
        threads: CPU threads of torch; None chooses by model and machine.
        device_index: index of the GPU, where the device is "auto" or "cuda" and there are several.
        compile_timeout_s: seconds that a grammar may compile.
        grammar_budget_s: processor seconds that a grammar may take in one step; 0 sets no limit.
        hang_timeout_s: seconds that the process may give no sign of life; 0 sets no limit.
        log_format: format of the log on standard error.
    """

    target: str
    proposers: dict[str, SpeculativeConfig | None]
    engine: EngineConfig
    threads: int | None = None
    device_index: int | None = None
    compile_timeout_s: float = 10.0
    grammar_budget_s: float = 5.0
    hang_timeout_s: float = 10.0
    log_format: Literal["text", "json"] = "text"


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the front end has to know of a loaded engine.

    Attributes:
        max_model_len: longest sequence in tokens.
        vocab_size: ids of the target.
        max_num_seqs: sequences decoded together.
        num_speculative_tokens: K of each proposer, by name, 0 for plain decoding.
        defaults: sampling parameters that the model asks for, fields of SamplingParams.
        memory: the memory plan as a table.
        device: name of the device.
    """

    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    num_speculative_tokens: dict[str, int]
    defaults: dict[str, Any]
    memory: str
    device: str


# ---- to the engine ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cancel:
    """An order to stop a request and free what it holds."""

    index: int


@dataclass(frozen=True, slots=True)
class Stop:
    """An order to end the process."""


# ---- from the engine ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready:
    """The models are loaded."""

    info: EngineInfo


@dataclass(frozen=True, slots=True)
class Failed:
    """The process ends, by a mistake in the settings (`is_user_error`) or by a fault."""

    message: str
    is_user_error: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """A request was not queued."""

    index: int
    message: str
    is_user_error: bool


@dataclass(frozen=True, slots=True)
class Stepped:
    """The chunks of one step; `stats` now and then."""

    chunks: list[StreamChunk]
    stats: EngineStats | None
