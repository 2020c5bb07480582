"""docs/hardware.md against the code's own arithmetic, and its checks of cards."""

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peagle.attention import triton_backend
from peagle.config import EngineConfig
from peagle.deploy.catalog import PACKAGED, load_catalog
from peagle.deploy.instances import sagemaker_facts
from peagle.engine.memory_plan import (
    GRAPH_BYTES,
    drawn_bytes,
    graph_bytes,
    lookahead_slots,
    output_bytes,
    size_text,
)
from peagle.engine.step.graph_runner import mixed_buckets
from peagle.errors import UserError
from peagle.kernels.attention import kv_write
from peagle.kernels.linear import experts, unpacking
from peagle.models import skinny
from peagle.models.head_json import default_k
from tests.docs.pages import ROOT

if not (ROOT / "README.md").is_file():
    pytest.skip("a source archive has no pages", allow_module_level=True)

PAGE = (ROOT / "docs" / "hardware.md").read_text()
ENTRIES = [entry for entry in load_catalog().values() if entry.origin == PACKAGED]


def rows(after: str) -> list[list[str]]:
    """The cells of the first table behind a heading, but for its two lines of heads."""
    table = re.findall(r"^\|.*$", PAGE.partition(f"## {after}\n")[2].partition("\n## ")[0], re.M)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def test_every_model_of_the_catalog_has_a_row() -> None:
    assert [row[0].split("`")[1] for row in rows("The published heads")] == [
        entry.name for entry in ENTRIES
    ]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_bytes_of_a_head_and_of_a_token(entry: Any) -> None:
    (row,) = (row for row in rows("The published heads") if f"`{entry.name}`" in row[0])
    target, head = (
        sum(kind.token_bytes for kind in kinds)
        for kinds in (entry.kv_layers, entry.draft_kv_layers)
    )
    k = entry.num_speculative_tokens or default_k(None)
    slots = lookahead_slots(k, is_pipelined=True)
    assert {"draft_weights_gib", "draft_kv_layers"} <= set(entry.estimates)
    assert row[1:] == [
        f"~{entry.draft_weights_gib} GiB",
        f"{target:,}",
        f"~{head:,}",
        f"{slots} (K = {k})",
        f"~{size_text(slots * (target + head))}",
    ]


def test_slots_ahead_and_graphs() -> None:
    assert lookahead_slots(6, is_pipelined=True) == 3 * 7
    assert lookahead_slots(6, is_pipelined=False) == 2 * 7
    assert lookahead_slots(6, 31, is_pipelined=True) == 7 + 32
    config, peak = EngineConfig(), 1000 * 2**20
    assert config.max_num_batched_tokens == 4096
    assert graph_bytes(peak, config, has_trees=False) == GRAPH_BYTES + peak // 2
    gemma: Any = SimpleNamespace(hidden_size=5376, dtype=torch.bfloat16, quantization=None)
    drafter: Any = SimpleNamespace(
        config=SimpleNamespace(feature_size=3 * 5376, draft_vocab_size=32_000)
    )
    outputs = output_bytes(gemma, drafter, sum(mixed_buckets(gemma)))
    packed: Any = SimpleNamespace(quantization="fp8")
    assert not mixed_buckets(packed)
    told = (GRAPH_BYTES, outputs, drawn_bytes(drafter, 32, 7))
    for size in map(size_text, told):
        assert f" {size.replace('.0 MiB', ' MiB')} for " in PAGE


def capabilities(text: str) -> list[tuple[int, ...]]:
    return [tuple(map(int, part.split("."))) for part in re.findall(r"\d+\.\d", text)]


ROWS = [
    (capability, row)
    for row in rows("Cards")
    for capability in ([(7, 5)] if row[0] == "below 8.0" else capabilities(row[0]))
]


CACHED = (
    triton_backend.check_device,
    kv_write._converts_e4m3,
    unpacking.has_assembly,
    experts._has_gluon,
)


@pytest.fixture
def _fresh_checks() -> Iterator[None]:
    for check in CACHED:
        check.cache_clear()
    yield
    for check in CACHED:
        check.cache_clear()


@pytest.mark.usefixtures("_fresh_checks")
@pytest.mark.parametrize(("capability", "row"), ROWS, ids=lambda one: str(one[0]))
def test_cards_are_as_the_code_chooses(
    capability: tuple[int, int], row: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    _, _, state, differs = row
    device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card")
    if state == "refused":
        with pytest.raises(UserError, match=r"expects 8\.0 or later"):
            triton_backend.check_device(device)
        return
    triton_backend.check_device(device)
    assert ("integer operations" in differs) == (not kv_write._converts_e4m3(device))
    assert ("wgmma" in differs) == (not experts._has_gluon(device))
    weight = SimpleNamespace(
        **{"device": device, "dtype": torch.bfloat16, "itemsize": 2, "shape": (8192, 8192)},
        **{"stride": lambda _: 1, "data_ptr": lambda: 0},
    )
    streams = skinny._max_rows(SimpleNamespace(weight=weight), None) > 0
    assert ("few rows in cuBLAS" in differs) == (not streams)
    assert (state == "tested") == (capability == (9, 0))


def test_every_card_of_sagemaker_has_a_row() -> None:
    for family in sagemaker_facts()["families"].values():
        (row,) = (row for found, row in ROWS if found == tuple(family["capability"]))
        assert family["gpu"] in row[1].split(", ")
