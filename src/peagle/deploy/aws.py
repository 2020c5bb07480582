"""AWS through boto3: the clients of a region, and requests checked without a network.

Credentials and region come from boto3's own chain, and are never read or shown here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from peagle.deploy.aws_errors import WHERE_CREDENTIALS, WHERE_REGION, explain, is_gone
from peagle.errors import UserError
from peagle.extras import install_extra

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

    def request(self, service: str, operation: str, **parameters: Any) -> dict[str, Any]:
        """`request("sagemaker", "DescribeEndpoint", EndpointName=...)`; errors are botocore's."""
        from botocore import xform_name

        return getattr(self.client(service), xform_name(operation))(**parameters)

    def ask(self, service: str, operation: str, **parameters: Any) -> dict[str, Any]:
        """Return an answer; {} where AWS says that it is about something that is not there.

        Raises:
            UserError: AWS refused, or gave no answer.
        """
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return self.request(service, operation, **parameters)
        except (BotoCoreError, ClientError) as error:
            if is_gone(error):
                return {}
            raise explain(error) from None


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
