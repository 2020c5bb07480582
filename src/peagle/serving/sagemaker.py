"""The environment of a SageMaker container, as arguments of `peagle serve`.

Variables are read as the managed vLLM container reads them: SM_VLLM_X_Y=v is vLLM's option
`--x-y v`. The tables below map each of vLLM's options to one of ours, drop it with a warning where
it would change nothing, or refuse it. Options outside the tables are refused too, so that none is
silently ignored.
"""

import json
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from peagle.config.checks import near_names
from peagle.errors import UserError, short_repr
from peagle.serving.config import TOOL_PARSERS
from peagle.serving.emf import DEFAULT_INTERVAL_S

PREFIX = "SM_VLLM_"
MODEL_DIR = Path("/opt/ml/model")
# SageMaker kills 30 s after SIGTERM.
DRAIN_TIMEOUT_S = 25
INTERVAL_VARIABLE = "PEAGLE_CLOUDWATCH_INTERVAL"
_SECRET = re.compile(r"-(key|token|password|secret)$")
_COUNT = re.compile(r"([0-9]{1,15})(\.[0-9]{1,15})?([kmgtKMGT]?)")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_VLLM_DTYPES = {"half": "float16", "float": "float32"}


@dataclass(frozen=True, slots=True)
class VllmFlag:
    """One variable, as the managed container hands it to vLLM.

    Attributes:
        name: name of vLLM's option, "--max-model-len".
        tokens: the words after the name; none for a switch, None where the option is left out.
    """

    variable: str
    value: str
    name: str
    tokens: tuple[str, ...] | None

    @property
    def arguments(self) -> list[str]:
        """Return the option and its tokens."""
        return [] if self.tokens is None else [self.name, *self.tokens]

    @property
    def shown(self) -> str:
        """Return the variable and its value, for messages; a secret is not shown."""
        if _SECRET.search(self.name):
            return f"{self.variable} (not shown)"
        return f"{self.variable} is {short_repr(self.value)}"

    def one_token(self) -> str:
        """Return the value of an option that takes one, or raise a UserError."""
        if self.tokens is None or len(self.tokens) != 1 or not self.tokens[0]:
            raise UserError(f"{self.shown}; expected one value for {self.name}.")
        return self.tokens[0]


def vllm_flags(environ: Mapping[str, str]) -> list[VllmFlag]:
    """Return vLLM's options that the variables SM_VLLM_* stand for, by name.

    SM_VLLM_X_Y=v is `--x-y v`. "true" and "" make a switch, "false" leaves the option out. A JSON
    array is one token for each element; any other text, JSON or not, is one token as it is.
    """
    return [
        VllmFlag(
            variable,
            environ[variable],
            "--" + variable.removeprefix(PREFIX).lower().replace("_", "-"),
            _tokens(environ[variable]),
        )
        for variable in sorted(environ)
        if variable.startswith(PREFIX)
    ]


def _tokens(value: str) -> tuple[str, ...] | None:
    if value == "false":
        return None
    if value in ("", "true"):
        return ()
    if value.lstrip().startswith("["):
        try:
            elements = json.loads(value)
        except (ValueError, RecursionError):
            return (value,)
        return tuple(e if isinstance(e, str) else json.dumps(e) for e in elements)
    return (value,)


# ---- what an option of vLLM is here ----


def _count(flag: VllmFlag) -> str:
    """Read a whole number as vLLM writes it: 4096, 4k (4000), 1.5k, 4K (4096)."""
    match = _COUNT.fullmatch(flag.one_token())
    if match is None or (match[2] and not match[3].islower()):
        raise UserError(f"{flag.shown}; expected a whole number, like 8192, 8k or 8K.")
    base = 1024 if match[3].isupper() else 1000
    whole, fraction = match[1], (match[2] or ".")[1:]
    scaled = int(whole + fraction) * base ** _POWERS[match[3].lower()]
    return str(scaled // 10 ** len(fraction))


def _dtype(flag: VllmFlag) -> str:
    return _VLLM_DTYPES.get(flag.one_token(), flag.one_token())


def _kv_cache_dtype(flag: VllmFlag) -> str:
    if (name := flag.one_token()) not in ("auto", "fp8", "fp8_e4m3"):
        raise UserError(f"{flag.shown}; expected auto, fp8 or fp8_e4m3.")
    return name.removesuffix("_e4m3")


def _tool_parser(flag: VllmFlag) -> str:
    if (name := flag.one_token()) not in TOOL_PARSERS:
        raise UserError(f"{flag.shown}; expected one of {', '.join(TOOL_PARSERS)}.")
    return name


# vLLM's option -> our option, and how its value is read.
_SAME_OPTIONS = (
    *("--speculative-config", "--host", "--port", "--served-model-name", "--device", "--seed"),
    *("--gpu-memory-utilization", "--block-size", "--chat-template", "--revision"),
)
_OPTIONS: dict[str, tuple[str, Callable[[VllmFlag], str]]] = {
    **{name: (name, VllmFlag.one_token) for name in _SAME_OPTIONS},
    "--max-model-len": ("--max-model-len", _count),
    "--max-num-seqs": ("--max-num-seqs", _count),
    "--max-num-batched-tokens": ("--max-num-batched-tokens", _count),
    "--max-num-queued-reqs": ("--max-queue", _count),
    "--dtype": ("--dtype", _dtype),
    "--device-memory-utilization": ("--gpu-memory-utilization", VllmFlag.one_token),
    "--kv-cache-memory-bytes": ("--kv-cache-gib", lambda flag: str(int(_count(flag)) / 2**30)),
    "--kv-cache-dtype": ("--kv-cache-dtype", _kv_cache_dtype),
    "--data-parallel-size": ("--data-parallel-size", _count),
    "--num-gpu-blocks-override": ("--num-kv-blocks", VllmFlag.one_token),
    "--tool-call-parser": ("--tool-call-parser", _tool_parser),
    "--shutdown-timeout": ("--drain-timeout", VllmFlag.one_token),
}
_SWITCHES = {
    "--enforce-eager": "--enforce-eager",
    "--no-enable-prefix-caching": "--no-prefix-caching",
}
# Given once for each value.
_LISTS = {"--allowed-origins": "--allowed-origin"}
# Logs, loading, scheduling and the like: no answer depends on them.
_IGNORED_OPTIONS = (
    *("--disable-log-requests", "--enable-log-requests", "--disable-log-stats"),
    *("--aggregate-engine-logging", "--max-log-len", "--uvicorn-log-level"),
    *("--disable-uvicorn-access-log", "--disable-fastapi-docs", "--use-tqdm-on-load"),
    *("--enable-auto-tool-choice", "--enable-request-id-headers", "--allow-credentials"),
    *("--allowed-methods", "--allowed-headers", "--swap-space"),
    *("--enable-prefix-caching", "--enable-chunked-prefill", "--scheduling-policy"),
    *("--async-scheduling", "--api-server-count", "--max-parallel-loading-workers"),
    *("--distributed-executor-backend", "--disable-custom-all-reduce", "--stream-interval"),
    *("--compilation-config", "--optimization-level", "--performance-mode"),
    *("--cudagraph-capture-sizes", "--max-cudagraph-capture-size", "--attention-backend"),
    *("--limit-mm-per-prompt", "--language-model-only", "--skip-mm-profiling"),
)
_ONE_GPU = (
    "One engine runs on one GPU: take an instance whose GPU holds the model, and use its other "
    "GPUs with SM_VLLM_DATA_PARALLEL_SIZE, or serve with the managed vLLM container."
)
_NO_QUANTIZATION = (
    "Serve the model in the type it is stored in, or with the managed vLLM container."
)
_NO_CODE = "Code of a model's repository is never run here: take a model that transformers knows."
_SPECULATE = (
    'Use SM_VLLM_SPECULATIVE_CONFIG=\'{"method": "eagle3", "model": "...", '
    '"num_speculative_tokens": 7}\'.'
)

_LEAVE_OUT = "Leave it out."
# Options that change nothing with one of these values, and cannot be had with another.
_ALLOWED_VALUES: dict[str, tuple[tuple[str, ...], str]] = {
    "--tensor-parallel-size": (("1",), _ONE_GPU),
    "--pipeline-parallel-size": (("1",), _ONE_GPU),
    "--decode-context-parallel-size": (("1",), _ONE_GPU),
    "--prefill-context-parallel-size": (("1",), _ONE_GPU),
    "--nnodes": (("1",), _ONE_GPU),
    "--cpu-offload-gb": (("0", "0.0"), _LEAVE_OUT),
    "--load-format": (("auto", "safetensors"), "Convert the weights to safetensors."),
    "--task": (("auto", "generate"), _LEAVE_OUT),
    "--runner": (("auto", "generate"), _LEAVE_OUT),
    "--tokenizer-mode": (("auto",), _LEAVE_OUT),
    "--config-format": (("auto", "hf"), _LEAVE_OUT),
    "--generation-config": (("auto",), "Give sampling parameters with every request."),
    "--response-role": (("assistant",), _LEAVE_OUT),
    "--chat-template-content-format": (("auto",), _LEAVE_OUT),
    # They change answers or where things run, and are not to be had with any value.
    "--trust-remote-code": ((), _NO_CODE),
    "--quantization": ((), _NO_QUANTIZATION),
    "--enable-expert-parallel": ((), _ONE_GPU),
    **dict.fromkeys(
        ("--enable-lora", "--lora-modules", "--max-loras", "--max-lora-rank"),
        ((), "Merge the adapter into the model's weights."),
    ),
}
# Options that are to be had in another way.
_REPLACEMENTS = {
    **dict.fromkeys(("--spec-method", "--spec-model", "--spec-tokens"), _SPECULATE),
    "--tokenizer": "Put the tokenizer's files into the model's folder.",
    "--download-dir": "Set HF_HOME to the folder.",
    "--hf-token": "Set HF_TOKEN.",
    "--api-key": "SageMaker itself checks its callers; elsewhere set PEAGLE_API_KEY.",
}
RULES = (*_OPTIONS, *_SWITCHES, *_LISTS, *_IGNORED_OPTIONS, *_ALLOWED_VALUES, *_REPLACEMENTS)
# Left out by "false", as the managed container does it, and then on: maybe not what was meant.
_OFF_SWITCHES = {"--enable-prefix-caching": "NO_ENABLE_PREFIX_CACHING"}


def _arguments(flag: VllmFlag) -> list[str]:
    """Return our arguments for one of vLLM's options, or raise a UserError."""
    name, shown, tokens = flag.name, flag.shown, flag.tokens
    if name in _OPTIONS:
        own_name, read = _OPTIONS[name]
        return [own_name, read(flag)]
    if name in _LISTS:
        if not tokens:
            raise UserError(f"{shown}; expected a value for {name}, or a JSON array.")
        return [word for token in tokens for word in (_LISTS[name], token)]
    if name in _SWITCHES:
        if tokens:
            raise UserError(f"{shown}; expected true or false.")
        return [_SWITCHES[name]]
    if name in _REPLACEMENTS:
        raise UserError(f"{shown}; expected this variable to be unset. {_REPLACEMENTS[name]}")
    if name in _ALLOWED_VALUES:
        values, remedy = _ALLOWED_VALUES[name]
        if tokens is None or len(tokens) != 1 or tokens[0] not in values:
            why = f"expected {' or '.join(values)}" if values else f"this server has no {name}"
            raise UserError(f"{shown}; {why}. {remedy}")
    elif name not in _IGNORED_OPTIONS:
        near = near_names(name, RULES, 1, 0.8)
        guess = near and f" Did you mean {PREFIX}{near[0][2:].replace('-', '_').upper()}?"
        raise UserError(
            f"{shown}: this server has no {name} and cannot tell what it would change. Unset the "
            f"variable.{guess or ''}"
        )
    warnings.warn(f"{shown}: dropped, it changes nothing in this server.", stacklevel=3)
    return []


def arguments_from(
    environ: Mapping[str, str], *, model_dir: Path = MODEL_DIR, with_model: bool = True
) -> list[str]:
    """Return the arguments of `peagle serve` for a container's environment.

    The model, if one is named, comes first, as a positional argument: SM_VLLM_MODEL, else the
    model folder if anything is in it, else HF_MODEL_ID. Without SM_VLLM_HOST, SM_VLLM_PORT and
    SM_VLLM_SHUTDOWN_TIMEOUT the server listens on port 8080 of all addresses (SageMaker names
    another port in SAGEMAKER_BIND_TO_PORT where a container shares its host) and drains for 25 s.
    It writes acceptance metrics once a minute; PEAGLE_CLOUDWATCH_INTERVAL sets other seconds,
    0 for never.

    Args:
        model_dir: where SageMaker puts the model's files.
        with_model: false leaves the model out, as the command line names one.

    Raises:
        UserError: a variable asks for something that this server cannot do, has a value that
            cannot be read, or is unknown; the message names it, its value and what to do.
    """
    given = _given(environ)
    named_model = given.pop("--model", None)
    ours = [_arguments(flag) for flag in given.values()]
    model = _model(environ, named_model, model_dir) if with_model else []
    defaults = [
        ["--host", "0.0.0.0"],
        ["--port", environ.get("SAGEMAKER_BIND_TO_PORT") or "8080"],
        ["--drain-timeout", str(DRAIN_TIMEOUT_S)],
        ["--cloudwatch-interval", environ.get(INTERVAL_VARIABLE) or str(DEFAULT_INTERVAL_S)],
    ]
    named = {option[0] for option in ours if option}
    options = [option for option in defaults if option[0] not in named] + ours
    return [*model, *(word for option in options for word in option)]


def _given(environ: Mapping[str, str]) -> dict[str, VllmFlag]:
    """Return the options that are not left out, by name."""
    given: dict[str, VllmFlag] = {}
    for flag in vllm_flags(environ):
        if flag.tokens is None:
            if flag.name in _OFF_SWITCHES:
                warnings.warn(
                    f"{flag.shown}: that leaves {flag.name} out, and it is on by itself. To turn "
                    f"it off, set {PREFIX}{_OFF_SWITCHES[flag.name]}=true.",
                    stacklevel=3,
                )
        elif flag.name in given:
            raise UserError(
                f"{given[flag.name].variable} and {flag.variable} are both {flag.name}; unset one "
                "of them."
            )
        else:
            given[flag.name] = flag
    return given


def _model(environ: Mapping[str, str], flag: VllmFlag | None, model_dir: Path) -> list[str]:
    if flag is not None:
        name, source = flag.one_token(), flag.variable
    elif _has_files(model_dir):
        return [str(model_dir)]
    else:
        name, source = environ.get("HF_MODEL_ID", ""), "HF_MODEL_ID"
    if name.startswith("-"):
        raise UserError(f"{source} is {name!r}; expected a folder or a hub id.")
    if not name and not environ.get("PEAGLE_TARGET"):
        warnings.warn(
            f"No model: neither {PREFIX}MODEL nor HF_MODEL_ID is set, and {str(model_dir)!r} is "
            "empty. The small bundled model is served.",
            stacklevel=3,
        )
    return [name] if name else []


def _has_files(folder: Path) -> bool:
    try:
        return any(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise UserError(
            f"The model folder {str(folder)!r} cannot be read: {error.strerror}. Let the "
            "container's user read it, or name the model with SM_VLLM_MODEL."
        ) from None
