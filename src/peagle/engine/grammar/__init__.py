"""Structured output: grammars that restrict the next tokens."""

from peagle.engine.grammar.compiler import MAX_THREADS, GrammarCompiler, GrammarState, to_bools
from peagle.engine.grammar.drafts import (
    BeamGrammar,
    DraftGrammar,
    LogitsAfter,
    grow_masked_trees,
    prepare_masks,
    verification_masks,
)
from peagle.engine.grammar.processor_time import WorkClock
