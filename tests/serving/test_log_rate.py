"""A flood of one kind of record writes few lines, and none is lost without being counted."""

from __future__ import annotations

import io
import json
import logging
import re
import time

import pytest

from peagle.serving.log_rate import MOST_IN_WINDOW, RateLimitedHandler
from peagle.serving.telemetry import JsonFormatter

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
    assert lines == [f"refused {n}" for n in [*range(MOST_IN_WINDOW), 1000, 1001]]
    assert last == f"left out {1000 - MOST_IN_WINDOW} more lines like: refused %d (status 401)"


def test_the_count_is_told_though_nothing_else_is_logged() -> None:
    stream = io.StringIO()
    logger = logger_to(RateLimitedHandler(stream, window_s=0.2))
    logger.info("first")  # the window begins
    for _ in range(MOST_IN_WINDOW + 7):
        logger.info("again")
    left_out = []
    end = time.monotonic() + 30
    while sum(left_out) + stream.getvalue().count("again\n") < MOST_IN_WINDOW + 7 + len(left_out):
        assert time.monotonic() < end
        time.sleep(0.05)
        left_out = [int(n) for n in re.findall(r"left out (\d+)", stream.getvalue())]


def test_after_the_window_the_lines_come_again() -> None:
    stream = io.StringIO()
    handler = RateLimitedHandler(stream, window_s=0.2)
    logger = logger_to(handler)
    for _ in range(MOST_IN_WINDOW + 1):
        logger.info("first")
    time.sleep(0.5)
    logger.info("second")
    assert stream.getvalue().endswith("second\n")
    logger.info("first")
    assert stream.getvalue().endswith("second\nfirst\n")


def test_each_answered_request_keeps_its_line() -> None:
    stream = io.StringIO()
    logger = logger_to(RateLimitedHandler(stream))
    for _ in range(10 * MOST_IN_WINDOW):
        logger.info("done", extra={"status": 200})
    assert stream.getvalue().count("\n") == 10 * MOST_IN_WINDOW


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
    assert len(lines) == MOST_IN_WINDOW + 1
    assert lines[-1]["level"] == "error"
    assert lines[-1]["message"].startswith(f"left out {count - MOST_IN_WINDOW} more lines")
