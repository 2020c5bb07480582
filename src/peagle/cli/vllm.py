"""vLLM as the engine of commands: its options, its launch, and `peagle serve --engine vllm`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peagle.backends.vllm.launch import VllmLaunch
from peagle.bundled import BUNDLED_TARGET
from peagle.cli import groups
from peagle.cli.flags import Given, pick_flags
from peagle.cli.settings import SPECULATIVE_VARIABLE, json_object
from peagle.cli.setup import Setup, note
from peagle.config import RUNTIME_KEYS, SpeculativeConfig
from peagle.errors import UserError
from peagle.evaluation.decoding_methods import NGRAM
from peagle.serving.config import ServerConfig

if TYPE_CHECKING:
    import torch

    from peagle.backends.vllm.installation import VllmInstallation

OPTIONS = pick_flags(groups.VLLM, "engine_name", "vllm_python", "tensor_parallel_size")
VllmFlags = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[-- FLAGS OF VLLM]", help="Flags that vLLM gets as they are.", show_default=False
    ),
]
# Fields of EngineConfig that vLLM has too.
_MEASURED_KEYS = (
    *("dtype", "max_model_len", "max_num_batched_tokens", "kv_cache_gib"),
    *("gpu_memory_utilization", "enable_prefix_caching"),
)


def is_vllm(given: Given, flags: Sequence[str]) -> bool:
    """Return whether the options ask for vLLM."""
    if given.value("engine_name") == "vllm":
        for key in ("engine.quantization", "engine.fp8_activations", "engine.kv_cache_dtype"):
            if key in given:
                raise UserError(f"{given[key].source} was given: {_UNSUPPORTED_OPTIONS[key][0]}.")
        if given.value(window := "speculative.draft_window"):
            raise UserError(
                f"{given[window].source} was given: vLLM takes the windows of a head from its "
                "config.json (layer_types, sliding_window)."
            )
        return True
    refuse_vllm_options(given, list(flags))
    return False


def refuse_unmeasured(given: Given, methods: Sequence[str]) -> None:
    """Refuse draft options that the measuring commands do not support with vLLM."""
    sampling = given.value("speculative.draft_sampling", "argmax")
    if sampling != "argmax":
        raise UserError(
            f"--draft-sampling is {sampling!r}; with --engine vllm drafts are "
            "measured as argmax. Leave it out."
        )
    if NGRAM in methods:
        raise UserError("--method is 'ngram'; vLLM is measured with heads only. Leave it out.")


def model_and_flags(model: str | None, flags: list[str] | None) -> tuple[str | None, list[str]]:
    """Separate the model from the flags of vLLM; without a model, `model` is the first flag."""
    flags = flags or []
    if model is not None and model.startswith("-"):
        return None, [model, *flags]
    if flags and not flags[0].startswith("-"):
        raise UserError(f"{flags[0]!r} was given after the model {model!r}; expected options.")
    return model, flags


def find(given: Given) -> VllmInstallation:
    """Return the installation of vLLM that the options name."""
    from peagle.backends.vllm import installation

    return installation.find_vllm(given.value("vllm_python"))


def launch_for(
    given: Given, flags: Sequence[str], target: Path, head: str | Path | None, k: int, **more: Any
) -> VllmLaunch:
    """Return a launch of vLLM on a free port with a key of its own.

    Prefix caching is off unless the options turn it on, as in our own engines.
    """
    engine = {name: given.value(f"engine.{name}") for name in _MEASURED_KEYS}
    engine["enable_prefix_caching"] = bool(engine["enable_prefix_caching"])
    speculative = None
    if head is not None:
        # The caller compares the head with its target.
        speculative = SpeculativeConfig(
            model=str(head), num_speculative_tokens=k, check_target=False
        )
    return VllmLaunch(
        str(target),
        speculative,
        port=0,
        threads=given.value("threads"),
        tensor_parallel_size=given.value("tensor_parallel_size", 1),
        extra=tuple(flags),
        **{name: value for name, value in engine.items() if value is not None},
        **more,
    )


def device_of(installation: VllmInstallation) -> torch.device | None:
    """Return the first GPU of this machine, on which vLLM runs; None for a build for CPUs."""
    from peagle.engine.placement import resolve_device

    return None if installation.is_cpu else resolve_device("auto")


def say(text: str) -> None:
    """Print a line of progress to standard error."""
    print(f"peagle: {text}", file=sys.stderr, flush=True)


def refuse_vllm_options(given: Given, flags: list[str]) -> None:
    """Refuse options and flags of vLLM where another engine runs."""
    for flag in groups.VLLM:
        if flag.key in given and flag.key != "engine_name":
            raise UserError(f"{flag.shown_name} was given; it needs --engine vllm.")
    if flags:
        raise UserError(
            f"{flags[0]!r} was given after --, where flags of vLLM stand; expected --engine vllm "
            "with them. Leave them out, or name that engine."
        )


_RECORDING = (
    *("record", "record_for", "record_all", "record_share", "record_max_gib", "record_days"),
    "record_key_file",
)
# Options without an equal in vLLM, with the reason, and the value that vLLM has anyway.
_UNSUPPORTED_OPTIONS = {
    "engine.device": ("vLLM runs on what it was built for", "auto"),
    "engine.quantization": ("vLLM has a --quantization of its own: give it behind --", None),
    "engine.fp8_activations": ("vLLM follows the checkpoint by itself", "off"),
    "engine.kv_cache_dtype": ("vLLM has a --kv-cache-dtype of its own: give it behind --", "auto"),
    "engine.max_itl_ms": ("vLLM bounds a step by --max-num-batched-tokens", 0),
    "engine.max_hold_ms": ("vLLM begins every prompt at once", 0),
    "server.compile_timeout_s": ("vLLM sets no limit to the compilation of schemas", None),
    "server.grammar_budget_s": ("vLLM sets no limit to what a grammar costs", 0),
    "server.user_grammars": ("vLLM takes grammars from every request", True),
    "server.parse_special_tokens": ("vLLM reads every spelled special token as the token", True),
    "server.hang_timeout_s": ("vLLM does not watch its engine for hangs", 0),
    "server.request_timeout_s": ("vLLM sets no limit to the time of a request", 0),
    "server.max_connections": ("vLLM sets no limit to connections", None),
    "server.head_timeout_s": ("vLLM sets no time for the head of a request", None),
    "server.ignore_priority": ("vLLM heeds priority with --scheduling-policy priority only", False),
    "server.playground": ("vLLM has no page at /", False),
    "server.allow_heads": ("vLLM keeps its head", ()),
    "admin_key_file": ("vLLM keeps its head", None),
    "server.on_engine_failure": ("vLLM ends with its engine; start it again from outside", "exit"),
    "server.cloudwatch_interval_s": ("vLLM writes no such lines", 0),
    "show_memory": ("vLLM prints its own account when it starts", None),
    "server.key_requests_per_minute": ("vLLM has no limits for each key", None),
    "server.key_tokens_per_minute": ("vLLM has no limits for each key", None),
    "server.key_concurrency": ("vLLM has no limits for each key", None),
    **{f"server.{name}": ("vLLM's server records nothing", None) for name in _RECORDING},
}
_ENGINE_KEYS = (
    *("dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size"),
    *("num_kv_blocks", "kv_cache_gib", "gpu_memory_utilization", "enable_prefix_caching"),
    *("enforce_eager", "seed"),
)
_SERVER_KEYS = (
    *("host", "port", "data_parallel_size", "allowed_origins", "max_body_bytes"),
    *("drain_timeout_s", "log_format", "log_prompts", "otlp_endpoint", "max_queue"),
)


def serve_vllm(given: Given, flags: Sequence[str], compare_draft: str | None) -> None:
    """Start vLLM with the given options, or print the command that starts it."""
    if compare_draft is not None:
        raise UserError(
            f"--compare-draft is {compare_draft!r}; vLLM serves one head. Leave it out."
        )
    setup = Setup(given)
    config: ServerConfig = setup.settings.build("server")
    _refuse_without_equal(setup, given)
    if "show_config" in given:
        setup.show(sections=("engine", "server"), with_decided=False)
        return
    launch = launch_of(setup, config, given, flags)
    from peagle.backends.vllm.installation import find_or_assume_vllm, find_vllm
    from peagle.backends.vllm.server import VllmServer

    setup.note_plain_decoding()
    python = given.value("vllm_python")
    if "print_command" in given:
        installation, missing = find_or_assume_vllm(python)
        server = VllmServer(launch, installation)
        for text in filter(None, [missing, *server.notes]):
            note(text)
        print(server.command)
        return
    server = VllmServer(
        launch, find_vllm(python), progress=say, log=partial(print, file=sys.stderr, flush=True)
    )
    raise typer.Exit(server.run())


def launch_of(setup: Setup, config: ServerConfig, given: Given, flags: Sequence[str]) -> VllmLaunch:
    """Return the launch of vLLM from given values alone; the other defaults are vLLM's."""
    from peagle.serving.hosts import allowed_host, allowed_origin, default_allowed_hosts
    from peagle.serving.keys import read_keys

    engine, server = setup.settings.section("engine"), setup.settings.section("server")
    options: dict[str, Any] = {name: engine[name] for name in _ENGINE_KEYS if name in engine}
    options |= {name: getattr(config, name) for name in _SERVER_KEYS if name in server}
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if name in given:
            options[name] = given.value(name)
    hosts = config.allowed_hosts
    hosts = default_allowed_hosts(config.host) if hosts is None else hosts
    options["allowed_hosts"] = tuple(name if name == "*" else allowed_host(name) for name in hosts)
    for origin in set(config.allowed_origins) - {"*"}:
        allowed_origin(origin)
    return VllmLaunch(
        setup.target,
        setup.speculative,
        revision=setup.settings.value("revision"),
        speculative_options=_runtime_options(setup, given),
        threads=setup.threads,
        served_model_name=config.served_model_name or _model_name(setup.target),
        chat_template=_chat_template(config.chat_template),
        tool_call_parser=_tool_parser(setup, config),
        keys=read_keys(os.environ, given.value("api_key_file")),
        extra=tuple(flags),
        **options,
    )


def _refuse_without_equal(setup: Setup, given: Given) -> None:
    for key, (reason, allowed) in _UNSUPPORTED_OPTIONS.items():
        setting = given.get(key)
        value = setup.settings.value(key) if setting is None else setting.value
        if value is None or value == allowed:
            continue
        source = setup.settings.source(key) if setting is None else setting.source
        raise UserError(
            f"{source} ({key.rpartition('.')[2]} is {value!r}) has no equal with --engine vllm: "
            f"{reason}. Leave it out."
        )


def _runtime_options(setup: Setup, given: Given) -> dict[str, Any]:
    """Return the given keys of the speculative configuration that concern how vLLM runs."""
    if setup.speculative is None:
        return {}
    whole: Mapping[str, Any] = {}
    if "speculative_config" in given:
        whole = json_object(given.value("speculative_config"), "{}")
    elif text := os.environ.get(SPECULATIVE_VARIABLE):
        whole = json_object(text, "{}")
    elif (file := given.value("config")) is not None:
        import tomllib

        whole = tomllib.loads(Path(file).read_text(encoding="utf-8")).get("speculative", {})
    return {key: whole[key] for key in RUNTIME_KEYS if whole.get(key) is not None}


def _model_name(target: str) -> str:
    """Return the served name: the name of the folder, or the hub id without its revision."""
    if target == str(BUNDLED_TARGET):
        return "peagle-code"
    return Path(target).resolve().name if Path(target).exists() else target.partition("@")[0]


def _chat_template(template: str | None) -> str | None:
    """Return a file or a template unchanged; refuse the name of a template, unknown to vLLM."""
    if template is None or Path(template).is_file() or "{" in template:
        return template
    raise UserError(
        f"--chat-template is {template!r}, which is neither a file nor a template; vLLM does not "
        "take the name of one of the model's templates. Write that template into a file."
    )


def _tool_parser(setup: Setup, config: ServerConfig) -> str | None:
    parser = setup.settings.value("server.tool_call_parser")
    if parser == "auto":
        raise UserError(
            "--tool-call-parser is 'auto'; vLLM does not recognise a template by itself. Name the "
            "parser, or hand on vLLM's own flags: -- --enable-auto-tool-choice "
            "--tool-call-parser NAME."
        )
    return None if parser in (None, "none") else config.tool_call_parser
