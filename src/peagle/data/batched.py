"""Requests to an LLM in this process, as many at a time as its engine decodes together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from peagle.config import SamplingParams
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.llm import LLM, RequestOutput

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class BatchedRequest(Generic[Key]):
    """A request: its key for the caller, the function that makes its prompt, and its parameters."""

    key: Key
    prompt: Callable[[], list[int]]
    params: SamplingParams


def batched_outputs(
    llm: LLM, take: Callable[[], BatchedRequest[Key] | None]
) -> Iterator[tuple[Key, RequestOutput | UserError]]:
    """Yield outputs as they finish, and keep the engine's batch full.

    A request that the engine or the chat template refuses gives the error.

    Args:
        llm: the LLM.
        take: gives the next request; None means that there is none for now, but a yielded output
            may bring another. The iterator ends when none is under way and `take` gives none.
    """
    requests = llm.requests
    # Some requests always wait, so that no place in the batch stays empty.
    capacity = 2 * llm.engine.config.max_num_seqs
    under_way: dict[int, Key] = {}
    number = 0
    try:
        while True:
            while len(under_way) < capacity and (request := take()) is not None:
                number += 1
                try:
                    requests.add(number, request.prompt(), request.params)
                except UserError as error:
                    yield request.key, error
                else:
                    under_way[number] = request.key
            if not under_way:
                return
            for chunk in requests.step():
                if chunk.output is not None:
                    yield under_way.pop(chunk.index), chunk.output
    finally:
        requests.cancel_all()
