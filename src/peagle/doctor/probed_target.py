"""A target and its own answers to prompts, which the examination of every head is held against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import cached_property

import torch
from transformers import PreTrainedTokenizerBase

from peagle.config import SamplingParams
from peagle.doctor.probe import Probe, make_probe
from peagle.doctor.questions import Question, Style, other_styles
from peagle.errors import UserError
from peagle.llm import LLM
from peagle.models.target import TargetModel, default_aux_layer_ids

Progress = Callable[[str], None]

# Output tokens of each prompt beyond K.
_ANSWER_TOKENS = 18
_FEWEST_PROMPTS = 8


@dataclass(frozen=True)
class ProbedTarget:
    """A target that has answered the texts on which heads are examined.

    Attributes:
        target, tokenizer: the model.
        style: how prompts reach it.
        texts: the prompts.
        questions: the prompts that were answered at length, as they were asked.
        probe: their answers, with the target's features.
        progress: gets a line about each step of an examination.
    """

    target: TargetModel
    tokenizer: PreTrainedTokenizerBase
    style: Style
    texts: tuple[str, ...]
    questions: tuple[Question, ...]
    probe: Probe
    progress: Progress

    @classmethod
    def of(
        cls,
        target: TargetModel,
        tokenizer: PreTrainedTokenizerBase,
        style: Style,
        texts: Sequence[str],
        num_drafts: int,
        layers: Sequence[int] = (),
        progress: Progress = lambda text: None,
    ) -> ProbedTarget:
        """Let the target answer.

        Args:
            target, tokenizer, style, texts, progress: see the attributes.
            num_drafts: K of the examination.
            layers: aux layers of the head, whose neighbours are kept too.

        Raises:
            UserError: the prompts do not fit the model.
        """
        count = target.num_layers
        usual, inside = default_aux_layer_ids(count), tuple(i for i in layers if 0 <= i < count)
        kept = {*usual, *inside}
        for ids in filter(None, (usual, inside)):
            kept |= {i for choice in aux_choices(ids, count) for i in choice}
        progress(f"the target answers {len(texts)} prompts")
        questions = [style.ask(text, tokenizer) for text in texts]
        answered, probe = _answer(target, questions, sorted(kept), num_drafts)
        return cls(target, tokenizer, style, tuple(texts), answered, probe, progress)

    @cached_property
    def in_other_styles(self) -> dict[Style, ProbedTarget]:
        """The same texts, answered as prompts of other styles."""
        found = {}
        for style in other_styles(self.style, self.tokenizer):
            self.progress(f"the target answers prompts {style}")
            questions = [style.ask(text, self.tokenizer) for text in self.texts]
            layers, k = sorted(self.probe.entering), self.probe.num_drafts
            try:
                answered, probe = _answer(self.target, questions, layers, k)
            except UserError:  # in this style they are too long
                continue
            found[style] = replace(self, style=style, questions=answered, probe=probe)
        return found

    def spelled_share(self) -> float:
        """Return how much of the answers the tokenizer makes of their text again, 0 to 1.

        A model writes its text with the tokens that its own tokenizer has for it; with another
        tokenizer its answers are words in pieces that nobody would cut so.
        """
        probe, ratios = self.probe, []
        for row, (start, end) in enumerate(zip(probe.prompt_lens, probe.lengths, strict=True)):
            ids = probe.tokens_PN[row, start:end].tolist()
            text = str(self.tokenizer.decode(ids))
            again = self.tokenizer(text, add_special_tokens=False).input_ids
            ratios.append(SequenceMatcher(None, ids, again, autojunk=False).ratio())
        return sum(ratios) / max(1, len(ratios))

    def reading_nats(self) -> float:
        """Return -log p a token over the prompts that the target knows best (lowest quarter)."""
        nats = [
            float(-self.probe.confidence_PN[row, 1:length].clamp_min(1e-9).log().mean())
            for row, length in enumerate(self.probe.prompt_lens)
            if length > 2
        ]
        return float(torch.tensor(nats).quantile(0.25)) if nats else 0.0


def aux_choices(ids: tuple[int, ...], num_layers: int) -> list[tuple[int, ...]]:
    """Layers that a head may have been trained on: its own and the usual ones, one off each way."""
    usual = default_aux_layer_ids(num_layers)
    bases = [ids] + ([usual] if len(usual) == len(ids) else [])
    shifted = [tuple(i + by for i in base) for base in bases for by in (0, 1, -1)]
    inside = [one for one in shifted if min(one) >= 0 and max(one) < num_layers]
    return [one for one in dict.fromkeys(inside) if one != ids]


def _answer(
    target: TargetModel, questions: Sequence[Question], layers: Sequence[int], num_drafts: int
) -> tuple[tuple[Question, ...], Probe]:
    """Answers of the target; those that end early are left out, if enough others are there."""
    llm = LLM(model=target)
    tokens = num_drafts + _ANSWER_TOKENS
    room = llm.engine.max_model_len - tokens
    fitting = [one for one in questions if 0 < len(one.token_ids) <= room]
    if len(fitting) < 2:
        raise UserError(
            f"{len(fitting)} of {len(questions)} prompts leave room for an answer within the "
            f"target's {llm.engine.max_model_len} positions; expected at least 2. Give shorter "
            "prompts (--prompts)."
        )
    params = SamplingParams(max_tokens=tokens, temperature=0.0)
    prompts = [one.token_ids for one in fitting]
    answers = [output.token_ids for output in llm.generate(prompts, params)]
    if sum(len(answer) == tokens for answer in answers) < min(_FEWEST_PROMPTS, len(fitting)):
        whole = llm.generate(prompts, replace(params, ignore_eos=True))
        answers = [output.token_ids for output in whole]
    kept = [pair for pair in zip(fitting, answers, strict=True) if len(pair[1]) == tokens]
    prompts = [one.token_ids for one, _ in kept]
    probe = make_probe(target, prompts, [answer for _, answer in kept], layers, num_drafts)
    return tuple(one for one, _ in kept), probe
