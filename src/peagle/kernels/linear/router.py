"""The router of a mixture of experts: logits, the experts of each token and their weights.

    logits = x W^T + bias
    weight of a chosen expert = exp(logit) / sum of exp(logits), of the chosen ones or of all

Shapes: T tokens, H width, E experts, C experts chosen for each token.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.kernels.launch import launch, overlapping, power_of_two
from peagle.kernels.linear.skinny_linear import skinny_linear
from peagle.kernels.linear.unpacking import has_assembly

MAX_EXPERTS = 512  # one warp holds the logits of all
_FEW_ROWS = 16  # up to which our product of few rows is used


def route(
    x_TH: Tensor, weight_EH: Tensor, bias_E: Tensor | None, chosen: int, *, among_chosen: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the experts of each token in Triton; a compiler sees the operator `peagle::route`.

    Of experts with equal logits the first comes first. A logit that is no number counts as the
    largest.

    Args:
        x_TH: the tokens' states.
        weight_EH, bias_E: of the router; up to `MAX_EXPERTS` experts.
        chosen: C.
        among_chosen: the weights of a token's chosen experts add up to 1, else of all its experts.

    Returns:
        logits [T, E], weights [T, C] in the type of x, the largest first, and experts int32 [T, C].
    """
    return torch.ops.peagle.route(x_TH, weight_EH, bias_E, chosen, among_chosen)


def route_reference(
    x_TH: Tensor, weight_EH: Tensor, bias_E: Tensor | None, chosen: int, *, among_chosen: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `route` in plain torch."""
    logits_TE = F.linear(x_TH, weight_EH, bias_E)
    wide_TE = logits_TE if logits_TE.dtype == torch.float64 else logits_TE.float()
    top_TC, index_TC = wide_TE.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf).sort(
        dim=-1, descending=True, stable=True
    )
    top_TC, index_TC = top_TC[:, :chosen], index_TC[:, :chosen]
    total_T = (top_TC if among_chosen else wide_TE).logsumexp(-1, keepdim=True)
    return logits_TE, (top_TC - total_T).exp().to(x_TH.dtype), index_TC.int()


@torch.library.custom_op(
    "peagle::route",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, int chosen, bool among_chosen) "
    "-> (Tensor, Tensor, Tensor)",
)
def _route(
    x: Tensor, weight: Tensor, bias: Tensor | None, chosen: int, among_chosen: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from peagle.kernels.linear import router_triton

    is_few = x.shape[0] <= _FEW_ROWS and x.dtype == torch.bfloat16 and has_assembly(x.device)
    logits = skinny_linear(x, weight, bias) if is_few else F.linear(x, weight, bias)
    num_tokens, experts = logits.shape
    weights = x.new_empty(num_tokens, chosen)
    index = torch.empty(num_tokens, chosen, dtype=torch.int32, device=x.device)
    if num_tokens:
        launch(
            router_triton.choose_experts_kernel,
            (num_tokens,),
            index,
            weights,
            logits,
            experts,
            chosen,
            EXPERTS=power_of_two(experts),
            AMONG_CHOSEN=among_chosen,
            **overlapping(x.device),
            num_warps=1,
        )
    return logits, weights, index


@_route.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, chosen: int, among_chosen: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.shape[0]
    index = x.new_empty(rows, chosen, dtype=torch.int32)
    return x.new_empty(rows, weight.shape[0]), x.new_empty(rows, chosen), index
