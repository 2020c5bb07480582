"""Who drafted what was accepted, in files, tables and pages of results."""

import csv
from pathlib import Path
from typing import Any

import pytest

from evaluation import report_samples as samples
from evaluation.report_pages import page_of, some, table_of
from peagle.cli.bench import bench_text
from peagle.cli.eval import entry_text
from peagle.engine import SpeculationStats
from peagle.evaluation.report.files import acceptance_csv, throughput_csv
from peagle.evaluation.sources import by_source
from peagle.results import AcceptanceResults, Entry, ThroughputResults, TuneResults

KEYS = {"num_accepted_text_tokens_per_pos", "head_per_pos", "text_per_pos"}
STATS = SpeculationStats(10, 90, 21, [9, 8, 4, 0], [1, 3, 4, 0])
HEAD, TEXT = [0.8, 0.5, 0.0, 0.0], [0.1, 0.3, 0.4, 0.0]


def told(document: dict[str, Any], method: str = "peagle") -> dict[str, Any]:
    """A file in which the text drafted beside one method's head."""
    shares = STATS.shares_by_source
    for entry in document.get("entries", ()):
        if entry["method"] == method:
            own = STATS.to_json() | shares | {"unconditional": STATS.acceptance_per_pos}
            entry["pooled"] |= own | {"unconditional_ci": None, "conditional_ci": None}
    for cell in document.get("cells", ()):
        if cell["method"] == method:
            cell["median"] |= shares
    for trees in document.get("trees", ()):
        trees |= shares
    return document


def keys_in(value: Any) -> set[str]:
    """All keys of a JSON value."""
    if isinstance(value, dict):
        return {*value}.union(*map(keys_in, value.values()))
    return set().union(*map(keys_in, value)) if isinstance(value, list) else set()


def test_shares_by_hand() -> None:
    assert STATS.shares_by_source["text_per_pos"] == TEXT
    assert STATS.shares_by_source["head_per_pos"] == pytest.approx(HEAD)


def test_a_method_without_a_head_has_one_source() -> None:
    entries = samples.acceptance(("ngram", "peagle"), (3,), (0.0,))
    file = AcceptanceResults.model_validate(told(told(entries), "ngram"))
    rows = [*by_source(file.entries)]
    assert [(entry.method, source) for entry, source, _ in rows] == [
        ("peagle", "head"),
        ("peagle", "text alone"),
    ]
    assert rows[1][2] == TEXT


@pytest.mark.parametrize(
    ("name", "model"),
    [("acceptance", AcceptanceResults), ("throughput", ThroughputResults), ("tune", TuneResults)],
)
def test_files_have_the_keys_only_where_the_text_drafts(name: str, model: Any) -> None:
    old = some(name)[name]
    assert not KEYS & keys_in(old), "as an earlier peagle wrote it"
    assert not KEYS & keys_in(model.model_validate(old).to_json())
    new = model.model_validate(told(some(name)[name]))
    written = new.to_json()
    assert {"head_per_pos", "text_per_pos"} <= keys_in(written)
    assert model.model_validate(written) == new


def test_tables_of_the_commands() -> None:
    entry = told({"entries": [samples.acceptance(("peagle",), (3,), (0.0,))["entries"][0]]})
    text = entry_text(Entry.model_validate(entry["entries"][0]), "float32", chat=False)
    rows = {line[:20].strip(): line[20:].split() for line in text.splitlines()}
    (label,) = (name for name in rows if name.startswith("by the text"))
    assert rows[label] == [".10", ".30", ".40", ".00"]
    old = Entry.model_validate(samples.acceptance(("peagle",), (3,), (0.0,))["entries"][0])
    assert "by the text" not in entry_text(old, "float32", chat=False)

    names = ("plain", "peagle"), (3,), (1,), ("humaneval",)
    result = ThroughputResults.model_validate(told(samples.throughput(*names)))
    lines = bench_text(result).splitlines()
    (line,) = (line for line in lines if "text alone" in line)
    assert line.split()[-4:] == [".10", ".30", ".40", ".00"]
    before = bench_text(ThroughputResults.model_validate(samples.throughput(*names)))
    assert "text alone" not in before


def test_the_page_and_the_csv(tmp_path: Path) -> None:
    documents = some("acceptance", "throughput", "tune")
    caption = "Accepted tokens by position and source"
    assert caption not in page_of(tmp_path / "old", **documents)
    for name in documents:
        page = page_of(tmp_path / name, **{name: told(some(name)[name])})
        tables = page.count(f"<caption><span>{caption}")
        assert tables == (2 if name == "acceptance" else 1), "one for each temperature"
        if name != "acceptance":
            header, *rows = table_of(page, caption)
            at = header.index("Drafted by")
            assert header[at + 1 :] == ["1", "2", "3", "4"]
            shown = {row[at]: row[at + 1 :] for row in rows}
            assert shown["head"] == ["80.0%", "50.0%", "0.0%", "0.0%"]
            assert shown["text alone"] == ["10.0%", "30.0%", "40.0%", "0.0%"]
    acceptance = AcceptanceResults.model_validate(told(documents["acceptance"]))
    page = page_of(tmp_path / "both", acceptance=acceptance.to_json())
    assert "Accepted, and drafted by the text alone" in page
    rows = [*csv.DictReader(acceptance_csv(acceptance).decode().splitlines())]
    own = [row for row in rows if row["method"] == "peagle" and row["slice_kind"] == "pooled"]
    counts = [int(row["num_accepted_of_text_at_position"]) for row in own[:4]]
    assert counts == STATS.num_accepted_text_tokens_per_pos
    throughput = ThroughputResults.model_validate(told(documents["throughput"]))
    rows = [*csv.DictReader(throughput_csv(throughput).decode().splitlines())]
    assert {row["text_tokens_per_draft"] for row in rows if row["method"] != "peagle"} == {""}
    sums = [float(row["text_tokens_per_draft"]) for row in rows if row["method"] == "peagle"]
    assert sums == pytest.approx([sum(TEXT)] * len(sums))
