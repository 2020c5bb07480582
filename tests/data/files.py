"""Small files of training data."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from peagle.data.dataset import ResponseDataset
from peagle.data.feature_writer import FeatureWriter
from peagle.data.features import FeatureStore, StoredDtype, StoreFacts
from peagle.models.target import TargetModel


def ids(prompt: list[int], response: list[int]) -> dict[str, list[int]]:
    """A record of token ids."""
    return {"prompt_token_ids": prompt, "response_token_ids": response}


def write(path: Path, *rows: Any) -> Path:
    """A .jsonl file; text is a line as it stands."""
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


AUX, H = (1, 2, 3), 32


SMALL = 12_000  # bytes of a shard: some sequences each


RARE = 317  # a token of one sequence alone


def make_dataset(seed: int = 0) -> ResponseDataset:
    """Sequences of unlike lengths, two with several answers; 5 has the rare token at position 6."""
    generator = torch.Generator().manual_seed(seed)
    lens = torch.tensor([9, 30, 4, 17, 30, 12, 3, 25, 8, 41, 5, 17])
    prompt_lens = torch.tensor([3, 12, 1, 14, 1, 4, 1, 10, 6, 7, 3, 9])
    tokens = torch.randint(2, 300, (int(lens.sum()),), generator=generator, dtype=torch.int32)
    start_loc = torch.nn.functional.pad(lens.cumsum(0), (1, 0))
    tokens[int(start_loc[5]) + 6] = RARE
    dataset = ResponseDataset.of_prompts(tokens, start_loc, prompt_lens)
    for sequence, begin, end in ((7, 16, 18), (9, 20, 21), (9, 29, 36)):
        dataset.loss_mask[start_loc[sequence] + begin : start_loc[sequence] + end] = False
    return dataset


def dataset_of(rows: Sequence[tuple[list[int], Sequence[int]]]) -> ResponseDataset:
    """Of token ids and, for each, whether it is supervised."""
    lens = torch.tensor([0, *(len(ids) for ids, _ in rows)])
    tokens = torch.tensor([token for ids, _ in rows for token in ids], dtype=torch.int32)
    mask = torch.tensor([on for _, mask in rows for on in mask], dtype=torch.bool)
    return ResponseDataset(tokens, lens.cumsum(0), mask)


def separate(rows: Sequence[tuple[list[int], Sequence[int]]]) -> list[tuple[list[int], list[int]]]:
    """Each answer behind its prompt, in a row of its own."""
    found = []
    for ids, mask in rows:
        for end in range(1, len(ids) + 1):
            if mask[end - 1] and (end == len(ids) or not mask[end]):
                begin = end
                while begin and mask[begin - 1]:
                    begin -= 1
                found.append((ids[:end], [0] * begin + [1] * (end - begin)))
    return found


def writer_of(
    folder: Path,
    dataset: ResponseDataset,
    model: Any,
    dtype: StoredDtype = "bf16",
    *,
    shard_bytes: int = SMALL,
    aux: tuple[int, ...] = AUX,
) -> FeatureWriter:
    facts = StoreFacts.of(dataset, model, aux, dtype, "float32", shard_bytes)
    return FeatureWriter(folder, dataset, facts)


def written(
    folder: Path,
    dataset: ResponseDataset,
    model: TargetModel,
    dtype: StoredDtype = "bf16",
    **options: Any,
) -> FeatureStore:
    """A store, computed one sequence at a time."""
    writer_of(folder, dataset, model, dtype, **options).write(model, batch_tokens=1)
    return FeatureStore.open(folder, dataset, model, AUX)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
