"""Lines of an endpoint's containers out of CloudWatch Logs."""

import itertools
from datetime import UTC, datetime, timedelta

import pytest

from deploy.operating import put_log
from peagle.deploy import logs
from peagle.errors import UserError

NOW = datetime.now(UTC)
START_MS = round((NOW - timedelta(minutes=30)).timestamp() * 1000)


def at(minutes: float) -> datetime:
    return NOW - timedelta(minutes=minutes)


def test_lines_of_all_instances_in_order(aws):
    put_log(aws, "AllTraffic/i-1", (at(40), "too old"), (at(20), "one\n"), (at(10), "three"))
    put_log(aws, "AllTraffic/i-2", (at(15), "two"))
    found = list(logs.read(aws.clients(), "code", START_MS))
    assert [line.text for line in sorted(found, key=lambda line: line.time_ms)] == [
        "one",
        "two",
        "three",
    ]
    first = found[0]
    assert first.stream == "AllTraffic/i-1"
    assert datetime.fromisoformat(first.time) == at(20).replace(
        microsecond=at(20).microsecond // 1000 * 1000
    ) or abs(datetime.fromisoformat(first.time) - at(20)) < timedelta(milliseconds=1)


def test_what_is_asked_of_cloudwatch(aws):
    put_log(aws, "blue/i-1", (at(5), "ERROR: no"), (at(4), "fine"))
    clients = aws.clients()
    found = list(logs.read(clients, "code", START_MS, variant="blue", pattern="ERROR"))
    assert [line.text for line in found] == ["ERROR: no"]
    asked = aws.calls[-1].parameters
    assert asked["logGroupName"] == "/aws/sagemaker/Endpoints/code"
    assert (asked["logStreamNamePrefix"], asked["filterPattern"]) == ("blue/", "ERROR")


def test_all_pages_are_read():
    class Pages:
        """Clients of a log in three pages, one of them empty, as CloudWatch may have them."""

        def __init__(self) -> None:
            self.tokens = []

        def request(self, service: str, operation: str, **asked):
            self.tokens.append(asked.get("nextToken"))
            number = len(self.tokens)
            event = {"timestamp": number, "message": str(number), "logStreamName": "s"}
            events = [] if number == 2 else [{**event, "eventId": str(number)}]
            return {"events": events, **({"nextToken": f"t{number}"} if number < 3 else {})}

    pages = Pages()
    assert [line.text for line in logs.read(pages, "code", 0)] == ["1", "3"]
    assert pages.tokens == [None, "t1", "t2"]


def test_following_shows_each_line_once_and_late_ones_too(aws):
    clients = aws.clients()
    coming = logs.follow(clients, "code", START_MS)
    assert next(coming) is None  # no log yet: it is waited for
    put_log(aws, "AllTraffic/i-1", (at(2), "one"))
    line = next(coming)
    assert line is not None and line.text == "one"
    # CloudWatch shows the older one only now.
    put_log(aws, "AllTraffic/i-2", (at(2.2), "late"), (at(1), "two"))
    texts = [line.text for line in itertools.islice(coming, 8) if line is not None]
    assert sorted(texts) == ["late", "two"]
    assert clients.clock.now() > 0  # it waited in between


def test_no_log_yet_is_clear(aws):
    with pytest.raises(
        UserError, match=r"no log of endpoint 'code'.*peagle deploy sagemaker status"
    ):
        list(logs.read(aws.clients(), "code", 0))


@pytest.mark.parametrize("kind", ["access denied", "throttling", "time-out before"])
def test_faults_of_aws(aws, kind):
    put_log(aws, "AllTraffic/i-1", (at(2), "one"))
    aws.fail(kind, "FilterLogEvents")
    with pytest.raises(UserError):
        list(logs.read(aws.clients(retries={"total_max_attempts": 1}), "code", START_MS))


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("2h", 7200), (" 1d ", 86400)]
)
def test_spans_of_time(text, seconds):
    assert logs.seconds_ago(text) == seconds


@pytest.mark.parametrize("text", ["", "10", "m", "-1m", "1w", "0m", "1.5h", "10m2s"])
def test_what_is_no_span_of_time(text):
    with pytest.raises(UserError, match="--since is"):
        logs.seconds_ago(text)
