"""Reading responses, and every way in which a file can be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from peagle.data.dataset import ResponseDataset
from peagle.data.readers import side_file
from peagle.errors import UserError
from tests.conftest import byte_tokenizer
from tests.data.files import ids, write


def load(path: Path, max_length: int = 64) -> ResponseDataset:
    return ResponseDataset.load(path, byte_tokenizer(), 320, max_length)


def test_both_formats_give_the_same_sequences(tmp_path: Path) -> None:
    rows = [ids([5, 6], [7, 8, 9]), ids([4], [3, 2, 1, 0])]
    jsonl = load(write(tmp_path / "a.jsonl", *rows, ""))
    store = {
        "tokens": torch.tensor([5, 6, 7, 8, 9, 4, 3, 2, 1, 0], dtype=torch.uint16),
        "sequence_start_loc": torch.tensor([0, 5, 10]),
        "prompt_lens": torch.tensor([2, 1], dtype=torch.int32),
    }
    save_file(store, tmp_path / "a.safetensors")
    packed = load(tmp_path / "a.safetensors")
    for name in ("tokens", "start_loc", "prompt_lens"):
        assert torch.equal(getattr(jsonl, name), getattr(packed, name)), name


def test_text_rows_are_tokenised(tmp_path: Path) -> None:
    dataset = load(write(tmp_path / "a.jsonl", {"prompt": "ab", "response": "cde"}))
    tokenizer = byte_tokenizer()
    assert dataset.tokens.tolist() == tokenizer.encode("ab") + tokenizer.encode("cde")
    assert dataset.prompt_lens.tolist() == [2]


def test_long_sequences_are_cut_and_empty_ones_dropped(tmp_path: Path) -> None:
    rows = [ids([1] * 10, [2] * 10), ids([1] * 20, [2] * 5), ids([1], [2]), ids([3], [4, 5])]
    dataset = load(write(tmp_path / "a.jsonl", *rows), max_length=12)
    assert dataset.start_loc.diff().tolist() == [12, 3]
    assert dataset.tokens.tolist() == [1] * 10 + [2] * 2 + [3, 4, 5]
    counts = dataset.response_token_counts(320)
    assert counts[[1, 2, 3, 4, 5]].tolist() == [0, 2, 0, 1, 1]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["{not json"], "line 1 is not JSON"),
        ([ids([1], [2, 3]), {"prompt": "x"}], "line 2 is"),
        ([ids([1], [2, 3]), [1, 2]], "line 2 is"),
        ([{"prompt_token_ids": ["a"], "response_token_ids": [1]}], "lists of integers"),
        (['{"prompt_token_ids": [1], "response_token_ids": [2, true]}'], "lists of integers"),
        ([{"messages": [{"role": "user", "content": "a"}]}], "peagle data prepare"),
        ([ids([1], [2, 400])], "token id 400"),
        ([ids([1, 2], [3])], "no sequence with at least two response tokens"),
        ([""], "no sequence"),
    ],
)
def test_malformed_rows_are_named(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(write(tmp_path / "a.jsonl", *rows))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.jsonl", "is not there"),
        ("a.csv", r"expected \.jsonl or \.safetensors"),
        ("a.safetensors", "not a whole store of responses"),
    ],
)
def test_files_of_the_wrong_kind_are_named(tmp_path: Path, name: str, message: str) -> None:
    write(tmp_path / "a.csv", "x")
    write(tmp_path / "a.safetensors", "x")
    with pytest.raises(UserError, match=message):
        load(tmp_path / name)


def test_data_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ids([1], [2, 3]))
    read = (path, byte_tokenizer(), 320, 64)
    side_file(path).write_text(json.dumps({"tokenizer_sha256": "1" * 64}))
    assert len(ResponseDataset.load(*read, tokenizer_sha256="1" * 64)) == 1
    with pytest.raises(UserError, match=r"another tokenizer \(1111.*2222"):
        ResponseDataset.load(*read, tokenizer_sha256="2" * 64)
