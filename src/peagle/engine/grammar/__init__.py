"""Structured output: grammars that say which tokens may come next."""

from peagle.engine.grammar.compiler import GrammarCompiler, GrammarState, unpack
from peagle.engine.grammar.drafts import DraftGrammar, prepare, verification_masks

__all__ = [
    "DraftGrammar",
    "GrammarCompiler",
    "GrammarState",
    "prepare",
    "unpack",
    "verification_masks",
]
