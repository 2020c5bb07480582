"""Responses of the target: what heads are trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from peagle.errors import UserError


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

    def response_token_counts(self, vocab_size: int) -> Tensor:
        """How often each token occurs in the responses, int64 [vocab_size]."""
        lens = self.start_loc.diff()
        offset = torch.arange(len(self.tokens)) - self.start_loc[:-1].repeat_interleave(lens)
        in_response = offset >= self.prompt_lens.repeat_interleave(lens)
        return torch.bincount(self.tokens[in_response].long(), minlength=vocab_size)


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
