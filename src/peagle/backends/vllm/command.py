"""The command line and the environment that start vLLM, made of our options."""

import json
import math
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from peagle.backends.vllm.facts import GUARD_VARIABLE, PLUGIN_VARIABLE
from peagle.backends.vllm.installation import VllmInstallation
from peagle.backends.vllm.launch import VllmLaunch, with_head
from peagle.config.network import LOOPBACK_NAMES, is_loopback

# vLLM's processes have this folder on their path. It holds nothing but the way to this peagle, so
# that it shadows no other module.
MODULE_FOLDER = Path(__file__).parent / "inside"
MODULE = "vllm.entrypoints.openai.api_server"
MIDDLEWARE = "peagle.serving.vllm_guard.Guard"
# The first release with --shutdown-timeout; before it, SIGTERM cuts off running requests.
DRAINS_SINCE = (0, 18)
_GIB = 1 << 30
# Arguments of vLLM's engine that a launch has under the same name.
_SAME_NAMES = (
    *("revision", "max_model_len", "max_num_seqs", "max_num_batched_tokens"),
    *("gpu_memory_utilization", "block_size", "seed", "enable_prefix_caching"),
)

# vLLM sends no usage statistics, runs no code out of the current folder, takes no pickles over
# sockets, and has none of its routes for developers.
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
    """A process to start: its command line, and its variables beside this process's."""

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
    lengths = config.lookup_lengths if config.method == "ngram" else (None, None)
    rates = config.synthetic_acceptance_rates
    schedule = config.num_speculative_tokens_per_batch_size
    if isinstance(schedule, tuple) and schedule[0][0] > 1:
        # vLLM wants a K for one sequence too; here it is K itself (`SpeculativeConfig.tokens_for`).
        schedule = ((1, schedule[0][0] - 1, config.k), *schedule)
    data = {
        "method": config.method,
        "model": config.model,
        "revision": config.revision,
        "num_speculative_tokens": config.k,
        "parallel_drafting": launch.is_parallel or None,
        "prompt_lookup_max": lengths[0],
        "prompt_lookup_min": lengths[1],
        "max_model_len": config.max_model_len,
        "draft_sample_method": None if config.draft_sampling == "argmax" else "probabilistic",
        "num_speculative_tokens_per_batch_size": schedule,
        "rejection_sample_method": None if rates is None else "synthetic",
        "synthetic_acceptance_rates": rates,
    }
    given = {name: value for name, value in data.items() if value is not None}
    return given | dict(launch.speculative_options)


def vllm_command(launch: VllmLaunch, installation: VllmInstallation) -> VllmCommand:
    """Return the process that serves `launch`.

    Raises:
        UserError: the head cannot be read, or was not trained for the requested drafting.
    """
    launch = with_head(launch)
    arguments = engine_arguments(launch, installation) | _server_arguments(launch, installation)
    argv = [str(installation.python), "-m", MODULE, *as_flags(arguments), *launch.extra]
    return VllmCommand(tuple(argv), vllm_environment(launch, installation))


def engine_arguments(launch: VllmLaunch, installation: VllmInstallation) -> dict[str, Any]:
    """Return the arguments of vLLM's engine by name, but for the ones that vLLM chooses."""
    arguments: dict[str, Any] = {
        "model": launch.target,
        "served_model_name": launch.name,
        "dtype": launch.dtype_on(installation),
        "num_gpu_blocks_override": launch.num_kv_blocks,
        **{name: getattr(launch, name) for name in _SAME_NAMES},
        # A CPU build would compile for minutes.
        "enforce_eager": launch.enforce_eager or installation.is_cpu or None,
        "speculative_config": speculative_json(launch),
    }
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        arguments[name] = None if (size := getattr(launch, name)) == 1 else size
    if launch.kv_cache_gib is not None and not installation.is_cpu:
        arguments["kv_cache_memory_bytes"] = round(launch.kv_cache_gib * _GIB)
    if not launch.has_flag("--load-format"):
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
    if launch.is_greedy_only(installation):
        arguments["override_generation_config"] = {"temperature": 0.0}
    return {name: value for name, value in arguments.items() if value is not None}


def as_flags(arguments: Mapping[str, Any]) -> list[str]:
    """Return arguments of vLLM as words of its command line."""
    flags = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            is_json = isinstance(value, dict | list)
            flags += [f"--{flag}", json.dumps(value) if is_json else str(value)]
    return flags


def vllm_environment(launch: VllmLaunch, installation: VllmInstallation) -> dict[str, str]:
    """Return the variables that vLLM gets beside this process's."""
    variables = dict(SAFE_ENVIRONMENT)
    inherited = os.environ.get("PYTHONPATH")
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(MODULE_FOLDER), inherited)))
    if launch.is_parallel:
        variables["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        assert launch.speculative is not None
        variables[PLUGIN_VARIABLE] = str(int(launch.speculative.correction))
    if launch.threads is not None:
        variables["OMP_NUM_THREADS"] = str(launch.threads)
    if installation.is_cpu:
        # Few users have the right to bind threads to cores.
        bind = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        variables["VLLM_CPU_OMP_THREADS_BIND"] = bind
        variables["VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"] = "1"  # no card to give back
        if launch.kv_cache_gib is not None or "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            variables["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, math.ceil(launch.kv_cache_gib or 2)))
    if launch.otlp_endpoint is not None:
        variables["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = "http/protobuf"
    # The guard compares digests of keys; no process of vLLM has a key.
    variables["VLLM_API_KEY"] = ""
    guard = {
        "allowed_hosts": _hosts(launch),
        "allowed_origins": list(launch.allowed_origins),
        "max_body_bytes": launch.max_body_bytes,
        "keys": [sha256(key.encode()).hexdigest() for key in launch.keys or ()],
        "greedy_only": launch.is_greedy_only(installation),
    }
    variables[GUARD_VARIABLE] = json.dumps(guard)
    return variables


def _hosts(launch: VllmLaunch) -> list[str]:
    """Return the Host headers to answer: by default the names of a loopback address, else any."""
    if launch.allowed_hosts is not None:
        return list(launch.allowed_hosts)
    own = f"[{launch.host}]" if ":" in launch.host.strip("[]") else launch.host
    return [*dict.fromkeys((*LOOPBACK_NAMES, own))] if is_loopback(launch.host) else ["*"]
