"""The log-probabilities of an answer, as completions and as chat completions have them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp
from typing import Any

_ID = "token_id:"
_MOST_MASS = 1.01  # of the likeliest tokens together; rounding may exceed 1
_LEAST_MASS = 1e-9  # of the likeliest one; no vocabulary has so many tokens


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """An output token with its log-probability.

    Attributes:
        token: the server's name of the token: its text, or "token_id:5".
        logprob: natural logarithm of its probability.
        top: the same of the most likely tokens of this position and of the token itself, by name.
        best: the greatest log-probability of the position, also where tokens share a name.
        num_listed: number of likeliest tokens whose log-probabilities the server gave.
    """

    token: str
    logprob: float
    top: Mapping[str, float]
    best: float
    num_listed: int

    @property
    def token_id(self) -> int | None:
        """Return the id in the token's name; None where the name is text."""
        number = self.token.removeprefix(_ID)
        return int(number) if number != self.token and number.isdigit() else None


def scored_tokens(choice: Mapping[str, Any]) -> list[ScoredToken]:
    """Return the scored tokens of a choice of a whole answer; none where it has none.

    The first token of an echoed prompt has no log-probability; it gets 0.

    Raises:
        ValueError: the log-probabilities have another form, or are those of no distribution.
    """
    given = choice.get("logprobs")
    try:
        if not given:
            return []
        if (content := given.get("content")) is not None:
            return [_of_chat(one) for one in content]
        tokens = given["tokens"] or []
        tops = given.get("top_logprobs") or [{}] * len(tokens)
        values = list(given["token_logprobs"])
        if values[:1] == [None]:
            values[0] = 0.0
        return [
            _scored(token, logprob, list((top or {}).items()))
            for token, logprob, top in zip(tokens, values, tops, strict=True)
        ]
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError):
        words = f"log-probabilities of another form, or of no distribution: {str(given)[:80]}"
        raise ValueError(words) from None


def _of_chat(entry: Mapping[str, Any]) -> ScoredToken:
    listed = [(one["token"], one["logprob"]) for one in entry.get("top_logprobs") or ()]
    return _scored(entry["token"], entry["logprob"], listed)


def _scored(token: Any, logprob: Any, listed: Sequence[tuple[str, Any]]) -> ScoredToken:
    tops = sorted((float(value), name) for name, value in listed)
    # Of tokens with one name the likeliest is kept, or the output token.
    top = {**{name: value for value, name in tops}, token: float(logprob)}
    best = max([top[token], *(value for value, _ in tops)])
    masses = [exp(value) for value in top.values()]
    # Not "> _MOST_MASS": NaN is not.
    is_some = _LEAST_MASS <= exp(best) <= _MOST_MASS and sum(masses) <= _MOST_MASS
    if not (isinstance(token, str) and is_some):
        raise ValueError(token)
    return ScoredToken(token, top[token], top, best, len(listed))
