"""What can be refused by looking at files, ports and packages is refused before torch is loaded.

One process runs all commands, one after another; it has nothing else to import torch for.
"""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from peagle.extras import install_extra
from tests.cli.conftest import environment
from tests.gguf_files import LLAMA, gguf_bytes

OWN = ["--target", "./none", "--draft", "bundled"]
TREES = ["--draft", "bundled", "--parallel-drafting-spec"]
PREPARED = ["d.jsonl", "--target", "bundled", "-o", "o.jsonl"]
COMMANDS: list[tuple[list[str], str]] = [
    (["generate", "--prompt", "x", "--target", "./none"], "target model 'none' is not there"),
    (["generate", "--prompt", "x", "--target", "none"], "target model 'none' is not there"),
    (["generate", "--prompt", "x", "--draft", "./none"], "draft head 'none' is not there"),
    (["generate", "--prompts", "none.txt"], "'none.txt' is not readable"),
    (["generate", "--prompt", "x", "--json-schema", "none.json"], "'none.json' is not readable"),
    (["generate", "--prompt", "x", "--json-object"], install_extra("grammar")),
    (["generate", "--prompt", "x", *TREES, '{"prediction_depth": 9}'], "is 9; expected at most 8"),
    (["generate", "--prompt", "x", *TREES, "{}", "-k", "9"], "is 9; expected at most 8, which"),
    (["generate", "--show-config", *TREES, '{"prediction_depth": 9}'], "is 9; expected at most 8"),
    (
        [
            *("generate", "--prompt", "x", "--draft", "bundled-eagle3"),
            *(*TREES[2:], '{"num_parallel_trees": 9}'),
        ],
        "num_parallel_trees is 9; expected 1 to 8: the nodes of each depth",
    ),
    (["chat", "--target", "./none"], "target model 'none' is not there"),
    (["chat"], "The bundled code model has no chat template"),
    (["chat", "--target", "./model"], "'./model' has no chat template"),
    (["serve", "--port", "PORT"], install_extra("serve")),
    (["serve", "--target", "./none"], "target model 'none' is not there"),
    (["serve", "--correction", "sql=./none"], "'sql' is './none', which is no file"),
    (["serve", "--correction", "sql=./empty"], "'./empty', which is no file and no folder with"),
    (["serve", "--compare-draft", "./none"], "EAGLE-3 head 'none' is not there"),
    (["serve", "--chat-template", "none.jinja"], "'none.jinja' cannot be read"),
    (["eval", *OWN], "target model 'none' is not there"),
    (["eval", "--method", "x=./none"], "draft head 'none' is not there"),
    (["eval", "--set", "none.jsonl"], "'none.jsonl' is not"),
    (["eval", *TREES, '{"prediction_depth": 9}'], "is 9; expected at most 8, which the head"),
    (["eval", "--certify", *TREES, '{"prediction_depth": 9}'], "is 9; expected at most 8, which"),
    (["bench", *TREES, '{"prediction_depth": 9}'], "is 9; expected at most 8, which the head"),
    (["eval", "./none"], "target model 'none' is not there"),
    (["eval", "--certify", "--samples", "-1"], "samples of the certificate is -1"),
    (["eval", "--certify", "--limit", "0"], "prompts of the certificate is 0"),
    (["eval", "--certify", "--set", "humanevil"], "Did you mean humaneval"),
    (["eval", "--certify", "--output", "d.jsonl"], "--output 'd.jsonl' cannot be written"),
    (["eval", "--output", "d.jsonl"], "--output 'd.jsonl' cannot be written"),
    (["eval", "--output", "earlier", "--limit", "3"], 'made with sets {"humaneval": 2}, not'),
    (["bench", "--output", "d.jsonl"], "--output 'd.jsonl' cannot be written"),
    (["bench", "--output", "earlier"], 'made with sets {"humaneval": 2}, not {"humaneval": 16}'),
    (["bench", "--objective", "500"], "The objective is '500'"),
    (["tune", "--output", "d.jsonl"], "--output 'd.jsonl' cannot be written"),
    (["tune", "--output", "earlier"], 'made with draft "other", not "bundled/peagle"'),
    (["data", "regenerate", "run.toml", "-o", "begun.jsonl", "--seed", "5"], "with seed 0, now it"),
    (["data", "regenerate", "run.toml", "-o", "x.jsonl", "--raw", "--thinking"], "--raw uses no"),
    (
        ["data", "synthesize", "--count", "9", "-o", "written.jsonl", "--seed", "5"],
        "with seed 0, now it",
    ),
    (
        ["data", "synthesize", "--count", "9", "-o", "x.jsonl", "--temperature", "0"],
        "--temperature is 0, at which",
    ),
    (
        ["data", "synthesize", "--count", "9", "-o", "x.jsonl", "--system-file", "none.txt"],
        "--system-file 'none.txt' is not readable",
    ),
    (
        ["data", "synthesize", "--count", "9", "-o", "x.jsonl", "--system-file", "d.txt"],
        "--system-file 'd.txt' is empty",
    ),
    (["data", "synthesize", "--count", "9", "-o", "x.txt"], "expected a name that ends in"),
    (["data", "synthesize", "--count", "9", "-o", "y.jsonl"], "'y.dropped.jsonl' is a folder"),
    (
        ["data", "synthesize", "--count", "9", "-o", "x.jsonl", "--target", "./none"],
        "target model 'none' is not there",
    ),
    (["bench", *OWN], "target model 'none' is not there"),
    (["bench", "--eagle3", "./none"], "EAGLE-3 head 'none' is not there"),
    (["bench", "--set", "none.jsonl"], "'none.jsonl' is not"),
    (["tune", *OWN], "target model 'none' is not there"),
    (["tune", "--acceptance", "none.json"], "'none.json' is not readable"),
    (["demo", *OWN], "target model 'none' is not there"),
    (["doctor", *OWN], "target model 'none' is not there"),
    (["doctor", "--prompts", "none.txt"], "'none.txt' is not readable"),
    (["train", "none.toml"], "'none.toml' is not there"),
    (["train", "run.toml"], "data.train is 'none.safetensors', which is not there"),
    (["train", "run.toml", "--set", "target=none"], "none' is not there"),
    (["train", "ready.toml", "--set", "optimizer.stps=2"], "Did you mean 'optimizer.steps'?"),
    (["train", "ready.toml", "--set", "run.minutes=2"], "steps is 1 and run.minutes is 2, which"),
    (["train", "ready.toml", "--set", "data.train=d.txt"], "expected a file that ends in .jsonl"),
    (["train", "ready.toml", "--set", "data.features=none"], "`peagle data features` writes it"),
    (["train", "ready.toml", "--set", "head.init=whole"], "is a whole model (LlamaForCausalLM)"),
    (["train", "ready.toml", "--set", "target=empty"], "has no config.json"),
    (["train", "ready.toml", "--set", "target=huge"], "are free; name another output"),
    (["train", "ready.toml", "--resume"], "no checkpoint to resume from"),
    (["train", "ready.toml", "--output", "begun"], "holds an earlier run"),
    (["train", "ready.toml", "--output", "begun", "--resume"], "run.seed 7 (now 0)"),
    (["data", "prepare", "run.toml", *PREPARED[1:]], "ends in '.toml'; expected .jsonl or"),
    (
        ["data", "prepare", "d.jsonl", "bad.jsonl", *PREPARED[1:]],
        "bad.jsonl, line 1 ends in",
    ),
    (["data", "prepare", *PREPARED, "--max-length", "2"], "limit is 2; expected at least 3"),
    (["data", "prepare", *PREPARED, "--validation-share", "1"], "validation share is 1"),
    (["data", "prepare", *PREPARED, "-o", "d.jsonl"], "is read and would be written"),
    (["data", "prepare", *PREPARED, "-o", "there.jsonl"], "is there already"),
    (["data", "prepare", *PREPARED, "-o", "o.txt"], "must end in .safetensors or .jsonl"),
    (["data", "prepare", "none.jsonl", "--target", "bundled", "-o", "o.jsonl"], "is not there"),
    (["data", "prepare", "d.jsonl", "--target", "./none", "-o", "o.jsonl"], "is not there"),
    (["data", "inspect", "none.jsonl"], "'none.jsonl' is not there"),
    (["data", "inspect", "d.jsonl", "--target", "./none"], "is not there"),
    (["data", "features", "none.jsonl", "--target", "bundled", "-o", "o"], "is not there"),
    (["data", "features", "d.jsonl", "--target", "./none", "-o", "o"], "is not there"),
    (["data", "regenerate", "none.jsonl", "-o", "o.jsonl"], "is not there"),
    (["make-head", "./none", "-o", "made"], "target model 'none' is not there"),
    (["make-head", "bundled", "-o", "made", "--minutes", "0"], "--minutes is 0; expected a finite"),
    (
        ["make-head", "bundled", "-o", "made", "--set", "head.layers=3"],
        "--set head.layers=3: head.layers is not a known key",
    ),
    (["make-head", "bundled", "-o", "empty/..", "--head", "eagle3"], "did not begin it"),
    (["make-head", "bundled", "-o", "made", "--prompts", "none.jsonl"], "is not there"),
    (["data", "regenerate", "d.jsonl", "--target", "./none", "-o", "o.jsonl"], "is not there"),
    (["convert", "./none", "out", "--format", "vllm"], "'./none' is not there"),
    (["push", "./none", "owner/name"], "'none' is not there"),
    (
        ["deploy", "sagemaker", "create", "./none", "--region", "us-east-1"],
        "'./none' is not a folder",
    ),
]
COMMANDS += [
    ([*words, "./cut.gguf"], "'cut.gguf' is cut: tensor 'token_embd.weight' ends at byte")
    for words in (
        ["generate", "--prompt", "x", "--target"],
        ["generate", "--prompt", "x"],
        ["chat"],
        ["serve", "--target"],
        ["serve"],
        ["eval", "--target"],
        ["bench", "--draft", "bundled", "--target"],
        ["tune", "--draft", "bundled", "--target"],
        ["demo", "--draft", "bundled", "--target"],
        ["doctor", "--draft", "bundled", "--target"],
        ["data", "prepare", "d.jsonl", "-o", "o.jsonl", "--target"],
        ["data", "inspect", "d.jsonl", "--target"],
        ["data", "features", "d.jsonl", "-o", "o", "--target"],
        ["data", "regenerate", "d.jsonl", "-o", "o.jsonl", "--target"],
        ["data", "synthesize", "--count", "1", "-o", "o.jsonl", "--target"],
        ["make-head", "-o", "made"],
    )
]
COMMANDS += [
    (["train", "run.toml", "--set", "target=cut.gguf"], "cut.gguf' is cut: tensor 'token_embd"),
    (["convert", "cut.gguf", "out", "--format", "hf"], "'cut.gguf' is cut: tensor"),
    (["generate", "--prompt", "x", "--target", "part.gguf"], "is part 2 of 3 of a split model"),
    (["generate", "--prompt", "x", "--target", "whole.gguf"], install_extra("gguf")),
    (["train", "run.toml", "--set", "target=whole.gguf"], install_extra("gguf")),
    (["convert", "whole.gguf", "out", "--format", "hf"], install_extra("gguf")),
    (["convert", "whole.gguf", "out", "--format", "vllm"], "given with --format vllm; expected a"),
    (["convert", "model", "out", "--format", "hf"], "expected a GGUF file for --format hf"),
    (["convert", "whole.gguf", "out", "--format", "hf", "--force"], "--force is for heads"),
    (["generate", "--prompt", "x", "--draft", "whole.gguf"], "head 'whole.gguf' is a file, not"),
    (
        ["deploy", "sagemaker", "create", "./whole.gguf", "--region", "us-east-1"],
        "is a GGUF file; make a folder of it with `peagle convert",
    ),
]
_CODE = """
import contextlib, io, json, sys
from peagle.cli.main import run
slow = "torch", "transformers", "huggingface_hub"
sys.modules["xgrammar"] = sys.modules["fastapi"] = sys.modules["gguf"] = None
told = []
for command in json.load(sys.stdin):
    with contextlib.redirect_stderr(io.StringIO()) as text:
        status = run(command)
    told.append([status, text.getvalue(), [name for name in slow if name in sys.modules]])
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str, list[str]]]:
    """Exit status, message and slow imports of each command."""
    folder: Path = tmp_path_factory.mktemp("refused")
    (folder / "d.jsonl").write_text('{"prompt_token_ids": [1], "response_token_ids": [2]}\n')
    (folder / "run.toml").write_text(
        'target = "bundled"\noutput = "o"\n[data]\ntrain = "none.safetensors"\n'
        "[optimizer]\nsteps = 1\n"
    )
    (folder / "ready.toml").write_text(
        'target = "bundled"\noutput = "o"\n[data]\ntrain = "d.jsonl"\n[optimizer]\nsteps = 1\n'
    )
    (folder / "bad.jsonl").write_text("{bad")
    (folder / "whole.gguf").write_bytes(gguf_bytes())
    (folder / "cut.gguf").write_bytes(gguf_bytes()[:-1])
    split = {"split.count": 3, "split.no": 1}
    (folder / "part.gguf").write_bytes(gguf_bytes(LLAMA | split))
    for name in ("d.txt", "there.jsonl"):
        (folder / name).touch()
    sizes = {"hidden_size": 2**22, "intermediate_size": 2**24, "vocab_size": 2**20}
    sizes |= {"num_attention_heads": 128, "num_hidden_layers": 9}
    (folder / "huge").mkdir()
    (folder / "huge" / "config.json").write_text(json.dumps(sizes))
    (folder / "empty").mkdir()
    (folder / "y.dropped.jsonl").mkdir()
    (folder / "whole").mkdir()
    (folder / "whole" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (folder / "begun" / "checkpoint").mkdir(parents=True)
    state = {"step": 1, "seed": 7, "progress": {}}
    (folder / "begun" / "checkpoint" / "state.json").write_text(json.dumps(state))
    earlier = folder / "earlier"
    earlier.mkdir()
    provenance = {"target": "t", "command": "", "created": "", "environment": {}}
    settings = {"sets": {"humaneval": 2}, "seed": 0}
    results = {"format_version": 1, "provenance": provenance, "settings": settings, "entries": []}
    (earlier / "acceptance.json").write_text(json.dumps(results))
    for name, settings in (
        ("cells.jsonl", {"sets": {"humaneval": 2}}),
        ("tune_cells.jsonl", {"draft": "other"}),
    ):
        (earlier / name).write_text(json.dumps({"format_version": 1, "settings": settings}) + "\n")
    (folder / "begun.jsonl").write_text("{}\n")
    options = {"sampling": {"max_tokens": 2048}, "seed": 0}
    (folder / "begun.jsonl.meta.json").write_text(json.dumps({"options": options}))
    (folder / "written.jsonl").write_text("{}\n")
    options = {"sampling": {"temperature": 1.0}, "seed": 0, "systems": [], "turns": 1}
    (folder / "written.jsonl.meta.json").write_text(json.dumps({"options": options}))
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    commands = [[word.replace("PORT", "8000") for word in command] for command, _ in COMMANDS]
    result = subprocess.run(
        [sys.executable, "-c", _CODE],
        input=json.dumps(commands),
        env=environment(),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("number", range(len(COMMANDS)), ids=lambda n: " ".join(COMMANDS[n][0]))
def test_it_is_refused_before_torch_is_imported(
    told: list[tuple[int, str, list[str]]], number: int
) -> None:
    status, message, imported = told[number]
    assert status == 2 and COMMANDS[number][1] in message, message
    assert imported == []


def test_a_taken_port_is_refused_before_torch_is_imported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code = (
            "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
            f"from peagle.cli.main import run; sys.exit(run(['serve', '--port', '{port}']))"
        )
        process = [sys.executable, "-c", code]
        result = subprocess.run(process, env=environment(), capture_output=True, text=True)
    assert result.returncode == 2 and f"port {port}" in result.stderr, result.stderr
