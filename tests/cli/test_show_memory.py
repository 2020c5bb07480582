"""The memory plan that commands print: where, when, and beside what."""

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peagle import EngineConfig
from peagle.cli.flags import Given
from peagle.cli.settings import Setting
from peagle.cli.setup import Setup
from peagle.engine import LLMEngine
from peagle.engine.memory_plan import MemoryPlan, make_memory_plan
from peagle.models.target import TargetModel
from tests.cli.conftest import Pair, Peagle
from tests.test_llm_chat import TEMPLATE


@pytest.fixture(autouse=True)
def memory_plan(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> MemoryPlan:
    """One that every engine has that makes none of its own."""
    plan = make_memory_plan(
        TargetModel.load(pair.target),
        None,
        EngineConfig(),
        max_model_len=2048,
        num_lookahead_slots=2,
        peak_bytes=0,
    )
    monkeypatch.setattr(LLMEngine, "memory_plan", plan, raising=False)
    return plan


def test_on_demand_to_standard_error(peagle: Peagle, pair: Pair) -> None:
    call = ("generate", *pair.options, "--prompt", "def f(x):", "--max-new-tokens", 4)
    plain, asked = peagle(*call), peagle(*call, "--show-memory")
    assert plain.status == asked.status == 0
    assert plain.out == asked.out
    assert "memory on" not in plain.err
    assert asked.err.startswith("memory on cpu\n  target weights ")
    for line in ("KV cache", "longest context   2,048 tokens", "requests at once  16 of 2,048"):
        assert f"\n  {line}" in asked.err
    assert "tokens/s" in asked.err and "\x1b" not in asked.err


def test_output_for_machines_stays_as_it_is(peagle: Peagle, pair: Pair) -> None:
    call = ("generate", *pair.options, "--prompt", "x", "--max-new-tokens", 4, "--format", "json")
    result = peagle(*call, "--show-memory")
    (line,) = result.out.splitlines()
    assert json.loads(line)["token_ids"] == json.loads(peagle(*call).out)["token_ids"]
    assert "memory on cpu" in result.err


def test_in_a_conversation(
    peagle: Peagle, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = tmp_path / "template.txt"
    template.write_text(TEMPLATE)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    models = ("--target", pair.target, "--chat-template", template)
    result = peagle("chat", *models, "--max-new-tokens", 4, "--format", "json", "--show-memory")
    assert result.status == 0, result.err
    assert json.loads(result.out)["turn"] == 1
    assert "memory on cpu" in result.err


def test_settings_are_shown_without_it(peagle: Peagle) -> None:
    result = peagle("generate", "--target", "org/x", "--show-config", "--show-memory")
    assert (result.status, result.err) == (0, "")
    assert json.loads(result.out)["engine"]["gpu_memory_utilization"] == 0.9


@pytest.mark.parametrize(
    ("kind", "flags", "is_shown"),
    [("cuda", (), True), ("cuda", ("show_memory",), True), ("cpu", (), False)],
)
def test_a_card_needs_no_flag(
    kind: str,
    flags: tuple[str, ...],
    is_shown: bool,
    memory_plan: MemoryPlan,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def load(*arguments: Any, **options: Any) -> Any:
        target = SimpleNamespace(device=torch.device(kind))
        return SimpleNamespace(target=target, engine=SimpleNamespace(memory_plan=memory_plan))

    monkeypatch.setattr("peagle.llm.LLM", load)
    Setup(Given({flag: Setting(True, f"--{flag}") for flag in flags})).load()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (f"{memory_plan}\n" if is_shown else "")
