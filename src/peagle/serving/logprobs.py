"""Log-probabilities in the forms of OpenAI's API, and those of a prompt in vLLM's."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any

from peagle.kernels.logprobs import TokenLogprobs

TokenText = Callable[[int], str]
TokenBytes = Callable[[int], bytes]
_LEAST = -9999.0  # JSON has no -inf


class TextOffset:
    """Counts the characters of a text whose bytes come token by token.

    A token that holds part of a character has the offset at which that character begins.

    Attributes:
        value: complete characters so far.
    """

    def __init__(self, value: int = 0) -> None:
        self.value = value
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, data: bytes) -> None:
        """Count the characters that these bytes complete."""
        self.value += len(self._decoder.decode(data))


def _number(logprob: float) -> float:
    return max(logprob, _LEAST)


def _name(data: bytes) -> str:
    """A token as text; as "bytes:\\xe2\\x82" where it holds part of a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(given: Sequence[TokenLogprobs], bytes_of: TokenBytes) -> dict[str, Any]:
    """As chat completions have them: one object a token, with its bytes."""

    def shown(token_id: int, logprob: float) -> dict[str, Any]:
        data = bytes_of(token_id)
        return {"token": _name(data), "logprob": _number(logprob), "bytes": list(data)}

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
    bytes_of: TokenBytes,
    offset: TextOffset,
    first: int | None = None,
) -> dict[str, Any]:
    """As completions have them: lists side by side.

    Args:
        given: of the tokens; None for a prompt's first, which has none.
        bytes_of: the bytes of a token.
        offset: of the first token; moved behind the last one.
        first: the id of a first token without log-probabilities.
    """
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for one in given:
        token_id = one.token_id if one is not None else first
        assert token_id is not None
        data = bytes_of(token_id)
        tokens.append(_name(data))
        offsets.append(offset.value)
        offset.add(data)
        if one is None:
            values.append(None)
            tops.append(None)
            continue
        values.append(_number(one.logprob))
        # Tokens may share their bytes: the token itself comes first, then the more likely ones.
        top = {tokens[-1]: _number(one.logprob)} if one.top else {}
        for other, logprob in one.top:
            top.setdefault(_name(bytes_of(other)), _number(logprob))
        tops.append(top)
    return {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": tops if any(tops) else None,
        "text_offset": offsets,
    }


def prompt_logprobs(
    given: Sequence[TokenLogprobs | None], bytes_of: TokenBytes
) -> list[dict[str, Any] | None]:
    """As vLLM has them: of each prompt token an object by token id, None for the first."""
    return [
        None
        if one is None
        else {
            str(token_id): {
                "logprob": _number(found.logprob),
                "rank": found.rank,
                "decoded_token": _name(bytes_of(token_id)),
            }
            for token_id, found in one.items()
        }
        for one in given
    ]
