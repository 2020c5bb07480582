# pyright: reportMissingImports=false
"""CUDA graphs of whole decode steps for each K of a schedule, in vLLM's V1 runner.

vLLM captures whole steps of 1 + K tokens for each request, and none with a schedule of K. Here it
captures them for a P-EAGLE head and each K of the schedule, at those of its sizes that are a
multiple of 1 + K. Steps of other lengths run in pieces, as vLLM's own. Without such graphs (on
CPUs, with `enforce_eager`, without a schedule) all methods are vLLM's own.

Runs in vLLM's processes alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any


def capture_scheduled_steps() -> None:
    """Replace methods of vLLM's configuration, dispatcher and runner, once: all or none.

    Raises:
        ImportError, AttributeError: this vLLM has no such methods.
    """
    from vllm.config import CUDAGraphMode, VllmConfig
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher as Dispatcher
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as Runner

    leave_out = VllmConfig._maybe_override_dynamic_sd_cudagraph_mode
    initialize = Dispatcher.initialize_cudagraph_keys
    determine, capture = Runner._determine_batch_execution_and_padding, Runner._warmup_and_capture
    _ = Dispatcher._compute_bs_to_padded_graph_size, Dispatcher.add_cudagraph_key
    _ = Dispatcher._get_lora_cases, Dispatcher._create_padded_batch_descriptor
    both = CUDAGraphMode.FULL_AND_PIECEWISE
    if hasattr(leave_out, "is_of_peagle"):
        return

    def leave_out_if_unknown(self: Any) -> None:
        if not step_lengths(self) or self.compilation_config.cudagraph_mode != both:
            leave_out(self)

    def initialize_all(self: Any, mode: Any, *inputs: Any, **named: Any) -> None:
        initialize(self, mode, *inputs, **named)
        self.peagle_sizes = {}
        if mode != both:  # the drafter's dispatcher too
            return
        most = self.vllm_config.scheduler_config.max_num_seqs
        for length in step_lengths(self.vllm_config):
            sizes = self.compilation_config.cudagraph_capture_sizes
            sizes = [size for size in sizes if size % length == 0 and size <= length * most]
            self.peagle_sizes[length] = sizes
            with _steps_of(length, self):
                for size, loras in product(sizes, self._get_lora_cases()):
                    found = self._create_padded_batch_descriptor(size, True, loras > 0, loras)
                    self.add_cudagraph_key(CUDAGraphMode.FULL, found)

    def determine_any(self: Any, *inputs: Any, **named: Any) -> Any:
        length = named.get("max_num_scheduled_tokens")
        with _steps_of(length, *_parts_of(self, length, named.get("num_tokens"))):
            return determine(self, *inputs, **named)

    def capture_any(self: Any, desc: Any, *inputs: Any, **named: Any) -> None:
        length = desc.num_tokens // desc.num_reqs if desc.uniform else None
        with _steps_of(length, *_parts_of(self, length, desc.num_tokens)):
            capture(self, desc, *inputs, **named)

    leave_out_if_unknown.is_of_peagle = True  # type: ignore[attr-defined]
    VllmConfig._maybe_override_dynamic_sd_cudagraph_mode = leave_out_if_unknown
    Dispatcher.initialize_cudagraph_keys = initialize_all
    Runner._determine_batch_execution_and_padding = determine_any
    Runner._warmup_and_capture = capture_any


def step_lengths(config: Any) -> frozenset[int]:
    """Return the tokens of a request in the steps of a P-EAGLE head's schedule.

    None without a schedule, with other heads, and for targets with state layers or latent
    attention: how these run steps of several lengths in one graph was not tried.
    """
    speculative, model = config.speculative_config, config.model_config
    if speculative is None or speculative.method != "eagle3" or not speculative.parallel_drafting:
        return frozenset()
    schedule = speculative.num_speculative_tokens_per_batch_size
    if not schedule or model.is_hybrid or model.use_mla:
        return frozenset()
    most = config.scheduler_config.max_num_seqs
    drafts = {k for first, _, k in schedule if first <= most}
    return frozenset(1 + min(k, speculative.num_speculative_tokens) for k in drafts)


def _parts_of(runner: Any, length: Any, num_tokens: Any) -> tuple[Any, ...]:
    """Return the runner and its dispatcher if steps of this length have a graph here; else none."""
    dispatcher = runner.cudagraph_dispatcher
    sizes = getattr(dispatcher, "peagle_sizes", {}).get(length)
    if not sizes or num_tokens > sizes[-1]:
        return ()
    padded = dispatcher._bs_to_padded_graph_size[num_tokens]
    return (runner, dispatcher) if padded in sizes else ()


@contextmanager
def _steps_of(length: Any, *holders: Any) -> Iterator[None]:
    """Let vLLM take steps of so many tokens a request for uniform ones there."""
    before = [one.uniform_decode_query_len for one in holders]
    for one in holders:
        one.uniform_decode_query_len = length
    try:
        yield
    finally:
        for one, value in zip(holders, before, strict=True):
            one.uniform_decode_query_len = value
