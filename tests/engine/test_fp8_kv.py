"""Engines with an FP8 KV cache: as transformers with a cache that rounds, and lossless.

In float64 there is no difference. In float32 a sum in another order can round a key to another
number, so that the first difference need not be a near-tie of the unrounded model; the bundled pair
has none here.
"""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache

from peagle import LLM, SamplingParams
from peagle.bundled import BUNDLED_EAGLE3, BUNDLED_PEAGLE, BUNDLED_TARGET
from peagle.config import EngineConfig
from peagle.data.features import target_states
from peagle.engine.block_manager import BlockManager
from peagle.engine.drafting import HeadDrafting
from peagle.engine.memory_plan import make_memory_plan
from peagle.engine.sequence import Sequence
from peagle.evaluation.prompts import load_prompt_set
from peagle.models.fingerprint import TargetFingerprint
from peagle.models.target import TargetModel
from tests.conftest import make_drafter
from tests.engine.engines import assert_idle, config_of, know_the_answer, make_llm
from tests.engine.test_lossless import NEW_TOKENS, PROMPTS, reference_outputs

FP8 = torch.float8_e4m3fn
SCALES = [(0.05, 0.3), (0.02, 0.1), (1.5, 0.01), (0.2, 2.0)]


@pytest.fixture(scope="module")
def scaled_folder(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target with scales of keys and values in every layer."""
    folder = tmp_path_factory.mktemp("scaled") / "target"
    shutil.copytree(target_folder, folder)
    tensors = load_file(folder / "model.safetensors")
    for i, scales in enumerate(SCALES):
        for name, scale in zip("kv", scales, strict=True):
            tensors[f"model.layers.{i}.self_attn.{name}_scale"] = torch.tensor([scale])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


class RoundedCache(DynamicCache):
    """transformers' own cache, of keys and values that went through FP8."""

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        rounded = (
            (x / scale).clamp(-448, 448).to(FP8).to(x.dtype) * scale
            for x, scale in zip((key, value), SCALES[layer_idx], strict=True)
        )
        return super().update(*rounded, layer_idx, *args, **kwargs)


@pytest.fixture(scope="module")
def expected(scaled_folder: Path) -> list[list[int]]:
    found = reference_outputs(scaled_folder, make_cache=RoundedCache)
    assert found != reference_outputs(scaled_folder), "rounding must change something"
    return found


Options = dict[str, Any]
WAYS: dict[str, tuple[str, Options]] = {
    "plain": ("plain", {}),
    "prompt lookup": ("ngram", {}),
    "P-EAGLE": ("peagle", {}),
    "trees": ("trees", {}),
    "EAGLE-3": ("eagle3", {}),
    "chunked prompts": ("peagle", {"max_num_batched_tokens": 7, "block_size": 4}),
    "alone": ("peagle", {"max_num_seqs": 1, "enable_prefix_caching": False}),
    # 105 slots of the longest request; all of them together have 278.
    "preemption": ("peagle", {"num_kv_blocks": 30, "block_size": 4}),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_outputs_are_those_of_a_rounded_cache_of_transformers(
    scaled_folder: Path, heads: dict[bool, Path], expected: list[list[int]], way: str
) -> None:
    name, options = WAYS[way]
    llm = make_llm(scaled_folder, config_of(name, heads), kv_cache_dtype="fp8", **options)
    if name in ("peagle", "trees", "eagle3"):
        answers = [prompt + output for prompt, output in zip(PROMPTS, expected, strict=True)]
        know_the_answer(llm, answers, share=0.8)
    for _ in range(2):  # the second time prompts are cached
        found = llm.generate(PROMPTS, SamplingParams(max_tokens=NEW_TOKENS))
        assert [output.token_ids for output in found] == expected
        assert_idle(llm)
    stats = llm.stats
    assert (stats.num_preemptions > 0) == (way == "preemption")
    assert (stats.num_cached_tokens > 0) == (way not in ("alone", "preemption"))
    assert name not in ("peagle", "eagle3") or stats.speculation.acceptance_length > 1.5
    assert {cache.keys.dtype for cache in llm.target.kv_caches} == {FP8}
    if isinstance(llm.engine.drafting, HeadDrafting):
        caches = llm.engine.drafting.proposer.caches
        assert {cache.values.dtype for cache in caches} == {torch.float64}


def test_a_target_that_forgets_its_scales_is_noticed(
    scaled_folder: Path, expected: list[list[int]]
) -> None:
    llm = make_llm(scaled_folder, kv_cache_dtype="fp8")
    llm.target.kv_scales = [(1.0, 1.0)] * 4
    llm = LLM(model=llm.target)
    found = llm.generate(PROMPTS, SamplingParams(max_tokens=NEW_TOKENS))
    assert [output.token_ids for output in found] != expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "head"), [(torch.float64, BUNDLED_EAGLE3), (torch.float32, BUNDLED_PEAGLE)], ids=str
)
def test_drafts_of_the_bundled_pair_change_no_output(dtype: torch.dtype, head: Path) -> None:
    target = TargetModel.load(BUNDLED_TARGET, dtype=dtype, kv_cache_dtype="fp8")
    prompts = [prompt.text for prompt in load_prompt_set("humaneval", 4)]
    params = SamplingParams(max_tokens=40)
    drafted = LLM(model=target, speculative_config={"model": str(head)})
    outputs = [llm.generate(prompts, params) for llm in (drafted, LLM(model=target))]
    assert outputs[0] and drafted.stats.speculation.acceptance_length > 2
    ids = [[output.token_ids for output in found] for found in outputs]
    assert ids[0] == ids[1]


# ---- passes without a cache ----


def test_features_are_those_of_the_engine(scaled_folder: Path, heads: dict[bool, Path]) -> None:
    """Training's pass over a whole sequence gives what the head reads when it is served."""
    llm = make_llm(scaled_folder, config_of("peagle", heads), kv_cache_dtype="fp8", max_num_seqs=1)
    drafting: Any = llm.engine.drafting
    seen: list[Tensor] = []
    propose = drafting.proposer.propose

    def watching(step: Any) -> Any:
        rows = step.num_rows[0]
        seen.append(step.features_TA[:rows].clone())
        return propose(step)

    drafting.proposer.propose = watching
    (output,) = llm.generate([PROMPTS[3]], SamplingParams(max_tokens=20, ignore_eos=True))
    served = torch.cat(seen)
    tokens = torch.tensor([PROMPTS[3] + output.token_ids])[:, : len(served)]
    batch = batch_of(tokens)
    in_training = target_states(llm.target, batch).features_BNA[0]
    torch.testing.assert_close(in_training, served, rtol=0, atol=1e-10)
    llm.target.drop_kv_caches()  # as it stands before any engine
    assert torch.equal(target_states(llm.target, batch).features_BNA[0], in_training)
    plain = TargetModel.load(scaled_folder, dtype=torch.float64)
    plain.tap_aux(llm.target.aux_layer_ids)
    assert not torch.allclose(target_states(plain, batch).features_BNA[0], served, atol=1e-4)


def batch_of(tokens_BN: Tensor) -> Any:
    from peagle.data.batches import Batch, Place

    rows, length = tokens_BN.shape
    places = tuple(Place(row, row, 0, length) for row in range(rows))
    zeros = torch.zeros_like(tokens_BN)
    return Batch(tokens_BN, zeros, zeros - 1, places, 1, 0, rows)


# ---- blocks, memory, identity ----


def test_blocks_of_another_type_or_other_scales_have_another_hash(
    target_folder: Path, scaled_folder: Path
) -> None:
    make = partial(make_llm, block_size=4)
    plain, fp8 = make(target_folder), make(target_folder, kv_cache_dtype="fp8")
    scaled = make(scaled_folder, kv_cache_dtype="fp8")
    again = make(scaled_folder, kv_cache_dtype="fp8")
    hashes = []
    for llm in (plain, fp8, scaled, again):
        sequence = make_sequence(list(range(9)))
        llm.engine.blocks.admit(sequence, [], 9)
        llm.engine.blocks.publish(sequence, 8, 8)
        assert len(sequence.block_hashes) == 2
        hashes.append(tuple(sequence.block_hashes))
    assert len({one for each in hashes[:3] for one in each}) == 6
    assert hashes[2] == hashes[3]


def test_the_identity_of_kv_and_the_salt_do_not_run_together() -> None:
    sequences = [replace(make_sequence([1, 2, 3]), cache_salt=salt) for salt in (b"", b"b", b"ab")]
    for sequence, identity in zip(sequences, (b"ab", b"a", b""), strict=True):
        blocks = BlockManager(4, 2, kv_identity=identity)
        blocks.admit(sequence, [], 3)
        blocks.publish(sequence, 2, 2)
    assert len({sequence.block_hashes[0] for sequence in sequences}) == 3


def make_sequence(tokens: list[int]) -> Sequence:
    return Sequence(0, tokens, SamplingParams(), seed=0, stop_token_ids=frozenset())


def test_the_plan_of_memory(target_folder: Path) -> None:
    """Half the bytes of bfloat16 in the target's layers; the drafter's blocks stay as they are."""
    plans = {}
    for name in ("auto", "fp8"):
        target = TargetModel.load(target_folder, dtype=torch.bfloat16, kv_cache_dtype=name)
        for drafter in (None, make_drafter(target)):
            plans[name, drafter is not None] = make_memory_plan(
                target,
                drafter,
                EngineConfig(kv_cache_gib=2**-10, max_num_seqs=256),
                max_model_len=256,
                num_lookahead_slots=2,
                peak_bytes=0,
            )
    auto, fp8 = plans["auto", False], plans["fp8", False]
    assert auto.block_bytes == 2 * fp8.block_bytes == 2 * 16 * 4 * 2 * 8 * 2
    assert fp8.num_blocks == 2 * auto.num_blocks
    assert " of bfloat16: " in str(auto)
    assert " of fp8, scales 1: " in str(fp8)
    auto, fp8 = plans["auto", True], plans["fp8", True]
    assert auto.drafter_block_bytes == fp8.drafter_block_bytes
    assert auto.target_block_bytes == 2 * fp8.target_block_bytes
    target = TargetModel.load(target_folder, dtype=torch.bfloat16, kv_cache_dtype="fp8")
    caches = target.make_kv_caches(9, 16)
    allocated = sum(cache.keys.nbytes + cache.values.nbytes for cache in caches)
    assert allocated == 10 * fp8.target_block_bytes, "one block is scrap"


def test_a_head_of_the_plain_target_fits(target_folder: Path, heads: dict[bool, Path]) -> None:
    target = TargetModel.load(target_folder, kv_cache_dtype="fp8")
    assert TargetFingerprint.of(target) == TargetFingerprint.of(TargetModel.load(target_folder))
    llm = LLM(model=target, speculative_config={"model": str(heads[True])})
    assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))[0].token_ids


def test_caches_are_written_and_wiped(target_folder: Path) -> None:
    llm = make_llm(target_folder, kv_cache_dtype="fp8", num_kv_blocks=20)
    llm.engine.touch_caches()
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
    llm.engine.check()
    for cache in llm.target.kv_caches:
        assert cache.values[0].view(torch.uint8).any()
        cache.wipe([0, 2])
        assert not cache.keys[[0, 2]].view(torch.uint8).any()
        assert not cache.values[[0, 2]].view(torch.uint8).any()
