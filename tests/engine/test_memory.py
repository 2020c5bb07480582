"""The memory plan of an engine: what fits, what is said about it, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from peagle.config import EngineConfig, SamplingParams
from peagle.engine import Sequence
from peagle.engine import memory_plan as memory
from peagle.engine.block_manager import BlockManager
from peagle.engine.memory_plan import (
    CPU_CACHE_GIB,
    GRAPH_BYTES,
    MemoryPlan,
    estimate_reserved,
    make_memory_plan,
    size_text,
    storage_bytes,
)
from peagle.engine.scheduler import Scheduler
from peagle.errors import UserError
from peagle.models.target import TargetModel
from tests.conftest import make_drafter

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


def fake_target(num_bytes: int = 1000, kind: str = "cuda", **text: Any) -> Any:
    """What the plan asks a target of 8 billion parameters for."""
    sizes = {"num_attention_heads": 32, "intermediate_size": 12288, **text}
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(**sizes))
    return SimpleNamespace(
        model=Owner(num_bytes, config=config),
        kv_shapes=lambda: [(KV_HEADS, HEAD_DIM)] * LAYERS,
        dtype=torch.bfloat16,
        device=torch.device(kind),
        hidden_size=4096,
        vocab_size=151_936,
    )


def fake_drafter(num_bytes: int = 500) -> Any:
    config = SimpleNamespace(
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        num_layers=4,
        num_attention_heads=32,
        hidden_size=4096,
        intermediate_size=12288,
        feature_size=3 * 4096,
        max_position_embeddings=2048,
    )
    return Owner(num_bytes, config=config)


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
    sizes = {"max_model_len": 40_960, "num_lookahead_slots": 24, "num_drafts": 7, **options}
    return make_memory_plan(target or fake_target(), drafter, config or EngineConfig(), **sizes)


def message_of(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as error:
        call()
    return str(error.value)


# ---- the number of blocks -------------------------------------------------------------------


def test_what_a_card_has_left(card: Card) -> None:
    """total * utilization - in use - reserved - scrap, in whole blocks."""
    card(60 * GIB, 80 * GIB)
    plan = plan_of(EngineConfig(gpu_memory_utilization=0.75), reserved_bytes=2 * GIB)
    assert plan.block_bytes == plan.target_block_bytes == TARGET_BLOCK
    assert plan.budget_bytes == (60 - 20 - 2) * GIB - TARGET_BLOCK
    assert plan.num_blocks == plan.budget_bytes // TARGET_BLOCK
    assert plan.kv_bytes == plan.num_blocks * TARGET_BLOCK
    assert (plan.device, plan.free_bytes, plan.total_bytes) == (CARD, 60 * GIB, 80 * GIB)
    assert (plan.usable_bytes, plan.reserved_bytes) == (60 * GIB, 2 * GIB)
    assert (plan.target_bytes, plan.drafter_bytes) == (1000, 0)


def test_a_drafter_has_its_part_in_every_block(card: Card) -> None:
    card(60 * GIB, 80 * GIB)
    plan = plan_of(drafter=fake_drafter(), reserved_bytes=0)
    assert (plan.target_block_bytes, plan.drafter_block_bytes) == (TARGET_BLOCK, DRAFTER_BLOCK)
    assert plan.num_blocks == (72 - 20) * GIB // (TARGET_BLOCK + DRAFTER_BLOCK) - 1
    assert plan.drafter_bytes == 500


def test_the_reserve_is_estimated_unless_given(card: Card) -> None:
    card(60 * GIB, 80 * GIB)
    target, config = fake_target(), EngineConfig()
    estimate = estimate_reserved(target, None, config, max_model_len=40_960, num_drafts=7)
    assert plan_of(config, target=target).reserved_bytes == estimate > GRAPH_BYTES
    assert plan_of(config, target=target, reserved_bytes=0).reserved_bytes == 0


def test_no_more_blocks_than_are_of_use(card: Card) -> None:
    card(79 * GIB, 80 * GIB)
    config = EngineConfig(max_num_seqs=2, enable_prefix_caching=False)
    assert plan_of(config, max_model_len=100).num_blocks == 2 * 7
    kept = replace(config, enable_prefix_caching=True)
    assert plan_of(kept, max_model_len=100).num_blocks == 4 * 2 * 7


def test_a_bound_of_the_cache_and_the_share_of_a_card_bound_each_other(card: Card) -> None:
    card(60 * GIB, 80 * GIB)
    assert plan_of(EngineConfig(kv_cache_gib=1.5)).budget_bytes == 1.5 * GIB
    assert plan_of(EngineConfig(kv_cache_gib=500)) == plan_of()


def test_a_given_number_of_blocks(card: Card) -> None:
    card(60 * GIB, 80 * GIB)
    # The share is not asked.
    plan = plan_of(EngineConfig(num_kv_blocks=10, gpu_memory_utilization=0.1))
    assert (plan.num_blocks, plan.budget_bytes) == (10, 10 * TARGET_BLOCK)


def test_a_cpu_has_a_bound_and_no_more(target: TargetModel) -> None:
    drafter = make_drafter(target)
    sizes = {"max_model_len": 256, "num_lookahead_slots": 8, "num_drafts": 3}
    plan = make_memory_plan(target, drafter, EngineConfig(), **sizes, reserved_bytes=9)
    block = (4 + 2) * 2 * 16 * 2 * 8 * 8
    assert plan.block_bytes == block
    assert plan.num_blocks == 4 * 16 * 16, "all that is of use"
    assert plan.budget_bytes == CPU_CACHE_GIB * GIB
    assert (plan.device, plan.reserved_bytes) == ("cpu", 0)
    assert plan.total_bytes is plan.free_bytes is plan.usable_bytes is None
    small = EngineConfig(kv_cache_gib=1 / 1024)
    assert make_memory_plan(target, drafter, small, **sizes).num_blocks == MIB // block
    few = EngineConfig(num_kv_blocks=5)
    assert make_memory_plan(target, drafter, few, **sizes).num_blocks == 5


@settings(deadline=None)
@given(data=st.data())
def test_the_plan_keeps_to_its_budget_and_wastes_none(data: st.DataObject) -> None:
    def number(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    total = number(MIB, 200 * GIB)
    free = number(0, total)
    reserved = number(0, 4 * GIB)
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
        target = fake_target(kind="cuda" if is_card else "cpu")
        try:
            plan = plan_of(config, target=target, drafter=drafter, reserved_bytes=reserved, **sizes)
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
        in_use = total - free + reserved + plan.kv_bytes + block
        assert in_use <= total * config.gpu_memory_utilization
    every = -(-plan.max_model_len // plan.block_size) * plan.max_num_seqs
    useful = every * 4 if config.enable_prefix_caching else every
    assert plan.num_blocks == useful or plan.kv_bytes + block > plan.budget_bytes
    assert plan.num_blocks <= useful
    assert plan.min_blocks <= plan.num_blocks
    assert 0 < plan.longest_context <= plan.max_model_len
    assert plan.max_len_concurrency <= plan.typical_concurrency <= plan.max_num_seqs
    assert (plan.max_len_concurrency > 0) == (plan.longest_context == plan.max_model_len)
    assert len(str(plan).splitlines()) <= 10


# ---- what it allows -------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [4, 5, 7, 12, 13, 20])
def test_the_longest_context_is_what_the_scheduler_takes(num_blocks: int) -> None:
    config = EngineConfig(num_kv_blocks=num_blocks, block_size=8)
    plan = plan_of(config, target=fake_target(kind="cpu"), max_model_len=100)
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


def test_concurrency_counts_the_slots_ahead(card: Card) -> None:
    card(60 * GIB, 80 * GIB)
    plan = plan_of(EngineConfig(num_kv_blocks=2 * 2560 + 1))
    # Positions beyond max_model_len have no slots; a typical request holds 2,072: 130 blocks.
    assert (plan.max_len_concurrency, plan.typical_concurrency) == (2, 16)
    assert plan.concurrency(2049) == 16
    wide = replace(plan, max_num_seqs=1000)
    assert (wide.max_len_concurrency, wide.typical_concurrency) == (2, 5121 // 130)
    assert replace(plan, max_model_len=1000).typical_len == 1000


# ---- weights --------------------------------------------------------------------------------


def test_shared_tensors_count_once() -> None:
    embedding = nn.Embedding(10, 4)
    tied = nn.Linear(4, 10, bias=False)
    tied.weight = embedding.weight
    model = nn.ModuleList([embedding, tied, nn.Linear(4, 4, bias=False)])
    seen: set[int] = set()
    assert storage_bytes(model, seen) == 160 + 64
    head = nn.Linear(4, 10)  # with a bias of its own
    head.weight = nn.Parameter(embedding.weight.detach())
    assert storage_bytes(head, seen) == 40
    assert storage_bytes(model, seen) == 0


def test_parts_of_one_allocation_count_as_it_does() -> None:
    whole = torch.zeros(12, 4)
    parts = nn.ParameterList([nn.Parameter(part) for part in whole.split([8, 2, 2])])
    assert storage_bytes(parts, set()) == whole.nbytes
    module = nn.Module()
    module.register_buffer("map", torch.zeros(5, dtype=torch.int64))
    assert storage_bytes(module, set()) == 40


def test_a_drafter_that_shares_the_targets_embeddings(target: TargetModel) -> None:
    drafter = make_drafter(target).to(torch.float64)
    sizes = {"max_model_len": 256, "num_lookahead_slots": 8, "num_drafts": 3}
    alone = make_memory_plan(target, drafter, EngineConfig(), **sizes)
    own = sum(parameter.nbytes for parameter in drafter.parameters())
    assert alone.target_bytes >= sum(parameter.nbytes for parameter in target.model.parameters())
    assert alone.drafter_bytes == own
    drafter.embed_tokens.weight = nn.Parameter(target.embedding_weight().detach())
    drafter.lm_head.weight = nn.Parameter(target.lm_head_weight().detach())
    shared = make_memory_plan(target, drafter, EngineConfig(), **sizes)
    assert shared.target_bytes == alone.target_bytes
    assert shared.drafter_bytes == own - 2 * target.lm_head_weight().nbytes


# ---- the reserve ----------------------------------------------------------------------------


def reserve(
    target: Any = None,
    drafter: Any = None,
    num_drafts: int = 7,
    num_resuming: int = 0,
    **options: Any,
) -> int:
    return estimate_reserved(
        target or fake_target(),
        drafter,
        EngineConfig(**options),
        max_model_len=4096,
        num_drafts=num_drafts,
        num_resuming=num_resuming,
    )


def test_the_reserve_by_hand() -> None:
    """One term after the other, for 4,096 rows of a chunk and 16 * 8 rows of logits."""
    row = 12 * 4096 + 2 * (32 + 2 * 8) * 128 + 3 * 12288
    logits = 128 * 151_936 * (2 * 2 + 4 * 4)
    assert reserve() == GRAPH_BYTES + 2 * 4096 * row + logits + 16 * 151_936 * 5
    angles = 2 * (4096 + 14) * 128 * 2
    assert reserve(drafter=fake_drafter()) == reserve() + 2 * 4096 * 3 * 3 * 4096 + angles


def test_the_reserve_grows_with_what_runs_at_once() -> None:
    assert reserve(max_num_batched_tokens=8192) > reserve()
    assert reserve(max_num_seqs=64) > reserve()
    assert reserve(num_drafts=3) < reserve()
    # A chunk is no longer than all sequences together; a decode step may be larger than a chunk.
    assert reserve(max_num_batched_tokens=10**9) == reserve(max_num_batched_tokens=16 * 4096)
    tiny = reserve(max_num_batched_tokens=1)
    assert tiny == reserve(max_num_batched_tokens=128) < reserve(max_num_batched_tokens=129)


def test_pauses_of_the_drafts_take_room_for_features() -> None:
    """256 features of every sequence and of one more, and a pass over those that resume."""
    drafter = fake_drafter()
    rings = 17 * 256 * 3 * 4096 * 2
    assert reserve(drafter=drafter, num_resuming=16) == reserve(drafter=drafter) + rings
    more = reserve(drafter=drafter, num_resuming=32, max_num_batched_tokens=8192)
    assert reserve(drafter=drafter, num_resuming=32) == more


@pytest.mark.parametrize(
    ("text", "width"),
    [
        ({"intermediate_size": [100, 300]}, 3 * 300),
        ({"intermediate_size": None}, 3 * 4 * 4096),
        # Experts: gate, up, product, in and out, of each that a token goes to.
        (
            {"intermediate_size": None, "moe_intermediate_size": 768, "num_experts_per_tok": 8},
            8 * (3 * 768 + 2 * 4096),
        ),
        ({"intermediate_size": 2880, "num_experts_per_tok": 4}, 4 * (3 * 2880 + 2 * 4096)),
        (
            {"intermediate_size": 12288, "moe_intermediate_size": None, "top_k_experts": None},
            3 * 12288,
        ),
    ],
)
def test_the_reserve_knows_how_wide_layers_are(text: dict[str, Any], width: int) -> None:
    plain = {"intermediate_size": 1, "num_experts_per_tok": 0}
    difference = reserve(fake_target(**text)) - reserve(fake_target(**plain))
    assert difference == 2 * 4096 * (width - 3)


def test_the_reserve_of_a_model_without_an_intermediate_size() -> None:
    target = fake_target()
    text = SimpleNamespace(num_attention_heads=32)
    target.model.config = SimpleNamespace(get_text_config=lambda: text)
    assert reserve(target) == reserve(fake_target(intermediate_size=4 * 4096))


def test_the_reserve_of_real_models(target: TargetModel) -> None:
    sizes = {"max_model_len": 256, "num_drafts": 3}
    plain = estimate_reserved(target, None, EngineConfig(), **sizes)
    drafted = estimate_reserved(target, make_drafter(target), EngineConfig(), **sizes)
    assert GRAPH_BYTES < plain < drafted < GRAPH_BYTES + 64 * MIB


# ---- the table ------------------------------------------------------------------------------


def test_the_table_of_a_card(card: Card) -> None:
    card(60 * GIB, 80 * GIB)
    plan = plan_of(drafter=fake_drafter(), reserved_bytes=2 * GIB)
    plan = replace(plan, target_bytes=16 * GIB, drafter_bytes=3 * GIB)
    assert str(plan).splitlines() == [
        "memory on Imaginary X1",
        "  usable               72.0 GiB of 80.0 GiB",
        "  CUDA, others         1.0 GiB",
        "  target weights       16.0 GiB",
        "  drafter weights      3.0 GiB",
        "  activations, graphs  2.0 GiB (estimate)",
        "  KV cache             50.0 GiB: 20,479 blocks of 16 slots (2.5 MiB, 256.0 KiB of it the "
        "drafter's)",
        "  reserved ahead       24 slots a request",
        "  longest context      40,960 tokens",
        "  requests at once     7 of 40,960, 16 of 2,048 tokens (max_num_seqs 16)",
    ]


def test_the_table_of_a_card_with_room_for_a_shorter_context(card: Card) -> None:
    card(9 * GIB + 512 * MIB, 80 * GIB)
    plan = plan_of(reserved_bytes=GIB)
    assert "target weights       1000 B" in str(plan)
    assert "drafter" not in str(plan)
    assert str(plan).splitlines()[-4:] == [
        "  KV cache             508.5 MiB: 226 blocks of 16 slots (2.2 MiB)",
        "  reserved ahead       24 slots a request",
        "  longest context      3,592 tokens: the KV cache ends before max_model_len (40,960)",
        "  requests at once     0 of 40,960, 1 of 2,048 tokens (max_num_seqs 16)",
    ]


def test_the_table_of_a_cpu(target: TargetModel) -> None:
    sizes = {"max_model_len": 256, "num_lookahead_slots": 2, "num_drafts": 0}
    plan = make_memory_plan(target, None, EngineConfig(max_num_seqs=3), **sizes)
    lines = str(replace(plan, target_bytes=5 * MIB)).splitlines()
    assert lines == [
        "memory on cpu",
        "  target weights    5.0 MiB",
        "  KV cache          3.0 MiB: 192 blocks of 16 slots (16.0 KiB)",
        "  reserved ahead    2 slots a request",
        "  longest context   256 tokens",
        "  requests at once  3 of 256 tokens (max_num_seqs 3)",
    ]


def test_sizes_for_people() -> None:
    sizes = (0, 1023, 1024, MIB - 1, 3 * MIB // 2, GIB, 2000 * GIB)
    expected = ["0 B", "1023 B", "1.0 KiB", "1,024.0 KiB", "1.5 MiB", "1.0 GiB", "2,000.0 GiB"]
    assert [size_text(size) for size in sizes] == expected


# ---- refusals -------------------------------------------------------------------------------


def test_a_card_without_room_for_a_request(card: Card) -> None:
    card(9 * GIB, 80 * GIB)
    message = message_of(lambda: plan_of(reserved_bytes=2 * GIB, drafter=fake_drafter()))
    assert message == (
        "A KV block takes 2.5 MiB and one request at least 2 of them, 5.0 MiB; the KV cache may "
        "take 0 B. Of the 80.0 GiB of Imaginary X1 this engine may use 72.0 GiB; 71.0 GiB are in "
        "use, 1.5 KiB of them by its weights, and 2.0 GiB are kept for activations and graphs. "
        "Lower max_num_batched_tokens (4096) or max_num_seqs (16), raise gpu_memory_utilization "
        "(0.9), take a smaller dtype, or free the card."
    )


def test_as_many_blocks_as_the_slots_ahead_need(card: Card) -> None:
    """25 slots of 16: one block is too little, two are enough."""
    config = EngineConfig(gpu_memory_utilization=1)
    card(3 * TARGET_BLOCK, 80 * GIB)  # one of them scrap
    assert plan_of(config, reserved_bytes=0).longest_context == 2 * 16 - 24
    card(2 * TARGET_BLOCK, 80 * GIB)
    message = message_of(lambda: plan_of(config, reserved_bytes=0))
    assert "one request at least 2 of them, 4.5 MiB; the KV cache may take 2.2 MiB" in message
    # Sequences shorter than that need less.
    assert plan_of(config, reserved_bytes=0, max_model_len=16).num_blocks == 1


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_bound_without_room_for_a_request(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = (60 * GIB, 80 * GIB) if kind == "cuda" else None
    monkeypatch.setattr(memory, "free_and_total", lambda device: found)
    monkeypatch.setattr(memory, "device_name", lambda device: kind)
    config = EngineConfig(kv_cache_gib=1 / 1024)
    message = message_of(lambda: plan_of(config, target=fake_target(kind=kind)))
    assert "at least 2 of them, 4.5 MiB; the KV cache may take 1.0 MiB. Raise kv_cache" in message
    assert "gpu_memory_utilization" not in message


def test_a_number_of_blocks_that_cannot_be(card: Card) -> None:
    card(1 * GIB, 80 * GIB)
    message = message_of(lambda: plan_of(EngineConfig(num_kv_blocks=500)))
    assert message == (
        "num_kv_blocks is 500, which take 1.1 GiB; Imaginary X1 has 1.0 GiB free. Ask for fewer, "
        "or leave it out."
    )
    message = message_of(lambda: plan_of(EngineConfig(num_kv_blocks=1)))
    assert message == "num_kv_blocks is 1; expected at least 2, those of one request."


# ---- the card -------------------------------------------------------------------------------


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
