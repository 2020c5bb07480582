"""`benchmarks/training/ablate.py`: heads that differ in one thing, and what is printed of them."""

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "training" / "ablate.py"
if not SCRIPT.is_file():
    pytest.skip("a source archive has no benchmarks", allow_module_level=True)


@pytest.mark.slow
def test_variants_differ_in_one_thing(
    target_folder: Path,
    responses: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = tmp_path / "any.toml"
    config.write_text(
        f'target = "{target_folder}"\noutput = "unused"\n[head]\nnum_layers = 2\n[data]\n'
        f'train = "{responses}"\nvalidation = "{responses}"\nbatch_tokens = 256\n'
        "length_multiple = 8\n[method]\ndepth = 8\n[optimizer]\nsteps = 99\n"
    )
    names = ("base", "twin", "1-layer", "k5", "frozen-embeddings")
    options = ["--output", str(tmp_path / "out"), "--steps", "2", "--variants", ",".join(names)]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(config), *options])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["variant"] for line in lines] == list(names)
    found = {line["variant"]: line for line in lines}
    records = {n: json.loads((tmp_path / "out" / n / "train.json").read_text()) for n in names}
    base = records["base"]["config"]
    for name, changes in (
        ("twin", {"seed": (0, 2)}),
        ("1-layer", {"num_layers": (2, 1)}),
        ("k5", {"depth": (8, 5)}),
        ("frozen-embeddings", {"freeze_embeddings": (False, True)}),
    ):
        other = records[name]["config"]
        differ = {
            key: (value, other[section][key])
            for section in ("head", "method", "optimizer", "run", "data")
            for key, value in base[section].items()
            if value != other[section][key]
        }
        assert differ == changes, name
    assert all(line["steps"] == 2 for line in lines)
    assert found["1-layer"]["parameters"] < found["base"]["parameters"]
    assert list(found["base"]["acceptance_length"]) == ["3", "5", "7"]
    assert list(found["k5"]["acceptance_length"]) == ["3", "5"]
