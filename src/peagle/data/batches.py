"""Batches: sequences packed into rows of one length, in an order that the seed decides.

Shapes: B rows, N positions of a row, T tokens of all sequences of a batch.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from peagle.data.dataset import ResponseDataset
from peagle.errors import UserError
from peagle.models.elements import PADDING_ROW, supervised_depth

# Sequences packed together: enough to fill rows well, few enough to keep their order random.
_PACKED_TOGETHER = 1024
# The bound of supervised anchors is one of this many shares of a row, since each is a shape of its
# own to compile.
_ANCHOR_SHARES = 8


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a sequence of the dataset: `length` tokens from `start` of a row."""

    sequence: int
    row: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of equal length, each with one or more sequences (documents) and padding at its end.

    Attributes:
        tokens_BN: token ids, 0 where padded.
        documents_BN: number of the document within its row, -1 where padded.
        deepest_BN: deepest supervised element of each anchor, -1 where none counts.
        places: which sequence lies where.
        max_anchors: bound of the supervised anchors of a row.
        first_row, num_rows: which rows of the whole batch these are, where several processes share
            it.
        layout: elements to compute (`partition.PartitionLayout`), if they are chosen already.
    """

    tokens_BN: Tensor
    documents_BN: Tensor
    deepest_BN: Tensor
    places: tuple[Place, ...]
    max_anchors: int
    first_row: int
    num_rows: int
    layout: Any = None

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens without padding."""
        return sum(place.length for place in self.places)


def make_batch(
    dataset: ResponseDataset,
    rows: Sequence[Sequence[int]],
    length: int,
    *,
    first_row: int = 0,
    num_rows: int | None = None,
) -> Batch:
    """Put the sequences of each row, which fit into `length` tokens, side by side."""
    places: list[Place] = []
    sizes = dataset.start_loc.diff()
    for row, indices in enumerate(rows):
        start = 0
        for index in indices:
            places.append(Place(index, row, start, int(sizes[index])))
            start += places[-1].length
        assert start <= length, "rows hold what fits into them"
    numbers = torch.tensor([i for indices in rows for i in range(len(indices))])
    row, start, size, source = (
        torch.tensor(column)
        for column in (
            [place.row for place in places],
            [place.start for place in places],
            [place.length for place in places],
            dataset.start_loc[[place.sequence for place in places]].tolist(),
        )
    )
    # One entry a token from here on.
    first_T = (size.cumsum(0) - size).repeat_interleave(size)
    offset_T = torch.arange(int(size.sum())) - first_T
    at_T = (row * length + start).repeat_interleave(size) + offset_T
    source_T = source.repeat_interleave(size) + offset_T
    shape = (len(rows), length)
    tokens = torch.zeros(shape, dtype=torch.int64)
    tokens.view(-1)[at_T] = dataset.tokens[source_T].long()
    documents = torch.full(shape, PADDING_ROW)
    documents.view(-1)[at_T] = numbers.repeat_interleave(size)
    assert not dataset.loss_mask[source].any(), "a sequence begins with a prompt"
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    loss_mask.view(-1)[at_T] = dataset.loss_mask[source_T]
    deepest = supervised_depth(loss_mask)
    return Batch(
        tokens,
        documents,
        deepest,
        tuple(places),
        max_anchors=anchor_bound(int((deepest >= 0).sum(1).max()), length),
        first_row=first_row,
        num_rows=len(rows) if num_rows is None else num_rows,
    )


def anchor_bound(anchors: int, length: int) -> int:
    """Return the `Batch.max_anchors` of rows with at most so many supervised anchors."""
    share = max(1, length // _ANCHOR_SHARES)
    return min(length, anchors + -anchors % share)


def fill_rows(
    lengths: Sequence[int], row_length: int, generator: torch.Generator
) -> list[list[int]]:
    """Pack sequences into rows of up to `row_length` tokens: shuffled, then best fit decreasing.

    Each sequence is in exactly one row. Only neighbours in the shuffled order share a row.
    """
    order = torch.randperm(len(lengths), generator=generator).tolist()
    packed: list[list[int]] = []
    for begin in range(0, len(order), _PACKED_TOGETHER):
        group = sorted(order[begin : begin + _PACKED_TOGETHER], key=lambda i: -lengths[i])
        rows: list[list[int]] = []
        room: list[tuple[int, int]] = []  # (tokens left, row), ascending
        for index in group:
            at = bisect_left(room, (lengths[index], -1))
            if at == len(room):
                rows.append([])
                left, row = row_length, len(rows) - 1
            else:
                left, row = room.pop(at)
            rows[row].append(index)
            insort(room, (left - lengths[index], row))
        packed += rows
    return packed


def by_length(
    lengths: Sequence[int], batch_tokens: int, length_multiple: int
) -> list[tuple[int, list[list[int]]]]:
    """Return (row length, rows) of batches with each sequence once, one a row, longest last."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    batches: list[tuple[int, list[list[int]]]] = []
    rows: list[list[int]] = []
    size = 0  # of the longest so far
    for index in order:
        grown = lengths[index] + -lengths[index] % length_multiple
        if rows and grown * (len(rows) + 1) > batch_tokens:
            batches.append((size, rows))
            rows = []
        rows.append([index])
        size = grown
    return [*batches, (size, rows)] if rows else batches


class BatchStream:
    """Packed batches by global step, epoch after epoch; `at(step)` is a function of (seed, step).

    Which sequences share a row is decided once; each epoch has the rows in another order. Rows left
    over at the end of an epoch are dropped (another epoch brings them), unless there are no others.
    A batch has `batch_tokens` tokens, padding included, and at least one row; process `rank` of
    `world_size` makes its share of the rows, which are padded to a multiple of `length_multiple`.

    Raises:
        UserError: the processes cannot share the rows of a batch evenly.

    Attributes:
        row_length: N, the longest sequence, padded.
        num_rows: rows of a whole batch.
        steps_per_epoch, tokens_per_step: the latter a mean, without padding.
        fill: share of the positions that hold tokens.
        anchors: supervised anchors of every row.
        is_packed: some row holds several sequences.
    """

    def __init__(
        self,
        dataset: ResponseDataset,
        batch_tokens: int,
        length_multiple: int,
        seed: int,
        *,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.dataset = dataset
        self.seed = seed
        self.rank, self.world_size = rank, world_size
        lengths = dataset.start_loc.diff().tolist()
        longest = max(lengths)
        self.row_length = longest + -longest % length_multiple
        self._rows = fill_rows(lengths, self.row_length, torch.Generator().manual_seed(seed))
        self.num_rows = min(max(1, batch_tokens // self.row_length), len(self._rows))
        self._require_shares(batch_tokens)
        self.steps_per_epoch = max(1, len(self._rows) // self.num_rows)
        self.fill = len(dataset.tokens) / (len(self._rows) * self.row_length)
        self.tokens_per_step = self.fill * self.num_rows * self.row_length
        of_sequence = dataset.num_graded.tolist()
        self.anchors = [sum(of_sequence[i] for i in row) for row in self._rows]
        self.is_packed = any(len(row) > 1 for row in self._rows)
        self._epoch = -1
        self._order: list[int] = []

    def _require_shares(self, batch_tokens: int) -> None:
        """Refuse rows that the processes cannot share evenly: their number changes no batch."""
        missing = -self.num_rows % self.world_size
        if not missing:
            return
        most, rows = len(self._rows), self.num_rows + missing
        if rows > most:
            rows -= self.world_size
        advice = f"set data.batch_tokens to {rows * self.row_length}, which holds {rows} rows"
        if most < self.world_size:
            advice = f"all of the data fills {most} rows: start at most {most} processes"
        raise UserError(
            f"data.batch_tokens {batch_tokens} holds {self.num_rows} rows of {self.row_length} "
            f"tokens, and {self.world_size} processes cannot share these evenly; {advice}."
        )

    def at(self, step: int) -> Batch:
        """Return the batch of a global step (from 0), or this process's share."""
        epoch, index = divmod(step, self.steps_per_epoch)
        if self._epoch != epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._order = torch.randperm(len(self._rows), generator=generator).tolist()
            self._epoch = epoch
        share = self.num_rows // self.world_size
        first = self.rank * share
        begin = index * self.num_rows + first
        # An epoch shorter than a batch goes round.
        chosen = (self._order[i % len(self._order)] for i in range(begin, begin + share))
        return self._make(chosen, first)

    def largest(self) -> Batch:
        """Return one process's share of a batch whose rows have the most supervised anchors."""
        order = sorted(range(len(self._rows)), key=lambda row: -self.anchors[row])
        return self._make(order[: self.num_rows // self.world_size], 0)

    def _make(self, chosen: Iterable[int], first_row: int) -> Batch:
        rows = [self._rows[row] for row in chosen]
        return make_batch(
            self.dataset, rows, self.row_length, first_row=first_row, num_rows=self.num_rows
        )


class ValidationStream:
    """At most `limit` batches with one sequence a row, for walking responses as serving does."""

    def __init__(
        self, dataset: ResponseDataset, batch_tokens: int, length_multiple: int, limit: int
    ) -> None:
        self.dataset = dataset
        lengths = dataset.start_loc.diff().tolist()
        batches = by_length(lengths, batch_tokens, length_multiple)
        # Spread over all lengths.
        count = min(limit, len(batches))
        self._batches = [batches[(2 * i + 1) * len(batches) // (2 * count)] for i in range(count)]

    def __len__(self) -> int:
        return len(self._batches)

    def at(self, index: int) -> Batch:
        """Return the batch of an index."""
        length, rows = self._batches[index]
        return make_batch(self.dataset, rows, length)


# ---- to a GPU ----


T = TypeVar("T")
# Metadata of a dataclass field whose tensor stays on the host.
ON_HOST = {"on_host": True}


def map_tensors(thing: T, function: Callable[[Tensor], Tensor]) -> T:
    """Return a copy of `thing` with the function applied to every tensor not marked `ON_HOST`."""
    value: Any = thing
    if isinstance(value, Tensor):
        value = function(value)
    elif isinstance(value, tuple):
        value = tuple(map_tensors(item, function) for item in value)
    elif is_dataclass(value) and not isinstance(value, type):
        changed = {
            field.name: map_tensors(getattr(value, field.name), function)
            for field in fields(value)
            if not field.metadata.get("on_host")
        }
        value = replace(value, **changed)
    return cast(T, value)


def moved(thing: T, device: torch.device) -> T:
    """Copy to a device; copies from pinned memory are asynchronous."""
    return map_tensors(thing, lambda tensor: tensor.to(device, non_blocking=True))


def pinned(thing: T) -> T:
    """Return a copy in page-locked memory, for asynchronous copies to a GPU."""
    return map_tensors(thing, lambda x: x if x.is_pinned() or x.is_cuda else x.pin_memory())


def owned_by(thing: T, stream: torch.cuda.Stream) -> T:
    """Keep the memory of `thing` until `stream` has done its work on it."""

    def record(tensor: Tensor) -> Tensor:
        if tensor.is_cuda:
            tensor.record_stream(stream)
        return tensor

    return map_tensors(thing, record)
