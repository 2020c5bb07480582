"""Flags of vLLM that a user hands on: those that are refused, and notes about others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from peagle.errors import UserError

# Our options that say the same, so that there is one place for each.
_OURS = {
    "--model": "MODEL",
    "--revision": "--revision",
    "--served-model-name": "--served-model-name",
    "--host": "--host",
    "--port": "--port",
    "--dtype": "--dtype",
    "--max-model-len": "--max-model-len",
    "--max-num-seqs": "--max-num-seqs",
    "--max-num-batched-tokens": "--max-num-batched-tokens",
    "--gpu-memory-utilization": "--gpu-memory-utilization",
    "--kv-cache-memory-bytes": "--kv-cache-gib",
    "--num-gpu-blocks-override": "--num-kv-blocks",
    "--block-size": "--block-size",
    "--enforce-eager": "--enforce-eager",
    "--enable-prefix-caching": "--no-prefix-caching",
    "--no-enable-prefix-caching": "--no-prefix-caching",
    "--seed": "--seed",
    "--tensor-parallel-size": "--tensor-parallel-size",
    "-tp": "--tensor-parallel-size",
    "--pipeline-parallel-size": "--pipeline-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "--data-parallel-size": "--data-parallel-size",
    "-dp": "--data-parallel-size",
    "--speculative-config": "--speculative-config",
    "-sc": "--speculative-config",
    "--spec-model": "--draft",
    "--spec-method": "--method",
    "--spec-tokens": "--num-speculative-tokens",
    "--chat-template": "--chat-template",
    "--allowed-origins": "--allowed-origin",
    "--shutdown-timeout": "--drain-timeout",
    "--otlp-traces-endpoint": "--otlp-endpoint",
    "--max-num-queued-reqs": "--max-queue",
}
_OWN_CODE = "it runs code of the user's in vLLM"
# Why a flag is not handed on.
_REFUSED = {
    "--trust-remote-code": "it runs code out of a model's repository",
    "--code-revision": "it runs code out of a model's repository",
    "--api-key": "keys in a command line are seen by all users of the machine: set PEAGLE_API_KEY",
    "--hf-token": "tokens in a command line are seen by all users of the machine: set HF_TOKEN",
    "--config": "a file of flags cannot be checked here: give the flags",
    "--middleware": _OWN_CODE,
    "--worker-cls": _OWN_CODE,
    "--worker-extension-cls": _OWN_CODE,
    "--scheduler-cls": _OWN_CODE,
    "--logits-processors": _OWN_CODE,
    "--model-class-overrides": _OWN_CODE,
    "--tool-parser-plugin": _OWN_CODE,
    "--reasoning-parser-plugin": _OWN_CODE,
    "--io-processor-plugin": _OWN_CODE,
    "--grpc": "that server has no guard",
    "--grpc-port": "that server has no guard",
    "--uds": "the server is checked over TCP: give --host and --port",
    "--headless": "such a node has no server to check: start vLLM itself there (docs/vllm.md)",
    "--disable-log-stats": "without counters nothing shows whether drafts are made",
    "--allow-credentials": "web pages elsewhere would act with a user's cookies",
}
_SAFE_FORMATS = ("safetensors", "fastsafetensors", "instanttensor", "runai_streamer", "dummy")
_NOTES = {
    "--allowed-local-media-path": "clients may read files of that folder",
    "--enable-prompt-embeds": "clients may send tensors, which vLLM unpickles",
    "--enable-mm-embeds": "clients may send tensors, which vLLM unpickles",
    "--trust-request-chat-template": "clients may send chat templates, which are programs",
    "--trust-request-mm-kwargs": "clients may choose what their images cost",
    "--tool-server": "tools run on this side",
    "--enable-tokenizer-info-endpoint": "clients may read the chat template",
    "--enable-log-outputs": "outputs are in the log",
    "--kv-transfer-config": "vLLM opens further ports, which nothing guards",
    "--ec-transfer-config": "vLLM opens further ports, which nothing guards",
    "--kv-events-config": "vLLM opens further ports, which nothing guards",
}
# Real flags that are the beginning of one above.
_WHOLE = ("--reasoning-parser",)


def check_flags(extra: Sequence[str]) -> Iterator[str]:
    """Refuse flags that are unsafe or that peagle has an option for; yield notes on the others.

    Raises:
        UserError: naming the flag and what to do.
    """
    for at, word in enumerate(extra):
        if (name := _name(word)) is None:
            continue
        flag = repr(word.partition("=")[0])  # a value may be a secret
        if name in _OURS:
            raise UserError(f"{flag} is a flag of vLLM; give it as peagle's {_OURS[name]}.")
        if name in _REFUSED:
            raise UserError(f"{flag} is not handed on to vLLM: {_REFUSED[name]}. Leave it out.")
        if name == "--load-format":
            _, equals, value = word.partition("=")
            value = value if equals else "".join(extra[at + 1 : at + 2])
            if value not in _SAFE_FORMATS:
                raise UserError(
                    f"--load-format is {value!r}; expected one of {', '.join(_SAFE_FORMATS)}: "
                    "others may load pickles, which can run code."
                )
        elif name not in _WHOLE and (meant := _abbreviated(name)):
            raise UserError(f"{flag} is short for {meant}; write flags of vLLM in full.")
        if name in _NOTES:
            yield f"{name}: {_NOTES[name]}"


def has_flag(extra: Sequence[str], name: str) -> bool:
    """Whether a flag is among those handed on."""
    return any(_name(word) == name for word in extra)


def _name(word: str) -> str | None:
    """The flag that a word is, as vLLM reads it; None for a value."""
    if not word.startswith("-") or word[1:2].isdigit() or word in ("-", "--"):
        return None
    name = word.partition("=")[0].partition(".")[0]
    return name.replace("_", "-")


def _abbreviated(name: str) -> str:
    """The flag that argparse would complete a word to, if it is one of those above."""
    flags = [*_OURS, *_REFUSED, "--load-format"]
    return next((flag for flag in flags if flag.startswith(name) and flag != name), "")
