"""Another head in a running engine: it drafts like a fresh engine's, and no output changes."""

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from peagle import LLM, SamplingParams
from peagle.bundled import BUNDLED_EAGLE3, BUNDLED_PEAGLE, BUNDLED_TARGET
from peagle.engine import head_swap
from peagle.engine.drafting import HeadDrafting
from peagle.engine.engine import LLMEngine
from peagle.engine.head_swap import HeadSwap
from peagle.engine.sequence import Sequence
from peagle.errors import CheckpointError, UserError
from peagle.models.checkpoint import read_head, save_drafter
from peagle.models.drafter import Drafter
from peagle.models.fingerprint import TargetFingerprint
from peagle.models.quantize import quantize_head
from peagle.models.target import TargetModel
from tests.second_head import make_second_head

K = 5
PROMPTS = ["def fibonacci(n):", "import os\n\n\ndef walk(folder):", "class Stack:\n    def push("]
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.9, seed=7)
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
    return [ids for ids, _ in facts(llm, params)]


def swap(llm: LLM, head: Path) -> HeadSwap:
    (made := HeadSwap(llm.engine, str(head))).copy()
    return made


def swap_within(llm: LLM, text: str, head: Path, params: SamplingParams = GREEDY) -> Sequence:
    """Swap the head after two steps of a sequence."""
    running = llm.engine.add_request(llm.requests.encode(text), params)
    for _ in range(2):
        llm.engine.step()
    swap(llm, head)
    while llm.engine.has_unfinished:
        llm.engine.step()
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
    swapping = swap(llm, second[kind])
    assert facts(llm) == other and tokens(llm) == tokens(plain)
    for is_new in (False, True):
        swapping.turn(is_new=is_new)
        assert facts(llm) == (other if is_new else own)
    assert tokens(llm, SEEDED) == tokens(plain, SEEDED)
    swap(llm, HEADS[kind]).restore()
    assert facts(llm) == other
    swap(llm, HEADS[kind])
    assert facts(llm) == own
    assert [t.data_ptr() for t in drafter_of(llm).parameters()] == places


def test_no_later_sequence_reads_kv_of_the_old_head(
    target: TargetModel, second: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks published before a swap, and those of a sequence that runs across it."""
    text = ["def function(argument):\n    return argument\n" * 8]
    expected = facts(make(target, second["peagle"]), GREEDY, text)

    def swapped() -> tuple[int, Facts]:
        llm = make(target, BUNDLED_PEAGLE)
        facts(llm, GREEDY, text)
        swap_within(llm, PROMPTS[0], second["peagle"])
        left = len(llm.engine.blocks._published)
        return left, facts(llm, GREEDY, text)

    assert swapped() == (0, expected)
    monkeypatch.setattr(
        LLMEngine, "forget_drafter_kv", lambda engine: engine.blocks.unpublish_all()
    )
    assert swapped()[0] > 0
    monkeypatch.setattr(LLMEngine, "forget_drafter_kv", lambda _: None)
    assert swapped()[1] != expected


@pytest.mark.parametrize(
    ("part", "method"),
    [
        *(("fc", "forward"), ("layers.2.self_attn.qkv_proj", "forward"), ("lm_head", "forward")),
        *(("correction", "add"), ("h_shared", ""), ("layers.1.mlp.down_proj.weight", "")),
    ],
)
def test_weights_that_stay_are_noticed(
    part: str,
    method: str,
    target: TargetModel,
    second: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A module that computes with a copy, as packed ones do; a vector; a weight."""
    llm = make(target, BUNDLED_PEAGLE)
    before = tensors(llm)
    if method:
        module = drafter_of(llm).get_submodule(part)
        monkeypatch.setattr(module, method, getattr(copy.deepcopy(module), method))
    elif part == "h_shared":
        monkeypatch.setattr(HeadDrafting, "derive_again", lambda _: None)
    else:
        monkeypatch.setattr(drafter_of(llm).get_parameter(part), "copy_", lambda _: None)
    named = "the logits of a pass" if method else part
    with pytest.raises(RuntimeError, match=f"reads other weights than those copied: {named}$"):
        swap(llm, second["peagle"])
    assert all(map(torch.equal, tensors(llm), before)), "the old head is back"


def edit(folder: Path, **facts: Any) -> None:
    data = json.loads((folder / "config.json").read_text())
    data["peagle"] |= facts
    (folder / "config.json").write_text(json.dumps(data))


def test_a_head_that_does_not_fit_is_refused(
    target: TargetModel, second: dict[str, Path], tmp_path: Path
) -> None:
    llm = make(target, BUNDLED_PEAGLE)
    before = tensors(llm)
    other = json.loads((BUNDLED_PEAGLE / "config.json").read_text())["peagle"]["target"]
    other["lm_head_sha256"] = "0" * 64
    cases: list[tuple[Callable[[Path], object], str]] = [
        (partial(edit, target=other), "was trained for target 'target'"),
        (partial(edit, target=None), "does not name its target"),
        (partial(edit, num_speculative_tokens_trained=4), "was trained for 4 draft tokens"),
        (lambda head: (head / "correction.st").unlink(), "a correction: no, the running head yes"),
        (lambda head: (head / "model.safetensors").write_text("?"), "not readable as safetensors"),
    ]
    with pytest.raises(CheckpointError, match="has kind EAGLE-3, the running head P-EAGLE;"):
        HeadSwap(llm.engine, str(BUNDLED_EAGLE3))
    for number, (change, message) in enumerate(cases):
        head = tmp_path / str(number)
        shutil.copytree(second["peagle"], head)
        change(head)
        with pytest.raises(CheckpointError, match=message):
            HeadSwap(llm.engine, str(head))
    assert all(map(torch.equal, tensors(llm), before))


def test_a_head_that_is_deleted_while_it_is_loaded(
    target: TargetModel, second: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, load = shutil.copytree(second["peagle"], tmp_path / "head"), head_swap.load_head
    llm = make(target, BUNDLED_PEAGLE)

    def load_without_correction(*given: Any) -> Drafter | None:
        (head / "correction.st").unlink()
        return load(*given)

    monkeypatch.setattr(head_swap, "load_head", load_without_correction)
    with pytest.raises(CheckpointError, match=r"deleted while it was loaded, as 'correction\.st'"):
        HeadSwap(llm.engine, str(head))


def test_a_second_head_for_which_there_is_no_memory(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(target, BUNDLED_PEAGLE)
    monkeypatch.setattr(head_swap, "load_head", Mock(side_effect=torch.OutOfMemoryError))
    with pytest.raises(UserError, match="does not fit cpu beside the running head; restart"):
        HeadSwap(llm.engine, str(BUNDLED_PEAGLE))


def test_what_an_engine_cannot_rewrite_is_refused(target: TargetModel) -> None:
    with pytest.raises(UserError, match="drafts without a head"):
        HeadSwap(make(target, None).engine, str(BUNDLED_PEAGLE))
    llm = make(target, BUNDLED_EAGLE3)
    quantize_head(drafter_of(llm), "int8", unpack=False)
    with pytest.raises(
        CheckpointError, match=r"layers\.0\.\S+ of the draft head is a PackedLinear"
    ):
        HeadSwap(llm.engine, str(BUNDLED_EAGLE3))


def test_other_shapes_and_vocabularies_are_refused(target: TargetModel, tmp_path: Path) -> None:
    config = read_head(BUNDLED_EAGLE3).config

    def saved(name: str, width: int, first_id: int) -> Path:
        head = Drafter(replace(config, intermediate_size=width, draft_vocab_size=64))
        head.set_draft_vocabulary(torch.arange(first_id, first_id + 64))
        save_drafter(tmp_path / name, head, fingerprint=TargetFingerprint.of(target))
        return tmp_path / name

    llm = make(target, saved("own", 32, 0))
    swap(llm, saved("alike", 32, 0))
    with pytest.raises(CheckpointError, match="has intermediate_size 48, the running head 32;"):
        HeadSwap(llm.engine, str(saved("wide", 48, 0)))
    with pytest.raises(CheckpointError, match="drafts from another vocabulary"):
        HeadSwap(llm.engine, str(saved("words", 32, 9)))


def test_a_new_head_is_tried_out_beside_the_engine(
    target: TargetModel, second: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(target, BUNDLED_PEAGLE)
    expected = tokens(llm)[0]
    prompts = [llm.requests.encode(text) for text in PROMPTS]
    running = llm.engine.add_request(prompts[0], GREEDY)
    swapping = HeadSwap(llm.engine, str(second["peagle"]))
    for _ in swapping.try_out(prompts):  # the engine goes on between two steps
        llm.engine.step()
    while llm.engine.has_unfinished:
        llm.engine.step()
    assert running.output_token_ids == expected
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
    params = replace(GREEDY, max_tokens=5 if device == "cpu" else 60)
    options = {"device": device, "dtype": "float32", "max_num_seqs": 1, "max_model_len": 128}
    heads = BUNDLED_PEAGLE, second["peagle"]
    llm, fresh = (make(BUNDLED_TARGET, head, **options) for head in heads)
    own, other = (facts(one, params, PROMPTS[:1]) for one in (llm, fresh))
    assert own != other and own[0][0] == other[0][0]
    running = swap_within(llm, PROMPTS[0], second["peagle"], params)
    assert running.output_token_ids == own[0][0]
    assert facts(llm, params, PROMPTS[:1]) == other
    assert llm.stats.eager_steps == {}
