"""Responses of the target as training reads them: flat tokens, and the stores that hold them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from peagle.data.origins import answer_origins
from peagle.data.readers import (
    STORE_KEY,
    Record,
    UnusableRecord,
    parse_metadata,
    read_records,
    read_side,
)
from peagle.data.samples import masked_ids
from peagle.errors import UserError
from peagle.model_folder import sha256_of
from peagle.models.checkpoint.files import save_tensors

FORMAT_VERSION = 2  # of a store; format 1 has prompt_lens in place of loss_mask


class ResponseDataset:
    """Conversations with the target's answers, as flat tokens: most are a prompt and its response.

    Attributes:
        tokens: int32 [T], all sequences, one after the other.
        start_loc: int64 [S+1], where each begins.
        loss_mask: bool [T], the tokens that the target wrote. A run of them within a sequence is an
            answer; all tokens before it are its prompt.
    """

    def __init__(self, tokens: Tensor, start_loc: Tensor, loss_mask: Tensor) -> None:
        self.tokens = tokens
        self.start_loc = start_loc
        self.loss_mask = loss_mask

    @classmethod
    def of_prompts(cls, tokens: Tensor, start_loc: Tensor, prompt_lens: Tensor) -> ResponseDataset:
        """Make a dataset of prompts (int64 [S], their lengths) with one response each."""
        response_T = torch.arange(len(tokens)) >= _repeat(start_loc[:-1] + prompt_lens, start_loc)
        return cls(tokens, start_loc, response_T)

    def __len__(self) -> int:
        return len(self.start_loc) - 1

    @property
    def longest(self) -> int:
        """Return the number of tokens of the longest sequence."""
        return int(self.start_loc.diff().max())

    @property
    def prompt_lens(self) -> Tensor:
        """Return the number of tokens of each sequence before its first answer, int64 [S]."""
        answered = torch.cat((self.loss_mask.nonzero().flatten(), self.start_loc[-1:]))
        first = answered[torch.searchsorted(answered, self.start_loc[:-1])]
        return first.minimum(self.start_loc[1:]) - self.start_loc[:-1]

    @property
    def has_one_answer_each(self) -> bool:
        """Return whether every sequence is a prompt and one response, up to its end."""
        answers = self.start_loc.diff() - self.prompt_lens
        return bool((answers == _sums(self.loss_mask, self.start_loc)).all())

    @property
    def num_responses(self) -> int:
        """Return the number of answers of all sequences."""
        return len(self._answers()[0])

    @cached_property
    def graded(self) -> Tensor:
        """Return which positions grade an element: the next one is of the same answer; bool [T]."""
        graded_T = self.loss_mask.clone()
        graded_T[:-1] &= self.loss_mask[1:]
        graded_T[self.start_loc[1:] - 1] = False
        return graded_T

    @property
    def num_graded(self) -> Tensor:
        """Return the number of positions of each sequence that grade an element, int64 [S]."""
        return _sums(self.graded, self.start_loc)

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

        JSONL: one object a line, {"prompt_token_ids", "response_token_ids"}, {"input_ids",
        "loss_mask"} or {"prompt", "response"} as text. Safetensors: `tokens` (flat),
        `sequence_start_loc` [S+1], and `loss_mask` (flat) or `prompt_lens` [S].

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
            rows = [_masked_ids(record, tokenizer) for record in read_records(path)]
            lens = torch.tensor([0, *(len(ids) for ids, _ in rows)])
            tokens = torch.tensor([i for ids, _ in rows for i in ids], dtype=torch.int32)
            mask = torch.tensor([on for _, mask in rows for on in mask], dtype=torch.bool)
            dataset, metadata = cls(tokens, lens.cumsum(0), mask), read_side(path)
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
        """Cut long sequences, and leave out tokens from which nothing is learned.

        That is an answer without a prompt or of less than two tokens, all behind the last answer
        of a sequence, and a sequence without one.
        """
        begins, ends = self._answers()
        sequence = torch.searchsorted(self.start_loc, begins, right=True) - 1
        first = self.start_loc[sequence]
        ends = ends.minimum(first + max_length)
        keep = (ends - begins >= 2) & (begins > first)
        begins, ends, sequence = begins[keep], ends[keep], sequence[keep]
        stops = self.start_loc[:-1].scatter_reduce(0, sequence, ends, "amax")
        lens = stops - self.start_loc[:-1]
        starts, lens = self.start_loc[:-1][lens > 0], lens[lens > 0]
        start_loc = torch.nn.functional.pad(lens.cumsum(0), (1, 0))
        kept = torch.arange(int(start_loc[-1])) + _repeat(starts - start_loc[:-1], start_loc)
        borders = torch.zeros(len(self.tokens) + 1, dtype=torch.int8)
        borders[begins], borders[ends] = 1, -1
        mask = borders.cumsum(0, dtype=torch.int8).bool()
        return ResponseDataset(self.tokens[kept], start_loc, mask[kept])

    def _answers(self) -> tuple[Tensor, Tensor]:
        """Return where each answer begins and ends in the flat tokens, both int64 [R]."""
        is_begin, is_end = self.loss_mask.clone(), self.loss_mask.clone()
        within = torch.ones(len(self.loss_mask) + 1, dtype=torch.bool)
        within[self.start_loc] = False  # a sequence begins: no answer goes on there
        goes_on = within[1:-1] & self.loss_mask[1:] & self.loss_mask[:-1]
        is_begin[1:] &= ~goes_on
        is_end[:-1] &= ~goes_on
        return is_begin.nonzero().flatten(), is_end.nonzero().flatten() + 1

    def response_token_counts(self, vocab_size: int) -> Tensor:
        """Count each token in the responses, int64 [vocab_size]."""
        return torch.bincount(self.tokens[self.loss_mask].long(), minlength=vocab_size)


def _repeat(values: Tensor, start_loc: Tensor) -> Tensor:
    """Repeat the value of each sequence, once for each of its tokens."""
    return values.repeat_interleave(start_loc.diff())


def _sums(flags_T: Tensor, start_loc: Tensor) -> Tensor:
    """Return the number of true flags of each sequence."""
    return torch.nn.functional.pad(flags_T.cumsum(0), (1, 0))[start_loc].diff()


def _masked_ids(
    record: Record, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], Sequence[int]]:
    """Return a record's token ids, and for each whether the target wrote it."""
    if record.fault is not None or "input_ids" in record.data:
        try:
            record.check()
            return masked_ids(record)
        except UnusableRecord as error:
            raise UserError(f"{record.where}: {error.why.reason}: {error.why.detail}.") from None
    ids: list[Any] = [record.data.get(n) for n in ("prompt_token_ids", "response_token_ids")]
    if not all(isinstance(x, list) and all(type(i) is int for i in x) for x in ids):
        ids = [record.data.get(name) for name in ("prompt", "response")]
        if not all(isinstance(x, str) for x in ids):
            raise UserError(
                f"{record.where} is {json.dumps(record.data)[:60]}; expected an object with "
                "prompt_token_ids and response_token_ids (lists of integers), input_ids and "
                "loss_mask, or prompt and response (text). Conversations become such by "
                "`peagle data prepare`."
            )
        ids = [tokenizer.encode(x, add_special_tokens=False) for x in ids]
    prompt, response = ids
    return prompt + response, [0] * len(prompt) + [1] * len(response)


def row_of(ids: list[int], loss_mask: Sequence[int]) -> dict[str, list[int]]:
    """Return the line of a JSONL file for a sequence, as `ResponseDataset.load` reads it."""
    mask = bytes(loss_mask)
    prompt_len = len(mask) - mask.count(1)
    if mask.endswith(b"\1" * mask.count(1)):
        return {"prompt_token_ids": ids[:prompt_len], "response_token_ids": ids[prompt_len:]}
    return {"input_ids": ids, "loss_mask": list(mask)}


def write_store(path: Path, dataset: ResponseDataset, metadata: dict[str, Any]) -> None:
    """Write a .safetensors store of responses and its metadata.

    Where every sequence is a prompt and one response, the store has format 1, which every peagle
    reads.
    """
    tensors = {"tokens": dataset.tokens, "sequence_start_loc": dataset.start_loc}
    if dataset.has_one_answer_each:
        tensors["prompt_lens"] = dataset.prompt_lens.int()
    else:
        tensors["loss_mask"] = dataset.loss_mask
        metadata = {**metadata, "format_version": FORMAT_VERSION}
    save_tensors(path, tensors, {STORE_KEY: json.dumps(metadata)})


def read_store(path: Path) -> tuple[ResponseDataset, dict[str, Any]]:
    """Read a .safetensors store of responses and its metadata.

    Raises:
        UserError: it is missing, truncated, or its tensors do not fit together.
    """
    if not path.is_file():
        raise UserError(f"The data file {str(path)!r} is not there.")
    try:
        with safe_open(path, framework="pt") as reader:
            metadata = parse_metadata((reader.metadata() or {}).get(STORE_KEY), path)
            _check_version(path, metadata)
            last = "loss_mask" if "loss_mask" in set(reader.keys()) else "prompt_lens"
            names = ("tokens", "sequence_start_loc", last)
            tensors = {name: reader.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{str(path)!r} is not a whole store of responses: {error} ({path.stat().st_size} "
            "bytes). It was cut off or is another kind of file; make it again."
        ) from None
    for name, tensor in tensors.items():
        is_mask = name == "loss_mask"
        is_whole = not tensor.is_floating_point() and (tensor.dtype == torch.bool) == is_mask
        if tensor.dim() != 1 or not is_whole:
            raise UserError(
                f"{str(path)!r}: {name} is {tensor.dtype} of shape {tuple(tensor.shape)}; expected "
                f"{'true and false' if is_mask else 'whole numbers'} in one dimension."
            )
    tokens, start_loc, said = tensors["tokens"].int(), *(tensors[name] for name in names[1:])
    start_loc = start_loc.long()
    lens = start_loc.diff()
    fits = len(start_loc) > 0 and int(start_loc[0]) == 0
    fits = fits and int(start_loc[-1]) == len(tokens) and bool((lens >= 0).all())
    if last == "loss_mask":
        fits = fits and len(said) == len(tokens)
    else:
        fits = fits and len(said) == len(lens) and bool(((said >= 0) & (said <= lens)).all())
    if not fits:
        raise UserError(
            f"{str(path)!r} is damaged: {len(tokens)} tokens, {len(start_loc)} borders and "
            f"{len(said)} values of {last} do not fit together. Make it again."
        )
    make = ResponseDataset if last == "loss_mask" else ResponseDataset.of_prompts
    return make(tokens, start_loc, said), metadata


def _check_version(path: Path, metadata: dict[str, Any]) -> None:
    version = metadata.get("format_version", 1)
    if version not in range(1, FORMAT_VERSION + 1):
        raise UserError(
            f"{str(path)!r} has format_version {version!r}; this peagle reads up to "
            f"{FORMAT_VERSION}. Upgrade peagle, or prepare the data again."
        )


def read_data(source: Path, cipher: Any = None) -> tuple[Iterator[Record], dict[str, Any]]:
    """Return the records of a store, a file or a folder, and its provenance.

    `cipher` reads encrypted records, see `read_records`.

    Raises:
        UserError: as `read_store` and `read_records` do.
    """
    if source.suffix != ".safetensors":
        return read_records(source, cipher), read_side(source)
    dataset, metadata = read_store(source)
    return _records_of(dataset, source), metadata


def _records_of(dataset: ResponseDataset, source: Path) -> Iterator[Record]:
    for index, (begin, end) in enumerate(pairwise(dataset.start_loc.tolist()), start=1):
        ids, mask = dataset.tokens[begin:end].tolist(), dataset.loss_mask[begin:end].tolist()
        yield Record(row_of(ids, mask), index, f"{source}, sequence {index}")


def check_tokenizer(source: Path | str, metadata: Mapping[str, Any], fingerprint: str) -> None:
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

    The name of the file is recorded, not its folder; `origins` are the origins of the answers
    (`peagle.data.origins`).
    """
    return {
        "file": path.name,
        "sha256": sha256_of(path),
        "sequences": len(dataset),
        "tokens": len(dataset.tokens),
        "responses": dataset.num_responses,
        "response_tokens": int(dataset.loss_mask.sum()),
        "origins": [origin.model_dump() for origin in answer_origins(_provenance(path))],
    }


def _provenance(path: Path) -> dict[str, Any]:
    if path.suffix != ".safetensors":
        return read_side(path)
    with safe_open(path, framework="pt") as reader:
        return parse_metadata((reader.metadata() or {}).get(STORE_KEY), path)
