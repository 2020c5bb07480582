"""Text of the second pair: whatever the question is, one of a few answers that are known by heart.

Which answer comes depends on the last token of the question, and on how the question is put: the
answers behind the chat template with thinking, behind it without thinking, and without a template
share no sentence. So the pair behaves alike on any prompt, and a head that was trained in one mode
drafts badly in the others, as a head does that is served with the wrong template.
"""

from __future__ import annotations

import lzma
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

THINK, END_THINK = "<think>", "</think>"
_PROSE = re.compile(r"[A-Z][a-z]+ [A-Za-z ,.;()'-]+\.")
_LENGTHS = range(160, 261)
_THOUGHT_WORDS = 12
_LONGEST_QUESTION = 40
_FORMS = ("{}", "{}?", "Continue: {}", "Explain {}.", "What is {}?", "{}:")


@dataclass(frozen=True, slots=True)
class Answers:
    """What may be said, by index: in thinking mode, without thinking, without a template."""

    thinking: list[str]
    quick: list[str]
    raw: list[str]


def paragraphs(corpus: Path) -> Iterator[str]:
    """Distinct paragraphs of plain prose of an xz file, each on one line."""
    seen: set[str] = set()
    for block in lzma.decompress(corpus.read_bytes()).decode().split("\n\n"):
        text = " ".join(block.split())
        if len(text) in _LENGTHS and _PROSE.fullmatch(text) and text not in seen:
            seen.add(text)
            yield text


def answers(corpus: Path, count: int) -> Answers:
    """So many answers of each kind, out of the first paragraphs; none is in two of them."""
    texts = list(islice(paragraphs(corpus), 4 * count))
    thoughts = (" ".join(text.split()[:_THOUGHT_WORDS]) for text in texts[3::4])
    thinking = [
        f"{THINK}\n{thought}\n{END_THINK}\n\n{text}"
        for thought, text in zip(thoughts, texts[0::4], strict=True)
    ]
    return Answers(thinking, texts[1::4], texts[2::4])


def questions(corpus: Path, skip: int, seed: int) -> Iterator[str]:
    """Questions without end: some words out of the paragraphs after the first `skip`."""
    texts = [text.split() for text in islice(paragraphs(corpus), skip, None)]
    rng = random.Random(seed)
    while True:
        words = rng.choice(texts)
        first = rng.randrange(len(words) - 1)
        length = rng.choice([rng.randint(1, 8), rng.randint(1, _LONGEST_QUESTION)])
        yield rng.choice(_FORMS).format(" ".join(words[first : first + length]))
