"""`peagle deploy sagemaker invoke`: send a request to an endpoint and stream the answer."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from peagle.cli.deploy_options import EndpointName, Region, Variant
from peagle.cli.groups import Format, OutputFormat
from peagle.cli.terminal import dim, printable, safe
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.client.answers import AnswerEvent
    from peagle.deploy.invoke import Completion

INVOKE_EXAMPLES = """
A question, the answer as it comes; then as a completion of text, greedily:
  peagle deploy sagemaker invoke peagle-gpt-oss-20b 'Why is the sky blue?'
  peagle deploy sagemaker invoke code 'def fibonacci(n):' --completion --temperature 0

A conversation from a file, a JSON array of messages; whole, as JSON:
  peagle deploy sagemaker invoke qwen3 --messages chat.json --no-stream --format json

A body of OpenAI's API as it is, from a file or typed:
  peagle deploy sagemaker invoke qwen3 --body request.json
  peagle deploy sagemaker invoke qwen3 --body '{"prompt": "Once", "max_tokens": 16, "n": 2}'
"""


def invoke(
    endpoint: EndpointName,
    prompt: str | None = typer.Argument(
        None, metavar="[PROMPT]", help="What to ask; - is standard input.", show_default=False
    ),
    messages: Path | None = typer.Option(
        None, metavar="FILE", help="A conversation: a JSON array of role and content."
    ),
    body: str | None = typer.Option(
        None, metavar="JSON|FILE", help="A whole request of OpenAI's API, sent as it is."
    ),
    completion: bool = typer.Option(
        False, "--completion", help="Let the prompt be gone on with; no chat."
    ),
    max_tokens: int | None = typer.Option(
        None, help="Most tokens of the answer.", show_default="the container's"
    ),
    temperature: float | None = typer.Option(
        None, help="0 is greedy.", show_default="the container's"
    ),
    stream: bool = typer.Option(
        True, "--stream/--no-stream", help="Text as it comes, or all at the end."
    ),
    report: bool = typer.Option(
        True, "--report/--no-report", help="Ask our container what it drafted."
    ),
    variant: Variant = None,
    region: Region = None,
    output_format: Format = OutputFormat.TEXT,
) -> None:
    """Send a request to an endpoint and show the answer.

    Text goes to standard output as it comes; reasoning, tokens and acceptance to standard error.
    JSON is the answer, or with --stream its events, one a line. An answer that breaks off is shown
    as far as it came, and ends with status 2.
    """
    sampling = {"max_tokens": max_tokens, "temperature": temperature}
    request = _request(prompt, messages, body, sampling, completion=completion)
    from peagle.deploy import invoke as requests
    from peagle.deploy.aws import Clients

    if body is None and report:
        request = requests.with_report(request)
    clients = Clients(region, retries=requests.RETRIES)
    client = clients.client("sagemaker-runtime")
    show = _AnswerPrinter(output_format)
    if stream:
        answer = requests.Completion()
        for event in requests.stream(client, endpoint, request, answer, variant or ""):
            show.event(event)
    else:
        answer = requests.invoke(client, endpoint, request, variant or "")
        assert answer.body is not None
        show.whole(answer)
    show.end(answer)
    if answer.problem:
        raise UserError(
            f"The answer is not complete: {answer.problem}. See the log: peagle deploy sagemaker "
            f"logs {endpoint}"
        )


# ---- the request ----


def _request(
    prompt: str | None,
    messages: Path | None,
    body: str | None,
    sampling: Mapping[str, Any],
    *,
    completion: bool,
) -> dict[str, Any]:
    given = [
        name
        for name, value in (("PROMPT", prompt), ("--messages", messages), ("--body", body))
        if value is not None
    ]
    if len(given) != 1:
        have = " and ".join(given) if given else "none of them"
        raise UserError(f"Give PROMPT, --messages or --body, one of them; {have} was given.")
    fields = {name: value for name, value in sampling.items() if value is not None}
    if body is not None:
        set_too = [f"--{name.replace('_', '-')}" for name in fields]
        set_too += ["--completion"] if completion else []
        if set_too:
            raise UserError(f"--body is sent as it is; put {set_too[0]} into it.")
        return _body(body)
    if messages is not None:
        if completion:
            raise UserError("--messages is a chat; leave --completion out.")
        return {"messages": _conversation(messages), **fields}
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise UserError("The prompt is empty; expected at least one character.")
    if completion:
        return {"prompt": text, **fields}
    return {"messages": [{"role": "user", "content": text}], **fields}


def _body(text: str) -> dict[str, Any]:
    is_json = text.lstrip().startswith("{")
    value = _parsed(text if is_json else _read(Path(text), "--body"), "--body")
    if not isinstance(value, dict) or ("messages" in value) == ("prompt" in value):
        raise UserError('--body needs "messages" (a chat) or "prompt" (a completion), one of both.')
    if "stream" in value:
        raise UserError('--body has "stream"; leave it out, --stream and --no-stream set it.')
    return value


def _conversation(path: Path) -> list[dict[str, Any]]:
    value = _parsed(_read(path, "--messages"), "--messages")
    if isinstance(value, dict):
        value = value.get("messages")
    every = value if isinstance(value, list) else []
    if every and all(isinstance(one, dict) and "role" in one for one in every):
        return every
    raise UserError(
        f"--messages {str(path)!r} is no conversation; expected a JSON array like "
        '[{"role": "user", "content": "Hello"}].'
    )


def _read(path: Path, flag: str) -> str:
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(f"{flag} is {str(path)!r}, which is not readable: {reason}.") from None


def _parsed(text: str, flag: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{flag} is not JSON: {error}.") from None


# ---- the answer ----


class _AnswerPrinter:
    """Print the first choice of an answer as it comes, the other choices at the end."""

    def __init__(self, output_format: OutputFormat) -> None:
        self._is_text = output_format is OutputFormat.TEXT
        self._start = time.perf_counter()
        self._first_s: float | None = None
        self._reasons = False  # reasoning was the last thing written
        self._ends_line = True  # standard output is at the beginning of a line

    def event(self, event: AnswerEvent) -> None:
        """Show an event of a stream."""
        if not self._is_text:
            print(json.dumps(event.body), flush=True)
        for choice in event.choices:
            if choice.reasoning or choice.text:
                self._first_s = self._first_s or time.perf_counter() - self._start
            if self._is_text and choice.index == 0:
                self._write_reasoning(choice.reasoning)
                self._write(choice.text)

    def whole(self, answer: Completion) -> None:
        """Show an answer that came in one piece."""
        if not self._is_text:
            print(json.dumps(answer.body))
        elif 0 in answer.texts:
            self._write(answer.texts[0])

    def _write_reasoning(self, text: str) -> None:
        if text:
            print(dim(printable(text), sys.stderr), end="", file=sys.stderr, flush=True)
            self._reasons = True

    def _write(self, text: str) -> None:
        if not text:
            return
        if self._reasons:
            print(file=sys.stderr)
            self._reasons = False
        shown = safe(text, sys.stdout)
        print(shown, end="", flush=True)
        self._ends_line = shown.endswith("\n")

    def end(self, answer: Completion) -> None:
        """Show the other choices, and the time, tokens and drafts of the answer."""
        if self._is_text:
            self._end_lines()
            for index in sorted(set(answer.texts) - {0}):
                text = answer.texts[index]
                print(f"=== {index + 1}\n{safe(text, sys.stdout)}")
        print(self._summary(answer), file=sys.stderr)

    def _end_lines(self) -> None:
        if self._reasons:
            print(file=sys.stderr)
        if not self._ends_line:
            print(flush=True)

    def _summary(self, answer: Completion) -> str:
        seconds = time.perf_counter() - self._start
        first = f"{self._first_s:.2f} s to the first text, " if self._first_s is not None else ""
        parts = [*_usage(answer.usage), f"{first}{seconds:.2f} s in all"]
        if reasons := sorted(set(answer.finish_reasons.values())):
            parts.append(f"ended by {', '.join(reasons)}")
        if answer.variant:
            parts.append(f"variant {answer.variant}")
        return printable("; ".join(parts))


def _usage(usage: Mapping[str, Any]) -> list[str]:
    """Describe the tokens and drafts that the container counted."""
    parts = []
    if "completion_tokens" in usage:
        parts.append(f"{usage.get('prompt_tokens', 0)} + {usage['completion_tokens']} tokens")
    drafts = usage.get("speculation") or {}
    if drafts.get("num_drafts"):
        length = f"{drafts.get('acceptance_length', 0):.2f}"
        parts.append(f"acceptance length {length} over {drafts['num_drafts']} drafts")
    elif drafts:
        parts.append("nothing drafted")
    return parts
