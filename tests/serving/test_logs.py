"""Log records: their form, what they leave out, and how many of a kind are written."""

import io
import json
import logging
import re
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.errors import UserError
from peagle.serving.logs import (
    MAX_IN_WINDOW,
    JsonFormatter,
    RateLimitedHandler,
    TextFormatter,
    configure_logging,
)

SECRET = "my diagnosis is"
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


def record(message: str = "hello", error: BaseException | None = None, **extra: Any):
    made = logging.makeLogRecord(
        {"name": "peagle.serving", "levelno": 20, "levelname": "INFO", "msg": message, **extra}
    )
    if error is not None:
        made.exc_info = (type(error), error, error.__traceback__)
    return made


def as_json(*args: Any, **extra: Any) -> dict[str, Any]:
    line = JsonFormatter().format(record(*args, **extra))
    assert len(line.splitlines()) == 1
    return json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def raised(message: str) -> ValueError:
    try:
        raise ValueError(message)
    except ValueError as error:
        return error


# ---- logs ----


def test_a_json_line(capsys):
    configure_logging("json", "info")
    logger = logging.getLogger("peagle.serving.app")
    logger.info("%s answered", "request", extra={"request_id": "r1", "status": 200, "seconds": 0.5})
    logger.debug("too much detail")
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    fields = json.loads(line)
    when = datetime.fromisoformat(fields.pop("time"))
    assert when.utcoffset() == timedelta(0)
    assert abs(datetime.now(UTC) - when) < timedelta(minutes=1)
    assert fields == {
        "level": "info",
        "logger": "peagle.serving.app",
        "message": "request answered",
        "request_id": "r1",
        "status": 200,
        "seconds": 0.5,
    }
    assert out == ""


def test_a_text_line(capsys):
    configure_logging("text", "WARNING")
    extra = {"request_id": "r1", "seconds": 0.5, "path": "/v1/completions", "why": "no room"}
    logging.getLogger("peagle.serving").warning("refused", extra=extra)
    when, _, rest = capsys.readouterr().err.partition(" ")
    assert TIME.fullmatch(when)
    assert rest == (
        "WARNING peagle.serving: refused request_id=r1 seconds=0.5 path=/v1/completions "
        'why="no room"\n'
    )


def test_the_last_configuration_holds(capsys):
    configure_logging("text", "debug")
    configure_logging("json", "error")
    logging.getLogger("peagle.serving").warning("no")
    logging.getLogger("peagle.serving").error("yes")
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "yes"


def test_uvicorn_and_opentelemetry_write_the_same_lines(capsys):
    import uvicorn

    configure_logging("json", "info")
    uvicorn.Config("nothing:app", log_config=None, log_level=None)
    # The arguments that uvicorn gives, color_message among them.
    logging.getLogger("uvicorn.error").info(
        "Started server process [%d]", 7, extra={"color_message": "Started \x1b[36m%d\x1b[0m"}
    )
    logging.getLogger("uvicorn.access").info(
        '%s - "%s %s HTTP/%s" %d', "127.0.0.1:5", "GET", "/health", "1.1", 200
    )
    logging.getLogger("opentelemetry.sdk._shared_internal").warning("Queue full, dropping Span.")
    out, err = capsys.readouterr()
    first, second, third = map(json.loads, err.splitlines())
    assert first["message"] == "Started server process [7]"
    assert first.keys() == {"time", "level", "logger", "message"}
    assert second["message"] == '127.0.0.1:5 - "GET /health HTTP/1.1" 200'
    assert third["level"] == "warning"
    assert out == ""


@pytest.mark.parametrize("name", ["peagle.serving", "uvicorn.error", "uvicorn.access"])
def test_a_record_is_written_once(capsys, caplog, name):
    # caplog has a handler at the root, as a library's basicConfig would put there.
    configure_logging("text", "info")
    logging.getLogger(name).info("once")
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert caplog.records == []


@pytest.mark.parametrize("args", [("xml", "info"), ("json", "loud"), ("json", "notset")])
def test_unknown_formats_and_levels(args):
    bad = args[0] if args[0] != "json" else args[1]
    with pytest.raises(UserError, match=f"{bad}.*expected"):
        configure_logging(*args)


ANY_TEXT = st.text(st.characters())  # surrogates too


@given(ANY_TEXT, ANY_TEXT)
def test_no_value_can_forge_a_line(message, value):
    fields = as_json(message, path=value, engine={value: [value]})
    assert fields["message"] == message
    assert fields["path"] == value
    text = TextFormatter().format(record(message, path=value, engine={value: [value]}))
    assert text.isprintable() and len(text.splitlines()) == 1
    text.encode()  # a surrogate would not


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\x0b", "\x85", "\u2028", "\x1b[2K\r"])
def test_an_exception_cannot_forge_a_line(end):
    forged = "2026-01-01T00:00:00.000Z INFO peagle.serving: forged"
    error = raised(f"bad{end}{forged}")
    head, *rest = TextFormatter().format(record("failed", error)).splitlines()
    assert head.endswith("peagle.serving: failed")
    assert all(line.startswith("    ") for line in rest)
    assert any("Traceback" in line for line in rest) and any("raised" in line for line in rest)
    fields = as_json("failed", error)
    assert fields["message"] == "failed"
    assert fields["exception"].startswith("Traceback") and forged in fields["exception"]


@pytest.mark.parametrize("name", ["prompt", "messages", "text", "output", "prompt_token_ids"])
def test_what_users_and_models_write_is_left_out(name):
    extras: tuple[dict[str, Any], ...] = (
        {name: SECRET},
        {name: [{"role": "user", "content": SECRET}]},
        {"request": {"inner": [{name: SECRET}]}},
    )
    for extra in extras:
        for formatter in (JsonFormatter(), TextFormatter()):
            line = formatter.format(record("done", **extra, status=200))
            assert SECRET not in line and "not logged" in line and "200" in line


def test_what_users_write_is_there_where_it_is_asked_for():
    asked = {"prompt": SECRET, "output": ["a\nb"]}
    assert as_json("done", log_prompts=asked)["log_prompts"] == asked
    assert SECRET in TextFormatter().format(record("done", log_prompts=asked))


def test_extra_fields_do_not_replace_those_of_the_record():
    fields = as_json("hello", time="yesterday", level="fatal", logger="other", engine=1)
    assert TIME.fullmatch(fields["time"])
    assert (fields["level"], fields["logger"], fields["engine"]) == ("info", "peagle.serving", 1)


def test_values_that_json_does_not_know():
    fields = as_json("x", a=float("nan"), b=float("inf"), c=Path("/p"), d=(1, None), e={2: True})
    found = {name: fields[name] for name in "abcde"}
    assert found == {"a": "nan", "b": "inf", "c": "/p", "d": [1, None], "e": {"2": True}}


# ---- the limit of lines ----

NAME = "peagle.test_log_rate"


def logger_to(handler: logging.Handler) -> logging.Logger:
    logger = logging.getLogger(NAME)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    logger.handlers = [handler]
    return logger


def test_what_is_left_out_is_counted() -> None:
    stream = io.StringIO()
    handler = RateLimitedHandler(stream, window_s=3600)
    logger = logger_to(handler)
    for number in range(1000):
        logger.info("refused %d", number, extra={"status": 401})
    logger.info("refused %d", 1000, extra={"status": 500})
    logger.error("refused %d", 1001, extra={"status": 401})
    handler.close()
    *lines, last = stream.getvalue().splitlines()
    assert lines == [f"refused {n}" for n in [*range(MAX_IN_WINDOW), 1000, 1001]]
    assert last == f"left out {1000 - MAX_IN_WINDOW} more lines like: refused %d (status 401)"


def test_the_count_is_told_though_nothing_else_is_logged() -> None:
    stream = io.StringIO()
    logger = logger_to(RateLimitedHandler(stream, window_s=0.2))
    logger.info("first")  # the window begins
    for _ in range(MAX_IN_WINDOW + 7):
        logger.info("again")
    left_out = []
    end = time.monotonic() + 30
    while sum(left_out) + stream.getvalue().count("again\n") < MAX_IN_WINDOW + 7 + len(left_out):
        assert time.monotonic() < end
        time.sleep(0.05)
        left_out = [int(n) for n in re.findall(r"left out (\d+)", stream.getvalue())]


def test_after_the_window_the_lines_come_again() -> None:
    stream = io.StringIO()
    handler = RateLimitedHandler(stream, window_s=0.2)
    logger = logger_to(handler)
    for _ in range(MAX_IN_WINDOW + 1):
        logger.info("first")
    time.sleep(0.5)
    logger.info("second")
    assert stream.getvalue().endswith("second\n")
    logger.info("first")
    assert stream.getvalue().endswith("second\nfirst\n")


def test_each_answered_request_keeps_its_line() -> None:
    stream = io.StringIO()
    logger = logger_to(RateLimitedHandler(stream))
    for _ in range(10 * MAX_IN_WINDOW):
        logger.info("done", extra={"status": 200})
    assert stream.getvalue().count("\n") == 10 * MAX_IN_WINDOW


@pytest.mark.parametrize("count", [300, 3000])
def test_failing_accepts_write_little(count: int) -> None:
    """As asyncio says it when files run out: a traceback each time."""
    stream = io.StringIO()
    handler = RateLimitedHandler(stream, window_s=3600)
    handler.setFormatter(JsonFormatter())
    logger = logger_to(handler)
    for number in range(count):
        try:
            raise OSError(24, "Too many open files")
        except OSError as error:
            text = f"socket.accept() out of system resource\nsocket: <socket fd={number}>"
            logger.error(text, exc_info=error)
    handler.close()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert len(lines) == MAX_IN_WINDOW + 1
    assert lines[-1]["level"] == "error"
    assert lines[-1]["message"].startswith(f"left out {count - MAX_IN_WINDOW} more lines")
