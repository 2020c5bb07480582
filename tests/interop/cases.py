"""The heads that are held against vLLM: every combination, and some that are special.

Targets (Llama, Qwen3) x layers (1, 4) x draft vocabulary (whole, pruned) x width (the target's,
another) are 16 P-EAGLE heads; each is loaded in both styles. They come from four heads that draft
well by pruning and widening, which keep what a head drafts. Beside them: heads as the repository
has them (2 layers), a trained one that is narrower than its target with Qwen3-style layers and the
other convention of the residual, EAGLE-3, and heads with windows that are shorter than the prompts.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from peagle import LLM, SamplingParams
from peagle.bundled import BUNDLED_EAGLE3, BUNDLED_PEAGLE
from peagle.chat import render_chat
from peagle.models.checkpoint import convert_head
from peagle.models.checkpoint.formats import trained_length
from peagle.models.target import TargetModel, load_tokenizer
from tests.interop.heads import SavedHead, pruned, widened
from tests.interop.trained import BUILD, PAIRS, pair2_head, pair_of, trained

K = 5
NUM_PROMPTS, MAX_TOKENS = 8, 48
STYLES = ("vllm", "speculators")
_WIDER = {"llama": 192, "qwen3": 112}
# Tokens that stay in a draft vocabulary: most of the answers' tokens, not all.
_KEPT = {"llama": 96, "qwen3": 100}

Source = Callable[[], Path]


@dataclass(frozen=True)
class Case:
    """A head to be made: what it is called, its pair, and what it is made of."""

    name: str
    pair: str
    source: Source
    is_pruned: bool = False
    is_wider: bool = False
    is_parallel: bool = True

    def make(self, folder: Path, kept: list[int]) -> dict[str, Path]:
        """The head's folders, by style; `kept` are the tokens of a pruned one."""
        source = self.source()
        if self.is_pruned or self.is_wider:
            head = SavedHead.read(source)
            head = pruned(head, kept) if self.is_pruned else head
            head = widened(head, _WIDER[self.pair]) if self.is_wider else head
            source = head.write(folder / self.name)
        other = folder / f"{self.name}-speculators"
        convert_head(source, other, "speculators", target=str(PAIRS[self.pair].target))
        return {"vllm": source, "speculators": other}


def _bases() -> Iterator[tuple[str, str, Source]]:
    yield "llama", "4-layers", lambda: BUNDLED_PEAGLE
    yield "llama", "1-layer", lambda: trained("llama-1")
    yield "qwen3", "4-layers", lambda: trained("qwen3-4")
    yield "qwen3", "1-layer", lambda: trained("qwen3-1")


def _windowed(size: int | None = None) -> Path:
    """The bundled head with a window in every layer: `size`, or the longest sequence it learnt."""
    head = SavedHead.read(BUNDLED_PEAGLE)
    size = size or trained_length(head.facts)
    config = replace(head.config, windows=(size,) * head.config.num_layers)
    return replace(head, config=config).write(BUILD / f"windows-{size}")


def _cases() -> Iterator[Case]:
    for pair, layers, source in _bases():
        for is_pruned in (False, True):
            for is_wider in (False, True):
                marks = ["pruned"] * is_pruned + ["wider"] * is_wider
                name = "-".join([pair, layers, *marks])
                yield Case(name, pair, source, is_pruned, is_wider)
    yield Case("qwen3-2-layers-bundled", "qwen3", lambda: pair2_head(BUILD / "qwen3" / "peagle"))
    yield Case("qwen3-narrower", "qwen3", lambda: trained("qwen3-narrow"))
    yield Case("llama-4-layers-windows", "llama", lambda: _windowed(32))
    yield Case("llama-long-4-layers-windows", "llama-long", _windowed)
    # `peagle train` wrote its window.
    yield Case("llama-long-1-layer-windows", "llama-long", lambda: trained("llama-1"))
    yield Case("llama-eagle3", "llama", lambda: BUNDLED_EAGLE3, is_parallel=False)
    yield Case("llama-eagle3-pruned-wider", "llama", lambda: BUNDLED_EAGLE3, True, True, False)


CASES = list(_cases())
# Heads that also run over two workers.
SPLIT = (
    *("llama-4-layers", "llama-4-layers-pruned", "llama-4-layers-wider"),
    *("llama-4-layers-pruned-wider", "llama-1-layer"),
)
# Schedules of K, by the number of requests that run: fewer drafts, none, and both by the load.
Schedule = tuple[tuple[int, int, int], ...]
SCHEDULES: dict[str, Schedule] = {
    "two": ((1, 1, 2),),
    "none": ((1, 1, 0),),
    "by load": ((1, 1, K), (2, 2, 2), (3, 3, 0)),
}


class Ours:
    """A target in our engine, in float32, and what it says to prompts of its pair.

    Attributes:
        prompts: token ids.
        answers: of the target alone.
    """

    def __init__(self, pair: str) -> None:
        self.pair = pair_of(pair)
        self.target = TargetModel.load(self.pair.target, dtype=torch.float32)
        tokenizer = load_tokenizer(self.pair.target)
        texts = self.pair.texts(NUM_PROMPTS)
        if self.pair.thinking is None:
            self.prompts = [list(tokenizer(text).input_ids) for text in texts]
        else:
            asked = [[{"role": "user", "content": text}] for text in texts]
            self.prompts = [render_chat(tokenizer, one, thinking=True) for one in asked]
        self.params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
        answers = LLM(model=self.target).generate(self.prompts, self.params)
        self.answers = [output.token_ids for output in answers]
        counted = Counter(token for answer in self.answers for token in answer)
        self.kept = [token for token, _ in counted.most_common(_KEPT.get(pair))]

    def speculate(self, head: Path, **options: Any) -> list[tuple[list[int], list[int]]]:
        """Output tokens, and [drafts, accepted at 1, ...] of each prompt, one at a time."""
        # vLLM does not read the correction that may lie beside a head.
        config = {"model": str(head), "num_speculative_tokens": K, "correction": False, **options}
        llm = LLM(model=self.target, speculative_config=config)
        told = []
        for prompt in self.prompts:
            (output,) = llm.generate([prompt], self.params)
            per_pos = output.stats.num_accepted_tokens_per_pos
            told.append((output.token_ids, [output.stats.num_drafts, *per_pos]))
        return told
