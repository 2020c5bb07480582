"""The plugin of vLLM without vLLM: its switch, and the walk over slots against plain products.

Stand-ins for vLLM's modules have what the plugin uses of them. tests/interop runs it in real vLLM.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint, distributions
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from peagle.backends.vllm import corrected_drafts, plugin
from peagle.backends.vllm.command import MODULE_FOLDER
from peagle.bundled import BUNDLED_PEAGLE, BUNDLED_TARGET
from peagle.errors import CheckpointError
from peagle.models.checkpoint import load_correction, load_drafter
from peagle.models.correction import DraftCorrection
from peagle.models.target import TargetModel
from tests.corrections import add_correction, random_correction, term_of
from tests.interop.heads import SavedHead, pruned
from tests.models.editing import edit_tensors

PROPOSER = "vllm.v1.spec_decode.llm_base_proposer"
CONFIG, DISPATCHER = "vllm.config", "vllm.v1.cudagraph_dispatcher"
RUNNER = "vllm.v1.worker.gpu_model_runner"


def put_module(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    """Put a stand-in for a module of vLLM, and for the packages above it, in place."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        above = ".".join(parts[:end])
        if above not in sys.modules:
            monkeypatch.setitem(sys.modules, above, ModuleType(above))
    module = ModuleType(name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)


# ---- the switch -----------------------------------------------------------------------------


def test_without_the_variable_nothing_is_imported() -> None:
    code = (
        "import sys; from peagle.backends.vllm.plugin import register; register(); "
        "print([name for name in ('torch', 'vllm', 'pydantic') if name in sys.modules])"
    )
    for value in ("", "0", "yes"):
        environment = {"PYTHONPATH": str(MODULE_FOLDER), "PEAGLE_VLLM": value}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
        said = "PEAGLE_VLLM is 'yes'; expected 1: vLLM drafts without peagle.\n"
        assert done.stdout == b"[]\n"
        assert done.stderr.decode() == (said if value == "yes" else "")


def test_vllm_finds_it_on_its_path_and_in_an_installed_peagle() -> None:
    (found,) = (
        point
        for one in distributions(path=[str(MODULE_FOLDER)])
        for point in one.entry_points
        if point.group == "vllm.general_plugins"
    )
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'[project.entry-points."{found.group}"]\n{found.name} = "{found.value}"' in project
    assert found.load() is plugin.register
    assert isinstance(found, EntryPoint)


@pytest.mark.parametrize(
    ("version", "why"),
    [((0, 40, 0), "it knows vLLM 0.26 and 0.32, and this is 0.40"), ((0, 32, 0), PROPOSER)],
)
def test_it_steps_aside_with_one_line(
    version: tuple[int, ...],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("PEAGLE_VLLM", "1")
    put_module(monkeypatch, "vllm.version", __version_tuple__=version)
    if version == (0, 32, 0):
        put_module(monkeypatch, PROPOSER)  # a proposer of another name
    with caplog.at_level(logging.INFO):
        plugin.register()
    (line,) = caplog.messages
    assert why in line and line.endswith("vLLM drafts without corrections.")


class Proposer:
    """The proposer of vLLM, as far as the plugin knows it."""

    method, parallel_drafting, num_speculative_tokens = "eagle3", True, 4
    needs_extra_input_slots = True
    device, dtype = torch.device("cpu"), torch.float32
    speculative_config = SimpleNamespace(num_speculative_tokens=4)
    _enable_probabilistic_draft_probs = False
    _last_draft_probs: Tensor | None = None

    def load_model(self, target_model: Any) -> None:
        self.loaded = target_model

    def _sample_draft_tokens(self, hidden: Tensor, metadata: Any) -> tuple[str, Tensor, Any]:
        return "as without peagle", hidden, metadata

    def propose(self, num_speculative_tokens: int, slots_R: Tensor, *, draws: bool) -> Tensor:
        """K slots of each request, read as if there were as many as the step wants."""
        self.num_speculative_tokens = num_speculative_tokens
        assert self.needs_extra_input_slots == (num_speculative_tokens > 0)
        if not num_speculative_tokens:
            return torch.empty(len(slots_R) // 4, 0, dtype=torch.int64)
        drafts_BK = slots_R.view(-1, num_speculative_tokens)
        self._last_draft_probs = drafts_BK.unsqueeze(-1) / 100 if draws else None
        return drafts_BK

    def _sample_from_logits(self, logits: Tensor, metadata: Any) -> tuple[Tensor, Tensor | None]:
        if not self._enable_probabilistic_draft_probs:
            return logits.argmax(-1), None
        probs = logits.softmax(-1)
        return torch.multinomial(probs, 1, generator=metadata.generator).squeeze(1), probs


@pytest.fixture
def proposer(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Any:
    """A class of its own in each test, with the plugin in it.

    This vLLM has no CUDA graphs that the plugin knows: it loses both kinds of them alone.
    """
    made = type("SpecDecodeBaseProposer", (), dict(vars(Proposer)))
    put_module(monkeypatch, PROPOSER, SpecDecodeBaseProposer=made)
    put_module(monkeypatch, "vllm.version", __version_tuple__=(0, 32, 0))
    put_module(monkeypatch, "vllm.distributed", get_tensor_model_parallel_rank=lambda: 0)
    put_module(monkeypatch, "vllm.logger", init_logger=logging.getLogger)
    put_module(monkeypatch, CONFIG)
    monkeypatch.setenv("PEAGLE_VLLM", "1")
    plugin.register()
    steps, walks = caplog.messages
    assert steps.startswith("peagle leaves the steps of a schedule of K in pieces: cannot import")
    assert walks.startswith("peagle launches the kernels of corrections one by one: cannot import")
    plugin.register()
    return made()


def loaded_with(proposer: Any, head: Path, target: Path = BUNDLED_TARGET) -> Any:
    proposer.draft_model_config = SimpleNamespace(model=str(head), revision=None)
    proposer.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(model=str(target), revision=None)
    )
    proposer.load_model("the target")
    return proposer


# ---- fewer drafts than K --------------------------------------------------------------------


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("k", [0, 1, 2, 3, 4])
def test_a_step_gets_the_first_drafts_of_each_request(proposer: Any, k: int, draws: bool) -> None:
    slots_BK = torch.arange(12).view(3, 4)
    drafts_BK = proposer.propose(k, slots_BK.flatten(), draws=draws)
    assert drafts_BK.is_contiguous() and drafts_BK.tolist() == slots_BK[:, :k].tolist()
    assert proposer.needs_extra_input_slots, "of the next step"
    if draws and k:
        assert torch.equal(proposer._last_draft_probs, drafts_BK.unsqueeze(-1) / 100)


def test_other_drafters_are_left_as_they_are(proposer: Any) -> None:
    proposer.parallel_drafting = False
    drafts_BK = proposer.propose(num_speculative_tokens=2, slots_R=torch.arange(6), draws=False)
    assert drafts_BK.tolist() == [[0, 1], [2, 3], [4, 5]]


# ---- the correction of a head ---------------------------------------------------------------


def made_head(folder: Path, *, is_pruned: bool = True, has_embedding: bool = True) -> Path:
    head = SavedHead.read(BUNDLED_PEAGLE)
    head = (pruned(head, range(0, 2000, 3)) if is_pruned else head).write(folder)
    if not has_embedding:
        edit_tensors(head, lambda tensors: tensors.pop("embed_tokens.weight"))
    add_correction(head)
    return head


@pytest.mark.parametrize("is_pruned", [False, True])
@pytest.mark.parametrize("has_embedding", [False, True])
def test_the_tables_are_those_of_our_engine(
    proposer: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    is_pruned: bool,
    has_embedding: bool,
) -> None:
    head = made_head(tmp_path / "head", is_pruned=is_pruned, has_embedding=has_embedding)
    drafter = load_drafter(head, TargetModel.load(BUNDLED_TARGET, dtype=torch.float32))
    ours = load_correction(head, drafter)
    with caplog.at_level(logging.INFO):
        proposer.peagle_walks = "graphs that read other weights"
        theirs = loaded_with(proposer, head).peagle_correction
        assert proposer.peagle_walks is None
    (line,) = caplog.messages
    assert f"drafts are corrected by {head} (rank 4, width 8)" in line
    assert proposer.loaded == "the target" and ours is not None
    torch.testing.assert_close(theirs.correction.weight_Vr, ours.weight_Vr)
    torch.testing.assert_close(theirs.correction.tokens_VW, ours.tokens_VW)
    torch.testing.assert_close(theirs.d2t, drafter.d2t)


def test_heads_without_one_and_other_methods_draft_as_without_peagle(
    proposer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head = made_head(tmp_path / "head")
    (head / "correction.st").unlink()
    with caplog.at_level(logging.INFO):
        loaded_with(proposer, head)
    assert "has no correction" in caplog.text
    assert proposer._sample_draft_tokens(1, 2) == ("as without peagle", 1, 2)
    proposer.parallel_drafting = False
    assert loaded_with(proposer, BUNDLED_PEAGLE).peagle_correction is None


def test_a_correction_of_another_head_ends_the_start(proposer: Any, tmp_path: Path) -> None:
    head = made_head(tmp_path / "head")
    shutil.copy(BUNDLED_PEAGLE / "correction.st", head)
    with pytest.raises(CheckpointError, match=r"correction\.st"):
        loaded_with(proposer, head)


# ---- the walk -------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["argmax", "one launch a slot", "drawn", "drawn, all greedy"])
@pytest.mark.parametrize("is_pruned", [False, True])
def test_each_slot_knows_the_draft_before_it(
    is_pruned: bool, way: str, proposer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against plain products of a row."""
    torch.manual_seed(0)
    num_requests, k, width, num_ids = 3, proposer.num_speculative_tokens, 24, 50
    ids = torch.arange(0, num_ids, 2 if is_pruned else 1)
    embedding, lm_head = torch.randn(num_ids, width), torch.randn(len(ids), width)
    correction = random_correction(width, rank=8, width=16)
    ready = DraftCorrection(correction, embedding, lm_head)
    hidden = torch.randn(num_requests * k, width)
    if is_pruned:
        proposer.model = SimpleNamespace(lm_head=lm_head, logits_processor=lambda w, x: x @ w.T)
    else:
        proposer.model = SimpleNamespace(compute_logits=lambda x: x @ lm_head.T)
    d2t = ids - torch.arange(len(ids)) if is_pruned else None
    proposer.peagle_correction = corrected_drafts.Corrected(ready, d2t)
    proposer._enable_probabilistic_draft_probs = way.startswith("drawn")
    metadata = SimpleNamespace(all_greedy="greedy" in way, generator=torch.Generator())
    if way == "drawn, all greedy":
        proposer._sample_from_logits = lambda logits, _: (logits.argmax(-1), None)
    if way == "one launch a slot":
        pytest.importorskip("triton", reason="needs triton")
        monkeypatch.setattr(corrected_drafts, "has_kernels", lambda _: True)
    drafts, probs = proposer._sample_draft_tokens(hidden, metadata)
    assert drafts.dtype == torch.int64 and drafts.shape == (num_requests * k,)
    assert (probs is None) == (way != "drawn")
    changed = 0
    for row, token in enumerate(drafts.tolist()):
        logits = lm_head @ hidden[row]
        if slot := row % k:
            before = embedding[drafts[row - 1]]
            corrected = hidden[row] + term_of(correction, hidden[row], before, slot)
            changed += int(logits.argmax() != (lm_head @ corrected).argmax())
            logits = lm_head @ corrected
        if probs is None:
            assert token == ids[logits.argmax()]
            continue
        expected = torch.zeros(num_ids).index_copy(0, ids, logits.softmax(-1))
        torch.testing.assert_close(probs[row], expected, atol=1e-5, rtol=1e-4)
        assert token in ids
    assert changed > 4
