"""Questions answered by a server with OpenAI's interface."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from peagle.client.api import ApiClient, NoAnswer, error_message
from peagle.errors import UserError
from peagle.training.regenerate import Ask, Failure, RegeneratedAnswer

_MAX_WAIT_S = 60.0
_WORTH_A_RETRY = (408, 409, 425, 429)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to go on with a question.

    Attributes:
        retries: further tries after the first.
        first_wait_s: wait before the first of them; every further wait is twice as long, up to a
            minute. A server's Retry-After replaces it.
        timeout_s: time of one try.
    """

    retries: int = 6
    first_wait_s: float = 1.0
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if self.retries < 0 or self.timeout_s <= 0:
            raise UserError(
                f"retries is {self.retries}, the timeout {self.timeout_s:g} s; expected at least 0 "
                "and more than 0."
            )

    def wait_s(self, tries: int, retry_after: str | None) -> float:
        """Return the seconds to wait after so many tries."""
        wait = self.first_wait_s * 2 ** (tries - 1)
        if retry_after is not None and retry_after.strip().isdigit():
            wait = float(retry_after)
        return min(wait, _MAX_WAIT_S)


class EndpointAnswerer:
    """A server that answers questions (an `Answerer`).

    Args:
        url: like https://host:8000, with or without /v1 at its end.
        model: its name there; None takes the first that the server lists.
        fields: fields of every request: sampling, and options of the chat template.
        key: key of the server, if it wants one.
        concurrency: number of questions in flight.
        is_chat: ask for chat completions; else for completions.
        patience: with failing tries.

    Raises:
        UserError: the URL, the key or the concurrency is not usable, or no model was named and the
            server lists none.
    """

    def __init__(
        self,
        url: str,
        model: str | None,
        fields: Mapping[str, Any],
        *,
        key: str | None = None,
        concurrency: int = 16,
        is_chat: bool = True,
        patience: Patience | None = None,
    ) -> None:
        if concurrency < 1:
            raise UserError(f"--concurrency is {concurrency}; expected at least 1.")
        self.url, self.is_chat = url, is_chat
        self._patience = patience or Patience()
        self._client = ApiClient(url, key, timeout_s=self._patience.timeout_s)
        self._concurrency = concurrency
        self.model = model or self._first_model()
        self._fields = {**fields, "model": self.model}

    def answers(
        self, take: Callable[[], Ask | None]
    ) -> Iterator[tuple[Ask, RegeneratedAnswer | Failure]]:
        """Yield answers in the order in which they come, `concurrency` questions at a time.

        Raises:
            UserError: the server cannot be reached, refuses the key, or is none of this kind.
        """
        asks: dict[asyncio.Task[RegeneratedAnswer | Failure], Ask] = {}

        async def next_done() -> set[asyncio.Task[RegeneratedAnswer | Failure]]:
            return (await asyncio.wait(asks, return_when=asyncio.FIRST_COMPLETED))[0]

        # Leaving the runner cancels what is in flight: an interrupted run waits for no answer.
        with asyncio.Runner() as runner:
            while True:
                while len(asks) < self._concurrency and (ask := take()) is not None:
                    asks[runner.get_loop().create_task(self._answer(ask))] = ask
                if not asks:
                    return
                done = runner.run(next_done())
                if errors := [error for task in done if (error := task.exception())]:
                    raise errors[0]
                for task in done:
                    yield asks.pop(task), task.result()

    async def _answer(self, ask: Ask) -> RegeneratedAnswer | Failure:
        body: dict[str, Any] = {**self._fields, "seed": ask.seed}
        if self.is_chat:
            path, body["messages"] = "/v1/chat/completions", [dict(m) for m in ask.messages]
        else:
            path, body["prompt"] = "/v1/completions", ask.messages[-1]["content"]
        raw = await self._patiently("POST", path, body)
        return raw if isinstance(raw, Failure) else self._read(raw)

    async def _patiently(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> bytes | Failure:
        """Return the body of an answer of status 200, after as many tries as it takes."""
        tries = 0
        while True:
            tries += 1
            retry_after = None
            try:
                reply = await self._client.call_async(method, path, body)
            except NoAnswer as error:
                if tries > self._patience.retries:
                    raise UserError(
                        f"{self.url} cannot be reached: {error.reason} ({tries} tries). The "
                        "answers so far are kept: run the same command again to go on."
                    ) from None
            else:
                if reply.status == 200:
                    return reply.body
                message = f"{reply.status}: {error_message(reply.body)}"
                if reply.status in (401, 403):
                    raise self._client.refusal(reply.status, reply.body)
                if reply.status == 404 or reply.status < 400:
                    raise UserError(
                        f"{self.url} has no {path} for the model ({message}). Correct --endpoint "
                        "or --target."
                    )
                if reply.status not in _WORTH_A_RETRY and reply.status < 500:
                    return Failure(message)
                if tries > self._patience.retries:
                    return Failure(f"{message} ({tries} tries)")
                retry_after = reply.headers.get("Retry-After")
            await asyncio.sleep(self._patience.wait_s(tries, retry_after))

    def _first_model(self) -> str:
        raw = asyncio.run(self._patiently("GET", "/v1/models"))
        try:
            listed = {} if isinstance(raw, Failure) else self._client.json_object(raw)
            return str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise UserError(
                f"{self.url} lists no models; name the one to ask with --target."
            ) from None

    def _read(self, raw: bytes) -> RegeneratedAnswer | Failure:
        """Return the answer in a completion or a chat completion."""
        reply = self._client.json_object(raw)
        try:
            choice = reply["choices"][0]
            reason = choice.get("finish_reason") or "stop"
            num_tokens = (reply.get("usage") or {}).get("completion_tokens") or 0
            if not self.is_chat:
                return RegeneratedAnswer(_text(choice["text"]), reason, num_tokens=num_tokens)
            message = choice["message"]
            if message.get("tool_calls"):
                return Failure("the answer is a tool call")
            reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
            text = _text(message.get("content") or "")
            return RegeneratedAnswer(text, reason, _text(reasoning), num_tokens)
        except (KeyError, IndexError, TypeError, AttributeError):
            raise self._client.foreign(json.dumps(reply)[:300]) from None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value
