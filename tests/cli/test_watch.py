"""`peagle watch` against a server of a script."""

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from peagle.evaluation.endpoint import EndpointBackend
from tests.cli.conftest import Peagle
from tests.evaluation.fake_endpoint import Script, endpoint, metrics


class BusyScript(Script):
    """A server that has answered one more request whenever its metrics are read."""

    numbers = count()

    @property
    def metrics(self) -> str:  # type: ignore[override]
        return metrics(next(self.numbers))

    @metrics.setter
    def metrics(self, _: Any) -> None: ...


@pytest.mark.parametrize("is_file", [True, False])
def test_intervals_are_lines(peagle: Peagle, tmp_path: Path, is_file: bool) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text('{"before": 1}\n')
    with endpoint(BusyScript()) as url:
        more = ("--output", file) if is_file else ()
        result = peagle("watch", url, "--every", "1s", "--count", 2, "--baseline", 2.5, *more)
    assert result.status == 0, result.err
    lines = (file.read_text() if is_file else result.out).splitlines()[is_file:]
    one, two = map(json.loads, lines)
    # Each answer of the script counts 9 drafts with 9 accepted tokens; ten readings an interval.
    assert (one["num_drafts"], one["num_accepted_tokens"]) == (90, 90)
    assert one["acceptance_length"] == 2.0 and one["baseline"] == 2.5
    assert two["time"] > one["time"]


def test_a_full_disk_is_named(peagle: Peagle) -> None:
    with endpoint(BusyScript()) as url:
        result = peagle("watch", url, "--every", "1s", "--count", 2, "--output", "/dev/full")
    assert result.status == 2 and "'/dev/full' cannot be written: No space left" in result.err


def test_a_fall_is_a_warning(peagle: Peagle, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = count()

    def counters(self: EndpointBackend) -> Any:
        from peagle.client.counters import Counters, DraftCounts

        n = next(numbers)
        found = Counters(DraftCounts(10 * n, 40 * n, 8 * n + n % 2), None)
        return Counters(found.drafts, None, {"0": found})

    monkeypatch.setattr(EndpointBackend, "counters", counters)
    with endpoint(Script()) as url:
        result = peagle("watch", url, "--every", "1s", "--count", 2, "--baseline", 2.2)
    assert result.status == 0
    warnings = [line for line in result.err.splitlines() if "below the baseline 2.20" in line]
    assert len(warnings) == 2 and "2 intervals in a row" in warnings[1]
    assert "acceptance length 1.80 [" in warnings[0]


def test_ctrl_c_ends_it_cleanly(peagle: Peagle, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, counters = count(), EndpointBackend.counters

    def interrupted(self: EndpointBackend) -> Any:
        if next(numbers) == 12:
            raise KeyboardInterrupt
        return counters(self)

    monkeypatch.setattr(EndpointBackend, "counters", interrupted)
    with endpoint(BusyScript()) as url:
        result = peagle("watch", url, "--every", "1s")
    assert result.status == 0
    assert len(result.out.splitlines()) == 1 and "interrupted; watching ends" in result.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("URL", "--every", "10"), "--every is '10'; expected a time of at least 1s"),
        (("URL", "--every", "0.5s"), "--every is '0.5s'"),
        (("URL", "--baseline", "0.7"), "--baseline is 0.7; expected an acceptance length above 1"),
        (("URL", "--every", "9" * 20 + "h"), "at most 720h"),
        (("URL", "--count", "0"), "--count is 0; expected at least 1"),
        (("URL", "--output", "/nowhere/x.jsonl"), "--output '/nowhere/x.jsonl' cannot be written"),
        (("URL", "--model", "x"), "has no completions of a model 'x'"),
        (("URL",), "counts no drafts at /metrics"),
        (("http://127.0.0.1:9",), "No server answers at http://127.0.0.1:9"),
        (("ftp://x",), "URL is 'ftp://x'; expected a URL like"),
    ],
)
def test_mistakes(peagle: Peagle, options: tuple[str, ...], message: str) -> None:
    with endpoint(Script()) as url:
        result = peagle("watch", *(url if one == "URL" else one for one in options))
    assert result.status == 2 and message in result.err
    assert result.out == ""
