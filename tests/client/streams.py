"""The streams of tests/fixtures/streams, and what a reader has to find in each."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from peagle.client.answers import Usage
from peagle.client.counters import DraftCounts

FOLDER = Path(__file__).resolve().parents[1] / "fixtures" / "streams"


@dataclass(frozen=True)
class Stream:
    """A stream, and its answer: texts and finish reasons by choice, the rest of the first one."""

    name: str
    texts: tuple[str, ...]
    finish_reasons: tuple[str, ...]
    usage: Usage | None = None
    reasoning: str = ""
    calls: tuple[str, str] | None = None  # name of the function, arguments
    error: str = ""
    is_done: bool = True
    report: list[tuple[int, int]] = field(default_factory=list)  # drafted, accepted

    @property
    def raw(self) -> bytes:
        return (FOLDER / f"{self.name}.sse").read_bytes()

    @property
    def is_chat(self) -> bool:
        return b'"delta"' in self.raw


STREAMS = [
    Stream(
        "ours_chat",
        (" pass\n\nNote that there is no", " return binom(x, 2"),
        ("length", "length"),
        Usage(17, 16),
    ),
    Stream(
        "ours_completions",
        (" é 🦬 é ",),
        ("length",),
        Usage(27, 12, 0, DraftCounts(8, 56, 4, (3, 1, 0, 0, 0, 0, 0))),
        report=[(0, 0), (7, 0), (7, 1), (7, 0), (7, 1), (7, 0), (7, 0), (7, 0), (7, 2)],
    ),
    Stream("sglang_chat", ("🦅 is 日本.",), ("stop",), Usage(12, 9, 8), "A bird?"),
    Stream("sglang_error", ("Once",), ("",), error="The request was aborted: out of memory."),
    Stream("sglang_tools", ("",), ("tool_calls",), calls=("weather", '{"city": "Köln"}')),
    Stream("tgi_chat", ("Grüße 🦅",), ("stop",), Usage(31, 4)),
    Stream("tgi_completions", (" Été à Paris",), ("length",), Usage(3, 3)),
    Stream(
        "tgi_error",
        (" Été",),
        ("",),
        error="Request failed during generation: Server error: CUDA out of memory",
    ),
    Stream(
        "tgi_tools",
        ("",),
        ("eos_token",),
        calls=("weather", '{"city": "Köln"}'),
        is_done=False,
    ),
    Stream("vllm_chat", ("\nsystem\n\n",), ("length",), Usage(34, 14), "Discover – “É”."),
    Stream(
        "vllm_completions",
        (", aメデゥ,", " い・・・###"),
        ("length", "length"),
        Usage(23, 18),
    ),
    Stream(
        "vllm_error",
        ("-in-a-",),
        ("",),
        error="EngineCore encountered an issue. See stack trace (above) for the root cause.",
    ),
    Stream("vllm_tools", ("",), ("length",), Usage(34, 40), calls=("weather", '"weather"')),
]

by_name = pytest.mark.parametrize("stream", STREAMS, ids=lambda one: one.name)


def called(deltas: list[Any]) -> tuple[str, str] | None:
    """Join the parts of the first call: the first name, all arguments."""
    functions = [call["function"] for call in deltas]
    if not functions:
        return None
    arguments = "".join(one.get("arguments") or "" for one in functions)
    return next(one["name"] for one in functions if one.get("name")), arguments
