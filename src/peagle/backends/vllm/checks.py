"""Known faults of vLLM, and mistakes in a launch or its flags, found before anything is started."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from peagle.backends.vllm.facts import TESTED_TEXT, TESTED_VERSIONS
from peagle.backends.vllm.installation import VllmInstallation, advisory_note, version_note
from peagle.backends.vllm.launch import VllmLaunch, flag_name, with_head
from peagle.config.speculative import AUTO
from peagle.errors import CheckpointError, UserError
from peagle.model_folder import read_json
from peagle.model_shape import ModelShape

if TYPE_CHECKING:
    from peagle.models.checkpoint import StoredHead
    from peagle.models.drafter import DrafterConfig

V2_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
# A hybrid target's layers are put into groups of the KV cache, and a drafter's must all be in one.
# Layers of the larger kind stay together up to this many times the smaller kind (pull requests
# 29303 and 36684 of vLLM; the second one, of March 2026, is in 0.18).
_TOGETHER, _TOGETHER_BEFORE, _TOGETHER_SINCE = 1.5, 1.25, (0, 18)
_HYBRID_OFF = "--disable-hybrid-kv-cache-manager"
# What vLLM's attention on a CPU computes (get_supported_head_sizes of its cpu_attn.py, 0.32); with
# another size it starts, and ends at the first request.
_CPU_HEAD_DIMS, _CPU_HEAD_DIMS_OF = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512), (0, 32)
# The first version in which these were seen; older ones were not looked at.
_NEWER_OPTIONS = (("log_format", "text", (0, 32)), ("max_queue", None, (0, 32)))


def check_launch(launch: VllmLaunch, installation: VllmInstallation) -> tuple[str, ...]:
    """Refuse a launch that is known to fail, and return notes for the user.

    Raises:
        UserError: the start would fail, or would not do what was asked.
    """
    launch = with_head(launch)
    notes = [version_note(installation), advisory_note(installation), *check_flags(launch.extra)]
    notes += _check_build(launch, installation)
    _check_options(launch, installation)
    if launch.speculative is not None:
        notes += _check_speculation(launch, installation)
    if launch.head_folder is not None:
        notes += _check_head(launch, installation, launch.head_folder)
    return tuple(note for note in notes if note)


def _check_build(launch: VllmLaunch, installation: VllmInstallation) -> Iterator[str]:
    if launch.dtype == "float64":
        raise UserError("dtype is 'float64', which vLLM does not have; expected float32 at most.")
    if not installation.is_cpu:
        return
    if (dtype := launch.dtype_on(installation)) != "float32":
        yield (
            f"dtype is {dtype!r} on a CPU, where vLLM 0.32 ended with an illegal instruction in "
            "some runs; float32 is the default there"
        )
    if launch.is_greedy_only(installation):
        yield (
            "on a CPU vLLM samples wrongly with speculative decoding: requests with a temperature "
            "above 0 are refused"
        )
    if (target := _read_target(launch.target, launch.revision)) is not None:
        _check_cpu_attention(f"target {target.name!r}", target.shape.head_dim, installation)


def _check_cpu_attention(whose: str, head_dim: int | None, installation: VllmInstallation) -> None:
    known = (installation.release or _CPU_HEAD_DIMS_OF) <= _CPU_HEAD_DIMS_OF
    if known and head_dim not in _CPU_HEAD_DIMS:
        raise UserError(
            f"The {whose} has attention heads of {head_dim} numbers, which {installation} does not "
            f"compute on a CPU; expected {', '.join(map(str, _CPU_HEAD_DIMS))}. Serve it on a GPU, "
            "or without --engine vllm."
        )


def _check_options(launch: VllmLaunch, installation: VllmInstallation) -> None:
    for name, unset, since in _NEWER_OPTIONS:
        value = getattr(launch, name)
        if value != unset and (installation.release or since) < since:
            raise UserError(
                f"{name} is {value!r}, which {installation} does not have; expected vLLM "
                f"{since[0]}.{since[1]} or newer. Leave it out, or upgrade vLLM."
            )
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        size = getattr(launch, name)
        if type(size) is not int or size < 1:
            raise UserError(f"{name} is {size!r}; expected a whole number of at least 1.")


def _check_speculation(launch: VllmLaunch, installation: VllmInstallation) -> Iterator[str]:
    config = launch.speculative
    assert config is not None
    if config.synthetic_acceptance_rates is not None:
        if installation.is_cpu:
            raise UserError(
                "synthetic_acceptance_rates were given, which vLLM refuses on a CPU; expected a "
                "GPU. Leave them out."
            )
        yield "acceptance is synthetic: outputs are not what the model would say"
    if config.parallel_drafting_spec is not None:
        raise UserError(
            "parallel_drafting_spec asks for candidate trees; vLLM drafts chains, of "
            "num_speculative_tokens. Leave it out, or take --engine peagle."
        )
    if config.draft_window:
        raise UserError(
            f"draft_window is {config.draft_window}; vLLM takes the windows of a head from its "
            "config.json (layer_types, sliding_window). Leave it out."
        )
    if config.corrections:
        raise UserError(
            f"correction {config.corrections[0][0]!r} was given; on vLLM a head has its own "
            "correction alone. Leave --correction out, or take --engine peagle."
        )
    if config.quantization is not None:
        raise UserError(
            f"quantization of the head is {config.quantization!r}; vLLM gets the head as it is "
            "stored. Leave --draft-quantization out."
        )
    if config.num_speculative_tokens_per_batch_size == AUTO:
        raise UserError(
            'num_speculative_tokens_per_batch_size is "auto"; vLLM does not choose K by the load. '
            "Leave it out."
        )
    if not launch.is_parallel:
        if launch.pipeline_parallel_size > 1 and config.method == "eagle3":
            yield (
                "EAGLE-3 over several pipeline stages needs vLLM's model runner V2 and a target "
                "that supports it (pull request 50514 of vLLM); not tried here"
            )
        return
    if config.num_speculative_tokens_per_batch_size is not None:
        yield from _check_schedule(launch, installation)
    if os.environ.get(V2_VARIABLE, "").strip().lower() in ("1", "true"):
        raise UserError(
            f"{V2_VARIABLE} is {os.environ[V2_VARIABLE]!r}: vLLM's model runner V2 does not draft "
            "in parallel with EAGLE heads. Unset it; peagle sets it to 0 for such heads."
        )
    if launch.pipeline_parallel_size > 1:
        raise UserError(
            f"pipeline_parallel_size is {launch.pipeline_parallel_size}, with a head for parallel "
            "drafting: vLLM passes the hidden states of earlier stages on in its model runner V2 "
            "only, which does not draft in parallel. Use --tensor-parallel-size or "
            "--data-parallel-size, or an EAGLE-3 head."
        )


def _check_schedule(launch: VllmLaunch, installation: VllmInstallation) -> Iterator[str]:
    """Refuse a schedule of K for a P-EAGLE head where the plugin does not serve it."""
    given = "num_speculative_tokens_per_batch_size was given, with a head for parallel drafting"
    reason = None
    if installation.release not in TESTED_VERSIONS:
        reason = f"{installation} drafts wrongly with both, and peagle knows vLLM {TESTED_TEXT}"
    elif not _names_plugin():
        reason = (
            f"vLLM drafts wrongly with both unless peagle's plugin runs there, and VLLM_PLUGINS is "
            f"{os.environ['VLLM_PLUGINS']!r}"
        )
    elif launch.speculative is not None and not launch.speculative.correction:
        reason = "that needs peagle's plugin, which corrects drafts too, and the correction is off"
    if reason is not None:
        raise UserError(f"{given}: {reason}. Leave it out; num_speculative_tokens is K then.")
    if launch.data_parallel_size > 1:
        yield "vLLM has one K for all loads with data parallelism: it leaves the schedule out"


def _names_plugin() -> bool:
    """Return whether vLLM loads peagle's plugin."""
    return "peagle" in os.environ.get("VLLM_PLUGINS", "peagle").split(",")


def _correction_notes(installation: VllmInstallation) -> Iterator[str]:
    if installation.release not in TESTED_VERSIONS:
        yield (
            f"the head has a correction, which needs vLLM {TESTED_TEXT}: this one drafts without it"
        )
    elif not _names_plugin():
        yield (
            f"the head has a correction, and VLLM_PLUGINS is {os.environ['VLLM_PLUGINS']!r}: vLLM "
            "drafts without it, unless the list names peagle too"
        )


def _check_head(launch: VllmLaunch, installation: VllmInstallation, folder: str) -> Iterator[str]:
    """Refuse a head that does not fit the launch, or its target as far as that is here."""
    from peagle.models.checkpoint import ANY_DEPTH, read_correction, read_head

    config = launch.speculative
    assert config is not None
    stored = read_head(folder, num_target_layers=ANY_DEPTH)
    head = stored.config
    if installation.is_cpu:
        _check_cpu_attention(f"head {config.model!r}", head.head_dim, installation)
    k, trained = config.k, head.trained_depth
    if trained is not None and k > trained:
        yield f"K is {k}, and the head was trained for {trained}: later tokens will be refused"
    longest, served = stored.trained_length, launch.max_model_len
    is_beyond = longest is not None and (served is None or served > longest)
    if head.is_parallel and is_beyond and not head.windows:
        yield (
            f"the head was trained on texts of up to {longest} tokens, and its config.json has no "
            "window: vLLM lets it look back over more, and accepts far fewer drafts there. "
            "peagle's own engine keeps it to them"
        )
    if config.correction and read_correction(folder, head) is not None:
        yield from _correction_notes(installation)
    elif not config.correction and not head.is_parallel:
        yield "the correction is off; an EAGLE-3 head has none"
    size = launch.speculative_options.get("draft_tensor_parallel_size")
    size = launch.tensor_parallel_size if size is None else size
    if head.num_attention_heads % size:
        raise UserError(
            f"tensor_parallel_size is {size} and the head has {head.num_attention_heads} attention "
            "heads, which vLLM cannot share out evenly. Give it one GPU: "
            '"draft_tensor_parallel_size": 1 in --speculative-config.'
        )
    target = _read_target(launch.target, launch.revision)
    if target is None:
        yield f"the target {launch.target!r} is not here yet: whether the head fits was not checked"
        return
    if config.check_target:
        _check_fits(target, stored, folder)
    _check_groups(launch, installation, head, target)


def _check_groups(
    launch: VllmLaunch, installation: VllmInstallation, head: DrafterConfig, target: _Target
) -> None:
    """Refuse a drafter whose layers vLLM would scatter over groups of the KV cache."""
    if launch.has_flag(_HYBRID_OFF):
        return
    if len(set(head.windows)) > 1:
        raise UserError(
            f"The head's layers have different windows ({list(head.windows)}): {installation} puts "
            "them into different groups of its KV cache and fails (validate_same_kv_cache_group). "
            f"Append -- {_HYBRID_OFF}, or take --engine peagle."
        )
    shape = target.shape
    if head.num_kv_heads * head.head_dim != (shape.num_kv_heads or 0) * (shape.head_dim or 0):
        return  # a drafter of another shape gets a group of its own
    num_sliding = sum(kind != "full_attention" for kind in shape.layer_kinds)
    num_full = len(shape.layer_kinds) - num_sliding
    since = (installation.release or _TOGETHER_SINCE) >= _TOGETHER_SINCE
    ratio = _TOGETHER if since else _TOGETHER_BEFORE
    is_apart = bool(head.windows)
    if is_apart and not shape.layer_kinds:
        num_full = shape.num_layers or 0
    if is_scattered(num_full, num_sliding, head.num_layers, ratio, is_apart=is_apart):
        raise UserError(
            f"The target has {num_full} layers of full attention and {num_sliding} others, the "
            f"head {head.num_layers}: {installation} would put the head's layers into several "
            "groups of its KV cache and fail (validate_same_kv_cache_group). Upgrade vLLM if it is "
            f"older than 0.18, or append -- {_HYBRID_OFF}, which costs KV cache."
        )


def is_scattered(
    num_full: int, num_sliding: int, num_draft: int, ratio: float, *, is_apart: bool = False
) -> bool:
    """Return whether vLLM splits the layers of the drafter's kind into several groups.

    They are of full attention, or, with `is_apart`, of a window that no layer of the target has.
    Groups have as many layers as the rarer kind, or as the commoner one if that is less than
    `ratio` times as many (`_get_kv_cache_groups_uniform_page_size` of vLLM). Layer i of a kind of n
    groups goes to group i mod n.
    """
    own = num_draft if is_apart else num_full + num_draft
    kinds = [num for num in (own, num_sliding, num_full if is_apart else 0) if num]
    if len(kinds) == 1 or num_draft < 2:
        return False
    fewest, most = min(kinds), max(kinds)
    size = most if most < fewest * ratio else fewest
    return own > size


# ---- the target ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Target:
    """A target by its small files."""

    name: str
    folder: Path
    shape: ModelShape


def _read_target(name: str, revision: str | None) -> _Target | None:
    """Read a target in a folder or the hub's cache; None if it is not here. Fetches nothing."""
    folder = Path(name)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        try:
            found = try_to_load_from_cache(name, "config.json", revision=revision)
        except ValueError:  # no name of a repository
            return None
        if not isinstance(found, str):
            return None
        folder = Path(found).parent
    try:
        shape = ModelShape.from_json(read_json(folder / "config.json"))
    except (OSError, ValueError):
        return None
    return None if shape.head_dim is None else _Target(name, folder, shape)


def _check_fits(target: _Target, stored: StoredHead, folder: str) -> None:
    """Refuse a head of another target: its sizes, then its fingerprint."""
    from peagle.models.fingerprint import same_tokenizer, tokenizer_digest
    from peagle.models.target_ends import TargetEnds

    head, fingerprint = stored.config, stored.fingerprint

    def other(difference: str) -> CheckpointError:
        return CheckpointError(
            f"The head {folder!r} was not trained for the target {target.name!r}: {difference}. "
            'Use its own target, or set "check_target": false if you know that the head fits.'
        )

    expected = {"vocab_size": head.vocab_size, "hidden_size": head.target_hidden_size}
    if fingerprint is not None:
        expected["num_layers"] = fingerprint.num_layers
    for name, value in expected.items():
        if (given := getattr(target.shape, name)) not in (None, value):
            raise other(f"{name} is {given}, expected {value}")
    deepest, num_layers = max(head.aux_layer_ids), target.shape.num_layers
    if num_layers is not None and deepest >= num_layers:
        raise other(f"it reads layer {deepest} of {num_layers}")
    if fingerprint is None:
        return
    digests = fingerprint.tokenizer_sha256, tokenizer_digest(target.folder)
    if same_tokenizer(*digests, fingerprint.tokens_sha256, target.folder) is False:
        raise other("its tokenizer is another one")
    try:
        ends = TargetEnds.load(target.folder)
    except (CheckpointError, OSError):
        return  # a target that vLLM knows and peagle does not, or whose ends are quantised
    if difference := fingerprint.difference(ends, "the head"):
        raise other(difference)


# ---- flags of vLLM that a user hands on ------------------------------------------------------

# Flags that peagle sets from an option of its own, so that each setting has one place.
_OWN_FLAGS = {
    name: name
    for name in (
        *("--revision", "--served-model-name", "--host", "--port", "--dtype", "--max-model-len"),
        *("--max-num-seqs", "--max-num-batched-tokens", "--gpu-memory-utilization", "--seed"),
        *("--block-size", "--enforce-eager", "--tensor-parallel-size", "--pipeline-parallel-size"),
        *("--data-parallel-size", "--speculative-config", "--chat-template"),
    )
} | {
    "--model": "MODEL",
    "--kv-cache-memory-bytes": "--kv-cache-gib",
    "--num-gpu-blocks-override": "--num-kv-blocks",
    "--enable-prefix-caching": "--no-prefix-caching",
    "--no-enable-prefix-caching": "--no-prefix-caching",
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-sc": "--speculative-config",
    "--spec-model": "--draft",
    "--spec-method": "--method",
    "--spec-tokens": "--num-speculative-tokens",
    "--allowed-origins": "--allowed-origin",
    "--shutdown-timeout": "--drain-timeout",
    "--otlp-traces-endpoint": "--otlp-endpoint",
    "--max-num-queued-reqs": "--max-queue",
}
# Why a flag is not handed on.
_REFUSED = {
    **dict.fromkeys(
        ("--trust-remote-code", "--code-revision"), "it runs code out of a model's repository"
    ),
    **dict.fromkeys(
        (
            *("--middleware", "--worker-cls", "--worker-extension-cls", "--scheduler-cls"),
            *("--logits-processors", "--model-class-overrides", "--tool-parser-plugin"),
            *("--reasoning-parser-plugin", "--io-processor-plugin"),
        ),
        "it runs code of the user's in vLLM",
    ),
    **dict.fromkeys(("--grpc", "--grpc-port"), "that server has no guard"),
    "--api-key": "keys in a command line are seen by all users of the machine: set PEAGLE_API_KEY",
    "--hf-token": "tokens in a command line are seen by all users of the machine: set HF_TOKEN",
    "--config": "a file of flags cannot be checked here: give the flags",
    "--uds": "the server is checked over TCP: give --host and --port",
    "--headless": "such a node has no server to check: start vLLM itself there (docs/vllm.md)",
    "--disable-log-stats": "without counters nothing shows whether drafts are made",
    "--allow-credentials": "web pages elsewhere would act with a user's cookies",
}
_SAFE_FORMATS = ("safetensors", "fastsafetensors", "instanttensor", "runai_streamer", "dummy")
_NOTES = {
    **dict.fromkeys(
        ("--enable-prompt-embeds", "--enable-mm-embeds"),
        "clients may send tensors, which vLLM unpickles",
    ),
    **dict.fromkeys(
        ("--kv-transfer-config", "--ec-transfer-config", "--kv-events-config"),
        "vLLM opens further ports, which nothing guards",
    ),
    "--allowed-local-media-path": "clients may read files of that folder",
    "--trust-request-chat-template": "clients may send chat templates, which are programs",
    "--trust-request-mm-kwargs": "clients may choose what their images cost",
    "--tool-server": "the server runs tools on this side",
    "--enable-tokenizer-info-endpoint": "clients may read the chat template",
    "--enable-log-outputs": "outputs are in the log",
}
# Real flags that are the beginning of one above.
_WHOLE_FLAGS = ("--reasoning-parser",)


def check_flags(extra: Sequence[str]) -> Iterator[str]:
    """Refuse flags that are unsafe or that peagle has an option for; yield notes on the others.

    Raises:
        UserError: naming the flag and what to do.
    """
    for at, word in enumerate(extra):
        if (name := flag_name(word)) is None:
            continue
        flag = repr(word.partition("=")[0])  # a value may be a secret
        if name in _OWN_FLAGS:
            raise UserError(f"{flag} is a flag of vLLM; give it as peagle's {_OWN_FLAGS[name]}.")
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
        elif name not in _WHOLE_FLAGS and (meant := _abbreviated(name)):
            raise UserError(f"{flag} is short for {meant}; write flags of vLLM in full.")
        if name in _NOTES:
            yield f"{name}: {_NOTES[name]}"


def _abbreviated(name: str) -> str:
    """Return the flag that argparse would complete a word to, if it is one of the flags above."""
    flags = [*_OWN_FLAGS, *_REFUSED, "--load-format"]
    return next((flag for flag in flags if flag.startswith(name) and flag != name), "")
