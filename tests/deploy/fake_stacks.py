"""CloudFormation stacks that take time and fail, over moto's, which do neither."""

import json
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest.mock import MagicMock

from moto.applicationautoscaling.models import applicationautoscaling_backends
from moto.sagemaker.models import FakeEndpoint

from deploy.aws_wire import Answer, Request
from deploy.fake_endpoints import FakeEndpoints
from peagle.deploy.aws import Clock

_VALIDATOR = "openapi_spec_validator"
if find_spec(_VALIDATOR) is None:
    # moto's stacks import all of its services, and API Gateway's wants this package, unused here.
    for _name in (_VALIDATOR, f"{_VALIDATOR}.validation", f"{_VALIDATOR}.validation.exceptions"):
        sys.modules[_name] = MagicMock()


_models = import_module("moto.cloudformation.models")
cloudformation_backends = _models.cloudformation_backends
# moto gives an endpoint of a stack a name of its own.
FakeEndpoint.cloudformation_name_type = staticmethod(lambda: "EndpointName")  # type: ignore

# What moto's stacks make; the rest of a template is kept, and scaling is done here.
_KNOWN = ("AWS::SageMaker", "AWS::CloudWatch")
XML = {"Content-Type": "text/xml"}


class FakeStacks:
    """The states of stacks: what a change set asks for happens when its time has come."""

    def __init__(
        self,
        clock: Clock,
        account: str,
        region: str,
        endpoints: FakeEndpoints,
        *,
        change_s: float = 60,
    ) -> None:
        self.clock, self.change_s, self._endpoints = clock, change_s, endpoints
        self._account, self._region = account, region
        # Operation ("CREATE", "UPDATE", "DELETE", "ROLLBACK") -> resource that fails, and why.
        self._failures: dict[str, tuple[str, str]] = {}
        self._refusal = ""
        # Stack -> (time, what happens; false if it cannot yet).
        self._due: dict[str, list[tuple[float, Callable[[], Any]]]] = {}

    def fail_next(self, operation: str, resource: str, reason: str) -> None:
        """Let the next operation fail; "ROLLBACK" is that which follows a failure."""
        self._failures[operation] = (resource, reason)

    @property
    def _moto(self) -> Any:
        return cloudformation_backends[self._account][self._region]

    def status(self, name: str) -> str:
        """StackStatus; "" without a stack."""
        found = [s.status for s in self._moto.stacks.values() if s.name == name]
        return found[0] if found else ""

    def settle(self) -> None:
        """Let happen what is due."""
        for due in list(self._due.values()):
            while due and due[0][0] <= self.clock.now():
                if due[0][1]() is False:
                    break
                due.pop(0)

    def _plan(self, stack: Any, *actions: Callable[[], Any]) -> None:
        now = self.clock.now()
        self._due[stack.stack_id] = [
            (now + self.change_s * (number + 1), action) for number, action in enumerate(actions)
        ]
        self.settle()

    def _set(self, stack: Any, status: str, resource: str = "", reason: str = "") -> None:
        stack.status = status
        if resource:
            self._event(stack, resource, status.replace("UPDATE_ROLLBACK", "UPDATE"), reason)
        stack._add_stack_event(status)

    # ---- answers ----

    def answer(self, request: Request, moto: Callable[[], Answer]) -> Any:
        """What AWS answers; `moto()` asks moto."""
        own = getattr(self, f"_{request.operation}", None)
        return moto() if own is None else own(request.parameters, moto)

    def _ExecuteChangeSet(self, parameters: dict[str, Any], moto: Any) -> Answer:
        change = self._moto.change_sets[parameters["ChangeSetName"]]
        stack, kind = self._moto.stacks[change.stack_id], change.change_set_type
        change.execution_status = "EXECUTE_IN_PROGRESS"
        failure, undo_failure = self._failures.pop(kind, None), None
        if failure:
            undo_failure = self._failures.pop("ROLLBACK", None)
        self._set(stack, f"{kind}_IN_PROGRESS")
        if failure is None:
            self._plan(
                stack,
                lambda: self._execute(stack, change.change_set_id, kind),
                lambda: self._complete(stack, kind),
            )
        elif kind == "CREATE":
            end = (
                (lambda: self._set(stack, "DELETE_FAILED", *undo_failure))
                if undo_failure
                else (lambda: self._delete(stack))
            )
            self._plan(
                stack,
                lambda: self._fail(stack, "CREATE_FAILED", failure, "DELETE_IN_PROGRESS"),
                end,
            )
        else:
            self._plan(
                stack,
                lambda: self._fail(stack, "UPDATE_FAILED", failure, "UPDATE_ROLLBACK_IN_PROGRESS"),
                lambda: self._set(
                    stack,
                    *(
                        ("UPDATE_ROLLBACK_FAILED", *undo_failure)
                        if undo_failure
                        else ("UPDATE_ROLLBACK_COMPLETE",)
                    ),
                ),
            )
        return 200, XML, _xml("ExecuteChangeSet")

    def _execute(self, stack: Any, change_set: str, kind: str) -> None:
        change = self._moto.change_sets[change_set]
        whole = json.loads(change.template)
        known = {n: r for n, r in whole["Resources"].items() if r["Type"].startswith(_KNOWN)}
        change.template = json.dumps({**whole, "Resources": known})
        change._parse_template()
        self._moto.execute_change_set(change_set)
        stack.template = json.dumps(whole)
        stack.status = f"{kind}_IN_PROGRESS"
        self._relink(stack)
        self._scale(json.loads(stack.template)["Resources"])

    def _event(self, stack: Any, resource: str, status: str, reason: str) -> None:
        kind = f"AWS::SageMaker::{resource}"
        named = (stack.stack_id, stack.name, resource, f"{resource}-1", kind)
        stack.events.append(_models.Event(*named, status, reason, None))

    def refuse_next(self, reason: str) -> None:
        """Let CloudFormation find that the next change set cannot be, for this reason."""
        self._refusal = reason

    def _CreateChangeSet(self, parameters: dict[str, Any], moto: Any) -> Answer:
        before = set(self._moto.change_sets)
        answer = moto()
        for name in set(self._moto.change_sets) - before:
            if self._refusal:
                change = self._moto.change_sets[name]
                change.status, change.status_reason = "FAILED", self._refusal
                self._refusal = ""
        return answer

    def _relink(self, stack: Any) -> None:
        """Let what refers to a resource that was replaced refer to the new one, as AWS does."""
        sagemaker = self._endpoints._moto
        found = {name: stack.resource_map[name] for name in ("Model", "EndpointConfig", "Endpoint")}
        model, config = found["Model"].model_name, found["EndpointConfig"].endpoint_config_name
        sagemaker.endpoint_configs[config].production_variants[0]["ModelName"] = model
        sagemaker.endpoints[found["Endpoint"].endpoint_name].endpoint_config_name = config

    def _delete(self, stack: Any) -> None:
        self._moto.delete_stack(stack.stack_id)
        self._scale({})

    def _scale(self, resources: dict[str, Any]) -> None:
        """Application Auto Scaling, which moto's stacks do not have."""
        scaling = applicationautoscaling_backends[self._account][self._region]
        scaling.targets.clear()
        scaling.policies.clear()
        if "ScalableTarget" not in resources:
            return
        target, policy = (resources[n]["Properties"] for n in ("ScalableTarget", "ScalingPolicy"))
        place = target["ServiceNamespace"], target["ResourceId"], target["ScalableDimension"]
        bounds = target["MinCapacity"], target["MaxCapacity"]
        scaling.register_scalable_target(*place, *bounds, "", None)  # type: ignore
        tracking = policy["TargetTrackingScalingPolicyConfiguration"]
        scaling.put_scaling_policy(
            policy["PolicyName"],
            *place,
            tracking,
            policy["PolicyType"],
        )

    def _complete(self, stack: Any, kind: str) -> bool:
        """Complete the stack, if the container is ready."""
        endpoints = self._endpoints._moto.endpoints
        endpoint = endpoints.get(stack.name.removeprefix("peagle-endpoint-"))
        is_ready = endpoint is None or self._endpoints.is_ready(endpoint.endpoint_config_name)
        if is_ready:
            stack.status = f"{kind}_COMPLETE"
        return is_ready

    def _fail(self, stack: Any, status: str, failure: tuple[str, str], then: str) -> None:
        resource, reason = failure
        self._event(stack, resource, status, reason)
        self._set(stack, then)

    def _DeleteStack(self, parameters: dict[str, Any], moto: Any) -> Answer:
        name = parameters["StackName"]
        (stack,) = [s for s in self._moto.stacks.values() if name in (s.name, s.stack_id)]
        failure = self._failures.pop("DELETE", None)
        self._set(stack, "DELETE_IN_PROGRESS")
        if failure is None:
            self._plan(stack, lambda: self._delete(stack))
        else:
            self._plan(stack, lambda: self._fail(stack, "DELETE_FAILED", failure, "DELETE_FAILED"))
        return 200, XML, _xml("DeleteStack")

    def _CancelUpdateStack(self, parameters: dict[str, Any], moto: Any) -> Answer:
        name = parameters["StackName"]
        (stack,) = [s for s in self._moto.stacks.values() if name in (s.name, s.stack_id)]
        self._set(stack, "UPDATE_ROLLBACK_IN_PROGRESS")
        self._plan(stack, lambda: self._set(stack, "UPDATE_ROLLBACK_COMPLETE"))
        return 200, XML, _xml("CancelUpdateStack")


def _xml(operation: str) -> bytes:
    return f"<{operation}Response><{operation}Result/></{operation}Response>".encode()
