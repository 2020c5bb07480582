"""What one API key may use: the arithmetic against a simple model, then a real server."""

import socket
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.errors import UserError
from peagle.serving.config import ServerConfig
from peagle.serving.errors import ApiError
from peagle.serving.keys import ApiKeys, Lease, QuotaMiddleware, Quotas
from peagle.serving.metrics import Metrics
from serving.asgi import JSON, echo, guard
from serving.live import KEYS, LiveServer, wait_for

# ---- the arithmetic ----


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class ModelBucket:
    """As it is defined: exact, worked out anew from everything that ever happened."""

    size: int
    taken: list[tuple[Fraction, int]] = field(default_factory=list)

    def level(self, now: Fraction) -> Fraction:
        level, at = Fraction(self.size), Fraction(1000)
        for when, amount in [*self.taken, (now, 0)]:
            level = min(Fraction(self.size), level + (when - at) * self.size / 60)
            level, at = min(Fraction(self.size), level - amount), when
        return level


# With these numbers floats are exact.
STEP = st.tuples(
    st.sampled_from(["wait", "open", "reserve", "settle", "close"]),
    st.integers(0, 300),
)


@given(
    requests=st.none() | st.sampled_from([60, 120]),
    tokens=st.none() | st.sampled_from([60, 240]),
    most=st.none() | st.integers(1, 3),
    steps=st.lists(STEP, max_size=60),
)
def test_as_the_model_says(requests, tokens, most, steps):
    clock = Clock()
    quotas = Quotas(
        requests_per_minute=requests, tokens_per_minute=tokens, concurrency=most, clock=clock
    )
    model_requests = ModelBucket(requests) if requests else None
    model_tokens = ModelBucket(tokens) if tokens else None
    leases: list[tuple[Lease, list[int]]] = []
    for kind, number in steps:
        now = Fraction(clock.now)
        if kind == "wait":
            clock.now += number / 8
        elif kind == "open":
            fits = most is None or len(leases) < most
            fits &= model_requests is None or model_requests.level(now) >= 1
            try:
                lease = quotas.open(b"key")
            except ApiError as error:
                assert not fits and error.status == 429
            else:
                assert fits
                leases.append((lease, []))
                if model_requests:
                    model_requests.taken.append((now, 1))
        elif leases:
            lease, reserved = leases[number % len(leases)]
            if kind == "reserve" and not reserved:
                amount = number + 1
                try:
                    lease.reserve(amount)
                except ApiError as error:
                    assert model_tokens is not None
                    assert model_tokens.level(now) < amount
                    assert error.status == (400 if amount > model_tokens.size else 429)
                else:
                    assert model_tokens is None or model_tokens.level(now) >= amount
                    reserved.append(amount)
                    if model_tokens:
                        model_tokens.taken.append((now, amount))
            elif kind == "settle" and reserved:
                used = number % (reserved[0] + 1)
                lease.settle(used)
                if model_tokens:
                    model_tokens.taken.append((now, used - reserved[0]))
                leases.remove((lease, reserved))
                lease.close()
            elif kind == "close" and not reserved:
                lease.settle(number)  # nothing was reserved: nothing happens
                leases.remove((lease, reserved))
                lease.close()
        now = Fraction(clock.now)
        if leases:
            account = leases[0][0].account
            assert account is not None and account.num_open == len(leases)
            left = account.headers(clock.now)
            for name, model in (("requests", model_requests), ("tokens", model_tokens)):
                if model is not None:
                    assert int(left[f"x-ratelimit-remaining-{name}"]) == int(model.level(now))


@given(
    size=st.integers(1, 1000),
    asks=st.lists(st.tuples(st.floats(0, 30), st.integers(1, 400)), min_size=1, max_size=40),
)
def test_no_time_gives_more_than_its_share(size, asks):
    """Whatever a key asks for, in any t seconds it gets at most size x (1 + t / 60) tokens."""
    clock = Clock()
    quotas = Quotas(tokens_per_minute=size, clock=clock)
    got: list[tuple[float, int]] = []
    for pause, amount in asks:
        clock.now += pause
        try:
            quotas.open(b"key").reserve(amount)
        except ApiError as error:
            if error.status == 429:
                # Whoever waits as told is served, if nobody else comes.
                clock.now += int(error.headers["Retry-After"])
                quotas.open(b"key").reserve(amount)
                got.append((clock.now, amount))
        else:
            got.append((clock.now, amount))
    for i, (begin, _) in enumerate(got):
        total = 0
        for end, amount in got[i:]:
            total += amount
            assert total <= size * (1 + (end - begin) / 60) + 1e-6


def test_a_key_knows_nothing_of_the_others():
    quotas = Quotas(requests_per_minute=1, tokens_per_minute=10, concurrency=1, clock=Clock())
    quotas.open(b"a").reserve(10)
    with pytest.raises(ApiError):
        quotas.open(b"a")
    quotas.open(b"b").reserve(10)


def test_without_limits_nothing_is_held_back():
    assert Quotas.of(ServerConfig(), has_keys=False) is None
    lease = Lease()
    lease.reserve(10**12)
    lease.settle(1)
    lease.close()


def test_limits_need_keys():
    config = ServerConfig(key_tokens_per_minute=5)
    assert Quotas.of(config, has_keys=True) is not None
    with pytest.raises(UserError, match=r"--key-tokens-per-minute is 5.*PEAGLE_API_KEY"):
        Quotas.of(config, has_keys=False)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3"])
@pytest.mark.parametrize("name", ["requests_per_minute", "tokens_per_minute", "concurrency"])
def test_limits_are_counts(name, value):
    with pytest.raises(UserError, match=f"key_{name} is .*at least 1"):
        ServerConfig(**{f"key_{name}": value})


# ---- the middleware ----


def test_a_refusal_reads_no_body_and_is_counted():
    metrics, keys = Metrics("m"), ApiKeys(["k" * 20])
    read: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        read.append(True)
        await echo(scope, receive, send)

    quotas = Quotas(requests_per_minute=1, clock=Clock())
    server = guard(QuotaMiddleware(app, quotas, metrics), keys=keys)
    headers = {"authorization": "Bearer " + "k" * 20, **JSON}
    first = server("POST", headers=headers, body=b"{}")
    assert first.status == 200 and first.headers["x-ratelimit-remaining-requests"] == "0"
    second = server("POST", headers=headers, body=b"{}")
    assert second.status == 429 and len(read) == 1
    assert second.error["type"] == "rate_limit_error"
    assert second.error["code"] == "rate_limit_exceeded" and second.error["param"] is None
    assert second.headers["retry-after"] == "60"
    assert second.headers["x-ratelimit-reset-requests"] == "60.000s"
    assert (
        b'peagle:request_failure_total{model_name="m",reason="refused"} 1.0'
        in (metrics.render()[0])
    )
    assert server("GET", headers=headers).status == 200  # reading is free
    # A key that is none has no account.
    assert server("POST", headers={**headers, "authorization": "Bearer x"}).status == 401


@pytest.mark.parametrize("when", ["before the answer", "within it"])
def test_an_answer_that_fails_frees_its_place(when):
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if when == "within it":
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError

    quotas = Quotas(concurrency=1)
    server = guard(QuotaMiddleware(app, quotas, Metrics("m")), keys=ApiKeys(["k" * 20]))
    headers = {"authorization": "Bearer " + "k" * 20, **JSON}
    for _ in range(2):
        with pytest.raises(RuntimeError):
            server("POST", headers=headers, body=b"{}")


# ---- a server ----

COMPLETIONS = "/v1/completions"


def refusal(response: httpx.Response) -> str:
    """What a 429 says; it has the form that OpenAI's clients know."""
    assert response.status_code == 429, response.text
    error = response.json()["error"]
    assert error["code"] == "rate_limit_exceeded" and error["type"] == "rate_limit_error"
    assert int(response.headers["retry-after"]) >= 1
    return error["message"]


def test_requests_of_a_key(strict):
    with strict.as_holder(KEYS[0]) as client, strict.as_holder(KEYS[1]) as other:
        for left in (4, 3, 2, 1, 0):
            answer = client.post("/tokenize", json={"prompt": "x"})
            assert answer.status_code == 200
            assert answer.headers["x-ratelimit-limit-requests"] == "5"
            assert int(answer.headers["x-ratelimit-remaining-requests"]) >= left
        answer = client.post("/tokenize", json={"prompt": "x"})
        assert "5 requests a minute (--key-requests-per-minute)" in refusal(answer)
        assert client.get("/v1/models").status_code == 200
        assert other.post("/tokenize", json={"prompt": "x"}).status_code == 200
    assert not any(key in strict.text for key in KEYS)


def test_tokens_of_a_key(strict):
    body = {"prompt": "def f(", "temperature": 0}
    with strict.as_holder(KEYS[2]) as client:
        # What an answer does not use comes back when it ends.
        answer = client.post(COMPLETIONS, json={**body, "max_tokens": 900, "stop": ["\n"]})
        assert answer.status_code == 200, answer.text
        used = answer.json()["usage"]["total_tokens"]
        assert used < 500
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) >= 1000 - used
        # While it runs, the most that it may use is gone.
        long = {**body, "max_tokens": 900 - used, "ignore_eos": True, "stream": True}
        with client.stream("POST", COMPLETIONS, json=long) as stream:
            assert stream.status_code == 200
            answer = client.post(COMPLETIONS, json={**body, "max_tokens": 980})
            message = refusal(answer)
        assert "1000 tokens a minute (--key-tokens-per-minute)" in message
        # Waiting does not help here.
        answer = client.post(COMPLETIONS, json={**body, "max_tokens": 1200})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "max_tokens"
        assert "retry-after" not in answer.headers


def begin(server: LiveServer, key: str) -> socket.socket:
    """A request whose body does not come, so that it is under way until its client leaves."""
    url = httpx.URL(server.url)
    connection = socket.create_connection((url.host, url.port), 60)
    connection.sendall(
        f"POST /tokenize HTTP/1.1\r\nHost: {url.host}\r\nAuthorization: Bearer {key}\r\n"
        "Content-Type: application/json\r\nContent-Length: 99\r\n\r\n{".encode()
    )
    return connection


def test_concurrency_of_a_key(strict):
    with strict.as_holder(KEYS[3]) as client:
        first, second = begin(strict, KEYS[3]), begin(strict, KEYS[3])
        with first, second:
            client.get("/v1/models")  # by now the server has read what the others sent
            answer = client.post("/tokenize", json={"prompt": "x"})
            assert "expected at most 2 at a time (--key-concurrency)" in refusal(answer)
        # Leaving frees both places; a refusal takes nothing of the key's requests.
        wait_for(lambda: client.post("/tokenize", json={"prompt": "x"}).status_code == 200)
