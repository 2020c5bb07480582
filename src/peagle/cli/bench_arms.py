"""What a benchmark compares: ways to decode in this process, and servers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.cli.flags import Given
from peagle.cli.settings import Settings
from peagle.cli.setup import note
from peagle.cli.vllm_engine import launch_for, say
from peagle.errors import UserError

if TYPE_CHECKING:
    import torch

    from peagle.evaluation.endpoint import EndpointBackend
    from peagle.evaluation.sweep import Arm
    from peagle.results import TrainingRecord

DEFAULT_KS = (3, 5, 7)
_ENDPOINT = re.compile(r"(?P<name>[\w.+-]+)=(?P<url>\S+)")


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The servers to measure.

    Attributes:
        urls: by the names that they have in tables.
        models: what they are asked for, by the same names.
    """

    urls: Mapping[str, str]
    models: Mapping[str, str]

    @classmethod
    def of(cls, endpoint: Sequence[str], model: Sequence[str]) -> Endpoints:
        """Read the options.

        Raises:
            UserError: one is not usable.
        """
        urls = _named("--endpoint", endpoint, "URL")
        models = _named("--model", model, "MODEL")
        if unknown := sorted(set(models) - set(urls)):
            raise UserError(f"--model names the endpoint {unknown[0]!r}; there is no such one.")
        return cls(urls, models)


def connect(
    endpoints: Endpoints, thinking: bool | None, extra_body: Mapping[str, Any]
) -> dict[str, EndpointBackend]:
    """The servers, each found to be there, by the names of their methods.

    Raises:
        UserError: one cannot be reached or has no such model.
    """
    from peagle.evaluation.endpoint import EndpointBackend

    extra = _extra_body(thinking, extra_body)
    return {
        name: EndpointBackend(url, endpoints.models.get(name), extra_body=extra, report=False)
        for name, url in endpoints.urls.items()
    }


@contextmanager
def in_vllm(
    given: Given,
    flags: Sequence[str],
    engines: Engines,
    k: int,
    most_in_flight: int,
    thinking: bool | None,
    extra_body: Mapping[str, Any],
) -> Iterator[EndpointBackend]:
    """vLLM with the first head of the engines here, for as long as the context lasts.

    Raises:
        UserError: vLLM is not there, or does not start.
    """
    from peagle.backends.vllm.installation import find_vllm
    from peagle.evaluation.vllm_server import vllm_backend

    launch = launch_for(
        given, flags, engines.folder, engines.head or None, k, max_num_seqs=most_in_flight
    )
    installation = find_vllm(given.value("vllm_python"))
    extra = _extra_body(thinking, extra_body)
    with vllm_backend(launch, installation, say=say, extra_body=extra) as backend:
        yield backend


def _extra_body(thinking: bool | None, extra_body: Mapping[str, Any]) -> dict[str, Any]:
    extra = dict(extra_body)
    if thinking is not None:
        wish = {"enable_thinking": thinking}
        extra["chat_template_kwargs"] = {**extra.get("chat_template_kwargs", {}), **wish}
    return extra


def endpoint_arms(backends: Mapping[str, EndpointBackend]) -> list[Arm]:
    """One arm a server, at the K that it tells."""
    from peagle.evaluation.sweep import Arm

    return [
        Arm(name, "", backend.num_speculative_tokens() or 0, backend)
        for name, backend in backends.items()
    ]


@dataclass(slots=True)
class Engines:
    """Engines of this process, one for each method and K, all on one target.

    Attributes:
        arms: plain decoding first.
        target, dtype, device: of the target.
        has_template: whether its tokenizer has a chat template.
        folder: of the target.
        head: folder of the first head, "" if there is none.
        identity: what must be the same for measurements to be of the same thing.
        training: how long each method's head was trained, where a record tells.
    """

    arms: list[Arm]
    target: str
    dtype: str
    device: torch.device
    has_template: bool
    folder: Path
    head: str
    identity: dict[str, Any]
    training: dict[str, TrainingRecord]


def load_engines(
    given: Given,
    settings: Settings,
    eagle3: str | None,
    methods: Sequence[str],
    ks: Sequence[int],
    most_in_flight: int,
    thinking: bool | None,
) -> Engines:
    """Load target and heads and build the engines: plain decoding, and every head at every K.

    Raises:
        UserError: a model, a head or an option is not usable.
    """
    from peagle.cli.eval_models import load_models
    from peagle.evaluation.acceptance_file import weights_digest
    from peagle.evaluation.compare import build
    from peagle.evaluation.decoding_methods import PLAIN, DecodingMethod
    from peagle.evaluation.eval_run import target_digest
    from peagle.evaluation.local import EngineBackend
    from peagle.evaluation.sweep import Arm
    from peagle.evaluation.training_record import read_training_record

    models = load_models(given, settings, eagle3, methods, ngram=False)
    head_options = settings.section("speculative")
    head_options.pop("model", None)
    plain = DecodingMethod(PLAIN)
    arms: dict[str, tuple[DecodingMethod, int]] = {PLAIN: (plain, 0)}
    configurations = {PLAIN: plain.config(0)}
    for one in models.methods:
        for k in ks or sorted({min(k, models.default_k) for k in DEFAULT_KS}):
            name = f"{one.method.name} K={k}"
            arms[name] = one.method, k
            own = head_options if one.folder else {}
            configurations[name] = one.loadable.config(k, **own)
    sizes = {"max_num_seqs": most_in_flight, **models.engine_options}
    note(f"building {len(arms)} engines on {models.name}")
    llms = build(models.target, configurations, **sizes)
    device = models.target.device
    return Engines(
        [
            Arm(method.name, method.source, k, EngineBackend(llms[name], thinking=thinking), device)
            for name, (method, k) in arms.items()
        ],
        models.name,
        models.dtype,
        device,
        models.has_template,
        models.folder,
        models.methods[0].folder if models.methods else "",
        {
            "target_sha256": target_digest(models.target),
            "heads_sha256": {one.method.name: weights_digest(one.folder) for one in models.methods},
            "engine": {**sizes, **head_options},
        },
        {
            one.method.name: record
            for one in models.methods
            if one.folder and (record := read_training_record(one.folder)) is not None
        },
    )


def _named(option: str, given: Sequence[str], what: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in given:
        match = _ENDPOINT.fullmatch(text)
        if match is None or match["name"].lower() in ("http", "https"):
            raise UserError(
                f"{option} is {text!r}; expected NAME={what} with a name for tables, like "
                f"{'vllm=http://127.0.0.1:8000' if what == 'URL' else 'vllm=Qwen/Qwen3-8B'}."
            )
        if match["name"] in found:
            raise UserError(f"{option} is given twice for {match['name']!r}; leave one out.")
        found[match["name"]] = match["url"]
    return found
