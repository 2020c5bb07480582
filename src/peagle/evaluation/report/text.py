"""Texts and numbers as the page shows them."""

import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import PurePath

from peagle.results import HardText, OutputSample, Slice

# Longer texts would make a page too large for browsers.
LONGEST_TEXT = 6000

_NAMES = {
    "plain": "Plain decoding",
    "ngram": "Prompt lookup",
    "peagle": "P-EAGLE",
    "eagle3": "EAGLE-3",
}
_SET_NAMES = {
    "humaneval": "HumanEval",
    "mt_bench": "MT-Bench",
    "gsm8k": "GSM8K",
    "mbpp": "MBPP",
    "heldout_code": "Held-out code",
}
_TREES = re.compile(r"(.+)-tree-w(\d+)-n(\d+)(-text)?")
# Characters that are invisible, or that can reverse the order of the text around them.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufffe\uffff"
    "\ud800-\udfff]"
)
_MISSING = "–"
_COMMON_WORDS = ("target", "model", "head", "draft", "checkpoint", "correction", "best", "final")


def method_name(method: str) -> str:
    """Return the name of a method in a sentence: "peagle" is P-EAGLE.

    "peagle-tree-w15-n15" (`DecodingMethod.with_trees`) is "P-EAGLE, trees of 15 nodes"; a width
    other than the number of nodes is named too. "…-text" is "…, and the text".
    """
    if (found := _TREES.fullmatch(method)) is not None:
        name, width, nodes, text = found.groups()
        wide = "" if width == nodes else f", {width} wide"
        return (
            f"{method_name(name)}, trees of {nodes} nodes{wide}{', and the text' if text else ''}"
        )
    return _NAMES.get(method, method)


def engine_name(engine: str) -> str:
    """Return the name of an engine in a sentence: vLLM, or host and port of a server."""
    return {"vllm": "vLLM"}.get(engine) or engine.partition("://")[2] or engine


def set_name(name: str) -> str:
    """Return the name of a prompt set or of a category: "mt_bench/math" is MT-Bench, math.

    Turns behind a set stay: "mt_bench (both turns)" is MT-Bench (both turns).
    """
    first, slash, rest = name.partition("/")
    known, bracket, turns = first.partition(" (")
    shown = (_SET_NAMES.get(known, known) + bracket + turns) or "all prompts"
    return f"{shown}, {rest.replace('_', ' ')}" if slash else shown


def visible(text: str) -> str:
    """Replace control characters and lone surrogates by visible characters."""

    def shown(match: re.Match[str]) -> str:
        code = ord(match.group())
        if code < 0x20:
            return chr(0x2400 + code)
        return "␡" if code == 0x7F else "�"

    return _HIDDEN.sub(shown, text.replace("\r\n", "\n"))


def cut(text: str, most: int = LONGEST_TEXT) -> str:
    """Return the first `most` characters of a text, with an ellipsis if more follow."""
    return text if len(text) <= most else text[:most] + " …"


def figure(value: float | None, digits: int = 2) -> str:
    """Return a number with `digits` decimals; a dash for None."""
    return _MISSING if value is None else f"{value:,.{digits}f}"


def count(value: int | None) -> str:
    """Return a whole number with thousands separators; a dash for None."""
    return _MISSING if value is None else f"{value:,}"


def rate(value: float | None) -> str:
    """Return tokens per second with at least three digits, from 100 on without decimals."""
    return figure(value, 0 if value is None or value >= 100 else 1 if value >= 10 else 2)


def money(value: float | None) -> str:
    """Return an amount without its currency: like `rate` from 1 on, with three digits below."""
    return rate(value) if value is None or value >= 1 else f"{value:#.3g}"


def times(value: float | None) -> str:
    """Return a factor like "1.25×"; a dash for None."""
    return _MISSING if value is None else f"{value:.2f}×"


def percent(value: float | None) -> str:
    """Return a share (0 to 1) as a percentage; a dash for None."""
    return _MISSING if value is None else f"{100 * value:.1f}%"


def milliseconds(value: float | None) -> str:
    """Return seconds as a number of milliseconds; a dash for None."""
    digits = 0 if value is None or value >= 0.1 else 1 if value >= 0.01 else 2
    return figure(None if value is None else 1000 * value, digits)


def objective(meets: bool | None) -> str:
    """Return "met" or "missed" for a latency objective; a dash for None."""
    return {None: _MISSING, True: "met", False: "missed"}[meets]


def interval(low_high: tuple[float, float] | None) -> str:
    """Return both ends, "low to high"; a dash for None."""
    return _MISSING if low_high is None else f"{low_high[0]:,.2f} to {low_high[1]:,.2f}"


def rates(low_high: tuple[float, float] | None) -> str:
    """Return an interval of tokens per second, "low to high"; a dash for None."""
    return _MISSING if low_high is None else f"{rate(low_high[0])} to {rate(low_high[1])}"


def with_interval(piece: Slice) -> str:
    """Return an acceptance length, with its interval in parentheses if there is one."""
    ends = piece.acceptance_length_ci
    return figure(piece.length) + (f" ({interval(ends)})" if ends else "")


def depth(k: int | None) -> str:
    """Return "K = 7" for 7; "" for plain decoding and for an unknown K."""
    return f"K = {k}" if k else ""


def short(source: str) -> str:
    """Return a hub id, or the last part of a folder, with its parent for a word like "head"."""
    path = PurePath(source)
    if not path.is_absolute() and not source.startswith("."):
        return source
    above = path.parent.name
    return f"{above}/{path.name}" if above and path.name in _COMMON_WORDS else path.name


def temperature(value: float) -> str:
    """Return "greedy" for 0, else "temperature" and the number."""
    return "greedy" if value == 0 else f"temperature {value:g}"


def day(created: str) -> str:
    """Return an ISO time as a day like "21 November 2026"; any other text unchanged."""
    try:
        when = datetime.fromisoformat(created)
    except ValueError:
        return created
    return f"{when.day} {when:%B %Y}"


def listed(items: list[str]) -> str:
    """Join words like "a, b and c"."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def schedule_words(schedule: Sequence[tuple[int, int, int]]) -> str:
    """Return a K schedule in words; "" for none."""
    words = [
        (f"K = {k}" if k else "no drafts")
        + (f" for {low}" if low == high else f" for {low} to {high}")
        for low, high, k in schedule
    ]
    return listed(words) + " sequences together" if words else ""


def text_title(item: OutputSample | HardText) -> str:
    """Return prompt set and id; the id alone if it begins with the set's name."""
    name = set_name(item.set) if item.set else ""
    parts = [item.id] if name and item.id.lower().startswith(name.lower()) else [name, item.id]
    return " · ".join(filter(None, parts)) or "Output"


def shown_pieces(sample: OutputSample) -> Iterator[tuple[str, str]]:
    """Yield kinds and texts of a sample's pieces, up to the longest text that a page shows."""
    left = LONGEST_TEXT
    for text, kind in sample.pieces:
        if left > 0:
            yield kind, cut(text, left)
        left -= len(text)
