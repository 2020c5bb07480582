"""vLLM's offline engine, in a process of its own: prompts in, tokens out as they come."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from peagle.backends.vllm.checks import check_launch
from peagle.backends.vllm.command import (
    INSIDE,
    VllmLaunch,
    engine_arguments,
    environment,
    greedy_only,
)
from peagle.backends.vllm.evidence import (
    PROBE_TOKENS,
    PROBES,
    DraftCounts,
    Expected,
    judge,
    skips_mask_hidden,
)
from peagle.backends.vllm.heads import with_head
from peagle.backends.vllm.installation import VllmInstallation, find_vllm
from peagle.backends.vllm.process import Child, Watch
from peagle.config import SamplingParams
from peagle.errors import UserError

_SPEC_DECODE = "vllm:spec_decode_"
_STRUCTURES = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}


@dataclass(frozen=True, slots=True)
class VllmChunk:
    """A step's addition to one output.

    Attributes:
        index, output_index: of the prompt, and of the output among those of its prompt.
        text, token_ids: what is new.
        finish_reason: "stop" or "length" with the last chunk, None before.
        prompt_token_ids: the prompt as vLLM read it.
        num_cached_tokens: prompt tokens whose KV was there already.
        logprobs, prompt_logprobs: for each token (id, logprob, rank) of itself and of the likeliest
            ones; [] unless asked for. Those of the prompt leave out its first token.
    """

    index: int
    output_index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    prompt_token_ids: list[int]
    num_cached_tokens: int
    logprobs: list[list[tuple[int, float, int]]]
    prompt_logprobs: list[list[tuple[int, float, int]]]


class VllmOffline:
    """vLLM's offline engine, loaded and seen to draft as asked.

    Args:
        launch: what it loads; what concerns a server does not count.
        installation: of vLLM; None finds it.
        arguments: further ones of vLLM's own `LLM`.
        log: told every line that vLLM prints.
        probe: let it complete a few prompts first and refuse an engine that does not draft.

    Attributes:
        max_model_len: longest sequence in tokens.
        notes: what the user should know, each said once as a warning.

    Raises:
        UserError: vLLM is missing, does not load, or does not draft as asked.
    """

    def __init__(
        self,
        launch: VllmLaunch,
        installation: VllmInstallation | None = None,
        *,
        arguments: Mapping[str, Any] | None = None,
        log: Callable[[str], None] | None = None,
        probe: bool = True,
    ) -> None:
        if launch.data_parallel_size > 1:
            raise UserError(
                f"data_parallel_size is {launch.data_parallel_size}; vLLM has it for servers only. "
                "Use tensor_parallel_size, or peagle serve --engine vllm."
            )
        self.installation = installation or find_vllm()
        self.launch = with_head(launch)
        self.notes = list(check_launch(self.launch, self.installation))
        self._watch = Watch(log or (lambda line: None), skips_mask_hidden)
        self._child: Child | None = None
        for note in self.notes:
            warnings.warn(note, stacklevel=3)
        self._spawn()
        try:
            self._facts = self._load(arguments or {})
            self.max_model_len = int(self._facts.get("max_model_len") or 0)
            if probe and self.launch.speculative is not None:
                self._check_drafts()
        except BaseException:
            self.close()
            raise

    def _spawn(self) -> None:
        variables = {**os.environ, **environment(self.launch, self.installation)}
        if self.installation.is_cpu:
            # In the worker's own process: a third of the time to start.
            variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        worker = str(INSIDE / "peagle_vllm_worker.py")
        argv = [str(self.installation.python), worker, str(theirs_in), str(theirs_out)]
        self._child = Child(argv, variables, self._watch, pass_fds=(theirs_in, theirs_out))
        os.close(theirs_in)
        os.close(theirs_out)
        self._orders = os.fdopen(ours_out, "w", encoding="utf-8")
        self._answers = os.fdopen(ours_in, encoding="utf-8")

    def _load(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        own = engine_arguments(self.launch, self.installation)
        own.pop("served_model_name")
        self._order({"load": {**own, "disable_log_stats": False, **arguments}})
        return self._answer()["loaded"]

    # ---- generating -------------------------------------------------------------------------

    def generate(
        self, prompts: Sequence[Sequence[int] | str], params: Sequence[SamplingParams]
    ) -> Iterator[VllmChunk]:
        """Complete prompts, batched together, yielding each step's tokens as they come.

        Leaving the iterator early stops what is unfinished.

        Raises:
            UserError: a prompt is too long, or parameters ask for what vLLM does not have; or the
                engine died.
        """
        asked = [vllm_params(one, self.launch, self.installation) for one in params]
        listed = [prompt if isinstance(prompt, str) else list(prompt) for prompt in prompts]
        pairs = zip(listed, asked, strict=True)
        self._order({"generate": [{"prompt": prompt, "params": one} for prompt, one in pairs]})
        is_done = False
        try:
            while not is_done:
                told = self._answer()
                is_done = "done" in told
                for request in told.get("outputs", ()):
                    yield from _chunks(request)
        except UserError:
            is_done = True
            raise
        finally:
            if not is_done:
                self._stop()

    def _stop(self) -> None:
        """Have it stop, and read on to the end of what it said before."""
        self._order("stop")
        while "done" not in self._answer():
            pass

    def counts(self) -> DraftCounts | None:
        """Its counters of drafts since it was loaded, the probes left out; None without drafts."""
        counts = self._counts()
        return counts and counts.since(self._probed)

    def _counts(self) -> DraftCounts | None:
        self._order("counters")
        told = self._answer()["counters"]
        names = {name.removeprefix(_SPEC_DECODE): value for name, value in told.items()}
        per_pos = names.pop("num_accepted_tokens_per_pos", [])
        if "num_drafts" not in names:
            return None
        totals = {name: value for name, value in names.items() if not isinstance(value, list)}
        return DraftCounts.of(totals, per_pos)

    _probed = DraftCounts()

    def _check_drafts(self) -> None:
        config = self.launch.speculative
        assert config is not None
        long = (self.max_model_len or 1 << 20) >= 256
        prompts, length = (PROBES, PROBE_TOKENS) if long else (("1 2 3 4", "a a a a"), 16)
        params = SamplingParams(max_tokens=length, ignore_eos=True)
        for _ in self.generate(prompts, [params] * len(prompts)):
            pass
        counts = self._counts()
        expected = Expected(
            config.method,
            config.num_drafts,
            bool(self.launch.is_parallel),
            is_fixed=config.num_speculative_tokens_per_batch_size is None,
        )
        told = judge(
            expected, counts, self._facts, skipped=self._watch.seen, num_requests=len(prompts)
        )
        self._probed = counts or DraftCounts()
        for note in told:
            self.notes.append(note)
            warnings.warn(note, stacklevel=4)

    # ---- the pipes --------------------------------------------------------------------------

    def _order(self, order: object) -> None:
        if self._child is None:
            raise UserError("This engine was closed; make another one.")
        try:
            self._orders.write(json.dumps(order) + "\n")
            self._orders.flush()
        except (BrokenPipeError, ValueError):
            raise self._died() from None

    def _answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise self._died()
        told = json.loads(line)
        if "error" in told:
            index = told.get("refused", -1)
            where = f"Prompt {index + 1}: " if index >= 0 else ""
            tail = "" if index >= 0 or self._child is None else f" {self._child.tail()}"
            raise UserError(f"{where}vLLM refuses: {told['error']}.{tail}")
        return told

    def _died(self) -> UserError:
        child = self._child
        tail = child.tail() if child is not None else ""
        self.close()
        return UserError(f"vLLM's engine ended unexpectedly. {tail}")

    def close(self) -> None:
        """End it; calling it again does nothing."""
        child, self._child = self._child, None
        if child is None:
            return
        # The worker ends when its orders do.
        for pipe in (self._orders, self._answers):
            with suppress(OSError):
                pipe.close()
        child.end()

    def __del__(self) -> None:
        if getattr(self, "_child", None) is not None:
            self.close()


def _chunks(request: Mapping[str, Any]) -> Iterator[VllmChunk]:
    for output in request["outputs"]:
        yield VllmChunk(
            request["index"],
            output["index"],
            output["text"],
            output["token_ids"],
            output["finish_reason"],
            request["prompt_token_ids"] or [],
            request["num_cached_tokens"] or 0,
            _logprobs(output["logprobs"]),
            _logprobs(request["prompt_logprobs"]),
        )


def _logprobs(told: Sequence[Sequence[Any]]) -> list[list[tuple[int, float, int]]]:
    infinite = float("-inf")
    return [
        [(token, infinite if value is None else value, rank or 0) for token, value, rank in one]
        for one in told
    ]


def vllm_params(
    params: SamplingParams, launch: VllmLaunch, installation: VllmInstallation
) -> dict[str, Any]:
    """Sampling parameters under vLLM's names.

    Raises:
        UserError: vLLM has no equal, or none with speculative decoding.
    """
    _refuse_params(params, launch, installation)
    same = (
        *("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "n", "seed"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty", "logprobs"),
        *("prompt_logprobs", "ignore_eos"),
    )
    told: dict[str, Any] = {name: getattr(params, name) for name in same}
    for name in ("stop", "stop_token_ids", "bad_words"):
        told[name] = list(getattr(params, name)) or None
    if params.allowed_token_ids is not None:
        told["allowed_token_ids"] = list(params.allowed_token_ids)
    if params.logit_bias:
        told["logit_bias"] = {str(token): bias for token, bias in params.logit_bias}
    if (structure := params.structured_output) is not None:
        if structure.kind == "json":
            told["structured_outputs"] = {"json_object": True}
        else:
            told["structured_outputs"] = {_STRUCTURES[structure.kind]: structure.source}
    return {name: value for name, value in told.items() if value is not None}


def _refuse_params(
    params: SamplingParams, launch: VllmLaunch, installation: VllmInstallation
) -> None:
    drafts = launch.speculative is not None
    infinite = [token for token, bias in params.logit_bias if bias == float("-inf")]
    ids = [word for word in params.bad_words if not isinstance(word, str)]
    for is_asked, what, remedy in (
        (params.typical_p != 1, f"typical_p {params.typical_p}", "Leave it out."),
        (
            params.num_speculative_tokens is not None,
            f"num_speculative_tokens {params.num_speculative_tokens} of one request",
            "K is the engine's.",
        ),
        (bool(infinite), f"a logit_bias of -inf (token {infinite[:1]})", "Use allowed_token_ids."),
        (bool(ids), f"bad_words as token ids ({ids[:1]})", "Give their text."),
        (
            drafts and params.min_p != 0,
            f"min_p {params.min_p} with speculative decoding",
            "Leave it out, or decode plainly.",
        ),
        (
            drafts and bool(params.logit_bias),
            "logit_bias with speculative decoding",
            "Leave it out, or decode plainly.",
        ),
        (
            greedy_only(launch, installation) and not params.is_greedy,
            f"temperature {params.temperature} with speculative decoding on a CPU, where it "
            "samples wrongly",
            "Use temperature 0, or decode plainly.",
        ),
    ):
        if is_asked:
            raise UserError(f"vLLM does not have {what}. {remedy}")
