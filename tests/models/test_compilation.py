"""Compiled layers equal eager ones, are one graph each, and never touch the KV cache themselves.

Most tests run what Dynamo traced as it is (backend "eager"): whether a layer traces whole, and for
what it is traced again, does not depend on the compiler. Two let Inductor make code.
"""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import setuptools  # noqa: F401  (see below)
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from peagle import LLM, SamplingParams
from peagle.attention.torch_backend import DenseCausalAttention
from peagle.models import compilation
from peagle.models.checkpoint import save_drafter
from peagle.models.compilation import (
    cache_compiled_code,
    code_cache_folder,
    compile_layers,
    wait_before_reading,
)
from peagle.models.fingerprint import TargetFingerprint
from peagle.models.fusion import fuse
from peagle.models.target import TargetModel
from peagle.models.target_attention import decoder_layers, windowed_modules
from tests.conftest import make_drafter
from tests.models.paging import CHUNKS, LENS, Paged, largest_difference, make_sequences
from tests.models.test_architectures import ARCHITECTURES
from tests.models.tiny import make_model

# Inductor imports setuptools when it first makes code, and setuptools then replaces Python's
# distutils by its own. The import above does so while the tests are collected: one run failed
# where this happened in the middle of the tests.

# Different kinds of layers in a model: each is a graph.
# Layers with and without a window are of one kind.
KINDS = {"gpt_oss": 1, "gemma2": 1, "gemma4, shared keys": 4}
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++")


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing traced yet, nothing on disk."""
    monkeypatch.setenv("PEAGLE_CACHE", str(tmp_path / "cache"))
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(variable, "")  # so that it is put back
        monkeypatch.delenv(variable)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def make_target(
    name: str = "llama", dtype: torch.dtype = torch.float32, aux: tuple[int, ...] = (1, 3)
) -> TargetModel:
    model: Any = make_model(ARCHITECTURES[name].model_type, **ARCHITECTURES[name].options)
    return TargetModel(model.to(dtype), aux_layer_ids=aux)


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


@torch.inference_mode()
def verify(paged: Paged) -> list[Tensor]:
    """Logits and features of the drafts."""
    logits, features, _ = paged.run(LENS, CHUNKS)
    return [*logits, *features]


@torch.inference_mode()
def prefilled(target: TargetModel) -> Paged:
    paged = Paged(target, make_sequences())
    paged.prefill()
    return paged


# ---- what is traced ----


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in ARCHITECTURES if not n.endswith(("image", "rope"))])
def test_every_architecture_traces_whole(name: str) -> None:
    target = make_target(name)
    paged = prefilled(target)
    expected = verify(paged)
    fuse(target.model)
    compiled = compile_layers(target.model, backend="eager")
    found = verify(paged)
    assert not compiled.left
    assert not counters["graph_break"]
    assert num_graphs() == KINDS.get(name, num_graphs()), "equal layers share a graph"
    assert num_graphs() <= 4
    assert largest_difference(found, expected) < 1e-5 * float(expected[0].abs().max()) + 1e-5
    verify(paged)
    assert num_graphs() == counters["stats"]["unique_graphs"]


@pytest.mark.slow
def test_a_window_with_another_use_stays_in_the_graph() -> None:
    target = make_target("gpt_oss")
    attentions: list[Any] = [layer.self_attn for layer in decoder_layers(target.model)]
    windows = [attention.sliding_window for attention in attentions]
    assert None in windows and windowed_modules(target.model) == [
        attention for attention in attentions if attention.sliding_window
    ]
    one = next(attention for attention in attentions if attention.sliding_window)
    one.k_proj.register_forward_hook(lambda *io: io[-1] * (2 if one.sliding_window else 1))
    assert windowed_modules(target.model) == []
    assert [attention.sliding_window for attention in attentions] == windows
    paged = prefilled(target)
    expected = verify(paged)
    compile_layers(target.model, backend="eager")
    assert largest_difference(verify(paged), expected) < 1e-5 * float(expected[0].abs().max())
    assert [attention.sliding_window for attention in attentions] == windows


@pytest.mark.slow
def test_layers_are_traced_again_for_new_numbers_of_tokens_only() -> None:
    target = make_target("qwen3")
    compile_layers(target.model, backend="eager")
    paged = prefilled(target)
    assert num_graphs() == 1
    for _ in range(2):
        verify(paged)
        assert num_graphs() == 2
    with torch.inference_mode():
        # As many tokens, shared out otherwise over the sequences; then other caches.
        paged.run([0] * len(LENS), [4, 1, 8, 3])
        verify(prefilled(target))
    assert num_graphs() == 2


@pytest.mark.slow
def test_other_numbers_of_tokens_share_a_graph() -> None:
    target = make_target()
    compile_layers(target.model, backend="eager", buckets=(1, sum(CHUNKS)))
    paged = prefilled(target)
    assert num_graphs() == 1
    verify(paged)
    assert num_graphs() == 2
    with torch.inference_mode():
        for lens in ([5, 1, 8, 3], [2, 1, 1, 3]):
            paged.run([0] * len(LENS), lens)
    assert num_graphs() == 2


@pytest.mark.slow
def test_each_layer_has_its_own_cache() -> None:
    """The shared graph finds the cache of the layer that it runs for."""
    target, other = make_target(), make_target(dtype=torch.float64)
    for model in (target, other):
        compile_layers(model.model, backend="eager")
    caches = [prefilled(model).caches for model in (target, other)]
    keys = [cache.keys for cache in caches[0]]
    assert all(key.abs().sum() > 0 for key in keys)
    assert all(not torch.equal(keys[0], key) for key in keys[1:])
    for ours, theirs in zip(*caches, strict=True):
        assert theirs.keys.dtype == torch.float64
        torch.testing.assert_close(ours.keys.double(), theirs.keys, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_an_fp8_cache_is_as_without_compilation() -> None:
    target = make_target(dtype=torch.float64)
    target.round_kv({layer: (0.05 * (layer + 1), 0.2) for layer in range(target.num_layers)})
    expected = verify(prefilled(target))
    compile_layers(target.model, backend="eager")
    assert largest_difference(verify(prefilled(target)), expected) < 1e-10


def test_layers_are_compiled_once() -> None:
    target = make_target()
    compile_layers(target.model, backend="eager")
    with pytest.raises(RuntimeError, match="compiled already"):
        compile_layers(target.model, backend="eager")


@pytest.mark.slow
def test_a_layer_that_does_not_trace_whole_runs_as_before() -> None:
    target = make_target()
    paged = prefilled(target)
    expected = verify(paged)
    decoder: Any = target.model.get_decoder()
    mlp = decoder.layers[2].mlp
    forward = mlp.forward

    def breaks(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return forward(x)

    mlp.forward = breaks
    compiled = compile_layers(target.model, backend="eager")
    with pytest.warns(UserWarning, match="Layer 2 runs uncompiled"):
        found = verify(paged)
    assert list(compiled.left) == [2]
    assert largest_difference(found, expected) < 1e-5
    verify(paged)  # silently


@pytest.mark.slow
def test_a_target_is_lossless_over_compiled_layers(target_folder: Path, tmp_path: Path) -> None:
    prompts, params = [[5, 9, 200, 31], [17] * 20], SamplingParams(max_tokens=16)
    target = TargetModel.load(target_folder, dtype=torch.float64)
    save_drafter(tmp_path, make_drafter(target), fingerprint=TargetFingerprint.of(target))
    drafting = {"model": str(tmp_path), "num_speculative_tokens": 3}
    llms = [LLM(model=target, speculative_config=c, block_size=4) for c in (None, drafting)]
    expected = [o.token_ids for o in llms[0].generate(prompts, params)]
    fuse(target.model)
    compiled = compile_layers(target.model, backend="eager", buckets=(1, 2, 4, 8))
    for llm in llms:
        assert [o.token_ids for o in llm.generate(prompts, params)] == expected
    assert num_graphs() and not compiled.left


# ---- the drafter ----


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"qk_norm": True, "attention_bias": True}], ids=str)
@torch.inference_mode()
def test_a_compiled_drafter_equals_the_eager_one(options: dict[str, Any]) -> None:
    drafter = make_drafter(make_target(), num_layers=3, **options).requires_grad_(False)
    asked: list[int] = []

    def attend(layer_idx: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        asked.append(layer_idx)
        keys, values = (x.repeat_interleave(2, -2).cumsum(0) for x in (key, value))
        return (query * keys).sum(-1, keepdim=True).sigmoid() * values * (layer_idx + 1)

    def run(tokens: int) -> Tensor:
        generator = torch.Generator().manual_seed(tokens)
        ids = torch.randint(2, 300, (tokens,), generator=generator)
        hidden = torch.randn(tokens, 32, generator=generator)
        return drafter(ids, hidden, torch.arange(tokens), attend)

    expected = [run(9), run(5)]
    compiled = compile_layers(drafter, backend="eager")
    asked.clear()
    found = [run(9), run(5)]
    assert asked == [0, 1, 2] * 2
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f, e, atol=1e-5 * float(e.abs().max()), rtol=1e-5)
    assert not compiled.left
    assert num_graphs() == 4, "layer 0 is of another kind than the rest; two numbers of tokens"
    run(9)
    assert num_graphs() == 4


# ---- Inductor ----


@pytest.mark.slow
@needs_compiler
@torch.inference_mode()
def test_compiled_code_leaves_the_cache_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import config, cpu_vec_isa
    from torch._inductor.utils import run_and_get_code

    # Who reads what memory is the same in plain C++, for which no program is compiled to try each
    # kind of vectors that a processor may have; nor do a few kernels need processes of their own.
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", list)
    target = make_target("qwen3")
    paged = prefilled(target)
    expected = verify(paged)
    fuse(target.model)
    compile_layers(target.model)
    with config.patch(compile_threads=1):
        found, codes = run_and_get_code(lambda: verify(paged))
    assert largest_difference(found, expected) < 2e-5
    assert (num_graphs(), len(codes)) == (1, 1)
    assert not counters["graph_break"]
    code = codes[0][codes[0].index("def call") : codes[0].index("runner = ")]
    assert code.count("torch.ops.peagle.paged_attention.default(") == 1
    assert code.count("extern_kernels.mm(") == 4, "q/k/v, o, gate/up, down"
    assert "copy_" not in code and "clone" not in code
    # Nothing in it is of the cache's size.
    shape = paged.caches[0].keys.shape
    for size in (shape[0], shape[0] - 1, shape[0] * shape[1], shape.numel()):
        assert not re.search(rf"\b{size}\b", code), size
    # Values are read where the fused product left them.
    attention = next(line for line in code.splitlines() if "paged_attention.default(" in line)
    assert f"reinterpret_tensor(buf2, ({sum(CHUNKS)}, 2, 8), (64, 8, 1), 48)" in attention
    # What it made lies below our folder.
    assert any((tmp_path / "cache" / "inductor").iterdir())


# ---- where compiled code is kept ----


def test_compiled_code_is_kept_in_our_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, name in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton")):
        monkeypatch.setenv(variable, "/elsewhere")
        cache_compiled_code()
        assert os.environ[variable] == "/elsewhere", "the user's word counts"
        monkeypatch.delenv(variable)
        cache_compiled_code()
        assert os.environ[variable] == str(tmp_path / "cache" / name)


def test_a_default_of_the_libraries_is_nobodys_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importing Inductor sets its variable, which must not look like the user's choice."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    cache_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "cache" / "inductor")


def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PEAGLE_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="is not kept"):
        cache_compiled_code()


def test_without_a_variable_the_folder_is_in_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PEAGLE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert code_cache_folder() == tmp_path / ".cache" / "peagle"


# ---- CUDA graphs ----


@pytest.mark.slow
def test_the_first_pass_of_a_size_may_not_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    target = make_target()
    compile_layers(target.model, backend="eager")
    with pytest.raises(RuntimeError, match="first see 33 tokens while a CUDA graph"):
        prefilled(target)


# ---- on a card ----


@pytest.mark.gpu
@torch.inference_mode()
def test_a_captured_pass_equals_the_eager_one() -> None:
    target = TargetModel(make_target("qwen3").model.to("cuda"))  # type: ignore[arg-type]
    tokens, positions = torch.arange(20, 36, device="cuda"), torch.arange(16, device="cuda")
    outputs: list[Tensor] = []

    def run() -> None:
        outputs.append(target.forward(tokens, positions, DenseCausalAttention(1))[0])

    run()
    expected = outputs[0].clone()
    fuse(target.model)
    compiled = compile_layers(target.model)
    run()
    assert num_graphs() == 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    outputs[-1].zero_()
    graph.replay()
    torch.testing.assert_close(outputs[-1], expected, atol=1e-4, rtol=1e-4)
    assert not compiled.left


@pytest.mark.parametrize("overlaps", [False, True])
def test_overlapping_kernels_wait_before_every_read(
    overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor alone lets a kernel read at once what the node before it did not write."""
    from torch._inductor.codegen.triton import TritonKernel
    from torch._inductor.utils import IndentedBuffer
    from torch._inductor.virtualized import V

    monkeypatch.setattr(
        TritonKernel, "_handle_pdl_before_access", TritonKernel._handle_pdl_before_access
    )
    monkeypatch.setattr(compilation, "compiled_kernels_overlap", lambda: overlaps)
    wait_before_reading.__wrapped__()
    kernel = SimpleNamespace(
        GDC_WAIT="wait", inside_reduction=False, _enable_pdl_codegen=lambda: True
    )
    before = SimpleNamespace(read_writes=SimpleNamespace(writes=[SimpleNamespace(name="other")]))
    scheduler = SimpleNamespace(previous_node=before)
    code = IndentedBuffer()
    handle: Any = TritonKernel._handle_pdl_before_access
    node = SimpleNamespace(current_node=SimpleNamespace(mutation_renames={}))
    graph: Any = SimpleNamespace(scheduler=scheduler)
    with V.set_graph_handler(graph), V.set_kernel_handler(node):
        handle(kernel, code, "read")
    assert code.getvalue().split() == (["wait"] if overlaps else [])
    assert graph.scheduler is scheduler
