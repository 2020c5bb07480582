"""Log-probabilities in the two forms that OpenAI's API has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from peagle.kernels.logprobs import TokenLogprobs

TokenText = Callable[[int], str]
_LEAST = -9999.0  # JSON has no -inf


def _number(logprob: float) -> float:
    return max(logprob, _LEAST)


def chat_logprobs(given: Sequence[TokenLogprobs], text_of: TokenText) -> dict[str, Any]:
    """As chat completions have them: one object a token, with its bytes."""

    def shown(token_id: int, logprob: float) -> dict[str, Any]:
        text = text_of(token_id)
        return {"token": text, "logprob": _number(logprob), "bytes": list(text.encode())}

    content = [
        {
            **shown(one.token_id, one.logprob),
            "top_logprobs": [shown(token_id, logprob) for token_id, logprob in one.top],
        }
        for one in given
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    given: Sequence[TokenLogprobs | None],
    text_of: TokenText,
    offset: int = 0,
    first: int | None = None,
) -> dict[str, Any]:
    """As completions have them: lists side by side.

    Args:
        given: of the tokens; None for a prompt's first, which has none.
        text_of: the text of a token.
        offset: characters of the text before the first token.
        first: the id of a first token without log-probabilities.
    """
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for one in given:
        token_id = one.token_id if one is not None else first
        assert token_id is not None
        text = text_of(token_id)
        tokens.append(text)
        offsets.append(offset)
        offset += len(text)
        if one is None:
            values.append(None)
            tops.append(None)
            continue
        values.append(_number(one.logprob))
        top = {text_of(i): _number(logprob) for i, logprob in one.top}
        tops.append({text: _number(one.logprob), **top} if one.top else {})
    return {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": tops if any(tops) else None,
        "text_offset": offsets,
    }
