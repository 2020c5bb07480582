"""Containers of a stand-in for SageMaker: the image's entry point, as processes on this machine."""

import json
import random
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from deploy.fake_aws import FakeAws
from deploy.fake_endpoints import ContainerError, Invocation
from serving.image import start_warm
from serving.warm import WarmProcess

MODEL_FOLDER = "/opt/ml/model"


class ContainerHost:
    """Runs what endpoint configurations ask for, and answers their endpoints' invocations.

    What a container would find below /opt/ml is fetched from S3 into a folder, and its environment
    says that folder instead. It is ready when its /ping says so.
    """

    def __init__(self, aws: FakeAws, folder: Path, seed: int = 0) -> None:
        self._aws, self._folder = aws, folder
        self._random = random.Random(seed)
        self._running: dict[str, tuple[WarmProcess, int]] = {}
        aws.endpoints.is_ready = self.is_ready
        aws.endpoints.answer_with = self.answer

    def is_ready(self, config: str) -> bool:
        if config not in self._running:
            self._running[config] = self._start(self._aws.endpoints.container_of(config), config)
        process, port = self._running[config]
        assert process.poll() is None, process.communicate()[0]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ping", timeout=2) as answer:
                return answer.status == 200
        except OSError:
            return False

    def answer(self, invocation: Invocation) -> Iterator[bytes]:
        """What the container answers, in parts that end anywhere."""
        _, port = self._running[invocation.config]
        headers = {"Content-Type": "application/json"}
        url = f"http://127.0.0.1:{port}/invocations"
        asked = urllib.request.Request(url, invocation.body, headers)
        try:
            with urllib.request.urlopen(asked, timeout=60) as answer:
                while part := answer.read(self._random.randint(1, 60)):
                    yield part
        except urllib.error.HTTPError as error:
            raise ContainerError(error.code, error.read().decode()) from None

    def end(self) -> None:
        """Stop all of them."""
        for process, _ in self._running.values():
            process.kill()
            process.communicate()

    # ---- a container ----

    def _start(self, container: Mapping[str, Any], config: str) -> tuple[WarmProcess, int]:
        folder = self._folder / config
        folder.mkdir()
        variables = dict(container.get("Environment", {}))
        if source := container.get("ModelDataSource"):
            self._fetch(source["S3DataSource"]["S3Uri"], Path(f"{folder}{MODEL_FOLDER}"))
            # SageMaker mounts it where the image looks by itself.
            variables.setdefault("SM_VLLM_MODEL", MODEL_FOLDER)
        moved = {k: v.replace("/opt/ml/", f"{folder}/opt/ml/") for k, v in variables.items()}
        port = _free_port()
        return start_warm(folder, "serve", **moved, SM_VLLM_PORT=str(port)), port

    def _fetch(self, uri: str, folder: Path) -> None:
        for name, content in self._aws.objects(uri).items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def events_of(body: bytes) -> list[dict[str, Any]]:
    """The JSON of a stream's server-sent events."""
    lines = [line[6:] for line in body.decode().split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]
