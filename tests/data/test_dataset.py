"""Files, folders and tables of data as records and as a dataset."""

import datetime
import json
import shutil
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from peagle.cli.main import run
from peagle.data.dataset import ResponseDataset, data_facts
from peagle.data.inspect import Inspection, inspect_data
from peagle.data.limits import Limits
from peagle.data.prepare import prepare
from peagle.data.readers import (
    Dropped,
    Record,
    conversation_of,
    dialogue_of,
    read_records,
    sha256_of_table,
    side_file,
    split_of,
    table_files,
)
from peagle.data.samples import SampleMaker
from peagle.errors import UserError
from peagle.model_folder import sha256_of
from tests.conftest import VOCAB_SIZE, byte_tokenizer
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


def test_both_formats_hold_several_answers(tmp_path: Path) -> None:
    row = {"input_ids": [5, 6, 7, 8, 9, 3, 2], "loss_mask": [0, 1, 1, 0, 1, 1, 0]}
    jsonl = load(write(tmp_path / "a.jsonl", row, ids([4], [3, 2])))
    mask = torch.tensor([0, 1, 1, 0, 1, 1, 0, 1, 1]).bool()
    store = {
        "tokens": torch.tensor([5, 6, 7, 8, 9, 3, 4, 3, 2], dtype=torch.int32),
        "sequence_start_loc": torch.tensor([0, 6, 9]),
        "loss_mask": mask,
    }
    save_file(store, tmp_path / "a.safetensors")
    packed = load(tmp_path / "a.safetensors")
    for dataset in (jsonl, packed):
        assert torch.equal(dataset.tokens, store["tokens"])
        assert dataset.start_loc.tolist() == [0, 6, 9]
        assert torch.equal(dataset.loss_mask, mask)
        assert dataset.prompt_lens.tolist() == [1, 1]
    cut = load(tmp_path / "a.jsonl", max_length=5)
    assert (cut.tokens.tolist(), cut.start_loc.tolist()) == ([5, 6, 7, 4, 3, 2], [0, 3, 6])
    facts = data_facts(tmp_path / "a.safetensors", packed)
    assert (facts["sequences"], facts["responses"], facts["response_tokens"]) == (2, 3, 6)


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
        ([ids([1], [2, 3]), [1, 2]], "line 2: the line is no object"),
        ([{"prompt_token_ids": ["a"], "response_token_ids": [1]}], "lists of integers"),
        ([{"input_ids": [1, 2], "loss_mask": [0]}], "1 values for 2 input_ids"),
        ([{"input_ids": [1, 2], "loss_mask": [0, "1"]}], "list of whole numbers: loss_mask is"),
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


# ---- folders and tables ----


CHAT = [{"role": "user", "content": "q?"}, {"role": "assistant", "content": "yes é"}]
ROWS = [
    {"id": "a", "messages": CHAT},
    {"id": "b", "messages": CHAT * 2},
    {"id": "c", "messages": [{"role": "system", "content": "s"}, *CHAT]},
]
IDS = [{"prompt_token_ids": [1, i], "response_token_ids": [2, 3, i]} for i in range(5)]


def data_of(path: Path) -> list[dict[str, Any]]:
    return [dict(record.data) for record in read_records(path)]


def look(path: Path, **options: Any) -> Inspection:
    return inspect_data(path, SampleMaker(None), **options)


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")
    return folder


# ---- places, without any package ----

HUB = ("data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet")


def names(parts: list[Path], folder: Path) -> list[str]:
    return [part.relative_to(folder).as_posix() for part in parts]


@pytest.mark.parametrize(
    ("held", "place", "split", "wanted"),
    [
        (["a/state.json"], "a", None, ["a"]),
        (["a/train/state.json", "a/test/state.json"], "a", "test", ["a/test"]),
        (["a/train/state.json", "a/test/state.json"], "a/train", None, ["a/train"]),
        (["a/train/state.json", "a/dataset_dict.json"], "a", None, ["a/train"]),
        (["a/train/state.json", "a/dataset_dict.json"], "a", "train", ["a/train"]),
        (["b.parquet", "a.parquet", ".c.parquet", "README.md"], ".", None, None),
        ([*HUB, "README.md"], ".", None, list(HUB)),
        ([*HUB, "data/test-00000-of-00001-0123abcd.parquet"], ".", "train", list(HUB)),
        ([*HUB, "data/test-00000-of-00001.parquet"], "data/train", None, list(HUB)),
        (["en/train/0000.parquet", "en/test/0000.parquet"], "en", "test", ["en/test/0000.parquet"]),
        (["a.parquet/2.parquet", "a.parquet/1.parquet"], "a.parquet", None, None),
        (["x-1.parquet", "train-1-of-1.parquet"], ".", None, None),
    ],
)
def test_places(
    tmp_path: Path, held: list[str], place: str, split: str | None, wanted: list[str] | None
) -> None:
    folder = touch(tmp_path, *held)
    if wanted is None:
        wanted = sorted(one for one in held if one.endswith(".parquet") and one[0] != ".")
    assert names(table_files(split_of(folder / place, split)), folder) == wanted


@pytest.mark.parametrize(
    ("held", "place", "split", "message"),
    [
        (["a/b.txt", "a/c.txt"], "a", None, r"expected one that Dataset\.save_to_disk .* b.txt, c"),
        (["a/data-00000-of-00001.arrow"], "a", None, "writing was cut off"),
        (["a/.hidden"], "a", None, "holds nothing"),
        (["a/train/state.json", "a/test/state.json"], "a", None, "'.*a/test' or '.*a/train', or"),
        (["a/train/state.json", "a/test/state.json"], "a", "dev", "no split 'dev': .* test, train"),
        (["a/state.json"], "a", "train", "has none; leave --split out"),
        (["train-0-of-1.parquet", "test-0-of-1-0abc.parquet"], ".", None, "several splits"),
        (["train-0-of-1.parquet"], ".", "test", "no split 'test': it has train"),
        (["train-0-of-1.parquet"], "test", None, "is not there"),
        (["a.jsonl"], "a.jsonl", "train", "is a file and has no split 'train'"),
        (["a.jsonl"], "none", "train", "folder '.*none' is not there"),
        (["a.jsonl"], "no/ne", None, "is not there"),
        (["a/b/train/state.json"], "a", "train", "'.*a' is no data: .* holds b"),
        (["a/b/train/state.json"], "a/b", "test", "'.*a/b' has no split 'test': it has train"),
        ([f"a/{i}.txt" for i in range(9)], "a", None, r"4\.txt, \.\.\.\.$"),
    ],
)
def test_places_that_hold_no_table(
    tmp_path: Path, held: list[str], place: str, split: str | None, message: str
) -> None:
    folder = touch(tmp_path, *held)
    with pytest.raises(UserError, match=message):
        read_records(split_of(folder / place, split))


@pytest.mark.parametrize("name", ["a/state.json", "a/x.parquet", "a.parquet"])
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    place = touch(tmp_path, name) / Path(name).parts[0]
    with pytest.raises(UserError, match=r"needs datasets, .*-m pip install .*\[train\]'"):
        list(read_records(place))


def test_mistakes_exit_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.chdir(touch(tmp_path, "two/train/state.json", "two/test/state.json", "none/x"))
    prepare_to = ["--target", "T", "-o", "x.jsonl"]
    for arguments, message in (
        (["inspect", "none"], "it holds x"),
        (["inspect", "two"], "'two/test' or 'two/train', or add --split"),
        (["inspect", "two", "--split", "dev"], "it has test, train"),
        (["inspect", "two/train"], "-m pip install "),
        (["prepare", "two", "--split", "dev", *prepare_to], "it has test, train"),
        (["regenerate", "two", "--split", "dev", "-o", "x.jsonl"], "it has test, train"),
        (["regenerate", "none", "-o", "x.jsonl"], "it holds x"),
        (["regenerate", "two", "--split", "test", "-o", "x.jsonl"], "needs datasets"),
    ):
        assert run(["data", *arguments]) == 2, arguments
        told = capsys.readouterr()
        assert told.out == "" and message in told.err, told.err


def test_a_folder_is_known_by_the_bytes_of_its_data(tmp_path: Path) -> None:
    folder = touch(tmp_path, "a.parquet", "b.parquet", "README.md")
    (folder / "b.parquet").write_bytes(b"b")
    before = sha256_of_table(folder)
    (folder / "README.md").write_text("other")
    assert sha256_of_table(folder) == before
    (folder / "a.parquet").write_bytes(b"a")
    changed = sha256_of_table(folder)
    (folder / "a.parquet").write_bytes(b"b")
    (folder / "b.parquet").write_bytes(b"a")
    assert len({before, changed, sha256_of_table(folder)}) == 3
    assert sha256_of_table(folder / "a.parquet") == sha256_of(folder / "a.parquet")
    saved = touch(tmp_path / "s", "data.arrow", "cache-1.arrow")
    (saved / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    before = sha256_of_table(saved)
    (saved / "cache-1.arrow").write_bytes(b"x")
    assert sha256_of_table(saved) == before
    (saved / "data.arrow").write_bytes(b"x")
    assert sha256_of_table(saved) != before


def test_what_stands_beside_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    wanted = tmp_path / "a.meta.json"
    assert side_file(tmp_path / "a") == side_file(Path("../a")).resolve() == side_file(Path("."))
    assert side_file(Path(".")) == wanted
    assert side_file(Path("..")) == tmp_path.parent / f"{tmp_path.name}.meta.json"
    assert side_file(Path("/")) == Path("/.meta.json")
    write(tmp_path / "a" / "x")
    with pytest.raises(UserError, match="is no data"):
        prepare([Path(".")], SampleMaker(None), Limits(VOCAB_SIZE), "f")


# ---- lines ----


def test_a_byte_order_mark_and_carriage_returns_are_no_content(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    text = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)
    path.write_bytes(b"\xef\xbb\xbf" + text.encode() + b"\r\n\r\n")
    assert data_of(path) == ROWS
    path.write_bytes(b"\xef\xbb\xbf\r\n \n" + text.encode())
    assert data_of(path) == ROWS, "the mark alone is a blank line; the last line needs no end"
    assert [record.number for record in read_records(path)] == [3, 4, 5]


def test_a_line_cut_anywhere_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    row = {"id": 1, "turn": True, "messages": [{"role": "user", "content": 'é "q" \u2028{x}'}]}
    line = json.dumps(row, ensure_ascii=False).encode()
    for size in range(1, len(line)):
        path.write_bytes(b'{"prompt": "x"}\n' + line[:size])
        with pytest.raises(UserError, match="line 2 ends in the middle"):
            list(read_records(path))
    path.write_bytes(b'{"prompt": "x"}\n' + line)
    assert len(data_of(path)) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{'prompt': 'x'}", "line 1 is not JSON: .* at character 2"),
        (b'{"prompt": "x"}\n{"prompt": }\n{"prompt"', "line 2 is not JSON: .* at character 12"),
        (b'{"prompt": "x"} {"prompt": "y"}\n', "line 1 is not JSON: Extra data"),
        ('{"prompt": "x"}\n'.encode("utf-16"), "line 1 is not UTF-8"),
        ('{"prompt": "\xe9"}'.encode("latin-1"), "line 1 is not UTF-8"),
        (b"[" * 100_000 + b"\n", "line 1 is not JSON"),
        (b"\x00" * 40, "line 1 "),
    ],
)
def test_lines_that_are_none(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        list(read_records(path))


@pytest.mark.parametrize(
    ("content", "reason", "detail"),
    [
        (b'{"prompt": "x\\ud83d"}', "the text holds half of a surrogate pair", r"\ud83d stands"),
        (b'{"prompt": "x\\uDC00"}', "the text holds half of a surrogate pair", r"\udc00 stands"),
        (b'[{"prompt": "x"}]', "the line is no object", '[{"prompt": "x"}]'),
        (b"7", "the line is no object", "7"),
        (b"null", "the line is no object", "null"),
    ],
)
def test_a_line_that_is_no_record_is_counted(
    tmp_path: Path, content: bytes, reason: str, detail: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content + b'\n{"prompt": "x"}\n')
    bad, good = read_records(path)
    assert good.data == {"prompt": "x"} and good.fault is None
    dropped = dialogue_of(bad)
    assert isinstance(dropped, Dropped) and dropped.reason == reason
    assert dropped.detail.startswith(detail)
    with pytest.raises(UserError, match=f"line 1: {reason}"):
        ResponseDataset.load(path, byte_tokenizer(), 320, 64)


def test_messages_may_be_json_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for name in ("messages", "conversations"):
        messages = [{"role": "user", "content": "q"}]
        path.write_text(json.dumps({name: json.dumps(messages)}) + "\n")
        (record,) = read_records(path)
        found = dialogue_of(record)
        assert not isinstance(found, Dropped) and found.turns == ("q",)


def test_whole_surrogate_pairs_are_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "\\ud83d\\ude00 \\\\ud800"}\n')
    assert data_of(path) == [{"prompt": "\U0001f600 \\ud800"}]


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl", *ROWS)

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError, match="cannot be read: Permission denied"):
        list(read_records(path))


# ---- what inspect and prepare say ----


def test_data_of_which_nothing_is_supervised(tmp_path: Path) -> None:
    masked = {"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]}
    path = write(tmp_path / "a.jsonl", masked, masked)
    with pytest.raises(UserError, match="holds no sequence: 2 × nothing is supervised"):
        look(path)
    with pytest.raises(UserError, match=r"None of 2 records .* 2 × nothing is supervised"):
        prepare([path], SampleMaker(None), Limits(VOCAB_SIZE), "f")
    found = look(write(tmp_path / "b.jsonl", masked, masked | {"loss_mask": [0, 1, 1]}))
    assert (found.samples, found.supervised) == (1, 2)
    assert found.dropped == {"nothing is supervised": 1}


def test_a_store_of_prompts_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {"tokens": torch.arange(5), "sequence_start_loc": torch.tensor([0, 2, 5])}
    save_file({**tensors, "prompt_lens": torch.tensor([2, 3])}, path)
    found = look(path)
    assert (found.samples, found.supervised, found.too_short) == (2, 0, 2)
    assert found.coverage == {} and found.supervised_share == 0
    assert run(["data", "inspect", str(path)]) == 0
    told = capsys.readouterr().out
    assert "too short to train on: 2" in told and "nothing is supervised" in told
    with pytest.raises(UserError, match="2 × response of less than 2 tokens"):
        prepare([path], SampleMaker(None), Limits(VOCAB_SIZE), "f")


def test_tokenizers_are_not_mixed(tmp_path: Path) -> None:
    """One file is of the target's tokenizer, another is not; text takes any."""
    files = [write(tmp_path / f"{name}.jsonl", *IDS) for name in "abc"]
    for file, fingerprint in zip(files, ("ours", "theirs", None), strict=True):
        if fingerprint is not None:
            side_file(file).write_text(json.dumps({"tokenizer_sha256": fingerprint}))
    limits = Limits(VOCAB_SIZE)
    with pytest.raises(UserError, match=r"'.*b\.jsonl' was made with another tokenizer"):
        prepare(files, SampleMaker(None), limits, "ours")
    _, _, report = prepare([files[0], files[2]], SampleMaker(None), limits, "ours")
    assert report.unknown_tokenizer == [str(files[2])] and report.duplicates == len(IDS)
    with pytest.raises(UserError, match="another tokenizer"):
        look(files[1], fingerprint="ours")


# ---- Parquet ----


def parquet(path: Path, rows: list[Any], **options: Any) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    module = pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    module.write_table(pyarrow.Table.from_pylist(rows), path, **options)
    return path


@pytest.mark.slow
def test_a_folder_of_parquet_files_is_read_in_order(tmp_path: Path) -> None:
    for index in (2, 0, 1):
        parquet(tmp_path / f"train-0000{index}-of-00003.parquet", IDS[index : index + 2])
    records = list(read_records(tmp_path))
    assert [dict(one.data) for one in records] == [*IDS[:2], *IDS[1:3], *IDS[2:4]]
    assert [one.number for one in records] == [1, 2, 3, 4, 5, 6]
    assert records[3].where == f"{tmp_path}/train-00001-of-00003.parquet, row 2"
    assert data_of(tmp_path / "train") == [dict(one.data) for one in records]
    found = look(tmp_path)
    assert (found.samples, found.duplicates) == (6, 2)
    assert prepare([tmp_path], SampleMaker(None), Limits(VOCAB_SIZE), "f")[2].samples == 4


def test_values_that_json_lacks(tmp_path: Path) -> None:
    time = datetime.datetime(2026, 1, 2, 3, 4)
    turn = {"role": "user", "content": "q", "at": time, "n": 1}
    row = {"messages": [turn], "at": time, "picture": {"bytes": b"\xff", "path": "x"}, "raw": b"x"}
    (found,) = data_of(parquet(tmp_path / "a.parquet", [row]))
    shown = "2026-01-02 03:04:00"
    assert found == {"messages": [{**turn, "at": shown}], "at": shown}
    assert dialogue_of(Record(found, 1, "a")).sha256


def test_parquet_cut_or_damaged_anywhere(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", ROWS * 50, row_group_size=50)
    whole = path.read_bytes()
    for size in (0, 3, 8, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(UserError, match="not a whole Parquet file"):
            look(path)
    for begin in (6, len(whole) // 3):
        path.write_bytes(whole[:begin] + bytes(60) + whole[begin + 60 :])
        with pytest.raises(UserError, match="not a whole Parquet file"):
            data_of(path)


def peak_while_reading(path: Path) -> tuple[int, int]:
    """Rows, and the most bytes of Python objects while they are read."""
    tracemalloc.start()
    try:
        count = sum(1 for _ in read_records(path))
        return count, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_parquet_is_not_read_at_once(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}" + "x" * 4000} for i in range(5000)]
    path = parquet(tmp_path / "a.parquet", rows)
    count, peak = peak_while_reading(path)
    assert count == 5000 and peak < 4e6 < 5000 * 4000


# ---- datasets ----


@pytest.fixture
def datasets() -> Any:
    module = pytest.importorskip("datasets")
    module.disable_progress_bars()
    return module


def test_a_saved_dataset_is_read_as_its_lines(tmp_path: Path, datasets: Any) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    lines = write(tmp_path / "a.jsonl", *ROWS)
    assert data_of(tmp_path / "one") == data_of(lines) == ROWS
    assert [one.where for one in read_records(tmp_path / "one")][1] == f"{tmp_path}/one, row 2"
    wanted = [dialogue_of(one) for one in read_records(lines)]
    assert [dialogue_of(one) for one in read_records(tmp_path / "one")] == wanted
    # Splits, in several files; what is selected is stored in its new order.
    both = datasets.DatasetDict(
        train=datasets.Dataset.from_list(IDS).select([4, 0, 2]),
        test=datasets.Dataset.from_list(IDS),
    )
    both.save_to_disk(tmp_path / "two", num_shards={"train": 2, "test": 5})
    assert data_of(tmp_path / "two" / "train") == [IDS[4], IDS[0], IDS[2]]
    assert data_of(split_of(tmp_path / "two", "test")) == IDS
    made, _, report = prepare(
        [tmp_path / "two" / "train", lines],
        SampleMaker(byte_tokenizer(), (0,), chat_template="{{ messages | length }}"),
        Limits(VOCAB_SIZE),
        "f",
    )
    assert report.records == 3 + 3 and made.tokens[0].tolist() == [1, 4, 2, 3, 4]


def test_the_format_in_which_it_was_shown_does_not_matter(tmp_path: Path, datasets: Any) -> None:
    saved = datasets.Dataset.from_list(IDS)
    saved.set_format("torch", columns=["response_token_ids"])
    saved.save_to_disk(tmp_path / "a")
    assert data_of(tmp_path / "a") == IDS


@pytest.mark.parametrize("name", ["a.jsonl", "a.safetensors", "a.parquet", "saved"])
def test_data_without_rows(tmp_path: Path, datasets: Any, name: str) -> None:
    path = tmp_path / name
    if name == "saved":
        datasets.Dataset.from_list(ROWS).select([]).save_to_disk(path)
    else:
        path.write_bytes(b"")
    with pytest.raises(UserError, match=f"{name}' (holds no sequence|is not a whole)"):
        look(path)


def test_columns_of_kinds_that_datasets_has(tmp_path: Path, datasets: Any) -> None:
    time = datetime.datetime(2026, 1, 2)
    turns = {"role": ["user", "assistant"], "content": ["q", "yes"], "name": [None, "n"]}
    text = datasets.Value("string")
    kinds = {
        "messages": datasets.Sequence({"role": text, "content": text, "name": text}),
        "picture": datasets.Image(),
        "label": datasets.ClassLabel(names=["x", "y"]),
        "at": datasets.Value("timestamp[us]"),
        "grid": datasets.Array2D((1, 2), "int8"),
        "nothing": text,
    }
    row = {"messages": turns, "picture": {"bytes": b"no image", "path": None}, "label": 1}
    row |= {"at": time, "grid": [[3, 4]], "nothing": None}
    made = datasets.Dataset.from_list([row, row], features=datasets.Features(kinds))
    made.save_to_disk(tmp_path / "a")
    (found, _) = read_records(tmp_path / "a")
    conversation = conversation_of(found)
    assert conversation is not None and conversation.messages == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "yes", "name": "n"},
    ]
    rest = {"label": 1, "at": "2026-01-02 00:00:00", "grid": [[3, 4]]}
    assert {k: v for k, v in found.data.items() if k != "messages"} == rest


def test_objects_of_no_fixed_form(tmp_path: Path, datasets: Any) -> None:
    if not hasattr(datasets, "Json"):
        pytest.skip("this version of datasets has no Json")
    tools = [[{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": ["y"]}]]
    kinds = datasets.Features(tools=datasets.Json(), prompt=datasets.Value("string"))
    made = datasets.Dataset.from_dict({"tools": tools, "prompt": ["p"]}, features=kinds)
    made.save_to_disk(tmp_path / "a")
    assert data_of(tmp_path / "a") == [{"tools": tools[0], "prompt": "p"}]


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _other(path: Path) -> None:
    path.write_text("[1]")


@pytest.mark.parametrize(
    ("pattern", "harm"),
    [
        ("*.arrow", Path.unlink),
        ("*.arrow", _cut),
        ("*.arrow", _empty),
        ("state.json", _empty),
        ("state.json", _other),
        ("state.json", lambda path: path.write_text("{}")),
        ("dataset_info.json", Path.unlink),
        ("dataset_info.json", _other),
        ("dataset_info.json", _cut),
        (
            "dataset_info.json",
            lambda path: path.write_text(path.read_text().replace('"Value"', '"Later"')),
        ),
    ],
)
def test_a_saved_dataset_that_is_damaged(
    tmp_path: Path, datasets: Any, pattern: str, harm: Callable[[Path], Any]
) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "a")
    harm(next((tmp_path / "a").glob(pattern)))
    with pytest.raises(UserError, match=r"is not a whole dataset .* Save it again"):
        data_of(tmp_path / "a")


@pytest.mark.slow
def test_a_saved_dataset_is_not_read_at_once(tmp_path: Path, datasets: Any) -> None:
    rows = {"prompt": [f"{i}" + "x" * 4000 for i in range(5000)]}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "a")
    pool = pytest.importorskip("pyarrow").default_memory_pool()
    before = pool.bytes_allocated()
    records = read_records(tmp_path / "a")
    next(records)  # imports take memory too
    assert pool.bytes_allocated() - before < 4e6, "the table itself is mapped"
    count, peak = peak_while_reading(tmp_path / "a")
    assert count == 5000 and peak < 4e6 < 5000 * 4000


def test_commands_take_a_split(
    tmp_path: Path, datasets: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    both = {"train": datasets.Dataset.from_list(IDS[:3]), "test": datasets.Dataset.from_list(IDS)}
    datasets.DatasetDict(both).save_to_disk(tmp_path / "two")
    target, output = tmp_path / "target", tmp_path / "out.safetensors"
    byte_tokenizer().save_pretrained(target)
    command = ["data", "inspect", str(tmp_path / "two"), "--split", "train", "--format", "json"]
    assert run(command) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 3
    command = ["data", "prepare", str(tmp_path / "two"), "--split", "test", "-o", str(output)]
    assert run([*command, "--target", str(target)]) == 0, capsys.readouterr().err
    assert "5 samples of 5 records" in capsys.readouterr().out
    found = look(output)
    place = tmp_path / "two" / "test"
    wanted = [{"path": str(place), "sha256": sha256_of_table(place)}]
    assert found.samples == 5 and found.metadata["sources"] == wanted
    shutil.rmtree(place)
    assert run([*command, "--target", str(target), "--overwrite"]) == 2
    assert "has no split 'test': it has train" in capsys.readouterr().err
