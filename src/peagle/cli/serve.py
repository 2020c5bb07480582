"""`peagle serve`: serve a model over HTTP, compatible with OpenAI's API."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from peagle.bundled import BUNDLED, FOLDERS, SMOLLM2, expand_bundled
from peagle.cli import groups
from peagle.cli.flags import Flag, Given, takes
from peagle.cli.settings import Layer, Setting
from peagle.cli.setup import Setup, check_paths, name_target
from peagle.cli.vllm import VllmFlags, model_and_flags, refuse_vllm_options
from peagle.config import SpeculativeConfig
from peagle.errors import UserError
from peagle.extras import require_package
from peagle.serving.config import ServerConfig

if TYPE_CHECKING:
    from peagle.serving.engine_process import EngineSpec

EXAMPLES = """
The bundled code model with its P-EAGLE head, and a page to try it at http://127.0.0.1:8000:
  peagle serve
  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
      -d '{"prompt": "def fibonacci(n):", "max_tokens": 64, "temperature": 0}'

A model of your own, in a folder or on the hub; a second head to compare with on the page:
  peagle serve Qwen/Qwen3-8B --draft ./peagle-head --max-num-seqs 64
  peagle serve ./Qwen3-8B --draft ./peagle-head --compare-draft ./eagle3-head

With vLLM's form of the speculative configuration; two engines behind one port:
  peagle serve ./model --data-parallel-size 2 --speculative-config \\
      '{"method": "eagle3", "model": "./head", "num_speculative_tokens": 5}'

For other machines, with a key; in a SageMaker container, by its environment:
  PEAGLE_API_KEY=... peagle serve --host 0.0.0.0 --log-format json
  peagle serve --sagemaker

On vLLM, over several GPUs; what follows -- are flags of vLLM's own; docs/vllm.md has the rest:
  peagle serve openai/gpt-oss-120b --draft amazon/gpt-oss-120b-p-eagle --engine vllm \\
      --tensor-parallel-size 4 -k 5 -- --kv-cache-dtype fp8
  peagle serve ./model --draft ./peagle-head --engine vllm --print-command
"""

_MAX_NUM_SEQS = 32
_DEFAULTS = Layer(
    {
        "engine.max_num_seqs": Setting(_MAX_NUM_SEQS, "peagle serve"),
        "engine.max_itl_ms": Setting(100.0, "peagle serve"),
    }
)
_PLAIN, _OWN_ENGINE = "plain", "peagle"


def _for_server(flag: Flag) -> Flag:
    """Return a flag with the default of this command."""
    own = flag.key == "engine.max_num_seqs"
    return replace(flag, default=str(_MAX_NUM_SEQS)) if own else flag


@takes(
    *groups.MODEL,
    *groups.SPECULATION,
    *groups.SERVER,
    *groups.SAFETY,
    *groups.RECORDING,
    *groups.OBSERVATION,
    *map(_for_server, groups.ENGINE),
    *groups.TUNING,
    *groups.VLLM,
    *groups.SETTINGS,
)
def serve(
    given: Given,
    model: groups.Model = None,
    flags: VllmFlags = None,
    compare_draft: str | None = typer.Option(
        None,
        metavar="MODEL",
        help="A second head to compare with, for the same target: a folder or a hub id.",
        show_default="the EAGLE-3 head with bundled and smollm2",
    ),
    sagemaker: bool = typer.Option(
        False,
        "--sagemaker",
        help="Serve as SageMaker expects: on port 8080, by the variables SM_VLLM_*.",
    ),
) -> None:
    """Serve a model over HTTP, compatible with OpenAI's API.

    Routes: /v1/completions, /v1/chat/completions, /v1/responses, /v1/models, /tokenize,
    /detokenize, /metrics, /live, /health, /ready, /version, SageMaker's /ping and /invocations,
    /admin/head with --allow-heads, and a page at /. The first SIGTERM or Ctrl-C finishes what
    runs, the second ends at once.
    """
    model, flags = model_and_flags(model, flags)
    engine = given.value("engine_name", _OWN_ENGINE)
    if engine == _OWN_ENGINE:
        refuse_vllm_options(given, flags)
    elif sagemaker:
        raise UserError("--sagemaker and --engine vllm contradict each other; leave one out.")
    if sagemaker:
        return _as_in_sagemaker(with_model=model is None and "target" not in given)
    name_target(given, model)
    if engine != _OWN_ENGINE:
        from peagle.cli.vllm import serve_vllm

        return serve_vllm(given, flags, compare_draft)
    setup = Setup(given, _DEFAULTS)
    config: ServerConfig = setup.settings.build("server")
    if "show_config" in given:
        setup.show(sections=("engine", "server"))
        return
    from peagle.serving.keys import load_admin_keys, load_keys
    from peagle.serving.logs import configure_logging

    configure_logging(config.log_format)
    keys = load_keys(os.environ, given.value("api_key_file"))
    admin_keys = load_admin_keys(given.value("admin_key_file"), config.allow_heads, keys)
    setup.check_paths(config.chat_template)
    check_paths(None, eagle3=compare_draft)
    for package in ("fastapi", "prometheus_client", "uvicorn"):
        require_package(package, "serve", "peagle serve")
    # Connections are accepted from here on, while everything else is imported and loaded.
    from peagle.serving.connections import listen

    listening = listen(config.host, config.port)
    spec, name = _spec(setup, config, compare_draft)
    from peagle.serving.server import serve as run

    own = config.served_model_name
    typed = None if own else setup.settings.value("target")
    run(config, spec, keys, admin_keys, name=own or name, typed_name=typed, listening=listening)


def _as_in_sagemaker(*, with_model: bool) -> None:
    """Start again with the options of the container's environment; typed flags override them."""
    from peagle.cli.main import run
    from peagle.serving.logs import configure_logging
    from peagle.serving.sagemaker import arguments_from

    typed = [word for word in sys.argv[2:] if word != "--sagemaker"]
    # Warnings about the environment come before the options are read.
    if "--log-format=json" in typed or ("--log-format", "json") in pairwise(typed):
        configure_logging("json")
    arguments = arguments_from(os.environ, with_model=with_model)
    raise typer.Exit(run(["serve", *arguments, *typed]))


def _spec(setup: Setup, config: ServerConfig, compare: str | None) -> tuple[EngineSpec, str]:
    """Return the models and limits of the engines, and the name of the model."""
    from peagle.models.loading import resolve_model, with_local_head

    folder = resolve_model(setup.target, setup.settings.value("revision"))
    speculative = setup.local_speculative()
    proposers = {_proposer_name(speculative): speculative}
    pair = setup.pair
    if compare is None and pair is not None and speculative is not None:
        compare = pair if speculative.model == str(FOLDERS["draft"][pair]) else None
    if compare is not None:
        if speculative is None:
            raise UserError(f"--compare-draft is {compare!r}; expected a --draft to compare with.")
        other = with_local_head(SpeculativeConfig(model=expand_bundled(compare, "eagle3")))
        name = _proposer_name(other)
        proposers[name if name not in proposers else f"{name}-2"] = other
    setup.prepare()
    from peagle.engine.head import check_corrections
    from peagle.serving.engine_process import EngineSpec

    for one in proposers.values():
        check_corrections(one)

    spec = EngineSpec(
        str(folder),
        proposers,
        setup.engine,
        threads=setup.threads,
        compile_timeout_s=config.compile_timeout_s,
        grammar_budget_s=config.grammar_budget_s,
        hang_timeout_s=config.hang_timeout_s,
        log_format=config.log_format,
        show_memory=setup.show_memory,
    )
    names = {BUNDLED: "peagle-code", SMOLLM2: SMOLLM2}
    return spec, names[pair] if pair is not None else _model_name(setup.target)


def _model_name(target: str) -> str:
    return Path(target).resolve().name if Path(target).exists() else target


def _proposer_name(speculative: SpeculativeConfig | None) -> str:
    """Return the kind of the head ("peagle", "eagle3"), or else "ngram" or "plain"."""
    if speculative is None:
        return _PLAIN
    if speculative.model is None:
        return speculative.method
    from peagle.models.checkpoint import ANY_DEPTH, read_head

    head = read_head(speculative.model, num_target_layers=ANY_DEPTH)
    return "peagle" if head.config.is_parallel else "eagle3"
