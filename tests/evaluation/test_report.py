"""The report: what it reads, what it writes, what it refuses."""

import csv
import json
import math
from pathlib import Path

import pytest

from evaluation import report_samples as samples
from evaluation.report_pages import Parsed, small, some
from peagle.errors import UserError
from peagle.evaluation.report import charts, write_report
from peagle.results import AcceptanceResults, ThroughputResults, TuneResults

WRITTEN = {
    "acceptance": {"acceptance.csv", "acceptance.png", "histogram.png", "pivot.csv"},
    "throughput": {"throughput.csv", "throughput.png", "k_sweep.png", "pivot.csv"},
    "tune": set(),
}
MODELS = {"acceptance": AcceptanceResults, "throughput": ThroughputResults, "tune": TuneResults}


# ---- what is written ----


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything, and its report."""
    folder = samples.write(tmp_path_factory.mktemp("report") / "all", **small())
    assert write_report(folder) == folder / "report.html"
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("names", [("acceptance",), ("throughput",), ("tune",), tuple(WRITTEN)])
def test_whichever_files_are_there(tmp_path, names, whole):
    folder = whole
    if len(names) < 3:
        folder = samples.write(tmp_path / "some", **some(*names))
        write_report(folder)
    expected = {f"{name}.json" for name in names} | {"results.json", "report.html"}
    expected |= set().union(*(WRITTEN[name] for name in names))
    assert {path.name for path in folder.iterdir()} == expected
    together = json.loads((folder / "results.json").read_text())
    assert set(together) == {"format_version", *WRITTEN}
    for name, model in MODELS.items():
        if name in names:
            assert model.model_validate(together[name]) == model.model_validate(small()[name])
        else:
            assert together[name] is None
    for path in folder.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") and path.stat().st_size > 5000
    shown = {d["id"] for tag, d in Parsed((folder / "report.html").read_text()).tags
             if tag == "section"}  # fmt: skip
    own = {
        "acceptance": {"acceptance", "sets", "places", "requests", "samples", "hardest"},
        "throughput": {"throughput", "sweep"},
        "tune": {"cost"},
    }
    assert shown - {"caveats"} == {"provenance"}.union(*(own[name] for name in names))


@pytest.mark.slow
def test_the_same_files_again(whole):
    before = {path.name: path.read_bytes() for path in whole.iterdir()}
    write_report(whole)
    assert {path.name: path.read_bytes() for path in whole.iterdir()} == before


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setattr(charts, "find_spec", lambda name: None)
    folder = samples.write(tmp_path, **some("acceptance"))
    page = write_report(folder).read_text()
    assert not list(folder.glob("*.png")) and "<svg" not in page
    assert "matplotlib is not installed (pip install &#34;peagle[report]&#34;)" in page
    assert "<details open><summary>Data" in page
    assert (folder / "acceptance.csv").exists()


def test_csv_of_acceptance(whole):
    rows = list(csv.DictReader((whole / "acceptance.csv").open()))
    entries = small()["acceptance"]["entries"]
    slices = 0
    for entry in entries:
        named = [("pooled", "", entry["pooled"])]
        named += [("set", name, piece) for name, piece in entry["by_set"].items()]
        named += [("category", name, piece) for name, piece in entry["by_category"].items()]
        for kind, key in (("context", "by_context"), ("output_position", "by_output_position")):
            named += [(kind, f"{r['from']}-{r['to']}", r["slice"]) for r in entry[key]]
        for kind, name, piece in named:
            slices += 1
            wanted = {"method": entry["method"], "k": str(entry["k"]), "slice_kind": kind}
            wanted |= {"temperature": str(entry["temperature"]), "slice": name}
            own = [row for row in rows if wanted.items() <= row.items()]
            assert [int(row["position"]) for row in own] == list(range(1, entry["k"] + 1))
            assert [float(row["unconditional"]) for row in own] == piece["unconditional"]
            assert [float(r["conditional_low"]) for r in own if r["conditional_low"]] == [
                low_high[0] for low_high in piece["conditional_ci"] if low_high
            ]
            lengths = {float(row["acceptance_length"]) for row in own}
            assert lengths == {piece["acceptance_length"]}
            counts = [int(row["num_accepted_at_position"]) for row in own]
            assert 1 + sum(counts) / int(own[0]["num_drafts"]) == pytest.approx(lengths.pop())
    assert len(rows) == sum(
        entry["k"] * (1 + 3 + len(samples.CATEGORIES) + 5 + 4) for entry in entries
    )
    assert slices == len(entries) * (1 + 3 + len(samples.CATEGORIES) + 5 + 4)


def test_csv_of_throughput(whole):
    rows = list(csv.DictReader((whole / "throughput.csv").open()))
    cells = small()["throughput"]["cells"]
    assert len(rows) == len(cells)
    for row, cell in zip(rows, cells, strict=True):
        assert (row["method"], row["set"]) == (cell["method"], cell["set"])
        assert (int(row["k"]), int(row["concurrency"])) == (cell["k"], cell["concurrency"])
        rates = sorted(repeat["output_tokens_per_s"] for repeat in cell["repeats"])
        shown = [float(row[f"output_tokens_per_s{end}"]) for end in ("_low", "", "_high")]
        assert shown == rates
        assert float(row["itl_s_p90"]) == cell["median"]["itl_s"]["p90"]
        assert row["acceptance_length"] == ("" if not cell["k"] else row["acceptance_length"])


# ---- what is refused ----


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"none of acceptance\.json, throughput\.json and tune"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", list(WRITTEN))
def test_a_newer_format_is_refused(tmp_path, name):
    documents = some("acceptance", name)
    documents[name]["format_version"] = 2
    samples.write(tmp_path, **documents)
    with pytest.raises(UserError, match=rf"{name}\.json' has format_version 2, newer than .*\(1\)"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "keys", "value", "message"),
    [
        ("acceptance", ("format_version",), "1", "at format_version: it is '1'"),
        ("acceptance", ("entries",), None, "at entries: "),
        ("acceptance", ("entries", 1, "pooled", "num_drafts"), -1, "entries.1.pooled.num_drafts"),
        ("acceptance", ("entries", 0, "k"), "seven", "at entries.0.k: .*'seven'"),
        ("acceptance", ("entries", 0, "pooled", "acceptance_length"), math.nan, "acceptance_len"),
        ("acceptance", ("entries", 0, "histogram"), [{"from": 1}], "entries.0.histogram.0.to"),
        ("acceptance", ("entries", 0, "samples", 0, "pieces"), [["a"]], "samples.0.pieces.0"),
        ("acceptance", ("provenance", "target"), 3, "provenance.target"),
        ("throughput", ("cells", 2, "concurrency"), 0, "cells.2.concurrency"),
        ("throughput", ("cells", 0, "median"), {}, "cells.0.median.output_tokens_per_s"),
        ("tune", ("schedule",), [[5, 8, 7], [1, 4, 3]], "at schedule: .*ascending"),
        ("tune", ("costs", "target_s"), [[1, "slow"]], "costs.target_s.0.1"),
    ],
)
def test_a_malformed_file_is_refused(tmp_path, name, keys, value, message):
    documents = some(name)
    place = documents[name]
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    samples.write(tmp_path, **documents)
    with pytest.raises(UserError, match=message) as error:
        write_report(tmp_path)
    assert f"{name}.json" in str(error.value) and len(str(error.value)) < 600


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"format_version": 1', "is not JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[]", "holds list"),
        (b"[" * 100_000, "is nested too deeply|is not JSON"),
    ],
)
def test_a_broken_file_is_refused(tmp_path, data, message):
    (tmp_path / "tune.json").write_bytes(data)
    with pytest.raises(UserError, match=message):
        write_report(tmp_path)
