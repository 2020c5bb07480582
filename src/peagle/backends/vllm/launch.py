"""A launch of vLLM: model, head and options, with the facts that the head's files add."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from peagle.backends.vllm.installation import VllmInstallation
from peagle.bundled import expand_bundled
from peagle.config import SpeculativeConfig
from peagle.config.network import is_loopback
from peagle.errors import CheckpointError, UserError
from peagle.model_folder import read_file_header
from peagle.models.gguf_header import is_gguf


@dataclass(frozen=True, slots=True)
class VllmLaunch:
    """A launch of vLLM; None leaves a choice to vLLM.

    EngineConfig and ServerConfig describe the fields that are not described here.

    Attributes:
        target, revision: folder or hub id, and its revision.
        speculative: how drafts are made; None decodes plainly.
        is_parallel: whether the head drafts in parallel; None reads it from the head.
        head_folder: where its files are; None looks for them.
        speculative_options: further keys of vLLM's own speculative configuration.
        threads: CPU threads.
        port: 0 takes a free one.
        served_model_name: the clients' name for the model; None takes `target`.
        chat_template: a file, or a template as text.
        keys: API keys; () opens the server to everybody on this machine, None makes one.
        max_queue: requests that may be under way, running or waiting.
        extra: further flags of vLLM.

    Raises:
        UserError: other machines could reach the server without a key.
    """

    target: str
    speculative: SpeculativeConfig | None = None
    is_parallel: bool | None = None
    head_folder: str | None = None
    speculative_options: Mapping[str, Any] = field(default_factory=dict)
    revision: str | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_gib: float | None = None
    num_kv_blocks: int | None = None
    block_size: int | None = None
    enable_prefix_caching: bool | None = None
    enforce_eager: bool = False
    seed: int | None = None
    threads: int | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    chat_template: str | None = None
    tool_call_parser: str | None = None
    keys: tuple[str, ...] | None = field(default=None, repr=False)
    allowed_hosts: tuple[str, ...] | None = None
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = 4 << 20
    drain_timeout_s: float = 60.0
    log_format: str = "text"
    log_prompts: bool = False
    otlp_endpoint: str | None = None
    max_queue: int | None = None
    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.keys == () and not is_loopback(self.host):
            raise UserError(
                f"The host is {self.host!r} and there is no API key: everybody who reaches the "
                "server could use it. Set PEAGLE_API_KEY or --api-key-file, or leave --host out."
            )

    @property
    def name(self) -> str:
        """Return the clients' name for the model."""
        return self.served_model_name or self.target

    def has_flag(self, name: str) -> bool:
        """Return whether a flag of vLLM is among the flags that the user hands on."""
        return any(flag_name(word) == name for word in self.extra)

    def dtype_on(self, installation: VllmInstallation) -> str:
        """Return the type of weights: float32 by default on a CPU, as bfloat16 ends some runs."""
        return "float32" if self.dtype == "auto" and installation.is_cpu else self.dtype

    def is_greedy_only(self, installation: VllmInstallation) -> bool:
        """Return whether sampling would be wrong: speculation of a CPU build is greedy only."""
        return installation.is_cpu and self.speculative is not None


def flag_name(word: str) -> str | None:
    """Return the flag that a word of a command line is, as vLLM reads it; None for a value."""
    if not word.startswith("-") or word[1:2].isdigit() or word in ("-", "--"):
        return None
    return word.partition("=")[0].partition(".")[0].replace("_", "-")


def with_head(launch: VllmLaunch) -> VllmLaunch:
    """Return the launch with the folder of its head, and whether that head drafts in parallel.

    vLLM is given a hub id as it is: on several nodes each fetches it for itself. Of a GGUF file and
    of a compact head vLLM is given a folder in the cache.

    Raises:
        UserError: the head is not there, or was not trained for the requested drafting.
    """
    launch = replace(launch, **_hub_id(launch.target, launch.revision, "target"))
    if is_gguf(Path(launch.target)):
        from peagle.models.loading import resolve_model

        launch = replace(launch, target=str(resolve_model(launch.target, launch.revision)))
    config = launch.speculative
    if config is None or config.model is None or launch.is_parallel is not None:
        return replace(launch, is_parallel=bool(launch.is_parallel))
    from peagle.models.checkpoint.whole import whole_head
    from peagle.models.loading import with_local_head

    local = with_local_head(config)
    assert local.model is not None
    from peagle.models.checkpoint import ANY_DEPTH, read_head

    head = read_head(local.model, num_target_layers=ANY_DEPTH).config
    asked = config.parallel_drafting
    if asked is not None and asked != head.is_parallel:
        kind = "a P-EAGLE head, trained" if head.is_parallel else "an EAGLE-3 head, not trained"
        raise UserError(
            f"parallel_drafting is {asked} and the head {config.model!r} is {kind} for parallel "
            "drafting; vLLM would draft nonsense with it. Leave parallel_drafting out: it is read "
            "from the head."
        )
    if head.is_parallel and not _has_mask_hidden(local.model):
        raise CheckpointError(
            f"The head {config.model!r} names a mask token but has no tensor mask_hidden, without "
            "which vLLM does not draft in parallel. Export it again from its training run "
            "(peagle doctor looks at the rest)."
        )
    model = _hub_id(expand_bundled(config.model, "draft"), config.revision, "model")
    whole = str(whole_head(local.model, launch.target, launch.revision))
    if whole != local.model:
        local, model = replace(local, model=whole), {"model": whole, "revision": None}
    config = replace(config, num_speculative_tokens=local.num_speculative_tokens, **model)
    return replace(
        launch, speculative=config, is_parallel=head.is_parallel, head_folder=local.model
    )


def _hub_id(name: str, revision: str | None, key: str) -> dict[str, str | None]:
    """Return name and revision apart, as vLLM takes them; a folder stays as it is."""
    if not os.path.exists(os.path.expanduser(name)) and "@" in name:
        name, _, revision = name.partition("@")
    return {key: os.path.expanduser(name), "revision": revision}


def _has_mask_hidden(folder: str) -> bool:
    for file in sorted(Path(folder).glob("*.safetensors")):
        try:
            names = read_file_header(file)
        except ValueError as error:
            raise CheckpointError(f"{str(file)!r} is cut or damaged: {error}.") from None
        if any(name.endswith("mask_hidden") for name in names):
            return True
    return False
