# pyright: reportMissingImports=false
"""CUDA graphs of whole decode steps for each K of a schedule, in vLLM's V1 runner.

vLLM captures whole steps of 1 + K tokens for each request, and none with a schedule of K. Here it
captures them for a P-EAGLE head and each K of the schedule, at those of its sizes that are a
multiple of 1 + K. Steps of other lengths run in pieces, as vLLM's own.

Runs in vLLM's processes alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any


def capture_scheduled_steps() -> None:
    """Replace methods of vLLM's configuration, dispatcher and runner, once.

    Raises:
        ImportError, AttributeError: this vLLM has no such methods.
    """
    from vllm.config import CUDAGraphMode, VllmConfig
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher as Dispatcher
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as Runner

    leave_out, initialize = (
        VllmConfig._maybe_override_dynamic_sd_cudagraph_mode,
        Dispatcher.initialize_cudagraph_keys,
    )
    determine, capture = Runner._determine_batch_execution_and_padding, Runner._warmup_and_capture
    if hasattr(leave_out, "is_of_peagle"):
        return

    def leave_out_if_unknown(self: Any) -> None:
        if not step_lengths(self):
            leave_out(self)

    def initialize_all(self: Any, mode: Any, uniform_decode_query_len: int = 1) -> None:
        initialize(self, mode, uniform_decode_query_len)
        whole = mode.decode_mode() == CUDAGraphMode.FULL and mode.separate_routine()
        if not whole or uniform_decode_query_len != self.uniform_decode_query_len:
            return  # the drafter's dispatcher
        most = self.vllm_config.scheduler_config.max_num_seqs
        for length in step_lengths(self.vllm_config) - {uniform_decode_query_len}:
            with _steps_of(length, self):
                for size in self.compilation_config.cudagraph_capture_sizes:
                    if size % length or size > length * most:
                        continue
                    for loras in self._get_lora_cases():
                        found = self._create_padded_batch_descriptor(size, True, loras > 0, loras)
                        self.add_cudagraph_key(CUDAGraphMode.FULL, found)

    def determine_any(self: Any, *inputs: Any, **named: Any) -> Any:
        length = named.get("max_num_scheduled_tokens")
        is_step = (
            named.get("force_uniform_decode") is None
            and length in step_lengths(self.vllm_config)
            and named["num_tokens"] == length * named["num_reqs"]
            and _padded(self.cudagraph_dispatcher, named["num_tokens"]) % length == 0
        )
        with _steps_of(length, self, self.cudagraph_dispatcher) if is_step else nullcontext():
            return determine(self, *inputs, **named)

    def capture_any(self: Any, desc: Any, *inputs: Any, **named: Any) -> None:
        length = desc.num_tokens // desc.num_reqs if desc.uniform else None
        is_step = length in step_lengths(self.vllm_config)
        with _steps_of(length, self, self.cudagraph_dispatcher) if is_step else nullcontext():
            capture(self, desc, *inputs, **named)

    leave_out_if_unknown.is_of_peagle = True  # type: ignore[attr-defined]
    VllmConfig._maybe_override_dynamic_sd_cudagraph_mode = leave_out_if_unknown
    Dispatcher.initialize_cudagraph_keys = initialize_all
    Runner._determine_batch_execution_and_padding = determine_any
    Runner._warmup_and_capture = capture_any


def step_lengths(config: Any) -> frozenset[int]:
    """Return the tokens of a request in steps of a schedule; none without a P-EAGLE head's."""
    speculative = config.speculative_config
    if speculative is None or speculative.method != "eagle3" or not speculative.parallel_drafting:
        return frozenset()
    schedule = speculative.num_speculative_tokens_per_batch_size or ()
    return frozenset(1 + k for _, _, k in schedule)


def _padded(dispatcher: Any, num_tokens: int) -> int:
    """Return the captured size that a step runs in; the step's own beyond all of them."""
    sizes = getattr(dispatcher, "_bs_to_padded_graph_size", ())
    return sizes[num_tokens] if num_tokens < len(sizes) else num_tokens


@contextmanager
def _steps_of(length: int, *holders: Any) -> Iterator[None]:
    """Let vLLM take steps of so many tokens a request for uniform ones."""
    before = [one.uniform_decode_query_len for one in holders]
    for one in holders:
        one.uniform_decode_query_len = length
    try:
        yield
    finally:
        for one, value in zip(holders, before, strict=True):
            one.uniform_decode_query_len = value
