"""Synthetic acceptance in Triton against `speculation.verify` with the same rates.

On a CPU the kernels run under Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from peagle.kernels.step_state import StepRecord
from tests.kernels.devices import DEVICES
from tests.kernels.verify_cases import Case, check, make_case, run, verify_triton

# The interpreter computes as numpy does: integers of one element warn when they wrap around.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
KINDS = ["greedy", "argmax drafts", "drawn drafts", "drawn from fewer tokens"]


def make(kind: str, num_seqs: int, k: int, seed: int, rates: list[float]) -> Case:
    draft_vocab = {"drawn drafts": 97, "drawn from fewer tokens": 40}.get(kind, 0)
    greedy, sampled = kind == "greedy", kind != "greedy"
    case = make_case(
        num_seqs, k, 97, seed=seed, greedy=greedy, draft_vocab=draft_vocab, cuts=sampled, scale=2.0
    )
    case.rates_K = torch.tensor(rates)
    return case


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rates", [[1.0] * 3, [0.9, 0.6, 0.3], [0.5, 0.5, 0.0], [0.0] * 3], ids=str)
def test_equals_the_reference(kind: str, rates: list[float], device: str) -> None:
    for seed in range(2):
        assert check(make(kind, 7, 3, seed, rates), device) == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_all_and_nothing(kind: str, device: str) -> None:
    for rate in (1.0, 0.0):
        case = make(kind, 7, 3, 5, [rate] * 3)
        accepted = run(case, device)[0].num_accepted_B.cpu()
        # Of k drafts, which differ from sequence to sequence.
        expected = case.state.num_drafts_B * int(rate)
        assert accepted.tolist() == expected.tolist()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_rates_beyond_the_drafts_are_not_read(kind: str, device: str) -> None:
    short, long = (make(kind, 7, 3, 1, [0.9, 0.6, 0.3, *more]) for more in ([], [0.3, 0.2]))
    found, wanted = run(long, device)[0], run(short, device)[0]
    for f in fields(StepRecord):
        assert torch.equal(getattr(found, f.name), getattr(wanted, f.name)), f.name


def test_fewer_rates_than_drafts_are_refused() -> None:
    synthetic = verify_triton.SyntheticAcceptance(torch.ones(2), torch.zeros(4))
    with pytest.raises(AssertionError, match="a rate for every draft"):
        verify_triton._synthetic_arguments(synthetic, torch.zeros(4, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("greedy", [True, False])
def test_real_sizes(greedy: bool) -> None:
    for seed in range(2):
        case = make_case(24, 7, 151_936, seed=seed, greedy=greedy, scale=3.0)
        case.rates_K = 0.8 ** torch.arange(1, 8)
        # One near-tie of the float32 softmax may fall otherwise, as without rates.
        assert check(case, "cuda") <= (0 if greedy else 1)
