"""What travels between boto3 and AWS: requests read by the service models, errors, event streams.

botocore's own service models say how a request looks on the wire; every request is read back into
the parameters of its operation, and checked against its shape, before the stand-in answers it.
"""

import base64
import json
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from typing import Any
from urllib.parse import parse_qs, parse_qsl
from xml.etree import ElementTree

from botocore.loaders import create_loader
from botocore.model import OperationModel, ServiceModel, Shape
from botocore.parsers import BaseCBORParser
from botocore.validate import ParamValidator

# Of X-Amz-Target, and of the credential scope where there is none.
TARGETS = {
    "SageMaker": "sagemaker",
    "AnyScaleFrontendService": "application-autoscaling",
    "Logs_20140328": "logs",
    "GraniteServiceVersion20100801": "cloudwatch",
    "secretsmanager": "secretsmanager",
}
SCOPES = {
    "cloudformation": "cloudformation",
    "s3": "s3",
    "sts": "sts",
    "iam": "iam",
    "monitoring": "cloudwatch",
}
NUMBERS = {"integer": int, "long": int, "float": float, "double": float}


@dataclass(frozen=True)
class Request:
    """What boto3 sent, as the operation's parameters.

    Attributes:
        service, operation, parameters: of the call.
        id: the same in all attempts of one call.
        attempt: 1 for the first.
    """

    service: str
    operation: str
    parameters: dict[str, Any]
    id: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.service}:{self.operation}"


@cache
def service_model(service: str) -> ServiceModel:
    return ServiceModel(create_loader().load_service_model(service, "service-2"), service)


# ---- reading requests ----


def read_request(environ: dict[str, Any], body: bytes) -> Request:
    """The call that a request is; AssertionError if the service model has no such call."""
    target = environ.get("HTTP_X_AMZ_TARGET", "")
    path, query = _path(environ), environ.get("QUERY_STRING", "")
    authorization = environ.get("HTTP_AUTHORIZATION", "")
    scope = re.search(r"Credential=[^/]+/\d+/[^/]+/([^/]+)/aws4_request", authorization)
    assert scope is not None, f"an unsigned request: {path}"
    if match := re.fullmatch(r"/service/(\w+)/operation/(\w+)", path):
        assert environ.get("HTTP_SMITHY_PROTOCOL") == "rpc-v2-cbor"
        service, operation = TARGETS[match[1]], match[2]
        parameters = _Cbor().read(body)
    elif target:
        prefix, operation = target.split(".")
        service = TARGETS[prefix]
        parameters = json.loads(body)
    elif path.startswith("/endpoints/"):
        service = "sagemaker-runtime"
        operation, parameters = _rest(service, environ, body)
    elif scope[1] == "s3":
        service = "s3"
        operation, parameters = _rest(service, environ, body)
    else:
        service = SCOPES[scope[1]]
        fields = dict(parse_qsl(body.decode() or query, keep_blank_values=True))
        operation = fields.pop("Action")
        fields.pop("Version")
        parameters = fields
    assert operation in service_model(service).operation_names, (service, operation)
    if service != "cloudformation":  # its requests are flat; boto3 checked them before
        check_parameters(service, operation, parameters)
    attempts = re.search(r"attempt=(\d+)", environ.get("HTTP_AMZ_SDK_REQUEST", ""))
    identity = environ.get("HTTP_AMZ_SDK_INVOCATION_ID", "")
    return Request(service, operation, parameters, identity, int(attempts[1]) if attempts else 1)


def check_parameters(service: str, operation: str, parameters: dict[str, Any]) -> None:
    """AssertionError if parameters do not fit the service model: types, enumerations, patterns."""
    shape = service_model(service).operation_model(operation).input_shape
    report = ParamValidator().validate(dict(parameters), shape)
    assert not report.has_errors(), report.generate_report()
    problems = list(_misfits(parameters, shape, operation))
    assert not problems, problems


def _misfits(value: Any, shape: Any, where: str) -> Iterator[str]:
    if shape.type_name == "structure":
        for name, member in value.items():
            yield from _misfits(member, shape.members[name], f"{where}.{name}")
    elif shape.type_name in ("list", "map"):
        inside = shape.member if shape.type_name == "list" else shape.value
        for member in value if shape.type_name == "list" else value.values():
            yield from _misfits(member, inside, where)
    elif shape.type_name == "string":
        allowed = getattr(shape, "enum", None)
        if allowed and value not in allowed:
            yield f"{where} is {value!r}, expected one of {allowed}"
        pattern = shape.metadata.get("pattern", "")
        is_pythons = "\\p{" not in pattern and "\\u" not in pattern
        if pattern and is_pythons and not re.fullmatch(pattern, value, re.DOTALL):
            yield f"{where} does not match {pattern}"


def _path(environ: dict[str, Any]) -> str:
    """As UTF-8: WSGI has bytes of a path as Latin-1."""
    return environ["PATH_INFO"].encode("latin-1").decode()


class _Cbor(BaseCBORParser):
    def __init__(self) -> None:
        pass

    def read(self, body: bytes) -> Any:
        return self.parse_data_item(BytesIO(body)) if body else {}


@cache
def _rest_operations(service: str) -> list[tuple[str, re.Pattern[str], set[str], OperationModel]]:
    """(method, pattern of the path, names that the query must have, operation).

    Those that want more of the query come first.
    """
    found = []
    model = service_model(service)
    for name in model.operation_names:
        operation = model.operation_model(name)
        path, _, query = operation.http["requestUri"].partition("?")
        pattern = re.escape(path).replace(r"\{", "{").replace(r"\}", "}").replace(r"\+", "+")
        pattern = re.sub(r"\{(\w+)\+\}", r"(?P<\1>.+)", pattern)
        pattern = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", pattern)
        shape: Any = operation.input_shape
        wanted = set(dict(parse_qsl(query, keep_blank_values=True)))
        wanted |= {
            member.serialization["name"]
            for key, member in (shape.members.items() if shape else ())
            if member.serialization.get("location") == "querystring"
            and key in shape.required_members
        }
        found.append((operation.http["method"], re.compile(pattern), wanted, operation))
    return sorted(found, key=lambda row: -len(row[2]))


def _rest(service: str, environ: dict[str, Any], body: bytes) -> tuple[str, dict[str, Any]]:
    query = {k: v[0] for k, v in parse_qs(environ["QUERY_STRING"], keep_blank_values=True).items()}
    method, path = environ["REQUEST_METHOD"], _path(environ)
    copies = "HTTP_X_AMZ_COPY_SOURCE" in environ
    for wanted_method, pattern, wanted, operation in _rest_operations(service):
        match = pattern.fullmatch(path)
        fits = method == wanted_method and wanted <= query.keys()
        if match and fits and ("Copy" in operation.name) == copies:
            parameters = _rest_parameters(operation, match.groupdict(), query, environ, body)
            return operation.name, parameters
    raise AssertionError(f"{service} has no {method} {path}?{query}")


def _rest_parameters(
    operation: OperationModel,
    labels: dict[str, str],
    query: dict[str, str],
    environ: dict[str, Any],
    body: bytes,
) -> dict[str, Any]:
    shape = operation.input_shape
    headers = {
        key.removeprefix("HTTP_").replace("_", "-").lower(): value
        for key, value in environ.items()
        if key.startswith("HTTP_") or key in ("CONTENT_TYPE", "CONTENT_LENGTH")
    }
    found: dict[str, Any] = {}
    payload = shape.serialization.get("payload")
    for name, member in shape.members.items():
        place = member.serialization.get("location")
        key = member.serialization.get("name", name)
        if place == "uri":
            found[name] = labels[key]
        elif place == "querystring" and key in query:
            found[name] = _typed(member, query[key])
        elif place == "header" and key.lower() in headers:
            found[name] = _typed(member, headers[key.lower()])
        elif place == "headers":
            values = {k[len(key) :]: v for k, v in headers.items() if k.startswith(key.lower())}
            found |= {name: values} if values else {}
        elif name == payload and body:
            is_blob = member.type_name == "blob"
            found[name] = body if is_blob else _from_xml(member, ElementTree.fromstring(body))
    return found


def _typed(shape: Shape, text: str) -> Any:
    if shape.type_name == "boolean":
        return text == "true"
    return NUMBERS.get(shape.type_name, str)(text)


def _from_xml(shape: Any, node: ElementTree.Element) -> Any:
    """A structure of rest-xml; lists there are flattened or wrapped."""
    if shape.type_name != "structure":
        return _typed(shape, node.text or "")
    found: dict[str, Any] = {}
    for name, member in shape.members.items():
        key = member.serialization.get("name", name)
        nodes = [child for child in node if child.tag.rpartition("}")[2] == key]
        if not nodes:
            continue
        if member.type_name == "list":
            if not member.serialization.get("flattened"):
                nodes = list(nodes[0])
            found[name] = [_from_xml(member.member, child) for child in nodes]
        else:
            found[name] = _from_xml(member, nodes[0])
    return found


# ---- answers ----

Answer = tuple[int, dict[str, str], bytes]


def json_answer(value: Any, status: int = 200) -> Answer:
    return status, {"Content-Type": "application/x-amz-json-1.1"}, json.dumps(value).encode()


def error_answer(request: Request, code: str, message: str, status: int = 400) -> Answer:
    """An error in the protocol of the service."""
    protocol = service_model(request.service).resolved_protocol  # what botocore then speaks
    if protocol == "rest-xml":
        text = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
        is_head = request.operation.startswith("Head")
        return status, {"Content-Type": "application/xml"}, b"" if is_head else text.encode()
    if protocol == "query":
        text = f"<Error><Type>Sender</Type><Code>{code}</Code><Message>{message}</Message></Error>"
        text = f"<ErrorResponse>{text}</ErrorResponse>"
        return status, {"Content-Type": "text/xml"}, text.encode()
    if protocol == "smithy-rpc-v2-cbor":
        headers = {"Content-Type": "application/cbor", "smithy-protocol": "rpc-v2-cbor"}
        return status, headers, _cbor_map({"__type": code, "message": message})
    status, headers, body = json_answer({"__type": code, "message": message}, status)
    return status, headers | {"x-amzn-ErrorType": code}, body


def _cbor_map(values: dict[str, str]) -> bytes:
    def text(value: str) -> bytes:
        data = value.encode()
        return b"\x79" + struct.pack(">H", len(data)) + data

    pairs = b"".join(text(key) + text(value) for key, value in values.items())
    return bytes([0xA0 | len(values)]) + pairs


# ---- event streams ----


def frame(headers: dict[str, str], payload: bytes) -> bytes:
    """A message of application/vnd.amazon.eventstream with both checksums.

    https://smithy.io/2.0/aws/amazon-eventstream.html
    """
    written = b"".join(
        struct.pack(">B", len(name))
        + name.encode()
        + struct.pack(">BH", 7, len(value.encode()))
        # 7: a string.
        + value.encode()
        for name, value in headers.items()
    )
    prelude = struct.pack(">II", 12 + len(written) + len(payload) + 4, len(written))
    head = prelude + struct.pack(">I", zlib.crc32(prelude)) + written + payload
    return head + struct.pack(">I", zlib.crc32(head))


def payload_part(payload: bytes) -> bytes:
    return frame(
        {
            ":message-type": "event",
            ":event-type": "PayloadPart",
            ":content-type": "application/octet-stream",
        },
        payload,
    )


def stream_error(kind: str, message: str, error_code: str = "") -> bytes:
    """The end of a stream: kind is "ModelStreamError" or "InternalStreamFailure"."""
    body = {"Message": message} | ({"ErrorCode": error_code} if error_code else {})
    return frame(
        {
            ":message-type": "exception",
            ":exception-type": kind,
            ":content-type": "application/json",
        },
        json.dumps(body).encode(),
    )


def decoded(blob: str | bytes) -> bytes:
    """A blob of a JSON protocol."""
    return blob if isinstance(blob, bytes) else base64.b64decode(blob)
