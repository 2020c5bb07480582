"""The requests of `peagle eval` and their settings in its results. It imports no torch."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from peagle.config import SamplingParams

if TYPE_CHECKING:
    from peagle.evaluation.dialogues import PromptSets


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """The requests of `peagle eval`, which every method gets."""

    sets: PromptSets
    temperatures: tuple[float, ...]
    params: SamplingParams  # the seed is not None
    draft_sampling: str  # for heads at temperatures above 0
    concurrency: int
    chat: bool  # prompts go behind the chat template
    thinking: bool | None = None  # mode of the template; None leaves it to the template
    draft_window: int | None = None  # for heads; None takes each head's own
    drawn_chains_from: float | Literal["never"] | None = None  # for trees; None takes the default

    def settings(self, target_sha256: str) -> dict[str, Any]:
        """Return the settings that all entries share, as JSON."""
        digest = hashlib.sha256()
        for name, prompts in self.sets.items():
            for prompt in prompts:
                others = [json.dumps(one) for one in (prompt.system, prompt.tools) if one]
                for text in (name, prompt.id, prompt.category, *prompt.turns, *others):
                    digest.update(text.encode("utf-8", "surrogatepass") + b"\0")
        given = {name: getattr(self, name) for name in ("draft_window", "drawn_chains_from")}
        return {name: value for name, value in given.items() if value is not None} | {
            "sets": {name: len(prompts) for name, prompts in self.sets.items()},
            "max_new_tokens": self.params.max_tokens,
            "top_p": self.params.top_p,
            "top_k": self.params.top_k,
            "chat_template": self.chat,
            "thinking": self.thinking,
            "seed": self.params.seed,
            "concurrency": self.concurrency,
            "prompts_sha256": digest.hexdigest(),
            "target_sha256": target_sha256,
        }
