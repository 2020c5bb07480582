"""Penalties in one pass against `apply_penalties`, over odd shapes, chains and trees."""

from dataclasses import replace

import pytest
import torch

from peagle.kernels.paths import TreePaths
from peagle.kernels.sampling.logits import apply_penalties
from peagle.kernels.sampling.logits_rules import (
    LogitsRules,
    PaddedRows,
    PaddedTreeRows,
    TokenCounts,
)
from tests.kernels.devices import DEVICES, INTERPRETED, compile_for_card

pytest.importorskip("triton", reason="needs triton")
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a card, or TRITON_INTERPRET=1", allow_module_level=True)

from peagle.kernels.sampling.penalties_triton import penalise

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
EXTREMES = [-torch.inf, 3e38, -3e38, 0.0, torch.nan]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("num_seqs", "num_draft_tokens", "vocab_size", "dtype", "is_tree", "names"),
    [
        (1, 0, 1, torch.float32, False, "rpf"),
        (3, 7, 300, torch.bfloat16, False, "rpf"),
        (2, 1, 2049, torch.float16, False, "r"),
        (2, 5, 4097, torch.float32, True, "pf"),
        (1, 63, 97, torch.bfloat16, True, "rpf"),
        (4, 3, 2048, torch.float32, True, "f"),
    ],
)
def test_equals_the_reference(
    device: str,
    num_seqs: int,
    num_draft_tokens: int,
    vocab_size: int,
    dtype: torch.dtype,
    is_tree: bool,
    names: str,
) -> None:
    torch.manual_seed(vocab_size)
    num_rows = num_seqs * (num_draft_tokens + 1)
    logits_RV = 3 * torch.randn(num_rows, vocab_size)
    for column, value in enumerate(EXTREMES[:vocab_size]):
        logits_RV[:, column * vocab_size // len(EXTREMES)] = value
    # Few tokens, so that drafts repeat each other, the output and the prompt.
    few = [vocab_size // n for n in range(2, 9)]
    drafts_BK = torch.tensor(few)[torch.randint(len(few), (num_seqs, num_draft_tokens))]
    counts = TokenCounts(num_seqs + 2, vocab_size, device)
    for slot in range(num_seqs + 2):
        counts.start(slot, torch.tensor(few[:4], device=device))
        output_N = torch.tensor(few[2:] * (slot % 3), dtype=torch.int64, device=device)
        counts.add(torch.full_like(output_N, slot), output_N)
    slots = torch.randperm(num_seqs + 2)[:num_seqs]
    slots[1::3] = -1
    values = {
        "r": torch.tensor([1.3, 1.0, 1e-320, 0.4]),
        "p": torch.tensor([0.7, 0.0, -1e30, 1e38]),
        "f": torch.tensor([-0.2, 1e38, 0.0, 0.9]),
    }
    given = {n: v[:num_seqs].double().to(device) for n, v in values.items() if n in names}
    rules = LogitsRules(
        repetition_penalty_B=given.get("r"),
        presence_penalty_B=given.get("p"),
        frequency_penalty_B=given.get("f"),
        count_slots_B=slots.to(device),
    )
    num_draft_tokens_B = torch.randint(num_draft_tokens + 1, (num_seqs,), device=device)
    sizes = drafts_BK.to(device), num_draft_tokens_B, torch.zeros_like(num_draft_tokens_B), num_rows
    rows = PaddedRows(*sizes)
    if is_tree:
        parents_BN = torch.tensor(
            [
                [int(torch.randint(n + 1, ())) for n in range(num_draft_tokens)]
                for _ in range(num_seqs)
            ]
        )
        rows = PaddedTreeRows(*sizes, paths=TreePaths.of(parents_BN.to(device), num_draft_tokens))
    logits_RV = logits_RV.to(dtype).to(device)
    found = penalise(logits_RV, rows, rules, counts)
    wanted = apply_penalties(logits_RV, rows, rules, counts)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6, equal_nan=True)
    if num_draft_tokens > 2:
        other = penalise(logits_RV, replace(rows, draft_tokens_BK=sizes[0] * 0), rules, counts)
        assert not torch.equal(found.nan_to_num(), other.nan_to_num()), "drafts count"


@pytest.mark.slow
def test_kernels_of_rules_compile_for_a_card() -> None:
    assert compile_for_card("rules").keys() == {"penalise", "chunk", "join"}
