"""What the containers of an endpoint wrote, from CloudWatch Logs.

SageMaker keeps standard output and error of an endpoint's containers in the log group
/aws/sagemaker/Endpoints/NAME, a stream for each instance called VARIANT/INSTANCE
("Logging with CloudWatch" of SageMaker's developer guide).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from peagle.deploy import aws_errors
from peagle.deploy.aws import Clients
from peagle.errors import UserError

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_POLL_S = 3.0
# CloudWatch may show an event only after later ones: so much is read twice.
_LATE_MS = 30_000


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a container.

    Attributes:
        time_ms: when it was written, milliseconds since 1970.
        stream: of the instance, "AllTraffic/i-0123456789abcdef0".
        text: of the line.
        id: of CloudWatch's event.
    """

    time_ms: int
    stream: str
    text: str
    id: str = ""

    @property
    def time(self) -> str:
        """Time in UTC, ISO 8601 with milliseconds."""
        moment = datetime.fromtimestamp(self.time_ms / 1000, UTC)
        return moment.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def group_of(endpoint: str) -> str:
    """The log group of an endpoint."""
    return f"/aws/sagemaker/Endpoints/{endpoint}"


def seconds_ago(text: str, flag: str = "--since") -> float:
    """A time span like 90s, 10m, 2h or 1d in seconds.

    Raises:
        UserError: it is none.
    """
    match = re.fullmatch(r"(\d{1,6})([smhd])", text.strip())
    if match is None or not int(match[1]):
        raise UserError(f"{flag} is {text!r}; expected a span of time, like 10m, 2h or 1d.")
    return float(int(match[1]) * _UNITS_S[match[2]])


def read(
    clients: Clients,
    endpoint: str,
    since_ms: int,
    *,
    until_ms: int | None = None,
    variant: str = "",
    pattern: str = "",
) -> Iterator[Line]:
    """Lines of a time, the oldest first.

    Args:
        clients: of AWS.
        endpoint: its name.
        since_ms, until_ms: milliseconds since 1970; until None, up to now.
        variant: only of this one; "" is all.
        pattern: a filter pattern of CloudWatch Logs; "" is everything.

    Raises:
        UserError: there is no log yet, or AWS refused.
    """
    asked: dict[str, Any] = {"logGroupName": group_of(endpoint), "startTime": since_ms}
    if until_ms is not None:
        asked["endTime"] = until_ms
    if variant:
        asked["logStreamNamePrefix"] = f"{variant}/"
    if pattern:
        asked["filterPattern"] = pattern
    while True:
        try:
            answer = clients.request("logs", "FilterLogEvents", **asked)
        except Exception as error:
            raise _explained(error, endpoint) from None
        for event in answer.get("events", ()):
            text = event.get("message", "").rstrip("\n")
            stream = event.get("logStreamName", "")
            yield Line(event.get("timestamp", 0), stream, text, event.get("eventId", ""))
        if not answer.get("nextToken"):
            return
        asked["nextToken"] = answer["nextToken"]


def follow(
    clients: Clients, endpoint: str, since_ms: int, *, variant: str = "", pattern: str = ""
) -> Iterator[Line | None]:
    """Lines as they come, without end; None whenever there was nothing new for a while.

    Arguments and errors as `read`; a log that is not there yet is waited for.
    """
    seen: dict[str, int] = {}
    start_ms = since_ms
    while True:
        try:
            for line in read(clients, endpoint, start_ms, variant=variant, pattern=pattern):
                if line.id in seen:
                    continue
                seen[line.id] = line.time_ms
                yield line
        except NoLogYet:
            pass
        start_ms = max([start_ms, *(time_ms - _LATE_MS for time_ms in seen.values())])
        seen = {id: time_ms for id, time_ms in seen.items() if time_ms >= start_ms}
        yield None
        clients.clock.sleep(_POLL_S)


class NoLogYet(UserError):
    """The endpoint has no log group."""


def _explained(error: Exception, endpoint: str) -> UserError:
    from botocore.exceptions import BotoCoreError, ClientError

    if aws_errors.code(error) == "ResourceNotFoundException":
        return NoLogYet(
            f"There is no log of endpoint {endpoint!r}: the group {group_of(endpoint)} comes with "
            "the first line of a container. See whether the endpoint exists and how far it is "
            f"(peagle deploy sagemaker status {endpoint}), and whether its role may write logs "
            "(logs:CreateLogGroup, logs:CreateLogStream, logs:PutLogEvents)."
        )
    if isinstance(error, BotoCoreError | ClientError):
        return aws_errors.explain(error)
    raise error
