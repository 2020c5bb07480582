"""The memory of an engine: the largest passes, what fits, what the plan says, what it refuses."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from peagle import LLM
from peagle.config import EngineConfig, SamplingParams
from peagle.engine import Sequence
from peagle.engine import memory_plan as memory
from peagle.engine.block_manager import BlockManager
from peagle.engine.features import FEATURES_KEPT
from peagle.engine.memory_plan import (
    CPU_CACHE_GIB,
    GRAPH_BYTES,
    MemoryPlan,
    graph_bytes,
    make_memory_plan,
    measure_peak,
    output_bytes,
    run_largest_passes,
    size_text,
    storage_bytes,
)
from peagle.engine.scheduler import Scheduler
from peagle.errors import UserError
from peagle.models.target import TargetModel
from tests.conftest import make_drafter
from tests.engine.engines import config_of, make_llm

MIB, GIB = 2**20, 2**30
CARD = "Imaginary X1"
LAYERS, KV_HEADS, HEAD_DIM = 36, 8, 128
# Keys and values of 16 slots in 36 layers of 8 heads of 128 in bfloat16.
TARGET_BLOCK = 2 * 16 * LAYERS * KV_HEADS * HEAD_DIM * 2
DRAFTER_BLOCK = TARGET_BLOCK // LAYERS * 4


class Owner(nn.Module):
    """Weights of so many bytes."""

    def __init__(self, num_bytes: int, **attributes: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_bytes, dtype=torch.uint8), requires_grad=False)
        for name, value in attributes.items():
            setattr(self, name, value)


def fake_target(kind: str = "cuda") -> Any:
    return SimpleNamespace(
        model=Owner(1000),
        kv_shapes=lambda: [(KV_HEADS, HEAD_DIM)] * LAYERS,
        dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16,
        kv_type="bfloat16",
        device=torch.device(kind),
    )


def fake_drafter() -> Any:
    return Owner(
        500,
        config=SimpleNamespace(num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, num_layers=4),
        correction=None,
    )


Card = Callable[[int, int], None]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    """card(free, total) puts a card in place of torch's."""

    def put(free: int, total: int) -> None:
        monkeypatch.setattr(memory, "free_and_total", lambda device: (free, total))
        monkeypatch.setattr(memory, "device_name", lambda device: CARD)

    return put


def plan_of(
    config: EngineConfig | None = None, *, target: Any = None, drafter: Any = None, **options: Any
) -> MemoryPlan:
    """A plan that reserves 2 GiB unless the options say otherwise."""
    sizes = {"max_model_len": 40_960, "num_lookahead_slots": 24, "peak_bytes": 1536 * MIB}
    options = {**sizes, **options}
    return make_memory_plan(target or fake_target(), drafter, config or EngineConfig(), **options)


def message_of(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as error:
        call()
    return str(error.value)


def largest_passes(llm: LLM, monkeypatch: pytest.MonkeyPatch, **options: Any) -> dict[str, list]:
    """The rows of each pass of target, logits and drafter, in order."""
    engine: Any = llm.engine
    rows: dict[str, list] = {"target": [], "logits": [], "drafter": []}

    def watch(owner: Any, name: str, kind: str) -> None:
        call = getattr(owner, name)

        def watched(first: Any, *rest: Any, **named: Any) -> Any:
            rows[kind].append(len(first))
            return call(first, *rest, **named)

        monkeypatch.setattr(owner, name, watched)

    watch(engine.target, "forward", "target")
    watch(engine.target, "compute_logits", "logits")
    if engine.max_draft_len:
        watch(engine.drafting.proposer.passes, "run", "drafter")
        watch(engine.drafting.proposer.readings, "run", "drafter")
    sizes = {
        "num_speculative_tokens": engine.num_speculative_tokens,
        "num_nodes": engine._plan.num_nodes,
    }
    sizes |= {"num_resuming": 0, **options}
    run_largest_passes(engine.runner, engine.drafting, engine._features, engine.config, **sizes)
    assert len(engine.sampler.slots._free) == engine.config.max_num_seqs
    return rows


SIZES = {"max_num_seqs": 3, "max_model_len": 40, "max_num_batched_tokens": 64}


@pytest.mark.parametrize(
    ("name", "num_draft_tokens", "drafter"),
    [
        ("plain", 0, []),
        ("ngram", 5, []),
        # A drafter slot a prompt token, and K - 1 mask slots for the prompt that leaves room.
        ("peagle", 5, [64 + 4, 3 * (1 + 4)]),
        ("peagle probabilistic", 5, [64 + 4, 3 * (1 + 4)]),
        ("trees", 9, [64 + 4, 3 * (1 + 4)]),
        ("eagle3", 5, [64, *[1] * 4, 3, *[3] * 4]),
    ],
)
def test_the_largest_passes_run_with_the_real_modules(
    target_folder: Path,
    heads: dict[bool, Path],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    num_draft_tokens: int,
    drafter: list[int],
) -> None:
    llm = make_llm(target_folder, config_of(name, heads), **SIZES)
    rows = largest_passes(llm, monkeypatch)
    decoding = 3 * (1 + num_draft_tokens)
    assert rows["target"][:2] == [64, decoding]
    assert rows["logits"][-2] == decoding
    assert name == "ngram" or rows["target"][2] == rows["logits"][-1] == decoding
    assert sum(rows["logits"][:-2]) == 64 - 2 + 2, "log-probabilities of two prompts, and samples"
    assert rows["drafter"][: len(drafter)] == drafter
    # The engine serves as before.
    assert len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))[0].token_ids) == 4


def test_the_largest_passes_read_kept_features(
    target_folder: Path, heads: dict[bool, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {**SIZES, "max_model_len": 200}
    llm = make_llm(target_folder, config_of("peagle", heads), **sizes)
    rows = largest_passes(llm, monkeypatch, num_resuming=2)
    *_, apart, last = rows["drafter"]
    assert apart >= 2 * (200 - 3 * 5 - 5) > FEATURES_KEPT
    assert last == 3 * (1 + 4)


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [True, False])
def test_a_full_engine_stays_within_what_was_measured(
    target_folder: Path, heads: dict[bool, Path], eager: bool
) -> None:
    config = {"model": str(heads[True]), "num_speculative_tokens": 5}
    options = {"max_num_seqs": 16, "max_model_len": 256, "kv_cache_gib": 0.1}
    llm = LLM(target_folder, speculative_config=config, enforce_eager=eager, **options)
    plan, device = llm.engine.memory_plan, llm.target.device
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    params = SamplingParams(max_tokens=50, temperature=1.0, top_p=0.9, repetition_penalty=1.1)
    llm.generate([[i] * 200 for i in range(32)], params)
    assert torch.cuda.max_memory_allocated(device) - before <= plan.reserved_bytes - GRAPH_BYTES


@pytest.mark.gpu
def test_the_peak_of_a_run_is_what_it_does_not_keep() -> None:
    device, kept = torch.device("cuda"), []

    def run() -> None:
        torch.empty(64 * MIB, dtype=torch.uint8, device=device)
        kept.append(torch.empty(16 * MIB, dtype=torch.uint8, device=device))

    peak = measure_peak(run, device, EngineConfig())
    assert 47 * MIB <= peak <= 49 * MIB

    def too_much() -> None:
        torch.empty(1 << 50, dtype=torch.uint8, device=device)

    message = message_of(lambda: measure_peak(too_much, device, EngineConfig()))
    assert "The largest passes do not fit" in message
    assert "Lower max_num_batched_tokens (4096) or max_num_seqs (16)" in message


@pytest.mark.parametrize("what", ["target", "draft head"])
def test_weights_that_do_not_fit_are_told(
    what: str, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError

    card(3 * GIB, 4 * GIB)
    where = "models.target.TargetModel.load" if what == "target" else "engine.engine_plan.load_head"
    monkeypatch.setattr(f"peagle.{where}", load)
    message = message_of(lambda: LLM("bundled", speculative_config={"model": "bundled"}))
    sizes = "9.1" if what == "target" else "3.6"
    assert message.startswith(f"The {what} '")
    assert f"fit {CARD}, which had 3.0 GiB free, and its files have {sizes} MiB. Qu" in message
    if what == "target":
        message = message_of(lambda: LLM("bundled", fp8_activations="auto"))
        assert "MiB. Leave fp8_activations out (it keeps weights twice), take a smaller" in message


def test_what_a_card_has_left(card: Card) -> None:
    """total * utilization - in use - reserved - scrap, in whole blocks."""
    card(60 * GIB, 80 * GIB)
    plan = plan_of(EngineConfig(gpu_memory_utilization=0.75))
    # The largest pass that is captured has 2,048 of 4,096 tokens.
    assert plan.reserved_bytes == (1536 + 768) * MIB + GRAPH_BYTES == 2816 * MIB
    assert plan.block_bytes == plan.target_block_bytes == TARGET_BLOCK
    assert plan.budget_bytes == (60 - 20) * GIB - 2816 * MIB - TARGET_BLOCK
    drawing = plan_of(EngineConfig(gpu_memory_utilization=0.75), kept_bytes=57 * MIB)
    assert drawing.reserved_bytes == plan.reserved_bytes + 57 * MIB
    assert drawing.budget_bytes == plan.budget_bytes - 57 * MIB
    assert plan.num_blocks == plan.budget_bytes // TARGET_BLOCK
    assert (plan.device, plan.free_bytes, plan.total_bytes) == (CARD, 60 * GIB, 80 * GIB)
    assert plan.usable_bytes == 60 * GIB
    assert (plan.target_bytes, plan.drafter_bytes) == (1000, 0)
    drafted = plan_of(drafter=fake_drafter())
    assert (drafted.target_block_bytes, drafted.drafter_block_bytes) == (
        TARGET_BLOCK,
        DRAFTER_BLOCK,
    )
    assert drafted.drafter_bytes == 500


def test_outputs_of_graphs(target: TargetModel) -> None:
    """Hidden states, and with a head the features of three layers."""
    hidden = 10 * target.hidden_size * 8
    assert output_bytes(target, None, 10) == hidden
    assert output_bytes(target, make_drafter(target), 10) == 4 * hidden


def test_bounds_that_users_give(card: Card) -> None:
    card(60 * GIB, 80 * GIB)
    assert plan_of(EngineConfig(kv_cache_gib=1.5)).budget_bytes == 1.5 * GIB
    # A number of blocks does not depend on the share of the card.
    plan = plan_of(EngineConfig(num_kv_blocks=10, gpu_memory_utilization=0.1))
    assert (plan.num_blocks, plan.budget_bytes) == (10, 10 * TARGET_BLOCK)


def test_a_cpu_has_a_bound_and_no_more(target: TargetModel) -> None:
    drafter = make_drafter(target)
    sizes = {"max_model_len": 256, "num_lookahead_slots": 8, "peak_bytes": 9}
    plan = make_memory_plan(target, drafter, EngineConfig(), **sizes)
    block = (4 + 2) * 2 * 16 * 2 * 8 * 8
    assert plan.block_bytes == block
    assert plan.num_blocks == 4 * 16 * 16, "all that is of use"
    assert plan.budget_bytes == CPU_CACHE_GIB * GIB
    assert (plan.device, plan.reserved_bytes) == ("cpu", 0)
    assert plan.total_bytes is plan.free_bytes is plan.usable_bytes is None
    small = EngineConfig(kv_cache_gib=1 / 1024)
    assert make_memory_plan(target, drafter, small, **sizes).num_blocks == MIB // block


@settings(deadline=None)
@given(data=st.data())
def test_the_plan_keeps_to_its_budget_and_wastes_none(data: st.DataObject) -> None:
    def number(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    total = number(MIB, 200 * GIB)
    free = number(0, total)
    peak = number(0, 4 * GIB)
    config = EngineConfig(
        max_num_seqs=number(1, 300),
        block_size=number(1, 64),
        kv_cache_gib=data.draw(st.none() | st.floats(1e-6, 300)),
        gpu_memory_utilization=data.draw(st.floats(0.01, 1)),
        enable_prefix_caching=data.draw(st.booleans()),
    )
    is_card = data.draw(st.booleans())
    drafter = fake_drafter() if data.draw(st.booleans()) else None
    sizes = {"max_model_len": number(1, 50_000), "num_lookahead_slots": number(0, 60)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "free_and_total", lambda _: (free, total) if is_card else None)
        patch.setattr(memory, "device_name", lambda _: CARD)
        target = fake_target("cuda" if is_card else "cpu")
        try:
            plan = plan_of(config, target=target, drafter=drafter, peak_bytes=peak, **sizes)
        except UserError as error:
            assert "A KV block takes" in str(error)
            return
    block = TARGET_BLOCK // 16 * config.block_size + (
        0 if drafter is None else DRAFTER_BLOCK // 16 * config.block_size
    )
    assert plan.block_bytes == block
    assert plan.kv_bytes <= plan.budget_bytes
    if config.kv_cache_gib is not None:
        assert plan.kv_bytes <= config.kv_cache_gib * GIB
    if is_card:
        in_use = (
            total - free + peak + graph_bytes(peak, config, has_trees=False) + plan.kv_bytes + block
        )
        assert in_use <= total * config.gpu_memory_utilization
    every = -(-plan.max_model_len // plan.block_size) * plan.max_num_seqs
    useful = every * 4 if config.enable_prefix_caching else every
    assert plan.num_blocks == useful or plan.kv_bytes + block > plan.budget_bytes
    assert plan.min_blocks <= plan.num_blocks <= useful
    assert 0 < plan.longest_context <= plan.max_model_len
    at_most = plan.concurrency(plan.max_model_len)
    assert at_most <= plan.max_num_seqs
    assert (at_most > 0) == (plan.longest_context == plan.max_model_len)
    assert len(str(plan).splitlines()) <= 10


@pytest.mark.parametrize("num_blocks", [4, 5, 7, 12, 13, 20])
def test_the_longest_context_is_what_the_scheduler_takes(num_blocks: int) -> None:
    config = EngineConfig(num_kv_blocks=num_blocks, block_size=8)
    plan = plan_of(config, target=fake_target("cpu"), max_model_len=100)
    scheduler = Scheduler(
        BlockManager(num_blocks, 8, enable_prefix_caching=False),
        max_num_seqs=16,
        max_num_batched_tokens=64,
        max_model_len=100,
        num_lookahead_slots=24,
    )

    def blocks_of(num_tokens: int) -> int:
        params = SamplingParams(max_tokens=1)
        sequence = Sequence(0, [1] * (num_tokens - 1), params, 0, frozenset())
        return scheduler.blocks.blocks_for(scheduler.most_slots(sequence))

    longest = plan.longest_context
    assert blocks_of(longest) <= num_blocks == plan.num_slots // 8
    assert longest == 100 or blocks_of(longest + 1) > num_blocks
    for num_tokens in (2, longest, 100):
        assert plan.blocks_for(num_tokens) == blocks_of(num_tokens)
        assert plan.concurrency(num_tokens) == min(16, num_blocks // blocks_of(num_tokens))


def test_shared_tensors_count_once() -> None:
    embedding = nn.Embedding(10, 4)
    tied = nn.Linear(4, 10, bias=False)
    tied.weight = embedding.weight
    model = nn.ModuleList([embedding, tied, nn.Linear(4, 4, bias=False)])
    model.register_buffer("map", torch.zeros(5, dtype=torch.int64))
    seen: set[int] = set()
    assert storage_bytes(model, seen) == 160 + 64 + 40
    head = nn.Linear(4, 10)  # with a bias of its own
    head.weight = nn.Parameter(embedding.weight.detach())
    assert storage_bytes(head, seen) == 40
    assert storage_bytes(model, seen) == 0
    whole = torch.zeros(12, 4)
    parts = nn.ParameterList([nn.Parameter(part) for part in whole.split([8, 2, 2])])
    assert storage_bytes(parts, set()) == whole.nbytes


def test_a_drafter_that_shares_the_targets_embeddings(target: TargetModel) -> None:
    drafter = make_drafter(target).to(torch.float64)
    own = sum(parameter.nbytes for parameter in drafter.parameters())
    alone = plan_of(target=target, drafter=drafter, max_model_len=256)
    assert alone.target_bytes >= sum(parameter.nbytes for parameter in target.model.parameters())
    assert alone.drafter_bytes == own
    drafter.embed_tokens.weight = nn.Parameter(target.embedding_weight().detach())
    drafter.lm_head.weight = nn.Parameter(target.lm_head_weight().detach())
    shared = plan_of(target=target, drafter=drafter, max_model_len=256)
    assert shared.target_bytes == alone.target_bytes
    assert shared.drafter_bytes == own - 2 * target.lm_head_weight().nbytes


def test_the_table_of_a_card(card: Card) -> None:
    card(60 * GIB, 80 * GIB)
    plan = replace(plan_of(drafter=fake_drafter()), target_bytes=16 * GIB, drafter_bytes=3 * GIB)
    assert str(plan).splitlines() == [
        "memory on Imaginary X1",
        "  usable               72.0 GiB of 80.0 GiB",
        "  CUDA, others         1.0 GiB",
        "  target weights       16.0 GiB",
        "  drafter weights      3.0 GiB",
        "  activations, graphs  2.8 GiB (measured)",
        "  KV cache             49.2 GiB of bfloat16: 20,171 blocks of 16 slots (2.5 MiB, "
        "256.0 KiB of it the drafter's)",
        "  reserved ahead       24 slots a request",
        "  longest context      40,960 tokens",
        "  requests at once     7 of 40,960, 16 of 2,048 tokens (max_num_seqs 16)",
    ]
    card(9 * GIB + 768 * MIB, 80 * GIB)
    plan = plan_of(peak_bytes=512 * MIB)
    assert "target weights       1000 B" in str(plan)
    assert "drafter" not in str(plan)
    assert str(plan).splitlines()[-4:] == [
        "  KV cache             508.5 MiB of bfloat16: 226 blocks of 16 slots (2.2 MiB)",
        "  reserved ahead       24 slots a request",
        "  longest context      3,592 tokens: the KV cache ends before max_model_len (40,960)",
        "  requests at once     0 of 40,960, 1 of 2,048 tokens (max_num_seqs 16)",
    ]


def test_the_table_of_a_cpu(target: TargetModel) -> None:
    sizes = {"max_model_len": 256, "num_lookahead_slots": 2}
    plan = plan_of(EngineConfig(max_num_seqs=3), target=target, **sizes)
    assert str(replace(plan, target_bytes=5 * MIB)).splitlines() == [
        "memory on cpu",
        "  target weights    5.0 MiB",
        "  KV cache          3.0 MiB of float64: 192 blocks of 16 slots (16.0 KiB)",
        "  reserved ahead    2 slots a request",
        "  longest context   256 tokens",
        "  requests at once  3 of 256 tokens (max_num_seqs 3)",
    ]


def test_sizes_for_people() -> None:
    sizes = (0, 17 / 3, 1023, 1024, MIB - 1, 3 * MIB // 2, GIB, 2000 * GIB)
    expected = "0 B|6 B|1023 B|1.0 KiB|1,024.0 KiB|1.5 MiB|1.0 GiB|2,000.0 GiB"
    assert "|".join(map(size_text, sizes)) == expected


def test_a_card_without_room_for_a_request(card: Card) -> None:
    card(9 * GIB, 80 * GIB)
    assert message_of(lambda: plan_of(drafter=fake_drafter())) == (
        "A KV block takes 2.5 MiB and one request at least 2 of them, 5.0 MiB; the KV cache may "
        "take 0 B. Of the 80.0 GiB of Imaginary X1 this engine may use 72.0 GiB; 71.0 GiB are in "
        "use, 1.5 KiB of them by its weights, and 2.8 GiB are kept for activations and graphs. "
        "Lower max_num_batched_tokens (4096) or max_num_seqs (16), raise gpu_memory_utilization "
        "(0.9), take a smaller dtype, or free the card."
    )
    config = EngineConfig(fp8_activations="auto")
    message = message_of(lambda: plan_of(config, drafter=fake_drafter()))
    assert "(0.9), leave fp8_activations out, take a smaller dtype" in message


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_bound_without_room_for_a_request(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = (60 * GIB, 80 * GIB) if kind == "cuda" else None
    monkeypatch.setattr(memory, "free_and_total", lambda device: found)
    monkeypatch.setattr(memory, "device_name", lambda device: kind)
    config = EngineConfig(kv_cache_gib=1 / 1024)
    message = message_of(lambda: plan_of(config, target=fake_target(kind)))
    assert "at least 2 of them, 4.5 MiB; the KV cache may take 1.0 MiB. Raise kv_cache" in message
    assert "gpu_memory_utilization" not in message


def test_a_number_of_blocks_that_cannot_be(card: Card) -> None:
    card(1 * GIB, 80 * GIB)
    assert message_of(lambda: plan_of(EngineConfig(num_kv_blocks=500))) == (
        "num_kv_blocks is 500, which take 1.1 GiB; Imaginary X1 has 1.0 GiB free. Ask for fewer, "
        "or leave it out."
    )
    message = message_of(lambda: plan_of(EngineConfig(num_kv_blocks=1)))
    assert message == "num_kv_blocks is 1; expected at least 2, those of one request."


def test_what_torch_hands_back_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [1]

    def empty_cache() -> None:
        free[0] = 5

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 8))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"{CARD} {device.index}")
    device = torch.device("cuda:1")
    assert (memory.free_and_total(device), memory.device_name(device)) == ((5, 8), f"{CARD} 1")
    cpu = torch.device("cpu")
    assert (memory.free_and_total(cpu), memory.device_name(cpu)) == (None, "cpu")
