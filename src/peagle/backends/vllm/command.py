"""The command line and the environment that start vLLM, made of our options."""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from peagle.backends.vllm.facts import GUARD_VARIABLE
from peagle.backends.vllm.flags import has_flag
from peagle.backends.vllm.installation import VllmInstallation
from peagle.backends.vllm.launch import VllmLaunch, with_head
from peagle.config.network import LOOPBACK_NAMES, is_loopback

# The folder on the path of vLLM's processes; it holds nothing but the way to this peagle, so that
# it shadows no other module.
INSIDE = Path(__file__).parent / "inside"
MODULE = "vllm.entrypoints.openai.api_server"
MIDDLEWARE = "peagle.serving.vllm_guard.Guard"
# First release with --shutdown-timeout; before, SIGTERM cuts what runs.
DRAINS_SINCE = (0, 18)
_GIB = 1 << 30

# No usage statistics, no code out of the current folder, no pickles over sockets, and none of the
# routes that are for vLLM's developers.
SAFE_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "PYTHONSAFEPATH": "1",
    "VLLM_SERVER_DEV_MODE": "0",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
    "VLLM_DEBUG_LOG_API_SERVER_RESPONSE": "0",
}


@dataclass(frozen=True, slots=True)
class VllmCommand:
    """A process to start: its command line, and the variables that it has over this process's."""

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)

    def variables(self) -> dict[str, str]:
        """Return its whole environment."""
        return {**os.environ, **self.environment}

    def __str__(self) -> str:
        """Return a line for a shell, without secrets."""
        guard = json.loads(self.environment[GUARD_VARIABLE])
        hidden = json.dumps(guard | {"keys": ["..." for _ in guard["keys"]]})
        environment = {**self.environment, GUARD_VARIABLE: hidden}
        variables = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
        return " \\\n  ".join(["env", *variables, shlex.join(self.argv)])


def speculative_json(launch: VllmLaunch) -> dict[str, Any] | None:
    """Return vLLM's speculative configuration; None decodes plainly.

    `"method": "eagle3"` is always named: vLLM would take a head for a draft model of its own
    (docs/compatibility.md). `parallel_drafting` is what the head was trained for.
    """
    config = launch.speculative
    if config is None:
        return None
    data: dict[str, Any] = {"method": config.method}
    if config.model is not None:
        data["model"] = config.model
        data |= {"revision": config.revision} if config.revision else {}
    data["num_speculative_tokens"] = config.num_drafts
    if launch.is_parallel:
        data["parallel_drafting"] = True
    if config.method == "ngram":
        data["prompt_lookup_max"] = config.prompt_lookup_max
        data["prompt_lookup_min"] = config.prompt_lookup_min
    if config.max_model_len is not None:
        data["max_model_len"] = config.max_model_len
    if config.draft_sampling == "probabilistic":
        data["draft_sample_method"] = "probabilistic"
    if config.num_speculative_tokens_per_batch_size is not None:
        ranges = config.num_speculative_tokens_per_batch_size
        data["num_speculative_tokens_per_batch_size"] = [list(one) for one in ranges]
    if config.synthetic_acceptance_rates is not None:
        data["rejection_sample_method"] = "synthetic"
        data["synthetic_acceptance_rates"] = list(config.synthetic_acceptance_rates)
    return data | dict(launch.speculative_options)


def vllm_command(launch: VllmLaunch, installation: VllmInstallation) -> VllmCommand:
    """Return the process that serves `launch`.

    Raises:
        UserError: the head cannot be read, or is asked for what it was not trained for.
    """
    launch = with_head(launch)
    arguments = engine_arguments(launch, installation) | _server_arguments(launch, installation)
    argv = [str(installation.python), "-m", MODULE, *_as_flags(arguments), *launch.extra]
    return VllmCommand(tuple(argv), environment(launch, installation))


def greedy_only(launch: VllmLaunch, installation: VllmInstallation) -> bool:
    """Whether sampling would be wrong: speculation of a CPU build verifies greedily only."""
    return installation.is_cpu and launch.speculative is not None


def engine_arguments(launch: VllmLaunch, installation: VllmInstallation) -> dict[str, Any]:
    """Return arguments of vLLM's engine by their names, without those that vLLM chooses."""
    arguments: dict[str, Any] = {
        "model": launch.target,
        "revision": launch.revision,
        "served_model_name": launch.name,
        "dtype": dtype_for(launch, installation),
        "max_model_len": launch.max_model_len,
        "max_num_seqs": launch.max_num_seqs,
        "max_num_batched_tokens": launch.max_num_batched_tokens,
        "gpu_memory_utilization": launch.gpu_memory_utilization,
        "num_gpu_blocks_override": launch.num_kv_blocks,
        "block_size": launch.block_size,
        "seed": launch.seed,
        "enable_prefix_caching": launch.enable_prefix_caching,
        # A CPU build would compile for minutes.
        "enforce_eager": launch.enforce_eager or installation.is_cpu or None,
        "speculative_config": speculative_json(launch),
    }
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        arguments[name] = None if (size := getattr(launch, name)) == 1 else size
    if launch.kv_cache_gib is not None and not installation.is_cpu:
        arguments["kv_cache_memory_bytes"] = round(launch.kv_cache_gib * _GIB)
    if not has_flag(launch.extra, "--load-format"):
        arguments["load_format"] = "safetensors"
    return {name: value for name, value in arguments.items() if value is not None}


def _server_arguments(launch: VllmLaunch, installation: VllmInstallation) -> dict[str, Any]:
    """Return the arguments of HTTP, safety and logs."""
    arguments: dict[str, Any] = {
        "host": launch.host,
        "port": launch.port,
        "chat_template": launch.chat_template,
        "max_num_queued_reqs": launch.max_queue,
        "middleware": MIDDLEWARE,
        "allowed_origins": [],  # the guard answers pages of other sites
        "tool_call_parser": launch.tool_call_parser,
        "enable_auto_tool_choice": launch.tool_call_parser is not None or None,
        "enable_log_requests": launch.log_prompts or None,
        "enable_log_outputs": launch.log_prompts or None,
    }
    if (installation.release or DRAINS_SINCE) >= DRAINS_SINCE:
        arguments["shutdown_timeout"] = math.ceil(launch.drain_timeout_s)
    if launch.log_format == "json":
        arguments["logging_config"] = {"formatter": "json"}
    if launch.otlp_endpoint is not None:
        arguments["otlp_traces_endpoint"] = launch.otlp_endpoint.rstrip("/") + "/v1/traces"
    if greedy_only(launch, installation):
        arguments["override_generation_config"] = {"temperature": 0.0}
    return {name: value for name, value in arguments.items() if value is not None}


def _as_flags(arguments: Mapping[str, Any]) -> list[str]:
    flags = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            is_json = isinstance(value, dict | list)
            flags += [f"--{flag}", json.dumps(value) if is_json else str(value)]
    return flags


def dtype_for(launch: VllmLaunch, installation: VllmInstallation) -> str:
    """Return the type of weights: float32 by default on a CPU, where bfloat16 ends some runs."""
    return "float32" if launch.dtype == "auto" and installation.is_cpu else launch.dtype


def environment(launch: VllmLaunch, installation: VllmInstallation) -> dict[str, str]:
    """Return the variables that vLLM has over those of this process."""
    variables = dict(SAFE_ENVIRONMENT)
    inherited = os.environ.get("PYTHONPATH")
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(INSIDE), inherited)))
    if launch.is_parallel:
        variables["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    if installation.is_cpu:
        variables |= _cpu_variables(launch)
    elif launch.threads is not None:
        variables["OMP_NUM_THREADS"] = str(launch.threads)
    if launch.otlp_endpoint is not None:
        variables["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = "http/protobuf"
    keys = launch.keys or ()
    # The guard compares keys, by digests; no process of vLLM has one.
    variables["VLLM_API_KEY"] = ""
    guard = {
        "allowed_hosts": _hosts(launch),
        "allowed_origins": list(launch.allowed_origins),
        "max_body_bytes": launch.max_body_bytes,
        "keys": [sha256(key.encode()).hexdigest() for key in keys],
        "greedy_only": greedy_only(launch, installation),
    }
    variables[GUARD_VARIABLE] = json.dumps(guard)
    return variables


def _hosts(launch: VllmLaunch) -> list[str]:
    """Return the Host headers that are served: by default a loopback address's names, else any."""
    if launch.allowed_hosts is not None:
        return list(launch.allowed_hosts)
    own = f"[{launch.host}]" if ":" in launch.host.strip("[]") else launch.host
    return [*dict.fromkeys((*LOOPBACK_NAMES, own))] if is_loopback(launch.host) else ["*"]


def _cpu_variables(launch: VllmLaunch) -> dict[str, str]:
    """Return memory and threads of a CPU build; few have the right to bind threads to cores."""
    variables = {
        "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",  # no card to give back
    }
    if launch.kv_cache_gib is not None or "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        variables["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, math.ceil(launch.kv_cache_gib or 2)))
    if launch.threads is not None:
        variables["OMP_NUM_THREADS"] = str(launch.threads)
    return variables
