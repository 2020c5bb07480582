"""The commands that peagle tells its users to run, run against the stand-in."""

from __future__ import annotations

import json
import shlex
from typing import Any

from botocore import xform_name
from botocore.exceptions import ClientError

from deploy.fake_aws import REGION, FakeAws
from peagle.deploy.aws_errors import is_gone


def run_command(aws: FakeAws, text: str) -> bool:
    """Do what a command of the AWS CLI does; false if what it is about was not there."""
    program, service, operation, *rest = shlex.split(text)
    assert program == "aws"
    assert rest[-2:] == ["--region", REGION]
    aws.clock.sleep(1000)
    if (service, operation) == ("s3", "rm"):
        uri, recursive = rest[:-2]
        assert recursive == "--recursive"
        return _remove(aws, uri)
    client = aws.clients(direct=True).client(service)
    api = client.meta.method_to_api_mapping[operation.replace("-", "_")]
    shape = client.meta.service_model.operation_model(api).input_shape
    if rest[0] == "--cli-input-json":
        parameters = json.loads(rest[1])
    else:
        options = dict(zip(rest[:-2:2], rest[1:-2:2]))
        members = {f"--{xform_name(name, '-')}": (name, m) for name, m in shape.members.items()}
        parameters = {members[o][0]: _typed(members[o][1], value) for o, value in options.items()}
    try:
        getattr(client, operation.replace("-", "_"))(**parameters)
    except ClientError as error:
        if is_gone(error):
            return False
        raise
    aws.clock.sleep(1000)
    return True


def _typed(shape: Any, text: str) -> Any:
    return int(text) if shape.type_name in ("integer", "long") else text


def _remove(aws: FakeAws, uri: str) -> bool:
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    client = aws.clients(direct=True).client("s3")
    found = client.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", [])
    for item in found:
        client.delete_object(Bucket=bucket, Key=item["Key"])
    return bool(found)
