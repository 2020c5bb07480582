"""AWS through boto3: the clients of a region, and requests checked without a network.

Credentials and region come from boto3's own chain, and are never read or shown here.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from peagle.deploy.aws_errors import WHERE_CREDENTIALS, WHERE_REGION, explain
from peagle.deploy.calls import Call
from peagle.errors import UserError
from peagle.extras import install_extra, pip_install

# At most so many attempts of a call that was throttled or got no answer, with growing pauses of up
# to 20 s: https://docs.aws.amazon.com/boto3/latest/guide/retries.html
MAX_ATTEMPTS = 6
RETRIES: Mapping[str, Any] = {"mode": "adaptive", "total_max_attempts": MAX_ATTEMPTS}
CONNECT_TIMEOUT_S = 10
# An answer that is not streamed has 60 s on SageMaker; between two parts of a stream it may be so
# long too.
READ_TIMEOUT_S = 70


@dataclass(frozen=True, slots=True)
class Clock:
    """How time passes for what waits; tests have their own."""

    def now(self) -> float:
        """Seconds, from any start."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)


class Clients:
    """boto3's clients of one region, made when they are first asked for.

    Attributes:
        region: that they talk to.
        clock: for what waits between calls.
    """

    def __init__(
        self,
        region: str | None = None,
        endpoint_url: str | None = None,
        *,
        session: Any = None,
        retries: Mapping[str, Any] = RETRIES,
        clock: Clock | None = None,
    ) -> None:
        """Find region and credentials; nothing is called.

        Args:
            region: None takes the one of boto3's own configuration.
            endpoint_url: of all services, for stand-ins of AWS (boto3 reads AWS_ENDPOINT_URL too).
            session: of boto3; None makes one.
            retries: botocore's configuration of what is tried again.
            clock: None is the machine's.

        Raises:
            UserError: there are no credentials or no region, or boto3 is not installed.
        """
        session = _session() if session is None else session
        self._session = session
        self._endpoint_url = endpoint_url
        self._retries = dict(retries)
        self._clients: dict[str, Any] = {}
        self.clock = clock or Clock()
        self.region = region or session.region_name
        if not self.region:
            raise UserError(f"No AWS region is known. {WHERE_REGION}")
        from botocore.exceptions import BotoCoreError

        try:
            found = session.get_credentials()
        except BotoCoreError as error:
            raise explain(error) from None
        if found is None:
            raise UserError(f"No AWS credentials were found. {WHERE_CREDENTIALS}")

    def client(self, service: str) -> Any:
        """boto3's client of a service, like "sagemaker-runtime".

        Raises:
            UserError: boto3 cannot make it of its configuration.
        """
        if service not in self._clients:
            from botocore.config import Config
            from botocore.exceptions import BotoCoreError

            config = Config(
                retries=self._retries,
                connect_timeout=CONNECT_TIMEOUT_S,
                read_timeout=READ_TIMEOUT_S,
            )
            try:
                self._clients[service] = self._session.client(
                    service,
                    region_name=self.region,
                    endpoint_url=self._endpoint_url,
                    config=config,
                )
            except (BotoCoreError, ValueError) as error:
                raise explain(error) from None
        return self._clients[service]

    def call(self, call: Call) -> dict[str, Any]:
        """Make a call and return its answer; errors are botocore's."""
        return self.request(call.service, call.operation, **call.parameters)

    def request(self, service: str, operation: str, **parameters: Any) -> dict[str, Any]:
        """`request("sagemaker", "DescribeEndpoint", EndpointName=...)`; errors are botocore's."""
        from botocore import xform_name

        return getattr(self.client(service), xform_name(operation))(**parameters)


def _session() -> Any:
    try:
        import boto3
        from botocore.exceptions import BotoCoreError
    except ImportError:
        raise UserError(
            f"boto3 is not installed, and AWS is reached through it: {install_extra('sagemaker')}"
        ) from None
    try:
        return boto3.Session()
    except BotoCoreError as error:
        raise explain(error) from None


# ---- requests without a network --------------------------------------------------------------


@cache
def _service_model(service: str) -> Any:
    from botocore.loaders import create_loader
    from botocore.model import ServiceModel

    return ServiceModel(create_loader().load_service_model(service, "service-2"), service)


def validate(call: Call) -> None:
    """Check a call's parameters by the service model that botocore brings; nothing is sent.

    Names, types and what is required are checked as botocore does before it sends, and beyond it
    the values of enumerations, the lengths and the patterns of text, and the bounds of numbers.

    Raises:
        UserError: botocore knows no such operation, or its parameters do not fit.
    """
    try:
        from botocore.validate import ParamValidator
    except ImportError:
        _session()
        raise
    model = _service_model(call.service)
    if call.operation not in model.operation_names:
        raise UserError(
            f"The installed boto3 knows no operation {call.operation!r} of {call.service!r}: "
            f"{pip_install('--upgrade boto3')}"
        )
    shape = model.operation_model(call.operation).input_shape
    report = ParamValidator().validate(dict(call.parameters), shape)
    problems = [report.generate_report()] if report.has_errors() else []
    problems = problems or _misfits(call.parameters, shape, "")
    if problems:
        raise UserError(f"{call.operation} would be refused: {'; '.join(problems)}")


def _misfits(value: Any, shape: Any, where: str) -> list[str]:
    """Where a value of the right type breaks what its shape says of enumerations and bounds."""
    if shape.type_name == "structure":
        return [
            problem
            for name, member in value.items()
            for problem in _misfits(member, shape.members[name], f"{where}.{name}".lstrip("."))
        ]
    if shape.type_name == "map":
        return [
            problem
            for key, member in value.items()
            for problem in (
                *_misfits(key, shape.key, f"{where}[{key!r}]"),
                *_misfits(member, shape.value, f"{where}[{key!r}]"),
            )
        ]
    problems = []
    if shape.type_name == "list":
        problems = [
            problem
            for number, member in enumerate(value)
            for problem in _misfits(member, shape.member, f"{where}[{number}]")
        ]
    metadata = shape.metadata
    size = value if shape.type_name in ("integer", "long", "float", "double") else None
    if shape.type_name in ("string", "list"):
        size = len(value)
    if size is not None and not metadata.get("min", size) <= size <= metadata.get("max", size):
        bounds = f"{metadata.get('min', '')} to {metadata.get('max', '')}"
        what = "length " if shape.type_name in ("string", "list") else ""
        problems.append(f"{where} has {what}{size}, expected {bounds}")
    if shape.type_name == "string":
        if (allowed := getattr(shape, "enum", None)) and value not in allowed:
            problems.append(f"{where} is {str(value)!r}, expected one of {', '.join(allowed)}")
        if (pattern := _pattern(metadata.get("pattern", ""))) and not pattern.fullmatch(value):
            problems.append(f"{where} does not match {pattern.pattern}")
    return problems


@cache
def _pattern(text: str) -> re.Pattern[str] | None:
    """The service model's pattern, if Python's expressions can say it."""
    try:
        return re.compile(text, re.DOTALL) if text else None
    except re.error:  # \p{...}
        return None
