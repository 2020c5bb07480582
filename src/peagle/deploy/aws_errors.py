"""Errors of AWS and boto3: what they are, and what they mean to the user."""

from __future__ import annotations

import re
from typing import Any

from peagle.errors import UserError

WHERE_CREDENTIALS = (
    "boto3 looks for them in the variables AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, in the "
    "profile that AWS_PROFILE names (~/.aws/credentials and ~/.aws/config, also `aws sso login`), "
    "and in the role of the machine that this runs on."
)
WHERE_REGION = (
    "Give it with --region, in the variable AWS_DEFAULT_REGION, or in ~/.aws/config (`aws "
    "configure set region us-east-1`)."
)

# ---- what an error is ------------------------------------------------------------------------

_THROTTLING = {
    *("Throttling", "ThrottlingException", "ThrottledException", "TooManyRequestsException"),
    *("RequestLimitExceeded", "RequestThrottled", "RequestThrottledException", "SlowDown"),
    *("LimitExceededException", "ConcurrentUpdateException", "BandwidthLimitExceeded"),
}
_DENIED = {"AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "AllAccessDisabled"}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "RequestExpired"}
_BAD_CREDENTIALS = {
    *("UnrecognizedClientException", "InvalidClientTokenId", "InvalidAccessKeyId", "InvalidToken"),
    *("InvalidSignatureException", "SignatureDoesNotMatch", "IncompleteSignature", "AuthFailure"),
    *("MissingAuthenticationToken", "MissingAuthenticationTokenException", "OptInRequired"),
}
_GONE = {"ResourceNotFound", "ResourceNotFoundException", "ObjectNotFoundException", "NoSuchKey"}
_GONE |= {"404", "NotFound", "NoSuchUpload"}
# "Could not find endpoint ...", "No scalable target found ...", "... does not exist".
_GONE_TEXT = re.compile(r"could not find|not found|no \w+ \w+ found|does not exist", re.I)


def _response(error: BaseException) -> dict[str, Any]:
    """What AWS answered; errors of the connection have the attribute too, and None in it."""
    return getattr(error, "response", None) or {}


def code(error: BaseException) -> str:
    """AWS's code of an error, "ThrottlingException"; "" for one that is not an answer of AWS."""
    return str(_response(error).get("Error", {}).get("Code", ""))


def text(error: BaseException) -> str:
    """AWS's message, or the error's own, as one line that cannot steer a terminal."""
    return clean(_response(error).get("Error", {}).get("Message") or str(error))


def clean(said: object) -> str:
    """What others wrote, as one line that cannot steer a terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(said)).split())


def status(error: BaseException) -> int:
    """HTTP status of AWS's answer; 0 without one."""
    metadata = _response(error).get("ResponseMetadata", {})
    return int(metadata.get("HTTPStatusCode", 0))


def is_gone(error: BaseException) -> bool:
    """Whether AWS says that what the call was about is not there."""
    is_validation = code(error) in ("ValidationException", "ValidationError")
    return code(error) in _GONE or (is_validation and bool(_GONE_TEXT.search(text(error))))


def is_throttled(error: BaseException) -> bool:
    """Whether AWS took no more calls at that moment."""
    return code(error) in _THROTTLING


# ---- what an error means to the user ---------------------------------------------------------

_NOT_AUTHORIZED = re.compile(
    r"not authorized to perform:? (?P<action>[\w:\-]+)(?: on resource:? (?P<resource>[^\s,]+))?"
)
_QUOTA = re.compile(
    r"service limit '(?P<quota>[^']+)' is (?P<limit>[\d.]+).*?utilization of (?P<used>[\d.]+)"
    r".*?delta of (?P<wanted>[\d.]+)"
)
_ROLE_TEXT = re.compile(r"assume role|role exists|trust relationship|execution role", re.I)


def explain(error: BaseException) -> UserError:
    """What an error of boto3's means, and what to do about it."""
    from botocore import exceptions as faults

    if isinstance(error, UserError):
        return error
    what = getattr(error, "operation_name", "") or "The call"
    if isinstance(error, faults.ClientError):
        return UserError(_answer(error, what))
    if isinstance(error, faults.NoRegionError):
        return UserError(f"No AWS region is known. {WHERE_REGION}")
    if isinstance(error, faults.ProfileNotFound):
        return UserError(f"{text(error)}. Name another one with AWS_PROFILE, or unset it.")
    if isinstance(error, faults.TokenRetrievalError | faults.UnauthorizedSSOTokenError):
        return UserError("The AWS session of single sign-on has ended: aws sso login")
    if isinstance(
        error,
        faults.NoCredentialsError
        | faults.PartialCredentialsError
        | faults.CredentialRetrievalError
        | faults.NoAuthTokenError,
    ):
        return UserError(f"The AWS credentials are not complete or not there. {WHERE_CREDENTIALS}")
    if isinstance(error, faults.ParamValidationError):
        return UserError(f"A request would be refused: {text(error)}")
    if isinstance(error, faults.HTTPClientError | faults.ConnectionError):
        return UserError(
            f"AWS gave no answer: {text(error)} Look at the network, a proxy, and whether the "
            "region has this service; then run it again."
        )
    return UserError(f"boto3 failed: {type(error).__name__}: {text(error)}")


def _answer(error: Any, what: str) -> str:
    """Of an error that AWS answered."""
    name, said = code(error), text(error)
    if is_throttled(error):
        attempts = 1 + int(error.response.get("ResponseMetadata", {}).get("RetryAttempts", 0))
        times = "once" if attempts == 1 else f"{attempts} times"
        return (
            f"{what} was throttled {times} ({name}: {said}): AWS takes no more of these calls from "
            "this account at the moment. Run it again in a minute; where it is often so, have the "
            "API's rate raised in Service Quotas."
        )
    if name in _DENIED or "not authorized to perform" in said:
        return _denied(what, said)
    if name == "ResourceLimitExceeded" or _QUOTA.search(said):
        return _quota(what, said)
    if name in _EXPIRED:
        return (
            f"The AWS credentials have expired ({name}). Get new ones: `aws sso login`, or where "
            "you got these; then run it again."
        )
    if name in _BAD_CREDENTIALS:
        return (
            f"AWS does not accept the credentials ({name}). {WHERE_CREDENTIALS} See which ones "
            "are in use: aws sts get-caller-identity"
        )
    if name == "NoSuchBucket":
        bucket = _response(error).get("Error", {}).get("BucketName", "BUCKET")
        return (
            f"{what}: there is no such bucket ({name}: {clean(bucket)}). Make it (aws s3 mb "
            f"s3://{clean(bucket)}), or name another one with --upload-to."
        )
    if _ROLE_TEXT.search(said):
        return (
            f"{what}: SageMaker cannot use the role: {said} Give a role that exists and trusts "
            "sagemaker.amazonaws.com with --role."
        )
    if status(error) >= 500:
        return f"{what} failed inside AWS ({name}: {said}). Run it again in a minute."
    return f"{what} was refused ({name}): {said}"


def _denied(what: str, said: str) -> str:
    match = _NOT_AUTHORIZED.search(said)
    if match is None:
        return (
            f"{what} was denied: {said} Have the action allowed in the policy of whoever calls: "
            "aws sts get-caller-identity"
        )
    action = match["action"]
    where = f" on {match['resource'].rstrip('.')}" if match["resource"] else ""
    if action == "iam:PassRole":
        return (
            f"{what} was denied: these credentials may not hand the role to SageMaker. Have "
            f"iam:PassRole{where} allowed in their policy, or give another role with --role."
        )
    reason = f" ({said})" if "explicit deny" in said else ""
    return (
        f"{what} was denied{reason}: have {action}{where} allowed in the policy of whoever calls: "
        "aws sts get-caller-identity"
    )


def _quota(what: str, said: str) -> str:
    match = _QUOTA.search(said)
    if match is None:
        return (
            f"{what} goes beyond a quota of the account: {said} Ask for more in Service Quotas "
            "(service SageMaker), or delete what is not needed."
        )
    return (
        f"{what} goes beyond the quota {match['quota']!r} of the account: it is {match['limit']}, "
        f"{match['used']} are in use, {match['wanted']} more are asked for. Have it raised in "
        "Service Quotas (aws service-quotas request-service-quota-increase --service-code "
        "sagemaker), or take another --instance-type or --region."
    )
