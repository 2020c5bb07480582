"""Log-probabilities against exact arithmetic in plain Python, with ties."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.kernels.sampling.logprobs import TokenLogprobs, logprob_table, token_logprobs
from tests.kernels.devices import DEVICES, INTERPRETED

INF = math.inf

# Few distinct values, so that rows are full of ties; -inf is what a padded vocabulary holds.
values = st.sampled_from([-INF, -3.0, -0.5, 0.0, 0.25, 2.0])
rows_ = st.integers(1, 9).flatmap(
    lambda vocab: st.lists(
        st.tuples(
            st.lists(values, min_size=vocab, max_size=vocab).filter(lambda r: max(r) > -INF),
            st.integers(0, vocab - 1),
            st.integers(0, 11),
        ),
        max_size=5,
    )
)


def slow(row: list[float], token: int, count: int) -> TokenLogprobs:
    total = math.log(math.fsum(math.exp(x) for x in row))
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))[:count]
    rank = 1 + sum(x > row[token] for x in row)
    return TokenLogprobs(token, row[token] - total, rank, [(i, row[i] - total) for i in order])


def assert_close(found: TokenLogprobs, wanted: TokenLogprobs, tolerance: float) -> None:
    assert (found.token_id, found.rank) == (wanted.token_id, wanted.rank)
    assert found.logprob == pytest.approx(wanted.logprob, abs=tolerance)
    assert [i for i, _ in found.top] == [i for i, _ in wanted.top]
    assert [x for _, x in found.top] == pytest.approx([x for _, x in wanted.top], abs=tolerance)


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(
    rows_, st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), st.sampled_from([0, 80])
)
def test_equals_plain_python(
    rows: list[tuple[list[float], int, int]], dtype: torch.dtype, shift: int
) -> None:
    """Any shift of all logits cancels; bfloat16 holds these logits exactly, so float32 does."""
    if not rows:
        return
    logits = torch.tensor([row for row, _, _ in rows], dtype=torch.float64)
    if shift:
        logits = logits * 4 + shift
    found = token_logprobs(logits.to(dtype), [t for _, t, _ in rows], [n for _, _, n in rows])
    for one, row, (_, token, count) in zip(found, logits.tolist(), rows, strict=True):
        assert_close(one, slow(row, token, count), 1e-12 if dtype == torch.float64 else 2e-5)


def test_equal_tokens_come_in_the_order_of_their_ids() -> None:
    """Which of equal values torch.topk takes differs with the size of the row and the device."""
    for vocab_size in (5, 2_000, 40_000):
        logits = torch.zeros(2, vocab_size)
        logits[0, vocab_size - 1] = 1.0
        first, second = token_logprobs(logits, [3, 3], [3, 4])
        assert [i for i, _ in first.top] == [vocab_size - 1, 0, 1]
        assert [i for i, _ in second.top] == [0, 1, 2, 3]
        assert (first.rank, second.rank) == (2, 1)


def test_the_token_is_reported_though_it_is_not_among_the_top() -> None:
    (found,) = token_logprobs(torch.tensor([[0.0, 3.0, 2.0, 1.0]]), [0], [2])
    assert found.rank == 4 and [i for i, _ in found.top] == [1, 2]
    assert found.logprob == pytest.approx(-3 - math.log(sum(math.exp(-i) for i in range(4))))


def test_greedy_tokens_have_rank_one() -> None:
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(0))
    best = logits.argmax(-1).tolist()
    for found, token in zip(token_logprobs(logits, best, [1] * 50), best, strict=True):
        assert found.rank == 1 and found.top == [(token, found.logprob)]


def test_the_logits_are_not_changed_and_no_rows_give_nothing() -> None:
    logits = torch.randn(3, 7)
    before = logits.clone()
    token_logprobs(logits, [0, 1, 2], [0, 20, 3])
    assert torch.equal(logits, before)
    assert token_logprobs(logits[:0], [], []) == []


# --- in two launches ---


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("vocab_size", "dtype", "num_top"),
    [
        (1, torch.float32, 3),
        (17, torch.bfloat16, 20),
        (4096, torch.float32, 0),
        (4097, torch.float16, 1),
        (9001, torch.bfloat16, 5),
        (20_000, torch.float32, 20),
    ],
)
def test_two_launches_equal_the_table(
    device: str, vocab_size: int, dtype: torch.dtype, num_top: int
) -> None:
    """Rows of any order, ties, tokens of probability 0; broken rows give no number."""
    tabulate_logprobs = pytest.importorskip(
        "peagle.kernels.sampling.logprobs_triton"
    ).tabulate_logprobs
    if not (INTERPRETED or torch.cuda.is_available()):
        pytest.skip("needs a card, or TRITON_INTERPRET=1")
    torch.manual_seed(vocab_size)
    logits = (4 * torch.randn(6, vocab_size)).to(dtype)
    logits[1] = (logits[1] / 4).round()
    logits[2, :-1] = -INF
    logits[3] = -INF
    logits[4, vocab_size // 2] = math.nan
    logits[5, : vocab_size // 2] = -INF
    rows = torch.tensor([5, 0, 1, 1, 2, 3, 4])
    tokens = torch.randint(vocab_size, (len(rows),))
    arguments = (x.to(device) for x in (logits, rows, tokens))
    found = tabulate_logprobs(*arguments, num_top).cpu()
    wanted = logprob_table(logits[rows], tokens, num_top)
    whole = slice(5)  # no one reads the numbers of the two broken rows
    assert found[5:, 0].isnan().all() and wanted[5:, 0].isnan().all()
    torch.testing.assert_close(found[whole], wanted[whole], rtol=0, atol=2e-5)
