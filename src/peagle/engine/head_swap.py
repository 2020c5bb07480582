"""A new draft head in the place of a running engine's, while its requests go on.

The weights go into the tensors that compiled code and CUDA graphs read; what follows from them is
computed again, in place. KV of the old head stays with the sequences that run, where it can cost
accepted drafts alone, and no other sequence reads it.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from peagle.config import SamplingParams
from peagle.engine.drafting import HeadDrafting
from peagle.engine.engine import LLMEngine
from peagle.engine.head import load_head
from peagle.engine.memory_plan import device_name
from peagle.engine.sequence import Sequence
from peagle.errors import CheckpointError, UserError
from peagle.models.checkpoint import read_head
from peagle.models.comparison import near_tie_bound, relative_difference, tolerance
from peagle.models.correction import DraftCorrection
from peagle.models.drafter import Drafter, DrafterAttention, DrafterLayer, DrafterMLP, RMSNorm

_TRIED_TOKENS = 12
_REMEDY = "; restart the server with the new head."
_PROBED_ROWS = 4
_PROBE_TOLERANCES = 4  # times that of a module: layers follow each other
# Modules whose weights are all parameters and buffers of theirs, and have no other form.
_REWRITTEN = (
    *(Drafter, DrafterLayer, DrafterAttention, DrafterMLP, RMSNorm, DraftCorrection),
    *(nn.Linear, nn.Embedding, nn.ModuleList),
)


class HeadSwap:
    """A head on its way into an engine.

    It may be made in a thread beside the engine's. Its methods belong between two steps.

    Raises:
        UserError: the engine drafts without a head, or with several corrections; or the device
            has no room for a second head.
        CheckpointError: the head in `folder` is not readable, loses files meanwhile, or does not
            fit.
    """

    def __init__(self, engine: LLMEngine, folder: str) -> None:
        drafting, speculative = engine.drafting, engine.speculative
        if speculative is None or not isinstance(drafting, HeadDrafting):
            raise UserError("The engine drafts without a head.")
        if names := engine.corrections:
            raise UserError(
                f"The head has further corrections ({', '.join(names)}), which fit no other head"
                + _REMEDY
            )
        self._engine, self._drafting = engine, drafting
        self._drafter = drafting.proposer.drafter
        self._old, self._speculative = speculative, replace(speculative, model=folder)
        self._before: dict[str, Tensor] = {}
        files = _names_in(folder)
        try:
            self._new = self._load(folder)
        except torch.OutOfMemoryError:
            where = device_name(engine.target.device)
            raise UserError(
                f"The head {folder!r} does not fit {where} beside the running head" + _REMEDY
            ) from None
        finally:
            if lost := files - _names_in(folder):
                raise CheckpointError(
                    f"Files of the head {folder!r} were deleted while it was loaded, as "
                    f"{min(lost)!r}; expected them to stay."
                )

    def _load(self, folder: str) -> Drafter:
        """Load the new head; refuse one that differs from the engine's by more than its weights."""
        own, target, k = self._drafter, self._engine.target, self._engine.num_speculative_tokens
        stored = read_head(folder, num_target_layers=target.num_layers)
        if self._speculative.check_target and stored.fingerprint is None:
            raise CheckpointError(
                f"The head {folder!r} does not name its target (peagle.target in config.json)."
            )
        new = load_head(target, self._speculative)
        assert new is not None
        theirs = _facts(new)
        for name, value in _facts(own).items():
            if theirs.get(name) != value:
                raise CheckpointError(
                    f"The head {folder!r} has {name} {theirs.get(name)}, the running head {value}"
                    + _REMEDY
                )
        if own.d2t is not None and new.d2t is not None and not torch.equal(own.d2t, new.d2t):
            raise CheckpointError(
                f"The head {folder!r} drafts from another vocabulary (d2t) than the running head"
                + _REMEDY
            )
        depth, needed = new.config.trained_depth, min(k, own.config.trained_depth or k)
        if depth is not None and depth < needed:
            raise CheckpointError(
                f"The head {folder!r} was trained for {depth} draft tokens; expected at least "
                f"{needed}, as many as are served."
            )
        return new

    def try_out(self, prompts: SequenceOf[SequenceOf[int]]) -> Iterator[None]:
        """Decode prompts with the new head and without drafts, in a small engine; yield each step.

        Raises:
            CheckpointError: greedy outputs differ by more than rounding explains.
        """
        engine = self._engine
        prompts = [prompt[: max(1, engine.max_model_len // 2)] for prompt in prompts]
        tokens = _TRIED_TOKENS + engine.scheduler.num_lookahead_slots
        small = replace(
            engine.config,
            max_num_seqs=2 * len(prompts),
            max_num_batched_tokens=256,
            num_kv_blocks=sum(2 + 2 * engine.blocks.blocks_for(len(p) + tokens) for p in prompts),
            kv_cache_gib=None,
            enable_prefix_caching=False,
            enforce_eager=True,
        )
        beside = LLMEngine(engine.target, small, self._speculative, drafter=self._new)
        params = SamplingParams(max_tokens=_TRIED_TOKENS, ignore_eos=True)
        plain = replace(params, num_speculative_tokens=0, logprobs=2)
        pairs = [[beside.add_request(p, one) for one in (plain, params)] for p in prompts]
        while beside.has_unfinished:
            beside.step()
            yield
        bound = near_tie_bound(engine.target.dtype)
        for expected, found in pairs:
            if found.error or not _is_same(expected, found, bound):
                raise CheckpointError(
                    f"With the head {self._speculative.model!r} a greedy output differs from the "
                    "one without drafts."
                )

    @torch.inference_mode()
    def copy(self) -> None:
        """Copy the new weights over the engine's; if it still reads others, take these back.

        Raises:
            RuntimeError: it does.
        """
        self._before = {n: t.to("cpu", copy=True) for n, t in _tensors(self._drafter).items()}
        try:
            self._write(_tensors(self._new))
            if stale := self._find_stale():
                raise RuntimeError(f"the engine reads other weights than those copied: {stale}")
        except BaseException:
            self.restore()
            raise
        self._engine.speculative = self._speculative

    @torch.inference_mode()
    def turn(self, *, is_new: bool) -> None:
        """Draft with the new head, or with the old one, after `copy` has checked the new one."""
        self._write(_tensors(self._new) if is_new else self._before)
        self._engine.speculative = self._speculative if is_new else self._old

    def restore(self) -> None:
        """Copy the old weights back, if new ones were copied."""
        if self._before:
            self.turn(is_new=False)
            self._before = {}

    def _write(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in _tensors(self._drafter).items():
            tensor.copy_(tensors[name])
        self._drafting.derive_again()
        self._engine.forget_drafter_kv()

    def _find_stale(self) -> str:
        """Return what differs between the engine's head and the new one; "" if nothing does.

        Weights must be equal, and so must passes through both, within the rounding of kernels.
        """
        new = _tensors(self._new)
        for name, tensor in _tensors(self._drafter).items():
            if not torch.equal(tensor, new[name]):
                return name
        pairs = {"the logits of a pass": (_probe(self._drafter), _probe(self._new))}
        if self._drafter.config.is_parallel:
            found = self._drafting.proposer.h_shared_1D.flatten()
            pairs["h_shared"] = found, self._new.shared_hidden()
        for name, pair in pairs.items():
            if not relative_difference(*pair) <= _PROBE_TOLERANCES * tolerance(pair[0].dtype):
                return name
        return ""


def _names_in(folder: str) -> set[str]:
    path = Path(folder)
    return {file.name for file in path.iterdir()} if path.is_dir() else set()


def _facts(drafter: Drafter) -> dict[str, Any]:
    """Return by name what a head has in common with one that takes its place.

    Raises:
        CheckpointError: a layer holds its weights in a form that a copy would leave as it is.
    """
    for name, module in drafter.named_modules():
        if not isinstance(module, _REWRITTEN):
            raise CheckpointError(
                f"{name} of the draft head is a {type(module).__name__}, whose packed weights a "
                f"swap does not rewrite{_REMEDY}"
            )
    config = asdict(replace(drafter.config, trained_depth=None))
    shapes = {f"{name} of shape": list(t.shape) for name, t in _tensors(drafter).items()}
    looks = {"windows": drafter.windows, "reach": drafter.reach}
    correction = {"a correction:": "no" if drafter.correction is None else "yes"}
    return {"kind": drafter.config.kind} | config | looks | correction | shapes


def _tensors(drafter: Drafter) -> dict[str, Tensor]:
    """Return the tensors of a head, those of its correction included."""
    return dict([*drafter.named_parameters(), *drafter.named_buffers()])


def _probe(drafter: Drafter) -> Tensor:
    """Return the corrected logits of a head on made-up features."""
    config, generator = drafter.config, torch.Generator().manual_seed(0)
    features = torch.randn(_PROBED_ROWS, config.feature_size, generator=generator)
    rows = torch.arange(_PROBED_ROWS, device=drafter.norm.weight.device)
    tokens = rows * (config.vocab_size - 1) // (_PROBED_ROWS - 1)
    repeats = config.num_attention_heads // config.num_kv_heads

    def attend(_: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return query + (key + value).repeat_interleave(repeats, -2)

    hidden = drafter.combine_features(features.to(drafter.norm.weight))
    states = drafter(tokens, hidden, rows, attend)
    logits = drafter.compute_logits(states)
    if (correction := drafter.correction) is None:
        return logits
    inner = correction.start(drafter.normed(states).unsqueeze(0))[0]
    return correction.add(logits, inner, tokens)


def _is_same(expected: Sequence, found: Sequence, bound: float) -> bool:
    """Return whether outputs are equal up to a near-tie of the two best in `expected.logprobs`."""
    ours, theirs = expected.output_token_ids, found.output_token_ids
    at = next((i for i, pair in enumerate(zip(ours, theirs)) if pair[0] != pair[1]), None)
    if at is None:
        return len(ours) == len(theirs)
    (_, best), (token, second) = expected.logprobs[at].top[:2]
    return token == theirs[at] and best - second <= bound
