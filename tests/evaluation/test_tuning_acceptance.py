"""Acceptance length by K, and what is read of acceptance.json."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.errors import UserError
from peagle.evaluation.tuning.acceptance import AcceptanceByK, acceptance_of_file


def falling(k: int) -> st.SearchStrategy[list[float]]:
    rates = st.lists(st.floats(0, 1), min_size=k, max_size=k)
    return rates.map(lambda values: sorted(values, reverse=True))


runs = st.sets(st.integers(1, 10), min_size=1, max_size=4).flatmap(
    lambda ks: st.fixed_dictionaries({k: falling(k) for k in ks})
)


@pytest.mark.slow
@given(runs)
def test_lengths_rise_and_agree_with_the_runs(per_pos: dict[int, list[float]]) -> None:
    acceptance = AcceptanceByK(per_pos)
    lengths = acceptance.lengths()
    assert list(lengths) == list(range(max(per_pos) + 1))
    assert lengths[0] == 1
    values = list(lengths.values())
    assert values == sorted(values)
    for k in range(1, max(per_pos) + 1):
        rates = acceptance.rates(k)
        assert len(rates) == k
        assert list(rates) == sorted(rates, reverse=True)
    for k, rates in per_pos.items():
        assert list(acceptance.rates(k)) == rates
        assert lengths[k] >= 1 + sum(rates) - 1e-9


def test_between_two_runs() -> None:
    acceptance = AcceptanceByK({2: [0.8, 0.4], 4: [0.6, 0.3, 0.2, 0.1]})
    assert acceptance.rates(1) == (0.8,)
    assert acceptance.rates(3) == pytest.approx((0.7, 0.35, 0.2))
    assert acceptance.lengths() == pytest.approx({0: 1, 1: 1.8, 2: 2.2, 3: 2.25, 4: 2.25})


@pytest.mark.parametrize("rates", [[0.5], [0.5, 0.6], [1.1, 0.5], [0.5, -0.1]])
def test_impossible_rates(rates: list[float]) -> None:
    with pytest.raises(UserError, match="at K = 2 is"):
        AcceptanceByK({2: rates})


def test_no_run() -> None:
    with pytest.raises(UserError, match="at least one K"):
        AcceptanceByK({})


def entry(method: str, k: int, rates: list[float], **more: Any) -> dict[str, Any]:
    return {
        "method": method,
        "source": f"./{method}" if method != "ngram" else "",
        "k": k,
        "temperature": 0.0,
        "pooled": {
            **{"num_drafts": 9, "num_accepted_tokens": 9, "unconditional": rates},
            "acceptance_length": 1 + sum(rates),
        },
        **more,
    }


ENTRIES = [
    entry("peagle", 1, [0.8]),
    entry("peagle", 3, [0.75, 0.5]),  # nothing was ever accepted at position 3
    entry("peagle", 3, [0.6, 0.4, 0.2], temperature=0.7),
    entry("eagle3", 3, [0.7, 0.4, 0.1]),
    entry("ngram", 7, [0.2] * 7),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path, ENTRIES)


def write(folder: Path, entries: list[dict[str, Any]]) -> Path:
    data = {"format_version": 1, "provenance": {"target": "t"}, "entries": entries}
    (folder / "acceptance.json").write_text(json.dumps(data))
    return folder


def test_entries_of_the_head(folder: Path) -> None:
    acceptance = acceptance_of_file(folder, draft="./peagle")
    assert acceptance.source == "acceptance.json"
    assert acceptance.per_pos == {1: [0.8], 3: [0.75, 0.5, 0.0]}
    file = folder / "acceptance.json"
    assert acceptance_of_file(file, draft="./peagle", temperature=0.7).per_pos == {
        3: [0.6, 0.4, 0.2]
    }
    assert acceptance_of_file(file, draft="./other", method="eagle3").lengths()[3] == 2.2


def test_the_only_head_is_taken_whatever_it_is_called(tmp_path: Path) -> None:
    write(tmp_path, [entry("mine", 2, [0.5, 0.25]), ENTRIES[-1]])
    assert acceptance_of_file(tmp_path, draft="./elsewhere").most == 2


SHAPE = {"num_parallel_trees": 3, "prediction_depth": 3, "max_nodes": 3}


@pytest.mark.parametrize(
    ("more", "pooled"),
    [({"parallel_drafting_spec": SHAPE}, {}), ({}, {"num_draft_tokens": 9 * 15})],
    ids=["by their shape", "by their drafts"],
)
def test_trees_are_no_chains(tmp_path: Path, more: dict[str, Any], pooled: dict[str, Any]) -> None:
    """Copies of the text make paths of trees longer than K."""

    def tree(method: str, rates: list[float]) -> dict[str, Any]:
        found = entry(method, 3, rates, source="./peagle", **more)
        return found | {"pooled": found["pooled"] | pooled}

    trees = [tree("peagle-tree", [0.9, 0.8, 0.7]), tree("mine-text", [0.9, 0.8, 0.7, 0.6, 0.5])]
    write(tmp_path, [*ENTRIES, *trees])
    for options in ({}, {"method": "peagle"}):
        acceptance = acceptance_of_file(tmp_path, draft="./peagle", **options)
        assert acceptance.per_pos == {1: [0.8], 3: [0.75, 0.5, 0.0]}
    with pytest.raises(UserError, match="no entry of method 'mine-text' with chains of drafts"):
        acceptance_of_file(tmp_path, draft="./peagle", method="mine-text")
    # The chains of the only head are taken whatever it is called.
    write(tmp_path, [ENTRIES[1], *trees])
    assert acceptance_of_file(tmp_path, draft="./elsewhere").most == 3
    write(tmp_path, trees)
    with pytest.raises(UserError, match="of such it has none"):
        acceptance_of_file(tmp_path, draft="./peagle")


def test_a_head_that_is_no_folder_beside_entries_of_folders(tmp_path: Path) -> None:
    here = tmp_path / "head"
    here.mkdir()
    every = [entry("peagle", 3, [0.5] * 3, source=str(here)), ENTRIES[3]]
    with pytest.raises(UserError, match="no entry of the head 'owner/head'"):
        acceptance_of_file(write(tmp_path, every), draft="owner/head")
    (tmp_path / "link").symlink_to(here)
    assert acceptance_of_file(tmp_path, draft=str(tmp_path / "link")).per_pos == {3: [0.5] * 3}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"draft": "./other"},
            "no entry of the head './other' with chains of drafts; of such it has eagle3, peagle",
        ),
        ({"draft": "./peagle", "method": "x"}, "no entry of method 'x'"),
        ({"draft": "./peagle", "temperature": 1.0}, "it has 0, 0.7. Set --temperature"),
    ],
)
def test_no_fitting_entry(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        acceptance_of_file(folder, **options)


def test_broken_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not readable"):
        acceptance_of_file(tmp_path / "none.json", draft="x")
    write(tmp_path, [{"method": "peagle"}])
    with pytest.raises(UserError, match=r"malformed at entries\.0\.k"):
        acceptance_of_file(tmp_path, draft="x")
    write(tmp_path, [entry("peagle", 1, [0.5]) | {"pooled": {}}])
    with pytest.raises(UserError, match=r"entries\.0\.pooled\.num_drafts"):
        acceptance_of_file(tmp_path, draft="x")
