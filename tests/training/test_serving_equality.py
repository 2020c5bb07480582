"""The forward pass that trains a head equals the pass that serves it, at every depth.

This guards against heads that train well and serve badly: a shifted feature, a wrong position id, a
mask slot that sees too much would all leave training happy.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from peagle import LLM, SamplingParams
from peagle.data.features import target_states
from peagle.models.checkpoint import save_drafter
from peagle.models.drafter import Drafter
from peagle.models.target import TargetModel
from peagle.speculation.proposers import EagerDraft
from peagle.training.config import MethodSection
from peagle.training.partition import PartitionLayout, partitioned_graded
from peagle.training.training_methods import TrainingMethod, eagle3_forward
from tests.conftest import make_drafter
from tests.training.reference import make_plain_batch

K = 6
HEADS: list[dict[str, Any]] = [
    {"num_layers": 1},
    {"num_layers": 3, "draft_vocab_size": 150},
    {"num_layers": 2, "norm_before_residual": True, "fc_norm": True},
    {"hidden_size": 48, "num_attention_heads": 4, "num_kv_heads": 1, "head_dim": 16},
]


def serve(folder: Path, head: Path, prompt: list[int], monkeypatch: pytest.MonkeyPatch):
    """Generate, recording for each draft the length of the prefix and the draft logits [K, DV]."""
    recorded: list[tuple[int, Tensor]] = []
    columns: list[Tensor] = []
    choose = EagerDraft.choose

    def recording_choose(self: EagerDraft, hidden_BJD: Tensor, first: int) -> None:
        columns.append(self._proposer.drafter.compute_logits(hidden_BJD)[0])
        done = torch.cat(columns)
        if len(done) == K:
            recorded.append((len(self._step.histories[0]), done))
            columns.clear()
        choose(self, hidden_BJD, first)

    monkeypatch.setattr(EagerDraft, "choose", recording_choose)
    llm = LLM(
        folder,
        dtype="float32",
        speculative_config={"model": str(head), "num_speculative_tokens": K},
    )
    # Sampling makes some drafts fail early and the output varied.
    output = llm.generate([prompt], SamplingParams(max_tokens=30, temperature=1.0, seed=3))[0]
    drafting: Any = llm.engine.drafting
    return prompt + output.token_ids, recorded, drafting.proposer.drafter


def train_forward(folder: Path, tokens: list[int], drafter: Any) -> dict[tuple[int, int], Tensor]:
    """Draft logits of every element of `tokens` as training computes them."""
    target = TargetModel.load(folder, dtype=torch.float32)
    target.tap_aux(drafter.config.aux_layer_ids)
    batch = make_plain_batch(torch.tensor([tokens]), torch.tensor([1]))
    states = target_states(target, batch)
    name = "peagle" if drafter.config.is_parallel else "eagle3"
    method = TrainingMethod(MethodSection(name=name, depth=K))  # type: ignore[call-arg]
    if name == "peagle":
        elements = method.elements(batch, None, everything=True)
        layout = PartitionLayout.of(elements, len(tokens), 3, method)
        parts = list(partitioned_graded(drafter, batch, states, layout, method))
        found = [(g.selected.anchor, g.selected.depth, g.hidden_MD) for g in parts]
    else:
        forward = eagle3_forward(drafter, batch, states, method)
        found = [
            (elements.anchors[0], elements.depths[0], hidden[0]) for elements, hidden in forward
        ]
    logits: dict[tuple[int, int], Tensor] = {}
    for anchors, depths, hidden in found:
        values = drafter.compute_logits(hidden)
        for i, (a, d) in enumerate(zip(anchors, depths, strict=True)):
            logits[int(a), int(d)] = values[i]
    return logits


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [True, False], ids=["peagle", "eagle3"])
@pytest.mark.parametrize("options", HEADS, ids=str)
def test_training_forward_equals_the_engines_drafter_pass(
    target_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    parallel: bool,
) -> None:
    drafter = make_drafter(TargetModel.load(target_folder), parallel=parallel, **options)
    save_drafter(tmp_path, drafter)
    prompt = [4, 99, 31, 31, 200, 7, 12]
    tokens, recorded, served = serve(target_folder, tmp_path, prompt, monkeypatch)
    with torch.no_grad():
        trained = train_forward(target_folder, tokens, served)
    assert len(recorded) > 5
    compared = 0
    for length, logits_KV in recorded:
        # The prefix x[0..n] has n + 1 = length tokens; its last NTP slot is anchor n - 1.
        anchor = length - 2
        for depth in range(K):
            if not parallel and depth > 0:
                # Training feeds the true next token, serving its own draft: deeper steps are
                # compared below, where the drafts are right.
                break
            if (anchor, depth) in trained and anchor + 1 < len(tokens):
                torch.testing.assert_close(
                    logits_KV[depth], trained[anchor, depth], atol=1e-4, rtol=1e-4
                )
                compared += 1
    assert compared >= (5 * K if parallel else 5)


def test_a_shifted_feature_is_noticed(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = make_drafter(TargetModel.load(target_folder))
    save_drafter(tmp_path, drafter)
    tokens, recorded, served = serve(target_folder, tmp_path, [5, 6, 7], monkeypatch)
    with torch.no_grad():
        trained = train_forward(target_folder, tokens, served)
    length, logits_KV = recorded[2]
    assert (logits_KV[1] - trained[length - 1, 1]).abs().max() > 1e-2


def test_eagle3_steps_equal_when_the_drafts_are_right(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serving that is fed the true tokens instead of its drafts equals training at every depth."""
    drafter = make_drafter(TargetModel.load(target_folder), parallel=False, num_layers=2)
    save_drafter(tmp_path, drafter)
    prompt = [4, 99, 31, 31, 200, 7, 12]
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    plain = prompt + LLM(target_folder, dtype="float32").generate([prompt], params)[0].token_ids
    asked = [0]
    to_target_ids, choose = Drafter.to_target_ids, EagerDraft.choose

    def forced(self: Drafter, draft_ids: Tensor) -> Tensor:
        if draft_ids.dim() == 1:  # the table of the whole draft vocabulary
            return to_target_ids(self, draft_ids)
        return torch.full_like(draft_ids, plain[asked[0]] if asked[0] < len(plain) else 0)

    recorded: list[tuple[int, Tensor]] = []
    columns: list[Tensor] = []

    def recording_choose(self: EagerDraft, hidden_BJD: Tensor, first: int) -> None:
        length = len(self._step.histories[0])
        asked[0] = length + first
        columns.append(self._proposer.drafter.compute_logits(hidden_BJD)[0])
        if len(columns) == K:
            recorded.append((length, torch.cat(columns)))
            columns.clear()
        choose(self, hidden_BJD, first)

    monkeypatch.setattr(Drafter, "to_target_ids", forced)
    monkeypatch.setattr(EagerDraft, "choose", recording_choose)
    config = {"model": str(tmp_path), "num_speculative_tokens": K}
    llm = LLM(target_folder, dtype="float32", speculative_config=config)
    output = llm.generate([prompt], params)[0]
    assert prompt + output.token_ids == plain
    assert output.stats.acceptance_length > K - 1, "the forced drafts are accepted"
    with torch.no_grad():
        trained = train_forward(target_folder, plain, drafter)
    compared = 0
    for length, logits_KV in recorded:
        for depth in range(K):
            if length - 2 + depth + 1 < len(plain):
                expected = trained[length - 2, depth]
                torch.testing.assert_close(logits_KV[depth], expected, atol=1e-4, rtol=1e-4)
                compared += 1
    assert compared > K
