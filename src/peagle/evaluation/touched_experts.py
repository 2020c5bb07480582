"""The distinct experts that decode steps of a mixture touch, counted from the model's own routing.

A step that is limited by memory reads the weights of each expert once, however many tokens chose
it: its cost follows distinct experts. The counted steps are not the timed ones, because recording
needs every kernel launched by itself.

Shapes: L layers with experts, T rows of a pass, C experts chosen for each, B sequences, E experts.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor

from peagle.errors import UserError
from peagle.evaluation.decoding import Request
from peagle.evaluation.engine_backend import EngineBackend
from peagle.evaluation.journal import Journal
from peagle.evaluation.sweep import Sweep, SweepPoint
from peagle.llm import LLM
from peagle.models.routing import num_experts_of, record_routing
from peagle.results import TouchedExperts

COUNTED_STEPS = 16


def expected_experts(num_tokens: float, num_chosen: int, num_experts: int) -> float:
    """Return the distinct experts that tokens touch on average under even routing.

    E (1 - (1 - c / E)^T): each token chooses c of E experts, independently and all equally likely.
    """
    return num_experts * (1 - (1 - num_chosen / num_experts) ** num_tokens)


@dataclass(frozen=True, slots=True)
class DecodePass:
    """One pass of the target over sequences that decode.

    Attributes:
        num_rows: rows of each sequence: its newest token and its drafts.
        experts_LTC: experts of each row in each layer, int64 on the CPU.
    """

    num_rows: tuple[int, ...]
    experts_LTC: Tensor


@contextmanager
def recorded_passes(llm: LLM) -> Iterator[list[DecodePass]]:
    """Yield a list that gets the decode passes of requests that begin and end meanwhile."""
    passes: list[DecodePass] = []
    engine = llm.engine
    run = engine.runner.run
    with engine.without_graphs(), record_routing(engine.target) as chosen:

        def recording(chunks: Sequence[Any], run_target: Any = None) -> Any:
            chosen.clear()
            done = run(chunks, run_target)
            if all(c.num_tokens == 1 and c.sequence.num_output_tokens for c in chunks):
                num_rows = tuple(chunk.num_tokens + chunk.num_draft_tokens for chunk in chunks)
                passes.append(DecodePass(num_rows, torch.stack(chosen).cpu().long()))
            return done

        engine.runner.run = recording
        try:
            yield passes
        finally:
            engine.runner.run = run


def count_touched(passes: Sequence[DecodePass], num_experts: int) -> TouchedExperts | None:
    """Return the mean distinct experts of a layer and step, over passes with the most sequences.

    None without a pass.
    """
    most = max((len(one.num_rows) for one in passes), default=0)
    full = [one for one in passes if len(one.num_rows) == most]
    if not full:
        return None
    counts = torch.tensor([[layer.unique().numel() for layer in p.experts_LTC] for p in full])
    return TouchedExperts(
        per_layer=counts.double().mean(0).tolist(), num_experts=num_experts, num_steps=len(full)
    )


@dataclass(frozen=True, slots=True)
class ExpertCounts:
    """Distinct experts that a decode step touches in a layer, means over steps and layers.

    Attributes:
        num_experts: experts of a layer.
        num_chosen: experts chosen for a token.
        by_k: the counts by K, for 1, 2 and more sequences.
    """

    num_experts: int
    num_chosen: int
    by_k: Mapping[int, Sequence[float]]

    def touched(self, batch: int, k: int) -> float:
        """Return the distinct experts of a layer and step for `batch` sequences at K = `k`."""
        return self.by_k[k][batch - 1]

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name, `by_k` as pairs."""
        return asdict(self) | {"by_k": [[k, list(counts)] for k, counts in self.by_k.items()]}

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> Self:
        """Return the counts from the fields that `to_json` gave."""
        return cls(**{**fields, "by_k": dict(fields["by_k"])})


def count_by_batch(
    passes: Sequence[DecodePass], num_experts: int, ks: Sequence[int]
) -> ExpertCounts:
    """Count the distinct experts by K, for 1 to B sequences.

    All passes are over B sequences with at least the largest K drafts each. The first rows of a
    sequence stand for fewer drafts. Each count for b sequences is the mean over the B ways to take
    b neighbours (in a circle).
    """
    found: dict[int, list[float]] = {k: [] for k in ks}
    experts = torch.stack([one.experts_LTC.unflatten(1, (len(one.num_rows), -1)) for one in passes])
    steps, layers, batch = experts.shape[:3]  # S, L, B, rows, C
    for k in ks:
        chosen = experts[..., : k + 1, :].flatten(3)
        own = torch.zeros(steps, layers, batch, num_experts, dtype=torch.bool)
        own.scatter_(3, chosen, True)
        union = own.clone()
        for size in range(1, batch + 1):
            found[k].append(float(union.sum(3, dtype=torch.float64).mean()))
            union |= own.roll(-size, 2)
    return ExpertCounts(num_experts, experts.shape[-1], found)


def count_experts(sweep: Sweep, log: Journal) -> dict[SweepPoint, TouchedExperts]:
    """Count the experts that decode steps touch at each point of a sweep with an engine here.

    At most `COUNTED_STEPS` steps count: the first in which all requests in flight decode. Only
    mixtures of experts have counts. The log keeps them, and its counts of further points are
    returned too.
    """
    for point, arm in sweep.points.items():
        if not isinstance(arm.backend, EngineBackend):
            continue
        if not (num_experts := num_experts_of(arm.backend.llm.target)):
            continue
        key = {"cell": point.to_json(), "experts": True}
        if log.get(key) is None:
            requests = sweep.requests(point)[: point.concurrency]
            counted = count_touched(_first_passes(arm.backend, requests), num_experts)
            log.add(key, None if counted is None else counted.to_json())
    return {
        SweepPoint(**key["cell"]): TouchedExperts.model_validate(counted)
        for key, counted in log.items()
        if "experts" in key and counted is not None
    }


def _first_passes(backend: EngineBackend, requests: Sequence[Request]) -> list[DecodePass]:
    """Record the first decode passes of some requests, then cancel the requests."""
    engine, num_added = backend.llm.requests, 0
    with recorded_passes(backend.llm) as passes:
        try:
            for index, request in enumerate(requests):
                try:
                    engine.add(index, backend.encode(request), request.params)
                    num_added += 1
                except UserError:
                    continue  # the sweep counts it as an error
            while engine.has_unfinished and _num_full(passes, num_added) < COUNTED_STEPS:
                engine.step()
        finally:
            engine.cancel_all()
    return passes


def _num_full(passes: Sequence[DecodePass], num_sequences: int) -> int:
    return sum(len(one.num_rows) == num_sequences for one in passes)
