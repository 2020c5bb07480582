"""GGUF files as targets: the same model and text as the folder they were made of, or a refusal."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import peagle.models.gguf_folder as gguf_folder
from peagle import LLM, SamplingParams
from peagle.backends.vllm.launch import VllmLaunch, with_head
from peagle.errors import CheckpointError, UserError
from peagle.models.gguf_folder import cached_folder, convert_gguf
from peagle.models.gguf_header import TYPES, read_gguf_header
from peagle.models.loading import find_model, resolve_model
from peagle.training.config import TrainConfig
from tests.fake_hub import message_of
from tests.gguf_files import (
    CHAT_TEMPLATE,
    LLAMA,
    WHOLE,
    gguf_bytes,
    merging_tokenizer,
    require_gguf,
    write_gguf,
)
from tests.models.tiny import make_model

TEXT = "def f(x):\n    return 'naïve' + \"<|endoftext|>\""
PROMPT_T = torch.tensor([[5, 99, 7, 200, 31, 64, 8, 250, 12, 3]])


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "peagle" / "gguf"


@pytest.fixture
def file(target_folder: Path, tmp_path: Path) -> Path:
    """The tiny Llama as a GGUF file of floats."""
    model = AutoModelForCausalLM.from_pretrained(target_folder)
    return write_gguf(model, tmp_path / "tiny.gguf")


# ---- what is read ----

GEMMA: dict[str, Any] = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 6,
    "tie_word_embeddings": True,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 8, "rope_theta": 5000.0}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 128, "rope_theta": 1e6}),
    "gemma2": ("gemma2", GEMMA),
    "gemma3": ("gemma3_text", GEMMA | {"num_hidden_layers": 7, "rope_theta": 1e6}),
}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_family_computes_what_its_own_folder_computes(tmp_path: Path, architecture: str) -> None:
    model_type, options = FAMILIES[architecture]
    model = make_model(model_type, **options).eval()
    made = convert_gguf(write_gguf(model, tmp_path / "x.gguf", architecture), tmp_path / "folder")
    assert (made.model_type, made.dtype) == (model_type, "float32")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "folder").eval()
    torch.testing.assert_close(loaded(PROMPT_T).logits, model(PROMPT_T).logits)


def _blocks(name: str, value: Tensor) -> str:
    """Q8_0 and Q4_1 by turns where a row has whole blocks; norms stay floats."""
    if value.dim() < 2 or value.shape[-1] % 32:
        return "F32"
    return "Q8_0" if "embed" in name or "o_proj" in name else "Q4_1"


@pytest.mark.slow
def test_quantised_weights_are_unpacked_as_transformers_unpacks_them(tmp_path: Path) -> None:
    gguf = require_gguf()
    model = make_model("llama", head_dim=8).eval()
    file = write_gguf(model, tmp_path / "q.gguf", kind_of=_blocks)
    llm = LLM(file, dtype="float64")
    folder = Path(llm.target.name)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    # transformers' own way, and the weights that the package's numpy code unpacks.
    own = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="q.gguf", dtype=torch.bfloat16, **gguf_folder._dequantised()
    ).double()
    state = {}
    for name, value in model.state_dict().items():
        kind = gguf.GGMLQuantizationType[_blocks(name, value)]
        packed = gguf.quants.quantize(value.float().numpy(), kind)
        state[name] = torch.from_numpy(gguf.quants.dequantize(packed, kind).copy()).bfloat16()
    model.double().load_state_dict(state)
    logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)(PROMPT_T).logits
    for other in (own, model):
        torch.testing.assert_close(logits, other(PROMPT_T).logits, rtol=0, atol=1e-9)
    text = AutoTokenizer.from_pretrained(tmp_path, gguf_file="q.gguf")
    ids = text(TEXT)["input_ids"]
    assert llm.tokenizer(TEXT)["input_ids"] == ids == merging_tokenizer()(TEXT)["input_ids"]
    expected = own.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)
    params = SamplingParams(max_tokens=16)
    assert llm.generate(TEXT, params)[0].token_ids == expected[0, len(ids) :].tolist()


def test_the_chat_template_and_the_ends_are_those_of_the_file(
    target_folder: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(target_folder)
    file = write_gguf(model, tmp_path / "x.gguf", eot_token_id=9)
    folder = resolve_model(file)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [0, 9]


@pytest.mark.parametrize(
    ("kinds", "dtype"), [("F16", "float16"), ("BF16", "bfloat16"), ("F32", "float32")]
)
def test_a_file_of_floats_keeps_its_type(tmp_path: Path, kinds: str, dtype: str) -> None:
    model = make_model("llama", head_dim=8)
    file = write_gguf(
        model,
        tmp_path / "x.gguf",
        kind_of=lambda _, value: kinds if value.dim() > 1 else "F32",
    )
    assert read_gguf_header(file).dtype == dtype
    assert convert_gguf(file, tmp_path / "out").dtype == dtype
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype == getattr(torch, dtype)


def test_the_table_of_types_is_that_of_the_package() -> None:
    gguf = require_gguf()
    sizes = {kind.value: (kind.name, *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    for number, kind in TYPES.items():
        assert sizes[number] == tuple(kind)


def test_only_the_file_is_read_not_what_lies_beside_it(file: Path) -> None:
    (file.parent / "tokenizer_config.json").write_text('{"chat_template": "other"}')
    (file.parent / "config.json").write_text('{"model_type": "gpt2"}')
    assert AutoTokenizer.from_pretrained(resolve_model(file)).chat_template == CHAT_TEMPLATE


def test_names_of_a_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    assert find_model("tiny.gguf") == find_model(Path("tiny.gguf")) == Path("tiny.gguf")
    shutil.copy(file, "sha256-blob")  # as some tools store it
    assert find_model("sha256-blob") == Path("sha256-blob")
    assert resolve_model("sha256-blob") == resolve_model("tiny.gguf")
    message = message_of(lambda: resolve_model("tiny.gguf", "v1"))
    assert "revision is 'v1', but the target model 'tiny.gguf' is a file, and only hub" in message
    assert "'nowhere.gguf' is not there; expected a folder with config.json, a GGUF" in message_of(
        lambda: resolve_model("nowhere.gguf")
    )
    head = message_of(lambda: resolve_model("tiny.gguf", role="draft"))
    assert "The draft head 'tiny.gguf' is a file, not a folder" in head


def test_training_and_vllm_get_the_folder(file: Path) -> None:
    toml = file.with_name("head.toml")
    toml.write_text(
        'target = "tiny.gguf"\noutput = "out"\n[data]\ntrain = "d.jsonl"\n[optimizer]\nsteps = 1\n'
    )
    folder = TrainConfig.read(toml).target
    assert folder == cached_folder(file)
    assert with_head(VllmLaunch(target=str(file))).target == str(folder)


# ---- the cache ----


def test_a_file_is_converted_once_whatever_its_name(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = cached_folder(file)
    assert folder.is_relative_to(cache) and folder.name == "tiny"
    assert "is unpacked into the cache" in caplog.text
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]
    caplog.clear()
    monkeypatch.setattr(gguf_folder, "_convert", None)  # nothing is converted from here on
    monkeypatch.setitem(sys.modules, "gguf", None)  # and the package is not needed
    assert cached_folder(shutil.move(file, file.with_name("other.gguf"))) == folder
    assert caplog.text == ""


@pytest.mark.slow
def test_nothing_is_left_of_a_conversion_that_failed(
    file: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(gguf_folder, "put_in_place", fail)
        assert "cannot be written: No space left on device. Set XDG_CACHE_HOME" in message_of(
            lambda: cached_folder(file)
        )
        message = message_of(lambda: convert_gguf(file, tmp_path / "new" / "out"))
        assert "'" + str(tmp_path / "new" / "out") + "' cannot be written: No space" in message
    assert [path for path in cache.rglob("*") if path.is_file()] == []
    assert list((tmp_path / "new").iterdir()) == []
    assert (cached_folder(file) / "config.json").is_file()


@pytest.mark.slow
def test_what_a_killed_conversion_left_is_replaced(file: Path) -> None:
    place = cached_folder(file).parent
    shutil.move(place / "tiny", place / gguf_folder._PARTIAL)
    (place / ".lock").touch()
    assert cached_folder(file) == place / "tiny"
    assert [path.name for path in place.iterdir()] == ["tiny"]
    (place / "tiny" / "config.json").unlink()
    assert cached_folder(file) == place / "tiny"


def test_no_room(file: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_folder, "free_bytes", lambda _: 1 << 20)
    for run in (lambda: cached_folder(file), lambda: convert_gguf(file, tmp_path / "out")):
        message = message_of(run)
        assert "when it is unpacked, but 1.0 MiB are free in" in message
        assert "Make room, or name another place" in message
    assert not (tmp_path / "out").exists()
    assert [path for path in cache.rglob("*") if path.is_file()] == []


def test_a_cache_that_cannot_be_written(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = file.with_name("blocked")
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    message = message_of(lambda: cached_folder(file))
    assert f"the cache {str(blocked / 'peagle')!r}, which cannot be written: Not a dir" in message
    assert "Set XDG_CACHE_HOME" in message and "--format hf" in message


# A conversion that takes its time, and that a second one at the same place would break.
_LOAD = """
import sys, time
from pathlib import Path
from peagle.models import gguf_folder

def convert(file, header, folder, partial):
    partial.mkdir()
    time.sleep(0.5)
    (partial / "config.json").touch()
    partial.rename(folder)

gguf_folder._require_packages = lambda file: None
gguf_folder._convert = convert
print(gguf_folder.cached_folder(Path(sys.argv[1])))
"""


def test_of_two_processes_one_converts_and_the_other_waits(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "tiny.gguf"
    file.write_bytes(gguf_bytes())
    command = [sys.executable, "-c", _LOAD, str(file)]
    path = os.pathsep.join(sys.path)
    runs = [
        subprocess.Popen(
            command, stdout=-1, stderr=-1, text=True, env={**os.environ, "PYTHONPATH": path}
        )
        for _ in range(2)
    ]
    told = [run.communicate() for run in runs]
    assert [run.returncode for run in runs] == [0, 0], told
    assert told[0][0] == told[1][0] == f"{next(cache.rglob('tiny'))}\n"
    assert sum("is unpacked into the cache" in err for _, err in told) == 1


# ---- what is refused ----

CUT = gguf_bytes()
REFUSED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is not a GGUF file: it is empty, expected b'GGUF'"),
    "other": (b"PK\3\4" * 20, "is not a GGUF file: it begins with b'PK\\x03\\x04', expected"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\n", "`git lfs pull` fetches it"),
    "short": (CUT[:20], "is cut: it has 20 bytes"),
    "header": (CUT[:60], "is cut or damaged: its header does not end"),
    "text": (CUT[:24] + b"\xff" * 40, "is cut or damaged: it has a text of"),
    "tensors": (CUT[:-1], "is cut: tensor 'token_embd.weight' ends at byte"),
    "version 1": (gguf_bytes(version=1), "has version 1 of the format; expected 2 or 3"),
    "version 9": (gguf_bytes(version=9), "has version 9 of the format"),
    "big-endian": (gguf_bytes(order=">"), "is big-endian; expected a little-endian file"),
    "adapter": (gguf_bytes(LLAMA | {"general.type": "adapter"}), "is an adapter, not a model"),
    "old adapter": (gguf_bytes(LLAMA | {"adapter.type": "lora"}), "is an adapter, not a model"),
    "split": (
        gguf_bytes(LLAMA | {"split.count": 3, "split.no": 1}),
        "is part 2 of 3 of a split model; expected one whole file. Join them with",
    ),
    "nameless": (gguf_bytes({}), "has architecture None; GGUF files are read of llama, qwen2"),
    "unknown": (gguf_bytes(LLAMA | {"general.architecture": "rwkv7"}), "has architecture 'rwkv7'"),
    "projector": (gguf_bytes(LLAMA | {"general.architecture": "clip"}), "architecture 'clip'"),
    "untokenised": (gguf_bytes({"general.architecture": "llama"}), "has no tokenizer"),
    "vocabulary": (gguf_bytes(LLAMA, []), "has no tensors: it is a vocabulary alone"),
    "type": (gguf_bytes(LLAMA, [("a", (32,), 36, 9)]), "tensor 'a' of type 36, which transformers"),
    "named type": (gguf_bytes(LLAMA, [("a", (32,), 9, 9)]), "tensor 'a' of type Q8_1, which"),
    "blocks": (gguf_bytes(LLAMA, [("a", (33, 2), 2, 9)]), "no whole blocks of 32 values (Q4_0)"),
    "twice": (gguf_bytes(LLAMA, WHOLE * 2), "is damaged: two tensors have one name"),
    "alignment": (gguf_bytes(LLAMA | {"general.alignment": 0}), "general.alignment is 0"),
    "rope": (
        gguf_bytes(LLAMA | {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}),
        "has scaled rotary positions (yarn), which transformers does not read out of GGUF",
    ),
    "window": (
        gguf_bytes(LLAMA | {"llama.attention.sliding_window": 4096}),
        "has a sliding window of 4096, which",
    ),
    "gemma": (
        gguf_bytes({**LLAMA, "general.architecture": "gemma2", "gemma2.attention.key_length": 128}),
        "has attention heads of size 128, which",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_file_that_is_refused_by_its_header(tmp_path: Path, cache: Path, kind: str) -> None:
    data, expected = REFUSED[kind]
    (tmp_path / "x.gguf").write_bytes(data)
    for run in (
        lambda: find_model(str(tmp_path / "x.gguf")),
        lambda: LLM(tmp_path / "x.gguf"),
        lambda: convert_gguf(tmp_path / "x.gguf", tmp_path / "out"),
    ):
        message = message_of(run, CheckpointError)
        assert expected in message and str(tmp_path / "x.gguf") in message
    assert not cache.exists() and not (tmp_path / "out").exists()


def test_damage_anywhere_in_a_header_is_an_error_of_the_file(tmp_path: Path) -> None:
    file, data = tmp_path / "x.gguf", bytearray(gguf_bytes())
    for place in range(len(data) - 32):
        for value in (0, 255):
            changed = bytearray(data)
            changed[place] = value
            file.write_bytes(changed)
            try:
                read_gguf_header(file)
            except CheckpointError as error:
                assert str(file) in str(error)


@pytest.mark.slow
def test_a_file_that_transformers_reads_in_part(tmp_path: Path) -> None:
    require_gguf()
    model = make_model("llama", head_dim=8)
    state = dict(model.state_dict())

    class Changed:
        """The model with other tensors."""

        def __init__(self, state: dict[str, Tensor]) -> None:
            self.config, self.model = model.config, model.model
            self.state_dict = lambda: state

    lacking = {n: v for n, v in state.items() if n != "model.layers.1.mlp.up_proj.weight"}
    biased = state | {"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}
    for changed, expected in (
        (lacking, "has no weights for 1 tensors of a llama model, 'model.layers.1.mlp.up_proj"),
        (biased, "values, of which transformers reads"),
    ):
        file = write_gguf(Changed(changed), tmp_path / "x.gguf")
        message = message_of(lambda: convert_gguf(file, tmp_path / "out"), CheckpointError)  # noqa: B023
        assert expected in message
        assert not (tmp_path / "out").exists()


def test_a_missing_package(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("gguf", "accelerate"):
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, package, None)
            for run in (lambda: resolve_model(file), lambda: convert_gguf(file, tmp_path / "out")):
                message = message_of(run, UserError)
                assert f"needs the package {package}, which is not installed; run" in message
                assert "[gguf]" in message


def test_a_destination_that_is_refused(file: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    assert "is not empty; expected a new" in message_of(
        lambda: convert_gguf(file, tmp_path / "full")
    )
    assert "is a file; expected a folder" in message_of(lambda: convert_gguf(file, file))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "tiny.gguf"]


@pytest.mark.slow
def test_a_folder_made_for_keeps_is_the_cached_one(file: Path, tmp_path: Path) -> None:
    made = convert_gguf(file, tmp_path / "keep")
    for one in cached_folder(file).iterdir():
        assert (tmp_path / "keep" / one.name).read_bytes() == one.read_bytes()
    assert made.num_bytes == (tmp_path / "keep" / "model.safetensors").stat().st_size
