"""The torch backend against attention written out query by query, in float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from peagle.attention import AttentionMetadata, LayerKVCache, TorchAttention
from peagle.attention.torch_backend import DenseCausalAttention, DocumentAttention
from tests.attention.paged_cases import FP8, SCALING, PagedCase

FLOAT = torch.float64


def make_case(past: list[int], new: list[int], **sizes: Any) -> PagedCase:
    return PagedCase(past, new, **{"head_dim": 8, "block_size": 4, "dtype": FLOAT, **sizes})


def attend_one(
    query_hd: Tensor,
    keys_SHd: Tensor,
    values_SHd: Tensor,
    seen: list[int],
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """One query over the keys that it sees: softmax(q . k * scale) v, head by head.

    A softcap bends the scores; a sink is one more score, for a value of zero.
    """
    keys_SHd, values_SHd = keys_SHd[seen], values_SHd[seen]
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


def written_out(case: PagedCase, window: int | None = None, **special: Any) -> Tensor:
    rows: list[Tensor] = []
    for b, (past, new) in enumerate(zip(case.past, case.new, strict=True)):
        start = case.starts[b] if case.starts else 0
        positions = case.positions(b)
        for row, path in zip(range(new), case.paths(b), strict=True):
            before = [*range(start, past), *(past + other for other in sorted(path))]
            here = positions[past + row]
            seen = [key for key in before if window is None or here - positions[key] < window]
            query_hd = case.query_THd[len(rows)]
            rows.append(attend_one(query_hd, *case.contexts[b], seen, **special))
    return torch.stack(rows)


def make_cache(case: PagedCase) -> LayerKVCache:
    """Past keys and values; what was in the other slots before must not matter."""
    cache = case.make_cache(with_new=False)
    for x in (cache.keys, cache.values):
        x.copy_(torch.where(x.isnan(), 100 * case.normal(*x.shape), x))
    return cache


def run(
    case: PagedCase,
    window: int | None = None,
    *,
    cache: LayerKVCache | None = None,
    metadata: AttentionMetadata | None = None,
    **special: Any,
) -> Tensor:
    return TorchAttention().prepare(metadata or case.metadata())(
        case.query_THd,
        *case.new_kv(),
        cache or make_cache(case),
        scaling=SCALING,
        sliding_window=window,
        **special,
    )


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@st.composite
def cases(draw: st.DrawFn) -> PagedCase:
    past_and_new = st.tuples(st.integers(0, 13), st.integers(1, 7))
    sequences = draw(st.lists(past_and_new, min_size=1, max_size=4))
    num_kv_heads = draw(st.sampled_from([1, 2, 3]))
    past = [past for past, _ in sequences]
    return make_case(
        past,
        [new for _, new in sequences],
        block_size=draw(st.integers(1, 6)),
        num_heads=num_kv_heads * draw(st.sampled_from([1, 2, 4])),
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from([2, 8])),
        seed=draw(st.integers(0, 99)),
        # A context begins at the first query at the latest.
        starts=[draw(st.integers(0, p)) for p in past] if draw(st.booleans()) else None,
        trees=[[draw(st.integers(0, row)) for row in range(new - 1)] for _, new in sequences]
        if draw(st.booleans())
        else None,
    )


WINDOWS = st.none() | st.integers(1, 9)
SOFTCAPS = st.none() | st.floats(0.5, 20.0)


@pytest.mark.slow
@settings(deadline=None, max_examples=250)
@given(cases(), WINDOWS, SOFTCAPS, st.booleans())
@example(make_case([9], [1]), None, None, False)
@example(make_case([3, 8], [4, 4]), None, None, False)
def test_equals_full_attention(
    case: PagedCase, window: int | None, softcap: float | None, with_sinks: bool
) -> None:
    special = {"softcap": softcap, "sinks": case.sinks() if with_sinks else None}
    assert_same(run(case, window, **special), written_out(case, window, **special))


def test_scores_beyond_what_exp_can_take() -> None:
    case = make_case([7, 3], [4, 2])
    case.query_THd *= 1e4
    for sinks in (case.sinks() * 1e4, case.sinks() - 1e4):
        assert_same(run(case, sinks=sinks), written_out(case, sinks=sinks))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    case = make_case([7, 3], [4, 2])
    special = {"softcap": 5.0, "sinks": case.sinks()}
    expected, cache = written_out(case, **special), make_cache(case)
    cache.keys, cache.values = cache.keys.to(dtype), cache.values.to(dtype)
    case.query_THd = case.query_THd.to(dtype)
    case.contexts = [(keys.to(dtype), values.to(dtype)) for keys, values in case.contexts]
    out = run(case, cache=cache, **special)
    assert out.dtype == dtype
    bound = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.to(FLOAT), expected, rtol=0, atol=bound)


def test_layers_of_one_pass_may_differ_in_windows_heads_and_sizes() -> None:
    shapes = [(2, 8), (1, 16), (4, 2)]
    layers = [make_case([7, 3, 12], [4, 1, 6], num_kv_heads=h, head_dim=d) for h, d in shapes]
    prepared = TorchAttention().prepare(layers[0].metadata())
    for window in (None, 3, None, 5, 3):
        for case in layers:
            cache = make_cache(case)
            assert [b.tolist() for b in case.blocks] == [b.tolist() for b in layers[0].blocks]
            out = prepared(
                case.query_THd, *case.new_kv(), cache, scaling=SCALING, sliding_window=window
            )
            assert_same(out, written_out(case, window))


@pytest.mark.parametrize("without_slot", [[], [2, 3]])
def test_writes_its_keys_and_values_and_nothing_else(without_slot: list[int]) -> None:
    """Tokens without a slot, here the last two of the first sequence, go to the scrap block."""
    case = make_case([7, 3, 12], [4, 1, 6])
    metadata, cache = case.metadata(), make_cache(case)
    slots_T = metadata.slots_T.clone()
    slots_T[without_slot] = -1
    before = [x.flatten(0, 1).clone() for x in (cache.keys, cache.values)]
    out = run(case, cache=cache, metadata=replace(metadata, slots_T=slots_T))
    kept = [row for row in range(len(slots_T)) if row not in without_slot]
    scrap = slice(case.num_blocks * case.block_size, None)
    for x, old, new in zip((cache.keys, cache.values), before, case.new_kv(), strict=True):
        old[slots_T[kept]] = new[kept]
        if without_slot:
            old[scrap] = x.flatten(0, 1)[scrap]
        assert torch.equal(x.flatten(0, 1), old)
    assert_same(out[kept], written_out(case)[kept])


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(
    ("past", "new", "starts"),
    [([9], [1], [5]), ([7, 3, 12], [4, 1, 6], [7, 0, 4]), ([6, 8], [2, 2], [3, 8])],
)
def test_hidden_keys_never_influence_the_output(
    past: list[int], new: list[int], starts: list[int], window: int | None
) -> None:
    case, whole = make_case(past, new, starts=starts), make_case(past, new)
    cache = make_cache(case)
    expected = run(case, window, cache=cache)
    for b, start in enumerate(starts):
        slots = case.slots(b)[:start]
        cache.keys.flatten(0, 1)[slots] = -1e6
        cache.values.flatten(0, 1)[slots] = 1e6
    assert torch.equal(run(case, window, cache=cache), expected)
    if window is None:
        assert not torch.allclose(run(whole, cache=cache), expected, atol=1e-6), "they would"


def rounded_case(case: PagedCase) -> PagedCase:
    """The same case with keys and values as an 8-bit cache gives them back."""
    plain = replace(case, cache_dtype=FLOAT)
    plain.query_THd = case.query_THd
    scales = (case.key_scale, case.value_scale)
    plain.contexts = [
        tuple(case.stored(x, s).to(FLOAT) * s for x, s in zip(context, scales))
        for context in case.contexts
    ]
    return plain


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.05, 0.02)], ids=str)
@pytest.mark.parametrize(
    ("window", "softcap", "sinks"), [(None, None, False), (3, 2.0, True), (None, 5.0, False)]
)
def test_8bit_cache(
    window: int | None, softcap: float | None, sinks: bool, scales: tuple[float, float]
) -> None:
    sizes: dict[str, Any] = {"num_heads": 6, "num_kv_heads": 3, "cache_dtype": FP8}
    case = make_case([9, 0, 5], [3, 6, 1], **sizes)
    case.key_scale, case.value_scale = scales
    cache = case.make_cache(with_new=False, poison=False)
    special = {"softcap": softcap, "sinks": case.sinks() if sinks else None}
    out = run(case, window, cache=cache, **special)
    assert_same(out, written_out(rounded_case(case), window, **special))
    assert not torch.allclose(out, written_out(case, window, **special), atol=1e-4)
    written = case.make_cache(with_new=True, poison=False)
    for found, expected in ((cache.keys, written.keys), (cache.values, written.values)):
        assert found.dtype == FP8 and found.itemsize == 1
        assert torch.equal(found[:-1].view(torch.uint8), expected[:-1].view(torch.uint8))


def test_values_beyond_an_8bit_type_are_cut() -> None:
    case = make_case([0], [2], num_heads=2, num_kv_heads=2, cache_dtype=FP8)
    case.contexts[0][1].fill_(1e4)
    case.value_scale = 2.0
    out = run(case, cache=case.make_cache(with_new=False, poison=False))
    assert_same(out, torch.full_like(out, 2 * 448.0))


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.05, 0.02)], ids=str)
def test_dense_attention_rounds_as_an_8bit_cache(scales: tuple[float, float]) -> None:
    case = make_case([0, 0], [7, 7], cache_dtype=FP8)
    case.key_scale, case.value_scale = scales
    expected = written_out(rounded_case(case))
    none = LayerKVCache(0, 1, 2, 8, FP8, torch.device("cpu"), scales)
    given = (case.query_THd, *case.new_kv(), none)
    assert_same(DenseCausalAttention(2)(*given, scaling=SCALING), expected)
    documents = torch.arange(2).repeat_interleave(7).unsqueeze(0)
    packed = DocumentAttention(documents, [(0, 0, 7), (0, 7, 7)])
    assert_same(packed(*given, scaling=SCALING), expected)
    assert not none.keys.view(torch.uint8).any() and not none.values.view(torch.uint8).any()


def test_bytes_of_a_block_are_those_allocated() -> None:
    cache = LayerKVCache(5, 16, 3, 8, torch.bfloat16, torch.device("cpu"))
    per_block = LayerKVCache.bytes_per_block(16, 3, 8, torch.bfloat16)
    assert cache.keys.nbytes + cache.values.nbytes == 6 * per_block, "one block more: scrap"


@settings(deadline=None, max_examples=60)
@given(
    batch=st.integers(1, 3),
    length=st.integers(1, 9),
    window=WINDOWS,
    group=st.sampled_from([1, 2]),
    seed=st.integers(0, 99),
    softcap=SOFTCAPS,
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
    """Causality also hides the padding at the end of a row."""
    case = make_case([0] * batch, [length] * batch, num_heads=2 * group, seed=seed)
    special = {"softcap": softcap, "sinks": case.sinks() if with_sinks else None}
    out = DenseCausalAttention(batch)(
        case.query_THd, *case.new_kv(), None, scaling=SCALING, sliding_window=window, **special
    )
    assert_same(out, written_out(case, window, **special))
