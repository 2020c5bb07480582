"""The torch backend against attention written out query by query, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peagle.attention import AttentionMetadata, LayerKVCache, TorchAttention
from peagle.attention.torch_backend import DenseCausalAttention

FLOAT = torch.float64


def attend_one(
    query_hd: Tensor,
    keys_SHd: Tensor,
    values_SHd: Tensor,
    position: int,
    window: int | None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    start: int = 0,
) -> Tensor:
    """One query over the keys it may see: softmax(q . k * scale) v, head by head.

    A softcap bends the scores; a sink is one more score, for a value of zero; keys before `start`
    are hidden.
    """
    oldest = start if window is None else max(start, position - window + 1)
    keys_SHd, values_SHd = keys_SHd[oldest : position + 1], values_SHd[oldest : position + 1]
    heads = query_hd.shape[0]
    group = heads // keys_SHd.shape[1]
    out = torch.empty_like(query_hd)
    for head in range(heads):
        scores = keys_SHd[:, head // group] @ query_hd[head] * SCALING
        values = values_SHd[:, head // group]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat((scores, sinks[head : head + 1]))
            values = torch.cat((values, torch.zeros_like(values[:1])))
        out[head] = torch.softmax(scores, 0) @ values
    return out


SCALING = 0.37


@dataclass
class Case:
    """Sequences with `past` cached tokens and `new` ones to run, over shuffled blocks."""

    past: list[int]
    new: list[int]
    block_size: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    seed: int = 0
    spare_blocks: int = 2
    starts: list[int] | None = None

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=FLOAT)

        self.lens = [p + n for p, n in zip(self.past, self.new, strict=True)]
        kv = (self.num_kv_heads, self.head_dim)
        self.keys = [normal(length, *kv) for length in self.lens]
        self.values = [normal(length, *kv) for length in self.lens]
        self.query_THd = normal(sum(self.new), self.num_heads, self.head_dim)
        counts = [-(-length // self.block_size) for length in self.lens]
        num_blocks = sum(counts) + self.spare_blocks
        shuffle = torch.Generator().manual_seed(self.seed)  # the same for all sizes of heads
        order = torch.randperm(num_blocks, generator=shuffle).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in counts]
        self.cache = LayerKVCache(num_blocks, self.block_size, *kv, FLOAT, torch.device("cpu"))
        # Whatever was in the blocks before must not matter.
        self.cache.keys.copy_(100 * normal(*self.cache.keys.shape))
        self.cache.values.copy_(100 * normal(*self.cache.values.shape))
        for b, past in enumerate(self.past):
            for position in range(past):
                block, offset = self.place(b, position)
                self.cache.keys[block, offset] = self.keys[b][position]
                self.cache.values[block, offset] = self.values[b][position]

    def place(self, sequence: int, position: int) -> tuple[int, int]:
        return self.tables[sequence][position // self.block_size], position % self.block_size

    def slot(self, sequence: int, position: int) -> int:
        block, offset = self.place(sequence, position)
        return block * self.block_size + offset

    def metadata(self) -> AttentionMetadata:
        width = max(map(len, self.tables))
        slots = [
            self.slot(b, past + i)
            for b, (past, new) in enumerate(zip(self.past, self.new, strict=True))
            for i in range(new)
        ]
        return AttentionMetadata(
            query_start_loc=torch.tensor(list(accumulate(self.new, initial=0))),
            seq_lens_B=torch.tensor(self.lens),
            block_tables_BM=torch.tensor([t + [0] * (width - len(t)) for t in self.tables]),
            slots_T=torch.tensor(slots),
            max_query_len=max(self.new),
            max_seq_len=max(self.lens),
            context_starts_B=None if self.starts is None else torch.tensor(self.starts),
        )

    def new_kv(self) -> tuple[Tensor, Tensor]:
        pairs = list(zip(self.past, self.keys, self.values, strict=True))
        return torch.cat([k[p:] for p, k, _ in pairs]), torch.cat([v[p:] for p, _, v in pairs])

    def run(
        self,
        window: int | None = None,
        metadata: AttentionMetadata | None = None,
        **special: Any,
    ) -> Tensor:
        prepared = TorchAttention().prepare(metadata or self.metadata())
        return prepared(
            self.query_THd,
            *self.new_kv(),
            self.cache,
            scaling=SCALING,
            sliding_window=window,
            **special,
        )

    def sinks(self) -> Tensor:
        return torch.linspace(-3.0, 3.0, self.num_heads, dtype=FLOAT)

    def reference(self, window: int | None = None, **special: Any) -> Tensor:
        rows, first = [], 0
        starts = self.starts or [0] * len(self.past)
        for past, new, keys, values, start in zip(
            self.past, self.new, self.keys, self.values, starts, strict=True
        ):
            for i in range(new):
                query_hd, at = self.query_THd[first + i], past + i
                rows.append(attend_one(query_hd, keys, values, at, window, **special, start=start))
            first += new
        return torch.stack(rows)


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    sequences = draw(
        st.lists(st.tuples(st.integers(0, 13), st.integers(1, 7)), min_size=1, max_size=4)
    )
    num_kv_heads = draw(st.sampled_from([1, 2, 3]))
    return Case(
        past=[past for past, _ in sequences],
        new=[new for _, new in sequences],
        block_size=draw(st.integers(1, 6)),
        num_heads=num_kv_heads * draw(st.sampled_from([1, 2, 4])),
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from([2, 8])),
        seed=draw(st.integers(0, 99)),
    )


def test_scores_beyond_what_exp_can_take() -> None:
    case = Case([7, 3], [4, 2])
    case.query_THd *= 1e4
    for sinks in (case.sinks() * 1e4, case.sinks() - 1e4):
        assert_same(case.run(sinks=sinks), case.reference(sinks=sinks))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    case = Case([7, 3], [4, 2])
    query, (key, value), cache = case.query_THd, case.new_kv(), case.cache
    special = {"softcap": 5.0, "sinks": case.sinks()}
    cache.keys, cache.values = cache.keys.to(dtype), cache.values.to(dtype)
    out = TorchAttention().prepare(case.metadata())(
        query.to(dtype), key.to(dtype), value.to(dtype), cache, scaling=SCALING, **special
    )
    assert out.dtype == dtype
    torch.testing.assert_close(
        out.to(FLOAT), case.reference(**special), rtol=0, atol=8 * torch.finfo(dtype).eps
    )


@pytest.mark.parametrize("past, new", [([9], [1]), ([9], [4]), ([0], [9]), ([3, 8], [4, 4])])
def test_batches_without_padding(past: list[int], new: list[int]) -> None:
    case = Case(past, new)
    assert_same(case.run(), case.reference())


def test_layers_with_and_without_a_window_share_one_pass() -> None:
    case = Case([7, 3, 12], [4, 1, 6])
    prepared = TorchAttention().prepare(case.metadata())
    for window in (None, 3, None, 5, 3):
        out = prepared(
            case.query_THd, *case.new_kv(), case.cache, scaling=SCALING, sliding_window=window
        )
        assert_same(out, case.reference(window))


def test_layers_of_one_pass_may_differ_in_heads_and_sizes() -> None:
    cases = [Case([7, 3], [4, 1], num_kv_heads=h, head_dim=d) for h, d in [(2, 8), (1, 16), (4, 2)]]
    prepared = TorchAttention().prepare(cases[0].metadata())
    for case in cases:
        assert case.tables == cases[0].tables
        out = prepared(case.query_THd, *case.new_kv(), case.cache, scaling=SCALING)
        assert_same(out, case.reference())


def test_writes_its_keys_and_values_and_nothing_else() -> None:
    case = Case([7, 3, 12], [4, 1, 6])
    before_keys, before_values = case.cache.keys.clone(), case.cache.values.clone()
    case.run()
    written = {(b, p) for b, past in enumerate(case.past) for p in range(past, case.lens[b])}
    for b, position in written:
        place = case.place(b, position)
        assert torch.equal(case.cache.keys[place], case.keys[b][position])
        assert torch.equal(case.cache.values[place], case.values[b][position])
        before_keys[place] = case.keys[b][position]
        before_values[place] = case.values[b][position]
    assert torch.equal(case.cache.keys, before_keys)
    assert torch.equal(case.cache.values, before_values)


def test_padding_slots_write_only_to_the_scrap_block() -> None:
    case = Case([7, 3], [4, 2])
    metadata = case.metadata()
    slots = metadata.slots_T.clone()
    slots[torch.tensor([2, 3])] = -1  # the last two queries of the first sequence
    padded = AttentionMetadata(
        query_start_loc=metadata.query_start_loc,
        seq_lens_B=metadata.seq_lens_B,
        block_tables_BM=metadata.block_tables_BM,
        slots_T=slots,
        max_query_len=metadata.max_query_len,
        max_seq_len=metadata.max_seq_len,
    )
    before_keys, before_values = case.cache.keys.clone(), case.cache.values.clone()
    out = case.run(metadata=padded)
    changed = (case.cache.keys != before_keys).any(-1).any(-1)
    changed |= (case.cache.values != before_values).any(-1).any(-1)
    expected = {case.place(0, 7), case.place(0, 8), case.place(1, 3), case.place(1, 4)}
    real = changed[:-1].nonzero().tolist()  # the last block is scrap
    assert {tuple(place) for place in real} == expected
    # Queries before the padded ones, and the other sequence, are untouched by it.
    kept = torch.tensor([0, 1, 4, 5])
    assert_same(out[kept], case.reference()[kept])


@settings(deadline=None, max_examples=250)
@given(cases(), st.none() | st.integers(1, 9), st.none() | st.floats(0.5, 20.0), st.data())
def test_equals_full_attention(
    case: Case, window: int | None, softcap: float | None, data: st.DataObject
) -> None:
    if data.draw(st.booleans()):  # a context begins at the first query at the latest
        case.starts = [data.draw(st.integers(0, past)) for past in case.past]
    special = {"softcap": softcap, "sinks": case.sinks() if data.draw(st.booleans()) else None}
    assert_same(case.run(window, **special), case.reference(window, **special))


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(
    ("past", "new", "starts"),
    [([9], [1], [5]), ([7, 3, 12], [4, 1, 6], [7, 0, 4]), ([6, 8], [2, 2], [3, 8])],
)
def test_hidden_keys_never_influence_the_output(
    past: list[int], new: list[int], starts: list[int], window: int | None
) -> None:
    expected = Case(past, new, starts=starts).run(window)
    case = Case(past, new, starts=starts)
    for b, start in enumerate(starts):
        for position in range(start):
            place = case.place(b, position)
            case.cache.keys[place] = -1e6
            case.cache.values[place] = 1e6
    assert torch.equal(case.run(window), expected)
    case.starts = None
    if window is None:
        assert not torch.allclose(case.run(), expected, atol=1e-6), "they would, if they were seen"


def test_bytes_of_a_block_are_those_allocated() -> None:
    cache = LayerKVCache(5, 16, 3, 8, torch.bfloat16, torch.device("cpu"))
    per_block = LayerKVCache.bytes_per_block(16, 3, 8, torch.bfloat16)
    assert cache.keys.nbytes + cache.values.nbytes == 6 * per_block, "one block more: scrap"


# ---- whole sequences without a cache --------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    batch=st.integers(1, 3),
    length=st.integers(1, 9),
    window=st.none() | st.integers(1, 10),
    group=st.sampled_from([1, 2]),
    seed=st.integers(0, 99),
    softcap=st.none() | st.floats(0.5, 20.0),
    with_sinks=st.booleans(),
)
def test_dense_equals_full_attention(
    batch: int,
    length: int,
    window: int | None,
    group: int,
    seed: int,
    softcap: float | None,
    with_sinks: bool,
) -> None:
    case = Case([0] * batch, [length] * batch, num_heads=2 * group, seed=seed)
    special = {"softcap": softcap, "sinks": case.sinks() if with_sinks else None}
    out = DenseCausalAttention(batch)(
        case.query_THd, *case.new_kv(), None, scaling=SCALING, sliding_window=window, **special
    )
    assert_same(out, case.reference(window, **special))


def test_dense_padding_at_the_end_is_never_seen() -> None:
    case = Case([0, 0], [6, 6])
    keys, values = case.new_kv()

    def run(values: Tensor) -> Tensor:
        return DenseCausalAttention(2)(case.query_THd, keys, values, None, scaling=SCALING)

    expected = run(values)
    changed = values.clone()
    changed[4:6] += 1.0  # sequence 0 has four tokens, the rest is padding
    out = run(changed)
    kept = [0, 1, 2, 3, *range(6, 12)]
    assert torch.equal(out[kept], expected[kept])
    assert not torch.equal(out[4:6], expected[4:6])
