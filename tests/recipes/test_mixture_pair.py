"""The mixture pair: its sizes, how it is trained, and that its check finds a wrong token."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO, Any

import numpy as np
import pytest
import torch
from tests.conftest import byte_tokenizer, make_drafter
from tests.models.tiny import make_model
from tests.recipes.pretraining import ROOT, VOCAB, scripts
from transformers import AutoConfig, AutoModelForCausalLM

from peagle.config import SpeculativeConfig
from peagle.llm import LLM
from peagle.models.checkpoint import save_drafter
from peagle.models.fingerprint import TargetFingerprint
from peagle.models.target import TargetModel
from peagle.training.config import TrainConfig
from serving.warm import WarmProcess

RECIPE = ROOT / "recipes" / "mixture_pair"


def load_script(name: str) -> ModuleType:
    scripts()
    sys.path.append(str(RECIPE))
    try:
        return __import__(name)
    finally:
        sys.path.remove(str(RECIPE))


check = load_script("check")


def test_the_target_is_the_mixture_that_is_promised() -> None:
    values = json.loads((RECIPE / "target.json").read_text())
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == 11
    assert (config.num_experts, config.num_experts_per_tok, config.num_hidden_layers) == (8, 2, 6)
    head = TrainConfig.read(RECIPE / "peagle.toml")
    assert head.method.name == "peagle" and head.method.depth >= check.K
    assert head.target.name == "target" and "mixture_pair" in str(head.target)


def test_every_weight_of_a_mixture_is_trained_and_its_tokens_are_spread(tmp_path: Path) -> None:
    scripts()
    import pretrain

    values = json.loads((RECIPE / "target.json").read_text())
    values |= {"vocab_size": VOCAB, "hidden_size": 32, "moe_intermediate_size": 16, "head_dim": 8}
    (tmp_path / "tiny.json").write_text(json.dumps(values | {"num_hidden_layers": 2}))
    rng = np.random.default_rng(0)
    for name, count in (("train", 4000), ("val", 400)):
        rng.integers(1, VOCAB, count).astype("<u2").tofile(tmp_path / f"{name}.u16")
    settings = {"steps": 12, "minutes": None, "batch": 8, "seq_len": 16, "optimizer": "muon"}
    settings |= {"lr": 1e-2, "warmup": 2, "decay_share": 0.5, "weight_decay": 0.1, "clip": 1.0}
    config = pretrain.TrainConfig(**settings, z_loss=1e-5, seed=0)
    model = pretrain.build_model(tmp_path / "tiny.json", 0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = pretrain.Trainer(model, config, tmp_path, 0.0)
    tokens = trainer.batch()
    _, balanced = trainer.forward(model, tokens)
    model.config.router_aux_loss_coef = 0.0
    _, alone = trainer.forward(model, tokens)
    model.config.router_aux_loss_coef = 0.01
    # The loss is the number of chosen experts where tokens are spread evenly, and more elsewhere.
    assert 0.02 <= float((balanced - alone).detach()) < 0.1
    assert trainer.run()["train_loss"] < 5
    unchanged = [name for name, p in model.named_parameters() if p.equal(before[name])]
    assert any("experts" in name for name in before) and unchanged == []


# ---- the check ----


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random mixture and head, in the folders that make.py writes."""
    root = tmp_path_factory.mktemp("mixture")
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "head_dim": 16,
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 4096}
    make_model("qwen3_moe", **sizes, **experts).save_pretrained(root / "target")
    byte_tokenizer().save_pretrained(root / "target")
    target = TargetModel.load(root / "target")
    drafter = make_drafter(target, max_position_embeddings=4096)
    fingerprint = TargetFingerprint.of(target)
    save_drafter(root / "peagle" / "head", drafter, fingerprint=fingerprint)
    return root


LOAD = check.Load(num_prompts=2, max_tokens=10, concurrency=2)


@pytest.mark.parametrize("precision", check.PRECISIONS)
def test_outputs_are_identical_in_every_precision(pair: Path, precision: str) -> None:
    found = check.check(pair, precision, LOAD)
    assert found["compared"] == 2 and found["faults"] == 0
    if precision != "bfloat16":
        assert found["identical"] == 2
    expected = precision if precision in ("float64", "bfloat16") else "float32"
    assert found["computed_in"] == expected
    assert 0 < found["rounding"] < (0.1 if precision == "bfloat16" else 1e-4)
    touched = found["experts_touched"]
    assert 2 <= touched["plain"] <= touched["peagle"] <= found["num_experts"] == 4


def test_a_wrong_token_is_a_fault(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = LLM.generate

    def wrong(self: LLM, *arguments: Any, **options: Any) -> Any:
        outputs = generate(self, *arguments, **options)
        if isinstance(self.engine.speculative, SpeculativeConfig):
            tokens = outputs[1].outputs[0].token_ids
            tokens[3] = (tokens[3] + 1) % 300
        return outputs

    monkeypatch.setattr(LLM, "generate", wrong)
    found = check.check(pair, "float32", LOAD)
    assert (found["identical"], found["faults"], found["near_ties"]) == (1, 1, 0)
    (difference,) = found["differences"]
    assert (difference["prompt"], difference["position"]) == ("1", 3)
    assert difference["gap"] > 1e-4


# ---- the whole recipe ----


def warm(command: list[str], *, stdout: IO[bytes], stderr: int, env: dict[str, str]) -> WarmProcess:
    """Stand in for `subprocess.Popen`, with a process that has imported torch already."""
    python, *words = command
    assert (python, stderr) == (sys.executable, subprocess.STDOUT)
    log = Path(str(stdout.name))
    if words[:2] == ["-m", "peagle"]:
        return WarmProcess(words[1:], env, log)
    return WarmProcess(words, env, log, script=Path(words[0]))


@pytest.mark.slow
def test_the_whole_recipe_in_tiny_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make = load_script("make")
    names = ("STDOUT", "TimeoutExpired")
    started = SimpleNamespace(Popen=warm, **{name: getattr(subprocess, name) for name in names})
    monkeypatch.setattr(make, "subprocess", started)
    words = ["make.py", "--output", str(tmp_path / "out"), "--small", "--minutes", "9"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        make.main()
    printed = capsys.readouterr().out
    assert ended.value.code == 0, printed
    last = printed.strip().splitlines()[-1]
    assert last.startswith("RESULT ")
    result = json.loads(last.removeprefix("RESULT "))
    assert result["passed"] and result["error"] is None
    assert [one["precision"] for one in result["check"]] == list(check.PRECISIONS)
    assert all(one["identical"] + one["near_ties"] == one["compared"] for one in result["check"])
    assert result["target"]["val_loss"] < 7.7 and result["head"][-1]["step"] == 12
    assert set(result["seconds"]) == {"text", "target", "responses", "data", "head", "check"}


def test_a_phase_that_fails_is_in_the_result(tmp_path: Path) -> None:
    """Without a text file there is no pair; the last line still is a RESULT."""
    make = load_script("make")
    phases = make.Phases(tmp_path, 1.0)
    with pytest.raises(RuntimeError, match=r"responses failed .*no such thing"):
        phases.run("responses", "-c", "raise SystemExit('no such thing')", result=tmp_path / "r")


def test_a_phase_ends_with_its_time_and_keeps_what_is_there(tmp_path: Path) -> None:
    make = load_script("make")
    phases = make.Phases(tmp_path, 0.02)  # 1.2 seconds
    file = tmp_path / "made"
    code = f"import time; open({str(file)!r}, 'w').write('x'); time.sleep(60)"
    phases.run("head", "-c", code, result=file, phase="head")
    assert file.exists() and phases.seconds["head"] < 15
