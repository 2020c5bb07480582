"""Instance types and memory: against EC2's and SageMaker's own data, and caches that are full."""

import gzip
import json
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Gemma4TextConfig, GptOssConfig

from peagle.deploy.instances import (
    INSTANCE_TYPES,
    find_instance_type,
    fits,
    fitting_types,
    require_fits,
)
from peagle.deploy.memory import (
    GIB,
    RESERVE_BYTES,
    KvLayers,
    MemoryNeeded,
    ModelFacts,
    facts_of_folder,
    memory_needed,
)
from peagle.errors import CheckpointError, UserError
from tests.conftest import make_target_folder
from tests.engine.engines import TREES, config_of, make_llm

botocore = pytest.importorskip("botocore.session")


# ---- the table ----


def hosted() -> set[str]:
    """What SageMaker hosts, by its service model."""
    model = botocore.get_session().get_service_model("sagemaker")
    return set(model.shape_for("ProductionVariantInstanceType").enum)


def test_sagemaker_hosts_every_type_of_the_table():
    assert INSTANCE_TYPES.keys() <= hosted()


def test_every_recent_gpu_type_that_sagemaker_hosts_is_in_the_table():
    recent = {name for name in hosted() if name.startswith(("ml.g", "ml.p"))}
    recent -= {name for name in recent if name.startswith(("ml.p2.", "ml.p3."))}
    assert recent - INSTANCE_TYPES.keys() <= {"ml.p6e-gb200.36xlarge"}


def test_gpus_are_those_that_ec2_tells():
    (moto,) = find_spec("moto").submodule_search_locations  # found, but not imported: that is slow
    path = Path(moto, "ec2", "resources", "instance_types.json.gz")
    told = json.loads(gzip.decompress(path.read_bytes()))
    for name, kind in INSTANCE_TYPES.items():
        (gpu,) = told[name.removeprefix("ml.")]["GpuInfo"]["Gpus"]
        assert gpu["Count"] == kind.num_gpus, name
        assert gpu["MemoryInfo"]["SizeInMiB"] * 2**20 == kind.gpu_bytes, name
        assert set(gpu["Name"].split()) >= set(kind.gpu.split()), name


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ml.m5.xlarge", "has no NVIDIA GPU"),
        ("ml.inf2.xlarge", "has no NVIDIA GPU"),
        ("ml.trn1.2xlarge", "has no NVIDIA GPU"),
        ("ml.p3.2xlarge", "older than compute capability 7.5"),
        ("g7e.2xlarge", "Did you mean ml.g7e.2xlarge"),
        ("ml.g7e.2xlagre", "Did you mean ml.g7e.2xlarge"),
        ("", "expected a name like ml.g7e.2xlarge"),
    ],
)
def test_names_that_are_refused(name: str, said: str):
    with pytest.raises(UserError, match=said):
        find_instance_type(name)


def test_a_type_that_aws_may_have_added_passes_with_a_warning():
    with pytest.warns(UserWarning, match=r"the instance type ml.g9.2xlarge.*did not check"):
        assert require_fits("ml.g9.2xlarge", needed(500), {}) is None


def test_a_size_that_is_not_known_passes_with_a_warning():
    with pytest.warns(UserWarning, match="did not check .*size"):
        assert require_fits("ml.g5.xlarge", None, {}) is INSTANCE_TYPES["ml.g5.xlarge"]


# ---- whether it fits ----


def needed(weights_gib: float, precision: str = "bf16", **changes: Any) -> MemoryNeeded:
    values = {
        "target_bytes": int(weights_gib * GIB),
        "draft_bytes": GIB,
        "kv_parts": ((2 * GIB, 8),),
        "max_model_len": 4096,
        "num_sequences": 1,
        "precision": precision,
    }
    return MemoryNeeded(**{**values, **changes})


def test_an_instance_that_is_too_small_says_what_is_needed_and_what_would_do():
    with pytest.raises(UserError) as caught:
        require_fits("ml.g5.xlarge", needed(60), {})
    said = str(caught.value)
    assert "it needs 65.0 GiB on one GPU" in said
    assert "weights 60.0 GiB, head 1.0 GiB, KV cache 2.0 GiB for 1 sequence of 4096 tokens" in said
    assert "It has 1 x A10G with 22.4 GiB, of which 20.1 GiB may be used (90%)" in said
    assert said.endswith(
        "Give as --instance-type one of ml.p5.4xlarge (1 x H100 with 80.0 GiB), ml.g7e.2xlarge "
        "(1 x RTX PRO 6000 with 96.0 GiB), ml.g6.12xlarge (4 x L4 with 22.4 GiB each)."
    )
    # 61/4 + 2/4 + 2 = 17.8 GiB
    require_fits("ml.g5.12xlarge", needed(60), {})


def test_what_fits_nowhere_says_so():
    with pytest.raises(UserError, match="No instance type known here fits"):
        require_fits("ml.p6-b300.48xlarge", needed(5000), {})


def test_more_gpus_than_there_are_is_refused():
    with pytest.raises(UserError, match=r"on 8 GPUs, and ml.g6.12xlarge has 4 x L4"):
        require_fits("ml.g6.12xlarge", needed(1), {"tensor-parallel-size": "8"})


def test_a_context_that_is_too_long_may_be_shortened():
    with pytest.raises(UserError, match=r"ml.g6e.xlarge \(1 x .*\), or lower max-model-len\.$"):
        require_fits("ml.g6.xlarge", needed(10, kv_parts=((20 * GIB, 8),)), {})


@pytest.mark.parametrize("precision", ["bf16", "fp8", "mxfp4", "nvfp4"])
def test_old_gpus_have_no_bfloat16(precision: str):
    with pytest.raises(UserError, match=r"T4 GPUs of compute capability 7.5.*8.0") as caught:
        require_fits("ml.g4dn.xlarge", needed(1, precision), {})
    require_fits("ml.g4dn.xlarge", needed(1, "fp16"), {})
    assert ("or set dtype=half." in str(caught.value)) == (precision == "bf16")
    require_fits("ml.g5.xlarge", needed(1, precision), {})


def test_our_own_engine_runs_on_one_gpu_of_many():
    one = needed(30, max_gpus=1)
    assert fits(INSTANCE_TYPES["ml.g6.12xlarge"], needed(30))
    with pytest.raises(
        UserError, match=r"on one GPU.*Give as --instance-type one of ml.g6e.xlarge"
    ):
        require_fits("ml.g6.12xlarge", one, {})


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({}, ""),
        ({"tensor-parallel-size": "4"}, ""),
        ({"pipeline-parallel-size": "2", "tensor-parallel-size": "2"}, ""),
        ({"pipeline-parallel-size": "4"}, ""),
        ({"gpu-memory-utilization": "0.99"}, ""),
        ({"gpu-memory-utilization": "0.5"}, r"of which 11.2 GiB may be used \(50%\)"),
        ({"tensor-parallel-size": "2"}, "on each of 2 GPUs"),
        ({"data-parallel-size": "4"}, "on one GPU"),
        ({"data-parallel-size": "2", "tensor-parallel-size": "4"}, "on 4 GPUs: that is 8, and"),
        ({"tensor-parallel-size": "3", "pipeline-parallel-size": "2"}, "on 6 GPUs, and"),
        ({"tensor-parallel-size": "x", "gpu-memory-utilization": "y"}, ""),
    ],
)
def test_what_flags_say_of_gpus(flags: dict[str, str], said: str):
    wanted = needed(50)  # 51/4 + 2/4 + 2 = 15.3 of 22.4 GiB on each of 4 GPUs
    if not said:
        require_fits("ml.g6.12xlarge", wanted, flags)
        return
    with pytest.raises(UserError, match=said):
        require_fits("ml.g6.12xlarge", wanted, flags)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    weights=st.floats(0.5, 1500),
    kv=st.floats(0.1, 100),
    heads=st.sampled_from([1, 2, 4, 8, 16]),
    precision=st.sampled_from(["bf16", "fp16", "mxfp4"]),
    utilization=st.sampled_from([0.5, 0.9, 0.95]),
)
def test_the_smallest_of_each_family_are_named(weights, kv, heads, precision, utilization):
    """Against the formula written out anew, in GiB."""

    def has_room(name: str) -> bool:
        kind = INSTANCE_TYPES[name]
        parts = min(heads, kind.num_gpus)
        left = kind.gpu_bytes / GIB * utilization - (weights + 1) / kind.num_gpus - kv / parts - 2
        assume(abs(left) > 1e-6)  # bytes are whole: so close to full, either is right
        modern = precision == "fp16" or not name.startswith("ml.g4dn")
        return modern and left > 0

    def memory(name: str) -> int:
        return INSTANCE_TYPES[name].num_gpus * INSTANCE_TYPES[name].gpu_bytes

    wanted = needed(weights, precision, kv_parts=((int(kv * GIB), heads),))
    found = [
        kind.num_gpus * kind.gpu_bytes for kind in fitting_types(wanted, utilization=utilization)
    ]
    room = [name for name in INSTANCE_TYPES if has_room(name)]
    families = {name.split(".")[1] for name in room}
    least = [min(memory(n) for n in room if n.startswith(f"ml.{family}.")) for family in families]
    assert found == sorted(least)
    flags = {"gpu-memory-utilization": str(utilization)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in INSTANCE_TYPES:
            if name in room:
                require_fits(name, wanted, flags)
            else:
                with pytest.raises(UserError):
                    require_fits(name, wanted, flags)


# ---- memory ----

_TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "sliding_window": 16,
}
_GEMMA = {
    "hidden_size_per_layer_input": 0,
    "num_global_key_value_heads": 1,
    "global_head_dim": 32,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": 64,
}
_CONFIGS = {
    "gpt_oss": GptOssConfig(**_TINY, num_local_experts=2, num_experts_per_tok=1),
    "gemma4": Gemma4TextConfig(**_TINY, **_GEMMA),
}


@pytest.mark.parametrize("kind", _CONFIGS)
def test_facts_are_those_of_the_model_that_runs(kind: str, tmp_path: Path):
    """Weights and KV caches of transformers' own model, windows and odd heads included."""
    model = AutoModelForCausalLM.from_config(_CONFIGS[kind], dtype=torch.bfloat16).eval()
    model.save_pretrained(tmp_path)
    facts = facts_of_folder(tmp_path)
    tokens = 12  # less than the window, of which transformers keeps one token less
    with torch.no_grad():
        cache = model(torch.arange(tokens)[None], use_cache=True).past_key_values
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)

    stored = {value.data_ptr(): value.nbytes for value in model.state_dict().values()}
    assert facts.weights_bytes == sum(stored.values())
    assert facts.precision == "bf16" and facts.max_model_len == 128
    assert {layer.window for layer in facts.kv_layers} == {None, 16}
    found = memory_needed(facts, max_model_len=tokens)
    assert found.kv_bytes() == kept
    assert found.per_gpu() == facts.weights_bytes + kept + RESERVE_BYTES


def test_float32_is_loaded_in_two_bytes(tmp_path: Path):
    folder = make_target_folder(tmp_path / "target")
    values = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder).parameters())
    facts = facts_of_folder(folder)
    assert (facts.weights_bytes, facts.precision) == (2 * values, "fp32")


@pytest.mark.parametrize(
    ("method", "precision", "packed"),
    [
        (
            "mxfp4",
            "mxfp4",
            {
                "experts.down_proj_blocks": torch.zeros(2, 32, 3, 16, dtype=torch.uint8),
                "experts.down_proj_scales": torch.zeros(2, 32, 3, dtype=torch.uint8),
            },
        ),
        (
            "fp8",
            "fp8",
            {
                "q_proj.weight": torch.zeros(256, 128, dtype=torch.float8_e4m3fn),
                "q_proj.weight_scale_inv": torch.zeros(2, 1),  # float32, one for 128 x 128
            },
        ),
        (
            "gptq",
            "int4",
            {
                "q_proj.qweight": torch.zeros(8, 64, dtype=torch.int32),  # 64 x 64 numbers
                "q_proj.qzeros": torch.zeros(2, 8, dtype=torch.int32),
            },
        ),
    ],
)
def test_packed_weights_count_as_they_are_stored(
    method: str, precision: str, packed: dict[str, torch.Tensor], tmp_path: Path
):
    """In both containers: on a GPU our own engine keeps them packed too."""
    tensors = {**packed, "embed.weight": torch.zeros(10, 4, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"quantization_config": {"quant_method": method}, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = facts_of_folder(tmp_path)
    assert facts.precision == precision
    assert facts.weights_bytes == sum(tensor.nbytes for tensor in tensors.values())
    managed, native = memory_needed(facts), memory_needed(facts, native=True)
    assert managed.target_bytes == native.target_bytes == facts.weights_bytes
    assert (native.max_gpus, native.precision) == (1, "bf16")


@given(
    length=st.integers(1, 200_000),
    sequences=st.integers(1, 64),
    window=st.integers(1, 4096),
    in_flight=st.integers(1, 8192),
)
def test_a_window_never_costs_more(length, sequences, window, in_flight):
    full, cut = KvLayers(3, 2, 8), KvLayers(3, 2, 8, window)
    all_slots = full.num_values(length, sequences, in_flight)
    assert all_slots == 2 * 3 * 2 * 8 * length * sequences
    slots = cut.num_values(length, sequences, in_flight) / (2 * 3 * 2 * 8)
    assert sequences * min(length, window) <= slots <= sequences * length
    assert slots <= sequences * window + in_flight


def test_the_context_is_the_models_own_unless_given():
    facts = ModelFacts(GIB, "bf16", (KvLayers(2, 4, 64),), max_model_len=1000)
    assert memory_needed(facts).max_model_len == 1000
    twice = memory_needed(facts, facts, max_model_len=500, num_sequences=3, kv_value_bytes=1)
    assert twice.kv_bytes() == 2 * (2 * 2 * 4 * 64) * 500 * 3
    assert twice.draft_bytes == GIB
    # 4 KV heads on 8 GPUs: each GPU keeps one.
    assert twice.kv_bytes(8) == twice.kv_bytes(4) == twice.kv_bytes() // 4


@pytest.mark.parametrize("way", ["peagle", "trees"])
def test_a_whole_context_takes_what_our_engine_plans(
    target_folder: Path, head_folders: Callable[..., Path], way: str
):
    """The slots that a tree needs ahead, 64 here, lie within the context too."""
    head = head_folders()
    config = config_of(way, {True: head}) or {}
    if way == "trees":
        config["parallel_drafting_spec"] = TREES | {"max_nodes": 63}
    plan = make_llm(target_folder, config, max_model_len=128).engine.memory_plan
    assert plan.num_lookahead_slots == (64 if way == "trees" else 12)
    facts = facts_of_folder(target_folder), facts_of_folder(head)
    found = memory_needed(*facts, max_model_len=128, kv_value_bytes=8, native=True)
    assert found.kv_bytes() == plan.blocks_for(128) * plan.block_bytes


def test_latent_attention_keeps_one_vector(tmp_path: Path):
    shapes = {"num_hidden_layers": 3, "num_attention_heads": 16, "num_key_value_heads": 16}
    config = shapes | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "hidden_size": 2048}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = memory_needed(facts_of_folder(tmp_path), max_model_len=10)
    assert found.kv_bytes() == 3 * (512 + 64) * 2 * 10 == found.kv_bytes(4)


@pytest.mark.parametrize(
    ("config", "weights", "said"),
    [
        (None, b"", "config.json' is not readable"),
        ("{", b"", "is not JSON"),
        ("[]", b"", "holds list; expected an object"),
        ("{}", b"\xff" * 64, "is no safetensors file"),
        ("{}", b"version https://git-lfs.github.com/spec/v1", "is no safetensors file"),
    ],
)
def test_folders_that_hold_no_model(tmp_path: Path, config: str | None, weights: bytes, said: str):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    (tmp_path / "model.safetensors").write_bytes(weights)
    with pytest.raises(CheckpointError, match=said):
        facts_of_folder(tmp_path)
