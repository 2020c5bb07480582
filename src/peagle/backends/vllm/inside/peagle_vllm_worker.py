"""vLLM's offline engine in a process of its own: orders come in by a pipe, outputs go out by one.

Run as `python peagle_vllm_worker.py READ_FD WRITE_FD`. Beside vLLM it imports what needs the
standard library only: vLLM may live in an environment without peagle. A line is a JSON object.

Orders: {"load": arguments of vllm.LLM}, {"generate": [{"prompt": token ids or text, "params": {}},
...]}, "stop" while it generates, "counters". Answers: {"loaded": facts}, {"outputs": [...]} a step,
{"done": whether it was not stopped}, {"counters": {...}}, {"error": text, "refused": index or -1}.
It ends when its orders end.
"""

from __future__ import annotations

import json
import math
import os
import select
import sys
from typing import Any


class Orders:
    """Lines that come in by a pipe; whether one waits can be asked."""

    def __init__(self, fd: int) -> None:
        self._fd, self._rest, self.has_ended = fd, b"", False

    def next(self) -> Any:
        """The next order, None at the end."""
        while b"\n" not in self._rest:
            part = os.read(self._fd, 1 << 20)
            if not part:
                self.has_ended = True
                return None
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def waits(self) -> bool:
        """Whether `next` would give something at once."""
        return b"\n" in self._rest or bool(select.select([self._fd], [], [], 0)[0])


class Worker:
    """An engine and what it is asked.

    Args:
        orders: what comes in.
        answer: sends an object.
    """

    def __init__(self, orders: Orders, answer: Any) -> None:
        self.orders, self.answer = orders, answer
        self.llm: Any = None
        self.num_requests = 0

    def run(self) -> None:
        """Do what is asked until the orders end."""
        while (order := self.orders.next()) is not None:
            try:
                if order == "counters":
                    self.answer({"counters": self.counters()})
                elif "load" in order:
                    self.answer({"loaded": self.load(order["load"])})
                elif "generate" in order:
                    self.answer({"done": self.generate(order["generate"])})
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
                self.answer({"error": text, "refused": getattr(error, "refused_index", -1)})

    def load(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Make the engine; what its configuration came to, as the guard of a server tells it."""
        from vllm import LLM

        from peagle.backends.vllm.facts import facts_of

        self.llm = LLM(**arguments)
        config = self.llm.llm_engine.vllm_config
        length = getattr(config.model_config, "max_model_len", None)
        return {**facts_of(config), "max_model_len": length}

    def generate(self, requests: list[dict[str, Any]]) -> bool:
        """Answer requests, batched together; False if that was stopped."""
        engine, names = self.llm.llm_engine, {}
        try:
            for index, request in enumerate(requests):
                self.num_requests += 1
                name = f"peagle-{self.num_requests}"
                try:
                    engine.add_request(name, _prompt(request["prompt"]), _params(request["params"]))
                except Exception as error:
                    error.refused_index = index  # type: ignore[attr-defined]
                    raise
                names[name] = index
            while engine.has_unfinished_requests():
                if self.orders.waits() and self.orders.next() in ("stop", None):
                    return False
                stepped = engine.step()
                if stepped:
                    told = [_told(names[one.request_id], one) for one in stepped]
                    self.answer({"outputs": told})
                for one in stepped:
                    if one.finished:
                        del names[one.request_id]
            return True
        finally:
            if names:
                engine.abort_request(list(names))
                while engine.has_unfinished_requests():
                    engine.step()

    def counters(self) -> dict[str, Any]:
        """vLLM's counters by name, since the engine was made: numbers, or lists by position."""
        found: dict[str, Any] = {}
        for metric in self.llm.get_metrics():
            if hasattr(metric, "values") and not hasattr(metric, "buckets"):
                before = found.get(metric.name, [0] * len(metric.values))
                found[metric.name] = [a + b for a, b in zip(before, metric.values)]
            elif isinstance(getattr(metric, "value", None), (int, float)):
                found[metric.name] = found.get(metric.name, 0) + metric.value
        return found


def _prompt(prompt: Any) -> Any:
    return {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt


def _params(given: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    params = dict(given)
    if (structure := params.pop("structured_outputs", None)) is not None:
        params["structured_outputs"] = StructuredOutputsParams(**structure)
    if "logit_bias" in params:
        params["logit_bias"] = {int(token): bias for token, bias in params["logit_bias"].items()}
    return SamplingParams(**params, output_kind=RequestOutputKind.DELTA)


def _told(index: int, output: Any) -> dict[str, Any]:
    """A step's addition to a request."""
    return {
        "index": index,
        "num_cached_tokens": output.num_cached_tokens,
        "prompt_token_ids": output.prompt_token_ids,
        "prompt_logprobs": _logprobs((output.prompt_logprobs or [None])[1:], None),
        "outputs": [
            {
                "index": one.index,
                "text": one.text,
                "token_ids": list(one.token_ids),
                "finish_reason": one.finish_reason,
                "logprobs": _logprobs(one.logprobs or [], list(one.token_ids)),
            }
            for one in output.outputs
        ],
    }


def _logprobs(given: Any, token_ids: list[int] | None) -> list[Any]:
    """[token id, logprob, rank] of each token, its own first; infinities as null."""
    told = []
    for at, by_id in enumerate(given):
        items = [[token, _number(one.logprob), one.rank] for token, one in (by_id or {}).items()]
        if token_ids is not None and at < len(token_ids):
            items.sort(key=lambda item: item[0] != token_ids[at])
        told.append(items)
    return told


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def main() -> None:
    """Serve the pipes named on the command line."""
    reading, writing = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(reading, False)
    os.set_inheritable(writing, False)

    def answer(content: dict[str, Any]) -> None:
        line = (json.dumps(content) + "\n").encode()
        while line:
            line = line[os.write(writing, line) :]

    Worker(Orders(reading), answer).run()


if __name__ == "__main__":
    main()
