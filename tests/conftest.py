"""Small random models, made once a session."""

import gc
import logging
import os
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    # Triton reads it when it is imported, and transformers imports it: kernels then run on a CPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from peagle.models.checkpoint import save_drafter
from peagle.models.drafter import Drafter, DrafterConfig
from peagle.models.fingerprint import TargetFingerprint
from peagle.models.target import TargetModel, default_aux_layer_ids
from tests import suites
from tests.browsing import Pages, opened_pages
from tests.triton_interpreter import lighten

lighten()

# How long an example takes says something of the machine's load, nothing of the code.
settings.register_profile("peagle", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("peagle")

# Shells start background jobs with interrupts ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

VOCAB_SIZE = 320
# Those that `peagle.serving.logs.configure_logging` changes, also in a command that a test runs.
LOGGERS = ("peagle.serving", "uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")
LOGGERS += ("opentelemetry", "asyncio")
CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
# Sizes of a head for a target of hidden size 32.
HEAD_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_layers": 2,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--suite", choices=suites.SUITES, help="run the tests of a make target alone")


def pytest_report_header(config: pytest.Config) -> str | None:
    if config.getoption("suite") != "touched":
        return None
    return f"parts that the change touches: {', '.join(sorted(suites.touched_parts())) or 'none'}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if suite := config.getoption("suite"):
        left_out = [item for item in items if not suites.is_in(suite, item)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if suites.is_in(suite, item)]


@pytest.fixture(autouse=True)
def _keep_loggers() -> Iterator[None]:
    """Put the loggers of servers back: a handler writes to the closed stderr of the test before."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    kept = [(log, log.handlers, log.level, log.propagate) for log in loggers]
    yield
    for log, handlers, level, propagate in kept:
        log.handlers, log.propagate = handlers, propagate
        log.setLevel(level)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Look for no garbage among what is imported: it stays, and is a third of the time.

    Nor do engines, which collect garbage when they end, visit it later.
    """
    gc.disable()
    found = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    return found


def pytest_unconfigure() -> None:
    gc.unfreeze()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token (ids 2 to 257); 0 ends text, 1 is the mask."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<|endoftext|>": 0, "<|mask|>": 1, **{c: i + 2 for i, c in enumerate(alphabet)}}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|endoftext|>", "<|mask|>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|endoftext|>")


def make_target_folder(folder: Path, kind: str = "llama", seed: int = 0, **overrides: Any) -> Path:
    """Save a random tiny target; its weights are scaled up so that its output is not constant."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "eos_token_id": 0,
        "bos_token_id": 0,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](**{**sizes, **overrides}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4.0)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def make_drafter(
    target: TargetModel, *, parallel: bool = True, seed: int = 0, **overrides: Any
) -> Drafter:
    """A random head for `target`."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        **HEAD_SIZES,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size,
        "target_hidden_size": target.hidden_size,
        "aux_layer_ids": default_aux_layer_ids(target.num_layers),
        "mask_token_id": 1 if parallel else None,
        "max_position_embeddings": 256,
    }
    drafter = Drafter(DrafterConfig(**{**sizes, **overrides}))
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
        if drafter.d2t is not None:
            ids = torch.randperm(target.vocab_size)[: drafter.config.draft_vocab_size].sort().values
            drafter.set_draft_vocabulary(ids)
    return drafter


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a byte tokenizer."""
    return make_target_folder(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def target(target_folder: Path) -> TargetModel:
    """The tiny Llama in float64."""
    return TargetModel.load(target_folder, dtype=torch.float64)


@pytest.fixture(scope="session")
def head_folders(
    target_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """head_folders(parallel=..., ...) saves a random head of the tiny Llama: its folder."""

    def make(**options: Any) -> Path:
        folder = tmp_path_factory.mktemp("head")
        target = TargetModel.load(target_folder)
        drafter = make_drafter(target, **options)
        save_drafter(folder, drafter, fingerprint=TargetFingerprint.of(target))
        return folder

    return make


@pytest.fixture(scope="module")
def pages() -> Iterator[Pages]:
    """Pages of a headless Chromium, each kept for the tests of a file."""
    with opened_pages() as pages:
        yield pages
