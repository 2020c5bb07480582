"""What `inspect_data` counts, against counts by hand, and damaged files."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from peagle.data.inspect import Inspection, Lengths, inspect_data
from peagle.data.prepare import Collected
from peagle.data.samples import Sample, SampleMaker
from peagle.errors import UserError
from tests.conftest import byte_tokenizer
from tests.data.files import ids, write

ROWS = [([1, 2], [3, 3, 4]), ([1, 2], [3, 3, 4]), ([9], [3]), ([5] * 6, [4, 7])]


def store(path: Path, **changes: Any) -> Path:
    tensors = {
        "tokens": torch.arange(10, dtype=torch.int32),
        "sequence_start_loc": torch.tensor([0, 4, 10]),
        "prompt_lens": torch.tensor([1, 2]),
    }
    save_file({k: v for k, v in {**tensors, **changes}.items() if v is not None}, path)
    return path


def look(path: Path, **options: Any) -> Inspection:
    return inspect_data(path, SampleMaker(None), **options)


def test_counts_are_those_by_hand(tmp_path: Path) -> None:
    found = look(write(tmp_path / "a.jsonl", *(ids(*row) for row in ROWS)))
    assert (found.samples, found.tokens, found.supervised) == (4, 20, 9)
    assert found.supervised_share == 9 / 20
    assert found.length == Lengths(5, 8, 8, 8) and found.response_length == Lengths(2, 3, 3, 3)
    assert (found.duplicates, found.too_short, found.distinct, found.largest_id) == (1, 1, 3, 9)
    assert found.coverage == {3: 1.0}


def test_answers_of_a_sample_are_counted_each(tmp_path: Path) -> None:
    row = {"input_ids": [1, 5, 6, 7, 2, 8, 9], "loss_mask": [0, 1, 1, 0, 0, 1, 0]}
    found = look(write(tmp_path / "a.jsonl", row, ids([3], [4, 4, 4])))
    assert (found.samples, found.answers, found.tokens, found.supervised) == (2, 3, 6 + 4, 6)
    assert found.prompt_length == Lengths(1, 5, 5, 5)
    assert found.response_length == Lengths(2, 3, 3, 3)
    assert found.too_short == 1 and found.distinct == 4 and found.largest_id == 8


def test_percentiles_are_nearest_ranks() -> None:
    assert Lengths.of(list(range(200, 0, -1))) == Lengths(100, 180, 198, 200)
    assert Lengths.of([7]) == Lengths(7, 7, 7, 7)


def test_coverage_is_that_of_the_most_frequent(tmp_path: Path) -> None:
    # Token i occurs once, and the first thousand once more.
    response = [*range(1500), *range(1000)]
    found = look(write(tmp_path / "a.jsonl", ids([1], response)))
    assert found.coverage == {1000: 2000 / 2500, 1500: 1.0}


def test_both_formats_are_read_alike(tmp_path: Path) -> None:
    collected = Collected()
    for prompt, response in ROWS:
        collected.add(Sample.answered(prompt, response))
    collected.write(tmp_path / "a.safetensors", {"tokenizer_sha256": "x"})
    collected.write(tmp_path / "a.jsonl", {"tokenizer_sha256": "x"})
    first, second = look(tmp_path / "a.safetensors"), look(tmp_path / "a.jsonl")
    assert first.metadata == second.metadata == {"tokenizer_sha256": "x"}
    assert [(s.prompt, s.response) for s in first.shown] == [
        (s.prompt, s.response) for s in second.shown
    ]
    for name in ("samples", "tokens", "supervised", "length", "coverage", "duplicates"):
        assert getattr(first, name) == getattr(second, name)
    with pytest.raises(UserError, match="another tokenizer"):
        look(tmp_path / "a.jsonl", fingerprint="y")
    (tmp_path / "a.jsonl.meta.json").write_text("[1]")
    with pytest.raises(UserError, match="expected an object"):
        look(tmp_path / "a.jsonl")


@pytest.mark.parametrize("count", [1, 2, 3, 5, 97, 1000])
def test_shown_samples_are_spread_over_the_file(tmp_path: Path, count: int) -> None:
    rows = [ids([1], [i % 300, i // 300]) for i in range(count)]
    shown = look(write(tmp_path / "a.jsonl", *rows), num_shown=3).shown
    places = [s.response[0] + 300 * s.response[1] for s in shown]
    assert len(places) == min(3, count) and places == sorted(set(places)) and places[0] == 0
    assert places[-1] >= count // 2 - 1
    gaps = [after - before for before, after in pairwise(places)]
    assert not gaps or max(gaps) <= 2 * min(gaps)
    assert look(tmp_path / "a.jsonl", num_shown=0).shown == []


def test_text_needs_a_tokenizer(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "ab", "response": "cde"})
    with pytest.raises(UserError, match="--target"):
        look(path)
    found = inspect_data(path, SampleMaker(byte_tokenizer()))
    assert (found.tokens, found.supervised) == (5, 3)


def test_a_store_that_was_cut_off(tmp_path: Path) -> None:
    path = store(tmp_path / "a.safetensors")
    assert look(path).supervised == 7
    whole = path.read_bytes()
    for size in (0, 5, 100, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(UserError, match="not a whole store"):
            look(path)


def test_a_store_of_a_later_format_is_refused_by_name(tmp_path: Path) -> None:
    tensors = {"tokens": torch.arange(10), "borders": torch.tensor([0, 10])}
    for version in (3, "2", None):
        metadata = {"peagle_data": json.dumps({"format_version": version})}
        save_file(tensors, tmp_path / "a.safetensors", metadata=metadata)
        with pytest.raises(UserError, match=f"has format_version {version!r}; .* reads up to 2"):
            look(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_lens": torch.tensor([1, 7])}, "is damaged"),
        ({"prompt_lens": torch.tensor([1, -1])}, "is damaged"),
        ({"prompt_lens": torch.tensor([1])}, "is damaged"),
        ({"sequence_start_loc": torch.tensor([0, 4, 11])}, "is damaged"),
        ({"sequence_start_loc": torch.tensor([1, 4, 10])}, "is damaged"),
        ({"sequence_start_loc": torch.tensor([0, 12, 10])}, "is damaged"),
        ({"tokens": torch.rand(10)}, "tokens is torch.float32"),
        ({"tokens": torch.zeros(2, 5, dtype=torch.int32)}, r"shape \(2, 5\)"),
        ({"prompt_lens": None}, "not a whole store"),
        ({"tokens": torch.arange(10) - 3}, "token id -3"),
        ({"loss_mask": torch.ones(9).bool()}, "9 values of loss_mask do not fit"),
        ({"loss_mask": torch.ones(10).int()}, "loss_mask is torch.int32 .* true and false"),
    ],
)
def test_tensors_that_are_no_store(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        look(store(tmp_path / "a.safetensors", **changes))
