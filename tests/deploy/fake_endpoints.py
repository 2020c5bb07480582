"""The states of SageMaker's endpoints, what they answer, and refusals that moto does not have."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from moto.applicationautoscaling.models import applicationautoscaling_backends
from moto.sagemaker.models import FakeEndpointConfig, sagemaker_backends

from deploy.aws_wire import Answer, Request, decoded, error_answer, json_answer, payload_part
from peagle.deploy.aws import Clock

# moto's list ends with instances of 2021; the service model's is checked instead.
FakeEndpointConfig.validate_instance_type = lambda self, instance_type: None  # type: ignore

IN_PROGRESS = ("Creating", "Updating", "SystemUpdating", "RollingBack", "Deleting")


@dataclass(frozen=True)
class Change:
    """From a moment on an endpoint has this status, this configuration and this failure."""

    at: float
    status: str
    config: str | None = None
    reason: str | None = None


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
        create_s, update_s, rollback_s, delete_s: how long these last.
        answer_with: what containers answer: payloads, each of which becomes a part of a stream;
            frames that are to go out as they are can be given as `Frame`.
        failures: how the next operations of these names end.
        violations: what AWS lets pass and says that one must not do.
        is_ready: whether the containers of a configuration are; nothing is in service before.
        hub: documents of the public hub by the model's id.
    """

    clock: Clock
    account: str
    region: str
    create_s: float = 60
    update_s: float = 60
    rollback_s: float = 30
    delete_s: float = 20
    answer_with: Callable[[Invocation], Iterable[bytes]] = echo
    is_ready: Callable[[str], bool] = lambda config: True
    hub: dict[str, Any] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._to_come: dict[str, list[Change]] = {}

    @property
    def _moto(self) -> Any:
        return sagemaker_backends[self.account][self.region]

    # ---- states ---------------------------------------------------------------------------

    def fail_next(self, operation: str, reason: str) -> None:
        """Let the next "CreateEndpoint" or "UpdateEndpoint" end badly, some time later."""
        self.failures[operation] = reason

    def settle(self) -> None:
        """Let happen what is due."""
        for name, changes in list(self._to_come.items()):
            while changes and changes[0].at <= self.clock.now():
                endpoint = self._moto.endpoints[name]
                config = changes[0].config or endpoint.endpoint_config_name
                if changes[0].status == "InService" and not self.is_ready(config):
                    break
                change = changes.pop(0)
                if change.status == "Gone":
                    del self._moto.endpoints[name]
                    del self._to_come[name]
                    break
                endpoint.endpoint_status = change.status
                endpoint.failure_reason = change.reason
                if change.config is not None:
                    endpoint.endpoint_config_name = change.config

    def status(self, name: str) -> str:
        """Of an endpoint; "" if it is not there."""
        self.settle()
        endpoint = self._moto.endpoints.get(name)
        return endpoint.endpoint_status if endpoint else ""

    def _plan(self, name: str, *steps: tuple[float, str, str | None, str | None]) -> None:
        """(seconds after the one before, status, configuration, reason)."""
        at, changes = self.clock.now(), []
        for seconds, *what in steps:
            at += seconds
            changes.append(Change(at, *what))
        self._to_come[name] = changes
        self.settle()

    # ---- answers --------------------------------------------------------------------------

    def answer(self, request: Request, moto: Callable[[], Answer]) -> Any:
        """What AWS answers; `moto()` asks moto."""
        own = getattr(self, f"_{request.operation}", None)
        return moto() if own is None else own(request, moto)

    def _refuse(self, request: Request, message: str, code: str = "ValidationException") -> Answer:
        return error_answer(request, code, message)

    def _arn(self, kind: str, name: str) -> str:
        return f"arn:aws:sagemaker:{self.region}:{self.account}:{kind}/{name.lower()}"

    def _CreateModel(self, request: Request, moto: Any) -> Answer:
        name = request.parameters["ModelName"]
        if name in self._moto._models:
            arn = self._arn("model", name)
            return self._refuse(request, f'Cannot create already existing model "{arn}".')
        return moto()

    def _CreateEndpointConfig(self, request: Request, moto: Any) -> Answer:
        name = request.parameters["EndpointConfigName"]
        if name in self._moto.endpoint_configs:
            arn = self._arn("endpoint-config", name)
            return self._refuse(
                request, f'Cannot create already existing endpoint configuration "{arn}".'
            )
        return moto()

    def _CreateEndpoint(self, request: Request, moto: Any) -> Answer:
        name = request.parameters["EndpointName"]
        if name in self._moto.endpoints:
            arn = self._arn("endpoint", name)
            return self._refuse(request, f'Cannot create already existing endpoint "{arn}".')
        answer = moto()
        if answer[0] == 200:
            reason = self.failures.pop("CreateEndpoint", None)
            status = "Failed" if reason else "InService"
            self._plan(name, (0, "Creating", None, None), (self.create_s, status, None, reason))
        return answer

    def _UpdateEndpoint(self, request: Request, moto: Any) -> Answer:
        name = request.parameters["EndpointName"]
        config = request.parameters["EndpointConfigName"]
        if refusal := self._unchangeable(request, name, (*IN_PROGRESS, "Failed")):
            return refusal
        if config not in self._moto.endpoint_configs:
            arn = self._arn("endpoint-config", config)
            return self._refuse(request, f'Could not find endpoint configuration "{arn}".')
        reason = self.failures.pop("UpdateEndpoint", None)
        if reason == "Failed":
            end = [(self.update_s, "Failed", None, "The update failed.")]
        elif reason:
            end = [
                (self.update_s, "RollingBack", None, reason),
                (self.rollback_s, "InService", None, reason),
            ]
        else:
            end = [(self.update_s, "InService", config, None)]
        self._plan(name, (0, "Updating", None, None), *end)
        return json_answer({"EndpointArn": self._arn("endpoint", name)})

    def _UpdateEndpointWeightsAndCapacities(self, request: Request, moto: Any) -> Answer:
        name = request.parameters["EndpointName"]
        if refusal := self._unchangeable(request, name, (*IN_PROGRESS, "Failed")):
            return refusal
        answer = moto()
        self._plan(name, (0, "Updating", None, None), (self.update_s, "InService", None, None))
        return answer

    def _DeleteEndpoint(self, request: Request, moto: Any) -> Answer:
        name = request.parameters["EndpointName"]
        if refusal := self._unchangeable(request, name, IN_PROGRESS):
            return refusal
        self._plan(name, (0, "Deleting", None, None), (self.delete_s, "Gone", None, None))
        return 200, {"Content-Type": "application/x-amz-json-1.1"}, b""

    def _unchangeable(
        self, request: Request, name: str, statuses: tuple[str, ...]
    ) -> Answer | None:
        arn = self._arn("endpoint", name)
        if name not in self._moto.endpoints:
            return self._refuse(request, f'Could not find endpoint "{arn}".')
        if self.status(name) in statuses:
            return self._refuse(request, f'Cannot update in-progress endpoint "{arn}".')
        return None

    def _DeleteEndpointConfig(self, request: Request, moto: Any) -> Answer:
        self._must_not_be_used(request.parameters["EndpointConfigName"])
        return moto()

    def _DeleteModel(self, request: Request, moto: Any) -> Answer:
        name = request.parameters["ModelName"]
        for config in self._moto.endpoint_configs.values():
            if any(variant["ModelName"] == name for variant in config.production_variants):
                self._must_not_be_used(config.endpoint_config_name)
        return moto()

    def _must_not_be_used(self, config: str) -> None:
        """AWS lets it be deleted, and says that one must not."""
        for name, endpoint in self._moto.endpoints.items():
            names = {endpoint.endpoint_config_name}
            names |= {c.config for c in self._to_come.get(name, ()) if c.config}
            if config in names and endpoint.endpoint_status != "Deleting":
                self.violations.append(f"{config} was deleted while {name} runs with it")

    def _ListModels(self, request: Request, moto: Any) -> Answer:
        status, headers, body = moto()
        wanted = request.parameters.get("NameContains", "")
        models = [m for m in json.loads(body)["Models"] if wanted in m["ModelName"]]
        return json_answer({"Models": models}) if status == 200 else (status, headers, body)

    def _DescribeEndpoint(self, request: Request, moto: Any) -> Answer:
        status, headers, body = moto()
        if status != 200:
            return status, headers, body
        endpoint = json.loads(body)
        coming = self._to_come.get(endpoint["EndpointName"], [])
        if configs := [change.config for change in coming if change.config]:
            endpoint["PendingDeploymentSummary"] = {"EndpointConfigName": configs[-1]}
        return json_answer(endpoint)

    # ---- scaling --------------------------------------------------------------------------

    @property
    def _scaling(self) -> Any:
        return applicationautoscaling_backends[self.account][self.region]

    def _has_target(self, request: Request) -> bool:
        parameters = request.parameters
        targets = self._scaling.targets.get(parameters["ScalableDimension"], {})
        return parameters["ResourceId"] in targets

    def _RegisterScalableTarget(self, request: Request, moto: Any) -> Answer:
        _, name, *_ = request.parameters["ResourceId"].split("/")
        if self.status(name) != "InService":
            return self._refuse(request, f"Could not find a variant in service of {name}")
        return moto()

    def _PutScalingPolicy(self, request: Request, moto: Any) -> Answer:
        if not self._has_target(request):
            message = "No scalable target registered for service namespace: sagemaker"
            return self._refuse(request, message, "ObjectNotFoundException")
        return moto()

    def _DeregisterScalableTarget(self, request: Request, moto: Any) -> Answer:
        if not self._has_target(request):
            message = "No scalable target found for service namespace: sagemaker"
            return self._refuse(request, message, "ObjectNotFoundException")
        resource = request.parameters["ResourceId"]
        for key, policy in list(self._scaling.policies.items()):
            if policy.resource_id == resource:
                del self._scaling.policies[key]
        return moto()

    def _DeleteScalingPolicy(self, request: Request, moto: Any) -> Answer:
        status, headers, body = moto()
        if status == 400 and b"No scaling policy found" in body:
            message = "No scaling policy found for service namespace: sagemaker"
            return self._refuse(request, message, "ObjectNotFoundException")
        return status, headers, body

    # ---- the hub --------------------------------------------------------------------------

    def _DescribeHubContent(self, request: Request, moto: Any) -> Answer:
        name = request.parameters["HubContentName"]
        hub = request.parameters["HubName"]
        if name not in self.hub:
            return self._refuse(request, f"Hub content {name} does not exist.", "ResourceNotFound")
        document = self.hub[name]
        text = document if isinstance(document, str) else json.dumps(document)
        arn = f"arn:aws:sagemaker:{self.region}:aws:hub"
        return json_answer(
            {
                "HubContentName": name,
                "HubContentArn": f"{arn}-content/{hub}/Model/{name}/1.0.0",
                "HubContentVersion": "1.0.0",
                "HubContentType": request.parameters["HubContentType"],
                "DocumentSchemaVersion": "2.3.0",
                "HubName": hub,
                "HubArn": f"{arn}/{hub}",
                "HubContentDocument": text,
                "HubContentStatus": "Available",
                "CreationTime": 0,
            }
        )

    # ---- invocations ----------------------------------------------------------------------

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
        if self.status(name) not in ("InService", "Updating", "RollingBack", "SystemUpdating"):
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
            return 200, headers, b"".join([first, *parts])
        headers = {
            "Content-Type": "application/vnd.amazon.eventstream",
            "X-Amzn-SageMaker-Content-Type": "text/event-stream",
            **variant,
        }
        return 200, headers, _frames(first, parts)

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
