"""Models by folder and by hub id: which is which, and what is refused before it is loaded."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from peagle import LLM, SamplingParams, SpeculativeConfig
from peagle.bundled import BUNDLED_EAGLE3, BUNDLED_PEAGLE
from peagle.errors import CheckpointError
from peagle.models.loading import check_weights, resolve_model, with_local_head
from tests.fake_hub import TINY, WEIGHTS, FakeHub, message_of, refused
from tests.models.published_heads import head_folder

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


# ---- folders ----


def test_a_folder_is_used_as_it_is(
    hub: FakeHub, target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(target_folder, tmp_path / "org" / "tiny")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model(target_folder) == target_folder
    assert resolve_model(str(target_folder)) == target_folder
    # The hub has an org/tiny, too.
    for name in ("org/tiny", "./org/tiny", "org/../org/tiny"):
        assert resolve_model(name) == Path(name)
    assert resolve_model("~/org/tiny") == tmp_path / "org" / "tiny"
    assert hub.requests == []


@pytest.mark.parametrize(
    "name",
    [
        *("./org/tiny", "../tiny", "/nowhere/tiny", "~/nowhere", ".hidden", "org\\tiny"),
        *("nowhere", "", "a/b/c", "org/", "org/ti ny", "org/ti--ny", "org/tiny@", "tiny@v1"),
        *("https://hub.example/org/tiny", "org/tiny.git", "org/tiny:v1"),
    ],
)
def test_what_is_no_hub_id_is_never_asked_for(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    message = refused(name)
    assert "The target model '" in message
    assert "is not there; expected a folder with config.json" in message
    assert hub.requests == []


def test_a_path_object_is_never_a_hub_id(hub: FakeHub) -> None:
    message = message_of(lambda: resolve_model(Path("org/tiny")))
    assert "'org/tiny' is not there; expected a folder" in message
    assert hub.requests == []


def test_a_folder_has_no_revision(hub: FakeHub, target_folder: Path) -> None:
    message = message_of(lambda: resolve_model(target_folder, "v1"))
    assert f"revision is 'v1', but the target model {str(target_folder)!r} is a folder" in message


# ---- models from the hub ----


@pytest.mark.slow
def test_a_pair_from_the_hub(
    hub: FakeHub, target_folder: Path, sharded_folder: Path, head_folders: Callable[..., Path]
) -> None:
    head = head_folders(parallel=True)
    hub.add("org/sharded", sharded_folder)
    pinned = hub.add("org/tiny-head", head).names["main"]
    hub.models["org/tiny-head"].commit({"config.json": b"{}", WEIGHTS: b"later nonsense"})
    config = {"model": "org/tiny-head", "num_speculative_tokens": 3, "parallel_drafting": True}
    expected = LLM(target_folder).generate("def f(x):", GREEDY)[0].token_ids
    for target, speculative in (
        (TINY, {**config, "revision": pinned}),
        ("org/sharded", {**config, "model": f"org/tiny-head@{pinned}"}),
    ):
        llm = LLM(target, speculative_config=speculative, revision="main")
        output = llm.generate("def f(x):", GREEDY)[0]
        assert output.token_ids == expected
        assert output.stats.num_drafts > 0
    assert len(list(resolve_model("org/sharded").glob("*.safetensors"))) > 2


def test_a_head_that_is_not_there_is_named_as_one(hub: FakeHub, target_folder: Path) -> None:
    for config, expected in (
        ({"model": "nowhere"}, "The draft head 'nowhere' is not there"),
        ({"model": "org/ghost"}, "The draft head 'org/ghost' is neither a folder here nor a model"),
        ({"model": TINY, "revision": "v9"}, "The draft head 'org/tiny' has no revision 'v9'"),
    ):
        message = message_of(lambda: LLM(target_folder, speculative_config=config))  # noqa: B023
        assert expected in message
    ngram = SpeculativeConfig(method="ngram")
    assert with_local_head(ngram) is ngram


def test_a_loaded_model_has_no_name_or_revision(target_folder: Path) -> None:
    model = LLM(target_folder).target
    assert "A loaded model was given" in message_of(lambda: LLM(TINY, model=model))
    assert "revision 'v1'" in message_of(lambda: LLM(revision="v1", model=model))


# ---- weights in a folder ----


@pytest.fixture
def copy(target_folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(target_folder, tmp_path / "copy")


def damage(file: Path, kind: str) -> None:
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    file.write_bytes(
        {
            "empty": b"",
            "tail": data[:-10],
            "longer": data + b"\0" * 8,
            "header": data[: length // 2],
            "eight": data[:8],
            "junk": b"\x10" + b"\0" * 7 + b"not JSON at all.",
            "list": b"\x02" + b"\0" * 7 + b"[]",
            "entries": b"\x07" + b"\0" * 7 + b'{"a":1}',
            "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n",
        }[kind]
    )


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("empty", "it has 0 bytes, too few for a header"),
        ("tail", "bytes, expected"),
        ("longer", "bytes, expected"),
        ("header", "its header takes"),
        ("eight", "its header takes"),
        ("junk", "its header is not that of a safetensors file"),
        ("list", "its header is not that of a safetensors file"),
        ("entries", "its header describes tensor 'a' wrongly"),
        ("pointer", "it is a pointer of Git LFS, not the weights; `git lfs pull` fetches them"),
    ],
)
def test_a_damaged_file_in_a_folder(copy: Path, kind: str, expected: str) -> None:
    damage(copy / WEIGHTS, kind)
    message = message_of(lambda: LLM(copy), CheckpointError)
    assert f"{str(copy / WEIGHTS)!r} is cut or damaged: it" in message
    assert expected in message
    assert "Copy or fetch it again" in message


def test_a_missing_shard_in_a_folder(sharded_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(sharded_folder, tmp_path / "copy")
    check_weights(folder)
    shards = sorted(folder.glob("*.safetensors"))
    shards[1].unlink()
    message = message_of(lambda: LLM(folder), CheckpointError)
    assert f"{str(shards[1])!r} is missing; 'model.safetensors.index.json' names" in message
    assert f"{len(shards)} shards, 1 of which are not there." in message


@pytest.mark.parametrize("text", ["{}", "[]", '{"weight_map": 5}', '{"weight_map": {"a": 5}}', "{"])
def test_a_damaged_index(copy: Path, text: str) -> None:
    (copy / "model.safetensors.index.json").write_text(text)
    message = message_of(lambda: resolve_model(copy), CheckpointError)
    assert "model.safetensors.index.json' " in message


# ---- code ----


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


AUTO_MAP = {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.XModel"}


def test_a_known_model_type_needs_none_of_its_code(copy: Path) -> None:
    edit_config(copy, auto_map=AUTO_MAP)
    for name in ("configuration_x.py", "modeling_x.py"):
        (copy / name).write_text("raise SystemExit('code of the model ran')")
    assert len(LLM(copy).generate("hi", GREEDY)[0].token_ids) == 12


def test_an_unknown_model_type_with_code_is_refused(copy: Path) -> None:
    edit_config(copy, auto_map=AUTO_MAP, model_type="x-model")
    message = message_of(lambda: LLM(copy), CheckpointError)
    assert f"The target model {str(copy)!r} has model type 'x-model'" in message
    assert "peagle runs no code out of a model" in message


def test_a_head_of_the_speculators_package_names_classes(copy: Path) -> None:
    edit_config(copy, auto_map={"": "x.X"}, model_type=None, speculators_model_type="eagle3")
    assert resolve_model(copy, role="draft") == copy


def test_a_head_is_no_target() -> None:
    folders = [BUNDLED_PEAGLE, BUNDLED_EAGLE3, head_folder("published_peagle")]
    for folder in (*folders, head_folder("speculators_eagle3")):
        message = message_of(lambda folder=folder: resolve_model(folder))
        assert "is a draft head, not a target. Name its target instead" in message
        assert resolve_model(folder, role="draft") == folder
