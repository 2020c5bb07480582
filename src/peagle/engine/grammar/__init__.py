"""Structured output: grammars that say which tokens may come next."""

from peagle.engine.grammar.compiler import GrammarCompiler, GrammarState, unpack
from peagle.engine.grammar.drafts import (
    DraftGrammar,
    LogitsAfter,
    grow_trees,
    prepare,
    verification_masks,
)

__all__ = [
    "DraftGrammar",
    "GrammarCompiler",
    "GrammarState",
    "LogitsAfter",
    "grow_trees",
    "prepare",
    "unpack",
    "verification_masks",
]
