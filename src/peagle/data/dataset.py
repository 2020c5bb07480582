"""Responses of the target as training reads them: flat tokens, and the stores that hold them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from peagle.data.readers import STORE_KEY, Record, metadata_of, read_records, read_side
from peagle.errors import UserError
from peagle.model_folder import sha256_of


class ResponseDataset:
    """Prompts with the target's responses, as flat tokens.

    Attributes:
        tokens: int32, prompt and response of every sequence, one after the other.
        start_loc: int64 [S+1], where each begins.
        prompt_lens: int64 [S].
    """

    def __init__(self, tokens: Tensor, start_loc: Tensor, prompt_lens: Tensor) -> None:
        self.tokens = tokens
        self.start_loc = start_loc
        self.prompt_lens = prompt_lens

    def __len__(self) -> int:
        return len(self.prompt_lens)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.start_loc.diff().max())

    @classmethod
    def load(
        cls,
        path: Path,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        max_length: int,
        tokenizer_sha256: str | None = None,
    ) -> ResponseDataset:
        """Read a .jsonl or .safetensors file; sequences longer than `max_length` are cut there.

        JSONL: one object a line, {"prompt_token_ids", "response_token_ids"} or
        {"prompt", "response"} as text. Safetensors: `tokens` (flat), `sequence_start_loc` [S+1],
        `prompt_lens` [S].

        Raises:
            UserError: the file is missing or malformed (with the line), made with a tokenizer of
                another `tokenizer_sha256`, a token is outside the vocabulary, or no sequence is
                long enough to learn from.
        """
        if not path.is_file():
            raise UserError(f"The data file {str(path)!r} is not there.")
        if path.suffix == ".safetensors":
            dataset, metadata = read_store(path)
        elif path.suffix == ".jsonl":
            pairs = [_ids_of(record, tokenizer) for record in read_records(path)]
            lens = torch.tensor([0] + [len(prompt) + len(response) for prompt, response in pairs])
            flat = [token for pair in pairs for ids in pair for token in ids]
            prompt_lens = torch.tensor([len(prompt) for prompt, _ in pairs])
            dataset = cls(torch.tensor(flat, dtype=torch.int32), lens.cumsum(0), prompt_lens)
            metadata = read_side(path)
        else:
            raise UserError(
                f"The data file {str(path)!r} ends in {path.suffix!r}; "
                "expected .jsonl or .safetensors."
            )
        if tokenizer_sha256 is not None:
            check_tokenizer(path, metadata, tokenizer_sha256)
        dataset = dataset._cut(max_length)
        if len(dataset) == 0:
            raise UserError(
                f"The data file {str(path)!r} has no sequence with at least two response tokens "
                f"within max_length {max_length}."
            )
        largest = int(dataset.tokens.max())
        if largest >= vocab_size or int(dataset.tokens.min()) < 0:
            raise UserError(
                f"The data file {str(path)!r} holds token id {largest}; the target's vocabulary "
                f"ends at {vocab_size - 1}. The responses must come from this target."
            )
        return dataset

    def _cut(self, max_length: int) -> ResponseDataset:
        """Cut long sequences and drop those without a supervised element."""
        lens = self.start_loc.diff().clamp_max(max_length)
        keep = (lens - self.prompt_lens >= 2) & (self.prompt_lens >= 1)
        starts, lens = self.start_loc[:-1][keep], lens[keep]
        start_loc = torch.nn.functional.pad(lens.cumsum(0), (1, 0))
        offset = torch.arange(int(start_loc[-1])) - start_loc[:-1].repeat_interleave(lens)
        tokens = self.tokens[starts.repeat_interleave(lens) + offset]
        return ResponseDataset(tokens, start_loc, self.prompt_lens[keep])

    def response_token_counts(self, vocab_size: int) -> Tensor:
        """Count each token in the responses, int64 [vocab_size]."""
        lens = self.start_loc.diff()
        offset = torch.arange(len(self.tokens)) - self.start_loc[:-1].repeat_interleave(lens)
        in_response = offset >= self.prompt_lens.repeat_interleave(lens)
        return torch.bincount(self.tokens[in_response].long(), minlength=vocab_size)


def _ids_of(record: Record, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Prompt and response of a record, as token ids."""
    ids: list[Any] = [record.data.get(n) for n in ("prompt_token_ids", "response_token_ids")]
    if all(isinstance(x, list) and all(type(i) is int for i in x) for x in ids):
        return ids[0], ids[1]
    texts = [record.data.get(name) for name in ("prompt", "response")]
    if all(isinstance(x, str) for x in texts):
        prompt, response = (tokenizer.encode(str(x), add_special_tokens=False) for x in texts)
        return prompt, response
    raise UserError(
        f"{record.where} is {json.dumps(record.data)[:60]}; expected an object with "
        "prompt_token_ids and response_token_ids (lists of integers), or prompt and response "
        "(text). Conversations become such by `peagle data prepare`."
    )


def read_store(path: Path) -> tuple[ResponseDataset, dict[str, Any]]:
    """Read a .safetensors store of responses and its metadata.

    Raises:
        UserError: it is missing, truncated, or its tensors do not fit together.
    """
    if not path.is_file():
        raise UserError(f"The data file {str(path)!r} is not there.")
    names = ("tokens", "sequence_start_loc", "prompt_lens")
    try:
        with safe_open(path, framework="pt") as reader:
            tensors = {name: reader.get_tensor(name) for name in names}
            note = (reader.metadata() or {}).get(STORE_KEY)
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{str(path)!r} is not a whole store of responses: {error} ({path.stat().st_size} "
            "bytes). It was cut off or is another kind of file; make it again."
        ) from None
    for name, tensor in tensors.items():
        if tensor.dim() != 1 or tensor.is_floating_point() or tensor.dtype == torch.bool:
            raise UserError(
                f"{str(path)!r}: {name} is {tensor.dtype} of shape {tuple(tensor.shape)}; expected "
                "whole numbers in one dimension."
            )
    tokens, start_loc, prompt_lens = (tensors[name].long() for name in names)
    lens = start_loc.diff()
    fits = len(start_loc) == len(prompt_lens) + 1 and int(start_loc[0]) == 0
    fits = fits and int(start_loc[-1]) == len(tokens) and bool((lens >= 0).all())
    if not fits or bool(((prompt_lens < 0) | (prompt_lens > lens)).any()):
        raise UserError(
            f"{str(path)!r} is damaged: {len(tokens)} tokens, {len(prompt_lens)} prompts and "
            f"{len(start_loc)} borders do not fit together. Make it again."
        )
    return ResponseDataset(tokens.int(), start_loc, prompt_lens), metadata_of(note, path)


def read_data(source: Path) -> tuple[Iterator[Record], dict[str, Any]]:
    """Return the records of a store, a file or a folder, and its provenance.

    Raises:
        UserError: as `read_store` and `read_records` do.
    """
    if source.suffix != ".safetensors":
        return read_records(source), read_side(source)
    dataset, metadata = read_store(source)
    return _records_of(dataset, source), metadata


def _records_of(dataset: ResponseDataset, source: Path) -> Iterator[Record]:
    borders = dataset.start_loc.tolist()
    for index, prompt_len in enumerate(dataset.prompt_lens.tolist()):
        ids = dataset.tokens[borders[index] : borders[index + 1]].tolist()
        data = {"prompt_token_ids": ids[:prompt_len], "response_token_ids": ids[prompt_len:]}
        yield Record(data, index + 1, f"{source}, sequence {index + 1}")


def check_tokenizer(source: Path, metadata: dict[str, Any], fingerprint: str) -> None:
    """Refuse data whose provenance names another tokenizer.

    Raises:
        UserError: it does.
    """
    theirs = metadata.get("tokenizer_sha256")
    if theirs is not None and theirs != fingerprint:
        raise UserError(
            f"{str(source)!r} was made with another tokenizer ({str(theirs)[:12]}...) than the "
            f"target's ({fingerprint[:12]}...). Data of different tokenizers cannot be mixed: name "
            "the target that wrote it, or regenerate the responses."
        )


def data_facts(path: Path, dataset: ResponseDataset) -> dict[str, Any]:
    """Describe the part of a file of responses that training or validation uses.

    The name of the file is recorded, not where it lay.
    """
    responses = dataset.start_loc.diff() - dataset.prompt_lens
    return {
        "file": path.name,
        "sha256": sha256_of(path),
        "sequences": len(dataset),
        "tokens": len(dataset.tokens),
        "response_tokens": int(responses.sum()),
    }
