"""A stand-in for AWS on a loopback port, for deployments.

moto holds stacks, models, endpoint configurations, endpoints, secrets and S3. In front of it, under
the same address, is what moto does not know: stacks that take time and fail, and invocations.
Every request is read back by botocore's service models and checked against them.

    with FakeAws() as aws:
        clients = aws.clients()                 # peagle's, with the stand-in's clock
        aws.fail("throttling", "CreateChangeSet")   # the next such call is throttled, once
        aws.stacks.fail_next("UPDATE", "Endpoint", "The container did not become healthy.")
        aws.endpoints.answer_with = lambda invocation: [b"data: ..."]
        aws.calls, aws.holdings()

`aws.clock` only moves when somebody sleeps on it. Leaving the block fails if a request was not
what AWS takes.
"""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from typing import Any
from urllib.parse import urlsplit

import boto3
import moto.backends
from botocore.awsrequest import AWSResponse
from botocore.exceptions import ReadTimeoutError
from moto.applicationautoscaling.models import applicationautoscaling_backends
from moto.cloudwatch.models import cloudwatch_backends
from moto.logs.models import logs_backends
from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    MotoRequestHandler,
    create_backend_app,
)
from moto.s3.models import s3_backends
from moto.sagemaker.models import sagemaker_backends
from moto.secretsmanager.models import secretsmanager_backends
from werkzeug.serving import make_server
from werkzeug.test import create_environ, run_wsgi_app

from deploy.aws_wire import Answer, Request, error_answer, read_request
from deploy.fake_endpoints import FakeEndpoints
from deploy.fake_stacks import FakeStacks, cloudformation_backends
from peagle.deploy.aws import Clients, Clock

# moto reads a folder for every request.
_MODULES = list(moto.backends.list_of_moto_modules())
moto.backends.list_of_moto_modules = lambda: _MODULES

ACCOUNT, REGION = "123456789012", "us-east-1"
ROLE = f"arn:aws:iam::{ACCOUNT}:role/sagemaker-execution"
BUCKET = f"sagemaker-{REGION}-{ACCOUNT}"
# Nobody's: what must appear in no output.
ACCESS_KEY, SECRET_KEY = "AKIAFAKEFAKEFAKEFAKE", "fake/secret/key/that/nobody/may/ever/print+1"


@cache
def _session() -> boto3.Session:
    """One for all: it takes a while to read the service models."""
    return boto3.Session(ACCESS_KEY, SECRET_KEY, region_name=REGION)


# AWS's words: (code, message, status).
KINDS = {
    "throttling": ("ThrottlingException", "Rate exceeded", 400),
    "access denied": (
        "AccessDeniedException",
        "User: arn:aws:iam::123456789012:user/dev is not authorized to perform: {action} on "
        "resource: * because no identity-based policy allows the {action} action",
        400,
    ),
    "validation": ("ValidationException", "1 validation error detected: not like this", 400),
    "quota": (
        "ResourceLimitExceeded",
        "The account-level service limit 'ml.g5.xlarge for endpoint usage' is 0 Instances, with "
        "current utilization of 0 Instances and a request delta of 1 Instances. Please use AWS "
        "Service Quotas to request an increase for this quota.",
        400,
    ),
    "role": (
        "ValidationException",
        "Could not assume role arn:aws:iam::123456789012:role/sagemaker-execution. Please ensure "
        "that the role exists and allows principal "
        "'sagemaker.amazonaws.com' to assume the role.",
        400,
    ),
    "expired": (
        "ExpiredTokenException",
        "The security token included in the request is expired",
        403,
    ),
    "internal": ("InternalFailure", "An internal error occurred", 500),
    # No answer comes; what was asked for is not done, or done.
    "time-out before": ("", "", 0),
    "time-out after": ("", "", 0),
    # Ctrl-C while the call is under way: once, or twice, so that its answer is not awaited.
    "interrupt": ("", "", 0),
    "interrupt twice before": ("", "", 0),
    "interrupt twice after": ("", "", 0),
}
ALWAYS = 1_000_000


@dataclass
class Fault:
    """What goes wrong.

    Attributes:
        kind: of KINDS.
        operation: "CreateModel"; None for every one.
        number: the how-manieth such call from now on, from 1.
        calls: how many calls, from that one on.
        attempts: of each of these calls, so many attempts fail, from the first.
    """

    kind: str
    operation: str | None = None
    number: int = 1
    calls: int = 1
    attempts: int = ALWAYS

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind
        self.seen: list[str] = []

    def hits(self, request: Request) -> bool:
        if self.operation not in (None, request.operation):
            return False
        if request.id not in self.seen:
            self.seen.append(request.id)
        index = self.seen.index(request.id)
        is_meant = self.number - 1 <= index < self.number - 1 + self.calls
        return is_meant and request.attempt <= self.attempts


class FakeClock(Clock):
    """Time that passes when somebody sleeps."""

    __slots__ = ("_lock", "_now")

    def __init__(self) -> None:
        object.__setattr__(self, "_now", 0.0)

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        object.__setattr__(self, "_now", self._now + seconds)


class NoSleep:
    """In place of the module `time` in botocore: retries follow at once."""

    time = staticmethod(time.time)

    @staticmethod
    def sleep(seconds: float) -> None:
        pass


class NoAnswer(Exception):
    """The connection breaks."""


class FakeAws:
    """See the module."""

    def __init__(self, *, clock: Clock | None = None, **durations: float) -> None:
        self.clock = clock or FakeClock()
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.RLock()
        self.session = _session()
        self._durations = durations
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        for backends in (
            sagemaker_backends,
            applicationautoscaling_backends,
            s3_backends,
            logs_backends,
            cloudwatch_backends,
            cloudformation_backends,
            secretsmanager_backends,
        ):
            backends[ACCOUNT].reset()
        self.calls: list[Request] = []
        self.violations: list[str] = []
        self.faults: list[Fault] = []
        self.endpoints = FakeEndpoints(ACCOUNT, REGION)
        self.stacks = FakeStacks(self.clock, ACCOUNT, REGION, self.endpoints, **self._durations)

    # ---- what tests use ----

    def fail(self, kind: str, operation: str | None = None, **options: Any) -> Fault:
        """Let calls fail; see Fault."""
        self.faults.append(Fault(kind, operation, **options))
        return self.faults[-1]

    def clients(self, *, direct: bool = False, **options: Any) -> Clients:
        """peagle's clients of this stand-in; direct: without a socket between."""
        options = {"clock": self.clock, "session": self.session, **options}
        url = "http://127.0.0.1:9" if direct else self.url
        return (
            DirectClients(self, REGION, url, **options)
            if direct
            else Clients(REGION, url, **options)
        )

    def client(self, service: str) -> Any:
        """boto3's own client, for what tests prepare and look at."""
        return self.clients().client(service)

    def make_bucket(self, name: str = BUCKET) -> None:
        s3_backends[ACCOUNT]["aws"].create_bucket(name, REGION)

    def holdings(self) -> set[str]:
        """Everything that is there, in words."""
        self.stacks.settle()
        sagemaker = sagemaker_backends[ACCOUNT][REGION]
        buckets = s3_backends[ACCOUNT]["aws"].buckets
        return {
            *(
                f"stack {stack.name}"
                for stack in cloudformation_backends[ACCOUNT][REGION].stacks.values()
            ),
            *(f"model {name}" for name in sagemaker._models),
            *(f"endpoint configuration {name}" for name in sagemaker.endpoint_configs),
            *(f"endpoint {name}" for name in sagemaker.endpoints),
            *(f"secret {name}" for name in secretsmanager_backends[ACCOUNT][REGION].secrets),
            *(f"object s3://{n}/{key}" for n, b in buckets.items() for key in b.keys),
            *(
                f"multipart upload s3://{name}/{upload.key_name}"
                for name, bucket in buckets.items()
                for upload in bucket.multiparts.values()
            ),
        }

    def objects(self, uri: str) -> dict[str, bytes]:
        """Contents of what is below s3://bucket/prefix/, by the rest of the key."""
        bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        keys = s3_backends[ACCOUNT]["aws"].buckets[bucket].keys
        return {k.removeprefix(prefix): v.value for k, v in keys.items() if k.startswith(prefix)}

    # ---- the server ----

    def __enter__(self) -> FakeAws:
        self._server = make_server("127.0.0.1", 0, self, True, request_handler=_Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        assert kind is not None or not self.violations, self.violations

    def environment(self) -> dict[str, str]:
        """What a process needs to talk to this stand-in."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        }

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """The WSGI application."""
        length = int(environ.get("CONTENT_LENGTH") or 0)
        body = environ["wsgi.input"].read(length)
        environ["wsgi.input"] = BytesIO(body)
        try:
            status, headers, answer = self._respond(environ, body)
        except NoAnswer:
            if "werkzeug.socket" not in environ:
                raise
            with suppress(OSError):
                environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            status, headers, answer = 500, {}, b""
        if isinstance(answer, bytes):
            headers["Content-Length"] = str(len(answer))
            answer = [answer]
        start_response(f"{status} -", list(headers.items()))
        return answer

    def _respond(self, environ: dict[str, Any], body: bytes) -> Any:
        try:
            request = read_request(environ, body)
        except Exception as error:
            self.violations.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}: {error}")
            return 400, {}, json.dumps({"__type": "Violation", "message": str(error)}).encode()
        with self._lock:
            self.calls.append(request)
            fault = next((fault.kind for fault in self.faults if fault.hits(request)), "")
            if fault == "time-out before":
                raise NoAnswer
            if fault in ("interrupt", "interrupt twice before"):
                _interrupt(2 if "twice" in fault else 1)
            elif fault and "after" not in fault:
                code, message, status = KINDS[fault]
                action = f"{request.service}:{request.operation}"
                return error_answer(request, code, message.format(action=action), status)
            self.stacks.settle()
            place = self.stacks if request.service == "cloudformation" else self.endpoints
            answer = place.answer(request, lambda: self._ask_moto(environ))
            if fault == "time-out after":
                raise NoAnswer
            if fault == "interrupt twice after":
                _interrupt(2)
        return answer

    def _ask_moto(self, environ: dict[str, Any]) -> Answer:
        chunks, status, headers = run_wsgi_app(self._moto, environ)
        named = {key: value for key, value in headers if key.lower() not in _HOP}
        return int(status.split()[0]), named, b"".join(chunks)


def _interrupt(times: int) -> None:
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)


_HOP = {"content-length", "transfer-encoding", "connection"}


class _Handler(MotoRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, *_: Any) -> None:
        pass


class DirectClients(Clients):
    """Clients whose requests are answered in the same thread, without a socket."""

    def __init__(self, aws: FakeAws, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._aws = aws

    def client(self, service: str) -> Any:
        is_new = service not in self._clients
        client = super().client(service)
        if is_new:
            client.meta.events.register(
                f"before-send.{client.meta.service_model.service_id.hyphenize()}", self._send
            )
        return client

    def _send(self, request: Any, **_: Any) -> AWSResponse:
        parts = urlsplit(request.url)
        body = request.body
        if hasattr(body, "read"):
            body = body.read()
        environ = create_environ(
            parts.path,
            "http://127.0.0.1:9",
            query_string=parts.query,
            method=request.method,
            headers=[
                (k, v.decode() if isinstance(v, bytes) else v) for k, v in request.headers.items()
            ],
            data=body or b"",
        )
        try:
            chunks, status, headers = run_wsgi_app(self._aws, environ)
        except NoAnswer:
            raise ReadTimeoutError(endpoint_url=request.url) from None
        raw = _Raw(b"".join(chunks))
        return AWSResponse(request.url, int(status.split()[0]), dict(headers), raw)


class _Raw(BytesIO):
    def stream(self, *_: Any, **__: Any) -> Iterator[bytes]:
        yield self.read()
