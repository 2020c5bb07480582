"""Requests to an endpoint in OpenAI's form, whole or streamed, and what became of them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from peagle.deploy import aws_errors
from peagle.deploy.events import EventReader
from peagle.errors import UserError

# One attempt: the answer to a request that was given up is computed all the same.
RETRIES: Mapping[str, Any] = {"mode": "standard", "total_max_attempts": 1}
DONE = "[DONE]"
_SHOWN_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of a choice."""

    text: str
    index: int = 0
    is_reasoning: bool = False


@dataclass(slots=True)
class Answer:
    """What has come of an answer.

    Attributes:
        texts: of each choice, without reasoning.
        finish_reasons: of each choice that ended.
        usage: tokens, and "speculation" where the container told of drafts.
        variant: that answered.
        body: the whole answer where it was not streamed.
        problem: why the answer is not complete; "" if it is.
    """

    texts: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    finish_reasons: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    variant: str = ""
    body: dict[str, Any] | None = None
    problem: str = ""

    def take(self, event: Mapping[str, Any]) -> list[Piece]:
        """Take in an event of a stream, or a whole answer, and give its text.

        Raises:
            UserError: it is none of a completion.
        """
        try:
            return self._take(event)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise UserError(
                f"The container answered with something else than a completion: "
                f"{_shown(json.dumps(event))}"
            ) from None

    def _take(self, event: Mapping[str, Any]) -> list[Piece]:
        if error := event.get("error"):
            said = error.get("message") if isinstance(error, dict) else error
            self.problem = f"the container ended the answer: {_shown(str(said))}"
            return []
        if not {"choices", "usage"} & set(event):
            raise ValueError(event)
        self.usage = dict(event.get("usage") or self.usage)
        pieces = []
        for choice in event.get("choices") or ():
            index = int(choice.get("index") or 0)
            part = choice.get("delta") or choice.get("message") or choice
            if text := part.get("reasoning_content") or part.get("reasoning"):
                pieces.append(Piece(text, index, is_reasoning=True))
            if text := part.get("content") or part.get("text"):
                self.texts[index] += text
                pieces.append(Piece(text, index))
            if reason := choice.get("finish_reason"):
                self.finish_reasons[index] = reason
        return pieces


# ---- bodies ---------------------------------------------------------------------------------


def streamed(body: Mapping[str, Any]) -> dict[str, Any]:
    """The same request, its answer in events, with the usage at the end."""
    options = {"include_usage": True, **(body.get("stream_options") or {})}
    return {**body, "stream": True, "stream_options": options}


def reporting(body: Mapping[str, Any]) -> dict[str, Any]:
    """The same request, telling of its drafts where the container is ours; vLLM's ignores it."""
    return {**body, "speculation": {"report": True, **(body.get("speculation") or {})}}


# ---- requests -------------------------------------------------------------------------------


def invoke(client: Any, endpoint: str, body: Mapping[str, Any], variant: str = "") -> Answer:
    """Ask, and wait for the whole answer.

    Args:
        client: boto3's of sagemaker-runtime.
        endpoint: its name.
        body: of OpenAI's chat completions or completions.
        variant: to ask; "" lets the endpoint choose.

    Raises:
        UserError: the endpoint, the container or AWS refused or failed; or what came is no answer.
    """
    try:
        response = client.invoke_endpoint(**_request(endpoint, body, variant))
        raw = response["Body"].read()
    except _errors() as error:
        raise explained(error, endpoint) from None
    answer = Answer(variant=response.get("InvokedProductionVariant", ""))
    answer.body = _object(raw.decode(errors="replace"))
    answer.take(answer.body)
    return answer


def stream(
    client: Any, endpoint: str, body: Mapping[str, Any], answer: Answer, variant: str = ""
) -> Iterator[tuple[dict[str, Any], list[Piece]]]:
    """Ask, and yield every event of the answer as it comes, with its text.

    What went wrong once the answer had begun is in `answer.problem` at the end, beside all that
    came before: the stream broke off, the container reported an error, or [DONE] never came.

    Args:
        client, endpoint, body, variant: as of `invoke`; the body is made to stream.
        answer: gets what comes.

    Raises:
        UserError: as `invoke`, before the answer began.
    """
    request = _request(endpoint, streamed(body), variant)
    try:
        response = client.invoke_endpoint_with_response_stream(**request)
    except _errors() as error:
        raise explained(error, endpoint) from None
    answer.variant = response.get("InvokedProductionVariant", "")
    is_whole = "json" in response.get("ContentType", "")  # a container that does not stream
    parts = _bytes_of(response["Body"], answer)
    found = _whole(parts, answer) if is_whole else _events(parts, answer)
    for event in found:
        yield event, answer.take(event)


def _bytes_of(body: Any, answer: Answer) -> Iterator[bytes]:
    """The payload of a stream, up to where it broke off."""
    try:
        for part in body:
            yield part.get("PayloadPart", {}).get("Bytes", b"")
    except _errors() as error:
        answer.problem = answer.problem or _broken_off(error)
    finally:
        body.close()


def _events(parts: Iterator[bytes], answer: Answer) -> Iterator[dict[str, Any]]:
    reader, is_done = EventReader(), False
    for part in parts:
        for event in reader.feed(part):
            if event.data == DONE:
                is_done = True
            else:
                yield _object(event.data)
    if not is_done:
        answer.problem = answer.problem or "the stream ended before the answer did (no [DONE])"


def _whole(parts: Iterator[bytes], answer: Answer) -> Iterator[dict[str, Any]]:
    raw = b"".join(parts)
    if not answer.problem:
        answer.body = _object(raw.decode(errors="replace"))
        yield answer.body


def _request(endpoint: str, body: Mapping[str, Any], variant: str) -> dict[str, Any]:
    target = {"TargetVariant": variant} if variant else {}
    data = json.dumps(body, ensure_ascii=False).encode()
    return {
        "EndpointName": endpoint,
        "ContentType": "application/json",
        "Body": data,
        **target,
    }


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UserError(f"The container's answer is no JSON object: {_shown(text)!r}")
    return value


def _shown(text: str) -> str:
    plain = "".join(c if c.isprintable() else " " for c in text[: _SHOWN_CHARACTERS + 1])
    return plain if len(plain) <= _SHOWN_CHARACTERS else plain[:_SHOWN_CHARACTERS] + "..."


# ---- errors ---------------------------------------------------------------------------------


def _errors() -> tuple[type[Exception], ...]:
    from botocore.eventstream import ParserError
    from botocore.exceptions import BotoCoreError, ClientError
    from urllib3.exceptions import HTTPError

    return BotoCoreError, ClientError, ParserError, HTTPError, OSError


def _broken_off(error: BaseException) -> str:
    """Why a stream that had begun ended."""
    name, said = aws_errors.code(error), aws_errors.text(error)
    if name == "ModelStreamError":
        # Which of the two is in its ErrorCode, which botocore does not hand on.
        return (
            "the container's answer broke off: it took longer than SageMaker waits, or the "
            f"connection to it broke (ModelStreamError: {_shown(said)})"
        )
    if name == "InternalStreamFailure":
        return f"the stream failed inside SageMaker (InternalStreamFailure: {_shown(said)})"
    return f"the connection to SageMaker broke ({type(error).__name__}: {_shown(said)})"


def explained(error: BaseException, endpoint: str) -> UserError:
    """What an error of an invocation means; one of the container's is shown as the container's."""
    from botocore.exceptions import ReadTimeoutError

    response: Any = getattr(error, "response", None) or {}
    name, said = aws_errors.code(error), aws_errors.text(error)
    if isinstance(error, ReadTimeoutError):
        return UserError(
            f"Endpoint {endpoint!r} gave no answer in time: SageMaker waits 60 s for one that is "
            "not streamed. Ask with --stream, or for fewer tokens with --max-tokens."
        )
    if name == "ModelError":
        status = response.get("OriginalStatusCode", "")
        words = _message(str(response.get("OriginalMessage") or said))
        logs = f"See its log: peagle deploy sagemaker logs {endpoint}"
        return UserError(f"The container answered {status}: {_shown(words)} {logs}".strip())
    if name == "ModelNotReadyException":
        return UserError(
            f"Endpoint {endpoint!r} has no container ready: {_shown(said)} Wait until it is: "
            f"peagle deploy sagemaker status {endpoint}"
        )
    if name == "ValidationError" and "not found" in said.lower():
        return UserError(
            f"There is no endpoint {endpoint!r} in this region and account, or it is not in "
            f"service: {_shown(said)} See: peagle deploy sagemaker status {endpoint}"
        )
    return aws_errors.explain(error)


def _message(raw: str) -> str:
    """What an error body in OpenAI's form says, else the body."""
    try:
        error = json.loads(raw)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError, RecursionError):
        return raw
