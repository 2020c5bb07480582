"""Configuration: frozen dataclasses, each default written once, each value checked when made."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from peagle.errors import UserError

DType = Literal["auto", "float32", "float64", "bfloat16", "float16"]
Method = Literal["eagle3", "ngram"]
DraftSampling = Literal["argmax", "probabilistic"]

MAX_SPECULATIVE_TOKENS = 64
MAX_SEED = 2**63 - 1
MAX_STOP_STRINGS = 64

# Keys of vLLM that concern how it runs, not what it drafts: accepted with the values for which this
# engine does the same.
_WITHOUT_EFFECT: dict[str, tuple[object, ...]] = {
    "enforce_eager": (False, True),
    "disable_padded_drafter_batch": (False, True),
    "use_local_argmax_reduction": (False, True),
    "draft_tensor_parallel_size": (1,),
    "rejection_sample_method": ("standard",),
}
_DRAFT_SAMPLE_METHODS = {"greedy": "argmax", "probabilistic": "probabilistic"}


def _require(condition: bool, name: str, value: object, expected: str, remedy: str = "") -> None:
    if not condition:
        raise UserError(
            f"{name} is {value!r}; expected {expected}.{' ' + remedy if remedy else ''}"
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled.

    Attributes:
        max_tokens: most tokens to generate, at least 1.
        temperature: 0 is greedy decoding; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose probabilities sum to top_p.
        seed: the same seed gives the same output for the same K, head, dtype and backend,
            whatever else is in the batch; None draws a fresh one from the engine's seed.
        stop: strings that end the output and are left out of its text, at most 64; one string
            stands for a list of one.
        stop_token_ids: token ids that end the output, beside the model's own end-of-text ids.
        ignore_eos: generate on past the model's own end-of-text ids.

    Raises:
        UserError: a value is out of range; the message names it.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        self._check_stop()
        _require(
            isinstance(self.stop_token_ids, Sequence | Set),
            "stop_token_ids",
            self.stop_token_ids,
            "a list of token ids",
        )
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _require(
            _is_int(self.max_tokens) and self.max_tokens >= 1,
            "max_tokens",
            self.max_tokens,
            "a whole number of at least 1",
        )
        _require(
            _is_number(self.temperature) and self.temperature >= 0,
            "temperature",
            self.temperature,
            "a number of at least 0 (0 is greedy)",
        )
        _require(
            _is_int(self.top_k) and self.top_k >= 0,
            "top_k",
            self.top_k,
            "a whole number of at least 0 (0 keeps every token)",
        )
        _require(
            _is_number(self.top_p) and 0 < self.top_p <= 1,
            "top_p",
            self.top_p,
            "a number above 0 and at most 1 (1 keeps every token)",
        )
        _require(
            self.seed is None or (_is_int(self.seed) and 0 <= self.seed <= MAX_SEED),
            "seed",
            self.seed,
            "a whole number from 0 to 2**63 - 1, or none",
        )
        for token in self.stop_token_ids:
            _require(
                _is_int(token) and token >= 0, "stop_token_ids", token, "token ids of at least 0"
            )

    def _check_stop(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        _require(isinstance(stop, Sequence | Set), "stop", stop, "a string or a list of strings")
        stop = tuple(stop)
        for one in stop:
            _require(isinstance(one, str) and bool(one), "stop", one, "strings that are not empty")
        _require(
            len(stop) <= MAX_STOP_STRINGS,
            "stop",
            f"{len(stop)} strings",
            f"at most {MAX_STOP_STRINGS}",
            "Look for others in the finished text.",
        )
        object.__setattr__(self, "stop", stop)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """How drafts are made; the field names are those of vLLM's speculative configuration.

    Attributes:
        method: "eagle3" drafts with a head (P-EAGLE heads too), "ngram" looks the drafts up in
            the tokens so far (prompt lookup).
        model: folder or hub id of the draft head; none for "ngram".
        revision: branch, tag or commit of a hub id.
        num_speculative_tokens: K, the draft tokens per step.
        parallel_drafting: draft all K in one pass; None takes what the head was trained for.
        draft_sampling: "argmax" drafts, or "probabilistic" ones drawn at the request's temperature.
        prompt_lookup_max, prompt_lookup_min: longest and shortest n-gram that "ngram" matches.
        check_target: refuse a head whose fingerprint names another target.

    Raises:
        UserError: a value is out of range or the combination makes no sense.
    """

    method: Method = "eagle3"
    model: str | None = None
    revision: str | None = None
    num_speculative_tokens: int = 7
    parallel_drafting: bool | None = None
    draft_sampling: DraftSampling = "argmax"
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 1
    check_target: bool = True

    def __post_init__(self) -> None:
        k = self.num_speculative_tokens
        _require(
            _is_int(k) and 1 <= k <= MAX_SPECULATIVE_TOKENS,
            "num_speculative_tokens",
            k,
            f"a whole number from 1 to {MAX_SPECULATIVE_TOKENS}",
            "To decode without drafts, leave the speculative configuration out (--no-speculation).",
        )
        _require(self.method in ("eagle3", "ngram"), "method", self.method, '"eagle3" or "ngram"')
        _require(
            self.draft_sampling in ("argmax", "probabilistic"),
            "draft_sampling",
            self.draft_sampling,
            '"argmax" or "probabilistic"',
        )
        parallel, check = self.parallel_drafting, self.check_target
        ok = parallel is None or isinstance(parallel, bool)
        _require(ok, "parallel_drafting", parallel, "true, false or none")
        _require(isinstance(check, bool), "check_target", check, "true or false")
        self._check_source()

    def _check_source(self) -> None:
        """Where the drafts come from: a head, or the tokens so far."""
        revision = self.revision
        ok = revision is None or (isinstance(revision, str) and bool(revision))
        _require(ok, "revision", revision, "a branch, a tag or a commit")
        if self.method == "eagle3":
            if isinstance(self.model, Path):
                object.__setattr__(self, "model", str(self.model))
            ok = isinstance(self.model, str) and bool(self.model)
            _require(ok, "model", self.model, "the folder of a draft head, or its hub id")
        else:
            self._check_lookup()

    def _check_lookup(self) -> None:
        for name in ("model", "revision"):
            value = getattr(self, name)
            _require(value is None, name, value, f'no {name} with method "ngram"')
        longest, shortest = self.prompt_lookup_max, self.prompt_lookup_min
        ok = _is_int(longest) and longest >= 1
        _require(ok, "prompt_lookup_max", longest, "a whole number of at least 1")
        ok = _is_int(shortest) and 1 <= shortest <= longest
        _require(ok, "prompt_lookup_min", shortest, f"1 to prompt_lookup_max ({longest})")

    @classmethod
    def parse(cls, source: str | Mapping[str, Any] | SpeculativeConfig) -> SpeculativeConfig:
        """Read vLLM's form of the configuration, from JSON text or a mapping.

        Keys are those of the attributes and of vLLM: `draft_sample_method` ("greedy" or
        "probabilistic") is its name of `draft_sampling`; `enforce_eager`,
        `disable_padded_drafter_batch` and `use_local_argmax_reduction` are accepted and change
        nothing here, as are `draft_tensor_parallel_size` 1 and `rejection_sample_method`
        "standard". Null stands for the default. All else is refused.

        Raises:
            UserError: the text is not a JSON object, or a key or value is not understood.
        """
        if isinstance(source, SpeculativeConfig):
            return source
        return cls(**speculative_keys(source))


def speculative_keys(source: str | Mapping[str, Any]) -> dict[str, Any]:
    """The fields of SpeculativeConfig that vLLM's form of it gives, see `SpeculativeConfig.parse`.

    Raises:
        UserError: not a JSON object, an unknown key, or a value of vLLM that has no equal here.
    """
    data = _json(source) if isinstance(source, str) else source
    if not isinstance(data, Mapping):
        raise UserError(f"The speculative configuration is {data!r}; expected a JSON object.")
    known = {field.name for field in fields(SpeculativeConfig)}
    vllm = {*_WITHOUT_EFFECT, "draft_sample_method"}
    if unknown := sorted(set(map(str, data)) - known - vllm - {"parallel_drafting_spec"}):
        raise UserError(
            f"Unknown key {unknown[0]!r} in the speculative configuration; "
            f"known keys: {', '.join(sorted(known))}; of vLLM also {', '.join(sorted(vllm))}."
        )
    given = {key: value for key, value in data.items() if value is not None}
    if "parallel_drafting_spec" in given:
        raise UserError(
            f"parallel_drafting_spec is {given['parallel_drafting_spec']!r}: it asks for candidate "
            "trees, which this engine does not draft. Leave it out; num_speculative_tokens sets "
            "the depth of the one chain that it drafts."
        )
    for key, allowed in _WITHOUT_EFFECT.items():
        expected, value = " or ".join(map(json.dumps, allowed)), given.pop(key, allowed[0])
        _require(value in allowed, key, value, expected, "This engine has no other: leave it out.")
    if "draft_sample_method" in given:
        _rename_draft_sampling(given)
    return given


def _rename_draft_sampling(given: dict[str, Any]) -> None:
    method = given.pop("draft_sample_method")
    expected = " or ".join(map(json.dumps, _DRAFT_SAMPLE_METHODS))
    _require(method in [*_DRAFT_SAMPLE_METHODS], "draft_sample_method", method, expected)
    sampling = _DRAFT_SAMPLE_METHODS[method]
    if given.setdefault("draft_sampling", sampling) != sampling:
        raise UserError(
            f"draft_sample_method {method!r} and draft_sampling {given['draft_sampling']!r} "
            "contradict each other; leave one of them out."
        )


def _json(text: str) -> Any:
    """JSON, in which no key may appear twice: one of the two would be ignored."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if twice := [key for n, (key, _) in enumerate(pairs) if key in dict(pairs[:n])]:
            raise UserError(f"The speculative configuration has the key {twice[0]!r} twice.")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise UserError(f"The speculative configuration is not JSON: {error}.") from None


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes and placement of one engine.

    Attributes:
        dtype: type of weights, activations and KV cache; "auto" is float32 on a CPU and
            bfloat16 on a GPU.
        device: "auto" takes the GPU where there is one.
        max_model_len: longest sequence (prompt and output) in tokens; None takes the model's.
        max_num_seqs: most sequences decoded together.
        max_num_batched_tokens: most prompt tokens in one prefill pass (a longer prompt runs alone).
        block_size: token slots of one KV block.
        num_kv_blocks: KV blocks of the cache; None derives it from max_num_seqs and kv_cache_gib.
        kv_cache_gib: memory bound of the KV cache in GiB; None is 2 on a CPU, and on a GPU 80% of
            what is free once the weights are loaded.
        seed: source of the seeds of requests that bring none.
    """

    dtype: DType = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 4096
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_gib: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        dtypes = ("auto", "float32", "float64", "bfloat16", "float16")
        _require(self.dtype in dtypes, "dtype", self.dtype, "one of " + ", ".join(dtypes))
        ok = isinstance(self.device, str)
        _require(ok, "device", self.device, '"auto", "cpu" or "cuda"')
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            value = getattr(self, name)
            _require(_is_int(value) and value >= 1, name, value, "a whole number of at least 1")
        for name in ("max_model_len", "num_kv_blocks"):
            value = getattr(self, name)
            ok = value is None or (_is_int(value) and value >= 1)
            _require(ok, name, value, "a whole number of at least 1, or none")
        ok = self.kv_cache_gib is None or (_is_number(self.kv_cache_gib) and self.kv_cache_gib > 0)
        _require(ok, "kv_cache_gib", self.kv_cache_gib, "a number above 0, or none")
        _require(
            _is_int(self.seed) and 0 <= self.seed <= MAX_SEED,
            "seed",
            self.seed,
            "a whole number from 0 to 2**63 - 1",
        )


def require_folder(path: str | Path, what: str) -> Path:
    """Return `path` as an existing folder.

    Raises:
        UserError: there is no such folder, or it is a file.
    """
    folder = Path(path)
    if folder.is_dir():
        return folder
    found = "a file, not a folder" if folder.exists() else "not there"
    raise UserError(f"{what} {str(path)!r} is {found}; expected a folder with config.json.")


def token_ids(values: Sequence[int], vocab_size: int, what: str) -> list[int]:
    """Return `values` as a list of token ids below `vocab_size`.

    Raises:
        UserError: an id is not a whole number of the vocabulary.
    """
    ids = list(values)
    for value in ids:
        _require(
            _is_int(value) and 0 <= value < vocab_size,
            what,
            value,
            f"token ids from 0 to {vocab_size - 1}",
        )
    return ids
