"""The recipe that shows what adapting brings: its prompts, and all its steps on a tiny pair."""

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import make_drafter, make_target_folder
from tests.recipes.pretraining import ROOT

from peagle.cli.main import run
from peagle.evaluation.prompts import load_prompt_set
from peagle.models.checkpoint import save_drafter
from peagle.models.fingerprint import TargetFingerprint
from peagle.models.target import TargetModel


@pytest.fixture(scope="module")
def recipe() -> Any:
    """`adapt.py`, under a name that no other recipe has."""
    path = ROOT / "recipes" / "smollm2" / "adapt.py"
    spec = importlib.util.spec_from_file_location("smollm2_adapt", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])  # other recipes have scripts of the same names
        spec.loader.exec_module(module)
    return module


def test_prompts_are_distinct_and_none_of_those_that_measure(recipe: Any) -> None:
    sets = map(load_prompt_set, ("form_json", "gsm8k", "humaneval", "heldout_code"))
    measured = {prompt.text for one in sets for prompt in one}
    for kind in recipe.KINDS:
        prompts = recipe.prompts_of(kind, 60)
        assert len(set(prompts)) == 60 and not measured & set(prompts)
        assert recipe.prompts_of(kind, 20) == prompts[:20]


@pytest.mark.slow
def test_all_steps_and_that_done_ones_are_skipped(
    recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target, head = tmp_path / "target", tmp_path / "peagle"
    model = TargetModel.load(make_target_folder(target, max_position_embeddings=512))
    drafter = make_drafter(model, max_position_embeddings=512)
    save_drafter(head, drafter, fingerprint=TargetFingerprint.of(model))
    ran: list[str] = []

    def run_jobs(jobs: Sequence[Any], *_: Any) -> dict[str, int]:
        """Run a job in this process; a random target's own prompts would be dropped."""
        (job,) = jobs
        ran.append(job.name)
        if job.name == "old-prompts":
            lines = [json.dumps({"prompt": f"{n} {n * n}"}) + "\n" for n in range(130)]
            Path(job.command[-1]).write_text("".join(lines))
            return {job.name: 0}
        return {job.name: run([*job.command[3:]])}

    monkeypatch.setattr(recipe, "run_jobs", run_jobs)
    words = ["--target", target, "--draft", head, "--kind", "arithmetic", "--steps", 1]
    words += ["--prompts", 100, "--max-tokens", 16, "--refusals", 2, "--output", tmp_path / "all"]
    words += ["--old-share", 0.5]
    monkeypatch.setattr("sys.argv", ["adapt.py", *map(str, words)])
    recipe.main()
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["traffic"]["output_tokens"] == 1600
    for found in (told["correction"], told["head"]):
        assert found["requests"]["requests"] == 100 and found["steps"]["correction"] == 1
        assert found["requests"]["old_trained_on"] > 0.6 * found["requests"]["trained_on"]
        assert found["held_out"]["num_conversations"] == 10 <= found["old"]["num_conversations"]
        assert found["passed"] == (not found["refusal"])
    assert told["exchanged"]["refused"] == told["exchanged"]["tried"] == 2
    ran.clear()
    recipe.main()
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == told and not ran


def test_too_few_prompts_are_refused_before_anything_runs(
    recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--target", "t", "--prompts", "60", "--output", str(tmp_path / "all")]
    monkeypatch.setattr("sys.argv", ["adapt.py", *words])
    with pytest.raises(SystemExit) as ended:
        recipe.main()
    assert ended.value.code == 2 and "--prompts is 60" in capsys.readouterr().err
    assert not (tmp_path / "all").exists()
    monkeypatch.setitem(recipe.KINDS, "code", lambda: iter("aab"))
    with pytest.raises(ValueError, match="3 prompts are wanted; there are 2 of kind code"):
        recipe.prompts_of("code", 3)
