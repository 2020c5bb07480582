"""Draws of rows in Triton against `sample_from_weights` over `probs_from_logits`.

On a CPU the kernels run under Triton's interpreter.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from peagle.kernels.drafts.step_state import NO_TOKEN
from peagle.kernels.sampling.logits import apply_probability_filters
from peagle.kernels.sampling.probabilities import probs_from_logits, sample_from_weights
from peagle.kernels.sampling.random import Purpose, uniform
from tests.kernels.devices import DEVICES, INTERPRETED

pytest.importorskip("triton", reason="needs triton")
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a card, or TRITON_INTERPRET=1", allow_module_level=True)

from peagle.kernels.sampling.draw_triton import allocate_weights, draw_rows
from peagle.kernels.sampling.probabilities_triton import RowStats, chunk_size, row_stats

# The interpreter computes as numpy does: integers of one element warn when they wrap around.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
UNTOUCHED = -77


@dataclass
class Case:
    """Rows of sequences with parameters and numbers of their own, on the CPU."""

    logits_RV: Tensor
    sequences_R: Tensor
    start_loc: Tensor
    temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor
    seeds_B: Tensor
    positions_B: Tensor
    purpose: Purpose = Purpose.SAMPLE
    first: int = 0

    @property
    def numbers_R(self) -> Tensor:
        rows = torch.arange(len(self.sequences_R))
        of = self.sequences_R.clamp_min(0)
        positions_R = self.positions_B[of] + self.first + rows - self.start_loc[of]
        return uniform(self.seeds_B[of], positions_R, self.purpose)


def make_case(num_seqs: int, vocab_size: int, *, cuts: bool, seed: int = 0) -> Case:
    """One to four rows a sequence, a third of them greedy; two rows of nobody at the end."""
    torch.manual_seed(seed)
    lens = torch.randint(1, 5, (num_seqs,))
    sequences = torch.repeat_interleave(lens)
    sequences = torch.nn.functional.pad(sequences, (0, 2), value=-1)
    temperature = torch.empty(num_seqs, dtype=torch.float64).uniform_(0.5, 1.5)
    temperature[torch.rand(num_seqs) < 0.3] = 0
    none = torch.zeros(num_seqs, dtype=torch.int64)
    return Case(
        torch.randn(len(sequences), vocab_size) * 3,
        sequences,
        torch.nn.functional.pad(lens.cumsum(0), (1, 0)),
        temperature,
        torch.randint(40, (num_seqs,)) if cuts else none,
        1 - 0.3 * torch.rand(num_seqs, dtype=torch.float64) if cuts else none + 1.0,
        0.1 * torch.rand(num_seqs, dtype=torch.float64) ** 6 if cuts else none + 0.0,
        torch.randint(2**62, (num_seqs,)),
        torch.randint(1000, (num_seqs,)),
    )


def run(case: Case, device: str, dtype: torch.dtype = torch.float32) -> list[int]:
    """What the kernels draw."""

    def to(value: Tensor) -> Tensor:
        return value.to(device)

    logits_RV, sequences_R = to(case.logits_RV).to(dtype), to(case.sequences_R)
    stats = RowStats.allocate(*logits_RV.shape, device)
    parameters = [to(case.temperature_B), to(case.top_k_B), to(case.top_p_B), to(case.min_p_B)]
    row_stats(logits_RV, sequences_R, *parameters, stats)
    out_R = torch.full_like(sequences_R, UNTOUCHED)
    draw_rows(
        logits_RV,
        sequences_R,
        to(case.start_loc),
        to(case.temperature_B),
        to(case.seeds_B),
        to(case.positions_B),
        stats,
        allocate_weights(*logits_RV.shape, device).fill_(torch.nan),
        out_R,
        purpose=case.purpose,
        first=case.first,
    )
    return out_R.tolist()


def expected(case: Case) -> list[int]:
    of = case.sequences_R.clamp_min(0)
    temperature_R = case.temperature_B[of]
    logits_RV = apply_probability_filters(case.logits_RV, temperature_R, case.min_p_B[of])
    probs_RV = probs_from_logits(logits_RV, temperature_R, case.top_k_B[of], case.top_p_B[of])
    tokens_R = sample_from_weights(probs_RV, case.numbers_R)
    return torch.where(case.sequences_R < 0, UNTOUCHED, tokens_R).tolist()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("num_seqs", "vocab_size"), [(1, 2), (3, 97), (2, 2048), (4, 4999)])
@pytest.mark.parametrize("cuts", [False, True])
def test_equals_the_reference(num_seqs: int, vocab_size: int, cuts: bool, device: str) -> None:
    for seed, purpose in enumerate((Purpose.SAMPLE, Purpose.DRAFT)):
        case = make_case(num_seqs, vocab_size, cuts=cuts, seed=seed)
        case.purpose, case.first = purpose, seed
        assert run(case, device) == expected(case)
        other = replace(case, first=case.first + 1)
        assert cuts or vocab_size < 50 or expected(other) != expected(case), "numbers count"


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_of_weight_0_are_not_drawn(device: str) -> None:
    case = make_case(40, 5, cuts=False)
    case.temperature_B.fill_(1.0)
    case.logits_RV[:, [0, 4]] = -torch.inf
    case.logits_RV[:, 1:4] = torch.tensor([-80.0, 0.0, -80.0])
    found = run(case, device)[:-2]
    assert set(found) <= {1, 2, 3}
    assert found == expected(case)[:-2]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("greedy", [True, False])
def test_a_row_without_a_finite_maximum_has_no_token(
    value: float, greedy: bool, device: str
) -> None:
    case = make_case(4, 97, cuts=True, seed=3)
    case.temperature_B.fill_(0.0 if greedy else 1.0)
    wanted = expected(case)
    case.logits_RV[2] = value
    wanted[2] = NO_TOKEN
    assert run(case, device) == wanted


@pytest.mark.parametrize("device", DEVICES)
def test_other_rows_change_nothing(device: str) -> None:
    """A row among 64, which `row_stats` cuts into larger chunks, draws what it draws alone."""
    few = make_case(3, 4999, cuts=True, seed=1)
    few.temperature_B.fill_(1.2)
    alone = run(few, device)[:-2]
    assert len(set(alone)) > 2
    num_more = 64 - len(alone)
    more = torch.full((num_more,), -1)
    more[::13] = torch.arange(0, 3).repeat(3)[: len(more[::13])]
    many = replace(
        few,
        logits_RV=torch.cat((few.logits_RV[:-2], torch.randn(num_more, 4999))),
        sequences_R=torch.cat((few.sequences_R[:-2], more)),
    )
    assert chunk_size(len(many.logits_RV), 4999) != chunk_size(len(few.logits_RV), 4999)
    assert run(many, device)[: len(alone)] == alone


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cuts", [False, True])
def test_real_sizes(dtype: torch.dtype, cuts: bool) -> None:
    different = total = 0
    for seed in range(3):
        case = make_case(40, 151_936, cuts=cuts, seed=seed)
        case.logits_RV = case.logits_RV.to(dtype).float()
        pairs = list(zip(run(case, "cuda", dtype), expected(case), strict=True))
        different += sum(a != b for a, b in pairs)
        total += len(pairs)
    # Near-ties of the float32 softmax: neighbours on the CDF, or of a top-p cut.
    print("drew otherwise:", different, "of", total)
    assert different <= 1
