"""Log-probabilities of tokens, by the raw logits: before bias, masks, penalties and temperature.

Shapes: N rows, V vocabulary, P most likely tokens, X = 2 + 2P columns of a table.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload

import numpy as np
import torch
from torch import Tensor

from peagle.kernels.sampling.probabilities import at_least_float32
from peagle.kernels.upload import upload_ints


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of one token, its rank, and its text if it was decoded, as in vLLM."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs(Mapping[int, Logprob]):
    """The target's log-probability of one token, and the tokens that it thought most likely there.

    As a mapping it has vLLM's form: the `Logprob` of the token, then the ones of `top`, by token
    id.

    Attributes:
        token_id: the token.
        logprob: natural logarithm of its probability, -inf where that is 0.
        rank: 1 + the number of tokens with a greater logit; 1 is the most likely.
        top: (token id, logprob), most likely first, of equal ones the lower id first. The token
            itself is there only if it is among them.
        texts: the text of each of these tokens by its id, where they have been decoded.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]
    texts: Mapping[int, str] = field(default_factory=dict, compare=False, repr=False)

    def __getitem__(self, token_id: int) -> Logprob:
        text = self.texts.get(token_id)
        if token_id == self.token_id:
            return Logprob(self.logprob, self.rank, text)
        for rank, (other, logprob) in enumerate(self.top, 1):
            if other == token_id:
                return Logprob(logprob, rank, text)
        raise KeyError(token_id)

    def __iter__(self) -> Iterator[int]:
        yield self.token_id
        yield from (token_id for token_id, _ in self.top if token_id != self.token_id)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(slots=True, eq=False)
class PromptLogprobs(Sequence[TokenLogprobs | None]):
    """Log-probabilities of a prompt's tokens, None for the first, made when they are asked for.

    The numbers stay in tables. A long prompt has hundreds of thousands of them, and as objects they
    would take seconds to pass to another process.

    Args:
        token_ids: the prompt.
        num_top: how many most likely tokens a position has.

    Attributes:
        tables: float64 [rows, X], as `logprob_table` gives them, of the tokens from the second on.
    """

    token_ids: list[int]
    num_top: int
    tables: list[np.ndarray] = field(default_factory=list)

    def add(self, table: Tensor) -> None:
        """Add the table of the next tokens; waits for the device."""
        self.tables.append(table.cpu().numpy())

    @property
    def has_nan(self) -> bool:
        """Return whether the log-probability of a token is NaN."""
        return any(bool(np.isnan(table[:, 0]).any()) for table in self.tables)

    def __len__(self) -> int:
        return 1 + sum(map(len, self.tables))

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs | None: ...

    @overload
    def __getitem__(self, index: slice) -> list[TokenLogprobs | None]: ...

    def __getitem__(self, index: int | slice) -> TokenLogprobs | list[TokenLogprobs | None] | None:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        index = range(len(self))[index]
        if index == 0:
            return None
        row = index - 1
        for table in self.tables:
            if row < len(table):
                return read_logprobs(table[row].tolist(), self.token_ids[index], self.num_top)
            row -= len(table)
        raise AssertionError("the tables have as many rows as they say")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)


def token_logprobs(
    logits_NV: Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """log softmax(logits) at a token of each row, and the most likely tokens of the row.

    Waits for the device. Takes about three times the memory of the rows in float32. A row that
    holds NaN gets NaN everywhere.

    Args:
        logits_NV: the rows, in any floating type; computed in at least float32.
        token_ids: one a row.
        num_top: how many most likely tokens a row gets, 0 or more; at most V come.
    """
    assert len(logits_NV) == len(token_ids) == len(num_top)
    if not token_ids:
        return []
    tokens_N = upload_ints(token_ids, logits_NV.device)
    table = logprob_table(logits_NV, tokens_N, max(num_top)).tolist()
    return list(map(read_logprobs, table, token_ids, num_top))


def logprob_table(logits_NV: Tensor, tokens_N: Tensor, num_top: int) -> Tensor:
    """Return the results of `token_logprobs` as numbers on the device, without waiting for it.

    Returns float64 [N, X]: the log-probability of the row's token, its rank, the ids of the
    min(num_top, V) most likely tokens, and their log-probabilities.
    """
    logits_NV = at_least_float32(logits_NV)
    logprobs_NV = logits_NV.log_softmax(-1)
    tokens_N1 = tokens_N.unsqueeze(1)
    greater_NV = logits_NV > logits_NV.gather(1, tokens_N1)
    ranks_N1 = greater_NV.sum(-1, keepdim=True) + 1
    ids_NP = _most_likely(logits_NV, min(num_top, logits_NV.shape[1]))
    logprobs = logprobs_NV.gather(1, tokens_N1), logprobs_NV.gather(1, ids_NP)
    columns = logprobs[0], ranks_N1, ids_NP, logprobs[1]
    return torch.cat([column.double() for column in columns], 1)


def read_logprobs(row: Sequence[float], token_id: int, num_top: int) -> TokenLogprobs:
    """Read a row of `logprob_table` on the host, of which the first num_top tokens count."""
    logprob, rank, *tops = row
    ids, values = tops[: len(tops) // 2], tops[len(tops) // 2 :]
    top = list(zip(map(int, ids[:num_top]), values[:num_top], strict=True))
    return TokenLogprobs(token_id, logprob, int(rank), top)


def _most_likely(values_NV: Tensor, count: int) -> Tensor:
    """Return the ids [N, P] of the greatest values; of equal ones the lower id comes first.

    topk alone leaves open which of equal values it takes. Does not wait for the device.
    """
    if count == 0:
        return values_NV[:, :0].long()
    values_NV = values_NV.nan_to_num(-torch.inf, neginf=-torch.inf)  # NaN equals nothing
    last_N1 = values_NV.topk(count, dim=-1).values[:, -1:]
    above_NV, ties_NV = values_NV > last_N1, values_NV == last_N1
    room_N1 = count - above_NV.sum(-1, keepdim=True)
    taken_NV = above_NV | (ties_NV & (ties_NV.cumsum(-1, dtype=torch.int32) <= room_N1))
    # Of numbers that fall from left to right, topk takes the first: no two are equal.
    falling_V = torch.arange(values_NV.shape[1], 0, -1, dtype=torch.int32, device=values_NV.device)
    ids_NP = torch.where(taken_NV, falling_V, 0).topk(count, dim=-1).indices
    # The ids ascend, so a stable sort keeps the lower of equal ones first.
    order_NP = values_NV.gather(1, ids_NP).sort(dim=-1, descending=True, stable=True).indices
    return ids_NP.gather(1, order_NP)
