"""Lines that the containers of an endpoint wrote, from CloudWatch Logs.

SageMaker keeps standard output and error of an endpoint's containers in the log group
/aws/sagemaker/Endpoints/NAME, with a stream VARIANT/INSTANCE for each instance
("Logging with CloudWatch" of SageMaker's developer guide).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from peagle.deploy.aws import Clients, call_errors, error_code, explain
from peagle.errors import UserError

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_POLL_S = 3.0
# CloudWatch may show an event after later ones, so `follow` reads this much time twice.
_OVERLAP_MS = 30_000


class NoLogYet(UserError):
    """The endpoint has no log group."""


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a container.

    Attributes:
        time_ms: milliseconds since 1970.
        stream: log stream of the instance, "AllTraffic/i-0123456789abcdef0".
        text: text of the line.
        id: of CloudWatch's event.
    """

    time_ms: int
    stream: str
    text: str
    id: str = ""

    @property
    def time(self) -> str:
        """Return the time in UTC, ISO 8601 with milliseconds."""
        moment = datetime.fromtimestamp(self.time_ms / 1000, UTC)
        return moment.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def group_of(endpoint: str) -> str:
    """Return the name of the log group of an endpoint."""
    return f"/aws/sagemaker/Endpoints/{endpoint}"


def seconds_ago(text: str, flag: str = "--since") -> float:
    """Return a time span like 90s, 10m, 2h or 1d in seconds; UserError for other text."""
    match = re.fullmatch(r"(\d{1,6})([smhd])", text.strip())
    if match is None or int(match[1]) == 0:
        raise UserError(f"{flag} is {text!r}; expected a time span like 10m, 2h or 1d.")
    return float(int(match[1]) * _UNITS_S[match[2]])


def read(
    clients: Clients,
    endpoint: str,
    since_ms: int,
    *,
    until_ms: int | None = None,
    variant: str = "",
    pattern: str = "",
) -> Iterator[LogLine]:
    """Yield the lines of a time span, the oldest first.

    Args:
        clients: of AWS.
        endpoint: its name.
        since_ms, until_ms: milliseconds since 1970; None for `until_ms` is now.
        variant: "" reads all variants.
        pattern: a filter pattern of CloudWatch Logs; "" matches everything.

    Raises:
        NoLogYet: the endpoint has no log.
        UserError: AWS refused.
    """
    query: dict[str, Any] = {"logGroupName": group_of(endpoint), "startTime": since_ms}
    if until_ms is not None:
        query["endTime"] = until_ms
    if variant:
        query["logStreamNamePrefix"] = f"{variant}/"
    if pattern:
        query["filterPattern"] = pattern
    while True:
        try:
            answer = clients.request("logs", "FilterLogEvents", **query)
        except call_errors() as error:
            if error_code(error) != "ResourceNotFoundException":
                raise explain(error) from None
            raise NoLogYet(
                f"There is no log of endpoint {endpoint!r}: a container's first line makes the "
                f"group {query['logGroupName']}. Check whether the endpoint exists and how far it "
                f"is (peagle deploy sagemaker status {endpoint}), and whether its role may write "
                "logs (logs:CreateLogGroup, logs:CreateLogStream, logs:PutLogEvents)."
            ) from None
        for event in answer.get("events", ()):
            text = event.get("message", "").rstrip("\n")
            stream = event.get("logStreamName", "")
            yield LogLine(event.get("timestamp", 0), stream, text, event.get("eventId", ""))
        if not answer.get("nextToken"):
            return
        query["nextToken"] = answer["nextToken"]


def follow(
    clients: Clients, endpoint: str, since_ms: int, *, variant: str = "", pattern: str = ""
) -> Iterator[LogLine | None]:
    """Yield lines as they come, without end; None after each look, also before there is a log.

    Arguments and errors are as of `read`.
    """
    seen: dict[str, int] = {}
    start_ms = since_ms
    while True:
        try:
            for line in read(clients, endpoint, start_ms, variant=variant, pattern=pattern):
                if line.id not in seen:
                    seen[line.id] = line.time_ms
                    yield line
        except NoLogYet:
            pass
        start_ms = max([start_ms, *(time_ms - _OVERLAP_MS for time_ms in seen.values())])
        seen = {id: time_ms for id, time_ms in seen.items() if time_ms >= start_ms}
        yield None
        clients.clock.sleep(_POLL_S)
