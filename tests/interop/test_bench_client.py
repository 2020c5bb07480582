"""vLLM's own client drives `peagle serve`, as benchmarks/serving/against_vllm.py starts both."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from peagle.backends.vllm.installation import VllmInstallation
from peagle.bundled import BUNDLED_PEAGLE, BUNDLED_TARGET

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "serving" / "against_vllm.py"


@pytest.mark.vllm
def test_vllms_client_drives_our_server(installation: VllmInstallation, tmp_path: Path) -> None:
    for name, source in (("target", BUNDLED_TARGET), ("peagle", BUNDLED_PEAGLE)):
        (tmp_path / name).symlink_to(source)
    results = tmp_path / "results.jsonl"
    words = [
        *("run", "--model", tmp_path, "--vllm-python", installation.python),
        *("--results", results, "--logs", tmp_path / "logs", "--variants", "peagle/k3"),
        *("--loads", "2/6:c2,2/5:r0.5", "--rounds", "2", "--seconds", "2", "--saturation", "8"),
        *("--max-num-seqs", "4", "--max-model-len", "256"),
        *("--peagle-args", "--device cpu --threads 1"),
    ]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, words)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    for line, tokens in zip(results.read_text().splitlines(), (6, 5), strict=True):
        found = json.loads(line)["result"]
        assert (found["completed"], found["failed"]) == (8, 0)
        assert found["total_output_tokens"] == 8 * tokens
        assert found["p99_ttft_ms"] > 0 < found["output_throughput"]
