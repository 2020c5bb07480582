"""What goes wrong with calls of the stand-in for AWS."""

from __future__ import annotations

from dataclasses import dataclass

from deploy.aws_wire import Request

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
