# pyright: reportMissingImports=false
"""Fewer drafts than K of a P-EAGLE head in vLLM's proposer, as a schedule of K asks for.

vLLM's proposer keeps room for K slots of each request, and with a schedule it reads as many as the
step wants out of them: each request then gets slots of another. Here the head drafts all K, which
takes it hardly longer, and the step gets the first of them. Without drafts the head reads on, and
has no slots in its pass.

Runs in vLLM's processes alone.
"""

from typing import Any

from torch import Tensor


def follow_schedules() -> None:
    """Replace a method of vLLM's proposer, once.

    Raises:
        ImportError, AttributeError: this vLLM has no such proposer.
    """
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer as Proposer

    propose = Proposer.propose
    if hasattr(propose, "is_of_peagle"):
        return

    def propose_first(self: Any, num_speculative_tokens: int, *inputs: Any, **named: Any) -> Tensor:
        most = self.speculative_config.num_speculative_tokens
        if self.method != "eagle3" or not self.parallel_drafting or num_speculative_tokens == most:
            return propose(self, num_speculative_tokens, *inputs, **named)
        if num_speculative_tokens == 0:
            needs_slots, self.needs_extra_input_slots = self.needs_extra_input_slots, False
            try:
                return propose(self, 0, *inputs, **named)
            finally:
                self.needs_extra_input_slots = needs_slots
        drafts_BK = propose(self, most, *inputs, **named)
        if self._last_draft_probs is not None:
            self._last_draft_probs = self._last_draft_probs[:, :num_speculative_tokens].contiguous()
        return drafts_BK[:, :num_speculative_tokens].contiguous()

    propose_first.is_of_peagle = True  # type: ignore[attr-defined]
    Proposer.propose = propose_first
