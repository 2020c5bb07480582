"""The invocations of SageMaker's endpoints, which moto does not stream."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from moto.s3.models import s3_backends
from moto.sagemaker.models import FakeEndpointConfig, sagemaker_backends

from deploy.aws_wire import Answer, Request, decoded, error_answer, json_answer, payload_part

# moto's list ends with instances of 2021; the service model's is checked instead.
FakeEndpointConfig.validate_instance_type = lambda self, instance_type: None  # type: ignore


@dataclass(frozen=True)
class Invocation:
    """What an endpoint is asked.

    Attributes:
        endpoint, config: who, and with which configuration.
        body, parameters: of the request.
        environment: of the model's container.
        streams: the answer is wanted in parts.
    """

    endpoint: str
    config: str
    body: bytes
    parameters: Mapping[str, Any]
    environment: Mapping[str, str]
    streams: bool


class ContainerError(Exception):
    """The container answered with an error: status and body."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(body)
        self.status = status


def echo(invocation: Invocation) -> list[bytes]:
    """The answer of containers that nobody wrote."""
    return [invocation.body]


@dataclass
class FakeEndpoints:
    """What SageMaker does beyond moto.

    Attributes:
        account, region: whose endpoints.
        answer_with: what containers answer: payloads, each of which becomes a part of a stream;
            frames that are to go out as they are can be given as `Frame`.
        is_ready: whether the container of a configuration is; no stack is complete before.
        num_calls: answered whole; data capture takes a share of them.
    """

    account: str
    region: str
    answer_with: Callable[[Invocation], Iterable[bytes]] = echo
    is_ready: Callable[[str], bool] = lambda config: True
    num_calls: int = 0

    @property
    def _moto(self) -> Any:
        return sagemaker_backends[self.account][self.region]

    def status(self, name: str) -> str:
        """Of an endpoint; "" if it is not there."""
        endpoint = self._moto.endpoints.get(name)
        return endpoint.endpoint_status if endpoint else ""

    def answer(self, request: Request, moto: Callable[[], Answer]) -> Any:
        """What AWS answers; `moto()` asks moto."""
        own = getattr(self, f"_{request.operation}", None)
        return moto() if own is None else own(request, moto)

    def _refuse(self, request: Request, message: str, code: str = "ValidationException") -> Answer:
        return error_answer(request, code, message)

    # ---- invocations ----

    def _InvokeEndpoint(self, request: Request, moto: Any) -> Any:
        return self._invoke(request, streams=False)

    def _InvokeEndpointWithResponseStream(self, request: Request, moto: Any) -> Any:
        return self._invoke(request, streams=True)

    def container(self, name: str) -> Mapping[str, Any]:
        """The first container of what an endpoint runs."""
        return self.container_of(self._moto.endpoints[name].endpoint_config_name)

    def container_of(self, config: str) -> Mapping[str, Any]:
        """The first container of an endpoint configuration."""
        variant = self._moto.endpoint_configs[config].production_variants[0]
        model = self._moto._models[variant["ModelName"]]
        return model.primary_container or model.containers[0]

    def _invoke(self, request: Request, *, streams: bool) -> Any:
        name = request.parameters["EndpointName"]
        if self.status(name) != "InService":
            message = f"Endpoint {name} of account {self.account} not found."
            return self._refuse(request, message, "ValidationError")
        config = self._moto.endpoints[name].endpoint_config_name
        environment = self.container_of(config).get("Environment", {})
        body = decoded(request.parameters["Body"])
        invocation = Invocation(name, config, body, request.parameters, environment, streams)
        try:
            parts = iter(self.answer_with(invocation))
            first = next(parts, b"")
        except ContainerError as error:
            return self._model_error(error)
        variant = {"x-Amzn-Invoked-Production-Variant": "AllTraffic"}
        if not streams:
            headers = {"Content-Type": "application/json", **variant}
            answer = b"".join([first, *parts])
            self._capture(name, config, body, answer)
            return 200, headers, answer
        headers = {
            "Content-Type": "application/vnd.amazon.eventstream",
            "X-Amzn-SageMaker-Content-Type": "text/event-stream",
            **variant,
        }
        return 200, headers, _frames(first, parts)

    def _capture(self, endpoint: str, config: str, *bodies: bytes) -> None:
        """Write a call to S3 as data capture does, which takes every 100 / share-th."""
        wanted = self._moto.endpoint_configs[config].data_capture_config
        self.num_calls += 1
        percent = wanted.get("InitialSamplingPercentage", 0)
        if self.num_calls * percent % 100 >= percent:
            return
        captured = {
            f"endpoint{option['CaptureMode']}": {"data": body.decode(), "encoding": "JSON"}
            for option, body in zip(wanted["CaptureOptions"], bodies, strict=True)
        }
        bucket, _, prefix = wanted["DestinationS3Uri"].removeprefix("s3://").partition("/")
        key = f"{prefix}/{endpoint}/AllTraffic/2026/01/02/03/04-05-{self.num_calls}.jsonl"
        time = f"2026-01-02T03:{self.num_calls // 60:02}:{self.num_calls % 60:02}Z"
        told = {"eventId": str(self.num_calls), "inferenceTime": time}
        line = {"captureData": captured, "eventMetadata": told, "eventVersion": "0"}
        content = json.dumps(line).encode() + b"\n"
        s3_backends[self.account]["aws"].put_object(bucket, key, content)

    def _model_error(self, error: ContainerError) -> Answer:
        side = "client" if error.status < 500 else "server"
        message = f'Received {side} error ({error.status}) from primary with message "{error}".'
        said = {
            "Message": message,
            "OriginalStatusCode": error.status,
            "OriginalMessage": str(error),
            "LogStreamArn": f"arn:aws:logs:{self.region}:{self.account}:log-group:/aws/sagemaker",
        }
        status, headers, body = json_answer(said, 424)
        return status, headers | {"x-amzn-ErrorType": "ModelError"}, body


class Frame(bytes):
    """Bytes that go out as they are, in a stream of events."""


def _frames(first: bytes, rest: Iterable[bytes]) -> Iterable[bytes]:
    for part in chain([first], rest):
        yield part if isinstance(part, Frame) else payload_part(part)
