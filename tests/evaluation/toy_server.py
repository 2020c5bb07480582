"""A server of a toy language whose exact distribution is known, lossless or with a planted fault.

Each character is a token. The distribution after a text depends on all of it. Drafts are right
about as often as wrong; a lossless server compares each with the target's own token.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from tests.evaluation.fake_endpoint import Dead, Script

LETTERS = "abcdefghijklmnopqrstuvwxyz(): \n"
END = len(LETTERS)  # the id of the end token
_BLOCK = 8  # tokens of a block of the prefix cache
_STEP = 4  # tokens of a step of the server


def encode(text: str) -> tuple[int, ...]:
    return tuple(max(LETTERS.find(one), 0) for one in text.lower())


@cache
def logprobs(tokens: tuple[int, ...], model: str = "m") -> np.ndarray:
    """Log-probabilities of the next token after all these tokens."""
    digest = hashlib.sha256(bytes(tokens) + model.encode()).digest()
    weights = np.random.default_rng([*digest[:8]]).gamma(0.15, size=END + 1) + 1e-4
    weights[END] *= 0.3 if len(tokens) % 8 else 3.0
    return np.log(weights / weights.sum())


def draft(tokens: tuple[int, ...]) -> int:
    """The draft after these tokens: the likeliest or the second likeliest one."""
    return int(np.argsort(logprobs(tokens))[-1 - (sum(tokens) % 2)]) % END


@dataclass
class ToyServer:
    """Answers of the server; `Script.answers` takes `answer`.

    Another `model` is another language. `fault`: "accepts" takes each second draft unseen, "past
    stop" ends only with a step, "cache" reads the first block of a prompt asked before from another
    prompt, "cache from the first" that of every prompt. `told(n, choice)`
    replaces the choice of answer n.
    """

    model: str = "m"
    is_ours: bool = False
    has_ids: bool = False
    has_echo: bool = False
    tops: int = 20
    draws: bool = True
    fault: str = ""
    told: Callable[[int, dict[str, Any]], dict[str, Any]] = lambda _, choice: choice
    num_limited: int = 0
    retry_after: str = "0"
    dies_after: int | None = None
    num_answers: int = 0
    seen: set[tuple[int, ...]] = field(default_factory=set)

    def script(self) -> Script:
        facts: dict[str, Any] = {"id": "m"}
        if self.is_ours:
            drafts = [{"name": "peagle", "num_speculative_tokens": _STEP - 1}]
            facts |= {"speculation": {"default": "peagle", "proposers": drafts}}
        return Script(models=[facts], answers=self.answer)

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        if self.num_limited:
            self.num_limited -= 1
            return 429, {"error": {"message": "slowly"}}, {"Retry-After": self.retry_after}
        if self.dies_after is not None and self.num_answers >= self.dies_after:
            raise Dead
        self.num_answers += 1
        unknown = {"return_tokens_as_token_ids", "top_k", "min_p", "speculation"} & set(body)
        if (unknown and not self.has_ids and not self.is_ours) or "chat" in path:
            return 400, {"error": {"message": f"not here: {sorted(unknown)}"}}, {}
        asked = body["prompt"]
        prompt = tuple(asked) if isinstance(asked, list) else encode(asked)
        if path == "/tokenize":
            return (200, {"tokens": prompt}, {}) if self.has_ids else (404, {}, {})
        if body["temperature"] and not self.draws:
            return 400, {"error": {"message": "temperature is 1.0, expected 0"}}, {}
        num_top = body.get("logprobs") or 0
        if num_top > self.tops > 0:
            return 400, {"error": {"message": f"at most {self.tops} log-probabilities"}}, {}
        return 200, self.complete(prompt, body, num_top if self.tops else 0), {}

    def complete(
        self, prompt: tuple[int, ...], body: dict[str, Any], num_top: int
    ) -> dict[str, Any]:
        drafts = (body.get("speculation") or {}).get("num_speculative_tokens") != 0
        context = prompt
        is_echo = body.get("echo", False) and self.has_echo
        is_wrong = self.fault == "cache from the first" or (
            self.fault == "cache" and prompt[:_BLOCK] in self.seen
        )
        if is_wrong and not is_echo:
            context = encode("anything")[:_BLOCK] + prompt[_BLOCK:]
        self.seen.add(prompt[:_BLOCK])
        output: tuple[int, ...] = ()
        reason = "length"
        stops = body.get("stop") or []
        while len(output) < body["max_tokens"]:
            token = self._next(context, output, body, drafts)
            output += (token,)
            is_step = not drafts or self.fault != "past stop" or len(output) % _STEP == 0
            text = "".join((LETTERS + "#")[one] for one in output)
            if (END in output or any(stop in text for stop in stops)) and is_step:
                reason = "stop"
                break
        text = "".join(LETTERS[one] for one in output if one != END)
        if self.fault != "past stop" or not drafts:
            text = min((text[: text.find(s)] for s in stops if s in text), key=len, default=text)
        as_ids = bool(body.get("return_tokens_as_token_ids"))
        # An echoed prompt is computed as a whole, without the cache.
        scored = ((), prompt + output) if is_echo else (context, output)
        listed = self._listed(*scored, num_top, as_ids)
        choice: dict[str, Any] = {"text": text, "finish_reason": reason}
        if self.tops:
            choice["logprobs"] = _of_completion(listed)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(output)}
        return {"choices": [self.told(self.num_answers, choice)], "usage": usage}

    def _next(
        self,
        context: tuple[int, ...],
        output: tuple[int, ...],
        body: dict[str, Any],
        drafts: bool,
    ) -> int:
        if drafts and self.fault == "accepts" and len(output) % 2:
            return draft(context + output)
        given = logprobs(context + output, self.model)
        if not body["temperature"]:
            return int(given.argmax())
        dice = np.random.default_rng([body.get("seed", 0), len(output)])
        return int(dice.choice(END + 1, p=np.exp(given)))

    def _listed(
        self, context: tuple[int, ...], output: tuple[int, ...], num_top: int, as_ids: bool
    ) -> list[tuple[str, float, dict[str, float]]]:
        def name(token: int) -> str:
            return f"token_id:{token}" if as_ids and self.has_ids else [*LETTERS, "</s>"][token]

        found = []
        for at, token in enumerate(output):
            given = logprobs(context + output[:at], self.model)
            best = np.argsort(given)[::-1][:num_top]
            tops = {name(int(one)): float(given[one]) for one in best}
            found.append((name(token), float(given[token]), tops))
        return found


def _of_completion(listed: list[tuple[str, float, dict[str, float]]]) -> dict[str, Any]:
    names, values, tops = zip(*listed, strict=True) if listed else ((), (), ())
    return {"tokens": names, "token_logprobs": values, "top_logprobs": tops}
