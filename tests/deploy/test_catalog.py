"""The catalog: the package's entries, the user's files, names that are nearly right."""

import json
import re
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.deploy.catalog import (
    CATALOG_ENV,
    FORMAT_VERSION,
    PACKAGED,
    CatalogEntry,
    find,
    find_facts,
    load_catalog,
    lookup,
    needed_by,
    parse_catalog,
    to_toml,
)
from peagle.deploy.instances import INSTANCE_TYPES, require_fits
from peagle.deploy.memory import GIB, gib
from peagle.deploy.models import ModelSource
from peagle.errors import UserError
from tests.conftest import make_target_folder

NAMES = [
    *("gpt-oss-120b", "gpt-oss-20b", "qwen3-coder-30b-a3b-instruct"),
    *("qwen3-coder-30b-a3b-instruct-bf16", "qwen3-8b", "gemma-4-31b-it"),
]
MINIMAL: dict[str, Any] = {
    "target": "me/model",
    "draft": "me/head",
    "num_speculative_tokens": 3,
    "precision": "bf16",
    "instance_types": ["ml.g6e.xlarge"],
}


@pytest.fixture(autouse=True)
def _no_files_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(CATALOG_ENV, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def write(path: Path, name: str = "mine", **changes: Any) -> Path:
    """A catalog file with one entry; a change to None leaves a key out."""
    table = {key: value for key, value in (MINIMAL | changes).items() if value is not None}
    lines = [f"{key} = {json.dumps(value)}" for key, value in table.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["format_version = 1", f"[models.{name}]", *lines]))
    return path


# ---- the package's ----


def test_the_package_has_the_five_models_and_one_in_two_precisions():
    assert list(load_catalog()) == NAMES
    data = tomllib.loads(files("peagle.deploy").joinpath("catalog.toml").read_text("utf-8"))
    assert data["format_version"] == FORMAT_VERSION


@pytest.mark.parametrize("name", NAMES)
def test_an_entry_is_complete_and_fits_every_instance_type_it_names(name: str):
    entry = load_catalog()[name]
    assert entry.instance_types[0] == "ml.g7e.2xlarge"
    assert entry.sources == ("managed", "native") and "max-model-len" in entry.vllm_flags
    for source in entry.sources:
        needed = entry.memory_needed(source)
        assert needed is not None and needed.draft_bytes > 0
        for instance in entry.instance_types:
            assert require_fits(instance, needed, entry.vllm_flags) is INSTANCE_TYPES[instance]
    if entry.draft is None:
        assert entry.is_head_in_jumpstart
    else:
        publisher, _, head = entry.draft.lower().partition("/")
        assert (publisher, head.endswith("p-eagle")) == ("amazon", True) or (
            (publisher, head.endswith(".peagle")) == ("redhatai", True)
        )
        name = entry.target.partition("/")[2].removesuffix("-FP8")
        assert re.search(name, entry.draft, re.IGNORECASE)


@pytest.mark.parametrize("name", NAMES)
def test_sizes_agree_with_parameters_and_precision(name: str):
    """Two bytes a parameter; packed 8 or 4.25 bits for most of them, two bytes for the rest."""
    entry = load_catalog()[name]
    assert entry.weights_gib is not None and entry.parameters_b is not None
    bytes_each = entry.weights_gib * GIB / (entry.parameters_b * 1e9)
    low, high = {"bf16": (1.99, 2.01), "fp8": (1.0, 1.05), "mxfp4": (0.53, 0.7)}[entry.precision]
    assert low < bytes_each < high


def test_qwen3_coder_is_the_fp8_checkpoint_and_counts_packed():
    """By the shapes of its config.json: bytes for weights of layers, bfloat16 for the rest."""
    entry = load_catalog()["qwen3-coder-30b-a3b-instruct"]
    assert entry.target == "Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8"
    hidden, layers, experts, vocab = 2048, 48, 128, 151_936
    attention = 2 * hidden * 128 * (32 + 4)  # q and o, k and v
    packed = layers * (attention + experts * 3 * 768 * hidden)
    scales = 2 * packed // 128**2
    plain = 2 * (2 * vocab * hidden + layers * (experts * hidden + 2 * hidden + 2 * 128) + hidden)
    for source in entry.sources:
        needed = entry.memory_needed(source)
        assert needed is not None
        assert needed.target_bytes / GIB == pytest.approx((packed + scales + plain) / GIB, abs=0.01)


def test_the_heads_and_their_k():
    told = {e.name: (e.draft, e.num_speculative_tokens) for e in load_catalog().values()}
    assert told == {
        "gpt-oss-120b": ("amazon/gpt-oss-120b-p-eagle", 5),
        "gpt-oss-20b": ("amazon/GPT-OSS-20B-P-EAGLE", 7),
        "qwen3-coder-30b-a3b-instruct": ("amazon/Qwen3-Coder-30B-A3B-Instruct-P-EAGLE", 7),
        "qwen3-coder-30b-a3b-instruct-bf16": ("amazon/Qwen3-Coder-30B-A3B-Instruct-P-EAGLE", 7),
        "qwen3-8b": ("RedHatAI/Qwen3-8B-speculator.peagle", 7),
        "gemma-4-31b-it": (None, None),
    }


# ---- the user's ----


def test_files_of_the_user_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    usual = write(tmp_path / "config/peagle/catalog.toml", num_speculative_tokens=1)
    first = write(tmp_path / "a.toml", num_speculative_tokens=2)
    second = write(tmp_path / "b.toml", "other")
    monkeypatch.setenv(CATALOG_ENV, f"{first}:{second}")
    entries = load_catalog()
    assert list(entries) == [*NAMES, "mine", "other"]
    assert entries["mine"].num_speculative_tokens == 2
    assert (entries["mine"].origin, entries["mine"].replaces) == (str(first), str(usual))
    assert entries["other"].replaces == ""
    last = write(tmp_path / "c.toml", num_speculative_tokens=4)
    assert load_catalog([last])["mine"].num_speculative_tokens == 4


def test_an_entry_of_the_user_replaces_one_of_the_package_in_any_case(tmp_path: Path):
    entries = load_catalog([write(tmp_path / "mine.toml", "GPT-OSS-20B")])
    assert "gpt-oss-20b" not in entries
    assert entries["GPT-OSS-20B"].replaces == PACKAGED
    assert find("gpt-oss-20b", entries).target == "me/model"


def test_an_own_entry_for_a_target_of_the_package_is_what_its_hub_id_means(tmp_path: Path):
    entries = load_catalog([write(tmp_path / "mine.toml", target="openai/gpt-oss-20b")])
    assert find("openai/gpt-oss-20b", entries).name == "mine"
    assert find("gpt-oss-20b", entries).name == "gpt-oss-20b"


def test_flags_may_be_numbers_and_folders_are_beside_the_file(tmp_path: Path):
    make_target_folder(tmp_path / "target")
    path = tmp_path / "mine.toml"
    path.write_text(
        """format_version = 1
        [models.mine]
        target = "./target"
        draft = "../head"
        num_speculative_tokens = 3
        precision = "bf16"
        instance_types = ["ml.g6e.xlarge"]
        vllm_flags = { max-model-len = 100, enforce-eager = true, o = "x", j = { a = [1] } }
        """
    )
    entry = load_catalog([path])["mine"]
    flags = {"max-model-len": "100", "enforce-eager": "true", "o": "x", "j": '{"a": [1]}'}
    assert entry.vllm_flags == flags
    assert entry.target == str(tmp_path / "target")
    assert entry.draft == str(tmp_path.parent / "head")
    needed = entry.memory_needed()
    assert needed is not None and needed.target_bytes > 0 and needed.max_model_len == 100


def test_the_page_tells_what_there_is():
    page = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text("utf-8")
    (block,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert [entry.name for entry in parse_catalog(block, "the page")] == ["my-model"]
    for entry in load_catalog().values():
        (row,) = re.findall(rf"^\| `{entry.name}` \|.*$", page, re.MULTILINE)
        needed = entry.memory_needed()
        assert needed is not None and f" {gib(needed.per_gpu())} |" in row
        assert entry.draft is None or f"| `{entry.draft}` | {entry.num_speculative_tokens} |" in row
    keys = set(re.findall(r"`(\w+)`", page))
    own = {"name", "origin", "replaces"}
    assert keys >= CatalogEntry.model_fields.keys() - own


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("format_version = 1\nmodels = = 3", r"is not TOML: .*line 2.*Mend it"),
        ("", "format_version is missing; expected format_version = 1"),
        ("format_version = true", "format_version is True; expected"),
        ("format_version = 2", r"is 2, newer than this peagle reads \(1\). Upgrade peagle"),
        ("format_version = 1\nmodel = 3", "'model' is not a known key; expected"),
        ("format_version = 1\nmodels = 3", r"models is 3; expected \[models.NAME\]"),
        ("format_version = 1\nmodels.x = 3", r"\[models.x\]: it is 3; expected a table"),
        ("format_version = 1\n[models.a]\n[models.A]", "are the same name"),
        ("format_version = 1\n[models.'a b']", "name is 'a b'"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, said: str):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=said) as caught:
        load_catalog([path])
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target": None}, "target is missing"),
        ({"target": "one"}, "target is 'one': String should match"),
        ({"draft": "s3//x"}, "draft is 's3//x'"),
        ({"num_speculative_tokens": None}, "a draft and no num_speculative_tokens; give K"),
        ({"draft": None}, "a num_speculative_tokens and no draft; name the head"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0"),
        ({"max_speculative_tokens": 2}, "num_speculative_tokens is 3; expected at most .* 2"),
        ({"precision": "int3"}, "precision is 'int3'"),
        ({"instance_types": []}, r"instance_types is \[\]"),
        ({"instance_types": ["g5"]}, "instance_types.0 is 'g5'"),
        ({"weights_gib": -1}, "weights_gib is -1"),
        ({"estimates": ["wieghts"]}, "estimates names 'wieghts', which is no key"),
        ({"sources": ["jumpstart"]}, "sources.0 is 'jumpstart': Input should be 'managed' or"),
        ({"sources": ["mine"]}, "sources.0 is 'mine'"),
        ({"instance_type": "x"}, "not a known key. Did you mean instance_types?"),
        ({"zzz": "x"}, "zzz is not a known key. Known: target, draft"),
        ({"origin": "x"}, "origin is not a known key"),
    ],
)
def test_entries_that_are_refused(tmp_path: Path, changes: dict[str, Any], said: str):
    with pytest.raises(UserError, match=said) as caught:
        load_catalog([write(tmp_path / "mine.toml", **changes)])
    assert "[models.mine]" in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UserError, match="No such file"):
        load_catalog([tmp_path / "none.toml"])
    monkeypatch.setenv(CATALOG_ENV, str(tmp_path))
    with pytest.raises(UserError, match="is not readable: Is a directory"):
        load_catalog()


# ---- TOML ----

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
_LAYERS = st.fixed_dictionaries(
    {"layers": st.integers(1, 99), "kv_heads": st.integers(1, 16), "head_dim": st.integers(1, 512)},
    optional={"window": st.integers(1, 4096)},
)
_ENTRIES = st.fixed_dictionaries(
    {
        "name": st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,9}", fullmatch=True),
        "target": st.sampled_from(["me/model", "s3://bucket/prefix/", "/a folder/é"]),
        "precision": st.sampled_from(["bf16", "mxfp4"]),
        "instance_types": st.lists(st.sampled_from(list(INSTANCE_TYPES)), min_size=1, max_size=3),
    },
    optional={
        "weights_gib": st.floats(1e-3, 1e6),
        "kv_layers": st.lists(_LAYERS, max_size=2),
        "vllm_flags": st.dictionaries(st.sampled_from(["max-model-len", "dtype", "x"]), _TEXT),
        "environment": st.dictionaries(_TEXT, _TEXT, max_size=3),
        "gated": st.booleans(),
        "license": _TEXT,
        "jumpstart_model_id": _TEXT,
    },
)


@settings(max_examples=30, deadline=None)
@given(values=_ENTRIES)
def test_what_is_written_is_read_again(values: dict[str, Any]):
    entry = CatalogEntry.model_validate({**values, "origin": "here"})
    assert parse_catalog(to_toml(entry), "here") == [entry]


@pytest.mark.parametrize("name", NAMES)
def test_entries_of_the_package_are_written_and_read_again(name: str):
    entry = load_catalog()[name]
    assert parse_catalog(to_toml(entry), PACKAGED) == [entry]


# ---- names ----

OURS = {name: load_catalog()[name] for name in NAMES}
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789-."


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    kind=st.sampled_from(["wrong", "extra", "missing", "swapped", "case"]),
    place=st.integers(0, 99),
    letter=st.sampled_from(LETTERS),
)
def test_one_wrong_letter_suggests_the_name(name: str, kind: str, place: int, letter: str):
    i = place % (len(name) - 1)
    typed = {
        "wrong": name[:i] + letter + name[i + 1 :],
        "extra": name[:i] + letter + name[i:],
        "missing": name[:i] + name[i + 1 :],
        "swapped": name[:i] + name[i + 1] + name[i] + name[i + 2 :],
        "case": name[:i] + name[i:].upper(),
    }[kind]
    entries = OURS
    if (found := lookup(typed, entries)) is not None:
        assert found.name == typed.lower()
        return
    with pytest.raises(UserError) as caught:
        find(typed, entries)
    meant = re.search(r"Did you mean (.*?)\?", str(caught.value))
    assert meant is not None and name in meant[1].split(" or ")
    assert "`peagle catalog` lists them" in str(caught.value)


def test_aliases_and_parts_of_names():
    entries = load_catalog()
    assert find("OPENAI/gpt-oss-20b", entries).name == "gpt-oss-20b"
    assert find("Gemma-4-31B-IT", entries).name == "gemma-4-31b-it"
    with pytest.raises(UserError, match="Did you mean gemma-4-31b-it"):
        find("gemma", entries)
    with pytest.raises(UserError, match=r"No model 'llama' in the catalog\. `peagle catalog`"):
        find("llama", entries)
    assert lookup("llama", entries) is None


# ---- memory ----


def test_sizes_of_what_is_deployed(tmp_path: Path):
    entries = load_catalog()
    target = ModelSource("hub", "openai/GPT-OSS-20B")
    head = ModelSource("hub", "amazon/gpt-oss-20b-p-eagle")
    flags = {"max-model-len": "32k", "kv-cache-dtype": "fp8", "max-num-batched-tokens": "4K"}
    found = needed_by(target, head, flags, entries)
    assert found is not None
    assert (found.target_bytes, found.draft_bytes) == (int(12.8 * GIB), int(3.4 * GIB))
    # Of 24 layers and 4 of the head: 16 keep every token, 12 their window and a step's tokens.
    values = 2 * 8 * 64 * (16 * 32_000 + 12 * (128 + 4096))
    assert (found.max_model_len, found.kv_bytes()) == (32_000, values)

    half = {"dtype": "half"}  # asked of a GPU without bfloat16
    folder = make_target_folder(tmp_path / "target")
    local = find_facts(ModelSource("local", str(folder)), entries)
    assert local is not None and local.max_model_len == 256
    old = needed_by(ModelSource("hub", "Qwen/Qwen3-Coder-30B-A3B-Instruct"), None, half, entries)
    packed = needed_by(target, None, half, entries)
    assert old is not None and packed is not None
    assert (old.precision, packed.precision) == ("fp16", "mxfp4")
    for unknown in (ModelSource("hub", "me/model"), ModelSource("s3", "s3://bucket/model/")):
        assert find_facts(unknown, entries) is None
        assert needed_by(unknown, head, {}, entries) is None
