"""A grammar compiler over single bytes, what its states allow, and random walks through them."""

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from peagle.config.structured import StructuredOutput
from peagle.engine.grammar.compiler import (
    GrammarCompiler,
    GrammarState,
    full_bitmask,
    to_bools,
)
from peagle.engine.outputs import RequestOutput
from peagle.engine.requests import Requests
from tests.conftest import VOCAB_SIZE, byte_tokenizer

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "grammar_campaign.py"
EOS = 0
TOKENIZER = byte_tokenizer()
BYTE_IDS = {byte: TOKENIZER.encode(chr(byte), add_special_tokens=False)[0] for byte in range(128)}
CLOSING = {BYTE_IDS[ord(c)] for c in '"]}'}


def byte_compiler(**options: Any) -> GrammarCompiler:
    return GrammarCompiler(byte_tokenizer(), VOCAB_SIZE, [EOS], **options)


@pytest.fixture(scope="session")
def compiler() -> GrammarCompiler:
    pytest.importorskip("xgrammar")
    return byte_compiler()


@pytest.fixture(scope="session")
def campaign() -> ModuleType:
    if not SCRIPT.is_file():
        pytest.skip("a source archive has no benchmarks")
    spec = importlib.util.spec_from_file_location("grammar_campaign", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.append(str(SCRIPT.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(SCRIPT.parent))
    return module


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def allowed(state: GrammarState) -> set[int]:
    bitmask = full_bitmask(1, state.vocab_size)
    state.mask_into(bitmask, 0)
    return set(to_bools(bitmask, state.vocab_size)[0].nonzero().flatten().tolist())


def fits(compiler: GrammarCompiler, structure: StructuredOutput, text: str) -> bool:
    state = compiler.start(structure)
    return all(state.try_advance(token) for token in encode(text)) and state.is_complete


def admits(compiler: GrammarCompiler, schema: Any, text: str, **options: bool) -> bool:
    return fits(compiler, StructuredOutput.json_schema(schema, **options), text)


def sample(
    compiler: GrammarCompiler, structure: StructuredOutput, rng: random.Random, most: int = 150
) -> str | None:
    """A random walk over allowed tokens, ASCII if any; None if it did not end by itself."""
    state = compiler.start(structure)
    tokens: list[int] = []
    while len(tokens) < most:
        may_come = allowed(state)
        if EOS in may_come and (len(may_come) == 1 or rng.random() < 0.5):
            return TOKENIZER.decode(tokens)
        choices = sorted(may_come & set(BYTE_IDS.values()) or may_come - {EOS})
        ending = [token for token in choices if token in CLOSING]
        tokens.append(rng.choice(ending if ending and rng.random() < 0.3 else choices))
        state.accept(tokens[-1:])
    return None


def drained(requests: Requests) -> dict[int, RequestOutput]:
    """Run all requests to their end; return their outputs, and see that every block is free."""
    found: dict[int, RequestOutput] = {}
    while requests.has_unfinished:
        for chunk in requests.step():
            if chunk.output is not None:
                found[chunk.index] = chunk.output
    blocks = requests.engine.blocks
    assert blocks.num_free_blocks == blocks.num_blocks
    return found
