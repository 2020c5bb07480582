"""The unpartitioned form: all elements of a batch in one pass, as the method is written down."""

from typing import Any

import torch
from torch import Tensor

from peagle.data.batches import Batch, Place
from peagle.data.features import TargetStates
from peagle.models.drafter import Drafter, DrafterConfig
from peagle.models.elements import PADDING_ROW, Elements, supervised_depth
from peagle.training.element_attention import dense_attention

HIDDEN, VOCAB = 12, 50


def peagle_forward(
    drafter: Drafter, batch: Batch, states: TargetStates, elements: Elements
) -> Tensor:
    """The head's output at every element, [B, E, D].

    Depth 0: token x[a+1], hidden fc(g[a]). Deeper: mask token, h_shared.
    """
    tokens_BN = batch.tokens_BN
    after = (elements.anchors + 1).clamp_max(tokens_BN.shape[1] - 1)
    is_ntp = elements.depths == 0
    mask_token_id = drafter.config.mask_token_id
    assert mask_token_id is not None
    tokens = torch.where(is_ntp, tokens_BN.gather(1, after), mask_token_id)
    rows = torch.arange(len(tokens_BN)).unsqueeze(1)
    combined = drafter.combine_features(states.features_BNA)[rows, elements.anchors]
    hidden = torch.where(is_ntp.unsqueeze(-1), combined, drafter.shared_hidden())
    attention = dense_attention(elements, elements)
    return drafter(tokens, hidden, elements.positions, lambda _, q, k, v: attention(q, k, v))


def rows_depth(lengths: Tensor, prompt_lens: Tensor, size: int) -> Tensor:
    """`supervised_depth` of rows that hold a prompt and one response each, [B, N]."""
    position = torch.arange(size, device=lengths.device)
    return supervised_depth(
        (position >= prompt_lens.unsqueeze(1)) & (position < lengths.unsqueeze(1))
    )


def make_plain_batch(tokens: Tensor, prompt_lens: Tensor, lengths: Tensor | None = None) -> Batch:
    """Rows of one document each; without `lengths` they are full."""
    rows, size = tokens.shape
    if lengths is None:
        lengths = torch.full((rows,), size)
    position = torch.arange(size).expand(rows, size)
    inside = position < lengths.unsqueeze(1)
    deepest = (lengths.unsqueeze(1) - 3 - position).clamp_min(-1)
    deepest = deepest.where(position + 1 >= prompt_lens.unsqueeze(1), -1)
    places = tuple(Place(i, i, 0, int(n)) for i, n in enumerate(lengths.tolist()))
    documents = torch.zeros_like(tokens).where(inside, PADDING_ROW)
    return Batch(tokens, documents, deepest, places, size, 0, rows)


def make_head(**options: Any) -> Drafter:
    """A random head in float64."""
    torch.manual_seed(4)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_layers": 2,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB,
        "target_hidden_size": HIDDEN,
        "aux_layer_ids": (0, 1, 2),
        "mask_token_id": 1,
    }
    head = Drafter(DrafterConfig(**{**sizes, **options})).double()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return head
