"""Responses of the target, and batches of them.

Shapes: B rows, N positions of a row.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from peagle.errors import UserError


@dataclass(frozen=True, slots=True)
class Batch:
    """Right-padded rows of equal length.

    Attributes:
        tokens_BN: token ids, 0 where padded.
        lengths_B, prompt_lens_B: tokens of each row, and of its prompt.
        max_response_len: bound of the response tokens of a row.
    """

    tokens_BN: Tensor
    lengths_B: Tensor
    prompt_lens_B: Tensor
    max_response_len: int

    def to(self, device: torch.device) -> Batch:
        """The batch on a device."""
        return Batch(
            self.tokens_BN.to(device),
            self.lengths_B.to(device),
            self.prompt_lens_B.to(device),
            self.max_response_len,
        )


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

    @classmethod
    def load(
        cls, path: Path, tokenizer: PreTrainedTokenizerBase, vocab_size: int, max_length: int
    ) -> ResponseDataset:
        """Read a .jsonl or .safetensors file; sequences are cut at `max_length`.

        JSONL: one object a line, {"prompt_token_ids", "response_token_ids"} or
        {"prompt", "response"} as text. Safetensors: `tokens` (flat), `sequence_start_loc` [S+1],
        `prompt_lens` [S].

        Raises:
            UserError: the file is missing or malformed (with the line), a token is outside the
                vocabulary, or no sequence is long enough to learn from.
        """
        if not path.is_file():
            raise UserError(f"The data file {str(path)!r} is not there.")
        if path.suffix == ".safetensors":
            dataset = cls._load_safetensors(path)
        elif path.suffix == ".jsonl":
            dataset = cls._load_jsonl(path, tokenizer)
        else:
            raise UserError(
                f"The data file {str(path)!r} ends in {path.suffix!r}; "
                "expected .jsonl or .safetensors."
            )
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

    @classmethod
    def _load_safetensors(cls, path: Path) -> ResponseDataset:
        try:
            with safe_open(path, framework="pt") as reader:
                names = ("tokens", "sequence_start_loc", "prompt_lens")
                tokens, start_loc, prompt_lens = (reader.get_tensor(name) for name in names)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{str(path)!r} is not a store of responses: {error}.") from None
        # uint16 has few operations in torch.
        return cls(tokens.to(torch.int32), start_loc.long(), prompt_lens.long())

    @classmethod
    def _load_jsonl(cls, path: Path, tokenizer: PreTrainedTokenizerBase) -> ResponseDataset:
        rows: list[list[int]] = []
        prompt_lens: list[int] = []
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                prompt, response = _parse_line(line, tokenizer, f"{path}, line {number}")
                rows.append(prompt + response)
                prompt_lens.append(len(prompt))
        lens = torch.tensor([0] + [len(row) for row in rows])
        flat = [token for row in rows for token in row]
        return cls(torch.tensor(flat, dtype=torch.int32), lens.cumsum(0), torch.tensor(prompt_lens))

    def _cut(self, max_length: int) -> ResponseDataset:
        """Cut long sequences and drop those without a supervised element."""
        lens = self.start_loc.diff().clamp_max(max_length)
        keep = lens - self.prompt_lens >= 2
        keep &= self.prompt_lens >= 1
        if bool(keep.all()) and bool((lens == self.start_loc.diff()).all()):
            return self
        starts, lens = self.start_loc[:-1][keep], lens[keep]
        start_loc = torch.nn.functional.pad(lens.cumsum(0), (1, 0))
        offset = torch.arange(int(start_loc[-1])) - start_loc[:-1].repeat_interleave(lens)
        tokens = self.tokens[starts.repeat_interleave(lens) + offset]
        return ResponseDataset(tokens, start_loc, self.prompt_lens[keep])

    def batch(self, indices: list[int], length_multiple: int) -> Batch:
        """The given sequences as one padded batch."""
        lens = self.start_loc.diff()[indices]
        longest = int(lens.max())
        response = int((lens - self.prompt_lens[indices]).max())
        tokens_BN = torch.zeros(
            len(indices), longest + -longest % length_multiple, dtype=torch.int64
        )
        for row, index in enumerate(indices):
            begin, end = int(self.start_loc[index]), int(self.start_loc[index + 1])
            tokens_BN[row, : end - begin] = self.tokens[begin:end]
        bound = response + -response % length_multiple
        return Batch(tokens_BN, lens, self.prompt_lens[indices], bound)

    def epoch(self, batch_tokens: int, length_multiple: int, seed: int) -> list[list[int]]:
        """Shuffled batches of one epoch: rows of like length, `batch_tokens` tokens with padding.

        A function of its arguments alone, so that a resumed run sees the same batches. What is left
        over of a length is dropped (another epoch brings it), unless it is all there is.
        """
        generator = torch.Generator().manual_seed(seed)
        # Rows of a batch are alike in length and in response length, so that little is padding.
        lens = self.start_loc.diff()
        sizes = torch.stack((lens, lens - self.prompt_lens), dim=1)
        sizes = (sizes + -sizes % length_multiple).tolist()
        by_size: dict[tuple[int, int], list[int]] = {}
        for index in torch.randperm(len(self), generator=generator).tolist():
            by_size.setdefault((sizes[index][0], sizes[index][1]), []).append(index)
        batches: list[list[int]] = []
        for (length, _), indices in sorted(by_size.items()):
            rows = max(1, batch_tokens // length)
            whole = [indices[i : i + rows] for i in range(0, len(indices) - rows + 1, rows)]
            batches += whole or [indices]
        order = torch.randperm(len(batches), generator=generator).tolist()
        return [batches[i] for i in order]

    def response_token_counts(self, vocab_size: int) -> Tensor:
        """How often each token occurs in the responses, int64 [vocab_size]."""
        lens = self.start_loc.diff()
        offset = torch.arange(len(self.tokens)) - self.start_loc[:-1].repeat_interleave(lens)
        in_response = offset >= self.prompt_lens.repeat_interleave(lens)
        return torch.bincount(self.tokens[in_response].long(), minlength=vocab_size)


class BatchStream:
    """Batches by global step, epoch after epoch; `at(step)` is a function of (seed, step)."""

    def __init__(
        self, dataset: ResponseDataset, batch_tokens: int, length_multiple: int, seed: int
    ) -> None:
        self.dataset = dataset
        self.batch_tokens = batch_tokens
        self.length_multiple = length_multiple
        self.seed = seed
        self._cached: tuple[int, list[list[int]]] = (0, self._shuffled(0))
        # Rows are grouped by length, so every epoch has as many batches as the first.
        self.steps_per_epoch = len(self._cached[1])
        self.tokens_per_step = len(dataset.tokens) / self.steps_per_epoch

    def at(self, step: int) -> Batch:
        """The batch of a global step (from 0)."""
        epoch, index = divmod(step, self.steps_per_epoch)
        if self._cached[0] != epoch:
            self._cached = (epoch, self._shuffled(epoch))
        return self.dataset.batch(self._cached[1][index], self.length_multiple)

    def _shuffled(self, epoch: int) -> list[list[int]]:
        seed = self.seed * 1_000_003 + epoch
        return self.dataset.epoch(self.batch_tokens, self.length_multiple, seed)


def _parse_line(
    line: str, tokenizer: PreTrainedTokenizerBase, where: str
) -> tuple[list[int], list[int]]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON: {error}.") from None
    if isinstance(row, dict):
        ids: list[Any] = [row.get(name) for name in ("prompt_token_ids", "response_token_ids")]
        if all(isinstance(x, list) and all(isinstance(i, int) for i in x) for x in ids):
            prompt, response = ids
            return prompt, response
        texts = [row.get(name) for name in ("prompt", "response")]
        if all(isinstance(x, str) for x in texts):
            prompt, response = (tokenizer.encode(str(x), add_special_tokens=False) for x in texts)
            return prompt, response
    raise UserError(
        f"{where} is {line.strip()[:60]!r}; expected an object with prompt_token_ids and "
        "response_token_ids (lists of integers), or prompt and response (text)."
    )
