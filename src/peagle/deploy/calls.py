"""Calls of AWS APIs as data: a deployment is listed, checked and shown before it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an AWS API.

    Attributes:
        service: boto3's name of the client, "sagemaker".
        operation: the API's name of the operation, "CreateModel".
        parameters: of the request, as botocore's service model has them.
        creates: what exists once it succeeded, in words for people, "model 'peagle-qwen3-8b'"; ""
            where it creates nothing that stays.
        undo: takes away again what it created; None where there is nothing to take away.
    """

    service: str
    operation: str
    parameters: Mapping[str, Any]
    creates: str = ""
    undo: Call | None = None

    def to_json(self) -> dict[str, Any]:
        """What `peagle deploy sagemaker plan` prints."""
        return {
            "service": self.service,
            "operation": self.operation,
            "parameters": dict(self.parameters),
        }
