"""The experts of tokens in Triton against plain torch; on a CPU under the interpreter."""

import pytest
import torch
from torch import Tensor

from peagle.kernels.linear.router import route, route_reference
from tests.kernels.devices import DEVICES

pytest.importorskip("triton", reason="needs triton")


def make(tokens: int, experts: int, width: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(tokens + experts)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x, weight, bias = (
        torch.randn(size).to(device, dtype) for size in ((tokens, width), (experts, width), experts)
    )
    return x, weight, bias


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("among_chosen", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(
    ("tokens", "experts", "chosen"), [(1, 128, 8), (3, 32, 4), (17, 5, 5), (40, 60, 1), (2, 300, 9)]
)
def test_choice_equals_the_reference(
    tokens: int, experts: int, chosen: int, has_bias: bool, among_chosen: bool, device: str
) -> None:
    x, weight, bias = make(tokens, experts, 64, device)
    given = bias if has_bias else None
    logits, weights, index = route(x, weight, given, chosen, among_chosen=among_chosen)
    exact = (x.double(), weight.double(), None if given is None else given.double())
    bound = 1e-5 if device == "cpu" else 2e-2
    expected, _, _ = route_reference(*exact, chosen, among_chosen=among_chosen)
    assert (logits.double() - expected).norm() < bound * expected.norm()
    # By its own logits: rounded ones are often equal.
    eye = torch.eye(experts, device=device, dtype=torch.float64)
    expected = route_reference(logits.double(), eye, None, chosen, among_chosen=among_chosen)
    assert torch.equal(index, expected[2])
    assert (weights.double() - expected[1]).abs().max() < (1e-6 if device == "cpu" else 4e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        ([1.0, 2, 2, 1, 2], [1, 2, 4, 0]),
        ([torch.nan, 0, torch.nan, 3, 1], [0, 2, 3, 4]),
        ([-torch.inf, -torch.inf, -torch.inf, -torch.inf, 0], [4, 0, 1, 2]),
    ],
)
def test_every_place_has_an_expert(logits: list[float], expected: list[int], device: str) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    one, column = torch.ones(1, 1), torch.tensor(logits)[:, None]
    _, _, index = route(one.to(device, dtype), column.to(device, dtype), None, 4, among_chosen=True)
    assert index.tolist() == [expected]


@pytest.mark.parametrize("device", DEVICES)
def test_no_tokens(device: str) -> None:
    x, weight, _ = make(1, 8, 16, device)
    logits, weights, index = route(x[:0], weight, None, 2, among_chosen=True)
    assert (logits.shape, weights.shape, index.shape) == ((0, 8), (0, 2), (0, 2))
