# pyright: reportMissingImports=false
"""CUDA graphs of the walk over the slots of up to 64 requests.

Launched one after the other out of vLLM's process, the kernels of a walk come later than the card
could begin them. A graph starts all of them at once, so that each begins while the one before it is
at work. vLLM captures them behind its own graphs. Without those, with a drafter that has none
(`enforce_eager`), and where vLLM shares lm_head out over several GPUs, kernels are launched one by
one.

Runs in vLLM's processes alone. Shapes: R rows, K of each request; D.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_REQUESTS = (1, 2, 4, *range(8, 65, 8))


class WalkGraphs:
    """A graph for each of some numbers of requests; a batch takes the next larger one.

    Args:
        draft: from final, normed hidden states [R, D] to drafts [R].
        hidden_D: of one row, for its device and type.
        num_slots: K.
        most: the largest number of requests.
    """

    def __init__(
        self, draft: Callable[[Tensor], Tensor], hidden_D: Tensor, num_slots: int, most: int
    ) -> None:
        most = min(most, _REQUESTS[-1])
        sizes = [size * num_slots for size in (*(one for one in _REQUESTS if one < most), most)]
        self._hidden_RD = hidden_D.new_zeros(sizes[-1], len(hidden_D))
        self._graphs: dict[int, tuple[Any, Tensor]] = {}  # by rows
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(sizes):  # the smaller ones fit into the memory of the largest
            draft(self._hidden_RD[:size])  # compiles the kernels
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                drafts_R = draft(self._hidden_RD[:size])
            self._graphs[size] = graph, drafts_R

    def __call__(self, hidden_RD: Tensor) -> Tensor | None:
        """Return the drafts [R]; None if there are more requests than any graph has."""
        rows = len(hidden_RD)
        size = min((size for size in self._graphs if size >= rows), default=None)
        if size is None:
            return None
        graph, drafts_R = self._graphs[size]
        self._hidden_RD[:rows].copy_(hidden_RD)
        graph.replay()
        return drafts_R[:rows].clone()  # the next step writes there again


def capture_walks() -> None:
    """Replace a method of vLLM's runner, once.

    Raises:
        ImportError, AttributeError: this vLLM has no such method.
    """
    from vllm.config import CUDAGraphMode
    from vllm.distributed import get_tensor_model_parallel_world_size
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as Runner

    from peagle.backends.vllm.corrected_drafts import draft_greedily, has_kernels

    capture = Runner.capture_model
    if hasattr(capture, "is_of_peagle"):
        return

    @torch.inference_mode()
    def capture_all(self: Any) -> int:
        taken = capture(self)
        drafter: Any = getattr(self, "drafter", None)
        corrected = getattr(drafter, "peagle_correction", None)
        is_whole = get_tensor_model_parallel_world_size() == 1
        has_graphs = self.compilation_config.cudagraph_mode != CUDAGraphMode.NONE
        if corrected is None or not (is_whole and has_graphs and has_kernels(drafter.device)):
            return taken
        speculative, device = drafter.speculative_config, drafter.device
        if speculative.enforce_eager:
            return taken
        drafter.peagle_walks = None  # vLLM captures anew when it gets more or fewer GPUs
        # A step of a schedule left its own K there.
        num_slots = drafter.num_speculative_tokens = speculative.num_speculative_tokens
        hidden_D = torch.zeros(drafter.hidden_size, dtype=drafter.dtype, device=device)
        free = torch.cuda.mem_get_info(device)[0]
        drafter.peagle_walks = WalkGraphs(
            lambda hidden_RD: draft_greedily(drafter, corrected, hidden_RD),
            hidden_D,
            num_slots,
            drafter.max_batch_size,
        )
        torch.cuda.empty_cache()  # of the passes that compiled the kernels
        return taken + free - torch.cuda.mem_get_info(device)[0]

    capture_all.is_of_peagle = True  # type: ignore[attr-defined]
    Runner.capture_model = capture_all
