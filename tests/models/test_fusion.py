"""The fused module equals the unfused one, in every architecture; what would not is left alone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from peagle.models.fingerprint import TargetFingerprint
from peagle.models.fusion import FusedLinear, FusedPart, FusionResult, fuse
from peagle.models.target import TargetModel
from tests.models.paging import Paged, largest_difference, make_sequences
from tests.models.test_architectures import ARCHITECTURES, float64_throughout
from tests.models.tiny import make_model

QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, biases, tied": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "qwen3_moe, some dense": (
        "qwen3_moe",
        {**ARCHITECTURES["qwen3_moe"].options, "mlp_only_layers": [0, 2]},
    ),
    **{name: (a.model_type, a.options) for name, a in ARCHITECTURES.items()},
}
# Layers in which these are fused; (4, 4) where not listed.
COUNTS = {
    "phi": (4, 0),  # its MLP has one input projection
    "phi3": (0, 0),  # is fused as it comes
    "qwen3_moe": (4, 0),  # experts are one tensor already
    "qwen3_moe, some dense": (4, 2),
    "gpt_oss": (4, 0),
    "gemma4, shared keys": (2, 4),
    "gemma4, experts, keys as values": (4, 4),  # two layers of them without v_proj
}


def make_target(name: str, dtype: torch.dtype = torch.float64) -> TargetModel:
    kind, options = MODELS[name]
    model = make_model(kind, **options)
    for parameter in model.parameters():  # not the angles of RoPE, which loading leaves alone too
        parameter.data = parameter.data.to(dtype)
    return TargetModel(model, aux_layer_ids=(1, 3))


def first_layer(target: TargetModel) -> Any:
    decoder: Any = target.model.get_decoder()
    return decoder.layers[0]


@torch.inference_mode()
def passes(target: TargetModel) -> list[Tensor]:
    """Logits and features of prompts, and logits of drafts behind them."""
    paged = Paged(target, make_sequences())
    logits, features, _ = paged.prefill()
    return [*logits, *features, *paged.verify()]


def reasons(results: list[FusionResult]) -> dict[tuple[int, str], str]:
    """Why groups stay as they are, by layer and module."""
    return {(r.layer, r.module): r.reason for r in results if r.reason}


@pytest.mark.parametrize("name", MODELS)
def test_fused_equals_unfused(name: str) -> None:
    target = make_target(name)
    with float64_throughout():
        before = passes(target)
        results = fuse(target.model)
        after = passes(target)
    assert largest_difference(after, before) < 1e-12
    counts = [
        sum(set(r.projections) <= set(names) and not r.reason for r in results)
        for names in (QKV, GATE_UP)
    ]
    assert tuple(counts) == COUNTS.get(name, (4, 4))
    modules = list(target.model.modules())
    assert sum(isinstance(m, FusedLinear) for m in modules) == sum(counts)
    assert len(results) == 2 * target.num_layers, "each layer is accounted for"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_other_types_only_rounding_differs(dtype: torch.dtype) -> None:
    target = make_target("qwen3", dtype)
    before = passes(target)
    assert not reasons(fuse(target.model))
    difference = largest_difference(passes(target), before)
    assert difference < (1e-5 if dtype == torch.float32 else 0.2)


def test_one_product_for_every_group() -> None:
    target = make_target("llama")
    fuse(target.model)
    products: list[nn.Module] = []
    for module in target.model.modules():
        if isinstance(module, FusedLinear):
            module.register_forward_hook(lambda m, *_: products.append(m))
    Paged(target, make_sequences()).prefill()
    assert len(products) == len({id(p) for p in products}) == 8
    assert all(fused.is_idle for fused in products if isinstance(fused, FusedLinear))


# ---- what stays as it was ----


def storage_bytes(model: nn.Module) -> int:
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("name", ["qwen2", "llama, biases, tied", "gemma4, shared keys"])
def test_weights_keep_their_names_and_take_no_more_memory(name: str) -> None:
    target = make_target(name)
    state = {k: v.clone() for k, v in target.model.state_dict().items()}
    size, fingerprint = storage_bytes(target.model), TargetFingerprint.of(target)
    fuse(target.model)
    fused = target.model.state_dict()
    assert fused.keys() == state.keys()
    assert all(torch.equal(fused[k], v) for k, v in state.items())
    assert storage_bytes(target.model) == size
    assert TargetFingerprint.of(target) == fingerprint


def test_weights_load_into_the_fused_ones() -> None:
    target, other = make_target("qwen2"), make_target("qwen2")
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.mul_(0.9)
    fuse(target.model)
    state = other.model.state_dict()
    target.model.load_state_dict(state)
    assert largest_difference(passes(target), passes(other)) < 1e-12
    name = "model.layers.1.self_attn.k_proj.weight"
    with pytest.raises(RuntimeError, match=r"Missing key.*layers\.1\.self_attn\.k_proj"):
        target.model.load_state_dict({k: v for k, v in state.items() if k != name})
    with pytest.raises(RuntimeError, match=r"k_proj\.weight is .*, expected"):
        target.model.load_state_dict({**state, name: torch.ones(3, 3)})


def test_stand_ins_look_like_projections() -> None:
    target = make_target("qwen2")
    layer = first_layer(target)
    original: Any = layer.self_attn.k_proj
    fuse(target.model)
    part: Any = layer.self_attn.k_proj
    assert type(part) is FusedPart and part.bias is not None
    assert torch.equal(part.weight, original.weight)
    assert torch.equal(part.bias, original.bias)
    assert (part.in_features, part.out_features) == (32, 16)
    x = torch.randn(3, 32, dtype=torch.float64)
    # Asked twice for the same input, and out of order.
    assert torch.equal(part(x), part(x))
    assert torch.allclose(part(x), original(x))


# ---- what is left alone ----


def give_one_a_bias(target: TargetModel) -> None:
    projection = first_layer(target).self_attn.k_proj
    projection.bias = nn.Parameter(torch.zeros(16, dtype=torch.float64))


def hook_one(target: TargetModel) -> None:
    first_layer(target).self_attn.k_proj.register_forward_hook(lambda *_: None)


def replace_one(target: TargetModel) -> None:
    class Other(nn.Linear):
        pass

    first_layer(target).self_attn.k_proj = Other(32, 16, bias=False, dtype=torch.float64)


def share_one(target: TargetModel) -> None:
    attention = first_layer(target).self_attn
    attention.k_proj.weight = attention.v_proj.weight


def feed_one_something_else(target: TargetModel) -> None:
    attention = first_layer(target).self_attn
    forward = attention.forward

    def changed(hidden_states: Tensor, **kwargs: Any) -> Any:
        attention.k_proj(hidden_states * 2)
        return forward(hidden_states, **kwargs)

    attention.forward = changed


def read_a_missing_attribute(target: TargetModel) -> None:
    attention = first_layer(target).self_attn
    forward = attention.forward

    def changed(hidden_states: Tensor, **kwargs: Any) -> Any:
        assert attention.k_proj.reset_parameters
        return forward(hidden_states, **kwargs)

    attention.forward = changed


def never_run(target: TargetModel) -> None:
    first_layer(target).forward = lambda hidden_states, **_: hidden_states


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (give_one_a_bias, "some have a bias and some have none"),
        (hook_one, "k_proj has hooks"),
        (replace_one, "k_proj is a Other, not a Linear"),
        (share_one, "k_proj shares its weight"),
        (feed_one_something_else, "the projections do not read one input"),
        (read_a_missing_attribute, "the module fails when fused: AttributeError"),
        (never_run, "the module did not run in the probe"),
    ],
)
def test_unsafe_projections_are_left_alone(
    change: Callable[[TargetModel], None], reason: str
) -> None:
    target = make_target("llama")
    change(target)
    before = passes(target)
    left = reasons(fuse(target.model))
    assert left.pop((0, "self_attn"), "").startswith(reason)
    assert all(key == (0, "mlp") and change is never_run for key in left)
    assert not any(
        isinstance(m, FusedPart | FusedLinear) for m in first_layer(target).self_attn.modules()
    )
    assert largest_difference(passes(target), before) < 1e-12


@contextmanager
def mixed_up_columns() -> Iterator[None]:
    take = FusedLinear.project

    def mixed_up(self: FusedLinear, index: int, x: Tensor) -> Tensor:
        return take(self, {1: 2, 2: 1}.get(index, index) if len(self.sizes) == 3 else index, x)

    FusedLinear.project = mixed_up
    yield
    FusedLinear.project = take


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_probe_sees_a_mistake(dtype: torch.dtype) -> None:
    target = make_target("qwen3", dtype)
    before = passes(target)
    with mixed_up_columns():
        results = fuse(target.model)
    assert [r.projections for r in results if not r.reason] == [GATE_UP] * 4
    assert all(why.startswith("the results differ by") for why in reasons(results).values())
    assert largest_difference(passes(target), before) < 0.2 * before[0].abs().max()


def test_each_group_has_its_reason() -> None:
    shared = fuse(make_target("gemma4, shared keys").model)
    alone = {r.projections for r in shared if r.reason == "no other projection beside it"}
    assert alone == {("q_proj",)}
    left = [r for r in fuse(make_target("phi").model) if r.reason]
    assert [(r.module, r.projections, r.reason) for r in left] == [
        ("layer", GATE_UP, "it has none of these")
    ] * 4


def test_fusing_again_changes_nothing() -> None:
    target = make_target("llama")
    fuse(target.model)
    before = passes(target)
    left = fuse(target.model)
    assert all(r.reason for r in left)
    assert left[0].reason == "q_proj is a FusedPart, not a Linear"
    assert largest_difference(passes(target), before) == 0


def test_norms_that_compute_in_float32_are_no_obstacle_in_float64() -> None:
    assert not reasons(fuse(make_target("qwen3").model))  # their casts are not lifted here


@pytest.mark.gpu
def test_fusing_on_a_card_needs_no_second_model() -> None:
    config = LlamaConfig(
        vocab_size=1024, hidden_size=2048, intermediate_size=8192, num_hidden_layers=12
    )
    with torch.device("cuda"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    target = TargetModel(model)  # runs it once: the library's workspace is there
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    assert not reasons(fuse(target.model))
    assert torch.cuda.max_memory_reserved() < 1.25 * before
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < 1.07 * before, "5.6% measured"
