"""RMSNorm of query and key heads, and their rotation by position (RoPE), in one kernel.

    x = x / sqrt(mean(x^2) + eps) * weight
    [x1 | x2] -> [x1 cos1 - x2 sin1 | x2 cos2 + x1 sin2]

Shapes: T tokens, H query heads, G key (and value) heads, d head size, a power of two.
"""

import torch
from torch import Tensor

from peagle.kernels.launch import launch, overlapping

_MOST_HEADS = 8  # of one program


def rotate_heads(
    qkv_TW: Tensor,
    cos_Td: Tensor,
    sin_Td: Tensor,
    heads: tuple[int, int],
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Norm and rotate in Triton, rounded once: queries [T, H, d] and keys [T, G, d].

    A compiler sees the operator `peagle::rotate_heads`.

    Args:
        qkv_TW: queries, keys and values of each token, contiguous; W = (H + 2 G) d.
        cos_Td, sin_Td: of the token's position.
        heads: H and G.
        norms: weights [d] of queries and of keys; None: there is no norm.
        eps: of the norms.
    """
    q_weight, k_weight = norms or (None, None)
    return torch.ops.peagle.rotate_heads(qkv_TW, cos_Td, sin_Td, *heads, q_weight, k_weight, eps)


@torch.library.custom_op(
    "peagle::rotate_heads",
    mutates_args=(),
    schema="(Tensor qkv, Tensor cos, Tensor sin, int heads, int key_heads, Tensor? q_weight, "
    "Tensor? k_weight, float eps) -> (Tensor, Tensor)",
)
def _rotate_heads(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    key_heads: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    from peagle.kernels.attention import rotation_triton

    qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
    (num_tokens, width), size = qkv.shape, cos.shape[1]
    queries = qkv.new_empty(num_tokens, heads, size)
    keys = qkv.new_empty(num_tokens, key_heads, size)
    of_program = _MOST_HEADS
    while heads % of_program or key_heads % of_program:
        of_program //= 2
    if num_tokens:
        launch(
            rotation_triton.rotate_heads_kernel,
            (num_tokens, (heads + key_heads) // of_program),
            queries,
            keys,
            qkv,
            cos,
            sin,
            qkv if q_weight is None else q_weight,
            qkv if k_weight is None else k_weight,
            width,
            heads,
            key_heads,
            eps,
            HEADS=of_program,
            HALF=size // 2,
            HAS_NORM=q_weight is not None,
            **overlapping(qkv.device),
            num_warps=1 if of_program * size <= 256 else 4,
        )
    return queries, keys


@_rotate_heads.register_fake
def _(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, key_heads: int, *others: object
) -> tuple[Tensor, Tensor]:
    num_tokens, size = qkv.shape[0], cos.shape[1]
    queries = qkv.new_empty(num_tokens, heads, size)
    return queries, qkv.new_empty(num_tokens, key_heads, size)
