"""Another head in a running engine: it drafts like a fresh engine's, and no output changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from peagle import LLM, SamplingParams
from peagle.bundled import BUNDLED_EAGLE3, BUNDLED_PEAGLE, BUNDLED_TARGET
from peagle.engine.drafting import HeadDrafting
from peagle.engine.engine import LLMEngine
from peagle.engine.head_swap import HeadSwap
from peagle.engine.sequence import Sequence
from peagle.errors import CheckpointError, UserError
from peagle.models.checkpoint import save_drafter
from peagle.models.drafter import Drafter, DrafterConfig
from peagle.models.fingerprint import TargetFingerprint
from peagle.models.packed_layers import PackedLinear
from peagle.models.quantize import quantize_head
from peagle.models.target import TargetModel
from tests.second_head import make_second_head

K = 5
PROMPTS = ["def fibonacci(n):", "import os\n\n\ndef walk(folder):", "class Stack:\n    def push("]
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.9, seed=7)
HEADS = {"peagle": BUNDLED_PEAGLE, "eagle3": BUNDLED_EAGLE3}


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return TargetModel.load(BUNDLED_TARGET, dtype=torch.float32)


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("heads")
    return {kind: make_second_head(head, folder / kind) for kind, head in HEADS.items()}


def make(target: TargetModel | Path, head: Path | None, **options: Any) -> LLM:
    config = {"model": str(head), "num_speculative_tokens": K} if head else None
    return LLM(model=target, speculative_config=config, kv_cache_gib=0.05, **options)


Facts = list[tuple[list[int], Any]]


def facts(llm: LLM, params: SamplingParams = GREEDY, prompts: list[str] = PROMPTS) -> Facts:
    return [(o.token_ids, o.stats) for o in llm.generate(prompts, params)]


def tokens(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [o.token_ids for o in llm.generate(PROMPTS, params)]


def swap(llm: LLM, head: Path) -> HeadSwap:
    made = HeadSwap(llm.engine, str(head))
    made.copy()
    return made


def finish(llm: LLM) -> None:
    while llm.engine.has_unfinished:
        llm.engine.step()


def swap_within(llm: LLM, text: str, head: Path, params: SamplingParams = GREEDY) -> Sequence:
    """Swap the head after two steps of a sequence."""
    running = llm.engine.add_request(llm.requests.encode(text), params)
    for _ in range(2):
        llm.engine.step()
    swap(llm, head)
    finish(llm)
    return running


def drafter_of(llm: LLM) -> Drafter:
    drafting: Any = llm.engine.drafting
    return drafting.proposer.drafter


def tensors(llm: LLM) -> list[Tensor]:
    drafter = drafter_of(llm)
    return [t.clone() for t in (*drafter.parameters(), *drafter.buffers())]


@pytest.mark.slow
@pytest.mark.parametrize("kind", HEADS)
def test_the_engine_drafts_like_a_fresh_one(
    kind: str, target: TargetModel, second: dict[str, Path]
) -> None:
    plain = make(target, None)
    llm, fresh = make(target, HEADS[kind]), make(target, second[kind])
    own, other = facts(llm), facts(fresh)
    places = [t.data_ptr() for t in drafter_of(llm).parameters()]
    assert own != other, "the heads draft alike, so that nothing would be seen"
    swap(llm, second[kind])
    assert facts(llm) == other and tokens(llm) == tokens(plain)
    assert tokens(llm, SEEDED) == tokens(plain, SEEDED)
    swap(llm, HEADS[kind]).restore()
    assert facts(llm) == other
    swap(llm, HEADS[kind])
    assert facts(llm) == own
    assert [t.data_ptr() for t in drafter_of(llm).parameters()] == places


@pytest.mark.slow
def test_sequences_that_run_go_on(target: TargetModel, second: dict[str, Path]) -> None:
    expected, llm, swaps = tokens(make(target, None)), make(target, BUNDLED_PEAGLE), 0
    running = [llm.engine.add_request(llm.requests.encode(text), GREEDY) for text in PROMPTS]
    while llm.engine.has_unfinished:
        llm.engine.step()
        swap(llm, BUNDLED_PEAGLE if swaps % 2 else second["peagle"])
        swaps += 1
    assert swaps > 8 and [s.output_token_ids for s in running] == expected


@pytest.mark.slow
def test_no_later_sequence_reads_kv_of_the_old_head(
    target: TargetModel, second: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of blocks that were published before the swap; those published after it are shared."""
    text = "def function(argument):\n    return argument\n" * 8
    params = SamplingParams(max_tokens=12, ignore_eos=True)

    def cached(llm: LLM) -> tuple[int | None, Any]:
        (sequence,) = [llm.engine.add_request(llm.requests.encode(text), params)]
        while llm.engine.has_unfinished:
            llm.engine.step()
        return sequence.num_cached_tokens, sequence.stats

    fresh = make(target, second["peagle"])
    expected = cached(fresh)
    warm = cached(fresh)
    assert expected[0] == 0 and warm[0]

    def swapped() -> tuple[Any, Any]:
        llm = make(target, BUNDLED_PEAGLE)
        cached(llm)
        swap(llm, second["peagle"])
        return cached(llm), cached(llm)

    assert swapped() == (expected, warm)
    with monkeypatch.context() as planted:
        planted.setattr(LLMEngine, "forget_drafter_kv", lambda _: None)
        assert swapped()[0] != expected


def test_a_sequence_that_runs_across_a_swap_shares_nothing(
    target: TargetModel, second: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its later blocks hold KV that follows from what the old head wrote."""

    def published() -> int:
        llm = make(target, BUNDLED_PEAGLE)
        swap_within(llm, PROMPTS[0], second["peagle"])
        found = len(llm.engine.blocks._published)
        facts(llm)
        assert len(llm.engine.blocks._published) > found, "later sequences share theirs"
        return found

    assert published() == 0
    forget = LLMEngine.forget_drafter_kv

    def forget_published(engine: LLMEngine) -> None:
        forget(engine)
        for sequence in engine.scheduler.running:
            sequence.has_old_drafter_kv = False

    monkeypatch.setattr(LLMEngine, "forget_drafter_kv", forget_published)
    assert published() > 0


class Packing(nn.Linear):
    """A layer that computes with a copy of its weight, as packed layers do."""

    packed: Tensor

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.packed, self.bias)


def pack(layer: nn.Linear) -> None:
    layer.__class__ = Packing
    vars(layer)["packed"] = layer.weight.detach().clone()


def keep_table(drafter: Drafter) -> None:
    correction = drafter.correction
    assert correction is not None
    kept, add = correction.tokens_VW.clone(), correction.add

    def add_old(logits_RV: Tensor, states_RW: Tensor, tokens_R: Tensor) -> Tensor:
        now, correction.tokens_VW = correction.tokens_VW, kept
        corrected = add(logits_RV, states_RW, tokens_R)
        correction.tokens_VW = now
        return corrected

    correction.add = add_old


STALE: dict[str, Callable[[Drafter], None]] = {
    "layers": lambda drafter: pack(drafter.get_submodule("layers.2.self_attn.qkv_proj")),  # type: ignore[arg-type]
    "correction": keep_table,
}


@pytest.mark.parametrize("part", [*STALE, "h_shared", "layers.1.mlp.down_proj.weight"])
def test_weights_that_stay_are_noticed(
    part: str, target: TargetModel, second: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(target, BUNDLED_PEAGLE)
    drafter = drafter_of(llm)
    before = tensors(llm)
    if part in STALE:
        STALE[part](drafter)
    elif part == "h_shared":
        monkeypatch.setattr(HeadDrafting, "derive_again", lambda _: None)
    else:
        weight = drafter.get_parameter(part)
        monkeypatch.setattr(weight, "copy_", lambda _: weight)
    with pytest.raises(RuntimeError, match=rf"reads other weights than those copied: {part}"):
        swap(llm, second["peagle"])
    assert all(map(torch.equal, tensors(llm), before)), "the old head is back"


def edit(folder: Path, **peagle: Any) -> None:
    """Change facts of a head in its config.json."""
    path = folder / "config.json"
    data = json.loads(path.read_text())
    data["peagle"] |= peagle
    path.write_text(json.dumps(data))


def other_kind(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(BUNDLED_EAGLE3, folder)


def cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


OTHER_TARGET = {"name": "other", "vocab_size": 2048, "hidden_size": 160, "num_layers": 16}
OTHER_TARGET |= {"tokenizer_sha256": "0" * 64, "lm_head_sha256": "0" * 64}
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "kind": (other_kind, "has kind EAGLE-3, the running head P-EAGLE"),
    "target": (
        lambda folder: edit(folder, target=OTHER_TARGET),
        "was trained for target 'other'",
    ),
    "no target": (lambda folder: edit(folder, target=None), "does not name"),
    "depth": (
        lambda folder: edit(folder, num_speculative_tokens_trained=4),
        "trained for 4 draft tokens; expected at least 5",
    ),
    "no correction": (
        lambda folder: (folder / "correction.st").unlink(),
        "has a correction: False, the running head True",
    ),
    "broken file": (cut, "not readable as safetensors"),
}


@pytest.fixture(scope="module")
def kept(target: TargetModel) -> LLM:
    """An engine whose head stays."""
    return make(target, BUNDLED_PEAGLE)


@pytest.mark.parametrize("what", REFUSED)
def test_a_head_that_does_not_fit_is_refused(
    what: str, kept: LLM, second: dict[str, Path], tmp_path: Path
) -> None:
    before, (change, message) = tensors(kept), REFUSED[what]
    head = tmp_path / "head"
    shutil.copytree(second["peagle"], head)
    change(head)
    with pytest.raises(CheckpointError, match=message):
        HeadSwap(kept.engine, str(head))
    assert all(map(torch.equal, tensors(kept), before))


def test_what_an_engine_cannot_rewrite_is_refused(
    target: TargetModel, second: dict[str, Path]
) -> None:
    with pytest.raises(UserError, match="drafts without a head"):
        HeadSwap(make(target, None).engine, str(second["peagle"]))
    llm = make(target, BUNDLED_EAGLE3)
    drafter = drafter_of(llm)
    quantize_head(drafter, "int8", unpack=False)
    assert any(isinstance(module, PackedLinear) for module in drafter.modules())
    with pytest.raises(
        CheckpointError, match=r"layers\.0\.\S+ of the draft head is a PackedLinear"
    ):
        HeadSwap(llm.engine, str(BUNDLED_EAGLE3))


def test_other_shapes_and_vocabularies_are_refused(target: TargetModel, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"intermediate_size": 48, "num_layers": 1, "head_dim": 16}
    sizes |= {"num_attention_heads": 2, "num_kv_heads": 1, "vocab_size": 2048}
    sizes |= {"draft_vocab_size": 64, "target_hidden_size": 160, "aux_layer_ids": (2, 8, 13)}

    def saved(name: str, hidden_size: int, first_id: int) -> Path:
        head = Drafter(DrafterConfig(hidden_size=hidden_size, **sizes))
        head.set_draft_vocabulary(torch.arange(first_id, first_id + 64))
        save_drafter(tmp_path / name, head, fingerprint=TargetFingerprint.of(target))
        return tmp_path / name

    llm = make(target, saved("own", 32, 0))
    swap(llm, saved("alike", 32, 0))
    with pytest.raises(CheckpointError, match="has hidden_size 48, the running head 32; restart"):
        HeadSwap(llm.engine, str(saved("wide", 48, 0)))
    with pytest.raises(CheckpointError, match="drafts from another vocabulary"):
        HeadSwap(llm.engine, str(saved("words", 32, 9)))


def test_a_new_head_is_tried_out_beside_the_engine(
    target: TargetModel, second: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(target, BUNDLED_PEAGLE)
    expected = tokens(llm)
    prompts = [llm.requests.encode(text) for text in PROMPTS]
    running = [llm.engine.add_request(prompt, GREEDY) for prompt in prompts]
    swapping = HeadSwap(llm.engine, str(second["peagle"]))
    for _ in swapping.try_out(prompts):  # the engine goes on between two steps
        llm.engine.step()
    finish(llm)
    assert [s.output_token_ids for s in running] == expected
    emit = LLMEngine._emit

    def emit_wrong(self: LLMEngine, sequence: Sequence, new: list[int], *args: Any) -> None:
        wrong = sequence.num_speculative_tokens and len(sequence) > 30
        emit(self, sequence, [9] * len(new) if wrong else new, *args)

    monkeypatch.setattr(LLMEngine, "_emit", emit_wrong)
    with pytest.raises(CheckpointError, match="a greedy output differs from the one without"):
        list(swapping.try_out([prompts[1] * 3]))


@pytest.mark.slow
@pytest.mark.usefixtures("graphs_everywhere")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_captured_steps_read_the_new_weights(device: str, second: dict[str, Path]) -> None:
    """On a CPU the steps run over the same buffers, and are not captured."""
    pytest.importorskip("triton")
    params = SamplingParams(max_tokens=5 if device == "cpu" else 60, ignore_eos=True)
    options = {"device": device, "dtype": "float32", "max_num_seqs": 1, "max_model_len": 128}
    heads = BUNDLED_PEAGLE, second["peagle"]
    llm, fresh = (make(BUNDLED_TARGET, head, **options) for head in heads)
    own, other = (facts(one, params, PROMPTS[:1]) for one in (llm, fresh))
    assert own != other and own[0][0] == other[0][0]
    running = swap_within(llm, PROMPTS[0], second["peagle"], params)
    assert running.output_token_ids == own[0][0]
    assert facts(llm, params, PROMPTS[:1]) == other
    assert llm.stats.eager_steps == {}
