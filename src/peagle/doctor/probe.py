"""The probe on which heads are tried: prompts, the target's greedy answers, and its features.

Shapes: P prompts (a row each, padded at its end), N positions, C anchors of a prompt, K drafts, H
target width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from peagle.chat import render_chat
from peagle.config import SamplingParams
from peagle.data.batches import Batch, Place
from peagle.data.features import target_states
from peagle.errors import UserError
from peagle.evaluation.decoding import Message
from peagle.evaluation.prompts import load_prompt_set, read_prompts
from peagle.llm import LLM
from peagle.models.target import TargetModel, default_aux_layer_ids

Progress = Callable[[str], None]

_SETS = ("humaneval", "mt_bench", "gsm8k", "heldout_code")
_OF_EACH_SET, _MAX_PROMPTS, _MIN_PROMPTS = 16, 64, 8
# Shorter prompts say too little, longer ones take time without saying more.
_LENGTHS = range(4, 513)
# Output tokens of each prompt beyond K.
_ANSWER_TOKENS = 18
_STRIDE = 2  # between the anchors that are tried


class Question(NamedTuple):
    """A prompt: its text, the form that a server gets, and the training side's token ids."""

    text: str
    prompt: str | tuple[Message, ...]
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class PromptStyle:
    """The way in which prompts reach the model.

    Attributes:
        is_chat: a prompt is a user's message behind the chat template, otherwise plain text.
        chat_template: None is the tokenizer's own.
        thinking: None leaves it to the template.
    """

    is_chat: bool
    chat_template: str | None = None
    thinking: bool | None = None

    def __str__(self) -> str:
        if not self.is_chat:
            return "plain text"
        mode = {None: "", True: ", thinking on", False: ", thinking off"}[self.thinking]
        return f"behind the chat template{mode}"

    def ask(self, text: str, tokenizer: PreTrainedTokenizerBase) -> Question:
        """Return a text as a question.

        Raises:
            UserError: the template cannot render it.
        """
        if not self.is_chat:
            return Question(text, text, list(tokenizer(text).input_ids))
        messages = ({"role": "user", "content": text},)
        options = {"chat_template": self.chat_template, "thinking": self.thinking}
        return Question(text, messages, render_chat(tokenizer, messages, **options))

    def others(self, tokenizer: PreTrainedTokenizerBase) -> list[PromptStyle]:
        """Return the other ways in which the same prompts might reach the model."""
        if not self.is_chat:
            return [PromptStyle(True)] if getattr(tokenizer, "chat_template", None) else []

        def greeting(style: PromptStyle) -> list[int]:
            try:
                return style.ask("Hi", tokenizer).token_ids
            except UserError:
                return []

        modes = [replace(self, thinking=mode) for mode in (True, False) if mode != self.thinking]
        return [PromptStyle(False), *(s for s in modes if greeting(s) not in ([], greeting(self)))]


def usual_style(
    tokenizer: PreTrainedTokenizerBase,
    *,
    plain: bool = False,
    chat_template: str | None = None,
    thinking: bool | None = None,
) -> PromptStyle:
    """Return the style that the options ask for: by default the chat template, where there is one.

    Raises:
        UserError: the options contradict each other.
    """
    if plain and (chat_template is not None or thinking):
        raise UserError("Plain prompts have neither a chat template nor a thinking mode.")
    has_template = bool(getattr(tokenizer, "chat_template", None)) or chat_template is not None
    if thinking and not has_template:
        raise UserError("A thinking mode was given, but the tokenizer has no chat template.")
    return PromptStyle(has_template and not plain, chat_template, thinking)


def choose_texts(file: Path | None, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return texts to ask: of a file, else the shortest of the bundled sets (code and prose).

    Raises:
        UserError: the file cannot be read, or has no prompt of a usable length.
    """
    sets = [read_prompts(file)] if file else [load_prompt_set(name) for name in _SETS]
    chosen: list[str] = []
    for prompts in sets:
        sized = [(len(tokenizer(p.text).input_ids), p.text) for p in prompts]
        fitting = [(size, text) for size, text in sized if size in _LENGTHS]
        texts = [text for _, text in (fitting if file else sorted(fitting))]
        chosen += texts[: _MAX_PROMPTS if file else _OF_EACH_SET]
    if len(chosen) < 2:
        raise UserError(
            f"{str(file)!r} has {len(chosen)} prompts of {_LENGTHS.start} to {_LENGTHS.stop - 1} "
            "tokens; expected at least 2, better 64."
        )
    return chosen


@dataclass(frozen=True)
class Probe:
    """A target that has answered texts, with its states and probabilities in them.

    Attributes:
        style: the way in which the prompts reached it.
        texts: all prompts.
        questions: the prompts that were answered at length, a row each.
        progress: gets a line about each step of an examination.
        tokens_PN: prompt and answer.
        lengths, prompt_lens: tokens and prompt tokens of each row.
        entering: the hidden states that enter each layer, [P, N, H], by layer.
        confidence_PN: probability of the token at each position, under the target.
        k: K.
        anchors_PC: anchors that are tried, the same number in each row.
    """

    target: TargetModel
    tokenizer: PreTrainedTokenizerBase
    style: PromptStyle
    texts: tuple[str, ...]
    questions: tuple[Question, ...]
    progress: Progress
    tokens_PN: Tensor
    lengths: tuple[int, ...]
    prompt_lens: tuple[int, ...]
    entering: dict[int, Tensor]
    confidence_PN: Tensor
    k: int
    anchors_PC: Tensor

    @classmethod
    def of(
        cls,
        target: TargetModel,
        tokenizer: PreTrainedTokenizerBase,
        style: PromptStyle,
        texts: Sequence[str],
        k: int,
        layers: Sequence[int] = (),
        progress: Progress = lambda text: None,
    ) -> Probe:
        """Let the target answer.

        Args:
            target: its taps are put back as they were.
            k: K of the examination.
            layers: aux layers of the head, whose neighbours are kept too.

        Raises:
            UserError: the prompts do not fit the model.
        """
        count = target.num_layers
        bases = default_aux_layer_ids(count), tuple(i for i in layers if 0 <= i < count)
        choices = [one for ids in filter(None, bases) for one in (ids, *aux_choices(ids, count))]
        kept = sorted({layer for one in choices for layer in one})
        progress(f"the target answers {len(texts)} prompts")
        return _ask(target, tokenizer, style, tuple(texts), k, kept, progress)

    @cached_property
    def in_other_styles(self) -> dict[PromptStyle, Probe]:
        """Return the same texts, answered as prompts of other styles."""
        found = {}
        for style in self.style.others(self.tokenizer):
            self.progress(f"the target answers prompts {style}")
            model, layers = (self.target, self.tokenizer), sorted(self.entering)
            try:
                probe = _ask(*model, style, self.texts, self.k, layers, self.progress)
            except UserError:  # in this style they are too long
                continue
            found[style] = probe
        return found

    @cached_property
    def all_anchors_PC(self) -> Tensor:
        """Return every anchor that all prompts have: with K tokens of the answer behind it."""
        anchors_PC = _anchors(self.lengths, self.prompt_lens, self.k, 1)
        return anchors_PC.to(self.tokens_PN.device)

    def features(self, layers: Sequence[int], shift: int = 0) -> Tensor:
        """Return aux features of these layers, [P, N, A * H], of `shift` positions before each."""
        return torch.cat([self.entering[layer] for layer in layers], dim=-1).roll(shift, dims=1)

    def part(self, step: int) -> Probe:
        """Return every `step`th prompt, from the first."""
        rows = slice(None, None, step)
        width = max(self.lengths[rows])
        return replace(
            self,
            questions=self.questions[rows],
            tokens_PN=self.tokens_PN[rows, :width],
            lengths=self.lengths[rows],
            prompt_lens=self.prompt_lens[rows],
            entering={layer: x[rows, :width] for layer, x in self.entering.items()},
            confidence_PN=self.confidence_PN[rows, :width],
            anchors_PC=self.anchors_PC[rows],
        )

    def answer(self, row: int) -> list[int]:
        """Return the answer to a prompt."""
        return self.tokens_PN[row, self.prompt_lens[row] : self.lengths[row]].tolist()

    def truth(self, anchors_PC: Tensor) -> Tensor:
        """Return the target's K tokens behind each anchor, [P, C, K]."""
        depths_K = torch.arange(self.k, device=self.tokens_PN.device)
        at_PCK = anchors_PC.unsqueeze(-1) + depths_K + 2
        return self.tokens_PN.gather(1, at_PCK.flatten(1)).view(at_PCK.shape)

    def batch(self, anchors_PC: Tensor, token_shift: int = 0) -> Batch:
        """Return the rows as training has them, these anchors supervised at every depth."""
        deepest_PN = torch.full_like(self.tokens_PN, -1)
        deepest_PN.scatter_(1, anchors_PC, self.k - 1)
        tokens_PN = self.tokens_PN.roll(token_shift, dims=1)
        return _batch(tokens_PN, deepest_PN, self.lengths, anchors_PC.shape[1])

    def spelled_share(self) -> float:
        """Return how much of the answers the tokenizer makes of their text again, 0 to 1.

        A model writes its text with the tokens that its own tokenizer has for it; another tokenizer
        cuts the words of its answers into unusual pieces.
        """
        ratios = []
        for row in range(len(self.lengths)):
            ids = self.answer(row)
            again = self.tokenizer(str(self.tokenizer.decode(ids)), add_special_tokens=False)
            ratios.append(SequenceMatcher(None, ids, again.input_ids, autojunk=False).ratio())
        return sum(ratios) / max(1, len(ratios))

    def reading_nats(self) -> float:
        """Return -log p a token over the prompts that the target knows best (lowest quarter)."""
        nats = [
            float(-self.confidence_PN[row, 1:length].clamp_min(1e-9).log().mean())
            for row, length in enumerate(self.prompt_lens)
            if length > 2
        ]
        return float(torch.tensor(nats).quantile(0.25)) if nats else 0.0


def aux_choices(ids: tuple[int, ...], num_layers: int) -> list[tuple[int, ...]]:
    """Return layers that a head may be for: its own and the usual ones, also one off each way."""
    usual = default_aux_layer_ids(num_layers)
    bases = [ids] + ([usual] if len(usual) == len(ids) else [])
    shifted = [tuple(i + by for i in base) for base in bases for by in (0, 1, -1)]
    inside = [one for one in shifted if min(one) >= 0 and max(one) < num_layers]
    return [one for one in dict.fromkeys(inside) if one != ids]


@torch.no_grad()
def _ask(
    target: TargetModel,
    tokenizer: PreTrainedTokenizerBase,
    style: PromptStyle,
    texts: tuple[str, ...],
    k: int,
    layers: Sequence[int],
    progress: Progress,
) -> Probe:
    """Let the target answer, and run it over prompts and answers, keeping the input of `layers`.

    Prompts whose answers end early are left out, if enough others are there.
    """
    llm = LLM(model=target)
    tokens = k + _ANSWER_TOKENS
    room = llm.engine.max_model_len - tokens
    questions = [style.ask(text, tokenizer) for text in texts]
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
    if sum(len(answer) == tokens for answer in answers) < min(_MIN_PROMPTS, len(fitting)):
        whole = llm.generate(prompts, replace(params, ignore_eos=True))
        answers = [output.token_ids for output in whole]
    kept = [pair for pair in zip(fitting, answers, strict=True) if len(pair[1]) == tokens]
    rows = [[*question.token_ids, *answer] for question, answer in kept]
    lengths = tuple(map(len, rows))
    prompt_lens = tuple(length - tokens for length in lengths)
    width = max(lengths)
    tokens_PN = torch.tensor([row + [0] * (width - len(row)) for row in rows]).to(target.device)
    before = target.aux_layer_ids
    target.tap_aux(layers)
    try:
        states = target_states(target, _batch(tokens_PN, torch.full_like(tokens_PN, -1), lengths))
    finally:
        target.tap_aux(before)
    confidence_PN = torch.zeros(tokens_PN.shape, dtype=torch.float32, device=target.device)
    for row, hidden_NH in enumerate(states.hidden_BNH):
        logits = target.compute_logits(hidden_NH[:-1]).float()
        next_N = tokens_PN[row, 1:]
        confidence_PN[row, 1:] = logits.softmax(-1).gather(1, next_N.unsqueeze(1)).squeeze(1)
    parts = states.features_BNA.split(target.hidden_size, dim=-1)
    return Probe(
        target,
        tokenizer,
        style,
        texts,
        tuple(question for question, _ in kept),
        progress,
        tokens_PN,
        lengths,
        prompt_lens,
        dict(zip(layers, parts, strict=True)),
        confidence_PN,
        k,
        _anchors(lengths, prompt_lens, k, _STRIDE).to(target.device),
    )


def _anchors(lengths: Sequence[int], prompt_lens: Sequence[int], k: int, stride: int) -> Tensor:
    """Return the anchors a with x[a+1] .. x[a+K+1] in the answer, or a + 1 the prompt's end."""
    room = min(n - p - k for n, p in zip(lengths, prompt_lens, strict=True))
    return torch.tensor(prompt_lens).unsqueeze(1) - 1 + torch.arange(0, room, stride)


def _batch(
    tokens_BN: Tensor, deepest_BN: Tensor, lengths: Sequence[int], max_anchors: int = 1
) -> Batch:
    """Return a batch with one document a row."""
    position_N = torch.arange(tokens_BN.shape[1])
    documents_BN = torch.where(position_N < torch.tensor(lengths).unsqueeze(1), 0, -1)
    places = tuple(Place(row, row, 0, length) for row, length in enumerate(lengths))
    documents_BN = documents_BN.to(tokens_BN.device)
    return Batch(tokens_BN, documents_BN, deepest_BN, places, max_anchors, 0, len(places))
