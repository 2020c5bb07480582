"""AWS through boto3: the clients of a region, and what an error of AWS means to the user.

boto3 finds the credentials and the region by itself. This file never reads or prints credentials.
"""

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from peagle.errors import UserError
from peagle.extras import install_extra

# boto3 repeats a call that AWS throttled or did not answer, with growing pauses of up to 20 s:
# https://docs.aws.amazon.com/boto3/latest/guide/retries.html
MAX_ATTEMPTS = 6
RETRIES: Mapping[str, Any] = {"mode": "adaptive", "total_max_attempts": MAX_ATTEMPTS}
CONNECT_TIMEOUT_S = 10
# SageMaker allows 60 s for a whole answer, and for the pause between two parts of a stream.
READ_TIMEOUT_S = 70

_CREDENTIALS_HELP = (
    "boto3 looks for them in the variables AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, in the "
    "profile that AWS_PROFILE names (~/.aws/credentials and ~/.aws/config, also `aws sso login`), "
    "and in the role of this machine."
)
_REGION_HELP = (
    "Give it with --region, in the variable AWS_DEFAULT_REGION, or in ~/.aws/config (`aws "
    "configure set region us-east-1`)."
)


class Clock:
    """The passing of time, for code that waits; tests have a clock of their own."""

    def now(self) -> float:
        """Return the seconds since some fixed moment."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait for a number of seconds."""
        time.sleep(seconds)


class Clients:
    """boto3's clients of one region, each made at its first use.

    Attributes:
        region: the region's name.
        clock: the clock of code that waits between calls.
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
        """Find the region and the credentials; this makes no call.

        Args:
            region: None takes the region of boto3's own configuration.
            endpoint_url: address of a stand-in for AWS (boto3 reads AWS_ENDPOINT_URL too).
            session: boto3's session; None makes one.
            retries: botocore's configuration of repeated calls.
            clock: None takes the machine's clock.

        Raises:
            UserError: there are no credentials or no region, or boto3 is not installed.
        """
        self._session = session or _session()
        self._endpoint_url = endpoint_url
        self._retries = dict(retries)
        self._clients: dict[str, Any] = {}
        self.clock = clock or Clock()
        self.region = region or self._session.region_name
        if not self.region:
            raise UserError(f"No AWS region is known. {_REGION_HELP}")
        with explained_errors():
            credentials = self._session.get_credentials()
        if credentials is None:
            raise UserError(f"No AWS credentials were found. {_CREDENTIALS_HELP}")

    def client(self, service: str) -> Any:
        """Return boto3's client of a service, like "sagemaker-runtime".

        Raises:
            UserError: boto3 cannot make the client with its configuration.
        """
        if service not in self._clients:
            from botocore.config import Config

            config = Config(
                retries=self._retries,
                connect_timeout=CONNECT_TIMEOUT_S,
                read_timeout=READ_TIMEOUT_S,
            )
            try:
                with explained_errors():
                    self._clients[service] = self._session.client(
                        service,
                        region_name=self.region,
                        endpoint_url=self._endpoint_url,
                        config=config,
                    )
            except ValueError as error:
                raise explain(error) from None
        return self._clients[service]

    def request(self, service: str, operation: str, **parameters: Any) -> dict[str, Any]:
        """Make a call: `request("sagemaker", "DescribeEndpoint", EndpointName="x")`.

        Raises:
            BotoCoreError, ClientError: as botocore raises them; `explain` puts them in words.
        """
        from botocore import xform_name

        return getattr(self.client(service), xform_name(operation))(**parameters)

    def find(self, service: str, operation: str, **parameters: Any) -> dict[str, Any]:
        """Make a call about something that may not exist; {} if AWS says that it does not.

        Raises:
            UserError: AWS refused, or gave no answer.
        """
        with explained_errors():
            try:
                return self.request(service, operation, **parameters)
            except call_errors() as error:
                if is_gone(error):
                    return {}
                raise


def _session() -> Any:
    try:
        import boto3
    except ImportError:
        raise UserError(
            f"boto3 is not installed, and peagle reaches AWS through it: "
            f"{install_extra('sagemaker')}"
        ) from None
    with explained_errors():
        return boto3.Session()


# ---- errors ----

_THROTTLING = {
    *("Throttling", "ThrottlingException", "ThrottledException", "TooManyRequestsException"),
    *("RequestLimitExceeded", "RequestThrottled", "RequestThrottledException", "SlowDown"),
    *("LimitExceededException", "ConcurrentUpdateException", "BandwidthLimitExceeded"),
}
_DENIED = {
    *("AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "AllAccessDisabled"),
    "403",  # of HeadObject, whose answer has no body
}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "RequestExpired"}
_BAD_CREDENTIALS = {
    *("UnrecognizedClientException", "InvalidClientTokenId", "InvalidAccessKeyId", "InvalidToken"),
    *("InvalidSignatureException", "SignatureDoesNotMatch", "IncompleteSignature", "AuthFailure"),
    *("MissingAuthenticationToken", "MissingAuthenticationTokenException", "OptInRequired"),
}
_GONE = {
    *("ResourceNotFound", "ResourceNotFoundException", "ObjectNotFoundException", "NoSuchKey"),
    *("404", "NotFound", "NoSuchUpload"),
}
# "Could not find endpoint ...", "No scalable target found ...", "... does not exist".
_GONE_TEXT = re.compile(r"could not find|not found|no \w+ \w+ found|does not exist", re.I)
_NOT_AUTHORIZED = re.compile(
    r"not authorized to perform:? (?P<action>[\w:\-]+)(?: on resource:? (?P<resource>[^\s,]+))?"
)
_QUOTA = re.compile(
    r"service limit '(?P<quota>[^']+)' is (?P<limit>[\d.]+).*?utilization of (?P<used>[\d.]+)"
    r".*?delta of (?P<wanted>[\d.]+)"
)
_ROLE_TEXT = re.compile(r"assume role|role exists|trust relationship|execution role", re.I)


def call_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that a call of boto3 raises."""
    from botocore.exceptions import BotoCoreError, ClientError

    return BotoCoreError, ClientError


@contextmanager
def explained_errors() -> Iterator[None]:
    """Turn errors of boto3 into `UserError`s that say what to do."""
    try:
        yield
    except call_errors() as error:
        raise explain(error) from None


def _response(error: BaseException) -> dict[str, Any]:
    """Return AWS's answer; {} for an error of the connection."""
    return getattr(error, "response", None) or {}


def error_code(error: BaseException) -> str:
    """Return AWS's code of an error, like "ThrottlingException"; "" without an answer of AWS."""
    return str(_response(error).get("Error", {}).get("Code", ""))


def error_text(error: BaseException) -> str:
    """Return the message of an error, as one line that cannot steer a terminal."""
    return one_line(_response(error).get("Error", {}).get("Message") or str(error))


def one_line(text: object) -> str:
    """Return text from outside as one line that cannot steer a terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())


def is_gone(error: BaseException) -> bool:
    """Return whether AWS says that the subject of the call does not exist."""
    is_validation = error_code(error) in ("ValidationException", "ValidationError")
    return error_code(error) in _GONE or (
        is_validation and bool(_GONE_TEXT.search(error_text(error)))
    )


def explain(error: BaseException) -> UserError:
    """Return an error of boto3 in words, with what the user can do about it."""
    from botocore import exceptions as faults

    if isinstance(error, UserError):
        return error
    if isinstance(error, faults.ClientError):
        return UserError(_explain_answer(error, error.operation_name or "The call"))
    if isinstance(error, faults.NoRegionError):
        return UserError(f"No AWS region is known. {_REGION_HELP}")
    if isinstance(error, faults.ProfileNotFound):
        return UserError(f"{error_text(error)}. Name another one with AWS_PROFILE, or unset it.")
    if isinstance(error, faults.TokenRetrievalError | faults.UnauthorizedSSOTokenError):
        return UserError("The AWS session of single sign-on has ended: aws sso login")
    if isinstance(
        error,
        faults.NoCredentialsError
        | faults.PartialCredentialsError
        | faults.CredentialRetrievalError
        | faults.NoAuthTokenError,
    ):
        return UserError(f"The AWS credentials are missing or not complete. {_CREDENTIALS_HELP}")
    if isinstance(error, faults.ParamValidationError):
        return UserError(f"AWS would refuse a request: {error_text(error)}")
    if isinstance(error, faults.HTTPClientError | faults.ConnectionError):
        return UserError(
            f"AWS gave no answer: {error_text(error)} Check the network, the proxy, and whether "
            "the region has this service; then run the command again."
        )
    return UserError(f"boto3 failed: {type(error).__name__}: {error_text(error)}")


def _explain_answer(error: Any, call: str) -> str:
    code, text = error_code(error), error_text(error)
    metadata = _response(error).get("ResponseMetadata", {})
    if code in _THROTTLING:
        attempts = 1 + int(metadata.get("RetryAttempts", 0))
        times = "once" if attempts == 1 else f"{attempts} times"
        return (
            f"AWS throttled {call} {times} ({code}: {text}): it takes no more of these calls from "
            "this account at the moment. Run the command again in a minute; if this happens "
            "often, raise the rate of the API in Service Quotas."
        )
    if code in _DENIED or "not authorized to perform" in text:
        return _explain_denial(call, text)
    if code == "ResourceLimitExceeded" or _QUOTA.search(text):
        return _explain_quota(call, text)
    if code in _EXPIRED:
        return (
            f"The AWS credentials have expired ({code}). Get new ones: `aws sso login`, or where "
            "you got these; then run the command again."
        )
    if code in _BAD_CREDENTIALS:
        return (
            f"AWS does not accept the credentials ({code}). {_CREDENTIALS_HELP} This command shows "
            "which ones are in use: aws sts get-caller-identity"
        )
    if code == "NoSuchBucket":
        bucket = one_line(_response(error).get("Error", {}).get("BucketName", "BUCKET"))
        return (
            f"{call}: there is no such bucket ({code}: {bucket}). Make it (aws s3 mb "
            f"s3://{bucket}), or name another one with --upload-to."
        )
    if _ROLE_TEXT.search(text):
        return (
            f"{call}: SageMaker cannot use the role: {text} Give a role that exists and trusts "
            "sagemaker.amazonaws.com with --role."
        )
    if int(metadata.get("HTTPStatusCode", 0)) >= 500:
        return f"{call} failed inside AWS ({code}: {text}). Run the command again in a minute."
    return f"AWS refused {call} ({code}): {text}"


def _explain_denial(call: str, text: str) -> str:
    match = _NOT_AUTHORIZED.search(text)
    if match is None:
        return (
            f"AWS denied {call}: {text} Allow the action in the policy of your user or role, which "
            "this command shows: aws sts get-caller-identity"
        )
    action = match["action"]
    where = f" on {match['resource'].rstrip('.')}" if match["resource"] else ""
    if action == "iam:PassRole":
        return (
            f"AWS denied {call}: these credentials may not hand the role to SageMaker. Allow "
            f"iam:PassRole{where} in their policy, or give another role with --role."
        )
    reason = f" ({text})" if "explicit deny" in text else ""
    return (
        f"AWS denied {call}{reason}: allow {action}{where} in the policy of your user or role, "
        "which this command shows: aws sts get-caller-identity"
    )


def _explain_quota(call: str, text: str) -> str:
    match = _QUOTA.search(text)
    if match is None:
        return (
            f"{call} goes beyond a quota of the account: {text} Ask for more in Service Quotas "
            "(service SageMaker), or delete resources that you do not need."
        )
    return (
        f"{call} goes beyond the quota {match['quota']!r} of the account: it is {match['limit']}, "
        f"{match['used']} are in use, and the call asks for {match['wanted']} more. Raise it in "
        "Service Quotas (aws service-quotas request-service-quota-increase --service-code "
        "sagemaker), or take another --instance-type or --region."
    )
