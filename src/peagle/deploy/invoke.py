"""Requests to an endpoint in OpenAI's form, whole or streamed, and their completions."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from peagle.client.answers import (
    AnswerEvent,
    ForeignAnswer,
    StreamedAnswer,
    error_message,
    printable_line,
    read_whole,
)
from peagle.deploy.aws import call_errors, error_code, error_text, explain
from peagle.errors import UserError

# One attempt: the container computes the completion of a request that was given up all the same.
RETRIES: Mapping[str, Any] = {"mode": "standard", "total_max_attempts": 1}
_SHOWN_CHARACTERS = 300


@dataclass(slots=True)
class Completion:
    """A completion, as far as it came.

    Attributes:
        texts: text of each choice, without reasoning.
        finish_reasons: finish reason of each choice that ended.
        usage: tokens, and "speculation" if the container reports its drafts.
        variant: the variant that answered.
        body: the whole response if it was not streamed.
        problem: why the completion is not complete; "" if it is.
    """

    texts: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    finish_reasons: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    variant: str = ""
    body: dict[str, Any] | None = None
    problem: str = ""

    def add(self, event: AnswerEvent) -> None:
        """Add an event of a stream, or a whole response."""
        if event.error:
            self.problem = f"the container ended the answer: {_shorten(event.error)}"
        self.usage = dict(event.body.get("usage") or self.usage)
        for choice in event.choices:
            if choice.text:
                self.texts[choice.index] += choice.text
            if choice.finish_reason:
                self.finish_reasons[choice.index] = choice.finish_reason


def with_report(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same request with a wish for a report on drafts; vLLM's container ignores it."""
    return {**body, "speculation": {"report": True, **(body.get("speculation") or {})}}


def invoke(client: Any, endpoint: str, body: Mapping[str, Any], variant: str = "") -> Completion:
    """Send a request and wait for the whole completion.

    Args:
        client: boto3's client of sagemaker-runtime.
        endpoint: its name.
        body: of OpenAI's chat completions or completions.
        variant: "" lets the endpoint choose.

    Raises:
        UserError: the endpoint, the container or AWS refused or failed, or answered with something
            else.
    """
    try:
        response = client.invoke_endpoint(**_parameters(endpoint, body, variant))
        raw = response["Body"].read()
    except _stream_errors() as error:
        raise explain_invocation(error, endpoint) from None
    completion = Completion(variant=response.get("InvokedProductionVariant", ""))
    _add_whole(completion, raw)
    return completion


def stream(
    client: Any, endpoint: str, body: Mapping[str, Any], completion: Completion, variant: str = ""
) -> Iterator[AnswerEvent]:
    """Send a request and yield every event of the completion as it comes.

    If something goes wrong after the first event, `completion.problem` says so at the end: the
    stream broke off, the container reported an error, or the answer did not end.

    Args:
        client, endpoint, body, variant: see `invoke`; this asks for a stream with the usage at
            its end.
        completion: gets the text and the figures that come.

    Raises:
        UserError: as `invoke`, before the first event.
    """
    options = {"include_usage": True, **(body.get("stream_options") or {})}
    streamed = {**body, "stream": True, "stream_options": options}
    try:
        response = client.invoke_endpoint_with_response_stream(
            **_parameters(endpoint, streamed, variant)
        )
    except _stream_errors() as error:
        raise explain_invocation(error, endpoint) from None
    completion.variant = response.get("InvokedProductionVariant", "")
    parts = _payload(response["Body"], completion)
    if "json" in response.get("ContentType", ""):  # a container that does not stream
        raw = b"".join(parts)
        if not completion.problem:
            yield _add_whole(completion, raw)
        return
    answer = StreamedAnswer()
    try:
        for event in answer.read_stream(parts):
            completion.add(event)
            yield event
    except ForeignAnswer as error:
        raise _foreign(error) from None
    except ValueError as error:
        raise UserError(f"The container's answer is no event stream: {error}.") from None
    if not answer.is_whole:
        completion.problem = completion.problem or (
            "the stream ended before the answer did (no finish reason, no [DONE])"
        )


def _payload(body: Any, completion: Completion) -> Iterator[bytes]:
    """Yield the bytes of a stream, up to the place where it broke off."""
    try:
        for part in body:
            yield part.get("PayloadPart", {}).get("Bytes", b"")
    except _stream_errors() as error:
        completion.problem = completion.problem or _explain_break(error)
    finally:
        body.close()


def _parameters(endpoint: str, body: Mapping[str, Any], variant: str) -> dict[str, Any]:
    return {
        "EndpointName": endpoint,
        "ContentType": "application/json",
        "Body": json.dumps(body, ensure_ascii=False).encode(),
        **({"TargetVariant": variant} if variant else {}),
    }


def _add_whole(completion: Completion, raw: bytes) -> AnswerEvent:
    try:
        event = read_whole(raw)
    except ForeignAnswer as error:
        raise _foreign(error) from None
    completion.body = dict(event.body)
    completion.add(event)
    return event


def _shorten(text: str) -> str:
    plain = printable_line(text[: _SHOWN_CHARACTERS + 1])
    return plain if len(plain) <= _SHOWN_CHARACTERS else plain[:_SHOWN_CHARACTERS] + "..."


# ---- errors ----


def _stream_errors() -> tuple[type[Exception], ...]:
    from botocore.eventstream import ParserError
    from urllib3.exceptions import HTTPError

    return *call_errors(), ParserError, HTTPError, OSError


def _foreign(error: ForeignAnswer) -> UserError:
    text = error.data.decode(errors="replace")
    if not error.is_object:
        return UserError(f"The container's answer is no JSON object: {_shorten(text)!r}")
    return UserError(
        f"The container answered with something else than a completion: {_shorten(text)}"
    )


def _explain_break(error: BaseException) -> str:
    """Return why a stream that had begun ended."""
    code, text = error_code(error), _shorten(error_text(error))
    if code == "ModelStreamError":
        # The error's ErrorCode says which of the two, but botocore does not hand it on.
        return (
            "the container's answer broke off: it took longer than SageMaker waits, or the "
            f"connection to it broke (ModelStreamError: {text})"
        )
    if code == "InternalStreamFailure":
        return f"the stream failed inside SageMaker (InternalStreamFailure: {text})"
    return f"the connection to SageMaker broke ({type(error).__name__}: {text})"


def explain_invocation(error: BaseException, endpoint: str) -> UserError:
    """Return the error of an invocation in words; an error of the container keeps its own."""
    from botocore.exceptions import ReadTimeoutError

    code, text = error_code(error), error_text(error)
    if isinstance(error, ReadTimeoutError):
        return UserError(
            f"Endpoint {endpoint!r} gave no answer in time: SageMaker waits 60 s for one that is "
            "not streamed. Ask with --stream, or for fewer tokens with --max-tokens."
        )
    if code == "ModelError":
        response: Any = getattr(error, "response", {})
        words = error_message(str(response.get("OriginalMessage") or text).encode())
        logs = f"See its log: peagle deploy sagemaker logs {endpoint}"
        status = response.get("OriginalStatusCode", "")
        return UserError(f"The container answered {status}: {_shorten(words)} {logs}".strip())
    if code == "ModelNotReadyException":
        return UserError(
            f"Endpoint {endpoint!r} has no container ready: {_shorten(text)} Wait until it has: "
            f"peagle deploy sagemaker status {endpoint}"
        )
    if code == "ValidationError" and "not found" in text.lower():
        return UserError(
            f"There is no endpoint {endpoint!r} in this region and account, or it is not in "
            f"service: {_shorten(text)} See: peagle deploy sagemaker status {endpoint}"
        )
    return explain(error)
