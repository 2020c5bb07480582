"""Structured output: grammars that say which tokens may come next."""

from peagle.engine.grammar.compiler import GrammarCompiler, GrammarState, unpack
from peagle.engine.grammar.drafts import DraftGrammar, prepare, walk

__all__ = ["DraftGrammar", "GrammarCompiler", "GrammarState", "prepare", "unpack", "walk"]
